"""Rows of sparse attention: the request and the visible keys of each query token, on the device.

One launch writes the rows of a phase, and one the slots of whole contexts. Their arguments on the
host are bounds, never lengths. Each launch has a twin in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from builders.latent.prefill import PagedRows
from specs.base import cdiv

_TILE = 256
"""Rows or slots that a program of either kernel writes."""


@dataclass(frozen=True)
class RowLengths:
    """Requests and lengths of a phase's rows: ``[T']`` int32 each, views of a builder's buffers."""

    reqs: torch.Tensor
    """Request of each row, counted from the phase's first; any request for a padding row."""
    visible_lens: torch.Tensor
    """Keys that each row sees, its own token's included; 0 for padding and for requests without
    keys."""
    topk_lens: torch.Tensor
    """Entries of each row's list: the visible keys, or ``topk`` if there are more."""


def fill_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    first_token: int,
    topk: int,
    rows: RowLengths,
    max_num_seqs: int,
) -> None:
    """Write requests and lengths of a phase's rows; nothing is read back from the device.

    Args:
        query_start_loc: ``[R' + 1]`` int32: first token of each of the phase's requests, counted in
            the batch's tokens.
        seq_lens: ``[R']`` int32, this step's tokens included; 0 for requests without keys.
        first_token: first token of the phase, in the batch. Tokens behind the last request's are
            padding.
        topk: most entries of a list.
        rows: its tensors are written.
        max_num_seqs: most requests of any step, for which the kernel is compiled.
    """
    # A tensor's len takes longer than its shape.
    if rows.reqs.shape[0] == 0:
        return
    if seq_lens.shape[0] == 0:
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
    """Write requests and lengths of rows by one kernel; its twin is :func:`expand_rows`."""
    count = rows.reqs.shape[0]
    _rows_launcher(max_num_seqs.bit_length())(
        (cdiv(count, _TILE),),
        query_start_loc,
        seq_lens,
        rows.reqs,
        rows.visible_lens,
        rows.topk_lens,
        seq_lens.shape[0],
        first_token,
        count,
        topk,
    )


@cache
def _rows_launcher(steps: int) -> Callable[..., None]:
    """The launcher of the kernel that searches a row's request in ``steps`` steps.

    To find it by a number costs less than to find it by the kernel, whose hash reads its source.
    """
    from builders.launch.launcher import Launcher
    from builders.pages.device import sparse_rows_kernel

    return Launcher(sparse_rows_kernel, {"STEPS": steps, "TILE": _TILE})


def expand_rows(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    first_token: int,
    topk: int,
    rows: RowLengths,
) -> None:
    """Write requests and lengths of rows in torch, for one request or more.

    This is the twin of :func:`launch_rows`.
    """
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
    """Cache slots of all keys of some requests, one request behind another.

    Nothing is read back from the device.

    Args:
        block_table: ``[R', max_blocks]`` int32, any row stride; entries past a request's last block
            may be anything.
        ends: ``[R']`` int32: inclusive prefix sum of the requests' lengths.
        num_rows: host bound on the keys of all these requests.
        page_size: tokens of a block.
        max_num_seqs: most requests of any step, for which the kernel is compiled.

    Returns:
        ``[num_rows]`` int32: a slot for each key; -1 past the last key, and for keys beyond the
        table.
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
    """Write the slots of some requests by one kernel; its twin is :func:`list_context`."""
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
    """Write the slots of some requests in torch, see :func:`context_slots` for the arguments.

    This is the twin of :func:`launch_context`.
    """
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


def chunk_slots(rows: PagedRows, page_size: int) -> torch.Tensor:
    """Cache slots of a chunk of some requests' context; nothing is read back from the device.

    Args:
        rows: the chunk's tokens of R requests.
        page_size: tokens of a block.

    Returns:
        ``[R * span]`` int32; -1 past a request's tokens, and for tokens beyond the table.
    """
    place = torch.arange(rows.span, dtype=torch.int32, device=rows.lens.device)
    token = rows.starts[:, None] + place
    page, width = token // page_size, rows.block_table.shape[1]
    block = rows.block_table.gather(1, page.clamp(max=width - 1).long())
    owned = (place < rows.lens[:, None]) & (page < width)
    return torch.where(owned, block * page_size + token % page_size, -1).view(-1)
