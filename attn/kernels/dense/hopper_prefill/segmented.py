"""Consumers of a batch-invariant engine: their rows have the bits of the split-KV kernel's.

A warp group owns 64 query rows, as in :mod:`attn.kernels.dense.hopper_prefill.consumer`, but walks
keys from the first visible one up, in that kernel's tiles. Where a tile begins a segment, the state
of the segment before it is folded into the one of earlier segments, as there, and the next one
starts empty. The portable kernels' own functions compute sums and folds; weights have their bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from attn.kernels.dense.hopper_prefill.steps import (
    anew,
    awaited,
    by_row,
    clear_behind,
    computed_pairs,
    first_scores,
    masked_tile,
    new_references,
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
    weights_of,
)
from attn.kernels.dense.query_rows import with_sinks, write_lse
from attn.kernels.dense.tile import (
    fold_factors,
    halved,
    halves_of,
    sum_of_columns,
    weighted,
)
from attn.kernels.lang.masks import biased
from attn.kernels.lang.opaque import opaque_zero, program_number
from attn.kernels.lang.structures import Folded, KeyRun
from builders.launch.call import is_by_ptxas_13
from builders.splitkv.device.segments import segment_of, segment_start

_LOW, _WITHIN, _BORDER = (gl.constexpr("mov.b32 $0, $1; // " + name) for name in "def")
_BY_PTXAS_13 = gl.constexpr(is_by_ptxas_13())


@gluon.constexpr_function
def _at_once(width: int) -> int:
    """Columns of a state in memory, of heads of ``width``, that are folded at a time: as many as
    there are registers for.
    """
    if not _BY_PTXAS_13:
        return 64
    # With 32 columns of heads of 192, ptxas 13 spills addresses.
    return 16 if width == 192 else 32


@gluon.constexpr_function
def _is_tight(width: int) -> bool:
    """Whether ptxas 13 spills heads of ``width`` unless it is kept from holding two things before
    they are needed: columns of a state in memory, and the thread's part of keys' numbers.
    """
    return _BY_PTXAS_13 and width > 192


@gluon.jit
def _seen(scores, first_key, rows, kv_len, scaling, mask, shape, MASKED: gl.constexpr):
    """A tile of scores under the soft cap, minus infinity where a row does not see the key.

    MASKED: a row may not see all of the tile's keys, which begin at ``first_key``.
    """
    if scaling.SOFT_CAP:
        scores = scores * scaling.factor
        scores = biased(scores, None, None, scaling.soft_cap, True, 0, False, True)
    if MASKED:
        HIDDEN: gl.constexpr = _is_tight(shape.WIDTH + shape.EXTRA)
        scores = masked_tile(scores, first_key, rows, kv_len, mask, HIDDEN)
    return scores


@gluon.jit
def _sums_of(weights, SUMS: gl.constexpr):
    """Sums of a tile's weights in SUMS columns."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16])
    return gl.convert_layout(halved(weights, SUMS), LAYOUT, assert_trivial=True)


@gluon.jit
def _with_sums(l, shrink, sums):
    """Sums of weights by column, with those of the next tile."""
    return gl.fma(l, spread(shrink, l), sums)


@gluon.jit
def _fold_outputs(acc, old, new_acc, new):
    """Fold outputs ``new_acc`` of a state into those of the state of the keys before it, each with
    a factor for every row.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, new_acc.type.layout)
    old = gl.convert_layout(old, ROWS)
    new = gl.convert_layout(new, ROWS)
    return weighted(acc, old[:, None], new_acc, new[:, None])


@gluon.jit
def _slots(PART: gl.constexpr, segments, shape):
    """A warp group's slots: for whole segment groups, and for the segments of one (with STORED)."""
    own = program_number(True) * shape.WARP_GROUPS + PART + opaque_zero()
    if segments.STORED:
        own *= 2
    return own, own + 1


@gluon.jit
def _behind_stores(slot):
    """``slot``, behind all stores of the warp: the four threads of a row read the maximum and the
    sum that one of them has stored.
    """
    return gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [slot], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _by_thread(x):
    """Outputs ``[64, N]`` as ``[128, N / 2]``, a row for each thread of the warp group."""
    TILES: gl.constexpr = x.shape[1] // 8
    # A thread has two columns of every eight, in rows that are eight apart.
    parts = gl.reshape(x, [4, 2, 8, TILES, 4, 2])
    return gl.reshape(gl.permute(parts, [0, 2, 4, 3, 1, 5]), [128, TILES * 4])


