"""Shapes of the speed tables of Hopper kernels are compiled and marked, so a spill is a miss."""

from __future__ import annotations

from typing import Final

import pytest

from attn.bench.cases.case import CaseKind, KernelCase
from attn.bench.cases.dense import BenchTable
from tests.compile.variants import HOPPER_VARIANTS, INVARIANT_VARIANTS, Kernel, Variant

OTHER_KERNELS: Final = ("convert_576_656", "index_b64_32k")
"""Cases of the sparse table that launch no attention."""
TABLES: Final = {
    BenchTable.HOPPER: HOPPER_VARIANTS,
    BenchTable.MLA: HOPPER_VARIANTS,
    BenchTable.SPARSE_MLA: HOPPER_VARIANTS,
    BenchTable.INVARIANCE: INVARIANT_VARIANTS,
}
DENSE: Final = {
    CaseKind.DECODE: (Kernel.HOPPER_DECODE,),
    CaseKind.VERIFY: (Kernel.HOPPER_DECODE,),
    CaseKind.PREFILL: (Kernel.HOPPER_PREFILL,),
    CaseKind.MIXED: (Kernel.HOPPER_DECODE, Kernel.HOPPER_PREFILL),
}

Shape = tuple[object, ...]


def kernels_of(table: BenchTable, case: KernelCase) -> tuple[Kernel, ...]:
    """The Hopper kernels that a case launches."""
    if table is BenchTable.SPARSE_MLA:
        return (Kernel.HOPPER_SPARSE,)
    if table is BenchTable.MLA and case.kind is not CaseKind.PREFILL:
        return (Kernel.HOPPER_MLA,)
    return DENSE[case.kind]


def shape_of_case(kernel: Kernel, case: KernelCase) -> Shape:
    """What a kernel is compiled for in a case, as far as cases differ in it."""
    drafts = max(case.query_lens) - 1 if kernel is not Kernel.HOPPER_PREFILL else 0
    if kernel is Kernel.HOPPER_SPARSE or case.kind is CaseKind.MIXED:
        drafts = 0
    return (
        *(kernel, case.num_heads // case.num_kv_heads, case.head_size, case.kv_cache_dtype),
        *(case.sliding_window is None, case.sinks, drafts, case.fp8_queries),
        case.block_size if kernel is Kernel.HOPPER_MLA else None,
    )


def shape_of_variant(variant: Variant) -> Shape:
    """The same of a compiled variant."""
    layer, kernel = variant.layer, variant.kernel
    return (
        *(kernel, layer.heads[0] // layer.heads[1], layer.heads[2], layer.cache),
        *(layer.window is None, layer.sinks, layer.drafts, layer.rounds_queries),
        layer.block_size if kernel is Kernel.HOPPER_MLA else None,
    )


MEASURED: Final = [
    pytest.param(table, case, id=f"{table}-{case.name}")
    for table in TABLES
    for case in table.cases
    if case.name not in OTHER_KERNELS
]


@pytest.mark.parametrize(("table", "case"), MEASURED)
def test_a_measured_shape_is_marked(table: BenchTable, case: KernelCase) -> None:
    for kernel in kernels_of(table, case):
        shape = shape_of_case(kernel, case)
        assert any(one.speed for one in TABLES[table] if shape_of_variant(one) == shape), shape
