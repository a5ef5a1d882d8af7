"""A step's page tables of two phases, decodes and prefills, written in place by one launch.

The host decides which requests are decodes, from query lengths that equal the device's. KV lengths,
and the pages that a window hides, are read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specs.base import cdiv, power_of_two

PAGE_SIZES = (16, 32, 64, 128)
"""Tokens per page that the vendor kernels take."""
_TILE = 256


@dataclass(frozen=True)
class StepRows:
    """The R requests of a step."""

    block_table: torch.Tensor
    """``[R, max_blocks]`` int32; entries past a row's last block may be anything."""
    seq_lens: torch.Tensor
    """``[R]`` int32, this step's tokens included; 0 for padding."""
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32 first query row of each request."""
    num_decodes: int
    """Number of leading requests in the decode table, padding among them included."""
    least_len: int
    """Least KV length that a decode is listed with, so that each of its queries has a key."""


class PhaseTable:
    """One phase's persistent tables, sized for its largest step; CUDA graphs keep addresses."""

    def __init__(
        self, max_num_seqs: int, max_kv_len: int, page_size: int, device: torch.device | str
    ) -> None:
        """
        Args:
            max_num_seqs: most requests of a step.
            max_kv_len: most keys that a row of the table lists.
            page_size: tokens of a page, and of a block of the engine's table.
            device: where the tables live.

        Raises:
            ValueError: the kernels do not take this page size.
        """
        if page_size not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise ValueError(f"page_size must be one of {sizes}, got {page_size}")
        self.page_size, self.max_num_seqs = page_size, max_num_seqs

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.pages = zeros(max_num_seqs, cdiv(max_kv_len, page_size))
        """``[R, width]``: pages from the first one listed; 0 past the last."""
        self.kv_lens = zeros(max_num_seqs)
        """``[R]``: keys from the first listed page on."""
        self.query_starts = zeros(max_num_seqs + 1)
        """``[R + 1]``: from the phase's first token."""
        self.kv_starts = zeros(max_num_seqs + 1)
        """``[R + 1]``: exclusive prefix sum of ``kv_lens``; of prefills alone."""

    @property
    def width(self) -> int:
        """Pages of a table row."""
        return self.pages.shape[1]


def fill_tables(
    step: StepRows, decode: PhaseTable | None, prefill: PhaseTable | None, window: int | None
) -> None:
    """Write a step's tables; nothing is copied to the host.

    In the decode table, decodes with tokens come first, in their order, then padding, whatever its
    place in the batch. Pages wholly before the first key that a request's first query sees are left
    out, because an engine may have given them to other requests. Masks stay right, because they
    count from the end of a request.

    Args:
        step: the requests.
        decode: table of the leading requests; None where there are none.
        prefill: table of the requests behind them; None where there are none.
        window: visible keys, the token's own included; None means all.

    Raises:
        ValueError: the step has more requests than declared, or tensors differ in their number.
    """
    table = decode or prefill
    assert table is not None
    reqs = len(step.seq_lens)
    if reqs > table.max_num_seqs or len(step.block_table) != reqs:
        raise ValueError(
            f"seq_lens and block_table must have the same number of requests, at most "
            f"{table.max_num_seqs}, got {reqs} and {len(step.block_table)}"
        )
    write = launch_tables if step.block_table.is_cuda else write_tables
    write(step, decode, prefill, window)


def launch_tables(
    step: StepRows, decode: PhaseTable | None, prefill: PhaseTable | None, window: int | None
) -> None:
    """Write a step's tables with one kernel; :func:`write_tables` is its twin."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import phase_tables_kernel

    # A missing phase has no requests, so nothing is written to the table that stands in for it.
    first, second = decode or prefill, prefill or decode
    assert first is not None
    assert second is not None
    table = step.block_table
    reqs, columns = table.shape
    if reqs == 0:
        return
    stride, has_window = table.stride(0), window is not None
    launch = launcher_of(
        phase_tables_kernel,
        table_stride=stride,
        PAGE_SIZE=first.page_size,
        WINDOW=has_window,
        REQS=power_of_two(first.max_num_seqs),
        TILE=_TILE,
    )
    width, other_width = first.width, second.width
    launch(
        (reqs, cdiv(max(width, other_width), _TILE)),
        table,
        step.seq_lens,
        step.query_start_loc,
        first.pages,
        first.kv_lens,
        first.query_starts,
        second.pages,
        second.kv_lens,
        second.query_starts,
        second.kv_starts,
        reqs,
        step.num_decodes,
        step.least_len,
        window or 0,
        columns,
        width,
        other_width,
    )


def write_tables(
    step: StepRows, decode: PhaseTable | None, prefill: PhaseTable | None, window: int | None
) -> None:
    """Write a step's tables in torch, as the twin of the kernel of :func:`launch_tables`."""
    decodes, reqs = step.num_decodes, len(step.seq_lens)
    counts, kv_lens = step.query_start_loc.diff(), step.seq_lens
    page_size = (decode or prefill).page_size  # type: ignore[union-attr]
    skipped = torch.zeros_like(kv_lens)
    if window is not None:
        skipped = (kv_lens - counts - (window - 1)).clamp(min=0) // page_size
    kv_lens = kv_lens - skipped * page_size
    if decode is not None and decodes:
        order = (counts[:decodes] == 0).to(torch.int8).argsort(stable=True)
        own = counts[:decodes][order]
        _write_pages(decode, step.block_table[:decodes][order], kv_lens[order], skipped[order])
        torch.maximum(kv_lens[order], own.clamp(min=step.least_len), out=decode.kv_lens[:decodes])
        _write_starts(decode.query_starts, own)
    if prefill is not None and decodes < reqs:
        rows, own_lens = reqs - decodes, kv_lens[decodes:]
        _write_pages(prefill, step.block_table[decodes:], own_lens, skipped[decodes:])
        prefill.kv_lens[:rows] = own_lens
        _write_starts(prefill.query_starts, counts[decodes:])
        _write_starts(prefill.kv_starts, own_lens)


def _write_pages(
    table: PhaseTable, blocks: torch.Tensor, kv_lens: torch.Tensor, skipped: torch.Tensor
) -> None:
    page, size = torch.arange(table.width, device=blocks.device), table.page_size
    column = page + skipped[:, None]
    used = (page * size < kv_lens[:, None]) & (column < blocks.shape[1])
    entries = blocks.gather(1, column.clamp(max=blocks.shape[1] - 1))
    table.pages[: len(blocks)] = torch.where(used, entries, 0)


def _write_starts(starts: torch.Tensor, lens: torch.Tensor) -> None:
    starts[:1] = 0
    torch.cumsum(lens, 0, dtype=torch.int32, out=starts[1 : len(lens) + 1])
