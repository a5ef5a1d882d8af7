"""The consumers of the Hopper split-KV kernel: warp groups that multiply."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.dense.hopper_decode.finish import (
    arrive_and_fold,
    fold_states,
    lending_group_of,
    place_of,
    slots_of,
    store_state,
    with_wide_strides,
    write_state,
)
from attn.kernels.dense.hopper_decode.parts import FIELDS, load_work_item, share_at
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.tile import (
    halved,
    power_of_two_guard,
    referred_weights,
    sum_of_columns,
)
from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.masks import biased, reach_of
from attn.kernels.lang.opaque import opaque_zero, program_number
from attn.kernels.lang.packed import e4m3_planes
from attn.kernels.lang.structures import Bounds, Head, Planes, State
from builders.splitkv.device.segments import segment_of, segment_start


@gluon.jit
def _clear_tail(ring, stage, live):
    """Zero the values from row ``live`` of a tile to the end of that row's run.

    These slots hold no token of the request, and may hold NaN.
    """
    RUNS: gl.constexpr = ring.KV_TILE // ring.RUN
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    run = live // ring.RUN
    row = run * ring.RUN + gl.arange(0, ring.RUN, layout=gl.SliceLayout(1, LAYOUT))
    for half in gl.static_range(ring.HALVES):
        box = ring.v_runs.index((stage * ring.HALVES + half) * RUNS + run)
        rows = box.load(LAYOUT)
        box.store(gl.where((row < live)[:, None], rows, gl.zeros_like(rows)))
    # The fence orders these stores before wgmma's reads and TMA's next writes; the barrier orders
    # them before reads of other threads.
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _sum_of_own(x, KV_TILE: gl.constexpr):
    """Sum the columns of ``x [ROWS, KV_TILE]`` that a thread holds, without any exchange.

    Returns:
        ``[ROWS, threads]``: with 16 rows, the 16 threads of four warps that share a row; with 64
        rows, the 4 threads of one warp.
    """
    ROWS: gl.constexpr = x.shape[0]
    THREADS: gl.constexpr = 16 if ROWS == 16 else 4
    x = gl.reshape(x, [ROWS, KV_TILE // (2 * THREADS), THREADS, 2])
    return gl.sum(gl.sum(x, 3), 1)


@gluon.jit
def _row_maximum(x, exchange):
    """The maximum of each row of ``x [16, keys]``, ``[16]`` fp32.

    Four warps share the columns of a row. They exchange their maxima once, in shared memory.
    """
    SCORES: gl.constexpr = x.type.layout
    EVERYWHERE: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 1], [0, 2]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [],
        [16, 4],
    )  # fmt: skip
    # First the maximum of a thread's columns, then the maximum of its warp's.
    x = gl.max(gl.max(gl.reshape(x, [16, x.shape[1] // 32, 4, 8]), 1), 2)
    exchange.store(x)
    # The warp group needs a barrier here; the compiler inserts it.
    return gl.convert_layout(gl.max(exchange.load(EVERYWHERE), 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def _joined(low, high, WIDTH: gl.constexpr):
    """Interleave two planes of columns to ``[rows, WIDTH]``; a plane of all columns is returned."""
    if low.shape[1] < WIDTH:
        low = gl.reshape(gl.join(low, high), [low.shape[0], WIDTH])
    return low


@gluon.jit
def _queries_of(first, m, TILE_HEADS: gl.constexpr):
    """The positions of the tile's query rows, int32 in the shape and layout of ``m [ROWS]``."""
    return first + gl.arange(0, m.shape[0], layout=m.type.layout) // TILE_HEADS


@gluon.jit
def _largest(scores, exchange):
    """The largest score of each row of a tile, ``[ROWS]``."""
    if scores.shape[0] == 16:
        largest = _row_maximum(scores, exchange)
    else:
        largest = gl.max(scores, 1)
    return largest


@gluon.jit
def _softmax(scores, m, l, scale, by_row, exchange):
    """Softmax of a tile of scores, relative to the row's largest so far.

    ``m`` and ``l`` are maxima and sums over earlier tiles. ``scale`` and ``by_row`` are the factor
    of maxima and of scores.

    Returns:
        The weights, the new maxima and sums, and the factor of earlier outputs.
    """
    ROWS: gl.constexpr = scores.shape[0]
    top = gl.maximum(m, _largest(scores, exchange))
    # A row that has seen no key so far has a maximum of -inf.
    base = gl.where(top == float("-inf"), 0.0, top)
    # Subtract before scaling: products of large scores have large rounding errors.
    weights = gl.exp2((scores - base[:, None]) * by_row)
    shrink = gl.exp2((m - base) * scale)
    own = gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))
    own = own[:, None].broadcast_to(ROWS, l.shape[1])
    return weights, top, gl.fma(l, own, _sum_of_own(weights, scores.shape[1])), shrink


