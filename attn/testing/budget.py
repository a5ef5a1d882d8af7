"""How wrong a result may be: budgets computed from the data, and inputs on which faults show.

The rule: against the float64 oracle, a result may err at most twice the sum of two numbers. One is
the error of the same maths in the low precision, computed here. The other is the rounding band of
the output dtype. No tolerance is typed by hand, and a budget that would accept zeros is refused.

    out, lse = oracle.attention(q, k, v, first, rules)
    low_out, low_lse = low_precision(q, k, v, first, rules, dtype)
    assert row_errors(actual_out, out).max() <= budget(out, low_out, dtype)
    assert lse_errors(actual_lse, lse).max() <= lse_budget(lse, low_lse)

Inputs: with independent normal q, k, v the softmax over n keys is nearly flat. One key then moves
the output by about 1/sqrt(n) of its norm. For a few thousand keys that is below the budget of bf16,
so a kernel that drops, adds or misplaces a key passes. :func:`peaked_inputs` prevents that: each
query is solved to score high against a few *needle* keys, each of which moves the output several
times as much as all ordinary keys together:

- *edge* keys, on both sides of every place where the row's mask changes (the query itself, the key
  after it, both sides of a window or chunk border, the first key). Losing one removes its share of
  the row, and adding one that should be hidden takes as much from the others.
- one key per head from the inside of the visible range, head h drawing from the h-th part of it, so
  that faults inside show too. A particular page or split border that must show in a long context
  with few query rows goes into ``extra_positions``.

Edges are dealt to heads in turn, shifting by one with each query. Needle scores differ, by up to a
factor of two in weight, so that exchanging two needles shows as well.

Limits: a steep ALiBi slope hides far needles. A soft cap below log(number of keys) flattens them.
One query with one head covers about three edges. A sink matters only at the height of the scores,
where :func:`peaked_sinks` puts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn.testing import oracle
from attn.testing.oracle import Rules, State


class UselessBudgetError(ValueError):
    """The low precision errs so much on these inputs that a budget would accept zeros."""


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """The relative error of each token's worst head: float64 ``[T]``.

    A head's error is ``|actual - expected| / |expected|`` by the L2 norm over Dv. NaN or infinity
    in ``actual`` is an infinite error, and so is anything but exact zeros where ``expected`` is
    zero.

    Args:
        actual: ``[T, H, Dv]``.
        expected: ``[T, H, Dv]``.

    Raises:
        ValueError: shapes differ.
    """
    actual, expected = _same_shape(actual, expected, 3)
    finite = actual.isfinite().all(-1)  # [T, H]
    size = expected.norm(dim=-1)
    relative = (actual - expected).norm(dim=-1) / size
    on_zero = torch.where((actual == 0).all(-1), 0.0, torch.inf)
    errors = torch.where(size == 0, on_zero, relative)
    return torch.where(finite, errors, torch.inf).amax(-1)


def lse_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """The absolute error of each token's worst head: float64 ``[T]``.

    Where both are -inf, a row without keys, the error is 0. Where only one of them is finite, and
    where one is NaN, it is infinite.

    Args:
        actual: ``[T, H]``.
        expected: ``[T, H]``.

    Raises:
        ValueError: shapes differ.
    """
    actual, expected = _same_shape(actual, expected, 2)
    both_finite = actual.isfinite() & expected.isfinite()
    both_empty = (actual == -torch.inf) & (expected == -torch.inf)
    difference = torch.where(both_finite, (actual - expected).abs(), torch.inf)
    return torch.where(both_empty, 0.0, difference).amax(-1)


def budget(expected: Tensor, low_precision: Tensor, dtype: torch.dtype) -> float:
    """Largest :func:`row_errors` to accept: 2 * (worst error of ``low_precision`` + rounding band).

    The band is half an ulp of ``dtype`` relative to the value, 2**-(mantissa bits + 1).

    Args:
        expected: ``[T, H, Dv]``, the oracle's.
        low_precision: ``[T, H, Dv]``, the same computed in low precision.
        dtype: of the output.

    Raises:
        UselessBudgetError: the budget would accept zeros.
    """
    band = torch.finfo(dtype).eps / 2
    limit = 2 * (_worst(row_errors(low_precision, expected)) + band)
    if not limit < 1:
        raise UselessBudgetError(
            f"budget {limit} would accept zeros, whose error is 1: {dtype} is too low for this"
        )
    return limit


def lse_budget(expected: Tensor, low_precision: Tensor, soft_cap: float | None = None) -> float:
    """Largest :func:`lse_errors` to accept: 2 * (worst error of ``low_precision`` + fp32 band).

    The band is fp32's epsilon times the largest |lse|. If all are smaller than 1 it is the epsilon
    itself, since arguments and results of the exponential and the logarithm are of order one
    however small the lse. Under a soft cap c it is at least the epsilon times c, since c * tanh
    multiplies numbers of order one by c.

    Args:
        expected: ``[T, H]``, the oracle's.
        low_precision: ``[T, H]``, the same computed in low precision.
        soft_cap: the layer's ``logits_soft_cap``.

    Raises:
        ValueError: ``low_precision`` has NaN, infinity, or -inf where ``expected`` has not.
    """
    sizes = expected[expected != -torch.inf].abs().double()
    band = torch.finfo(torch.float32).eps * max(_worst(sizes), 1.0, soft_cap or 0.0)
    limit = 2 * (_worst(lse_errors(low_precision, expected)) + band)
    if not math.isfinite(limit):
        raise ValueError("low_precision has NaN, infinity, or -inf where expected has not")
    return limit


E4M3_MAX = 448.0
"""Largest number of e4m3."""
TANH_ERROR = 2.0**-11
"""Largest relative error of PTX's ``tanh.approx.f32``, by its documentation."""


