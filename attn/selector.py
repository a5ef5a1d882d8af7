"""Selection of the backend for a layer: the named backend or an error, else the best-ranked one."""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Any, Final

from attn.backends.base import AttentionBackend
from attn.device import detect_device, known_device
from attn.errors import MissingDependencyError, UnsupportedError, missing_reason, one_line
from attn.registry import ROWS, AttentionBackendEnum, RegisteredBackend
from specs.attention import AttentionSelectorConfig, AttentionType
from specs.base import Spec, parse_spec
from specs.devices import Device, DeviceKind
from specs.dtypes import CacheDType

_REFERENCE: Final = ("TORCH_REF", "TORCH_REF_MLA", "TORCH_REF_SPARSE_MLA")
_GPU: Final = ("TRITON_ATTN", "TRITON_MLA", "SPARSE_MLA", *_REFERENCE)

PRIORITIES: Final[dict[DeviceKind, tuple[str, ...]]] = {
    DeviceKind.CPU: _REFERENCE,
    DeviceKind.SM80: _GPU,
    DeviceKind.SM89: _GPU,
    DeviceKind.SM90: _GPU,
    DeviceKind.SM100: _GPU,
    DeviceKind.SM120: _GPU,
    DeviceKind.ROCM: _GPU,
}
"""Names of the library's backends for each kind of device, best first. Reference backends come
last. On a GPU they are too slow to serve and are chosen only where a caller allows it."""

ONLY_ALLOWED: Final = "chosen on a GPU only by name or allow_reference=True"
"""Why a reference backend that could serve is not chosen."""


def is_withheld(name: str, kind: DeviceKind) -> bool:
    """True for a reference backend on a GPU, which is not chosen automatically."""
    return name in _REFERENCE and kind is not DeviceKind.CPU


def ranked(kind: DeviceKind) -> tuple[str, ...]:
    """Names of the registered backends that may be chosen automatically, best first.

    A backend of another package comes before the library's backend of the same rank. Backends of
    other packages with equal ranks are in order of registration, which is by name.
    """
    own = PRIORITIES[kind]
    placed = [(rank, 1, name) for rank, name in enumerate(own, 1) if name in AttentionBackendEnum]
    placed += [
        (member.row.ranks[kind], 0, member.name)
        for member in AttentionBackendEnum
        if kind in member.row.ranks and member.name not in own
    ]
    return tuple(name for _, _, name in sorted(placed, key=lambda item: item[:2]))


@unique
class Verdict(StrEnum):
    """The selector's verdict on a candidate."""

    CHOSEN = "chosen"
    REFUSED = "refused"
    """The backend cannot serve the layer, or cannot run here."""
    RANKED_LOWER = "ranked lower"
    """The backend could serve, but a better-ranked backend does."""
    NOT_ASKED = "not asked for"
    """The backend could serve, but the caller named another, or did not allow this one."""


class Candidate(Spec):
    """One registered backend in a decision."""

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    """Why the backend was not chosen; for the chosen backend, why it was."""


class SelectionReport(Spec):
    """A whole decision: the request, the device, and a verdict on every registered backend."""

    request: AttentionSelectorConfig
    device: Device
    asked_for: str | None
    """Backend asked for by name; None is the automatic choice."""
    allow_reference: bool = False
    """The automatic choice on a GPU may be a reference backend."""
    chosen: str | None
    """Registry name of the chosen backend; None when no backend serves the request."""
    candidates: tuple[Candidate, ...]
    """Every registered backend in order of rank; backends without a rank come last."""

    @property
    def reasons(self) -> list[str]:
        """One line for every candidate that was not chosen."""
        return [
            f"{candidate.name}: {', '.join(candidate.reasons)}"
            for candidate in self.candidates
            if candidate.verdict is not Verdict.CHOSEN
        ]


def served_cache_dtypes() -> tuple[CacheDType, ...]:
    """KV cache dtypes that at least one backend of the library declares, of those that can be
    imported here.
    """
    declared: set[CacheDType] = set()
    # By name: a look at all of them would import other packages, for every start of the command.
    for row in ROWS:
        member = AttentionBackendEnum[row.name]
        if not member.missing() and not member.is_third_party:
            declared.update(member.get_class().capabilities.kv_cache_dtypes)
    return tuple(dtype for dtype in CacheDType if dtype in declared)


