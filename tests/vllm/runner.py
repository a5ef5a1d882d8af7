"""The work of vLLM's model runner around one attention layer, on the CPU, and the right answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from attn.integrations.vllm import compat
from attn.testing import budget, stored_rows
from attn.testing.budget import low_precision
from attn.testing.oracle import Rules, attention
from tests.vllm.views import cache_view

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
SCALE = HEAD_SIZE**-0.5
NAME = "model.layers.0.self_attn.attn"
MOST_REQS = 6
DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Tokens:
    """Everything that requests have been given so far."""

    query: list[Tensor]
    """``[T, H, D]`` for each request; key and value are ``[T, Hk, D]`` for each request."""
    key: list[Tensor]
    value: list[Tensor]

    @classmethod
    def random(cls, lens: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tokens:
        generator = torch.Generator().manual_seed(seed)

        def rows(heads: int) -> list[Tensor]:
            return [
                torch.randn(count, heads, HEAD_SIZE, generator=generator).to(dtype)
                for count in lens
            ]

        return cls(rows(HEADS), rows(KV_HEADS), rows(KV_HEADS))


class Runner:
    """A layer with its backend, cache and builder, made and called as vLLM does it."""

    def __init__(
        self,
        config: Any,
        make_layer: Callable[[Any], Any],
        *,
        layout: str = "NHD",
        wrap: Callable[[Any], Any] = lambda backend: backend,
    ) -> None:
        """
        Args:
            config: vLLM's.
            make_layer: a layer of vLLM's with prefix ``NAME``, given the configuration.
            layout: NHD or HND.
            wrap: another backend around the layer's, as fast prefill makes it.
        """
        self.config = config
        self.dtype = config.model_config.dtype
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with set_current_vllm_config(config):
                self.layer = make_layer(config)
                spec = self.layer.get_kv_cache_spec(config)
        finally:
            torch.set_default_dtype(default)
        self.layer.process_weights_after_loading(self.dtype)
        backend = wrap(self.layer.get_attn_backend())
        self.is_cached = spec is not None
        if spec is None:
            spec = EncoderOnlyAttentionSpec(
                block_size=16, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=self.dtype
            )
        if self.is_cached and not compat.BACKENDS_SHAPE_CACHES:
            spec = backend.customize_spec(spec)
        self.spec = spec
        width = config.model_config.max_model_len // spec.block_size
        num_blocks = 1 + MOST_REQS * width
        if self.is_cached:
            cache_dtype = config.cache_config.cache_dtype
            view = cache_view(spec, num_blocks, backend, cache_dtype=cache_dtype, layout=layout)
            self.layer.kv_cache = view
            if hasattr(self.layer, "bind_kv_cache"):
                self.layer.bind_kv_cache(view)
        self.builder = backend.get_builder_cls()(spec, [NAME], config, DEVICE)
        ids = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(7)) + 1
        self.table = ids.view(MOST_REQS, width).int()

    def batch(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], **fields: Any
    ) -> CommonAttentionMetadata:
        """vLLM's own batch object, filled like its runner fills it."""
        starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        table = self.table[: len(seq_lens)]
        slots = [
            int(table[row, place // self.spec.block_size]) * self.spec.block_size
            + place % self.spec.block_size
            for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True))
            for place in range(length - count, length)
        ]
        return CommonAttentionMetadata(
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=lens.clone(),
            num_reqs=len(seq_lens),
            num_actual_tokens=sum(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            **{"seq_lens_cpu_upper_bound": lens, **fields},
        )

    def step(
        self, tokens: Tokens, query_lens: Sequence[int], seq_lens: Sequence[int], **fields: Any
    ) -> Tensor:
        """Run a step; the output is ``[T, H, D]`` of each request's new tokens."""
        batch = self.batch(query_lens, seq_lens, **fields)
        return self.forward(self.builder.build(0, batch), tokens, query_lens, seq_lens, batch)

    def forward(
        self,
        record: Any,
        tokens: Tokens,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        batch: CommonAttentionMetadata,
    ) -> Tensor:
        """Run the layer's forward in vLLM's forward context."""

        def new(rows: list[Tensor]) -> Tensor:
            parts = zip(rows, query_lens, seq_lens, strict=True)
            return torch.cat([part[length - count : length] for part, count, length in parts])

        query, key, value = new(tokens.query), new(tokens.key), new(tokens.value)
        return self.call(record, query, key, value, batch)

    def call(
        self,
        record: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        batch: CommonAttentionMetadata,
    ) -> Tensor:
        """Run the layer on given rows."""
        slots = {NAME: batch.slot_mapping} if self.is_cached else {}
        metadata = None if record is None else {NAME: record}
        with set_forward_context(metadata, self.config, slot_mapping=slots):
            output = self.layer(
                query.flatten(1),
                None if key is None else key.flatten(1),
                None if value is None else value.flatten(1),
            )
        return output.view(-1, HEADS, HEAD_SIZE)


class Answer(NamedTuple):
    """The right rows ``[T, H, D]`` float64, and the rows of the same maths in low precision."""

    exact: Tensor
    low: Tensor

    def assert_is(self, actual: Tensor) -> None:
        """Check that ``actual`` errs no more than its type and the low precision excuse."""
        error = budget.row_errors(actual, self.exact).max()
        assert error <= budget.budget(self.exact, self.low, actual.dtype)

    def rows(self, index: Tensor) -> Answer:
        """An answer for some of the rows."""
        return Answer(self.exact[index], self.low[index])


def answer_of(
    query: Tensor, key: Tensor, value: Tensor, first: int, rules: Rules, cache_dtype: str = "auto"
) -> Answer:
    """The answer by definition for one request, whose queries start at position ``first``."""
    exact, _ = attention(query, key, value, first, rules)
    stored = [stored_rows.quantized(rows, cache_dtype, torch.ones(())) for rows in (key, value)]
    low, _ = low_precision(query, *stored, first, rules, query.dtype)
    return Answer(exact, low.double())


def expected(
    tokens: Tokens,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *rules: Rules,
    cache_dtype: str = "auto",
) -> Answer:
    """The oracle's answer for a batch, with one set of rules for all requests or one for each."""
    each = rules if len(rules) > 1 else rules * len(seq_lens)
    parts = []
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = length - count
        query = tokens.query[row][first:length]
        key, value = tokens.key[row][:length], tokens.value[row][:length]
        parts.append(answer_of(query, key, value, first, each[row], cache_dtype))
    return Answer(*(torch.cat(side) for side in zip(*parts, strict=True)))


def plain_rules(**changes: Any) -> Rules:
    """Rules of causal attention at the runner's scale, with changes."""
    return replace(Rules(SCALE), **changes)


def encoder_lens(lens: Sequence[int]) -> dict[str, Any]:
    """Fields of a batch of an encoder-decoder model."""
    return {
        "encoder_seq_lens": torch.tensor(lens, dtype=torch.int32),
        "encoder_seq_lens_cpu": np.array(lens, dtype=np.int32),
    }


def torch_rotary(width: int, max_position: int) -> Any:
    """DeepSeek's rotary embedding of ``width`` columns, in plain torch.

    Which of an op's methods vLLM takes depends on the platform and the configuration that were set
    when its modules were imported.
    """
    from vllm.model_executor.models import deepseek_v2

    rotary = deepseek_v2.get_rope(
        width,
        max_position=max_position,
        is_neox_style=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    rotary._forward_method = rotary.forward_native
    return rotary