@dataclass(frozen=True)
class Habits:
    """The values that a kernel rounds on purpose where a careful kernel would not."""

    fp8_weights: bool = False
    """Unnormalised probabilities are rounded to e4m3, scaled so that the largest becomes e4m3's
    largest number."""
    rounds_sums: bool = False
    """The softmax denominator is the sum of rounded probabilities."""
    approximates_tanh: bool = False
    """A soft cap uses the hardware's approximate tanh."""
    key_scale: float = 0.0
    """Scores are sums of products of e4m3 queries and of keys that are e4m3 times this scale, see
    :func:`e4m3_sums`. 0: scores are summed in fp32."""


CAREFUL = Habits()
"""The habits of a kernel that rounds nothing that it need not."""


E4M3_COLUMNS = 32
"""Columns whose products of e4m3 a matrix unit of Hopper adds at a time."""
E4M3_DIGITS = 13
"""Binary digits that such a sum keeps behind its first, as measured on an H200
(``docs/notebook/latent.md``)."""


def e4m3_sums(q: Tensor, k: Tensor) -> Tensor:
    """Scores ``[G, T, S]`` of e4m3 queries ``[T, G, D]`` and keys ``[S, D]``, as Hopper adds them.

    The products of some columns are added to the sum of those before. All of these numbers are cut,
    towards zero, behind E4M3_DIGITS digits of the largest one.
    """
    total = q.new_zeros(q.shape[1], q.shape[0], len(k))
    for first in range(0, q.shape[-1], E4M3_COLUMNS):
        columns = slice(first, first + E4M3_COLUMNS)
        products = torch.einsum("tgd,sd->gtsd", q[..., columns], k[:, columns])
        largest = torch.maximum(products.abs().amax(-1), total.abs())
        digit = torch.exp2(torch.frexp(largest)[1] - (1.0 + E4M3_DIGITS))
        cut = torch.trunc(products / digit[..., None]).sum(-1)
        total = (cut + torch.trunc(total / digit)) * digit
    return total


def low_precision_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    rules: Rules,
    dtype: torch.dtype,
    unit: float = 1.0,
    habits: Habits = CAREFUL,
) -> State:
    """``oracle.attention`` as a kernel computes it, once: out in ``dtype``, lse fp32.

    Operands are rounded to ``dtype``. Scores, softmax and sums are fp32 (float64 for that
    ``dtype``). Unnormalised probabilities are rounded to ``dtype`` before they multiply values, and
    so is the output. :func:`low_precision` takes the worst of several such runs.

    Args:
        q: ``[Tq, H, D]``; of MLA the absorbed query, ``[Tq, H, L + r]``.
        k: ``[Tk, Hk, D]``; of MLA the latent rows as one KV head, ``[Tk, 1, L + r]``.
        v: ``[Tk, Hk, Dv]``; of MLA the first L columns of ``k``.
        first_position: of the first query; keys are at 0 to Tk - 1.
        rules: of the layer for this request.
        dtype: in which the kernel computes.
        unit: in which scores, maxima and the parts of the lse are counted. It is log 2 where a
            kernel's exponentials are powers of 2, which rounds scores once more.
        habits: what the kernel rounds beyond that.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (tensor.to(dtype).to(wide) for tensor in (q, k, v))
    if len(k) == 0:
        nothing = q.new_full(q.shape[:2], -torch.inf)
        return q.new_zeros(*q.shape[:2], v.shape[2]).to(dtype), nothing
    group = q.shape[1] // k.shape[1]
    hidden = ~oracle.mask(len(q), len(k), first_position, rules).to(q.device)
    positions = torch.arange(first_position, first_position + len(q))
    key_minus_query = (torch.arange(len(k)) - positions[:, None]).to(q.device, wide)  # [Tq, Tk]

    outs, lses = [], []
    for kv_head in range(k.shape[1]):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        if habits.key_scale:
            codes = (k[:, kv_head] / habits.key_scale).to(torch.float8_e4m3fn).to(wide)
            s = e4m3_sums(q[:, heads], codes) * (habits.key_scale * rules.scale)
        else:
            s = torch.einsum("tgd,sd->gts", q[:, heads], k[:, kv_head]) * rules.scale
        if rules.logits_soft_cap is not None:
            s = torch.tanh(s / rules.logits_soft_cap) * rules.logits_soft_cap
            if habits.approximates_tanh:
                s = s * (1 - TANH_ERROR)
        if rules.alibi_slopes is not None:
            slopes = rules.alibi_slopes[heads].to(q.device, wide)[:, None, None]
            away = (-key_minus_query).clamp_min(0).sqrt().neg()
            s = s + slopes * (away if rules.use_alibi_sqrt else key_minus_query)
        s = (s / unit).masked_fill(hidden, -torch.inf)
        top = s.amax(-1, keepdim=True)  # [G, Tq, 1]
        empty = top == -torch.inf
        top = top.masked_fill(empty, 0)
        if rules.sinks is not None:
            sinks = (rules.sinks[heads].to(q.device, wide) / unit)[:, None, None].expand_as(top)
            top = torch.where(empty, top, torch.maximum(top, sinks))
        p = torch.exp((s - top) * unit)
        rounded = p.to(dtype).to(wide)
        total = (rounded if habits.rounds_sums else p).sum(-1, keepdim=True)
        if rules.sinks is not None:
            total = total + torch.exp((sinks - top) * unit).masked_fill(empty, 0)
        if habits.fp8_weights:
            rounded = (p * E4M3_MAX).to(torch.float8_e4m3fn).to(wide) / E4M3_MAX
        weighted = torch.einsum("gts,sd->gtd", rounded, v[:, kv_head])
        outs.append((weighted / total.masked_fill(empty, 1)).to(dtype))
        lses.append((top * unit + total.log()).squeeze(-1))
    return torch.cat(outs).transpose(0, 1), torch.cat(lses).T


SUMMATION_ORDERS = 16
"""Orders of summation that :func:`low_precision` tries for 32- and 64-bit dtypes."""


def low_precision(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    rules: Rules,
    dtype: torch.dtype,
    habits: Habits = CAREFUL,
) -> State:
    """``oracle.attention`` in ``dtype``, as wrong as a good kernel may be: the state for a budget.

    Products are summed in other orders than the oracle's, with :func:`low_precision_attention`. In
    float64, equal orders would share their rounding, and the budget would miss it. In 32 and 64
    bits, the error is nothing but the order of summation and the unit of exponents. Both are the
    kernel's own choice, so several are tried, and for each token and head the worst one counts.

    In 16 bits one order is enough, and the lse is lowered a little. Matrix units add 16 products of
    16-bit numbers at a time to an fp32 sum and do not round it: they cut it off, always towards
    zero. Each time that takes half a unit on average, of a sum that has half its final size on
    average.

    Args:
        query: ``[Tq, H, D]``; of MLA the absorbed query, ``[Tq, H, L + r]``.
        key: ``[Tk, Hk, D]``; of MLA the latent rows as one KV head, ``[Tk, 1, L + r]``.
        value: ``[Tk, Hk, Dv]``; of MLA the first L columns of ``key``.
        first: position of the first query; keys are at 0 to Tk - 1.
        rules: of the layer for this request.
        dtype: in which the kernel computes.
        habits: what the kernel rounds beyond a careful one.

    Returns:
        Out ``[Tq, H, Dv]`` in ``dtype`` and lse ``[Tq, H]``.
    """
    generator = torch.Generator().manual_seed(0)
    states = []
    units = (1.0,) if dtype.itemsize < 4 else (1.0, math.log(2)) * (SUMMATION_ORDERS // 2)
    for unit in units:
        order = torch.randperm(query.shape[-1], generator=generator)
        turned = (query[..., order], key[..., order], value)
        states.append(low_precision_attention(*turned, first, rules, dtype, unit, habits))
    if len(states) == 1:
        out, lse = states[0]
        return out, lse - lse.abs() * (query.shape[-1] / 16 * 2**-24 / 2)
    if len(query) == 0:
        return states[0]
    exact = oracle.attention(query, key, value, first, rules)
    outs, lses = (torch.stack([state[side] for state in states]) for side in (0, 1))
    off = (outs.double() - exact[0]).norm(dim=-1).argmax(0)[None]
    lse_off = (lses.double() - exact[1]).abs().nan_to_num(0).argmax(0)[None]
    worst = outs.gather(0, off[..., None].expand(-1, -1, -1, outs.shape[-1]))[0]
    return worst, lses.gather(0, lse_off)[0]


@dataclass(frozen=True)
class Shape:
    """Sizes of one request in a dense layer."""

    num_queries: int
    """Tq."""
    num_keys: int
    """Tk."""
    num_heads: int
    """H."""
    num_kv_heads: int
    """Hk."""
    head_size: int
    """D."""
    head_size_v: int | None = None
    """Dv; None: ``head_size``."""


def peaked_inputs(
    generator: torch.Generator,
    shape: Shape,
    first_position: int,
    rules: Rules,
    dtype: torch.dtype = torch.float32,
    extra_positions: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v of one request, queries peaked on needles as the text of this module says.

    Args:
        generator: of the numbers.
        shape: sizes.
        first_position: of the first query; keys are at 0 to Tk - 1.
        rules: of the layer for this request.
        dtype: of the result.
        extra_positions: key positions that become needles as the edges of the mask do: page, tile
            or split borders, for example.

    Returns:
        q ``[Tq, H, D]``, k ``[Tk, Hk, D]`` and v ``[Tk, Hk, Dv]``.
    """
    k = torch.randn(shape.num_keys, shape.num_kv_heads, shape.head_size, generator=generator)
    size_v = shape.head_size_v or shape.head_size
    v = torch.randn(shape.num_keys, shape.num_kv_heads, size_v, generator=generator)
    k, v = k.to(dtype), v.to(dtype)
    visible = oracle.mask(shape.num_queries, shape.num_keys, first_position, rules)
    q = peaked_queries(generator, k, shape.num_heads, visible, rules.scale, extra_positions)
    return q.to(dtype), k, v


