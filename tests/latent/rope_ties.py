"""Compares two e4m3 roundings of one rotation: bits are equal, unless fp32 cannot tell which is
nearer.

Kernels may multiply by a reciprocal where another divides, and fuse a product with a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specs.cache_write import Rotation, UnrotatedLatents

LARGEST = 448.0


def real_rows(
    nope: Tensor, rope: Tensor, table: Tensor, positions: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Rotated rows by definition, and the sum of sizes in each element: float64 ``[T, H, L + r]``.

    A pair of columns is a complex number, turned by an angle.
    """
    cos, sin = table.double()[positions.long()][:, None].chunk(2, -1)
    x = rope.double()
    pairs = x.chunk(2, -1) if is_neox else (x[..., 0::2], x[..., 1::2])
    turned = torch.complex(*(part.contiguous() for part in pairs)) * torch.complex(cos, sin)
    parts = turned.real, turned.imag
    sizes = (turned.abs(),) * 2
    joined = [
        torch.cat(both, -1) if is_neox else torch.stack(both, -1).flatten(-2)
        for both in (parts, sizes)
    ]
    wide = nope.double()
    return torch.cat([wide, joined[0]], -1), torch.cat([wide.abs(), joined[1]], -1)


def differences(one: Tensor, other: Tensor, real: Tensor, size: Tensor, scale: float) -> list[str]:
    """What is wrong with two e4m3 tensors of the same values ``real / scale``; an empty list if
    nothing is.
    """
    wanted, band = real / scale, 4 * torch.finfo(torch.float32).eps * size / scale
    clamped = wanted.clamp(-LARGEST, LARGEST)
    step = torch.exp2(clamped.abs().clamp(min=2**-6).log2().floor() - 3)
    found = []
    for name, stored in (("one", one), ("other", other)):
        off = (stored.double() - clamped).abs() > step / 2 + band
        if bool(off.any()) or bool(stored.float().isnan().any()):
            found.append(f"{name}: {int(off.sum())} elements are not the nearest")
    differ = one.double() != other.double()
    tie = (one.double() + other.double()) / 2
    odd = differ & ((wanted - tie).abs() > band)
    if bool(odd.any()):
        found.append(f"{int(odd.sum())} of {int(differ.sum())} differ where there is no tie")
    return found


def grouped(**given: Any) -> dict[str, Any]:
    """Arguments by name, with those of queries, rows and rotation in their records."""
    return {
        "latents": UnrotatedLatents(*(given.pop(name) for name in UnrotatedLatents._fields)),
        "rotation": Rotation(*(given.pop(name) for name in Rotation._fields)),
        **given,
    }
