"""What the bytes of a KV cache mean: the judge of every cache write.

A cache stores numbers as integers or floats (*units*), with a scale: real = units * scale. This
module reads such bytes (:func:`decode_side`, :func:`decode_latent`), says what a number becomes on
its way through a cache (:func:`quantized`, :func:`quantized_latent`) and finds numbers that were
not written to half an ulp (:meth:`Stored.misses`). It shares no code with ``specs.layouts``,
``specs.rows`` and ``attn.reference``, since it judges them too.

``cache_dtype`` is a name of ``specs.dtypes.CacheDType``:

- ``auto``: the model's dtype;
- ``float16``, ``bfloat16``: that dtype;
- ``fp8``, ``fp8_e4m3``, ``fp8_e5m2``: fp8 with a scale that the layer holds, for the tensor or for
  each head;
- ``fp8_per_token_head``, ``int8_per_token_head``, ``int4_per_token_head``: the row of a token and a
  head ends in its own fp32 scale, an *inline* scale;
- ``fp8_ds_mla``: a latent row of e4m3 with one fp32 scale for each 128 numbers, then the rotary
  part in bf16.
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
"""Inline scale of a row of zeros, and lower bound of every other."""
LATENT_BLOCK = 128
"""Numbers of an ``fp8_ds_mla`` row that share a scale."""


def half_ulp(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Half the distance between neighbouring values of ``dtype`` at ``x``, in the shape of ``x``.

    None as ``dtype`` stands for integers, whose half distance is 0.5.
    """
    if dtype is None:
        return torch.full_like(x, 0.5)
    info = torch.finfo(dtype)
    size = x.abs().clamp(min=info.smallest_normal)
    # Not log2: a GPU's is off by an ulp at powers of two, and its floor then by one.
    exponent = torch.frexp(size).exponent - 1
    return torch.ldexp(torch.full_like(size, info.eps / 2), exponent)


@dataclass(frozen=True, eq=False)
class Stored:
    """Numbers that a cache holds: units and their scales."""

    units: Tensor
    """float64, the stored numbers before scaling."""
    scale: Tensor
    """float64, broadcasts to ``units``."""
    dtype: torch.dtype | None
    """The dtype in which units are stored; None for integers."""

    @property
    def real(self) -> Tensor:
        """float64 numbers that the units stand for: ``units * scale``."""
        return self.units * self.scale

    def misses(self, x: Tensor) -> Tensor:
        """Where the cache does not hold ``x``: bool in the shape of ``x``.

        A unit is right when it is within half an ulp of ``x / scale``, clamped to the range of the
        stored dtype.
        """
        wanted = x.double() / self.scale
        if self.dtype is not None:
            wanted = wanted.clamp(-torch.finfo(self.dtype).max, torch.finfo(self.dtype).max)
        # A kernel divides in fp32, or multiplies by a reciprocal: two roundings.
        slack = 0.0 if bool((self.scale == 1).all()) else 2 * torch.finfo(torch.float32).eps
        limit = half_ulp(wanted, self.dtype) + slack * wanted.abs()
        return ~((self.units - wanted).abs() <= limit)


def quantized(x: Tensor, cache_dtype: str, scale: Tensor) -> Tensor:
    """Keys or values ``[T, Hk, D]`` after a round trip through the cache, in float64.

    Args:
        x: numbers that are written.
        cache_dtype: of a dense cache.
        scale: the layer's, scalar or ``[Hk]``; only fp8 without inline scales uses it.
    """
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
    """Latent rows ``[T, L + r]`` after a round trip through the cache, in float64.

    Args:
        rows: numbers that are written.
        cache_dtype: of a latent cache.
        scale: the layer's scalar; only fp8 with one scale for the tensor uses it.
        rank: L.
    """
    rows = rows.double()
    if cache_dtype == "fp8_ds_mla":
        blocks = latent_blocks(rows[:, :rank])
        step = block_scale(blocks)
        latent = (_rounded(blocks / step, torch.float8_e4m3fn) * step).flatten(1)
        return torch.cat([latent, rows[:, rank:].bfloat16().double()], -1)
    return quantized(rows[:, None], cache_dtype, scale)[:, 0]


def rounded_queries(rows: Tensor) -> Tensor:
    """Queries ``[..., D]`` rounded to e4m3 as the Hopper latent kernel may do: float64.

    A row is multiplied by a power of two first, so that its largest element is in [2^7, 2^8).
    """
    rows = rows.double()
    peak = rows.abs().amax(-1, keepdim=True)
    factor = torch.where(peak > 0, torch.exp2(7 - peak.log2().floor()), 1.0)
    return _rounded(rows * factor, torch.float8_e4m3fn) / factor


def latent_blocks(latent: Tensor) -> Tensor:
    """Latent rows ``[T, L]`` cut into the blocks ``[T, L / 128, 128]`` that share a scale."""
    blocks: Tensor = latent.unflatten(-1, (-1, LATENT_BLOCK))  # type: ignore[no-untyped-call]
    return blocks


