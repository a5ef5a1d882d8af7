"""The dense attention cases that kernels are timed on, with their targets, as data."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from enum import StrEnum, unique
from itertools import groupby
from typing import Final, Self

import torch
from pydantic import Field, StrictBool, model_validator

from specs.base import NonNegativeInt, PositiveInt, Spec
from specs.dtypes import CacheDType, CacheDTypeField, DType
from specs.engine import DecodeKernel, PrefillKernel
from specs.rows import LatentFormat, RowFormat, latent_format_of

PEERS: Final = ("fa3", "flashinfer", "xqa", "vllm_triton")
"""Kernels of other projects that the dense table compares with."""
HOPPER_PEERS: Final = ("fa3", "cudnn", "flashinfer", "xqa")
"""Likewise of the Hopper table."""
MLA_PEERS: Final = ("flashmla", "flashinfer_mla", "vllm_triton_mla", "fa3")
"""Likewise of the table of latent attention; the last one where it is expanded."""
ALL_PEERS: Final = tuple(dict.fromkeys((*PEERS, *HOPPER_PEERS, *MLA_PEERS)))

TILES: Final = "tiles"
"""In place of a peer, of the table of sparse attention: other tiles of our own kernel."""

MODEL_DTYPE: Final = DType.BFLOAT16
"""Of query, output and an ``auto`` cache, in every case."""

MAX_FREE_PARTITION_RATIO: Final = 1.03
"""Batch-invariant decode over the same kernel with a free partition, at most."""
MAX_SCRATCH_BYTES: Final = 64 << 20
"""Of a builder for 256 sequences, 32 query heads, head size 128; must stay below."""


@unique
class BenchTable(StrEnum):
    """Which cases are measured, against whom and how they are judged."""

    DENSE = "dense"
    """Forward of the plain kernels, against every peer."""
    HOPPER = "hopper"
    """Forward, and forward with the step's plan, against the fastest kernels for Hopper."""
    MLA = "mla"
    """Absorbed decode over a latent cache, likewise."""
    FLASHINFER = "flashinfer"
    """What our backends over FlashInfer's dense kernels add to its own calls."""
    TRTLLM_MLA = "trtllm_mla"
    """Likewise of its latent kernels, and rotation, e4m3 and cache write in one launch."""
    SPARSE_MLA = "sparse_mla"
    """Latent attention over lists beside FlashMLA, a cache's conversion, the indexer."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Kernels that it compares with."""
        named: dict[BenchTable, tuple[str, ...]] = {
            BenchTable.HOPPER: HOPPER_PEERS,
            BenchTable.MLA: MLA_PEERS,
            BenchTable.FLASHINFER: (),
            BenchTable.TRTLLM_MLA: (),
            BenchTable.SPARSE_MLA: ("flashmla",),
        }
        return named.get(self, PEERS)

    @property
    def has_lines(self) -> bool:
        """It compares pairs of times, in place of kernels with peers."""
        return self in (BenchTable.FLASHINFER, BenchTable.TRTLLM_MLA, BenchTable.SPARSE_MLA)

    @property
    def times_plans(self) -> bool:
        """What each kernel needs once per step is timed too, and counted."""
        return self in (BenchTable.HOPPER, BenchTable.MLA)

    @property
    def backend(self) -> str:
        """Ours, where none is named."""
        named = {
            BenchTable.MLA: "TRITON_MLA",
            BenchTable.FLASHINFER: "FLASHINFER",
            BenchTable.TRTLLM_MLA: "FLASHINFER_MLA",
            BenchTable.SPARSE_MLA: "SPARSE_MLA",
        }
        return named.get(self, "TRITON_ATTN")

    @property
    def also(self) -> tuple[str, ...]:
        """Further ones of ours, where none is named."""
        named = {BenchTable.FLASHINFER: "TRTLLM_MHA", BenchTable.TRTLLM_MLA: "TRTLLM_MLA"}
        return (named[self],) if self in named else ()

    @property
    def prefill_kernel(self) -> PrefillKernel:
        """Of ours, what is measured."""
        return PrefillKernel.AUTO if self.times_plans else PrefillKernel.TRITON

    @property
    def decode_kernel(self) -> DecodeKernel:
        """Likewise."""
        return DecodeKernel.AUTO if self.times_plans else DecodeKernel.TRITON

    @property
    def cases(self) -> tuple[KernelCase, ...]:
        """In the order of the table."""
        named = {
            BenchTable.HOPPER: HOPPER_CASES,
            BenchTable.MLA: MLA_CASES,
            BenchTable.FLASHINFER: VENDOR_CASES,
            BenchTable.TRTLLM_MLA: LATENT_VENDOR_CASES,
            BenchTable.SPARSE_MLA: SPARSE_CASES,
        }
        return named.get(self, CASES)


