"""What plain Triton kernels do with groups of arguments, see ``attn/kernels/lang/groups.py``."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, ROWS = 16, 10


class _Lines(NamedTuple):
    """Lines of a matrix, which functions add up."""

    lines_ptr: tl.tensor
    """``[ROWS, WIDTH]`` fp32."""
    bias_ptr: tl.tensor | None
    """``[WIDTH]`` fp32, added to every line; read with BIASED."""
    stride: tl.tensor
    """int32, elements from a line to the next one."""
    WIDTH: tl.constexpr
    BIASED: tl.constexpr
    DTYPE: tl.constexpr
    """Type that elements are rounded to."""
    TIMES: tl.constexpr = 2
    """int, how often a line is counted."""


class _Sums(NamedTuple):
    """Results of lines, all ``[WIDTH]`` fp32."""

    top: tl.tensor
    """Maxima."""
    total: tl.tensor
    """Sums of the first lines."""


@triton.jit
def _nothing(lines):
    """The sums of no line: a function returns a group of tensors."""
    zero = tl.zeros([lines.WIDTH], tl.float32)
    return _Sums(top=zero, total=zero)


@triton.jit
def _line(lines, row):
    """One line ``[WIDTH]``: constexprs of a group are a shape, an argument, and a condition."""
    HALF: tl.constexpr = lines.WIDTH // 2
    column = tl.arange(0, lines.WIDTH)
    line = tl.load(lines.lines_ptr + row * lines.stride + column)
    line = line.to(lines.DTYPE).to(tl.float32)
    if lines.BIASED and HALF > 1:
        line += tl.load(lines.bias_ptr + column)
    if lines.bias_ptr is None:
        line += HALF
    return line


@triton.jit
def _added(sums, lines, row, limit):
    """The sums with one more line: a branch makes one group or another."""
    line = _line(lines, row)
    top = tl.maximum(sums.top, line)
    total = sums.total
    for _ in tl.static_range(lines.TIMES):
        total += line
    added = _Sums(top, total=sums.total)
    if row < limit:
        added = _Sums(top, total)
    return added


@triton.jit
def _add_lines(lines, out_ptr, rows, limit):
    """Write the sums of ``rows`` lines: a loop carries a group."""
    sums = _nothing(lines)
    for row in tl.range(0, rows, num_stages=2):
        sums = _added(sums, lines, row, limit)
    out = out_ptr + tl.arange(0, lines.WIDTH)
    tl.store(out, sums.top)
    tl.store(out + lines.WIDTH, sums.total)


@triton.jit
def add_lines_kernel(
    lines_ptr, bias_ptr, out_ptr, stride, rows, limit, WIDTH: tl.constexpr, BIASED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Maxima and sums of lines; the group is made among the arguments of a call."""
    _add_lines(
        _Lines(
            lines_ptr=lines_ptr, bias_ptr=bias_ptr, stride=stride, WIDTH=WIDTH, BIASED=BIASED,
            DTYPE=DTYPE,
        ),
        out_ptr, rows, limit,
    )  # fmt: skip


@pytest.mark.parametrize("biased", [False, True])
def test_a_group_keeps_its_fields_through_calls(biased: bool) -> None:
    lines = torch.randn(ROWS, WIDTH, device=DEVICE)
    bias = torch.randn(WIDTH, device=DEVICE) if biased else None
    out = torch.empty(2, WIDTH, device=DEVICE)
    add_lines_kernel[(1,)](
        lines, bias, out, lines.stride(0), ROWS, 4, WIDTH=WIDTH, BIASED=biased, DTYPE=tl.float16
    )
    expected = lines.half().float() + (WIDTH // 2 if bias is None else bias)
    torch.testing.assert_close(out[0], expected.amax(0).clamp_min(0))
    torch.testing.assert_close(out[1], 2 * expected[:4].sum(0))
