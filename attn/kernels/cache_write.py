"""Cache writes: K and V of a step's tokens into a paged dense cache, with or without RoPE first.

A program handles ``ROWS`` rows; row ``token * Hk + head`` is one head of one token, so that a
tile ``[ROWS, next power of two of D]`` gives each thread 16 bytes whatever the number of heads. It
writes the row's K, its V and, where there are any, their inline scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from attn.kernels.launch import KernelCall
from attn.kernels.numerics import (
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
from specs.dtypes import CacheDType
from specs.layouts import KVViews

# -- Device code.


@triton.jit
def _row_pointers(base, offsets, ALIGN: tl.constexpr):
    """``[ROWS, 1]`` pointers to rows, all multiples of ``ALIGN`` bytes."""
    return tl.multiple_of((base + offsets)[:, None], [ALIGN, ALIGN])


@triton.jit
def _table_rows(
    positions, token, num_tokens, cos_sin, cos_sin_stride, max_position, ALIGN: tl.constexpr
):
    """``[ROWS, 1]`` each: pointers to the tokens' rows of the table, and which tokens have one."""
    position = tl.load(positions + token, mask=token < num_tokens, other=-1).to(tl.int64)
    # A padding token's position may be anything.
    turned = (position >= 0) & (position < max_position)
    position = tl.where(turned, position, 0)
    return _row_pointers(cos_sin, position * cos_sin_stride, ALIGN), turned[:, None]


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
    """Elements ``START`` to ``START + SPAN`` of rows, rotated and rounded to the model's type.

    ``[ROWS, SPAN]``, 0 outside ``mask``.

    Args:
        rows: ``[ROWS, 1]`` pointers.
        mask: ``[ROWS, SPAN]``.
        table_rows: ``[ROWS, 1]`` pointers to cosines, then sines.
        turned: ``[ROWS, 1]``, which rows are rotated.
        START: even, and so is ``SPAN``, a power of two: interleaved pairs are not torn.
        ROTARY_DIM: elements of a row that rotate; 0 is plain loading.
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
    """fp32 ``[ROWS]`` scales that map ``absmax`` to ``largest``, at least 1e-6; NaN stays NaN."""
    scale = divide(absmax, largest)
    return tl.where(scale < 1e-6, 1e-6, scale)


@triton.jit
def _encode_rows(x, dtype: tl.constexpr, scale, FORMAT: tl.constexpr, HARDWARE_E4M3: tl.constexpr):
    """Stored elements of ``x [ROWS, W]`` and, for inline formats, the scales found for the rows.

    Args:
        x: in the model's type; 0 where the row has no element.
        dtype: the stored type.
        scale: ``[ROWS]`` fp32 of the layer, for ``e4m3`` and ``e5m2``.
        FORMAT: a value of ``_FORMATS`` except ``int4``.
    """
    # Triton 3.6 cannot return None: without inline scales these stand in.
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
    """int4 bytes ``[ROWS, W]`` of both halves of rows, and the rows' scales ``[ROWS]``."""
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
    """Quantise and store K or V of some rows; K under RoPE is rotated, in place too, first.

    Args:
        rows: ``[ROWS, 1]`` pointers to the model's rows.
        target: ``[ROWS, 1]`` pointers to the cache's rows.
        target_scales: ``[ROWS]`` pointers to inline scales, or None.
        scale: ``[ROWS]`` fp32 scale of the layer, or None.
        written: ``[ROWS, 1]``, which rows have a slot.
        table_rows: as in ``_load_rows``, and so are ``turned`` and ``ROTARY_DIM``.
        turned: likewise.
        WIDTH: elements of a row.
    """
    present = written
    if ROTARY_DIM > 0:
        present = written | turned
    # int4 handles elements i and i + WIDTH / 2 together: they share a byte.
    SPAN: tl.constexpr = WIDTH // 2 if FORMAT == "int4" else WIDTH
    TILE: tl.constexpr = triton.next_power_of_2(SPAN)
    cols = tl.arange(0, TILE)[None, :]
    inside = cols < SPAN
    mask = present & inside
    x = _load_rows(rows, mask, table_rows, turned, 0, TILE, ROTARY_DIM, IS_NEOX)
    upper = x
    if FORMAT == "int4":
        upper = _load_rows(rows, mask, table_rows, turned, SPAN, TILE, ROTARY_DIM, IS_NEOX)
    if ROTARY_DIM > 0:
        # Elsewhere in the program an element may still be awaited as another's partner.
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


