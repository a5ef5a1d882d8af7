"""A sparse layer of vLLM's with lists that are neither full nor sequential, and the right answer.

A stand-in for the indexer holds lists of random tokens, of many lengths and in any order. Rows of
its buffer behind a step's tokens name tokens far outside the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention

from attn.integrations.vllm import members
from attn.testing import stored_rows
from attn.testing.batches import BatchSpec, LatentWeights, Request, latent_requests, latent_weights
from attn.testing.budget import low_precision
from attn.testing.latent_trial import latent_output, low_latent_output
from tests.vllm.runner import NAME, Answer, Runner, Tokens

TOPK, BLOCK_SIZE = 16, 64
WILD = 2**20
"""A token that no request has; the row behind it lies outside the cache."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    heads: int = 4
    rank: int = 64
    nope: int = 32
    rope: int = 32
    value: int = 32

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope) ** -0.5)

    def weights(self, dtype: torch.dtype) -> LatentWeights:
        generator = torch.Generator().manual_seed(3)
        return latent_weights(
            generator, self.heads, dtype, self.rank, self.nope, self.rope, self.value
        )


NARROW = Sizes()
WIDE = Sizes(heads=2, rank=512, rope=64)
"""Rows of 512 + 64, as ``fp8_ds_mla`` needs them."""


class Projection(torch.nn.Module):
    """Stands in for ``kv_b_proj`` without quantisation."""

    quant_method = None

    def __init__(self, weights: LatentWeights) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weights.kv_b_proj(), requires_grad=False)
        self.params_dtype = self.weight.dtype


class Lists:
    """Stands in for an indexer: its buffer, which a test fills before each step."""

    def __init__(self, topk: int = TOPK) -> None:
        self.topk_indices_buffer = torch.full((512, topk), WILD, dtype=torch.int32)

    def fill(self, lists: Sequence[Tensor]) -> None:
        """Put lists at the front, and wild tokens behind them."""
        self.topk_indices_buffer.fill_(WILD)
        for row, listed in enumerate(lists):
            self.topk_indices_buffer[row] = -1
            self.topk_indices_buffer[row, : len(listed)] = listed.int()


