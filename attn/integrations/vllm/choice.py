"""Which of our backends ``CUSTOM`` stands for: one for each kind of layer.

vLLM is not imported here, nor any kernel: the plugin asks in every process of vLLM's.
"""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Any

from attn.integrations.vllm import settings
from attn.integrations.vllm.settings import BACKEND_VARIABLE
from specs.devices import ComputeCapability, DeviceKind, kind_of


@unique
class LayerKind(StrEnum):
    """The kinds of attention layers that vLLM's selection tells apart."""

    DENSE = "dense"
    """Keys and values of every head are cached."""
    LATENT = "latent"
    """One latent row per token is cached (MLA), and every row is attended."""
    SPARSE = "sparse"
    """One latent row per token is cached, and an indexer lists the rows to attend."""

    @classmethod
    def of(cls, use_mla: bool, use_sparse: bool) -> LayerKind:
        """The kind of a layer or of a backend, by the two flags of vLLM's selection."""
        if not use_mla:
            return cls.DENSE
        return cls.SPARSE if use_sparse else cls.LATENT


def chosen(device: DeviceKind, is_routed: bool) -> dict[LayerKind, str]:
    """Our backends for the kinds of layers on a kind of device.

    A backend that the environment names comes before the best-ranked one. A kind for which no
    backend has its packages is left out; for dense layers the best-ranked backend stands even so,
    and reports what is missing when vLLM asks for its class.

    Args:
        device: the kind of device.
        is_routed: vLLM's platform lets ``CUSTOM`` be another class for each layer. On all other
            platforms it is one class, for dense layers.

    Raises:
        ValueError: the variable names a backend that this library lacks or cannot import, two
            backends for one kind of layer, or a kind of layer that ``CUSTOM`` does not serve here.
    """
    names = named()
    if not is_routed:
        for kind, name in names.items():
            if kind is not LayerKind.DENSE:
                raise ValueError(
                    f"{BACKEND_VARIABLE} must name a backend of dense layers on this platform, got "
                    f"{name}, which serves {kind.value} layers"
                )
        return {LayerKind.DENSE: names.get(LayerKind.DENSE) or best_dense(device)}
    found = {kind: names.get(kind) or best(kind, device) for kind in LayerKind}
    found[LayerKind.DENSE] = found[LayerKind.DENSE] or best_dense(device)
    return {kind: name for kind, name in found.items() if name is not None}


def named() -> dict[LayerKind, str]:
    """The backends that the environment names, by kind of layer, in our registry's spelling.

    Raises:
        ValueError: a name is no backend of this library or cannot be imported, or two names are
            backends for one kind of layer.
    """
    from attn.registry import AttentionBackendEnum
    from attn.selector import import_problem

    found: dict[LayerKind, str] = {}
    for given in settings.backends():
        member: Any = AttentionBackendEnum[known(given, BACKEND_VARIABLE)]
        problem = import_problem(member)
        if problem is not None:
            raise ValueError(f"{BACKEND_VARIABLE}={given} {problem}")
        kind = kind_served(member.get_class())
        if kind in found:
            raise ValueError(
                f"{BACKEND_VARIABLE} must name at most one backend for each kind of layer, got "
                f"{found[kind]} and {member.name}, which both serve {kind.value} layers"
            )
        found[kind] = str(member.name)
    return found


def known(name: str, variable: str) -> str:
    """Our registry's spelling of ``name``.

    Raises:
        ValueError: no backend has the name, or its package is not installed; the error names the
            variable.
    """
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


def device_of(capability: Any) -> DeviceKind:
    """The kind of device with vLLM's compute capability ``capability``, which is None for a CPU.

    A GPU that no backend serves must not keep vLLM from starting. It counts as a CPU, whose
    backends refuse it when a layer is selected.
    """
    if capability is None:
        return DeviceKind.CPU
    return kind_of(ComputeCapability.model_validate(capability)) or DeviceKind.CPU


def kind_served(backend: Any) -> LayerKind:
    """The kind of layer that a backend class of ours serves."""
    return LayerKind.of(backend.is_mla(), backend.is_sparse())


def best(kind: LayerKind, device: DeviceKind) -> str | None:
    """Our best-ranked backend for a kind of layer; None if none has its packages."""
    from attn.registry import AttentionBackendEnum
    from attn.selector import import_problem

    for name in _ranked(device):
        member = AttentionBackendEnum[name]
        if member.missing() or import_problem(member) is not None:
            continue
        if kind_served(member.get_class()) is kind:
            return name
    return None


def best_dense(device: DeviceKind) -> str:
    """Our best-ranked dense backend, or the first of all ranks if every backend lacks packages.

    ``CUSTOM`` reports the packages where it is asked for; without ``CUSTOM`` vLLM runs.
    """
    return best(LayerKind.DENSE, device) or _ranked(device)[0]


def lacking(kind: LayerKind, device: DeviceKind) -> str:
    """The reason against a layer for whose kind no backend is chosen."""
    from attn.errors import missing_reason
    from attn.registry import AttentionBackendEnum

    members = [AttentionBackendEnum[name] for name in _ranked(device)]
    packages = dict.fromkeys(package for member in members for package in member.missing())
    reasons = ", ".join(missing_reason(package) for package in packages)
    return f"{kind.value} layers not supported" + (f" ({reasons})" if reasons else "")


def _ranked(device: DeviceKind) -> list[str]:
    from attn.selector import is_withheld, ranked

    return [name for name in ranked(device) if not is_withheld(name, device)]
