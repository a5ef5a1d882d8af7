"""Printing decisions: every registered backend with its verdict and reasons."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attn.errors import missing_reason
from attn.registry import ROWS, AttentionBackendEnum
from attn.selector import (
    ONLY_ALLOWED,
    SelectionReport,
    Verdict,
    explain,
    import_problem,
    is_withheld,
)
from builders.dense.choice import (
    LayerRequirements,
    decode_kernel_of,
    prefill_kernel_of,
)
from builders.splitkv.record import (
    longest_short_query,
)
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    split_tile,
)
from specs.attention import AttentionType
from specs.devices import Device, DeviceKind
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, PrefillKernel
from specs.model import LayerGeometry, LayerKind, ModelGeometry

_STYLES = {Verdict.CHOSEN: "bold green", Verdict.REFUSED: "red"}


def print_backends(device: Device, console: Console) -> None:
    """Print every registered backend: whether this machine can run it, and its capabilities."""
    table = Table(title=f"Attention backends on {device.name}", title_justify="left")
    table.add_column("backend", no_wrap=True)
    for column in ("runs here", "serves", "KV cache dtypes", "head sizes"):
        table.add_column(column)
    below: list[str] = []
    for member in AttentionBackendEnum:
        missing = member.missing()
        if missing:
            table.add_row(member.name, Text(f"no: {missing_reason(missing[0])}", "red"))
            continue
        problem = import_problem(member)
        if problem is not None:
            table.add_row(member.name, Text("no: see below", "red"))
            below.append(f"{member.name}: {problem}")
            continue
        backend = member.get_class()
        if member.package is not None:
            below.append(f"{member.name}: from {member.package}")
        capable = backend.supports_device(device) and backend.supports_compute_capability(
            device.compute_capability
        )
        capabilities = backend.capabilities
        broken = backend.unavailable_reason() if capable else f"not on {device.kind.value}"
        runs = f"yes, {ONLY_ALLOWED}" if is_withheld(member.name, device.kind) else "yes"
        table.add_row(
            member.name,
            Text(runs, "green") if broken is None else Text(f"no: {broken}", "red"),
            _serves(backend.is_mla(), backend.is_sparse()),
            ", ".join(dtype.value for dtype in capabilities.kv_cache_dtypes),
            str(capabilities.head_sizes),
        )
    console.print(table)
    for line in below:
        console.print(Text(line), soft_wrap=True)


_FEATURES = {
    "sinks": "sink",
    "sliding window": "sliding_window",
    "chunked local": "chunked_local",
    "soft cap": "logits_soft_cap",
    "ALiBi": "alibi",
    "multimodal ranges": "mm_prefix",
    "R-SWA": "rswa",
    "non-causal": "non_causal",
    "DCP": "dcp",
    "LSE": "lse",
    "fp8 output": "output_quant",
    "batch invariant": "batch_invariance",
}


def feature_table() -> str:
    """A Markdown table of features for each backend of the library, from the declared
    capabilities.
    """
    members = [AttentionBackendEnum[row.name] for row in ROWS]
    members = [member for member in members if not member.missing()]
    declared = {member.name: member.get_class().capabilities for member in members}
    rows = [["", *declared], ["---"] * (len(declared) + 1)]

    def row(label: str, cells: Iterable[str]) -> None:
        rows.append([label, *cells])

    capabilities = declared.values()
    row("serves", (_serves(item.is_mla, item.is_sparse) for item in capabilities))
    row("devices", (_or_all(item.device_kinds, DeviceKind) for item in capabilities))
    row("layers", (_or_all(item.attn_types, AttentionType) for item in capabilities))
    row("dtypes", (", ".join(item.dtypes) for item in capabilities))
    row("KV cache", (", ".join(item.kv_cache_dtypes) for item in capabilities))
    row("head sizes", (str(item.head_sizes) for item in capabilities))
    row("block sizes", (", ".join(map(str, item.block_sizes)) for item in capabilities))
    row("CUDA graphs", (item.cudagraph_support.name.lower() for item in capabilities))
    for label, name in _FEATURES.items():
        row(label, ("yes" if getattr(item, name) else "-" for item in capabilities))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _or_all(values: Sequence[StrEnum], kind: type[StrEnum]) -> str:
    return "all" if len(values) == len(kind) else ", ".join(values)


def _serves(is_mla: bool, is_sparse: bool) -> str:
    if not is_mla:
        return "dense"
    return "sparse MLA" if is_sparse else "MLA"


def remarks(model: ModelGeometry) -> list[str]:
    """Remarks on a model: its notes, and its layers without attention."""
    return [
        *(f"note: {note}" for note in model.notes),
        *(
            f"not attention: {len(other.indices)} {other.name} "
            f"{'layer' if len(other.indices) == 1 else 'layers'} ({_ranges(other.indices)})"
            for other in model.other_layers
        ),
    ]


def _ranges(indices: Sequence[int]) -> str:
    """Ascending numbers as text with ranges, such as ``"0-2, 4"``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@dataclass(frozen=True)
