"""Latent rows: written to a cache, gathered by slots, converted to a format that a kernel reads.

Operations run as kernels on a GPU and in the reference elsewhere. ``specs.sparse_mla.CONVERSIONS``
lists the conversions and what each loses: those from e4m3 rows are exact where scales are powers of
two.
"""

from __future__ import annotations

import torch

from attn.ops.cache import rope_and_write_kv, write_kv
from attn.ops.dispatch import converts_float8, has_kernel
from attn.reference import latent_convert as reference
from attn.reference.cache import scatter_rows, write_latent
from builders.checks.debug import debug_enabled
from builders.pages.paging import check_slots
from specs.cache_write import CacheTarget, Rotation, RowsAtSlots
from specs.dtypes import CacheDType
from specs.layouts import KVViews, latent_views
from specs.rows import LatentFormat, RowFormat
from specs.sparse_mla import conversion_reason

_CHUNK_ROWS = 65_536
"""Rows that the reference converts at a time; this bounds the memory of its fp32 copies."""


def write_latent_rows(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    row: RowFormat,
) -> None:
    """Write new latent rows into a cache of any attended format, in one launch.

    Elements of e4m3 saturate. The scale of a block of 128 elements is the smallest power of two
    that brings the block into e4m3's range, or 1 for a block of zeros.

    Args:
        kv_c: ``[T, L]``; rows past ``len(slot_mapping)`` are padding.
        k_pe: ``[T, r]``.
        kv_cache: ``[N, P, row]``.
        slot_mapping: ``[<= T]`` int64; -1 skips.
        k_scale: fp32 scalar, used by rows with one scale per tensor.
        row: the cache's row format.

    Raises:
        ValueError: tensors that do not fit together, or the indexer's format.
    """
    latent = LatentFormat(row.name)
    if latent is LatentFormat.INDEXER_FP8:
        raise ValueError(f"row must be a format of attended rows, got {latent.value!r}")
    views = latent_views(kv_cache, row)
    if debug_enabled():
        check_slots(slot_mapping, kv_cache.shape[1], len(kv_cache))
    if not has_kernel(kv_c):
        write_latent(kv_c, k_pe, kv_cache, slot_mapping, k_scale, row)
        return
    if latent is not LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
        target = _dense_target(views, slot_mapping, k_scale, latent)
        write_kv(k_pe[:, None], kv_c[:, None], target)
        return
    count = len(slot_mapping)
    if kv_c.shape[1] != views["nope"].shape[2] or k_pe.shape[1] != row["rope"].count:
        raise ValueError(
            f"kv_c and k_pe must be {row['nope'].count} and {row['rope'].count} wide for "
            f"{row.name} rows, got {kv_c.shape[1]} and {k_pe.shape[1]}"
        )
    if min(len(kv_c), len(k_pe)) < count or kv_c.stride(-1) != 1 or k_pe.stride(-1) != 1:
        raise ValueError(
            f"kv_c and k_pe must have dense rows, one for each of {count} slots, got "
            f"{len(kv_c)} and {len(k_pe)} in strides {kv_c.stride()} and {k_pe.stride()}"
        )
    # Each row is a block of its own. As one block of all rows, the number of rows would be the
    # block size, a constant that the kernel is compiled for.
    new = RowsAtSlots({"nope": kv_c[:, None], "rope": k_pe[:, None]}, LatentFormat.BF16)
    _launch(new, RowsAtSlots(views, latent, slot_mapping), k_scale, count, snap_scales=False)


