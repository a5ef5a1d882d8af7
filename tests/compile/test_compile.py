"""Kernels compiled for GPUs that are not there: they fit, do not spill, copy asynchronously.

The full matrix, by several versions of Triton, is ``make test-compile``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from specs.dtypes import DType
from tests.compile.compile_matrix import (
    PROCESSES,
    ByTarget,
    Facts,
    facts_of,
    idle_barriers,
    limit_of,
    misses_of,
    packed_additions,
    read_log,
    side_by_side,
    table_of,
)
from tests.compile.variants import MLA_VARIANTS, TARGETS, VARIANTS, Kernel, Layer, Variant

MOST_COMPILES: Final = 56
EVERY: Final = (*VARIANTS, *MLA_VARIANTS)
TESTED: Final = [(variant, target) for variant in EVERY for target in variant.tested]
LOG: Final = """\
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    32 bytes stack frame, 60 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 32 bytes cumulative stack size
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ByTarget:
    """Facts of the variants that ``make test`` compiles."""

    def compiled_for(targets: Sequence[int], cache: Path) -> ByTarget:
        of = ["triton_attn", "triton_mla"]
        return facts_of(targets, tested_only=True, cache=cache, of=of)

    return side_by_side(compiled_for, tmp_path_factory.mktemp("triton"))


def test_variants_are_named_and_few_enough_for_every_run() -> None:
    assert len({variant.name for variant in EVERY}) == len(EVERY)
    assert len(TESTED) <= MOST_COMPILES
    assert {target for _, target in TESTED} == set(TARGETS)
    # Hopper kernels are compiled by tests of their own.
    kernels = {kernel for kernel in Kernel if not kernel.is_of_hopper}
    assert {variant.kernel for variant, _ in TESTED} == kernels
    assert sorted(target for targets in PROCESSES for target in targets) == sorted(TARGETS)


def test_every_shape_of_the_speed_table_is_compiled_for_hopper() -> None:
    assert [
        variant.name for variant in VARIANTS if variant.speed and 90 not in variant.tested
    ] == []


@pytest.mark.parametrize(
    ("variant", "target"),
    [pytest.param(*one, id=f"{one[0].name}-sm_{one[1]}") for one in TESTED],
)
def test_a_variant_compiles_and_keeps_what_it_must(
    compiled: ByTarget, variant: Variant, target: int
) -> None:
    assert misses_of(variant, target, compiled[target][variant.name]) == []


def test_what_must_be_kept_is_told_from_what_need_not() -> None:
    decode = Variant(Kernel.DECODE, "", speed=True)
    prefill = Variant(Kernel.PREFILL, "")
    good = Facts(
        "", 255, shared=65536, asynchronous_copies=48, warp_group_products=24, pipeline=65536
    )
    for variant in (decode, prefill):
        for target in TARGETS:
            assert misses_of(variant, target, good) == []
    assert misses_of(decode, 90, replace(good, error="no")) == ["no"]
    assert misses_of(decode, 90, replace(good, spills=8)) == ["spills 8 bytes"]
    assert misses_of(decode, 80, replace(good, spills=8)) == []
    assert "serialized" in misses_of(decode, 90, replace(good, serialized=True))[0]
    assert misses_of(prefill, 90, replace(good, overwritten=2)) == [
        "2 writes to operands of products under way"
    ]
    assert misses_of(prefill, 90, replace(good, spills=8)) == []
    assert "exponents" in misses_of(prefill, 90, replace(good, mergeable_exponents=2))[0]
    assert misses_of(decode, 80, replace(good, asynchronous_copies=0)) == ["no asynchronous copies"]
    assert "stages need 65536" in misses_of(decode, 80, replace(good, shared=65535))[0]
    synchronous = replace(good, asynchronous_copies=0, pipeline=0)
    assert misses_of(Variant(Kernel.MERGE, ""), 80, synchronous) == []
    groupless = replace(good, warp_group_products=0)
    assert misses_of(prefill, 90, groupless) == ["no products by warp group"]
    for variant, target in (
        (decode, 90),
        (prefill, 100),
        (Variant(Kernel.PREFILL, "", Layer(dtype=DType.FLOAT32)), 90),
    ):
        assert misses_of(variant, target, groupless) == []


@pytest.mark.parametrize(
    ("target", "kibibytes"), [(80, 163), (86, 99), (90, 227), (100, 227), (120, 99)]
)
def test_shared_memory_has_the_limit_of_the_target(target: int, kibibytes: int) -> None:
    assert limit_of(target) == kibibytes * 1024
    variant = Variant(Kernel.DECODE, "")
    facts = Facts(shared=kibibytes * 1024, asynchronous_copies=1)
    assert misses_of(variant, target, facts) == []
    over = misses_of(variant, target, replace(facts, shared=facts.shared + 1))
    assert len(over) == 1
    assert "is the limit" in over[0]


def test_the_assembler_is_understood() -> None:
    read = {"registers": 255, "stack": 32, "spills": 96, "serialized": False}
    assert read_log(LOG) == read
    complaint = "(C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    assert read_log(complaint + LOG) == read | {"serialized": True}
    with pytest.raises(ValueError, match="stack frame"):
        read_log("")


def test_the_table_shows_misses_as_misses() -> None:
    facts = {
        variant.name: Facts("", 128, shared=65536, asynchronous_copies=1, warp_group_products=1)
        for variant in VARIANTS
    }
    facts[VARIANTS[0].name] = Facts(error="PTXASError: a | b")
    facts[VARIANTS[1].name] = Facts(
        "", 255, 8, 16, shared=65536, asynchronous_copies=1, warp_group_products=1
    )
    table = table_of({("3.9.0", 90): facts})
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert rows[0] == "| variant | 3.9.0 sm_90 |"
    assert len(rows) == 2 + len(VARIANTS)
    assert rows[2].endswith("| **PTXASError: a   b** |")
    assert rows[3].endswith("| **255 / 16 / 64** |")
    assert rows[-1].endswith("| 128 / 0 / 64 |")


def test_a_barrier_that_is_made_and_not_used_is_found() -> None:
    ttgir = """
    %idle = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared, #smem, mutable> loc(#loc1)
    %idle_2 = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable> loc(#loc2)
    %used = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable> loc(#loc3)
    %rows = ttg.local_alloc : () -> !ttg.memdesc<16x64xbf16, #shared, #smem, mutable> loc(#loc4)
    %first = ttg.memdesc_index %used[%zero] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
    %second = ttg.memdesc_index %idle_2[%zero] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>
    ttng.init_barrier %idle, 1 : !ttg.memdesc<1xi64>
    ttng.init_barrier %first, 1 : !ttg.memdesc<1xi64>
    ttng.init_barrier %second, 1 : !ttg.memdesc<1xi64>
    ttg.warp_specialize(%rows, %used) loc("%idle")
    """
    assert idle_barriers(ttgir) == ["%idle", "%idle_2"]


def test_additions_in_pairs_of_16_bits_are_found() -> None:
    ptx = """
    add.s16x2 	%r1132, %r1130, %r1131;
    add.s32 	%r1, %r2, %r3;
    cvt.rn.bf16x2.f32 	%r4, %r5, %r6;
    add.bf16x2 	%r4, %r5, %r6;
    add.u16x2 	%r2, %r1, %r1;
    """
    assert packed_additions(ptx) == 2
