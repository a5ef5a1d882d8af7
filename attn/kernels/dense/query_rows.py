"""Query rows before and after the loop over keys: loading and scaling queries, writing results.

The last part folds states that several programs stored for the same query rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.dense.tile import fold, power_of_two_guard
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.groups import State
from attn.kernels.lang.numerics import encode_e4m3, product
from attn.kernels.lang.stored import plane_columns

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_query(
    query_ptr, offset, wanted, PLANE: tl.constexpr, K_WIDTH: tl.constexpr, K_USED: tl.constexpr,
    K_SIZE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Load the elements of query rows that one plane of the stored keys is multiplied with.

    Returns:
        ``[M, K_WIDTH]`` in the query's type; 0 where ``wanted [M]`` is False.
    """
    index = tl.arange(0, K_WIDTH)
    column = plane_columns(index, PLANE, K_SIZE, KIND)
    mask = wanted[:, None] & (index < K_USED)[None, :]
    return tl.load(query_ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def factors_of(kv_head, query, cache):
    """The factors that the heads of a KV head give to scores and to outputs, fp32.

    The first includes log2(e) unless scores have a soft cap. The second is 1 unless the cache has
    scales per tensor or head.
    """
    natural = query.scale
    v_factor = 1.0
    if cache.PER_TENSOR:
        natural = query.scale * tl.load(cache.k_scale_ptr + kv_head * cache.scale_head)
        v_factor = tl.load(cache.v_scale_ptr + kv_head * cache.scale_head)
    if not query.SOFT_CAP:
        natural = natural * LOG2E
    return natural, v_factor


@triton.jit
def prepared_queries(offset, wanted, scale, query, cache, COMPUTE: tl.constexpr):
    """Load query planes ``[M, K_WIDTH]`` in the type COMPUTE of the product.

    The fifth result ``[M]`` fp32 is the factor of each row's scores. GUARD says that a bf16 query
    is multiplied in fp16, whose range is smaller: each row is multiplied by a power of two, and its
    factor undoes that.

    Args:
        offset: ``[M]`` int64, offset of each row's query.
        wanted: ``[M]`` bool, False for rows that are not loaded.
        scale: fp32, factor of the scores.
        query: a ``Query`` of :mod:`attn.kernels.dense.groups`.
        cache: a ``Cache``.
        COMPUTE: a type.
    """
    q0 = _load_plane(offset, wanted, query, cache, 0)
    q1 = q0
    q2 = q0
    q3 = q0
    if cache.PLANES > 1:
        q1 = _load_plane(offset, wanted, query, cache, 1)
    if cache.PLANES > 2:
        q2 = _load_plane(offset, wanted, query, cache, 2)
        q3 = _load_plane(offset, wanted, query, cache, 3)
    scales = tl.zeros([q0.shape[0]], tl.float32) + scale
    if query.GUARD:
        largest = tl.max(tl.abs(q0.to(tl.float32)), 1)
        if cache.PLANES > 1:
            largest = tl.maximum(largest, tl.max(tl.abs(q1.to(tl.float32)), 1))
        if cache.PLANES > 2:
            largest = tl.maximum(largest, tl.max(tl.abs(q2.to(tl.float32)), 1))
            largest = tl.maximum(largest, tl.max(tl.abs(q3.to(tl.float32)), 1))
        down, up = power_of_two_guard(largest)
        scales = scales * up
        q0 = q0.to(tl.float32) * down[:, None]
        q1 = q1.to(tl.float32) * down[:, None]
        q2 = q2.to(tl.float32) * down[:, None]
        q3 = q3.to(tl.float32) * down[:, None]
    return q0.to(COMPUTE), q1.to(COMPUTE), q2.to(COMPUTE), q3.to(COMPUTE), scales


@triton.jit
def _load_plane(offset, wanted, query, cache, PLANE: tl.constexpr):
    """Load the elements of query rows that one plane of keys is multiplied with."""
    return load_query(
        query.query_ptr, offset, wanted, PLANE, cache.K_WIDTH, cache.K_USED, cache.K_SIZE,
        cache.KIND,
    )  # fmt: skip


@triton.jit
def with_sinks(some, m, l, head, wanted, sinks_ptr):
    """Add the heads' sinks to the maxima and sums of rows that have a key.

    Returns:
        Maxima, sums, and the factor that the rows' accumulators need then; all ``[M]`` fp32.
    """
    sink = product(tl.load(sinks_ptr + head, mask=wanted, other=0.0).to(tl.float32), LOG2E)
    top = tl.where(some, tl.maximum(m, sink), m)
    base = tl.where(some, top, 0.0)
    shrink = tl.exp2(m - base)
    return top, tl.fma(l, shrink, tl.where(some, tl.exp2(sink - base), 0.0)), shrink


@triton.jit
def write_lse(some, m, l, at, head, wanted, lse_ptr, lse_token):
    """Write the natural LSE of rows ``[M]``, fp32; rows without keys get -inf."""
    lse = tl.where(some, (m + tl.log2(l)) * _LN2, float("-inf"))
    tl.store(lse_ptr + at.to(tl.int64) * lse_token + head, lse, mask=wanted)


@triton.jit
def write_rows(
    m, l, acc, at, head, wanted, columns, valid, out, v_factor, LSE: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Normalise the states of query rows ``[M]`` and write them.

    Args:
        m: ``[M]`` fp32, maxima of the scores.
        l: ``[M]`` fp32, sums of the weights.
        acc: ``[M, N]`` fp32, some columns of the sums of values times weights.
        at: ``[M]`` int32, token of each row.
        head: ``[M]`` int32, query head of each row.
        wanted: ``[M]`` bool, False for rows that are not written.
        columns: ``[N]`` int32, the element of the output that each column is.
        valid: ``[N]`` bool, False for columns that are not written.
        out: an ``Out`` of :mod:`attn.kernels.lang.groups` or of its twin in ``structures``.
        v_factor: fp32, by which outputs are multiplied.
        LSE: whether the LSE is written too.
        HARDWARE_E4M3: whether the GPU has instructions for e4m3.
    """
    some = m > float("-inf")
    if out.SINKS:
        m, l, shrink = with_sinks(some, m, l, head, wanted, out.sinks_ptr)
        acc = acc * shrink[:, None]
    # The accumulator of a row without keys is zero, and so is its output.
    result = acc * (v_factor / tl.where(some, l, 1.0))[:, None]
    offset = at.to(tl.int64) * out.out_token + head * out.out_head
    mask = wanted[:, None] & valid[None, :]
    if out.FP8_OUT:
        bits = encode_e4m3(result / tl.load(out.output_scale_ptr), HARDWARE_E4M3)
        tl.store(out.out_ptr + offset[:, None] + columns[None, :], bits, mask=mask)
    else:
        tl.store(
            out.out_ptr + offset[:, None] + columns[None, :],
            result.to(out.out_ptr.dtype.element_ty),
            mask=mask,
        )
    if LSE:
        write_lse(some, m, l, at, head, wanted, out.lse_ptr, out.lse_token)


@triton.jit
def _write_plane(m, l, acc, rows, out, v_factor, PLANE: tl.constexpr, LSE: tl.constexpr):
    """Write one plane of outputs ``acc [M, WIDTH]`` of query rows, and with LSE their LSE."""
    index = tl.arange(0, acc.shape[1])
    write_rows(
        m, l, acc, rows.token, rows.head, rows.wanted,
        plane_columns(index, PLANE, out.SIZE, out.KIND), index < out.COLUMNS, out, v_factor, LSE,
        out.HARDWARE_E4M3,
    )  # fmt: skip


@triton.jit
def write_state(state, rows, out, v_factor, PLANES: tl.constexpr):
    """Write the results of query rows ``[M]`` whose keys are all folded into ``state``.

    The groups are those of :mod:`attn.kernels.lang.groups`; ``state`` has PLANES planes.
    """
    _write_plane(state.m, state.l, state.acc0, rows, out, v_factor, 0, out.LSE)
    if PLANES > 1:
        _write_plane(state.m, state.l, state.acc1, rows, out, v_factor, 1, False)
    if PLANES > 2:
        _write_plane(state.m, state.l, state.acc2, rows, out, v_factor, 2, False)
        _write_plane(state.m, state.l, state.acc3, rows, out, v_factor, 3, False)


@triton.jit
def fold_parts(
    block, slot, first, parts, target, stores, scratch, out, v_factor, GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):  # fmt: skip
    """Fold the stored states of a work item in their order, and write the result.

    Slot ``slot`` holds the state of all parts below ``first``; the slots from ``slot + first`` to
    ``slot + parts`` hold one part each. If ``stores``, the folded state goes to slot ``target``,
    which may be one of the slots that are folded; else the output is written.

    The loads skip the L1 cache, because other multiprocessors stored the states. Up to eight states
    are being loaded at a time.

    Args:
        block: a ``Block`` of :mod:`attn.kernels.lang.groups`, the work item's query rows.
        slot: int32.
        first: int32.
        parts: int32.
        target: int32.
        stores: bool.
        scratch: a ``Scratch``, which holds the slots.
        out: an ``Out``.
        v_factor: fp32, by which outputs are multiplied.
        GROUP: query heads of a KV head.
        TILE_HEADS: query heads of a tile: row ``i`` is of head ``i % TILE_HEADS``.
    """
    CELLS: tl.constexpr = scratch.WIDTH * scratch.PLANES
    USED: tl.constexpr = scratch.USED
    row = tl.arange(0, scratch.FINISH_ROWS)
    mine = row < USED
    head = block.kv_head * GROUP + block.in_group + row % TILE_HEADS
    wanted = (row < block.tokens * TILE_HEADS) & (block.in_group + row % TILE_HEADS < GROUP)
    at = block.token + row // TILE_HEADS
    m = tl.full([scratch.FINISH_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([scratch.FINISH_ROWS], tl.float32)
    for c0 in range(0, CELLS, scratch.FINISH_WIDTH):
        column = c0 + tl.arange(0, scratch.FINISH_WIDTH)
        cells = row[:, None] * CELLS + column[None, :]
        mask = mine[:, None] & (column >= 0)[None, :]
        m, l, acc = load_state(
            scratch.states_ptr, scratch.sums_ptr, slot, row, cells, mine, mask, USED, CELLS
        )
        m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3 = _load_parts(
            scratch, slot, first, parts, row, cells, mine, mask
        )
        for part in range(first, parts, 4):
            # Load the next four before folding these, so that only the first fold waits for memory.
            n0, k0, b0, n1, k1, b1, n2, k2, b2, n3, k3, b3 = _load_parts(
                scratch, slot, part + 4, parts, row, cells, mine, mask
            )
            m, l, acc = fold(m, l, acc, m0, l0, a0)
            m, l, acc = fold(m, l, acc, m1, l1, a1)
            m, l, acc = fold(m, l, acc, m2, l2, a2)
            m, l, acc = fold(m, l, acc, m3, l3, a3)
            m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3 = (
                n0, k0, b0, n1, k1, b1, n2, k2, b2, n3, k3, b3,
            )  # fmt: skip
        if stores:
            states = scratch.states_ptr + target.to(tl.int64) * (USED * CELLS)
            tl.store(states + cells, acc, mask=mask)
        else:
            plane = column // scratch.WIDTH
            index = column % scratch.WIDTH
            columns = plane_columns(index, plane, out.SIZE, out.KIND)
            write_rows(
                m, l, acc, at, head, wanted, columns, index < out.COLUMNS, out, v_factor, out.LSE,
                out.HARDWARE_E4M3,
            )  # fmt: skip
    if stores:
        # The maxima and sums are stored last: every iteration above reads those of slot ``target``
        # where that slot is one of the folded ones. The barrier waits for these reads.
        tl.debug_barrier()
        sums = scratch.sums_ptr + target.to(tl.int64) * (2 * USED)
        tl.store(sums + row, m, mask=mine)
        tl.store(sums + USED + row, l, mask=mine)


@triton.jit
def _load_parts(scratch, slot, part, parts, row, cells, mine, mask):
    """Load the states of parts ``part`` to ``part + 3``.

    A part from ``parts`` on gives the empty state, which changes nothing when it is folded.
    """
    m0, l0, a0 = _load_part(scratch, slot, part, parts, row, cells, mine, mask)
    m1, l1, a1 = _load_part(scratch, slot, part + 1, parts, row, cells, mine, mask)
    m2, l2, a2 = _load_part(scratch, slot, part + 2, parts, row, cells, mine, mask)
    m3, l3, a3 = _load_part(scratch, slot, part + 3, parts, row, cells, mine, mask)
    return m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3


@triton.jit
def _load_part(scratch, slot, part, parts, row, cells, mine, mask):
    """Load the state of part ``part``; a part from ``parts`` on gives the empty state."""
    CELLS: tl.constexpr = scratch.WIDTH * scratch.PLANES
    real = part < parts
    return load_state(
        scratch.states_ptr, scratch.sums_ptr, slot + part, row, cells, mine & real, mask & real,
        scratch.USED, CELLS,
    )  # fmt: skip


@triton.jit
def load_planes(scratch, slot, wanted, ROWS: tl.constexpr):
    """Load the state in a slot of ``scratch``; the empty state if it is not ``wanted``."""
    row = tl.arange(0, ROWS)
    cells = row[:, None] * (scratch.WIDTH * scratch.PLANES) + tl.arange(0, scratch.WIDTH)[None, :]
    mine = (row < scratch.USED) & wanted
    CELLS: tl.constexpr = scratch.WIDTH * scratch.PLANES
    m, l, acc0 = load_state(
        scratch.states_ptr, scratch.sums_ptr, slot, row, cells, mine, mine[:, None], scratch.USED,
        CELLS,
    )  # fmt: skip
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    if scratch.PLANES > 1:
        _, _, acc1 = load_state(
            scratch.states_ptr, scratch.sums_ptr, slot, row, cells + scratch.WIDTH, mine,
            mine[:, None], scratch.USED, CELLS,
        )  # fmt: skip
    if scratch.PLANES > 2:
        _, _, acc2 = load_state(
            scratch.states_ptr, scratch.sums_ptr, slot, row, cells + 2 * scratch.WIDTH, mine,
            mine[:, None], scratch.USED, CELLS,
        )  # fmt: skip
        _, _, acc3 = load_state(
            scratch.states_ptr, scratch.sums_ptr, slot, row, cells + 3 * scratch.WIDTH, mine,
            mine[:, None], scratch.USED, CELLS,
        )  # fmt: skip
    return State(m, l, acc0, acc1, acc2, acc3)


@triton.jit
def fold_slots(new, slot, new_slot, stored, scratch):
    """Fold the state ``new``, whose outputs are in ``new_slot``, into the state in ``slot``.

    That is the empty state unless something is ``stored`` there.

    Returns:
        The folded state, whose outputs are in ``slot`` and not in registers.
    """
    # All planes of a row lie one after another.
    WIDTH: tl.constexpr = scratch.WIDTH * scratch.PLANES
    USED: tl.constexpr = scratch.USED
    row = tl.arange(0, USED)
    sums = scratch.sums_ptr + slot.to(tl.int64) * (2 * USED)
    mine = (row < USED) & stored
    # Threads load what other threads stored.
    tl.debug_barrier()
    m = tl.load(sums + row, mask=mine, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(sums + USED + row, mask=mine, other=0.0, cache_modifier=".cg")
    for c0 in range(0, WIDTH, 32):
        cells = row[:, None] * WIDTH + (c0 + tl.arange(0, 32))[None, :]
        _, _, before = load_state(
            scratch.states_ptr, scratch.sums_ptr, slot, row, cells, mine, mine[:, None], USED,
            WIDTH,
        )  # fmt: skip
        _, _, acc = load_state(
            scratch.states_ptr, scratch.sums_ptr, new_slot, row, cells, mine, cells >= 0, USED,
            WIDTH,
        )  # fmt: skip
        _, _, after = fold(m, l, before, new.m, new.l, acc)
        at = tl.multiple_of(scratch.states_ptr + slot.to(tl.int64) * (USED * WIDTH), 16)
        tl.store(at + cells, after)
    top, total, _ = fold(m, l, l[:, None], new.m, new.l, l[:, None])
    tl.debug_barrier()
    tl.store(sums + row, top)
    tl.store(sums + USED + row, total)
    return State(top, total, new.acc0, new.acc1, new.acc2, new.acc3)


@triton.jit
def load_outputs(state, slot, scratch):
    """``state`` with the outputs in a slot of ``scratch``; rows without keys have none there.

    States have one plane or two.
    """
    CELLS: tl.constexpr = scratch.WIDTH * scratch.PLANES
    row = tl.arange(0, state.m.shape[0])
    at = scratch.states_ptr + slot.to(tl.int64) * (scratch.USED * CELLS)
    at = tl.multiple_of(at, 16)
    cells = at + row[:, None] * CELLS + tl.arange(0, scratch.WIDTH)[None, :]
    seen = (state.m > float("-inf"))[:, None]
    acc = tl.load(cells, mask=seen, other=0.0, cache_modifier=".cg")
    acc1 = acc
    if scratch.PLANES > 1:
        acc1 = tl.load(cells + scratch.WIDTH, mask=seen, other=0.0, cache_modifier=".cg")
    return State(state.m, state.l, acc, acc1, acc, acc)


@triton.jit
def load_state(
    states_ptr, sums_ptr, slot, row, cells, mine, mask, USED: tl.constexpr, CELLS: tl.constexpr
):
    """Load m, l and acc of one stored state; masked elements are those of the empty state."""
    slot = slot.to(tl.int64)
    sums = sums_ptr + slot * (2 * USED)
    m = tl.load(sums + row, mask=mine, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(sums + USED + row, mask=mine, other=0.0, cache_modifier=".cg")
    at = tl.multiple_of(states_ptr + slot * (USED * CELLS), 16)
    return m, l, tl.load(at + cells, mask=mask, other=0.0, cache_modifier=".cg")
