"""Copies of listed rows by pieces of 16 bytes, each to where an instruction says, not a layout.

Rows of 656 bytes begin in the middle of a sector of 32 bytes, every other one. Two neighbouring
threads that copy what two sectors have in common ask for both: 32 sectors for 512 bytes where 17
hold them. Here threads of such rows are a piece behind, and the first has the last piece.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.hopper.compat import arrive_behind_gathers
from attn.kernels.hopper.sparse_parts import UNIT, listed
from attn.kernels.hopper.tiles import wide
from attn.kernels.sparse_mla import _row_offsets

# The dynamic shared memory of every kernel of Triton's.
_MEMORY = tl.constexpr("mov.u32 $0, global_smem;")
_TIMES_UNIT = tl.constexpr("shl.b32 $0, $1, 4;")
# Sixteen bytes of $2, or with $3 = 0 zeros, to $1.
_COPY = tl.constexpr("cp.async.cg.shared.global [$1], [$2], 16, $3; // $0")
# Likewise, and evicted first from the L2 cache.
_COPY_ONCE = tl.constexpr(
    "{ .reg .b64 first; mov.b64 first, 0x12F0000000000000;"
    " cp.async.cg.shared.global.L2::cache_hint [$1], [$2], 16, $3, first; } // $0"
)
# Where $4 is set.
_COPY_SOME = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p cp.async.cg.shared.global [$1], [$2], 16, $3; } // $0"
)
_COPY_SOME_ONCE = tl.constexpr(
    "{ .reg .pred p; .reg .b64 first; setp.ne.s32 p, $4, 0; mov.b64 first, 0x12F0000000000000;"
    " @p cp.async.cg.shared.global.L2::cache_hint [$1], [$2], 16, $3, first; } // $0"
)


@gluon.jit
def copy_pieces(
    memory, stage, at, row, piece, there, asked, OFFSET: gl.constexpr, SOME: gl.constexpr,
    ONCE: gl.constexpr,
):  # fmt: skip
    """Copy pieces of rows, as many as ``at`` has pointers, to a stage of memory that begins at
    OFFSET of the program's and is laid out by
    :func:`attn.kernels.hopper.sparse_operands.swizzled`; zeros for rows that are not there, and
    with SOME nothing where it is not asked for.
    """
    TILE: gl.constexpr = memory.shape[1]
    PIECES: gl.constexpr = memory.shape[2] // 4
    bent = piece
    if PIECES >= 8:
        bent = piece ^ ((((row ^ (row >> 2)) & 1) << 2) | (row & 2))
    begin = gl.inline_asm_elementwise(_MEMORY, "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    # LLVM would add rows before it multiplies, and keep none of them as an instruction's offset.
    across = gl.inline_asm_elementwise(
        _TIMES_UNIT, "=r,r", [bent], dtype=gl.int32, is_pure=True, pack=1
    )
    place = begin + (OFFSET + stage * (TILE * PIECES * UNIT)) + row * (PIECES * UNIT) + across
    size = gl.where(there, UNIT, 0) + bent * 0
    if SOME:
        WHERE: gl.constexpr = _COPY_SOME_ONCE if ONCE else _COPY_SOME
        gl.inline_asm_elementwise(
            WHERE, "=r,r,l,r,r", [place, at, size, asked + bent * 0], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        TEXT: gl.constexpr = _COPY_ONCE if ONCE else _COPY
        gl.inline_asm_elementwise(
            TEXT, "=r,r,l,r", [place, at, size], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _shares(x, SHARES: gl.constexpr):
    """``[TILE]`` of four warps' rows as SHARES of ``[16]``, four rows of each warp."""
    if SHARES == 2:
        x0, x1 = gl.split(gl.permute(gl.reshape(x, [4, 2, 4]), (0, 2, 1)))
        few = (gl.reshape(x0, [16]), gl.reshape(x1, [16]))
    else:
        even, odd = gl.split(gl.permute(gl.reshape(x, [4, 2, 2, 4]), (0, 3, 1, 2)))
        x0, x2 = gl.split(even)
        x1, x3 = gl.split(odd)
        x0, x1 = gl.reshape(x0, [16]), gl.reshape(x1, [16])
        few = (x0, x1, gl.reshape(x2, [16]), gl.reshape(x3, [16]))  # type: ignore[assignment]
    return few


