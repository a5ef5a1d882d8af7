"""Query rows before and after the loop over keys: loading and scaling queries, writing results.

The last part folds states that several programs stored for the same query rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn.kernels.dense.tile import fold, power_of_two_guard
from attn.kernels.lang.constants import LOG2E
from attn.kernels.lang.numerics import encode_e4m3
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
def prepared_queries(
    query_ptr, offset, wanted, scale, K_WIDTH: tl.constexpr, K_USED: tl.constexpr,
    K_SIZE: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, GUARD: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Load query planes ``[M, K_WIDTH]`` in the type COMPUTE of the product.

    The fifth result ``[M]`` fp32 is the factor of each row's scores. GUARD says that a bf16 query
    is multiplied in fp16, whose range is smaller: each row is multiplied by a power of two, and its
    factor undoes that.
    """
    q0 = load_query(query_ptr, offset, wanted, 0, K_WIDTH, K_USED, K_SIZE, KIND)
    q1 = q0
    q2 = q0
    q3 = q0
    if PLANES > 1:
        q1 = load_query(query_ptr, offset, wanted, 1, K_WIDTH, K_USED, K_SIZE, KIND)
    if PLANES > 2:
        q2 = load_query(query_ptr, offset, wanted, 2, K_WIDTH, K_USED, K_SIZE, KIND)
        q3 = load_query(query_ptr, offset, wanted, 3, K_WIDTH, K_USED, K_SIZE, KIND)
    scales = tl.zeros([q0.shape[0]], tl.float32) + scale
    if GUARD:
        largest = tl.max(tl.abs(q0.to(tl.float32)), 1)
        if PLANES > 1:
            largest = tl.maximum(largest, tl.max(tl.abs(q1.to(tl.float32)), 1))
        if PLANES > 2:
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
def with_sinks(some, m, l, head, wanted, sinks_ptr):
    """Add the heads' sinks to the maxima and sums of rows that have a key.

    Returns:
        Maxima, sums, and the factor that the rows' accumulators need then; all ``[M]`` fp32.
    """
    sink = tl.load(sinks_ptr + head, mask=wanted, other=0.0).to(tl.float32) * LOG2E
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
    m, l, acc, at, head, wanted, columns, valid, out_ptr, lse_ptr, sinks_ptr, v_factor,
    output_scale_ptr, out_token, out_head, lse_token, SINKS: tl.constexpr, FP8_OUT: tl.constexpr,
    LSE: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Normalise the states of rows and write them: output ``[M, columns]`` and LSE ``[M]``."""
    some = m > float("-inf")
    if SINKS:
        m, l, shrink = with_sinks(some, m, l, head, wanted, sinks_ptr)
        acc = acc * shrink[:, None]
    # The accumulator of a row without keys is zero, and so is its output.
    out = (acc * v_factor) / tl.where(some, l, 1.0)[:, None]
    offset = at.to(tl.int64) * out_token + head * out_head
    mask = wanted[:, None] & valid[None, :]
    if FP8_OUT:
        bits = encode_e4m3(out / tl.load(output_scale_ptr), HARDWARE_E4M3)
        tl.store(out_ptr + offset[:, None] + columns[None, :], bits, mask=mask)
    else:
        tl.store(
            out_ptr + offset[:, None] + columns[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=mask,
        )
    if LSE:
        write_lse(some, m, l, at, head, wanted, lse_ptr, lse_token)


@triton.jit
def fold_parts(
    kv_head, in_group, token, count, slot, first, parts, target, stores, states_ptr, sums_ptr,
    out_ptr, lse_ptr, sinks_ptr, v_factor, output_scale_ptr, out_token, out_head, lse_token,
    GROUP: tl.constexpr, TILE_HEADS: tl.constexpr, USED: tl.constexpr, WIDTH: tl.constexpr,
    PLANES: tl.constexpr, KIND: tl.constexpr, V_USED: tl.constexpr, V_SIZE: tl.constexpr,
    FINISH_ROWS: tl.constexpr, FINISH_WIDTH: tl.constexpr, SINKS: tl.constexpr,
    FP8_OUT: tl.constexpr, LSE: tl.constexpr, HARDWARE_E4M3: tl.constexpr,
):  # fmt: skip
    """Fold the stored states of a work item in their order, and write the result.

    Slot ``slot`` holds the state of all parts below ``first``; the slots from ``slot + first`` to
    ``slot + parts`` hold one part each. If ``stores``, the folded state goes to slot ``target``,
    which may be one of the slots that are folded; else the output is written.

    The loads skip the L1 cache, because other multiprocessors stored the states. Up to eight states
    are being loaded at a time.
    """
    CELLS: tl.constexpr = WIDTH * PLANES
    row = tl.arange(0, FINISH_ROWS)
    mine = row < USED
    head = kv_head * GROUP + in_group + row % TILE_HEADS
    wanted = (row < count * TILE_HEADS) & (in_group + row % TILE_HEADS < GROUP)
    at = token + row // TILE_HEADS
    m = tl.full([FINISH_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([FINISH_ROWS], tl.float32)
    for c0 in range(0, CELLS, FINISH_WIDTH):
        column = c0 + tl.arange(0, FINISH_WIDTH)
        cells = row[:, None] * CELLS + column[None, :]
        mask = mine[:, None] & (column >= 0)[None, :]
        m, l, acc = load_state(states_ptr, sums_ptr, slot, row, cells, mine, mask, USED, CELLS)
        m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3 = _load_parts(
            states_ptr, sums_ptr, slot, first, parts, row, cells, mine, mask, USED, CELLS
        )
        for part in range(first, parts, 4):
            # Load the next four before folding these, so that only the first fold waits for memory.
            n0, k0, b0, n1, k1, b1, n2, k2, b2, n3, k3, b3 = _load_parts(
                states_ptr, sums_ptr, slot, part + 4, parts, row, cells, mine, mask, USED, CELLS
            )
            m, l, acc = fold(m, l, acc, m0, l0, a0)
            m, l, acc = fold(m, l, acc, m1, l1, a1)
            m, l, acc = fold(m, l, acc, m2, l2, a2)
            m, l, acc = fold(m, l, acc, m3, l3, a3)
            m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3 = (
                n0, k0, b0, n1, k1, b1, n2, k2, b2, n3, k3, b3,
            )  # fmt: skip
        if stores:
            tl.store(states_ptr + target.to(tl.int64) * (USED * CELLS) + cells, acc, mask=mask)
        else:
            plane = column // WIDTH
            index = column % WIDTH
            columns = plane_columns(index, plane, V_SIZE, KIND)
            write_rows(
                m, l, acc, at, head, wanted, columns, index < V_USED, out_ptr, lse_ptr, sinks_ptr,
                v_factor, output_scale_ptr, out_token, out_head, lse_token, SINKS, FP8_OUT, LSE,
                HARDWARE_E4M3,
            )  # fmt: skip
    if stores:
        # The maxima and sums are stored last: every iteration above reads those of slot ``target``
        # where that slot is one of the folded ones. The barrier waits for these reads.
        tl.debug_barrier()
        sums = sums_ptr + target.to(tl.int64) * (2 * USED)
        tl.store(sums + row, m, mask=mine)
        tl.store(sums + USED + row, l, mask=mine)


@triton.jit
def _load_parts(
    states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask, USED: tl.constexpr,
    CELLS: tl.constexpr,
):  # fmt: skip
    """Load the states of parts ``part`` to ``part + 3``.

    A part from ``parts`` on gives the empty state, which changes nothing when it is folded.
    """
    m0, l0, a0 = _load_part(
        states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask, USED, CELLS
    )
    m1, l1, a1 = _load_part(
        states_ptr, sums_ptr, slot, part + 1, parts, row, cells, mine, mask, USED, CELLS
    )
    m2, l2, a2 = _load_part(
        states_ptr, sums_ptr, slot, part + 2, parts, row, cells, mine, mask, USED, CELLS
    )
    m3, l3, a3 = _load_part(
        states_ptr, sums_ptr, slot, part + 3, parts, row, cells, mine, mask, USED, CELLS
    )
    return m0, l0, a0, m1, l1, a1, m2, l2, a2, m3, l3, a3


@triton.jit
def _load_part(
    states_ptr, sums_ptr, slot, part, parts, row, cells, mine, mask, USED: tl.constexpr,
    CELLS: tl.constexpr,
):  # fmt: skip
    """Load the state of part ``part``; a part from ``parts`` on gives the empty state."""
    real = part < parts
    return load_state(
        states_ptr, sums_ptr, slot + part, row, cells, mine & real, mask & real, USED, CELLS
    )


@triton.jit
def load_state(
    states_ptr, sums_ptr, slot, row, cells, mine, mask, USED: tl.constexpr, CELLS: tl.constexpr
):
    """Load m, l and acc of one stored state; masked elements are those of the empty state."""
    slot = slot.to(tl.int64)
    sums = sums_ptr + slot * (2 * USED)
    m = tl.load(sums + row, mask=mine, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(sums + USED + row, mask=mine, other=0.0, cache_modifier=".cg")
    at = states_ptr + slot * (USED * CELLS)
    return m, l, tl.load(at + cells, mask=mask, other=0.0, cache_modifier=".cg")
