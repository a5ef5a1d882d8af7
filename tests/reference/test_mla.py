"""Latent attention: absorption, expansion and top-k lists give what the oracle gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn.reference.dense import AttentionRules, attend_request
from attn.reference.mla import (
    absorb_query,
    attend_topk,
    expand_latent,
    project_latent_output,
    read_as_mqa,
    split_kv_b_proj,
)
from attn.testing import batches, oracle
from attn.testing.batches import BatchSpec, LatentWeights, Request
from attn.testing.budget import (
    budget,
    low_precision,
    low_precision_attention,
    lse_budget,
    lse_errors,
    row_errors,
)
from attn.testing.oracle import Rules, State

HEADS, RANK, NOPE, ROPE, VALUE = 3, 32, 12, 8, 10
SPEC = BatchSpec("one", (5,), (40,))


def layer(dtype: torch.dtype = torch.float32) -> tuple[LatentWeights, Request]:
    generator = torch.Generator().manual_seed(1)
    weights = batches.latent_weights(generator, HEADS, dtype, RANK, NOPE, ROPE, VALUE)
    return weights, batches.latent_requests(generator, SPEC, weights, dtype, 16)[0]


def expanded(weights: LatentWeights, request: Request) -> tuple[State, State]:
    """The oracle's state, and the state of the same maths in the model's precision."""
    rows, nope = request.key[:, 0], request.query[..., :NOPE]
    parts = (nope, request.query[..., NOPE:], rows[:, :RANK], rows[:, RANK:])
    rules = Rules(scale=weights.scale)
    expected = oracle.mla_expanded(
        *parts, weights.w_uk, weights.w_uv, request.first_position, rules
    )
    # Absorbed, the layer has one KV head, and the same sums are taken in another order.
    absorbed = torch.einsum("thp,lhp->thl", nope, weights.w_uk)
    query = torch.cat([absorbed, request.query[..., NOPE:]], -1)
    key, value = rows[:, None], rows[:, None, :RANK]
    latent, lse = low_precision_attention(
        query, key, value, request.first_position, rules, rows.dtype
    )
    return expected, (torch.einsum("thl,lhv->thv", latent, weights.w_uv), lse)


def assert_same(actual: State, expected: State, low: State) -> None:
    limit = budget(expected[0], low[0], actual[0].dtype)
    assert row_errors(actual[0], expected[0]).max() <= limit
    assert lse_errors(actual[1], expected[1]).max() <= lse_budget(expected[1], low[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_absorbed_and_expanded_attention_give_the_same(dtype: torch.dtype) -> None:
    weights, request = layer(dtype)
    expected, low = expanded(weights, request)
    rows, rules = request.key[:, 0], AttentionRules(scale=weights.scale)
    first, num_keys = request.first_position, len(rows)

    absorbed = absorb_query(request.query[..., :NOPE], weights.w_uk)
    query = torch.cat([absorbed, request.query[..., NOPE:]], -1)

    def latent(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return read_as_mqa(rows[start:stop], RANK)

    out, lse = attend_request(query, latent, first, num_keys, rules)
    assert_same((project_latent_output(out, weights.w_uv), lse), expected, low)

    key, value = expand_latent(rows, weights.w_uk, weights.w_uv)
    assert key.shape == (num_keys, HEADS, NOPE + ROPE)
    assert value.shape == (num_keys, HEADS, VALUE)

    def whole(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return key[start:stop], value[start:stop]

    assert_same(attend_request(request.query, whole, first, num_keys, rules), expected, low)


def test_up_projections_are_split_per_head() -> None:
    weights, _ = layer()
    w_uk, w_uv = split_kv_b_proj(weights.kv_b_proj(), HEADS, NOPE, VALUE)
    assert torch.equal(w_uk, weights.w_uk)
    assert torch.equal(w_uv, weights.w_uv)


@pytest.mark.parametrize("shape", [(HEADS * (NOPE + VALUE) + 1, RANK), (RANK,)])
def test_a_weight_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"\[{HEADS * (NOPE + VALUE)}, kv_lora_rank\].*got"):
        split_kv_b_proj(torch.zeros(shape), HEADS, NOPE, VALUE)


def test_lists_are_attended_exactly_holes_repeats_and_empty_ones_included() -> None:
    weights, request = layer(torch.float64)
    rows = request.key[:, 0]
    query = torch.cat(
        [absorb_query(request.query[..., :NOPE], weights.w_uk), request.query[..., NOPE:]], -1
    )
    lists = torch.tensor(
        [
            [3, 1, 2, -1, -1],
            [-1, 7, -1, 0, 39],
            [-1, -1, -1, -1, -1],
            [5, 5, 5, 6, -1],
            [35, 36, 37, 38, 39],
        ]
    )
    asked: list[Tensor] = []

    def read(positions: Tensor) -> Tensor:
        asked.append(positions)
        return rows[positions]

    actual = attend_topk(query, lists, read, RANK, weights.scale)
    assert all(bool((positions >= 0).all()) for positions in asked)
    parts = (query[..., :RANK], query[..., RANK:], rows[:, :RANK], rows[:, RANK:])
    expected = oracle.sparse_mla(*parts, lists, weights.scale)
    rules, lows = Rules(scale=weights.scale, causal=False), []
    for row, listed in enumerate(lists):
        keys = rows[listed[listed >= 0], None]
        lows.append(
            low_precision(query[row, None], keys, keys[..., :RANK], 0, rules, torch.float64)
        )
    low, low_lse = (torch.cat(parts) for parts in zip(*lows, strict=True))
    assert_same(actual, expected, (low, low_lse))
    assert bool((actual[0][2] == 0).all())
    assert bool((actual[1][2] == -torch.inf).all())


def test_no_queries_attend_nothing() -> None:
    empty = torch.empty(0, HEADS, RANK + ROPE)
    out, lse = attend_topk(empty, torch.empty(0, 4), lambda positions: positions, RANK, 1.0)
    assert (out.shape, lse.shape) == ((0, HEADS, RANK), (0, HEADS))
