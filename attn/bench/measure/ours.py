"""Our kernels on a case, called only through the interface that an engine uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from attn.bench.cases.case import MODEL_DTYPE, NOPE_SIZE, KernelCase
from attn.bench.cases.dense import PLAN_SIZES, SCRATCH_CASE
from attn.bench.cases.inputs import Content, cache_slots, make_content, permuted_table
from attn.bench.measure.timing import graph_time_us, host_time_us
from attn.bench.peers.dense import FP8_QUERY_TOLERANCE, TOLERANCE, KernelRun, Latest
from attn.bench.results.reasons import describe
from attn.bench.results.results import PlanOfSize, PlanTime
from attn.device import detect_device
from attn.impls.base import AttentionImpl, LayerScales, MLAAttentionImpl
from attn.impls.latent.triton_mla import TritonMLAImpl
from attn.registry import RegisteredBackend
from attn.selector import refusals
from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata
from specs.attention import AttentionCGSupport, AttentionSelectorConfig, MlaKernel
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from specs.layouts import KVViews

MAX_MODEL_LEN: Final = 131072
MAX_NUM_SEQS: Final = 256
MAX_NUM_BATCHED_TOKENS: Final = 8192
"""Most tokens of a step of the engine, in every case that does not exceed them."""
EXPANDED_RANK: Final = 512
"""Latent width of a case with expanded rows; the result does not depend on it."""
WRITE_CHUNK: Final = 65536
"""Tokens per cache write."""
PLAN_LEN: Final = 8192
"""Average number of keys of the requests in :func:`measure_plans`."""
PLAIN_KERNELS: Final = Kernels.own(PrefillKernel.TRITON, DecodeKernel.TRITON)
"""The choice of the portable kernel wherever the library has two of its own."""

Builder = AttentionMetadataBuilder[Any]
MakeBuilder = Callable[..., Builder]


def engine_config(
    case: KernelCase,
    batch_invariant: bool = False,
    kernels: Kernels = PLAIN_KERNELS,
) -> EngineConfig:
    """Settings of an engine that serves the case."""
    drafts = case.num_speculative_tokens
    return EngineConfig(
        max_model_len=max(MAX_MODEL_LEN, *case.seq_lens),
        max_num_seqs=max(MAX_NUM_SEQS, case.num_reqs),
        max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, case.num_tokens),
        num_heads=case.num_heads,
        speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
        batch_invariant=batch_invariant,
        kernels=kernels,
        fp8_mla_queries=case.fp8_queries,
        softmax_scale=case.scale,
    )


def kv_cache_spec(case: KernelCase) -> FullAttentionSpec | SlidingWindowSpec | MLAAttentionSpec:
    """The spec of the cache of the case's layer."""
    if case.rope_size:
        return MLAAttentionSpec(
            block_size=case.block_size,
            dtype=MODEL_DTYPE,
            cache_dtype=case.kv_cache_dtype,
            kv_lora_rank=_rank_of(case),
            qk_rope_head_dim=case.rope_size,
        )
    sizes: dict[str, Any] = {
        "block_size": case.block_size,
        "num_kv_heads": case.num_kv_heads,
        "head_size": case.head_size,
        "dtype": MODEL_DTYPE,
        "cache_dtype": case.kv_cache_dtype,
    }
    if case.sliding_window is None:
        return FullAttentionSpec(**sizes)
    return SlidingWindowSpec(**sizes, sliding_window=case.sliding_window)


@dataclass(frozen=True)
class OurLayer:
    """A layer of ours with its cache written, which all variants of a case share."""

    content: Content
    impl: AttentionImpl | MLAAttentionImpl
    scales: LayerScales
    kv_cache: torch.Tensor
    """The cache in the backend's own layout; slots without a token hold NaN."""
    batch: CommonAttentionMetadata
    """The step's batch; its block table is not the one that peers get."""


