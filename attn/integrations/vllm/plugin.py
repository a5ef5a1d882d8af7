"""Entry point of ``vllm.general_plugins``: puts our backends into vLLM's registry."""

from __future__ import annotations

import os
from typing import Any, Final

BACKEND_VARIABLE: Final = "ATTN_VLLM_BACKEND"
"""Our backend that ``--attention-backend CUSTOM`` stands for; unset is the best of the device."""
OVERRIDE_VARIABLE: Final = "ATTN_VLLM_OVERRIDE"
"""Members of vLLM's registry, separated by commas, that ours of the same name replace."""

_registered: dict[str, str] = {}


def register() -> None:
    """Register ``CUSTOM`` and the overrides; vLLM calls it in every process, once or more often.

    Imports no kernel and touches no device.

    Raises:
        ValueError: a variable names a backend that this library, or a member that vLLM, does not
            have.
    """
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from attn.integrations.vllm.members import CUSTOM, path_of

    custom = _dense(os.environ.get(BACKEND_VARIABLE) or _best(), BACKEND_VARIABLE)
    wanted = {CUSTOM: path_of(CUSTOM, custom)}
    for name in filter(None, map(str.strip, os.environ.get(OVERRIDE_VARIABLE, "").split(","))):
        if name not in AttentionBackendEnum.__members__:
            raise ValueError(f"{OVERRIDE_VARIABLE} must name members of vLLM's, got {name!r}")
        wanted[name] = path_of(name, _known(name, OVERRIDE_VARIABLE))
    if wanted == _registered:
        return
    for name in [name for name in _registered if name not in wanted]:
        AttentionBackendEnum[name].clear_override()
    for name, path in wanted.items():
        register_backend(AttentionBackendEnum[name], path)
    _registered.clear()
    _registered.update(wanted)
    overrides = ", ".join(name for name in wanted if name != CUSTOM) or "none"
    init_logger("vllm.attn_backends").info(
        "attn-backends: CUSTOM is %s; replaced by ours: %s", custom, overrides
    )


def _known(name: str, variable: str) -> str:
    """A registry name of ours."""
    from attn.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum:
        names = ", ".join(member.name for member in AttentionBackendEnum)
        raise ValueError(f"{variable} must name one of {names}, got {name!r}")
    return AttentionBackendEnum[name].name


def _dense(name: str, variable: str) -> str:
    """A registry name of ours that serves dense layers."""
    from attn.registry import AttentionBackendEnum

    member: Any = AttentionBackendEnum[_known(name, variable)]
    if not member.missing() and member.get_class().is_mla():
        raise ValueError(f"{variable} must name a backend of dense layers, got {name!r}")
    return str(member.name)


def _best() -> str:
    """Our best-ranked dense backend on the device that vLLM runs on."""
    from vllm.platforms import current_platform

    from attn.integrations.vllm.translate import device_kind
    from attn.registry import AttentionBackendEnum
    from attn.selector import PRIORITIES, is_withheld
    from specs.devices import DeviceKind

    kind = DeviceKind.ROCM
    if not current_platform.is_rocm():
        # A GPU that nothing here serves must not keep vLLM from starting: CUSTOM refuses it.
        kind = device_kind(current_platform.get_device_capability()) or DeviceKind.CPU
    ranked = [name for name in PRIORITIES[kind] if not is_withheld(name, kind)]
    for name in ranked:
        member = AttentionBackendEnum[name]
        if not member.missing() and not member.get_class().is_mla():
            return name
    # Packages are missing: CUSTOM says so where it is asked for, and vLLM starts without it.
    return ranked[0]
