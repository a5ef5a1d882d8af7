"""Draft steps of TRTLLM_MHA: all their records are made before the first step runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from builders.batch import CommonAttentionMetadata
from builders.pages.paging import compute_slot_mapping
from builders.pages.window_pool import translate_slots
from specs.sentinels import PAD_SLOT_ID

if TYPE_CHECKING:
    from builders.vendor.trtllm_mha import PhaseBuffers, TrtllmMhaMetadata, TrtllmMhaMetadataBuilder


@dataclass(frozen=True)
class DraftBuffers:
    """Tensors of one draft step, whose addresses a graph may keep."""

    phase: PhaseBuffers
    """Buffers of the decode phase, with the step's own page table."""
    starts: torch.Tensor
    """``[R + 1]`` int32 first query row of each request, which has one token."""
    seq_lens: torch.Tensor
    """``[R]`` int32 KV lengths in this step."""
    slots: torch.Tensor
    """``[R]`` int64 slot of each request's token."""
    keyless: torch.Tensor
    """``[R, 1, 1]`` bool, True for padding, which has no keys."""

    @classmethod
    def of(cls, phase: PhaseBuffers) -> DraftBuffers:
        """Make buffers for as many requests as the phase's page table has rows."""
        lens = phase.table.kv_lens
        reqs, device = len(lens), lens.device
        return cls(
            phase,
            torch.arange(reqs + 1, dtype=torch.int32, device=device),
            torch.zeros_like(lens),
            torch.full((reqs,), PAD_SLOT_ID, dtype=torch.int64, device=device),
            torch.zeros(reqs, 1, 1, dtype=torch.bool, device=device),
        )


def build_draft_steps(
    builder: TrtllmMhaMetadataBuilder, batch: CommonAttentionMetadata, num_steps: int
) -> list[TrtllmMhaMetadata]:
    """Records of consecutive draft steps: see ``TrtllmMhaMetadataBuilder.build_draft_steps``."""
    from builders.vendor.trtllm_mha import TrtllmMhaMetadata

    page, reqs = builder.kv_cache_spec.block_size, batch.num_reqs
    table = batch.block_table_tensor[:reqs]
    room = min(builder.vllm_config.max_model_len, table.shape[1] * page)
    is_live = batch.query_start_loc[: reqs + 1].diff() > 0
    own_table, records = builder.own_blocks(table), []
    for step in range(num_steps):
        own = builder.draft_buffers(step)
        starts = own.starts[: reqs + 1]
        lens = batch.seq_lens[:reqs] + (step + 1)
        own.seq_lens[:reqs] = torch.where(is_live & (lens <= room) & (lens > step + 1), lens, 0)
        slots = compute_slot_mapping(table, starts, own.seq_lens[:reqs], reqs, page)
        if builder.block_map is not None:
            slots = translate_slots(slots, builder.block_map, page)
        own.slots[:reqs] = slots
        torch.eq(own.seq_lens[:reqs, None, None], 0, out=own.keyless[:reqs])
        record = TrtllmMhaMetadata(
            slot_mapping=own.slots[:reqs],
            num_actual_tokens=reqs,
            num_reqs=reqs,
            query_start_loc=starts,
            seq_lens=own.seq_lens[:reqs],
            block_table=own_table,
            sliding_window=builder.sliding_window,
            split=builder.split([1] * reqs),
            decode=None,
            prefill=None,
            keyless=own.keyless[:reqs],
            **builder.pages,
        )
        builder.fill(record, own.phase, None)
        records.append(record)
    return records