def peaked_queries(
    generator: torch.Generator,
    k: Tensor,
    num_heads: int,
    visible: Tensor,
    scale: float,
    extra_positions: Sequence[int] = (),
) -> Tensor:
    """Queries that peak on needles among given keys: float64 ``[Tq, H, D]``.

    Args:
        generator: of the numbers.
        k: ``[Tk, Hk, D]``; of MLA latent rows ``[Tk, 1, L + r]`` for absorbed queries, or expanded
            keys ``[Tk, H, P + r]``.
        num_heads: H.
        visible: bool ``[Tq, Tk]``, which query sees which key.
        scale: multiplies q.k in the layer.
        extra_positions: key positions that become needles as the edges of the mask do.
    """
    keys = k.double().repeat_interleave(num_heads // k.shape[1], dim=1)  # [Tk, H, D]
    queries = torch.randn(len(visible), num_heads, k.shape[2], generator=generator).double()
    for t, row in enumerate(visible):
        needles = _needles(generator, row, t, num_heads, k.shape[2], extra_positions)  # [H, M]
        count = needles.shape[1]
        if count == 0:
            continue  # no visible key: the random query stays
        height = _needle_score(int(row.sum()), count, k.shape[2])
        lower = torch.arange(count) * (math.log(2) / count)  # weights from 1 down to above 1/2
        wanted = ((height - lower) / scale).double().expand(num_heads, count)
        picked = keys[needles, torch.arange(num_heads)[:, None]]  # [H, M, D]
        queries[t] = (torch.linalg.pinv(picked) @ wanted[..., None]).squeeze(-1)
    return queries


def peaked_sinks(generator: torch.Generator, lse: Tensor) -> Tensor:
    """Sinks that matter: fp32 ``[H]``, each about the median of a head's lse.

    Args:
        generator: of the numbers.
        lse: ``[T, H]``, of the layer without sinks.
    """
    medians = [head[head != -torch.inf].median() for head in lse.unbind(1)]
    return (torch.stack(medians).cpu() + torch.rand(len(medians), generator=generator)).float()


def _needles(
    generator: torch.Generator,
    row: Tensor,
    turn: int,
    num_heads: int,
    head_size: int,
    extra_positions: Sequence[int],
) -> Tensor:
    """Distinct key positions for each head, ``[H, M]``, of the row ``[Tk]`` of a mask.

    M is 0 where no key is visible. ``turn`` is the index of the query, by which edges are dealt.
    """
    padded = torch.nn.functional.pad(row, (1, 1))
    is_edge = (row != padded[:-2]) | (row != padded[2:])
    is_edge[list(extra_positions)] |= row[list(extra_positions)]
    edges = is_edge.nonzero().flatten()
    inside = (row & ~is_edge).nonzero().flatten()
    # Needles share the query's norm: beyond this many they cannot outweigh the other keys.
    most = int(head_size / (4 * _log_noise_to_beat(int(row.sum()))))
    per_head = min(math.ceil(len(edges) / num_heads), max(most - 1, 3))
    head = torch.arange(num_heads)[:, None]
    needles = torch.empty(num_heads, 0, dtype=torch.int64)
    if len(edges):
        order = (turn + head) * per_head + torch.arange(per_head)
        needles = edges[order % len(edges)]
    if len(inside):
        part = (head + torch.rand(num_heads, 1, generator=generator)) / num_heads
        needles = torch.cat([needles, inside[(part * len(inside)).long()]], 1)
    return needles


def _log_noise_to_beat(num_visible: int) -> float:
    """log(4 sqrt(n)): four times what n keys of random scores add to an output, as a score."""
    return math.log(4 * math.sqrt(max(num_visible, 1)))


def _needle_score(num_visible: int, count: int, head_size: int) -> float:
    """Score at which each of ``count`` needles moves the output four times as much as all the rest.

    A query that scores S on M needles in D dimensions scores normally distributed noise of variance
    S^2 M / D on every other key. Values being independent, n such keys add up in quadrature, to
    sqrt(n) exp(S^2 M / D) against exp(S) of a needle. This is the smallest S with
    S - S^2 M / D = log(4 sqrt(n)) or, if there is none, the S that maximises the left side.
    """
    best = head_size / (2 * count)
    return best * (1 - math.sqrt(max(0.0, 1 - 2 * _log_noise_to_beat(num_visible) / best)))


def _same_shape(actual: Tensor, expected: Tensor, ndim: int) -> tuple[Tensor, Tensor]:
    if actual.shape != expected.shape or actual.ndim != ndim:
        raise ValueError(
            f"actual {tuple(actual.shape)} and expected {tuple(expected.shape)} must have one "
            f"shape with {ndim} dimensions"
        )
    return actual.double().to(expected.device), expected.double()


def _worst(errors: Tensor) -> float:
    """Largest entry, 0 if there is none."""
    return float(errors.max()) if errors.numel() else 0.0
