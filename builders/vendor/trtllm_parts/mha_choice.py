"""Limits of TRTLLM_MHA: the kernel of each phase on each GPU, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any

import torch

from builders.pages.phase_tables import PAGE_SIZES
from builders.vendor.flashinfer_parts.calls import DirectCalls
from specs.attention import ComputeCapabilityRange, HeadSizes
from specs.devices import ComputeCapability
from specs.dtypes import CacheDType, DType, KVQuantMode
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec, SlidingWindowSpec

NAME = "TRTLLM_MHA"
XQA_ROWS = 32
"""Query rows of a program of XQA's kernels, except of its Hopper kernel for fp8."""
MODEL_DTYPES = (torch.bfloat16, torch.float16)
CACHE_DTYPES = (
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E4M3,
)
HEAD_SIZES = HeadSizes(multiple_of=16, minimum=16, maximum=256)
"""Head sizes that at least one kernel takes; each kernel has its own list."""
UNGROUPED_PAGES = 64
"""Most tokens of a page that trtllm-gen takes with one query head per KV head."""


@unique
class Phase(StrEnum):
    """The requests of a step that a kernel is called for."""

    PREFILL = "prefill"
    """Requests with any number of new tokens."""
    DECODE = "decode"
    """Requests with one new token, or with the few of a verify."""


@unique
class VendorKernel(StrEnum):
    """A kernel family of FlashInfer's direct calls, by FlashInfer's name."""

    XQA = "xqa"
    TRTLLM_GEN = "trtllm-gen"
    FMHA_V2 = "fmha_v2"


@dataclass(frozen=True)
class KernelRule:
    """The limits of one kernel family in one phase on some GPUs."""

    kernel: VendorKernel
    phase: Phase
    capabilities: ComputeCapabilityRange
    head_sizes: HeadSizes
    model_dtypes: tuple[torch.dtype, ...]
    takes_fp8: bool
    """The kernel takes a cache of e4m3."""
    query_is_fp8: bool
    """The kernel takes an e4m3 query over an e4m3 cache, not one in the model's type."""
    computes_fp8: bool
    """The kernel multiplies e4m3 over an e4m3 cache: it rounds weights, and a query that it is
    given in the model's type, to e4m3."""
    gives_lse: bool
    """The kernel returns the log-sum-exp."""
    dense_pages: bool
    """The kernel addresses pages by shape, so K and V of a block must lie side by side, without
    gaps."""
    query_is_dense: bool
    """The kernel takes no strides of the query, which must be dense."""
    ragged: bool
    """Requests of one call may have different numbers of tokens."""


def _from(minimum: str, maximum: str) -> ComputeCapabilityRange:
    parse = ComputeCapability.model_validate
    return ComputeCapabilityRange(minimum=parse(minimum), maximum=parse(maximum))


SM90, SM100, SM120 = _from("9.0", "9.0"), _from("10.0", "10.3"), _from("12.0", "12.1")
_WARP_SPECIALISED = (32, 48, 64, 80, 96, 128, 160, 192, 256)
_BF16 = (torch.bfloat16,)


def _xqa(capabilities: ComputeCapabilityRange, computes_fp8: bool) -> KernelRule:
    return KernelRule(
        kernel=VendorKernel.XQA,
        phase=Phase.DECODE,
        capabilities=capabilities,
        head_sizes=HEAD_SIZES,
        model_dtypes=MODEL_DTYPES,
        takes_fp8=True,
        query_is_fp8=False,
        computes_fp8=computes_fp8,
        gives_lse=False,
        dense_pages=False,
        query_is_dense=True,
        ragged=False,
    )


def _fmha_v2(
    capabilities: ComputeCapabilityRange, head_sizes: tuple[int, ...], takes_fp8: bool
) -> KernelRule:
    return KernelRule(
        kernel=VendorKernel.FMHA_V2,
        phase=Phase.PREFILL,
        capabilities=capabilities,
        head_sizes=HeadSizes(values=head_sizes),
        # fp16 is left out because the kernel sums products of fp16 in fp16.
        model_dtypes=_BF16,
        takes_fp8=takes_fp8,
        query_is_fp8=True,
        computes_fp8=True,
        gives_lse=False,
        dense_pages=True,
        query_is_dense=True,
        ragged=True,
    )


def _trtllm_gen(phase: Phase) -> KernelRule:
    return KernelRule(
        kernel=VendorKernel.TRTLLM_GEN,
        phase=phase,
        capabilities=SM100,
        head_sizes=HeadSizes(values=(64, 128, 256)),
        model_dtypes=MODEL_DTYPES,
        takes_fp8=True,
        query_is_fp8=True,
        computes_fp8=True,
        gives_lse=True,
        dense_pages=False,
        query_is_dense=False,
        ragged=True,
    )


