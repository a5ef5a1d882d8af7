"""RoPE and e4m3 quantisation of queries and latent rows in one launch, with the rows' cache write.

Rotary parts are rotated in fp32 and rounded once, to e4m3. A program takes a tile of one token's
heads; the last program of each token takes its latent row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attn.kernels.cache.write_kernel import rows_of_table
from attn.kernels.lang.numerics import divide_for_e4m3, encode_e4m3, to_float32
from builders.launch.call import KernelCall
from specs.cache_write import Rotation, UnrotatedLatents

TILE_HEADS, NUM_WARPS = 2, 1
"""Heads and warps of a program: many small programs keep the most bytes in flight."""
_ANYWHERE = ["positions_ptr", "slots_ptr", "q_scale_ptr", "k_scale_ptr"]


@triton.jit
def _turned_rows(
    rows, mask, table, turned, ROPE: tl.constexpr, WIDTH: tl.constexpr, IS_NEOX: tl.constexpr
):
    """Rotary parts of rows as fp32 ``[R, WIDTH]``, rotated where ``turned`` is set."""
    half: tl.constexpr = ROPE // 2
    column = tl.arange(0, WIDTH)
    inside = mask & (column < ROPE)[None, :]
    if IS_NEOX:
        pair = tl.where(column < half, column + half, column - half)
        angle = column % half
        is_first = column < half
    else:
        pair = column ^ 1
        angle = column // 2
        is_first = column % 2 == 0
    x = to_float32(tl.load(rows + column[None, :], mask=inside, other=0.0))
    y = to_float32(tl.load(rows + pair[None, :], mask=inside, other=0.0))
    there = inside & turned
    cos = tl.load(table + angle[None, :], mask=there, other=1.0)
    sin = tl.load(table + half + angle[None, :], mask=there, other=0.0)
    return x * cos + tl.where(is_first[None, :], -y, y) * sin


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "max_position"],
            do_not_specialize_on_alignment=_ANYWHERE)  # fmt: skip
def rope_quantize_kernel(
    q_nope_ptr, q_pe_ptr, kv_c_ptr, k_pe_ptr, positions_ptr, table_ptr, q_out_ptr, k_out_ptr,
    latent_ptr, rope_ptr, slots_ptr, q_scale_ptr, k_scale_ptr, num_tokens, num_slots, max_position,
    q_nope_token: tl.int64, q_nope_head: tl.int64, q_pe_token: tl.int64, q_pe_head: tl.int64,
    kv_c_token: tl.int64, k_pe_token: tl.int64, table_row: tl.int64, latent_block: tl.int64,
    latent_token: tl.int64, rope_block: tl.int64, rope_token: tl.int64, HEADS: tl.constexpr,
    TILE_HEADS: tl.constexpr, RANK: tl.constexpr, RANK_WIDTH: tl.constexpr, ROPE: tl.constexpr,
    ROPE_WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_NEOX: tl.constexpr,
    KEEPS_ROWS: tl.constexpr, WRITES_CACHE: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Rotate and quantise queries and latent rows; grid ``(T, head tiles + 1)``.

    :func:`attn.ops.rope_quant.rope_quantize` gives shapes and meaning of the arguments.
    """
    token = tl.program_id(0).to(tl.int64)
    table, turned = rows_of_table(
        positions_ptr, token + tl.arange(0, 1), num_tokens, table_ptr, table_row, max_position, 4
    )
    column = tl.arange(0, RANK_WIDTH)
    rotary = tl.arange(0, ROPE_WIDTH)
    row_width: tl.constexpr = RANK + ROPE
    first = tl.program_id(1) * TILE_HEADS
    if first < HEADS:
        scale = tl.load(q_scale_ptr)
        head = (first + tl.arange(0, TILE_HEADS)).to(tl.int64)[:, None]
        real = head < HEADS
        at = q_nope_ptr + token * q_nope_token + head * q_nope_head + column[None, :]
        mask = real & (column < RANK)[None, :]
        out = q_out_ptr + (token * HEADS + head) * row_width
        x = to_float32(tl.load(at, mask=mask, other=0.0))
        tl.store(
            out + column[None, :], encode_e4m3(divide_for_e4m3(x, scale), HARDWARE_E4M3), mask=mask
        )
        rows = q_pe_ptr + token * q_pe_token + head * q_pe_head
        x = _turned_rows(rows, real, table, turned, ROPE, ROPE_WIDTH, IS_NEOX)
        code = encode_e4m3(divide_for_e4m3(x, scale), HARDWARE_E4M3)
        tl.store(out + RANK + rotary[None, :], code, mask=real & (rotary < ROPE)[None, :])
    else:
        scale = tl.load(k_scale_ptr)
        one = tl.arange(0, 1)[:, None]
        all_rows = one == 0
        k_mask = all_rows & (column < RANK)[None, :]
        k_x = to_float32(
            tl.load(kv_c_ptr + token * kv_c_token + one + column[None, :], mask=k_mask, other=0.0)
        )
        nope = encode_e4m3(divide_for_e4m3(k_x, scale), HARDWARE_E4M3)
        k_rows = k_pe_ptr + token * k_pe_token + one
        k_x = _turned_rows(k_rows, all_rows, table, turned, ROPE, ROPE_WIDTH, IS_NEOX)
        rope = encode_e4m3(divide_for_e4m3(k_x, scale), HARDWARE_E4M3)
        inside = all_rows & (rotary < ROPE)[None, :]
        if KEEPS_ROWS:
            k_to = k_out_ptr + token * row_width + one
            tl.store(k_to + column[None, :], nope, mask=k_mask)
            tl.store(k_to + RANK + rotary[None, :], rope, mask=inside)
        if WRITES_CACHE:
            slot = tl.load(slots_ptr + token, mask=token < num_slots, other=-1)
            kept = slot >= 0
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            to = latent_ptr + block * latent_block + offset * latent_token
            tl.store(to + one + column[None, :], nope, mask=k_mask & kept)
            to = rope_ptr + block * rope_block + offset * rope_token
            tl.store(to + one + rotary[None, :], rope, mask=inside & kept)


