"""Limits of FLASHINFER_MLA, and the choice of FlashInfer's kernel, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from builders.vendor.flashinfer_parts.choice import WrapperKernel, mixed_dtypes_reason
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind
from specs.dtypes import CacheDType
from specs.engine import EngineConfig
from specs.kv_cache import MLAAttentionSpec

NAME = "FLASHINFER_MLA"
RANKS = (128, 256, 512)
ROPE_SIZE = 64
BLOCK_MULTIPLE = 16
MODEL_DTYPES = (torch.float16, torch.bfloat16)
CACHE_DTYPES = (
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E4M3,
)
FP8_RANK = 512
"""Latent width of the e4m3 rows that FlashInfer's Hopper kernel takes."""
MOST_HEADS = 128
"""Rows of the kernels' largest tile, which must hold all heads of a token."""
MOST_WORK = 16384
"""Most tiles of a plan, pieces of split rows included; 0.6 does not check the limit."""
CUT_WORK = 512
"""Part of ``MOST_WORK`` that is kept for pieces of rows that a plan splits for balance; a plan
makes at most a few for each multiprocessor."""


@dataclass(frozen=True)
class LatentKernelChoice:
    """The kernel that a plan is for, and the reason."""

    kernel: WrapperKernel
    reason: str


def latent_wrapper_kernel(kind: DeviceKind) -> LatentKernelChoice:
    """The kernel for a kind of GPU."""
    if kind is DeviceKind.SM90:
        return LatentKernelChoice(WrapperKernel.FA3, "fa3 is made for sm90")
    return LatentKernelChoice(WrapperKernel.FA2, f"fa3 needs sm90, the device is {kind.value}")


def padded_heads(num_heads: int) -> int:
    """Heads that the kernel is given: the next power of two.

    Tiles have 64 or 128 rows (tokens x heads). Where a token's heads lie in two tiles, the kernels
    hide the last key of the first tile, if that key is the first of a tile of keys. 0.7 refuses
    such plans; 0.6 gives wrong values.
    """
    return power_of_two(num_heads)


def check_support(spec: Any, config: EngineConfig, kind: DeviceKind) -> int:
    """Check that the wrapper serves a spec and an engine's settings; returns the query heads.

    Raises:
        ValueError: the wrapper does not serve the spec or a setting; the message names it.
    """
    if not isinstance(spec, MLAAttentionSpec):
        raise ValueError(
            f"kv_cache_spec must be MLAAttentionSpec for {NAME}, got {type(spec).__name__}"
        )
    heads = config.num_heads
    if heads is None:
        raise ValueError(f"vllm_config.num_heads is needed by {NAME}, got None")
    if heads > MOST_HEADS:
        raise ValueError(
            f"vllm_config.num_heads must be at most {MOST_HEADS} for {NAME}, got {heads}"
        )
    if config.softmax_scale is None:
        raise ValueError(
            f"vllm_config.softmax_scale is needed by {NAME}, whose plan holds it, got None"
        )
    if not config.exact_host_lengths:
        raise ValueError(
            f"vllm_config.exact_host_lengths must be True for {NAME}, whose plans are made on the "
            "host, got False: choose TRITON_MLA, or turn asynchronous speculation off"
        )
    if config.parallel.decode_context_parallel_size > 1:
        raise ValueError(
            f"decode_context_parallel_size must be 1 for {NAME}, got "
            f"{config.parallel.decode_context_parallel_size}"
        )
    if config.batch_invariant:
        raise ValueError(f"vllm_config.batch_invariant must be False for {NAME}, got True")
    if spec.topk is not None:
        raise ValueError(f"topk must be None for {NAME}, got {spec.topk}")
    check_rows(spec.kv_lora_rank, spec.qk_rope_head_dim, spec.cache_dtype)
    check_model_dtype(spec.dtype.torch, spec.cache_dtype)
    if spec.cache_dtype.is_quantized and kind is not DeviceKind.SM90:
        raise ValueError(
            f"kv_cache_dtype must not be quantised for {NAME} on {kind.value}, got "
            f"{spec.cache_dtype.value!r}: rows of e4m3 need sm90"
        )
    if spec.block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size must be a multiple of {BLOCK_MULTIPLE} for {NAME}, got {spec.block_size}"
        )
    tiles = config.max_num_seqs * cdiv(config.max_decode_query_len * padded_heads(heads), 64)
    if tiles + CUT_WORK > MOST_WORK:
        raise ValueError(
            f"max_num_seqs ({config.max_num_seqs}) of {config.max_decode_query_len} tokens and "
            f"{padded_heads(heads)} heads must take at most {MOST_WORK - CUT_WORK} tiles for "
            f"{NAME}, got {tiles}"
        )
    return heads


def check_rows(rank: int, rope_size: int, cache: CacheDType) -> None:
    """Refuse row widths that the wrapper does not take in a cache of this type.

    Raises:
        ValueError: the wrapper does not take them.
    """
    if cache not in CACHE_DTYPES:
        names = ", ".join(dtype.value for dtype in CACHE_DTYPES)
        raise ValueError(f"kv_cache_dtype must be one of {names} for {NAME}, got {cache.value!r}")
    if rank not in RANKS or rope_size != ROPE_SIZE:
        ranks = ", ".join(map(str, RANKS))
        raise ValueError(
            f"kv_lora_rank must be one of {ranks} and qk_rope_head_dim {ROPE_SIZE} for {NAME}, got "
            f"{rank} and {rope_size}"
        )
    if cache.is_quantized and rank != FP8_RANK:
        raise ValueError(
            f"kv_lora_rank must be {FP8_RANK} for {NAME} with kv_cache_dtype {cache.value!r}, got "
            f"{rank}"
        )


def check_model_dtype(model: torch.dtype, cache: CacheDType) -> None:
    """Refuse a model and KV cache dtype that do not go together.

    Raises:
        ValueError: they do not go together; the message says why.
    """
    reason = dtypes_reason(model, cache)
    if reason is not None:
        raise ValueError(reason)


def dtypes_reason(model: torch.dtype, cache: CacheDType) -> str | None:
    """Why model and KV cache dtype do not go together; None where they do."""
    if model not in MODEL_DTYPES:
        names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
        return f"model dtype must be one of {names} for {NAME}, got {model}"
    if cache.is_quantized and model != torch.bfloat16:
        return (
            f"model dtype must be torch.bfloat16 for {NAME} with kv_cache_dtype {cache.value!r}, "
            f"got {model}"
        )
    return mixed_dtypes_reason(model, cache)
