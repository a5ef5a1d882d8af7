"""Masks and biases: which keys a query sees, and what is added to its scores.

Scores are ``[query rows, keys]``. A position is counted from the first token of the request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.numerics import product
from builders.splitkv.device.segments import first_visible


@triton.jit
def is_visible(
    query, key, reach, kv_len, prefix, range_first, range_last, mask, RSWA: tl.constexpr
):
    """Whether a query sees a key, bool, for positions that broadcast against each other.

    Args:
        query: int32, positions of queries.
        key: int32, positions of keys.
        reach: int32, the last key that causality and KV length leave to a query
            (:func:`reach_of`).
        kv_len: int32, keys of the request.
        prefix: int32, number of first keys that all queries see; read with RSWA.
        range_first: int32, the first key of a query's own ranges (:func:`own_range`).
        range_last: int32, the last key of a query's own ranges.
        mask: a ``Mask`` of :mod:`attn.kernels.lang.groups` or of its twin in ``structures``.
        RSWA: whether queries see a window and the prefix only.
    """
    seen = key <= reach
    if mask.CHUNK:
        seen = seen & (query // mask.chunk - key // mask.chunk <= mask.lookback)
    if RSWA:
        seen = seen & ((query - key < mask.window) | (key < prefix))
    elif mask.WINDOW and not mask.CHUNK:
        seen = seen & (query - key < mask.window)
        if mask.CAUSAL != 1:
            seen = seen & (key - query < mask.window)
    if mask.RANGES:
        inside = (key >= range_first) & (key <= range_last) & (key < kv_len)
        if mask.CLAMP:
            inside = inside & (query - key < mask.window)
        seen = seen | inside
    return seen


@triton.jit
def masked(
    scores, query, key, reach, kv_len, prefix, range_first, range_last, mask, RSWA: tl.constexpr
):
    """Scores ``[M, N]`` of queries ``[M]`` and keys ``[N]``, -inf where a query does not see.

    ``reach``, ``range_first`` and ``range_last`` are ``[M]``; :func:`is_visible` describes them and
    the other arguments.
    """
    seen = is_visible(
        query[:, None], key[None, :], reach[:, None], kv_len, prefix, range_first[:, None],
        range_last[:, None], mask, RSWA,
    )  # fmt: skip
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def own_range(query, ranges_ptr, num_ranges):
    """The first and the last key of the ranges that a query lies in.

    The first is above the last for a query in no range. Ranges that share a query have no gap
    between them, so that two numbers describe them all.
    """
    first = query * 0 + 2147483647
    last = query * 0 - 1
    for i in range(num_ranges):
        low = tl.load(ranges_ptr + 2 * i)
        high = tl.load(ranges_ptr + 2 * i + 1)
        inside = (low < high) & (query >= low) & (query <= high)
        first = tl.where(inside, tl.minimum(first, low), first)
        last = tl.where(inside, tl.maximum(last, high), last)
    return first, last


@triton.jit
def reach_of(query, kv_len, causal, CAUSAL: tl.constexpr):
    """The last key that causality and the KV length leave to a query.

    CAUSAL is 0 (never causal), 1 (always causal) or 2 (causal where ``causal`` is not 0).
    """
    reach = query * 0 + kv_len - 1
    if CAUSAL == 1:
        reach = tl.minimum(query, reach)
    elif CAUSAL == 2:
        reach = tl.where(causal != 0, tl.minimum(query, reach), reach)
    return reach


@triton.jit
def last_visible(first, last, kv_len, causal, ranges_ptr, mask, RSWA: tl.constexpr):
    """The end (exclusive) of the keys that queries at positions ``[first, last]`` may see.

    ``ranges_ptr`` points to the request's ranges ``[num_ranges, 2]``; ``causal`` is not 0 where the
    request is causal, and is read where ``mask.CAUSAL`` is 2.
    """
    stop = kv_len
    if mask.CAUSAL == 1:
        stop = tl.minimum(kv_len, last + 1)
    elif mask.CAUSAL == 2:
        stop = tl.where(causal != 0, tl.minimum(kv_len, last + 1), kv_len)
    if mask.WINDOW and not mask.CHUNK and not RSWA and mask.CAUSAL != 1:
        stop = tl.minimum(stop, last + mask.window)
    if mask.RANGES:
        for i in range(mask.num_ranges):
            low = tl.load(ranges_ptr + 2 * i)
            high = tl.load(ranges_ptr + 2 * i + 1)
            meets = (low < high) & (low <= last) & (high >= first)
            stop = tl.where(meets, tl.maximum(stop, tl.minimum(high + 1, kv_len)), stop)
    return stop


@triton.jit
def seen_by_all(first, last, kv_len, causal, mask, RSWA: tl.constexpr):
    """Keys ``[low, high)`` that every query at positions ``[first, last]`` sees.

    Prefixes and ranges are left out: they can only add keys. ``causal`` is read where
    ``mask.CAUSAL`` is 2.
    """
    low = first_visible(
        last, last, mask.window, mask.chunk, mask.lookback, None, 0,
        mask.WINDOW or mask.CHUNK or RSWA, mask.CHUNK, False, False,
    )  # fmt: skip
    high = kv_len
    if mask.CAUSAL == 1:
        high = tl.minimum(kv_len, first + 1)
    elif mask.CAUSAL == 2:
        high = tl.where(causal != 0, tl.minimum(kv_len, first + 1), kv_len)
    if mask.WINDOW and not mask.CHUNK and not RSWA and mask.CAUSAL != 1:
        high = tl.minimum(high, first + mask.window)
    return low, high


@triton.jit
def biased(
    scores, distance, slope, soft_cap, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    EXACT: tl.constexpr, ROUNDS: tl.constexpr = False,
):  # fmt: skip
    """Apply soft cap and position bias to scores; the result is in units of log 2.

    ``scores`` come in natural units with SOFT_CAP, else already multiplied by log2(e).
    ``distance`` is the key's position minus the query's. ALIBI is 0 (none), 1 (linear) or 2 (square
    root). With EXACT, small scores keep their last bits under a soft cap. With ROUNDS the result is
    rounded, however a kernel goes on with it (see :func:`attn.kernels.lang.numerics.product`).
    """
    if SOFT_CAP:
        # c * tanh(x / c); exp2 saturates on both sides, so that tanh becomes exactly +-1.
        turns = tl.exp2(scores * (2.0 * LOG2E / soft_cap))
        bounded = 1.0 - 2.0 / (turns + 1.0)
        if EXACT:
            # The difference above loses bits near 0, where the series of tanh does not.
            y = scores / soft_cap
            z = y * y
            series = y * (1.0 + z * (-1.0 / 3.0 + z * (2.0 / 15.0 + z * (-17.0 / 315.0))))
            bounded = tl.where(tl.abs(y) < 0.1, series, bounded)
        if ROUNDS:
            scores = product(bounded, soft_cap * LOG2E)
        else:
            scores = (soft_cap * LOG2E) * bounded
    if ALIBI == 1:
        scores = tl.fma((slope * LOG2E)[:, None], distance.to(tl.float32), scores)
    elif ALIBI == 2:
        away = tl.sqrt(tl.maximum(-distance, 0).to(tl.float32))
        scores = tl.fma((-slope * LOG2E)[:, None], away, scores)
    return scores
