"""Rescaling of the narrow sparse kernel's output when a maximum grows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def shrink_text(cells: int) -> str:
    """PTX that multiplies a thread's ``cells`` elements by their heads' factors.

    It does nothing if all factors of the warp are 1. Thread 4 g + t has elements of heads 2 t and
    2 t + 1 alternately, in runs of four; with sixteen heads, every other run is of heads 2 t + 8
    and 2 t + 9. It is given the factors of heads g and g + 8.
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
    """Register constraints of :func:`shrink_text`: each element is multiplied in place.

    With inputs apart from outputs, every tile would move all elements. A factor may share a
    register with an output, since all factors are read before any element is written.
    """
    return ",".join(["=f"] * cells + [str(i) for i in range(cells)] + ["f"] * cells)


@gluon.jit
def shrunk(o, by):
    """The output ``o`` ``[4, 128, heads]`` times ``by`` ``[4, heads]``, a factor for each block.

    The factors lie like weights: the threads that have a head's weights have its factor, and not
    the threads that have its output.
    """
    ROWS: gl.constexpr = o.shape[2]
    RUNS: gl.constexpr = ROWS // 8
    CELLS: gl.constexpr = 4 * ROWS
    TEXT: gl.constexpr = shrink_text(CELLS)
    REGISTERS: gl.constexpr = _registers(CELLS)
    # Each of a thread's elements is paired with the factor that the thread has, whatever its head.
    cells = gl.reshape(o, [4, 16 // RUNS, RUNS, 8, ROWS])
    MINE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, cells.type.layout))
    by = gl.convert_layout(gl.reshape(by, [4, RUNS, 8]), MINE, assert_trivial=True)
    cells, by = gl.broadcast(cells, by[:, None, :, :][:, :, :, :, None])
    by = gl.convert_layout(gl.reshape(by, [4, 128, ROWS]), o.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        TEXT, REGISTERS, [o, by], dtype=gl.float32, is_pure=True, pack=CELLS
    )
