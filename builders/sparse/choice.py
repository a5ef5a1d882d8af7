"""Which kernel of sparse latent attention takes which rows of a step, and what it is given.

``setup_of`` reads a layer, its cache and its device, and ``check_setup`` refuses a pair of kernels
that cannot work, both at construction; ``resolve`` is a pure function from a step to a frozen plan.
Nothing else decides, and nothing is kept between steps: a decode cannot change what the next
prefill does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from builders.vendor.trtllm_parts.mha_choice import capability_of
from specs.base import cdiv
from specs.devices import ComputeCapability
from specs.dtypes import DType
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, MLAAttentionSpec
from specs.rows import LatentFormat
from specs.sparse_mla import (
    AUTO_KERNELS,
    MOST_HEADS,
    SM100,
    SPARSE_KERNELS,
    STORED_FORMATS,
    ForwardMode,
    IndexKind,
    LatentConversion,
    SparseKernel,
    SparseKernelRule,
    SparsePhase,
    conversion_reason,
    find_conversion,
    rule_of,
)

NAME = "SPARSE_MLA"
CALLED = tuple(rule.kernel for rule in SPARSE_KERNELS)
"""Kernels that the impl calls; plans for others are made, and refused, as if they were there."""
AUTO_KEYS_PER_TOKEN = 512
"""Of ``flashmla_auto``: over quantised rows prefill converts the context up to so many cached
tokens for each new one."""
ROW_WIDTHS = (512, 64)
"""Latent and rotary part of a row, for every kernel but the library's own; the widest of its."""
LEAST_WIDTH = 32
"""Of either part: the narrowest that is written."""
_PARTS = (LEAST_WIDTH, 64, 128, 256, 512)
ROW_SIZES = tuple(
    sorted({one + other for one in _PARTS for other in _PARTS if one + other <= sum(ROW_WIDTHS)})
)
"""Widths of whole rows of the library's own kernel: of two powers of two each."""


@dataclass(frozen=True)
class SparseSetup:
    """What does not change from step to step: the layers, their cache, the device, the choice."""

    layout: LatentFormat
    """Rows of the cache."""
    prefill: SparseKernel
    decode: SparseKernel
    num_heads: int
    """Query heads on this rank."""
    topk: int
    """Entries of a row's list."""
    block_size: int
    dtype: DType
    """Of the model."""
    capability: ComputeCapability | None
    """None is no GPU."""
    has_padded_pages: bool = False
    """Blocks of the cache are farther apart than their rows need."""

    def chosen(self, phase: SparsePhase) -> SparseKernel:
        """The kernel that is configured for a phase."""
        return self.prefill if phase is SparsePhase.PREFILL else self.decode


@dataclass(frozen=True)
class BatchStats:
    """Host bounds of a step's sizes; they choose between ways to the same numbers."""

    prefill_tokens: int = 0
    """New tokens of the requests that are no decodes."""
    prefill_keys: int = 0
    """At least the keys of those requests, new tokens included."""


NO_PREFILL = BatchStats()


@dataclass(frozen=True)
class PhasePlan:
    """How the rows of one phase are attended; one query token each."""

    phase: SparsePhase
    kernel: SparseKernel
    """Never ``flashmla_auto``."""
    stored: LatentFormat
    """Rows of the cache."""
    reads: LatentFormat
    """Rows that the kernel is given."""
    conversion: LatentConversion | None
    """From the one to the other, of needed rows only; None where they are the same."""
    snaps_scales: bool
    """Block scales made from a scale per tensor are powers of two."""
    index_kind: IndexKind
    topk: int
    index_width: int
    """Entries of a list with its padding of -1."""
    num_heads: int
    padded_heads: int
    query_dtype: DType
    skips_minus_one: bool
    """Else entries stand at the front of a list, and lengths say how many are read."""


@dataclass(frozen=True)
class SparsePlan:
    """A step's plan: decodes first. None means that a phase has no rows."""

    mode: ForwardMode
    decode: PhasePlan | None
    prefill: PhasePlan | None


# -- What is there.


def find_module(name: str) -> bool:
    """A module can be found; no package is imported for the answer.

    Args:
        name: dotted; parts behind the first are looked for as files.
    """
    top, *inner = name.split(".")
    found = importlib.util.find_spec(top)
    if found is None:
        return False
    folders = [Path(place) for place in found.submodule_search_locations or ()]
    for place, part in enumerate(inner):
        if place + 1 == len(inner):
            return any(
                (folder / part / "__init__.py").is_file() or any(folder.glob(f"{part}.*"))
                for folder in folders
            )
        folders = [folder / part for folder in folders]
    return True


