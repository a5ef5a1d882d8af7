"""SPARSE_MLA: top-k sparse latent attention, by kernels that are chosen for each phase."""

from __future__ import annotations

from typing import Any, ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.sparse.sparse_mla import SparseMLAImpl
from builders.sparse.choice import LEAST_WIDTH, ROW_SIZES, kernel_notes
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from builders.vendor.trtllm_parts.mha_choice import mixed_dtypes_reason
from specs.attention import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    BackendCapabilities,
    HeadSizes,
    MultipleOf,
)
from specs.devices import ComputeCapability, DeviceKind
from specs.dtypes import CacheDType, DType
from specs.rows import INDEXER_PAGE, LATENT_BLOCK, cache_dtype_of
from specs.sparse_mla import STORED_FORMATS, SparseKernel, rule_of


class SparseMLABackend(AttentionBackend):
    """Every row, of prefill too, attends the tokens that an indexer lists; CUDA graphs of decodes.

    The library's own kernel takes either phase on every GPU. ``EngineConfig.kernels.sparse``
    asks for others, phase by phase; a pair that cannot work is refused by the builder, with every
    reason and the nearest choice that works.
    """

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=rule_of(SparseKernel.TRITON_SPARSE).query_dtypes,
        # "float16" and "bfloat16" are served where they name the model's dtype, as "auto" does.
        kv_cache_dtypes=(
            *(cache_dtype_of(latent) for latent in STORED_FORMATS),
            CacheDType.FLOAT16,
            CacheDType.BFLOAT16,
            CacheDType.FP8,
        ),
        # Latent rows and the indexer's planar pages share block tables.
        block_sizes=(MultipleOf(base=INDEXER_PAGE),),
        # Sizes of a latent row: the latent part and the rotary part.
        head_sizes=HeadSizes(values=ROW_SIZES),
        device_kinds=(
            DeviceKind.SM80,
            DeviceKind.SM89,
            DeviceKind.SM90,
            DeviceKind.SM100,
            DeviceKind.SM120,
            DeviceKind.ROCM,
        ),
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
        is_mla=True,
        is_sparse=True,
        batch_invariance=True,
        dcp=True,
        lse=True,
        row_bits=True,
    )

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """A 16-bit cache has the model's dtype; block-scaled rows have whole blocks of latent."""
        if not (
            cls.supports_dtype(config.dtype) and cls.supports_kv_cache_dtype(config.kv_cache_dtype)
        ):
            return None
        cache = CacheDType.parse(config.kv_cache_dtype)
        is_scaled = cache is CacheDType.FP8_DS_MLA
        if (
            is_scaled
            and config.head_size in ROW_SIZES
            and config.head_size < LATENT_BLOCK + LEAST_WIDTH
        ):
            return (
                f"fp8_ds_mla needs a latent part of a multiple of {LATENT_BLOCK}, got head_size "
                f"{config.head_size}"
            )
        return mixed_dtypes_reason(DType.parse(config.dtype).torch, cache)

    @classmethod
    def device_notes(cls, device_capability: Any) -> list[str]:
        """The kernels that can be asked for on this GPU, and the packages they come from."""
        if device_capability is None:
            return []
        return kernel_notes(ComputeCapability.model_validate(device_capability))

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        """The impl of this triple."""
        return SparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        """The metadata builder of this triple."""
        return SparseMLAMetadataBuilder