@unique
class CaseKind(StrEnum):
    """What a step does; decides the metric."""

    DECODE = "decode"
    VERIFY = "verify"
    """Several new tokens per request, all of them drafts to be verified but the first."""
    PREFILL = "prefill"
    MIXED = "mixed"
    """Decodes first, then extends."""


class PeerBound(Spec):
    """A bound on our time as a multiple of one peer's."""

    peer: str
    max_ratio: float = Field(gt=0)


class Target(Spec):
    """What a case has to reach; all of it, and an empty one asks for nothing."""

    max_ratio_to_best: float | None = Field(default=None, gt=0)
    """Our time over the best of ``against``."""
    max_planned_ratio_to_best: float | None = Field(default=None, gt=0)
    """Likewise with what each does once per step before its first layer: plans, schedules."""
    against: tuple[str, ...] = PEERS
    """Peers each of which the best is known only after."""
    no_slower_than: str | None = None
    """A case of the same run whose time of ours is the most that ours may take."""
    min_speedup: float = Field(default=1.0, gt=0)
    """That time over ours, at least."""
    max_host_us: float | None = Field(default=None, gt=0)
    """Microseconds that one forward may take on the host."""
    faster_than: tuple[str, ...] = ()
    """Peers whose time must be above ours."""
    max_ratios: tuple[PeerBound, ...] = ()
    min_rate: float | None = Field(default=None, gt=0)
    """In the case's own unit, GB/s or TFLOP/s."""
    min_plain_rate: float | None = Field(default=None, gt=0)
    """Likewise, of our kernel in plain Triton."""


