"""The kernel that clears the rows which no request owns, for the portable latent kernel.

A captured graph is replayed for steps with fewer tokens than it was captured for, and its other
rows go through the projections that follow, so they must hold numbers. The Hopper kernels clear
these rows themselves. In the portable kernel the few instructions that this takes cost registers
that it does not have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from builders.splitkv.record import ROW_FIELDS

_FIELDS = tl.constexpr(ROW_FIELDS)


@triton.jit(do_not_specialize=["lse_token"], do_not_specialize_on_alignment=["lse_ptr"])
def clear_padding_kernel(
    out_ptr,
    lse_ptr,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    out_token,
    out_head,
    lse_token,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    LSE: tl.constexpr,
):
    """Write zeros, and -inf as LSE, to rows past the last work item's; grid ``(T,)``.

    Out is ``[T, NUM_HEADS, SIZE]``, LSE ``[T, NUM_HEADS]`` fp32. WIDTH is SIZE, padded to a power
    of two. The other pointers are the tensors of :class:`builders.splitkv.record.SplitPlan`.
    """
    row = tl.program_id(0)
    items = tl.load(total_ptr)
    # Work items have the order of their tokens.
    last = rows_ptr + tl.maximum(items - 1, 0) * _FIELDS
    past = tl.load(last + 1) + tl.load(last + 2)
    if row >= tl.where(items > 0, past, 0):
        column = tl.arange(0, WIDTH)
        zeros = tl.zeros([WIDTH], out_ptr.dtype.element_ty)
        for head in range(NUM_HEADS):
            at = row.to(tl.int64) * out_token + head * out_head
            tl.store(out_ptr + at + column, zeros, mask=column < SIZE)
            if LSE:
                tl.store(lse_ptr + row.to(tl.int64) * lse_token + head, float("-inf"))
