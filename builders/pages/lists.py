"""A step's pages as one list, made by one launch, as FlashInfer takes them.

:mod:`builders.pages.paging` makes lists with several torch operations.
"""

from __future__ import annotations

import torch

from builders.pages.paging import block_table_to_csr
from specs.base import cdiv, power_of_two

_TILE = 256


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