def make_layer(member: RegisteredBackend, content: Content, generator: torch.Generator) -> OurLayer:
    """A layer with a cache in the backend's own layout, written by the backend's own cache write.

    Args:
        member: the backend.
        content: the case's inputs.
        generator: host generator that draws the block table.
    """
    case, device = content.case, content.device
    backend = member.get_class()
    if case.rope_size:
        return _latent_layer(member, content, generator)
    impl = backend.get_impl_cls()(
        case.num_heads,
        case.head_size,
        case.scale,
        case.num_kv_heads,
        None,
        case.sliding_window,
        case.kv_cache_dtype.value,
        None,
        "decoder",
        None,
        **({} if content.sinks is None else {"sinks": content.sinks}),
    )
    if not isinstance(impl, AttentionImpl):
        raise ValueError(f"backend must serve dense layers, got {member.name}")
    table, num_blocks = permuted_table(case, generator)
    block_table = table.to(device)
    layout = backend.kv_cache_layout(kv_cache_spec(case))
    kv_cache = layout.allocate(num_blocks, device, fill_byte=0xFF)
    scales, slots = LayerScales.of(device=device), cache_slots(case, block_table)
    for start in range(0, len(slots), WRITE_CHUNK):
        chunk = slice(start, start + WRITE_CHUNK)
        key, value = (
            content.rows(side, content.slots[chunk]) for side in (content.key, content.value)
        )
        impl.do_kv_cache_update(scales, key, value, kv_cache, slots[chunk])
    batch = CommonAttentionMetadata.from_lengths(
        case.query_lens, case.seq_lens, block_table, case.block_size
    )
    return OurLayer(content, impl, scales, kv_cache, batch)


def _latent_layer(
    member: RegisteredBackend, content: Content, generator: torch.Generator
) -> OurLayer:
    """:func:`make_layer` for a latent layer; its up-projections hold no values and are not used."""
    case, device, rank = content.case, content.device, _rank_of(content.case)
    impl = latent_impl(member, case)
    table, num_blocks = permuted_table(case, generator)
    block_table = table.to(device)
    kv_cache = kv_cache_spec(case).layout().allocate(num_blocks, device, fill_byte=0xFF)
    scales, slots = LayerScales.of(device=device), cache_slots(case, block_table)
    for start in range(0, len(slots) if case.is_latent else 0, WRITE_CHUNK):
        chunk = slice(start, start + WRITE_CHUNK)
        rows = content.rows(content.key, content.slots[chunk])[:, 0]
        impl.do_kv_cache_update(
            rows[:, :rank],
            rows[:, None, rank:],
            kv_cache,
            slots[chunk],
            case.kv_cache_dtype.value,
            scales._k_scale,
        )
    batch = CommonAttentionMetadata.from_lengths(
        case.query_lens, case.seq_lens, block_table, case.block_size
    )
    return OurLayer(content, impl, scales, kv_cache, batch)


def latent_impl(member: RegisteredBackend, case: KernelCase, **options: Any) -> MLAAttentionImpl:
    """The backend's impl of a latent layer, without values in its up-projections.

    Args:
        member: the backend.
        case: a case with a rotary part.
        options: further keyword arguments of the impl.
    """
    rank, make = _rank_of(case), member.get_class().get_impl_cls()
    width = case.num_heads * 2 * NOPE_SIZE
    given: dict[str, Any] = {
        "kv_lora_rank": rank,
        "qk_nope_head_dim": NOPE_SIZE,
        "qk_rope_head_dim": case.rope_size,
        "qk_head_dim": NOPE_SIZE + case.rope_size,
        "v_head_dim": NOPE_SIZE,
        "kv_b_proj": torch.nn.Linear(rank, width, bias=False, device="meta"),
        **options,
    }
    impl = make(
        *(case.num_heads, rank + case.rope_size, case.scale, 1, None, None),
        *(case.kv_cache_dtype.value, None, "decoder", None),
        **given,
    )
    if not isinstance(impl, MLAAttentionImpl):
        raise ValueError(f"backend must serve latent layers, got {member.name}")
    impl.process_weights_after_loading(MODEL_DTYPE.torch)
    return impl


