"""PTX that packs 8-bit and 16-bit elements into words, and unpacks them."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

JOIN_HALVES = tl.constexpr("mov.b32 $0, {$1, $2};")
"""Join two 16-bit elements to one 32-bit word, the first in the low half."""
SPLIT_HALVES = tl.constexpr("mov.b32 {$0, $1}, $2;")
"""Split one 32-bit word into its low and its high 16 bits."""
SPLIT_E4M3 = tl.constexpr(
    "{ .reg .b16 x, y; .reg .b32 a, b; mov.b32 {x, y}, $4; cvt.rn.f16x2.e4m3x2 a, x;"
    " cvt.rn.f16x2.e4m3x2 b, y; mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }"
)
"""Decode the four e4m3 elements of a 32-bit word, from the lowest byte on, to four fp16."""
E4M3_PAIRS = tl.constexpr(
    "{ .reg .b16 x, y; mov.b32 {x, y}, $2; cvt.rn.f16x2.e4m3x2 $0, x; cvt.rn.f16x2.e4m3x2 $1, y; }"
)
"""Decode the four e4m3 elements of a 32-bit word to fp16, in two words of two."""
_WOVEN = (
    ".reg .b16 a, b, c, d; .reg .b32 x, y, p, q, r, s, most;"
    " prmt.b32 x, $8, $9, 0x5140; prmt.b32 y, $8, $9, 0x7362;"
    " mov.b32 {a, b}, x; mov.b32 {c, d}, y;"
    " cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b;"
    " cvt.rn.f16x2.e4m3x2 r, c; cvt.rn.f16x2.e4m3x2 s, d;"
)
_SPLIT_PAIRS = (
    " mov.b32 {$0, $1}, p; mov.b32 {$2, $3}, q; mov.b32 {$4, $5}, r; mov.b32 {$6, $7}, s;"
)
_NUMBERS = " mov.b32 most, 0x5F005F00;" + "".join(f" min.f16x2 {x}, {x}, most;" for x in "pqrs")
WOVEN_E4M3 = tl.constexpr("{ " + _WOVEN + _SPLIT_PAIRS + " }")
"""Decode the four e4m3 elements of two words ($8 and $9) to fp16, in pairs of one element of
each."""
WOVEN_NUMBERS = tl.constexpr("{ " + _WOVEN + _NUMBERS + _SPLIT_PAIRS + " }")
"""As :data:`WOVEN_E4M3`, but NaN becomes 448, the largest number of e4m3."""


@gluon.jit
def woven_e4m3(first, second, ASSEMBLY: gl.constexpr = WOVEN_E4M3):
    """Decode the e4m3 elements of words of two rows to fp16, in pairs of one element of each row.

    Three dimensions of 2 are added: the row; and the high and the low bit of the element's number
    in its word. With WOVEN_NUMBERS as ASSEMBLY, NaN becomes 448.
    """
    a0, b0, a1, b1, a2, b2, a3, b3 = gl.inline_asm_elementwise(
        ASSEMBLY, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [first, second],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16,
               gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    even = gl.join(gl.join(a0, b0), gl.join(a2, b2))
    odd = gl.join(gl.join(a1, b1), gl.join(a3, b3))
    return gl.join(even, odd)


@gluon.jit
def e4m3_planes(words):
    """Decode the e4m3 elements in the low and in the high byte of 16-bit words, to fp16 each."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; .reg .b16 low, high; prmt.b32 a, $2, 0, 0x3120; mov.b32 {low, high}, a; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip
