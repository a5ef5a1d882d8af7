"""The indexer of a sparse layer: scores keys, and lists the keys that each row attends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn.impls.warm import run_compiled
from attn.ops.indexer import (
    gather_index_keys,
    paged_index_logits,
    ragged_index_logits,
    select_topk,
    select_widths,
    write_index_keys,
)
from attn.ops.rank_topk import merge_candidates, pack_candidates
from builders.checks.debug import debug_slots
from builders.checks.tensors import check_count
from builders.sparse.indexer import (
    IndexChunk,
    IndexerMetadata,
    IndexerMetadataBuilder,
    IndexGroup,
    IndexRows,
)
from builders.splitkv.stripe import Stripe


@dataclass(frozen=True)
class IndexInputs:
    """The tensors that a layer gives its indexer in a step, and the step's record."""

    query: torch.Tensor
    """``[T, Hi, Di]``, e4m3 (its scale is part of the weights) or a model dtype."""
    key: torch.Tensor | None
    """``[T, Di]``, this step's keys; None where they are in the cache already."""
    weights: torch.Tensor
    """``[T, Hi]`` fp32, the weight of each head's score."""
    kv_cache: torch.Tensor
    """``[N, 64, Di + 4]`` uint8, planar pages."""
    metadata: IndexerMetadata
    """The record that :class:`builders.sparse.indexer.IndexerMetadataBuilder` built."""


