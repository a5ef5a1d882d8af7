"""The loop over key tiles that both portable kernels share: paged rows, scores, online softmax.

Scores are ``[query rows, keys]``, and so are all tensors that broadcast against them. A position is
counted from the first token of the request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.lang.groups import State
from attn.kernels.lang.masks import biased, last_visible, masked, own_range, reach_of
from attn.kernels.lang.numerics import product
from attn.kernels.lang.stored import PLAIN, plane_of
from builders.splitkv.device.segments import first_visible, segment_of, segment_start

_PLAIN = tl.constexpr(PLAIN)
_SLACK = tl.constexpr(8.0)
"""By how much a row's reference may be exceeded, in units of log 2: weights are at most 2^8."""


@triton.jit
def _near_runs(
    tile, low, high, hole, SUB: tl.constexpr, PAGES: tl.constexpr, LOW: tl.constexpr,
    HOLE: tl.constexpr,
):  # fmt: skip
    """The runs of ``SUB`` tokens of a tile, moved to the nearest slots that may be read.

    Slots in ``[low, high)`` may be read, where low is 0 without LOW. With HOLE, slots below
    ``hole`` may be read too.

    Returns:
        The number of each run, and the first and the last slot that it may read; all ``[PAGES]``.
    """
    run = tile * PAGES + tl.arange(0, PAGES)
    first = run * 0 + low
    last = run * 0 + tl.maximum(high - 1, 0)
    if HOLE:
        early = run * SUB < hole
        first = tl.where(early, 0, first)
        last = tl.where(early, hole - 1, last)
    if LOW:
        run = tl.maximum(run, first // SUB)
    return tl.minimum(run, last // SUB), first, last


@triton.jit
def page_ids(
    table_ptr, tile, low, high, hole, SUB: tl.constexpr, PARTS: tl.constexpr, PAGES: tl.constexpr,
    LOW: tl.constexpr, HOLE: tl.constexpr,
):  # fmt: skip
    """The physical block of each run of ``SUB`` tokens of a tile, ``[PAGES]``.

    A page is cut into PARTS runs, so that pages of any multiple of 16 tokens fit tiles. Only table
    entries of slots that may be read are loaded: other entries are undefined.
    """
    run, _, _ = _near_runs(tile, low, high, hole, SUB, PAGES, LOW, HOLE)
    return tl.load(table_ptr + run // PARTS)


@triton.jit
def paged_rows(
    pages, tile, low, high, hole, stride_block, stride_token, CLAMP: tl.constexpr,
    SUB: tl.constexpr, PARTS: tl.constexpr, PAGES: tl.constexpr, LOW: tl.constexpr,
    HOLE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The int64 offset of each token of a tile, ``[PAGES * SUB]``.

    With CLAMP, a token whose slot must not be read gets the offset of the nearest slot that may be
    read. A slot that must not be read can hold NaN, and a weight of 0 times NaN is NaN.
    """
    step = tl.arange(0, SUB)[None, :]
    if CLAMP:
        run, first, last = _near_runs(tile, low, high, hole, SUB, PAGES, LOW, HOLE)
        token = (tile * (PAGES * SUB) + tl.arange(0, PAGES) * SUB)[:, None] + step
        if LOW:
            token = tl.maximum(token, first[:, None])
        token = tl.minimum(token, last[:, None])
        within = token - (run // PARTS * (PARTS * SUB))[:, None]
    else:
        run = tile * PAGES + tl.arange(0, PAGES)
        within = (run % PARTS * SUB)[:, None] + step
    rows = (pages.to(tl.int64) * stride_block)[:, None] + within * stride_token
    # The hint belongs inside this function. Triton drops a hint on the result of a call, and
    # without the hint it does not copy the rows asynchronously.
    return tl.multiple_of(tl.reshape(rows, [PAGES * SUB]), ALIGN)


@triton.jit
def recomputed(number, DECODE: tl.constexpr):
    """``number``, hidden from the compiler (a move in inline assembly that it cannot see through).

    The compiler computes values that depend on the result again after a loop. Otherwise it would
    keep them in registers that the loop needs. With DECODE PLAIN (no PTX) nothing is hidden.
    """
    if DECODE != _PLAIN:
        number = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )
    return number


@triton.jit
def barrier_and(number, DECODE: tl.constexpr):
    """``number``, behind a barrier of the program's threads that Triton does not see."""
    if DECODE != _PLAIN:
        number = tl.inline_asm_elementwise(
            "bar.sync 0;\n\tmov.b32 $0, $1;",
            "=r,r",
            [number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return number


@triton.jit
def power_of_two_guard(largest):
    """fp32 powers of two g and 1 / g; ``largest * g`` is in [2^10, 2^11), so fp16 can hold it."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    # The bounds keep g and 1 / g finite for zero and for subnormal numbers.
    exponent = tl.minimum(tl.maximum(exponent, 20), 240)
    down = ((264 - exponent) << 23).to(tl.float32, bitcast=True)
    up = ((exponent - 10) << 23).to(tl.float32, bitcast=True)
    return down, up


@triton.jit
def dot(a, b, accumulator, IEEE: tl.constexpr):
    """``accumulator + a @ b`` in fp32; fp32 operands are not rounded to tf32."""
    if IEEE:
        result = tl.dot(a, b, accumulator, input_precision="ieee")
    else:
        result = tl.dot(a, b, accumulator)
    return result


@triton.jit
def halves_of(x):
    """The left and the right half of the columns of ``x [M, W]``, each ``[M, W / 2]``."""
    parts = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def scores_of(query, keys, accumulator, IEEE: tl.constexpr):
    """``accumulator + query @ keys.T``.

    With IEEE (fp32 operands) the sum over columns is cut into short sums: the rounding error of a
    sum grows with its length.
    """
    PARTS: tl.constexpr = query.shape[1] // 32
    if IEEE and PARTS > 4:
        q0, q1 = halves_of(query)
        k0, k1 = halves_of(keys)
        zero = tl.zeros_like(accumulator)
        left = scores_of(q0, k0, zero, IEEE)
        result = accumulator + (left + scores_of(q1, k1, zero, IEEE))
    elif IEEE and PARTS > 1:
        q = tl.permute(tl.reshape(query, [query.shape[0], PARTS, 32]), (1, 0, 2))
        k = tl.permute(tl.reshape(keys, [keys.shape[0], PARTS, 32]), (1, 2, 0))
        result = accumulator + tl.sum(tl.dot(q, k, input_precision="ieee"), 0)
    else:
        result = dot(query, tl.trans(keys), accumulator, IEEE)
    return result


@triton.jit
def fold(m, l, acc, m_new, l_new, acc_new):
    """Fold the states (maximum, sum, accumulator) of two runs of keys into the state of both.

    Kernels whose states must agree bit for bit all fold through this function, or through those
    that it calls, so that they round in the same order.
    """
    top, old, new = fold_factors(m, m_new)
    sums = weighted(l, old, l_new, new)
    return top, sums, weighted(acc, old[:, None], acc_new, new[:, None])


@triton.jit
def fold_factors(m, m_new):
    """The maximum of two states, and the factor that the sums of each get, from their maxima."""
    top = tl.maximum(m, m_new)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(m - base), tl.exp2(m_new - base)


@triton.jit
def weighted(x, old, x_new, new):
    """``x * old + x_new * new``.

    The fma is explicit: a compiler that chooses by itself could choose differently in two kernels,
    and their bits would differ.
    """
    return tl.fma(x, old, x_new * new)


@triton.jit
def store_state(
    states_ptr, sums_ptr, slot, m, l, acc0, acc1, acc2, acc3, USED: tl.constexpr,
    WIDTH: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Store the state of one segment in its slot of the scratch, which holds USED rows."""
    row = tl.arange(0, m.shape[0])
    column = tl.arange(0, WIDTH)
    mine = row < USED
    slot = slot.to(tl.int64)
    tl.store(sums_ptr + slot * 2 * USED + row, m, mask=mine)
    tl.store(sums_ptr + slot * 2 * USED + USED + row, l, mask=mine)
    at = tl.multiple_of(states_ptr + slot * (USED * WIDTH * PLANES), 16)
    cells = at + row[:, None] * (WIDTH * PLANES) + column[None, :]
    tl.store(cells, acc0, mask=mine[:, None])
    if PLANES > 1:
        tl.store(cells + WIDTH, acc1, mask=mine[:, None])
    if PLANES > 2:
        tl.store(cells + 2 * WIDTH, acc2, mask=mine[:, None])
        tl.store(cells + 3 * WIDTH, acc3, mask=mine[:, None])


@triton.jit
def causal_and_prefix(req, kv_len, mask):
    """Whether a request is causal, int32, and the number of its first keys that all queries see."""
    causal = 1
    if mask.CAUSAL == 2:
        causal = tl.load(mask.causal_ptr + req).to(tl.int32)
    prefix = 0
    if mask.RSWA:
        # Engines may pass the largest int32 for "all keys"; rounding that up to a tile would
        # overflow.
        prefix = tl.minimum(tl.load(mask.prefix_ptr + req), kv_len)
    return causal, prefix


@triton.jit
def keys_seen(first, last, kv_len, causal, ranges_ptr, mask):
    """The keys ``[start, stop)`` that queries from position ``first`` to ``last`` may see.

    ``ranges_ptr`` points to the request's ranges ``[num_ranges, 2]``. Prefixes are left out.
    """
    start = first_visible(
        first, last, mask.window, mask.chunk, mask.lookback, ranges_ptr, mask.num_ranges,
        mask.WINDOW or mask.CHUNK or mask.RSWA, mask.CHUNK, mask.RANGES, mask.CLAMP,
    )  # fmt: skip
    return start, last_visible(first, last, kv_len, causal, ranges_ptr, mask, mask.RSWA)


@triton.jit
def readable(start, prefix, cache, mask, KV_TILE: tl.constexpr):
    """Which slots of a request may be read: those from ``safe_low`` on, and those below ``hole``.

    Queries see keys from ``start`` on, and with RSWA the first ``prefix`` keys.
    """
    RUN: tl.constexpr = (
        KV_TILE if cache.BLOCK_SIZE % KV_TILE == 0 else (cache.BLOCK_SIZE & -cache.BLOCK_SIZE)
    )
    safe_low = start
    hole = 0
    if mask.RSWA:
        # Slots between prefix and window, if any, are seen by no query: never read them.
        apart = tl.cdiv(prefix, RUN) * RUN < start
        safe_low = tl.where(apart, start, 0)
        hole = tl.where(apart, prefix, 0)
    return safe_low, hole


@triton.jit
def empty_state(m, l, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The state of no keys, from its maxima and sums; its outputs are ``[ROWS, WIDTH]``."""
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    return State(m, l, acc, acc, acc, acc)


@triton.jit
def fold_states(state, m, l, new, PLANES: tl.constexpr):
    """Fold two states of PLANES planes; ``m`` and ``l`` replace those of the second, ``new``."""
    top, sums, acc0 = fold(state.m, state.l, state.acc0, m, l, new.acc0)
    acc1 = state.acc1
    acc2 = state.acc2
    acc3 = state.acc3
    if PLANES > 1:
        _, _, acc1 = fold(state.m, state.l, acc1, m, l, new.acc1)
    if PLANES > 2:
        _, _, acc2 = fold(state.m, state.l, acc2, m, l, new.acc2)
        _, _, acc3 = fold(state.m, state.l, acc3, m, l, new.acc3)
    return State(top, sums, acc0, acc1, acc2, acc3)


@triton.jit
def opened(number, begin, UNIT: tl.constexpr):
    """Whether a segment begins at one of the tiles ``[begin, number)`` of UNIT positions."""
    return segment_start(segment_of(number * UNIT - 1)) >= begin * UNIT


@triton.jit
def fold_into_slot(total, m, l, new, stored, scratch, DECODE: tl.constexpr):
    """Fold the state ``new`` into ``total``, whose outputs are in the program's second slot.

    ``m`` and ``l`` replace those of ``new``. The outputs of ``total`` in registers are not used.
    Unless something is ``stored``, they are 0. States have one plane or two.
    """
    CELLS: tl.constexpr = scratch.WIDTH * scratch.PLANES
    slot = tl.program_id(0) + tl.num_programs(0)
    row = tl.arange(0, total.m.shape[0])
    # Threads load what other threads stored. Triton pipelines no loop that holds
    # one of its own barriers.
    slot = barrier_and(slot, DECODE)
    # The compiler does not know how the scratch is aligned.
    at = scratch.states_ptr + slot.to(tl.int64) * (scratch.USED * CELLS)
    rows_at = tl.multiple_of(at, 16) + row[:, None] * CELLS
    _fold_columns(total.m, total.l, m, l, new.acc0, rows_at, stored)
    if scratch.PLANES > 1:
        _fold_columns(total.m, total.l, m, l, new.acc1, rows_at + scratch.WIDTH, stored)
    top, sums, _ = fold(total.m, total.l, total.l[:, None], m, l, l[:, None])
    return State(top, sums, total.acc0, total.acc1, total.acc2, total.acc3)


@triton.jit
def _fold_columns(m, l, m_new, l_new, acc, rows_at, stored):
    """Fold outputs ``acc [ROWS, N]`` into stored ones, whose rows begin at ``rows_at [ROWS, 1]``.

    Few columns at a time, since layouts change through shared memory, of which the loop over keys
    leaves little.
    """
    COLUMNS: tl.constexpr = acc.shape[1]
    if COLUMNS > 32:
        left, right = halves_of(acc)
        _fold_columns(m, l, m_new, l_new, left, rows_at, stored)
        _fold_columns(m, l, m_new, l_new, right, rows_at + COLUMNS // 2, stored)
    else:
        column = tl.arange(0, COLUMNS)[None, :]
        cells = rows_at + column
        before = tl.load(cells, mask=(column >= 0) & stored, other=0.0, cache_modifier=".cg")
        _, _, after = fold(m, l, before, m_new, l_new, acc)
        tl.store(cells, after)


@triton.jit
def sum_of_columns(x, SUMS: tl.constexpr):
    """The sum of the columns of ``x [ROWS, N]``, N a power of two.

    With SUMS it is a tree of sums of two numbers, whose bits do not depend on how threads share the
    tile out, and so not on its number of rows. A thread has its columns in pairs: these are added
    first, then those of neighbouring threads, then those of warps.
    """
    result = x
    if SUMS > 0:
        ROWS: tl.constexpr = x.shape[0]
        pairs = tl.sum(tl.reshape(x, [ROWS, x.shape[1] // 8, 2, 2, 2]), 4)
        result = tl.reshape(halved(tl.sum(tl.sum(pairs, 3), 2), 1), [ROWS])
    else:
        result = tl.sum(x, 1)
    return result


@triton.jit
def halved(x, COLUMNS: tl.constexpr):
    """Add the right half of the columns of ``x [ROWS, N]`` to the left until COLUMNS are left."""
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    result = x
    if HALF >= COLUMNS:
        result = halved(tl.sum(tl.reshape(x, [ROWS, 2, HALF]), 1), COLUMNS)
    return result


@triton.jit
def closed_state(state, queries, query, tile):
    """The maxima, in units of log 2, and the sums of a ``state`` whose sums are kept by column."""
    sums = sum_of_columns(state.l, tile.SUMS)
    highest = state.m
    if query.SIMPLE and tile.SUMS == 0:
        # Some states are folded in registers, some are stored first: the bits must be the same.
        highest = product(state.m, queries.scale)
    return highest, sums


@triton.jit
def store_planes(scratch, slot, m, l, state):
    """Store a state in a slot of ``scratch``; ``m`` and ``l`` ``[ROWS]`` replace its own."""
    store_state(
        scratch.states_ptr, scratch.sums_ptr, slot, m, l, state.acc0, state.acc1, state.acc2,
        state.acc3, scratch.USED, scratch.WIDTH, scratch.PLANES,
    )  # fmt: skip


@triton.jit
def _pages_of(number, keys, cache, mask, KV_TILE: tl.constexpr):
    """The page of each run of tokens of tile ``number``, int32."""
    SUB: tl.constexpr = (
        KV_TILE if cache.BLOCK_SIZE % KV_TILE == 0 else (cache.BLOCK_SIZE & -cache.BLOCK_SIZE)
    )
    PARTS: tl.constexpr = cache.BLOCK_SIZE // SUB
    LOW: tl.constexpr = mask.WINDOW or mask.CHUNK or mask.RSWA
    return page_ids(
        keys.table_ptr, number, keys.safe_low, keys.kv_len, keys.hole, SUB, PARTS, KV_TILE // SUB,
        LOW, mask.RSWA,
    )  # fmt: skip


@triton.jit
def _rows_of(
    pages, number, keys, stride_block, stride_token, cache, mask, KV_TILE: tl.constexpr,
    CLAMP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The int64 offset of each token of tile ``number``, whose pages :func:`_pages_of` found.

    The strides are those of the cache's keys, of its values or of their factors. CLAMP says that
    some of the tokens may be in slots that must not be read.
    """
    SUB: tl.constexpr = (
        KV_TILE if cache.BLOCK_SIZE % KV_TILE == 0 else (cache.BLOCK_SIZE & -cache.BLOCK_SIZE)
    )
    PARTS: tl.constexpr = cache.BLOCK_SIZE // SUB
    LOW: tl.constexpr = mask.WINDOW or mask.CHUNK or mask.RSWA
    return paged_rows(
        pages, number, keys.safe_low, keys.kv_len, keys.hole, stride_block, stride_token, CLAMP,
        SUB, PARTS, KV_TILE // SUB, LOW, mask.RSWA, ALIGN,
    )  # fmt: skip


@triton.jit
def _products(queries, words, rest, cache, tile):
    """Products ``[ROWS, KV_TILE]`` fp32 of queries with stored keys ``words [KV_TILE, K_WIDTH]``.

    ``rest [KV_TILE, REST]`` are the further columns of the keys; they are read with REST.
    """
    IEEE: tl.constexpr = tl.float32 == tile.COMPUTE
    KIND: tl.constexpr = cache.KIND
    DECODE: tl.constexpr = cache.DECODE
    scores = tl.zeros([queries.scale.shape[0], tile.KV_TILE], tl.float32)
    k0 = plane_of(words, 0, KIND, DECODE).to(tile.COMPUTE)
    scores = scores_of(queries.q0, k0, scores, IEEE)
    if tile.REST > 0:
        scores = scores_of(queries.q1, rest.to(tile.COMPUTE), scores, IEEE)
    if cache.PLANES > 1:
        k1 = plane_of(words, 1, KIND, DECODE).to(tile.COMPUTE)
        scores = scores_of(queries.q1, k1, scores, IEEE)
    if cache.PLANES > 2:
        k2 = plane_of(words, 2, KIND, DECODE).to(tile.COMPUTE)
        scores = scores_of(queries.q2, k2, scores, IEEE)
        k3 = plane_of(words, 3, KIND, DECODE).to(tile.COMPUTE)
        scores = scores_of(queries.q3, k3, scores, IEEE)
    return scores


@triton.jit
def weights_of(scores, m, top, scale, SIMPLE: tl.constexpr, MASK: tl.constexpr):
    """Softmax of one tile of keys, relative to the maxima ``top [ROWS]`` so far.

    ``m [ROWS]`` are the maxima without this tile. With SIMPLE, ``scores [ROWS, KV_TILE]`` are still
    to be multiplied by ``scale [ROWS]``. MASK says that a row may see no key yet.

    Returns:
        The weights ``[ROWS, KV_TILE]``, and the factor ``[ROWS]`` of sums over earlier tiles.
    """
    base = top
    if MASK:
        base = tl.where(top == float("-inf"), 0.0, top)
    weights = scores - base[:, None]
    alpha = m - base
    if SIMPLE:
        # Subtract before scaling: the largest score then has an exponent of exactly 0.
        # fma(scores, scale, -base * scale) would leave the rounding error of base * scale
        # there, which is large for huge scores.
        weights = weights * scale[:, None]
        alpha = alpha * scale
    weights = tl.exp2(weights)
    alpha = tl.exp2(alpha)
    return weights, alpha


@triton.jit
def referred_weights(scores, m, most, scale, SIMPLE: tl.constexpr, MASK: tl.constexpr):
    """Softmax of one tile of keys, relative to a reference that seldom changes.

    ``m [ROWS]`` are the references so far, in units of log 2. A row keeps its reference until a
    score exceeds it by more than 8, a factor of 2^8; then the tile's largest score, ``most
    [ROWS]``, replaces it. So nearly every factor of earlier sums is exactly 1, and a kernel may
    skip it. SIMPLE and MASK as in :func:`weights_of`. Whether a row keeps its reference depends on
    its scores alone: kernels whose bits must agree all compute weights this way.

    Returns:
        The weights ``[ROWS, KV_TILE]``, the factor ``[ROWS]`` of sums over earlier tiles, and the
        new references.
    """
    if SIMPLE:
        # The reference is this product, rounded: that costs nothing of the weights' accuracy.
        most = product(most, scale)
    # Where nothing was seen before, the difference is infinite or no number, and not up to 8.
    top = tl.where(most - m <= _SLACK, m, most)
    base = top
    if MASK:
        base = tl.where(top == float("-inf"), 0.0, top)
    if SIMPLE:
        exponents = tl.fma(scores, scale[:, None], -base[:, None])
    else:
        exponents = scores - base[:, None]
    return tl.exp2(exponents), tl.exp2(m - base), top


@triton.jit
def _with_values(state, m, l, alpha, weights, words, cache, COMPUTE: tl.constexpr):
    """Add the weighted values of one tile to a state.

    ``weights [ROWS, KV_TILE]`` are of type COMPUTE, ``words [KV_TILE, V_WIDTH]`` the stored values.
    ``m`` and ``l`` are the maxima and sums of the new state, ``alpha [ROWS]`` the factor of its
    earlier outputs.
    """
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    KIND: tl.constexpr = cache.KIND
    DECODE: tl.constexpr = cache.DECODE
    v0 = plane_of(words, 0, KIND, DECODE).to(COMPUTE)
    acc0 = dot(weights, v0, state.acc0 * alpha[:, None], IEEE)
    acc1 = state.acc1
    acc2 = state.acc2
    acc3 = state.acc3
    if cache.PLANES > 1:
        v1 = plane_of(words, 1, KIND, DECODE).to(COMPUTE)
        acc1 = dot(weights, v1, acc1 * alpha[:, None], IEEE)
    if cache.PLANES > 2:
        v2 = plane_of(words, 2, KIND, DECODE).to(COMPUTE)
        acc2 = dot(weights, v2, acc2 * alpha[:, None], IEEE)
        v3 = plane_of(words, 3, KIND, DECODE).to(COMPUTE)
        acc3 = dot(weights, v3, acc3 * alpha[:, None], IEEE)
    return State(m, l, acc0, acc1, acc2, acc3)


@triton.jit
def attend_tiles(
    state, total, queries, keys, slots, run, query, cache, mask, plan, scratch, tile,
    MASK: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    """Online softmax over a run of tiles of keys, for one tile of query rows.

    With SEGMENTED, a state is closed at the end of each segment; if the plan depends on the batch,
    one state is closed at the end of the run. A closed state is stored if ``slots.stores``, else it
    is folded into ``total``. The sums of ``state`` are then ``[ROWS, KV_TILE]``, and are summed
    over their columns when the state closes. In tiles with SUMS they are ``[ROWS, SUMS]``, also
    without SEGMENTED.

    In tiles with UNIT, without SEGMENTED, a state is closed by the tile that begins the next
    segment, and is folded into ``total``. The last state is left for the caller to fold.

    If the query is SIMPLE, the maxima of ``state`` are those of the unscaled scores. In tiles with
    SUMS they are references instead, see :func:`referred_weights`, in units of log 2.

    Args:
        state: a ``State``, over the keys before the run; with SEGMENTED the empty one.
        total: a ``State`` over closed segments; read with SEGMENTED and in tiles with UNIT.
        queries: the ``Queries`` of the tile.
        keys: the ``Keys`` of the request.
        slots: ``Slots`` for segments; read with SEGMENTED.
        run: a ``Run`` of tiles.
        query: the ``Query``.
        cache: the ``Cache``.
        mask: the ``Mask``.
        plan: the ``Plan``; read with SEGMENTED.
        scratch: the ``Scratch`` that closed states are stored in; read with SEGMENTED and in tiles
            with STORED.
        tile: the ``Tile``.
        MASK: False if every row sees every key of the run. With MASK, every row still sees all keys
            of the tiles from ``run.full_low`` to ``run.full_high``.
        SEGMENTED: whether the state is closed.

    Returns:
        ``state`` and ``total``, updated.
    """
    KV_TILE: tl.constexpr = tile.KV_TILE
    ROWS: tl.constexpr = state.m.shape[0]
    COMPUTE: tl.constexpr = tile.COMPUTE
    LOW: tl.constexpr = mask.WINDOW or mask.CHUNK or mask.RSWA
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    # Only tiles of at least 64 rows can be multiplied by warp groups, which is asynchronous.
    ASYNCHRONOUS: tl.constexpr = ROWS >= 64
    # Weights of a request must not depend on the kernel, nor on whether a tile is masked.
    ROUNDS: tl.constexpr = SEGMENTED or tile.SUMS > 0
    FOLDS: tl.constexpr = tile.UNIT > 0 and not SEGMENTED
    kc = tl.arange(0, cache.K_WIDTH)
    vc = tl.arange(0, cache.V_WIDTH)
    within = tl.arange(0, KV_TILE)
    WORD: tl.constexpr = cache.key_ptr.dtype.element_ty.primitive_bitwidth // 8
    BYTES: tl.constexpr = cache.ALIGN * WORD if cache.ALIGN * WORD < 16 else 16
    keys_at = tl.multiple_of(cache.key_ptr + keys.k_base, BYTES)
    values_at = tl.multiple_of(cache.value_ptr + keys.v_base, BYTES)
    if SEGMENTED:
        segment = slots.segment
    if cache.BLOCK_SIZE > 0:
        # Page ids are loaded one tile ahead, so that the load of keys never waits for them. The
        # split-KV kernel has few products between two tiles and loads them two tiles ahead.
        pages = _pages_of(run.low, keys, cache, mask, KV_TILE)
        if SEGMENTED:
            ahead = _pages_of(run.low + 1, keys, cache, mask, KV_TILE)
    if MASK:
        reach = reach_of(queries.position, keys.kv_len, keys.causal, mask.CAUSAL)
        range_first = reach
        range_last = reach
        if mask.RANGES:
            # This has a loop over ranges. Inside the loop over tiles it would keep Triton from
            # pipelining that loop.
            range_first, range_last = own_range(queries.position, keys.ranges_ptr, mask.num_ranges)
    if SEGMENTED:
        segment_end = run.high
        if not plan.DEPENDS_ON_BATCH:
            segment_end = segment_start(segment + 1) // plan.SEGMENT_UNIT
    if FOLDS:
        # The first tile from here on that begins a segment.
        opens = segment_start(segment_of(run.low * tile.UNIT - 1) + 1) // tile.UNIT
    for number in tl.range(run.low, run.high, num_stages=tile.STAGES):
        token = number * KV_TILE + within
        if cache.BLOCK_SIZE > 0:
            k_rows = _rows_of(
                pages, number, keys, cache.k_block, cache.k_token, cache, mask, KV_TILE, MASK,
                cache.ALIGN,
            )  # fmt: skip
            v_rows = k_rows
            if not cache.SAME_ROWS:
                v_rows = _rows_of(
                    pages, number, keys, cache.v_block, cache.v_token, cache, mask, KV_TILE, MASK,
                    cache.ALIGN,
                )  # fmt: skip
        else:
            near = tl.minimum(token, keys.kv_len - 1).to(tl.int64)
            k_rows = tl.multiple_of(near * cache.k_token, cache.ALIGN)
            v_rows = tl.multiple_of(near * cache.v_token, cache.ALIGN)
        k_at = keys_at + (k_rows[:, None] + kc[None, :])
        v_at = values_at + (v_rows[:, None] + vc[None, :])
        if cache.K_USED < cache.K_WIDTH:
            k_words = tl.load(k_at, mask=(kc < cache.K_USED)[None, :], other=0)
        else:
            k_words = tl.load(k_at)
        rest = k_words
        if tile.REST > 0:
            beyond = cache.K_WIDTH + tl.arange(0, tile.REST)
            rest = tl.load(keys_at + (k_rows[:, None] + beyond[None, :]))
        if cache.INLINE:
            s_rows = keys.s_base + _rows_of(
                pages, number, keys, cache.s_block, cache.s_token, cache, mask, KV_TILE, MASK, 1
            )
            k_scale = tl.load(cache.k_inline_ptr + s_rows)
            v_scale = tl.load(cache.v_inline_ptr + s_rows)
        if cache.BLOCK_SIZE > 0:
            further = number + 1
            if SEGMENTED:
                # Triton does not pipeline a loop that hands a value on unchanged. Page ids are not
                # negative, so this maximum changes nothing.
                pages = tl.maximum(ahead, 0)
                further = number + 2
            ahead = _pages_of(further, keys, cache, mask, KV_TILE)
            if not SEGMENTED:
                pages = ahead

        scores = _products(queries, k_words, rest, cache, tile)
        if not query.SIMPLE:
            if ROUNDS and not query.SOFT_CAP:
                scores = product(scores, queries.scale[:, None])
            else:
                scores = scores * queries.scale[:, None]
            if cache.INLINE:
                if tile.SUMS > 0:
                    # The value's scale is added below.
                    scores = product(scores, k_scale[None, :])
                else:
                    scores = scores * k_scale[None, :]
            distance = token[None, :] - queries.position[:, None]
            scores = biased(
                scores, distance, queries.slope, query.soft_cap, query.SOFT_CAP, query.ALIBI, IEEE,
                ROUNDS,
            )  # fmt: skip
            if cache.INLINE:
                # The value's scale is added to the weight's exponent: a product of weight and scale
                # could underflow.
                scores = scores + tl.log2(v_scale)[None, :]
        if MASK:
            edge = number >= run.full_high
            if LOW:
                edge = edge | (number < run.full_low)
            if not SEGMENTED or ASYNCHRONOUS:
                # No branch here: Triton fails to wait for products by warp group before a branch.
                scores = masked(
                    scores, queries.position, token, reach, keys.kv_len, keys.prefix, range_first,
                    range_last, mask, mask.RSWA,
                )  # fmt: skip
            elif edge:
                scores = masked(
                    scores, queries.position, token, reach, keys.kv_len, keys.prefix, range_first,
                    range_last, mask, mask.RSWA,
                )  # fmt: skip
        if FOLDS:
            # Behind the wait for the scores, which waits for the products with values too.
            if number == opens:
                highest, sums = closed_state(state, queries, query, tile)
                if tile.STORED:
                    stored = opened(opens, run.begin, tile.UNIT)
                    total = fold_into_slot(
                        total, highest, sums, state, stored, scratch, cache.DECODE
                    )
                else:
                    total = fold_states(total, highest, sums, state, cache.PLANES)
                state = _reset(state, cache.PLANES)
                opens = segment_start(segment_of(opens * tile.UNIT) + 1) // tile.UNIT
        most = tl.max(scores, 1)
        if tile.SUMS > 0:
            weights, alpha, m = referred_weights(
                scores, state.m, most, queries.scale, query.SIMPLE, MASK
            )
        else:
            m = tl.maximum(state.m, most)
            weights, alpha = weights_of(scores, state.m, m, queries.scale, query.SIMPLE, MASK)
        parts = weights
        if cache.INLINE:
            if tile.SUMS > 0:
                # Columns are added below.
                parts = product(weights, (1.0 / v_scale)[None, :])
            else:
                parts = weights * (1.0 / v_scale)[None, :]
        if tile.SUMS > 0:
            l = tl.fma(state.l, alpha[:, None], halved(parts, tile.SUMS))
        elif SEGMENTED:
            l = state.l * alpha[:, None] + parts
        else:
            l = state.l * alpha + tl.sum(parts, 1)
        if cache.V_USED < cache.V_WIDTH:
            v_words = tl.load(v_at, mask=(vc < cache.V_USED)[None, :], other=0)
        else:
            v_words = tl.load(v_at)
        state = _with_values(state, m, l, alpha, weights.to(COMPUTE), v_words, cache, COMPUTE)
        if SEGMENTED:
            closes = (number + 1 == segment_end) | (number + 1 == run.high)
            if closes:
                highest, sums = closed_state(state, queries, query, tile)
                if slots.stores:
                    store_planes(scratch, slots.slot + segment, highest, sums, state)
                else:
                    total = fold_states(total, highest, sums, state, cache.PLANES)
                if not ASYNCHRONOUS:
                    state = _reset(state, cache.PLANES)
                segment += 1
                if not plan.DEPENDS_ON_BATCH:
                    segment_end = segment_start(segment + 1) // plan.SEGMENT_UNIT
            if ASYNCHRONOUS:
                # This stays outside the branch: Triton fails to wait for products by warp group
                # before a branch.
                state = _emptied(state, closes, cache.PLANES)
    return state, total


@triton.jit
def _reset(state, PLANES: tl.constexpr):
    """The state of no keys, with the shapes of ``state``, which has PLANES planes."""
    m = tl.full([state.m.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros(state.l.shape, tl.float32)
    acc0 = tl.zeros(state.acc0.shape, tl.float32)
    acc1 = state.acc1
    acc2 = state.acc2
    acc3 = state.acc3
    if PLANES > 1:
        acc1 = acc0
    if PLANES > 2:
        acc2 = acc0
        acc3 = acc0
    return State(m, l, acc0, acc1, acc2, acc3)


@triton.jit
def _emptied(state, closes, PLANES: tl.constexpr):
    """A state of PLANES planes; the state of no keys if it ``closes``."""
    m = tl.where(closes, float("-inf"), state.m)
    l = tl.where(closes, 0.0, state.l)
    acc0 = tl.where(closes, 0.0, state.acc0)
    acc1 = state.acc1
    acc2 = state.acc2
    acc3 = state.acc3
    if PLANES > 1:
        acc1 = tl.where(closes, 0.0, acc1)
    if PLANES > 2:
        acc2 = tl.where(closes, 0.0, acc2)
        acc3 = tl.where(closes, 0.0, acc3)
    return State(m, l, acc0, acc1, acc2, acc3)
