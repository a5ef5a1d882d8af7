"""Quantisation of KV rows: saturating casts, per-(token, head) scales, block scales."""

from __future__ import annotations

import torch

from specs.dtypes import CacheDType
from specs.rows import LATENT_BLOCK

INT4_ZERO = 8
"""A signed 4-bit value is stored as value + 8."""


def saturate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to a narrow float type with values beyond its range clamped, never turned to NaN.

    torch's own cast to e4m3 gives NaN beyond about 464.
    """
    limit = torch.finfo(dtype).max
    # float32 holds the largest value of every narrow type exactly; fp16 does not hold bf16's.
    wide = x if x.dtype == torch.float64 else x.float()
    return wide.clamp(-limit, limit).to(dtype)


def quantize_per_tensor(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x / scale``, saturated.

    Args:
        x: ``[T, Hk, D]`` (or ``[T, width]`` with a scalar scale).
        scale: fp32 scalar, or ``[Hk]`` per head: real = stored * scale.
        dtype: the stored type.
    """
    return saturate(x.float() / per_head_scale(scale), dtype)


def per_head_scale(scale: torch.Tensor) -> torch.Tensor:
    """Shape a scalar or ``[Hk]`` scale so that it multiplies ``[T, Hk, D]``."""
    return scale[:, None] if scale.dim() == 1 and scale.numel() > 1 else scale.reshape(())


def quantize_per_token_head(
    x: torch.Tensor, cache_dtype: CacheDType
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale for each (token, head): absmax / largest stored value, min. 1e-6.

    Args:
        x: ``[T, Hk, D]``.
        cache_dtype: one of the ``*_per_token_head`` types.

    Returns:
        Stored ``[T, Hk, D]`` (int4: ``[T, Hk, D // 2]`` uint8, element i in the low and
        i + D / 2 in the high nibble) and fp32 scales ``[T, Hk]``.
    """
    largest = {
        CacheDType.INT8_PER_TOKEN_HEAD: 127.0,
        CacheDType.INT4_PER_TOKEN_HEAD: 7.0,
        CacheDType.FP8_PER_TOKEN_HEAD: torch.finfo(torch.float8_e4m3fn).max,
    }[cache_dtype]
    # Clamped, because an infinite value would make its row's scale infinite and the row NaN.
    limit = torch.finfo(torch.float32).max
    x = x.float().clamp(-limit, limit)
    scale = (x.abs().amax(-1) / largest).clamp(min=1e-6)
    scaled = x / scale[..., None]
    if cache_dtype is CacheDType.FP8_PER_TOKEN_HEAD:
        return saturate(scaled, torch.float8_e4m3fn), scale
    whole = scaled.round().clamp(-largest, largest)
    if cache_dtype is CacheDType.INT8_PER_TOKEN_HEAD:
        return whole.to(torch.int8), scale
    low, high = (whole + INT4_ZERO).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4), scale


def dequantize(
    stored: torch.Tensor,
    scale: torch.Tensor | None,
    cache_dtype: CacheDType,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Real values of stored rows.

    Args:
        stored: ``[S, Hk, D]`` (int4: ``[S, Hk, D // 2]``).
        scale: ``[S, Hk]`` inline scales, a scalar or ``[Hk]`` per-tensor scale, or None.
        cache_dtype: how the rows are stored.
        dtype: float32 or float64.
    """
    if cache_dtype is CacheDType.INT4_PER_TOKEN_HEAD:
        stored = torch.cat([stored & 0xF, stored >> 4], dim=-1).to(torch.int8) - INT4_ZERO
    real = stored.to(dtype)
    if scale is None:
        return real
    if cache_dtype.quant_mode.is_per_token_head:
        return real * scale[..., None].to(dtype)
    return real * per_head_scale(scale).to(dtype)


def power_of_two_scale(absmax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Smallest power of two that brings ``absmax`` into the range of ``dtype``, in fp32.

    It is 1 where ``absmax`` is zero, infinite or NaN. Powers of two make a later conversion to
    other formats exact, and FlashMLA's SM90 kernel, which rounds block scales to bf16, leaves them
    unchanged.
    """
    return power_of_two_above(absmax.float() / torch.finfo(dtype).max)


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """Smallest normal fp32 power of two that is not below ``x``; 1 for 0, infinity and NaN."""
    mantissa, exponent = torch.frexp(x.float())
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=-126)
    power = torch.ldexp(torch.ones_like(mantissa), exponent)
    return torch.where((x > 0) & x.isfinite(), power, 1.0)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """View ``[T, L]`` as blocks ``[T, L // 128, 128]``; T may be 0."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // LATENT_BLOCK, LATENT_BLOCK)


def quantize_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with one power-of-two scale per 128 elements.

    Args:
        x: ``[T, L]``, L a multiple of 128.

    Returns:
        ``[T, L]`` e4m3 and ``[T, L // 128]`` fp32.
    """
    blocks = _blocks(x.float())
    scale = power_of_two_scale(blocks.abs().amax(-1), torch.float8_e4m3fn)
    return saturate(blocks / scale[..., None], torch.float8_e4m3fn).flatten(-2), scale


def dequantize_blocks(
    stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Real values ``[S, L]`` of e4m3 rows with a scale per 128 elements."""
    blocks = _blocks(stored.to(dtype))
    return (blocks * scale[..., None].to(dtype)).flatten(-2)
