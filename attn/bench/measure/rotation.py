"""Inputs and a check of every element for rotation, rounding to e4m3 and cache write of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from attn.bench.cases.inputs import Content
from attn.bench.measure.pairs import BrokenError
from attn.impls.base import LayerScales

E4M3: Final = torch.float8_e4m3fn
Q_SCALE, K_SCALE = 0.3, 0.2
MAX_POSITION: Final = 4096
UNWRITTEN: Final = 0x7F
"""Byte of a NaN in e4m3, which fills outputs before a call."""


@dataclass(frozen=True)
class Rotation:
    """One call with its outputs, and the expected values of the outputs."""

    call: Callable[[], object]
    q_out: torch.Tensor
    """``[T, H, L + r]`` e4m3 queries, written by the call."""
    kv_cache: torch.Tensor
    """``[N, P, L + r]`` e4m3 cache, written by the call."""
    slots: torch.Tensor
    """``[T]`` int64 slot of each token."""
    query: tuple[torch.Tensor, torch.Tensor]
    """``[T, H, L + r]`` float64 queries divided by their scale, and a bound of fp32's error."""
    rows: tuple[torch.Tensor, torch.Tensor]
    """``[T, L + r]`` float64 latent rows divided by their scale, and a bound of fp32's error."""

    def error(self) -> float:
        """Call once and return the largest relative norm of a row's error.

        Raises:
            BrokenError: an element is not the nearest in e4m3, or a row of another slot was
                written.
        """
        self.q_out.view(torch.uint8).fill_(UNWRITTEN)
        self.kv_cache.view(torch.uint8).fill_(UNWRITTEN)
        self.call()
        codes = self.kv_cache.view(torch.uint8).flatten(0, 1)
        written = codes[self.slots].view(E4M3)
        kept = torch.ones(len(codes), dtype=torch.bool, device=codes.device)
        kept[self.slots] = False
        if not bool((codes[kept] == UNWRITTEN).all()):
            raise BrokenError("rows of other slots were written")
        errors = []
        for name, stored, (real, band) in (
            ("queries", self.q_out, self.query),
            ("rows", written, self.rows),
        ):
            off = misrounded(stored, real, band)
            if off:
                raise BrokenError(f"{off} elements of {name} are not the nearest in e4m3")
            errors.append((stored.double() - real).norm(dim=-1) / real.norm(dim=-1))
        return max(float(error.max()) for error in errors)


def misrounded(stored: torch.Tensor, real: torch.Tensor, band: torch.Tensor) -> int:
    """Number of e4m3 elements that are not the nearest to any value within ``band`` of ``real``."""
    limit = torch.finfo(E4M3).max
    wanted = real.clamp(-limit, limit)
    step = torch.exp2(wanted.abs().clamp(min=2**-6).log2().floor() - 3)
    # The comparison is False for NaN, which therefore counts as wrong.
    near = (stored.double() - wanted).abs() <= step / 2 + band
    return int((~near).sum())


def make_rotation(
    content: Content, kv_cache: torch.Tensor, slots: torch.Tensor, impl: Any, seed: int
) -> Rotation:
    """Make a step of decodes with the strides that tensors have in a model.

    Absorbed queries have the heads as their first axis in memory, and the parts of a latent row are
    views of one projection.

    Args:
        content: content of a latent case.
        kv_cache: cache of the impl's layer.
        slots: ``[T]`` int64 slots of the step's tokens.
        impl: an impl with ``do_rope_quantize_and_kv_cache_update``.
        seed: seed of the inputs.
    """
    case, device = content.case, content.device
    tokens, heads, rank, rope = case.num_tokens, case.num_heads, case.head_size_v, case.rope_size
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, device=device, generator=generator)
        return (3 * drawn).to(content.query.dtype)

    q_nope = draw(heads, tokens, rank).transpose(0, 1)
    q_pe = draw(tokens, heads, 2 * rope)[..., rope:]
    fused = draw(tokens, rank + rope)
    frequencies = 10_000.0 ** (-torch.arange(0, rope, 2, device=device).double() / rope)
    angles = torch.arange(MAX_POSITION, device=device).double()[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], -1).float()
    positions = torch.randint(0, MAX_POSITION, (tokens,), device=device, generator=generator)
    q_out = torch.empty((tokens, heads, rank + rope), dtype=E4M3, device=device)
    layer: Any = LayerScales.of(k=K_SCALE, q=Q_SCALE, device=device)

    def call() -> None:
        impl.do_rope_quantize_and_kv_cache_update(
            *(layer, q_nope, q_pe, fused[:, :rank], fused[:, rank:], positions, table, False),
            *(kv_cache, slots, q_out),
        )

    turned = table.double()[positions]
    query = _expected(q_nope, q_pe, turned, Q_SCALE)
    rows = _expected(fused[:, None, :rank], fused[:, None, rank:], turned, K_SCALE)
    row, band = (part[:, 0] for part in rows)
    return Rotation(call, q_out, kv_cache, slots, query, (row, band))


def _expected(
    nope: torch.Tensor, rope: torch.Tensor, turned: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected ``[T, heads, L + r]`` float64 values over the scale, and a bound of fp32's error.

    Rotation pairs neighbouring elements.
    """
    cos, sin = turned[:, None].chunk(2, -1)
    x, y = rope.double()[..., 0::2], rope.double()[..., 1::2]
    wide = nope.double()
    rotated = torch.stack([x * cos - y * sin, y * cos + x * sin], -1).flatten(-2)
    sizes = torch.hypot(x, y).repeat_interleave(2, -1)
    real, size = torch.cat([wide, rotated], -1), torch.cat([wide.abs(), sizes], -1)
    as_stored = float(torch.tensor(scale))
    return real / as_stored, 4 * torch.finfo(torch.float32).eps * size / as_stored