def make_builder(
    member: RegisteredBackend,
    layer: OurLayer,
    batch_invariant: bool = False,
    free: bool = False,
    kernels: Kernels = PLAIN_KERNELS,
) -> Builder:
    """The backend's builder for the case.

    Args:
        member: the backend.
        layer: the case's layer.
        batch_invariant: the engine setting of that name.
        free: the one that partitions keys with a view on the whole batch.
        kernels: the engine setting of that name.
    """
    case = layer.content.case
    make: MakeBuilder = member.get_class().get_builder_cls()
    if free:
        make = free_partition_of(member) or make
    config = engine_config(case, batch_invariant, kernels)
    return make(kv_cache_spec(case), ["layers.0"], config, layer.content.device)


def free_partition_of(member: RegisteredBackend) -> MakeBuilder | None:
    """Constructor of the backend's free-partition builder; None where the backend has none."""
    make: MakeBuilder | None = getattr(
        member.get_class().get_builder_cls(), "for_free_partition", None
    )
    return make


def our_run(layer: OurLayer, builder: Builder) -> KernelRun:
    """One forward of our layer; the step is planned here, once."""
    record = builder.build(0, layer.batch)
    if layer.content.case.is_expanded:
        return _expanded_run(layer, record)
    if isinstance(layer.impl, MLAAttentionImpl):
        return _latent_run(layer, layer.impl, builder, record)
    query, output = layer.content.query, torch.empty_like(layer.content.query)
    forward = layer.impl.forward
    # The timed call is the bound method itself, since a function around it would cost host time.
    given = (layer.scales, query, None, None, layer.kv_cache)
    return KernelRun(
        partial(forward, *given, record, output),
        output,
        planned=lambda: forward(*given, builder.build(0, layer.batch), output),
        plan=partial(builder.build, 0, layer.batch),
    )


def _latent_run(
    layer: OurLayer, impl: MLAAttentionImpl, builder: Builder, record: Any
) -> KernelRun:
    """:func:`our_run` for a latent layer, called as vLLM's layer calls it.

    The queries are in two parts, and every call allocates its output.
    """
    content = layer.content
    assert content.parts is not None
    query, forward, results = content.parts, impl.forward_mqa, Latest()
    output = query[0].new_empty(query[0].shape)

    def attend(step: Any) -> None:
        results.output = forward(query, layer.kv_cache, step, layer.scales)[0]

    return KernelRun(
        partial(attend, record),
        output,
        FP8_QUERY_TOLERANCE if content.case.fp8_queries else TOLERANCE,
        planned=lambda: attend(builder.build(0, layer.batch)),
        plan=partial(builder.build, 0, layer.batch),
        collect=lambda: output.copy_(results.output),
    )


def _expanded_run(layer: OurLayer, record: Any) -> KernelRun:
    """Attention of new tokens over rows that are expanded before the timed call."""
    content, impl, scale = layer.content, layer.impl, layer.scales._k_scale
    if not isinstance(impl, TritonMLAImpl):
        raise ValueError(f"impl must be TRITON_MLA's to take expanded rows, got {type(impl)}")
    keys = KVViews(*content.own_rows())
    output = torch.empty_like(keys.value)
    step = record.prefill.own
    return KernelRun(lambda: impl.attend_expanded(content.query, keys, step, output, scale), output)


def _rank_of(case: KernelCase) -> int:
    """Latent width of a case; a case with expanded rows does not define it."""
    return case.head_size_v if case.is_latent else EXPANDED_RANK


