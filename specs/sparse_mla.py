"""Top-k sparse latent attention as data: forward modes, kernels, conversions of cached rows.

Which kernel reads which rows, on which GPUs and how: the choices of a step follow from these
records alone (``builders.sparse.choice``).
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
"""Rows that sparse attention is asked to keep."""


@unique
class SparsePhase(StrEnum):
    """What a kernel is called for."""

    PREFILL = "prefill"
    """Rows of requests with many new tokens."""
    DECODE = "decode"
    """Rows of requests with one new token, or with as many as a verify has."""


@unique
class ForwardMode(StrEnum):
    """What a step computes."""

    EXTEND = "extend"
    """New tokens of prompts, behind cached ones or not."""
    DECODE = "decode"
    """One token of each request."""
    MIXED = "mixed"
    """Decodes, and prompts behind them."""
    TARGET_VERIFY = "target_verify"
    """Drafts of each request, verified at once."""
    DRAFT_EXTEND = "draft_extend"
    """A draft model's first step: the tokens that a verify accepted."""
    IDLE = "idle"
    """No rows: the step of a rank that only takes part in others' exchanges."""

    @property
    def phases(self) -> tuple[SparsePhase, ...]:
        """Whose kernels have rows, in the order of the batch."""
        if self is ForwardMode.EXTEND:
            return (SparsePhase.PREFILL,)
        if self is ForwardMode.MIXED:
            return (SparsePhase.DECODE, SparsePhase.PREFILL)
        return () if self is ForwardMode.IDLE else (SparsePhase.DECODE,)


@unique
class IndexKind(StrEnum):
    """What the entries of a row's top-k list count."""

    PAGED = "paged"
    """Physical slots of the cache, ``block * block_size + offset``."""
    RAGGED = "ragged"
    """Rows of a compact buffer with the whole context of every request, one behind another: token
    of the request plus the request's offset."""
    GATHERED = "gathered"
    """Rows of a compact buffer with one row for each entry of each list."""


@unique
class SparseKernel(StrEnum):
    """Kernels of sparse latent attention, chosen for each phase."""

    TRITON_SPARSE = "triton_sparse"
    """The library's own: every GPU, any number of heads, all rows as they are."""
    FLASHMLA_SPARSE = "flashmla_sparse"
    """FlashMLA's prefill over bf16 rows."""
    FLASHMLA_KV = "flashmla_kv"
    """FlashMLA's over block-scaled rows, decode and prefill."""
    FLASHMLA_AUTO = "flashmla_auto"
    """Of the two of FlashMLA's, the one that suits the rows and the step."""
    TRTLLM = "trtllm"
    """trtllm-gen, of FlashInfer."""
    FLASHINFER_MLA = "flashinfer_mla"
    """FlashInfer's wrapper for latent rows, with pages of one token."""
    FA3 = "fa3"
    """FlashAttention 3 with latent values, with pages of one token."""


# -- Conversions of rows.


@unique
class Exactness(StrEnum):
    """What a conversion of rows loses."""

    COPY = "copy"
    """Nothing: the same bytes."""
    SCALED = "scaled"
    """Nothing where scales are powers of two; else an element is rounded at most once."""
    QUANTIZES = "quantizes"
    """What writing such rows in the first place would have lost."""


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
"""Every conversion that there is."""

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
    """A kernel on some GPUs."""

    capabilities: ComputeCapabilityRange | None
    """None is every device."""
    head_counts: tuple[PositiveInt, ...] = ()
    """Heads that it takes, others are padded up to one; empty for any number."""
    topk_multiple: PositiveInt = 1
    """Lists are padded with -1 to a multiple of this."""
    rounds_scales: StrictBool = False
    """Reads block scales as powers of two, whatever they are."""

    def padded_heads(self, num_heads: int) -> int | None:
        """Heads that the kernel is given for a layer of ``num_heads``; None where too many."""
        if not self.head_counts:
            return num_heads
        return min((count for count in self.head_counts if count >= num_heads), default=None)


class SparseKernelRule(Spec):
    """What a kernel takes, where it runs and where it comes from."""

    kernel: SparseKernel
    reads: tuple[LatentFormat, ...]
    """Rows that it takes as they are cached."""
    prefill_converts: tuple[LatentFormat, ...] = ()
    """Rows that prefill converts for it, to the first of ``reads``."""
    decode_converts: tuple[LatentFormat, ...] = ()
    """Likewise for decodes."""
    query_dtypes: tuple[DType, ...] = (DType.BFLOAT16,)
    """Model dtypes."""
    fp8_query: StrictBool = False
    """Over 576-byte rows the query is e4m3 too."""
    dense_pages: StrictBool = False
    """Takes the cache as one array of rows: blocks without padding."""
    skips_minus_one: StrictBool = True
    """Entries of -1 are passed over wherever they stand; else a length says how many are read."""
    block_sizes: tuple[PositiveInt, ...] = ()
    """Tokens per block of the rows it reads; empty for any."""
    modules: tuple[str, ...]
    """Where it can be imported from; one is enough."""
    variants: tuple[KernelVariant, ...]
    instead: tuple[SparseKernel, ...] = ()
    """Next of kin, nearest first; the library's own comes after them."""

    @model_validator(mode="after")
    def _conversions_exist(self) -> Self:
        """What is converted for it can be converted, and is not read as it is."""
        for source in (*self.prefill_converts, *self.decode_converts):
            if source in self.reads:
                raise ValueError(f"{source.value} is read as it is by {self.kernel.value}")
            reason = conversion_reason(source, self.reads[0])
            if reason is not None:
                raise ValueError(reason)
        return self

    def converts(self, phase: SparsePhase) -> tuple[LatentFormat, ...]:
        """Rows that a phase converts for it."""
        is_prefill = phase is SparsePhase.PREFILL
        return self.prefill_converts if is_prefill else self.decode_converts

    def variant_for(self, capability: ComputeCapability | None) -> KernelVariant | None:
        """The variant of a GPU; None where it does not run. A capability of None is no GPU."""
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
            # Up to half a tile, or a whole one.
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
"""Every kernel but ``flashmla_auto``, which stands for two of them."""

AUTO_KERNELS: Final = (_K.FLASHMLA_SPARSE, _K.FLASHMLA_KV)
"""What ``flashmla_auto`` stands for."""
MOST_HEADS: Final = 128
"""Query heads of a layer on one rank."""


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