@gluon.jit
def copy_by_sectors(
    latent_ptr, ids_ptr, lens_ptr, nope, tail, full, empty, ids_row, topk,
    HEAD_TILES: gl.constexpr, SEGMENT: gl.constexpr, PARTS: gl.constexpr, HAS_LENS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, BLOCK_UNITS: gl.constexpr, ROW_UNITS: gl.constexpr,
    SKIP: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    """The warp group that copies: listed rows, zeros for those of -1, tile after tile. A warp takes
    32 pieces of a row at a time; and of what is behind the latents several rows'.
    """
    STAGES: gl.constexpr = nope.shape[0]
    TILE: gl.constexpr = nope.shape[1]
    PIECES: gl.constexpr = nope.shape[2] // 4
    BEHIND: gl.constexpr = tail.shape[2] // 4
    REST: gl.constexpr = BEHIND - SKIP // 4
    COPY: gl.constexpr = _of_rows(TILE, 32)
    TAIL_COPY: gl.constexpr = _of_rows(TILE, BEHIND)
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    TAIL_ROW: gl.constexpr = gl.SliceLayout(1, TAIL_COPY)
    work = gl.program_id(0)
    token = work // (HEAD_TILES * PARTS)
    low = work // HEAD_TILES % PARTS * SEGMENT
    mine = ids_ptr + token.to(gl.int64) * wide(ids_row)
    # Not yet known how many count, but where the list ends.
    end = gl.minimum(topk, low + SEGMENT)
    ids = listed(mine, low, end, TILE, ROW)
    tail_ids = listed(mine, low, end, TILE, TAIL_ROW)
    high = end
    if HAS_LENS:
        high = gl.minimum(end, gl.load(lens_ptr + token))
        ids = gl.where(low + gl.arange(0, TILE, layout=ROW) < high, ids, -1)
        tail_ids = gl.where(low + gl.arange(0, TILE, layout=TAIL_ROW) < high, tail_ids, -1)
    ahead = listed(mine, low + TILE, high, TILE, ROW)
    tail_ahead = listed(mine, low + TILE, high, TILE, TAIL_ROW)
    SOME: gl.constexpr = _of_rows(16, 32)
    SOME_ROW: gl.constexpr = gl.SliceLayout(1, SOME)
    row = gl.arange(0, 16, layout=SOME_ROW)
    row = (row // 4 * (TILE // 4) + row % 4)[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, SOME))[None, :]
    tail_row = gl.arange(0, TILE, layout=TAIL_ROW)[:, None]
    tail_lane = gl.arange(0, BEHIND, layout=gl.SliceLayout(0, TAIL_COPY))[None, :]
    for first in range(low, high, TILE):
        turn = (first - low) // TILE
        stage = turn % STAGES
        # Asked for two tiles ahead: loads stand in line behind copies.
        next_ids = listed(mine, first + 2 * TILE, high, TILE, ROW)
        next_tail = listed(mine, first + 2 * TILE, high, TILE, TAIL_ROW)
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        # A few rows after another: there are no registers for a tile's places.
        few = _shares(ids, TILE // 16)
        for k in gl.static_range(TILE // 16):
            some = gl.convert_layout(few[k], SOME_ROW, assert_trivial=True)
            units = _row_offsets(some, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)[:, None]
            # Thread 0 of a row that begins within a sector takes the last piece of 32.
            piece = (lane - (units.to(gl.int32) & 1)) & 31
            for i in gl.static_range(PIECES // 32):
                at = latent_ptr + units * (UNIT // 4) + (piece + 32 * i) * (UNIT // 4)
                copy_pieces(
                    nope, stage, at, row + 4 * k, piece + 32 * i, (some >= 0)[:, None], 1, 0, False,
                    ONCE,
                )  # fmt: skip
        units = _row_offsets(tail_ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)[:, None]
        piece = tail_lane + (units.to(gl.int32) & 1)
        piece = gl.where(piece == REST, 0, piece)
        at = latent_ptr + units * (UNIT // 4) + (piece + PIECES) * (UNIT // 4)
        copy_pieces(
            tail, stage, at, tail_row, piece + SKIP // 4, (tail_ids >= 0)[:, None],
            (tail_lane < REST).to(gl.int32), STAGES * TILE * PIECES * UNIT, BEHIND > REST, ONCE,
        )  # fmt: skip
        arrive_behind_gathers(full.index(stage), increment_count=False)
        ids = ahead
        tail_ids = tail_ahead
        ahead = next_ids
        tail_ahead = next_tail


@gluon.constexpr_function
def _of_rows(rows: int, lanes: int) -> gl.DistributedLinearLayout:
    """``[rows, lanes]``: a row of as many threads, rows of a warp behind each other."""
    across, down = lanes.bit_length() - 1, rows.bit_length() - 1
    beside = 5 - across
    return gl.DistributedLinearLayout(
        reg_bases=[[1 << k, 0] for k in range(beside, down - 2)],
        lane_bases=[*([0, 1 << k] for k in range(across)), *([1 << k, 0] for k in range(beside))],
        warp_bases=[[1 << (down - 2), 0], [1 << (down - 1), 0]],
        block_bases=[],
        shape=[rows, lanes],
    )
