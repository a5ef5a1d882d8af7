"""The differences between vLLM 0.26 and 0.33; no other module of the plugin depends on versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import vllm.v1.attention.backend as vllm_backend
from vllm.v1.attention.backend import AttentionBackend

BACKENDS_SHAPE_CACHES: bool = hasattr(AttentionBackend, "get_kv_cache_shape")
"""True in vLLM 0.26, where the backend gives the cache's shape and stride order; False in 0.33,
where the engine does."""


def packed_stride_order(include_num_layers_dimension: bool) -> tuple[int, ...]:
    """Logical axes of a packed cache, outermost in memory first, in the layout that vLLM is set to.

    Args:
        include_num_layers_dimension: logical axis 0 counts layers; with HND the layers of a head
            lie side by side, as KV connectors expect.
    """
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    is_nhd = get_kv_cache_layout() == "NHD"
    if include_num_layers_dimension:
        return (1, 0, 3, 2, 4) if is_nhd else (1, 2, 0, 3, 4)
    return (0, 2, 1, 3) if is_nhd else (0, 1, 2, 3)


def block_size_of(size: Any) -> Any:
    """A kernel block size for vLLM: our ``MultipleOf`` becomes vLLM's."""
    return size if isinstance(size, int) else vllm_backend.MultipleOf(size.base)


def cudagraph_support(level: int) -> Any:
    """The member of vLLM's enumeration of CUDA-graph support with this number."""
    return vllm_backend.AttentionCGSupport(level)


def merge_ranks(output: torch.Tensor, lse: torch.Tensor, group: Any) -> torch.Tensor:
    """Merge the outputs of all DCP ranks and return the heads of this rank.

    Args:
        output: ``[T, H * ranks, D]``, attention of every rank's heads over this rank's keys.
        lse: ``[T, H * ranks]`` fp32, natural logarithm.
        group: vLLM's group of ranks.

    Returns:
        ``[T, H, D]``, attention of this rank's heads over the keys of all ranks.
    """
    if BACKENDS_SHAPE_CACHES:
        from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
    else:
        from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs
    merged: torch.Tensor = cp_lse_ag_out_rs(output, lse, group)
    return merged


def quantised_up_projections() -> list[str]:
    """Names of the vLLM variables in force that make MLA layers keep quantised up-projections."""
    from vllm._aiter_ops import rocm_aiter_ops

    asked = {
        "VLLM_ROCM_USE_AITER_FP8BMM": rocm_aiter_ops.is_fp8bmm_enabled(),
        "VLLM_ROCM_USE_AITER_FP4BMM": rocm_aiter_ops.is_fp4bmm_enabled(),
    }
    return [variable for variable, is_asked in asked.items() if is_asked]


def dcp_group() -> Any:
    """VLLM's group of the ranks that share the tokens of a request (DCP)."""
    from vllm.distributed.parallel_state import get_dcp_group

    return get_dcp_group()


def rswa_window(vllm_config: Any, spec: Any) -> int | None:
    """Window of reference sliding-window attention (R-SWA), from the spec, else from the model."""
    window = getattr(spec, "rswa_window", None)
    if window is None:
        window = getattr(vllm_config.model_config, "rswa_window", None)
    return window or None


def is_optimistic(vllm_config: Any) -> bool:
    """True where only the device knows rejected drafts, so that host lengths are upper bounds."""
    speculative = vllm_config.speculative_config
    trims = getattr(vllm_config.scheduler_config, "async_scheduling", False) or getattr(
        speculative, "enable_adaptive_verification", False
    )
    return bool(getattr(speculative, "num_speculative_tokens", None)) and bool(trims)


def has_inexact_lengths() -> bool:
    """:func:`is_optimistic` of the engine that is being made; False where there is none."""
    from vllm.config import get_current_vllm_config_or_none

    vllm_config = get_current_vllm_config_or_none()
    return vllm_config is not None and is_optimistic(vllm_config)


def index_topk(vllm_config: Any, spec: Any = None) -> int | None:
    """Tokens that a sparse MLA layer attends: columns of its lists, else the model's number.

    Args:
        vllm_config: vLLM's configuration.
        spec: vLLM's spec of the layer; only 0.33 tells the columns of lists.
    """
    width = getattr(spec, "topk_buffer_width", None)
    if width is not None:
        return int(width)
    model = vllm_config.model_config
    configs = (getattr(model, name, None) for name in ("hf_text_config", "hf_config"))
    return next((size for one in configs if (size := getattr(one, "index_topk", None))), None)


def spec_fields(spec: Any) -> dict[str, Any]:
    """Fields of a KV cache spec that only one version has; the defaults in the other version."""
    return {
        "head_size_v": getattr(spec, "head_size_v", None),
        "page_size_padded": getattr(spec, "page_size_padded", None),
        "dcp_sharded": getattr(spec, "dcp_sharded", True),
        "cache_dtype_str": getattr(spec, "cache_dtype_str", None),
    }


@dataclass(frozen=True)
class Features:
    """Features that steps of a group of layers can ask of kernels, as the configuration tells."""

    non_causal: bool
    mm_ranges: bool
    shared_prefix: bool
    output_quant: bool
    """A compiler pass may fuse the output's fp8 quantisation."""


