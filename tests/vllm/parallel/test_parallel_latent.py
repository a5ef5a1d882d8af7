"""Decode context parallelism of MLA through vLLM's layer: two processes, over gloo on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention

from attn.backends.triton_mla import TritonMLABackend
from attn.integrations.vllm import compat
from attn.testing import stored_rows
from attn.testing.batches import BatchSpec, LatentWeights, Request, latent_requests, latent_weights
from attn.testing.budget import low_precision
from attn.testing.latent_trial import latent_output, low_latent_output
from builders.splitkv.stripe import Stripe
from tests.vllm.parallel.rank_processes import RANKS, give_ranks, in_torch, localise, run_ranks
from tests.vllm.runner import Answer, Tokens
from tests.vllm.test_latent import (
    HEADS,
    NOPE,
    RANK,
    ROPE,
    VALUE,
    LatentRunner,
    NoPrefill,
    Projection,
    make_layer,
)

DRAFTS = 3
STEPS = (
    ((33, 90, 30), (33, 90, 30)),
    ((1, 4, 3, 2, 40), (34, 94, 33, 2, 40)),
    ((2, 1, 20), (36, 95, 60)),
)
"""Steps of one request after the other: new tokens and lengths. The first step has prompts; then
come decodes and verifies, a first token of which one rank keeps no key, and a prompt's next
chunks."""
ROWS = ((0, 1, 2), (0, 1, 2, 3, 4), (0, 1, 4))
"""Rows of the block table of each step's requests."""


def every_weight(dtype: torch.dtype) -> LatentWeights:
    generator = torch.Generator().manual_seed(3)
    return latent_weights(generator, HEADS * RANKS, dtype, RANK, NOPE, ROPE, VALUE)


class RankProjection(Projection):
    """The ``kv_b_proj`` of one rank's heads."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        whole, mine = every_weight(dtype), slice(rank * HEADS, (rank + 1) * HEADS)
        own = replace(whole, num_heads=HEADS, w_uk=whole.w_uk[:, mine], w_uv=whole.w_uv[:, mine])
        self.weight = torch.nn.Parameter(own.kv_b_proj(), requires_grad=False)


class RankRunner(LatentRunner):
    """The layer on one rank: slots and block tables are those of its own tokens."""

    stripe: Stripe

    def batch(self, query_lens: Sequence[int], seq_lens: Sequence[int], **fields: Any) -> Any:
        batch = super().batch(query_lens, seq_lens, **fields)
        return localise(batch, self.stripe, query_lens, seq_lens, self.spec.block_size)


def requests_of(dtype: torch.dtype) -> list[Request]:
    """All tokens that requests have in the end, with queries of all ranks' heads."""
    generator = torch.Generator().manual_seed(11)
    lens = [
        max(dict(zip(r, s[1], strict=True)).get(row, 0) for r, s in _steps()) for row in range(5)
    ]
    return latent_requests(
        generator, BatchSpec("whole", lens, lens), every_weight(dtype), dtype, 16
    )


def _steps() -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]]:
    return list(zip(ROWS, STEPS, strict=True))


def expected_rows(
    requests: list[Request], query_lens: Sequence[int], seq_lens: Sequence[int], cache_dtype: str
) -> Answer:
    """The definition of a step's new tokens; decodes and verifies are absorbed."""
    weights, answers = every_weight(requests[0].query.dtype), []
    for whole, count, length in zip(requests, query_lens, seq_lens, strict=True):
        first = length - count
        query, rows = whole.query[first:length], whole.key[:length]
        asked = replace(whole, first_position=first, query=query, key=rows, value=rows[..., :RANK])
        stored = stored_rows.quantized_latent(rows[:, 0], cache_dtype, torch.ones(()), RANK)

        def attend(query: Tensor, rows: Tensor, asked: Request = asked) -> Tensor:
            keys, first, rules = rows[:, None], asked.first_position, asked.rules
            return low_precision(query, keys, keys[..., :RANK], first, rules, query.dtype)[0]

        low = low_latent_output(weights, asked, stored, attend if count <= 1 + DRAFTS else None)
        answers.append((latent_output(weights, asked), low.double()))
    return Answer(*(torch.cat(side) for side in zip(*answers, strict=True)))


