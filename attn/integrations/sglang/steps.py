"""Steps of SGLang as batches of ours: one launch writes block tables and lengths, for every mode.

No length is read from the device. The host knows the new tokens of each request; how many tokens
are cached is known to the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from builders.batch import CommonAttentionMetadata
from builders.pages.slot_tables import SlotTables, StepSlots


@dataclass
class Step:
    """A step: its batch for each pool, and the records that groups of layers have built so far."""

    full: CommonAttentionMetadata
    window: CommonAttentionMetadata | None
    """The batch over the window pool; None for a cache of one pool."""
    written: torch.Tensor
    """``[T]`` int64: SGLang's slots of the new tokens, which the batch was made from."""
    tables: SlotTables
    cached: list[int]
    """Cached tokens of each request of a step of prompts, as the host knows them; else zeros, which
    nothing reads."""
    records: dict[Any, Any]

    @property
    def num_tokens(self) -> int:
        """New tokens, padding left out."""
        return self.full.num_actual_tokens

    def new_slots(self, out_cache_loc: torch.Tensor, in_window: bool) -> torch.Tensor:
        """Where a layer writes the new tokens.

        Args:
            out_cache_loc: ``[>= T]`` int64: SGLang's slots, which it changes between the layers of
                one draft step and those of the next.
            in_window: the layer's keys are in the window pool.
        """
        if not in_window:
            return out_cache_loc
        if out_cache_loc.data_ptr() == self.written.data_ptr():
            assert self.window is not None
            return self.window.slot_mapping
        assert self.tables.window_slots is not None
        return self.tables.window_slots[out_cache_loc].long()


@dataclass(frozen=True)
class Lengths:
    """New tokens of each of R requests."""

    query_len: int
    """New tokens of every request, if ``host`` is None; else of the request with most."""
    host: list[int] | None
    device: torch.Tensor | None
    added: int
    """Tokens of every request that SGLang's lengths do not count."""


def lengths_of(batch: Any, draft_step: int | None) -> Lengths:
    """The new tokens of a step.

    Args:
        batch: SGLang's ``ForwardBatch``, or its view of one.
        draft_step: number of the draft model's decode step that the step is; None for others.

    Raises:
        NotImplementedError: a kind of step that is not served.
    """
    mode = batch.forward_mode
    if mode.is_decode():
        return Lengths(1, None, None, 0 if draft_step is None else draft_step + 1)
    if mode.is_target_verify():
        width = _width(batch)
        return Lengths(width, None, None, width)
    if mode.is_draft_extend_v2():
        return Lengths(_width(batch), None, None, 0)
    if not mode.is_extend() or mode.name == "DLLM_EXTEND" or batch.extend_seq_lens_cpu is None:
        raise NotImplementedError(
            f"attention backend 'attn' does not serve steps of kind {mode.name}: set "
            "--attention-backend triton"
        )
    host = [int(count) for count in batch.extend_seq_lens_cpu]
    return Lengths(max(host, default=0), host, batch.extend_seq_lens, 0)


def _width(batch: Any) -> int:
    """New tokens of every request of a verify, or of the draft model's step after it."""
    width = getattr(batch.spec_info, "num_tokens_per_req", -1)
    return int(width) if width > 0 else len(batch.input_ids) // batch.batch_size


def make_step(batch: Any, tables: SlotTables, draft_step: int | None) -> Step:
    """Write a step's tables and lengths; one launch, which can be captured.

    Args:
        batch: SGLang's ``ForwardBatch``, or its view of one.
        tables: where to.
        draft_step: see :func:`lengths_of`.
    """
    lengths, reqs = lengths_of(batch, draft_step), batch.batch_size
    if lengths.host is None:
        starts = torch.arange(reqs + 1, dtype=torch.int32) * lengths.query_len
    else:
        starts = torch.tensor([0, *lengths.host], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_tokens = int(starts[-1])
    written = batch.out_cache_loc[:num_tokens]
    tables.fill(
        StepSlots(
            rows=batch.req_pool_indices[:reqs],
            seq_lens=batch.seq_lens[:reqs],
            new_slots=written,
            query_len=lengths.query_len,
            query_lens=lengths.device,
            added=lengths.added,
        )
    )
    full = CommonAttentionMetadata(
        query_start_loc=tables.starts[: reqs + 1],
        query_start_loc_cpu=starts,
        seq_lens=tables.kv_lens[:reqs],
        num_reqs=reqs,
        num_actual_tokens=num_tokens,
        max_query_len=lengths.query_len,
        max_seq_len=tables.longest,
        block_table_tensor=tables.table[:reqs],
        slot_mapping=written,
        block_size=tables.page_size,
    )
    window = None
    if tables.window_table is not None:
        window = full.replace(
            block_table_tensor=tables.window_table[:reqs],
            slot_mapping=tables.window_new[:num_tokens],
        )
    cached = getattr(batch, "extend_prefix_lens_cpu", None) if lengths.host is not None else None
    return Step(full, window, written, tables, [*map(int, cached or [0] * reqs)], {})
