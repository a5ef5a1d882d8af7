"""The Hopper kernel of the indexer's logits over pages: e4m3 products by warp group.

The rate at which keys arrive is the limit, so a program asks for pages three ahead of the page that
it scores. Their bytes are copied to shared memory in the order in which a product reads them. A
page is 64 keys of 128 bytes: its keys are the rows of a product, whose columns are a token's heads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.lang.compat import async_gather, reinterpret, thread_barrier

_STAGES = gl.constexpr(4)
"""Pages that shared memory holds. With four, five programs fit a multiprocessor."""
_ROWS = gl.constexpr(128)
"""Rows whose pieces are counted at once."""


@gluon.jit
def _copy_page(
    data_ptr, scale_ptr, block, is_there, data_block, scale_block, keys, scales
):  # fmt: skip
    """Ask for a page: its keys and their scales, as one group of copies.

    The group is empty unless ``is_there``.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    key = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, COPY))
    at = data_ptr + block.to(gl.int64) * data_block
    at = at + (key * 128)[:, None] + column[None, :]
    async_gather(keys, at, mask=is_there & (key >= 0)[:, None] & (column >= 0)[None, :])
    key = gl.arange(0, 64, layout=SCALES)
    at = scale_ptr + block.to(gl.int64) * scale_block + key
    async_gather(scales, at, mask=is_there & (key >= 0))
    async_copy.commit_group()


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _pages_of(lens_ptr, first, rows, most):
    """Pages of ``_ROWS`` rows from ``first`` on. Every warp has all, so sums stay within a warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([_ROWS // 32], [32], [4], [0])
    row = first + gl.arange(0, _ROWS, layout=LAYOUT)
    lens = gl.load(lens_ptr + row, mask=row < rows, other=0)
    return (gl.minimum(lens, most) + 63) // 64


@gluon.jit
def _piece_of(lens_ptr, rows, most):
    """Find the program's piece of a row from the lengths of all rows.

    A piece has at most ``most_pages`` pages: the fewest with which there are no more pieces than
    programs. A row's number of pieces is rounded up, which adds less than one for each row, so
    the pages of all rows are divided by the number of programs less that of rows.

    Returns the row, the piece's place in the row, and ``most_pages``. A program without a piece
    gets row ``rows`` or a later one.
    """
    total = 0
    for first in range(0, rows, _ROWS):
        total += gl.sum(_pages_of(lens_ptr, first, rows, most), 0)
    to_fill = gl.num_programs(0) - rows
    most_pages = gl.maximum((total + to_fill - 1) // to_fill, 1)
    program = gl.program_id(0)
    row = 0
    begin = 0
    before = 0
    for first in range(0, rows, _ROWS):
        pieces = (_pages_of(lens_ptr, first, rows, most) + most_pages - 1) // most_pages
        ends = before + gl.associative_scan(pieces, 0, _add)
        row += gl.sum((ends <= program).to(gl.int32), 0)
        begin = gl.maximum(begin, gl.max(gl.where(ends <= program, ends, 0), 0))
        before += gl.sum(pieces, 0)
    return row, program - begin, most_pages


@gluon.jit(
    do_not_specialize=["table_row", "logits_row", "most", "rows"],
    do_not_specialize_on_alignment=["lens_ptr", "requests_ptr", "table_ptr", "logits_ptr"],
)
def hopper_paged_logits_kernel(
    q_ptr,
    weights_ptr,
    data_ptr,
    scale_ptr,
    table_ptr,
    requests_ptr,
    lens_ptr,
    logits_ptr,
    q_token,
    q_head,
    weights_token,
    data_block,
    scale_block,
    table_row,
    logits_row,
    most,
    rows,
    NUM_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Logits of e4m3 query tokens over their requests' pages; more programs than ``rows`` tokens.

    Results are those of :func:`attn.kernels.sparse.indexer.kernels.paged_logits_kernel` with e4m3
    products, and arguments are as there, with q as bytes. A page is read as a whole, also where a
    token's keys end inside. The grid does not depend on lengths, which a captured graph could not
    follow: each program finds its piece of a row from all tokens' lengths.
    """
    STAGES: gl.constexpr = _STAGES
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    own, place_in_row, most_pages = _piece_of(lens_ptr, rows, most)
    if own < rows:
        token = own.to(gl.int64)
        length = gl.minimum(gl.load(lens_ptr + token), most)
        count = (length + 63) // 64
        pieces = (count + most_pages - 1) // most_pages
        low = place_in_row * count // pieces
        high = (place_in_row + 1) * count // pieces
        request = token
        if requests_ptr is not None:
            request = gl.load(requests_ptr + token).to(gl.int64)
        table = table_ptr + request * table_row
        key_bytes = gl.allocate_shared_memory(gl.uint8, [STAGES, 64, 128], OPERAND)
        keys = reinterpret(key_bytes, gl.float8e4nv, [STAGES, 64, 128], OPERAND)
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT)
        # An entry of the table is loaded a page before it is used. No load is masked: it would be a
        # branch, which waits for the entry at once. Past the piece, the last entry is loaded again.
        block = gl.load(table + low)
        # Queries and weights are asked for ahead of the pages. Behind them they would arrive after
        # all three, and nothing would be under way meanwhile.
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PRODUCT))
        weights = gl.load(
            weights_ptr + token * weights_token + head, mask=head < NUM_HEADS, other=0.0
        )
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY))
        column = gl.arange(0, 128, layout=gl.SliceLayout(0, QUERY))
        at = q_ptr + token * q_token + (head * q_head)[:, None] + column[None, :]
        q_bytes = gl.allocate_shared_memory(gl.uint8, [HEADS, 128], OPERAND)
        async_gather(q_bytes, at, mask=(head < NUM_HEADS)[:, None] & (column >= 0)[None, :])
        async_copy.commit_group()
        for i in gl.static_range(STAGES - 1):
            next_block = gl.load(table + gl.minimum(low + i + 1, high - 1))
            _copy_page(
                data_ptr, scale_ptr, block, low + i < high, data_block, scale_block,
                key_bytes.index(i), scales.index(i),
            )  # fmt: skip
            block = next_block
        queries = reinterpret(q_bytes, gl.float8e4nv, [HEADS, 128], OPERAND).permute((1, 0))
        zero = gl.zeros([64, HEADS], gl.float32, PRODUCT)
        place = gl.arange(0, 64, layout=ROW)
        out = logits_ptr + token * logits_row
        for page in range(low, high):
            turn = page - low
            async_copy.wait_group(STAGES - 2)
            # Now all threads' copies of this page are there, and all have read the page before.
            thread_barrier()
            # Products read memory by another way than threads write it.
            fence_async_shared()
            products = warpgroup_mma(
                keys.index(turn % STAGES), queries, zero, use_acc=False, is_async=True
            )
            scale = scales.index(turn % STAGES).load(ROW)
            ahead = page + STAGES - 1
            stage = (turn + STAGES - 1) % STAGES
            _copy_page(
                data_ptr, scale_ptr, block, ahead < high, data_block, scale_block,
                key_bytes.index(stage), scales.index(stage),
            )  # fmt: skip
            block = gl.load(table + gl.minimum(ahead + 1, high - 1))
            products = warpgroup_mma_wait(0, deps=[products])
            logits = gl.sum(gl.maximum(products, 0.0) * weights[None, :], 1) * scale
            key = page * 64 + place
            # Keep logits in L2 until the largest are selected: otherwise keys that stream through
            # L2 push them out to memory, between the reads of keys.
            gl.store(out + key, logits, mask=key < length, eviction_policy="evict_last")
        async_copy.wait_group(0)
