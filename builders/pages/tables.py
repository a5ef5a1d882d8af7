"""Contiguous page tables, rewritten in place by one launch, and page lists, made by one launch.

Some vendor kernels take tables, others take lists. :mod:`builders.pages.paging` makes lists with
several torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.buffers import GraphBuffers
from builders.pages.paging import block_table_to_csr
from specs.base import cdiv, power_of_two

PAGE_SIZES = (16, 32, 64, 128)
"""Tokens per page that the vendor kernels take."""
_TILE = 256


@dataclass(frozen=True)
class PageTable:
    """One step's pages, as views of persistent buffers."""

    pages: torch.Tensor
    """``[R, width]`` int32, contiguous: physical page of each logical page, 0 past the last."""
    kv_lens: torch.Tensor
    """``[R]`` int32: keys of each request; 0 for padding."""
    kv_starts: torch.Tensor
    """``[R + 1]`` int32: exclusive prefix sum of ``kv_lens``."""
    max_num_seqs: int
    """Most requests of any step, which the kernel is compiled for."""


class PageTableBuffers:
    """Buffers of the tables of one KV cache group, allocated once for the declared limits.

    A CUDA graph keeps their addresses. The launch that fills them may be a part of a graph, because
    no number that it takes from the host depends on lengths.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        page_size: int,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            max_num_seqs: most requests of a step.
            max_model_len: most keys of a request.
            block_size: tokens of a block of the engine's table.
            page_size: tokens of a page of the kernel that reads the tables.
            device: device of the buffers.

        Raises:
            ValueError: the kernels do not take the page size, or it does not divide the blocks.
        """
        if page_size not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise ValueError(f"page_size must be one of {sizes}, got {page_size}")
        if block_size % page_size:
            raise ValueError(
                f"block_size must be a multiple of page_size ({page_size}), got {block_size}"
            )
        self.block_size, self.page_size = block_size, page_size
        self._max_reqs = max_num_seqs
        self._width = cdiv(max_model_len, page_size)
        self._buffers = GraphBuffers(device)
        for name, extent in (("kv_lens", max_num_seqs), ("kv_starts", max_num_seqs + 1)):
            self._buffers.declare(name, (extent,), torch.int32)
        self._buffers.declare("pages", (max_num_seqs, self._width), torch.int32)

    def fill(self, block_table: torch.Tensor, seq_lens: torch.Tensor, added: int = 0) -> PageTable:
        """Write a step's tables; nothing is copied to the host.

        Args:
            block_table: ``[R, max_blocks]`` int32, any row stride; entries past a row's last block
                may be anything.
            seq_lens: ``[R]`` int32, this step's tokens included; 0 for padding requests.
            added: keys of every request, except padding, beyond ``seq_lens``; draft step i adds
                i + 1.

        Raises:
            ValueError: the step has more requests than declared, or tensors differ in their number.
        """
        reqs = len(seq_lens)
        if reqs > self._max_reqs or len(block_table) != reqs:
            raise ValueError(
                f"seq_lens and block_table must have the same number of requests, at most "
                f"{self._max_reqs}, got {reqs} and {len(block_table)}"
            )
        table = PageTable(
            self._buffers.view("pages", reqs, self._width),
            self._buffers.view("kv_lens", reqs),
            self._buffers.view("kv_starts", reqs + 1),
            self._max_reqs,
        )
        write = launch_page_table if block_table.is_cuda else write_page_table
        write(block_table, seq_lens, table, self.block_size, self.page_size, added)
        return table


