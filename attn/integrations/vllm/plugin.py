"""Entry point of ``vllm.general_plugins``: puts our backends into vLLM's registry."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

from attn.integrations.vllm import choice, settings
from attn.integrations.vllm.settings import BACKEND_VARIABLE, OVERRIDE_VARIABLE

if TYPE_CHECKING:
    from specs.devices import DeviceKind

FIRST: Final = (0, 26)
LAST: Final = (0, 33)
"""First and last version of vLLM that the plugin serves; it is tested with both."""

ROUTER: Final = "attn.integrations.vllm.router"
"""The module of the class behind ``CUSTOM`` on CUDA; it is imported when a layer is selected."""

logger = logging.getLogger("vllm.attn_backends")

_registered: dict[str, str] = {}
"""The import path that the plugin registered for each name in vLLM's registry."""


def register() -> None:
    """Register ``CUSTOM`` and the overrides; vLLM calls it in every process, once or more often.

    The function imports no kernel and touches no device. In a version of vLLM that the plugin does
    not serve it registers nothing, and it never replaces a ``CUSTOM`` of another plugin; the log
    says so.

    Raises:
        ValueError: a variable names a backend or kernel that this library lacks, two backends for
            one kind of layer, or a name that vLLM's registry lacks; or a variable with our prefix
            is unknown.
    """
    import vllm

    if not is_served(vllm.__version__):
        logger.warning(
            "attn-backends: serves vLLM %d.%d to %d.%d, this is %s; nothing is registered",
            *(*FIRST, *LAST, vllm.__version__),
        )
        return
    settings.check()
    settings.pass_on()
    settings.keep_environment()
    _put(*_wanted())
    from attn.integrations.vllm.model_hooks import install_when_imported

    install_when_imported()


def is_served(version: str) -> bool:
    """True for a version of vLLM that the plugin serves."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and FIRST <= (int(found[1]), int(found[2])) <= LAST


def custom_paths(kind: DeviceKind) -> dict[str, str]:
    """Import path of the class that ``CUSTOM`` is, by kind of layer; vLLM is not imported.

    Args:
        kind: kind of the device. On a CPU and on ROCm ``CUSTOM`` serves dense layers alone.

    Raises:
        ValueError: a variable names a backend or kernel that this library lacks.
    """
    from attn.integrations.vllm.members import CUSTOM, path_of
    from specs.devices import DeviceKind

    settings.check()
    names = choice.chosen(kind, is_routed=kind not in (DeviceKind.CPU, DeviceKind.ROCM))
    return {layers.value: path_of(CUSTOM, name) for layers, name in names.items()}


def _wanted() -> tuple[str, dict[str, str]]:
    """Our backends for ``CUSTOM`` in words, and the import path for each name of vLLM's."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from attn.integrations.vllm.members import CUSTOM, path_of

    # Only CUDA's selection asks the class behind a member which class shall serve a layer.
    is_routed = current_platform.is_cuda()
    names = choice.chosen(_device(), is_routed)
    if is_routed:
        words = ", ".join(f"{name} for {kind.value} layers" for kind, name in names.items())
        wanted = {CUSTOM: f"{ROUTER}.{CUSTOM}"}
    else:
        (words,) = names.values()
        wanted = {CUSTOM: path_of(CUSTOM, words)}
    for name in settings.overrides():
        if name not in AttentionBackendEnum.__members__:
            raise ValueError(_no_member(name))
        wanted[name] = path_of(name, choice.known(name, OVERRIDE_VARIABLE))
    return words, wanted


def _no_member(name: str) -> str:
    """The error about a name to override that vLLM's registry lacks."""
    from attn.registry import AttentionBackendEnum

    message = f"{OVERRIDE_VARIABLE} must name members of vLLM's, got {name!r}"
    if name not in AttentionBackendEnum:
        return message
    return (
        f"{message}: vLLM has no backend of this name to replace; set {BACKEND_VARIABLE}={name} "
        "and serve with --attention-backend CUSTOM"
    )


def _put(custom: str, wanted: dict[str, str]) -> None:
    """Register the wanted import paths in vLLM's registry, and log the result."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from attn.integrations.vllm.members import CUSTOM

    theirs = {name: path for name in wanted if (path := _of_others(AttentionBackendEnum[name]))}
    if CUSTOM in theirs:
        logger.warning(
            "attn-backends: CUSTOM is another plugin's, %s, and stays so; ours, %s, is not "
            "registered (VLLM_PLUGINS says which plugins are loaded)",
            *(theirs[CUSTOM], wanted[CUSTOM]),
        )
        wanted = {name: path for name, path in wanted.items() if name != CUSTOM}
    replaced = {name: path for name, path in theirs.items() if name != CUSTOM}
    for name, path in replaced.items():
        logger.warning(
            "attn-backends: %s names %s, which was another plugin's, %s, and is ours now, %s",
            *(OVERRIDE_VARIABLE, name, path, wanted[name]),
        )
    if wanted == _registered and not replaced:
        return
    for name in [name for name in _registered if name not in wanted]:
        if not _of_others(AttentionBackendEnum[name]):
            AttentionBackendEnum[name].clear_override()
    for name, path in wanted.items():
        register_backend(AttentionBackendEnum[name], path)
    _registered.clear()
    _registered.update(wanted)
    logger.info(
        "attn-backends: CUSTOM is %s; replaced by ours: %s",
        custom if CUSTOM in wanted else "not ours",
        ", ".join(name for name in wanted if name != CUSTOM) or "none",
    )


def _of_others(member: Any) -> str | None:
    """Import path of a backend in vLLM's registry if another plugin replaced it, else None."""
    from attn.integrations.vllm import members

    ours = members.__name__, ROUTER
    if not member.is_overridden() or member.get_path(include_classname=False) in ours:
        return None
    return str(member.get_path())


def _device() -> DeviceKind:
    """The kind of device that vLLM runs on."""
    from vllm.platforms import current_platform

    from specs.devices import DeviceKind

    if current_platform.is_rocm():
        return DeviceKind.ROCM
    return choice.device_of(current_platform.get_device_capability())
