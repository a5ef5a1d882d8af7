"""Lists of sparse attention over keys that several ranks share (DCP), in plain torch."""

from __future__ import annotations

import torch

from builders.splitkv.stripe import Stripe


def pack_candidates(logits: torch.Tensor, lists: torch.Tensor, stripe: Stripe) -> torch.Tensor:
    """The candidates of a rank: see :func:`attn.ops.rank_topk.pack_candidates`."""
    scores = logits.gather(1, lists.clamp(min=0).long()) if logits.shape[1] else lists.float()
    scores = scores.masked_fill(lists < 0, float("-inf"))
    return torch.stack([scores.view(torch.int32), stripe.global_positions(lists)])


def merge_candidates(candidates: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
    """The best candidates of all ranks: see :func:`attn.ops.rank_topk.merge_candidates`."""
    topk = out.shape[1]
    out.fill_(-1)
    for token, length in enumerate(lens.tolist()):
        if length <= topk:
            out[token, : max(length, 0)] = torch.arange(max(length, 0), dtype=out.dtype)
            continue
        positions = candidates[:, 1, token].flatten()
        scores = candidates[:, 0, token].flatten().view(torch.float32)
        positions, order = positions.sort()
        scores = scores[order][positions >= 0]
        positions = positions[positions >= 0]
        best = torch.sort(scores.nan_to_num(nan=-torch.inf), descending=True, stable=True).indices
        out[token] = positions[best[:topk]].sort().values
