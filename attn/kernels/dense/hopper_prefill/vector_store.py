"""Results of products by warp group, laid out so that they are written sixteen bytes at a time.

Of a row a thread has two neighbouring columns in every eight: written as they are, half of a sector
by four threads. Four neighbouring threads exchange what they have of 32 columns.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.lang.packed import JOIN_HALVES, SPLIT_HALVES


@gluon.constexpr_function
def _transposed(words: int) -> str:
    """Thread t of four, which has word t of four runs, gets run t: for two rows at once, whose
    words alternate. Threads exchange with the next one, then with the one behind that.
    """
    lines = [
        "{ .reg .pred p, q; .reg .b32 x, y;",
        "mov.u32 x, %laneid; and.b32 y, x, 1; setp.ne.u32 p, y, 0;",
        "and.b32 y, x, 2; setp.ne.u32 q, y, 0;",
    ]
    lines += [f"mov.b32 ${i}, ${words + i};" for i in range(words)]
    for mask, odd, step in ((1, "p", 2), (2, "q", 4)):
        for i in range(words):
            if i & step == 0:
                a, b = f"${i}", f"${i + step}"
                lines += [
                    f"selp.b32 x, {a}, {b}, {odd};",
                    f"shfl.sync.bfly.b32 y, x, {mask}, 31, -1;",
                    f"selp.b32 {a}, y, {a}, {odd}; selp.b32 {b}, {b}, y, {odd};",
                ]
    return " ".join([*lines, "}"])


_QUADS = tl.constexpr(_transposed(8))
_QUADS_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))


@gluon.constexpr_function
def side_by_side_layout(columns: int) -> gl.DistributedLinearLayout:
    """``[64, columns]`` of a warp group, whose threads have eight columns side by side."""
    more = [[0, 32 << k] for k in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *more],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def side_by_side(x):
    """Rows ``[64, N]`` of 16 bits as a product by a warp group gives them, N a multiple of 32, in
    :func:`side_by_side_layout`.
    """
    N: gl.constexpr = x.shape[1]
    low, high = gl.split(gl.reshape(x.to(gl.int16, bitcast=True), [64, N // 2, 2]))
    words = gl.inline_asm_elementwise(
        JOIN_HALVES, "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )
    words = gl.inline_asm_elementwise(
        _QUADS, _QUADS_REGISTERS, [words], dtype=gl.int32, is_pure=True, pack=8
    )
    # What was a run of four is now a thread's.
    words = gl.permute(gl.reshape(words, [64, N // 32, 4, 4]), (0, 1, 3, 2))
    low, high = gl.inline_asm_elementwise(
        SPLIT_HALVES, "=h,=h,r", [gl.reshape(words, [64, N // 2])], dtype=(gl.int16, gl.int16),
        is_pure=True, pack=1,
    )  # fmt: skip
    out = gl.reshape(gl.join(low, high), [64, N]).to(x.dtype, bitcast=True)
    return gl.convert_layout(out, side_by_side_layout(N), assert_trivial=True)


@gluon.jit
def store_side_by_side(out, at, wanted, first, out_ptr):
    """Write rows as :func:`side_by_side` gives them, each from column ``first`` on of the row at
    element ``at``, where it is wanted; both ``[64]``, as ``out``'s rows lie.
    """
    column = gl.arange(0, out.shape[1], layout=gl.SliceLayout(0, out.type.layout)) + first
    gl.store(
        out_ptr + at[:, None] + column[None, :], out,
        mask=wanted[:, None] & (column >= 0)[None, :],
    )  # fmt: skip
