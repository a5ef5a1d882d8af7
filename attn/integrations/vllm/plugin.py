"""Entry point of ``vllm.general_plugins``: puts our backends into vLLM's registry."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any, Final

from attn.integrations.vllm import settings
from attn.integrations.vllm.settings import BACKEND_VARIABLE, OVERRIDE_VARIABLE

if TYPE_CHECKING:
    from specs.devices import DeviceKind

FIRST: Final = (0, 26)
LAST: Final = (0, 33)
"""First and last version of vLLM that the plugin serves; it is tested with both."""

logger = logging.getLogger("vllm.attn_backends")

_registered: dict[str, str] = {}
"""The import path that the plugin registered for each name in vLLM's registry."""


def register() -> None:
    """Register ``CUSTOM`` and the overrides; vLLM calls it in every process, once or more often.

    The function imports no kernel and touches no device. In a version of vLLM that the plugin does
    not serve it registers nothing, and it never replaces a ``CUSTOM`` of another plugin; the log
    says so.

    Raises:
        ValueError: a variable names a backend or kernel that this library lacks, or a name that
            vLLM's registry lacks; or a variable with our prefix is unknown.
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
    _put(*_wanted())
    from attn.integrations.vllm.indexer_late import install_when_imported

    install_when_imported()


def is_served(version: str) -> bool:
    """True for a version of vLLM that the plugin serves."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and FIRST <= (int(found[1]), int(found[2])) <= LAST


def custom_path(kind: DeviceKind) -> str:
    """Import path of the class that ``CUSTOM`` is on a kind of device; vLLM is not imported.

    Raises:
        ValueError: a variable names a backend or kernel that this library lacks.
    """
    from attn.integrations.vllm.members import CUSTOM, path_of

    settings.check()
    named = settings.backend()
    return path_of(CUSTOM, _dense(named, BACKEND_VARIABLE) if named else best_dense(kind))


def _wanted() -> tuple[str, dict[str, str]]:
    """Our backend for ``CUSTOM``, and the import path to register for each name of vLLM's."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from attn.integrations.vllm.members import CUSTOM, path_of

    named = settings.backend()
    custom = _dense(named, BACKEND_VARIABLE) if named else _best()
    wanted = {CUSTOM: path_of(CUSTOM, custom)}
    for name in settings.overrides():
        if name not in AttentionBackendEnum.__members__:
            raise ValueError(f"{OVERRIDE_VARIABLE} must name members of vLLM's, got {name!r}")
        wanted[name] = path_of(name, _known(name, OVERRIDE_VARIABLE))
    return custom, wanted


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

    if not member.is_overridden() or member.get_path(include_classname=False) == members.__name__:
        return None
    return str(member.get_path())


def _known(name: str, variable: str) -> str:
    """Our registry's spelling of ``name``; an error names the variable."""
    from attn.errors import BackendPackageError
    from attn.registry import AttentionBackendEnum

    try:
        member = AttentionBackendEnum[name]
    except BackendPackageError as error:
        raise ValueError(f"{variable}={name}: {error}") from error
    except KeyError:
        names = ", ".join(member.name for member in AttentionBackendEnum)
        raise ValueError(f"{variable} must name one of {names}, got {name!r}") from None
    missing = member.missing()
    if missing:
        raise ValueError(f"{variable}={name} needs {', '.join(missing)}, which is not installed")
    return member.name


def _dense(name: str, variable: str) -> str:
    """Our registry's spelling of ``name``, which must be a backend of dense layers."""
    from attn.registry import AttentionBackendEnum
    from attn.selector import import_problem

    member: Any = AttentionBackendEnum[_known(name, variable)]
    problem = import_problem(member)
    if problem is not None:
        raise ValueError(f"{variable}={name} {problem}")
    if member.get_class().is_mla():
        raise ValueError(f"{variable} must name a backend of dense layers, got {name!r}")
    return str(member.name)


def _best() -> str:
    """Our best-ranked dense backend on the device that vLLM runs on."""
    from vllm.platforms import current_platform

    from attn.integrations.vllm.translate import device_kind
    from specs.devices import DeviceKind

    kind = DeviceKind.ROCM
    if not current_platform.is_rocm():
        # A GPU that no backend serves must not keep vLLM from starting: CUSTOM refuses it later.
        kind = device_kind(current_platform.get_device_capability()) or DeviceKind.CPU
    return best_dense(kind)


def best_dense(kind: DeviceKind) -> str:
    """Our best-ranked dense backend on a kind of device; vLLM is not imported."""
    from attn.registry import AttentionBackendEnum
    from attn.selector import import_problem, is_withheld, ranked

    names = [name for name in ranked(kind) if not is_withheld(name, kind)]
    for name in names:
        member = AttentionBackendEnum[name]
        if member.missing() or import_problem(member) is not None:
            continue
        if not member.get_class().is_mla():
            return name
    # Every backend lacks packages. CUSTOM reports that where it is asked for; without it vLLM runs.
    return names[0]
