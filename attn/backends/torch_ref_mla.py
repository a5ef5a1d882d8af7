"""TORCH_REF_MLA and TORCH_REF_SPARSE_MLA: latent attention in plain torch, on any device."""

from __future__ import annotations

from typing import Any, ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.latent.torch_ref_mla import TorchRefMLAImpl, TorchRefSparseMLAImpl
from builders.latent.torch_ref_mla import (
    TorchRefMLAMetadataBuilder,
    TorchRefSparseMLAMetadataBuilder,
)
from specs.attention import AttentionSelectorConfig, BackendCapabilities, MultipleOf
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType
from specs.rows import INDEXER_PAGE, LATENT_BLOCK


class TorchRefMLABackend(AttentionBackend):
    """Dense latent attention, at reference speed; no CUDA graphs."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=(DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64),
        kv_cache_dtypes=(
            CacheDType.AUTO,
            CacheDType.FLOAT16,
            CacheDType.BFLOAT16,
            CacheDType.FP8,
            CacheDType.FP8_E4M3,
            CacheDType.FP8_DS_MLA,
        ),
        block_sizes=(MultipleOf(base=1),),
        device_kinds=tuple(DeviceKind),
        is_mla=True,
        sliding_window=True,
        device_cpu_query_lens_mismatch=True,
        lse=True,
        row_bits=True,
    )

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """Block-scaled rows have whole blocks of latent, and keep their parts aligned."""
        is_scaled = cls.supports_kv_cache_dtype(config.kv_cache_dtype) and (
            CacheDType.parse(config.kv_cache_dtype) is CacheDType.FP8_DS_MLA
        )
        if is_scaled and (config.head_size < LATENT_BLOCK or config.head_size % 2):
            return (
                f"fp8_ds_mla needs a latent part of a multiple of {LATENT_BLOCK} and an even "
                f"rotary part, got head_size {config.head_size}"
            )
        return None

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "TORCH_REF_MLA"

    @staticmethod
    def get_impl_cls() -> type[TorchRefMLAImpl]:
        """The impl of this triple."""
        return TorchRefMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TorchRefMLAMetadataBuilder]:
        """The metadata builder of this triple."""
        return TorchRefMLAMetadataBuilder


class TorchRefSparseMLABackend(TorchRefMLABackend):
    """Top-k sparse latent attention, at reference speed; no CUDA graphs."""

    capabilities: ClassVar[BackendCapabilities] = TorchRefMLABackend.capabilities.replace(
        is_sparse=True,
        sliding_window=False,
        # Latent rows and the indexer's planar pages share block tables.
        block_sizes=(MultipleOf(base=INDEXER_PAGE),),
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "TORCH_REF_SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> type[TorchRefSparseMLAImpl]:
        """The impl of this triple."""
        return TorchRefSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TorchRefSparseMLAMetadataBuilder]:
        """The metadata builder of this triple."""
        return TorchRefSparseMLAMetadataBuilder
