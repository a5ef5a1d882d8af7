"""Dense cache writes, with and without RoPE: by kernels on a GPU, by the reference elsewhere."""

from __future__ import annotations

import torch

from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference import cache as reference
from attn.reference.rope import rotate_in_place
from specs.dtypes import CacheDType
from specs.layouts import KVViews


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    views: KVViews,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    cache_dtype: CacheDType,
) -> None:
    """Write new keys and values into a dense cache, quantised as the cache is.

    Args:
        key: ``[T, Hk, D]``; rows past ``len(slot_mapping)`` are padding.
        value: ``[T, Hk, Dv]``.
        views: K and V of the cache.
        slot_mapping: ``[<= T]`` int64, ``block * P + offset``; -1 skips.
        k_scale: fp32 scalar or ``[Hk]``, for per-tensor fp8.
        v_scale: fp32 scalar or ``[Hk]``, for per-tensor fp8.
        cache_dtype: how the cache is quantised.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: a cache dtype or head size that no kernel writes.
    """
    arguments = (key, value, views, slot_mapping, k_scale, v_scale, cache_dtype)
    if not has_kernel(key):
        reference.write_kv(*arguments)
        return
    from attn.kernels.cache.write import write_kv_launch

    write_kv_launch(*arguments, hardware_e4m3=converts_float8(key.device)).launch()


def write_stored_rows(
    rows: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], slot_mapping: torch.Tensor
) -> None:
    """Write latent rows that are in the cache's 8-bit type already, byte by byte; one launch.

    Args:
        rows: ``[T, L + r]``, dense; L and r are even.
        cache: ``[N, P, L]`` and ``[N, P, r]`` views of the cache; strides are even.
        slot_mapping: ``[<= T]`` int64; -1 skips.
    """
    # Two elements are viewed as one fp16 number, which the write kernel copies bit by bit.
    pairs = rows.view(torch.float16)[:, None]
    latent, rope = (part.view(torch.float16)[:, :, None] for part in cache)
    width = latent.shape[-1]
    one = torch.ones((), device=rows.device)
    given = pairs[..., width:], pairs[..., :width], KVViews(rope, latent), slot_mapping
    write_kv(*given, one, one, CacheDType.AUTO)


def rope_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    views: KVViews,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    cache_dtype: CacheDType,
) -> None:
    """Rotate query and key in place, then write the rotated keys and the values; one launch.

    Args:
        query: ``[T, H, D]``; rows past ``len(positions)`` stay unchanged.
        key: ``[T, Hk, D]``; rows past ``len(positions)`` stay unchanged, and a row with slot -1 is
            rotated but not written.
        value: ``[T, Hk, Dv]``.
        positions: ``[>= len(slot_mapping)]`` integer.
        cos_sin_cache: ``[max_position, rotary_dim]``: cosines, then sines.
        is_neox: the pair of element i is i + rotary_dim / 2 (True) or its neighbour (False).
        views: K and V of the cache.
        slot_mapping: ``[<= T]`` int64, ``block * P + offset``; -1 skips.
        k_scale: fp32 scalar or ``[Hk]``, for per-tensor fp8.
        v_scale: fp32 scalar or ``[Hk]``, for per-tensor fp8.
        cache_dtype: how the cache is quantised.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: a cache dtype or head size that no kernel writes.
    """
    if not has_kernel(key):
        for rows in (query, key):
            rotate_in_place(rows, positions, cos_sin_cache, is_neox)
        reference.write_kv(key, value, views, slot_mapping, k_scale, v_scale, cache_dtype)
        return
    from attn.kernels.cache.write import rope_and_write_kv_call
    from builders.launch.launcher import launch

    launch(
        rope_and_write_kv_call(
            query,
            key,
            value,
            positions,
            cos_sin_cache,
            is_neox,
            views,
            slot_mapping,
            k_scale,
            v_scale,
            cache_dtype,
            hardware_e4m3=converts_float8(key.device),
        )
    )
