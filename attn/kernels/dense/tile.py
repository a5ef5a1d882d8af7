"""The loop over key tiles that both portable kernels share: paged rows, scores, online softmax.

Scores are ``[query rows, keys]``, and so are all tensors that broadcast against them. A position is
counted from the first token of the request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.lang.masks import biased, masked, own_range, reach_of
from attn.kernels.lang.stored import PLAIN, plane_of
from builders.splitkv.device.segments import segment_start

_PLAIN = tl.constexpr(PLAIN)


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

    Kernels whose states must agree bit for bit all fold through this function, so that they round
    in the same order. The fma is explicit: a compiler that chooses by itself could choose
    differently in two kernels, and their bits would differ.
    """
    top = tl.maximum(m, m_new)
    base = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp2(m - base)
    new = tl.exp2(m_new - base)
    return top, tl.fma(l, old, l_new * new), tl.fma(acc, old[:, None], acc_new * new[:, None])


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
    at = states_ptr + slot * (USED * WIDTH * PLANES)
    cells = at + row[:, None] * (WIDTH * PLANES) + column[None, :]
    tl.store(cells, acc0, mask=mine[:, None])
    if PLANES > 1:
        tl.store(cells + WIDTH, acc1, mask=mine[:, None])
    if PLANES > 2:
        tl.store(cells + 2 * WIDTH, acc2, mask=mine[:, None])
        tl.store(cells + 3 * WIDTH, acc3, mask=mine[:, None])


