"""Conversion of top-k lists to the entries that an attention kernel reads, in plain torch."""

from __future__ import annotations

import torch

from builders.sparse.arguments import TopkLists
from specs.sparse_mla import IndexKind


def transform_topk(
    lists: TopkLists,
    kind: IndexKind,
    out: torch.Tensor,
    block_table: torch.Tensor | None,
    block_size: int,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> None:
    """Convert top-k lists in torch: see :func:`attn.ops.topk_transform.transform_topk`."""
    ids, visible_lens, reqs, stripe = lists[:4]
    listed = (ids >= 0) & (ids < visible_lens[:, None])
    if stripe is not None:
        ids = stripe.local_positions(ids)
        listed &= ids >= 0
    owner = reqs.long()
    if kind is IndexKind.RAGGED:
        assert offsets is not None
        entries = ids + offsets[owner][:, None]
    else:
        assert block_table is not None
        page = torch.div(ids.clamp(min=0), block_size, rounding_mode="floor")
        listed &= page < block_table.shape[1]
        blocks = block_table[owner[:, None], torch.where(listed, page, 0).long()]
        entries = blocks * block_size + ids % block_size
    entries = torch.where(listed, entries, -1).to(torch.int32)
    if counts is not None:
        # A stable sort moves the listed entries to the front and keeps their order.
        order = torch.sort((~listed).to(torch.int8), dim=1, stable=True).indices
        entries, listed = entries.gather(1, order), listed.gather(1, order)
        counts.copy_(listed.sum(1))
    padding = (0, out.shape[1] - ids.shape[1])
    entries = torch.nn.functional.pad(entries, padding, value=-1)
    if kind is IndexKind.GATHERED:
        assert slots is not None
        slots.copy_(entries)
        places = torch.arange(out.numel(), dtype=torch.int32, device=out.device).view_as(out)
        entries = torch.where(entries >= 0, places, -1)
    out.copy_(entries)
