"""Limits of TRTLLM_MLA's kernels on each GPU, with reasons."""

from __future__ import annotations

from typing import Any

import torch

from builders.vendor.flashinfer_parts.choice import mixed_dtypes_reason
from builders.vendor.trtllm_parts.mha_choice import SM100
from specs.attention import MlaKernel
from specs.devices import ComputeCapability
from specs.dtypes import CacheDType
from specs.engine import EngineConfig
from specs.kv_cache import MLAAttentionSpec

NAME = "TRTLLM_MLA"
PAGE_SIZES = (32, 64)
ROW_SIZES = ((512, 64), (256, 64))
"""Widths of a row's latent and rotary parts that the vendor's decode kernel takes."""
EXPANDED_SIZES = ((192, 128), (128, 128), (256, 256))
"""Head sizes of expanded keys and values that the vendor's prefill kernel takes."""
MODEL_DTYPES = (torch.bfloat16,)
CACHE_DTYPES = (CacheDType.AUTO, CacheDType.BFLOAT16, CacheDType.FP8, CacheDType.FP8_E4M3)
TRITON_MODEL_DTYPES = (torch.bfloat16, torch.float16)
TRITON_CACHE_DTYPES = (*CACHE_DTYPES, CacheDType.FLOAT16)
MOST_HEADS = 128
FULL_TILE, HALF_TILE = 128, 64
"""Heads that the vendor's kernel takes: at most half a tile (64), or a whole tile (128)."""


def model_dtypes_of(kernel: MlaKernel) -> tuple[torch.dtype, ...]:
    """Model dtypes of a kernel."""
    return TRITON_MODEL_DTYPES if kernel is MlaKernel.TRITON else MODEL_DTYPES


def cache_dtypes_of(kernel: MlaKernel) -> tuple[CacheDType, ...]:
    """KV cache dtypes of a kernel."""
    return TRITON_CACHE_DTYPES if kernel is MlaKernel.TRITON else CACHE_DTYPES


def capability_reason(kernel: MlaKernel, capability: ComputeCapability | None) -> str | None:
    """Why a kernel does not run on a GPU; None where it does."""
    if kernel is MlaKernel.TRITON or (capability is not None and capability in SM100):
        return None
    has = "a device without any" if capability is None else str(capability)
    return (
        f"trtllm-gen needs compute capability {SM100.minimum} to {SM100.maximum}, got {has}: ask "
        'for kernel "triton", or choose another backend'
    )


def heads_reason(kernel: MlaKernel, heads: int) -> str | None:
    """Why a kernel does not take this number of query heads; None where it does."""
    if kernel is MlaKernel.TRITON or heads <= HALF_TILE or heads == FULL_TILE:
        return None
    return (
        f"num_heads must be at most {HALF_TILE}, or {FULL_TILE}, for trtllm-gen, got {heads}: "
        "pad the heads, or choose another tensor parallel size"
    )


def check_support(spec: Any, config: EngineConfig, capability: ComputeCapability | None) -> int:
    """Check that the kernel serves a spec and an engine's settings; returns the query heads.

    Raises:
        ValueError: the kernel does not serve the spec, a setting or the GPU; with every reason.
    """
    if not isinstance(spec, MLAAttentionSpec):
        raise ValueError(
            f"kv_cache_spec must be MLAAttentionSpec for {NAME}, got {type(spec).__name__}"
        )
    heads, kernel = config.num_heads, config.kernels.latent.rows
    if heads is None:
        raise ValueError(f"vllm_config.num_heads is needed by {NAME}, got None")
    reasons = [
        reason
        for reason in (
            capability_reason(kernel, capability),
            heads_reason(kernel, heads),
            row_reason(kernel, spec.kv_lora_rank, spec.qk_rope_head_dim),
            dtypes_reason(kernel, spec.dtype.torch, spec.cache_dtype),
        )
        if reason is not None
    ]
    if spec.block_size not in PAGE_SIZES:
        sizes = " or ".join(map(str, PAGE_SIZES))
        reasons.append(f"block_size must be {sizes}, got {spec.block_size}")
    reasons += fp8_prefill_reasons(config, spec.cache_dtype)
    if spec.topk is not None:
        reasons.append(f"topk must be None, got {spec.topk}")
    size = config.parallel.decode_context_parallel_size
    if size > 1:
        reasons.append(f"decode_context_parallel_size must be 1, got {size}")
    if config.batch_invariant:
        reasons.append("vllm_config.batch_invariant must be False, got True")
    if reasons:
        raise ValueError(f"{NAME}: {'; '.join(reasons)}")
    return heads


def fp8_prefill_reasons(config: EngineConfig, cache: CacheDType) -> list[str]:
    """Every reason why prefill in e4m3 is not served; [] where it is, or is not asked for."""
    if not config.fp8_mla_prefill:
        return []
    reasons = []
    if config.kernels.latent.rows is MlaKernel.TRITON:
        reasons.append("vllm_config.fp8_mla_prefill must be False with kernel triton, got True")
    if not cache.is_quantized:
        reasons.append(f"vllm_config.fp8_mla_prefill needs an fp8 cache, got {cache.value!r}")
    if config.skip_prefill:
        reasons.append("vllm_config.fp8_mla_prefill must be False with skip_prefill, got True")
    return reasons


def row_reason(kernel: MlaKernel, rank: int, rope_size: int) -> str | None:
    """Why a kernel does not take rows of these widths; None where it does."""
    if kernel is MlaKernel.TRITON or (rank, rope_size) in ROW_SIZES:
        return None
    sizes = ", ".join(f"{latent} + {rope}" for latent, rope in ROW_SIZES)
    return (
        f"kv_lora_rank and qk_rope_head_dim must be one of {sizes} for trtllm-gen, got {rank} + "
        f"{rope_size}"
    )


def dtypes_reason(kernel: MlaKernel, model: torch.dtype, cache: CacheDType) -> str | None:
    """Why model and KV cache dtype do not go together; None where they do."""
    models, caches = model_dtypes_of(kernel), cache_dtypes_of(kernel)
    if cache not in caches:
        names = ", ".join(dtype.value for dtype in caches)
        return f"kv_cache_dtype must be one of {names}, got {cache.value!r}"
    if model not in models:
        names = ", ".join(str(dtype) for dtype in models)
        return f"model dtype must be one of {names}, got {model}"
    return mixed_dtypes_reason(model, cache)