def unavailable_kernels() -> dict[SparseKernel, str]:
    """Kernels that cannot be called here, with the reason; others are left out."""
    missing = {}
    for rule in SPARSE_KERNELS:
        if not any(find_module(name) for name in rule.modules):
            names = " or ".join(rule.modules)
            missing[rule.kernel] = f"{rule.kernel.value} is not available: no {names} is installed"
        elif rule.kernel not in CALLED:
            missing[rule.kernel] = f"{rule.kernel.value} is installed, but not called by {NAME} yet"
    return missing


def kernel_notes(capability: ComputeCapability) -> list[str]:
    """What can be asked for on a GPU, present or not, in place of the library's own kernel."""
    lines = [
        f"prefill and decode by {SparseKernel.TRITON_SPARSE.value}, either by another kernel that "
        "is asked for"
    ]
    missing = unavailable_kernels()
    for rule in SPARSE_KERNELS:
        if rule.kernel is SparseKernel.TRITON_SPARSE or rule.variant_for(capability) is None:
            continue
        read = " and ".join(one.value for one in rule.reads)
        lines.append(missing.get(rule.kernel, f"{rule.kernel.value} is there, and reads {read}"))
    return lines


# -- What can work.


def _kernel_reasons(
    rule: SparseKernelRule, setup: SparseSetup, phase: SparsePhase
) -> Iterator[str]:
    """Why a kernel cannot take a phase's rows."""
    name, layout = rule.kernel.value, setup.layout
    if layout not in rule.reads and layout not in rule.converts(phase):
        yield _layout_reason(rule, layout, phase)
    variant = rule.variant_for(setup.capability)
    if variant is None:
        served = [one.capabilities for one in rule.variants if one.capabilities is not None]
        # A range of one is named once.
        edges = [dict.fromkeys((str(one.minimum), str(one.maximum))) for one in served]
        wanted = " or ".join(" to ".join(names) for names in edges)
        has = "a device without any" if setup.capability is None else str(setup.capability)
        yield f"{name} needs compute capability {wanted}, got {has}"
    elif variant.padded_heads(setup.num_heads) is None:
        most = max(variant.head_counts)
        yield f"{name} takes at most {most} query heads, got {setup.num_heads}"
    if setup.dtype not in rule.query_dtypes:
        names = ", ".join(dtype.value for dtype in rule.query_dtypes)
        yield f"{name} takes a model dtype of {names}, got {setup.dtype.value}"
    is_direct = layout in rule.reads
    if is_direct and rule.block_sizes and setup.block_size not in rule.block_sizes:
        sizes = " or ".join(map(str, rule.block_sizes))
        yield f"{name} reads blocks of {sizes} tokens, got block_size {setup.block_size}"
    if is_direct and rule.dense_pages and setup.has_padded_pages:
        yield f"{name} reads a cache as one array of rows, got pages with padding"


def _layout_reason(rule: SparseKernelRule, layout: LatentFormat, phase: SparsePhase) -> str:
    name = rule.kernel.value
    read = " and ".join(one.value for one in rule.reads)
    start = f"{name} reads {read} rows alone, and the cache holds {layout.value}"
    refused = conversion_reason(layout, rule.reads[-1])
    if refused is not None:
        return f"{start}; {refused}"
    if layout in rule.prefill_converts:
        return f"{start}; rows are converted to {rule.reads[0].value} for prefill, not for decode"
    return f"{start}; none are converted for it in {phase.value}"


def _reasons(
    kernel: SparseKernel,
    setup: SparseSetup,
    phase: SparsePhase,
    unavailable: Mapping[SparseKernel, str],
) -> list[str]:
    """Why a choice cannot take a phase's rows; none where it can."""
    found: list[str] = []
    for one in _reachable(kernel, setup, phase):
        found += _kernel_reasons(rule_of(one), setup, phase)
        if one in unavailable:
            found.append(unavailable[one])
    return list(dict.fromkeys(found))


def _reachable(
    kernel: SparseKernel, setup: SparseSetup, phase: SparsePhase
) -> tuple[SparseKernel, ...]:
    """What a choice may come to in some step."""
    if kernel is not SparseKernel.FLASHMLA_AUTO:
        return (kernel,)
    if setup.layout is LatentFormat.BF16:
        return (SparseKernel.FLASHMLA_SPARSE,)
    if phase is SparsePhase.PREFILL and _is_sm100(setup.capability):
        return AUTO_KERNELS
    return (SparseKernel.FLASHMLA_KV,)