def backend_refusals(
    case: KernelCase, member: RegisteredBackend, mla_kernel: MlaKernel = MlaKernel.AUTO
) -> list[str]:
    """Every reason why the backend cannot serve the case here."""
    request = AttentionSelectorConfig(
        head_size=_rank_of(case) + case.rope_size if case.rope_size else case.head_size,
        dtype=MODEL_DTYPE,
        kv_cache_dtype=case.kv_cache_dtype,
        block_size=case.block_size,
        has_sink=case.sinks,
        has_sliding_window=case.sliding_window is not None,
        use_mla=case.rope_size > 0,
        use_sparse=case.topk > 0,
        mla_kernel=mla_kernel,
    )
    return refusals(member, request, detect_device())


def plan_time(builder: Builder, layer: OurLayer) -> PlanTime:
    """Time of ``build`` on the host and on the device."""
    device = layer.content.device

    def call() -> None:
        builder.build(0, layer.batch)

    host_us, gpu_us, reason = host_time_us(call), None, ""
    support = type(builder).get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec)
    if device.type != "cuda":
        reason = "needs a CUDA device"
    elif support is AttentionCGSupport.NEVER:
        reason = "the builder declares no support of CUDA graphs"
    else:
        try:
            gpu_us = graph_time_us(call, device)
        except RuntimeError as error:
            reason = f"build cannot be captured: {describe(error)}"
    return PlanTime(host_us=host_us, gpu_us=gpu_us, reason=reason)


def measure_plans(
    member: RegisteredBackend, device: torch.device, kernels: Kernels
) -> tuple[tuple[PlanOfSize, ...], str]:
    """Times of plans of ``PLAN_SIZES`` decodes by one builder; or none, and the reason."""
    reasons = backend_refusals(SCRATCH_CASE, member)
    if reasons:
        return (), "; ".join(reasons)
    most, size = PLAN_SIZES[-1], SCRATCH_CASE.block_size
    config = engine_config(SCRATCH_CASE, kernels=kernels).replace(max_num_seqs=most)
    lens = {
        "even_us": [PLAN_LEN] * most,
        # Shuffled: 389 is coprime to the number of requests, so its multiples visit all of them.
        "uneven_us": [1 + PLAN_LEN * 2 * (at * 389 % most) // most for at in range(most)],
    }
    plans = []
    try:
        make: MakeBuilder = member.get_class().get_builder_cls()
        builder = make(kv_cache_spec(SCRATCH_CASE), ["layers.0"], config, device)
        # The plan's time does not depend on which pages the table names, so all entries are 0.
        table = torch.zeros(most, PLAN_LEN * 2 // size, dtype=torch.int32, device=device)
        for num_reqs in PLAN_SIZES:
            times = {}
            for name, all_lens in lens.items():
                step = most // num_reqs
                own = all_lens[step - 1 :: step]
                batch = CommonAttentionMetadata.from_lengths(
                    [1] * num_reqs, own, table[:num_reqs], size
                )
                time_us = graph_time_us(partial(builder.build, 0, batch), device)
                if time_us is None:
                    return (), "needs a CUDA device"
                times[name] = time_us
            plans.append(PlanOfSize(num_reqs=num_reqs, **times))
    except Exception as error:
        return (), describe(error)
    return tuple(plans), ""


def measure_scratch(
    member: RegisteredBackend, device: torch.device, seed: int
) -> tuple[int | None, str]:
    """Device bytes of a builder, a step's record and a forward; or None, and the reason."""
    if device.type != "cuda":
        return None, "needs a CUDA device"
    reasons = backend_refusals(SCRATCH_CASE, member)
    if reasons:
        return None, "; ".join(reasons)
    generator = torch.Generator().manual_seed(seed)
    try:
        content = make_content(SCRATCH_CASE, device, generator)
        layer = make_layer(member, content, generator)
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run = our_run(layer, make_builder(member, layer))
        run.call()
        torch.cuda.synchronize(device)
    except Exception as error:
        return None, describe(error)
    output_bytes = run.output.numel() * run.output.element_size()
    return torch.cuda.max_memory_allocated(device) - before - output_bytes, ""
