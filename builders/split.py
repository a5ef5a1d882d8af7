"""Decode-first batches: where decodes end, and how to reorder a batch so that they come first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from builders.batch import LEADING_AXIS, VLLM_CACHES, CommonAttentionMetadata, replace_known


@dataclass(frozen=True)
class BatchSplit:
    """Decode rows, then prefill rows; each pair sums to the batch."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    batch: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> BatchSplit:
    """Find the boundary in a batch ordered decode, short extend, long extend, prefill.

    Reads host lengths only, so it may misjudge nothing but speed: both paths compute any row.

    Args:
        batch: a decode-first batch.
        decode_threshold: longest query of a decode.
        require_uniform: decodes must share one query length; padding rows (length 0) may follow.
        treat_short_extends_as_decodes: a short chunk of a prompt counts as a decode; otherwise
            ``batch.is_prefilling`` must be given.
    """
    num_reqs, num_tokens = batch.num_reqs, batch.num_actual_tokens
    if (
        batch.max_query_len <= decode_threshold
        and (not require_uniform or decode_threshold <= 1)
        and treat_short_extends_as_decodes
    ):
        return BatchSplit(num_reqs, 0, num_tokens, 0)
    starts: list[int] = batch.query_start_loc_cpu.tolist()
    lens = [stop - start for start, stop in pairwise(starts)]
    prefilling: list[bool] = [False] * num_reqs
    if not treat_short_extends_as_decodes:
        if batch.is_prefilling is None:
            raise ValueError("is_prefilling is needed when short extends are not decodes")
        prefilling = batch.is_prefilling.tolist()
    uniform = lens[0] if lens else 0
    for row, query_len in enumerate(lens):
        odd = require_uniform and query_len not in (uniform, 0)
        if query_len > decode_threshold or odd or prefilling[row]:
            return BatchSplit(row, num_reqs - row, starts[row], num_tokens - starts[row])
    return BatchSplit(num_reqs, 0, num_tokens, 0)


def decode_first_order(
    query_lens: torch.Tensor, context_lens: torch.Tensor, decode_threshold: int = 1
) -> torch.Tensor:
    """A stable order of requests: decode, short extend, long extend, prefill.

    Args:
        query_lens: ``[R]`` integer, host.
        context_lens: ``[R]`` integer, host: tokens already cached.
        decode_threshold: longest query of a decode or a short extend.

    Returns:
        ``[R]`` int64 permutation: position i of the new batch is request ``order[i]``.
    """
    has_context = context_lens > 0
    short = query_lens <= decode_threshold
    rank = torch.full_like(query_lens, 3)
    rank[has_context & ~short] = 2
    rank[has_context & short & (query_lens > 1)] = 1
    rank[has_context & (query_lens <= 1)] = 0
    # Padding rows keep to the end, where unpadded() cuts them off.
    rank[query_lens == 0] = 4
    return torch.argsort(rank, stable=True)


def reorder(batch: CommonAttentionMetadata, order: torch.Tensor) -> CommonAttentionMetadata:
    """The batch with its requests in another order, tokens moved with them.

    Host lengths are used to move tokens, so they must agree with the device's.

    Args:
        batch: any batch.
        order: ``[R]`` int64 permutation, host.

    Raises:
        ValueError: the batch lists tokens whose logits are wanted; list them after reordering.
    """
    if batch.logits_indices_padded is not None:
        raise ValueError("logits_indices_padded counts tokens in the old order: reorder before it")
    starts = batch.query_start_loc_cpu.long()
    lens = (starts[1:] - starts[:-1])[order]
    new_starts = torch.zeros(batch.num_reqs + 1, dtype=torch.int32)
    new_starts[1:] = lens.cumsum(0)
    moved = [torch.arange(int(starts[row]), int(starts[row + 1])) for row in order.tolist()]
    tokens = torch.cat([*moved, torch.arange(0)])
    changes: dict[str, Any] = {
        "query_start_loc": new_starts.to(batch.query_start_loc.device),
        "query_start_loc_cpu": new_starts,
    }
    for name, (extent, _) in LEADING_AXIS.items():
        value = getattr(batch, name, None)
        if name in changes or value is None or isinstance(value, bool):
            continue
        index = order
        if extent == "tokens":
            # Slots past the last request's tokens are padding and stay where they are.
            index = torch.cat([tokens, torch.arange(len(tokens), len(value))])
        is_tensor = isinstance(value, torch.Tensor)
        changes[name] = value[index.to(value.device) if is_tensor else index.tolist()]
    if batch.mm_req_doc_ranges is not None:
        inverse = {old: new for new, old in enumerate(order.tolist())}
        ranges = batch.mm_req_doc_ranges.items()
        changes["mm_req_doc_ranges"] = {inverse[req]: spans for req, spans in ranges}
    return replace_known(batch, **changes, **dict.fromkeys(VLLM_CACHES))
