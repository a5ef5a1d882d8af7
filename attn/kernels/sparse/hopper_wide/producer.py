"""The producer of the wide Hopper sparse kernel: a warp group that gathers queries and listed rows.

Rows of 16 bits are copied unchanged, 16 bytes by each thread, and the copies themselves arrive at
barriers. Rows of e4m3 are converted by :mod:`attn.kernels.sparse.hopper_wide.dequantise`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.lang.compat import arrive_behind_gathers, async_gather
from attn.kernels.sparse.hopper_wide.dequantise import begin_rows, dequantise_rows
from attn.kernels.sparse.hopper_wide.parts import (
    HALF,
    UNIT,
    gaps_of,
    ids_of,
    listed,
    lists_row,
    units_at,
)
from attn.kernels.sparse.pieces import work_at, works_of


@gluon.jit
def _gather_queries(query, piece, queries, division, LAYOUT: gl.constexpr):
    """Copy the queries of a tile of heads to shared memory; zeros where there is no head."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    token, head, there = division.row_of(row, piece.token, piece.head_tile)
    wanted = there[:, None] & (column >= 0)[None, :]
    start = units_at(token, head, query.query_token, query.query_head)
    at = query.query_ptr + start[:, None] + column[None, :]
    for i in gl.static_range(8):
        async_gather(queries.latent.index(i), at + i * 64, mask=wanted)
    start = units_at(token, head, query.rotary_token, query.rotary_head)
    at = query.rotary_ptr + start[:, None] + column[None, :]
    async_gather(queries.rotary.index(0), at, mask=wanted)
    arrive_behind_gathers(queries.full, increment_count=False)


@gluon.jit
def _gather_block(
    at, there, turn, ring, columns, BLOCK_OF: gl.constexpr, EMPTY: gl.constexpr, FULL: gl.constexpr
):
    """Copy some columns of a block of keys, once their buffer is free.

    Args:
        at: pointers ``[KEYS, width]`` to the elements.
        there: ``[KEYS, width]`` bool, whether there is an element; others become zero.
        turn: int32, tiles that the program has copied before.
        ring: the :class:`attn.kernels.sparse.structures.WideRing`.
        columns: ``[2, KEYS, width]`` in shared memory, where the elements go.
        BLOCK_OF: number of the block.
        EMPTY, FULL: numbers of the barriers.
    """
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(ring.empty.index(EMPTY), (turn & 1) ^ 1)
    async_gather(columns.index(BLOCK_OF), at, mask=there)
    arrive_behind_gathers(ring.full.index(FULL), increment_count=False)


@gluon.jit
def _gather_rope(
    entries, starts, turn, ring, ROPE_AT: gl.constexpr, BLOCK_OF: gl.constexpr,
    TOKENS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Copy a block's rotary part and store its gaps, whose buffer is free when the rope's is.

    ``entries`` ``[KEYS]`` are those of the list, and ``starts`` ``[KEYS]`` are pointers to rows.
    """
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = starts[:, None] + column[None, :] + ROPE_AT // 2
    there = lists_row(entries, TOKENS)[:, None] & (column >= 0)[None, :]
    _gather_block(at, there, turn, ring, ring.rope, BLOCK_OF, BLOCK_OF, BLOCK_OF)
    ring.gaps.index(BLOCK_OF).store(gaps_of(entries, TOKENS))
    mbarrier.arrive(ring.full.index(BLOCK_OF), count=1)


@gluon.jit
def _copy_rows(mine, piece, turn, rows, ring, tile, LAYOUT: gl.constexpr):
    """Copy listed rows of 16 bits, block after block.

    The halves of a block come in the order in which their buffers become free.

    Args:
        mine: pointer to the list.
        piece: the piece of work.
        turn: int32, tiles that the program has copied before.
        rows: the cache's :class:`attn.kernels.sparse.structures.LatentRows`.
        ring: the :class:`attn.kernels.sparse.structures.WideRing`.
        tile: the kernel's :class:`attn.kernels.sparse.structures.WideTile`.
        LAYOUT: layout of the elements that threads copy.

    Returns:
        The tiles that the program has copied now.
    """
    KEYS: gl.constexpr = tile.KEYS
    ring = ring.in_halves()
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    ahead = listed(mine, piece.low * (2 * KEYS), piece.length, KEYS, gl.SliceLayout(1, LAYOUT))
    for step in range(piece.low, piece.high):
        for b in gl.static_range(2):
            entries = ahead
            ids = ids_of(entries, tile.TOKENS)
            starts = rows.latent_ptr + rows.offsets(ids) * (UNIT // 2)
            _gather_rope(entries, starts, turn, ring, rows.ROPE_AT, b, tile.TOKENS, LAYOUT)
            # The next entries are loaded after a wait and before most copies: a use of loaded
            # entries waits for all loads before it, and loads queue behind copies. Entries past
            # the end of the part are not used.
            after = step * (2 * KEYS) + (b + 1) * KEYS
            ahead = listed(mine, after, piece.length, KEYS, gl.SliceLayout(1, LAYOUT))
            # Fields are addressed by offset in a row, which keeps fewer pointers in registers.
            at = starts[:, None] + column[None, :]
            there = lists_row(entries, tile.TOKENS)[:, None] & (column >= 0)[None, :]
            if b == 0:
                _gather_block(at, there, turn, ring, ring.left, 0, 2, 2)
                _gather_block(at + HALF, there, turn, ring, ring.right, 0, 4, 4)
            else:
                _gather_block(at + HALF, there, turn, ring, ring.right, 1, 5, 3)
                _gather_block(at, there, turn, ring, ring.left, 1, 3, 5)
        turn += 1
    return turn


@gluon.jit
def produce_listed(query, lists, rows, queries, ring, stored, division, tile):
    """Bring queries and listed rows of the program's pieces of work, tile after tile.

    The rope and the halves of a tile's two blocks come in the order in which consumers need them.
    """
    KEYS: gl.constexpr = tile.KEYS
    # Eight threads copy 128 bytes of a row, which are one row of a box.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    turn = 0
    count = 0
    walks = 0
    first, last, step = works_of(lists.topk, division, KEYS)
    for work in range(first, last, step):
        piece = work_at(work, lists, division, KEYS)
        if piece.high > piece.low:
            mine = lists.of(piece.token)
            if tile.WHOLE:
                end = gl.minimum(piece.length, piece.high * (2 * KEYS))
                entries = begin_rows(mine, piece.low * (2 * KEYS), end, count, rows, stored, tile)
            mbarrier.wait(queries.empty, (walks & 1) ^ 1)
            _gather_queries(query, piece, queries, division, LAYOUT)
            walks += 1
            if tile.WHOLE:
                turn, count = dequantise_rows(
                    entries, mine, end, piece, turn, count, rows, ring, stored, tile
                )
            else:
                turn = _copy_rows(mine, piece, turn, rows, ring, tile, LAYOUT)
