"""The requirements of a layer, and the capabilities that a backend declares."""

from __future__ import annotations

from enum import IntEnum, StrEnum, unique
from typing import Self

from pydantic import StrictBool, model_validator

from specs.base import PositiveInt, Spec
from specs.devices import ComputeCapability, DeviceKind
from specs.dtypes import CacheDType, CacheDTypeField, DType, DTypeField


@unique
class AttentionType(StrEnum):
    """Role of an attention layer; values as vLLM's."""

    DECODER = "decoder"
    ENCODER = "encoder"
    """Encoder of an encoder-decoder model."""
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"
    """Cross attention: decoder queries over the encoder's keys."""

    @property
    def is_cached(self) -> bool:
        """True when keys and values go through the KV cache."""
        return self in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


@unique
class AttentionCGSupport(IntEnum):
    """Which batches a captured CUDA graph can replay; a larger value includes the smaller ones."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    """All requests with one query length (speculative verify included)."""
    ALWAYS = 3
    """Any mix of prefill and decode."""


@unique
class MlaKernel(StrEnum):
    """Which kernel of TRTLLM_MLA takes a step's rows."""

    AUTO = "auto"
    """The vendor's kernel, on the GPUs that it is made for."""
    TRITON = "triton"
    """TRITON_MLA's kernel, on every GPU, behind the same builder and metadata."""


@unique
class RopeKernel(StrEnum):
    """Which kernel rotates and quantises absorbed queries and latent rows of an fp8 cache."""

    TRITON = "triton"
    """The library's own kernel: one launch, which also writes the cache."""
    FLASHINFER = "flashinfer"
    """FlashInfer's ``mla_rope_quantize_fp8``, followed by a launch that writes the rows."""


class MultipleOf(Spec):
    """An entry of a list of block sizes that stands for every multiple of ``base``."""

    base: PositiveInt

    def __str__(self) -> str:
        return f"any multiple of {self.base}"


class HeadSizes(Spec):
    """Head sizes that a backend takes: a list, or every multiple of a step inside a range."""

    values: tuple[PositiveInt, ...] = ()
    """The head sizes, one by one; empty means the range that the fields below give."""
    multiple_of: PositiveInt = 1
    minimum: PositiveInt = 1
    maximum: PositiveInt | None = None

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        """The minimum does not exceed the maximum."""
        if self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"minimum ({self.minimum}) exceeds maximum ({self.maximum})")
        return self

    def __contains__(self, head_size: int) -> bool:
        if self.values:
            return head_size in self.values
        above = self.maximum is not None and head_size > self.maximum
        return head_size >= self.minimum and not above and head_size % self.multiple_of == 0

    def __str__(self) -> str:
        if self.values:
            return ", ".join(str(value) for value in self.values)
        upper = "" if self.maximum is None else f" to {self.maximum}"
        return f"multiples of {self.multiple_of} from {self.minimum}{upper}"


class ComputeCapabilityRange(Spec):
    """Compute capabilities from ``minimum`` to ``maximum``, both included."""

    minimum: ComputeCapability
    maximum: ComputeCapability | None = None

    def __contains__(self, capability: ComputeCapability) -> bool:
        return self.minimum <= capability and (self.maximum is None or capability <= self.maximum)

    def __str__(self) -> str:
        if self.maximum is None:
            return f"{self.minimum} or above"
        if self.minimum == self.maximum:
            return str(self.minimum)
        return f"{self.minimum} to {self.maximum}"