@pytest.fixture
def as_rank(
    plugin: Any,
    cuda: Callable[..., None],
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., RankRunner]:
    """The layer on this process's rank."""
    cuda()
    monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, "TRITON_MLA")
    plugin.register()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    module = "common" if compat.BACKENDS_SHAPE_CACHES else "dcp"
    monkeypatch.setattr(f"vllm.v1.attention.ops.{module}.correct_attn_out", in_torch)

    def make(
        rank: int,
        interleave: int = 1,
        dtype: str = "float32",
        layer: dict[str, Any] | None = None,
        **settings: Any,
    ) -> RankRunner:
        config = make_config(dtype=dtype, backend="TRITON_MLA", **settings)
        give_ranks(config, interleave)
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=DRAFTS,
            parallel_drafting=False,
            enable_adaptive_verification=False,
        )
        projection = RankProjection(rank, config.model_config.dtype)
        runner = RankRunner(config, lambda config: make_layer(config, projection, **(layer or {})))
        runner.stripe = Stripe(RANKS, rank, interleave)
        return runner

    return make


def outputs_of(runner: RankRunner) -> list[Tensor]:
    """The outputs of every step on this rank, ``[T, HEADS, V]``."""
    rank = runner.stripe.rank
    mine, table, outputs = slice(rank * HEADS, (rank + 1) * HEADS), runner.table, []
    requests = requests_of(runner.dtype)
    # What no token was written to is NaN, whatever the type.
    runner.layer.kv_cache.view(torch.uint8).fill_(0xFF)
    for rows, (query_lens, seq_lens) in _steps():
        runner.table = table[list(rows)]
        keys = [requests[row].key for row in rows]
        queries = [requests[row].query[:, mine] for row in rows]
        outputs.append(runner.step(Tokens(queries, keys, keys), query_lens, seq_lens))
    return outputs


CASES: dict[str, dict[str, Any]] = {
    "one token in turn": {},
    "16 tokens in turn": {"interleave": 16},
    "fp16": {"dtype": "float16", "interleave": 4},
    "fp8": {"dtype": "float16", "cache_dtype": "fp8"},
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_give_what_one_rank_gives(
    as_rank: Callable[..., RankRunner],
    make_config: Callable[..., Any],
    tmp_path: Path,
    case: str,
) -> None:
    settings = CASES[case]
    results = run_ranks(tmp_path, make_config(), lambda rank: outputs_of(as_rank(rank, **settings)))
    requests = requests_of(getattr(torch, settings.get("dtype", "float32")))
    for step, (rows, (query_lens, seq_lens)) in enumerate(_steps()):
        output = torch.cat([result[step] for result in results], 1)
        chosen = [requests[row] for row in rows]
        right = expected_rows(chosen, query_lens, seq_lens, settings.get("cache_dtype", "auto"))
        right.assert_is(output)


def test_a_rank_that_reads_another_ranks_lengths_is_noticed(
    as_rank: Callable[..., RankRunner],
    make_config: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local_lens = Stripe.local_lens
    monkeypatch.setattr(
        Stripe, "local_lens", lambda stripe, lens: local_lens(replace(stripe, rank=0), lens)
    )
    results = run_ranks(tmp_path, make_config(), lambda rank: outputs_of(as_rank(rank)))
    requests = requests_of(torch.float32)
    output = torch.cat([result[1] for result in results], 1)
    right = expected_rows([requests[row] for row in ROWS[1]], *STEPS[1], "auto")
    with pytest.raises(AssertionError):
        right.assert_is(output)


def test_a_backend_without_dcp_is_refused_when_the_layer_is_made(
    as_rank: Callable[..., RankRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the selector's question in vLLM 0.33, by what the plugin sees in 0.26."""
    without = TritonMLABackend.capabilities.replace(dcp=False)
    monkeypatch.setattr(TritonMLABackend, "capabilities", without)
    with pytest.raises(ValueError, match="DCP not supported"):
        as_rank(0)


def test_a_window_is_refused_when_the_layer_is_made(
    as_rank: Callable[..., RankRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sliding_window" not in inspect.signature(mla_attention.MLAAttention).parameters:
        pytest.skip("this vLLM has no latent layers with a window")
    group = SimpleNamespace(world_size=RANKS, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "_DCP", group)
    with pytest.raises(ValueError, match=r"size 2 does not go together with a sliding window"):
        as_rank(0, layer={"sliding_window": 9})
