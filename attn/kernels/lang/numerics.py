"""Device helpers that every kernel shares: exact widening, saturating narrow formats, rounding.

Encoders give the bits of ``attn.reference.quant``: round to nearest even, values beyond the
format's range (infinities too) clamped to its largest, NaN kept. 8-bit floats travel as ``uint8``
patterns, so that a GPU without e4m3 instructions (compute capability below 8.9) compiles them.
Each has an integer form, which the interpreter and those GPUs run, and a form of one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
E5M2_MAX = tl.constexpr(57344.0)
FLOAT16_MAX = tl.constexpr(65504.0)
BFLOAT16_MAX = tl.constexpr(3.3895313892515355e38)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INT4_ZERO = tl.constexpr(8)
"""A signed 4-bit value is stored as value + 8."""


@triton.jit
def to_float32(x):
    """fp32 of fp16, bf16 or fp32 ``x``, exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        # The interpreter's own cast is wrong for subnormal numbers.
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 ``x`` in fp16, bf16 or fp32, to nearest even; overflow gives an infinity."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's own cast cuts the low bits off.
        bits = x.to(tl.uint32, bitcast=True)
        # Past the largest number are the patterns of NaN.
        half = 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.add(bits, half, sanitize_overflow=False) >> 16
        rounded = tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.uint16)
        narrow = rounded.to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


@triton.jit
def clamp_to(x, largest):
    """``x`` in ``[-largest, largest]``; NaN stays NaN."""
    return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def saturate_to(x, dtype: tl.constexpr):
    """fp32 ``x`` in fp16, bf16 or fp32, clamped to the largest finite value."""
    if dtype == tl.float16:
        bounded = clamp_to(x, FLOAT16_MAX)
    elif dtype == tl.bfloat16:
        bounded = clamp_to(x, BFLOAT16_MAX)
    else:
        bounded = clamp_to(x, FLOAT32_MAX)
    return round_to(bounded, dtype)


@triton.jit
def divide(x, y):
    """IEEE fp32 quotient, rounded once; a plain ``/`` is only approximate on a GPU."""
    return tl.div_rn(x, y)


@triton.jit
def divide_for_e4m3(x, y):
    """The bits of :func:`divide` of many ``x`` by one scalar ``y``, or of the same sign and beyond
    e4m3's range where they are; one reciprocal for all, where each division has one of its own.
    """
    if INTERPRETED:
        # There a fused product and sum are rounded twice.
        quotient = divide(x, y)
    else:
        # Finite, that remainders are.
        x = clamp_to(x, tl.abs(y) * 512.0)
        reciprocal = tl.div_rn(tl.full([], 1.0, tl.float32), y)
        quotient = x * reciprocal
        # Once to a neighbour of the quotient, once to the nearest; signs are those that leave -0.
        opposite = -x
        quotient = tl.fma(tl.fma(quotient, y, opposite), -reciprocal, quotient)
        quotient = tl.fma(tl.fma(quotient, y, opposite), -reciprocal, quotient)
    return quotient


@triton.jit
def encode_e4m3(x, HARDWARE_E4M3: tl.constexpr):
    """uint8 e4m3 pattern of fp32 ``x``, saturated."""
    x = clamp_to(x, E4M3_MAX)
    if HARDWARE_E4M3 and not INTERPRETED:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _encode_float8(x, 3, 7)
    return code


@triton.jit
def encode_e5m2(x, HARDWARE_E4M3: tl.constexpr):
    """uint8 e5m2 pattern of fp32 ``x``, saturated."""
    x = clamp_to(x, E5M2_MAX)
    if HARDWARE_E4M3 and not INTERPRETED:
        code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        # Without the instruction, Triton's own cast goes through fp16 and rounds twice.
        code = _encode_float8(x, 2, 15)
    return code


@triton.jit
def _encode_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """uint8 pattern of fp32 ``x`` inside the range of a format, or NaN."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    SMALLEST_NORMAL: tl.constexpr = (128 - BIAS) << 23
    # A power of two whose ulp is the format's subnormal step: adding it rounds in hardware.
    STEP_BITS: tl.constexpr = (128 - BIAS + DROPPED) << 23
    STEP: tl.constexpr = 2.0 ** (1 - BIAS + DROPPED)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    odd = (size >> DROPPED) & 1
    normal = (size - ((127 - BIAS) << 23) + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED
    subnormal = (size.to(tl.float32, bitcast=True) + STEP).to(tl.int32, bitcast=True) - STEP_BITS
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(code, HARDWARE_E4M3: tl.constexpr):
    """fp16 value of uint8 e4m3 patterns, exact."""
    if HARDWARE_E4M3 and not INTERPRETED:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = code.to(tl.uint16)
        # The exponent's bias is 8 less than fp16's.
        shifted = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = shifted.to(tl.float16, bitcast=True) * 256.0
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return value


@triton.jit
def decode_e5m2(code):
    """fp16 value of uint8 e5m2 patterns, exact: the upper half of an fp16."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def decode_e4m3_float32(code, HARDWARE_E4M3: tl.constexpr):
    """fp32 value of uint8 e4m3 patterns, exact."""
    return decode_e4m3(code, HARDWARE_E4M3).to(tl.float32)


@triton.jit
def decode_e5m2_float32(code):
    """fp32 value of uint8 e5m2 patterns, exact."""
    return decode_e5m2(code).to(tl.float32)


@triton.jit
def round_to_int(x):
    """int32 nearest to fp32 ``x``, halves to even, for ``|x| < 2**22``; any integer for NaN."""
    # 1.5 * 2**23, whose ulp is 1: the sum's low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def encode_int(x, largest: tl.constexpr):
    """int32 nearest to fp32 ``x``, clamped to ``[-largest, largest]``."""
    whole = round_to_int(x)
    return tl.minimum(tl.maximum(whole, -largest), largest)


@triton.jit
def pack_int4(low, high):
    """uint8 of two int32 in ``[-7, 7]``, each stored plus 8, the first in the low nibble."""
    return ((low + INT4_ZERO) | ((high + INT4_ZERO) << 4)).to(tl.uint8)


@triton.jit
def row_absmax(x):
    """``[R]`` largest ``|x|`` of fp32 ``x [R, W]``; NaN when the row holds one."""
    # As integers, patterns without sign are ordered, NaN last.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_above(x):
    """Smallest power of two that is not below fp32 ``x``; 1 where that is 0, infinite or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # Past the largest number are the patterns of NaN.
    above = tl.add(bits, 0x7FFFFF, sanitize_overflow=False)
    exponent = tl.maximum(above >> 23, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where((bits > 0) & (bits < 0x7F800000), scale, 1.0)


@triton.jit
def block_scale(absmax):
    """Power-of-two scale that brings ``absmax`` into the range of e4m3; 1 for none."""
    return power_of_two_above(divide(absmax, E4M3_MAX))


INTERPRETED = tl.constexpr(not isinstance(to_float32, triton.JITFunction))
"""Kernels run in Triton's interpreter, on CPU tensors."""
