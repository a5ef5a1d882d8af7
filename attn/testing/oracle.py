"""The oracle: attention by definition, which every backend and ``attn.reference`` must match.

It shares no code with the library and imports only torch and the standard library. It computes one
request at a time, on unpaged and contiguous keys and values, with a loop over heads and an explicit
boolean mask, all in float64. Results stay on the device of the queries. :class:`Rules` says what a
layer asks. :func:`attention` is dense attention. :func:`mla_absorbed`, :func:`mla_expanded` and
:func:`sparse_mla` are MLA. :func:`index_logits` and :func:`index_topk` are a sparse layer's
indexer.

Sizes in shapes: Tq queries, Tk keys, H query heads, Hk KV heads, D head size of queries and keys,
Dv head size of values; in MLA L latent width, r rotary width, P key width without the rotary part,
V value width.

A *state* is the pair (out ``[Tq, H, Dv]``, lse ``[Tq, H]``), both float64. The lse, the logarithm
of the sum of exponentials, is natural. ``exp(lse) * out`` is the sum over visible keys of
``exp(score) * v``, so states over parts of the keys can be merged (:func:`merge`). A row that sees
no key has out 0 and lse -inf, with sinks too: where keys are split over several states, give the
sinks to exactly one of them, and to one that sees a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

State = tuple[Tensor, Tensor]
"""Out ``[Tq, H, Dv]`` and lse ``[Tq, H]``, both float64."""

NO_TOKEN = -1
"""Entry of ``topk_indices`` that names no position."""


@dataclass(frozen=True, eq=False)  # eq of tensor fields is not a bool
class Rules:
    """What one layer asks for one request: scores, mask and sinks. None means off.

    Raises:
        ValueError: a value is out of its range, or goes with no meaning beside another.
    """

    scale: float
    """Multiplies q.k."""
    causal: bool = True
    """A query sees no key after its own position."""
    sliding_window: int | None = None
    """Number of visible keys, the query's own position included; where ``causal`` is off, as many
    on the other side of it."""
    attention_chunk_size: int | None = None
    """Chunked local attention: aligned chunks of this many positions."""
    chunk_lookback: int = 0
    """How many chunks before its own a query sees."""
    logits_soft_cap: float | None = None
    """Scores become ``cap * tanh(score / cap)``."""
    alibi_slopes: Tensor | None = None
    """``[H]``; ``slope * (key position - query position)`` is added to scores."""
    use_alibi_sqrt: bool = False
    """``-slope * sqrt(query position - key position)`` is added instead, and nothing to the scores
    of keys after the query."""
    sinks: Tensor | None = None
    """``[H]`` further logit of each head, in the softmax denominator only."""
    mm_ranges: tuple[tuple[int, int], ...] = ()
    """Inclusive pairs (start, end) of positions, as multimodal tokens have them: those inside a
    pair see each other in both directions. A pair with start >= end adds nothing."""
    mm_clamp_window: bool = False
    """Even inside ``mm_ranges`` nothing further back than the sliding window is seen, if there is
    one."""
    rswa_prefix_len: int | None = None
    """R-SWA: a query sees the first ``rswa_prefix_len`` keys beside the last ``rswa_window``."""
    rswa_window: int | None = None
    """R-SWA's window, which replaces ``sliding_window`` except for ``mm_clamp_window``."""

    def __post_init__(self) -> None:
        for name in ("sliding_window", "attention_chunk_size", "rswa_window", "logits_soft_cap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive or None, got {value}")
        if self.chunk_lookback < 0:
            raise ValueError(f"chunk_lookback must be at least 0, got {self.chunk_lookback}")
        if (self.rswa_prefix_len is None) != (self.rswa_window is None):
            raise ValueError(
                "rswa_prefix_len and rswa_window go together, got "
                f"{self.rswa_prefix_len} and {self.rswa_window}"
            )
        if not self.causal and (self.attention_chunk_size or self.rswa_window):
            raise ValueError("attention_chunk_size and rswa_window are defined for causal only")


