"""Device helpers against torch's own conversions, over every pattern or every rounding case."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from attn.kernels.lang import numerics
from attn.reference.quant import saturate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [False]
if DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
    FORMS.append(True)
"""Whether the GPU's e4m3 instructions are used: False, and True where it has them."""
FLOATS = [torch.float16, torch.bfloat16, torch.float32]


@triton.jit
def apply_kernel(
    x, y, out, count, OPERATION: tl.constexpr, HARDWARE: tl.constexpr, TILE: tl.constexpr
):
    """``out[i] = operation(x[i], y[i])``."""
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    a = tl.load(x + place, mask=place < count)
    if OPERATION == "e4m3":
        result = numerics.encode_e4m3(a, HARDWARE)
    elif OPERATION == "e5m2":
        result = numerics.encode_e5m2(a, HARDWARE)
    elif OPERATION == "from_e4m3":
        result = numerics.decode_e4m3(a, HARDWARE)
    elif OPERATION == "from_e5m2":
        result = numerics.decode_e5m2(a)
    elif OPERATION == "from_e4m3_float32":
        result = numerics.decode_e4m3_float32(a, HARDWARE)
    elif OPERATION == "from_e5m2_float32":
        result = numerics.decode_e5m2_float32(a)
    elif OPERATION == "to_float32":
        result = numerics.to_float32(a)
    elif OPERATION == "round_to":
        result = numerics.round_to(a, out.dtype.element_ty)
    elif OPERATION == "saturate_to":
        result = numerics.saturate_to(a, out.dtype.element_ty)
    elif OPERATION == "round_to_int":
        result = numerics.round_to_int(a)
    elif OPERATION == "encode_int":
        result = numerics.encode_int(a, 7)
    elif OPERATION == "divide":
        result = numerics.divide(a, tl.load(y + place, mask=place < count, other=1.0))
    else:
        result = numerics.pack_int4(a, tl.load(y + place, mask=place < count))
    tl.store(out + place, result, mask=place < count)


@triton.jit
def absmax_kernel(x, out, R: tl.constexpr, W: tl.constexpr):
    """Write the ``row_absmax`` of ``x [R, W]`` to ``out [R]``."""
    rows = tl.arange(0, R)
    tile = tl.load(x + rows[:, None] * W + tl.arange(0, W)[None, :])
    tl.store(out + rows, numerics.row_absmax(tile))


def apply(
    operation: str, x: Tensor, dtype: torch.dtype, y: Tensor | None = None, hardware: bool = False
) -> Tensor:
    """Run the operation by its kernel; the result is on the CPU."""
    x = x.to(DEVICE).contiguous()
    y = x if y is None else y.to(DEVICE).contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    grid = (triton.cdiv(len(x), 1024),)
    apply_kernel[grid](x, y, out, len(x), operation, hardware, 1024)
    return out.cpu()


def hard_cases() -> Tensor:
    """fp32 numbers: every fp16 and bf16 value, both neighbours of each, and random patterns."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    exact = torch.cat([patterns.view(dtype).float() for dtype in (torch.float16, torch.bfloat16)])
    neighbours = [(exact.view(torch.int32) + step).view(torch.float32) for step in (-1, 1)]
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (20000,), generator=generator).int()
    x = torch.cat([exact, *neighbours, random.view(torch.float32)])
    # A signalling NaN makes NumPy warn, and with it the interpreter: every NaN becomes a quiet one.
    return torch.where(x.isnan(), torch.nan, x)


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether values are equal, signs of zero included, and NaN exactly where NaN is expected."""
    nan = expected.isnan()
    sign = torch.equal(got.signbit()[~nan], expected.signbit()[~nan])
    return sign and torch.equal(got.isnan(), nan) and torch.equal(got[~nan], expected[~nan])


@pytest.mark.parametrize("hardware", FORMS)
@pytest.mark.parametrize(
    ("operation", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_encoding_8_bit_floats_rounds_once_and_saturates(
    operation: str, dtype: torch.dtype, hardware: bool
) -> None:
    x = hard_cases()
    got = apply(operation, x, torch.uint8, hardware=hardware)
    assert same(got.view(dtype).float(), saturate(x, dtype).float())


@pytest.mark.parametrize("hardware", FORMS)
@pytest.mark.parametrize("suffix", ["", "_float32"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_decoding_8_bit_floats_is_exact(dtype: torch.dtype, suffix: str, hardware: bool) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    operation = ("from_e4m3" if dtype == torch.float8_e4m3fn else "from_e5m2") + suffix
    result = torch.float32 if suffix else torch.float16
    got = apply(operation, codes, result, hardware=hardware)
    assert same(got.float(), codes.view(dtype).float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dequantising_is_exact(dtype: torch.dtype) -> None:
    x = hard_cases().to(dtype)
    assert same(apply("to_float32", x, torch.float32), x.float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_narrowing_rounds_to_even(dtype: torch.dtype) -> None:
    x = hard_cases()
    inside = x.isnan() | (x.abs() <= torch.finfo(dtype).max)
    assert same(apply("round_to", x[inside], dtype), x[inside].to(dtype))
    assert same(apply("saturate_to", x, dtype), saturate(x, dtype))


def test_bfloat16_overflow_is_infinite() -> None:
    x = torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf])
    assert same(apply("round_to", x, torch.bfloat16), x.bfloat16())


def test_integers_round_to_even() -> None:
    halves = torch.arange(-255, 256) / 2
    x = torch.cat([halves, halves.nextafter(torch.tensor(torch.inf)), torch.randn(500) * 1000])
    assert torch.equal(apply("round_to_int", x, torch.int32), x.round().int())
    assert torch.equal(apply("encode_int", x, torch.int32), x.round().clamp(-7, 7).int())


def test_int4_pairs_put_the_first_in_the_low_nibble() -> None:
    low, high = torch.cartesian_prod(torch.arange(-7, 8), torch.arange(-7, 8)).int().unbind(-1)
    expected = (low + 8) | ((high + 8) << 4)
    assert torch.equal(apply("pack", low, torch.uint8, high), expected.to(torch.uint8))


def test_division_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(50000, generator=generator) for _ in range(2))
    assert torch.equal(apply("divide", x, torch.float32, y), x / y)


def test_absmax_of_a_row_with_nan_is_nan() -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    x[1, 3], x[2, 5], x[3] = torch.nan, -torch.inf, 0.0
    out = torch.empty(4, device=DEVICE)
    absmax_kernel[(1,)](x.to(DEVICE), out, 4, 32)
    assert same(out.cpu(), x.abs().amax(-1))
