"""FLASHINFER: dense attention by FlashInfer's paged wrappers, planned on the host."""

from __future__ import annotations

from typing import Any, ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.vendor.flashinfer import FlashInferImpl
from builders.vendor.flashinfer import FlashInferMetadataBuilder
from builders.vendor.flashinfer_parts import install as compat
from builders.vendor.flashinfer_parts.choice import (
    BLOCK_MULTIPLE,
    CACHE_DTYPES,
    HEAD_SIZES,
    MODEL_DTYPES,
    mixed_dtypes_reason,
)
from specs.attention import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    BackendCapabilities,
    HeadSizes,
    MultipleOf,
)
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType


class FlashInferBackend(AttentionBackend):
    """Causal decoders, with a window or a soft cap, where the host knows every length."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=tuple(DType.parse(dtype) for dtype in MODEL_DTYPES),
        kv_cache_dtypes=CACHE_DTYPES,
        block_sizes=(MultipleOf(base=BLOCK_MULTIPLE),),
        head_sizes=HeadSizes(values=HEAD_SIZES),
        device_kinds=(
            DeviceKind.SM80,
            DeviceKind.SM89,
            DeviceKind.SM90,
            DeviceKind.SM100,
            DeviceKind.SM120,
        ),
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
        sliding_window=True,
        logits_soft_cap=True,
        needs_host_lengths=True,
        lse=True,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why FlashInfer cannot be imported, or cannot compile its kernels, on this machine."""
        return compat.unavailable_reason()

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """A 16-bit cache has the model's dtype."""
        try:
            model, cache = DType.parse(config.dtype), CacheDType.parse(config.kv_cache_dtype)
        except ValueError:
            return None
        served = model.torch in MODEL_DTYPES and cache in CACHE_DTYPES
        return mixed_dtypes_reason(model.torch, cache) if served else None

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "FLASHINFER"

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        """The impl of this triple."""
        return FlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        """The metadata builder of this triple."""
        return FlashInferMetadataBuilder
