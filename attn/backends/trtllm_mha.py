"""TRTLLM_MHA: dense attention by FlashInfer's direct calls, each on the GPUs it is made for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.vendor.trtllm_mha import TrtllmMhaImpl
from builders.pages.phase_tables import PAGE_SIZES
from builders.vendor.flashinfer_parts import install as compat
from builders.vendor.flashinfer_parts.calls import DirectCalls
from builders.vendor.trtllm_mha import TrtllmMhaMetadataBuilder
from builders.vendor.trtllm_parts.mha_choice import (
    CACHE_DTYPES,
    CAPABILITIES,
    HEAD_SIZES,
    MODEL_DTYPES,
    RULES,
    Phase,
    layer_reasons,
    phase_notes,
    rule_of,
    version_reason,
)
from specs.attention import AttentionCGSupport, AttentionSelectorConfig, BackendCapabilities
from specs.devices import ComputeCapability, DeviceKind
from specs.dtypes import CacheDType, DType
from specs.layouts import KVPacking


@functools.cache
def _calls_of(loader: Callable[[], DirectCalls]) -> DirectCalls | None:
    """The loaded calls; None where they cannot be loaded, for which ``unavailable_reason`` has the
    reason. Cached, because a failed import takes long.
    """
    try:
        return loader()
    except compat.FlashInferUnavailableError:
        return None


class TrtllmMhaBackend(AttentionBackend):
    """Causal decoders, with a window or sinks; the host need not know the KV lengths."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        # The prefill kernel fmha_v2 takes bf16 alone. A mix that uses only the decode phase may
        # have fp16 too (see for_phase).
        dtypes=(DType.BFLOAT16,),
        kv_cache_dtypes=CACHE_DTYPES,
        block_sizes=PAGE_SIZES,
        head_sizes=HEAD_SIZES,
        device_kinds=(DeviceKind.SM90, DeviceKind.SM100, DeviceKind.SM120),
        compute_capabilities=CAPABILITIES,
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
        sink=True,
        sliding_window=True,
        clears_tails=True,
    )
    phases: ClassVar[tuple[Phase, ...]] = (Phase.PREFILL, Phase.DECODE)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why FlashInfer cannot be imported, or cannot compile its kernels, on this machine."""
        return compat.unavailable_reason(compat.load_calls)

    @classmethod
    def for_phase(cls, phase: str) -> type[AttentionBackend] | None:
        """TRTLLM_MHA with the limits of one phase's kernels: XQA takes fp16, and any layout."""
        wanted = (Phase(phase),)
        builder_cls: Any = type(
            f"TrtllmMha{phase.title()}Builder", (TrtllmMhaMetadataBuilder,), {"phases": wanted}
        )
        served = {
            dtype
            for rule in RULES
            if rule.phase is wanted[0]
            for dtype in MODEL_DTYPES
            if dtype in rule.model_dtypes
        }

        class OfPhase(cls):  # type: ignore[valid-type, misc]
            """TRTLLM_MHA limited to one phase."""

            capabilities = cls.capabilities.replace(
                dtypes=tuple(DType.parse(dtype) for dtype in MODEL_DTYPES if dtype in served)
            )
            phases = wanted

            @staticmethod
            def get_builder_cls() -> type[TrtllmMhaMetadataBuilder]:
                """The metadata builder of this phase."""
                return builder_cls  # type: ignore[no-any-return]

        return OfPhase

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        """Refuse a layer for which a phase has no kernel on the GPU, by head size and cache."""
        try:
            model, cache = DType.parse(config.dtype), CacheDType.parse(config.kv_cache_dtype)
        except ValueError:
            return None
        served = config.head_size in HEAD_SIZES and model in cls.capabilities.dtypes
        if not served or cache not in CACHE_DTYPES:
            return None
        phases: tuple[Phase, ...] = ()
        capability = None
        if device_capability is not None:
            capability = ComputeCapability.model_validate(device_capability)
            if cls.supports_compute_capability(capability):
                phases = cls.phases
        reasons = layer_reasons(
            config.head_size, config.head_size, model, cache, capability, phases
        )
        calls = _calls_of(compat.load_calls)
        if calls is not None:
            missing = version_reason(phases, capability, cache, calls)
            reasons += [] if missing is None else [missing]
        return "; ".join(reasons) or None

    @classmethod
    def layout_reason(
        cls, packing: KVPacking, is_padded: bool, device_capability: Any
    ) -> str | None:
        """Refuse packed or padded pages for kernels that address pages by their shape alone."""
        if device_capability is None:
            return None
        capability = ComputeCapability.model_validate(device_capability)
        for phase in cls.phases:
            rule = rule_of(phase, capability)
            if rule is None or not rule.dense_pages:
                continue
            by = f"for {phase.value} by {rule.kernel.value} on compute capability {capability}"
            if packing is not KVPacking.SPLIT:
                return f"KV cache must be split {by}, got {packing.value}"
            if is_padded:
                return f"KV cache pages must be without padding {by}, got padded ones"
        return None

    @classmethod
    def device_notes(cls, device_capability: Any) -> list[str]:
        """The kernel that takes each phase on this GPU, and why others do not."""
        if device_capability is None:
            return []
        return phase_notes(ComputeCapability.model_validate(device_capability), cls.phases)

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "TRTLLM_MHA"

    @staticmethod
    def get_impl_cls() -> type[TrtllmMhaImpl]:
        """The impl of this triple."""
        return TrtllmMhaImpl

    @staticmethod
    def get_builder_cls() -> type[TrtllmMhaMetadataBuilder]:
        """The metadata builder of this triple."""
        return TrtllmMhaMetadataBuilder