def rope_and_write_latent_rows(
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    rotation: Rotation,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    row: RowFormat,
) -> None:
    """Rotate both rotary parts in place and write rows without block scales, in one launch.

    Args:
        q_pe: ``[T, H, r]``, dense rows.
        kv_c: ``[T, L]``; rows past ``len(slot_mapping)`` are padding.
        k_pe: ``[T, r]``, dense rows.
        rotation: positions ``[T]`` and the table ``[max_position, r]``.
        kv_cache: ``[N, P, row]``.
        slot_mapping: ``[<= T]`` int64; -1 skips.
        k_scale: fp32 scalar, used by rows with one scale per tensor.
        row: the cache's row format.

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: rows with block scales, or the indexer's rows.
    """
    latent = LatentFormat(row.name)
    if latent not in (LatentFormat.BF16, LatentFormat.FP8_NOPE_FP8_ROPE):
        raise NotImplementedError(f"{latent.value} rows are not rotated and written in one launch")
    if debug_enabled():
        check_slots(slot_mapping, kv_cache.shape[1], len(kv_cache))
    target = _dense_target(latent_views(kv_cache, row), slot_mapping, k_scale, latent)
    rope_and_write_kv(q_pe, k_pe[:, None], kv_c[:, None], rotation, target)


def _dense_target(
    views: dict[str, torch.Tensor],
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    latent: LatentFormat,
) -> CacheTarget:
    """Latent rows for the dense write: the rotary part as keys, which RoPE rotates there.

    Args:
        views: fields of the cache, ``[N, P, count]`` each, by name.
        slot_mapping: ``[<= T]`` int64; -1 skips.
        k_scale: fp32 scalar.
        latent: the rows' format, one without block scales.
    """
    keys = KVViews(views["rope"][:, :, None], views["nope"][:, :, None])
    is_raw = latent is LatentFormat.FP8_NOPE_FP8_ROPE
    cache_dtype = CacheDType.FP8_E4M3 if is_raw else CacheDType.AUTO
    return CacheTarget(keys, slot_mapping, k_scale, k_scale, cache_dtype)


def convert_rows(
    kv_cache: torch.Tensor,
    source: RowFormat,
    slots: torch.Tensor,
    out: torch.Tensor,
    target: RowFormat,
    k_scale: torch.Tensor,
    snap_scales: bool = False,
) -> None:
    """Write to row i of ``out`` the cached row at ``slots[i]``, in the target's format; one launch.

    Only listed rows are read, each as often as it is listed. Between equal formats rows are copied.

    Args:
        kv_cache: ``[N, P, row]``.
        source: row format of ``kv_cache``.
        slots: ``[S]`` int32 or int64, contiguous; -1 gives a row of zeros.
        out: ``[>= S, row]`` in the target's format, dense rows; rows past S are not written.
        target: row format of ``out``.
        k_scale: fp32 scalar, used by source rows with one scale per tensor.
        snap_scales: round block scales that are made from ``k_scale`` to powers of two, for kernels
            that read scales as powers of two; it costs elements one more rounding.

    Raises:
        ValueError: a conversion that is refused, with the reason; tensors that do not fit.
    """
    _check_formats(source, target)
    if slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1:
        raise ValueError(
            f"slots must be [S] int32 or int64, got shape {tuple(slots.shape)} of {slots.dtype}"
        )
    if len(slots) > 1 and slots.stride(0) != 1:
        raise ValueError(f"slots must be contiguous, got strides {slots.stride()}")
    if out.dim() != 2 or len(out) < len(slots):
        raise ValueError(
            f"out must have a row for each of {len(slots)} slots, got shape {tuple(out.shape)}"
        )
    fields, to_fields = latent_views(kv_cache, source), latent_views(out[None], target)
    if debug_enabled():
        check_slots(slots, kv_cache.shape[1], len(kv_cache))
    if _runs_kernel(kv_cache, out):
        listed = RowsAtSlots(fields, LatentFormat(source.name), slots)
        written = RowsAtSlots(to_fields, LatentFormat(target.name))
        _launch(listed, written, k_scale, len(slots), snap_scales)
        return
    for first in range(0, len(slots), _CHUNK_ROWS):
        rows = reference.gather_fields(fields, slots[first : first + _CHUNK_ROWS])
        made = reference.convert_fields(rows, source, target, k_scale, snap_scales)
        for name, part in made.items():
            scatter_rows(to_fields[name], _places(first, len(part), out.device), part)