@gluon.jit
def _referred_softmax(scores, m, l, scale, exchange, apart, SIMPLE: gl.constexpr):
    """As :func:`_softmax`, with the portable kernels' bits: references for maxima, and sums by
    column. With SIMPLE, scores are still to be multiplied by ``scale``.
    """
    ROWS: gl.constexpr = scores.shape[0]
    scales = gl.full([ROWS], 1.0, gl.float32, m.type.layout) * scale
    most = _largest(scores, exchange)
    weights, shrink, top = referred_weights(scores, m, most, scales, SIMPLE, True)
    sums = gl.convert_layout(halved(weights, apart.COLUMNS), l.type.layout, assert_trivial=True)
    own = gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))
    own = own[:, None].broadcast_to(ROWS, apart.COLUMNS)
    return weights, top, gl.fma(l, own, sums), shrink


@gluon.jit
def _tile(key_tile, turn, q, state, odd, work, head, bounds, query, ring, room, mask, apart, tile):
    """Attend to one tile of keys: scores, online softmax, output.

    The state's sums are ``[ROWS, threads]``, or as ``apart`` has them. With E4M3 its output has the
    even columns, and ``odd`` has the odd ones.
    """
    E4M3: gl.constexpr = tile.E4M3
    ROWS: gl.constexpr = tile.ROWS
    OUTPUT: gl.constexpr = tile.OUTPUT
    SCORES: gl.constexpr = tile.SCORES
    KV_TILE: gl.constexpr = ring.KV_TILE
    K_WIDTH: gl.constexpr = 4 if E4M3 else 2
    stage, phase = ring.stage_of(turn)
    if tile.CONSUMERS > 1:
        # The tile that was in this stage before may belong to the other consumer, and may still be
        # on its way. The barrier of the keys is then two phases behind, which looks the same as
        # none. Waiting for that tile's release first tells the two apart.
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
    mbarrier.wait(ring.k_full.index(stage), phase)
    keys = ring.k_tiles.index(stage).permute((1, 0))
    zero = gl.zeros([ROWS, KV_TILE], gl.float32, SCORES)
    if E4M3 and apart.COLUMNS > 0:
        even, odd_keys = e4m3_planes(keys.load(gl.DotOperandLayout(1, SCORES, 2)))
        scores = mma_v2(q.odd, odd_keys, mma_v2(q.even, even, zero))
    elif ROWS == 16:
        keys = keys.load(gl.DotOperandLayout(1, SCORES, K_WIDTH))
        scores = mma_v2(q, keys.to(gl.float16) if E4M3 else keys, zero)
    else:
        scores = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
    scale = head.natural
    by_row = head.natural[:, None] if E4M3 else head.natural
    if query.SOFT_CAP:
        scores = biased(
            scores * by_row, None, None, query.soft_cap, True, 0, False, apart.COLUMNS > 0
        )  # fmt: skip
        scale = 1.0
        by_row = 1.0
    edge = (key_tile + 1) * KV_TILE > bounds.all_high
    if mask.WINDOW or mask.CHUNK:
        edge = edge | (key_tile * KV_TILE < bounds.all_low)
    m = state.m
    if edge:
        key = key_tile * KV_TILE + gl.arange(0, KV_TILE, layout=gl.SliceLayout(0, SCORES))
        position = _queries_of(work.first, m, tile.TILE_HEADS)
        reach = reach_of(position, work.kv_len, work.causal, mask.CAUSAL)
        scores = mask.masked(
            scores, position, key, reach, work.kv_len, bounds.range_first, bounds.range_last
        )
    if apart.COLUMNS > 0:
        weights, top, l, shrink = _referred_softmax(
            scores, m, state.l, scale, room.exchange, apart, not query.SOFT_CAP
        )  # fmt: skip
    else:
        weights, top, l, shrink = _softmax(scores, m, state.l, scale, by_row, room.exchange)
    if ROWS == 16:
        room.turned.store(weights.to(tile.DTYPE))
        left = room.turned.load(gl.DotOperandLayout(0, OUTPUT, 2))
    else:
        left = gl.convert_layout(weights.to(tile.DTYPE), gl.DotOperandLayout(0, OUTPUT, 2))
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUTPUT))[:, None]
    acc = state.acc * shrink
    mbarrier.wait(ring.v_full.index(stage), phase)
    live = work.kv_len - key_tile * KV_TILE
    if (live < KV_TILE) & (live % ring.RUN != 0):
        _clear_tail(ring, stage, live)
    if ROWS == 16:
        values = ring.v_tiles.index(stage).load(gl.DotOperandLayout(1, OUTPUT, 2))
        mbarrier.arrive(ring.empty.index(stage), count=1)
        if E4M3:
            values, odd_values = e4m3_planes(values)
            odd = mma_v2(left, odd_values, odd * shrink)
        acc = mma_v2(left, values, acc)
    else:
        # Wait here: ptxas would serialise a product that is in flight over the loop's edge.
        acc = warpgroup_mma(left, ring.v_tiles.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(stage), count=1)
    return State(m=top, l=l, acc=acc), odd