def is_visible(query_position: Tensor, key_position: Tensor, rules: Rules) -> Tensor:
    """Which query sees which key: bool, in the broadcast shape of the two int tensors."""
    distance = query_position - key_position

    if rules.causal:
        visible = key_position <= query_position
    else:
        visible = torch.ones_like(distance, dtype=torch.bool)

    if rules.rswa_prefix_len is not None and rules.rswa_window is not None:
        in_prefix = key_position < rules.rswa_prefix_len
        visible = visible & (in_prefix | (key_position > query_position - rules.rswa_window))
    elif rules.sliding_window is not None:
        visible = visible & (key_position > query_position - rules.sliding_window)
        if not rules.causal:
            visible = visible & (key_position < query_position + rules.sliding_window)

    if rules.attention_chunk_size is not None:
        chunk = rules.attention_chunk_size
        chunks_back = query_position // chunk - key_position // chunk
        visible = visible & (chunks_back <= rules.chunk_lookback)

    for start, end in rules.mm_ranges:
        query_inside = (start <= query_position) & (query_position <= end)
        key_inside = (start <= key_position) & (key_position <= end)
        both_inside = query_inside & key_inside
        if rules.mm_clamp_window and rules.sliding_window is not None:
            both_inside = both_inside & (distance < rules.sliding_window)
        visible = visible | both_inside

    return visible


def mask(num_queries: int, num_keys: int, first_position: int, rules: Rules) -> Tensor:
    """Which query sees which key: bool ``[Tq, Tk]`` on the CPU.

    Queries are at ``first_position`` and the positions after it, keys at 0 to Tk - 1.
    """
    query_position = first_position + torch.arange(num_queries)[:, None]  # [Tq, 1]
    key_position = torch.arange(num_keys)[None, :]  # [1, Tk]
    return is_visible(query_position, key_position, rules)


def attention(q: Tensor, k: Tensor, v: Tensor, first_position: int, rules: Rules) -> State:
    """The state of one request in a dense layer.

    Args:
        q: ``[Tq, H, D]``.
        k: ``[Tk, Hk, D]``.
        v: ``[Tk, Hk, Dv]``.
        first_position: of the first query; keys are at 0 to Tk - 1.
        rules: of the layer for this request.

    Raises:
        ValueError: shapes do not match, or a tensor has NaN or infinite entries.
    """
    q, k, v = _float64("q", q), _float64("k", k), _float64("v", v)
    num_queries, num_heads, head_size = q.shape
    num_keys, num_kv_heads, _ = k.shape
    if k.shape[2] != head_size or v.shape[:2] != k.shape[:2] or num_heads % num_kv_heads:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not match")

    visible = mask(num_queries, num_keys, first_position, rules).to(q.device)
    query_position = first_position + torch.arange(num_queries, device=q.device)[:, None]
    distance = query_position - torch.arange(num_keys, device=q.device)[None, :]

    sinks = _sinks_of(rules.sinks, q)
    out = q.new_zeros(num_queries, num_heads, v.shape[2])
    lse = q.new_zeros(num_queries, num_heads)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        score = rules.scale * (q[:, head] @ k[:, kv_head].T)  # [Tq, Tk]
        if rules.logits_soft_cap is not None:
            score = rules.logits_soft_cap * torch.tanh(score / rules.logits_soft_cap)
        if rules.alibi_slopes is not None:
            slope = _per_head("alibi_slopes", rules.alibi_slopes, num_heads)[head].item()
            bias = -distance.clamp(min=0).double().sqrt() if rules.use_alibi_sqrt else -distance
            score = score + slope * bias
        score = score.masked_fill(~visible, -torch.inf)
        sink = None if sinks is None else sinks[head]
        out[:, head], lse[:, head] = _weighted(score, v[:, kv_head], sink)
    return out, lse


def _weighted(score: Tensor, values: Tensor, sink: Tensor | None) -> State:
    """Out ``[Tq, Dv]`` and lse ``[Tq]`` of one head.

    Args:
        score: ``[Tq, Tk]``, minus infinity where a query does not see a key.
        values: ``[Tk, Dv]``.
        sink: a number, or None. A query that sees no key has no sink either.
    """
    lse = torch.logsumexp(score, dim=-1)
    if sink is not None:
        lse = torch.where(lse > -torch.inf, torch.logaddexp(lse, sink), lse)
    return torch.exp(score - _zero_if_empty(lse)[:, None]) @ values, lse


