"""The record that the latent backends over vendors' kernels share, with its checks and split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from builders.base import AttentionMetadata
from builders.batch import CommonAttentionMetadata, refuse_fields, split_decodes_and_prefills
from builders.latent.prefill import LatentPrefill


@dataclass
class LatentStep(AttentionMetadata):
    """A step of latent attention: decodes come first, then prefills."""

    num_actual_tokens: int
    """Tokens to compute, padding included."""
    num_decodes: int
    """Leading requests, which decode kernels take."""
    num_prefills: int
    """Requests behind the decodes."""
    num_decode_tokens: int
    """Tokens of the decodes, padding included where the batch counts it."""
    num_prefill_tokens: int
    """Tokens of the prefills, padding included where the batch counts it."""
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: first token of each request, and the end of the last."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device: blocks of each request."""
    prefill: LatentPrefill | None
    """Plan of the prefills; None without any."""
    keyless: torch.Tensor | None
    """``[num_decode_tokens]`` bool, device: True for tokens that no request owns, or whose request
    has no keys. None where there cannot be such tokens."""


def split_step(batch: CommonAttentionMetadata, threshold: int, name: str) -> dict[str, Any]:
    """The fields of a :class:`LatentStep`, by name, with nothing planned yet.

    Args:
        batch: ours or vLLM's own object.
        threshold: most new tokens of a decode.
        name: name of the backend, for messages.

    Raises:
        NotImplementedError: the batch is not plainly causal.
    """
    refuse_fields(batch, name, "dcp_local_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens")
    if batch.causal is not True:
        raise NotImplementedError(f"{name} takes causal batches, got causal={batch.causal!r}")
    reqs, found = batch.num_reqs, split_decodes_and_prefills(batch, threshold)
    return {
        "slot_mapping": batch.slot_mapping,
        "num_actual_tokens": batch.num_actual_tokens,
        "num_decodes": found.num_decodes,
        "num_prefills": found.num_prefills,
        "num_decode_tokens": found.num_decode_tokens,
        "num_prefill_tokens": found.num_prefill_tokens,
        "query_start_loc": batch.query_start_loc[: reqs + 1],
        "seq_lens": batch.seq_lens[:reqs],
        "block_table": batch.block_table_tensor[:reqs],
        "prefill": None,
        "keyless": None,
    }


def captured_query_len(batch: CommonAttentionMetadata) -> int:
    """New tokens of each request of a batch that is to be captured.

    Padding requests, without tokens, may be among them.

    Raises:
        ValueError: requests have several query lengths, or there is none.
    """
    lens: list[int] = batch.query_start_loc_cpu[: batch.num_reqs + 1].diff().tolist()
    if not lens or lens[0] == 0 or any(one not in (0, lens[0]) for one in lens):
        raise ValueError(
            "query_start_loc_cpu must give every request of a captured batch the same number of "
            f"tokens, got {lens}"
        )
    return lens[0]