RULES: tuple[KernelRule, ...] = (
    # XQA's Hopper kernel computes in fp8. Verifies may run on another of XQA's kernels, which
    # computes in the model's type.
    _xqa(SM90, computes_fp8=True),
    _xqa(SM120, computes_fp8=False),
    _trtllm_gen(Phase.DECODE),
    _fmha_v2(SM90, _WARP_SPECIALISED, takes_fp8=True),
    _fmha_v2(SM120, (64, 128, 256), takes_fp8=False),
    _trtllm_gen(Phase.PREFILL),
)
"""The kernels, at most one for each phase and GPU."""
CAPABILITIES = (SM90, SM100, SM120)


def rule_of(phase: Phase, capability: ComputeCapability | None) -> KernelRule | None:
    """The kernel of a phase on a GPU; None where there is none."""
    for rule in RULES:
        if rule.phase is phase and capability is not None and capability in rule.capabilities:
            return rule
    return None


def missing_reason(phase: Phase, capability: ComputeCapability | None) -> str:
    """Why no kernel takes a phase on a GPU."""
    has = "a device without any" if capability is None else str(capability)
    needed = "; ".join(
        f"{rule.kernel.value} needs {_range(rule.capabilities)}"
        for rule in RULES
        if rule.phase is phase
    )
    return f"no {phase.value} kernel for compute capability {has}: {needed}"


def phase_notes(
    capability: ComputeCapability, phases: tuple[Phase, ...] = tuple(Phase)
) -> list[str]:
    """Lines that tell the kernel of each phase on a GPU, and why other kernels do not take it."""
    notes = []
    for phase in phases:
        rule = rule_of(phase, capability)
        if rule is None:
            notes.append(missing_reason(phase, capability))
            continue
        notes.append(f"{phase.value} by {rule.kernel.value}")
        needed: dict[VendorKernel, list[str]] = {}
        for other in RULES:
            if other.phase is phase and other.kernel is not rule.kernel:
                needed.setdefault(other.kernel, []).append(_range(other.capabilities))
        notes += [
            f"{phase.value} by {kernel.value} refused: it needs compute capability "
            f"{' or '.join(ranges)}, the device has {capability}"
            for kernel, ranges in needed.items()
        ]
    return notes


def _range(capabilities: ComputeCapabilityRange) -> str:
    low, high = capabilities.minimum, capabilities.maximum
    return str(low) if high is None or high == low else f"{low} to {high}"


def phase_reasons(
    phase: Phase,
    capability: ComputeCapability | None,
    head_size: int,
    model: torch.dtype,
    cache: CacheDType,
) -> Iterator[str]:
    """Every reason why a phase of a layer cannot run on a GPU."""
    rule = rule_of(phase, capability)
    if rule is None:
        yield missing_reason(phase, capability)
        return
    by = f"for {phase.value} by {rule.kernel.value} on compute capability {capability}"
    if head_size not in rule.head_sizes:
        yield f"head_size must be one of {rule.head_sizes} {by}, got {head_size}"
    if model not in rule.model_dtypes:
        names = ", ".join(str(dtype) for dtype in rule.model_dtypes)
        yield f"model dtype must be one of {names} {by}, got {model}"
    if cache.quant_mode is KVQuantMode.FP8_PER_TENSOR and not rule.takes_fp8:
        yield f"kv_cache_dtype must not be quantised {by}, got {cache.value!r}"