def _is_sm100(capability: ComputeCapability | None) -> bool:
    return capability is not None and capability in SM100


def nearest_kernel(
    kernel: SparseKernel,
    setup: SparseSetup,
    phase: SparsePhase,
    unavailable: Mapping[SparseKernel, str],
) -> SparseKernel | None:
    """The choice that works and is nearest to one that does not; None where nothing works."""
    near = AUTO_KERNELS if kernel is SparseKernel.FLASHMLA_AUTO else rule_of(kernel).instead
    # First those that need no conversion.
    ordered = sorted(near, key=lambda other: setup.layout not in rule_of(other).reads)
    for other in (*ordered, SparseKernel.TRITON_SPARSE):
        if not _reasons(other, setup, phase, unavailable):
            return other
    return None


def setup_of(spec: AnyKVCacheSpec, config: EngineConfig, device: torch.device) -> SparseSetup:
    """What does not change from step to step, of a group's layers.

    Raises:
        ValueError: a spec or setting that is not served; with every reason.
    """
    if not isinstance(spec, MLAAttentionSpec):
        raise ValueError(
            f"kv_cache_spec must be MLAAttentionSpec for {NAME}, got {type(spec).__name__}"
        )
    heads, topk = config.num_heads, spec.topk or config.index_topk
    reasons = []
    if heads is None:
        reasons.append(f"vllm_config.num_heads is needed by {NAME}, got None")
    if topk is None:
        reasons.append(f"topk of the spec, or vllm_config.index_topk, is needed by {NAME}")
    if config.index_topk not in (None, topk):
        reasons.append(f"index_topk must be the spec's topk ({topk}), got {config.index_topk}")
    size = config.parallel.decode_context_parallel_size
    if size > 1:
        reasons.append(f"decode_context_parallel_size must be 1, got {size}")
    if not spec.cache_dtype.is_quantized and spec.cache_dtype.element(spec.dtype) is not spec.dtype:
        reasons.append(
            f"kv_cache_dtype must be quantised or the model's {spec.dtype.value}, got "
            f"{spec.cache_dtype.value!r}"
        )
    reasons += _width_reasons(spec)
    kernels = config.kernels.sparse.prefill, config.kernels.sparse.decode
    others = [one.value for one in kernels if one is not SparseKernel.TRITON_SPARSE]
    widths = spec.kv_lora_rank, spec.qk_rope_head_dim
    if others and widths != ROW_WIDTHS:
        reasons.append(
            f"rows must be {ROW_WIDTHS[0]} + {ROW_WIDTHS[1]} wide for {others[0]}, got "
            f"{widths[0]} + {widths[1]}: use triton_sparse"
        )
    if others and config.batch_invariant:
        reasons.append(
            f"batch_invariant must be False for {others[0]}, got True: use triton_sparse"
        )
    if reasons:
        raise ValueError(f"{NAME}: {'; '.join(reasons)}")
    assert heads is not None
    assert topk is not None
    layout = spec.layout()
    return SparseSetup(
        layout=spec.latent_format,
        prefill=kernels[0],
        decode=kernels[1],
        num_heads=heads,
        topk=topk,
        block_size=spec.block_size,
        dtype=spec.dtype,
        capability=capability_of(device),
        has_padded_pages=layout.page_size_bytes != layout.content_bytes,
    )


def _width_reasons(spec: MLAAttentionSpec) -> Iterator[str]:
    """Why the library's own kernel has no tile for such rows."""
    parts = {"kv_lora_rank": spec.kv_lora_rank, "qk_rope_head_dim": spec.qk_rope_head_dim}
    for name, width in parts.items():
        if width < LEAST_WIDTH or width & (width - 1):
            yield f"{name} must be a power of two from {LEAST_WIDTH} on, got {width}"
    if sum(parts.values()) > sum(ROW_WIDTHS):
        yield f"rows must be at most {sum(ROW_WIDTHS)} wide, got {sum(parts.values())}"


