"""How a KV cache stores its elements, and how kernels read them.

8-bit and 4-bit rows are read as 16-bit words, because words can be loaded transposed and single
bytes cannot. The elements at the same place in all words of a row make up a plane. There are two
planes of 8-bit elements, or four planes of 4-bit elements.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from attn.kernels.lang.numerics import INTERPRETED

NATIVE, E4M3, E5M2, INT8, INT4 = range(5)
DEQUANTISED = -1
"""A kind besides those of caches: dequantised elements of the model, still to be scaled."""
_E4M3, _E5M2, _INT8, _INT4 = (tl.constexpr(kind) for kind in (E4M3, E5M2, INT8, INT4))

# How elements are decoded: in plain Triton, in PTX for any NVIDIA GPU, or by sm_89's conversions.
PLAIN, PTX, PTX_SM89 = range(3)
_PLAIN, _PTX_SM89 = tl.constexpr(PLAIN), tl.constexpr(PTX_SM89)


@cache
def decode_form(device: torch.device) -> tuple[int, bool]:
    """How kernels decode stored rows on a device.

    Returns:
        PLAIN, PTX or PTX_SM89; and whether the device has e4m3 instructions.
    """
    if INTERPRETED.value or device.type != "cuda" or torch.version.hip is not None:
        return PLAIN, False
    has_e4m3 = torch.cuda.get_device_capability(device) >= (8, 9)
    return PTX_SM89 if has_e4m3 else PTX, has_e4m3


@triton.jit
def plane_columns(index, plane, width, KIND: tl.constexpr):
    """The element of a row that the 16-bit word ``index`` holds in ``plane``.

    A row has ``width`` elements.
    """
    if KIND == 0:
        column = index
    elif KIND == _INT4:
        # Word i holds bytes 2i and 2i + 1. Byte b holds element b in its low half and element
        # b + width / 2 in its high half.
        column = 2 * index + plane % 2 + (plane // 2) * (width // 2)
    else:
        column = 2 * index + plane
    return column


@triton.jit
def _by_ptx(words, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


def _ptx(body: str) -> tl.constexpr:
    """Wrap PTX that turns a pair of words in ``$1`` into a pair of fp16 in ``$0``."""
    return tl.constexpr("{ .reg .b32 a, b, c; .reg .b16 l, h; " + body + " }")


_SM89 = " mov.b32 {l, h}, a; cvt.rn.f16x2.e4m3x2 $0, l;"
# e4m3 in the upper byte has fp16's sign. Shifted right by one bit, its exponent and mantissa align
# with fp16's; the bias is 7 in place of 15, so the number is multiplied by 256.
_SHIFTED = (
    " shr.u32 b, a, 1; and.b32 b, b, 0x3F803F80; and.b32 a, a, 0x80008000; or.b32 a, a, b;"
    " mov.b32 c, 0x5C005C00; mul.rn.f16x2 $0, a, c;"
)
# An integer in the mantissa of fp16 1024.0 adds itself. The words become 1024 + 128 + value (int8)
# and 1024 + 8 + value (int4), and the constant is subtracted again.
_SIGNED8 = (
    " xor.b32 a, a, 0x00800080; or.b32 a, a, 0x64006400;"
    " mov.b32 c, 0x64806480; sub.rn.f16x2 $0, a, c;"
)
_OFFSET4 = (
    " and.b32 a, a, 0x000F000F; or.b32 a, a, 0x64006400;"
    " mov.b32 c, 0x64086408; sub.rn.f16x2 $0, a, c;"
)
_SM89_LOW = _ptx("prmt.b32 a, $1, 0, 0x4420;" + _SM89)
_SM89_HIGH = _ptx("prmt.b32 a, $1, 0, 0x4431;" + _SM89)
_E4M3_LOW = _ptx("prmt.b32 a, $1, 0, 0x2404;" + _SHIFTED)
_E4M3_HIGH = _ptx("prmt.b32 a, $1, 0, 0x3414;" + _SHIFTED)
# e5m2 is the upper byte of fp16.
_E5M2_LOW = _ptx("prmt.b32 $0, $1, 0, 0x2404;")
_E5M2_HIGH = _ptx("prmt.b32 $0, $1, 0, 0x3414;")
_INT8_LOW = _ptx("prmt.b32 a, $1, 0, 0x4240;" + _SIGNED8)
_INT8_HIGH = _ptx("prmt.b32 a, $1, 0, 0x4341;" + _SIGNED8)
_INT4_0, _INT4_1, _INT4_2, _INT4_3 = (
    _ptx(f"shr.u32 a, $1, {shift};" + _OFFSET4) for shift in (0, 8, 4, 12)
)


@triton.jit
def _plain_plane(words, PLANE: tl.constexpr, KIND: tl.constexpr):
    """Decode one plane of int16 words to fp16, exactly, in plain Triton."""
    if KIND == _INT4:
        SHIFT: tl.constexpr = (PLANE % 2) * 8 + (PLANE // 2) * 4
        plane = ((words >> SHIFT) & 15).to(tl.float16) - 8.0
    elif KIND == _INT8:
        byte = words >> 8 if PLANE == 1 else (words << 8) >> 8
        plane = byte.to(tl.float16)
    else:
        upper = words & -256 if PLANE == 1 else words << 8
        if KIND == _E5M2:
            plane = upper.to(tl.float16, bitcast=True)
        else:
            bits = ((upper >> 1) & 0x3F80) | (upper & -32768)
            plane = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return plane


@triton.jit
def _ptx_plane(words, PLANE: tl.constexpr, KIND: tl.constexpr, DECODE: tl.constexpr):
    if KIND == _INT4:
        if PLANE == 0:
            plane = _by_ptx(words, _INT4_0)
        elif PLANE == 1:
            plane = _by_ptx(words, _INT4_1)
        elif PLANE == 2:
            plane = _by_ptx(words, _INT4_2)
        else:
            plane = _by_ptx(words, _INT4_3)
    elif KIND == _INT8:
        plane = _by_ptx(words, _INT8_LOW) if PLANE == 0 else _by_ptx(words, _INT8_HIGH)
    elif KIND == _E5M2:
        plane = _by_ptx(words, _E5M2_LOW) if PLANE == 0 else _by_ptx(words, _E5M2_HIGH)
    elif DECODE == _PTX_SM89:
        plane = _by_ptx(words, _SM89_LOW) if PLANE == 0 else _by_ptx(words, _SM89_HIGH)
    else:
        plane = _by_ptx(words, _E4M3_LOW) if PLANE == 0 else _by_ptx(words, _E4M3_HIGH)
    return plane


@triton.jit
def plane_of(words, PLANE: tl.constexpr, KIND: tl.constexpr, DECODE: tl.constexpr):
    """The elements of one plane: fp16 for 8-bit and 4-bit kinds; a native row is returned as is."""
    if KIND == 0:
        plane = words
    elif DECODE == _PLAIN:
        plane = _plain_plane(words, PLANE, KIND)
    else:
        plane = _ptx_plane(words, PLANE, KIND, DECODE)
    return plane
