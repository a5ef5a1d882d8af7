"""The kernel that writes K and V of a step's tokens into a paged cache, with or without RoPE first.

A program handles ``ROWS`` rows of key and value, or ``QUERY_ROWS`` rows of a query. Row
``token * Hk + head`` is one head of one token. A tile is ``[ROWS, next power of two of D]``, which
gives each thread 16 bytes for any number of heads. The program writes K and V of its rows and, for
formats that have them, their inline scales.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from attn.kernels.lang.constants import next_power_of_2
from attn.kernels.lang.numerics import (
    E4M3_MAX,
    FLOAT32_MAX,
    clamp_to,
    divide,
    encode_e4m3,
    encode_e5m2,
    encode_int,
    pack_int4,
    round_to,
    row_absmax,
    saturate_to,
    to_float32,
)


@triton.jit
def row_pointers(base, offsets, ALIGN: tl.constexpr):
    """``[ROWS, 1]`` pointers to rows, each a multiple of ``ALIGN`` bytes."""
    return tl.multiple_of((base + offsets)[:, None], [ALIGN, ALIGN])


@triton.jit
def rows_of_table(
    positions, token, num_tokens, cos_sin, cos_sin_stride, max_position, ALIGN: tl.constexpr
):
    """The rows of the RoPE table for some tokens.

    Returns:
        Pointers ``[ROWS, 1]`` to the rows; and bool ``[ROWS, 1]``, which tokens have one.
    """
    position = tl.load(positions + token, mask=token < num_tokens, other=-1).to(tl.int64)
    # A padding token's position may be anything.
    turned = (position >= 0) & (position < max_position)
    position = tl.where(turned, position, 0)
    return row_pointers(cos_sin, position * cos_sin_stride, ALIGN), turned[:, None]


@triton.jit
def _load_rows(
    rows,
    mask,
    table_rows,
    turned,
    START: tl.constexpr,
    SPAN: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    """Load elements ``START`` to ``START + SPAN`` of rows, rotated, in the model's type.

    Args:
        rows: ``[ROWS, 1]`` pointers.
        mask: ``[ROWS, SPAN]``.
        table_rows: ``[ROWS, 1]`` pointers to cosines, then sines.
        turned: ``[ROWS, 1]``, which rows are rotated.
        START: even, and so is ``SPAN``, a power of two: interleaved pairs are not torn.
        ROTARY_DIM: elements of a row that rotate; 0 only loads.

    Returns:
        ``[ROWS, SPAN]``, 0 outside ``mask``.
    """
    cols = START + tl.arange(0, SPAN)[None, :]
    x = tl.load(rows + cols, mask=mask, other=0.0)
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        R: tl.constexpr = x.shape[0]
        wide = to_float32(x)
        turns = turned & (cols < ROTARY_DIM) & mask
        if IS_NEOX:
            is_first = cols < HALF
            pair = tl.where(is_first, cols, cols - HALF)
            partner_cols = tl.where(is_first, cols + HALF, cols - HALF)
            partner = to_float32(tl.load(rows + partner_cols, mask=turns))
            cos = to_float32(tl.load(table_rows + pair, mask=turns))
            sin = to_float32(tl.load(table_rows + HALF + pair, mask=turns))
        else:
            is_first = cols % 2 == 0
            pair = START // 2 + tl.arange(0, SPAN // 2)[None, :]
            even, odd = tl.split(tl.reshape(wide, [R, SPAN // 2, 2]))
            partner = tl.reshape(tl.join(odd, even), [R, SPAN])
            cos = to_float32(tl.load(table_rows + pair, mask=turned & (pair < HALF)))
            sin = to_float32(tl.load(table_rows + HALF + pair, mask=turned & (pair < HALF)))
            cos = tl.reshape(tl.join(cos, cos), [R, SPAN])
            sin = tl.reshape(tl.join(sin, sin), [R, SPAN])
        rotated = wide * cos + partner * tl.where(is_first, -sin, sin)
        x = tl.where(turns, round_to(rotated, x.dtype), x)
    return x


@triton.jit
def _inline_scale(absmax, largest):
    """Scales, fp32 ``[ROWS]``, that map ``absmax`` to ``largest``; at least 1e-6, NaN stays NaN."""
    scale = divide(absmax, largest)
    return tl.where(scale < 1e-6, 1e-6, scale)


@triton.jit
def _encode_rows(x, dtype: tl.constexpr, scale, FORMAT: tl.constexpr, HARDWARE_E4M3: tl.constexpr):
    """Encode ``x [ROWS, W]``, and find the rows' scales for formats with inline scales.

    Args:
        x: in the model's type; 0 where the row has no element.
        dtype: the stored type.
        scale: ``[ROWS]`` fp32 of the layer, for ``e4m3`` and ``e5m2``.
        FORMAT: a value of ``_FORMATS`` except ``int4``.
    """
    # Triton 3.6 cannot return None. Formats without inline scales return these zeros in its place.
    found = tl.zeros([x.shape[0]], tl.float32)
    if FORMAT == "float":
        stored = x
        if x.dtype != dtype:
            stored = saturate_to(to_float32(x), dtype)
    elif FORMAT == "e4m3":
        stored = encode_e4m3(divide(to_float32(x), scale[:, None]), HARDWARE_E4M3)
    elif FORMAT == "e5m2":
        stored = encode_e5m2(divide(to_float32(x), scale[:, None]), HARDWARE_E4M3)
    else:
        wide = clamp_to(to_float32(x), FLOAT32_MAX)
        if FORMAT == "int8":
            found = _inline_scale(row_absmax(wide), 127.0)
            stored = encode_int(divide(wide, found[:, None]), 127).to(dtype)
        else:
            found = _inline_scale(row_absmax(wide), E4M3_MAX)
            stored = encode_e4m3(divide(wide, found[:, None]), HARDWARE_E4M3)
    return stored, found


@triton.jit
def _encode_pairs(low, high):
    """Encode both halves of rows as int4 bytes ``[ROWS, W]``, with the rows' scales ``[ROWS]``."""
    low, high = clamp_to(to_float32(low), FLOAT32_MAX), clamp_to(to_float32(high), FLOAT32_MAX)
    both = tl.reshape(tl.join(low, high), [low.shape[0], 2 * low.shape[1]])
    scale = _inline_scale(row_absmax(both), 7.0)
    low = encode_int(divide(low, scale[:, None]), 7)
    high = encode_int(divide(high, scale[:, None]), 7)
    return pack_int4(low, high), scale


