"""Limits of FLASHINFER, and the choice of FlashInfer's kernels, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any

import torch

from builders.splitkv.tiles import DenseShape
from specs.devices import DeviceKind
from specs.dtypes import CacheDType
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec, SlidingWindowSpec

NAME = "FLASHINFER"
HEAD_SIZES = (64, 128, 256)
"""Head sizes that FLASHINFER serves; keys and values must have the same size."""
BLOCK_MULTIPLE = 16
MODEL_DTYPES = (torch.float16, torch.bfloat16)
CACHE_DTYPES = (
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E4M3,
    CacheDType.FP8_E5M2,
)
FA3_MIN_QUERY_LEN = 16
"""Least average of new tokens per request with which fa3 takes a step's prefills. With fewer, fa2
fills its tiles better, as it packs the query heads of a KV head into one tile."""
TENSOR_CORE_GROUP = 4
"""Least number of query heads per KV head with which decodes use tensor cores."""


@unique
class WrapperKernel(StrEnum):
    """A kernel family of FlashInfer's wrappers, by FlashInfer's name."""

    FA2 = "fa2"
    FA3 = "fa3"


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that a plan is for, and the reason."""

    kernel: WrapperKernel
    use_tensor_cores: bool
    reason: str

    @property
    def rounds_sums(self) -> bool:
        """True where the kernel sums weights after rounding them to the model's type.

        Outputs lose nothing by it, because the products use the same rounded weights. The LSE is
        off by up to that type's rounding, which is 2^-9 for bf16.
        """
        return self.kernel is WrapperKernel.FA2 and self.use_tensor_cores


def prefill_kernel_of(
    shape: DenseShape, kind: DeviceKind, num_tokens: int, num_reqs: int
) -> KernelChoice:
    """The kernel for requests of any length.

    FlashInfer's own choice depends on dtypes alone and is slower on Hopper for short requests.

    Args:
        shape: the layer.
        kind: kind of the GPU.
        num_tokens: query rows of the plan.
        num_reqs: requests with query rows.
    """
    if kind is not DeviceKind.SM90:
        reason = f"fa3 needs sm90, the device is {kind.value}"
    elif shape.stored_bits != shape.itemsize * 8:
        reason = "fa3 needs keys of the query's type"
    elif num_tokens < FA3_MIN_QUERY_LEN * num_reqs:
        reason = (
            f"{num_tokens} tokens in {num_reqs} requests are fewer than {FA3_MIN_QUERY_LEN} each, "
            "which fa2 packs with their heads"
        )
    else:
        reason = f"{num_tokens} tokens in {num_reqs} requests fill tiles of fa3"
        return KernelChoice(WrapperKernel.FA3, True, reason)
    return KernelChoice(WrapperKernel.FA2, True, reason)


def decode_kernel_of(shape: DenseShape) -> KernelChoice:
    """The kernel for requests of one token."""
    quantized = shape.stored_bits != shape.itemsize * 8
    if quantized or shape.group >= TENSOR_CORE_GROUP:
        what = "a quantised cache" if quantized else f"{shape.group} query heads per KV head"
        reason = f"{what}: fa2's tiles pack them"
        return KernelChoice(WrapperKernel.FA2, True, reason)
    reason = f"{shape.group} query heads per KV head do not fill a tile"
    return KernelChoice(WrapperKernel.FA2, False, reason)


def check_support(spec: Any, config: EngineConfig) -> int:
    """Check that the wrappers serve a spec and an engine's settings; returns the query heads.

    Raises:
        ValueError: the wrappers do not serve the spec or a setting; the message names it.
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
    if not config.exact_host_lengths:
        raise ValueError(
            f"vllm_config.exact_host_lengths must be True for {NAME}, whose plans are made on the "
            "host, got False: choose TRITON_ATTN, or turn asynchronous speculation off"
        )
    if config.parallel.decode_context_parallel_size > 1:
        raise ValueError(
            f"decode_context_parallel_size must be 1 for {NAME}, got "
            f"{config.parallel.decode_context_parallel_size}"
        )
    if config.batch_invariant:
        raise ValueError(f"vllm_config.batch_invariant must be False for {NAME}, got True")
    check_head_sizes(spec.head_size, spec.v_size)
    check_dtypes(spec.dtype.torch, spec.cache_dtype)
    if spec.block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size must be a multiple of {BLOCK_MULTIPLE} for {NAME}, got {spec.block_size}"
        )
    return heads


def check_head_sizes(head_size: int, head_size_v: int) -> None:
    """Refuse head sizes that the wrappers do not take.

    Raises:
        ValueError: keys and values differ in size, or the size is not served.
    """
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise ValueError(f"head_size must be one of {sizes} for {NAME}, got {head_size}")
    if head_size_v != head_size:
        raise ValueError(
            f"head_size_v must be head_size ({head_size}) for {NAME}, got {head_size_v}"
        )


def check_dtypes(model: torch.dtype | None, cache: CacheDType) -> None:
    """Refuse a model and KV cache dtype that do not go together.

    Args:
        model: model dtype; None where it is not known yet.
        cache: KV cache dtype.

    Raises:
        ValueError: one is not served, or a 16-bit cache is not of the model's type.
    """
    if cache not in CACHE_DTYPES:
        names = ", ".join(dtype.value for dtype in CACHE_DTYPES)
        raise ValueError(f"kv_cache_dtype must be one of {names} for {NAME}, got {cache.value!r}")
    if model is None:
        return
    if model not in MODEL_DTYPES:
        names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
        raise ValueError(f"model dtype must be one of {names} for {NAME}, got {model}")
    reason = mixed_dtypes_reason(model, cache)
    if reason is not None:
        raise ValueError(reason)


def mixed_dtypes_reason(model: torch.dtype, cache: CacheDType) -> str | None:
    """Why a 16-bit cache does not go with the model dtype; None where it does."""
    if cache.is_quantized or cache is CacheDType.AUTO or str(model) == f"torch.{cache.value}":
        return None
    return f"kv_cache_dtype must be the model's dtype ({model}) or fp8, got {cache.value!r}"