def block_scale(blocks: Tensor) -> Tensor:
    """Scales that blocks ``[..., 128]`` must carry: float64 ``[..., 1]``.

    A block's scale is the smallest power of two that brings it into e4m3's range, and 1 for zeros.
    """
    peak = blocks.double().abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return torch.where(peak > 0, torch.exp2(peak.log2().ceil()), 1.0)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).float().to(dtype).double()


@dataclass(frozen=True)
class Pages:
    """How the bytes of a dense cache are laid out."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    row_bytes: int
    """Bytes of K and V of one token and one head, inline scales included."""
    page_bytes: int
    """Bytes from one block to the next, padding included."""
    split: bool
    """True: a page holds all of K, then all of V. False: each row holds K, then V."""
    head_major: bool
    """True: heads, then the tokens of each (HND). False: tokens, then the heads of each (NHD)."""

    def rows(self, buffer: Tensor) -> Tensor:
        """A copy of the cache's bytes by token and head: K's bytes, then V's.

        Args:
            buffer: ``[num_blocks * page_bytes]``, all bytes of the cache.

        Returns:
            ``[num_blocks, block_size, num_kv_heads, row_bytes]`` of the dtype of ``buffer``.
        """
        N, P, Hk = self.num_blocks, self.block_size, self.num_kv_heads
        content = buffer.view(N, self.page_bytes)[:, : P * Hk * self.row_bytes]
        if self.split:
            planes = content.reshape(N, 2, *((Hk, P) if self.head_major else (P, Hk)), -1)
            order = (0, 3, 2, 1, 4) if self.head_major else (0, 2, 3, 1, 4)
            return planes.permute(order).flatten(-2)
        tokens = content.reshape(N, *((Hk, P) if self.head_major else (P, Hk)), -1)
        return tokens.transpose(1, 2) if self.head_major else tokens

    def margins(self, buffer: Tensor) -> Tensor:
        """The padding of the pages ``[num_blocks, padding bytes]``, of all bytes of the cache."""
        content = self.block_size * self.num_kv_heads * self.row_bytes
        return buffer.view(self.num_blocks, self.page_bytes)[:, content:]


def side_bytes(size: int, cache_dtype: str, model_dtype: torch.dtype) -> int:
    """Bytes of K (or of V) of one token and one head, its inline scale included.

    Args:
        size: head size.
        cache_dtype: of a dense cache.
        model_dtype: what ``auto`` stands for.
    """
    if cache_dtype == "int4_per_token_head":
        return size // 2 + 4
    if cache_dtype.endswith("per_token_head"):
        return size + 4
    return size * _FLOATS.get(cache_dtype, model_dtype).itemsize


def decode_side(data: Tensor, cache_dtype: str, model_dtype: torch.dtype, scale: Tensor) -> Stored:
    """The keys (or the values) that bytes of a dense cache mean.

    Args:
        data: uint8 ``[..., Hk, bytes]``, K's (or V's) part of rows.
        cache_dtype: of a dense cache.
        model_dtype: what ``auto`` stands for.
        scale: the layer's, scalar or ``[Hk]``; only fp8 without inline scales uses it.

    Returns:
        Numbers ``[..., Hk, D]``.
    """
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
    """Inline scales that rows of keys or values ``[T, Hk, D]`` must carry: float64 ``[T, Hk, 1]``.

    ``cache_dtype`` is one of those that end in ``per_token_head``.
    """
    largest = _LARGEST_INT.get(cache_dtype) or torch.finfo(_FLOATS[cache_dtype]).max
    return (x.double().abs().amax(-1, keepdim=True) / largest).clamp(min=SMALLEST_INLINE_SCALE)


def latent_row_bytes(rank: int, rope_size: int, cache_dtype: str, model_dtype: torch.dtype) -> int:
    """Bytes of one token's latent row.

    Args:
        rank: L.
        rope_size: r.
        cache_dtype: of a latent cache.
        model_dtype: what ``auto`` stands for.
    """
    if cache_dtype == "fp8_ds_mla":
        return rank + rank // LATENT_BLOCK * 4 + rope_size * 2
    return (rank + rope_size) * _FLOATS.get(cache_dtype, model_dtype).itemsize


def decode_latent(
    data: Tensor, rank: int, cache_dtype: str, model_dtype: torch.dtype, scale: Tensor
) -> tuple[Stored, Stored]:
    """The latent ``[..., L]`` and the rotary part ``[..., r]`` that bytes of a latent cache mean.

    Args:
        data: uint8 ``[..., bytes]``, rows.
        rank: L.
        cache_dtype: of a latent cache.
        model_dtype: what ``auto`` stands for.
        scale: the layer's scalar; only fp8 with one scale for the tensor uses it.
    """
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