@triton.jit
def _write_side(
    rows,
    target,
    target_scales,
    scale,
    written,
    table_rows,
    turned,
    WIDTH: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
):
    """Quantise and store K or V of some rows.

    With RoPE, K is rotated first, and the rotated elements are also stored in place.

    Args:
        rows: ``[ROWS, 1]`` pointers to the model's rows.
        target: ``[ROWS, 1]`` pointers to the cache's rows.
        target_scales: ``[ROWS]`` pointers to inline scales, or None.
        scale: ``[ROWS]`` fp32 scale of the layer, or None.
        written: ``[ROWS, 1]``, which rows have a slot.
        table_rows: ``[ROWS, 1]`` pointers to cosines, then sines; None without RoPE.
        turned: ``[ROWS, 1]``, which rows are rotated; None without RoPE.
        WIDTH: elements of a row.
        ROTARY_DIM: elements of a row that rotate; 0 without RoPE.
    """
    present = written
    if ROTARY_DIM > 0:
        present = written | turned
    # int4 handles elements i and i + WIDTH / 2 together: they share a byte.
    SPAN: tl.constexpr = WIDTH // 2 if FORMAT == "int4" else WIDTH
    TILE: tl.constexpr = next_power_of_2(SPAN)
    cols = tl.arange(0, TILE)[None, :]
    inside = cols < SPAN
    mask = present & inside
    x = _load_rows(rows, mask, table_rows, turned, 0, TILE, ROTARY_DIM, IS_NEOX)
    upper = x
    if FORMAT == "int4":
        upper = _load_rows(rows, mask, table_rows, turned, SPAN, TILE, ROTARY_DIM, IS_NEOX)
    if ROTARY_DIM > 0:
        # Another thread may not have loaded this element yet as the partner of its own.
        tl.debug_barrier()
        tl.store(rows + cols, x, mask=mask & turned & (cols < ROTARY_DIM))
        if FORMAT == "int4":
            turns = mask & turned & (cols + SPAN < ROTARY_DIM)
            tl.store(rows + SPAN + cols, upper, mask=turns)
    if FORMAT == "int4":
        stored, found = _encode_pairs(x, upper)
    else:
        stored, found = _encode_rows(x, target.dtype.element_ty, scale, FORMAT, HARDWARE_E4M3)
    tl.store(target + cols, stored, mask=written & inside)
    if target_scales is not None:
        tl.store(target_scales[:, None], found[:, None], mask=written)


