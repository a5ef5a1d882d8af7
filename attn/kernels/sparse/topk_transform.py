"""Top-k lists made ready for a kernel: tokens of a request become slots, or rows of a buffer."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from attn.kernels.lang.numerics import INTERPRETED
from builders.device import device_facts
from builders.launch.call import KernelCall, LaunchOptions
from builders.launch.launcher import Launch, Launcher
from builders.sparse.arguments import TopkLists
from builders.splitkv.stripe import Stripe
from specs.devices import DeviceKind

_VARYING: Final = ["ids_row", "table_row", "table_width"]
_ANYWHERE: Final = [
    *("ids_ptr", "visible_ptr", "reqs_ptr", "block_table_ptr", "offsets_ptr"),
    *("out_ptr", "slots_ptr", "counts_ptr"),
]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def topk_transform_kernel(
    ids_ptr,
    visible_ptr,
    reqs_ptr,
    block_table_ptr,
    offsets_ptr,
    out_ptr,
    slots_ptr,
    counts_ptr,
    ids_row,
    table_row,
    table_width,
    TOPK: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    COMPACT: tl.constexpr,
    DCP_SIZE: tl.constexpr,
    DCP_RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HASTENS: tl.constexpr,
):
    """Translate lists ``[T, TOPK]`` to ``[T, WIDTH]``; grid ``(T,)``.

    TILE is a power of two, at least WIDTH. KIND is "paged" (entries become slots of the cache),
    "ragged" (entries become rows of a buffer, by the request's offset) or "gathered" (slots go to
    ``slots_ptr`` ``[T, WIDTH]``, and entries become rows of a buffer of T * WIDTH rows). With
    COMPACT, listed entries come first, and their number is written to ``counts_ptr`` ``[T]``. With
    DCP_SIZE above 1, entries are those of the keys of rank DCP_RANK, which keeps INTERLEAVE tokens
    in its turn. With HASTENS the kernel that attends may be started now; it waits by itself.
    """
    if HASTENS:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    token = tl.load(ids_ptr + row * ids_row + column, mask=column < TOPK, other=-1)
    # A key that the query token does not see has no entry in the table and no row in the buffer.
    listed = (token >= 0) & (token < tl.load(visible_ptr + row))
    if DCP_SIZE > 1:
        turn = token // INTERLEAVE
        listed = listed & (turn % DCP_SIZE == DCP_RANK)
        token = turn // DCP_SIZE * INTERLEAVE + token % INTERLEAVE
    req = tl.load(reqs_ptr + row).to(tl.int64)
    if KIND == "ragged":
        entry = token + tl.load(offsets_ptr + req)
    else:
        page = token // PAGE_SIZE
        listed = listed & (page < table_width)
        block = tl.load(block_table_ptr + req * table_row + page, mask=listed, other=0)
        entry = block * PAGE_SIZE + token % PAGE_SIZE
    place = column
    inside = column < WIDTH
    if COMPACT:
        ones = listed.to(tl.int32)
        count = tl.sum(ones, 0)
        if count < TOPK:
            # Entries that list no row follow the entries that do.
            before = tl.cumsum(ones, 0) - ones
            place = tl.where(listed, before, count + column - before)
            inside = place < WIDTH
        tl.store(counts_ptr + row, count)
    entry = tl.where(listed, entry, -1)
    if KIND == "gathered":
        tl.store(slots_ptr + row * WIDTH + place, entry, mask=inside)
        entry = tl.where(listed, (row * WIDTH + place).to(tl.int32), -1)
    tl.store(out_ptr + row * WIDTH + place, entry, mask=inside)


def topk_transform_call(
    lists: TopkLists,
    kind: str,
    out: torch.Tensor,
    block_table: torch.Tensor | None,
    block_size: int,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> KernelCall:
    """The launch of :func:`attn.ops.topk_transform.transform_topk`, which checks the arguments."""
    given = block_table, block_size, offsets, slots, counts
    return topk_transform_launch(lists, kind, out, *given).call


def topk_transform_launch(
    lists: TopkLists,
    kind: str,
    out: torch.Tensor,
    block_table: torch.Tensor | None,
    block_size: int,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> Launch:
    """The launch, prepared by the launcher of its variant, which is kept."""
    rows, width = out.shape
    ids = lists.ids
    tensors = (ids, lists.visible_lens, lists.reqs, block_table, offsets, out, slots, counts)
    types = tuple(None if one is None else (one.dtype, one.is_cuda) for one in tensors)
    hastens = lists.hastens and out.is_cuda and not INTERPRETED
    hastens = hastens and device_facts(out.device).kind is DeviceKind.SM90
    launcher = _launcher(kind, ids.shape[1], width, block_size, lists.stripe, types, hastens)
    ids_row, table_row, table_width = ids.stride()[0], 0, 0
    if block_table is not None:
        table_row, table_width = block_table.stride()[0], block_table.shape[1]
    varying = {
        "ids_ptr": ids,
        "visible_ptr": lists.visible_lens,
        "reqs_ptr": lists.reqs,
        "block_table_ptr": block_table,
        "offsets_ptr": offsets,
        "out_ptr": out,
        "slots_ptr": slots,
        "counts_ptr": counts,
        "ids_row": ids_row,
        "table_row": table_row,
        "table_width": table_width,
    }
    return launcher.bind((rows,), varying)


@lru_cache(maxsize=256)
def _launcher(
    kind: str,
    topk: int,
    width: int,
    block_size: int,
    stripe: Stripe | None,
    types: tuple[tuple[torch.dtype, bool] | None, ...],
    hastens: bool,
) -> Launcher:
    """The launcher for lists of these sizes, and for tensors of these types in their order.

    Args:
        hastens: the kernel behind this one may start early.
    """
    shared = stripe or Stripe(1, 0, 1)
    fixed = {
        "TOPK": topk,
        "WIDTH": width,
        "TILE": triton.next_power_of_2(width),
        "PAGE_SIZE": block_size,
        "KIND": kind,
        # The last tensor receives the numbers of entries, which are then moved to the front.
        "COMPACT": types[-1] is not None,
        "DCP_SIZE": shared.size,
        "DCP_RANK": shared.rank,
        "INTERLEAVE": shared.interleave,
        "HASTENS": hastens,
    }
    options = LaunchOptions(num_warps=8)
    return Launcher(topk_transform_kernel, fixed, options=options, is_typed=True)