@gluon.jit
def _send(state, times, mailbox):
    """Put a state into the mailbox, once the first consumer has read the state before it.

    ``times`` is the number of states sent before.
    """
    mbarrier.wait(mailbox.taken, (times & 1) ^ 1)
    mailbox.acc.index(0).store(state.acc)
    mailbox.top.store(state.m)
    mailbox.sums.store(state.l)
    mbarrier.arrive(mailbox.sent, count=1)


@gluon.jit
def _with_sent(state, times, mailbox):
    """Fold the state in the mailbox onto ``state``.

    ``times`` is the number of states taken before.
    """
    STATE: gl.constexpr = state.acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    mbarrier.wait(mailbox.sent, times & 1)
    m = mailbox.top.load(ROW)
    l = mailbox.sums.load(ROW)
    acc = mailbox.acc.index(0).load(STATE)
    mbarrier.arrive(mailbox.taken, count=1)
    return fold_states(state, State(m=m, l=l, acc=acc))


@gluon.jit
def _load_queries(work, token, count, query, cache, room, plan, apart, tile):
    """Load the queries of a part, as products take them, and say which heads they are of.

    They are ``[ROWS, WIDTH]``, zeros behind a head's last column: an operand in registers if ROWS
    is 16, else in shared memory. They are two operands,
    ``Planes``, over e4m3 with the portable kernels' bits.
    """
    LOADED: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // tile.WIDTH, tile.WIDTH // 8], [4, 1], [1, 0]
    )
    SCORES: gl.constexpr = tile.SCORES
    tile_of_heads = (work.number % plan.HEAD_LOOPS) * plan.HEADS + work.lane
    kv_head = tile_of_heads // plan.HEAD_TILES
    in_group = (tile_of_heads % plan.HEAD_TILES) * tile.TILE_HEADS
    row = gl.arange(0, tile.ROWS, layout=gl.SliceLayout(1, LOADED))
    column = gl.arange(0, tile.WIDTH, layout=gl.SliceLayout(0, LOADED))
    head = in_group + row % tile.TILE_HEADS
    offset = (token + row // tile.TILE_HEADS).to(gl.int64) * wide(query.query_token)
    offset += (kv_head * tile.GROUP + head) * query.query_head
    wanted = ((row < count * tile.TILE_HEADS) & (head < tile.GROUP))[:, None]
    if tile.SIZE < tile.WIDTH:
        wanted = wanted & (column < tile.SIZE)[None, :]
    q = gl.load(query.query_ptr + offset[:, None] + column[None, :], mask=wanted, other=0.0)
    natural = query.scale
    v_factor = 1.0
    if tile.E4M3:
        natural = natural * gl.load(cache.k_scale_ptr + kv_head * cache.scale_head)
    if not query.SOFT_CAP:
        natural = natural * LOG2E
    if tile.E4M3:
        v_factor = gl.load(cache.v_scale_ptr + kv_head * cache.scale_head)
        up = gl.full([tile.ROWS], 1.0, gl.float32, gl.SliceLayout(1, LOADED))
        if q.dtype == gl.bfloat16:
            # The products are in fp16, whose range bf16 exceeds: a power of two brings each row
            # into the range.
            q = q.to(gl.float32)
            down, up = power_of_two_guard(gl.max(gl.abs(q), 1))
            q = q * down[:, None]
        q = q.to(gl.float16)
        natural = natural * gl.convert_layout(up, gl.SliceLayout(1, SCORES))
    if tile.E4M3 and apart.COLUMNS > 0:
        even, odd = gl.split(gl.reshape(q, [tile.ROWS, tile.WIDTH // 2, 2]))
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
        q = Planes(even=gl.convert_layout(even, OPERAND), odd=gl.convert_layout(odd, OPERAND))
    elif tile.ROWS == 16:
        q = gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 4 if tile.E4M3 else 2))
    else:
        # The products of the work item before are done, so its queries may be overwritten: every
        # thread waits for its products before it comes here.
        thread_barrier()
        room.queries.store(q)
        fence_async_shared()
        thread_barrier()
        q = room.queries
    return q, Head(kv_head=kv_head, in_group=in_group, natural=natural, v_factor=v_factor)


@gluon.jit
def _bounds_of(work, mask, tile):
    """Compute the bounds of the keys that the queries of a part see, for all tiles of keys."""
    row = gl.arange(0, tile.ROWS, layout=gl.SliceLayout(1, tile.SCORES))
    position = work.first + row // tile.TILE_HEADS
    range_first, range_last = mask.own_range(position, work.req)
    all_low, all_high = mask.seen_by_all(work.first, work.last, work.kv_len, work.causal)
    return Bounds(
        range_first=range_first, range_last=range_last, all_low=all_low, all_high=all_high
    )


@gluon.jit
def _lending_group_for(work, plan):
    """Find the group that lends a part its state slots.

    Returns:
        Whether the part has all keys of its queries and needs no slot; and the lending group, 0 if
        none is needed.
    """
    parts = gl.load(work.fields + 9)
    is_all = (work.begin == 0) & (work.end == parts) & (gl.load(work.fields + 11) == 1)
    lending_group = 0
    if not is_all:
        lending_group = lending_group_of(
            place_of(work.fields, work.number % plan.HEAD_LOOPS, 0), plan
        )
    return is_all, lending_group


@gluon.jit
def _attend(
    PART: gl.constexpr, work, q, head, bounds, first_part, slots, turn, handoffs, query, ring, room,
    plan, mask, apart, tile,
):  # fmt: skip
    """Attend to the segments of a part.

    A part that begins with its row's first segment has one state, which is returned. Another part
    stores the state of each segment in its slot, from ``slots`` on. The second consumer (PART 1)
    sends all states to the first. Also returns how many states have been sent so far.
    """
    SUMS: gl.constexpr = gl.SliceLayout(1, tile.SCORES)
    PLANE: gl.constexpr = tile.WIDTH // 2 if tile.E4M3 else tile.WIDTH
    top = gl.full([tile.ROWS], float("-inf"), gl.float32, SUMS)
    zero = gl.zeros([tile.ROWS, PLANE], gl.float32, tile.OUTPUT)
    # The state of all segments is kept as three values, not as a structure. A loop carries values
    # in the order in which they are first named, and another order would give other PTX.
    A = _joined(zero, zero, tile.WIDTH)
    STATE: gl.constexpr = A.type.layout
    M = gl.full([tile.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, STATE))
    L = gl.zeros([tile.ROWS], gl.float32, gl.SliceLayout(1, STATE))
    low, high = work.low, work.high
    seen = segment_of(low * plan.SEGMENT_UNIT, True)
    unseen = segment_of(gl.maximum(high - 1, 0) * plan.SEGMENT_UNIT, True) + 1
    unseen = gl.where(high > low, unseen, seen)
    if PART == 0:
        if work.begin > 0:
            # The fold reads a state for every segment of the part. Segments that no query of this
            # layer sees get an empty state.
            for s in range(first_part + work.begin, first_part + work.end):
                if (s < seen) | (s >= unseen):
                    nothing = State(m=M, l=L, acc=A)
                    store_state(plan, slots + s - first_part, nothing, tile, opaque_zero())
    for s in range(seen, unseen):
        if apart.COLUMNS > 0:
            l = gl.zeros([tile.ROWS, apart.COLUMNS], gl.float32, apart.LAYOUT)
        else:
            l = gl.zeros([tile.ROWS, ring.KV_TILE], gl.float32, tile.SCORES)
            l = _sum_of_own(l, ring.KV_TILE)
        state = State(m=top, l=l, acc=zero)
        odd = zero
        from_tile = gl.maximum(segment_start(s) // plan.SEGMENT_UNIT, low)
        to_tile = gl.minimum(segment_start(s + 1) // plan.SEGMENT_UNIT, high)
        if tile.CONSUMERS > 1:
            from_tile += (from_tile ^ PART) & 1
        for key_tile in range(from_tile, to_tile, tile.CONSUMERS):
            state, odd = _tile(
                key_tile, turn + key_tile - low, q, state, odd, work, head, bounds, query, ring,
                room, mask, apart, tile,
            )  # fmt: skip
        m = state.m
        if apart.COLUMNS > 0:
            total = sum_of_columns(state.l, apart.COLUMNS)
        else:
            total = gl.sum(state.l, 1)
            if not query.SOFT_CAP:
                m = m * head.natural
        acc = _joined(state.acc, odd, tile.WIDTH)
        m = gl.convert_layout(m, gl.SliceLayout(1, STATE))
        total = gl.convert_layout(total, gl.SliceLayout(1, STATE))
        of_segment = State(m=m, l=total, acc=acc)
        if PART == 1:
            _send(of_segment, handoffs, room.mailbox)
        else:
            if tile.CONSUMERS > 1:
                of_segment = _with_sent(of_segment, handoffs, room.mailbox)
            if work.begin > 0:
                store_state(plan, slots + s - first_part, of_segment, tile, opaque_zero())
            else:
                folded = fold_states(State(m=M, l=L, acc=A), of_segment)
                M, L, A = folded.m, folded.l, folded.acc
        handoffs += 1
    return State(m=M, l=L, acc=A), handoffs


@gluon.jit
def _write_or_store(is_all, work, head, state, lending_group, plan, out, apart, tile):
    """Write the output of a part that has all keys of its queries, or store its state."""
    STATE: gl.constexpr = state.acc.type.layout
    # States that are loaded at a time when a work item is folded: as many as there are registers
    # for, at most all of a segment group. With batch invariance two programs share the registers.
    CELLS: gl.constexpr = tile.FINISH_ROWS * tile.FINISH_WIDTH // 128 * tile.CONSUMERS
    FEW: gl.constexpr = 8 if tile.ROWS == 16 and tile.CONSUMERS == 1 and apart.COLUMNS == 0 else 4
    MOST: gl.constexpr = 12 if tile.E4M3 and apart.COLUMNS > 0 else 16
    AT_ONCE: gl.constexpr = MOST if CELLS <= 4 else 12 if CELLS <= 8 else FEW
    # Load these numbers again here, so that the loop over keys does not keep them in registers.
    token = gl.load(work.fields + 1)
    count = gl.load(work.fields + 2)
    if is_all:
        row = gl.arange(0, tile.ROWS, layout=gl.SliceLayout(1, STATE)) + opaque_zero()
        in_tile = head.in_group + row % tile.TILE_HEADS
        column = gl.arange(0, tile.WIDTH, layout=gl.SliceLayout(0, STATE))
        at = token + row // tile.TILE_HEADS
        heads = head.kv_head * tile.GROUP + in_tile
        wanted = (row < count * tile.TILE_HEADS) & (in_tile < tile.GROUP)
        write_state(
            state, at, heads, wanted, column, head.v_factor, with_wide_strides(out), tile.SIZE
        )
    else:
        wide_out = with_wide_strides(out)
        arrive_and_fold(
            work, head, state, lending_group, plan, wide_out, tile, opaque_zero(), AT_ONCE=AT_ONCE
        )


@gluon.jit
def consume(PART: gl.constexpr, query, cache, ring, room, plan, mask, out, apart, tile):
    """Attend to all parts that the program takes.

    A single consumer (PART 0) takes all tiles of keys. With two consumers, the first (PART 0) takes
    even tiles of keys, and folds, finishes and writes. The second (PART 1) takes odd tiles of keys,
    and sends its states to the first.
    """
    lane = program_number() % plan.HEADS
    first_row, begin, past_row, mine, fields = share_at(plan.shares_ptr, plan.HEADS)
    room = room.of(PART)
    turn = 0
    handoffs = 0
    for r in range(first_row, past_row):
        work = load_work_item(r, lane, mine, fields, begin, mask, ring.KV_TILE, plan.SEGMENT_UNIT)
        if work.end > work.begin:
            token = gl.load(fields + 1)
            count = gl.load(fields + 2)
            first_part = gl.load(fields + 8)
            q, head = _load_queries(work, token, count, query, cache, room, plan, apart, tile)
            bounds = _bounds_of(work, mask, tile)
            is_all = True
            lending_group = 0
            if PART == 0:
                is_all, lending_group = _lending_group_for(work, plan)
            state, handoffs = _attend(
                PART, work, q, head, bounds, first_part, slots_of(work, lending_group, plan), turn,
                handoffs, query, ring, room, plan, mask, apart, tile,
            )  # fmt: skip
            turn += gl.maximum(work.high - work.low, 0)
            if PART == 0:
                _write_or_store(is_all, work, head, state, lending_group, plan, out, apart, tile)
        begin = 0
        fields = plan.rows_ptr + wide(((r + 1) // plan.HEAD_LOOPS) * FIELDS)