def convert_blocks(
    kv_cache: torch.Tensor,
    source: RowFormat,
    out: torch.Tensor,
    target: RowFormat,
    k_scale: torch.Tensor,
    first_block: int = 0,
    snap_scales: bool = False,
) -> None:
    """Write to block i of ``out`` block ``first_block + i`` of the cache, in the target's format.

    One launch converts a whole cache. With an ``out`` of fewer blocks, several calls convert it in
    bounded memory. Slots without a token are converted too and have no meaning.

    Args:
        kv_cache: ``[N, P, row]``.
        source: row format of ``kv_cache``.
        out: ``[M, P, row]`` in the target's format.
        target: row format of ``out``.
        k_scale: fp32 scalar, used by source rows with one scale per tensor.
        first_block: first of the M blocks in ``kv_cache``.
        snap_scales: round block scales that are made from ``k_scale`` to powers of two, for kernels
            that read scales as powers of two; it costs elements one more rounding.

    Raises:
        ValueError: a conversion that is refused, with the reason; blocks of another size, or beyond
            the cache.
    """
    _check_formats(source, target)
    if out.shape[1] != kv_cache.shape[1]:
        raise ValueError(
            f"out must have blocks of {kv_cache.shape[1]} tokens as kv_cache, got {out.shape[1]}"
        )
    count = len(out)
    if first_block < 0 or first_block + count > len(kv_cache):
        raise ValueError(
            f"first_block must leave {count} of {len(kv_cache)} blocks, got {first_block}"
        )
    fields = latent_views(kv_cache[first_block : first_block + count], source)
    to_fields = latent_views(out, target)
    rows = count * out.shape[1]
    if _runs_kernel(kv_cache, out):
        read = RowsAtSlots(fields, LatentFormat(source.name))
        written = RowsAtSlots(to_fields, LatentFormat(target.name))
        _launch(read, written, k_scale, rows, snap_scales)
        return
    for first in range(0, rows, _CHUNK_ROWS):
        slots = _places(first, min(_CHUNK_ROWS, rows - first), out.device)
        listed = reference.gather_fields(fields, slots)
        made = reference.convert_fields(listed, source, target, k_scale, snap_scales)
        for name, part in made.items():
            scatter_rows(to_fields[name], slots, part)


def _places(first: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + count, device=device)


def _runs_kernel(kv_cache: torch.Tensor, out: torch.Tensor) -> bool:
    return has_kernel(kv_cache) and has_kernel(out)


def _check_formats(source: RowFormat, target: RowFormat) -> None:
    formats = LatentFormat(source.name), LatentFormat(target.name)
    reason = conversion_reason(*formats)
    if reason is not None:
        raise ValueError(reason)
    is_copy = formats[0] is formats[1]
    for name in ("nope", "rope"):
        one, other = source.get(name), target.get(name)
        counts = tuple(0 if field is None else field.count for field in (one, other))
        if counts[0] != counts[1] or (is_copy and one != other):
            raise ValueError(
                f"target's {name} must be like source's, got "
                f"{' and '.join(_said(field) for field in (other, one))}"
            )


def _said(field: object) -> str:
    count, dtype = getattr(field, "count", 0), getattr(field, "dtype", None)
    return "none" if dtype is None else f"{count} of {dtype.value}"


def _launch(
    source: RowsAtSlots,
    target: RowsAtSlots,
    k_scale: torch.Tensor,
    num_rows: int,
    snap_scales: bool,
) -> None:
    from attn.kernels.latent.convert import latent_convert_call
    from builders.launch.launcher import launch

    launch(
        latent_convert_call(
            *(source, target, k_scale, num_rows),
            snap_scales=snap_scales,
            hardware_e4m3=converts_float8(k_scale.device),
        )
    )