@triton.jit
def _turn_queries(
    query,
    positions,
    cos_sin,
    program,
    num_query_tokens,
    max_position,
    cos_sin_stride,
    query_stride_t,
    query_stride_h,
    QUERY_HEADS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    QUERY_ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
):
    """Rotate one program's rows of the query in place; other elements are not touched."""
    row = program * QUERY_ROWS + tl.arange(0, QUERY_ROWS)
    token, head = row // QUERY_HEADS, row % QUERY_HEADS
    table_rows, turned = rows_of_table(
        *(positions, token, num_query_tokens),
        *(cos_sin, cos_sin_stride, max_position, TABLE_ALIGN),
    )
    rows = row_pointers(query, token * query_stride_t + head * query_stride_h, QUERY_ALIGN)
    TILE: tl.constexpr = next_power_of_2(ROTARY_DIM)
    cols = tl.arange(0, TILE)[None, :]
    mask = turned & (cols < ROTARY_DIM)
    x = _load_rows(rows, mask, table_rows, turned, 0, TILE, ROTARY_DIM, IS_NEOX)
    # Another thread may not have loaded this element yet as the partner of its own.
    tl.debug_barrier()
    tl.store(rows + cols, x, mask=mask)


def _name(specialization: Any) -> str:
    """The kernel's name in profiles."""
    rotates = specialization.constants.get("ROTARY_DIM", 0) > 0
    return "rope_write_kv_kernel" if rotates else "write_kv_kernel"


RUNTIME_INTEGERS: Final = [
    *("num_slots", "num_tokens", "num_query_tokens", "max_position", "cos_sin_stride"),
    *("key_stride_t", "key_stride_h", "value_stride_t", "value_stride_h"),
    *("query_stride_t", "query_stride_h", "k_scale_stride", "v_scale_stride"),
    *("key_cache_stride_n", "key_cache_stride_p", "key_cache_stride_h"),
    *("value_cache_stride_n", "value_cache_stride_p", "value_cache_stride_h"),
    *("key_scales_stride_n", "key_scales_stride_p", "key_scales_stride_h"),
    *("value_scales_stride_n", "value_scales_stride_p", "value_scales_stride_h"),
]


