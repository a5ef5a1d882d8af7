"""Helpers of the online softmax for kernels that add up their output by warp group (wgmma)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def base_of(m):
    """The score that a row's exponents are relative to, ``[rows]``.

    It is the row's maximum ``m``, or 0 where the row has seen no key and ``m`` is -inf.
    """
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def scaled_rows(o, by):
    """Multiply the output ``o [rows, columns]`` by one factor for each row, ``by [rows]``."""
    return o * gl.convert_layout(by, gl.SliceLayout(1, o.type.layout))[:, None]