class AttentionSelectorConfig(Spec):
    """The requirements of one layer of a model, by which the selector chooses a backend.

    The fields down to ``use_rswa`` are vLLM's (0.26 and 0.33), in vLLM's order. The fields after it
    are for features that vLLM's selection does not see.
    """

    head_size: PositiveInt
    """Query and key head size; for MLA the absorbed width (latent + rope)."""
    dtype: DTypeField
    """Model (activation) dtype."""
    kv_cache_dtype: CacheDTypeField = CacheDType.AUTO
    block_size: PositiveInt | None = None
    """Block size that the user asked for; None leaves it to the backend."""
    use_mla: StrictBool = False
    has_sink: StrictBool = False
    """The layer has per-head sink logits in the softmax denominator."""
    use_sparse: StrictBool = False
    """The layer is top-k sparse MLA."""
    use_mm_prefix: StrictBool = False
    """The layer has bidirectional ranges of multimodal tokens."""
    use_per_head_quant_scales: StrictBool = False
    attn_type: AttentionType = AttentionType.DECODER
    has_sliding_window: StrictBool = False
    use_non_causal: StrictBool = False
    use_batch_invariant: StrictBool = False
    use_kv_connector: StrictBool = False
    use_pcp: StrictBool = False
    use_adaptive_verification: StrictBool = False
    """The device may trim drafts, so host and device query lengths can disagree."""
    use_dcp: StrictBool = False
    use_rswa: StrictBool = False
    use_logits_soft_cap: StrictBool = False
    use_alibi: StrictBool = False
    use_alibi_sqrt: StrictBool = False
    use_alibi_symmetric: StrictBool = False
    """The layer has ALiBi with a bias of -slope * |key - query|, as encoders have."""
    use_chunked_local: StrictBool = False
    mla_kernel: MlaKernel = MlaKernel.AUTO
    """Kernel that a latent backend with several kernels shall use; the automatic selection of a
    backend does not set it."""
    head_size_v: PositiveInt | None = None
    """Value head size of a dense layer; None is ``head_size``."""


class BackendCapabilities(Spec):
    """The capabilities of a backend; its ``supports_*`` methods only read this record."""

    dtypes: tuple[DType, ...]
    """Model dtypes that the backend serves."""
    kv_cache_dtypes: tuple[CacheDType, ...]
    block_sizes: tuple[PositiveInt | MultipleOf, ...]
    """Kernel block sizes; a manager block is supported when one of them divides it."""
    head_sizes: HeadSizes = HeadSizes()
    device_kinds: tuple[DeviceKind, ...]
    compute_capabilities: tuple[ComputeCapabilityRange, ...] = ()
    """Compute capabilities that narrow ``device_kinds``; empty means all capabilities of the kinds.
    """
    attn_types: tuple[AttentionType, ...] = (AttentionType.DECODER,)
    cudagraph_support: AttentionCGSupport = AttentionCGSupport.NEVER
    is_mla: StrictBool = False
    is_sparse: StrictBool = False
    sink: StrictBool = False
    sliding_window: StrictBool = False
    chunked_local: StrictBool = False
    logits_soft_cap: StrictBool = False
    alibi: StrictBool = False
    alibi_sqrt: StrictBool = False
    alibi_symmetric: StrictBool = False
    mm_prefix: StrictBool = False
    rswa: StrictBool = False
    non_causal: StrictBool = False
    non_causal_dcp: StrictBool = False
    per_head_quant_scales: StrictBool = False
    batch_invariance: StrictBool = False
    row_bits: StrictBool = False
    """A request's output has the same bits alone as in a batch, except in rows for which the step's
    record says that their split depends on the batch. A backend with ``batch_invariance`` promises
    this to engines that ask for batch invariance, and may promise less to others. Without this flag
    every row's split may depend on the batch."""
    clears_tails: StrictBool = False
    """``forward`` may zero the slots behind a request's last key, in the page of that key: the
    kernel multiplies their content by a weight of zero, which gives NaN where they hold NaN."""
    kv_connector: StrictBool = True
    pcp: StrictBool = False
    dcp: StrictBool = False
    """The backend serves decode context parallelism, which needs the LSE of decode rows."""
    device_cpu_query_lens_mismatch: StrictBool = False
    """Results are right when device and host query lengths disagree: the backend decides nothing
    from host lengths where ``EngineConfig.exact_host_lengths`` is not set."""
    head_size_v: StrictBool = False
    """Values may have another head size than keys."""
    needs_host_lengths: StrictBool = False
    """The backend plans on the host: its builder refuses engines whose host lengths are inexact."""
    lse: StrictBool = False
    """The backend can return the log-sum-exp of every row."""
    output_quant: StrictBool = False
    """The backend can write fp8 output with a static scale."""

    @model_validator(mode="after")
    def _sparse_is_mla(self) -> Self:
        """Sparse backends of this library are MLA backends."""
        if self.is_sparse and not self.is_mla:
            raise ValueError("is_sparse needs is_mla")
        return self

    @model_validator(mode="after")
    def _lists_are_not_empty(self) -> Self:
        """Refuse a backend with an empty list: it would serve no layer at all."""
        for name in ("dtypes", "kv_cache_dtypes", "block_sizes", "device_kinds", "attn_types"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        return self
