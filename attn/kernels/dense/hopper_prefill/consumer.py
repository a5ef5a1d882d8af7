"""The consumers: warp groups that multiply, and write 64 query rows of a tile each."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attn.kernels.dense.hopper_prefill.scheduler import sum_of_own, wide
from attn.kernels.dense.hopper_prefill.steps import (
    anew,
    awaited,
    by_row,
    clear_behind,
    computed,
    first_scores,
    masked_tile,
    output_of,
    pack,
    part_told,
    referred_weights,
    rescaled,
    rows_of,
    scaled,
    scores_of,
    spread,
    store_rows,
    unpack,
    unreferred,
)
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.masks import biased
from attn.kernels.lang.opaque import opaque_zero

_LN2 = tl.constexpr(0.6931471805599453)
_EDGE, _INNER, _FAR = (gl.constexpr("mov.b32 $0, $1; // " + name) for name in ("a", "b", "c"))


@gluon.jit
def _softmax(
    scores, m, l, first_key, rows, kv_len, scaling, mask, shape, MASKED: gl.constexpr,
    FIRST: gl.constexpr = False,
):  # fmt: skip
    """Weights of a tile of scores and the row's new maximum, sum and what its past is worth.

    A row's scores are in four threads of a warp, which exchange maxima; sums stay by thread,
    ``[64, 4]``, until the row is written. The factor of ``scaling`` turns the maximum (of raw
    scores, or of log2 units under a soft cap) into log2 units. MASKED: a row may not see all of the
    tile's keys, which begin at ``first_key``. FIRST: there is no past.

    REFERRED: in place of the maximum a row has a reference that seldom changes, and what its past
    is worth is nearly always 1. Both are by thread, see
    :func:`attn.kernels.dense.hopper_prefill.steps.referred_weights`.
    """
    factor = scaling.factor
    if scaling.SOFT_CAP:
        scores = biased(scores * factor, None, None, scaling.soft_cap, True, 0, False)
        factor = 1.0
    if MASKED:
        scores = masked_tile(scores, first_key, rows, kv_len, mask)
    if shape.REFERRED:
        weights, shrink, top = referred_weights(scores, m, factor, scaling.SOFT_CAP, MASKED)
        sums = sum_of_own(weights)
        if not FIRST:
            sums = gl.fma(l, shrink, sums)
    else:
        weights, top, sums, shrink = _exact_softmax(scores, m, l, factor, MASKED, FIRST)
    return weights, top, sums, shrink


@gluon.jit
def _exact_softmax(scores, m, l, factor, MASKED: gl.constexpr, FIRST: gl.constexpr):
    """Softmax of masked scores, relative to the largest score of each row so far."""
    if MASKED:
        most = gl.max(scores, 1)
    else:
        # First the larger of each pair of scores: these operations do not wait for each other, and
        # a step issues in 1000 clocks. One reduction over all scores takes 1060.
        left, right = gl.split(gl.reshape(scores, [scores.shape[0], scores.shape[1] // 2, 2]))
        most = gl.convert_layout(gl.max(gl.maximum(left, right), 1), m.type.layout)
    if FIRST:
        top = most
    else:
        top = gl.maximum(m, most)
    if MASKED:
        # A row may see nothing of this tile.
        base = gl.where(top == float("-inf"), 0.0, top) * factor
    else:
        base = top * factor
    weights = gl.exp2(scores * factor - base[:, None])
    sums = sum_of_own(weights)
    shrink = base
    if not FIRST:
        shrink = gl.exp2(m * factor - base)
        own = gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))
        sums = gl.fma(l, own[:, None].broadcast_to(64, 4), sums)
    return weights, top, sums, shrink


@gluon.jit
def _step(
    i, done, place, is_last, acc, rest, pairs, m, l, tile, rows, queries, rings, scaling, mask,
    shape, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``i`` of keys (from the last), output of the tile before it.

    The queries are those of ``place`` in their ring; ``done`` tiles of keys have been walked for
    queries before them. Both products are issued and waited for here: one in flight over a loop's
    edge would be serialised by ptxas. Keys are given back before the softmax, so that the next are
    on their way under it, and so are queries of which there is one stage; narrow heads lose more to
    the barrier than they gain.
    """
    EARLY: gl.constexpr = shape.WIDTH + shape.EXTRA > 64
    OUTPUT: gl.constexpr = shape.OUTPUT
    left = unpack(pairs, shape.VALUE, shape.KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
    now = done + i
    before = now - 1
    rings.keys.wait_full(now)
    scores = scores_of(place, now, queries, rings.keys, shape)
    rings.values.wait_full(before)
    acc, rest = output_of(left, before, acc, rest, rings.values)
    scores = warpgroup_mma_wait(2 if rings.values.EXTRA > 0 else 1, deps=[scores])
    # Each is a barrier of the warp group: side by side they cost one.
    if EARLY:
        rings.keys.give_back(now)
    if queries.STAGES == 1:
        mbarrier.arrive(queries.empty.index(0), count=1, pred=is_last)
    weights, m, l, shrink = _softmax(
        scores, m, l, (tile.high - 1 - i) * shape.KV_TILE, rows, tile.kv_len, scaling, mask, shape,
        MASKED,
    )  # fmt: skip
    if shape.HELD:
        l = computed(l)
    acc, rest = awaited(acc, rest, rings.values, 0)
    if rings.JOINT:
        rings.keys.give_back(now)
    else:
        if not EARLY:
            rings.keys.give_back(now)
        rings.values.give_back(before)
    acc = _with_factor(acc, shrink, shape)
    if rings.values.EXTRA > 0:
        rest = _with_factor(rest, shrink, shape)
    return acc, rest, pack(weights, shape.VALUE, shape.KV_TILE), m, l


@gluon.jit
def _with_factor(x, shrink, shape):
    """Rows of an output, each multiplied by what its past is worth."""
    if shape.REFERRED:
        x = rescaled(x, spread(shrink, x))
    else:
        x = scaled(x, shrink)
    return x


@gluon.jit
def _write(m, l, acc, rest, tile, scaling, v_factor, out, values, shape):
    """Normalise a warp group's rows of a tile, and write those whose tokens the request has."""
    PACKED: gl.constexpr = shape.PACKED
    if shape.REFERRED:
        m = by_row(m, shape)
    SUMS: gl.constexpr = m.type.layout
    row = gl.arange(0, 64, layout=SUMS)
    wanted = row // PACKED < tile.left
    at = (tile.row + row // PACKED).to(gl.int64)
    some = m > float("-inf")
    l = gl.convert_layout(gl.sum(l, 1), SUMS)
    if not (scaling.SOFT_CAP or shape.REFERRED):
        m = m * scaling.factor
    if out.SINKS:
        sink = gl.load(out.sinks_ptr + tile.head * PACKED + row % PACKED).to(gl.float32) * LOG2E
        top = gl.where(some, gl.maximum(m, sink), m)
        base = gl.where(some, top, 0.0)
        shrink = gl.exp2(m - base)
        l = l * shrink + gl.where(some, gl.exp2(sink - base), 0.0)
        acc = scaled(acc, shrink)
        if values.EXTRA > 0:
            rest = scaled(rest, shrink)
        m = top
    inverse = v_factor / gl.where(some, l, 1.0)
    if out.FP8_OUT:
        inverse = inverse / gl.load(out.output_scale_ptr)
    store_rows(scaled(acc, inverse), 0, tile, tile.left, out, shape)
    if values.EXTRA > 0:
        store_rows(scaled(rest, inverse), shape.WIDTH, tile, tile.left, out, shape)
    if out.LSE:
        lse = gl.where(some, (m + gl.log2(l)) * _LN2, float("-inf"))
        lse_ptr = out.lse_ptr + at * wide(out.lse_token) + tile.head * PACKED + row % PACKED
        gl.store(lse_ptr, lse, mask=wanted)


@gluon.jit
def _factors(head, scaling, cache, shape):
    """The factors of scores and of outputs of a tile of heads."""
    factor = scaling.factor
    v_factor = 1.0
    if shape.KIND != 0:
        at = (head * shape.PACKED // shape.GROUP) * cache.scale_head
        factor = factor * gl.load(cache.k_scale_ptr + at)
        v_factor = gl.load(cache.v_scale_ptr + at)
    return factor, v_factor


@gluon.jit
def _first_weights(scores, now, tile, queries, keys, scaling, mask, shape):
    """Weights, maximum and sum of a tile's first keys, the last that any row of it sees.

    Waits for their scores, and gives back the keys, and queries that are not needed any more.
    """
    scores = warpgroup_mma_wait(0, deps=[scores])
    keys.give_back(now, tile.high > 0)
    if queries.STAGES == 1:
        is_last = (tile.high > 0) & (tile.high - tile.low == 1)
        mbarrier.arrive(queries.empty.index(0), count=1, pred=is_last)
    rows = rows_of(tile, mask, shape)
    if shape.REFERRED:
        m = unreferred(scores)
    else:
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, shape.SCORES))
    weights, m, l, _ = _softmax(
        scores, m, m, (tile.high - 1) * shape.KV_TILE, rows, tile.kv_len, scaling, mask, shape,
        True, True,
    )  # fmt: skip
    return pack(weights, shape.VALUE, shape.KV_TILE), m, l


@gluon.jit
def _tiles_seen(tile, rows, mask, KV_TILE: gl.constexpr):
    """How many tiles of keys a tile of queries walks, and ``[inner, outer)`` of them, counted from
    the last, of which every row sees all.
    """
    all_low, all_high = mask.seen_by_all(rows.first, rows.last, tile.kv_len, tile.causal)
    count = tile.high - tile.low
    inner = gl.minimum(gl.maximum(tile.high - all_high // KV_TILE, 1), count)
    outer = count
    if mask.WINDOW or mask.CHUNK:
        outer = gl.maximum(tile.high - (all_low + KV_TILE - 1) // KV_TILE, inner)
        outer = gl.minimum(outer, count)
    return count, inner, outer


@gluon.jit
def consume(PART: gl.constexpr, queries, rings, cache, scaling, mask, out, shape):
    """A warp group: rows ``[64 * PART, 64 * PART + 64)`` of every tile.

    The last output of a tile and the first scores of the next are issued together; the finished
    tile is written under the latter. Every warp group takes every tile of keys, also where none of
    its own rows sees one: it would wait for the others otherwise.
    """
    OUTPUT: gl.constexpr = shape.OUTPUT
    turn = 0
    done = 0
    parity = 0
    mbarrier.wait(queries.full.index(0), 0)
    tile = part_told(PART, 0, queries, shape)
    scores = first_scores(PART, done, tile, queries, rings.keys, shape)
    factor, v_factor = _factors(tile.head, scaling, cache, shape)
    pairs, m, l = _first_weights(
        scores, done, tile, queries, rings.keys, scaling.with_factor(factor), mask, shape
    )
    while tile.high > 0:
        # Made anew: a structure that the loop carries brings its soft cap along, also where nobody
        # reads it, and PTX would be another.
        of_tile = scaling.with_factor(factor)
        rows = rows_of(tile, mask, shape)
        count, inner, outer = _tiles_seen(tile, rows, mask, shape.KV_TILE)
        parity = clear_behind(PART, done, parity, tile, rings, shape)
        acc = gl.zeros([64, shape.WIDTH], gl.float32, OUTPUT)
        rest = m
        if rings.values.EXTRA > 0:
            rest = gl.zeros([64, shape.EXTRA], gl.float32, shape.EXTRA_OUTPUT)
        place = (turn % queries.STAGES) * shape.WARP_GROUPS + PART
        # The state is no structure: the loop around these carries all of it but the output.
        for i in range(1, inner):
            acc, rest, pairs, m, l = _step(
                i, done, anew(place, _EDGE), i == count - 1, acc, rest, pairs, m, l, tile, rows,
                queries, rings, of_tile, mask, shape, True,
            )  # fmt: skip
        for i in range(inner, outer):
            acc, rest, pairs, m, l = _step(
                i, done, anew(place, _INNER), i == count - 1, acc, rest, pairs, m, l, tile, rows,
                queries, rings, of_tile, mask, shape, False,
            )  # fmt: skip
        if mask.WINDOW or mask.CHUNK:
            for i in range(outer, count):
                acc, rest, pairs, m, l = _step(
                    i, done, anew(place, _FAR), i == count - 1, acc, rest, pairs, m, l, tile, rows,
                    queries, rings, of_tile, mask, shape, True,
                )  # fmt: skip
        if queries.STAGES > 1:
            mbarrier.arrive(queries.empty.index(turn % queries.STAGES), count=1)
        weights = unpack(pairs, shape.VALUE, shape.KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
        done += count
        before = done - 1
        rings.values.wait_full(before)
        acc, rest = output_of(weights, before, acc, rest, rings.values)
        # The next tile. After the last one its scores are of whatever is there.
        finished = tile
        turn += 1
        stage = turn % queries.STAGES
        queries.wait_full(turn)
        tile = part_told(PART, stage, queries, shape)
        # The opaque zero hides the address: with one stage the compiler would keep the operands'
        # addresses in registers from the first tile on.
        place = stage * shape.WARP_GROUPS + PART + opaque_zero()
        scores = first_scores(place, done, tile, queries, rings.keys, shape)
        acc, rest = awaited(acc, rest, rings.values, 2 if shape.EXTRA > 0 else 1)
        if not rings.JOINT:
            rings.values.give_back(before)
        _write(m, l, acc, rest, finished, of_tile, v_factor, out, rings.values, shape)
        factor, v_factor = _factors(tile.head, scaling, cache, shape)
        pairs, m, l = _first_weights(
            scores, done, tile, queries, rings.keys, scaling.with_factor(factor), mask, shape
        )
