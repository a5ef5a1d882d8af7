"""Dense attention of the reference: masks against the oracle's, slices, shared prefixes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attn.reference import dense
from attn.reference.dense import AttentionRules, Request, attend_batch, attend_request
from attn.testing import oracle
from attn.testing.budget import (
    Shape,
    budget,
    low_precision_attention,
    lse_budget,
    lse_errors,
    peaked_inputs,
    row_errors,
)
from attn.testing.oracle import Rules, State

lengths = st.integers(1, 12)


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """One way to limit the visible keys, with multimodal ranges on top of it."""
    kind = draw(st.sampled_from(["none", "window", "two_sided", "chunk", "rswa", "all"]))
    rules: dict[str, Any] = {"causal": kind not in ("two_sided", "all")}
    if kind in ("window", "two_sided"):
        rules["sliding_window"] = draw(lengths)
    if kind == "chunk":
        rules |= {"attention_chunk_size": draw(lengths), "chunk_lookback": draw(st.integers(0, 2))}
    if kind == "rswa":
        rules |= {"rswa_prefix_len": draw(st.integers(0, 9)), "rswa_window": draw(lengths)}
    edge = st.integers(0, 30)
    rules["mm_ranges"] = tuple(draw(st.lists(st.tuples(edge, edge), max_size=3)))
    rules["mm_clamp_window"] = draw(st.booleans())
    return rules


@given(limits(), st.integers(0, 14), st.integers(1, 10), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_masks_are_the_oracles(given: dict[str, Any], first: int, count: int, later: int) -> None:
    rules = AttentionRules(scale=1.0, **given)
    num_keys = first + count + later  # keys after the last query too
    expected = oracle.mask(count, num_keys, first, Rules(scale=1.0, **given))
    queries = torch.arange(first, first + count)[:, None]
    seen = dense.visibility(queries, torch.arange(num_keys)[None], rules)
    assert torch.equal(expected, torch.ones_like(expected) if seen is None else seen)
    start, stop = dense.visible_range(first, first + count - 1, num_keys, rules)
    assert 0 <= start <= stop <= num_keys
    assert not bool(expected[:, :start].any())
    assert not bool(expected[:, stop:].any())


def state_of(inputs: tuple[Tensor, Tensor, Tensor], first: int, rules: Rules) -> tuple[Any, ...]:
    """The oracle's state, and the state of the same maths in the inputs' type."""
    return (
        oracle.attention(*inputs, first, rules),
        low_precision_attention(*inputs, first, rules, inputs[0].dtype),
    )


def assert_same(actual: State, expected: State, low: State) -> None:
    limit = budget(expected[0], low[0], actual[0].dtype)
    assert row_errors(actual[0], expected[0]).max() <= limit
    assert lse_errors(actual[1], expected[1]).max() <= lse_budget(expected[1], low[1])


RULES = {
    "causal": Rules(scale=0.25),
    "window": Rules(scale=0.25, sliding_window=7),
    "two_sided": Rules(scale=0.25, causal=False, sliding_window=5),
    "chunk": Rules(scale=0.25, attention_chunk_size=6, chunk_lookback=1),
    "ranges": Rules(scale=0.25, sliding_window=4, mm_ranges=((3, 20), (25, 29))),
    "rswa": Rules(scale=0.25, rswa_prefix_len=4, rswa_window=5),
}


@pytest.mark.parametrize("rows_per_slice", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_queries_cut_into_slices_give_the_same_and_read_only_what_they_see(
    name: str, rows_per_slice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, shape = RULES[name], Shape(14, 30, 4, 2, 16)
    q, k, v = peaked_inputs(torch.Generator().manual_seed(2), shape, 16, rules)
    mine = AttentionRules(**{**asdict(rules), "mm_ranges": rules.mm_ranges})
    row_bytes = shape.num_heads * shape.num_keys * q.element_size()
    monkeypatch.setattr(dense, "SCORE_BYTES", rows_per_slice * row_bytes)
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> tuple[Tensor, Tensor]:
        reads.append((start, stop))
        return k[start:stop], v[start:stop]

    actual = attend_request(q, read, 16, 30, mine)
    assert_same(actual, *state_of((q, k, v), 16, rules))
    assert len(reads) == -(-14 // rows_per_slice)
    for begin, (start, stop) in zip(range(0, 14, rows_per_slice), reads, strict=True):
        seen = oracle.mask(14, 30, 16, rules)[begin : begin + rows_per_slice].any(0).nonzero()
        assert start <= int(seen.min())
        assert int(seen.max()) < stop
        assert (start, stop) == (int(seen.min()), int(seen.max()) + 1) or name == "rswa"


@pytest.mark.parametrize("prefix", [0, 8, 16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_shared_prefix_attended_apart_gives_the_same(prefix: int, with_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    rules = Rules(scale=0.25, sinks=sinks)
    mine = AttentionRules(scale=0.25, sinks=sinks)
    inputs = [
        peaked_inputs(generator, Shape(count, keys, 4, 2, 16), keys - count, rules)
        for count, keys in ((1, 20), (4, 30))
    ]
    requests, start = [], 0
    for q, k, v in inputs:
        stop = start + len(q)

        def read(low: int, high: int, k: Tensor = k, v: Tensor = v) -> tuple[Tensor, Tensor]:
            return k[low:high], v[low:high]

        requests.append(Request(start, stop, len(k), len(k) - len(q), mine, read))
        start = stop
    written: dict[int, State] = {}

    def write(tokens: slice, out: Tensor, lse: Tensor) -> None:
        written[tokens.start] = (out, lse)

    attend_batch(torch.cat([q for q, _, _ in inputs]), requests, write, prefix)
    for request, (q, k, v) in zip(requests, inputs, strict=True):
        expected, low = state_of((q, k, v), request.first_position, rules)
        assert_same(written[request.start], expected, low)
