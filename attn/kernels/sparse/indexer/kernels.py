"""The portable kernels of the indexer: they write and gather keys, and score them."""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.lang.numerics import (
    E4M3_MAX,
    FLOAT32_MAX,
    clamp_to,
    decode_e4m3,
    divide,
    encode_e4m3,
    row_absmax,
    to_float32,
)
from specs.rows import INDEXER_LEAST

_LEAST = tl.constexpr(INDEXER_LEAST)


@triton.jit
def _power_of_two_scale(absmax):
    """Smallest power of two that, as a divisor, brings ``absmax`` to 448 or less.

    A smaller ``absmax`` than 1e-4 counts as 1e-4.
    """
    bounded = tl.maximum(clamp_to(absmax, FLOAT32_MAX), _LEAST)
    bits = divide(bounded, tl.zeros_like(bounded) + E4M3_MAX).to(tl.int32, bitcast=True)
    # Round up to a power of two.
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def write_keys_kernel(
    k_ptr,
    slots_ptr,
    data_ptr,
    scale_ptr,
    num_tokens,
    k_token,
    data_block,
    scale_block,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
):
    """Write keys ``[T, WIDTH]`` as e4m3 patterns with one scale each; grid ``(cdiv(T, ROWS),)``.

    A page holds the patterns of all its tokens, and after them their scales. Keys of slot -1 are
    not written.
    """
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    there = slot >= 0
    column = tl.arange(0, WIDTH)
    x = tl.load(
        k_ptr + (token * k_token)[:, None] + column[None, :], mask=there[:, None], other=0.0
    )
    x = to_float32(x)
    scale = _power_of_two_scale(row_absmax(x))
    code = encode_e4m3(divide(x, tl.zeros_like(x) + scale[:, None]), HARDWARE_E4M3)
    block = tl.maximum(slot, 0) // BLOCK_SIZE
    offset = tl.maximum(slot, 0) % BLOCK_SIZE
    at = data_ptr + (block * data_block + offset * WIDTH)[:, None] + column[None, :]
    tl.store(at, code, mask=there[:, None])
    tl.store(scale_ptr + block * scale_block + offset, scale, mask=there)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def gather_keys_kernel(
    slots_ptr,
    data_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    num_rows,
    data_block,
    scale_block,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy patterns and scales of listed keys to compact rows; grid ``(cdiv(S, ROWS),)``.

    A row of slot -1 is not written.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
    there = slot >= 0
    column = tl.arange(0, WIDTH)
    block = tl.maximum(slot, 0) // BLOCK_SIZE
    offset = tl.maximum(slot, 0) % BLOCK_SIZE
    at = data_ptr + (block * data_block + offset * WIDTH)[:, None] + column[None, :]
    code = tl.load(at, mask=there[:, None], other=0)
    scale = tl.load(scale_ptr + block * scale_block + offset, mask=there, other=0.0)
    tl.store(out_ptr + (row * WIDTH)[:, None] + column[None, :], code, mask=there[:, None])
    tl.store(out_scale_ptr + row, scale, mask=there)


@triton.jit
def _in_product(x, COMPUTE: tl.constexpr, FP8: tl.constexpr, HARDWARE_E4M3: tl.constexpr):
    """e4m3 patterns, converted to the type of the product: e4m3 itself with FP8, else COMPUTE."""
    if FP8:
        element = x.to(tl.float8e4nv, bitcast=True)
    else:
        element = decode_e4m3(x, HARDWARE_E4M3).to(COMPUTE)
    return element


@triton.jit
def _query_of(
    q_ptr, weights_ptr, token, q_token, q_head, weights_token, NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, E4M3: tl.constexpr, COMPUTE: tl.constexpr,
    FP8: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Query ``[HEADS, WIDTH]`` of one token in the type of the product, and its fp32 weights."""
    head = tl.arange(0, HEADS)
    mine = head < NUM_HEADS
    column = tl.arange(0, WIDTH)
    at = token * q_token + head * q_head
    q = tl.load(q_ptr + at[:, None] + column[None, :], mask=mine[:, None], other=0)
    if E4M3:
        q = _in_product(q, COMPUTE, FP8, HARDWARE_E4M3)
    else:
        q = q.to(COMPUTE)
    weights = tl.load(weights_ptr + token * weights_token + head, mask=mine, other=0.0)
    return q, weights.to(tl.float32)


@triton.jit
def _logits_of(k, scale, q, weights, IEEE: tl.constexpr):
    """Logits of keys: the sum over heads of ``weight * max(q . k, 0)``, times the key's scale."""
    if IEEE:
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
    else:
        products = tl.dot(k, tl.trans(q))
    return tl.sum(tl.maximum(products, 0.0) * weights[None, :], 1) * scale


@triton.jit(
    do_not_specialize=["table_row", "logits_row", "most"],
    do_not_specialize_on_alignment=[
        *("weights_ptr", "lens_ptr", "requests_ptr", "table_ptr", "logits_ptr"),
    ],
)
def paged_logits_kernel(
    q_ptr,
    weights_ptr,
    data_ptr,
    scale_ptr,
    table_ptr,
    requests_ptr,
    lens_ptr,
    logits_ptr,
    q_token,
    q_head,
    weights_token,
    data_block,
    scale_block,
    table_row,
    logits_row,
    most,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    TILES: tl.constexpr,
    E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
    FP8: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits of query tokens over their requests' pages; grid ``(cdiv(most, TILES * tile), T)``.

    A tile is PAGES * BLOCK_SIZE keys. Shapes: q ``[T, NUM_HEADS, WIDTH]``, weights
    ``[T, NUM_HEADS]``, table ``[R, blocks]``, requests and lens ``[T]`` int32, logits
    ``[T, >= most]`` fp32; data and scale are the planes of the pages. Keys from a token's length on
    are not read, and their logits not written.
    """
    TILE: tl.constexpr = PAGES * BLOCK_SIZE
    token = tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(lens_ptr + token), most)
    low = tl.program_id(0) * TILES
    high = tl.minimum(low + TILES, tl.cdiv(length, TILE))
    if low < high:
        request = token
        if requests_ptr is not None:
            request = tl.load(requests_ptr + token).to(tl.int64)
        table = table_ptr + request * table_row
        q, weights = _query_of(
            q_ptr, weights_ptr, token, q_token, q_head, weights_token, NUM_HEADS, HEADS, WIDTH,
            E4M3, COMPUTE, FP8, HARDWARE_E4M3,
        )  # fmt: skip
        column = tl.arange(0, WIDTH)
        for tile in tl.range(low, high, num_stages=STAGES):
            key = tile * TILE + tl.arange(0, TILE)
            there = key < length
            # The table is read for each key, not for each page: after a reshape the compiler would
            # no longer see that 16 bytes of a row can be loaded at a time.
            block = tl.load(table + key // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            inside = tl.arange(0, TILE) % BLOCK_SIZE
            at = block * data_block + inside * WIDTH
            k = tl.load(data_ptr + at[:, None] + column[None, :], mask=there[:, None], other=0)
            scale = tl.load(scale_ptr + block * scale_block + inside, mask=there, other=0.0)
            k = _in_product(k, COMPUTE, FP8, HARDWARE_E4M3)
            logits = _logits_of(k, scale, q, weights, tl.float32 == COMPUTE)
            tl.store(logits_ptr + token * logits_row + key, logits, mask=there)


@triton.jit(
    do_not_specialize=["num_rows", "num_keys", "logits_row"],
    do_not_specialize_on_alignment=[
        *("weights_ptr", "starts_ptr", "ends_ptr", "logits_ptr", "scale_ptr"),
    ],
)
def ragged_logits_kernel(
    q_ptr,
    weights_ptr,
    data_ptr,
    scale_ptr,
    starts_ptr,
    ends_ptr,
    logits_ptr,
    num_rows,
    num_keys,
    q_token,
    q_head,
    weights_token,
    data_row,
    logits_row,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
    FP8: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Logits of query tokens over keys ``[start, end)`` of compact rows; grid
    ``(key tiles, blocks of query tokens)``.

    Shapes: q ``[T, NUM_HEADS, WIDTH]``, weights ``[T, NUM_HEADS]``, data ``[S, WIDTH]``, scale
    ``[S]``, starts and ends ``[T]`` int32, logits ``[T, *]`` fp32. Column i of a token's logits is
    key ``start + i``.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    starts = tl.load(starts_ptr + row, mask=real, other=2147483647)
    ends = tl.load(ends_ptr + row, mask=real, other=0)
    first = tl.program_id(0) * TILE
    # A query token without keys must not widen the range of keys of its block.
    low = tl.min(tl.where(ends > starts, starts, 2147483647), 0)
    high = tl.minimum(tl.max(ends, 0), num_keys)
    if (low < first + TILE) & (high > first):
        key = first + tl.arange(0, TILE)
        column = tl.arange(0, WIDTH)
        there = (key >= low) & (key < high)
        at = key.to(tl.int64) * data_row
        k = tl.load(data_ptr + at[:, None] + column[None, :], mask=there[:, None], other=0)
        k = _in_product(k, COMPUTE, FP8, HARDWARE_E4M3)
        scale = tl.load(scale_ptr + key, mask=there, other=0.0)
        begin = tl.program_id(1).to(tl.int64) * ROWS
        count = tl.minimum(num_rows - tl.program_id(1) * ROWS, ROWS)
        for turn in tl.range(0, count, num_stages=STAGES):
            token = begin + turn
            start = tl.load(starts_ptr + token)
            end = tl.minimum(tl.load(ends_ptr + token), num_keys)
            q, weights = _query_of(
                q_ptr, weights_ptr, token, q_token, q_head, weights_token, NUM_HEADS,
                HEADS, WIDTH, E4M3, COMPUTE, FP8, HARDWARE_E4M3,
            )  # fmt: skip
            logits = _logits_of(k, scale, q, weights, tl.float32 == COMPUTE)
            mine = (key >= start) & (key < end)
            out = logits_ptr + token * logits_row + (key - start)
            tl.store(out, logits, mask=mine)
