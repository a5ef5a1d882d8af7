"""Translation of vLLM's configuration and KV cache specs to ours, field by field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.v1 import kv_cache_interface as vllm_specs

from attn.integrations.vllm import compat, settings
from attn.reference.dense import AttentionRules
from specs.base import cdiv
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig, SpeculativeConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

_QUANT_MODES = {
    "INT8_PER_TOKEN_HEAD": CacheDType.INT8_PER_TOKEN_HEAD,
    "FP8_PER_TOKEN_HEAD": CacheDType.FP8_PER_TOKEN_HEAD,
    "INT4_PER_TOKEN_HEAD": CacheDType.INT4_PER_TOKEN_HEAD,
}


def cache_dtype(spec: Any, cache_config_dtype: str, model_dtype: torch.dtype) -> CacheDType:
    """The ``kv_cache_dtype`` of one layer's cache.

    A spec of vLLM's names its quantisation mode, but not which fp8 type; that comes from the
    engine. A layer that is exempt from the engine's quantisation has a spec without quantisation.

    Args:
        spec: vLLM's spec.
        cache_config_dtype: ``kv_cache_dtype`` of the engine.
        model_dtype: model dtype.

    Raises:
        ValueError: a format that this library does not have.
    """
    named = compat.spec_fields(spec)["cache_dtype_str"]
    mode = spec.kv_quant_mode.name
    if mode == "NONE":
        if named is not None and CacheDType.parse(named).is_quantized:
            return CacheDType.parse(named)
        is_model = spec.dtype == model_dtype
        return CacheDType.AUTO if is_model else CacheDType.parse(DType.parse(spec.dtype).value)
    if mode in _QUANT_MODES:
        return _QUANT_MODES[mode]
    if mode == "FP8_PER_TENSOR":
        name = named or cache_config_dtype
        return CacheDType.parse(name if name.startswith("fp8") else "fp8")
    raise ValueError(f"KV cache quantisation {mode} is not served by this library")


def kv_cache_spec(
    spec: Any,
    cache_config_dtype: str = "auto",
    model_dtype: torch.dtype | None = None,
    qk_rope_head_dim: int = 64,
) -> AnyKVCacheSpec:
    """Our spec of the same cache, with pages of the same bytes.

    Args:
        spec: an attention spec of vLLM's. The window of R-SWA is left out: it is part of
            :func:`engine_config`.
        cache_config_dtype: ``kv_cache_dtype`` of the engine.
        model_dtype: model dtype; None where only the bytes of rows matter.
        qk_rope_head_dim: rotary width of MLA layers; specs give latent and rope in one number.

    Raises:
        ValueError: a kind of spec or a format that this library does not have.
    """
    model = model_dtype or (spec.dtype if spec.dtype.is_floating_point else torch.bfloat16)
    fields: dict[str, Any] = {
        "block_size": spec.block_size,
        "dtype": model,
        "cache_dtype": cache_dtype(spec, cache_config_dtype, model),
    }
    kind, own = _kind_of(spec, qk_rope_head_dim)
    ours: AnyKVCacheSpec = kind(**fields, **own)
    padded = compat.spec_fields(spec)["page_size_padded"]
    if padded is not None and padded != ours.page_size_bytes:
        ours = ours.replace(page_size_padded=padded)
    return ours


def _kind_of(spec: Any, qk_rope_head_dim: int) -> tuple[Any, dict[str, Any]]:
    """Our class for a spec of vLLM's, and the fields that only this class has."""
    extra = compat.spec_fields(spec)
    if isinstance(spec, vllm_specs.MLAAttentionSpec | vllm_specs.SlidingWindowMLASpec):
        own: dict[str, Any] = {
            "kv_lora_rank": spec.head_size - qk_rope_head_dim,
            "qk_rope_head_dim": qk_rope_head_dim,
        }
        if isinstance(spec, vllm_specs.SlidingWindowMLASpec):
            return SlidingWindowMLASpec, {**own, "sliding_window": spec.sliding_window}
        return MLAAttentionSpec, {**own, "dcp_sharded": extra["dcp_sharded"]}
    own = {"num_kv_heads": spec.num_kv_heads, "head_size": spec.head_size}
    if extra["head_size_v"] != spec.head_size:
        own["head_size_v"] = extra["head_size_v"]
    # Subclasses are tested before their base classes.
    if isinstance(spec, vllm_specs.SinkFullAttentionSpec):
        return SinkFullAttentionSpec, {**own, "sink_len": spec.sink_len}
    if isinstance(spec, vllm_specs.FullAttentionSpec):
        return FullAttentionSpec, {**own, "dcp_sharded": extra["dcp_sharded"]}
    if isinstance(spec, vllm_specs.SlidingWindowSpec):
        return SlidingWindowSpec, {**own, "sliding_window": spec.sliding_window}
    if isinstance(spec, vllm_specs.ChunkedLocalAttentionSpec):
        own["attention_chunk_size"] = spec.attention_chunk_size
        return ChunkedLocalAttentionSpec, own
    if isinstance(spec, vllm_specs.CrossAttentionSpec):
        return CrossAttentionSpec, own
    if isinstance(spec, vllm_specs.EncoderOnlyAttentionSpec):
        return EncoderOnlyAttentionSpec, own
    raise ValueError(f"KV cache spec {type(spec).__name__} is not served by this library")


