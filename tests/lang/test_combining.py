"""Reductions and scans by a kernel's own function give the same by blocks as one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from builders.device import interprets

pytestmark = pytest.mark.skipif(not interprets(), reason="needs Triton's interpreter")


@triton.jit
def _then(factor, shift, next_factor, next_shift):
    """Two steps of ``factor * x + shift``, whose order matters."""
    return factor * next_factor, shift * next_factor + next_shift


@triton.jit
def _steps_kernel(factors_ptr, shifts_ptr, whole_ptr, parts_ptr, AXIS: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    factors, shifts = tl.load(factors_ptr + at), tl.load(shifts_ptr + at)
    whole = tl.reduce((factors, shifts), AXIS, _then, keep_dims=True)
    tl.store(whole_ptr + at, (at * 0).to(tl.float64) + whole[0])
    tl.store(whole_ptr + 32 + at, (at * 0).to(tl.float64) + whole[1])
    line = tl.reduce((factors, shifts), AXIS, _then)
    tl.store(whole_ptr + 64 + tl.arange(0, 4 if AXIS == 1 else 8), line[1])
    part = tl.associative_scan((factors, shifts), AXIS, _then)
    tl.store(parts_ptr + at, part[0])
    tl.store(parts_ptr + 32 + at, part[1])
    back = tl.associative_scan((factors, shifts), AXIS, _then, reverse=True)
    tl.store(parts_ptr + 64 + at, back[1])


def _one_by_one(factors: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = [(factors[0], shifts[0])]
    for factor, shift in zip(factors[1:], shifts[1:], strict=True):
        before, moved = found[-1]
        found.append((before * factor, moved * factor + shift))
    return np.stack([a for a, _ in found]), np.stack([b for _, b in found])


@pytest.mark.parametrize("axis", [0, 1])
def test_functions_whose_order_matters_are_combined_in_order(axis: int) -> None:
    factors, shifts = torch.randn(2, 4, 8, dtype=torch.float64)
    whole, parts = torch.full((72,), 9.0).double(), torch.empty(96, dtype=torch.float64)
    _steps_kernel[(1,)](factors, shifts, whole, parts, axis)
    lines = [np.moveaxis(x.numpy(), axis, 0) for x in (factors, shifts)]
    expected = _one_by_one(*lines)
    for found, one in zip(parts.view(3, 4, 8).numpy(), expected, strict=False):
        np.testing.assert_allclose(np.moveaxis(found, axis, 0), one)
    for found, one in zip(whole[:64].view(2, 4, 8).numpy(), expected, strict=True):
        np.testing.assert_allclose(np.moveaxis(found, axis, 0), np.broadcast_to(one[-1], one.shape))
    np.testing.assert_allclose(whole[64 : 64 + lines[0].shape[1]], expected[1][-1])
    backwards = _one_by_one(*(line[::-1] for line in lines))[1][::-1]
    np.testing.assert_allclose(np.moveaxis(parts[64:].view(4, 8).numpy(), axis, 0), backwards)
