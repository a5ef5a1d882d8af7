"""The portable kernel of sparse latent (MLA) attention: a query token attends the rows it lists.

A token's list is cut into segments by position in the list. A program takes some segments for all
heads of a tile, so a listed row is read once for these heads; it is both key and value.

If a program has the whole list, it folds the states of its segments in order. Otherwise it stores
them, and :func:`fold_states_kernel` folds them in the same order. With up to 16 heads in a tile
both ways give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn.kernels.dense.query_rows import load_query, load_state, write_rows
from attn.kernels.dense.tile import dot, fold, scores_of, store_planes
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.groups import Out, Scratch, State
from attn.kernels.lang.numerics import saturate_to, to_float32
from attn.kernels.lang.stored import E4M3
from attn.kernels.sparse.groups import Cache, Lists, Query, Tile
from attn.kernels.sparse.listed_rows import elements_of, listed_ids, row_offsets, weights_of

_E4M3 = tl.constexpr(E4M3)
_BLOCK = tl.constexpr(128)


@triton.jit
def _latent_of(ids, cache):
    """Latent parts of listed rows as they are stored, ``[KV, WIDTH]``.

    An entry of -1 gives a row of zeros: its weight is zero, but zero times NaN is NaN.
    """
    offset = row_offsets(ids, cache.BLOCK_UNITS, cache.ROW_UNITS, cache.BLOCK_SIZE)
    offset = offset * cache.LATENT_UNIT
    column = tl.arange(0, cache.WIDTH)
    there = (ids >= 0)[:, None]
    return tl.load(cache.latent_ptr + (offset[:, None] + column[None, :]), mask=there, other=0)


@triton.jit
def _attend_listed(m, l, acc, ids, ahead, latent, q, r, scale, cache, tile):
    """Online softmax over one step's listed rows; entries of -1 are neither read nor counted.

    With HOLDS_NEXT, ``latent`` are the step's latent parts, loaded before, and the latent parts of
    the rows ``ahead`` are returned in their place.

    Args:
        m: ``[ROWS]`` fp32, maxima of the scores so far.
        l: ``[ROWS]`` fp32, sums of the weights so far.
        acc: ``[ROWS, WIDTH]`` fp32, sums of rows times weights so far.
        ids: ``[KV_TILE]`` int32, the step's entries.
        ahead: ``[KV_TILE]`` int32, the next step's entries; read with HOLDS_NEXT.
        latent: ``[KV_TILE, WIDTH]``; read with HOLDS_NEXT.
        q: ``[ROWS, WIDTH]``, absorbed parts of queries.
        r: ``[ROWS, ROPE]``, rotary parts of queries.
        scale: fp32, factor of the products, log2(e) included.
        cache: a ``Cache``.
        tile: a ``Tile``.

    Returns:
        m, l, acc and latent after the step.
    """
    COMPUTE: tl.constexpr = tile.COMPUTE
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    KIND: tl.constexpr = cache.KIND
    HARDWARE_E4M3: tl.constexpr = cache.HARDWARE_E4M3
    there = ids >= 0
    offset = row_offsets(ids, cache.BLOCK_UNITS, cache.ROW_UNITS, cache.BLOCK_SIZE)
    rotary = tl.arange(0, cache.ROPE)
    if not tile.HOLDS_NEXT:
        latent = _latent_of(ids, cache)
    rope = tl.load(
        cache.rope_ptr + ((offset * cache.ROPE_UNIT)[:, None] + rotary[None, :]),
        mask=there[:, None], other=0,
    )  # fmt: skip
    factors = 0.0
    if cache.SCALED:
        part = tl.arange(0, cache.WIDTH // _BLOCK)
        factors = tl.load(
            cache.scales_ptr + ((offset * cache.SCALE_UNIT)[:, None] + part[None, :]),
            mask=there[:, None], other=0,
        )  # fmt: skip
    k = elements_of(latent, factors, KIND, cache.SCALED, COMPUTE, HARDWARE_E4M3)
    if KIND == 0 or not cache.SCALED:
        p = elements_of(rope, 0.0, KIND, False, COMPUTE, HARDWARE_E4M3)
    elif tl.bfloat16 == COMPUTE:
        p = rope
    else:
        p = saturate_to(to_float32(rope), COMPUTE)
    scores = tl.zeros([m.shape[0], ids.shape[0]], tl.float32)
    scores = scores_of(q, k, scores, IEEE)
    scores = scores_of(r, p, scores, IEEE)
    if tile.HOLDS_NEXT:
        # The next step's latent parts are loaded only now, when this step's have left registers.
        latent = _latent_of(ahead, cache)
    top, alpha, weights = weights_of(scores, m, there, scale)
    l = tl.fma(l, alpha, tl.sum(weights, 1))
    weights = weights.to(COMPUTE)
    acc = dot(weights, k, acc * alpha[:, None], IEEE)
    return top, l, acc, latent


@triton.jit
def _write(m, l, acc, token, head, wanted, factor, out):
    """Write output and LSE of some heads of one token.

    ``m``, ``l`` and ``acc`` ``[ROWS, WIDTH]`` are the state of the heads ``head`` ``[ROWS]``, of
    which those are written that are ``wanted``; ``factor`` fp32 is the factor of outputs.
    """
    columns = tl.arange(0, acc.shape[1])
    write_rows(
        m, l, acc, head * 0 + token, head, wanted, columns, columns >= 0, out, factor, out.LSE,
        False,
    )  # fmt: skip


@triton.jit
def length_of(token, lists):
    """Entries of the list of ``token``, int32."""
    if lists.lens_ptr is None:
        length = lists.topk
    else:
        length = tl.minimum(tl.load(lists.lens_ptr + token), lists.topk)
    return length


@triton.jit
def attend_lists(query, cache, lists, scratch, out, tile):
    """Attention of a program's span of a token's list; the arguments are groups."""
    TILES: tl.constexpr = tile.SEGMENT // tile.KV_TILE
    pid = tl.program_id(0)
    # Programs of a token's head tiles are neighbours, so that they find its rows in the L2 cache.
    token = (pid // tile.HEAD_TILES).to(tl.int64)
    in_group = (pid % tile.HEAD_TILES) * tile.ROWS
    part = tl.program_id(1)
    length = length_of(token, lists)
    low = part * (tile.SPAN * TILES)
    high = tl.minimum(low + tile.SPAN * TILES, tl.cdiv(length, tile.KV_TILE))
    row = tl.arange(0, tile.ROWS)
    head = in_group + row
    wanted = head < tile.NUM_HEADS
    # The branch tells Triton that the loop runs at least once. Triton 3.6 needs that to keep the
    # products of warp groups apart.
    if high > low:
        _attend_span(
            pid, part, token, head, wanted, low, high, length, query, cache, lists, scratch, out,
            tile,
        )  # fmt: skip
    elif tile.SPAN >= tile.SEGMENTS:
        nothing = tl.zeros([tile.ROWS, cache.WIDTH], tl.float32)
        m = tl.full([tile.ROWS], float("-inf"), tl.float32)
        _write(m, tl.zeros([tile.ROWS], tl.float32), nothing, token, head, wanted, 1.0, out)


@triton.jit
def _attend_span(
    pid, part, token, head, wanted, low, high, length, query, cache, lists, scratch, out, tile
):
    """Attention of steps ``[low, high)`` of a token's list, which are a program's span ``part``.

    If the span is the whole list, write the result. Else store the state of each segment.

    ``pid`` is the number of the token's tile of heads, ``head`` ``[ROWS]`` int32 are its heads, and
    ``wanted`` says which of them there are. The list has ``length`` entries.
    """
    TILES: tl.constexpr = tile.SEGMENT // tile.KV_TILE
    WHOLE: tl.constexpr = tile.SPAN >= tile.SEGMENTS
    CLOSES: tl.constexpr = tile.FOLDS and tile.SPAN > 1
    ROWS: tl.constexpr = tile.ROWS
    KV_TILE: tl.constexpr = tile.KV_TILE
    WIDTH: tl.constexpr = cache.WIDTH
    ROPE: tl.constexpr = cache.ROPE
    offset = token * query.query_token + head * query.query_head
    q = load_query(query.query_ptr, offset, wanted, 0, WIDTH, WIDTH, WIDTH, 0).to(tile.COMPUTE)
    offset = token * query.rotary_token + head * query.rotary_head
    r = load_query(query.rotary_ptr, offset, wanted, 0, ROPE, ROPE, ROPE, 0).to(tile.COMPUTE)
    factor = 1.0
    if cache.factor_ptr is not None:
        factor = tl.load(cache.factor_ptr)
    logits_scale = query.scale * factor * LOG2E
    mine = lists.ids_ptr + token * lists.ids_row
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    M = m
    L = l
    A = acc
    slot = pid * tile.SEGMENTS
    # Rows behind the span are another program's: they are not loaded ahead.
    end = tl.minimum(length, high * KV_TILE)
    ids = listed_ids(mine, low, end, KV_TILE)
    ahead = listed_ids(mine, low + 1, end, KV_TILE)
    latent = 0
    if tile.HOLDS_NEXT:
        latent = _latent_of(ids, cache)
    for number in tl.range(low, high, num_stages=tile.STAGES, disable_licm=True):
        if not tile.CARRIES_IDS:
            ids = listed_ids(mine, number, end, KV_TILE)
        m, l, acc, held = _attend_listed(
            m, l, acc, ids, ahead, latent, q, r, logits_scale, cache, tile
        )
        if tile.HOLDS_NEXT:
            latent = held
        if tile.CARRIES_IDS:
            # Triton does not pipeline a loop that merely hands a value on. This maximum changes
            # nothing, since ids are at least -1.
            ids = tl.maximum(ahead, -1)
            ahead = listed_ids(mine, number + 2, end, KV_TILE)
        if CLOSES:
            if ((number + 1) % TILES == 0) | (number + 1 == high):
                if WHOLE:
                    M, L, A = fold(M, L, A, m, l, acc)
                else:
                    store_planes(
                        scratch, slot + number // TILES, m, l, State(m, l, acc, acc, acc, acc)
                    )
                m = tl.full([ROWS], float("-inf"), tl.float32)
                l = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros_like(acc)
    if WHOLE:
        if not CLOSES:
            M = m
            L = l
            A = acc
        _write(M, L, A, token, head, wanted, factor, out)
    elif not CLOSES:
        store_planes(scratch, slot + part, m, l, State(m, l, acc, acc, acc, acc))


@triton.jit(
    do_not_specialize=["lse_token", "ids_row", "topk"],
    do_not_specialize_on_alignment=["ids_ptr", "lens_ptr", "lse_ptr", "factor_ptr", "sinks_ptr"],
)
def sparse_mla_kernel(
    query_ptr,
    rotary_ptr,
    latent_ptr,
    rope_ptr,
    scales_ptr,
    factor_ptr,
    sinks_ptr,
    ids_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    states_ptr,
    sums_ptr,
    query_token,
    query_head,
    rotary_token,
    rotary_head,
    out_token,
    out_head,
    lse_token,
    ids_row,
    topk,
    scale,
    NUM_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    KV_TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    SPAN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    FOLDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    LATENT_UNIT: tl.constexpr,
    ROPE_UNIT: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    CARRIES_IDS: tl.constexpr,
    HOLDS_NEXT: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    STAGES: tl.constexpr,
    HASTENS: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Attention over listed rows; grid ``(T * HEAD_TILES, cdiv(SEGMENTS, SPAN))``.

    Shapes: query ``[T, NUM_HEADS, WIDTH]``, rotary ``[T, NUM_HEADS, ROPE]``, ids ``[T, topk]`` and
    lens ``[T]`` int32, out ``[T, NUM_HEADS, WIDTH]``, LSE ``[T, NUM_HEADS]`` fp32. Latent, rope and
    scales are fields of the cache's rows; offsets of rows are in units of the rows' alignment. A
    state goes to slot ``(token * HEAD_TILES + tile) * SEGMENTS + segment``.
    """
    if WAITS:
        # This kernel may have been started while the one that wrote the lists still runs.
        gdc_wait()
    if HASTENS:
        # The kernel that folds may be started now; it waits for this one by itself.
        gdc_launch_dependents()
    attend_lists(
        Query(
            query_ptr=query_ptr, rotary_ptr=rotary_ptr, query_token=query_token,
            query_head=query_head, rotary_token=rotary_token, rotary_head=rotary_head, scale=scale,
        ),
        Cache(
            latent_ptr=latent_ptr, rope_ptr=rope_ptr, scales_ptr=scales_ptr, factor_ptr=factor_ptr,
            BLOCK_SIZE=BLOCK_SIZE, BLOCK_UNITS=BLOCK_UNITS, ROW_UNITS=ROW_UNITS,
            LATENT_UNIT=LATENT_UNIT, ROPE_UNIT=ROPE_UNIT, SCALE_UNIT=SCALE_UNIT, WIDTH=WIDTH,
            ROPE=ROPE, KIND=KIND, SCALED=SCALED, HARDWARE_E4M3=HARDWARE_E4M3,
        ),
        Lists(ids_ptr=ids_ptr, lens_ptr=lens_ptr, ids_row=ids_row, topk=topk),
        Scratch(states_ptr=states_ptr, sums_ptr=sums_ptr, USED=ROWS, WIDTH=WIDTH, PLANES=1),
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=None,
            out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=SINKS,
            FP8_OUT=False, LSE=LSE,
        ),
        Tile(
            NUM_HEADS=NUM_HEADS, HEAD_TILES=HEAD_TILES, ROWS=ROWS, KV_TILE=KV_TILE, SEGMENT=SEGMENT,
            SEGMENTS=SEGMENTS, COMPUTE=COMPUTE, STAGES=STAGES, SPAN=SPAN, FOLDS=FOLDS,
            CARRIES_IDS=CARRIES_IDS, HOLDS_NEXT=HOLDS_NEXT,
        ),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["lse_token", "topk"],
    do_not_specialize_on_alignment=["lens_ptr", "lse_ptr", "factor_ptr", "sinks_ptr"],
)
def fold_states_kernel(
    states_ptr,
    sums_ptr,
    factor_ptr,
    sinks_ptr,
    lens_ptr,
    out_ptr,
    lse_ptr,
    out_token,
    out_head,
    lse_token,
    topk,
    NUM_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    FINISH_ROWS: tl.constexpr,
    FINISH_WIDTH: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Fold the stored states of a token's segments in order, and write output and LSE.

    Grid ``(T * HEAD_TILES, ROWS // FINISH_ROWS, WIDTH // FINISH_WIDTH)``: a program has some heads
    and some columns. Out is ``[T, NUM_HEADS, WIDTH]``, LSE ``[T, NUM_HEADS]`` fp32, lens ``[T]``
    int32. Segments past the end of a list were not stored, and are not read. WAITS: the kernel may
    have been started while :func:`sparse_mla_kernel` still writes states, and waits for it.
    """
    # Registers hold the states that are under way.
    AHEAD: tl.constexpr = 16 if FINISH_ROWS == 1 else 8
    pid = tl.program_id(0)
    token = (pid // HEAD_TILES).to(tl.int64)
    # The list's length was written before the kernel that writes states was started.
    if lens_ptr is None:
        length = topk
    else:
        length = tl.minimum(tl.load(lens_ptr + token), topk)
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    if WAITS:
        gdc_wait()
    row = tl.program_id(1) * FINISH_ROWS + tl.arange(0, FINISH_ROWS)
    head = (pid % HEAD_TILES) * ROWS + row
    wanted = head < NUM_HEADS
    columns = tl.program_id(2) * FINISH_WIDTH + tl.arange(0, FINISH_WIDTH)
    cells = row[:, None] * WIDTH + columns[None, :]
    parts = tl.cdiv(length, SEGMENT)
    m = tl.full([FINISH_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([FINISH_ROWS], tl.float32)
    acc = tl.zeros([FINISH_ROWS, FINISH_WIDTH], tl.float32)
    slot = pid * SEGMENTS
    for first in tl.static_range(0, SEGMENTS, AHEAD):
        # These states are all under way before the first is folded: a load takes longer than folds.
        states = ()
        for part in tl.static_range(first, min(first + AHEAD, SEGMENTS)):
            # Past the last segment the state is empty: folding it changes nothing.
            there = wanted & (part < parts)
            mask = there[:, None] & (columns >= 0)[None, :]
            state = load_state(
                states_ptr, sums_ptr, slot + part, row, cells, there, mask, ROWS, WIDTH
            )
            states += (state,)  # type: ignore[assignment]
        for i in tl.static_range(min(AHEAD, SEGMENTS - first)):
            n, k, b = states[i]  # type: ignore[var-annotated]
            m, l, acc = fold(m, l, acc, n, k, b)
    at = row * 0 + token
    write_rows(
        m, l, acc, at, head, wanted, columns, columns >= 0,
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=None,
            out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=SINKS,
            FP8_OUT=False, LSE=LSE,
        ),
        factor, LSE, False,
    )  # fmt: skip
