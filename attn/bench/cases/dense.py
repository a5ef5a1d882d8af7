"""The tables of the benchmarks and the dense cases, as data."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from enum import StrEnum, unique
from typing import Final

from attn.bench.cases.case import (
    PEERS,
    CaseKind,
    KernelCase,
    PeerBound,
    Target,
    make_case,
    make_decode,
    make_prefill,
    mixed_lens,
    zipf_lens,
)
from attn.bench.cases.latent import (
    LATENT_VENDOR_CASES,
    MILLION,
    MLA_CASES,
    MLA_PEERS,
    SPARSE_CASES,
    SPARSE_PEERS,
)
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, PrefillKernel

HOPPER_PEERS: Final = ("fa3", "cudnn", "flashinfer", "xqa")
"""Kernels of other projects that the Hopper table compares with."""
FA4: Final = "fa4"
FA4_CASE: Final = "pre_1x8k"
"""The case that shows whether FlashAttention-4 is a peer on Hopper. Its time counts there if it can
be measured, and is not missed where it cannot."""
FA3_ONE_SPLIT: Final = "fa3_one_split"
"""FlashAttention-3 with one split of the keys, as vLLM calls it for batch invariance."""
ALL_PEERS: Final = tuple(dict.fromkeys((*PEERS, *HOPPER_PEERS, FA4, FA3_ONE_SPLIT, *MLA_PEERS)))

TILES: Final = "tiles"
"""A name that the sparse table takes in place of a peer: other tiles of our portable kernel."""

MAX_FREE_PARTITION_RATIO: Final = 1.03
"""Most time of batch-invariant decode over that of the same kernel with a free partition."""
MAX_SCRATCH_BYTES: Final = 64 << 20
"""Scratch of a builder for 256 sequences, 32 query heads, head size 128 must stay below this."""
MAX_PLAN_US: Final = 4.0
"""Most microseconds of a plan on the device, for each case and each number in ``PLAN_SIZES``."""
PLAN_SIZES: Final = (1, 32, 64, 128, 256, 512, 1024)
"""Numbers of decodes whose plans are timed with the builder of one engine."""


@unique
class BenchTable(StrEnum):
    """A table of the benchmarks: its cases, peers and targets."""

    DENSE = "dense"
    """The portable kernels, against every peer."""
    HOPPER = "hopper"
    """The kernels that ``auto`` takes, against the fastest kernels for Hopper."""
    MLA = "mla"
    """Absorbed decode over a latent cache, called as an engine calls it, against peers."""
    INVARIANCE = "invariance"
    """The kernels that ``auto`` takes with batch invariance, against the same without."""
    FLASHINFER = "flashinfer"
    """Time that our backends over FlashInfer's dense kernels add to FlashInfer's own calls."""
    TRTLLM_MLA = "trtllm_mla"
    """Time that our backends over FlashInfer's latent kernels add to FlashInfer's own calls, and
    rotation, quantisation to e4m3 and cache write in one launch."""
    SPARSE_MLA = "sparse_mla"
    """Latent attention over lists against peers; the conversion of a cache, the indexer."""

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the peers that the table compares with."""
        named: dict[BenchTable, tuple[str, ...]] = {
            BenchTable.HOPPER: (*HOPPER_PEERS, FA4),
            BenchTable.INVARIANCE: ("fa3", FA3_ONE_SPLIT),
            BenchTable.MLA: MLA_PEERS,
            BenchTable.FLASHINFER: (),
            BenchTable.TRTLLM_MLA: (),
            BenchTable.SPARSE_MLA: SPARSE_PEERS,
        }
        return named.get(self, PEERS)

    @property
    def has_lines(self) -> bool:
        """True for a table of lines, each a pair of times, in place of kernels and peers."""
        return self in (BenchTable.FLASHINFER, BenchTable.TRTLLM_MLA)

    @property
    def is_latent(self) -> bool:
        """True where latent layers are measured, of which each call allocates its output."""
        return self in (BenchTable.MLA, BenchTable.TRTLLM_MLA, BenchTable.SPARSE_MLA)

    @property
    def takes_hopper(self) -> bool:
        """True where our kernels are those that ``auto`` takes, and not the portable ones."""
        return self not in (BenchTable.DENSE, BenchTable.FLASHINFER, BenchTable.TRTLLM_MLA)

    @property
    def bounds_plans(self) -> bool:
        """True where plans of ``PLAN_SIZES`` decodes are timed and judged."""
        return self is BenchTable.HOPPER

    @property
    def backend(self) -> str:
        """Our backend in this table, unless another is named."""
        named = {
            BenchTable.MLA: "TRITON_MLA",
            BenchTable.FLASHINFER: "FLASHINFER",
            BenchTable.TRTLLM_MLA: "FLASHINFER_MLA",
            BenchTable.SPARSE_MLA: "SPARSE_MLA",
        }
        return named.get(self, "TRITON_ATTN")

    @property
    def also(self) -> tuple[str, ...]:
        """Further backends of ours in this table, unless one is named."""
        named = {BenchTable.FLASHINFER: "TRTLLM_MHA", BenchTable.TRTLLM_MLA: "TRTLLM_MLA"}
        return (named[self],) if self in named else ()

    @property
    def prefill_kernel(self) -> PrefillKernel:
        """Our kernel that this table measures for requests with many new tokens."""
        return PrefillKernel.AUTO if self.takes_hopper else PrefillKernel.TRITON

    @property
    def decode_kernel(self) -> DecodeKernel:
        """Our decode kernel that this table measures, where the command line names none."""
        return DecodeKernel.AUTO if self.takes_hopper else DecodeKernel.TRITON

    @property
    def decode_option(self) -> str | None:
        """The option that names another decode kernel of ours; None where none is read."""
        named = {
            BenchTable.DENSE: "dense_decode_kernel",
            BenchTable.HOPPER: "dense_decode_kernel",
            BenchTable.INVARIANCE: "dense_decode_kernel",
            BenchTable.MLA: "latent_decode_kernel",
            BenchTable.SPARSE_MLA: "sparse_own_decode_kernel",
        }
        return named.get(self)

    @property
    def cases(self) -> tuple[KernelCase, ...]:
        """The cases, in the order of the table."""
        named = {
            BenchTable.HOPPER: HOPPER_CASES,
            BenchTable.INVARIANCE: INVARIANCE_CASES,
            BenchTable.MLA: MLA_CASES,
            BenchTable.FLASHINFER: VENDOR_CASES,
            BenchTable.TRTLLM_MLA: LATENT_VENDOR_CASES,
            BenchTable.SPARSE_MLA: SPARSE_CASES,
        }
        return named.get(self, CASES)