def check_setup(setup: SparseSetup, unavailable: Mapping[SparseKernel, str] | None = None) -> None:
    """Every step of this setup has a plan.

    Args:
        setup: what is configured.
        unavailable: kernels that cannot be called, with reasons; None looks.

    Raises:
        ValueError: it has not; with every reason, and the nearest choice that works.
    """
    if unavailable is None:
        unavailable = unavailable_kernels()
    problems = list(_setup_problems(setup))
    if not problems:
        for phase in SparsePhase:
            kernel = setup.chosen(phase)
            reasons = _reasons(kernel, setup, phase, unavailable)
            if reasons:
                other = nearest_kernel(kernel, setup, phase, unavailable)
                way_out = "no other kernel works" if other is None else f"use {other.value}"
                problems.append(f"{phase.value} by {'; '.join(reasons)}: {way_out}")
    if problems:
        raise ValueError("\n".join([f"{NAME} cannot be set up so:", *problems]))


def _setup_problems(setup: SparseSetup) -> Iterator[str]:
    if setup.layout not in STORED_FORMATS:
        names = ", ".join(one.value for one in STORED_FORMATS)
        yield f"layout must be one of {names}, got {setup.layout.value}"
    if not 1 <= setup.num_heads <= MOST_HEADS:
        yield f"num_heads must be 1 to {MOST_HEADS}, got {setup.num_heads}"
    if setup.topk < 1:
        yield f"topk must be positive, got {setup.topk}"


# -- Plans.


def resolve(setup: SparseSetup, mode: ForwardMode, stats: BatchStats = BatchStats()) -> SparsePlan:
    """The plan of a step; the same for the same arguments, whatever was planned before.

    Args:
        setup: one that :func:`check_setup` let pass.
        mode: what the step computes.
        stats: its sizes.
    """
    plans = {phase: _phase_plan(setup, phase, stats) for phase in mode.phases}
    return SparsePlan(mode, plans.get(SparsePhase.DECODE), plans.get(SparsePhase.PREFILL))


def concrete_kernel(setup: SparseSetup, phase: SparsePhase, stats: BatchStats) -> SparseKernel:
    """The kernel that a choice comes to."""
    kernels = _reachable(setup.chosen(phase), setup, phase)
    if len(kernels) == 1:
        return kernels[0]
    is_short = stats.prefill_keys < AUTO_KEYS_PER_TOKEN * stats.prefill_tokens
    return SparseKernel.FLASHMLA_SPARSE if is_short else SparseKernel.FLASHMLA_KV


def reachable_plans(setup: SparseSetup, phase: SparsePhase) -> tuple[PhasePlan, ...]:
    """A plan by each kernel that a phase can come to: what room they need follows from them."""
    kernels = _reachable(setup.chosen(phase), setup, phase)
    return tuple(_plan_by(kernel, setup, phase, NO_PREFILL) for kernel in kernels)


def _phase_plan(setup: SparseSetup, phase: SparsePhase, stats: BatchStats) -> PhasePlan:
    return _plan_by(concrete_kernel(setup, phase, stats), setup, phase, stats)


def _plan_by(
    kernel: SparseKernel, setup: SparseSetup, phase: SparsePhase, stats: BatchStats
) -> PhasePlan:
    rule = rule_of(kernel)
    variant = rule.variant_for(setup.capability)
    heads = None if variant is None else variant.padded_heads(setup.num_heads)
    if variant is None or heads is None:
        raise ValueError(f"check_setup must come before resolve: {kernel.value} does not run")
    stored = setup.layout
    reads = stored if stored in rule.reads else rule.reads[0]
    conversion = None if reads is stored else find_conversion(stored, reads)
    kind = IndexKind.PAGED if conversion is None else _compact_kind(setup, phase, stats)
    is_raw = reads is LatentFormat.FP8_NOPE_FP8_ROPE
    return PhasePlan(
        phase=phase,
        kernel=kernel,
        stored=stored,
        reads=reads,
        conversion=conversion,
        snaps_scales=conversion is not None and variant.rounds_scales,
        index_kind=kind,
        topk=setup.topk,
        index_width=cdiv(setup.topk, variant.topk_multiple) * variant.topk_multiple,
        num_heads=setup.num_heads,
        padded_heads=heads,
        query_dtype=DType.FLOAT8_E4M3FN if is_raw and rule.fp8_query else setup.dtype,
        skips_minus_one=rule.skips_minus_one,
    )


def _compact_kind(setup: SparseSetup, phase: SparsePhase, stats: BatchStats) -> IndexKind:
    """How rows are found that are converted: the fewer of whole contexts and listed rows.

    The rows of a decode are those listed: how many there can be is known when a graph is captured.
    """
    if phase is SparsePhase.DECODE:
        return IndexKind.GATHERED
    listed = stats.prefill_tokens * setup.topk
    return IndexKind.RAGGED if stats.prefill_keys <= listed else IndexKind.GATHERED