@gluon.jit
def _by_row(x, like):
    """What :func:`_by_thread` made of outputs like ``like``, as it was."""
    TILES: gl.constexpr = like.shape[1] // 8
    parts = gl.permute(gl.reshape(x, [4, 8, 4, TILES, 2, 2]), [0, 4, 1, 3, 2, 5])
    rows = gl.reshape(parts, [64, TILES * 8])
    return gl.convert_layout(rows, like.type.layout, assert_trivial=True)


@gluon.jit
def _cells(like, first, slot, segments, shape):
    """Pointers to columns from ``first`` on of a slot, for outputs like ``like``, by thread.

    Every eight columns are one piece, in which each thread's four numbers lie side by side. As
    rows, each access of a warp would touch eight lines of memory.
    """
    WIDTH: gl.constexpr = shape.WIDTH + shape.EXTRA
    LAYOUT: gl.constexpr = _by_thread(like).type.layout
    thread = gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    cell = gl.arange(0, like.shape[1] // 2, layout=gl.SliceLayout(0, LAYOUT))
    at = segments.states_ptr + slot.to(gl.int64) * (64 * WIDTH) + first * 64
    own = gl.multiple_of(at, 16) + (thread * 4 + opaque_zero() * 4)
    return own[:, None] + (cell // 4 * 512 + cell % 4)[None, :]


@gluon.jit
def _loaded(like, first, slot, segments, shape):
    """Outputs in a slot, columns from ``first`` on, as many and laid out as those of ``like``."""
    return _by_row(gl.load(_cells(like, first, slot, segments, shape)), like)


@gluon.jit
def _stored(like, seen, first, slot, segments, shape):
    """Outputs in a slot as :func:`_loaded` gives them, zeros in rows not ``seen``, ``[64]``."""
    seen = gl.convert_layout(seen, gl.SliceLayout(1, like.type.layout))
    return gl.where(seen[:, None], _loaded(like, first, slot, segments, shape), 0.0)


@gluon.jit
def _store(x, first, slot, segments, shape):
    """Store outputs in a slot, columns from ``first`` on."""
    gl.store(_cells(x, first, slot, segments, shape), _by_thread(x))


@gluon.jit
def _fold_into(old, new_acc, new, first, slot, segments, shape):
    """Fold outputs ``new_acc``, columns from ``first`` on, into those of a slot, few at a time.

    ``old`` and ``new`` are factors, see :func:`_fold_outputs`. Where ``old`` is 0 nothing may have
    been stored.
    """
    COLUMNS: gl.constexpr = new_acc.shape[1]
    AT_ONCE: gl.constexpr = _at_once(shape.WIDTH + shape.EXTRA)
    if COLUMNS > AT_ONCE:
        left, right = halves_of(new_acc)
        _fold_into(old, left, new, first, slot, segments, shape)
        _fold_into(old, right, new, first + COLUMNS // 2, slot, segments, shape)
    else:
        if _is_tight(shape.WIDTH + shape.EXTRA):
            # These columns are loaded once those before them are stored.
            slot = _behind_stores(slot)
        before = _stored(new_acc, old > 0, first, slot, segments, shape)
        after = _fold_outputs(before, old, new_acc, new)
        _store(after, first, slot, segments, shape)


@gluon.jit
def _empty(shape, segments):
    """The state of no segments."""
    ROWS: gl.constexpr = gl.SliceLayout(1, shape.SCORES)
    m = gl.full([64], float("-inf"), gl.float32, ROWS)
    l = gl.zeros([64], gl.float32, ROWS)
    acc, rest = l, l
    if not segments.STORED:
        acc = gl.zeros([64, shape.WIDTH], gl.float32, shape.OUTPUT)
        if shape.SIZE > shape.WIDTH:
            rest = gl.zeros([64, shape.EXTRA], gl.float32, shape.EXTRA_OUTPUT)
    return Folded(m=m, l=l, acc=acc, rest=rest)


@gluon.jit
def _closed(m, l, folded, segments, shape):
    """Fold maxima and sums of a segment into those of earlier segments.

    Returns:
        The state of all these segments, but for the outputs of the last; and the factors of the
        outputs of earlier segments and of the last.
    """
    sums = gl.convert_layout(sum_of_columns(l, segments.SUMS), folded.m.type.layout)
    m = by_row(m, shape)
    top, old, new = fold_factors(folded.m, m)
    l = weighted(folded.l, old, sums, new)
    return Folded(m=top, l=l, acc=folded.acc, rest=folded.rest), old, new


@gluon.jit
def _fold_segment(PART: gl.constexpr, acc, rest, old, new, folded, segments, shape):
    """Fold a segment's outputs into those of earlier segments; ``old`` and ``new`` are factors."""
    EXTRA: gl.constexpr = shape.SIZE > shape.WIDTH
    WIDTH: gl.constexpr = shape.WIDTH
    total, total_rest = folded.acc, folded.rest
    if segments.STORED:
        _, own = _slots(PART, segments, shape)
        _fold_into(old, acc, new, 0, own, segments, shape)
        if EXTRA:
            _fold_into(old, rest, new, WIDTH, own, segments, shape)
    else:
        total = _fold_outputs(total, old, acc, new)
        if EXTRA:
            total_rest = _fold_outputs(total_rest, old, rest, new)
    return Folded(m=folded.m, l=folded.l, acc=total, rest=total_rest)


@gluon.jit
def _move(old, new, like, first, slot, own, segments, shape):
    """Fold outputs in the slot ``own``, as many columns as ``like`` has, into another slot's."""
    COLUMNS: gl.constexpr = like.shape[1]
    AT_ONCE: gl.constexpr = _at_once(shape.WIDTH + shape.EXTRA)
    if COLUMNS > AT_ONCE:
        left, right = halves_of(like)
        _move(old, new, left, first, slot, own, segments, shape)
        _move(old, new, right, first + COLUMNS // 2, slot, own, segments, shape)
    else:
        stored = _loaded(like, first, own, segments, shape)
        _fold_into(old, stored, new, first, slot, segments, shape)


@gluon.jit
def _fold_run(
    acc, old, new, group_old, group_new, total, first, groups, own, follows, more, segments, shape
):  # fmt: skip
    """Fold outputs ``acc`` of a run's last segment into those of its earlier segments, ``total`` or
    the slot ``own``, and those into outputs of earlier segment groups.
    """
    if segments.STORED:
        _fold_into(old, acc, new, first, own, segments, shape)
        slot = own
        if segments.PER_GROUP > 0:
            slot = groups
            _move(group_old, group_new, acc, first, groups, own, segments, shape)
        acc = _loaded(acc, first, slot, segments, shape)
    else:
        acc = _fold_outputs(total, old, acc, new)
        if segments.PER_GROUP > 0:
            if follows:
                before = _stored(acc, group_old > 0, first, groups, segments, shape)
                acc = _fold_outputs(before, group_old, acc, group_new)
            if more:
                _store(acc, first, groups, segments, shape)
    return acc


@gluon.jit
def _finished(PART: gl.constexpr, acc, rest, m, l, folded, run, segments, shape):
    """The state over all keys of a tile of queries up to those of a run; ``m``, ``l``, ``acc`` and
    ``rest`` are that of the run's last segment.

    If more segment groups follow, this state goes to a slot.
    """
    groups, own = _slots(PART, segments, shape)
    more = run.high < run.end
    total, total_rest = folded.acc, folded.rest
    folded, old, new = _closed(m, l, folded, segments, shape)
    m, l = folded.m, folded.l
    group_old, group_new = old, new
    if segments.PER_GROUP > 0:
        row = gl.arange(0, 64, layout=m.type.layout)
        at = segments.sums_ptr + _behind_stores(groups) * 128 + row
        there_is = (row >= 0) & run.follows
        group_m = gl.load(at, mask=there_is, other=float("-inf"))
        group_l = gl.load(at + 64, mask=there_is, other=0.0)
        m, group_old, group_new = fold_factors(group_m, m)
        l = weighted(group_l, group_old, l, group_new)
        gl.store(at, m, mask=(row >= 0) & more)
        gl.store(at + 64, l, mask=(row >= 0) & more)
    acc = _fold_run(
        acc, old, new, group_old, group_new, total, 0, groups, own, run.follows, more, segments,
        shape,
    )  # fmt: skip
    if shape.SIZE > shape.WIDTH:
        rest = _fold_run(
            rest, old, new, group_old, group_new, total_rest, shape.WIDTH, groups, own,
            run.follows, more, segments, shape,
        )  # fmt: skip
    return m, l, acc, rest


@gluon.jit
def _wait_for_next(now, there_is, rings, segments):
    """Wait for the values of turn ``now``, and for the next keys of the run, if ``there_is`` such a
    tile. With STORED each product waits for its own operand instead.
    """
    if not segments.STORED:
        rings.keys.wait_full(now + 1, there_is)
        rings.values.wait_full(now)


@gluon.jit
def _step(
    PART: gl.constexpr, number, done, place, begun, opens, acc, rest, pairs, m, l, folded, tile,
    run, rows, queries, rings, scaling, mask, segments, shape, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``number`` of keys, output of the tile before it.

    The queries are those of ``place`` in their ring; ``done`` tiles of keys have been walked ahead
    of the run. Tile ``begun`` began the segment under way: its output ignores what the registers
    hold. Tile ``opens`` begins the next one: then the state of this one is complete once the output
    is.
    """
    PACKED_AHEAD: gl.constexpr = segments.STORED and not _BY_PTXAS_13
    OUTPUT: gl.constexpr = shape.OUTPUT
    is_first = number == opens
    ended_m, old, new = m, folded.m, folded.m
    if segments.STORED:
        # Behind the products registers have no room for the sums of two segments.
        if is_first:
            folded, old, new = _closed(m, l, folded, segments, shape)
            l = gl.zeros_like(l)
    m = gl.where(is_first, float("-inf"), m)
    left = unpack(pairs, shape.VALUE, shape.KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
    now = done + (number - run.low).to(gl.uint32)
    before = now - 1
    if segments.STORED:
        rings.keys.wait_full(now)
    scores = scores_of(place, now, queries, rings.keys, shape)
    if segments.STORED:
        rings.values.wait_full(before)
    acc, rest = output_of(left, before, acc, rest, rings.values, number - 1 != begun)
    # Under the products, which hide how long even a wait for what has come takes: 140 of 1,750
    # clocks of a tile at head size 128, where each product waited for its own operand.
    _wait_for_next(now, number + 1 < run.high, rings, segments)
    scores = warpgroup_mma_wait(2 if rings.values.EXTRA > 0 else 1, deps=[scores])
    if not rings.JOINT:
        rings.keys.give_back(now)
    if queries.STAGES == 1:
        mbarrier.arrive(queries.empty.index(0), count=1, pred=number == run.end - 1)
    scores = _seen(scores, number * shape.KV_TILE, rows, tile.kv_len, scaling, mask, shape, MASKED)
    top, base = new_references(scores, m, scaling.factor, scaling.SOFT_CAP, MASKED)
    shrink = gl.exp2(m - base)
    weights = scores
    if segments.STORED:
        # Behind a branch that loads and stores outputs there would be too few registers. Weights
        # are packed behind the wait: packed here, prompts at head size 256 took 27 % more time.
        weights = weights_of(scores, base, scaling.factor, scaling.SOFT_CAP)
        l = _with_sums(l, shrink, _sums_of(weights, segments.SUMS))
    acc, rest = awaited(acc, rest, rings.values, 0)
    if rings.JOINT:
        rings.keys.give_back(now)
    else:
        rings.values.give_back(before)
    past = shrink
    if PACKED_AHEAD:
        pairs = pack(weights, shape.VALUE, shape.KV_TILE)
    if is_first:
        if PACKED_AHEAD:
            # Otherwise ptxas packs behind the branch, where each pair still has two registers.
            pairs = computed_pairs(pairs)
        if not segments.STORED:
            folded, old, new = _closed(ended_m, l, folded, segments, shape)
            l = gl.zeros_like(l)
        folded = _fold_segment(PART, acc, rest, old, new, folded, segments, shape)
        begun, opens = number, _behind(number, segments)
    if not segments.STORED:
        # A segment that begins has nothing to multiply. Stored states leave no register for this.
        past = gl.where(is_first, 1.0, past)
    acc = rescaled(acc, spread(past, acc))
    if rings.values.EXTRA > 0:
        rest = rescaled(rest, spread(past, rest))
    if not segments.STORED:
        # Behind all branches: a warp issues an exponent in eight clocks, and sums and packing fill
        # the clocks between only where they are in the same block of instructions.
        weights = weights_of(scores, base, scaling.factor, scaling.SOFT_CAP)
        l = _with_sums(l, shrink, _sums_of(weights, segments.SUMS))
    if not PACKED_AHEAD:
        pairs = pack(weights, shape.VALUE, shape.KV_TILE)
    return begun, opens, acc, rest, pairs, top, l, folded


@gluon.jit
def _write(m, l, acc, rest, tile, left, out, values, shape):
    """Normalise a warp group's rows of a tile, as the portable kernels do, and write those of the
    first ``left`` tokens.
    """
    PACKED: gl.constexpr = shape.PACKED
    row = gl.arange(0, 64, layout=m.type.layout) + opaque_zero()
    wanted = row // PACKED < left
    at = tile.row + row // PACKED
    head = tile.head * PACKED + row % PACKED
    some = m > float("-inf")
    if out.SINKS:
        m, l, shrink = with_sinks(some, m, l, head, wanted, out.sinks_ptr)
        acc = scaled(acc, shrink)
        if values.EXTRA > 0:
            rest = scaled(rest, shrink)
    inverse = 1.0 / gl.where(some, l, 1.0)
    store_rows(_normalised(acc, inverse, out), 0, tile, left, out, shape)
    if values.EXTRA > 0:
        store_rows(_normalised(rest, inverse, out), shape.WIDTH, tile, left, out, shape)
    if out.LSE:
        write_lse(some, m, l, at, head, wanted, out.lse_ptr, out.lse_token)


@gluon.jit
def _normalised(acc, inverse, out):
    """Outputs ``[64, columns]``, multiplied by one over the sums of weights, ``[64]``."""
    result = scaled(acc, inverse)
    if out.FP8_OUT:
        result = result / gl.load(out.output_scale_ptr)
    return result


@gluon.jit
def _first_weights(scores, now, tile, run, queries, keys, scaling, mask, segments, shape):
    """Weights, maximum and sums of a run's first keys.

    Waits for their scores, and gives back the keys, and queries that are not needed any more.
    """
    scores = warpgroup_mma_wait(0, deps=[scores])
    keys.give_back(now, tile.high > 0)
    if queries.STAGES == 1:
        is_last = (tile.high > 0) & (run.end - run.low == 1)
        mbarrier.arrive(queries.empty.index(0), count=1, pred=is_last)
    rows = rows_of(tile, mask, shape)
    scores = _seen(scores, run.low * shape.KV_TILE, rows, tile.kv_len, scaling, mask, shape, True)
    m = unreferred(scores)
    weights, _, m = referred_weights(scores, m, scaling.factor, scaling.SOFT_CAP, True)
    return pack(weights, shape.VALUE, shape.KV_TILE), m, _sums_of(weights, segments.SUMS)


@gluon.jit
def _behind(number, segments):
    """The tile of keys that begins the segment behind the one of tile ``number``."""
    return segment_start(segment_of(number * segments.UNIT) + 1) // segments.UNIT


@gluon.jit
def _run_from(low, tile, follows, segments):
    """The tiles of keys from ``low`` to the end of their segment group."""
    high = tile.high
    if segments.PER_GROUP > 0:
        group = segment_of(low * segments.UNIT) // segments.PER_GROUP
        behind = segment_start((group + 1) * segments.PER_GROUP) // segments.UNIT
        high = gl.minimum(high, behind)
    return KeyRun(low=low, high=high, end=tile.high, follows=follows)


@gluon.jit
def _next_run(PART: gl.constexpr, turn, done, ended, queries, rings, segments, shape):
    """Find the run behind ``ended``, once the queries of ``turn`` are there, and issue its first
    scores, those of tile ``done`` of keys. After the last run the scores mean nothing.

    Returns:
        The tile of queries, the run, and its first scores, under way.
    """
    queries.wait_full(turn)
    stage = turn % queries.STAGES
    tile = part_told(PART, stage, queries, shape)
    low = gl.where(ended.high == ended.end, tile.low, ended.high)
    run = _run_from(low, tile, ended.high < ended.end, segments)
    # The opaque zero hides the address, see the other consumer.
    place = stage * shape.WARP_GROUPS + PART + opaque_zero()
    return tile, run, first_scores(place, done, tile, queries, rings.keys, shape)


@gluon.jit
def _tiles_seen(tile, run, rows, mask, KV_TILE: gl.constexpr):
    """Tiles ``[inner, edge)`` behind a run's first one, of whose keys every row sees all."""
    all_low, all_high = mask.seen_by_all(rows.first, rows.last, tile.kv_len, tile.causal)
    inner = run.low + 1
    if mask.WINDOW or mask.CHUNK:
        inner = gl.maximum((all_low + KV_TILE - 1) // KV_TILE, inner)
        inner = gl.minimum(inner, run.high)
    return inner, gl.maximum(gl.minimum(all_high // KV_TILE, run.high), inner)


@gluon.jit
def consume_segments(
    PART: gl.constexpr, queries, rings, cache, scaling, mask, out, segments, shape
):
    """A warp group: rows ``[64 * PART, 64 * PART + 64)`` of every tile of queries.

    The keys of a tile of queries are walked in runs, one for each segment group. The last output of
    a run and the first scores of the next are issued together; states are folded and written under
    the latter. With STORED they are folded and written ahead of it, since registers have no room
    for these scores too. Every warp group takes every tile of keys, also where none of its own rows
    sees one: that changes no bit of its states.
    """
    OUTPUT: gl.constexpr = shape.OUTPUT
    turn = 0
    done = gl.to_tensor(0).to(gl.uint32)
    parity = 0
    mbarrier.wait(queries.full.index(0), 0)
    tile = part_told(PART, 0, queries, shape)
    run = _run_from(tile.low, tile, tile.low < 0, segments)
    scores = first_scores(PART, done, tile, queries, rings.keys, shape)
    pairs, m, l = _first_weights(
        scores, done, tile, run, queries, rings.keys, scaling, mask, segments, shape
    )
    while tile.high > 0:
        rows = rows_of(tile, mask, shape)
        inner, edge = _tiles_seen(tile, run, rows, mask, shape.KV_TILE)
        acc = gl.zeros([64, shape.WIDTH], gl.float32, OUTPUT)
        rest = m
        if rings.values.EXTRA > 0:
            rest = gl.zeros([64, shape.EXTRA], gl.float32, shape.EXTRA_OUTPUT)
        folded = _empty(shape, segments)
        begun, opens = run.low, _behind(run.low, segments)
        _wait_for_next(done, run.high - run.low > 1, rings, segments)
        # The opaque zero hides an address that would take a uniform register in all three loops.
        place = (turn % queries.STAGES) * shape.WARP_GROUPS + PART + opaque_zero()
        if mask.WINDOW or mask.CHUNK:
            for i in range(run.low + 1, inner):
                begun, opens, acc, rest, pairs, m, l, folded = _step(
                    PART, i, done, anew(place, _LOW), begun, opens, acc, rest, pairs, m, l, folded,
                    tile, run, rows, queries, rings, scaling, mask, segments, shape, True,
                )  # fmt: skip
        for i in range(inner, edge):
            begun, opens, acc, rest, pairs, m, l, folded = _step(
                PART, i, done, anew(place, _WITHIN), begun, opens, acc, rest, pairs, m, l, folded,
                tile, run, rows, queries, rings, scaling, mask, segments, shape, False,
            )  # fmt: skip
        for i in range(edge, run.high):
            begun, opens, acc, rest, pairs, m, l, folded = _step(
                PART, i, done, anew(place, _BORDER), begun, opens, acc, rest, pairs, m, l, folded,
                tile, run, rows, queries, rings, scaling, mask, segments, shape, True,
            )  # fmt: skip
        is_last = run.high == run.end
        finished = tile
        if queries.STAGES > 1:
            # Read again, since there are no registers to keep it in.
            finished = part_told(PART, turn % queries.STAGES, queries, shape)
            mbarrier.arrive(queries.empty.index(turn % queries.STAGES), count=1, pred=is_last)
        weights = unpack(pairs, shape.VALUE, shape.KV_TILE, gl.DotOperandLayout(0, OUTPUT, 2))
        done += (run.high - run.low).to(gl.uint32)
        before = done - 1
        if is_last:
            parity = clear_behind(PART, before, parity, finished, rings, shape)
        if segments.STORED:
            rings.values.wait_full(before)
        acc, rest = output_of(weights, before, acc, rest, rings.values, run.high - 1 != begun)
        ended = run
        turn += is_last.to(gl.int32)
        if segments.STORED:
            acc, rest = awaited(acc, rest, rings.values, 0)
        else:
            tile, run, scores = _next_run(PART, turn, done, ended, queries, rings, segments, shape)
            acc, rest = awaited(acc, rest, rings.values, 2 if shape.EXTRA > 0 else 1)
        if not rings.JOINT:
            rings.values.give_back(before)
        m, l, acc, rest = _finished(
            PART, acc, rest, m, l, folded, ended, segments, shape
        )  # fmt: skip
        # A run that others follow writes no row.
        left = gl.where(ended.high == ended.end, finished.left, 0)
        _write(m, l, acc, rest, finished, left, out, rings.values, shape)
        if segments.STORED:
            tile, run, scores = _next_run(PART, turn, done, ended, queries, rings, segments, shape)
        pairs, m, l = _first_weights(
            scores, done, tile, run, queries, rings.keys, scaling, mask, segments, shape
        )
