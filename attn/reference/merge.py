"""Merging attention states computed over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merge_states(
    states: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state over the union of the keys; merging is associative and commutative.

    ``m = max(lse)``, ``w = exp(lse - m)``, ``out = sum(w * out) / sum(w)``,
    ``lse = m + log(sum(w))``. An empty state (``lse`` of -inf) changes nothing. Where every state
    is empty, the result is zero and -inf.

    Args:
        states: pairs of ``out [T, H, Dv]`` and natural ``lse [T, H]``.
    """
    outs = torch.stack([out for out, _ in states])
    lses = torch.stack([lse for _, lse in states])
    peak = lses.amax(0)
    base = torch.where(peak > float("-inf"), peak, 0)
    weights = torch.exp(lses - base)
    total = weights.sum(0)
    empty = total == 0
    # An empty state's output may hold NaN, so it is dropped and not multiplied by zero.
    parts = torch.where(weights[..., None] > 0, weights[..., None] * outs, 0)
    out = parts.sum(0) / torch.where(empty, 1, total)[..., None]
    return out.to(outs.dtype), torch.where(empty, float("-inf"), base + torch.log(total))
