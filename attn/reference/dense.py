"""Attention of one request and of a batch, with every masking rule of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from attn.reference.merge import merge_states
from builders.checks.masks import refuse_masks

SCORE_BYTES = 1 << 26
"""Most bytes of scores at a time, roughly: queries are sliced to stay below this number."""


@dataclass(frozen=True)
class AttentionRules:
    """Rules for one request: which keys a query sees, and how scores become weights."""

    scale: float
    """Multiplies q.k."""
    causal: bool = True
    """A query sees no key behind its own position; without it, every key of the request."""
    sliding_window: int | None = None
    """Visible keys, the token's own included; without ``causal``, that many to each side."""
    attention_chunk_size: int | None = None
    """Tokens of an aligned chunk. A query sees no keys before its own chunk and ``chunk_lookback``
    chunks before it. Chunks replace the window. Later chunks are hidden by ``causal`` alone."""
    chunk_lookback: int = 0
    logits_soft_cap: float | None = None
    """c in ``c * tanh(score / c)``; None means no cap."""
    alibi_slopes: torch.Tensor | None = None
    """``[H]`` slopes: scores get ``slope * (key position - query position)`` added."""
    use_alibi_sqrt: bool = False
    """Add ``-slope * sqrt(query position - key position)`` instead of the linear bias."""
    sinks: torch.Tensor | None = None
    """``[H]`` logits in the softmax denominator, and in the LSE, of rows that have keys."""
    mm_ranges: tuple[tuple[int, int], ...] = ()
    """Inclusive ranges of positions inside which every query sees every key, whatever ``causal``,
    window and chunks say."""
    mm_clamp_window: bool = False
    """Hide keys before the window inside ``mm_ranges`` too."""
    rswa_prefix_len: int | None = None
    """Length of a prefix that stays visible in addition to the window ``rswa_window``."""
    rswa_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse masks that mean nothing together.

        Raises:
            ValueError: two fields do not go together; the message names both.
        """
        chunk, window = self.attention_chunk_size, self.sliding_window
        if chunk is not None and window not in (None, chunk):
            raise ValueError(
                f"attention_chunk_size ({chunk}) takes the place of sliding_window, which must be "
                f"None or the same, got {window}"
            )
        if (self.rswa_prefix_len is None) != (self.rswa_window is None):
            raise ValueError(
                "rswa_prefix_len and rswa_window must be given together, got "
                f"{self.rswa_prefix_len} and {self.rswa_window}"
            )
        refuse_masks(self.causal, chunk, self.rswa_window)

    @property
    def is_plain_causal(self) -> bool:
        """True where every query sees all keys up to its own position."""
        limits = (self.sliding_window, self.attention_chunk_size, self.rswa_window)
        return self.causal and not self.mm_ranges and all(limit is None for limit in limits)


def visible_range(first: int, last: int, num_keys: int, rules: AttentionRules) -> tuple[int, int]:
    """Key positions ``[start, stop)`` outside of which no query in ``[first, last]`` sees a key."""
    start, stop = 0, num_keys
    if rules.causal:
        stop = min(stop, last + 1)
    if rules.attention_chunk_size is not None:
        chunk = first // rules.attention_chunk_size - rules.chunk_lookback
        start = chunk * rules.attention_chunk_size
    elif rules.sliding_window is not None and rules.rswa_window is None:
        start = first - rules.sliding_window + 1
        if not rules.causal:
            stop = min(stop, last + rules.sliding_window)
    for low, high in rules.mm_ranges:
        if low < high and low <= last and high >= first:
            start, stop = min(start, low), max(stop, min(high + 1, num_keys))
    return max(0, min(start, stop)), max(0, stop)


def visibility(
    queries: torch.Tensor, keys: torch.Tensor, rules: AttentionRules
) -> torch.Tensor | None:
    """Mask of the keys that each query sees; None where every query sees all.

    Args:
        queries: ``[T, 1]`` positions.
        keys: ``[1, S]`` positions, all below the request's length.
        rules: the request's rules.

    Returns:
        ``[T, S]`` bool, or None.
    """
    seen: torch.Tensor | None = None

    def also(condition: torch.Tensor) -> torch.Tensor:
        return condition if seen is None else seen & condition

    if rules.causal:
        seen = also(keys <= queries)
    if rules.attention_chunk_size is not None:
        size = rules.attention_chunk_size
        seen = also(queries // size - keys // size <= rules.chunk_lookback)
    if rules.rswa_window is not None:
        in_window = queries - keys < rules.rswa_window
        seen = also(in_window | (keys < (rules.rswa_prefix_len or 0)))
    elif rules.sliding_window is not None and rules.attention_chunk_size is None:
        seen = also(queries - keys < rules.sliding_window)
        if not rules.causal:
            seen = also(keys - queries < rules.sliding_window)
    if seen is None:
        return None
    for low, high in rules.mm_ranges:
        if low >= high:
            continue
        inside = (queries >= low) & (queries <= high) & (keys >= low) & (keys <= high)
        if rules.mm_clamp_window and rules.sliding_window is not None:
            inside &= queries - keys < rules.sliding_window
        seen = seen | inside
    return seen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    rules: AttentionRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over keys held in memory.

    Args:
        query: ``[T, H, D]``, float32 or float64.
        key: ``[S, Hk, D]``, same type.
        value: ``[S, Hk, Dv]``, same type.
        query_positions: ``[T]`` integer.
        key_positions: ``[S]`` integer.
        rules: the request's rules.

    Returns:
        ``[T, H, Dv]`` and natural LSE ``[T, H]``; zero and -inf for a query without keys.
    """
    num_tokens, num_heads, _ = query.shape
    num_keys, num_kv_heads, v_size = value.shape
    group = num_heads // num_kv_heads
    if num_keys == 0:
        empty = query.new_zeros((num_tokens, num_heads, v_size))
        return empty, query.new_full((num_tokens, num_heads), float("-inf"))
    seen = visibility(query_positions[:, None], key_positions[None, :], rules)
    if seen is not None:
        # A key that no query sees may hold NaN, and 0 * NaN would reach the sum.
        unseen = ~seen.any(0)
        if bool(unseen.any()):
            key = key.masked_fill(unseen[:, None, None], 0)
            value = value.masked_fill(unseen[:, None, None], 0)
    # [T, Hk, G, D] -> [Hk, G * T, D]
    rows = query.view(num_tokens, num_kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(rows * rules.scale, key.permute(1, 2, 0))
    scores = scores.view(num_heads, num_tokens, num_keys)
    if rules.logits_soft_cap is not None:
        scores = rules.logits_soft_cap * torch.tanh(scores / rules.logits_soft_cap)
    if rules.alibi_slopes is not None:
        scores = scores + _alibi(query_positions, key_positions, rules, scores.dtype)
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    peak = scores.amax(-1)
    has_keys = peak > float("-inf")
    sinks = None
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores)[:, None]
        peak = torch.where(has_keys, torch.maximum(peak, sinks), peak)
    peak = torch.where(has_keys, peak, 0)
    weights = scores.sub_(peak[..., None]).exp_()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + torch.where(has_keys, torch.exp(sinks - peak), 0)
    out = torch.bmm(weights.view(num_kv_heads, group * num_tokens, num_keys), value.transpose(0, 1))
    out = out.view(num_heads, num_tokens, v_size) / torch.where(has_keys, total, 1)[..., None]
    lse = torch.where(has_keys, peak + torch.log(total), float("-inf"))
    return out.transpose(0, 1), lse.transpose(0, 1)


