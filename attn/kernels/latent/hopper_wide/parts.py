"""The parts of work items that a program of the wide latent kernel has."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from attn.kernels.dense.hopper_decode.parts import share_at
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.latent.structures import Cut

BLOCK = tl.constexpr(64)
"""Keys of a block, and query rows of a work item; two blocks are a tile of keys."""
HALF = tl.constexpr(256)
"""Columns of the output that one warp group computes."""
BUFFERS = tl.constexpr(4)
"""Blocks whose weights have a place, over e4m3; a power of two."""


@gluon.jit
def share_with_item_at(shares_ptr, HEADS: gl.constexpr):
    """The share of :func:`share_at`, loaded together with the numbers of its first work item.

    Half of these numbers lie in another sector of 32 bytes than the share. Triton's compiler and
    ptxas load them in the loop over work items if nothing ahead of it uses them, and a second trip
    to memory follows the first.
    """
    first_row, begin, past_row, mine, fields = share_at(shares_ptr, HEADS)
    # A first position is never so small, which the compiler does not know.
    past_row = gl.where(gl.load(fields + 4) > -(2**30), past_row, 0)
    return first_row, begin, past_row, mine, fields


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
def clear_tail(rows, box, live, ring, BOXES: gl.constexpr):
    """Zero the values of a block from key ``live`` to the end of its run of RUN keys.

    No request wrote those slots, so they may hold NaN, and zero times NaN is NaN. Pages without
    live slots are zeros already. ``rows`` is the warp group's half of the values, seen as rows of
    boxes; those of the block are BOXES boxes from ``box`` on. The swizzle of a row's columns does
    not matter to zeros.
    """
    RUN: gl.constexpr = ring.RUN
    if (live > 0) & (live < BLOCK) & (live % RUN != 0):
        zeros = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        for row in range(live, (live // RUN + 1) * RUN):
            for i in gl.static_range(BOXES):
                rows.index((box + i) * BLOCK + row).store(zeros)
        # The zeros must be visible before products read them and before TMA overwrites them.
        fence_async_shared()
        thread_barrier()
