"""Latent decodes under decode context parallelism (DCP): lengths and tables of this rank's keys.

A rank keeps a part of every request's keys, by :class:`builders.splitkv.stripe.Stripe`, and attends
them with the query heads of all ranks. The last keys of a request's tokens differ by one, but not
on every rank, so that the causal mask of a verify does not follow from the rank's length of the
request. Each token is therefore a request of its own, with the keys that the rank keeps of those
that the token sees. The decode kernels need to know nothing about ranks then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from builders.buffers import GraphBuffers
from builders.dense.record import TritonAttentionMetadata
from builders.splitkv.stripe import Stripe
from specs.base import cdiv
from specs.engine import EngineConfig


@dataclass
class RankDecode:
    """The decodes of a step as the decode kernel takes them on one rank."""

    seq_lens: torch.Tensor
    """``[R]`` int32, device: lengths of the requests, the keys of all ranks counted."""
    step: TritonAttentionMetadata
    """A step in which every token is a request; lengths and blocks are those of this rank's keys.

    Its tensors are the builder's. Where a decode has one token, its requests are the batch's, and
    its block table is the batch's."""


class RankRows:
    """The tensors of the decodes of one rank, allocated once for the engine's limits."""

    def __init__(
        self, stripe: Stripe, config: EngineConfig, block_size: int, buffers: GraphBuffers
    ) -> None:
        """
        Args:
            stripe: the keys that this rank keeps.
            config: limits of the engine.
            block_size: tokens of a block of the cache.
            buffers: the tensors are declared here.
        """
        self.stripe, self._buffers = stripe, buffers
        self.max_kv_len = replace(stripe, rank=0).local_len(config.max_model_len)
        """Most keys of a request on a rank: rank 0 keeps at least as many as any other."""
        tokens = config.max_decode_query_len
        self._is_apart = tokens > 1
        self.max_rows = config.max_num_seqs
        """Most tokens of a step's decodes."""
        buffers.declare("local_lens", (config.max_num_seqs,), torch.int32)
        if self._is_apart:
            self.max_rows = min(config.max_num_seqs * tokens, config.max_num_batched_tokens)
            columns = cdiv(max(self.max_kv_len, 1), block_size)
            starts = buffers.declare("row_starts", (self.max_rows + 1,), torch.int32)
            starts.copy_(torch.arange(self.max_rows + 1, dtype=torch.int32))
            buffers.declare("row_lens", (self.max_rows,), torch.int32)
            buffers.declare("row_tables", (self.max_rows, columns), torch.int32)

    def split(self, step: TritonAttentionMetadata, tokens: int) -> tuple[torch.Tensor, RankDecode]:
        """Take the decodes of a batch apart into the rows of this rank.

        Args:
            step: the decodes, with lengths that count the keys of all ranks.
            tokens: tokens of the decodes, without padding.

        Returns:
            ``[R]`` int32: keys that this rank keeps of each request; and the rows.
        """
        rows = RankDecode(step.seq_lens, step)
        local = self.refill(step, rows, tokens)
        if not self._is_apart:
            rows.step = replace(step, seq_lens=local)
            return local, rows
        view = self._buffers.view
        rows.step = replace(
            step,
            num_reqs=tokens,
            query_start_loc=view("row_starts", tokens + 1),
            seq_lens=view("row_lens", tokens),
            block_table=self._tables(step, tokens),
        )
        return local, rows

    def refill(self, step: TritonAttentionMetadata, rows: RankDecode, tokens: int) -> torch.Tensor:
        """Compute the rank's lengths anew from what the requests' lengths are now.

        Blocks stay as they are. A graph may capture this.

        Args:
            step: the decodes of the batch.
            rows: the rows of the step.
            tokens: tokens of the decodes, without padding.

        Returns:
            ``[R]`` int32: keys that this rank keeps of each request.
        """
        local = self._buffers.write("local_lens", self.stripe.local_lens(rows.seq_lens))
        if self._is_apart and tokens:
            owner, is_owned = self._owners(step, tokens)
            places = self._buffers.view("row_starts", tokens)
            seen = rows.seq_lens[owner] - step.query_start_loc[owner + 1] + places + 1
            seen = torch.where(is_owned, seen, 0).clamp(min=0)
            self._buffers.write("row_lens", self.stripe.local_lens(seen))
        return local

    def update_table(self, step: TritonAttentionMetadata, rows: RankDecode) -> RankDecode:
        """The rows over other blocks.

        Args:
            step: the decodes of the batch, with the blocks of another KV cache group.
            rows: the rows over the blocks of one group.
        """
        table = step.block_table
        if self._is_apart:
            table = self._tables(step, rows.step.num_reqs)
        changed = replace(rows.step, slot_mapping=step.slot_mapping, block_table=table)
        return RankDecode(rows.seq_lens, changed)

    def _owners(
        self, step: TritonAttentionMetadata, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Request of each token, and whether there is one; without one, any number stands."""
        places = self._buffers.view("row_starts", tokens)
        req = torch.searchsorted(step.query_start_loc[1:].contiguous(), places, right=True)
        return req.clamp(max=step.num_reqs - 1), req < step.num_reqs

    def _tables(self, step: TritonAttentionMetadata, tokens: int) -> torch.Tensor:
        """Write the blocks of each token's request."""
        table = step.block_table
        columns = min(table.shape[1], self._buffers["row_tables"].shape[1])
        owner, _ = self._owners(step, tokens)
        into = self._buffers["row_tables"][:tokens, :columns]
        return into.copy_(table[:, :columns].index_select(0, owner))
