"""Cascade attention: the common prefix of a batch is attended once for all requests.

The rest of each request's keys is attended as in any other step, and both states are merged.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from builders.batch import CommonAttentionMetadata
from builders.dense.record import SharedPrefix, TritonAttentionMetadata
from builders.splitkv.planner import SplitPlanner
from builders.splitkv.record import PrefillPlan
from builders.splitkv.tiles import DenseShape
from specs.base import cdiv


class SharedBuffers:
    """The buffers of cascade attention beside the ordinary plan: a second plan, and scratch."""

    def __init__(self, planner: SplitPlanner, shape: DenseShape) -> None:
        """
        Args:
            planner: a planner with buffers of its own; it plans the keys after the prefix.
            shape: the layer.
        """
        self.planner = planner
        self.buffers = buffers = planner.buffers
        limits, int32 = planner.limits, torch.int32
        states = (2, limits.max_num_tokens, shape.num_heads)
        buffers.declare("own_lens", (limits.max_num_seqs,), int32)
        buffers.declare("prefix_len", (1,), int32)
        buffers.declare("prefix_query_start", (2,), int32)
        buffers.declare("prefix_tile_starts", (2,), int32)
        buffers.declare("outputs", (*states, shape.head_size_v), torch.float32)
        buffers.declare("lses", states, torch.float32)

    def fill(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, num_tokens: int, length: int
    ) -> None:
        """Compute the lengths of both parts, and plan the part after the prefix, on the device.

        Args:
            query_start_loc: ``[R + 1]`` int32, device.
            seq_lens: ``[R]`` int32, device.
            num_tokens: tokens of the batch, without padding.
            length: tokens of the prefix.
        """
        own_lens = self.buffers.view("own_lens", len(seq_lens))
        torch.sub(seq_lens, length, out=own_lens).clamp_(min=0)
        self.planner.fill(query_start_loc, own_lens)
        self.buffers["prefix_len"].fill_(length)
        self.buffers["prefix_query_start"][1:].fill_(num_tokens)
        tiles = cdiv(num_tokens, self.planner.prefill.query_tile)
        self.buffers["prefix_tile_starts"][1:].fill_(tiles)

    def parts(
        self, record: TritonAttentionMetadata, num_tokens: int, length: int, block_size: int
    ) -> SharedPrefix:
        """Both records of the step, whose tensors are views of these buffers.

        Args:
            record: the step's ordinary record.
            num_tokens: tokens of the batch, without padding.
            length: tokens of the prefix.
            block_size: tokens of a block.
        """
        b, planner, table = self.buffers, self.planner, record.block_table
        tile, heads = planner.prefill, planner.num_heads
        programs = cdiv(num_tokens, tile.query_tile) * heads
        prefix = replace(
            record,
            num_reqs=1,
            query_start_loc=b["prefix_query_start"],
            seq_lens=b["prefix_len"],
            block_table=table[:1],
            split=None,
            prefill=PrefillPlan(tile, b["prefix_tile_starts"], programs),
            causal=False,
        )
        own_prefill = record.prefill
        if own_prefill is not None:
            # Outputs go to fp32 scratch, which the Hopper kernel has no room for.
            own_prefill = replace(planner.own_prefill(own_prefill, record.num_reqs), hopper=None)
        own = replace(
            record,
            seq_lens=b.view("own_lens", record.num_reqs),
            block_table=table[:, length // block_size :],
            split=planner.split(),
            prefill=own_prefill,
        )
        outputs = b.view("outputs", 2, num_tokens, heads, b["outputs"].shape[-1])
        return SharedPrefix(length, prefix, own, outputs, b.view("lses", 2, num_tokens, heads))


def debug_prefix(batch: CommonAttentionMetadata, length: int, block_size: int) -> None:
    """Check that every request has computed the prefix, in the blocks of the first request.

    Requests without new tokens are padding and are not checked.

    Raises:
        ValueError: a request has computed fewer tokens, or has other blocks.
    """
    query_lens = batch.naive_query_lens().cpu()
    context = batch.seq_lens.cpu() - query_lens
    table = batch.block_table_tensor[:, : length // block_size].cpu()
    for row in query_lens.nonzero().flatten().tolist():
        if context[row] < length:
            raise ValueError(
                f"common_prefix_len must be at most the computed tokens of every request, got "
                f"{length} and {int(context[row])} of request {row}"
            )
        if not torch.equal(table[row], table[0]):
            raise ValueError(
                f"common_prefix_len ({length}) spans blocks that request {row} does not share "
                f"with request 0: {table[row].tolist()} and {table[0].tolist()}"
            )
