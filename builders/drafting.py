"""Multi-step drafting: the batch of draft step n + 1 from that of step n."""

from __future__ import annotations

import torch

from builders.common import CommonAttentionMetadata, replace_known
from builders.paging import compute_slot_mapping

# What vLLM's own object (0.26, 0.33) keeps of lengths that were; unknown to our class.
_VLLM_CACHES = (
    "dcp_local_seq_lens_cpu",
    "_seq_lens_cpu",
    "_num_computed_tokens_cpu",
    "_num_computed_tokens_cache",
    "_token_to_req_indices_cache",
)


def advance(
    batch: CommonAttentionMetadata,
    block_size: int,
    max_model_len: int,
    num_rejected_tokens: torch.Tensor | None = None,
) -> CommonAttentionMetadata:
    """The next draft step: one new token per request, one token further; ``batch`` is not written.

    Args:
        batch: any step's batch (the first draft step usually follows a verify or a prefill).
        block_size: tokens per block.
        max_model_len: rows that would grow beyond it become padding rows, so no slot outside
            their block table is ever computed.
        num_rejected_tokens: ``[R]`` int32: drafts refused in the last step, subtracted from the
            padded batch's lengths; None for none.

    Returns:
        A batch of R rows with one token each; padding rows (KV length 0) stay padding.
    """
    device = batch.seq_lens.device
    num_reqs = batch.num_reqs
    kept = batch.seq_lens if num_rejected_tokens is None else batch.seq_lens - num_rejected_tokens
    fits = (kept > 0) & (kept < max_model_len)
    seq_lens = torch.where(fits, kept + 1, 0).to(torch.int32)
    starts_cpu = torch.arange(num_reqs + 1, dtype=torch.int32)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
    slots = compute_slot_mapping(batch.block_table_tensor, starts, seq_lens, num_reqs, block_size)
    bound = batch.seq_lens_cpu_upper_bound
    return replace_known(
        batch,
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=seq_lens,
        num_actual_tokens=num_reqs,
        max_query_len=1,
        max_seq_len=min(batch.max_seq_len + 1, max_model_len),
        slot_mapping=slots,
        causal=True,
        positions=(seq_lens - 1).clamp(min=0).long(),
        seq_lens_cpu_upper_bound=None if bound is None else (bound + 1).clamp(max=max_model_len),
        # Per-rank lengths follow from the global ones; the caller's are of the step before.
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu_upper_bound=None,
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
        is_prefilling=None,
        **dict.fromkeys(_VLLM_CACHES),
    )
