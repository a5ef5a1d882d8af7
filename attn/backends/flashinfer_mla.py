"""FLASHINFER_MLA: latent attention by FlashInfer's wrapper, planned on the host."""

from __future__ import annotations

from typing import Any, ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.vendor.flashinfer_mla import FlashInferMlaImpl
from builders.vendor.flashinfer_mla import FlashInferMlaMetadataBuilder
from builders.vendor.flashinfer_parts import install as flashinfer_compat
from builders.vendor.flashinfer_parts import mla_calls as compat
from builders.vendor.flashinfer_parts.mla_choice import (
    BLOCK_MULTIPLE,
    CACHE_DTYPES,
    FP8_RANK,
    MODEL_DTYPES,
    RANKS,
    ROPE_SIZE,
    dtypes_reason,
    latent_wrapper_kernel,
)
from specs.attention import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    BackendCapabilities,
    HeadSizes,
    MultipleOf,
)
from specs.devices import ComputeCapability, DeviceKind, kind_of
from specs.dtypes import CacheDType, DType


class FlashInferMlaBackend(AttentionBackend):
    """Absorbed decodes where the host knows every length; prefill expanded in chunks."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=tuple(DType.parse(dtype) for dtype in MODEL_DTYPES),
        kv_cache_dtypes=CACHE_DTYPES,
        block_sizes=(MultipleOf(base=BLOCK_MULTIPLE),),
        # Sizes of a latent row: the latent part and the rotary part.
        head_sizes=HeadSizes(values=tuple(rank + ROPE_SIZE for rank in RANKS)),
        device_kinds=(
            DeviceKind.SM80,
            DeviceKind.SM89,
            DeviceKind.SM90,
            DeviceKind.SM100,
            DeviceKind.SM120,
        ),
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
        is_mla=True,
        needs_host_lengths=True,
        lse=True,
    )

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why FlashInfer cannot be imported, or cannot compile its kernels, on this machine."""
        return flashinfer_compat.unavailable_reason(compat.load_latent)

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """Refuse a 16-bit cache of another dtype than the model's; e4m3 needs bf16 and Hopper."""
        try:
            model, cache = DType.parse(config.dtype), CacheDType.parse(config.kv_cache_dtype)
        except ValueError:
            return None
        if model not in cls.capabilities.dtypes or cache not in CACHE_DTYPES:
            return None
        reasons = [reason for reason in (dtypes_reason(model.torch, cache),) if reason]
        if cache.is_quantized and config.head_size != FP8_RANK + ROPE_SIZE:
            reasons.append(
                f"head_size must be {FP8_RANK + ROPE_SIZE} with kv_cache_dtype {cache.value!r}, "
                f"got {config.head_size}"
            )
        if cache.is_quantized and device_capability is not None:
            capability = ComputeCapability.model_validate(device_capability)
            if kind_of(capability) is not DeviceKind.SM90:
                reasons.append(
                    f"kv_cache_dtype {cache.value!r} needs compute capability 9.0, the device has "
                    f"{capability}"
                )
        return "; ".join(reasons) or None

    @classmethod
    def device_notes(cls, device_capability: Any) -> list[str]:
        """The kernel that decodes on this GPU."""
        if device_capability is None:
            return []
        kind = kind_of(ComputeCapability.model_validate(device_capability))
        if kind is None:
            return []
        choice = latent_wrapper_kernel(kind)
        return [f"decode by {choice.kernel.value}: {choice.reason}"]

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "FLASHINFER_MLA"

    @staticmethod
    def get_impl_cls() -> type[FlashInferMlaImpl]:
        """The impl of this triple."""
        return FlashInferMlaImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMlaMetadataBuilder]:
        """The metadata builder of this triple."""
        return FlashInferMlaMetadataBuilder
