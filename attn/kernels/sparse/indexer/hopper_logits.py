"""The Hopper kernel of the indexer's logits: it multiplies e4m3 keys and queries as fp16.

The rate at which keys arrive is the limit, so a program asks for pages three ahead of the page that
it scores: their bytes are copied to shared memory as they are stored. From there they go 16 at a
time to the registers from which products read them. A product sums over all columns, so columns may
come in any order that keys and queries share; a thread uses the columns that it has loaded. A page
is 64 keys of 128 bytes, and its keys are the rows of a product.
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

from attn.kernels.lang.compat import async_gather, thread_barrier
from attn.kernels.lang.packed import SPLIT_E4M3

_STAGES = gl.constexpr(4)
"""Pages that shared memory holds. With four, four programs fit a multiprocessor."""
_ROWS = gl.constexpr(128)
"""Rows whose pieces are counted at once."""


@gluon.constexpr_function
def _words_layout(rows: int) -> gl.DistributedLinearLayout:
    """The layout of ``[rows, 32]`` words in a warp group.

    Four threads share a row; each has 16 bytes of its first 64 bytes and 16 of its last 64.
    """
    more = [[32 << k, 0] for k in range(rows.bit_length() - 6)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], *more],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[rows, 32],
    )


@gluon.jit
def _as_operand(words, ROWS: gl.constexpr, MOVES_ROWS: gl.constexpr):
    """Words of four e4m3 as fp16 ``[ROWS, 128]``, in the order of columns that products want.

    Word 16 a + 4 c + b goes to step 4 a + b of the product, to thread c of the four that share a
    row. With MOVES_ROWS rows are reordered too: row 32 h + 8 w + g becomes row 16 w + 8 h + g.
    """
    f0, f1, f2, f3 = gl.inline_asm_elementwise(
        SPLIT_E4M3, "=h,=h,=h,=h,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    x = gl.join(gl.join(f0, f1), gl.join(f2, f3))
    if MOVES_ROWS:
        x = gl.reshape(x, [2, 4, 8, 2, 4, 4, 2, 2])
        x = gl.permute(x, (1, 0, 2, 3, 5, 7, 4, 6))
    else:
        x = gl.reshape(x, [ROWS, 2, 4, 4, 2, 2])
        x = gl.permute(x, (0, 1, 3, 5, 2, 4))
    return gl.reshape(x, [ROWS, 128])


@gluon.jit
def _key_of(row):
    """The key of a page that a row of the product stands for."""
    return row // 8 % 2 * 32 + row // 16 * 8 + row % 8


@gluon.jit
def _copy_page(
    data_ptr, scale_ptr, block, is_there, data_block, scale_block, keys, scales
):  # fmt: skip
    """Ask for a page: its keys as they are stored, its scales in the order of the product's rows.

    The copies of a page are one group. It is empty unless ``is_there``.
    """
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, COPY))
    at = data_ptr + block.to(gl.int64) * data_block
    at = at + (row * 32)[:, None] + word[None, :]
    async_gather(keys, at, mask=is_there & (row >= 0)[:, None] & (word >= 0)[None, :])
    row = gl.arange(0, 64, layout=SCALES)
    at = scale_ptr + block.to(gl.int64) * scale_block + _key_of(row)
    async_gather(scales, at, mask=is_there & (row >= 0))
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
    """The row of the program's piece, the piece's place in the row, and the most pages of a piece.

    A row is cut into the fewest pieces of so many pages, and there is a program for each piece:
    rounded up, all rows together have at most one piece each more than pages of them would fill.
    Programs without a piece get row ``rows`` or above.
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

    Results and arguments are those of
    :func:`attn.kernels.sparse.indexer.kernels.paged_logits_kernel`, but q and data, and their
    strides, are in words of four bytes. A page is read as a whole, also where a token's keys end
    inside. The grid does not depend on lengths, which a captured graph could not follow: each
    program finds its piece of a row from all tokens' lengths.
    """
    STAGES: gl.constexpr = _STAGES
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    WORDS: gl.constexpr = _words_layout(64)
    QUERY: gl.constexpr = _words_layout(HEADS)
    # Eight threads read halves of two rows at a time, which lie at different banks.
    STORED: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
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
        keys = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 32], STORED)
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT)
        for i in gl.static_range(STAGES - 1):
            block = gl.load(table + (low + i), mask=low + i < high, other=0)
            _copy_page(
                data_ptr, scale_ptr, block, low + i < high, data_block, scale_block,
                keys.index(i), scales.index(i),
            )  # fmt: skip
        ahead = low + STAGES - 1
        block = gl.load(table + ahead, mask=ahead < high, other=0)
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PRODUCT))
        weights = gl.load(
            weights_ptr + token * weights_token + head, mask=head < NUM_HEADS, other=0.0
        )
        mine = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY))
        word = gl.arange(0, 32, layout=gl.SliceLayout(0, QUERY))
        at = q_ptr + token * q_token + (mine * q_head)[:, None] + word[None, :]
        q = gl.load(at, mask=(mine < NUM_HEADS)[:, None] & (word >= 0)[None, :], other=0)
        q_tile = gl.allocate_shared_memory(
            gl.float16, [HEADS, 128], gl.NVMMASharedLayout(128, 16, 2)
        )
        q_tile.store(_as_operand(q, HEADS, False))
        fence_async_shared()
        thread_barrier()
        zero = gl.zeros([64, HEADS], gl.float32, PRODUCT)
        place = _key_of(gl.arange(0, 64, layout=ROW))
        out = logits_ptr + token * logits_row
        for page in range(low, high):
            turn = page - low
            async_copy.wait_group(STAGES - 2)
            # Now all threads' copies of this page are there, and all have read the page before.
            thread_barrier()
            words = keys.index(turn % STAGES).load(WORDS)
            scale = scales.index(turn % STAGES).load(ROW)
            ahead = page + STAGES - 1
            stage = (turn + STAGES - 1) % STAGES
            _copy_page(
                data_ptr, scale_ptr, block, ahead < high, data_block, scale_block,
                keys.index(stage), scales.index(stage),
            )  # fmt: skip
            # An entry of the table is loaded a page before it is used.
            block = gl.load(table + (ahead + 1), mask=ahead + 1 < high, other=0)
            operand = gl.convert_layout(_as_operand(words, 64, True), OPERAND)
            products = warpgroup_mma(
                operand, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True
            )
            products = warpgroup_mma_wait(0, deps=[products])
            logits = gl.sum(gl.maximum(products, 0.0) * weights[None, :], 1) * scale
            key = page * 64 + place
            gl.store(out + key, logits, mask=key < length)
        async_copy.wait_group(0)
