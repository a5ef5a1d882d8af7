"""Writing the paged cache by slots and reading it by block table, for every layout."""

from __future__ import annotations

import torch

from attn.reference.quant import (
    dequantize,
    dequantize_blocks,
    quantize_blocks,
    quantize_per_tensor,
    quantize_per_token_head,
    saturate,
)
from builders.checks.tensors import check_kv_scale, check_written
from builders.pages.paging import check_slots
from specs.cache_write import CacheTarget
from specs.dtypes import CacheDType, KVQuantMode
from specs.layouts import KVViews, latent_views
from specs.rows import LatentFormat, RowFormat


def scatter_rows(target: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``rows [T, ...]`` to their slots in ``target [N, P, ...]``; negative slots are skipped.

    Args:
        target: a strided view of the cache.
        slots: ``[T]`` int64, ``block * P + offset``.
        rows: ``[T, ...]`` in the target's dtype.
    """
    if rows.shape[1:] != target.shape[2:]:
        raise ValueError(
            f"rows of a token must have shape {tuple(target.shape[2:])} for this cache, "
            f"got {tuple(rows.shape[1:])}"
        )
    # Slots are padded under a CUDA graph, rows in a padded batch.
    slots = slots[: len(rows)]
    check_slots(slots, target.shape[1], target.shape[0])
    kept = slots >= 0
    slots, rows = slots[kept], rows[kept]
    if target.dtype.itemsize == 1 and target.dtype.is_floating_point:
        # Not every device has indexed writes of 8-bit floats, but all have them of bytes.
        target, rows = target.view(torch.uint8), rows.contiguous().view(torch.uint8)
    target[slots // target.shape[1], slots % target.shape[1]] = rows


def gather_rows(
    source: torch.Tensor, table_row: torch.Tensor, start: int, stop: int
) -> torch.Tensor:
    """Rows of positions ``[start, stop)`` of one request; entries of other blocks are not read.

    Args:
        source: ``[N, P, ...]`` strided view of the cache.
        table_row: ``[max_blocks]`` int32 of the request.
        start: first position.
        stop: position after the last.

    Returns:
        ``[stop - start, ...]``.

    Raises:
        ValueError: a block id outside the cache, or positions past the table.
    """
    block_size = source.shape[1]
    if stop <= start:
        return source.new_empty((0, *source.shape[2:]))
    if stop > len(table_row) * block_size:
        raise ValueError(
            f"KV length {stop} exceeds a block table of {len(table_row)} blocks of {block_size}"
        )
    first = start // block_size
    blocks = _used_blocks(table_row[first : -(-stop // block_size)], source.shape[0])
    offset = first * block_size
    pages = _take(source, (blocks,))
    return pages.flatten(0, 1)[start - offset : stop - offset]


def gather_positions(
    source: torch.Tensor, table_row: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Rows ``[S, ...]`` at ``[S]`` positions of one request, in the order of ``positions``.

    Raises:
        ValueError: a block id outside the cache.
    """
    num_blocks, block_size = source.shape[:2]
    blocks = _used_blocks(table_row[positions // block_size], num_blocks)
    return _take(source, (blocks, positions % block_size))


def _used_blocks(blocks: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Block ids as int64, checked: torch would count a negative id from the end of the cache."""
    outside = (blocks < 0) | (blocks >= num_blocks)
    if bool(outside.any()):
        raise ValueError(
            f"block_table ids must be in [0, {num_blocks}), got {int(blocks[outside][0])}"
        )
    return blocks.long()


def _take(source: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Index rows of any type: 8-bit floats are indexed as bytes, as not every device has both."""
    if source.dtype.itemsize == 1 and source.dtype.is_floating_point:
        return source.view(torch.uint8)[index].view(source.dtype)
    return source[index]


def write_kv(key: torch.Tensor, value: torch.Tensor, target: CacheTarget) -> None:
    """Write new keys and values into a dense cache, quantised as the cache is.

    Args:
        key: ``[T, Hk, D]``; rows past the last slot are padding.
        value: ``[T, Hk, Dv]``.
        target: the cache and the slot of each row.

    Raises:
        ValueError: tensors that do not fit together.
    """
    views, slots, k_scale, v_scale, cache_dtype = target
    check_written(key, value, views, slots, cache_dtype)
    if cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_kv_scale(name, scale, key.shape[1])
    sides = (
        (key, views.key, views.key_scale, k_scale),
        (value, views.value, views.value_scale, v_scale),
    )
    for rows, stored, inline, factor in sides:
        rows = rows[: len(slots)]
        if inline is not None:
            rows, inline_scale = quantize_per_token_head(rows, cache_dtype)
            scatter_rows(inline, slots, inline_scale)
        elif cache_dtype.is_quantized:
            rows = quantize_per_tensor(rows, factor, stored.dtype)
        elif rows.dtype != stored.dtype:
            rows = saturate(rows, stored.dtype)
        scatter_rows(stored, slots, rows)


def read_kv(
    views: KVViews,
    table_row: torch.Tensor,
    start: int,
    stop: int,
    scales: tuple[torch.Tensor, torch.Tensor],
    cache_dtype: CacheDType,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Real keys and values of positions ``[start, stop)`` of one request.

    Args:
        views: K and V of the cache.
        table_row: ``[max_blocks]`` int32 of the request.
        start: first position.
        stop: position after the last.
        scales: K and V scale, for per-tensor fp8.
        cache_dtype: how the cache is quantised.
        dtype: float32 or float64.

    Returns:
        ``[stop - start, Hk, D]`` and ``[stop - start, Hk, Dv]``.
    """
    sides = []
    for source, inline, scale in (
        (views.key, views.key_scale, scales[0]),
        (views.value, views.value_scale, scales[1]),
    ):
        stored = gather_rows(source, table_row, start, stop)
        factor: torch.Tensor | None = scale if cache_dtype.is_quantized else None
        if inline is not None:
            factor = gather_rows(inline, table_row, start, stop)
        sides.append(dequantize(stored, factor, cache_dtype, dtype))
    return sides[0], sides[1]


def write_latent(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor,
    row: RowFormat,
) -> None:
    """Write new latent rows.

    Args:
        kv_c: ``[T, L]``.
        k_pe: ``[T, r]``.
        kv_cache: ``[N, P, row]``.
        slots: ``[<= T]`` int64, -1 skips.
        k_scale: fp32 scalar, for the per-tensor format.
        row: the cache's row format.
    """
    views = latent_views(kv_cache, row)
    kv_c, k_pe = kv_c[: len(slots)], k_pe[: len(slots)]
    latent = LatentFormat(row.name)
    if latent is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
        kv_c, scale = quantize_blocks(kv_c)
        scatter_rows(views["scale"], slots, scale)
    elif latent is LatentFormat.FP8_NOPE_FP8_ROPE:
        kv_c = quantize_per_tensor(kv_c, k_scale, views["nope"].dtype)
        k_pe = quantize_per_tensor(k_pe, k_scale, views["nope"].dtype)
    for name, rows in (("nope", kv_c), ("rope", k_pe)):
        if name in views:
            target = views[name]
            rows = rows if rows.dtype == target.dtype else saturate(rows, target.dtype)
            scatter_rows(target, slots, rows)


def read_latent(
    kv_cache: torch.Tensor,
    table_row: torch.Tensor,
    start: int,
    stop: int,
    k_scale: torch.Tensor,
    row: RowFormat,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Real latent rows ``[stop - start, L + r]`` of one request.

    Args:
        kv_cache: ``[N, P, row]``.
        table_row: ``[max_blocks]`` int32 of the request.
        start: first position.
        stop: position after the last.
        k_scale: fp32 scalar, for the per-tensor format.
        row: the cache's row format.
        dtype: float32 or float64.
    """
    gathered = {
        name: gather_rows(view, table_row, start, stop)
        for name, view in latent_views(kv_cache, row).items()
    }
    return latent_values(gathered, k_scale, row, dtype)


def latent_values(
    fields: dict[str, torch.Tensor], k_scale: torch.Tensor, row: RowFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Real values ``[..., L + r]`` of gathered row fields, each ``[..., count]``."""
    latent = LatentFormat(row.name)
    if latent is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
        nope = dequantize_blocks(fields["nope"], fields["scale"], dtype)
    else:
        nope = fields["nope"].to(dtype)
    parts = [nope]
    if "rope" in fields:
        parts.append(fields["rope"].to(dtype))
    real = torch.cat(parts, dim=-1)
    if latent is LatentFormat.FP8_NOPE_FP8_ROPE:
        real = real * k_scale.reshape(()).to(dtype)
    return real
