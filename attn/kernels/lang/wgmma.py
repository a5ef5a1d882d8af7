"""Online softmax around products by warp group (wgmma), whose results are the output's sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def base_of(m):
    """The exponent that weights are relative to: the row's maximum ``m``, or 0 where the row has
    seen no key and its maximum is -inf.
    """
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def scaled_rows(o, by):
    """Output ``o [rows, columns]`` times one factor for each row, ``by [rows]``."""
    return o * gl.convert_layout(by, gl.SliceLayout(1, o.type.layout))[:, None]