def _name(specialization: Any) -> str:
    """What profiles call the kernel."""
    rotates = specialization.constants.get("ROTARY_DIM", 0) > 0
    return "rope_write_kv_kernel" if rotates else "write_kv_kernel"


_RUNTIME_INTEGERS: Final = [
    *("num_slots", "num_tokens", "num_query_tokens", "max_position", "cos_sin_stride"),
    *("key_stride_t", "key_stride_h", "value_stride_t", "value_stride_h"),
    *("query_stride_t", "query_stride_h", "k_scale_stride", "v_scale_stride"),
    *("key_cache_stride_n", "key_cache_stride_p", "key_cache_stride_h"),
    *("value_cache_stride_n", "value_cache_stride_p", "value_cache_stride_h"),
    *("key_scales_stride_n", "key_scales_stride_p", "key_scales_stride_h"),
    *("value_scales_stride_n", "value_scales_stride_p", "value_scales_stride_h"),
]


@triton.jit(repr=_name, do_not_specialize=_RUNTIME_INTEGERS)
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

    Layout: key ``[T, Hk, D]``, value ``[T, Hk, Dv]``, query ``[T, H, D]``, caches
    ``[N, P, Hk, ...]``, inline scales ``[N, P, Hk]`` or None; rows contiguous, strides any.
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
            table_rows, turned = _table_rows(
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

        rows = _row_pointers(key, token * key_stride_t + head * key_stride_h, KEY_ALIGN)
        offsets = block * key_cache_stride_n + place * key_cache_stride_p
        offsets += head * key_cache_stride_h
        target = _row_pointers(key_cache, offsets, KEY_CACHE_ALIGN)
        _write_side(
            *(rows, target, key_inline, key_factor, written, table_rows, turned),
            *(HEAD_SIZE, ROTARY_DIM, IS_NEOX, FORMAT, HARDWARE_E4M3),
        )
        rows = _row_pointers(value, token * value_stride_t + head * value_stride_h, VALUE_ALIGN)
        offsets = block * value_cache_stride_n + place * value_cache_stride_p
        offsets += head * value_cache_stride_h
        target = _row_pointers(value_cache, offsets, VALUE_CACHE_ALIGN)
        _write_side(
            *(rows, target, value_inline, value_factor, written, None, None),
            *(HEAD_SIZE_V, 0, IS_NEOX, FORMAT, HARDWARE_E4M3),
        )
    elif ROTARY_DIM > 0:
        row = (pid - num_key_programs) * ROWS + tl.arange(0, ROWS)
        token, head = row // QUERY_HEADS, row % QUERY_HEADS
        table_rows, turned = _table_rows(
            *(positions, token, num_query_tokens),
            *(cos_sin, cos_sin_stride, max_position, TABLE_ALIGN),
        )
        rows = _row_pointers(query, token * query_stride_t + head * query_stride_h, QUERY_ALIGN)
        TILE: tl.constexpr = triton.next_power_of_2(ROTARY_DIM)
        cols = tl.arange(0, TILE)[None, :]
        mask = turned & (cols < ROTARY_DIM)
        x = _load_rows(rows, mask, table_rows, turned, 0, TILE, ROTARY_DIM, IS_NEOX)
        tl.debug_barrier()
        tl.store(rows + cols, x, mask=mask)


# -- Launchers.

NUM_WARPS: Final = 4
MODEL_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES: Final = range(32, 513, 8)

_FORMATS: Final = {
    CacheDType.AUTO: "float",
    CacheDType.FLOAT16: "float",
    CacheDType.BFLOAT16: "float",
    CacheDType.FP8: "e4m3",
    CacheDType.FP8_E4M3: "e4m3",
    CacheDType.FP8_INC: "e4m3",
    CacheDType.FP8_E5M2: "e5m2",
    CacheDType.INT8_PER_TOKEN_HEAD: "int8",
    CacheDType.FP8_PER_TOKEN_HEAD: "fp8",
    CacheDType.INT4_PER_TOKEN_HEAD: "int4",
}
_STORED: Final = {
    "float": MODEL_DTYPES,
    "e4m3": (torch.float8_e4m3fn,),
    "e5m2": (torch.float8_e5m2,),
    "int8": (torch.int8,),
    "fp8": (torch.float8_e4m3fn,),
    "int4": (torch.uint8,),
}


@dataclass(frozen=True)
class WriteConfig:
    """Launch configuration of a cache write."""

    rows: int
    """Rows (one head of one token each) per program."""
    num_warps: int = NUM_WARPS


@cache
def write_config(head_size: int, head_size_v: int, smallest_itemsize: int) -> WriteConfig:
    """Tiles that give each thread 16 bytes of the narrower of model and cache elements."""
    tile = NUM_WARPS * 32 * 16 // smallest_itemsize
    return WriteConfig(max(1, tile // triton.next_power_of_2(max(head_size, head_size_v))))


def write_kv_call(
    key: torch.Tensor,
    value: torch.Tensor,
    views: KVViews,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    cache_dtype: CacheDType,
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch that writes new keys and values into a dense cache, quantised as the cache is.

    Args:
        key: ``[T, Hk, D]``; rows past ``len(slot_mapping)`` are padding. Heads of any strides.
        value: ``[T, Hk, Dv]``, likewise.
        views: K and V of the cache.
        slot_mapping: ``[<= T]`` int64, ``block * P + offset``; negative skips.
        k_scale: fp32 scalar or ``[Hk]`` on the device, read there; for per-tensor fp8 only.
        v_scale: likewise.
        cache_dtype: how the cache is quantised.
        hardware_e4m3: the GPU converts to 8-bit floats (compute capability 8.9 and later).

    Raises:
        ValueError: shapes, strides or dtypes that do not fit together.
        NotImplementedError: a model dtype, cache dtype or head size outside the kernel's.
    """
    arguments = _write_arguments(key, value, views, slot_mapping, k_scale, v_scale, cache_dtype)
    num_slots = arguments["num_slots"]
    arguments |= {
        **{name: None for name in ("query", "positions", "cos_sin")},
        **{name: 0 for name in ("num_query_tokens", "max_position", "cos_sin_stride")},
        **{name: 0 for name in ("query_stride_t", "query_stride_h")},
        "num_tokens": num_slots,
        "QUERY_HEADS": 0,
        "QUERY_ALIGN": 1,
        "TABLE_ALIGN": 1,
        "ROTARY_DIM": 0,
        "IS_NEOX": True,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    grid = _cdiv(num_slots * key.shape[1], arguments["ROWS"])
    return KernelCall(write_kv_kernel, (grid,), arguments, NUM_WARPS)


def rope_and_write_kv_call(
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
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch that rotates query and key in place and writes rotated keys and values.

    Args:
        query: ``[T, H, D]``; rows past ``len(positions)`` are left as they are.
        key: ``[T, Hk, D]``, likewise; a row with a negative slot is rotated, not written.
        value: as in :func:`write_kv_call`, and so are the arguments not named here.
        positions: ``[>= len(slot_mapping)]`` int64 or int32; a row whose position is outside the
            table is padding and not rotated.
        cos_sin_cache: ``[max_position, rotary_dim]``: cosines, then sines; fp32 or the model's.
        is_neox: the pair of element i is i + rotary_dim / 2 (True) or its neighbour (False).
        views: K and V of the cache.
        slot_mapping: ``[<= T]`` int64.
        k_scale: as there.
        v_scale: as there.
        cache_dtype: as there.
        hardware_e4m3: as there.

    Raises:
        ValueError: as there; or a query, positions or table that does not fit the key.
        NotImplementedError: as there.
    """
    arguments = _write_arguments(key, value, views, slot_mapping, k_scale, v_scale, cache_dtype)
    _check_rope(query, key, positions, cos_sin_cache, arguments["num_slots"])
    num_tokens = min(len(key), len(positions))
    num_query_tokens = min(len(query), len(positions))
    arguments |= {
        "query": query,
        "positions": positions,
        "cos_sin": cos_sin_cache,
        "num_tokens": num_tokens,
        "num_query_tokens": num_query_tokens,
        "max_position": cos_sin_cache.shape[0],
        "cos_sin_stride": cos_sin_cache.stride(0),
        "query_stride_t": query.stride(0),
        "query_stride_h": query.stride(1),
        "QUERY_HEADS": query.shape[1],
        "QUERY_ALIGN": _alignment(query),
        "TABLE_ALIGN": _alignment(cos_sin_cache),
        "ROTARY_DIM": cos_sin_cache.shape[1],
        "IS_NEOX": is_neox,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    rows = arguments["ROWS"]
    grid = _cdiv(num_tokens * key.shape[1], rows) + _cdiv(num_query_tokens * query.shape[1], rows)
    return KernelCall(write_kv_kernel, (grid,), arguments, NUM_WARPS)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    views: KVViews,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    cache_dtype: CacheDType,
    *,
    hardware_e4m3: bool,
) -> None:
    """Launch :func:`write_kv_call`."""
    write_kv_call(
        *(key, value, views, slot_mapping, k_scale, v_scale, cache_dtype),
        hardware_e4m3=hardware_e4m3,
    ).launch()


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
    *,
    hardware_e4m3: bool,
) -> None:
    """Launch :func:`rope_and_write_kv_call`."""
    rope_and_write_kv_call(
        *(query, key, value, positions, cos_sin_cache, is_neox),
        *(views, slot_mapping, k_scale, v_scale, cache_dtype),
        hardware_e4m3=hardware_e4m3,
    ).launch()


def _cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _alignment(x: torch.Tensor) -> int:
    """Bytes, a power of two up to 16, that the address of every row is a multiple of."""
    size, strides = x.element_size(), x.stride()[:-1]
    used = (stride * size for stride, count in zip(strides, x.shape, strict=False) if count > 1)
    return math.gcd(16, x.data_ptr(), *used)


def _write_arguments(
    key: torch.Tensor,
    value: torch.Tensor,
    views: KVViews,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    cache_dtype: CacheDType,
) -> dict[str, Any]:
    """The kernel's arguments that do not concern RoPE."""
    form = _format_of(key, value, views, cache_dtype)
    _check_shapes(key, value, views, slot_mapping, form)
    arguments: dict[str, Any] = {}
    for name, rows in (("key", key), ("value", value)):
        arguments[name] = rows
        arguments[f"{name}_stride_t"], arguments[f"{name}_stride_h"], _ = rows.stride()
        arguments[f"{name.upper()}_ALIGN"] = _alignment(rows)
    for name, stored in (("key_cache", views.key), ("value_cache", views.value)):
        # As bytes, so that GPUs without the 8-bit float type compile the kernel.
        is_float8 = stored.dtype.itemsize == 1 and stored.dtype.is_floating_point
        arguments[name] = stored.view(torch.uint8) if is_float8 else stored
        arguments |= _strides(name, stored)
        arguments[f"{name.upper()}_ALIGN"] = _alignment(stored)
    for name, inline in (("key_scales", views.key_scale), ("value_scales", views.value_scale)):
        arguments[name] = inline
        arguments |= _strides(name, inline)
    is_scaled = form in ("e4m3", "e5m2")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if is_scaled:
            _check_scale(name, scale, key.shape[1])
        arguments[name] = scale if is_scaled else None
        arguments[f"{name}_stride"] = scale.stride(0) if is_scaled and scale.numel() > 1 else 0
    itemsize = min(key.element_size(), views.key.element_size())
    return arguments | {
        "slot_mapping": slot_mapping,
        "num_slots": len(slot_mapping),
        "HEADS": key.shape[1],
        "HEAD_SIZE": key.shape[2],
        "HEAD_SIZE_V": value.shape[2],
        "BLOCK_SIZE": views.key.shape[1],
        "FORMAT": form,
        "ROWS": write_config(key.shape[2], value.shape[2], itemsize).rows,
    }


def _strides(name: str, x: torch.Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if x is None else x.stride()[:3]
    return {f"{name}_stride_{axis}": stride for axis, stride in zip("nph", strides, strict=True)}


# -- What callers can get wrong.


def _format_of(
    key: torch.Tensor, value: torch.Tensor, views: KVViews, cache_dtype: CacheDType
) -> str:
    """How elements are encoded, with every dtype checked against it."""
    form = _FORMATS.get(cache_dtype)
    if form is None:
        raise NotImplementedError(f"kv_cache_dtype {cache_dtype.value!r} has no cache-write kernel")
    if key.dtype not in MODEL_DTYPES:
        raise NotImplementedError(f"key must be float16, bfloat16 or float32, got {key.dtype}")
    if value.dtype != key.dtype:
        raise ValueError(f"value must have key's dtype {key.dtype}, got {value.dtype}")
    is_inline = cache_dtype.quant_mode.is_per_token_head
    for name, stored, scales in (
        ("key", views.key, views.key_scale),
        ("value", views.value, views.value_scale),
    ):
        if stored.dtype not in _STORED[form]:
            names = " or ".join(str(dtype) for dtype in _STORED[form])
            raise ValueError(
                f"views.{name} must be {names} for {cache_dtype.value!r}, got {stored.dtype}"
            )
        if (scales is not None) != is_inline:
            needed = "a tensor" if is_inline else "None"
            raise ValueError(
                f"views.{name}_scale must be {needed} for {cache_dtype.value!r}, got "
                f"{'None' if scales is None else tuple(scales.shape)}"
            )
        if scales is not None and scales.dtype != torch.float32:
            raise ValueError(f"views.{name}_scale must be float32, got {scales.dtype}")
    return form


def _check_shapes(
    key: torch.Tensor,
    value: torch.Tensor,
    views: KVViews,
    slot_mapping: torch.Tensor,
    form: str,
) -> None:
    if key.dim() != 3:
        raise ValueError(f"key must be [T, Hk, D], got shape {tuple(key.shape)}")
    if value.dim() != 3 or value.shape[:2] != key.shape[:2]:
        raise ValueError(
            f"value must be [{key.shape[0]}, {key.shape[1]}, Dv] like key, got shape "
            f"{tuple(value.shape)}"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(
            f"slot_mapping must be [T] int64, got shape {tuple(slot_mapping.shape)} of "
            f"{slot_mapping.dtype}"
        )
    if len(slot_mapping) > len(key):
        raise ValueError(
            f"slot_mapping must have at most key's {len(key)} rows, got {len(slot_mapping)}"
        )
    if len(slot_mapping) > 1 and slot_mapping.stride(0) != 1:
        raise ValueError(f"slot_mapping must be contiguous, got strides {slot_mapping.stride()}")
    pages = views.key.shape[:2]
    for name, rows, stored, scales in (
        ("key", key, views.key, views.key_scale),
        ("value", value, views.value, views.value_scale),
    ):
        size = rows.shape[2]
        if size not in HEAD_SIZES:
            raise NotImplementedError(
                f"{name} head size must be a multiple of {HEAD_SIZES.step} from "
                f"{HEAD_SIZES.start} to {HEAD_SIZES.stop - 1}, got {size}"
            )
        expected = (*pages, rows.shape[1], size // 2 if form == "int4" else size)
        if tuple(stored.shape) != expected:
            raise ValueError(
                f"views.{name} must have shape {expected} for {name} of shape "
                f"{tuple(rows.shape)}, got {tuple(stored.shape)}"
            )
        if scales is not None and tuple(scales.shape) != expected[:3]:
            raise ValueError(
                f"views.{name}_scale must have shape {expected[:3]}, got {tuple(scales.shape)}"
            )
        for what, x in ((name, rows), (f"views.{name}", stored)):
            if x.stride(-1) != 1:
                raise ValueError(f"{what} must have contiguous rows, got strides {x.stride()}")


def _check_scale(name: str, scale: torch.Tensor, num_kv_heads: int) -> None:
    shape = tuple(scale.shape)
    if scale.dtype != torch.float32 or (scale.numel() != 1 and shape != (num_kv_heads,)):
        raise ValueError(
            f"{name} must be a float32 scalar or [{num_kv_heads}], got shape {shape} of "
            f"{scale.dtype}"
        )


def _check_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_slots: int,
) -> None:
    head_size = key.shape[2]
    if query.dim() != 3 or query.shape[2] != head_size or query.dtype != key.dtype:
        raise ValueError(
            f"query must be [T, H, {head_size}] of {key.dtype} like key, got shape "
            f"{tuple(query.shape)} of {query.dtype}"
        )
    if query.stride(-1) != 1:
        raise ValueError(f"query must have contiguous rows, got strides {query.stride()}")
    if positions.dim() != 1 or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"positions must be [T] int64 or int32, got shape {tuple(positions.shape)} of "
            f"{positions.dtype}"
        )
    if len(positions) < num_slots:
        raise ValueError(
            f"positions must have a row for each of {num_slots} slots, got {len(positions)}"
        )
    if len(positions) > 1 and positions.stride(0) != 1:
        raise ValueError(f"positions must be contiguous, got strides {positions.stride()}")
    shape = tuple(cos_sin_cache.shape)
    if len(shape) != 2 or shape[1] % 2 or not 0 < shape[1] <= head_size:
        raise ValueError(
            f"cos_sin_cache must be [max_position, rotary_dim] with an even rotary_dim up to "
            f"{head_size}, got shape {shape}"
        )
    if cos_sin_cache.dtype not in MODEL_DTYPES or cos_sin_cache.stride(-1) != 1:
        raise ValueError(
            f"cos_sin_cache must be float16, bfloat16 or float32 with contiguous rows, got "
            f"{cos_sin_cache.dtype} with strides {cos_sin_cache.stride()}"
        )
