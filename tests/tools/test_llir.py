"""Reading LLVM's code finds products that may be merged with the sum behind them."""

from __future__ import annotations

import pytest

from tests.tools.llir import mergeable_exponents

POWER = "  %9 = tail call float @llvm.nvvm.ex2.approx.ftz.f(float %8) #6, !dbg !319"


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["  %7 = fmul float %1, %2, !dbg !3", "  %8 = fsub float %7, %3, !dbg !4"], 1),
        (["  %7 = fmul float %1, %2, !dbg !3", "  %8 = fadd float %3, %7, !dbg !4"], 1),
        (["  %8 = call float @llvm.fma.f32(float %1, float %2, float %3), !dbg !4"], 0),
        (
            [
                "  %7 = call float @llvm.fma.f32(float %1, float %2, float 0.0), !dbg !4",
                "  %8 = fsub float %7, %3, !dbg !4",
            ],
            0,
        ),
        (["  %7 = fsub float %1, %2, !dbg !3", "  %8 = fmul float %7, %3, !dbg !4"], 0),
        (["  %6 = fmul float %1, %2, !dbg !3", "  %8 = fsub float %7, %3, !dbg !4"], 0),
    ],
)
def test_an_exponent_that_may_round_once_or_twice_is_found(lines: list[str], count: int) -> None:
    assert mergeable_exponents("\n".join([*lines, POWER])) == [POWER.strip()] * count