class Question:
    """Which layers are to get a backend, and where."""

    model: ModelGeometry
    """Geometry of its layers."""
    device: Device
    """Present or not."""
    kv_cache_dtype: CacheDType
    block_size: int | None
    """Tokens of a page; None leaves it open."""
    backend: str | None
    """The only one to consider; None considers all."""
    allow_reference: bool = False
    """On a GPU a reference backend may be chosen where no other serves."""


def print_decisions(
    question: Question, console: Console, *, as_json: bool, kernels: bool = False
) -> bool:
    """Print the decision for each kind of layer of a model.

    Args:
        question: what is to be decided.
        console: where tables go.
        as_json: print data instead.
        kernels: say too which kernels of the backend a layer gets.

    Returns:
        True when every kind of layer is served.
    """
    model, device, kv_cache_dtype = question.model, question.device, question.kv_cache_dtype
    decisions: list[tuple[str, SelectionReport, dict[str, str]]] = []
    for layer, indices in model.groups():
        request = layer.selector_config(model.dtype, kv_cache_dtype, question.block_size)
        decision = explain(
            request, device, question.backend, allow_reference=question.allow_reference
        )
        wanted = kernels and decision.chosen == "TRITON_ATTN"
        named = dense_kernels(question, layer) if wanted else {}
        name = f"{len(indices)} {layer.label} {'layer' if len(indices) == 1 else 'layers'}"
        decisions.append((name, decision, named))
    served = all(decision.chosen is not None for _, decision, _ in decisions)
    for remark in remarks(model):
        # With --json, standard output must hold nothing but the JSON.
        print(remark, file=sys.stderr if as_json else console.file)
    if as_json:
        dumped = [
            {
                "layers": name,
                **decision.model_dump(mode="json"),
                **({"kernels": named} if named else {}),
            }
            for name, decision, named in decisions
        ]
        print(json.dumps(dumped, indent=2))
        return served
    for name, decision, named in decisions:
        title = f"{model.name} on {device.name}, {name}, {kv_cache_dtype.value} KV cache"
        table = Table(title=title, title_justify="left")
        table.add_column("backend", no_wrap=True)
        for column in ("verdict", "why"):
            table.add_column(column)
        for candidate in decision.candidates:
            style = _STYLES.get(candidate.verdict, "")
            table.add_row(
                candidate.name,
                Text(candidate.verdict.value, style),
                Text("\n".join(candidate.reasons)),
            )
        console.print(table)
        console.print(Text(f"-> {decision.chosen or 'no backend serves this layer'}", "bold"))
        for rows, kernel in named.items():
            console.print(Text(f"   {rows}: {kernel}"))
        console.print()
    return served


def dense_kernels(question: Question, layer: LayerGeometry) -> dict[str, str]:
    """TRITON_ATTN's kernels under ``auto``, by the requests that they take."""
    model, device, kv_cache_dtype = question.model, question.device, question.kv_cache_dtype
    element = kv_cache_dtype.element(model.dtype)
    shape = DenseShape(
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        layer.head_size_v or layer.head_size,
        model.dtype.itemsize,
        element.itemsize * 8 // kv_cache_dtype.packing,
    )
    is_paged = layer.kind is not LayerKind.ENCODER_ONLY
    pages = (question.block_size or DEFAULT_BLOCK_SIZE) if is_paged else 0
    asks = LayerRequirements(
        is_local=layer.sliding_window is not None or layer.attention_chunk_size is not None,
        alibi=layer.use_alibi,
        query=model.dtype,
        cache_dtype=kv_cache_dtype,
    )
    prefill, why = prefill_kernel_of(shape, device.kind, pages, asks, PrefillKernel.AUTO)
    longer = f"prefill, {kernel_name(prefill)}: {why}"
    if not is_paged:
        return {"all rows": longer}
    decode, why = decode_kernel_of(shape, device.kind, pages, 1, asks, DecodeKernel.AUTO)
    tile = split_tile(shape, device.facts, 1) if decode is None else decode.split
    # The longest decode query is 1, as without speculation.
    short = longest_short_query(shape.num_kv_heads, tile, 1)
    return {
        f"up to {short} new tokens": f"split KV, {kernel_name(decode)}: {why}",
        f"more than {short} new tokens": longer,
    }


def kernel_name(tile: HopperTile | HopperDecodeTile | None) -> str:
    """Name of a kernel by its Hopper tile."""
    return "plain Triton" if tile is None else "Gluon for Hopper"


DEFAULT_BLOCK_SIZE = 16
"""Tokens of a page where the user names no block size."""
