"""Number formats on the device: exact conversion to wider types, rounding, saturating encoders.

Encoders give the same bits as ``attn.reference.quant``. They round to nearest even, clamp values
beyond the format's range (infinities too) to its largest number, and keep NaN. 8-bit floats travel
as ``uint8`` patterns, so that kernels compile for a GPU without e4m3 instructions (compute
capability below 8.9). Such GPUs and Triton's interpreter convert through the bits of the pattern;
other GPUs convert with one instruction.
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
    """Convert fp16, bf16 or fp32 ``x`` to fp32, exactly."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        # The interpreter's own cast is wrong for subnormal numbers.
        wide = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Round fp32 ``x`` to fp16, bf16 or fp32, to nearest even; overflow gives an infinity."""
    if INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's own cast cuts the low bits off.
        bits = x.to(tl.uint32, bitcast=True)
        # The patterns of NaN may overflow here; they are replaced below.
        half = 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.add(bits, half, sanitize_overflow=False) >> 16
        rounded = tl.where(x == x, rounded, (bits >> 16) | 0x40).to(tl.uint16)
        narrow = rounded.to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


@triton.jit
def clamp_to(x, largest):
    """Clamp ``x`` to ``[-largest, largest]``; NaN stays NaN."""
    return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def saturate_to(x, dtype: tl.constexpr):
    """Round fp32 ``x`` to fp16, bf16 or fp32, clamped to the type's largest finite value."""
    if dtype == tl.float16:
        bounded = clamp_to(x, FLOAT16_MAX)
    elif dtype == tl.bfloat16:
        bounded = clamp_to(x, BFLOAT16_MAX)
    else:
        bounded = clamp_to(x, FLOAT32_MAX)
    return round_to(bounded, dtype)


@triton.jit
def product(x, y):
    """``x * y`` in fp32, rounded. No sum behind it is merged with it into one fma.

    A compiler may merge a product and a sum, and round once, in one kernel and not in another.
    Where two kernels must agree bit for bit, such a product is written so. This fma costs what a
    product costs, and no compiler may drop its 0, which turns -0 into 0.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def divide(x, y):
    """IEEE fp32 quotient, rounded once; a plain ``/`` is only approximate on a GPU."""
    return tl.div_rn(x, y)


@triton.jit
def divide_for_e4m3(x, y):
    """Divide many ``x`` by one scalar ``y`` for :func:`encode_e4m3`, fp32.

    A quotient has the bits of :func:`divide`. Where those are beyond e4m3's range, the result is
    another number of the same sign beyond it, which e4m3 encodes alike. All quotients share one
    reciprocal; a division computes one for each.
    """
    if INTERPRETED:
        # The interpreter rounds a fused product and sum twice.
        quotient = divide(x, y)
    else:
        # Quotients must be finite, so that the remainders below are.
        x = clamp_to(x, tl.abs(y) * 512.0)
        reciprocal = tl.div_rn(tl.full([], 1.0, tl.float32), y)
        quotient = x * reciprocal
        # The first correction gives the quotient or a neighbour of it, the second the nearest. The
        # signs are chosen so that -0 stays -0.
        opposite = -x
        quotient = tl.fma(tl.fma(quotient, y, opposite), -reciprocal, quotient)
        quotient = tl.fma(tl.fma(quotient, y, opposite), -reciprocal, quotient)
    return quotient


@triton.jit
def encode_e4m3(x, HARDWARE_E4M3: tl.constexpr):
    """Encode fp32 ``x`` in e4m3, saturated; the result is its uint8 pattern."""
    x = clamp_to(x, E4M3_MAX)
    if HARDWARE_E4M3 and not INTERPRETED:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = _encode_float8(x, 3, 7)
    return code


@triton.jit
def encode_e5m2(x, HARDWARE_E4M3: tl.constexpr):
    """Encode fp32 ``x`` in e5m2, saturated; the result is its uint8 pattern."""
    x = clamp_to(x, E5M2_MAX)
    if HARDWARE_E4M3 and not INTERPRETED:
        code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        # Without the instruction, Triton's own cast goes through fp16 and rounds twice.
        code = _encode_float8(x, 2, 15)
    return code


@triton.jit
def _encode_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Encode fp32 ``x`` in an 8-bit float format through its bits; the result is a uint8 pattern.

    ``x`` must be in the format's range, or NaN.
    """
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
    """Decode uint8 e4m3 patterns to fp16, exactly."""
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
    """Decode uint8 e5m2 patterns to fp16, exactly: a pattern is the upper byte of an fp16."""
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def decode_e4m3_float32(code, HARDWARE_E4M3: tl.constexpr):
    """Decode uint8 e4m3 patterns to fp32, exactly."""
    return decode_e4m3(code, HARDWARE_E4M3).to(tl.float32)


@triton.jit
def decode_e5m2_float32(code):
    """Decode uint8 e5m2 patterns to fp32, exactly."""
    return decode_e5m2(code).to(tl.float32)


@triton.jit
def round_to_int(x):
    """Round fp32 ``x`` to the nearest int32, halves to even, for ``|x| < 2**22``.

    NaN gives any integer.
    """
    # The constant is 1.5 * 2**23, where the ulp is 1: the low bits of the sum are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def encode_int(x, largest: tl.constexpr):
    """Round fp32 ``x`` to the nearest int32, clamped to ``[-largest, largest]``."""
    whole = round_to_int(x)
    return tl.minimum(tl.maximum(whole, -largest), largest)


@triton.jit
def pack_int4(low, high):
    """Pack two int32 in ``[-7, 7]`` into one uint8, each plus 8, the first in the low nibble."""
    return ((low + INT4_ZERO) | ((high + INT4_ZERO) << 4)).to(tl.uint8)


@triton.jit
def row_absmax(x):
    """The largest ``|x|`` of each row of fp32 ``x [R, W]``, ``[R]``; NaN for a row with a NaN."""
    # Bit patterns without the sign are ordered as integers, with NaN last.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_above(x):
    """Smallest power of two that is not below fp32 ``x``; 1 where that is 0, infinite or NaN."""
    bits = x.to(tl.int32, bitcast=True)
    # The patterns of NaN may overflow here; the last line returns 1 for them.
    above = tl.add(bits, 0x7FFFFF, sanitize_overflow=False)
    exponent = tl.maximum(above >> 23, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.where((bits > 0) & (bits < 0x7F800000), scale, 1.0)


@triton.jit
def block_scale(absmax):
    """The power-of-two scale that brings ``absmax`` into the range of e4m3.

    It is 1 for 0, an infinity or NaN.
    """
    return power_of_two_above(divide(absmax, E4M3_MAX))


INTERPRETED = tl.constexpr(not isinstance(to_float32, triton.JITFunction))
"""Whether kernels run in Triton's interpreter, on CPU tensors."""