@triton.jit
def attend_tiles(
    m,
    l,
    acc0,
    acc1,
    acc2,
    acc3,
    M,
    L,
    A0,
    A1,
    A2,
    A3,
    segment,
    states_ptr,
    sums_ptr,
    slot,
    stores,
    q0,
    q1,
    q2,
    q3,
    query,
    scale,
    slope,
    soft_cap,
    key_ptr,
    value_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    k_base,
    v_base,
    k_block,
    k_token,
    v_block,
    v_token,
    s_base,
    s_block,
    s_token,
    low,
    high,
    safe_low,
    safe_high,
    hole,
    kv_len,
    causal,
    window,
    chunk,
    lookback,
    prefix,
    ranges_ptr,
    num_ranges,
    full_low,
    full_high,
    MASK: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    HOLE: tl.constexpr,
    SEGMENT_UNIT: tl.constexpr,
    KV_TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_USED: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_USED: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    INLINE: tl.constexpr,
    DECODE: tl.constexpr,
    COMPUTE: tl.constexpr,
    ALIGN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RSWA: tl.constexpr,
    RANGES: tl.constexpr,
    CLAMP: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SIMPLE: tl.constexpr,
    SEGMENTED: tl.constexpr,
    DEPENDS_ON_BATCH: tl.constexpr,
    USED: tl.constexpr,
    STAGES: tl.constexpr,
    REST: tl.constexpr = 0,
):
    """Online softmax over key tiles ``[low, high)`` for one tile of query rows.

    Shapes: m and l are ``[M]`` fp32. There is one acc ``[M, V_WIDTH]`` and one q ``[M, K_WIDTH]``
    for each plane of words. query ``[M]`` holds positions. scale ``[M]`` includes log2(e) unless
    SOFT_CAP. With BLOCK_SIZE 0 there is no block table, and keys lie one after another.

    MASK False says that every row sees every key of the tiles. With MASK, every row still sees all
    keys of the tiles ``[full_low, full_high)``. Only slots in ``[safe_low, safe_high)`` are read,
    and with HOLE those below ``hole`` too.

    SEGMENTED closes a state at the end of each segment; with DEPENDS_ON_BATCH it closes one state,
    at ``high``. The state goes to slot ``slot + segment`` if ``stores``, else it is folded into M,
    L and A*. l is then ``[M, KV_TILE]``, and is summed over its columns when the state closes.

    SIMPLE says that scores are only multiplied by the scale; m is then the maximum of the unscaled
    scores. SAME_ROWS says that values have the strides of keys. REST is the number of key columns
    beyond K_WIDTH, which are multiplied by q1 ``[M, REST]``.

    Returns:
        m, l, acc0 to acc3, M, L and A0 to A3, updated.
    """
    SUB: tl.constexpr = (
        KV_TILE if BLOCK_SIZE == 0 or BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE)
    )
    PAGES: tl.constexpr = KV_TILE // SUB
    PARTS: tl.constexpr = BLOCK_SIZE // SUB
    LOW: tl.constexpr = WINDOW or CHUNK or RSWA
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    # Only tiles of at least 64 rows can be multiplied by warp groups, which is asynchronous.
    ASYNCHRONOUS: tl.constexpr = m.shape[0] >= 64
    kc = tl.arange(0, K_WIDTH)
    vc = tl.arange(0, V_WIDTH)
    within = tl.arange(0, KV_TILE)
    WORD: tl.constexpr = key_ptr.dtype.element_ty.primitive_bitwidth // 8
    BYTES: tl.constexpr = ALIGN * WORD if ALIGN * WORD < 16 else 16
    keys_at = tl.multiple_of(key_ptr + k_base, BYTES)
    values_at = tl.multiple_of(value_ptr + v_base, BYTES)
    pages = tl.zeros([PAGES], tl.int32)
    if BLOCK_SIZE > 0:
        # Page ids are loaded one tile ahead, so that the load of keys never waits for them. The
        # split-KV kernel has few products between two tiles and loads them two tiles ahead.
        pages = page_ids(table_ptr, low, safe_low, safe_high, hole, SUB, PARTS, PAGES, LOW, HOLE)
        if SEGMENTED:
            ahead = page_ids(
                table_ptr, low + 1, safe_low, safe_high, hole, SUB, PARTS, PAGES, LOW, HOLE
            )
    if MASK:
        reach = reach_of(query, kv_len, causal, CAUSAL)
        range_first = reach
        range_last = reach
        if RANGES:
            # This has a loop over ranges. Inside the loop over tiles it would keep Triton from
            # pipelining that loop.
            range_first, range_last = own_range(query, ranges_ptr, num_ranges)
    if SEGMENTED:
        segment_end = high
        if not DEPENDS_ON_BATCH:
            segment_end = segment_start(segment + 1) // SEGMENT_UNIT
    for tile in tl.range(low, high, num_stages=STAGES):
        token = tile * KV_TILE + within
        if BLOCK_SIZE > 0:
            k_rows = paged_rows(
                pages,
                tile,
                safe_low,
                safe_high,
                hole,
                k_block,
                k_token,
                MASK,
                SUB,
                PARTS,
                PAGES,
                LOW,
                HOLE,
                ALIGN,
            )
            v_rows = k_rows
            if not SAME_ROWS:
                v_rows = paged_rows(
                    pages,
                    tile,
                    safe_low,
                    safe_high,
                    hole,
                    v_block,
                    v_token,
                    MASK,
                    SUB,
                    PARTS,
                    PAGES,
                    LOW,
                    HOLE,
                    ALIGN,
                )
        else:
            near = tl.minimum(token, safe_high - 1).to(tl.int64)
            k_rows = tl.multiple_of(near * k_token, ALIGN)
            v_rows = tl.multiple_of(near * v_token, ALIGN)
        k_at = keys_at + (k_rows[:, None] + kc[None, :])
        v_at = values_at + (v_rows[:, None] + vc[None, :])
        if K_USED < K_WIDTH:
            keys = tl.load(k_at, mask=(kc < K_USED)[None, :], other=0)
        else:
            keys = tl.load(k_at)
        if REST > 0:
            rest = tl.load(keys_at + (k_rows[:, None] + (K_WIDTH + tl.arange(0, REST))[None, :]))
        if INLINE:
            s_rows = s_base + paged_rows(
                pages,
                tile,
                safe_low,
                safe_high,
                hole,
                s_block,
                s_token,
                MASK,
                SUB,
                PARTS,
                PAGES,
                LOW,
                HOLE,
                1,
            )
            k_scale = tl.load(k_scale_ptr + s_rows)
            v_scale = tl.load(v_scale_ptr + s_rows)
        if BLOCK_SIZE > 0:
            further = tile + 1
            if SEGMENTED:
                # Triton does not pipeline a loop that hands a value on unchanged. Page ids are not
                # negative, so this maximum changes nothing.
                pages = tl.maximum(ahead, 0)
                further = tile + 2
            ahead = page_ids(
                table_ptr, further, safe_low, safe_high, hole, SUB, PARTS, PAGES, LOW, HOLE
            )
            if not SEGMENTED:
                pages = ahead

        zero = tl.zeros([m.shape[0], KV_TILE], tl.float32)
        scores = scores_of(q0, plane_of(keys, 0, KIND, DECODE).to(COMPUTE), zero, IEEE)
        if REST > 0:
            scores = scores_of(q1, rest.to(COMPUTE), scores, IEEE)
        if PLANES > 1:
            scores = scores_of(q1, plane_of(keys, 1, KIND, DECODE).to(COMPUTE), scores, IEEE)
        if PLANES > 2:
            scores = scores_of(q2, plane_of(keys, 2, KIND, DECODE).to(COMPUTE), scores, IEEE)
            scores = scores_of(q3, plane_of(keys, 3, KIND, DECODE).to(COMPUTE), scores, IEEE)
        if not SIMPLE:
            scores = scores * scale[:, None]
            if INLINE:
                scores = scores * k_scale[None, :]
            distance = token[None, :] - query[:, None]
            scores = biased(scores, distance, slope, soft_cap, SOFT_CAP, ALIBI, IEEE)
            if INLINE:
                # The value's scale is added to the weight's exponent: a product of weight and scale
                # could underflow.
                scores = scores + tl.log2(v_scale)[None, :]
        if MASK:
            edge = tile >= full_high
            if LOW:
                edge = edge | (tile < full_low)
            if not SEGMENTED or ASYNCHRONOUS:
                # No branch here: Triton fails to wait for products by warp group before a branch.
                scores = masked(
                    scores, query, token, reach, kv_len, window, chunk, lookback, prefix,
                    range_first, range_last, CAUSAL, WINDOW, CHUNK, RSWA, RANGES, CLAMP,
                )  # fmt: skip
            elif edge:
                scores = masked(
                    scores, query, token, reach, kv_len, window, chunk, lookback, prefix,
                    range_first, range_last, CAUSAL, WINDOW, CHUNK, RSWA, RANGES, CLAMP,
                )  # fmt: skip
        top = tl.maximum(m, tl.max(scores, 1))
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
        m = top
        parts = weights
        if INLINE:
            parts = weights * (1.0 / v_scale)[None, :]
        if SEGMENTED:
            l = l * alpha[:, None] + parts
        else:
            l = l * alpha + tl.sum(parts, 1)
        if V_USED < V_WIDTH:
            values = tl.load(v_at, mask=(vc < V_USED)[None, :], other=0)
        else:
            values = tl.load(v_at)
        weights = weights.to(COMPUTE)
        acc0 = dot(
            weights, plane_of(values, 0, KIND, DECODE).to(COMPUTE), acc0 * alpha[:, None], IEEE
        )
        if PLANES > 1:
            acc1 = dot(
                weights, plane_of(values, 1, KIND, DECODE).to(COMPUTE), acc1 * alpha[:, None], IEEE
            )
        if PLANES > 2:
            acc2 = dot(
                weights, plane_of(values, 2, KIND, DECODE).to(COMPUTE), acc2 * alpha[:, None], IEEE
            )
            acc3 = dot(
                weights, plane_of(values, 3, KIND, DECODE).to(COMPUTE), acc3 * alpha[:, None], IEEE
            )
        if SEGMENTED:
            closes = (tile + 1 == segment_end) | (tile + 1 == high)
            if closes:
                total = tl.sum(l, 1)
                highest = m
                if SIMPLE:
                    highest = m * scale
                if stores:
                    store_state(
                        states_ptr, sums_ptr, slot + segment, highest, total, acc0, acc1, acc2,
                        acc3, USED, V_WIDTH, PLANES,
                    )  # fmt: skip
                else:
                    M0 = M
                    L0 = L
                    M, L, A0 = fold(M0, L0, A0, highest, total, acc0)
                    if PLANES > 1:
                        _, _, A1 = fold(M0, L0, A1, highest, total, acc1)
                    if PLANES > 2:
                        _, _, A2 = fold(M0, L0, A2, highest, total, acc2)
                        _, _, A3 = fold(M0, L0, A3, highest, total, acc3)
                if not ASYNCHRONOUS:
                    m = tl.full([m.shape[0]], float("-inf"), tl.float32)
                    l = tl.zeros([m.shape[0], KV_TILE], tl.float32)
                    acc0 = tl.zeros([m.shape[0], V_WIDTH], tl.float32)
                    if PLANES > 1:
                        acc1 = acc0
                    if PLANES > 2:
                        acc2 = acc0
                        acc3 = acc0
                segment += 1
                if not DEPENDS_ON_BATCH:
                    segment_end = segment_start(segment + 1) // SEGMENT_UNIT
            if ASYNCHRONOUS:
                # This stays outside the branch: Triton fails to wait for products by warp group
                # before a branch.
                m = tl.where(closes, float("-inf"), m)
                l = tl.where(closes, 0.0, l)
                acc0 = tl.where(closes, 0.0, acc0)
                if PLANES > 1:
                    acc1 = tl.where(closes, 0.0, acc1)
                if PLANES > 2:
                    acc2 = tl.where(closes, 0.0, acc2)
                    acc3 = tl.where(closes, 0.0, acc3)
    return m, l, acc0, acc1, acc2, acc3, M, L, A0, A1, A2, A3