def merge(states: Sequence[State]) -> State:
    """The state over all keys, of states ``[Tq, H, Dv]``, ``[Tq, H]`` over parts of the keys."""
    outs = torch.stack([_float64("out", out) for out, _ in states])  # [S, Tq, H, Dv]
    lses = torch.stack([lse.double() for _, lse in states])  # [S, Tq, H]
    top = _zero_if_empty(lses.amax(0))  # [Tq, H]
    weight = torch.exp(lses - top)
    total = weight.sum(0)
    out = (weight[..., None] * outs).sum(0) / torch.where(total > 0, total, 1)[..., None]
    return out, top + torch.log(total)


def mla_absorbed(
    ql_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, first_position: int, rules: Rules
) -> State:
    """The latent state of one request in an MLA layer: out ``[Tq, H, L]``, before W_UV.

    Args:
        ql_nope: ``[Tq, H, L]``, queries already multiplied by W_UK.
        q_pe: ``[Tq, H, r]``, their rotary part.
        kv_c: ``[Tk, L]``, latents.
        k_pe: ``[Tk, r]``, rotary keys.
        first_position: of the first query; keys are at 0 to Tk - 1.
        rules: of the layer for this request.
    """
    q = torch.cat([_float64("ql_nope", ql_nope), _float64("q_pe", q_pe)], -1)
    rows = torch.cat([_float64("kv_c", kv_c), _float64("k_pe", k_pe)], -1)  # [Tk, L + r]
    return attention(q, rows[:, None, :], kv_c[:, None, :], first_position, rules)


def mla_expanded(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    first_position: int,
    rules: Rules,
) -> State:
    """The state of one request in an MLA layer with keys and values expanded: out ``[Tq, H, V]``.

    Args:
        q_nope: ``[Tq, H, P]``, queries without their rotary part.
        q_pe: ``[Tq, H, r]``, their rotary part.
        kv_c: ``[Tk, L]``, latents.
        k_pe: ``[Tk, r]``, rotary keys.
        w_uk: ``[L, H, P]``, from latents to keys.
        w_uv: ``[L, H, V]``, from latents to values.
        first_position: of the first query; keys are at 0 to Tk - 1.
        rules: of the layer for this request.
    """
    num_heads = q_nope.shape[1]
    q = torch.cat([_float64("q_nope", q_nope), _float64("q_pe", q_pe)], -1)
    latent, rope = _float64("kv_c", kv_c), _float64("k_pe", k_pe)
    w_uk, w_uv = _float64("w_uk", w_uk), _float64("w_uv", w_uv)
    keys, values = [], []
    for head in range(num_heads):
        keys.append(torch.cat([latent @ w_uk[:, head], rope], -1))  # [Tk, P + r]
        values.append(latent @ w_uv[:, head])
    return attention(q, torch.stack(keys, 1), torch.stack(values, 1), first_position, rules)