class KernelCase(Spec):
    """One step of one layer. R requests; lengths in tokens."""

    name: str
    kind: CaseKind
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_size: PositiveInt
    rope_size: NonNegativeInt = 0
    """Rotary part of a latent row, which is the key of all heads and, without it, their value, or
    of each head's key, where rows are expanded; 0 for keys and values of one size."""
    query_lens: tuple[PositiveInt, ...] = Field(min_length=1)
    """``[R]`` new tokens."""
    seq_lens: tuple[PositiveInt, ...] = Field(min_length=1)
    """``[R]`` KV lengths, the new tokens included."""
    block_size: PositiveInt = 16
    kv_cache_dtype: CacheDTypeField = CacheDType.AUTO
    sliding_window: PositiveInt | None = None
    """Visible keys, the token itself included."""
    topk: NonNegativeInt = 0
    """Keys that each new token lists; 0 is all that it sees."""
    sinks: StrictBool = False
    """One sink logit per query head in the softmax denominator."""
    num_speculative_tokens: NonNegativeInt = 0
    """k drafts per request; a verify query has 1 + k tokens."""
    target: Target = Target()
    compare_free_partition: StrictBool = False
    """Also time the kernel with a partition of the keys that looks at the whole batch."""
    compare_batch_invariant: StrictBool = False
    """Also time ``EngineConfig.batch_invariant=True``."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        """One query and one KV length per request, of the lengths that the kind allows."""
        if len(self.query_lens) != len(self.seq_lens):
            raise ValueError(
                f"query_lens and seq_lens must have one entry per request, got "
                f"{len(self.query_lens)} and {len(self.seq_lens)}"
            )
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            if query_len > seq_len:
                raise ValueError(f"query_lens must be at most seq_lens, got {query_len}, {seq_len}")
        expected = {CaseKind.DECODE: 1, CaseKind.VERIFY: 1 + self.num_speculative_tokens}
        length = expected.get(self.kind)
        if length is not None and set(self.query_lens) != {length}:
            raise ValueError(
                f"query_lens of a {self.kind.value} must be {length}, got {set(self.query_lens)}"
            )
        return self

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """T, new tokens of the step."""
        return sum(self.query_lens)

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_size**-0.5)

    @property
    def kv_itemsize(self) -> int:
        """Bytes per cached element."""
        return self.kv_cache_dtype.storage(MODEL_DTYPE).itemsize

    @property
    def is_bandwidth_bound(self) -> bool:
        """Rated in GB/s, else in TFLOP/s."""
        return self.kind in (CaseKind.DECODE, CaseKind.VERIFY)

    @property
    def is_latent(self) -> bool:
        """Absorbed attention over a latent cache."""
        return self.rope_size > 0 and self.num_kv_heads == 1

    @property
    def is_expanded(self) -> bool:
        """Latent attention over keys and values of every head, which lie as the queries do."""
        return self.rope_size > 0 and self.num_kv_heads > 1

    @property
    def head_size_v(self) -> int:
        """Of values and output."""
        return self.head_size - self.rope_size

    @property
    def latent_format(self) -> LatentFormat:
        """Of a latent cache's rows."""
        return latent_format_of(self.kv_cache_dtype)

    @property
    def latent_row(self) -> RowFormat:
        """Likewise."""
        return self.latent_format.row(self.head_size_v, self.rope_size, MODEL_DTYPE)

    @property
    def unit(self) -> str:
        """Of :meth:`rate`; many heads over one latent row are bound by their products."""
        is_computed = self.is_latent and self.num_heads * max(self.query_lens) >= 64
        return "GB/s" if self.is_bandwidth_bound and not is_computed else "TF"

    @property
    def nbytes(self) -> int:
        """Each live key and value once (what some new token sees), plus query and output; of lists
        the rows that they name, for each token anew.
        """
        if self.topk:
            return self.num_tokens * self.topk * self.latent_row.nbytes
        live = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            seen = seq_len if self.sliding_window is None else self.sliding_window + query_len - 1
            live += min(seq_len, seen)
        # A latent row is read once for both.
        sides = self.head_size + (0 if self.is_latent else self.head_size_v)
        cached = live * self.num_kv_heads * sides * self.kv_itemsize
        rows = self.num_tokens * self.num_heads * (self.head_size + self.head_size_v)
        return cached + rows * MODEL_DTYPE.itemsize

    @property
    def flops(self) -> int:
        """2 * (head size + that of values) per query head and visible (query, key) pair."""
        pairs = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            if self.topk:
                pairs += query_len * self.topk
            else:
                pairs += _visible_pairs(query_len, seq_len, self.sliding_window)
        return 2 * (self.head_size + self.head_size_v) * self.num_heads * pairs

    def rate(self, time_us: float) -> float:
        """In the case's unit, at ``time_us`` microseconds."""
        if self.unit == "GB/s":
            return self.nbytes / time_us * 1e-3
        return self.flops / time_us * 1e-6

    @property
    def what(self) -> str:
        """Shape in a few words: kind, heads / KV heads / head size, requests."""
        parts = []
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        groups = [(lens, len(list(same))) for lens, same in groupby(pairs)]
        if len(groups) > 3:
            parts.append(f"{self.num_reqs} ragged of {min(self.seq_lens)}..{max(self.seq_lens)}")
            groups = []
        for (query_len, seq_len), count in groups:
            new = f"{query_len} of " if 1 < query_len < seq_len else ""
            parts.append(f"{count} x {new}{seq_len}")
        if len(set(self.query_lens)) > 3:
            parts.append(f"{min(self.query_lens)}..{max(self.query_lens)} new")
        if self.sliding_window is not None:
            parts.append(f"window {self.sliding_window}")
        if self.topk:
            parts.append(f"top-k {self.topk}")
        if self.sinks:
            parts.append("sinks")
        if self.kv_cache_dtype.is_quantized:
            parts.append(f"{self.kv_cache_dtype.value} KV")
        heads = f"{self.num_heads}/{self.num_kv_heads}/{self.head_size}"
        return f"{self.kind.value} {heads}, {', '.join(parts)}"


def _visible_pairs(query_len: int, seq_len: int, window: int | None) -> int:
    """Pairs (new token, key it sees) of one request under a causal mask."""
    context = seq_len - query_len
    full = query_len * context + query_len * (query_len + 1) // 2
    if window is None:
        return full
    hidden = range(max(context, window), seq_len)
    return full - sum(position + 1 - window for position in hidden)