@triton.jit(repr=_name, do_not_specialize=RUNTIME_INTEGERS)
def write_kv_kernel(
    key,
    value,
    query,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,
    positions,
    cos_sin,
    k_scale,
    v_scale,
    num_slots,
    num_tokens,
    num_query_tokens,
    max_position,
    cos_sin_stride,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    query_stride_t,
    query_stride_h,
    k_scale_stride,
    v_scale_stride,
    key_cache_stride_n,
    key_cache_stride_p,
    key_cache_stride_h,
    value_cache_stride_n,
    value_cache_stride_p,
    value_cache_stride_h,
    key_scales_stride_n,
    key_scales_stride_p,
    key_scales_stride_h,
    value_scales_stride_n,
    value_scales_stride_p,
    value_scales_stride_h,
    HEADS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    VALUE_ALIGN: tl.constexpr,
    QUERY_ALIGN: tl.constexpr,
    TABLE_ALIGN: tl.constexpr,
    KEY_CACHE_ALIGN: tl.constexpr,
    VALUE_CACHE_ALIGN: tl.constexpr,
):
    """Write K and V of ``num_slots`` tokens; with ``ROTARY_DIM`` rotate query and key first.

    Grid: the programs of ``num_tokens`` tokens of key and value, then those of
    ``num_query_tokens`` of the query.

    Layout: key is ``[T, Hk, D]``, value is ``[T, Hk, Dv]``, query is ``[T, H, D]``. Caches are
    ``[N, P, Hk, ...]``, inline scales are ``[N, P, Hk]`` or None. Rows are contiguous; all other
    strides are free.
    """
    pid = tl.program_id(0).to(tl.int64)
    num_key_programs = tl.cdiv(num_tokens.to(tl.int64) * HEADS, ROWS)
    if pid < num_key_programs:
        row = pid * ROWS + tl.arange(0, ROWS)
        token, head = row // HEADS, row % HEADS
        slot = tl.load(slot_mapping + token, mask=token < num_slots, other=-1)
        written = (slot >= 0)[:, None]
        # Rows without a slot address block 0; nothing is stored there.
        slot = tl.maximum(slot, 0)
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE

        table_rows, turned = None, None
        if ROTARY_DIM > 0:
            table_rows, turned = rows_of_table(
                positions, token, num_tokens, cos_sin, cos_sin_stride, max_position, TABLE_ALIGN
            )
        key_inline, value_inline = None, None
        if key_scales is not None:
            offsets = block * key_scales_stride_n + place * key_scales_stride_p
            key_inline = key_scales + (offsets + head * key_scales_stride_h)
            offsets = block * value_scales_stride_n + place * value_scales_stride_p
            value_inline = value_scales + (offsets + head * value_scales_stride_h)
        key_factor, value_factor = None, None
        if k_scale is not None:
            key_factor = tl.load(k_scale + head * k_scale_stride)
            value_factor = tl.load(v_scale + head * v_scale_stride)

        rows = row_pointers(key, token * key_stride_t + head * key_stride_h, KEY_ALIGN)
        offsets = block * key_cache_stride_n + place * key_cache_stride_p
        offsets += head * key_cache_stride_h
        target = row_pointers(key_cache, offsets, KEY_CACHE_ALIGN)
        _write_side(
            *(rows, target, key_inline, key_factor, written, table_rows, turned),
            *(HEAD_SIZE, ROTARY_DIM, IS_NEOX, FORMAT, HARDWARE_E4M3),
        )
        rows = row_pointers(value, token * value_stride_t + head * value_stride_h, VALUE_ALIGN)
        offsets = block * value_cache_stride_n + place * value_cache_stride_p
        offsets += head * value_cache_stride_h
        target = row_pointers(value_cache, offsets, VALUE_CACHE_ALIGN)
        _write_side(
            *(rows, target, value_inline, value_factor, written, None, None),
            *(HEAD_SIZE_V, 0, IS_NEOX, FORMAT, HARDWARE_E4M3),
        )
    elif ROTARY_DIM > 0:
        _turn_queries(
            *(query, positions, cos_sin, pid - num_key_programs, num_query_tokens),
            *(max_position, cos_sin_stride, query_stride_t, query_stride_h),
            *(QUERY_HEADS, QUERY_ROWS, ROTARY_DIM, IS_NEOX, QUERY_ALIGN, TABLE_ALIGN),
        )
