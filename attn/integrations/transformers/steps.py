"""Steps of Transformers as batches of ours: lengths, tables and slots, all on the device.

Three roads lead to the kernels:

- pages: continuous batching's own cache, written and read in place;
- scratch: keys and values that a call brings are written to pages first, which every call does
  anew (``generate``, and layers with a window in a continuous batch);
- rows: bidirectional layers attend the rows of the call as they lie.

No road reads a number back from a GPU, except once per step where a batch of ``generate`` has
padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from builders.batch import CommonAttentionMetadata
from specs.base import cdiv
from specs.sentinels import PAD_SLOT_ID

if TYPE_CHECKING:
    from attn.integrations.transformers.compat import PackedStep


@dataclass
class Step:
    """A step of a group's layers: its batch, its record, and what to do with a call's rows."""

    batch: CommonAttentionMetadata
    scratch_pages: int = 0
    """Pages of scratch that the call's keys take; 0 where they are not written to scratch."""
    queries: torch.Tensor | None = None
    """``[T]`` int64: the rows of a call's queries that are no padding; None for all of them."""
    record: Any = None
    """The builder's record."""
    token: object = None
    captures: bool = False
    layers: set[int] = field(default_factory=set)
    """Numbers of the layers that have been in this step."""


@dataclass(frozen=True)
class Lengths:
    """Where each of R requests begins among a call's queries and keys, and bounds on both."""

    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    key_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    num_tokens: int
    """Query tokens T, padding at the end included."""
    max_query_len: int
    max_seq_len: int

    @property
    def num_reqs(self) -> int:
        """R."""
        return len(self.query_start_loc) - 1