def most_tokens_with_sinks(group: int, most: int) -> int:
    """Most tokens of a request, up to ``most``, that XQA decodes right in layers with sinks.

    A program has :data:`XQA_ROWS` rows, which are the query heads of one token after another. XQA
    finds a row's sink by the row's place in its program. In every program but the first this is the
    sink of the row's head only where a program holds whole tokens (``addAttentionSinksSpecDec`` in
    0.6.14 and 0.7.2).

    Args:
        group: query heads of a KV head.
        most: most tokens of an engine's decodes.
    """
    return most if XQA_ROWS % group == 0 else min(most, max(XQA_ROWS // group, 1))


def stride_reason(rule: KernelRule | None, spec: Any) -> str | None:
    """Why the decode kernel cannot find the pages of a cache; None where it can.

    Args:
        rule: the decode kernel; None without one.
        spec: spec of the group's cache.
    """
    row = spec.head_size * spec.cache_dtype.element(spec.dtype).itemsize
    if rule is None or rule.kernel is not VendorKernel.XQA or spec.page_size_bytes % row == 0:
        return None
    return (
        f"page_size_padded must leave pages of whole rows for xqa, which counts strides in rows of "
        f"head_size elements ({row} bytes), got {spec.page_size_bytes} bytes"
    )


def version_reason(
    phases: tuple[Phase, ...],
    capability: ComputeCapability | None,
    cache: CacheDType,
    calls: DirectCalls,
) -> str | None:
    """Why this FlashInfer's kernels for the phases do not serve a cache; None where they do."""
    rule = rule_of(Phase.PREFILL, capability) if Phase.PREFILL in phases else None
    if rule is None or rule.kernel is not VendorKernel.FMHA_V2 or calls.prefills_fp8:
        return None
    if cache.quant_mode is not KVQuantMode.FP8_PER_TENSOR:
        return None
    return (
        f"kv_cache_dtype must not be quantised for prefill by fmha_v2 of flashinfer "
        f"{calls.version}, which may hang, got {cache.value!r}: install "
        "flashinfer-python>=0.7, or choose another prefill backend"
    )


def mixed_dtypes_reason(model: torch.dtype, cache: CacheDType) -> str | None:
    """Why a 16-bit cache does not go with the model dtype; None where it does."""
    if cache.is_quantized or cache is CacheDType.AUTO or str(model) == f"torch.{cache.value}":
        return None
    return f"kv_cache_dtype must be the model's dtype ({model}) or fp8, got {cache.value!r}"


def capability_of(device: torch.device) -> ComputeCapability | None:
    """The compute capability of a torch device; None where it has none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return ComputeCapability(major=major, minor=minor)


def check_support(
    spec: Any, config: EngineConfig, capability: ComputeCapability | None, phases: tuple[Phase, ...]
) -> int:
    """Check that the kernels serve a spec and an engine's settings; returns the query heads.

    Raises:
        ValueError: the phases' kernels do not serve the spec or a setting; with every reason.
    """
    if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
        raise ValueError(
            f"kv_cache_spec must be of full or sliding-window attention for {NAME}, got "
            f"{type(spec).__name__}"
        )
    heads = config.num_heads
    if heads is None:
        raise ValueError(f"vllm_config.num_heads is needed by {NAME}, got None")
    if heads % spec.num_kv_heads:
        raise ValueError(
            f"vllm_config.num_heads ({heads}) must be a multiple of the spec's num_kv_heads "
            f"({spec.num_kv_heads})"
        )
    reasons = []
    if config.parallel.decode_context_parallel_size > 1:
        size = config.parallel.decode_context_parallel_size
        reasons.append(f"decode_context_parallel_size must be 1, got {size}")
    if config.batch_invariant:
        reasons.append("vllm_config.batch_invariant must be False, got True")
    if config.logits_soft_cap is not None:
        reasons.append(f"logits_soft_cap must be None, got {config.logits_soft_cap}")
    reasons += layer_reasons(
        spec.head_size, spec.v_size, spec.dtype, spec.cache_dtype, capability, phases
    )
    reasons += page_reasons(spec.block_size, heads // spec.num_kv_heads, capability, phases)
    if spec.page_size_padded not in (None, spec.layout().content_bytes):
        for phase in phases:
            rule = rule_of(phase, capability)
            if rule is not None and rule.dense_pages:
                reasons.append(
                    f"page_size_padded must be None for {phase.value} by {rule.kernel.value}, "
                    f"which addresses pages by their shape, got {spec.page_size_padded}"
                )
    if reasons:
        raise ValueError(f"{NAME}: {'; '.join(reasons)}")
    return heads


def layer_reasons(
    head_size: int,
    head_size_v: int,
    dtype: DType | torch.dtype,
    cache: CacheDType,
    capability: ComputeCapability | None,
    phases: tuple[Phase, ...],
) -> list[str]:
    """Every reason against a layer, apart from reasons against its pages."""
    reasons = []
    if head_size not in HEAD_SIZES:
        reasons.append(f"head_size must be one of {HEAD_SIZES}, got {head_size}")
    if head_size_v != head_size:
        reasons.append(f"head_size_v must be head_size ({head_size}), got {head_size_v}")
    if cache not in CACHE_DTYPES:
        names = ", ".join(one.value for one in CACHE_DTYPES)
        reasons.append(f"kv_cache_dtype must be one of {names}, got {cache.value!r}")
    model = DType.parse(dtype).torch
    if model not in MODEL_DTYPES:
        names = ", ".join(str(one) for one in MODEL_DTYPES)
        reasons.append(f"model dtype must be one of {names}, got {model}")
        return reasons
    mixed = mixed_dtypes_reason(model, cache)
    if mixed is not None:
        reasons.append(mixed)
    if not reasons:
        for phase in phases:
            reasons += phase_reasons(phase, capability, head_size, model, cache)
    return reasons


def page_reasons(
    page_size: int, group: int, capability: ComputeCapability | None, phases: tuple[Phase, ...]
) -> list[str]:
    """Every reason against the pages of a layer.

    Args:
        page_size: tokens of a block.
        group: query heads per KV head.
        capability: compute capability of the GPU.
        phases: phases that are wanted.
    """
    if page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return [f"block_size must be one of {sizes}, got {page_size}"]
    rules = [rule_of(phase, capability) for phase in phases]
    is_gen = any(rule is not None and rule.kernel is VendorKernel.TRTLLM_GEN for rule in rules)
    if is_gen and group == 1 and page_size > UNGROUPED_PAGES:
        return [
            f"block_size must be at most {UNGROUPED_PAGES} for trtllm-gen with one query head per "
            f"KV head, got {page_size}"
        ]
    return []