def rope_quantize_call(
    latents: UnrotatedLatents,
    rotation: Rotation,
    scales: tuple[torch.Tensor, torch.Tensor],
    q_out: torch.Tensor,
    k_out: torch.Tensor | None,
    cache: tuple[torch.Tensor, torch.Tensor] | None,
    slot_mapping: torch.Tensor | None,
    *,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch of :func:`attn.ops.rope_quant.rope_quantize`, which explains and checks arguments.

    ``scales`` are the scale of queries and the scale of keys. ``cache`` holds the latent and the
    rotary part of the cache.
    """
    q_nope, q_pe, kv_c, k_pe = latents
    positions, cos_sin_cache, is_neox = rotation
    tokens, heads, rank = q_nope.shape
    rope = q_pe.shape[2]
    tile = min(triton.next_power_of_2(heads), TILE_HEADS)
    latent, rotary = (None, None) if cache is None else cache
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if latent is not None and rotary is not None:
        strides = (*latent.stride()[:2], *rotary.stride()[:2])
    arguments = {
        "q_nope_ptr": q_nope,
        "q_pe_ptr": q_pe,
        "kv_c_ptr": kv_c,
        "k_pe_ptr": k_pe,
        "positions_ptr": positions,
        "table_ptr": cos_sin_cache,
        "q_out_ptr": q_out.view(torch.uint8),
        "k_out_ptr": None if k_out is None else k_out.view(torch.uint8),
        "latent_ptr": None if latent is None else latent.view(torch.uint8),
        "rope_ptr": None if rotary is None else rotary.view(torch.uint8),
        "slots_ptr": slot_mapping,
        "q_scale_ptr": scales[0],
        "k_scale_ptr": scales[1],
        "num_tokens": len(positions),
        "num_slots": 0 if slot_mapping is None else len(slot_mapping),
        "max_position": len(cos_sin_cache),
        "q_nope_token": q_nope.stride(0),
        "q_nope_head": q_nope.stride(1),
        "q_pe_token": q_pe.stride(0),
        "q_pe_head": q_pe.stride(1),
        "kv_c_token": kv_c.stride(0),
        "k_pe_token": k_pe.stride(0),
        "table_row": cos_sin_cache.stride(0),
        "latent_block": strides[0],
        "latent_token": strides[1],
        "rope_block": strides[2],
        "rope_token": strides[3],
        "HEADS": heads,
        "TILE_HEADS": tile,
        "RANK": rank,
        "RANK_WIDTH": triton.next_power_of_2(rank),
        "ROPE": rope,
        "ROPE_WIDTH": triton.next_power_of_2(rope),
        "BLOCK_SIZE": 1 if latent is None else latent.shape[1],
        "IS_NEOX": is_neox,
        "KEEPS_ROWS": k_out is not None,
        "WRITES_CACHE": cache is not None,
        "HARDWARE_E4M3": hardware_e4m3,
    }
    grid = (tokens, triton.cdiv(heads, tile) + 1)
    return KernelCall(rope_quantize_kernel, grid, arguments, num_warps=NUM_WARPS)
