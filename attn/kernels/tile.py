"""What the attention kernels share: masks, paged rows, stored formats, scores.

Orientation is that of the scores, ``[query rows, keys]``. Positions are absolute in the request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.kernels import segment_start

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)

# How a KV cache stores its elements; 8-bit and 4-bit rows are read as 16-bit words, whose parts are
# planes of their own: such words can be loaded transposed, single bytes cannot.
NATIVE, E4M3, E5M2, INT8, INT4 = range(5)
_E4M3, _E5M2, _INT8, _INT4 = (tl.constexpr(kind) for kind in (E4M3, E5M2, INT8, INT4))

# How they are decoded: in plain Triton, in PTX for any NVIDIA GPU, or by sm_89's conversions.
PLAIN, PTX, PTX_SM89 = range(3)
_PLAIN, _PTX_SM89 = tl.constexpr(PLAIN), tl.constexpr(PTX_SM89)


@triton.jit
def is_visible(
    query,
    key,
    reach,
    kv_len,
    window,
    chunk,
    lookback,
    prefix,
    range_first,
    range_last,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RSWA: tl.constexpr,
    RANGES: tl.constexpr,
    CLAMP: tl.constexpr,
):
    """Which keys a query sees; positions that broadcast against each other.

    ``reach`` is the last key that causality and KV length leave to the query (:func:`reach_of`);
    ``range_first`` and ``range_last`` are its own range's (:func:`own_range`).
    """
    seen = key <= reach
    if CHUNK:
        seen = seen & (query // chunk - key // chunk <= lookback)
    if RSWA:
        seen = seen & ((query - key < window) | (key < prefix))
    elif WINDOW and not CHUNK:
        seen = seen & (query - key < window)
        if CAUSAL != 1:
            seen = seen & (key - query < window)
    if RANGES:
        inside = (key >= range_first) & (key <= range_last) & (key < kv_len)
        if CLAMP:
            inside = inside & (query - key < window)
        seen = seen | inside
    return seen


@triton.jit
def own_range(query, ranges_ptr, num_ranges):
    """First and last key of the ranges that a query lies in; the first is above the last without
    any. Ranges that share a query have no gap between them, so two numbers say it all.
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
    """Last key that a query may see; CAUSAL is 0 (never), 1 (always) or 2 (as ``causal`` says)."""
    reach = query * 0 + kv_len - 1
    if CAUSAL == 1:
        reach = tl.minimum(query, reach)
    elif CAUSAL == 2:
        reach = tl.where(causal != 0, tl.minimum(query, reach), reach)
    return reach


@triton.jit
def last_visible(
    last,
    kv_len,
    causal,
    window,
    ranges_ptr,
    num_ranges,
    first,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    RSWA: tl.constexpr,
    RANGES: tl.constexpr,
):
    """End (exclusive) of what queries in ``[first, last]`` may see."""
    stop = kv_len
    if CAUSAL == 1:
        stop = tl.minimum(kv_len, last + 1)
    elif CAUSAL == 2:
        stop = tl.where(causal != 0, tl.minimum(kv_len, last + 1), kv_len)
    if WINDOW and not CHUNK and not RSWA and CAUSAL != 1:
        stop = tl.minimum(stop, last + window)
    if RANGES:
        for i in range(num_ranges):
            low = tl.load(ranges_ptr + 2 * i)
            high = tl.load(ranges_ptr + 2 * i + 1)
            meets = (low < high) & (low <= last) & (high >= first)
            stop = tl.where(meets, tl.maximum(stop, tl.minimum(high + 1, kv_len)), stop)
    return stop


