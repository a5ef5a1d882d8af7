"""SDPA_ATTN: what the backend can do, as data."""

from __future__ import annotations

from typing import ClassVar

from attn.backends.base import AttentionBackend
from specs.attention import BackendCapabilities, HeadSizes, MultipleOf
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType

from sdpa_attn.builders.sdpa_attn import SdpaAttnMetadataBuilder
from sdpa_attn.impls.sdpa_attn import SdpaAttnImpl


class SdpaAttnBackend(AttentionBackend):
    """Dense causal attention, with or without a sliding window."""

    # The selector refuses what is not declared here, and the conformance kit tests what is.
    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=(DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32),
        kv_cache_dtypes=(CacheDType.AUTO,),
        block_sizes=(MultipleOf(base=16),),
        # The sizes that CachedImpl writes on a GPU.
        head_sizes=HeadSizes(minimum=32, maximum=512, multiple_of=8),
        device_kinds=tuple(DeviceKind),
        sliding_window=True,
        head_size_v=True,
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "SDPA_ATTN"

    @staticmethod
    def get_impl_cls() -> type[SdpaAttnImpl]:
        """The impl of this triple."""
        return SdpaAttnImpl

    @staticmethod
    def get_builder_cls() -> type[SdpaAttnMetadataBuilder]:
        """The metadata builder of this triple."""
        return SdpaAttnMetadataBuilder
