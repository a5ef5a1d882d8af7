"""What a cache's bytes mean, in a few lines of its own: the judge of every cache write.

Shares no code with ``specs.layouts``, ``specs.rows`` and ``attn.reference``, which it judges too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_FLOATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_LARGEST_INT = {"int8_per_token_head": 127, "int4_per_token_head": 7}
SMALLEST_INLINE_SCALE = 1e-6
LATENT_BLOCK = 128


def half_ulp(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Half the distance of neighbouring values of ``dtype`` at ``x``; integers for None."""
    if dtype is None:
        return torch.full_like(x, 0.5)
    info = torch.finfo(dtype)
    size = x.abs().clamp(min=info.smallest_normal)
    # Not log2: a GPU's is off by an ulp at powers of two, and its floor then by one.
    exponent = torch.frexp(size).exponent - 1
    return torch.ldexp(torch.full_like(size, info.eps / 2), exponent)


@dataclass(frozen=True, eq=False)
class Stored:
    """Numbers as a cache holds them, float64; ``real = units * scale``."""

    units: Tensor
    scale: Tensor
    dtype: torch.dtype | None
    """Of the units; None for integers."""

    @property
    def real(self) -> Tensor:
        return self.units * self.scale

    def misses(self, x: Tensor) -> Tensor:
        """Where the units are not ``x / scale`` to half an ulp, saturated; bool like ``x``."""
        wanted = x.double() / self.scale
        if self.dtype is not None:
            wanted = wanted.clamp(-torch.finfo(self.dtype).max, torch.finfo(self.dtype).max)
        # A kernel divides in fp32, or multiplies by a reciprocal: two roundings.
        slack = 0.0 if bool((self.scale == 1).all()) else 2 * torch.finfo(torch.float32).eps
        limit = half_ulp(wanted, self.dtype) + slack * wanted.abs()
        return ~((self.units - wanted).abs() <= limit)


def quantized(x: Tensor, cache_dtype: str, scale: Tensor) -> Tensor:
    """float64 ``x [T, Hk, D]`` after a round trip through the cache, in the obvious way."""
    x = x.double()
    if cache_dtype == "auto":
        return x
    if not cache_dtype.endswith("per_token_head"):
        if not cache_dtype.startswith("fp8"):
            return x.to(_FLOATS[cache_dtype]).double()
        scale = scale.double().reshape(-1, 1)  # [Hk or 1, 1]
        return _rounded(x / scale, _FLOATS[cache_dtype]) * scale
    largest = _LARGEST_INT.get(cache_dtype) or torch.finfo(_FLOATS[cache_dtype]).max
    scale = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=SMALLEST_INLINE_SCALE)
    units = x / scale
    if cache_dtype in _LARGEST_INT:
        return units.round() * scale
    return _rounded(units, _FLOATS[cache_dtype]) * scale


def quantized_latent(rows: Tensor, cache_dtype: str, scale: Tensor, rank: int) -> Tensor:
    """float64 latent rows ``[T, L + r]`` after a round trip through the cache."""
    rows = rows.double()
    if cache_dtype == "fp8_ds_mla":
        blocks = rows[:, :rank].unflatten(-1, (-1, LATENT_BLOCK))
        step = block_scale(blocks)
        latent = (_rounded(blocks / step, torch.float8_e4m3fn) * step).flatten(1)
        return torch.cat([latent, rows[:, rank:].bfloat16().double()], -1)
    return quantized(rows[:, None], cache_dtype, scale)[:, 0]


def block_scale(blocks: Tensor) -> Tensor:
    """float64 ``[..., 1]``: the smallest power of two that brings a block into e4m3's range."""
    peak = blocks.double().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return torch.where(peak > 0, torch.exp2(peak.log2().ceil()), 1.0)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).float().to(dtype).double()


