"""States of a row whose list lies in two programs' shares: stored by who comes first, folded and
written by who comes last.

Both are equal in that: each product is rounded before they are added, so that bits do not depend on
who was last. Nobody waits. Either warp group does this by itself, for its columns of the output.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.wgmma import base_of
from attn.kernels.sparse.hopper_wide.parts import BLOCK, HALF

# Products with a rounding of their own are not contracted.
_WEIGHTED = tl.constexpr(
    "{ .reg .f32 a, b; mul.rn.f32 a, $1, $3; mul.rn.f32 b, $2, $4; add.rn.f32 $0, a, b; }"
)
# The same of two neighbouring cells, whose others lie in memory: as they come, so that not all are
# in registers. Another multiprocessor stored them.
_WEIGHTED_PAIR = tl.constexpr(
    "{ .reg .f32 a, b, x, y; ld.global.cg.v2.f32 {x, y}, [$4];"
    " mul.rn.f32 a, $2, $6; mul.rn.f32 b, x, $8; add.rn.f32 $0, a, b;"
    " mul.rn.f32 a, $3, $7; mul.rn.f32 b, y, $9; add.rn.f32 $1, a, b; }"
)


@gluon.jit
def _places(side, slot, states_ptr, sums_ptr, W: gl.constexpr, OUTPUT: gl.constexpr):
    """Where a warp group's maxima are, its sums, and its cells."""
    # Else places are kept in registers until others are loaded.
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, OUTPUT)) + opaque_zero()
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))
    place = (slot * 2 + side).to(gl.int64) * 2 + W
    maxima = sums_ptr + place * (2 * BLOCK) + row
    cells = states_ptr + place * (BLOCK * HALF) + row[:, None] * HALF + column[None, :]
    return maxima, maxima + BLOCK, cells


@gluon.jit
def finish_shared(slot, is_later, m, l, o, states_ptr, sums_ptr, counters_ptr, W: gl.constexpr):
    """One program's part of a row that lies in two: True and the row's state for who is to write
    it, False for who came first.

    States are ``[slots, 2, 2, 64, 256]``, of the earlier part and of the later one, each by warp
    groups; sums likewise ``[slots, 2, 2, 2, 64]``, maximum and sum; counters ``[slots, 2]`` of
    arrivals of either warp group, which are 0 before and after.

    Args:
        slot: of the place where both shares meet.
        is_later: the program has the list's end.
        m, l, o: maximum ``[64]``, sum ``[64]`` and the warp group's columns ``[64, 256]``.
    """
    OUTPUT: gl.constexpr = o.type.layout
    side = is_later.to(gl.int32)
    arrived = side * 0
    if side == 0:
        # The other one's is a share's first piece of work, this a late one: mostly it is there.
        arrived = gl.atomic_add(counters_ptr + slot * 2 + W, 0, sem="acquire", scope="gpu")
    if arrived == 0:
        maxima, sums, cells = _places(side, slot, states_ptr, sums_ptr, W, OUTPUT)
        gl.store(maxima, m)
        gl.store(sums, l)
        gl.store(cells, o)
        # All threads have stored before one of them says so.
        thread_barrier()
        arrived = gl.atomic_add(counters_ptr + slot * 2 + W, 1, sem="acq_rel", scope="gpu")
    if arrived == 1:
        gl.store(counters_ptr + slot * 2 + W, 0)
        maxima, sums, cells = _places(1 - side, slot, states_ptr, sums_ptr, W, OUTPUT)
        m_other = gl.load(maxima, cache_modifier=".cg")
        l_other = gl.load(sums, cache_modifier=".cg")
        top = gl.maximum(m, m_other)
        base = base_of(top)
        own = gl.exp2(m - base)
        others = gl.exp2(m_other - base)
        m = top
        l = gl.inline_asm_elementwise(
            _WEIGHTED, "=f,f,f,f,f", [l, l_other, own, others], dtype=gl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
        o, by_own = gl.broadcast(o, own[:, None])
        o, by_others = gl.broadcast(o, others[:, None])
        o = gl.inline_asm_elementwise(
            _WEIGHTED_PAIR, "=&f,=&f,f,f,l,l,f,f,f,f",
            [o, cells.to(gl.int64, bitcast=True), by_own, by_others], dtype=gl.float32,
            is_pure=False, pack=2,
        )  # fmt: skip
    return arrived == 1, m, l, o
