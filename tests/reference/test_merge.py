"""Merging attention states, against the oracle's merge and by its laws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn.reference.merge import merge_states
from attn.testing import oracle
from attn.testing.budget import budget, lse_budget, lse_errors, row_errors
from attn.testing.oracle import State

TOKENS, HEADS, SIZE = 5, 3, 8


def state(seed: int, spread: float = 5.0, dtype: torch.dtype = torch.float64) -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(TOKENS, HEADS, SIZE, generator=generator, dtype=torch.float64)
    lse = spread * torch.randn(TOKENS, HEADS, generator=generator, dtype=torch.float64)
    return out.to(dtype), lse.to(dtype)


def empty(fill: float = 0.0) -> State:
    out = torch.full((TOKENS, HEADS, SIZE), fill, dtype=torch.float64)
    return out, torch.full((TOKENS, HEADS), -math.inf, dtype=torch.float64)


def low_merge(*states: State) -> State:
    """The merge of states by another formula (a softmax of LSEs), in the type of the states."""
    lses = torch.stack([lse for _, lse in states])
    weights = torch.softmax(lses, 0)
    outs = torch.stack([out for out, _ in states])
    return (weights[..., None] * outs).sum(0), torch.logsumexp(lses, 0)


def assert_same(actual: State, expected: State, low: State) -> None:
    dtype = actual[0].dtype
    assert row_errors(actual[0], expected[0]).max() <= budget(expected[0], low[0], dtype)
    assert lse_errors(actual[1], expected[1]).max() <= lse_budget(expected[1], low[1])


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("spread", [0.1, 5.0, 500.0])
def test_merge_matches_the_oracle(count: int, spread: float) -> None:
    states = [state(seed, spread) for seed in range(count)]
    merged = merge_states(states)
    assert_same(merged, oracle.merge(states), low_merge(*states))
    assert merged[0].shape == (TOKENS, HEADS, SIZE)
    assert merged[1].shape == (TOKENS, HEADS)


def test_merge_keeps_the_dtype_of_the_outputs_and_errs_as_it_rounds() -> None:
    states = [state(seed, dtype=torch.float32) for seed in range(3)]
    out, lse = merge_states(states)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert_same((out, lse), oracle.merge(states), low_merge(*states))


def test_merge_is_associative_and_commutative() -> None:
    a, b, c = (state(seed) for seed in range(3))
    whole = oracle.merge([a, b, c])
    left, right = merge_states([a, b]), merge_states([b, c])
    assert_same(merge_states([left, c]), whole, low_merge(low_merge(a, b), c))
    assert_same(merge_states([a, right]), whole, low_merge(a, low_merge(b, c)))
    assert_same(merge_states([c, a, b]), whole, low_merge(c, a, b))


def test_an_empty_state_changes_no_bit() -> None:
    one = state(0)
    for states in ([one, empty()], [empty(), one], [empty(), one, empty()]):
        out, lse = merge_states(states)
        assert torch.equal(out, one[0])
        assert torch.equal(lse, one[1])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 7.0])
def test_the_output_of_an_empty_state_is_never_read(garbage: float) -> None:
    one = state(0)
    out, lse = merge_states([empty(garbage), one])
    assert torch.equal(out, one[0])
    assert torch.equal(lse, one[1])


def test_only_empty_states_merge_to_zero_and_minus_infinity() -> None:
    out, lse = merge_states([empty(math.nan), empty(math.nan)])
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_rows_may_be_empty_in_different_states() -> None:
    a, b = state(0), state(1)

    def without(one: State, rows: Tensor) -> State:
        return (
            one[0].masked_fill(rows[:, None, None], math.nan),
            one[1].masked_fill(rows[:, None], -math.inf),
        )

    rows = torch.tensor([True, False, True, False, True])
    out, lse = merge_states([without(a, rows), without(b, ~rows)])
    expected = torch.where(rows[:, None, None], b[0], a[0])
    assert torch.equal(out, expected)
    assert torch.equal(lse, torch.where(rows[:, None], b[1], a[1]))


def test_merging_the_parts_of_a_sequence_gives_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, HEADS, SIZE, generator=generator) for n in (4, 30, 30))
    rules = oracle.Rules(scale=0.3, causal=False)
    parts = [
        oracle.attention(q, k[part], v[part], 0, rules)
        for part in (slice(0, 7), slice(7, 7), slice(7, 30))
    ]
    full = [part for part in parts if bool(part[1].isfinite().all())]
    assert len(full) == 2
    assert_same(merge_states(parts), oracle.attention(q, k, v, 26, rules), low_merge(*full))
