"""Top-k sparse latent attention as data: forward modes, kernels, conversions of cached rows.

The records say which kernel reads which rows, on which GPUs and how. ``builders.sparse.choice``
chooses the kernels of a step from these records alone.
"""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Final, Self

from pydantic import StrictBool, model_validator

from specs.attention import ComputeCapabilityRange
from specs.base import PositiveInt, Spec
from specs.devices import ComputeCapability
from specs.dtypes import DType
from specs.rows import LatentFormat

_BF16 = LatentFormat.BF16
_RAW = LatentFormat.FP8_NOPE_FP8_ROPE
_SCALED = LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
STORED_FORMATS: Final = (_BF16, _RAW, _SCALED)
"""Row formats that a cache of sparse attention can have."""


@unique
class SparsePhase(StrEnum):
    """The rows of a step that a kernel is called for."""

    PREFILL = "prefill"
    """Rows of requests with many new tokens."""
    DECODE = "decode"
    """Rows of requests with one new token, or with the few of a verify."""


@unique
class ForwardMode(StrEnum):
    """Kind of a step, by its requests."""

    EXTEND = "extend"
    """New tokens of prompts, with or without cached tokens before them."""
    DECODE = "decode"
    """One token of each request."""
    MIXED = "mixed"
    """Decodes, and prompts behind them."""
    TARGET_VERIFY = "target_verify"
    """Draft tokens of each request, verified together."""
    DRAFT_EXTEND = "draft_extend"
    """A draft model's first step: the tokens that a verify accepted."""
    IDLE = "idle"
    """No rows: the rank only takes part in the other ranks' collective operations."""

    @property
    def phases(self) -> tuple[SparsePhase, ...]:
        """The phases that have rows, in the order of the batch."""
        if self is ForwardMode.EXTEND:
            return (SparsePhase.PREFILL,)
        if self is ForwardMode.MIXED:
            return (SparsePhase.DECODE, SparsePhase.PREFILL)
        return () if self is ForwardMode.IDLE else (SparsePhase.DECODE,)


@unique
class IndexKind(StrEnum):
    """Meaning of the entries of a row's top-k list."""

    PAGED = "paged"
    """Physical slots of the cache, ``block * block_size + offset``."""
    RAGGED = "ragged"
    """Rows of a compact buffer with the whole context of every request, one request behind another:
    an entry is the token's index in the request plus the request's offset."""
    GATHERED = "gathered"
    """Rows of a compact buffer with one row for each entry of each list."""


@unique
class SparseKernel(StrEnum):
    """Kernels of sparse latent attention, chosen for each phase."""

    TRITON_SPARSE = "triton_sparse"
    """The library's own kernel: every GPU, up to 128 heads, every row format unconverted."""
    FLASHMLA_SPARSE = "flashmla_sparse"
    """FlashMLA's prefill kernel over bf16 rows."""
    FLASHMLA_KV = "flashmla_kv"
    """FlashMLA's kernel over block-scaled rows, for decode and prefill."""
    FLASHMLA_AUTO = "flashmla_auto"
    """``flashmla_sparse`` or ``flashmla_kv``, whichever suits the rows and the step."""
    TRTLLM = "trtllm"
    """trtllm-gen, called through FlashInfer."""
    FLASHINFER_MLA = "flashinfer_mla"
    """FlashInfer's wrapper for latent rows, with pages of one token."""
    FA3 = "fa3"
    """FlashAttention 3 with latent values, with pages of one token."""


# -- Conversions of rows.


@unique
class Exactness(StrEnum):
    """Precision that a conversion of rows loses."""

    COPY = "copy"
    """Nothing: the same bytes."""
    SCALED = "scaled"
    """Nothing where scales are powers of two; else an element is rounded at most once."""
    QUANTIZES = "quantizes"
    """As much as writing the token to a cache of the target format would have lost."""


class LatentConversion(Spec):
    """Rows of one format made from rows of another."""

    source: LatentFormat
    target: LatentFormat
    exactness: Exactness


CONVERSIONS: Final = tuple(
    LatentConversion(source=source, target=target, exactness=exactness)
    for source, target, exactness in (
        *((one, one, Exactness.COPY) for one in STORED_FORMATS),
        (_RAW, _BF16, Exactness.SCALED),
        (_RAW, _SCALED, Exactness.SCALED),
        (_SCALED, _BF16, Exactness.SCALED),
        (_BF16, _SCALED, Exactness.QUANTIZES),
    )
)
"""Every conversion that the library has."""

