"""Budgets accept the error of the low precision itself and refuse every seeded fault, on fitting
inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.testing import budget as budgets
from attn.testing import oracle
from attn.testing.budget import Habits, Shape, budget, lse_budget, lse_errors, row_errors
from attn.testing.oracle import Rules, State

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FAR = 4
"""How many times over its budget a fault must lie, to count as far beyond it."""


@dataclass(frozen=True, eq=False)
class Judged:
    """One request with its expected state and its budgets."""

    q: Tensor
    k: Tensor
    v: Tensor
    first: int
    rules: Rules
    dtype: torch.dtype
    state: State = field(init=False)
    low: State = field(init=False)

    def __post_init__(self) -> None:
        one = (self.q, self.k, self.v, self.first, self.rules)
        object.__setattr__(self, "state", oracle.attention(*one))
        object.__setattr__(self, "low", budgets.low_precision_attention(*one, self.dtype))

    def excess(self, out: Tensor) -> float:
        """Error of ``out``, rounded as a kernel would, in units of the budget; more than 1 is
        refused.
        """
        error = row_errors(out.to(self.dtype), self.state[0]).max().item()
        return error / budget(self.state[0], self.low[0], self.dtype)

    def lse_excess(self, lse: Tensor) -> float:
        error = lse_errors(lse.float(), self.state[1]).max().item()
        return error / lse_budget(self.state[1], self.low[1])


def judged(
    shape: Shape, rules: Rules, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **kwargs: Any
) -> Judged:
    generator = torch.Generator().manual_seed(seed)
    first = shape.num_keys - shape.num_queries
    q, k, v = budgets.peaked_inputs(generator, shape, first, rules, dtype, **kwargs)
    return Judged(q, k, v, first, rules, dtype)


DECODE = Shape(1, 700, 8, 2, 64)
EXTEND = Shape(5, 300, 4, 2, 64, head_size_v=32)
PREFILL = Shape(70, 70, 4, 1, 64)
SHAPES = [DECODE, EXTEND, PREFILL]
SCALE = Rules(scale=0.125)
RULES = {
    "full": SCALE,
    "non_causal": replace(SCALE, causal=False),
    "window": replace(SCALE, sliding_window=50),
    "encoder_window": replace(SCALE, causal=False, sliding_window=20),
    "chunk": replace(SCALE, attention_chunk_size=48, chunk_lookback=1),
    "rswa": replace(SCALE, rswa_prefix_len=9, rswa_window=17),
    "ranges": replace(SCALE, sliding_window=4, mm_ranges=((5, 30), (60, 69), (280, 299))),
    "soft_cap": replace(SCALE, logits_soft_cap=8.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_low_precision_and_the_rounded_oracle_pass(
    shape: Shape, name: str, dtype: torch.dtype
) -> None:
    case = judged(shape, RULES[name], dtype)
    assert case.low[0].dtype == dtype
    assert case.low[1].dtype == torch.float32
    for out, lse in (case.low, case.state):
        assert case.excess(out) <= 1
        assert case.lse_excess(lse) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_stale_swapped_and_nan_outputs_fail(shape: Shape, dtype: torch.dtype) -> None:
    case = judged(shape, SCALE, dtype)
    stale = judged(shape, SCALE, dtype, seed=1).state
    out, lse = case.state
    nan = out.clone()
    nan[-1, -1, -1] = math.nan
    assert case.excess(nan) == math.inf
    for wrong in (torch.zeros_like(out), stale[0], out.roll(1, 1), out * 1.1, out.roll(1, 2)):
        assert case.excess(wrong) > FAR
    for wrong in (torch.zeros_like(lse), stale[1], lse.roll(1, 1), lse / math.log(2), lse + 0.01):
        assert case.lse_excess(wrong) > FAR


FAULTS = [
    ("full", {"scale": 0.1}, 0),
    ("full", {}, -1),  # the query does not see itself
    ("full", {"rswa_prefix_len": 0, "rswa_window": 699}, 0),  # key 0 dropped, for 700 keys
    ("non_causal", {"causal": True}, -1),  # last key dropped
    ("window", {"sliding_window": 49}, 0),
    ("window", {"sliding_window": 51}, 0),
    ("encoder_window", {"sliding_window": 19}, 0),
    ("encoder_window", {"sliding_window": 21}, 0),
    ("chunk", {"attention_chunk_size": 47}, 0),
    ("chunk", {"chunk_lookback": 0}, 0),
    ("rswa", {"rswa_prefix_len": 8}, 0),
    ("rswa", {"rswa_prefix_len": 10}, 0),
    ("rswa", {"rswa_window": 18}, 0),
    ("ranges", {"mm_ranges": ((5, 30), (60, 69), (281, 299))}, 0),
    ("ranges", {"mm_clamp_window": True}, 0),
    ("soft_cap", {"logits_soft_cap": None}, 0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "changes", "shift"), FAULTS)
def test_wrong_rules_fail(
    name: str, changes: dict[str, Any], shift: int, seed: int, dtype: torch.dtype
) -> None:
    shape = EXTEND if name == "ranges" else DECODE
    case = judged(shape, RULES[name], dtype, seed)
    wrong = replace(case.rules, **changes)
    out, lse = oracle.attention(case.q, case.k, case.v, case.first + shift, wrong)
    assert case.excess(out) > FAR
    assert case.lse_excess(lse) > FAR


@pytest.mark.parametrize("shape", [*SHAPES, Shape(1, 200, 1, 1, 16), Shape(1, 20000, 1, 1, 128)])
@pytest.mark.parametrize("seed", range(3))
def test_one_key_more_or_less_at_a_window_edge_fails(shape: Shape, seed: int) -> None:
    window = shape.num_keys // 2
    case = judged(shape, replace(SCALE, sliding_window=window), seed=seed)
    for wrong in (window - 1, window + 1):
        rules = replace(SCALE, sliding_window=wrong)
        out, lse = oracle.attention(case.q, case.k, case.v, case.first, rules)
        assert case.excess(out) > FAR
        assert case.lse_excess(lse) > FAR


def test_flat_inputs_hide_the_key_that_peaked_inputs_show() -> None:
    shape = Shape(1, 16384, 1, 1, 64)
    rules, off_by_one = (replace(SCALE, sliding_window=w) for w in (16000, 15999))
    peaked = judged(shape, rules)
    flat_q = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    flat = Judged(flat_q, peaked.k, peaked.v, peaked.first, rules, torch.bfloat16)
    for case, shown in ((flat, False), (peaked, True)):
        out, _ = oracle.attention(case.q, case.k, case.v, case.first, off_by_one)
        assert (case.excess(out) > 1) == shown


@pytest.mark.parametrize("position", [16, 255, 256, 511])
def test_extra_positions_become_needles(position: int) -> None:
    case = judged(DECODE, SCALE, extra_positions=(16, 255, 256, 511))
    v = case.v.clone()
    v[position] = v[position - 3]
    assert case.excess(oracle.attention(case.q, case.k, v, case.first, SCALE)[0]) > FAR


@pytest.mark.parametrize("shape", [*SHAPES, Shape(1, 200, 1, 1, 64)])
def test_exchanged_values_fail(shape: Shape) -> None:
    case = judged(shape, SCALE)
    v = case.v.clone()
    v[[0, -1]] = v[[-1, 0]]
    assert case.excess(oracle.attention(case.q, case.k, v, case.first, SCALE)[0]) > FAR


@pytest.mark.parametrize("shape", [DECODE, EXTEND])
def test_heads_dealt_to_kv_heads_in_turn_fail(shape: Shape) -> None:
    case = judged(shape, SCALE)
    k, v = (x.repeat(1, shape.num_heads // shape.num_kv_heads, 1) for x in (case.k, case.v))
    assert case.excess(oracle.attention(case.q, k, v, case.first, SCALE)[0]) > FAR


@pytest.mark.parametrize("shape", SHAPES)
def test_sinks_at_the_height_of_the_scores_matter(shape: Shape) -> None:
    bare = judged(shape, SCALE)
    sinks = budgets.peaked_sinks(torch.Generator().manual_seed(0), bare.state[1])
    assert sinks.shape == (shape.num_heads,)
    rules = replace(SCALE, sinks=sinks)
    case = Judged(bare.q, bare.k, bare.v, bare.first, rules, bare.dtype)
    assert case.excess(case.low[0]) <= 1
    assert case.lse_excess(case.low[1]) <= 1
    for wrong in (SCALE, replace(SCALE, sinks=sinks.roll(1)), replace(SCALE, sinks=sinks + 0.5)):
        out, lse = oracle.attention(case.q, case.k, case.v, case.first, wrong)
        assert case.excess(out) > FAR
        assert case.lse_excess(lse) > FAR


@pytest.mark.parametrize("use_alibi_sqrt", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_alibi_slopes_matter(shape: Shape, use_alibi_sqrt: bool) -> None:
    slopes = torch.tensor([2.0**-h for h in range(1, shape.num_heads + 1)])
    rules = replace(SCALE, alibi_slopes=slopes, use_alibi_sqrt=use_alibi_sqrt)
    case = judged(shape, rules)
    assert case.excess(case.low[0]) <= 1
    assert case.lse_excess(case.low[1]) <= 1
    for changes in ({"alibi_slopes": None}, {"use_alibi_sqrt": not use_alibi_sqrt}):
        out, _ = oracle.attention(case.q, case.k, case.v, case.first, replace(rules, **changes))
        assert case.excess(out) > FAR


def test_mla_shapes_pass_as_one_kv_head() -> None:
    latent, rules, first = 96, SCALE, 200 - 3
    generator = torch.Generator().manual_seed(0)
    q, k, _ = budgets.peaked_inputs(
        generator, Shape(3, 200, 4, 1, latent + 32), first, rules, torch.bfloat16
    )
    rows = k[:, 0]
    expected = oracle.mla_absorbed(
        q[..., :latent], q[..., latent:], rows[:, :latent], rows[:, latent:], first, rules
    )
    low = budgets.low_precision_attention(q, k, k[..., :latent], first, rules, torch.bfloat16)
    assert row_errors(low[0], expected[0]).max() <= budget(expected[0], low[0], torch.bfloat16)
    assert lse_errors(low[1], expected[1]).max() <= lse_budget(expected[1], low[1])


def test_rows_without_keys() -> None:
    q, k, v = budgets.peaked_inputs(torch.Generator(), Shape(3, 4, 2, 1, 16), -2, SCALE)
    rules = replace(SCALE, sinks=torch.ones(2))
    case = Judged(q, k, v, -2, rules, torch.float32)
    assert (case.low[0][:2] == 0).all()
    assert (case.low[1][:2] == -math.inf).all()
    assert case.excess(case.low[0]) <= 1
    assert case.lse_excess(case.low[1]) <= 1
    assert case.excess(case.low[0] + 1e-30) == math.inf
    assert case.lse_excess(case.low[1].clamp(min=-1e30)) == math.inf
    none = budgets.low_precision_attention(q, k[:0], v[:0], 0, rules, torch.float16)
    assert none[0].dtype == torch.float16
    assert (none[0] == 0).all()
    assert (none[1] == -math.inf).all()


def test_low_precision_rounds_unnormalised_probabilities() -> None:
    scores = -torch.arange(1, 33) / 16  # of key 0; key 1 scores 0, so the largest weight is 1
    q, k, v = (
        scores[None, :, None],
        torch.tensor([[[1.0]], [[0.0]]]),
        torch.tensor([[[1.0]], [[0.0]]]),
    )
    out, _ = budgets.low_precision_attention(q, k, v, 1, Rules(1.0), torch.bfloat16)
    weight = scores.exp()
    assert out.flatten().tolist() == (weight.bfloat16() / (weight + 1)).bfloat16().tolist()


def test_sink_far_above_the_scores_does_not_overflow() -> None:
    rules = replace(SCALE, sinks=torch.tensor([200.0, 300.0]))
    q, k, v = budgets.peaked_inputs(torch.Generator(), Shape(1, 9, 2, 1, 16), 8, rules)
    _, lse = budgets.low_precision_attention(q, k, v, 8, rules, torch.float32)
    assert lse.tolist() == [[200.0, 300.0]]


def test_row_errors_by_hand() -> None:
    expected = torch.tensor([[[3.0, 4.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 0.0]]])
    actual = expected.clone()
    actual[0, 0, 0], actual[0, 1, 1] = 3.5, 2.5  # heads: 0.5 / 5 and 0.5 / 2
    assert row_errors(actual, expected).tolist() == [0.25, 0.0]
    for bad in (math.nan, math.inf, -math.inf):
        actual[1, 0, 0] = bad
        assert row_errors(actual, expected).tolist() == [0.25, math.inf]
    actual[1] = torch.tensor([[1.0, 0.0], [0.0, 1e-40]])
    assert row_errors(actual, expected)[1] == math.inf
    with pytest.raises(ValueError, match="shape"):
        row_errors(expected[0], expected)


def test_lse_errors_by_hand() -> None:
    expected = torch.tensor([[1.0, -math.inf], [2.0, 3.0]])
    assert lse_errors(expected, expected).tolist() == [0, 0]
    assert lse_errors(expected + 0.5, expected).tolist() == [0.5, 0.5]
    for bad in (math.nan, math.inf, -math.inf):
        assert lse_errors(torch.tensor([[1.0, bad], [2.0, bad]]), expected)[1] == math.inf
    assert lse_errors(torch.tensor([[1.0, -1e30], [2.0, 3.0]]), expected)[0] == math.inf


@pytest.mark.parametrize(
    ("dtype", "band"),
    [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2**-24)],
)
def test_budget_is_twice_error_and_band(dtype: torch.dtype, band: float) -> None:
    expected = torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]])
    assert budget(expected, expected, dtype) == 2 * band
    low = expected.clone()
    low[0, 0, 0] += 0.25
    assert budget(expected, low, dtype) == 2 * (0.25 / 5 + band)
    assert budget(expected[:0], expected[:0], dtype) == 2 * band


def test_lse_budget_is_twice_error_and_band() -> None:
    expected, eps = torch.tensor([[4.0, -math.inf], [-8.0, 0.5]]), 2**-23
    assert lse_budget(expected, expected) == 2 * 8 * eps
    assert lse_budget(expected, expected + 0.25) == 2 * (0.25 + 8 * eps)
    assert lse_budget(expected[1:, 1:], expected[1:, 1:]) == 2 * eps
    assert lse_budget(expected, expected, soft_cap=50.0) == 2 * 50 * eps
    assert lse_budget(expected, expected, soft_cap=1.0) == 2 * 8 * eps


def test_budgets_that_would_accept_anything_are_refused() -> None:
    expected = torch.ones(2, 1, 3)
    for useless in (torch.zeros(2, 1, 3), torch.full((2, 1, 3), math.nan)):
        with pytest.raises(ValueError, match="would accept zeros"):
            budget(expected, useless, torch.float16)
    with pytest.raises(ValueError, match="low_precision"):
        lse_budget(torch.zeros(2, 1), torch.full((2, 1), -math.inf))


def test_weights_of_e4m3_are_rounded_to_it() -> None:
    # Two keys, the second 0.3 times as likely as the first: 0.3 * 448 = 134.4 is 128 in e4m3.
    q = torch.ones(1, 1, 1)
    k = torch.tensor([0.0, math.log(0.3)]).view(2, 1, 1)
    v = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    out, lse = budgets.low_precision_attention(
        q, k, v, 1, Rules(1.0), torch.float32, habits=Habits(fp8_weights=True)
    )
    assert out.item() == pytest.approx(128 / 448 / 1.3, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(1.3), rel=1e-6)


def test_sums_of_e4m3_products_lose_digits_far_behind_the_largest() -> None:
    q, k = torch.ones(1, 1, 64), torch.zeros(2, 64)
    q[..., 0], k[:, 0] = 128, 64
    k[:, 32:] = torch.tensor([0.5, 1.0])[:, None]
    assert budgets.e4m3_sums(q, k).flatten().tolist() == [2**13, 2**13 + 32]


def test_scores_of_e4m3_keys_are_such_sums() -> None:
    q, k = torch.ones(1, 1, 64), torch.zeros(1, 1, 64)
    q[..., 0], k[..., 0], k[..., 32:] = 128, 64, 0.5
    given = q, 3 * k, k, 0, Rules(1.0), torch.bfloat16
    assert budgets.low_precision_attention(*given)[1].item() == 3 * (2**13 + 16)
    habits = Habits(key_scale=3.0)
    assert budgets.low_precision_attention(*given, habits=habits)[1].item() == 3 * 2**13


def test_sums_of_rounded_weights_are_in_the_lse_and_not_in_the_output() -> None:
    # Two keys, the second 0.3 times as likely as the first: 0.30078125 in bf16.
    q = torch.ones(1, 1, 1)
    k = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    scale = math.log(0.3)
    v = torch.tensor([0.0, 1.0]).view(2, 1, 1)
    given = (q, k, v, 1, Rules(scale), torch.bfloat16)
    out, lse = budgets.low_precision_attention(*given, habits=Habits(rounds_sums=True))
    assert lse.item() == pytest.approx(math.log(1.30078125), rel=1e-6)
    assert out.item() == pytest.approx(0.30078125 / 1.30078125, rel=2**-8)
    assert budgets.low_precision_attention(*given)[1].item() == pytest.approx(
        math.log(1.3), rel=1e-6
    )


def test_an_approximate_tanh_is_off_by_its_documented_error() -> None:
    q = k = v = torch.ones(1, 1, 1)
    given = (q, k, v, 0, Rules(1.0, logits_soft_cap=2.0), torch.float32)
    exact, off = (
        budgets.low_precision_attention(*given, habits=habits)[1].item()
        for habits in (budgets.CAREFUL, Habits(approximates_tanh=True))
    )
    assert exact == pytest.approx(2 * math.tanh(0.5), rel=1e-6)
    assert off == pytest.approx(exact * (1 - 2**-11), rel=1e-6)
