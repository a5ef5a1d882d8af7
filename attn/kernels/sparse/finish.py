"""The states of a list that lies in two programs' shares.

The program that comes first stores its state. The program that comes last folds both states and
writes the result; no program waits for the other. The fold is symmetric: each product is rounded
before both are added, so the bits do not depend on which program came last. Each warp group does
this by itself, for its columns of the output: in the wide kernel two have half of them each, in the
narrow kernel one has all.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.structures import State
from attn.kernels.lang.wgmma import base_of

_COLUMNS = tl.constexpr(512)
"""Columns of the output."""
# Assembly, so that each product is rounded by itself and not contracted to an fma.
_WEIGHTED = tl.constexpr(
    "{ .reg .f32 a, b; mul.rn.f32 a, $1, $3; mul.rn.f32 b, $2, $4; add.rn.f32 $0, a, b; }"
)
# The weighted sum for two neighbouring elements. The other program's elements are loaded as they
# are used, so that registers need not hold all of them; by ``cg``, because another multiprocessor
# stored them.
_WEIGHTED_PAIR = tl.constexpr(
    "{ .reg .f32 a, b, x, y; ld.global.cg.v2.f32 {x, y}, [$4];"
    " mul.rn.f32 a, $2, $6; mul.rn.f32 b, x, $8; add.rn.f32 $0, a, b;"
    " mul.rn.f32 a, $3, $7; mul.rn.f32 b, y, $9; add.rn.f32 $1, a, b; }"
)


@gluon.jit
def _places(side, slot, scratch, W: gl.constexpr, ROWS: gl.constexpr, OUTPUT: gl.constexpr,
            COLUMNS: gl.constexpr):  # fmt: skip
    """Pointers to the maxima, the sums and the output elements of a warp group's stored state."""
    # Hidden from the compiler, which would keep the pointers in registers for the other state's.
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUTPUT)) + opaque_zero()
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUTPUT))
    place = (slot * 2 + side).to(gl.int64) * (_COLUMNS // COLUMNS) + W
    maxima = scratch.sums_ptr + place * (2 * ROWS) + row
    cells = scratch.states_ptr + place * (ROWS * COLUMNS) + row[:, None] * COLUMNS
    return maxima, maxima + ROWS, cells + column[None, :]


@gluon.jit
def finish_shared(slot, is_later, state, scratch, W: gl.constexpr):
    """Store or fold one program's part of a list that lies in two programs.

    A tile of ROWS heads is finished by GROUPS warp groups. States are fp32
    ``[slots, 2, GROUPS, ROWS, 512 // GROUPS]``: earlier and later part of the list, then warp
    group. Sums are fp32 ``[slots, 2, GROUPS, 2, ROWS]``: part, warp group, then maxima and sums.
    Counters are ``[slots, GROUPS]``: arrivals of each warp group, 0 before and after.

    Args:
        slot: the number of the place where both shares meet.
        is_later: the program has the end of the list.
        state: maxima ``[ROWS]``, sums ``[ROWS]`` and the warp group's columns of the output
            ``[ROWS, 512 // GROUPS]``.
        scratch: the kernel's :class:`attn.kernels.sparse.structures.Scratch`.
        W: number of the warp group.

    Returns:
        True and the state of the whole list if the program came last and is to write it; False and
        a state without meaning if it came first.
    """
    m, l, o = state.m, state.l, state.acc
    OUTPUT: gl.constexpr = o.type.layout
    ROWS: gl.constexpr = o.shape[0]
    COLUMNS: gl.constexpr = o.shape[1]
    counter = scratch.counters_ptr + slot * (_COLUMNS // COLUMNS) + W
    side = is_later.to(gl.int32)
    arrived = side * 0
    if side == 0:
        # The later part is the first piece of work of its program, so mostly it is stored already.
        arrived = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    if arrived == 0:
        maxima, sums, cells = _places(side, slot, scratch, W, ROWS, OUTPUT, COLUMNS)
        gl.store(maxima, m)
        gl.store(sums, l)
        gl.store(cells, o)
        # All threads must have stored before one of them announces it.
        thread_barrier()
        arrived = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived == 1:
        gl.store(counter, 0)
        maxima, sums, cells = _places(1 - side, slot, scratch, W, ROWS, OUTPUT, COLUMNS)
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
    return arrived == 1, State(m=m, l=l, acc=o)
