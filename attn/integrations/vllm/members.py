"""Import paths of the adapted classes: what vLLM's registry holds and its workers import.

``TRITON_ATTN`` here is our triple of that name under vLLM's name; ``CUSTOM_TRITON_ATTN`` is the
same triple as vLLM's ``CUSTOM``. Classes are made when first asked for.
"""

from __future__ import annotations

from typing import Any, Final

from attn.registry import AttentionBackendEnum

CUSTOM: Final = "CUSTOM"
_PREFIX: Final = f"{CUSTOM}_"


def path_of(member: str, backend: str) -> str:
    """Import path of one of our backends as a member of vLLM's registry.

    Args:
        member: vLLM's name: ``CUSTOM``, or the backend's own.
        backend: our registry name.
    """
    return f"{__name__}.{backend if member == backend else _PREFIX + backend}"


def __getattr__(name: str) -> Any:
    is_custom = name.startswith(_PREFIX)
    backend = name.removeprefix(_PREFIX)
    if backend not in AttentionBackendEnum:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attn.integrations.vllm.adapter import adapted

    ours = AttentionBackendEnum[backend].get_class()
    return adapted(ours, CUSTOM if is_custom else backend, __name__, name)