_REFUSED: Final = {
    (_SCALED, _RAW): (
        "one scale per tensor cannot stand for a scale per 128 elements, and bf16 rope would be "
        "rounded to e4m3: store 576-byte rows, or choose kernels that read 656-byte rows"
    ),
    (_BF16, _RAW): (
        "one scale per tensor is chosen when rows are written, not from rows that are there: "
        "store 576-byte rows, or choose kernels that read bf16 rows"
    ),
}


def find_conversion(source: LatentFormat, target: LatentFormat) -> LatentConversion | None:
    """The conversion between two formats; None where there is none."""
    pair = source, target
    return next((one for one in CONVERSIONS if (one.source, one.target) == pair), None)


def conversion_reason(source: LatentFormat, target: LatentFormat) -> str | None:
    """Why rows are not converted; None where they are."""
    if find_conversion(source, target) is not None:
        return None
    reason = _REFUSED.get((source, target), "the indexer's rows are scored, not attended")
    return f"{source.value} rows are not converted to {target.value}: {reason}"


# -- Kernels.


class KernelVariant(Spec):
    """How a kernel is called on some GPUs."""

    capabilities: ComputeCapabilityRange | None
    """GPUs of this variant; None means every device."""
    head_counts: tuple[PositiveInt, ...] = ()
    """Numbers of heads that the kernel takes; others are padded up to the next. Empty: any."""
    topk_multiple: PositiveInt = 1
    """Lengths of top-k lists: lists are padded with -1 to a multiple of this."""
    rounds_scales: StrictBool = False
    """The kernel rounds block scales to powers of two when it reads them."""

    def padded_heads(self, num_heads: int) -> int | None:
        """Heads that the kernel computes for a layer of ``num_heads``; None if that is too many."""
        if not self.head_counts:
            return num_heads
        return min((count for count in self.head_counts if count >= num_heads), default=None)


class SparseKernelRule(Spec):
    """A kernel's inputs, the GPUs it runs on and the packages it comes from."""

    kernel: SparseKernel
    reads: tuple[LatentFormat, ...]
    """Row formats that the kernel reads from the cache."""
    prefill_converts: tuple[LatentFormat, ...] = ()
    """Row formats that prefill converts for the kernel, to the first format of ``reads``."""
    decode_converts: tuple[LatentFormat, ...] = ()
    """Row formats that decode converts for the kernel, to the first format of ``reads``."""
    query_dtypes: tuple[DType, ...] = (DType.BFLOAT16,)
    """Model dtypes that the kernel takes."""
    fp8_query: StrictBool = False
    """The kernel's query is e4m3 too where the rows are the 576-byte rows of e4m3."""
    dense_pages: StrictBool = False
    """The kernel takes the cache as one array of rows, so that blocks must not be padded."""
    skips_minus_one: StrictBool = True
    """The kernel skips entries of -1 anywhere in a list; else a length says how many it reads."""
    block_sizes: tuple[PositiveInt, ...] = ()
    """Tokens per block that the kernel takes; empty for any number."""
    modules: tuple[str, ...]
    """Modules that the kernel can be imported from; one of them is enough."""
    variants: tuple[KernelVariant, ...]
    instead: tuple[SparseKernel, ...] = ()
    """Kernels to suggest where this one does not serve, best first; the library's own follows."""

    @model_validator(mode="after")
    def _conversions_exist(self) -> Self:
        """Every format to convert has a conversion and is not in ``reads``."""
        for source in (*self.prefill_converts, *self.decode_converts):
            if source in self.reads:
                raise ValueError(f"{source.value} is read as it is by {self.kernel.value}")
            reason = conversion_reason(source, self.reads[0])
            if reason is not None:
                raise ValueError(reason)
        return self

    def converts(self, phase: SparsePhase) -> tuple[LatentFormat, ...]:
        """Row formats that a phase converts for the kernel."""
        is_prefill = phase is SparsePhase.PREFILL
        return self.prefill_converts if is_prefill else self.decode_converts

    def variant_for(self, capability: ComputeCapability | None) -> KernelVariant | None:
        """The variant for a GPU; None where the kernel does not run there.

        Args:
            capability: compute capability of the GPU; None for a device that has none.
        """
        for variant in self.variants:
            served = variant.capabilities
            if served is None or (capability is not None and capability in served):
                return variant
        return None


