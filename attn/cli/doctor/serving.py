"""Which backend serves which phase of a model's layers, and why the others do not."""

from __future__ import annotations

from attn.cli.explain import DEFAULT_BLOCK_SIZE, Question, dense_kernels, kernel_name
from attn.cli.kernels import family_of
from attn.selector import SelectionReport, Verdict, explain, is_withheld
from builders.dense.choice import LATENT_OPTION, LayerRequirements, prefill_kernel_of
from builders.latent.choice import latent_kernel_of
from builders.splitkv.tiles import DenseShape
from specs.base import Spec
from specs.devices import Device
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, PrefillKernel
from specs.model import LayerGeometry, ModelGeometry


class Phase(Spec):
    """One phase of a group of layers."""

    phase: str
    """``prefill`` or ``decode``."""
    backend: str | None
    """Name of the backend; None where none serves."""
    kernel: str
    """The kernel of that backend and why it is taken, as far as it is a choice."""


class Serving(Spec):
    """A group of equal layers and its backends."""

    model: str
    family: str
    """``dense``, ``latent`` or ``sparse``."""
    layers: str
    """Number and kind of the layers in words."""
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]
    """What the chosen backend says of itself on this device."""
    is_reference: bool
    """The backend is a reference in plain torch on a GPU, too slow to serve."""
    others: dict[str, tuple[str, ...]]
    """Every other backend, with the reasons against it."""


def serving_of(model: ModelGeometry, device: Device) -> list[Serving]:
    """The backends of each group of a model's layers on a device, present or not."""
    found = []
    for layer, indices in model.groups():
        request = layer.selector_config(model.dtype, CacheDType.AUTO, None)
        decision = explain(request, device, allow_reference=True)
        question = Question(
            model=model,
            device=device,
            kv_cache_dtype=CacheDType.AUTO,
            block_size=None,
            backend=None,
        )
        kernels = _kernels(question, layer, decision)
        found.append(
            Serving(
                model=model.name,
                family=family_of(layer),
                layers=f"{len(indices)} {layer.label} {'layer' if len(indices) == 1 else 'layers'}",
                phases=tuple(
                    Phase(phase=phase, backend=decision.chosen, kernel=kernels.get(phase, ""))
                    for phase in ("prefill", "decode")
                ),
                notes=_notes(decision),
                is_reference=decision.chosen is not None
                and is_withheld(decision.chosen, device.kind),
                others={
                    candidate.name: candidate.reasons
                    for candidate in decision.candidates
                    if candidate.verdict is not Verdict.CHOSEN
                },
            )
        )
    return found


def _kernels(question: Question, layer: LayerGeometry, decision: SelectionReport) -> dict[str, str]:
    """The kernels of the chosen backend by phase, where there is a choice."""
    if decision.chosen == "TRITON_ATTN":
        *short, long = dense_kernels(question, layer).items()
        said = {"prefill": f"{long[0]}: {long[1].removeprefix('prefill, ')}"}
        return {**said, **({"decode": f"{short[0][0]}: {short[0][1]}"} if short else {})}
    if decision.chosen == "TRITON_MLA":
        return _latent_kernels(question, layer)
    return {}


def _notes(decision: SelectionReport) -> tuple[str, ...]:
    """What the chosen backend adds to the verdict; its first reason is the verdict's own."""
    chosen = (one for one in decision.candidates if one.verdict is Verdict.CHOSEN)
    return next((one.reasons[1:] for one in chosen), ())


def _latent_kernels(question: Question, layer: LayerGeometry) -> dict[str, str]:
    """TRITON_MLA's kernels under ``auto``."""
    model, kind, sizes = question.model, question.device.kind, layer.mla
    assert sizes is not None
    asks = LayerRequirements(
        is_local=layer.sliding_window is not None, query=model.dtype, cache_dtype=CacheDType.AUTO
    )
    bytes_of = model.dtype.itemsize
    latent = DenseShape(
        *(layer.num_heads, 1, sizes.latent_size, sizes.kv_lora_rank, bytes_of, 8 * bytes_of)
    )
    # A latent row is expanded to a key and a value of each head.
    expanded = DenseShape(
        *(layer.num_heads, layer.num_heads, sizes.qk_head_dim, sizes.v_head_dim),
        *(bytes_of, 8 * bytes_of),
    )
    decode, why = latent_kernel_of(latent, kind, DEFAULT_BLOCK_SIZE, 1, asks, DecodeKernel.AUTO)
    given = expanded, kind, 0, asks, PrefillKernel.AUTO, LATENT_OPTION
    prefill, reason = prefill_kernel_of(*given)
    return {
        "prefill": f"expanded, {kernel_name(prefill)}: {reason}",
        "decode": f"absorbed, {kernel_name(decode)}: {why}",
    }
