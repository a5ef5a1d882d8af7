"""TRITON_ATTN: dense attention in Triton, on every GPU."""

from __future__ import annotations

from typing import ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.dense.triton_attn import TritonAttentionImpl
from builders.checks.kernel_limits import BLOCK_MULTIPLE, CACHE_DTYPES, HEAD_SIZES, MODEL_DTYPES
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from specs.attention import (
    AttentionCGSupport,
    AttentionType,
    BackendCapabilities,
    HeadSizes,
    MultipleOf,
)
from specs.devices import DeviceKind
from specs.dtypes import DType


class TritonAttentionBackend(AttentionBackend):
    """Every dense feature of the library, split KV for decode and verify, CUDA graphs."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=tuple(DType.parse(dtype) for dtype in MODEL_DTYPES),
        kv_cache_dtypes=CACHE_DTYPES,
        block_sizes=(MultipleOf(base=BLOCK_MULTIPLE),),
        head_sizes=HeadSizes(
            multiple_of=HEAD_SIZES.step, minimum=HEAD_SIZES.start, maximum=HEAD_SIZES.stop - 1
        ),
        device_kinds=(
            DeviceKind.SM80,
            DeviceKind.SM89,
            DeviceKind.SM90,
            DeviceKind.SM100,
            DeviceKind.SM120,
            DeviceKind.ROCM,
        ),
        attn_types=tuple(AttentionType),
        cudagraph_support=AttentionCGSupport.ALWAYS,
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
        batch_invariance=True,
        dcp=True,
        device_cpu_query_lens_mismatch=True,
        head_size_v=True,
        lse=True,
        output_quant=True,
        row_bits=True,
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "TRITON_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """The impl of this triple."""
        return TritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        """The metadata builder of this triple."""
        return TritonAttentionMetadataBuilder
