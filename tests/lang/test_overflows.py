"""Triton's interpreter reports sums and products in kernels that do not fit 32 bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from builders.device import interprets

pytestmark = pytest.mark.skipif(not interprets(), reason="needs Triton's interpreter")


@triton.jit
def _compute(x_ptr, out_ptr, y, KIND: tl.constexpr, SIZE: tl.constexpr = 2):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    if KIND == "add":
        x = x + y
    elif KIND == "sub":
        x = x - y
    elif KIND == "mul":
        x = x * y
    else:
        x = (x.to(tl.int64) * y).to(tl.int32)
    tl.store(out_ptr + tl.arange(0, SIZE), x)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("kind", "x", "y"),
    [
        ("add", 2**31 - 1, 1),
        ("add", -(2**31), -1),
        ("sub", -(2**31), 1),
        ("sub", 2**31 - 1, -1),
        ("mul", 2**16, 2**15),
        ("mul", -(2**30), 3),
    ],
)
def test_a_result_that_does_not_fit_is_an_error_and_its_neighbour_is_none(
    kind: str, x: int, y: int, size: int
) -> None:
    """The interpreter checks single numbers and tensors in different ways, so both are tested."""
    given = torch.tensor([1, x], dtype=torch.int32)[-size:]
    out = torch.zeros_like(given)
    with pytest.raises(Exception, match=f"{kind} of int32: results are"):
        _compute[(1,)](given, out, y, kind, size)
    given[-1] = x // 2 if kind != "mul" else x // 4
    _compute[(1,)](given, out, y, kind, size)
    wanted = {"add": given + y, "sub": given - y, "mul": given * y}[kind]
    assert torch.equal(out, wanted)


def test_products_in_64_bits_are_none_of_its_business() -> None:
    given, out = torch.tensor([1, 2**30], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    _compute[(1,)](given, out, 4, "wide")
    assert out.tolist() == [4, 0]
