"""The adapted classes as module attributes: vLLM's registry holds their import paths.

``members.TRITON_ATTN`` adapts our TRITON_ATTN for vLLM's registry name ``TRITON_ATTN``, and
``members.CUSTOM_TRITON_ATTN`` adapts it for the name ``CUSTOM``. A class is made when it is first
asked for. :mod:`attn.integrations.vllm.router` picks between the classes for ``CUSTOM``.
"""

from __future__ import annotations

from typing import Any, Final

from attn.registry import AttentionBackendEnum

CUSTOM: Final = "CUSTOM"
_PREFIX: Final = f"{CUSTOM}_"


def path_of(member: str, backend: str) -> str:
    """Import path of one of our backends as a member of vLLM's registry.

    Args:
        member: the name in vLLM's registry: ``CUSTOM``, or the name of the backend itself.
        backend: our registry name.
    """
    return f"{__name__}.{attribute_of(member, backend)}"


def attribute_of(member: str, backend: str) -> str:
    """Name of this module's attribute for one of our backends as a member of vLLM's registry.

    Args:
        member: the name in vLLM's registry: ``CUSTOM``, or the name of the backend itself.
        backend: our registry name.
    """
    return backend if member == backend else _PREFIX + backend


def __getattr__(name: str) -> Any:
    is_custom = name.startswith(_PREFIX)
    backend = name.removeprefix(_PREFIX)
    # Importing the module asks for names such as __path__, which must not read entry points.
    if name.startswith("_") or backend not in AttentionBackendEnum:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attn.integrations.vllm.adapter import adapted

    ours = AttentionBackendEnum[backend].get_class()
    return adapted(ours, CUSTOM if is_custom else backend, __name__, name)
