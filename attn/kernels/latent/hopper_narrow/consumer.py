"""The consumers of the narrow Hopper latent kernel: eight warps.

For scores a warp has some of the keys, with all their columns. For the output it has some of the
columns, of all keys. So no two warps read the same byte of the cache for the same product.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_decode.finish import (
    fold_states,
    lending_group_of,
    place_of,
    slots_of,
    store_state,
    write_state,
)
from attn.kernels.dense.hopper_decode.parts import FIELDS, load_work_item, share_at
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.tile import power_of_two_guard
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.packed import e4m3_planes
from attn.kernels.lang.structures import Head, State
from attn.kernels.latent.hopper_narrow.finish import BLOCK, arrive_and_fold, fold_if_last
from attn.kernels.latent.structures import KeptQueries, NarrowState, causal_bounds
from builders.splitkv.device.segments import segment_of, segment_start

_WARPS = tl.constexpr(8)
_KEPT = tl.constexpr(128)
"""Columns of the queries' left half that stay in registers; the rotary columns do so too."""


@gluon.jit
def _clear_tail(rows, stage, live, ring):
    """Zero a half of a tile's values from key ``live`` to the end of its run of RUN keys.

    No request wrote those slots, so they may hold NaN, and zero times NaN is NaN. ``rows`` are the
    ring's rows of that half. The swizzle of a row's columns does not matter to zeros.
    """
    zeros = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [_WARPS], [0]))
    for row in range(live, (live // ring.RUN + 1) * ring.RUN):
        for box in gl.static_range(ring.BOXES):
            rows.index((stage * ring.BOXES + box) * ring.KV_TILE + row).store(zeros)


@gluon.jit
def _sum_of_own(x):
    """Sum ``[16, keys]`` within each thread: ``[16, 32]``, for a row's 32 threads in all warps."""
    x = gl.reshape(x, [16, x.shape[1] // (8 * _WARPS), 4 * _WARPS, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _row_maximum(x, exchange):
    """Maximum of each row, whose columns lie in eight warps that meet once, in shared memory."""
    SCORES: gl.constexpr = x.type.layout
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 2], [0, 4]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0], [0, 0]], [], [16, 8],
    )  # fmt: skip
    # Take the maximum within a thread, then within its warp.
    x = gl.max(gl.max(gl.reshape(x, [16, x.shape[1] // (8 * _WARPS), _WARPS, 8]), 1), 2)
    exchange.store(x)
    # The exchange needs a barrier here, and the compiler inserts it.
    return gl.convert_layout(gl.max(exchange.load(EVERYWHERE), 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def _stored_order(part, E4M3: gl.constexpr):
    """Columns of queries in the order of shared memory, which :func:`_query_of` explains."""
    if E4M3:
        ROWS: gl.constexpr = part.shape[0]
        WIDTH: gl.constexpr = part.shape[1]
        part = gl.permute(gl.reshape(part, [ROWS, WIDTH // 32, 2, 4, 2, 2]), (0, 1, 4, 2, 3, 5))
        part = gl.reshape(part, [ROWS, WIDTH])
    return part


@gluon.jit
def _query_of(q, OUTPUT: gl.constexpr, E4M3: gl.constexpr):
    """Queries, loaded from shared memory as the first operand of a product.

    A thread has four neighbouring columns of an e4m3 key, where a 16-bit operand has two and then
    two more further on. Queries in natural order would be read 8 bytes at a time and then moved.
    They are stored in an order that lets a thread read 16 bytes at once, each where it belongs.
    """
    left = q.load(gl.DotOperandLayout(0, OUTPUT, 2))
    if E4M3:
        WIDTH: gl.constexpr = q.shape[1]
        left = gl.permute(gl.reshape(left, [16, WIDTH // 32, 2, 2, 4, 2]), (0, 1, 3, 4, 2, 5))
        left = gl.reshape(left, [16, WIDTH])
        left = gl.convert_layout(left, gl.DotOperandLayout(0, OUTPUT, 4), assert_trivial=True)
    return left


@gluon.jit
def _scored(left, keys, scores, E4M3: gl.constexpr):
    """``scores`` plus products of more columns; bytes become fp16 as they are loaded."""
    K_WIDTH: gl.constexpr = 4 if E4M3 else 2
    SCORES: gl.constexpr = scores.type.layout
    keys = keys.permute((1, 0)).load(gl.DotOperandLayout(1, SCORES, K_WIDTH)).to(left.dtype)
    return mma_v2(left, keys, scores)


@gluon.jit
def _values(v, HALF: gl.constexpr, RIGHT: gl.constexpr, E4M3: gl.constexpr):
    """Half of a tile's values as two operands, whose columns :func:`_joined` puts in order."""
    if E4M3:
        low, high = e4m3_planes(v.load(RIGHT))
    else:
        low = v.slice(0, HALF, dim=1).load(RIGHT)
        high = v.slice(HALF, HALF, dim=1).load(RIGHT)
    return low, high


@gluon.jit
def _scores_of(stage, kept, ring, room, tile):
    """Scores ``[16, KV_TILE]`` of a tile, as two sums over columns that are added at the end.

    Within one sum every product waits for the product before it. Every warp reads the queries for
    its keys, which are more bytes than the keys. Shared memory is the limit with a cache of e4m3,
    so a third of the queries' columns stay in registers; no more registers are free.
    """
    OUTPUT: gl.constexpr = tile.OUTPUT
    E4M3: gl.constexpr = tile.E4M3
    keys = ring.k_left.index(stage)
    nothing = gl.zeros([16, ring.KV_TILE], gl.float32, OUTPUT)
    scores = _scored(kept.rope, ring.k_rope.index(stage), nothing, E4M3)
    scores = _scored(kept.left, keys.slice(0, _KEPT, dim=1), scores, E4M3)
    q = _query_of(room.q_left.index(0).slice(_KEPT, 256 - _KEPT, dim=1), OUTPUT, E4M3)
    scores = _scored(q, keys.slice(_KEPT, 256 - _KEPT, dim=1), scores, E4M3)
    q = _query_of(room.q_right.index(0), OUTPUT, E4M3)
    return scores + _scored(q, ring.k_right.index(stage), nothing, E4M3)


@gluon.jit
def _seen(scores, key_tile, bounds):
    """Scores of a tile, with -inf for keys that a row does not see."""
    KV_TILE: gl.constexpr = scores.shape[1]
    if (key_tile + 1) * KV_TILE > bounds.all_high:
        KEYS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        key = key_tile * KV_TILE + gl.arange(0, KV_TILE, layout=KEYS)
        scores = gl.where(key[None, :] <= bounds.limit[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _tile(key_tile, turn, state, kept, natural, bounds, ring, room, tile):
    """Attend to one tile of keys: scores, online softmax, output.

    ``natural`` ``[16]`` fp32 are the factors of the rows' products. Returns the state that follows
    ``state``, a :class:`attn.kernels.latent.structures.NarrowState`.
    """
    OUTPUT: gl.constexpr = tile.OUTPUT
    HALF: gl.constexpr = state.left0.shape[1]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, OUTPUT, 2)
    stage = turn % ring.STAGES
    mbarrier.wait(ring.full.index(stage), (turn // ring.STAGES) & 1)
    scores = _seen(_scores_of(stage, kept, ring, room, tile), key_tile, bounds)
    m = state.m
    top = gl.maximum(m, _row_maximum(scores, room.exchange))
    # A row that has seen no key yet has a maximum of -inf.
    base = gl.where(top == float("-inf"), 0.0, top)
    # Subtract before multiplying: products of large scores have large rounding errors.
    weights = gl.exp2((scores - base[:, None]) * natural[:, None])
    shrink = gl.exp2((m - base) * natural)
    l = state.l
    own = gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))
    own = own[:, None].broadcast_to(16, l.shape[1])
    l = gl.fma(l, own, _sum_of_own(weights))
    room.turned.store(weights.to(tile.DTYPE))
    left = room.turned.load(LEFT)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    live = bounds.kv_len - key_tile * ring.KV_TILE
    if (live < ring.KV_TILE) & (live % ring.RUN != 0):
        _clear_tail(ring.left_rows, stage, live, ring)
        _clear_tail(ring.right_rows, stage, live, ring)
        # The zeros must be visible before other threads read them and before TMA overwrites them.
        fence_async_shared()
        thread_barrier()
    v0, v1 = _values(ring.v_left.index(stage), HALF, RIGHT, tile.E4M3)
    left0 = mma_v2(left, v0, state.left0 * shrink)
    left1 = mma_v2(left, v1, state.left1 * shrink)
    v0, v1 = _values(ring.v_right.index(stage), HALF, RIGHT, tile.E4M3)
    # All warps must have read the tile before its stage is freed.
    thread_barrier()
    mbarrier.arrive(ring.empty.index(stage), count=1)
    right0 = mma_v2(left, v0, state.right0 * shrink)
    right1 = mma_v2(left, v1, state.right1 * shrink)
    return NarrowState(m=top, l=l, left0=left0, left1=left1, right0=right0, right1=right1)


@gluon.jit
def _query_part(token, count, in_group, query, tile, first: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of a part's queries as fp32, and the largest magnitude of each row.

    The columns begin with column ``first`` of the absorbed part; where ``first`` is None, they are
    the rotary part. Rows past the item's query tokens or heads are zeros.

    Returns:
        ``[16, WIDTH]`` and ``[16]`` fp32.
    """
    LANES: gl.constexpr = min(32, WIDTH // 8)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [_WARPS, 1], [1, 0])
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT)) + opaque_zero()
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    head = in_group + row % tile.TILE_HEADS
    wanted = (row < count * tile.TILE_HEADS) & (head < tile.GROUP)
    tokens = token + row // tile.TILE_HEADS
    if first is None:
        at = query.rotary_at(tokens, head)
    else:
        at = query.absorbed_at(tokens, head) + first
    at = at[:, None] + column[None, :]
    part = gl.load(at, mask=wanted[:, None], other=0.0).to(gl.float32)
    return part, gl.max(gl.abs(part), 1)


@gluon.jit
def _scaled(part, by, DTYPE: gl.constexpr):
    """Rows of queries times a power of two each, in the type of products."""
    by = gl.convert_layout(by, gl.SliceLayout(1, part.type.layout))
    return (part * by[:, None]).to(DTYPE)


@gluon.jit
def _load_queries(work, in_group, query, room, tile):
    """Copy the queries of a part to shared memory, in the type of products.

    With E4M3 the type is fp16, and every row is multiplied by a power of two that brings bf16 into
    fp16's range. Returns the factor of each row that undoes it, ``[16]`` fp32; 1 without E4M3.
    """
    SUMS: gl.constexpr = gl.SliceLayout(1, tile.OUTPUT)
    token = gl.load(work.fields + 1)
    count = gl.load(work.fields + 2)
    left, most = _query_part(token, count, in_group, query, tile, 0, 256)
    most = gl.convert_layout(most, SUMS)
    right, other = _query_part(token, count, in_group, query, tile, 256, 256)
    most = gl.maximum(most, gl.convert_layout(other, SUMS))
    rope, other = _query_part(token, count, in_group, query, tile, None, 64)
    most = gl.maximum(most, gl.convert_layout(other, SUMS))
    if tile.E4M3:
        down, up = power_of_two_guard(most)
    else:
        down = gl.full([16], 1.0, gl.float32, SUMS)
        up = down
    # All warps must have read the previous item's queries. Without the opaque index, the addresses
    # would occupy registers from the start of the kernel.
    thread_barrier()
    room.q_left.index(opaque_zero()).store(
        _stored_order(_scaled(left, down, tile.DTYPE), tile.E4M3)
    )
    room.q_right.index(opaque_zero()).store(
        _stored_order(_scaled(right, down, tile.DTYPE), tile.E4M3)
    )
    room.q_rope.index(opaque_zero()).store(
        _stored_order(_scaled(rope, down, tile.DTYPE), tile.E4M3)
    )
    thread_barrier()
    return up


@gluon.jit
def _side_by_side(left, right):
    """Concatenate the columns of ``left`` and ``right``."""
    return gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [16, 2 * left.shape[1]])


@gluon.constexpr_function
def _state_layout(E4M3: bool) -> gl.DistributedLinearLayout:
    """The layout of an output ``[16, 512]`` of products, with registers in natural order.

    In the order that joins leave, a thread would store its neighbouring columns one by one.
    """
    if E4M3:
        registers = [[0, 1], [0, 2], [8, 0], [0, 128], [0, 256]]
        lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
        warps = [[0, 16], [0, 32], [0, 64]]
    else:
        registers = [[0, 1], [8, 0], [0, 64], [0, 128], [0, 256]]
        lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
        warps = [[0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [16, 512])


@gluon.jit
def _joined(state, E4M3: gl.constexpr):
    """Combine a state's four accumulators into the output ``[16, SIZE]``, in natural order."""
    if E4M3:
        WIDTH: gl.constexpr = 2 * state.left0.shape[1]
        left = gl.reshape(gl.join(state.left0, state.left1), [16, WIDTH])
        right = gl.reshape(gl.join(state.right0, state.right1), [16, WIDTH])
    else:
        left = _side_by_side(state.left0, state.left1)
        right = _side_by_side(state.right0, state.right1)
    return gl.convert_layout(_side_by_side(left, right), _state_layout(E4M3), assert_trivial=True)


@gluon.jit
def _load_head(work, query, cache, room, plan, tile):
    """Load the queries of a part, and say which heads they are of.

    Returns:
        A :class:`Head`, and the :class:`KeptQueries`; the other columns are in ``room``.
    """
    in_group = ((work.number % plan.HEAD_LOOPS) * plan.HEADS + work.lane) * tile.TILE_HEADS
    v_factor = 1.0
    if tile.E4M3:
        v_factor = gl.load(cache.k_scale_ptr)
    up = _load_queries(work, in_group, query, room, tile)
    kept = KeptQueries(
        left=_query_of(
            room.q_left.index(opaque_zero()).slice(0, _KEPT, dim=1), tile.OUTPUT, tile.E4M3
        ),
        rope=_query_of(room.q_rope.index(opaque_zero()), tile.OUTPUT, tile.E4M3),
    )
    natural = up * (query.scale * LOG2E * v_factor)
    return Head(kv_head=0, in_group=in_group, natural=natural, v_factor=v_factor), kept


@gluon.jit
def _attend(work, head, kept, bounds, slots, turn, ring, room, plan, tile):
    """Attend to the segments of a part, whose states are folded by blocks.

    :mod:`attn.kernels.latent.hopper_narrow.finish` explains blocks, and where their states go. The
    fold of the blocks of a part that begins with its row's first segment is kept in shared memory,
    in the layout in which it is needed again: registers hold two states.

    Returns:
        The state that is not stored yet, for the slot that :func:`slot_of_last` says; and the
        number of tiles walked so far, which was ``turn`` before.
    """
    SUMS: gl.constexpr = gl.SliceLayout(1, tile.OUTPUT)
    zero = gl.zeros([16, tile.SIZE // 4], gl.float32, tile.OUTPUT)
    nothing = NarrowState(
        m=gl.full([16], float("-inf"), gl.float32, SUMS),
        l=_sum_of_own(gl.zeros([16, ring.KV_TILE], gl.float32, tile.OUTPUT)),
        left0=zero, left1=zero, right0=zero, right1=zero,
    )  # fmt: skip
    # The state of a block is kept as three values, not as a structure. A loop carries values in the
    # order in which they are first named, and another order would give other PTX.
    A = _joined(nothing, tile.E4M3)
    STATE: gl.constexpr = A.type.layout
    M = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, STATE))
    L = gl.zeros([16], gl.float32, gl.SliceLayout(1, STATE))
    low, high = work.low, work.high
    # The plan is causal like the kernel: every segment has a key that some row sees.
    seen = segment_of(low * plan.SEGMENT_UNIT)
    unseen = segment_of(gl.maximum(high - 1, 0) * plan.SEGMENT_UNIT) + 1
    unseen = gl.where(high > low, unseen, seen)
    for s in range(seen, unseen):
        state = nothing
        from_tile = gl.maximum(segment_start(s) // plan.SEGMENT_UNIT, low)
        to_tile = gl.minimum(segment_start(s + 1) // plan.SEGMENT_UNIT, high)
        for key_tile in range(from_tile, to_tile):
            state = _tile(key_tile, turn, state, kept, head.natural, bounds, ring, room, tile)
            turn += 1
        # A product would be contracted with the difference that the fold takes of it, unrounded,
        # and then a state that is stored and loaded again would give other bits.
        m = gl.fma(state.m, head.natural, gl.zeros([16], gl.float32, SUMS))
        m = gl.convert_layout(m, gl.SliceLayout(1, STATE))
        total = gl.convert_layout(gl.sum(state.l, 1), gl.SliceLayout(1, STATE))
        of_segment = State(m=m, l=total, acc=_joined(state, tile.E4M3))
        # These are loaded here instead of being kept in registers during the loop over tiles.
        part = s - gl.load(work.fields + 8)
        parts = gl.load(work.fields + 9)
        block = part // BLOCK * BLOCK
        # The fold of a block begins with its first segment. Where another program has that one,
        # the states of segments are stored one by one.
        is_own = block >= work.begin
        folded = fold_states(State(m=M, l=L, acc=A), of_segment)
        M, L, A = folded.m, folded.l, folded.acc
        is_done = (part - block == BLOCK - 1) | (part + 1 == parts)
        # The last state of another part stays in registers.
        if gl.where(s + 1 == unseen, work.begin == 0, is_done | (is_own == 0)):
            if (work.begin == 0) & (is_done | (block == 0)):
                if block > 0:
                    before = State(
                        m=room.prefix_sums.index(opaque_zero()).load(gl.SliceLayout(1, STATE)),
                        l=room.prefix_sums.index(opaque_zero() + 1).load(gl.SliceLayout(1, STATE)),
                        acc=room.prefix.index(opaque_zero()).load(STATE),
                    )
                    folded = fold_states(before, State(m=M, l=L, acc=A))
                    M, L, A = folded.m, folded.l, folded.acc
                room.prefix_sums.index(opaque_zero()).store(M)
                room.prefix_sums.index(opaque_zero() + 1).store(L)
                room.prefix.index(opaque_zero()).store(A)
            else:
                slot = gl.where(is_own, block, part)
                store_state(plan, slots + slot, State(m=M, l=L, acc=A), tile, opaque_zero())
            M = gl.full([16], float("-inf"), gl.float32, gl.SliceLayout(1, STATE))
            L = gl.zeros([16], gl.float32, gl.SliceLayout(1, STATE))
            A = gl.zeros([16, tile.SIZE], gl.float32, STATE)
    if (work.begin == 0) & (unseen > seen):
        M = room.prefix_sums.index(opaque_zero()).load(gl.SliceLayout(1, STATE))
        L = room.prefix_sums.index(opaque_zero() + 1).load(gl.SliceLayout(1, STATE))
        A = room.prefix.index(opaque_zero()).load(STATE)
    return State(m=M, l=L, acc=A), turn


@gluon.jit
def _write_or_store(is_all, work, head, state, lending_group, is_end, plan, out, tile):
    """Write the output of a part that has all keys of its queries, or store its state."""
    STATE: gl.constexpr = state.acc.type.layout
    has_all = is_all
    if not is_all:
        state, has_all = fold_if_last(work, state, lending_group, plan, tile)
    # These are loaded once more instead of being kept in registers during the loop.
    token = gl.load(work.fields + 1)
    count = gl.load(work.fields + 2)
    if has_all:
        place = gl.arange(0, 16, layout=gl.SliceLayout(1, STATE)) + opaque_zero()
        heads = head.in_group + place % tile.TILE_HEADS
        column = gl.arange(0, tile.SIZE, layout=gl.SliceLayout(0, STATE))
        at = token + place // tile.TILE_HEADS
        wanted = (place < count * tile.TILE_HEADS) & (heads < tile.GROUP)
        write_state(state, at, heads, wanted, column, head.v_factor, out)
    else:
        arrive_and_fold(work, head, state, lending_group, is_end, plan, out, tile)


@gluon.jit
def consume_narrow(query, cache, ring, room, plan, mask, out, tile):
    """Attend to all parts that the program takes; eight warps run this."""
    lane = gl.program_id(0) % plan.HEADS
    first_row, begin, past_row, mine, fields = share_at(plan.shares_ptr, plan.HEADS)
    turn = 0
    for r in range(first_row, past_row):
        work = load_work_item(r, lane, mine, fields, begin, mask, ring.KV_TILE, plan.SEGMENT_UNIT)
        if work.end > work.begin:
            head, kept = _load_head(work, query, cache, room, plan, tile)
            bounds = causal_bounds(work.first, work.kv_len, tile)
            parts = gl.load(fields + 9)
            is_all = (begin == 0) & (work.end == parts) & (gl.load(fields + 11) == 1)
            lending_group = 0
            if not is_all:
                lending_group = lending_group_of(place_of(fields, r % plan.HEAD_LOOPS, 0), plan)
            slots = slots_of(work, lending_group, plan)
            state, turn = _attend(work, head, kept, bounds, slots, turn, ring, room, plan, tile)
            is_end = r + 1 == past_row
            _write_or_store(is_all, work, head, state, lending_group, is_end, plan, out, tile)
        begin = 0
        fields = plan.rows_ptr + wide(((r + 1) // plan.HEAD_LOOPS) * FIELDS)
