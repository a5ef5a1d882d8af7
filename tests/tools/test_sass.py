"""Registers that a path never wrote or a product may still read; exponents rounded once."""

from __future__ import annotations

import pytest

from tests.tools.sass import overwritten_operands, undefined_reads

HEAD = "        /*0000*/                   UMOV UR5, 0x2 ;  /* 0x0 */\n"


def sass(*lines: str) -> str:
    return HEAD + "".join(
        f"        /*{16 * (i + 1):04x}*/    {line} ;  /* 0x0 */\n" for i, line in enumerate(lines)
    )


def test_what_only_one_way_writes_is_not_there_after_both() -> None:
    assert undefined_reads(
        sass("@P0 BRA 0x30", "UIADD3 UR4, UR5, 0x2, URZ", "UIADD3 UR6, UR4, 0x1, URZ", "EXIT")
    ) == ["UIADD3 UR6, UR4, 0x1, URZ"]


def test_what_both_ways_write_is() -> None:
    lines = ["@P0 BRA 0x40", "UMOV UR4, UR5", "BRA 0x50", "UMOV UR4, 0x1", "UMOV UR6, UR4", "EXIT"]
    assert undefined_reads(sass(*lines)) == []


def test_what_a_loop_writes_late_is_not_there_in_its_first_round() -> None:
    lines = ["UIADD3 UR6, UR4, 0x1, URZ", "UMOV UR4, UR5", "@P0 BRA 0x10", "EXIT"]
    assert undefined_reads(sass(*lines)) == ["UIADD3 UR6, UR4, 0x1, URZ"]


def test_a_copy_is_no_use_but_has_no_more_than_it_copies() -> None:
    lines = ["UMOV UR6, UR4", "UIADD3 UR7, UR6, 0x1, URZ", "EXIT"]
    assert undefined_reads(sass(*lines)) == ["UIADD3 UR7, UR6, 0x1, URZ"]
    assert undefined_reads(sass("UMOV UR6, UR4", "UMOV UR6, UR5", *lines[1:])) == []


def test_descriptors_and_wide_sums_are_pairs() -> None:
    lines = ["UIADD3.64 UR8, UR4, UR5, URZ", "LDG.E R0, desc[UR8][R2.64]", "EXIT"]
    assert undefined_reads(sass(*lines)) == ["UIADD3.64 UR8, UR4, UR5, URZ"]
    assert undefined_reads(sass("UMOV UR8, UR5", "LDG.E R0, desc[UR8][R2.64]", "EXIT")) == [
        "LDG.E R0, desc[UR8][R2.64]"
    ]


def test_a_product_with_its_left_operand_in_registers_has_one_descriptor() -> None:
    right = ["UMOV UR10, UR5", "UMOV UR11, UR5"]
    product = "HGMMA.64x64x16.F32.BF16 R88, R140, gdesc[UR8].tnspB, R88"
    assert undefined_reads(sass(*right, product, "EXIT")) == []
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT"
    assert undefined_reads(sass(*right, product, "EXIT")) == [product]


def test_partitions_begin_with_what_their_dispatch_knows() -> None:
    use = "UIADD3 UR6, UR4, 0x1, URZ"
    lines = ["BRX R2", "UMOV UR6, UR5", "EXIT", use, "EXIT"]
    assert undefined_reads(sass(*lines)) == [use]


def test_a_called_function_begins_with_what_its_callers_know() -> None:
    lines = [
        "UMOV UR4, UR5",
        "CALL.REL.NOINC 0x40",
        "EXIT",
        "UIADD3 UR6, UR4, 0x1, URZ",
        "RET.REL.NODEC R2 0x0",
    ]
    assert undefined_reads(sass(*lines)) == []
    lines[0] = "NOP"
    assert undefined_reads(sass(*lines)) == ["UIADD3 UR6, UR4, 0x1, URZ"]


def test_a_call_comes_back_with_what_the_function_writes_on_all_its_paths() -> None:
    use = "UIADD3 UR6, UR4, 0x1, URZ"
    write = "UIADD3 UR4, UR5, 0x1, URZ"
    lines = ["CALL.REL.NOINC 0x40", use, "EXIT", write, "RET.REL.NODEC R2 0x0"]
    assert undefined_reads(sass(*lines)) == []
    # A path around the write, and a call that may not happen.
    around = ["CALL.REL.NOINC 0x40", use, "EXIT", "@P0 BRA 0x60", write, "RET R2 0x0"]
    assert undefined_reads(sass(*around)) == [use]
    assert undefined_reads(sass("@P0 CALL.REL.NOINC 0x40", *lines[1:])) == [use]


# The left operand is R4 to R7.
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8].tnspB, R24, gsb0"
OTHER = "HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], RZ, !UPT, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


@pytest.mark.parametrize(
    "write",
    [
        *("FADD R7, R1, R2", "@P1 MOV R4, R2", "IMAD.WIDE R6, R1, R2, R8", "LDS.128 R4, [R1]"),
        *("LDSM.16.M88.4 R4, [R90]", "CS2R R6, SRZ", "SHFL.BFLY PT, R5, R2, 0x1, 0x1f"),
    ],
)
def test_an_operand_of_a_product_is_not_written_before_it_is_waited_for(write: str) -> None:
    assert overwritten_operands(sass(write, PRODUCT, write, WAIT, write, "EXIT")) == [write]


@pytest.mark.parametrize(
    "other",
    [
        *("FADD R8, R4, R5", "LDSM.16.M88.4 R0, [R4]", "STS [R4], R5", "LDS.64 R2, [R4]"),
        *("ISETP.GE.AND P1, PT, R4, R5, PT", "@P1 STG.E desc[UR4][R4.64], R6"),
    ],
)
def test_an_operand_of_a_product_may_be_read_and_its_neighbours_written(other: str) -> None:
    assert overwritten_operands(sass(PRODUCT, other, WAIT, "EXIT")) == []


def test_a_wait_leaves_as_many_groups_as_it_says_under_way() -> None:
    write = "FADD R4, R1, R2"
    one = WAIT.replace("0x0", "0x1")
    assert overwritten_operands(sass(PRODUCT, OTHER, one, write, WAIT, "EXIT")) == []
    assert overwritten_operands(sass(OTHER, PRODUCT, one, write, WAIT, "EXIT")) == [write]
    # Fewer than it leaves: all of them are.
    assert overwritten_operands(sass(PRODUCT, one, write, WAIT, "EXIT")) == [write]


def test_a_group_is_all_products_up_to_the_one_that_says_so() -> None:
    first = PRODUCT.removesuffix(", gsb0").replace("R4", "R12")
    wait = WAIT.replace("0x0", "0x1")
    write = "FADD R13, R1, R2"
    assert overwritten_operands(sass(first, PRODUCT, wait, write, "EXIT")) == [write]
    assert overwritten_operands(sass(first, PRODUCT, OTHER, wait, write, "EXIT")) == []


def test_a_product_is_under_way_over_a_loops_edge() -> None:
    write = "FADD R4, R1, R2"
    lines = [write, PRODUCT, "@P0 BRA 0x10", "EXIT"]
    assert overwritten_operands(sass(*lines)) == [write]
    lines = [write, PRODUCT, WAIT, "@P0 BRA 0x10", "EXIT"]
    assert overwritten_operands(sass(*lines)) == []