def _alibi(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    rules: AttentionRules,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``[H, T, S]`` position bias in ``dtype``."""
    assert rules.alibi_slopes is not None
    distance = (key_positions[None, :] - query_positions[:, None]).to(dtype)
    if rules.use_alibi_sqrt:
        distance = -torch.sqrt((-distance).clamp(min=0))
    return rules.alibi_slopes[:, None, None].to(distance) * distance


ReadKV = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""Real keys and values of one request's positions ``[start, stop)``."""


def attend_request(
    query: torch.Tensor,
    read: ReadKV,
    first_position: int,
    num_keys: int,
    rules: AttentionRules,
    first_key: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request's new tokens, in slices of queries that bound memory.

    Args:
        query: ``[T, H, D]``, float32 or float64.
        read: returns keys and values of a range of positions; called for visible ranges only.
        first_position: position of the first query.
        num_keys: KV length of the request.
        rules: the request's rules.
        first_key: keys before this position are left out (a shared prefix, attended separately).

    Returns:
        ``[T, H, Dv]`` and LSE ``[T, H]``.
    """
    num_tokens, num_heads, _ = query.shape
    outs, lses = [], []
    row_bytes = num_heads * max(num_keys, 1) * query.element_size()
    step = max(1, min(num_tokens, SCORE_BYTES // row_bytes))
    for begin in range(0, num_tokens, step):
        part = query[begin : begin + step]
        first = first_position + begin
        start, stop = visible_range(first, first + len(part) - 1, num_keys, rules)
        start, stop = max(start, first_key), max(stop, first_key)
        key, value = read(start, stop)
        positions = torch.arange(first, first + len(part), device=query.device)
        keys = torch.arange(start, stop, device=query.device)
        out, lse = attend(part, key, value, positions, keys, rules)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@dataclass(frozen=True)
class Request:
    """One request of a batch."""

    start: int
    """Index of the request's first token in the batch."""
    stop: int
    """Index after the request's last token in the batch."""
    num_keys: int
    """KV length, this step's tokens included; in cross attention the encoder's length."""
    first_position: int
    """Position of the request's first token of this step."""
    rules: AttentionRules
    read: ReadKV


def attend_batch(
    query: torch.Tensor,
    requests: Iterable[Request],
    write: Callable[[slice, torch.Tensor, torch.Tensor], None],
    common_prefix_len: int = 0,
) -> None:
    """Attention of every request; with a shared prefix, merged from the prefix and the rest.

    Args:
        query: ``[T, H, D]`` in any float type.
        requests: the requests of the batch that have tokens.
        write: receives a slice of tokens, their output and their LSE, in the type of the
            arithmetic.
        common_prefix_len: number of leading positions with the same keys in all requests; used
            where every query sees all of them (plain causal rules).
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    for request in requests:
        tokens = slice(request.start, request.stop)
        part = query[tokens].to(dtype)
        prefix = common_prefix_len
        shared = request.rules.is_plain_causal and 0 < prefix <= request.first_position
        out, lse = attend_request(
            part,
            request.read,
            request.first_position,
            request.num_keys,
            request.rules,
            prefix if shared else 0,
        )
        if shared:
            # Merging adds denominators, so that only one of the two states may hold the sinks.
            rules = replace(request.rules, causal=False, sinks=None)
            before = attend_request(part, request.read, request.first_position, prefix, rules)
            out, lse = merge_states([before, (out, lse)])
        write(tokens, out, lse)