def sparse_mla(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    topk_indices: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> State:
    """The latent state of one request where each query attends exactly the positions in its list.

    Args:
        ql_nope: ``[Tq, H, L]``, queries already multiplied by W_UK.
        q_pe: ``[Tq, H, r]``, their rotary part.
        kv_c: ``[Tk, L]``, latents.
        k_pe: ``[Tk, r]``, rotary keys.
        topk_indices: int ``[Tq, K]``, positions from 0 to Tk - 1; -1, anywhere in a row, names
            none. A position listed twice counts twice. A row of -1 only has out 0 and lse -inf.
        scale: multiplies q.k.
        sinks: ``[H]`` or None.

    Raises:
        ValueError: a list names a position that is not there.
    """
    listed = topk_indices.long().to(kv_c.device)
    wrong = ((listed < NO_TOKEN) | (listed >= len(kv_c))).any(-1).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"topk_indices[{wrong[0]}] must be -1 or 0..{len(kv_c) - 1}, got {listed[wrong[0]]}"
        )
    query, entry = (listed != NO_TOKEN).nonzero(as_tuple=True)
    # How often each query lists each key. A key that is listed twice counts as two equal keys.
    counts = kv_c.new_zeros(len(listed), len(kv_c), dtype=torch.float64)
    one = counts.new_ones(())
    counts.index_put_((query, listed[query, entry]), one, accumulate=True)
    # Rows that no list names are not looked at: they may be poison.
    named = counts.any(0)
    rows = torch.cat([_float64("kv_c", kv_c[named]), _float64("k_pe", k_pe[named])], -1)
    q = torch.cat([_float64("ql_nope", ql_nope), _float64("q_pe", q_pe)], -1).to(rows.device)
    values, log_counts = rows[:, : kv_c.shape[1]], counts[:, named].log()
    out, lse = q.new_zeros(*q.shape[:2], values.shape[1]), q.new_zeros(q.shape[:2])
    sinks = _sinks_of(sinks, q)
    for head in range(q.shape[1]):
        score = scale * (q[:, head] @ rows.T) + log_counts
        out[:, head], lse[:, head] = _weighted(
            score, values, None if sinks is None else sinks[head]
        )
    return out, lse


def index_logits(q_index: Tensor, k_index: Tensor, weights: Tensor, first_position: int) -> Tensor:
    """The indexer's score of each key for each query: float64 ``[Tq, Tk]``, -inf after the query.

    The score is the sum over heads of ``weight * relu(q.k)``.

    Args:
        q_index: ``[Tq, H, D]``.
        k_index: ``[Tk, D]``.
        weights: ``[Tq, H]``.
        first_position: of the first query; keys are at 0 to Tk - 1.
    """
    q_index, k_index = _float64("q_index", q_index), _float64("k_index", k_index)
    weights = _float64("weights", weights)
    logits = q_index.new_zeros(len(q_index), len(k_index))
    for head in range(q_index.shape[1]):
        logits += weights[:, head, None] * torch.relu(q_index[:, head] @ k_index.T)
    visible = mask(len(q_index), len(k_index), first_position, Rules(scale=1.0))
    return logits.masked_fill(~visible.to(logits.device), -torch.inf)


def index_topk(
    q_index: Tensor, k_index: Tensor, weights: Tensor, first_position: int, topk: int
) -> Tensor:
    """The positions that the indexer picks for each query: int32 ``[Tq, topk]``.

    They are ordered by :func:`index_logits`, highest first, of equal ones the lower position first;
    -1 fills up rows that have fewer.

    Args:
        q_index: ``[Tq, H, D]``.
        k_index: ``[Tk, D]``.
        weights: ``[Tq, H]``.
        first_position: of the first query; keys are at 0 to Tk - 1.
        topk: positions to pick.
    """
    logits = index_logits(q_index, k_index, weights, first_position)
    ordered, positions = torch.sort(logits, dim=-1, descending=True, stable=True)
    positions = positions.masked_fill(ordered == -torch.inf, NO_TOKEN)[:, :topk].int()
    missing = topk - positions.shape[1]
    return torch.nn.functional.pad(positions, (0, missing), value=NO_TOKEN)


def _float64(name: str, tensor: Tensor) -> Tensor:
    """``tensor`` in float64. NaN and infinity are refused: they come from slots of poison."""
    tensor = tensor.double()
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} has NaN or infinite entries")
    return tensor


def _per_head(name: str, tensor: Tensor, num_heads: int) -> Tensor:
    if tensor.shape != (num_heads,):
        raise ValueError(f"{name} must have shape [{num_heads}], got {tuple(tensor.shape)}")
    return tensor.double()


def _sinks_of(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """``[H]`` float64 on the device of queries ``[Tq, H, D]``, or None."""
    return None if sinks is None else _per_head("sinks", sinks, q.shape[1]).to(q.device)


def _zero_if_empty(lse: Tensor) -> Tensor:
    """``lse`` with 0 in place of -inf, so that ``x - lse`` stays -inf instead of becoming NaN."""
    return torch.where(lse == -torch.inf, 0.0, lse)
