"""The portable kernel of sparse latent attention for many heads: tiles of 64 heads.

On Hopper, products of such tiles are computed by warp groups. A program takes one segment of a
token's list for the heads of a tile and walks it in steps. If a list has several segments, the
program stores a state, and :func:`attn.kernels.sparse.attend.fold_states_kernel` folds the states.

Triton copies the rows of a step while the products of the step before run, and a thread spends most
of its time on computing addresses. So rows are loaded in two halves, of each of which a thread has
few rows and many columns. Rows are also prefetched into the L2 cache one step ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from attn.kernels.dense.query_rows import load_query, write_rows
from attn.kernels.dense.tile import dot, halves_of, scores_of, store_state
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.groups import Out
from attn.kernels.lang.numerics import INTERPRETED, saturate_to, to_float32
from attn.kernels.sparse.listed_rows import SPREAD, elements_of, listed_ids, row_offsets, weights_of

_BLOCK = tl.constexpr(128)
_LINE = tl.constexpr(128)
"""Bytes of a line of the L2 cache."""
_SHRUNK = tl.constexpr(2.0**-32)
"""An extra factor of e4m3 elements: without it, 2^120 times their scale would exceed bf16."""
_LARGEST = tl.constexpr(2.0**39)
"""Largest scale of a block; larger ones are cut to it. Its latents reach 2^47, as no model's do."""
_TO_SHRUNK = tl.constexpr(
    "{ .reg .b32 a, b, d, z; mov.b32 z, 0x80008000;"
    + SPREAD
    + " fma.rn.bf16x2 $0, a, $3, z; fma.rn.bf16x2 $1, b, $4, z; }"
)


@triton.jit
def _listed_whole(ids_ptr, tile, high, length, HAS_LENS: tl.constexpr, KV_TILE: tl.constexpr):
    """Listed rows of one step of KV_TILE entries, where ``topk`` is a multiple of KV_TILE.

    Steps from ``high`` on give the last step before ``high``. So every address is valid, and no
    entry needs a test of its own. With HAS_LENS, entries from ``length`` on are -1.
    """
    first = tl.minimum(tile, high - 1) * KV_TILE
    entry = tl.arange(0, KV_TILE)
    at = (ids_ptr + first) + entry
    if INTERPRETED:
        ids = tl.load(at)
    else:
        # Inline assembly, since Triton would copy a load of its own to shared memory first, entry
        # by entry.
        ids = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=True, pack=1
        )
    if HAS_LENS:
        ids = tl.where(entry < length - first, ids, -1)
    return ids


@triton.jit
def _entries(ids_ptr, tile, high, length, WHOLE_STEPS: tl.constexpr, HAS_LENS: tl.constexpr,
             KV_TILE: tl.constexpr):  # fmt: skip
    """Listed rows of a step, -1 where the list has no row."""
    if WHOLE_STEPS:
        ids = _listed_whole(ids_ptr, tile, high, length, HAS_LENS, KV_TILE)
    else:
        ids = listed_ids(ids_ptr, tile, length, KV_TILE)
    return ids