def import_problem(member: RegisteredBackend) -> str | None:
    """Why the class of a backend cannot be imported, on one line; None where it can.

    Errors inside this library that are no import errors are not caught.
    """
    of = "" if member.package is None else f" ({member.package})"
    try:
        member.get_class()
    except (ImportError, OSError) as error:
        return f"cannot be imported{of}: {one_line(error)}"
    except Exception as error:
        if not member.is_third_party:
            raise
        return f"cannot be imported{of}: {type(error).__name__}: {one_line(error)}"
    return None


def refusals(
    member: RegisteredBackend, request: AttentionSelectorConfig, device: Device
) -> list[str]:
    """Every reason why a registered backend cannot serve a layer on a device; [] when it can.

    A broken optional dependency is a reason too, and so is any error that a third party's module
    raises on import. Other errors inside this library are not caught.
    """
    missing = member.missing()
    if missing:
        return [missing_reason(name) for name in missing]
    problem = import_problem(member)
    if problem is not None:
        return [problem]
    backend, reasons = member.get_class(), []
    # CUDA devices are judged by their compute capability, inside validate_configuration.
    if device.compute_capability is None and not backend.supports_device(device):
        kinds = ", ".join(kind.value for kind in backend.capabilities.device_kinds)
        reasons.append(f"device {device.kind.value}: {kinds}")
    return reasons + backend.validate(request, device.compute_capability)


def explain(
    request: AttentionSelectorConfig,
    device: Device | str | None = None,
    backend: str | None = None,
    *,
    allow_reference: bool = False,
) -> SelectionReport:
    """The decision for a layer, with a verdict and a reason for every registered backend.

    Args:
        request: requirements of the layer.
        device: any device, present or not, or the name of a known device; None means this
            machine's.
        backend: registry name or alias to use; None means the automatic choice.
        allow_reference: on a GPU, a reference backend in plain torch may be chosen where no other
            backend serves. On a CPU it may always be chosen.

    Raises:
        ValueError: ``backend`` is not registered, or another package offers it and it cannot be
            used; or no device is known as ``device``.
    """
    if device is None:
        device = detect_device()
    elif isinstance(device, str):
        device = known_device(device)
    asked = None if backend is None else AttentionBackendEnum[backend].name
    ranks = ranked(device.kind)
    members = [AttentionBackendEnum[name] for name in ranks]
    members += [member for member in AttentionBackendEnum if member.name not in ranks]
    chosen: str | None = None
    candidates = []
    for member in members:
        reasons = refusals(member, request, device)
        withheld = is_withheld(member.name, device.kind) and not allow_reference
        eligible = member.name in ranks and not withheld
        if asked is not None:
            eligible = member.name == asked
        if eligible and chosen is None and not reasons:
            broken = member.get_class().unavailable_reason()
            reasons = [] if broken is None else [broken]
        if reasons:
            verdict = Verdict.REFUSED
        elif eligible and chosen is None:
            verdict, chosen = Verdict.CHOSEN, member.name
            reasons = ["asked for by name" if asked else _rank_reason(member.name, ranks, device)]
            reasons += member.get_class().device_notes(device.compute_capability)
        elif asked is not None:
            verdict, reasons = Verdict.NOT_ASKED, [f"{asked} was asked for"]
        elif member.name not in ranks:
            verdict, reasons = Verdict.NOT_ASKED, ["chosen only by name"]
        elif withheld:
            verdict, reasons = Verdict.NOT_ASKED, [ONLY_ALLOWED]
        else:
            verdict, reasons = Verdict.RANKED_LOWER, [f"{chosen} ranks higher"]
        candidates.append(Candidate(name=member.name, verdict=verdict, reasons=tuple(reasons)))
    return SelectionReport(
        request=request,
        device=device,
        asked_for=asked,
        allow_reference=allow_reference,
        chosen=chosen,
        candidates=tuple(candidates),
    )


