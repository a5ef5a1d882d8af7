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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn.kernels.dense.query_rows import load_query, write_rows
from attn.kernels.dense.tile import dot, halves_of, scores_of, store_planes
from attn.kernels.lang.constants import LOG2E, next_power_of_2
from attn.kernels.lang.groups import Out, Scratch, State
from attn.kernels.lang.numerics import INTERPRETED, saturate_to, to_float32
from attn.kernels.sparse.groups import Cache, Lists, Query, Tile
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
def _entries(ids_ptr, number, high, length, lists, tile):
    """Listed rows of step ``number``, -1 where the list at ``ids_ptr`` has no row.

    ``[KV_TILE]`` int32. The list has ``length`` entries; the program takes steps up to ``high``.
    """
    if tile.WHOLE_STEPS:
        ids = _listed_whole(ids_ptr, number, high, length, lists.lens_ptr is not None, tile.KV_TILE)
    else:
        ids = listed_ids(ids_ptr, number, length, tile.KV_TILE)
    return ids


@triton.jit
def _ask_for(ids, cache):
    """Prefetch listed rows ``ids`` ``[KV_TILE]`` into the L2 cache, line by line."""
    ELEMENT: tl.constexpr = cache.latent_ptr.dtype.element_ty.primitive_bitwidth // 8
    LINES: tl.constexpr = next_power_of_2(cache.ROW_BYTES // _LINE + 1)
    offset = row_offsets(ids, cache.BLOCK_UNITS, cache.ROW_UNITS, cache.BLOCK_SIZE)
    offset = offset * cache.LATENT_UNIT
    line = tl.arange(0, LINES) * (_LINE // ELEMENT)
    at = (cache.latent_ptr + line)[None, :] + offset[:, None]
    wanted = (ids >= 0)[:, None] & (line < cache.ROW_BYTES // ELEMENT)[None, :]
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [at, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _keys_of(stored, factors, cache, tile):
    """Stored elements ``[KV_TILE, N]``, converted to the type of the products.

    With SCALED, ``factors`` ``[KV_TILE, BLOCKS]`` are those of blocks of elements. With SHRINKS the
    result is 2^-32 times as large, which takes one product for each pair of elements.
    """
    if tile.SHRINKS:
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
        elements = elements_of(
            stored, factors, cache.KIND, cache.SCALED, tile.COMPUTE, cache.HARDWARE_E4M3
        )
    return elements


@triton.jit
def _attend_step(m, l, acc0, acc1, ids, steps, q0, q1, r, scale, cache, tile):
    """Online softmax over one step's listed rows; entries of -1 are neither read nor counted.

    Args:
        m: ``[ROWS]`` fp32, maxima of the scores so far.
        l: ``[ROWS, 2, 4]`` fp32, sums of the weights so far, a few for each row.
        acc0: ``[ROWS, WIDTH / 2]`` fp32, left half of the sums of rows times weights so far.
        acc1: ``[ROWS, WIDTH / 2]`` fp32, right half.
        ids: ``[KV_TILE]`` int32, the step's entries.
        steps: int32, steps from this one on, which are at least 1.
        q0: ``[ROWS, WIDTH / 2]``, left half of the queries' absorbed parts.
        q1: ``[ROWS, WIDTH / 2]``, right half.
        r: ``[ROWS, ROPE]``, rotary parts of queries.
        scale: fp32, factor of the products, log2(e) included.
        cache: a ``Cache``.
        tile: a ``Tile``.

    Returns:
        m, l, acc0 and acc1 after the step.
    """
    COMPUTE: tl.constexpr = tile.COMPUTE
    IEEE: tl.constexpr = tl.float32 == COMPUTE
    HALF: tl.constexpr = q0.shape[1]
    there = ids >= 0
    offset = row_offsets(ids, cache.BLOCK_UNITS, cache.ROW_UNITS, cache.BLOCK_SIZE)
    column = tl.arange(0, HALF)
    rotary = tl.arange(0, cache.ROPE)
    # An entry of -1 gives a row of zeros: its weight is zero, but zero times NaN is NaN.
    at = (cache.latent_ptr + column)[None, :] + (offset * cache.LATENT_UNIT)[:, None]
    left = tl.load(at, mask=there[:, None], other=0)
    right = tl.load(at + HALF, mask=there[:, None], other=0)
    at = (cache.rope_ptr + rotary)[None, :] + (offset * cache.ROPE_UNIT)[:, None]
    rope = tl.load(at, mask=there[:, None], other=0)
    f0 = 0.0
    f1 = 0.0
    if cache.SCALED:
        part = tl.arange(0, 2 * HALF // _BLOCK)
        at = (cache.scales_ptr + part)[None, :] + (offset * cache.SCALE_UNIT)[:, None]
        f0 = tl.load(at, mask=there[:, None], other=0)
        f1 = f0
        if HALF >= _BLOCK:
            f0, f1 = halves_of(f0)
    k0 = _keys_of(left, f0, cache, tile)
    k1 = _keys_of(right, f1, cache, tile)
    if cache.KIND == 0 or not cache.SCALED:
        p = elements_of(rope, 0.0, cache.KIND, False, COMPUTE, cache.HARDWARE_E4M3)
    elif tl.bfloat16 == COMPUTE:
        p = rope
    else:
        p = saturate_to(to_float32(rope), COMPUTE)
    # Where Triton sees that one product feeds another, it has both warp groups compute all of the
    # first. The fma keeps it from merging the score products into one chain, and the branch hides
    # that the scores feed the next products.
    zero = tl.zeros([m.shape[0], ids.shape[0]], tl.float32)
    grow = zero + (1.0 / _SHRUNK if tile.SHRINKS else 1.0)
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


@triton.jit
def attend_segments(query, cache, lists, scratch, out, tile):
    """Attention of a program's segment of a token's list; the arguments are groups."""
    TILES: tl.constexpr = tile.SEGMENT // tile.KV_TILE
    HALF: tl.constexpr = cache.WIDTH // 2
    ROWS: tl.constexpr = tile.ROWS
    pid = tl.program_id(0)
    # Programs of a token's head tiles are neighbours, so that they find its rows in the L2 cache.
    token = (pid // tile.HEAD_TILES).to(tl.int64)
    part = tl.program_id(1)
    length = lists.topk
    if lists.lens_ptr is not None:
        length = tl.minimum(tl.load(lists.lens_ptr + token), lists.topk)
    low = part * TILES
    high = tl.minimum(low + TILES, tl.cdiv(length, tile.KV_TILE))
    row = tl.arange(0, ROWS)
    head = (pid % tile.HEAD_TILES) * ROWS + row
    wanted = head < tile.NUM_HEADS
    column = tl.arange(0, HALF)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, HALF], tl.float32)
    acc1 = tl.zeros([ROWS, HALF], tl.float32)
    factor = 1.0
    # The branch tells Triton that the loop runs at least once. Triton 3.6 needs that to keep the
    # products of warp groups apart.
    if high > low:
        m, sums, acc0, acc1, factor = _attend_steps(
            m, acc0, acc1, token, head, wanted, low, high, length, query, cache, lists, tile
        )
        if tile.SEGMENTS > 1:
            store_planes(
                scratch, pid * tile.SEGMENTS + part, m, sums,
                State(m, sums, acc0, acc1, acc0, acc1),
            )  # fmt: skip
    if tile.SEGMENTS == 1:
        at = head * 0 + token
        write_rows(
            m, sums, acc0, at, head, wanted, column, column >= 0, out, factor, out.LSE, False
        )
        write_rows(
            m, sums, acc1, at, head, wanted, column, column >= 0,
            Out(
                out_ptr=out.out_ptr + HALF, lse_ptr=out.lse_ptr, sinks_ptr=out.sinks_ptr,
                output_scale_ptr=None, out_token=out.out_token, out_head=out.out_head,
                lse_token=out.lse_token, SINKS=out.SINKS, FP8_OUT=False, LSE=out.LSE,
            ),
            factor, False, False,
        )  # fmt: skip


@triton.jit
def _attend_steps(
    m, acc0, acc1, token, head, wanted, low, high, length, query, cache, lists, tile
):  # fmt: skip
    """Attention of steps ``[low, high)`` of a token's list, of which there is at least one.

    ``m``, ``acc0`` and ``acc1`` are the state of no keys. ``head`` ``[ROWS]`` int32 are the tile's
    heads, and ``wanted`` says which of them there are. The list has ``length`` entries.

    Returns:
        Maxima and sums ``[ROWS]``, the two halves of outputs ``[ROWS, WIDTH / 2]``, and the factor
        of outputs; all fp32.
    """
    HALF: tl.constexpr = cache.WIDTH // 2
    ROPE: tl.constexpr = cache.ROPE
    COMPUTE: tl.constexpr = tile.COMPUTE
    mine = lists.ids_ptr + token * lists.ids_row
    ids = _entries(mine, low, high, length, lists, tile)
    # The prefetch runs while the program waits for queries.
    _ask_for(ids, cache)
    offset = token * query.query_token + head * query.query_head
    q0 = load_query(query.query_ptr, offset, wanted, 0, HALF, HALF, HALF, 0).to(COMPUTE)
    q1 = load_query(query.query_ptr + HALF, offset, wanted, 0, HALF, HALF, HALF, 0).to(COMPUTE)
    offset = token * query.rotary_token + head * query.rotary_head
    r = load_query(query.rotary_ptr, offset, wanted, 0, ROPE, ROPE, ROPE, 0).to(COMPUTE)
    factor = 1.0
    if cache.factor_ptr is not None:
        factor = tl.load(cache.factor_ptr)
    logits_scale = query.scale * factor * LOG2E
    l = tl.zeros([tile.ROWS, 2, 4], tl.float32)
    ahead = _entries(mine, low + 1, high, length, lists, tile)
    for number in tl.range(low, high, num_stages=tile.STAGES, disable_licm=True):
        _ask_for(ahead, cache)
        m, l, acc0, acc1 = _attend_step(
            m, l, acc0, acc1, ids, high - number, q0, q1, r, logits_scale, cache, tile
        )
        # Triton does not pipeline a loop that merely hands a value on. This maximum changes
        # nothing, since ids are at least -1.
        ids = tl.maximum(ahead, -1)
        ahead = _entries(mine, number + 2, high, length, lists, tile)
    sums = tl.sum(tl.sum(l, 2), 1)
    if tile.SHRINKS:
        acc0 = acc0 / _SHRUNK
        acc1 = acc1 / _SHRUNK
    return m, sums, acc0, acc1, factor


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
    WAITS: tl.constexpr,
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
    if WAITS:
        # This kernel may have been started while the one that wrote the lists still runs.
        gdc_wait()
    if HASTENS:
        # The kernel that folds may be started now; it waits for this one by itself.
        gdc_launch_dependents()
    attend_segments(
        Query(
            query_ptr=query_ptr, rotary_ptr=rotary_ptr, query_token=query_token,
            query_head=query_head, rotary_token=rotary_token, rotary_head=rotary_head, scale=scale,
        ),
        Cache(
            latent_ptr=latent_ptr, rope_ptr=rope_ptr, scales_ptr=scales_ptr, factor_ptr=factor_ptr,
            BLOCK_SIZE=BLOCK_SIZE, BLOCK_UNITS=BLOCK_UNITS, ROW_UNITS=ROW_UNITS,
            LATENT_UNIT=LATENT_UNIT, ROPE_UNIT=ROPE_UNIT, SCALE_UNIT=SCALE_UNIT, WIDTH=WIDTH,
            ROPE=ROPE, KIND=KIND, SCALED=SCALED, HARDWARE_E4M3=HARDWARE_E4M3, ROW_BYTES=ROW_BYTES,
        ),
        Lists(ids_ptr=ids_ptr, lens_ptr=lens_ptr, ids_row=ids_row, topk=topk),
        Scratch(states_ptr=states_ptr, sums_ptr=sums_ptr, USED=ROWS, WIDTH=WIDTH // 2, PLANES=2),
        Out(
            out_ptr=out_ptr, lse_ptr=lse_ptr, sinks_ptr=sinks_ptr, output_scale_ptr=None,
            out_token=out_token, out_head=out_head, lse_token=lse_token, SINKS=SINKS,
            FP8_OUT=False, LSE=LSE,
        ),
        Tile(
            NUM_HEADS=NUM_HEADS, HEAD_TILES=HEAD_TILES, ROWS=ROWS, KV_TILE=KV_TILE, SEGMENT=SEGMENT,
            SEGMENTS=SEGMENTS, COMPUTE=COMPUTE, STAGES=STAGES, WHOLE_STEPS=WHOLE_STEPS,
            SHRINKS=SCALED and tl.bfloat16 == COMPUTE and not INTERPRETED,
        ),
    )  # fmt: skip