class SparseIndexer:
    """Scores all keys that a row sees, and lists the best of them for the layer's attention."""

    def __init__(self, topk_indices_buffer: torch.Tensor) -> None:
        """
        Args:
            topk_indices_buffer: ``[max_tokens, K]`` int32, written; layers may share one, as each
                reads its lists before the next writes.

        Raises:
            ValueError: a buffer of another type or shape.
        """
        if topk_indices_buffer.dim() != 2 or topk_indices_buffer.dtype != torch.int32:
            raise ValueError(
                f"topk_indices_buffer must be int32 [max_tokens, K], got "
                f"{list(topk_indices_buffer.shape)} of {topk_indices_buffer.dtype}"
            )
        self.topk_indices_buffer = topk_indices_buffer
        self.all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Under DCP, puts the tensors of all ranks one behind another in their first dimension, in
        the order of ranks. The engine sets it, since only the engine knows how ranks communicate.
        """

    def do_kv_cache_update(
        self, k_index: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Quantise this step's keys and write them to the cache; slot -1 is skipped.

        Args:
            k_index: ``[T, Di]``.
            kv_cache: ``[N, 64, Di + 4]`` uint8.
            slot_mapping: ``[<= T]`` integer, slots in the indexer's pages.
        """
        write_index_keys(k_index, kv_cache, slot_mapping)

    def forward(self, inputs: IndexInputs) -> torch.Tensor:
        """Write this step's keys to the cache, if they are given, then the list of each row.

        A list holds positions in the row's request, in ascending order; -1 fills its end. Among
        keys with equal logits, lower positions are taken first. Under DCP ranks exchange their
        candidates by :attr:`all_gather`, so that all ranks must make this call for the same step.

        Returns:
            ``[T, K]``, a view of the buffer, for the record's tokens.

        Raises:
            ValueError: a record of more tokens than the buffer has rows; tensors that do not fit;
                ranks share the keys, and :attr:`all_gather` is not set.
        """
        record, buffer = inputs.metadata, self.topk_indices_buffer
        tokens = record.num_actual_tokens
        record.check_cache(inputs.kv_cache.shape[1], inputs.kv_cache.dtype)
        debug_slots(record.slot_mapping, tokens)
        for name in ("query", "key", "weights"):
            if getattr(inputs, name) is not None:
                check_count(name, getattr(inputs, name), tokens)
        if tokens > len(buffer):
            raise ValueError(
                f"topk_indices_buffer must have a row for each of {tokens} tokens, got "
                f"{len(buffer)}"
            )
        if inputs.key is not None:
            self.do_kv_cache_update(inputs.key, inputs.kv_cache, record.slot_mapping)
        for rows in (record.decode, record.prefill):
            for group in () if rows is None else rows.groups:
                assert rows is not None
                self._score(inputs, rows, group)
        return buffer[:tokens]

    def warm_up(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        kv_cache: torch.Tensor,
        builder: IndexerMetadataBuilder,
    ) -> None:
        """Compile every kernel variant that serving will need, by running small steps.

        A variant depends on heads and dtype of queries, the dtype of keys, the strides of the
        cache, the builder's configuration, and whether rows of logits may be long. The launches
        cover all of that. Block 0 of the cache is read; the builder's buffers and the front of the
        lists are overwritten.

        Args:
            query: ``[1, Hi, Di]`` of any content, in the dtype that will be served.
            key: ``[1, Di]`` of any content, in the dtype that will be served.
            kv_cache: ``[N, 64, Di + 4]`` uint8.
            builder: the builder of the indexer's group.
        """

        def run_steps() -> None:
            for record in builder.warm_up_steps():
                count = record.num_actual_tokens
                queries, keys = (
                    x.new_zeros(()).expand(count, *x.shape[1:]).contiguous() for x in (query, key)
                )
                weights = torch.zeros(queries.shape[:2], device=query.device)
                self.forward(IndexInputs(queries, keys, weights, kv_cache, record))
            longest, topk = builder.vllm_config.max_model_len, self.topk_indices_buffer.shape[1]
            for width in select_widths(longest, topk):
                logits = torch.zeros(1, width, device=query.device)
                seen = torch.zeros(1, dtype=torch.int32, device=query.device)
                select_topk(logits, seen, self.topk_indices_buffer[:1])

        run_compiled(run_steps, builder.device)

    def _score(self, inputs: IndexInputs, rows: IndexRows, group: IndexGroup) -> None:
        """Compute the logits and lists of a group, chunk by chunk."""
        keys, lens = group.keys, rows.lengths
        if keys is not None:
            gather_index_keys(inputs.kv_cache, keys.slots, keys.data, keys.scale)
        for chunk in group.chunks:
            part, tokens = _places(rows, chunk)
            query, weights = inputs.query[tokens], inputs.weights[tokens]
            if keys is None:
                paged_index_logits(
                    *(query, weights, inputs.kv_cache, rows.block_table, lens.reqs[part]),
                    *(lens.visible_lens[part], chunk.logits),
                )
            else:
                own = slice(part.start - group.first_row, part.stop - group.first_row)
                ragged_index_logits(
                    *(query, weights, keys.data, keys.scale),
                    *(keys.starts[own], keys.stops[own], chunk.logits),
                )
            lists = self.topk_indices_buffer[tokens]
            select_topk(chunk.logits, lens.visible_lens[part], lists)
            if inputs.metadata.stripe is not None:
                assert rows.every_len is not None
                self._merge(chunk, rows.every_len[part], lists, inputs.metadata.stripe)

    def _merge(
        self, chunk: IndexChunk, lens: torch.Tensor, lists: torch.Tensor, stripe: Stripe
    ) -> None:
        """Replace lists of the best of this rank's keys by those of all ranks' keys."""
        if self.all_gather is None:
            raise ValueError("all_gather must be set where ranks share the keys")
        assert chunk.merged is not None
        gathered = self.all_gather(pack_candidates(chunk.logits, lists, stripe))
        candidates = gathered.view(stripe.size, 2, *lists.shape)
        merge_candidates(candidates, lens, chunk.merged, lists)


def _places(rows: IndexRows, chunk: IndexChunk) -> tuple[slice, slice]:
    """The rows of a chunk: in its phase, and in the batch."""
    stop = chunk.first_row + len(chunk.logits)
    first = rows.first_token
    return slice(chunk.first_row, stop), slice(first + chunk.first_row, first + stop)
