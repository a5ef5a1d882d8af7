"""Sparse latent (MLA) attention: each query row attends the latent rows that it lists.

A row's list is cut into segments by position in the list. A program walks over some of them with
all the heads of a tile, so that a listed row is read once for those; the row is key and value. It
folds the states of its segments in order if they are the whole list, or stores them, to be folded
in the same order by :func:`fold_states_kernel`: up to 16 heads with the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn.kernels.dense.query_rows import load_query, load_state, write_rows
from attn.kernels.dense.tile import dot, fold, scores_of, store_state
from attn.kernels.lang.numerics import INTERPRETED, decode_e4m3, saturate_to, to_float32
from attn.kernels.lang.stored import E4M3

_E4M3 = tl.constexpr(E4M3)
_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = tl.constexpr(128)

SPREAD = (
    " prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"
    " shr.u32 d, a, 4; and.b32 d, d, 0x07F007F0; and.b32 a, a, 0x80008000; or.b32 a, a, d;"
    " shr.u32 d, b, 4; and.b32 d, d, 0x07F007F0; and.b32 b, b, 0x80008000; or.b32 b, b, d;"
)
"""PTX: four e4m3 in $2 to pairs of bf16 in a and b, by way of d: the same bits, three exponent bits
further right, are 2^-120 times as much."""
# Times the factors in $3 and $4, exactly where these are powers of two.
_TO_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, z; mov.b32 z, 0x80008000; mov.b32 c, 0x7B807B80;"
    + SPREAD
    + " fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 b, b, c, z;"
    " fma.rn.bf16x2 $0, a, $3, z; fma.rn.bf16x2 $1, b, $4, z; }"
)
_TO_BF16_PLAIN = tl.constexpr(
    "{ .reg .b32 a, b, c, d, z; mov.b32 z, 0x80008000; mov.b32 c, 0x7B807B80;"
    + SPREAD
    + " fma.rn.bf16x2 $0, a, c, z; fma.rn.bf16x2 $1, b, c, z; }"
)


@triton.jit
def _row_offsets(ids, block, stride, BLOCK_SIZE: tl.constexpr):
    """int64 offset of listed rows in units of the row's alignment; that of -1 is not to be read."""
    if BLOCK_SIZE == 1:
        offset = ids.to(tl.int64) * stride
    else:
        slot = tl.maximum(ids, 0)
        offset = (slot // BLOCK_SIZE).to(tl.int64) * block
        offset += (slot % BLOCK_SIZE).to(tl.int64) * stride
    return offset


@triton.jit
def _listed(ids_ptr, tile, length, KV_TILE: tl.constexpr):
    """Listed rows of one step, -1 from ``length`` on, which is not looked at."""
    at = tile * KV_TILE + tl.arange(0, KV_TILE)
    return tl.load(ids_ptr + at, mask=at < length, other=-1)


@triton.jit
def _elements(stored, factors, KIND: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr,
              HARDWARE_E4M3: tl.constexpr):  # fmt: skip
    """Stored elements ``[KV, WIDTH]`` in the type of the products; SCALED: times ``[KV, BLOCKS]``,
    each for as many of them.
    """
    KV: tl.constexpr = stored.shape[0]
    WIDTH: tl.constexpr = stored.shape[1]
    if KIND == 0:
        elements = stored.to(COMPUTE)
    elif tl.bfloat16 == COMPUTE and not INTERPRETED:
        if SCALED:
            narrow = factors.to(tl.bfloat16)
            BLOCKS: tl.constexpr = factors.shape[1]
            wide = tl.broadcast_to(narrow[:, :, None], [KV, BLOCKS, WIDTH // BLOCKS])
            wide = tl.reshape(wide, [KV, WIDTH])
            elements = tl.inline_asm_elementwise(
                _TO_BF16, "=r,=r,r,r,r", [stored, wide], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            elements = tl.inline_asm_elementwise(
                _TO_BF16_PLAIN, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    else:
        real = decode_e4m3(stored, HARDWARE_E4M3).to(tl.float32)
        if SCALED:
            blocks = tl.reshape(real, [KV, factors.shape[1], WIDTH // factors.shape[1]])
            real = tl.reshape(blocks * factors[:, :, None], [KV, WIDTH])
        elements = saturate_to(real, COMPUTE)
    return elements


@triton.jit
def _weights_of(scores, m, there, scale):
    """New maxima, what to multiply old sums by, and weights, of ``[ROWS, KV]`` scores."""
    scores = tl.where(there[None, :], scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    base = tl.where(top == float("-inf"), 0.0, top)
    # Explicit fma: left to the compiler, two launches could contract differently.
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, -base[:, None]))
    return top, tl.exp2(m - base), weights


@triton.jit
def _latent_of(
    ids, latent_ptr, block, stride, BLOCK_SIZE: tl.constexpr, LATENT_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Latent parts of listed rows as they are stored, ``[KV, WIDTH]``.

    Zeros in place of rows that are not there: a weight of zero does not undo NaN.
    """
    offset = _row_offsets(ids, block, stride, BLOCK_SIZE) * LATENT_UNIT
    column = tl.arange(0, WIDTH)
    there = (ids >= 0)[:, None]
    return tl.load(latent_ptr + (offset[:, None] + column[None, :]), mask=there, other=0)


@triton.jit
def _attend_listed(
    m, l, acc, ids, ahead, latent, q, r, scale, latent_ptr, rope_ptr, scales_ptr, block,
    stride, BLOCK_SIZE: tl.constexpr, LATENT_UNIT: tl.constexpr, ROPE_UNIT: tl.constexpr,
    SCALE_UNIT: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, KIND: tl.constexpr,
    SCALED: tl.constexpr, COMPUTE: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
    HOLDS_NEXT: tl.constexpr,
):  # fmt: skip
    """Online softmax over one step's listed rows; those of -1 are neither read nor counted.

    HOLDS_NEXT: ``latent`` is the step's, and that of the rows ``ahead`` is returned in its place.
    """
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    there = ids >= 0
    offset = _row_offsets(ids, block, stride, BLOCK_SIZE)
    rotary = tl.arange(0, ROPE)
    if not HOLDS_NEXT:
        latent = _latent_of(ids, latent_ptr, block, stride, BLOCK_SIZE, LATENT_UNIT, WIDTH)
    rope = tl.load(
        rope_ptr + ((offset * ROPE_UNIT)[:, None] + rotary[None, :]), mask=there[:, None], other=0
    )
    factors = 0.0
    if SCALED:
        part = tl.arange(0, WIDTH // _BLOCK)
        factors = tl.load(
            scales_ptr + ((offset * SCALE_UNIT)[:, None] + part[None, :]),
            mask=there[:, None], other=0,
        )  # fmt: skip
    k = _elements(latent, factors, KIND, SCALED, COMPUTE, HARDWARE_E4M3)
    if KIND == 0 or not SCALED:
        p = _elements(rope, 0.0, KIND, False, COMPUTE, HARDWARE_E4M3)
    elif tl.bfloat16 == COMPUTE:
        p = rope
    else:
        p = saturate_to(to_float32(rope), COMPUTE)
    scores = tl.zeros([m.shape[0], ids.shape[0]], tl.float32)
    scores = scores_of(q, k, scores, IEEE)
    scores = scores_of(r, p, scores, IEEE)
    if HOLDS_NEXT:
        # Asked for once this step's are no longer in registers, and not earlier.
        latent = _latent_of(ahead, latent_ptr, block, stride, BLOCK_SIZE, LATENT_UNIT, WIDTH)
    top, alpha, weights = _weights_of(scores, m, there, scale)
    l = tl.fma(l, alpha, tl.sum(weights, 1))
    weights = weights.to(COMPUTE)
    acc = dot(weights, k, acc * alpha[:, None], IEEE)
    return top, l, acc, latent


@triton.jit
def _write(
    m, l, acc, token, head, wanted, out_ptr, lse_ptr, sinks_ptr, factor, out_token, out_head,
    lse_token, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Result of some heads of one row, ``[ROWS, WIDTH]``."""
    columns = tl.arange(0, acc.shape[1])
    write_rows(
        m, l, acc, head * 0 + token, head, wanted, columns, columns >= 0, out_ptr, lse_ptr,
        sinks_ptr, factor, None, out_token, out_head, lse_token, SINKS, False, LSE, False,
    )  # fmt: skip


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
):
    """Attention over listed rows; grid ``(T * HEAD_TILES, cdiv(SEGMENTS, SPAN))``.

    Shapes: query ``[T, NUM_HEADS, WIDTH]`` and rotary ``[T, NUM_HEADS, ROPE]``; latent, rope and
    scales are fields of the cache's rows, at offsets in units of the rows' alignment; ids
    ``[T, topk]`` and lens ``[T]`` int32; out ``[T, NUM_HEADS, WIDTH]``, LSE ``[T, NUM_HEADS]``.
    States go to slot ``(token * HEAD_TILES + tile) * SEGMENTS + segment``.
    """
    if HASTENS:
        # Who folds may start, and waits by itself.
        gdc_launch_dependents()
    TILES: tl.constexpr = SEGMENT // KV_TILE
    WHOLE: tl.constexpr = SPAN >= SEGMENTS
    pid = tl.program_id(0)
    # Tiles of a row's heads are neighbours, so that they find its rows in the L2 cache.
    token = (pid // HEAD_TILES).to(tl.int64)
    in_group = (pid % HEAD_TILES) * ROWS
    part = tl.program_id(1)
    if lens_ptr is None:
        length = topk
    else:
        length = tl.minimum(tl.load(lens_ptr + token), topk)
    low = part * (SPAN * TILES)
    high = tl.minimum(low + SPAN * TILES, tl.cdiv(length, KV_TILE))
    row = tl.arange(0, ROWS)
    head = in_group + row
    wanted = head < NUM_HEADS
    # Known to run at least once, the loop keeps the products by warp group of Triton 3.6 apart.
    if high > low:
        offset = token * query_token + head * query_head
        q = load_query(query_ptr, offset, wanted, 0, WIDTH, WIDTH, WIDTH, 0).to(COMPUTE)
        offset = token * rotary_token + head * rotary_head
        r = load_query(rotary_ptr, offset, wanted, 0, ROPE, ROPE, ROPE, 0).to(COMPUTE)
        factor = 1.0
        if factor_ptr is not None:
            factor = tl.load(factor_ptr)
        logits_scale = scale * factor * _LOG2E
        mine = ids_ptr + token * ids_row
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        M = m
        L = l
        A = acc
        slot = pid * SEGMENTS
        ids = _listed(mine, low, length, KV_TILE)
        ahead = _listed(mine, low + 1, length, KV_TILE)
        latent = 0
        if HOLDS_NEXT:
            latent = _latent_of(
                ids, latent_ptr, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE, LATENT_UNIT, WIDTH
            )
        for tile in tl.range(low, high, num_stages=STAGES, disable_licm=True):
            if not CARRIES_IDS:
                ids = _listed(mine, tile, length, KV_TILE)
            m, l, acc, held = _attend_listed(
                m, l, acc, ids, ahead, latent, q, r, logits_scale, latent_ptr, rope_ptr,
                scales_ptr, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE, LATENT_UNIT, ROPE_UNIT, SCALE_UNIT,
                WIDTH, ROPE, KIND, SCALED, COMPUTE, HARDWARE_E4M3, HOLDS_NEXT,
            )  # fmt: skip
            if HOLDS_NEXT:
                latent = held
            if CARRIES_IDS:
                # Triton does not pipeline a loop that merely hands a value on.
                ids = tl.maximum(ahead, -1)
                ahead = _listed(mine, tile + 2, length, KV_TILE)
            if FOLDS and SPAN > 1:
                if ((tile + 1) % TILES == 0) | (tile + 1 == high):
                    if WHOLE:
                        M, L, A = fold(M, L, A, m, l, acc)
                    else:
                        store_state(
                            states_ptr, sums_ptr, slot + tile // TILES, m, l, acc, None, None,
                            None, ROWS, WIDTH, 1,
                        )  # fmt: skip
                    m = tl.full([ROWS], float("-inf"), tl.float32)
                    l = tl.zeros([ROWS], tl.float32)
                    acc = tl.zeros_like(acc)
        if WHOLE:
            if not (FOLDS and SPAN > 1):
                M = m
                L = l
                A = acc
            _write(
                M, L, A, token, head, wanted, out_ptr, lse_ptr, sinks_ptr, factor, out_token,
                out_head, lse_token, SINKS, LSE,
            )  # fmt: skip
        elif not (FOLDS and SPAN > 1):
            store_state(
                states_ptr, sums_ptr, slot + part, m, l, acc, None, None, None, ROWS, WIDTH, 1,
            )  # fmt: skip
    elif WHOLE:
        nothing = tl.zeros([ROWS, WIDTH], tl.float32)
        _write(
            tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), nothing,
            token, head, wanted, out_ptr, lse_ptr, sinks_ptr, 1.0, out_token, out_head, lse_token,
            SINKS, LSE,
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
    """Fold a row's stored states in order and write it; a program has some heads' columns.

    Grid ``(T * HEAD_TILES, ROWS // FINISH_ROWS, WIDTH // FINISH_WIDTH)``; shapes as above. Segments
    that no key is listed in were not stored, and are not read. WAITS: it may have been started
    while they are written.
    """
    if WAITS:
        gdc_wait()
    pid = tl.program_id(0)
    token = (pid // HEAD_TILES).to(tl.int64)
    row = tl.program_id(1) * FINISH_ROWS + tl.arange(0, FINISH_ROWS)
    head = (pid % HEAD_TILES) * ROWS + row
    wanted = head < NUM_HEADS
    columns = tl.program_id(2) * FINISH_WIDTH + tl.arange(0, FINISH_WIDTH)
    cells = row[:, None] * WIDTH + columns[None, :]
    if lens_ptr is None:
        length = topk
    else:
        length = tl.minimum(tl.load(lens_ptr + token), topk)
    parts = tl.cdiv(length, SEGMENT)
    m = tl.full([FINISH_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([FINISH_ROWS], tl.float32)
    acc = tl.zeros([FINISH_ROWS, FINISH_WIDTH], tl.float32)
    slot = pid * SEGMENTS
    for part in tl.static_range(SEGMENTS):
        # Past the last one the empty state, which folds as the identity.
        there = wanted & (part < parts)
        mask = there[:, None] & (columns >= 0)[None, :]
        n, k, b = load_state(
            states_ptr, sums_ptr, slot + part, row, cells, there, mask, ROWS, WIDTH
        )
        m, l, acc = fold(m, l, acc, n, k, b)
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    at = row * 0 + token
    write_rows(
        m, l, acc, at, head, wanted, columns, columns >= 0, out_ptr, lse_ptr, sinks_ptr, factor,
        None, out_token, out_head, lse_token, SINKS, False, LSE, False,
    )  # fmt: skip
