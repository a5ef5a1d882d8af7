"""Latent rows gathered from one cache, converted to another format and written, in one launch."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from attn.kernels.cache.write_kernel import row_pointers
from attn.kernels.lang.memory import alignment, as_bytes
from attn.kernels.lang.numerics import (
    block_scale,
    decode_e4m3_float32,
    divide,
    encode_e4m3,
    power_of_two_above,
    row_absmax,
    saturate_to,
    to_float32,
)
from builders.launch.call import KernelCall
from specs.cache_write import RowsAtSlots
from specs.rows import LATENT_BLOCK, LatentFormat

_KINDS: Final = {
    LatentFormat.BF16: "float",
    LatentFormat.FP8_NOPE_FP8_ROPE: "raw",
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: "scaled",
}
_ROWS: Final = 8
"""Rows per program: every thread has 16 bytes of a row, and more if rows are wide."""
_VARYING: Final = ["num_rows"]
_ANYWHERE: Final = ["from_slots_ptr", "to_slots_ptr", "k_scale_ptr"]


@triton.jit
def _values_of(x, scales, k_scale, FROM: tl.constexpr, HARDWARE_E4M3: tl.constexpr):
    """Stored elements as fp32 ``[ROWS, W]``; block scales are ``[ROWS, GROUPS]``."""
    if FROM == "float":
        real = to_float32(x)
    elif FROM == "raw":
        real = decode_e4m3_float32(x, HARDWARE_E4M3) * k_scale
    else:
        R: tl.constexpr = x.shape[0]
        W: tl.constexpr = x.shape[1]
        GROUPS: tl.constexpr = scales.shape[1]
        blocks = tl.reshape(decode_e4m3_float32(x, HARDWARE_E4M3), [R * GROUPS, W // GROUPS])
        blocks = blocks * tl.reshape(scales, [R * GROUPS])[:, None]
        real = tl.reshape(blocks, [R, W])
    return real


@triton.jit
def _scaled_blocks(
    x, k_scale, FROM: tl.constexpr, SNAP: tl.constexpr, GROUPS: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Rows without block scales as e4m3: uint8 ``[ROWS, W]`` and fp32 scales ``[ROWS, GROUPS]``."""
    R: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    if FROM == "raw":
        scale = k_scale
        code = x
        if SNAP:
            scale = power_of_two_above(k_scale)
            units = decode_e4m3_float32(x, HARDWARE_E4M3) * divide(k_scale, scale)
            code = encode_e4m3(units, HARDWARE_E4M3)
        scales = tl.zeros([R, GROUPS], tl.float32) + scale
    else:
        blocks = tl.reshape(to_float32(x), [R * GROUPS, W // GROUPS])
        found = block_scale(row_absmax(blocks))
        code = tl.reshape(encode_e4m3(divide(blocks, found[:, None]), HARDWARE_E4M3), [R, W])
        scales = tl.reshape(found, [R, GROUPS])
    return code, scales


@triton.jit
def _offsets(slot, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    return slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def latent_convert_kernel(
    nope_ptr, rope_ptr, scale_ptr, to_nope_ptr, to_rope_ptr, to_scale_ptr, from_slots_ptr,
    to_slots_ptr, k_scale_ptr, num_rows, nope_block: tl.int64, nope_token: tl.int64,
    rope_block: tl.int64, rope_token: tl.int64, scale_block: tl.int64, scale_token: tl.int64,
    to_nope_block: tl.int64, to_nope_token: tl.int64, to_rope_block: tl.int64,
    to_rope_token: tl.int64, to_scale_block: tl.int64, to_scale_token: tl.int64,
    FROM: tl.constexpr, TO: tl.constexpr, SNAP: tl.constexpr, FROM_BLOCK: tl.constexpr,
    TO_BLOCK: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    ROPE: tl.constexpr, ROPE_WIDTH: tl.constexpr, NOPE_ALIGN: tl.constexpr,
    ROPE_ALIGN: tl.constexpr, TO_NOPE_ALIGN: tl.constexpr, TO_ROPE_ALIGN: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read row i at slot ``from_slots[i]``, write it at ``to_slots[i]``; grid
    ``(cdiv(num_rows, ROWS),)``.

    A list that is None means slot i. A row read from slot -1 is zeros; a row for slot -1 is not
    written. Fields are ``[N, P, count]`` on both sides, and e4m3 fields are uint8. A row of RANK
    elements, padded to WIDTH, has GROUPS block scales.

    SNAP is about rows with one scale per tensor that get block scales. With it, the block scales
    are the power of two above the tensor's scale, and elements are rounded again. Without it, the
    tensor's scale is copied to every block.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    source = row
    if from_slots_ptr is not None:
        source = tl.load(from_slots_ptr + row, mask=real, other=-1).to(tl.int64)
    target = row
    if to_slots_ptr is not None:
        target = tl.load(to_slots_ptr + row, mask=real, other=-1).to(tl.int64)
    there = (real & (source >= 0))[:, None]
    kept = (real & (target >= 0))[:, None]
    # Rows without a slot address block 0; nothing is read or stored there.
    source, target = tl.maximum(source, 0), tl.maximum(target, 0)

    column = tl.arange(0, WIDTH)[None, :]
    rotary = tl.arange(0, ROPE_WIDTH)[None, :]
    group = tl.arange(0, GROUPS)[None, :]
    inside, turned, scaled = column < RANK, rotary < ROPE, group * (WIDTH // GROUPS) < RANK
    # All loads come before the first store: stores would hold loads back.
    at = row_pointers(nope_ptr, _offsets(source, nope_block, nope_token, FROM_BLOCK), NOPE_ALIGN)
    nope = tl.load(at + column, mask=there & inside, other=0)
    rope = nope
    if ROPE > 0:
        offsets = _offsets(source, rope_block, rope_token, FROM_BLOCK)
        at = row_pointers(rope_ptr, offsets, ROPE_ALIGN)
        rope = tl.load(at + rotary, mask=there & turned, other=0)
    scales = tl.zeros([ROWS, GROUPS], tl.float32)
    if FROM == "scaled":
        offsets = _offsets(source, scale_block, scale_token, FROM_BLOCK)
        at = scale_ptr + offsets[:, None] + group
        scales = tl.load(at, mask=there & scaled, other=1.0)
    k_scale = 1.0
    if FROM == "raw":
        k_scale = tl.load(k_scale_ptr)

    if FROM != TO:
        if TO == "float":
            real_nope = _values_of(nope, scales, k_scale, FROM, HARDWARE_E4M3)
            nope = saturate_to(real_nope, to_nope_ptr.dtype.element_ty)
        else:
            nope, scales = _scaled_blocks(nope, k_scale, FROM, SNAP, GROUPS, HARDWARE_E4M3)
        if ROPE > 0:
            if rope.dtype != to_rope_ptr.dtype.element_ty:
                # The rotary part of block-scaled rows is stored without a scale.
                KIND: tl.constexpr = "raw" if FROM == "raw" else "float"
                real_rope = _values_of(rope, scales, k_scale, KIND, HARDWARE_E4M3)
                rope = saturate_to(real_rope, to_rope_ptr.dtype.element_ty)
    offsets = _offsets(target, to_nope_block, to_nope_token, TO_BLOCK)
    tl.store(row_pointers(to_nope_ptr, offsets, TO_NOPE_ALIGN) + column, nope, mask=kept & inside)
    if ROPE > 0:
        offsets = _offsets(target, to_rope_block, to_rope_token, TO_BLOCK)
        at = row_pointers(to_rope_ptr, offsets, TO_ROPE_ALIGN)
        tl.store(at + rotary, rope, mask=kept & turned)
    if TO == "scaled":
        offsets = _offsets(target, to_scale_block, to_scale_token, TO_BLOCK)
        tl.store(to_scale_ptr + offsets[:, None] + group, scales, mask=kept & scaled)


def latent_convert_call(
    source: RowsAtSlots,
    target: RowsAtSlots,
    k_scale: torch.Tensor,
    num_rows: int,
    *,
    snap_scales: bool,
    hardware_e4m3: bool,
) -> KernelCall:
    """The launch behind the functions of :mod:`attn.ops.latent_convert`, which check arguments.

    Args:
        source: the rows that are read; slot -1 gives a row of zeros.
        target: the rows that are written; a row for slot -1 is not written.
        k_scale: fp32 scalar, of rows with one scale per tensor.
        num_rows: S.
        snap_scales: block scales made from ``k_scale`` are powers of two.
        hardware_e4m3: the GPU has instructions that convert e4m3.
    """
    rank = source.fields["nope"].shape[2]
    rope = source.fields["rope"].shape[2] if "rope" in source.fields else 0
    groups = triton.cdiv(triton.next_power_of_2(rank), LATENT_BLOCK)
    width = max(triton.next_power_of_2(rank), groups * LATENT_BLOCK)
    arguments: dict[str, Any] = {}
    for name, rows in (("", source), ("to_", target)):
        for field in ("nope", "rope", "scale"):
            x = rows.fields.get(field)
            arguments[f"{name}{field}_ptr"] = None if x is None else as_bytes(x)
            strides = (0, 0) if x is None else x.stride()[:2]
            arguments[f"{name}{field}_block"], arguments[f"{name}{field}_token"] = strides
            if field != "scale":
                aligned = 1 if x is None else alignment(x)
                arguments[f"{name}{field}_align".upper()] = aligned
    arguments |= {
        "from_slots_ptr": source.slots,
        "to_slots_ptr": target.slots,
        "k_scale_ptr": k_scale,
        "num_rows": num_rows,
        "FROM": _KINDS[source.format],
        "TO": _KINDS[target.format],
        "SNAP": snap_scales,
        "FROM_BLOCK": source.fields["nope"].shape[1],
        "TO_BLOCK": target.fields["nope"].shape[1],
        "RANK": rank,
        "WIDTH": width,
        "GROUPS": groups,
        "ROPE": rope,
        "ROPE_WIDTH": triton.next_power_of_2(max(rope, 1)),
        "HARDWARE_E4M3": hardware_e4m3,
        "ROWS": _ROWS,
    }
    grid = (triton.cdiv(num_rows, _ROWS),)
    return KernelCall(latent_convert_kernel, grid, arguments, num_warps=4)
