"""TORCH_REF: dense attention in plain torch; the CPU backend, and correct on any device."""

from __future__ import annotations

from typing import Any, ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.dense.torch_ref import TorchRefImpl
from builders.dense.torch_ref import TorchRefMetadataBuilder
from specs.attention import AttentionSelectorConfig, AttentionType, BackendCapabilities, MultipleOf
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType


class TorchRefBackend(AttentionBackend):
    """Every dense feature of the library but decode context parallelism, at reference speed.

    It has no CUDA graphs.
    """

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=(DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64),
        kv_cache_dtypes=(
            CacheDType.AUTO,
            CacheDType.FLOAT16,
            CacheDType.BFLOAT16,
            CacheDType.FP8,
            CacheDType.FP8_E4M3,
            CacheDType.FP8_E5M2,
            CacheDType.INT4_PER_TOKEN_HEAD,
            CacheDType.INT8_PER_TOKEN_HEAD,
            CacheDType.FP8_PER_TOKEN_HEAD,
        ),
        block_sizes=(MultipleOf(base=1),),
        device_kinds=tuple(DeviceKind),
        attn_types=tuple(AttentionType),
        sink=True,
        sliding_window=True,
        chunked_local=True,
        logits_soft_cap=True,
        alibi=True,
        alibi_sqrt=True,
        mm_prefix=True,
        rswa=True,
        non_causal=True,
        per_head_quant_scales=True,
        # Lengths come from the device, so a host copy that disagrees changes nothing.
        device_cpu_query_lens_mismatch=True,
        head_size_v=True,
        lse=True,
        output_quant=True,
        row_bits=True,
    )

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """Per-(token, head) rows need head sizes that keep their inline scales aligned."""
        if not cls.supports_kv_cache_dtype(config.kv_cache_dtype):
            return None
        cache_dtype = CacheDType.parse(config.kv_cache_dtype)
        step = 4 * cache_dtype.packing
        if cache_dtype.quant_mode.is_per_token_head and config.head_size % step:
            return (
                f"{cache_dtype.value} needs a head_size that is a multiple of {step}, "
                f"got {config.head_size}"
            )
        return None

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "TORCH_REF"

    @staticmethod
    def get_impl_cls() -> type[TorchRefImpl]:
        """The impl of this triple."""
        return TorchRefImpl

    @staticmethod
    def get_builder_cls() -> type[TorchRefMetadataBuilder]:
        """The metadata builder of this triple."""
        return TorchRefMetadataBuilder