@dataclass(frozen=True)
class Pages:
    """How the bytes of a dense cache are laid out, by hand."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    row_bytes: int
    """K and V of one token of one head."""
    page_bytes: int
    split: bool
    head_major: bool

    def rows(self, buffer: Tensor) -> Tensor:
        """uint8 ``[N, P, Hk, row_bytes]`` (a copy): K's bytes, then V's."""
        N, P, Hk = self.num_blocks, self.block_size, self.num_kv_heads
        content = buffer.view(N, self.page_bytes)[:, : P * Hk * self.row_bytes]
        if self.split:
            planes = content.reshape(N, 2, *((Hk, P) if self.head_major else (P, Hk)), -1)
            order = (0, 3, 2, 1, 4) if self.head_major else (0, 2, 3, 1, 4)
            return planes.permute(order).flatten(-2)
        tokens = content.reshape(N, *((Hk, P) if self.head_major else (P, Hk)), -1)
        return tokens.transpose(1, 2) if self.head_major else tokens

    def margins(self, buffer: Tensor) -> Tensor:
        """Bytes of each page behind the content."""
        content = self.block_size * self.num_kv_heads * self.row_bytes
        return buffer.view(self.num_blocks, self.page_bytes)[:, content:]


def side_bytes(size: int, cache_dtype: str, model_dtype: torch.dtype) -> int:
    """Bytes of one K (or V) of one head, its inline scale included."""
    if cache_dtype == "int4_per_token_head":
        return size // 2 + 4
    if cache_dtype.endswith("per_token_head"):
        return size + 4
    return size * _FLOATS.get(cache_dtype, model_dtype).itemsize


def decode_side(data: Tensor, cache_dtype: str, model_dtype: torch.dtype, scale: Tensor) -> Stored:
    """Numbers of one side of rows ``[..., Hk, bytes]``; ``scale`` is the layer's, if any."""
    if cache_dtype.endswith("per_token_head"):
        inline = _as(data[..., -4:], torch.float32).double()
        data = data[..., :-4]
        if cache_dtype == "int4_per_token_head":
            units = torch.cat([data & 0xF, data >> 4], -1).double() - 8
            return Stored(units, inline, None)
        if cache_dtype == "int8_per_token_head":
            return Stored(_as(data, torch.int8).double(), inline, None)
        return Stored(_as(data, torch.float8_e4m3fn).double(), inline, torch.float8_e4m3fn)
    dtype = _FLOATS.get(cache_dtype, model_dtype)
    outer = scale.double().reshape(-1, 1) if cache_dtype.startswith("fp8") else torch.ones(())
    return Stored(_as(data, dtype).double(), outer.to(data.device), dtype)


def expected_inline_scale(x: Tensor, cache_dtype: str) -> Tensor:
    """float64 ``[T, Hk, 1]`` scale that a per-token-head row must carry."""
    largest = _LARGEST_INT.get(cache_dtype) or torch.finfo(_FLOATS[cache_dtype]).max
    return (x.double().abs().amax(-1, keepdim=True) / largest).clamp(min=SMALLEST_INLINE_SCALE)


def latent_row_bytes(rank: int, rope_size: int, cache_dtype: str, model_dtype: torch.dtype) -> int:
    """Bytes of a latent row."""
    if cache_dtype == "fp8_ds_mla":
        return rank + rank // LATENT_BLOCK * 4 + rope_size * 2
    return (rank + rope_size) * _FLOATS.get(cache_dtype, model_dtype).itemsize


def decode_latent(
    data: Tensor, rank: int, cache_dtype: str, model_dtype: torch.dtype, scale: Tensor
) -> tuple[Stored, Stored]:
    """Latent and rope of rows ``[..., bytes]``: ``[..., L]`` and ``[..., r]``."""
    one = torch.ones((), device=data.device)
    if cache_dtype == "fp8_ds_mla":
        scales_end = rank + rank // LATENT_BLOCK * 4
        steps = _as(data[..., rank:scales_end], torch.float32).double()
        units = _as(data[..., :rank], torch.float8_e4m3fn).double()
        latent = Stored(units, steps.repeat_interleave(LATENT_BLOCK, -1), torch.float8_e4m3fn)
        rope = Stored(_as(data[..., scales_end:], torch.bfloat16).double(), one, torch.bfloat16)
        return latent, rope
    dtype = _FLOATS.get(cache_dtype, model_dtype)
    units = _as(data, dtype).double()
    outer = scale.double().to(data.device) if cache_dtype.startswith("fp8") else one
    return Stored(units[..., :rank], outer, dtype), Stored(units[..., rank:], outer, dtype)


def _as(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.contiguous().view(dtype)