def _rank_reason(name: str, ranks: tuple[str, ...], device: Device) -> str:
    return f"best-ranked on {device.kind.value} that serves it (rank {ranks.index(name) + 1})"


def chosen_backend(report: SelectionReport) -> type[AttentionBackend]:
    """The class of the chosen backend.

    Raises:
        UnsupportedError: the backend asked for, or every candidate, was refused; the error holds
            all reasons.
        MissingDependencyError: the backend asked for needs a package that is not installed.
    """
    if report.chosen is not None:
        return AttentionBackendEnum[report.chosen].get_class()
    if report.asked_for is not None:
        member = AttentionBackendEnum[report.asked_for]
        for package in member.missing():
            raise MissingDependencyError(package, f"backend {member.name}")
        refused = next(item for item in report.candidates if item.name == report.asked_for)
        raise UnsupportedError(
            f"attention backend {report.asked_for} cannot serve this layer on "
            f"{report.device.name}:",
            refused.reasons,
        )
    raise UnsupportedError(
        f"no attention backend serves this layer on {report.device.name}:", report.reasons
    )


def select(
    request: AttentionSelectorConfig,
    device: Device | str | None = None,
    backend: str | None = None,
    *,
    allow_reference: bool = False,
) -> type[AttentionBackend]:
    """The backend class for a layer: :func:`explain`, then :func:`chosen_backend`.

    Raises:
        UnsupportedError: the backend asked for, or every candidate, was refused; the error holds
            all reasons.
        MissingDependencyError: the backend asked for needs a package that is not installed.
        ValueError: ``backend`` is not registered, or no device is known as ``device``.
    """
    return chosen_backend(explain(request, device, backend, allow_reference=allow_reference))


def get_attn_backend(
    head_size: int,
    dtype: Any,
    kv_cache_dtype: str | None,
    use_mla: bool = False,
    has_sink: bool = False,
    use_sparse: bool = False,
    use_mm_prefix: bool = False,
    use_per_head_quant_scales: bool = False,
    attn_type: str | None = None,
    num_heads: int | None = None,
    has_sliding_window: bool = False,
    *,
    backend: str | None = None,
    device: Device | str | None = None,
    allow_reference: bool = False,
    **features: Any,
) -> type[AttentionBackend]:
    """The backend class for a layer, with vLLM's arguments.

    Args:
        head_size: query and key head size.
        dtype: model dtype, torch's or a name.
        kv_cache_dtype: a ``CacheDType`` string, or None for ``auto``.
        use_mla: the layer has latent attention.
        has_sink: the layer has per-head sink logits.
        use_sparse: the layer has top-k sparse attention.
        use_mm_prefix: the layer has bidirectional multimodal ranges.
        use_per_head_quant_scales: the cache has K and V scales per head.
        attn_type: an ``AttentionType`` string; None means decoder.
        num_heads: accepted because vLLM passes it; no backend here depends on it.
        has_sliding_window: the layer has a sliding window.
        backend: name of the backend to use or refuse; None means the automatic choice.
        device: the device, or the name of a known device; None means this machine's.
        allow_reference: on a GPU, a reference backend may be chosen where no other serves.
        features: any further field of ``AttentionSelectorConfig``.

    Raises:
        UnsupportedError: no backend serves the layer; the error holds all reasons.
        MissingDependencyError: the backend asked for needs a package that is not installed.
        SpecError: an argument of the wrong value; the message names it.
        ValueError: ``backend`` is not registered, or no device is known as ``device``.
    """
    values = {
        "head_size": head_size,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "use_mla": use_mla,
        "has_sink": has_sink,
        "use_sparse": use_sparse,
        "use_mm_prefix": use_mm_prefix,
        "use_per_head_quant_scales": use_per_head_quant_scales,
        "attn_type": AttentionType.DECODER if attn_type is None else attn_type,
        "has_sliding_window": has_sliding_window,
        **features,
    }
    request = parse_spec(AttentionSelectorConfig, values, "attention request")
    return select(request, device, backend, allow_reference=allow_reference)
