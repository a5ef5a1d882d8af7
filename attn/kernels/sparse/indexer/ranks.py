"""Candidates for the lists of rows whose keys several ranks share (DCP): sent, and put in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from builders.launch.call import KernelCall
from builders.splitkv.stripe import Stripe


@triton.jit(
    do_not_specialize=["logits_row", "lists_row", "plane"],
    do_not_specialize_on_alignment=["logits_ptr", "lists_ptr", "out_ptr"],
)
def pack_candidates_kernel(
    logits_ptr,
    lists_ptr,
    out_ptr,
    logits_row: tl.int64,
    lists_row: tl.int64,
    plane: tl.int64,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Write the logits and the positions in the request of the keys in a rank's lists; grid
    ``(T,)``.

    logits are ``[T, M]`` fp32, lists ``[T, TOPK]`` int32 places among the rank's keys, -1 for none.
    out is ``[2, T, TOPK]`` int32, ``plane`` elements a plane: the bits of the logits, then the
    positions. TILE is a power of two, at least TOPK.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < TOPK
    place = tl.load(lists_ptr + row * lists_row + column, mask=inside, other=-1)
    listed = place >= 0
    score = tl.load(logits_ptr + row * logits_row + place, mask=listed, other=float("-inf"))
    turn = place // INTERLEAVE
    position = (turn * SIZE + RANK) * INTERLEAVE + place % INTERLEAVE
    out = out_ptr + row * TOPK + column
    tl.store(out, score.to(tl.int32, bitcast=True), mask=inside)
    tl.store(out + plane, tl.where(listed, position, -1), mask=inside)


@triton.jit(
    do_not_specialize=["rows", "room_row", "width"],
    do_not_specialize_on_alignment=["candidates_ptr", "room_ptr"],
)
def spread_candidates_kernel(
    candidates_ptr,
    room_ptr,
    rows,
    room_row: tl.int64,
    width,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write every candidate's logit at its position; grid ``(T, ranks)``.

    candidates are ``[ranks, 2, T, TOPK]`` int32, see :func:`pack_candidates_kernel`. room is
    ``[T, width]`` fp32; positions from ``width`` on are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    plane = rows.to(tl.int64) * TOPK
    column = tl.arange(0, TILE)
    inside = column < TOPK
    at = candidates_ptr + tl.program_id(1) * 2 * plane + row * TOPK + column
    score = tl.load(at, mask=inside, other=0).to(tl.float32, bitcast=True)
    position = tl.load(at + plane, mask=inside, other=-1)
    listed = (position >= 0) & (position < width)
    tl.store(room_ptr + row * room_row + position, score, mask=listed)


def pack_candidates_call(
    logits: torch.Tensor, lists: torch.Tensor, stripe: Stripe, out: torch.Tensor
) -> KernelCall:
    """The launch of :func:`attn.ops.rank_topk.pack_candidates`, which explains the arguments."""
    rows, topk = lists.shape
    arguments = {
        "logits_ptr": logits,
        "lists_ptr": lists,
        "out_ptr": out,
        "logits_row": logits.stride(0),
        "lists_row": lists.stride(0),
        "plane": rows * topk,
        "TOPK": topk,
        "TILE": triton.next_power_of_2(topk),
        "SIZE": stripe.size,
        "RANK": stripe.rank,
        "INTERLEAVE": stripe.interleave,
    }
    return KernelCall(pack_candidates_kernel, (rows,), arguments, num_warps=4)


def spread_candidates_call(candidates: torch.Tensor, room: torch.Tensor) -> KernelCall:
    """The launch that writes candidates where :func:`attn.ops.rank_topk.merge_candidates` ranks
    them.
    """
    ranks, _, rows, topk = candidates.shape
    arguments = {
        "candidates_ptr": candidates,
        "room_ptr": room,
        "rows": rows,
        "room_row": room.stride(0),
        "width": room.shape[1],
        "TOPK": topk,
        "TILE": triton.next_power_of_2(topk),
    }
    return KernelCall(spread_candidates_kernel, (rows, ranks), arguments, num_warps=4)
