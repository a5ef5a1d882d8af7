"""Multi-step drafting: the batch of draft step n + 1, made from the batch of step n."""

from __future__ import annotations

import torch

from builders.batch import VLLM_CACHES, CommonAttentionMetadata, replace_known
from builders.pages.paging import compute_slot_mapping


def advance(
    batch: CommonAttentionMetadata,
    block_size: int,
    max_model_len: int,
    num_rejected_tokens: torch.Tensor | None = None,
    num_rejected_tokens_cpu: torch.Tensor | None = None,
) -> CommonAttentionMetadata:
    """The batch of the next draft step, with one new token per request; ``batch`` is not written.

    Args:
        batch: any step's batch (the first draft step usually follows a verify or a prefill).
        block_size: tokens per block.
        max_model_len: longest sequence. Rows that would grow beyond it, or beyond their block
            table, become padding rows, so that no slot outside the table is ever computed.
        num_rejected_tokens: ``[R]`` int32, device: drafts refused in the last step, subtracted from
            the batch's lengths; None where none was refused.
        num_rejected_tokens_cpu: ``num_rejected_tokens`` on the host. With it, exact host lengths of
            ``batch`` stay exact; without it, the result's host lengths are bounds.

    Returns:
        A batch of R rows with one token each; padding rows (no token, or KV length 0) have KV
        length 0 and slot -1.
    """
    device = batch.seq_lens.device
    num_reqs = batch.num_reqs
    kept = batch.seq_lens if num_rejected_tokens is None else batch.seq_lens - num_rejected_tokens
    room = min(max_model_len, batch.block_table_tensor.shape[1] * block_size)
    seq_lens = _lengthened(kept, batch.query_start_loc.diff() > 0, room)
    starts_cpu = torch.arange(num_reqs + 1, dtype=torch.int32)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    slots = compute_slot_mapping(batch.block_table_tensor, starts, seq_lens, num_reqs, block_size)
    bound = batch.seq_lens_cpu_upper_bound
    if bound is not None and num_rejected_tokens_cpu is not None:
        bound = _lengthened(
            bound[:num_reqs] - num_rejected_tokens_cpu,
            batch.query_start_loc_cpu[: num_reqs + 1].diff() > 0,
            room,
        )
    elif bound is not None:
        bound = (bound + 1).clamp(max=room)
    return replace_known(
        batch,
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=seq_lens,
        num_actual_tokens=num_reqs,
        max_query_len=1,
        max_seq_len=min(batch.max_seq_len + 1, room),
        slot_mapping=slots,
        causal=True,
        positions=(seq_lens - 1).clamp(min=0).long(),
        seq_lens_cpu_upper_bound=bound,
        # Dropped, because the batch's per-rank lengths are those of the previous step; they follow
        # from the global lengths.
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu_upper_bound=None,
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
        is_prefilling=None,
        **dict.fromkeys(VLLM_CACHES),
    )


def _lengthened(kept: torch.Tensor, has_tokens: torch.Tensor, room: int) -> torch.Tensor:
    """``[R]`` int32 lengths with one token more; 0 for padding and for rows without room.

    Padding is told by ``has_tokens``: an engine's padding rows may have a KV length of 1.
    """
    fits = has_tokens & (kept > 0) & (kept < room)
    return torch.where(fits, kept + 1, 0).to(torch.int32)