@triton.jit
def biased(scores, distance, slope, soft_cap, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in units of log 2, soft cap and position bias included.

    With SOFT_CAP they come in natural units, else times log2(e) already. ``distance`` is key minus
    query position; ALIBI is 0 (none), 1 (linear) or 2 (square root).
    """
    if SOFT_CAP:
        # c * tanh(x / c); exp2 saturates on both sides, so that tanh becomes exactly +-1.
        turns = tl.exp2(scores * (2.0 * _LOG2E / soft_cap))
        scores = (soft_cap * _LOG2E) * (1.0 - 2.0 / (turns + 1.0))
    if ALIBI == 1:
        scores += (slope * _LOG2E)[:, None] * distance.to(tl.float32)
    elif ALIBI == 2:
        away = tl.sqrt(tl.maximum(-distance, 0).to(tl.float32))
        scores -= (slope * _LOG2E)[:, None] * away
    return scores


@triton.jit
def _near_runs(tile, low, high, hole, SUB: tl.constexpr, PAGES: tl.constexpr, HOLE: tl.constexpr):
    """Runs of ``SUB`` tokens of a tile, moved into the slots that may be read, and their limits.

    Slots in ``[low, high)`` may be read, with HOLE those below ``hole`` too. All ``[PAGES]``.
    """
    run = tile * PAGES + tl.arange(0, PAGES)
    first = run * 0 + low
    last = run * 0 + tl.maximum(high - 1, 0)
    if HOLE:
        early = run * SUB < hole
        first = tl.where(early, 0, first)
        last = tl.where(early, hole - 1, last)
    return tl.minimum(tl.maximum(run, first // SUB), last // SUB), first, last


@triton.jit
def page_ids(
    table_ptr, tile, low, high, hole, SUB: tl.constexpr, PARTS: tl.constexpr, PAGES: tl.constexpr,
    HOLE: tl.constexpr,
):  # fmt: skip
    """Physical block of each run of ``SUB`` tokens of a tile, ``[PAGES]``.

    A page is cut into PARTS runs, so that pages of any multiple of 16 tokens fit tiles. No entry of
    the table is looked at but those of slots that may be read.
    """
    run, _, _ = _near_runs(tile, low, high, hole, SUB, PAGES, HOLE)
    return tl.load(table_ptr + run // PARTS)


@triton.jit
def paged_rows(
    pages, tile, low, high, hole, stride_block, stride_token, CLAMP: tl.constexpr,
    SUB: tl.constexpr, PARTS: tl.constexpr, PAGES: tl.constexpr, HOLE: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """int64 offset of each token of a tile, ``[PAGES * SUB]``; with CLAMP of the nearest slot that
    may be read: others can hold anything, and 0 * NaN is NaN.
    """
    step = tl.arange(0, SUB)[None, :]
    if CLAMP:
        run, first, last = _near_runs(tile, low, high, hole, SUB, PAGES, HOLE)
        token = (tile * (PAGES * SUB) + tl.arange(0, PAGES) * SUB)[:, None] + step
        token = tl.minimum(tl.maximum(token, first[:, None]), last[:, None])
        within = token - (run // PARTS * (PARTS * SUB))[:, None]
    else:
        run = tile * PAGES + tl.arange(0, PAGES)
        within = (run % PARTS * SUB)[:, None] + step
    rows = (pages.to(tl.int64) * stride_block)[:, None] + within * stride_token
    # The hint belongs here: on the result of a call it is lost, and asynchronous copies with it.
    return tl.multiple_of(tl.reshape(rows, [PAGES * SUB]), ALIGN)


@triton.jit
def plane_columns(index, plane, width, KIND: tl.constexpr):
    """Element of a row that a 16-bit word holds in ``plane``; ``width`` elements per row."""
    if KIND == 0:
        column = index
    elif KIND == _INT4:
        # Word i holds bytes 2i and 2i + 1; a byte holds element b and, high, b + width / 2.
        column = 2 * index + plane % 2 + (plane // 2) * (width // 2)
    else:
        column = 2 * index + plane
    return column


@triton.jit
def _by_ptx(words, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


def _ptx(body: str) -> tl.constexpr:
    """PTX over a pair of words in ``$1``, to a pair of fp16 in ``$0``."""
    return tl.constexpr("{ .reg .b32 a, b, c; .reg .b16 l, h; " + body + " }")


_SM89 = " mov.b32 {l, h}, a; cvt.rn.f16x2.e4m3x2 $0, l;"
# e4m3 has fp16's sign and, one bit further right, 4 of its exponent bits: bias 7 against 15.
_SHIFTED = (
    " shr.u32 b, a, 1; and.b32 b, b, 0x3F803F80; and.b32 a, a, 0x80008000; or.b32 a, a, b;"
    " mov.b32 c, 0x5C005C00; mul.rn.f16x2 $0, a, c;"
)
# In the mantissa of 1024.0 an integer stands as itself: 1024 + 128 + value, 1024 + 8 + value.
_SIGNED8 = (
    " xor.b32 a, a, 0x00800080; or.b32 a, a, 0x64006400;"
    " mov.b32 c, 0x64806480; sub.rn.f16x2 $0, a, c;"
)
_OFFSET4 = (
    " and.b32 a, a, 0x000F000F; or.b32 a, a, 0x64006400;"
    " mov.b32 c, 0x64086408; sub.rn.f16x2 $0, a, c;"
)
_SM89_LOW = _ptx("prmt.b32 a, $1, 0, 0x4420;" + _SM89)
_SM89_HIGH = _ptx("prmt.b32 a, $1, 0, 0x4431;" + _SM89)
_E4M3_LOW = _ptx("prmt.b32 a, $1, 0, 0x2404;" + _SHIFTED)
_E4M3_HIGH = _ptx("prmt.b32 a, $1, 0, 0x3414;" + _SHIFTED)
# e5m2 is the upper byte of fp16.
_E5M2_LOW = _ptx("prmt.b32 $0, $1, 0, 0x2404;")
_E5M2_HIGH = _ptx("prmt.b32 $0, $1, 0, 0x3414;")
_INT8_LOW = _ptx("prmt.b32 a, $1, 0, 0x4240;" + _SIGNED8)
_INT8_HIGH = _ptx("prmt.b32 a, $1, 0, 0x4341;" + _SIGNED8)
_INT4_0, _INT4_1, _INT4_2, _INT4_3 = (
    _ptx(f"shr.u32 a, $1, {shift};" + _OFFSET4) for shift in (0, 8, 4, 12)
)


@triton.jit
def _plain_plane(words, PLANE: tl.constexpr, KIND: tl.constexpr):
    """One plane of int16 words as fp16, exactly."""
    if KIND == _INT4:
        SHIFT: tl.constexpr = (PLANE % 2) * 8 + (PLANE // 2) * 4
        plane = ((words >> SHIFT) & 15).to(tl.float16) - 8.0
    elif KIND == _INT8:
        byte = words >> 8 if PLANE == 1 else (words << 8) >> 8
        plane = byte.to(tl.float16)
    else:
        upper = words & -256 if PLANE == 1 else words << 8
        if KIND == _E5M2:
            plane = upper.to(tl.float16, bitcast=True)
        else:
            bits = ((upper >> 1) & 0x3F80) | (upper & -32768)
            plane = bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return plane


@triton.jit
def _ptx_plane(words, PLANE: tl.constexpr, KIND: tl.constexpr, DECODE: tl.constexpr):
    if KIND == _INT4:
        if PLANE == 0:
            plane = _by_ptx(words, _INT4_0)
        elif PLANE == 1:
            plane = _by_ptx(words, _INT4_1)
        elif PLANE == 2:
            plane = _by_ptx(words, _INT4_2)
        else:
            plane = _by_ptx(words, _INT4_3)
    elif KIND == _INT8:
        plane = _by_ptx(words, _INT8_LOW) if PLANE == 0 else _by_ptx(words, _INT8_HIGH)
    elif KIND == _E5M2:
        plane = _by_ptx(words, _E5M2_LOW) if PLANE == 0 else _by_ptx(words, _E5M2_HIGH)
    elif DECODE == _PTX_SM89:
        plane = _by_ptx(words, _SM89_LOW) if PLANE == 0 else _by_ptx(words, _SM89_HIGH)
    else:
        plane = _by_ptx(words, _E4M3_LOW) if PLANE == 0 else _by_ptx(words, _E4M3_HIGH)
    return plane


@triton.jit
def plane_of(words, PLANE: tl.constexpr, KIND: tl.constexpr, DECODE: tl.constexpr):
    """Elements of one plane, fp16 for stored 8-bit and 4-bit kinds; native rows are their own."""
    if KIND == 0:
        plane = words
    elif DECODE == _PLAIN:
        plane = _plain_plane(words, PLANE, KIND)
    else:
        plane = _ptx_plane(words, PLANE, KIND, DECODE)
    return plane


@triton.jit
def recomputed(number, DECODE: tl.constexpr):
    """``number``, in a way that the compiler cannot see through: what follows from it is computed
    once more, instead of being kept in registers that a loop in between needs.
    """
    if DECODE != _PLAIN:
        number = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
        )
    return number


@triton.jit
def power_of_two_guard(largest):
    """fp32 powers of two g and 1 / g that bring ``largest`` to [2^10, 2^11): fp16 holds it then."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    # Zero and subnormals keep a factor that is finite both ways.
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
def _halves(x):
    """``[M, W]`` as its left and its right half."""
    parts = tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2])
    return tl.split(tl.permute(parts, (0, 2, 1)))