def over_pages(packed: PackedStep, num_tokens: int, block_size: int) -> Step:
    """The step of a call over continuous batching's own pages.

    Args:
        packed: the step, with pages.
        num_tokens: T, padding included.
        block_size: tokens of a page.
    """
    lens = packed.key_start_loc.diff()
    table, slots = packed.block_table, packed.slots
    longest = packed.max_seq_len
    if table is not None:
        # Every request has one token, its last; requests of length 0 are padding.
        longest = table.shape[1] * block_size
        last = (lens - 1).clamp(min=0).long()
        pages = table.gather(1, (last // block_size)[:, None])[:, 0].long()
        slots = (pages * block_size + last % block_size).masked_fill(lens <= 0, PAD_SLOT_ID)
    else:
        every = packed.all_slots
        assert every is not None
        firsts = torch.arange(0, longest, block_size, device=every.device)
        found = (packed.key_start_loc[:-1, None] + firsts).clamp(max=len(every) - 1)
        # Entries past a request's last page are another request's, and never read.
        table = (every[found] // block_size).int()
    lengths = Lengths(
        packed.query_start_loc, packed.key_start_loc, num_tokens, packed.max_query_len, longest
    )
    assert slots is not None
    return Step(_batch(lengths, lens, table, slots, block_size))


def over_scratch(lengths: Lengths, num_keys: int, block_size: int) -> Step:
    """The step of a packed call whose keys are written to scratch.

    Args:
        lengths: lengths of its requests.
        num_keys: rows of keys that the call brings, padding at the end included.
        block_size: tokens of a page.
    """
    starts = lengths.key_start_loc
    rows = torch.arange(num_keys, dtype=torch.int32, device=starts.device)
    owners = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    owners = owners.clamp(max=lengths.num_reqs - 1)
    places = rows - starts[owners]
    return _scratch_step(lengths, owners, places, rows < starts[-1], block_size)


def of_rectangle(
    mask: torch.Tensor | None,
    shape: tuple[int, int, int],
    block_size: int,
    device: torch.device,
    *,
    is_cross: bool,
) -> Step:
    """The step of a call of ``generate``, whose keys are written to scratch.

    Args:
        mask: ``[B, S_k]`` bool, True where a key is no padding; None where none is.
        shape: B, new tokens S and keys S_k of a row.
        block_size: tokens of a page.
        device: of the call.
        is_cross: every query sees every key, and none of the queries is padding.
    """
    rows, _, keys = shape
    lengths, queries = _rectangle(mask, shape, device, is_cross=is_cross)
    owners = torch.arange(rows, device=device).repeat_interleave(keys)
    if mask is None:
        places = torch.arange(keys, device=device).repeat(rows)
        kept = torch.ones_like(places, dtype=torch.bool)
    else:
        places = (mask.cumsum(1) - 1).flatten()
        kept = mask.flatten()
    step = _scratch_step(lengths, owners, places, kept, block_size)
    step.queries = queries
    if is_cross:
        step.batch = step.batch.replace(encoder_seq_lens=step.batch.seq_lens)
    return step


def of_rows(mask: torch.Tensor | None, shape: tuple[int, int, int], device: torch.device) -> Step:
    """The step of a bidirectional call, which attends its own rows.

    Args:
        mask: ``[B, S]`` bool, True where a token is no padding; None where none is.
        shape: B, S and S.
        device: of the call.
    """
    lengths, queries = _rectangle(mask, shape, device, is_cross=False)
    table = torch.zeros((lengths.num_reqs, 0), dtype=torch.int32, device=device)
    slots = torch.full((lengths.num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device)
    step = Step(_batch(lengths, lengths.key_start_loc.diff(), table, slots, None))
    step.queries = queries
    return step


def _rectangle(
    mask: torch.Tensor | None,
    shape: tuple[int, int, int],
    device: torch.device,
    *,
    is_cross: bool,
) -> tuple[Lengths, torch.Tensor | None]:
    """Lengths of a call of ``generate``, and the rows of its queries that are no padding."""
    rows, new, keys = shape
    steps = torch.arange(rows + 1, dtype=torch.int32, device=device)
    if mask is None:
        return Lengths(steps * new, steps * keys, rows * new, new, keys), None
    key_starts = _starts(mask)
    if is_cross:
        return Lengths(steps * new, key_starts, rows * new, new, keys), None
    own = mask[:, keys - new :]
    # The number of rows is read back, once per step.
    queries = own.flatten().nonzero()[:, 0]
    return Lengths(_starts(own), key_starts, len(queries), new, keys), queries


def _starts(mask: torch.Tensor) -> torch.Tensor:
    """``[B + 1]`` int32: tokens of a mask before each row."""
    starts = torch.zeros(len(mask) + 1, dtype=torch.int32, device=mask.device)
    starts[1:] = mask.sum(1).cumsum(0)
    return starts


def _scratch_step(
    lengths: Lengths,
    owners: torch.Tensor,
    places: torch.Tensor,
    kept: torch.Tensor,
    block_size: int,
) -> Step:
    """The step of a call whose keys are written to scratch.

    Request r takes its pages from ``key_start_loc[r] // block_size + r`` on. Its predecessors need
    no more than that, since each has one page that is not full.

    Args:
        lengths: lengths of the requests.
        owners: ``[keys]``: request of each row of keys.
        places: ``[keys]``: its place among the request's keys.
        kept: ``[keys]`` bool: it is no padding.
        block_size: tokens of a page.
    """
    starts, device = lengths.key_start_loc, owners.device
    order = torch.arange(lengths.num_reqs, dtype=torch.int32, device=device)
    firsts = starts[:-1] // block_size + order
    slots = (firsts[owners].long() * block_size + places).masked_fill(~kept, PAD_SLOT_ID)
    columns = torch.arange(cdiv(lengths.max_seq_len, block_size), device=device)
    pages = len(owners) // block_size + lengths.num_reqs
    table = (firsts[:, None] + columns).clamp(max=pages - 1).int()
    step = Step(_batch(lengths, starts.diff(), table, slots, block_size))
    step.scratch_pages = pages
    return step


def _batch(
    lengths: Lengths,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    block_size: int | None,
) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=lengths.query_start_loc,
        query_start_loc_cpu=_host_starts(lengths),
        seq_lens=seq_lens,
        num_reqs=lengths.num_reqs,
        num_actual_tokens=lengths.num_tokens,
        max_query_len=lengths.max_query_len,
        max_seq_len=lengths.max_seq_len,
        block_table_tensor=block_table,
        slot_mapping=slots,
        block_size=block_size,
    )


def _host_starts(lengths: Lengths) -> torch.Tensor:
    """``[R + 1]`` int32, host: where requests may begin.

    On a GPU the host does not know. It sizes grids by as many requests of the greatest length as
    there can be; the kernels read the device's lengths.
    """
    starts = lengths.query_start_loc
    if starts.device.type == "cpu":
        return starts
    steps = torch.arange(lengths.num_reqs + 1, dtype=torch.int32) * lengths.max_query_len
    return steps.clamp_(max=lengths.num_tokens)