def launch_page_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table: PageTable,
    block_size: int,
    page_size: int,
    added: int = 0,
) -> None:
    """Write a page table with one kernel; :func:`write_page_table` is its twin."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import page_table_kernel

    reqs, width = table.pages.shape
    if reqs == 0:
        table.kv_starts.zero_()
        return
    launch = launcher_of(
        page_table_kernel,
        table_stride=block_table.stride(0),
        PAGES_PER_BLOCK=block_size // page_size,
        PAGE_SIZE=page_size,
        REQS=power_of_two(table.max_num_seqs),
        TILE=_TILE,
    )
    launch(
        (reqs, cdiv(width, _TILE)),
        block_table,
        seq_lens,
        table.pages,
        table.kv_lens,
        table.kv_starts,
        reqs,
        added,
        block_table.shape[1],
        width,
    )


def write_page_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table: PageTable,
    block_size: int,
    page_size: int,
    added: int = 0,
) -> None:
    """Write a page table in torch, as the twin of the kernel of :func:`launch_page_table`.

    Args:
        block_table: ``[R, max_blocks]`` int32.
        seq_lens: ``[R]`` int32.
        table: the table to write.
        block_size: tokens of a block, a multiple of ``page_size``.
        page_size: tokens of a page.
        added: keys beyond ``seq_lens`` of every request that has any.
    """
    per_block, width = block_size // page_size, table.pages.shape[1]
    table.kv_lens.copy_(torch.where(seq_lens > 0, seq_lens + added, 0))
    table.kv_starts[:1] = 0
    torch.cumsum(table.kv_lens, 0, out=table.kv_starts[1:])
    used = torch.div(table.kv_lens + page_size - 1, page_size, rounding_mode="floor")
    used = used.clamp(max=block_table.shape[1] * per_block)
    page = torch.arange(width, dtype=torch.int32, device=block_table.device)
    column = (page // per_block).clamp(max=block_table.shape[1] - 1)
    entries = block_table[:, column.long()] * per_block + page % per_block
    table.pages.copy_(torch.where(page < used[:, None], entries, 0))


class RequestPlaces:
    """Places of each request's rows and pages, on the device, rewritten by a kernel in every step.

    The leading requests and the requests behind them have separate prefix sums, each from 0.
    """

    def __init__(self, out: torch.Tensor, num_leading: int) -> None:
        """
        Args:
            out: ``[3 * R + 4]`` int32 memory for all places.
            num_leading: number L of leading requests.
        """
        reqs = (out.shape[0] - 4) // 3
        split = num_leading + 1, reqs + 1 - num_leading
        parts = out.split_with_sizes((*split, *split, num_leading, reqs - num_leading))
        self.out = out
        self.num_leading = num_leading
        self.leading = parts[0], parts[2], parts[4]
        """``qo_indptr`` ``[L + 1]`` and ``kv_indptr`` ``[L + 1]``, both from 0, and
        ``last_page_len`` ``[L]``: tokens in the last page, 0 without pages.
        """
        self.behind = parts[1], parts[3], parts[5]
        """``qo_indptr`` ``[R - L + 1]``, ``kv_indptr`` ``[R - L + 1]`` and ``last_page_len``
        ``[R - L]`` of the requests behind the leading ones, with sums from 0.
        """


def list_pages(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    skipped: torch.Tensor | None,
    max_num_seqs: int,
    places: RequestPlaces | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pages of every request, one request after another; nothing is copied to the host.

    Args:
        block_table: ``[R, max_blocks]`` int32, any row stride; entries past a row's last page may
            be anything.
        seq_lens: ``[R]`` int32.
        page_size: tokens per page, and per block.
        skipped: ``[R]``: leading pages of each request that are left out, at most all of them; None
            leaves none out.
        max_num_seqs: most requests of any step, which the kernel is compiled for.
        places: places to write in the same launch; None writes none.
        query_start_loc: ``[R + 1]`` int32, first query row of each request, for ``places``.

    Returns:
        ``[R * max_blocks]`` int32; 0 past the last page, since a kernel may read one page ahead.
    """
    list_them = launch_page_list if block_table.is_cuda else _list_in_torch
    given = block_table, seq_lens, page_size, skipped, max_num_seqs
    return list_them(*given, places, query_start_loc)


def launch_page_list(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    skipped: torch.Tensor | None,
    max_num_seqs: int,
    places: RequestPlaces | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    """List pages with one kernel; the arguments are those of :func:`list_pages`."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import page_list_kernel

    reqs, width = block_table.shape
    indices = torch.empty(reqs * width, dtype=torch.int32, device=block_table.device)
    if reqs and width:
        launch = launcher_of(
            page_list_kernel,
            table_stride=block_table.stride(0),
            PAGE_SIZE=page_size,
            REQS=power_of_two(max_num_seqs),
            TILE=_TILE,
        )
        grid = reqs, cdiv(width, _TILE)
        out, leading = (None, 0) if places is None else (places.out, places.num_leading)
        starts = query_start_loc
        launch(grid, block_table, seq_lens, skipped, indices, starts, out, reqs, width, leading)
    return indices


def _list_in_torch(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    skipped: torch.Tensor | None,
    max_num_seqs: int,
    places: RequestPlaces | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> torch.Tensor:
    listed = block_table_to_csr(block_table, seq_lens, page_size, skipped)
    if places is not None:
        assert query_start_loc is not None
        count, starts, ends = places.num_leading, query_start_loc, listed.indptr
        parts = (places.leading, slice(0, count)), (places.behind, slice(count, None))
        for part, own in parts:
            first, stop = own.start, None if own.stop is None else own.stop + 1
            part[0].copy_(starts[first:stop] - starts[first])
            part[1].copy_(ends[first:stop] - ends[first])
            part[2].copy_(listed.last_page_len[own])
    return listed.indices
