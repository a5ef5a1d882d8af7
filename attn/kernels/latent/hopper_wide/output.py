"""The output of a part of a work item, on its way to memory, in the wide Hopper latent kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.dense.query_rows import write_lse
from attn.kernels.lang.compat import reinterpret, thread_barrier
from attn.kernels.lang.opaque import opaque_zero, program_number
from attn.kernels.latent.hopper_wide.parts import HALF
from attn.kernels.latent.hopper_wide.queries import query_rows


@gluon.jit
def write_part(
    W: gl.constexpr, cut, in_group, m, l, written, room, plan, out, tile, OUTPUT: gl.constexpr
):
    """Write warp group W's half of a part's output; group 0 also writes the LSE.

    A part that has all keys of its queries is the result. Any other goes to a slot of the program,
    for :func:`attn.kernels.latent.hopper_wide.fold.fold_cuts_kernel`: the output that the part's
    keys alone would give, in the output's type, and the LSE in units of log 2.

    ``m`` and ``l`` ``[64]`` are the rows' references and sums of weights, in the rows of the layout
    OUTPUT; ``written`` ``[64, HALF]`` is the output in its type.

    This runs once for a work item and waits for its instructions to be fetched. So the code is kept
    short: rows go through shared memory to threads that write 16 bytes at a time.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    WRITES_LSE: gl.constexpr = out.LSE and W == 0
    some = m > float("-inf")
    # The queries' shared memory is free: no product reads it any more.
    halves = reinterpret(room.q_boxes, tile.DTYPE, [2, 64, 256], gl.NVMMASharedLayout(128, 16, 2))
    z = opaque_zero() if tile.E4M3 else 0
    halves.index(z + W).store(written.to(tile.DTYPE, bitcast=True))
    # These are loaded once more instead of being kept in registers during the loop.
    count = gl.load(cut.fields + 2)
    token = gl.load(cut.fields + 1)
    is_result = (cut.begin == 0) & (cut.end == gl.load(cut.fields + 6))
    # A program has two slots: the first for an item that another program began, the second for an
    # item that goes on in another program.
    slot = wide(2 * program_number() + gl.where(cut.begin == 0, 1, 0))
    if is_result:
        if WRITES_LSE:
            tokens, head, wanted = query_rows(token, count, in_group, tile, OUTPUT)
            write_lse(some, m, l, tokens, head, wanted, out.lse_ptr, out.lse_token)
    elif W == 0:
        place = gl.arange(0, 64, layout=ROW) + opaque_zero()
        lse = gl.where(some, m + gl.log2(l), float("-inf"))
        gl.store(plan.sums_ptr + slot * tile.USED + place, lse, mask=place < tile.USED)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tokens, head, wanted = query_rows(token, count, in_group, tile, LAYOUT)
    at = tokens.to(gl.int64) * out.out_token + head * out.out_head
    to = out.out_ptr
    if not is_result:
        place = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)) + opaque_zero()
        at = (slot * tile.USED + place) * (2 * HALF)
        wanted = place < tile.USED
        to = plan.states_ptr.to(gl.pointer_type(out.out_ptr.dtype.element_ty), bitcast=True)
    thread_barrier()
    # Eight times zero: the compiler has to know that a thread's columns are aligned.
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)) + 8 * opaque_zero()
    for i in gl.static_range(4):
        part = room.q_boxes.index(z + W * 4 + i).load(LAYOUT)
        cells = to + at[:, None] + (W * HALF + i * 64 + column)[None, :]
        gl.store(cells, part.to(out.out_ptr.dtype.element_ty, bitcast=True), mask=wanted[:, None])
    # The next item's queries come where the output was.
    thread_barrier()
