"""The kernel that casts queries to e4m3: bits of the reference, and compiles for every GPU."""

from __future__ import annotations

import pytest
import torch

from attn.kernels.cache.quant import quantize_rows
from attn.ops.quant import quantize_into
from attn.reference.quant import saturate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HARDWARE = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize(
    "dtype", [pytest.param(one, marks=MARKS) for one in (torch.float16, torch.bfloat16)]
)
@pytest.mark.parametrize(("heads", "size"), [(8, 64), (7, 80), (3, 256), (1, 16)])
@pytest.mark.parametrize("is_strided", [False, True])
def test_the_kernel_gives_the_bits_of_the_reference(
    dtype: torch.dtype, heads: int, size: int, is_strided: bool
) -> None:
    generator = torch.Generator().manual_seed(heads * size)
    wide = 40 * torch.randn(5, heads + 2, size, generator=generator)
    wide[0, 0, :4] = torch.tensor([6e4, -6e4, 0.0, float("nan")])
    rows = wide.to(dtype).to(DEVICE)[:, :heads]
    rows = rows if is_strided else rows.contiguous()
    out = torch.empty(5, heads, size, dtype=torch.float8_e4m3fn, device=DEVICE)
    quantize_rows(rows, 0.3, out, hardware_e4m3=HARDWARE)
    expected = saturate(rows.cpu().float() / torch.tensor(0.3), torch.float8_e4m3fn)
    one, other = (values.cpu().view(torch.uint8) & 0x7F for values in (out, expected))
    is_nan = other == 0x7F
    assert torch.equal(one == 0x7F, is_nan)
    both = out.cpu().float()[~is_nan], expected.float()[~is_nan]
    assert torch.equal(*both)
    again = torch.empty_like(out)
    quantize_into(rows, 0.3, again)
    assert torch.equal(again.view(torch.uint8), out.view(torch.uint8))


def test_tensors_that_do_not_fit_are_refused() -> None:
    rows = torch.zeros(2, 3, 16)
    good = torch.zeros(2, 3, 16).to(torch.float8_e4m3fn)
    for out in (good[:1], good.float(), good.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match="out must be contiguous float8_e4m3fn"):
            quantize_rows(rows, 1.0, out, hardware_e4m3=False)
    with pytest.raises(ValueError, match="rows must be dense"):
        quantize_rows(torch.zeros(2, 3, 32)[..., ::2], 1.0, good, hardware_e4m3=False)
    quantize_rows(rows[:0], 1.0, good[:0], hardware_e4m3=False)
