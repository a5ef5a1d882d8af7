"""Which kernel of sparse latent attention takes which rows of a step, and in which form.

A row is one query token with its list of keys. At construction :func:`setup_of` reads a layer, its
cache and its device, and :func:`check_setup` refuses a pair of kernels that cannot work. For every
step :func:`resolve`, a pure function, makes a frozen plan. No other function decides, and no state
is kept between steps, so a decode cannot change how the next prefill runs.
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
"""Kernels that the impl calls. A plan for any other kernel can be made, but is refused with a
reason."""
AUTO_KEYS_PER_TOKEN = 512
"""Most cached tokens for each new token with which ``flashmla_auto`` converts the context of a
prefill over quantised rows."""
ROW_WIDTHS = (512, 64)
"""Columns of the latent and of the rotary part of a row. Other kernels than the library's own take
no other widths, and its own takes no wider rows."""
LEAST_WIDTH = 32
"""Fewest columns of the latent or of the rotary part."""
_PARTS = (LEAST_WIDTH, 64, 128, 256, 512)
ROW_SIZES = tuple(
    sorted({one + other for one in _PARTS for other in _PARTS if one + other <= sum(ROW_WIDTHS)})
)
"""Columns of the rows that the library's own kernel takes: each is a sum of two powers of two."""


@dataclass(frozen=True)
class SparseSetup:
    """The facts that all steps share: the layers, their cache, the device, the chosen kernels."""

    layout: LatentFormat
    """Format of the cache's rows."""
    prefill: SparseKernel
    """The kernel that the engine chose for prefills."""
    decode: SparseKernel
    """The kernel that the engine chose for decodes."""
    num_heads: int
    """Query heads on this rank."""
    topk: int
    """Entries of a row's list."""
    block_size: int
    """Tokens of a block of the cache."""
    dtype: DType
    """Type of the model's elements."""
    capability: ComputeCapability | None
    """Compute capability of the device; None if it has none."""
    has_padded_pages: bool = False
    """Blocks of the cache are farther apart than their rows need."""

    def chosen(self, phase: SparsePhase) -> SparseKernel:
        """The kernel that is configured for a phase."""
        return self.prefill if phase is SparsePhase.PREFILL else self.decode


@dataclass(frozen=True)
class BatchStats:
    """Host bounds of a step's sizes. They choose how fast a result is computed, not which one."""

    prefill_tokens: int = 0
    """New tokens of the requests that are no decodes."""
    prefill_keys: int = 0
    """Upper bound on the keys of those requests, new tokens included."""


NO_PREFILL = BatchStats()
"""The sizes of a step without prefills."""


@dataclass(frozen=True)
class PhasePlan:
    """How the query rows of one phase are attended; each row is one query token."""

    phase: SparsePhase
    kernel: SparseKernel
    """The kernel that takes the rows; never ``flashmla_auto``, which stands for a choice."""
    stored: LatentFormat
    """Format of the cache's rows."""
    reads: LatentFormat
    """Format of the rows that the kernel reads."""
    conversion: LatentConversion | None
    """How needed rows are converted from ``stored`` to ``reads``; None where both are the same."""
    snaps_scales: bool
    """Block scales that are made from a scale per tensor are rounded to powers of two."""
    index_kind: IndexKind
    """How an entry of a list names a key: by its cache slot, or by a row of a compact buffer."""
    topk: int
    """Entries of a row's list."""
    index_width: int
    """Entries of a list with its padding of -1."""
    num_heads: int
    """Query heads on this rank."""
    padded_heads: int
    """Query heads that the kernel computes."""
    query_dtype: DType
    """Type of the query that the kernel reads."""
    skips_minus_one: bool
    """True if the kernel skips entries of -1. Otherwise entries are moved to the front of a list,
    and the kernel is given how many it should read."""


@dataclass(frozen=True)
class SparsePlan:
    """A step's plan: a plan for each phase."""

    mode: ForwardMode
    """The kind of the step."""
    decode: PhasePlan | None
    """Plan of the decodes, which come first; None without any."""
    prefill: PhasePlan | None
    """Plan of the prefills; None without any."""


# -- Which kernels are installed.


def find_module(name: str) -> bool:
    """Whether a module can be found; no package is imported for the answer.

    Args:
        name: dotted name; parts behind the first are looked for as files.
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
    """The reason for each kernel that cannot be called here; kernels that can are left out."""
    missing = {}
    for rule in SPARSE_KERNELS:
        if not any(find_module(name) for name in rule.modules):
            names = " or ".join(rule.modules)
            missing[rule.kernel] = f"{rule.kernel.value} is not available: no {names} is installed"
        elif rule.kernel not in CALLED:
            missing[rule.kernel] = f"{rule.kernel.value} is installed, but not called by {NAME} yet"
    return missing


def kernel_notes(capability: ComputeCapability) -> list[str]:
    """Sentences on the kernels that can be chosen on a GPU instead of the library's own kernel.

    Kernels that are not installed are among them, with the reason.
    """
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


# -- Which kernels work for a layer.


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
        # A range with a single capability is named once.
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
    """All reasons why a choice of kernel cannot take a phase's rows; empty where it can."""
    found: list[str] = []
    for one in _reachable(kernel, setup, phase):
        found += _kernel_reasons(rule_of(one), setup, phase)
        if one in unavailable:
            found.append(unavailable[one])
    return list(dict.fromkeys(found))


