"""TRTLLM_MLA: latent attention by trtllm-gen, or by TRITON_MLA's kernel where that is asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn.backends.base import AttentionBackend
from attn.backends.triton_mla import TritonMLABackend
from attn.impls.vendor.trtllm_mla import TrtllmMlaImpl
from builders.vendor.flashinfer_parts import install as flashinfer_compat
from builders.vendor.trtllm_mla import TrtllmMlaMetadataBuilder
from builders.vendor.trtllm_parts import mla_calls as compat
from builders.vendor.trtllm_parts.mha_choice import SM100, capability_of
from builders.vendor.trtllm_parts.mla_choice import (
    CACHE_DTYPES,
    MODEL_DTYPES,
    PAGE_SIZES,
    ROW_SIZES,
    TRITON_CACHE_DTYPES,
    TRITON_MODEL_DTYPES,
    capability_reason,
    dtypes_reason,
)
from specs.attention import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    BackendCapabilities,
    HeadSizes,
    MlaKernel,
)
from specs.devices import DeviceKind
from specs.dtypes import CacheDType, DType


class TrtllmMlaBackend(AttentionBackend):
    """Decode, verify, draft-extend and ragged prefill; the host need not know the KV lengths."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=tuple(DType.parse(dtype) for dtype in MODEL_DTYPES),
        kv_cache_dtypes=CACHE_DTYPES,
        block_sizes=PAGE_SIZES,
        # Sizes of a latent row: the latent part and the rotary part.
        head_sizes=HeadSizes(values=tuple(sum(sizes) for sizes in ROW_SIZES)),
        device_kinds=(DeviceKind.SM100,),
        compute_capabilities=(SM100,),
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
        is_mla=True,
        lse=True,
    )
    kernel: ClassVar[MlaKernel] = MlaKernel.AUTO

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why FlashInfer cannot be imported, or cannot compile its kernels, on this machine.

        None on a GPU that trtllm-gen does not run on: only TRITON_MLA's kernel can serve there.
        """
        if not torch.cuda.is_available():
            return None
        if capability_reason(MlaKernel.AUTO, capability_of(torch.device("cuda"))) is not None:
            return None
        return flashinfer_compat.unavailable_reason(compat.load_latent_calls)

    @classmethod
    def with_kernel(cls, kernel: MlaKernel) -> type[TrtllmMlaBackend]:
        """The backend class with the capabilities of the kernel that is asked for."""
        return _ByTriton if kernel is MlaKernel.TRITON else cls

    @classmethod
    def supports_mla_kernel(cls, mla_kernel: str) -> bool:
        """Always True: the backend has the vendor's kernel and TRITON_MLA's."""
        return True

    @classmethod
    def validate(cls, config: AttentionSelectorConfig, device_capability: Any) -> list[str]:
        """See the base class: with the kernel that the request asks for."""
        served = cls.with_kernel(MlaKernel(config.mla_kernel))
        validate = AttentionBackend.validate.__func__  # type: ignore[attr-defined]
        reasons: list[str] = validate(served, config, device_capability)
        return reasons

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """Refuse a 16-bit cache of another dtype than the model's."""
        try:
            model, cache = DType.parse(config.dtype), CacheDType.parse(config.kv_cache_dtype)
        except ValueError:
            return None
        served = model in cls.capabilities.dtypes and cache in cls.capabilities.kv_cache_dtypes
        return dtypes_reason(cls.kernel, model.torch, cache) if served else None

    @classmethod
    def device_notes(cls, device_capability: Any) -> list[str]:
        """The kernels that take decode and prefill."""
        return ['decode and prefill by trtllm-gen, or by triton with kernel "triton"']

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "TRTLLM_MLA"

    @staticmethod
    def get_impl_cls() -> type[TrtllmMlaImpl]:
        """The impl of this triple."""
        return TrtllmMlaImpl

    @staticmethod
    def get_builder_cls() -> type[TrtllmMlaMetadataBuilder]:
        """The metadata builder of this triple."""
        return TrtllmMlaMetadataBuilder


class _ByTriton(TrtllmMlaBackend):
    """TRTLLM_MLA with TRITON_MLA's kernel: every GPU, and every row width of that kernel."""

    capabilities = TrtllmMlaBackend.capabilities.replace(
        dtypes=tuple(DType.parse(dtype) for dtype in TRITON_MODEL_DTYPES),
        kv_cache_dtypes=TRITON_CACHE_DTYPES,
        head_sizes=TritonMLABackend.capabilities.head_sizes,
        device_kinds=TritonMLABackend.capabilities.device_kinds,
        compute_capabilities=(),
    )
    kernel = MlaKernel.TRITON