@dataclass(frozen=True)
class Sequences:
    """Everything that requests have been given so far, and the list of each token."""

    requests: list[Request]
    lists: list[list[Tensor]]

    @classmethod
    def random(
        cls, lens: Sequence[int], sizes: Sizes, dtype: torch.dtype, seed: int = 11
    ) -> Sequences:
        """Sequences of ``lens`` tokens; every seventh list is full, and every ninth is empty."""
        generator = torch.Generator().manual_seed(seed)
        lists = []
        for length in lens:
            own = []
            for position in range(length):
                most = min(position + 1, TOPK)
                count = int(torch.randint(1, most + 1, (1,), generator=generator))
                count = most if position % 7 == 6 else 0 if position % 9 == 8 else count
                own.append(torch.randperm(position + 1, generator=generator)[:count])
            lists.append(own)

        def listed(row: int, num_queries: int, kv_len: int, first: int) -> Tensor:
            mask = torch.zeros(num_queries, kv_len, dtype=torch.bool)
            for query in range(num_queries):
                mask[query, lists[row][first + query]] = True
                mask[query, first + query] |= not bool(mask[query].any())
            return mask

        spec = BatchSpec("whole", tuple(lens), tuple(lens))
        weights = sizes.weights(dtype)
        requests = latent_requests(generator, spec, weights, dtype, BLOCK_SIZE, listed)
        return cls(requests, lists)

    def take(self, rows: Sequence[int]) -> Sequences:
        return Sequences([self.requests[row] for row in rows], [self.lists[row] for row in rows])

    def tokens(self) -> Tokens:
        keys = [request.key for request in self.requests]
        return Tokens([request.query for request in self.requests], keys, keys)

    def of_step(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[Tensor]:
        """The lists of a step's new tokens."""
        parts = zip(self.lists, query_lens, seq_lens, strict=True)
        return [one for lists, count, length in parts for one in lists[length - count : length]]


class SparseRunner(Runner):
    """The layer, made and called as vLLM does it."""

    def __init__(
        self,
        config: Any,
        sizes: Sizes = NARROW,
        *,
        is_shared: bool = False,
        topk: int = TOPK,
    ) -> None:
        """
        Args:
            config: vLLM's.
            sizes: of the layer.
            is_shared: the layer has no indexer and reads another layer's lists.
            topk: entries of a list.
        """
        self.sizes, self.indexer = sizes, Lists(topk)
        config.model_config.hf_text_config.index_topk = topk

        def make_layer(config: Any) -> Any:
            return mla_attention.MLAAttention(
                *(sizes.heads, sizes.scale, sizes.nope, sizes.rope, sizes.value, None),
                sizes.rank,
                Projection(sizes.weights(config.model_config.dtype)),
                cache_config=config.cache_config,
                prefix=NAME,
                use_sparse=True,
                indexer=None if is_shared else self.indexer,
                topk_indices_buffer=self.indexer.topk_indices_buffer,
                attn_backend=members.CUSTOM_SPARSE_MLA,
            )

        super().__init__(config, make_layer)

    def call(
        self, record: Any, query: Tensor, key: Tensor | None, value: Tensor | None, batch: Any
    ) -> Tensor:
        assert key is not None
        sizes = self.sizes
        latent, rope = key.split([sizes.rank, sizes.rope], dim=-1)
        metadata = None if record is None else {NAME: record}
        slots = {NAME: batch.slot_mapping}
        with set_forward_context(metadata, self.config, slot_mapping=slots):
            shape = len(query), sizes.heads * sizes.value
            output: Tensor = self.layer(query, latent[:, 0], rope, output_shape=shape)
        return output.view(-1, sizes.heads, sizes.value)

    def attend(
        self, sequences: Sequences, query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> Tensor:
        """Run a step over the sequences' own lists."""
        self.indexer.fill(sequences.of_step(query_lens, seq_lens))
        return self.step(sequences.tokens(), query_lens, seq_lens)


def expected_rows(
    sequences: Sequences,
    sizes: Sizes,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    cache_dtype: str = "auto",
    k_scale: float = 1.0,
) -> Answer:
    """The oracle's answer for a step's new tokens, each of which attends the tokens of its list."""
    weights = sizes.weights(sequences.requests[0].query.dtype)
    exact, low = [], []
    parts = zip(sequences.requests, sequences.lists, query_lens, seq_lens, strict=True)
    for whole, lists, count, length in parts:
        scale = torch.tensor(k_scale)
        stored = stored_rows.quantized_latent(whole.key[:, 0], cache_dtype, scale, sizes.rank)
        for position in range(length - count, length):
            listed = lists[position].sort().values
            if not len(listed):
                empty = torch.zeros(1, sizes.heads, sizes.value, dtype=torch.float64)
                exact.append(empty)
                low.append(empty)
                continue
            asked = replace(
                whole,
                first_position=len(listed) - 1,
                query=whole.query[position : position + 1],
                key=whole.key[listed],
                value=whole.key[listed][..., : sizes.rank],
            )

            def attend(query: Tensor, rows: Tensor, asked: Request = asked) -> Tensor:
                keys = rows[:, None]
                values, first = keys[..., : sizes.rank], asked.first_position
                return low_precision(query, keys, values, first, asked.rules, asked.query.dtype)[0]

            exact.append(latent_output(weights, asked))
            low.append(low_latent_output(weights, asked, stored[listed], attend).double())
    return Answer(torch.cat(exact), torch.cat(low))


def expected_dense(
    sequences: Sequences,
    sizes: Sizes,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    cache_dtype: str = "auto",
    k_scale: float = 1.0,
) -> Answer:
    """The oracle's answer for a step's new tokens, each of which attends all tokens up to it."""
    weights = sizes.weights(sequences.requests[0].query.dtype)
    exact, low = [], []
    for whole, count, length in zip(sequences.requests, query_lens, seq_lens, strict=True):
        first, rows = length - count, whole.key[:length]
        query = whole.query[first:length]
        asked = replace(
            whole, first_position=first, query=query, key=rows, value=rows[..., : sizes.rank]
        )
        scale = torch.tensor(k_scale)
        stored = stored_rows.quantized_latent(rows[:, 0], cache_dtype, scale, sizes.rank)
        exact.append(latent_output(weights, asked))
        low.append(low_latent_output(weights, asked, stored).double())
    return Answer(torch.cat(exact), torch.cat(low))