@triton.jit
def _ask_for(ids, latent_ptr, BLOCK_SIZE: tl.constexpr, BLOCK_UNITS: tl.constexpr,
             ROW_UNITS: tl.constexpr, LATENT_UNIT: tl.constexpr,
             ROW_BYTES: tl.constexpr):  # fmt: skip
    """Prefetch listed rows into the L2 cache, line by line."""
    ELEMENT: tl.constexpr = latent_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = triton.next_power_of_2(ROW_BYTES // _LINE + 1)
    offset = row_offsets(ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE) * LATENT_UNIT
    line = tl.arange(0, LINES) * (_LINE // ELEMENT)
    at = (latent_ptr + line)[None, :] + offset[:, None]
    wanted = (ids >= 0)[:, None] & (line < ROW_BYTES // ELEMENT)[None, :]
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [at, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _keys_of(stored, factors, KIND: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr,
             HARDWARE_E4M3: tl.constexpr, SHRINKS: tl.constexpr):  # fmt: skip
    """Stored elements, converted to the type of the products.

    With SHRINKS they are 2^-32 times as large, which takes one product for each pair of elements.
    """
    if SHRINKS:
        KV: tl.constexpr = stored.shape[0]
        WIDTH: tl.constexpr = stored.shape[1]
        BLOCKS: tl.constexpr = factors.shape[1]
        narrow = (tl.minimum(factors, _LARGEST) * (_SHRUNK * 2.0**120)).to(tl.bfloat16)
        wide = tl.broadcast_to(narrow[:, :, None], [KV, BLOCKS, WIDTH // BLOCKS])
        elements = tl.inline_asm_elementwise(
            _TO_SHRUNK, "=r,=r,r,r,r", [stored, tl.reshape(wide, [KV, WIDTH])], dtype=tl.bfloat16,
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        elements = elements_of(stored, factors, KIND, SCALED, COMPUTE, HARDWARE_E4M3)
    return elements


@triton.jit
def _attend_step(
    m, l, acc0, acc1, ids, steps, q0, q1, r, scale, latent_ptr, rope_ptr, scales_ptr,
    BLOCK_SIZE: tl.constexpr, BLOCK_UNITS: tl.constexpr, ROW_UNITS: tl.constexpr,
    LATENT_UNIT: tl.constexpr, ROPE_UNIT: tl.constexpr, SCALE_UNIT: tl.constexpr,
    ROPE: tl.constexpr, KIND: tl.constexpr, SCALED: tl.constexpr, COMPUTE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr, SHRINKS: tl.constexpr,
):  # fmt: skip
    """Online softmax over one step's listed rows; entries of -1 are neither read nor counted."""
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    HALF: tl.constexpr = q0.shape[1]
    there = ids >= 0
    offset = row_offsets(ids, BLOCK_UNITS, ROW_UNITS, BLOCK_SIZE)
    column = tl.arange(0, HALF)
    rotary = tl.arange(0, ROPE)
    # An entry of -1 gives a row of zeros: its weight is zero, but zero times NaN is NaN.
    at = (latent_ptr + column)[None, :] + (offset * LATENT_UNIT)[:, None]
    left = tl.load(at, mask=there[:, None], other=0)
    right = tl.load(at + HALF, mask=there[:, None], other=0)
    at = (rope_ptr + rotary)[None, :] + (offset * ROPE_UNIT)[:, None]
    rope = tl.load(at, mask=there[:, None], other=0)
    f0 = 0.0
    f1 = 0.0
    if SCALED:
        part = tl.arange(0, 2 * HALF // _BLOCK)
        at = (scales_ptr + part)[None, :] + (offset * SCALE_UNIT)[:, None]
        f0 = tl.load(at, mask=there[:, None], other=0)
        f1 = f0
        if HALF >= _BLOCK:
            f0, f1 = halves_of(f0)
    k0 = _keys_of(left, f0, KIND, SCALED, COMPUTE, HARDWARE_E4M3, SHRINKS)
    k1 = _keys_of(right, f1, KIND, SCALED, COMPUTE, HARDWARE_E4M3, SHRINKS)
    if KIND == 0 or not SCALED:
        p = elements_of(rope, 0.0, KIND, False, COMPUTE, HARDWARE_E4M3)
    elif tl.bfloat16 == COMPUTE:
        p = rope
    else:
        p = saturate_to(to_float32(rope), COMPUTE)
    # Where Triton sees that one product feeds another, it has both warp groups compute all of the
    # first. The fma keeps it from merging the score products into one chain, and the branch hides
    # that the scores feed the next products.
    zero = tl.zeros([m.shape[0], ids.shape[0]], tl.float32)
    grow = zero + (1.0 / _SHRUNK if SHRINKS else 1.0)
    scores = tl.fma(scores_of(q0, k0, zero, IEEE), grow, scores_of(r, p, zero, IEEE))
    scores = tl.fma(scores_of(q1, k1, zero, IEEE), grow, scores)
    top = m
    alpha = m
    weights = scores
    if steps > 0:
        top, alpha, weights = weights_of(scores, m, there, scale)
    # Sums are kept by thread; warps exchange them only at the end.
    parts = tl.reshape(weights, [weights.shape[0], 2, weights.shape[1] // 16, 4, 2])
    l = tl.fma(l, tl.zeros_like(l) + alpha[:, None, None], tl.sum(tl.sum(parts, 4), 2))
    weights = weights.to(COMPUTE)
    acc0 = dot(weights, k0, acc0 * alpha[:, None], IEEE)
    acc1 = dot(weights, k1, acc1 * alpha[:, None], IEEE)
    return top, l, acc0, acc1


@triton.jit(
    do_not_specialize=["lse_token", "ids_row", "topk"],
    do_not_specialize_on_alignment=["ids_ptr", "lens_ptr", "lse_ptr", "factor_ptr", "sinks_ptr"],
)
def sparse_mla_many_kernel(
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
    SEGMENTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_UNITS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    LATENT_UNIT: tl.constexpr,
    ROPE_UNIT: tl.constexpr,
    SCALE_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    STAGES: tl.constexpr,
    HASTENS: tl.constexpr,
):
    """Attention over listed rows; grid ``(T * HEAD_TILES, SEGMENTS)``.

    Shapes: query ``[T, NUM_HEADS, WIDTH]``, rotary ``[T, NUM_HEADS, ROPE]``, ids ``[T, topk]`` and
    lens ``[T]`` int32, out ``[T, NUM_HEADS, WIDTH]``, LSE ``[T, NUM_HEADS]`` fp32. Latent, rope and
    scales are fields of the cache's rows; offsets of rows are in units of the rows' alignment.

    With several segments, states are stored for
    :func:`attn.kernels.sparse.attend.fold_states_kernel`, at slot
    ``(token * HEAD_TILES + tile) * SEGMENTS + segment``. WHOLE_STEPS says that topk is a multiple
    of KV_TILE.
    """
    if HASTENS:
        # The kernel that folds may be started now; it waits for this one by itself.
        gdc_launch_dependents()
    TILES: tl.constexpr = SEGMENT // KV_TILE
    HALF: tl.constexpr = WIDTH // 2
    HAS_LENS: tl.constexpr = lens_ptr is not None
    SHRINKS: tl.constexpr = SCALED and tl.bfloat16 == COMPUTE and not INTERPRETED
    pid = tl.program_id(0)
    # Programs of a token's head tiles are neighbours, so that they find its rows in the L2 cache.
    token = (pid // HEAD_TILES).to(tl.int64)
    part = tl.program_id(1)
    length = topk
    if HAS_LENS:
        length = tl.minimum(tl.load(lens_ptr + token), topk)
    low = part * TILES
    high = tl.minimum(low + TILES, tl.cdiv(length, KV_TILE))
    row = tl.arange(0, ROWS)
    head = (pid % HEAD_TILES) * ROWS + row
    wanted = head < NUM_HEADS
    column = tl.arange(0, HALF)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, HALF], tl.float32)
    acc1 = tl.zeros([ROWS, HALF], tl.float32)
    factor = 1.0
    # The branch tells Triton that the loop runs at least once. Triton 3.6 needs that to keep the
    # products of warp groups apart.
    if high > low:
        mine = ids_ptr + token * ids_row
        ids = _entries(mine, low, high, length, WHOLE_STEPS, HAS_LENS, KV_TILE)
        # The prefetch runs while the program waits for queries.
        _ask_for(ids, latent_ptr, BLOCK_SIZE, BLOCK_UNITS, ROW_UNITS, LATENT_UNIT, ROW_BYTES)
        offset = token * query_token + head * query_head
        q0 = load_query(query_ptr, offset, wanted, 0, HALF, HALF, HALF, 0).to(COMPUTE)
        q1 = load_query(query_ptr + HALF, offset, wanted, 0, HALF, HALF, HALF, 0).to(COMPUTE)
        offset = token * rotary_token + head * rotary_head
        r = load_query(rotary_ptr, offset, wanted, 0, ROPE, ROPE, ROPE, 0).to(COMPUTE)
        if factor_ptr is not None:
            factor = tl.load(factor_ptr)
        logits_scale = scale * factor * LOG2E
        l = tl.zeros([ROWS, 2, 4], tl.float32)
        ahead = _entries(mine, low + 1, high, length, WHOLE_STEPS, HAS_LENS, KV_TILE)
        for tile in tl.range(low, high, num_stages=STAGES, disable_licm=True):
            _ask_for(ahead, latent_ptr, BLOCK_SIZE, BLOCK_UNITS, ROW_UNITS, LATENT_UNIT, ROW_BYTES)
            m, l, acc0, acc1 = _attend_step(
                m, l, acc0, acc1, ids, high - tile, q0, q1, r, logits_scale, latent_ptr, rope_ptr,
                scales_ptr, BLOCK_SIZE, BLOCK_UNITS, ROW_UNITS, LATENT_UNIT, ROPE_UNIT, SCALE_UNIT,
                ROPE, KIND, SCALED, COMPUTE, HARDWARE_E4M3, SHRINKS,
            )  # fmt: skip
            # Triton does not pipeline a loop that merely hands a value on. This maximum changes
            # nothing, since ids are at least -1.
            ids = tl.maximum(ahead, -1)
            ahead = _entries(mine, tile + 2, high, length, WHOLE_STEPS, HAS_LENS, KV_TILE)
        sums = tl.sum(tl.sum(l, 2), 1)
        if SHRINKS:
            acc0 = acc0 / _SHRUNK
            acc1 = acc1 / _SHRUNK
        if SEGMENTS > 1:
            store_state(
                states_ptr, sums_ptr, pid * SEGMENTS + part, m, sums, acc0, acc1, None, None, ROWS,
                HALF, 2,
            )  # fmt: skip
    if SEGMENTS == 1:
        at = head * 0 + token
        write_rows(
            m, sums, acc0, at, head, wanted, column, column >= 0,
            Out(
                out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=None,
                out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=SINKS,
                FP8_OUT=False, LSE=LSE,
            ),
            factor, LSE, False,
        )  # fmt: skip
        write_rows(
            m, sums, acc1, at, head, wanted, column, column >= 0,
            Out(
                out_ptr=out_ptr + HALF, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr,
                output_scale_ptr=None,
                out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=SINKS,
                FP8_OUT=False, LSE=LSE,
            ),
            factor, False, False,
        )  # fmt: skip