@triton.jit
def scores_of(query, keys, accumulator, IEEE: tl.constexpr):
    """``accumulator + query @ keys.T``; long fp32 sums are cut, their error grows with them."""
    if IEEE and query.shape[1] >= 256:
        q0, q1 = _halves(query)
        k0, k1 = _halves(keys)
        zero = tl.zeros_like(accumulator)
        if query.shape[1] >= 512:
            q00, q01 = _halves(q0)
            q10, q11 = _halves(q1)
            k00, k01 = _halves(k0)
            k10, k11 = _halves(k1)
            left = dot(q00, tl.trans(k00), zero, IEEE) + dot(q01, tl.trans(k01), zero, IEEE)
            right = dot(q10, tl.trans(k10), zero, IEEE) + dot(q11, tl.trans(k11), zero, IEEE)
        else:
            left = dot(q0, tl.trans(k0), zero, IEEE)
            right = dot(q1, tl.trans(k1), zero, IEEE)
        result = accumulator + (left + right)
    else:
        result = dot(query, tl.trans(keys), accumulator, IEEE)
    return result


@triton.jit
def fold(m, l, acc, m_new, l_new, acc_new):
    """State (maximum, sum, accumulator) of two runs of keys; one function, one order of rounding.

    Explicit fma: left to the compiler, two places could contract differently and differ in bits.
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
    """State of one segment into its slot of the scratch; only rows below USED exist there."""
    row = tl.arange(0, m.shape[0])
    column = tl.arange(0, WIDTH)
    mine = row < USED
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
    FREE: tl.constexpr,
    USED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over key tiles ``[low, high)`` for one tile of query rows.

    m ``[M]``; l ``[M]``; acc* ``[M, V_WIDTH]`` and q* ``[M, K_WIDTH]``, one per plane of words;
    query ``[M]`` positions; scale ``[M]`` (times log2(e) unless SOFT_CAP). Without a block table
    (BLOCK_SIZE 0) keys lie one after another. MASK False: every row sees every key of the tiles.
    SEGMENTED: at the end of each segment (with FREE, of the run) its state goes to slot
    ``slot + segment`` if ``stores``, else it is folded into M, L, A*; l is then
    ``[M, KV_TILE]``, summed at a segment's end.
    Only slots in ``[safe_low, safe_high)``, with HOLE also below ``hole``, are read. SAME_ROWS:
    values have the strides of keys.
    """
    SUB: tl.constexpr = (
        KV_TILE if BLOCK_SIZE == 0 or BLOCK_SIZE % KV_TILE == 0 else (BLOCK_SIZE & -BLOCK_SIZE)
    )
    PAGES: tl.constexpr = KV_TILE // SUB
    PARTS: tl.constexpr = BLOCK_SIZE // SUB
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    kc = tl.arange(0, K_WIDTH)
    vc = tl.arange(0, V_WIDTH)
    within = tl.arange(0, KV_TILE)
    WORD: tl.constexpr = key_ptr.dtype.element_ty.primitive_bitwidth // 8
    BYTES: tl.constexpr = ALIGN * WORD if ALIGN * WORD < 16 else 16
    keys_at = tl.multiple_of(key_ptr + k_base, BYTES)
    values_at = tl.multiple_of(value_ptr + v_base, BYTES)
    pages = tl.zeros([PAGES], tl.int32)
    if BLOCK_SIZE > 0:
        # One tile ahead, so that the load of keys never waits for its page ids.
        pages = page_ids(table_ptr, low, safe_low, safe_high, hole, SUB, PARTS, PAGES, HOLE)
    if MASK:
        reach = reach_of(query, kv_len, causal, CAUSAL)
        range_first = reach
        range_last = reach
        if RANGES:
            # Not in the loop over tiles: with a loop inside, that one is not pipelined.
            range_first, range_last = own_range(query, ranges_ptr, num_ranges)
    if SEGMENTED:
        segment_end = high
        if not FREE:
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
                HOLE,
                1,
            )
            k_scale = tl.load(k_scale_ptr + s_rows)
            v_scale = tl.load(v_scale_ptr + s_rows)
        if BLOCK_SIZE > 0:
            pages = page_ids(
                table_ptr, tile + 1, safe_low, safe_high, hole, SUB, PARTS, PAGES, HOLE
            )

        zero = tl.zeros([m.shape[0], KV_TILE], tl.float32)
        scores = scores_of(q0, plane_of(keys, 0, KIND, DECODE).to(COMPUTE), zero, IEEE)
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
            scores = biased(scores, distance, slope, soft_cap, SOFT_CAP, ALIBI)
            if INLINE:
                # The value's scale joins the weight's exponent: their product cannot underflow.
                scores = scores + tl.log2(v_scale)[None, :]
        if MASK:
            seen = is_visible(
                query[:, None], token[None, :], reach[:, None], kv_len, window, chunk, lookback,
                prefix, range_first[:, None], range_last[:, None], CAUSAL, WINDOW, CHUNK, RSWA,
                RANGES, CLAMP,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.max(scores, 1)
        if SIMPLE:
            top = top * scale
        top = tl.maximum(m, top)
        base = top
        if MASK:
            base = tl.where(top == float("-inf"), 0.0, top)
        if SIMPLE:
            weights = tl.exp2(tl.fma(scores, scale[:, None], -base[:, None]))
        else:
            weights = tl.exp2(scores - base[:, None])
        alpha = tl.exp2(m - base)
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
            if (tile + 1 == segment_end) | (tile + 1 == high):
                total = tl.sum(l, 1)
                if stores:
                    store_state(
                        states_ptr, sums_ptr, slot + segment, m, total, acc0, acc1, acc2, acc3,
                        USED, V_WIDTH, PLANES,
                    )  # fmt: skip
                else:
                    M0 = M
                    L0 = L
                    M, L, A0 = fold(M0, L0, A0, m, total, acc0)
                    if PLANES > 1:
                        _, _, A1 = fold(M0, L0, A1, m, total, acc1)
                    if PLANES > 2:
                        _, _, A2 = fold(M0, L0, A2, m, total, acc2)
                        _, _, A3 = fold(M0, L0, A3, m, total, acc3)
                m = tl.full([m.shape[0]], float("-inf"), tl.float32)
                l = tl.zeros([m.shape[0], KV_TILE], tl.float32)
                acc0 = tl.zeros([m.shape[0], V_WIDTH], tl.float32)
                if PLANES > 1:
                    acc1 = acc0
                if PLANES > 2:
                    acc2 = acc0
                    acc3 = acc0
                segment += 1
                if not FREE:
                    segment_end = segment_start(segment + 1) // SEGMENT_UNIT
    return m, l, acc0, acc1, acc2, acc3, M, L, A0, A1, A2, A3
