"""Sums of few heads' values multiplied by what a new maximum makes of them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def shrink_text(cells: int) -> str:
    """Multiply a thread's cells by their heads' factors, unless all factors of the warp are 1.

    Thread 4 g + t has cells of heads 2 t and 2 t + 1 by turns, four at a time, of sixteen heads
    the next four of those behind eight; and is given factors of head g, and g + 8.
    """
    runs = cells // 32
    given = [f"${2 * cells + 2 * run}" for run in range(runs)]
    lines = ["{ .reg .pred p, q; .reg .b32 x, y;"]
    lines += [f".reg .b32 f{i};" for i in range(2 * runs)]
    lines += [f"setp.neu.f32 p, {given[0]}, 0f3F800000;"]
    lines += [f"setp.neu.f32 q, {by}, 0f3F800000; or.pred p, p, q;" for by in given[1:]]
    lines += ["vote.sync.any.pred p, p, 0xFFFFFFFF;"]
    lines += ["@!p bra.uni DONE;"]
    lines += ["mov.u32 x, %laneid; and.b32 x, x, 3; shl.b32 x, x, 3; add.u32 y, x, 4;"]
    for run, by in enumerate(given):
        lines += [f"shfl.sync.idx.b32 f{2 * run}, {by}, x, 31, -1;"]
        lines += [f"shfl.sync.idx.b32 f{2 * run + 1}, {by}, y, 31, -1;"]
    for i in range(cells):
        run = i // 4 % runs
        lines += [f"mul.f32 ${i}, ${i}, f{2 * run + i % 2};"]
    return " ".join([*lines, "DONE: }"])


@gluon.constexpr_function
def _registers(cells: int) -> str:
    """Cells are multiplied where they are: as inputs beside outputs all of them would be moved for
    each tile. It does no harm if a factor shares a register: they are read before any cell is
    written.
    """
    return ",".join(["=f"] * cells + [str(i) for i in range(cells)] + ["f"] * cells)


@gluon.jit
def shrunk(o, by):
    """Sums ``o`` ``[4, 128, heads]`` of blocks of columns times ``by`` ``[4, heads]``, which lies
    as weights do: a head's is with the eight threads that have its weights, not those that have
    its sums.
    """
    ROWS: gl.constexpr = o.shape[2]
    RUNS: gl.constexpr = ROWS // 8
    CELLS: gl.constexpr = 4 * ROWS
    TEXT: gl.constexpr = shrink_text(CELLS)
    REGISTERS: gl.constexpr = _registers(CELLS)
    # What a thread has stands beside all of its cells, whosever they are.
    cells = gl.reshape(o, [4, 16 // RUNS, RUNS, 8, ROWS])
    MINE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, cells.type.layout))
    by = gl.convert_layout(gl.reshape(by, [4, RUNS, 8]), MINE, assert_trivial=True)
    cells, by = gl.broadcast(cells, by[:, None, :, :][:, :, :, :, None])
    by = gl.convert_layout(gl.reshape(by, [4, 128, ROWS]), o.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        TEXT, REGISTERS, [o, by], dtype=gl.float32, is_pure=True, pack=CELLS
    )