def _gpus(minimum: str, maximum: str) -> ComputeCapabilityRange:
    parse = ComputeCapability.model_validate
    return ComputeCapabilityRange(minimum=parse(minimum), maximum=parse(maximum))


SM90, SM100 = _gpus("9.0", "9.0"), _gpus("10.0", "10.3")
_FLASHMLA: Final = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
_K = SparseKernel

SPARSE_KERNELS: Final = (
    SparseKernelRule(
        kernel=_K.TRITON_SPARSE,
        reads=STORED_FORMATS,
        query_dtypes=(DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32),
        modules=("triton",),
        variants=(KernelVariant(capabilities=None),),
    ),
    SparseKernelRule(
        kernel=_K.FLASHMLA_SPARSE,
        reads=(_BF16,),
        prefill_converts=(_RAW, _SCALED),
        dense_pages=True,
        modules=_FLASHMLA,
        variants=(
            KernelVariant(capabilities=SM90, head_counts=(64, 128), topk_multiple=128),
            KernelVariant(capabilities=SM100, head_counts=(128,), topk_multiple=128),
        ),
        instead=(_K.FLASHMLA_KV,),
    ),
    SparseKernelRule(
        kernel=_K.FLASHMLA_KV,
        reads=(_SCALED,),
        prefill_converts=(_BF16, _RAW),
        decode_converts=(_BF16, _RAW),
        block_sizes=(64,),
        modules=_FLASHMLA,
        variants=(
            KernelVariant(capabilities=SM90, head_counts=(64, 128), topk_multiple=64),
            KernelVariant(
                capabilities=SM100, head_counts=(64, 128), topk_multiple=64, rounds_scales=True
            ),
        ),
        instead=(_K.FLASHMLA_SPARSE,),
    ),
    SparseKernelRule(
        kernel=_K.TRTLLM,
        reads=(_BF16, _RAW),
        fp8_query=True,
        dense_pages=True,
        skips_minus_one=False,
        block_sizes=(64,),
        modules=("flashinfer",),
        variants=(
            # The heads fill at most half of trtllm-gen's tile, or all of it.
            KernelVariant(capabilities=SM100, head_counts=(*range(1, 65), 128), topk_multiple=4),
        ),
        instead=(_K.FLASHINFER_MLA, _K.FLASHMLA_KV, _K.FLASHMLA_SPARSE),
    ),
    SparseKernelRule(
        kernel=_K.FLASHINFER_MLA,
        reads=(_RAW,),
        dense_pages=True,
        skips_minus_one=False,
        modules=("flashinfer",),
        variants=(KernelVariant(capabilities=SM90, head_counts=(1, 2, 4, 8, 16, 32, 64, 128)),),
        instead=(_K.TRTLLM, _K.FLASHMLA_KV, _K.FLASHMLA_SPARSE),
    ),
    SparseKernelRule(
        kernel=_K.FA3,
        reads=(_BF16,),
        dense_pages=True,
        skips_minus_one=False,
        modules=("flash_attn_interface", "vllm.vllm_flash_attn._vllm_fa3_C"),
        variants=(KernelVariant(capabilities=SM90),),
        instead=(_K.FLASHMLA_SPARSE, _K.FLASHMLA_KV),
    ),
)
"""The records of all kernels; ``flashmla_auto`` has none, as it stands for two kernels."""

AUTO_KERNELS: Final = (_K.FLASHMLA_SPARSE, _K.FLASHMLA_KV)
"""The two kernels that ``flashmla_auto`` stands for."""
MOST_HEADS: Final = 128
"""Most query heads of a layer on one rank."""


def rule_of(kernel: SparseKernel) -> SparseKernelRule:
    """The record of a kernel.

    Raises:
        ValueError: ``flashmla_auto``, which is no kernel of its own.
    """
    for rule in SPARSE_KERNELS:
        if rule.kernel is kernel:
            return rule
    names = " or ".join(one.value for one in AUTO_KERNELS)
    raise ValueError(f"{kernel.value} is no kernel of its own: it stands for {names}")