def planned_spec(spec: AnyKVCacheSpec, rules: Sequence[AttentionRules]) -> AnyKVCacheSpec:
    """The spec to plan a group's steps with: the mask of its layers, where they agree on one.

    vLLM splits the requests of chunked local layers into one request for each chunk, so these
    layers plan as full attention. The layers' own masks count for windows over a cache that keeps
    every token, and for chunks that vLLM states as windows.

    Args:
        spec: spec of the group's cache.
        rules: masks of the group's layers; empty where none is known.
    """
    fields: dict[str, Any] = {
        name: getattr(spec, name)
        for name in ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype")
        if hasattr(spec, name)
    }
    fields["cache_dtype"] = spec.cache_dtype
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return FullAttentionSpec(**fields)
    seen = {(rule.sliding_window, rule.attention_chunk_size, rule.chunk_lookback) for rule in rules}
    if isinstance(spec, FullAttentionSpec | SlidingWindowSpec) and len(seen) == 1:
        ((window, chunk, lookback),) = seen
        if chunk is not None:
            chunks = {"attention_chunk_size": chunk, "chunk_lookback": lookback}
            return ChunkedLocalAttentionSpec(**fields, **chunks)
        if window is not None:
            return SlidingWindowSpec(**fields, sliding_window=window)
    if isinstance(spec, SlidingWindowSpec) and seen:
        return FullAttentionSpec(**fields)
    if isinstance(spec, EncoderOnlyAttentionSpec) and len(seen) == 1:
        ((window, _, _),) = seen
        return EncoderOnlyAttentionSpec(**fields, sliding_window=window)
    return spec.replace(page_size_padded=None)


def engine_config(
    vllm_config: Any, spec: Any, num_heads: int, dcp_size: int = 1, dcp_rank: int = 0
) -> EngineConfig:
    """The settings that a builder needs.

    Args:
        vllm_config: vLLM's configuration.
        spec: vLLM's spec of the builder's group. Static sinks lengthen every sequence, and chunked
            local layers get one request as several.
        num_heads: query heads of this rank.
        dcp_size: ranks that share a request's tokens; 1 for a draft model that is replicated.
        dcp_rank: index of this rank among them.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    max_tokens = max(scheduler.max_num_batched_tokens, *captured, 1)
    # A captured batch is padded, which can exceed the scheduler's limit of requests.
    max_reqs = max(scheduler.max_num_seqs, *captured, 1)
    # The dummy batches before a capture can be longer than the model's longest sequence.
    max_len = max(model.max_model_len, *captured, 1)
    if isinstance(spec, vllm_specs.SinkFullAttentionSpec):
        max_len += spec.sink_len
    if isinstance(spec, vllm_specs.ChunkedLocalAttentionSpec):
        # Each chunk of a request counts as a request; the first and the last may be partial.
        max_reqs = 2 * max_reqs + cdiv(max_tokens, spec.attention_chunk_size)
    drafts = None if speculative is None else speculative.num_speculative_tokens
    # vLLM adds static sinks to the lengths on the device, so the host's lengths lack them.
    is_exact = not compat.is_optimistic(vllm_config) and not isinstance(
        spec, vllm_specs.SinkFullAttentionSpec
    )
    return EngineConfig(
        max_model_len=max_len,
        max_encoder_len=_encoder_len(vllm_config, spec),
        max_num_seqs=max_reqs,
        max_num_batched_tokens=max_tokens,
        # Under DCP each rank attends with the query heads of all ranks over its own tokens.
        num_heads=num_heads * dcp_size,
        cudagraph_capture_sizes=tuple(captured),
        parallel=ParallelConfig(
            tensor_parallel_size=parallel.tensor_parallel_size,
            decode_context_parallel_size=dcp_size,
            decode_context_parallel_rank=dcp_rank,
            dcp_interleave=parallel.cp_kv_cache_interleave_size,
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        ),
        speculative=None
        if not drafts
        else SpeculativeConfig(
            num_speculative_tokens=drafts,
            parallel_drafting=bool(getattr(speculative, "parallel_drafting", False)),
        ),
        batch_invariant=batch_invariant(),
        rswa_window=compat.rswa_window(vllm_config, spec),
        exact_host_lengths=is_exact,
        index_topk=compat.index_topk(vllm_config, spec),
        dense_short_prompts=compat.sends_short_prompts(vllm_config),
        kernels=settings.kernels(),
        fp8_mla_queries=settings.fp8_mla_queries(),
    )


def _encoder_len(vllm_config: Any, spec: Any) -> int | None:
    """Longest input of an encoder, in tokens; None for layers that are not cross attention.

    It is the largest of the scheduler's limit on encoder inputs, the model's
    ``max_source_positions`` and its ``max_model_len``.
    """
    if not isinstance(spec, vllm_specs.CrossAttentionSpec):
        return None
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    positions = getattr(model.hf_config, "max_source_positions", None) or 0
    return int(max(scheduler.max_num_encoder_input_tokens, positions, model.max_model_len))


def batch_invariant() -> bool:
    """True where vLLM is set to give a request the same bits in any batch."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def layers_of(vllm_config: Any, layer_names: Iterable[str]) -> list[Any]:
    """The modules of the layers ``layer_names``, without names and modules that are no layers."""
    context = vllm_config.compilation_config.static_forward_context
    modules = (context.get(name) for name in layer_names)
    return [module for module in modules if hasattr(module, "impl")]


def dcp_ranks(layers: Sequence[Any]) -> tuple[int, int]:
    """Ranks that share the layers' tokens, and the index of this rank; (1, 0) without layers."""
    for layer in layers:
        return int(layer.impl.dcp_world_size), int(layer.impl.dcp_rank)
    return 1, 0


def query_heads(vllm_config: Any, layers: Sequence[Any]) -> int:
    """Query heads of this rank, which must be equal in all layers of a group.

    Raises:
        ValueError: layers have different numbers of query heads.
    """
    counts = {layer.num_heads for layer in layers}
    if len(counts) > 1:
        raise ValueError(
            "layers that share a KV cache group must have one number of query heads, got "
            f"{sorted(counts)}"
        )
    if counts:
        return int(counts.pop())
    return int(vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config))