def _reachable(
    kernel: SparseKernel, setup: SparseSetup, phase: SparsePhase
) -> tuple[SparseKernel, ...]:
    """The kernels that a choice may stand for in some step."""
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
    """The nearest choice that works to a choice that does not; None where no choice works."""
    near = AUTO_KERNELS if kernel is SparseKernel.FLASHMLA_AUTO else rule_of(kernel).instead
    # Kernels that need no conversion come first.
    ordered = sorted(near, key=lambda other: setup.layout not in rule_of(other).reads)
    for other in (*ordered, SparseKernel.TRITON_SPARSE):
        if not _reasons(other, setup, phase, unavailable):
            return other
    return None


def setup_of(spec: AnyKVCacheSpec, config: EngineConfig, device: torch.device) -> SparseSetup:
    """The facts of a group's layers that all steps share.

    Args:
        spec: the group's spec.
        config: limits and settings of the engine.
        device: where the records' tensors live.

    Raises:
        ValueError: the spec or a setting is not served; the message has every reason.
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
    if size > 1 and not spec.dcp_sharded:
        reasons.append(
            f"dcp_sharded must be True with decode_context_parallel_size {size}: the builder of a "
            "group that every rank keeps whole has decode_context_parallel_size 1"
        )
    if size > 1 and heads is not None and heads % size:
        reasons.append(
            f"vllm_config.num_heads ({heads}) counts the heads of all ranks and must be a multiple "
            f"of decode_context_parallel_size ({size})"
        )
    if not spec.cache_dtype.is_quantized and spec.cache_dtype.element(spec.dtype) is not spec.dtype:
        reasons.append(
            f"kv_cache_dtype must be quantised or the model's {spec.dtype.value}, got "
            f"{spec.cache_dtype.value!r}"
        )
    reasons += width_reasons(spec.kv_lora_rank, spec.qk_rope_head_dim)
    kernels = config.kernels.sparse.prefill, config.kernels.sparse.decode
    others = [one.value for one in kernels if one is not SparseKernel.TRITON_SPARSE]
    widths = spec.kv_lora_rank, spec.qk_rope_head_dim
    if others and widths != ROW_WIDTHS:
        reasons.append(
            f"rows must be {ROW_WIDTHS[0]} + {ROW_WIDTHS[1]} wide for {others[0]}, got "
            f"{widths[0]} + {widths[1]}: use triton_sparse"
        )
    if others and size > 1:
        reasons.append(
            f"decode_context_parallel_size must be 1 for {others[0]}, got {size}: use triton_sparse"
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


def width_reasons(kv_lora_rank: int, qk_rope_head_dim: int) -> list[str]:
    """Why the library's own kernel has no tile for rows of these widths; empty where it has one."""
    parts = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    reasons = [
        f"{name} must be a power of two from {LEAST_WIDTH} on, got {width}"
        for name, width in parts.items()
        if width < LEAST_WIDTH or width & (width - 1)
    ]
    if sum(parts.values()) > sum(ROW_WIDTHS):
        reasons.append(f"rows must be at most {sum(ROW_WIDTHS)} wide, got {sum(parts.values())}")
    return reasons


def check_setup(setup: SparseSetup, unavailable: Mapping[SparseKernel, str] | None = None) -> None:
    """Check that every step of a setup has a plan.

    Args:
        setup: the setup.
        unavailable: kernels that cannot be called, with reasons; None finds them out.

    Raises:
        ValueError: some step has no plan; the message has every reason, and the nearest choice that
            works.
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
    """The plan of a step. It depends on the arguments alone, not on earlier steps.

    Args:
        setup: a setup that :func:`check_setup` accepts.
        mode: what kind of step it is.
        stats: sizes of the step.
    """
    plans = {phase: _phase_plan(setup, phase, stats) for phase in mode.phases}
    return SparsePlan(mode, plans.get(SparsePhase.DECODE), plans.get(SparsePhase.PREFILL))


def concrete_kernel(setup: SparseSetup, phase: SparsePhase, stats: BatchStats) -> SparseKernel:
    """The kernel that takes a phase's rows in one step; only ``flashmla_auto`` chooses by step."""
    kernels = _reachable(setup.chosen(phase), setup, phase)
    if len(kernels) == 1:
        return kernels[0]
    is_short = stats.prefill_keys < AUTO_KEYS_PER_TOKEN * stats.prefill_tokens
    return SparseKernel.FLASHMLA_SPARSE if is_short else SparseKernel.FLASHMLA_KV


def reachable_plans(setup: SparseSetup, phase: SparsePhase) -> tuple[PhasePlan, ...]:
    """A plan for each kernel that may take a phase's rows in some step; they size the buffers."""
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
    """Whether whole contexts are converted, or the listed rows: a prefill takes the fewer of both.

    A decode always converts the listed rows, since their largest number is known when a graph is
    captured.
    """
    if phase is SparsePhase.DECODE:
        return IndexKind.GATHERED
    listed = stats.prefill_tokens * setup.topk
    return IndexKind.RAGGED if stats.prefill_keys <= listed else IndexKind.GATHERED
