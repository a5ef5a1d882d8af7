"""Rows of sparse attention: one query token each, what it sees, and the context behind it.

Written on the device by one launch each, whose arguments are host bounds and never lengths; twins
in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specs.base import cdiv

_TILE = 256


@dataclass(frozen=True)
class RowLengths:
    """What belongs to the rows of a phase, ``[T']`` int32 each, as views of a builder's buffers."""

    reqs: torch.Tensor
    """Request of each row, counted from the phase's first; that of a padding row is any."""
    visible_lens: torch.Tensor
    """Keys that a row sees, its own token's included; 0 for padding, and without keys."""
    topk_lens: torch.Tensor
    """Of these, as many as a list can hold."""


def fill_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    first_token: int,
    topk: int,
    rows: RowLengths,
    max_num_seqs: int,
) -> None:
    """Write what belongs to the rows of a phase; nothing is read back.

    Args:
        query_start_loc: ``[R' + 1]`` int32, of the phase's requests, counted in the batch's tokens.
        seq_lens: ``[R']`` int32, this step's tokens included; 0 for requests without keys.
        first_token: of the phase, in the batch. Tokens behind the last request's are padding.
        topk: entries of a list.
        rows: written.
        max_num_seqs: most requests of any step: what the kernel is compiled for.
    """
    if len(rows.reqs) == 0:
        return
    if len(seq_lens) == 0:
        for part in (rows.reqs, rows.visible_lens, rows.topk_lens):
            part.zero_()
    elif query_start_loc.is_cuda:
        launch_rows(query_start_loc, seq_lens, first_token, topk, rows, max_num_seqs)
    else:
        expand_rows(query_start_loc, seq_lens, first_token, topk, rows)


def launch_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    first_token: int,
    topk: int,
    rows: RowLengths,
    max_num_seqs: int,
) -> None:
    """:func:`expand_rows` by one kernel."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import sparse_rows_kernel

    count = len(rows.reqs)
    launch = launcher_of(sparse_rows_kernel, STEPS=max_num_seqs.bit_length(), TILE=_TILE)
    launch(
        (cdiv(count, _TILE),),
        query_start_loc,
        seq_lens,
        rows.reqs,
        rows.visible_lens,
        rows.topk_lens,
        len(seq_lens),
        first_token,
        count,
        topk,
    )


def expand_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    first_token: int,
    topk: int,
    rows: RowLengths,
) -> None:
    """:func:`fill_rows` in torch: the kernel's twin, for one request or more."""
    ends = query_start_loc[1:].contiguous()
    count, reqs = len(rows.reqs), len(seq_lens)
    tokens = torch.arange(first_token, first_token + count, dtype=torch.int32, device=ends.device)
    found = torch.searchsorted(ends, tokens, right=True)
    known = found.clamp(max=reqs - 1)
    lens = seq_lens[known]
    behind = ends[known] - 1 - tokens
    visible = torch.where((found < reqs) & (lens > 0), (lens - behind).clamp(min=0), 0)
    rows.reqs.copy_(known)
    rows.visible_lens.copy_(visible)
    rows.topk_lens.copy_(visible.clamp(max=topk))


def context_slots(
    block_table: torch.Tensor,
    ends: torch.Tensor,
    num_rows: int,
    page_size: int,
    max_num_seqs: int,
) -> torch.Tensor:
    """Slots of all keys of some requests, one request behind another; nothing is read back.

    Args:
        block_table: ``[R', max_blocks]`` int32, any row stride; entries past a row's last block may
            be anything.
        ends: ``[R']`` int32, inclusive prefix sum of the requests' lengths.
        num_rows: host bound of the last of them.
        page_size: tokens per block.
        max_num_seqs: most requests of any step: what the kernel is compiled for.

    Returns:
        ``[num_rows]`` int32; -1 past the last key, and for keys beyond the table.
    """
    slots = torch.empty(num_rows, dtype=torch.int32, device=ends.device)
    if num_rows:
        write = launch_context if block_table.is_cuda else list_context
        write(block_table, ends, slots, page_size, max_num_seqs)
    return slots


def launch_context(
    block_table: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    max_num_seqs: int,
) -> None:
    """:func:`list_context` by one kernel."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import context_slots_kernel

    launch = launcher_of(
        context_slots_kernel,
        table_stride=block_table.stride(0),
        PAGE_SIZE=page_size,
        STEPS=max_num_seqs.bit_length(),
        TILE=_TILE,
    )
    launch(
        (cdiv(len(slots), _TILE),),
        block_table,
        ends,
        slots,
        len(ends),
        len(slots),
        block_table.shape[1],
    )


def list_context(
    block_table: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    max_num_seqs: int,
) -> None:
    """:func:`context_slots` into ``slots``, in torch: the kernel's twin."""
    reqs, width = block_table.shape
    rows = torch.arange(len(slots), dtype=torch.int32, device=ends.device)
    found = torch.searchsorted(ends, rows, right=True)
    known = found.clamp(max=reqs - 1)
    starts = torch.where(known > 0, ends[(known - 1).clamp(min=0)], 0)
    position = rows - starts
    page = position // page_size
    owned = (found < reqs) & (page < width)
    block = block_table[known, page.clamp(max=width - 1).long()]
    slots.copy_(torch.where(owned, block * page_size + position % page_size, -1))
