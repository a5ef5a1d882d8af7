"""Block tables and lengths of a step, from an engine's table of one slot per token.

Some engines keep, for every request, the slot of each of its tokens: ``[requests, tokens]``. The
tokens of a page have consecutive slots, so that a block table is every ``page_size``-th of them.
One launch writes what a batch needs, for one pool of slots or for two, and can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.device import interprets
from specs.base import cdiv, power_of_two

_TILE = 256


@dataclass(frozen=True)
class StepSlots:
    """The R requests of a step, as an engine of slots has them."""

    rows: torch.Tensor
    """``[R]`` integers, device: row of each request in the engine's table."""
    seq_lens: torch.Tensor
    """``[R]`` integers, device: tokens of each request, ``added`` left out."""
    new_slots: torch.Tensor
    """``[T]`` int64, device: where the step's tokens are written."""
    query_len: int
    """New tokens of every request, where ``query_lens`` is None."""
    query_lens: torch.Tensor | None = None
    """``[R]`` integers, device: new tokens of each request."""
    added: int = 0
    """Tokens that ``seq_lens`` does not count, of every request: drafts."""


class SlotTables:
    """Persistent block tables and lengths, sized for the largest step; graphs keep addresses."""

    def __init__(
        self,
        slots: torch.Tensor,
        page_size: int,
        max_num_seqs: int,
        window_slots: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            slots: ``[requests, tokens]`` int32: slot of every token; kept, not copied.
            page_size: tokens of a page.
            max_num_seqs: most requests of a step.
            window_slots: ``[slots]`` integers: slot in a second pool, of the layers with a window,
                of each slot; negative for none. None where there is one pool.
        """
        self.slots, self.page_size, self.max_num_seqs = slots, page_size, max_num_seqs
        self.window_slots = window_slots
        self.longest = slots.shape[1]
        device, width = slots.device, cdiv(slots.shape[1], page_size)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.table = zeros(max_num_seqs, width)
        """``[max_num_seqs, pages]`` int32; entries past a request's last page are undefined."""
        self.window_table = None if window_slots is None else zeros(max_num_seqs, width)
        """``[max_num_seqs, pages]`` int32, pages of the second pool; entries behind the window are
        undefined too."""
        self.kv_lens = zeros(max_num_seqs)
        """``[max_num_seqs]`` int32, the step's tokens included."""
        self.starts = zeros(max_num_seqs + 1)
        """``[max_num_seqs + 1]`` int32: first token of each request."""
        self.window_new = torch.zeros(0, dtype=torch.int64, device=device)
        """``[>= T]`` int64: where the step's tokens are written in the second pool; -1 nowhere."""

    def reserve(self, num_tokens: int) -> None:
        """Make room for the second pool's slots of ``num_tokens`` new tokens.

        A buffer that is replaced may be a graph's. It is the caller's duty to reserve enough before
        the first capture.
        """
        if self.window_slots is not None and len(self.window_new) < num_tokens:
            self.window_new = self.window_new.new_zeros(power_of_two(num_tokens))

    def fill(self, step: StepSlots) -> None:
        """Write the tables and lengths of a step, by one launch; nothing is read back.

        Raises:
            ValueError: the step has more requests than declared.
        """
        if len(step.rows) > self.max_num_seqs:
            raise ValueError(
                f"rows must have at most {self.max_num_seqs} requests, got {len(step.rows)}"
            )
        self.reserve(len(step.new_slots))
        if len(step.rows) == 0:
            return
        write = launch_tables if self.slots.is_cuda or interprets() else write_tables
        write(self, step)


def launch_tables(tables: SlotTables, step: StepSlots) -> None:
    """Write a step's tables with one kernel; :func:`write_tables` is its twin."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import slot_tables_kernel

    reqs, width = len(step.rows), tables.table.shape[1]
    launch = launcher_of(
        slot_tables_kernel,
        slots_stride=tables.slots.stride(0),
        PAGE_SIZE=tables.page_size,
        REQS=power_of_two(tables.max_num_seqs),
        TILE=_TILE,
    )
    launch(
        (reqs, cdiv(width, _TILE)),
        tables.slots,
        step.rows,
        step.seq_lens,
        step.query_lens,
        tables.window_slots,
        step.new_slots,
        tables.table,
        tables.window_table,
        tables.kv_lens,
        tables.starts,
        tables.window_new,
        reqs,
        step.query_len,
        step.added,
        tables.longest,
        width,
        len(step.new_slots),
    )


def write_tables(tables: SlotTables, step: StepSlots) -> None:
    """Write a step's tables in torch, as the twin of the kernel of :func:`launch_tables`."""
    reqs, size = len(step.rows), tables.page_size
    lens = (step.seq_lens + step.added).clamp(max=tables.longest)
    first = tables.slots[step.rows.long(), ::size].long()
    used = torch.arange(first.shape[1], device=first.device) * size < lens[:, None]
    first = torch.where(used, first, 0)
    tables.table[:reqs] = torch.where(used, first // size, tables.table[:reqs])
    if tables.window_slots is not None:
        assert tables.window_table is not None
        own = tables.window_slots[first].clamp(min=0) // size
        tables.window_table[:reqs] = torch.where(used, own, tables.window_table[:reqs])
        new = step.new_slots
        written = torch.where(new >= 0, tables.window_slots[new.clamp(min=0)], -1)
        tables.window_new[: len(new)] = written
    tables.kv_lens[:reqs] = lens
    tables.starts[0] = 0
    counts = step.query_lens
    if counts is None:
        counts = torch.full((reqs,), step.query_len, device=lens.device)
    tables.starts[1 : reqs + 1] = counts.cumsum(0)