_GQA = (32, 8, 128)
_TP8 = (8, 1, 128)
_D64 = (64, 8, 64)
_D256 = (16, 8, 256)

CASES: Final[tuple[KernelCase, ...]] = (
    make_decode("dec_b1_8k", _GQA, [(1, 8192)], compare_free_partition=True),
    make_decode("dec_b1_128k", _GQA, [(1, 131072)]),
    make_decode("dec_b8_8k", _GQA, [(8, 8192)]),
    make_decode("dec_b32_4k", _GQA, [(32, 4096)], compare_free_partition=True),
    make_decode("dec_b128_2k", _GQA, [(128, 2048)]),
    make_decode("dec_b128_8k", _GQA, [(128, 8192)], min_rate=4100, compare_free_partition=True),
    make_decode("dec_b256_1k", _GQA, [(256, 1024)]),
    make_decode(
        "dec_b64_zipf",
        _GQA,
        [(1, length) for length in zipf_lens(64, 128, 32768)],
        min_rate=3600,
        compare_free_partition=True,
    ),
    make_decode("dec_tp8_b32_8k", _TP8, [(32, 8192)], compare_free_partition=True),
    make_decode("dec_tp8_b128_4k", _TP8, [(128, 4096)]),
    make_decode("dec_d64_b32_8k", _D64, [(32, 8192)]),
    make_decode("dec_d64_sw128_sink", _D64, [(64, 8192)], sliding_window=128, sinks=True),
    make_decode("dec_d256_b32_8k", _D256, [(32, 8192)]),
    make_decode("dec_mha_b32_4k", (32, 32, 128), [(32, 4096)]),
    make_decode(
        "dec_fp8_b128_8k",
        _GQA,
        [(128, 8192)],
        min_rate=3300,
        kv_cache_dtype=CacheDType.FP8_E4M3,
    ),
    make_decode("spec4_b32_8k", _GQA, [(32, 8192)], drafts=3),
    make_decode("spec8_b8_32k", _GQA, [(8, 32768)], drafts=7),
    make_prefill("pre_1x8k", _GQA, (1, 8192, 8192), min_rate=375, compare_batch_invariant=True),
    make_prefill("pre_16x1k", _GQA, (16, 1024, 1024)),
    make_prefill("pre_4x4k", _GQA, (4, 4096, 4096)),
    make_prefill("pre_1x32k", _GQA, (1, 32768, 32768)),
    make_prefill("chunk_2k_of_16k", _GQA, (1, 2048, 16384), compare_batch_invariant=True),
    make_prefill("pre_d64_1x8k", _D64, (1, 8192, 8192), min_rate=330),
    make_prefill("pre_d256_1x8k", _D256, (1, 8192, 8192), min_rate=360),
    make_prefill("pre_sw1k_1x16k", _GQA, (1, 16384, 16384), min_rate=280, sliding_window=1024),
    make_case(
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
    # The host's cost is judged on this case alone: it is one launch, whatever the lengths.
    host = HOST_TARGET_US if case.name == "pre_1x8k" else None
    against = ("fa3",) if case.name in _FA3_ALONE else HOPPER_PEERS
    target = Target(max_ratio_to_best=1.0, against=against, max_host_us=host)
    return case.replace(target=target, compare_free_partition=False, compare_batch_invariant=False)


def _fp8_twin(name: str, of: str) -> KernelCase:
    """The case ``of`` over an fp8 cache, with the target to be no slower than ``of``."""
    (twin,) = (case for case in CASES if case.name == of)
    target = Target(no_slower_than=of)
    changes = {"name": name, "target": target, "kv_cache_dtype": CacheDType.FP8_E4M3}
    return twin.replace(**changes, compare_batch_invariant=False)


HOST_TARGET_US: Final = 20.0
"""Microseconds that the host may spend in one eager forward of a dense layer."""
_OTHER_SHAPES: Final = (
    *(
        make_decode(f"dec_p{size}_b32_4k", _GQA, [(32, 4096)], block_size=size)
        for size in (32, 64, 128)
    ),
    make_decode("dec_h12_b32_4k", (12, 2, 128), [(32, 4096)]),
    make_decode("dec_h24_b32_4k", (24, 8, 128), [(32, 4096)]),
    make_decode("dec_h96_b32_4k", (96, 8, 128), [(32, 4096)]),
    make_decode("spec4_b128_2k", _GQA, [(128, 2048)], drafts=3),
    make_decode("spec8_b32_4k", _GQA, [(32, 4096)], drafts=7),
    make_decode("dec_d192_b32_8k", (8, 1, 192), [(32, 8192)]),
    make_prefill("pre_d80_1x8k", (32, 8, 80), (1, 8192, 8192)),
    make_decode("dec_b1_1m", _GQA, [(1, MILLION)]),
)
"""Shapes that users run besides: other sizes of pages, numbers of heads and head sizes, drafts of 3
and of 7 tokens, a million tokens."""
_FA3_ALONE: Final = ("dec_d192_b32_8k", "pre_d80_1x8k")
"""Cases of head sizes for which FlashAttention-3 alone must be measured."""
HOPPER_CASES: Final[tuple[KernelCase, ...]] = (
    *(_for_hopper(case) for case in CASES),
    *(
        _for_hopper(
            make_case(f"rag{count}_d{heads[2]}", CaseKind.MIXED, heads, mixed_lens(count, 4000))
        )
        for heads in (_GQA, _D64)
        for count in (6, 48)
    ),
    *(_for_hopper(case) for case in _OTHER_SHAPES),
    _fp8_twin("pre_fp8_1x8k", "pre_1x8k"),
    _fp8_twin("chunk_fp8_2k_of_16k", "chunk_2k_of_16k"),
)
"""The cases of the Hopper table: the dense ones, ragged batches, other shapes, fp8 caches."""


def _invariant(name: str) -> KernelCase:
    """A case of the Hopper table, also timed with batch invariance, which has a bound."""
    (case,) = (case for case in HOPPER_CASES if case.name == name)
    bound = 1.05
    if not case.is_bandwidth_bound:
        bound = 1.3 if case.head_size <= 128 else 1.6
    return case.replace(target=Target(max_invariant_ratio=bound), compare_batch_invariant=True)


INVARIANCE_CASES: Final = tuple(
    _invariant(name)
    for name in (
        *("dec_b1_8k", "dec_b32_4k", "dec_b128_8k", "dec_b64_zipf", "dec_tp8_b32_8k"),
        *("dec_d64_b32_8k", "dec_d256_b32_8k", "dec_fp8_b128_8k", "spec4_b32_8k", "spec8_b8_32k"),
        *("pre_1x8k", "pre_16x1k", "chunk_2k_of_16k", "pre_d64_1x8k", "pre_d256_1x8k"),
        *("pre_sw1k_1x16k", "mix_64dec8k_2kpre"),
    )
)
"""The cases of the table of batch invariance."""

VENDOR_CASES: Final = (
    *(
        case.replace(target=Target(), compare_free_partition=False)
        for case in CASES
        if case.name in ("dec_b1_8k", "dec_b128_8k", "dec_b32_4k")
    ),
    make_decode("dec_b256_4k", _GQA, [(256, 4096)]).replace(target=Target()),
)
"""The cases of the table of backends over FlashInfer; see
:mod:`attn.bench.results.tables.flashinfer`."""

SCRATCH_CASE: Final = make_case("scratch", CaseKind.DECODE, _GQA, [(256, 1, 128)])
"""The shape whose scratch is bounded by ``MAX_SCRATCH_BYTES``; the lengths do not matter."""


def select_cases(
    patterns: Sequence[str], cases: Sequence[KernelCase] = CASES
) -> tuple[KernelCase, ...]:
    """The cases whose names match a pattern, in their order; no pattern means all.

    Args:
        patterns: shell patterns such as ``dec_*``.
        cases: cases to choose from.

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