def _zipf_lens(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """``count`` lengths, log-uniform from ``shortest`` to ``longest``, always the same ones."""
    draws = torch.rand(count, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(int(shortest * (longest / shortest) ** draw) for draw in draws)


def _mixed_lens(count: int, most_new: int) -> list[tuple[int, int, int]]:
    """``count`` requests of 1 to ``most_new`` new tokens, log-uniform; half have a context.

    Drawn from equal parts of the range, one each, so that few requests span it too. Always the same
    ones, as (1, new, KV length); contexts have 64 to 8191 tokens, log-uniform.
    """
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)
    has_context = torch.randperm(count, generator=generator) < count // 2
    contexts = torch.rand(count, generator=generator)
    requests = []
    for place, is_extend, context in zip(
        (places / count).tolist(), has_context.tolist(), contexts.tolist(), strict=True
    ):
        query_len = int((most_new + 1) ** place)
        requests.append((1, query_len, query_len + is_extend * int(64 * 128**context)))
    return requests


def _case(
    name: str,
    kind: CaseKind,
    heads: tuple[int, int, int],
    requests: Sequence[tuple[int, int, int]],
    **fields: object,
) -> KernelCase:
    """``heads`` is (query heads, KV heads, head size), ``requests`` (count, new, KV length)."""
    query_lens = [new for count, new, _ in requests for _ in range(count)]
    seq_lens = [length for count, _, length in requests for _ in range(count)]
    values = {
        "name": name,
        "kind": kind,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_size": heads[2],
        "query_lens": tuple(query_lens),
        "seq_lens": tuple(seq_lens),
        **fields,
    }
    return KernelCase.model_validate(values)


def _decode(
    name: str,
    heads: tuple[int, int, int],
    requests: Sequence[tuple[int, int]],
    min_rate: float | None = None,
    drafts: int = 0,
    **fields: object,
) -> KernelCase:
    """A decode, or a verify of ``drafts``; ``requests`` is (count, KV length)."""
    return _case(
        name,
        CaseKind.VERIFY if drafts else CaseKind.DECODE,
        heads,
        [(count, 1 + drafts, length) for count, length in requests],
        num_speculative_tokens=drafts,
        target=Target(max_ratio_to_best=1.10, faster_than=("vllm_triton",), min_rate=min_rate),
        **fields,
    )


def _prefill(
    name: str,
    heads: tuple[int, int, int],
    requests: tuple[int, int, int],
    min_rate: float | None = None,
    **fields: object,
) -> KernelCase:
    """``requests`` is (count, new, KV length)."""
    target = Target(min_rate=min_rate)
    return _case(name, CaseKind.PREFILL, heads, [requests], target=target, **fields)


_GQA = (32, 8, 128)
_TP8 = (8, 1, 128)
_D64 = (64, 8, 64)
_D256 = (16, 8, 256)

CASES: Final[tuple[KernelCase, ...]] = (
    _decode("dec_b1_8k", _GQA, [(1, 8192)], compare_free_partition=True),
    _decode("dec_b1_128k", _GQA, [(1, 131072)]),
    _decode("dec_b8_8k", _GQA, [(8, 8192)]),
    _decode("dec_b32_4k", _GQA, [(32, 4096)], compare_free_partition=True),
    _decode("dec_b128_2k", _GQA, [(128, 2048)]),
    _decode("dec_b128_8k", _GQA, [(128, 8192)], min_rate=4100, compare_free_partition=True),
    _decode("dec_b256_1k", _GQA, [(256, 1024)]),
    _decode(
        "dec_b64_zipf",
        _GQA,
        [(1, length) for length in _zipf_lens(64, 128, 32768)],
        min_rate=3600,
        compare_free_partition=True,
    ),
    _decode("dec_tp8_b32_8k", _TP8, [(32, 8192)], compare_free_partition=True),
    _decode("dec_tp8_b128_4k", _TP8, [(128, 4096)]),
    _decode("dec_d64_b32_8k", _D64, [(32, 8192)]),
    _decode("dec_d64_sw128_sink", _D64, [(64, 8192)], sliding_window=128, sinks=True),
    _decode("dec_d256_b32_8k", _D256, [(32, 8192)]),
    _decode("dec_mha_b32_4k", (32, 32, 128), [(32, 4096)]),
    _decode(
        "dec_fp8_b128_8k",
        _GQA,
        [(128, 8192)],
        min_rate=3300,
        kv_cache_dtype=CacheDType.FP8_E4M3,
    ),
    _decode("spec4_b32_8k", _GQA, [(32, 8192)], drafts=3),
    _decode("spec8_b8_32k", _GQA, [(8, 32768)], drafts=7),
    _prefill("pre_1x8k", _GQA, (1, 8192, 8192), min_rate=375, compare_batch_invariant=True),
    _prefill("pre_16x1k", _GQA, (16, 1024, 1024)),
    _prefill("pre_4x4k", _GQA, (4, 4096, 4096)),
    _prefill("pre_1x32k", _GQA, (1, 32768, 32768)),
    _prefill("chunk_2k_of_16k", _GQA, (1, 2048, 16384), compare_batch_invariant=True),
    _prefill("pre_d64_1x8k", _D64, (1, 8192, 8192), min_rate=330),
    _prefill("pre_d256_1x8k", _D256, (1, 8192, 8192), min_rate=360),
    _prefill("pre_sw1k_1x16k", _GQA, (1, 16384, 16384), min_rate=280, sliding_window=1024),
    _case(
        "mix_64dec8k_2kpre",
        CaseKind.MIXED,
        _GQA,
        [(64, 1, 8192), (1, 2048, 10240)],
        target=Target(max_ratios=(PeerBound(peer="fa3", max_ratio=1.25),)),
    ),
)
"""The dense cases, in the order of the published table."""


def _for_hopper(case: KernelCase) -> KernelCase:
    """A case with the Hopper table's target, and without the dense table's variants."""
    if case.is_bandwidth_bound:
        target = Target(max_planned_ratio_to_best=1.0, against=HOPPER_PEERS)
    else:
        # The row whose host cost is judged: one launch, whatever the lengths.
        host = HOST_TARGET_US if case.name == "pre_1x8k" else None
        target = Target(max_ratio_to_best=1.0, against=HOPPER_PEERS, max_host_us=host)
    return case.replace(target=target, compare_free_partition=False, compare_batch_invariant=False)


def _fp8_twin(name: str, of: str) -> KernelCase:
    """A case of the table over an fp8 cache, which is to be no slower."""
    (twin,) = (case for case in CASES if case.name == of)
    target = Target(no_slower_than=of)
    changes = {"name": name, "target": target, "kv_cache_dtype": CacheDType.FP8_E4M3}
    return twin.replace(**changes, compare_batch_invariant=False)


def _latent(
    name: str,
    heads: int,
    *requests: tuple[int, int],
    drafts: int = 0,
    target: Target | None = None,
    min_plain_rate: float | None = None,
    **fields: object,
) -> KernelCase:
    """Absorbed decode or verify, rows of 512 + 64; ``requests`` are (count, KV length)."""
    judged = Target(
        max_planned_ratio_to_best=1.0, against=MLA_PEERS[:-1], min_plain_rate=min_plain_rate
    )
    case = _decode(name, (heads, 1, 576), requests, drafts=drafts, rope_size=64, block_size=64)
    return case.replace(target=target or judged, **fields)


_FP8_LATENT: Final = Target(no_slower_than="mla_h16_b128_4k", min_speedup=1.6)
_RAGGED: Final = [(1, length) for length in _zipf_lens(64, 128, 32768)]
MLA_CASES: Final[tuple[KernelCase, ...]] = (
    _latent("mla_h128_b1_8k", 128, (1, 8192)),
    _latent("mla_h128_b32_4k", 128, (32, 4096)),
    _latent("mla_h128_b128_4k", 128, (128, 4096), min_plain_rate=250),
    _latent("mla_h16_b32_8k", 16, (32, 8192)),
    _latent("mla_h16_b128_4k", 16, (128, 4096), min_plain_rate=3200),
    _latent("mla_h128_q2_b64_4k", 128, (64, 4096), drafts=1),
    _latent("mla_h64_b64_8k", 64, (64, 8192)),
    _latent("mla_h16_b64_zipf", 16, *_RAGGED),
    _latent("mla_h128_b64_zipf", 128, *_RAGGED),
    _latent("mla_h16_q4_b64_4k", 16, (64, 4096), drafts=3),
    _latent(
        "mla_fp8_h16_b128_4k",
        16,
        (128, 4096),
        target=_FP8_LATENT,
        kv_cache_dtype=CacheDType.FP8_E4M3,
    ),
    _case(
        "ragged_mla_pre_1x8k",
        CaseKind.PREFILL,
        (128, 128, 192),
        [(1, 8192, 8192)],
        rope_size=64,
        target=Target(max_ratio_to_best=1.0, against=("fa3",), min_plain_rate=380),
    ),
)
"""The cases of the table of latent attention; pages of 64 tokens are FlashMLA's only ones."""

HOST_TARGET_US: Final = 10.0
"""Of one eager forward on the host."""
HOPPER_CASES: Final[tuple[KernelCase, ...]] = (
    *(_for_hopper(case) for case in CASES),
    *(
        _for_hopper(
            _case(f"rag{count}_d{heads[2]}", CaseKind.MIXED, heads, _mixed_lens(count, 4000))
        )
        for heads in (_GQA, _D64)
        for count in (6, 48)
    ),
    _fp8_twin("pre_fp8_1x8k", "pre_1x8k"),
    _fp8_twin("chunk_fp8_2k_of_16k", "chunk_2k_of_16k"),
)
"""The cases of the Hopper table: the dense ones, ragged batches, fp8 caches."""

VENDOR_CASES: Final = (
    *(
        case.replace(target=Target(), compare_free_partition=False)
        for case in CASES
        if case.name in ("dec_b1_8k", "dec_b128_8k", "dec_b32_4k")
    ),
    _decode("dec_b256_4k", _GQA, [(256, 4096)]).replace(target=Target()),
)
"""The cases of the table of backends over FlashInfer; see :mod:`attn.bench.vendor`."""

ROPE_CASE: Final = "mla_rope_h128_t128"
"""Rotated and written, not attended."""
LATENT_VENDOR_CASES: Final = (
    *(
        case.replace(target=Target())
        for case in MLA_CASES
        if case.name in ("mla_h128_b128_4k", "mla_h16_b128_4k", "mla_fp8_h16_b128_4k")
    ),
    _latent(ROPE_CASE, 128, (128, 64), target=Target(), kv_cache_dtype=CacheDType.FP8_E4M3),
)
"""The cases of the table of backends over FlashInfer's latent kernels; see
:mod:`attn.bench.latent_lines`."""

CONVERSION_CASE: Final = "convert_576_656"
"""A whole cache converted, not attended."""
INDEX_CASE: Final = "index_b64_32k"
"""The indexer's logits."""
SPARSE_CONTEXT: Final = 32768


def _sparse(name: str, heads: int, rows: int, cache: str, prefills: bool = False) -> KernelCase:
    """Decodes of so many requests, or one request's new tokens; lists of 2048."""
    requests = [(1, rows, SPARSE_CONTEXT)] if prefills else [(rows, 1, SPARSE_CONTEXT)]
    kind = CaseKind.PREFILL if prefills else CaseKind.DECODE
    latent = {"rope_size": 64, "block_size": 64, "topk": 2048, "kv_cache_dtype": cache}
    return _case(name, kind, (heads, 1, 576), requests, **latent)


SPARSE_CASES: Final = (
    _sparse("dec_656_h128_b128", 128, 128, "fp8_ds_mla"),
    _sparse("dec_656_h64_b128", 64, 128, "fp8_ds_mla"),
    _sparse("dec_656_h16_b128", 16, 128, "fp8_ds_mla"),
    _sparse("dec_656_h8_b128", 8, 128, "fp8_ds_mla"),
    _sparse("dec_656_h16_b32", 16, 32, "fp8_ds_mla"),
    _sparse("dec_656_h16_b1", 16, 1, "fp8_ds_mla"),
    _sparse("dec_656_h128_b1", 128, 1, "fp8_ds_mla"),
    _sparse("dec_576_h16_b128", 16, 128, "fp8_e4m3"),
    _sparse("dec_bf16_h16_b128", 16, 128, "auto"),
    _sparse("dec_bf16_h16_b1", 16, 1, "auto"),
    _sparse("pre_bf16_h128_4k", 128, 4096, "auto", prefills=True),
    _sparse("pre_bf16_h16_4k", 16, 4096, "auto", prefills=True),
    _sparse("pre_656_h128_4k", 128, 4096, "fp8_ds_mla", prefills=True),
    _sparse(CONVERSION_CASE, 1, 64, "fp8_e4m3"),
    _sparse(INDEX_CASE, 64, 64, "fp8_e4m3"),
)
"""The cases of the table of sparse attention; see :mod:`attn.bench.sparse_mla`."""

SCRATCH_CASE: Final = _case("scratch", CaseKind.DECODE, _GQA, [(256, 1, 128)])
"""The shape whose scratch is bounded by ``MAX_SCRATCH_BYTES``; the lengths do not matter."""


def select_cases(
    patterns: Sequence[str], cases: Sequence[KernelCase] = CASES
) -> tuple[KernelCase, ...]:
    """The cases whose names match a pattern, in their order; no pattern means all.

    Args:
        patterns: shell patterns such as ``dec_*``.
        cases: what to choose from.

    Raises:
        ValueError: a pattern that matches no case; the message lists the names.
    """
    names = [case.name for case in cases]
    chosen = set() if patterns else set(names)
    for pattern in patterns:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ValueError(f"case must match one of {', '.join(names)}; got {pattern!r}")
        chosen.update(matching)
    return tuple(case for case in cases if case.name in chosen)
