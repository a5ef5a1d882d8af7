"""The parts of work items that a program of the wide latent kernel has, and where states go."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.hopper_prefill.vector_store import side_by_side, store_side_by_side
from attn.kernels.latent.structures import Cut

BLOCK = tl.constexpr(64)
"""Keys of a block, and query rows of a work item; two blocks are a tile of keys."""
HALF = tl.constexpr(256)
"""Columns of the output that one warp group computes."""


@gluon.jit
def cut_at(r, mine, fields, begin):
    """Load the program's part of work item ``r``; the part begins with tile ``begin``.

    ``mine`` points to the program's share of the plan, ``fields`` to the work item's numbers.
    Returns a :class:`attn.kernels.latent.structures.Cut`.
    """
    kv_len = gl.load(fields + 3)
    first = gl.load(fields + 4)
    end = gl.where(r == gl.load(mine + 2), gl.load(mine + 3), gl.load(fields + 6))
    seen = gl.minimum(first + gl.load(fields + 2), kv_len)
    high = gl.minimum(end, (seen + 2 * BLOCK - 1) // (2 * BLOCK))
    return Cut(
        number=r, fields=fields, begin=begin, end=end, req=gl.load(fields), kv_len=kv_len,
        first=first, high=high,
    )  # fmt: skip


@gluon.jit
def store_part(
    states_ptr, sums_ptr, slot, m, l, o, zero, W: gl.constexpr, USED: gl.constexpr
):  # fmt: skip
    """Store the state of a part of a work item, for
    :func:`attn.kernels.latent.hopper_wide.fold.fold_cuts_kernel`.

    Maxima ``m`` and sums ``l`` are ``[64]`` fp32, the output ``o`` is ``[64, 256]`` fp32, of which
    USED rows are stored in slot ``slot``. Each warp group stores its columns of the output; group 0
    also stores maxima and sums. ``zero`` is 0, which the compiler does not know.

    A slot of ``states_ptr`` has ``[USED, 512]`` fp32 of room. The first half holds the output as
    fp16, each row of a warp group divided by its largest element, so that no value is too large;
    behind it are these elements, ``[2, USED]`` fp32. What a fold costs are the bytes of states.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, o.type.layout)) + zero
    mine = row < USED
    if W == 0:
        sums = sums_ptr + wide(slot) * (2 * USED)
        gl.store(sums + row, m, mask=mine)
        gl.store(sums + USED + row, l, mask=mine)
    top = gl.max(gl.maximum(o, -o), 1)
    state = states_ptr + wide(slot) * (USED * 2 * HALF)
    gl.store(state + (USED * HALF + W * USED) + row, top, mask=mine)
    by = 1.0 / gl.where(top > 0.0, top, 1.0)
    halves = side_by_side((o * by[:, None]).to(gl.float16))
    place = gl.arange(0, 64, layout=gl.SliceLayout(1, halves.type.layout)) + zero
    halves_ptr = state.to(gl.pointer_type(gl.float16), bitcast=True)
    store_side_by_side(halves, place * (2 * HALF), place < USED, W * HALF, halves_ptr)