def features_of(vllm_config: Any, spec: Any) -> Features:
    """Features of a group of layers with a spec of vLLM's; 0.33 has no shared prefixes."""
    model = vllm_config.model_config
    passes = vllm_config.compilation_config.pass_config
    return Features(
        non_causal=bool(getattr(spec, "non_causal", False))
        or bool(vllm_config.attention_config.use_non_causal),
        mm_ranges=bool(model.is_mm_prefix_lm),
        shared_prefix=not getattr(model, "disable_cascade_attn", True),
        output_quant=bool(getattr(passes, "fuse_attn_quant", False)),
    )


def gather_ranks(rows: torch.Tensor) -> torch.Tensor:
    """The tensors of all DCP ranks, one behind another in their first dimension."""
    gathered: torch.Tensor = dcp_group().all_gather(rows.contiguous(), dim=0)
    return gathered


def hides_dcp() -> bool:
    """True where the engine that is being made has DCP, but does not say so when it selects.

    That is vLLM 0.26; vLLM 0.33 asks a backend for it by ``use_dcp``.
    """
    from vllm.config import get_current_vllm_config_or_none

    vllm_config = get_current_vllm_config_or_none()
    if not BACKENDS_SHAPE_CACHES or vllm_config is None:
        return False
    return bool(vllm_config.parallel_config.decode_context_parallel_size > 1)


def verified_tokens(vllm_config: Any) -> int:
    """Tokens of a request in a verify: 1 and its drafts."""
    return 1 + (getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0)


def sparse_reasons(most_heads: int) -> list[str]:
    """Why the engine that is being made cannot have our sparse layers.

    The selection of a backend does not tell these facts.

    Args:
        most_heads: most query heads per rank that a kernel takes.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None:
        return []
    parallel = config.parallel_config
    heads = config.model_config.get_num_attention_heads(parallel)
    # Under DCP a rank attends with the heads of all ranks that share its keys.
    heads *= parallel.decode_context_parallel_size
    found = {
        f"{heads} query heads per rank not supported (served: 1 to {most_heads})": heads
        > most_heads,
        "HiSparse not supported": getattr(config.attention_config, "hisparse_config", None)
        is not None,
    }
    return [reason for reason, is_there in found.items() if is_there]


def latent_widths() -> tuple[int, int] | None:
    """Columns of the latent and of the rotary part in the engine that is being made, if told."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    text_config = getattr(getattr(config, "model_config", None), "hf_text_config", None)
    widths = (getattr(text_config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    rank, rope = widths
    return None if rank is None or rope is None else (int(rank), int(rope))


def local_rank() -> int:
    """Number of this process among its machine's; 0 where ranks are not set up."""
    from vllm.distributed import parallel_state

    try:
        return int(parallel_state.get_world_group().local_rank)
    except AssertionError:
        return 0


def sends_short_prompts(vllm_config: Any) -> bool:
    """Whether sparse layers get prompts of at most ``index_topk`` tokens in ``forward_mha``.

    vLLM 0.26 sends them there if it has a prefill kernel of its own for the model, which a layer of
    ours does not use. vLLM 0.33 asks the step's record.
    """
    if vllm_config.attention_config.sparse_mla_force_mqa:
        return False
    every = vllm_config.compilation_config.static_forward_context.values()
    layers = [layer for layer in every if getattr(getattr(layer, "impl", None), "is_sparse", False)]
    return bool(layers) and all(
        getattr(layer.impl, "expands", False)
        and (not BACKENDS_SHAPE_CACHES or layer.prefill_backend is not None)
        for layer in layers
    )


def indexer_topk_backend(vllm_config: Any) -> str:
    """Kernel of vLLM's that is named for an indexer's lists; ``auto`` in 0.26, which has none."""
    kernels = getattr(vllm_config, "kernel_config", None)
    return str(getattr(kernels, "sparse_indexer_topk_backend", "auto"))


def indexer_cache_dtype(vllm_config: Any) -> str:
    """Type of the indexers' keys that the engine is set to; ``auto`` leaves it to the model."""
    attention = vllm_config.attention_config
    # 0.26 has both fields, and its sparse MLA layers know the first only.
    if hasattr(attention, "use_fp4_indexer_cache"):
        return "mxfp4" if attention.use_fp4_indexer_cache else "auto"
    return str(attention.indexer_kv_dtype)


def dcp_ranks_of(vllm_config: Any) -> tuple[int, int]:
    """Ranks that share the tokens of a request, and the index of this rank; (1, 0) without DCP."""
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return 1, 0
    group = dcp_group()
    return int(group.world_size), int(group.rank_in_group)


def merge_by_lse_alone(layer: Any) -> None:
    """Have vLLM 0.33 merge the ranks of a layer by the LSEs that our impl returns.

    vLLM also masks the rows of requests of which a rank keeps no key. It finds them by lengths and
    starts of a record of its own, in which prompts that attend lists are not decodes. The LSE of
    such rows is ``-inf`` here in any case. In 0.26 there is nothing to do.

    Args:
        layer: an ``MLAAttention`` of sparse attention.
    """
    manager = getattr(layer, "dcp_manager", None)
    if manager is None:
        return
    merge = manager.combine
    manager.combine = lambda output, lse, **_: merge(output, lse)
