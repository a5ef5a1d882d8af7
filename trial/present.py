"""The Hopper kernel of the indexer's logits: it multiplies e4m3 keys and queries as fp16.

Keys go from the cache straight to the registers from which products read them, 16 bytes at a time,
without passing shared memory. A product sums over all columns, so columns may come in any order
that keys and queries share; a thread uses the columns that it has loaded. A page is 64 keys of 128
bytes, and its keys are the rows of a product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.lang.compat import thread_barrier
from attn.kernels.lang.packed import SPLIT_E4M3


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
def _page_words(data_ptr, block, data_block, count, LAYOUT: gl.constexpr):
    """The keys of a page as words; zeros from key ``count`` on."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT))
    at = data_ptr + block.to(gl.int64) * data_block
    at = at + (row * 32)[:, None] + word[None, :]
    return gl.load(at, mask=(row < count)[:, None] & (word >= 0)[None, :], other=0)


@gluon.jit(
    do_not_specialize=["table_row", "logits_row", "most"],
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
    NUM_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    PAGES: gl.constexpr,
):
    """Logits of e4m3 query tokens over their requests' pages; grid ``(cdiv(most, 64 * PAGES), T)``.

    Results and arguments are those of
    :func:`attn.kernels.sparse.indexer.kernels.paged_logits_kernel`, but q and data, and their
    strides, are in words of four bytes.
    """
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    WORDS: gl.constexpr = _words_layout(64)
    QUERY: gl.constexpr = _words_layout(HEADS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    token = gl.program_id(1).to(gl.int64)
    length = gl.minimum(gl.load(lens_ptr + token), most)
    low = gl.program_id(0) * PAGES
    high = gl.minimum(low + PAGES, (length + 63) // 64)
    if low < high:
        request = token
        if requests_ptr is not None:
            request = gl.load(requests_ptr + token).to(gl.int64)
        table = table_ptr + request * table_row
        block = gl.load(table + low)
        after = gl.load(table + low + 1, mask=low + 1 < high, other=0)
        words = _page_words(data_ptr, block, data_block, length - low * 64, WORDS)
        # The key that each row of the product stands for.
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
        place = (row // 8) % 2 * 32 + row // 16 * 8 + row % 8
        scales = scale_ptr + block.to(gl.int64) * scale_block + place
        scale = gl.load(scales, mask=low * 64 + place < length, other=0.0)
        head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PRODUCT))
        weights = gl.load(
            weights_ptr + token * weights_token + head, mask=head < NUM_HEADS, other=0.0
        )
        mine = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY))
        word = gl.arange(0, 32, layout=gl.SliceLayout(0, QUERY))
        at = q_ptr + token * q_token + (mine * q_head)[:, None] + word[None, :]
        q = gl.load(at, mask=(mine < NUM_HEADS)[:, None] & (word >= 0)[None, :], other=0)
        q_tile = gl.allocate_shared_memory(gl.float16, [HEADS, 128], SHARED)
        q_tile.store(_as_operand(q, HEADS, False))
        fence_async_shared()
        thread_barrier()
        zero = gl.zeros([64, HEADS], gl.float32, PRODUCT)
        out = logits_ptr + token * logits_row
        for page in range(low, high):
            keys = gl.convert_layout(_as_operand(words, 64, True), OPERAND)
            products = warpgroup_mma(
                keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True
            )
            # The next page is loaded while the products run; its table entry was loaded a page ago.
            block, following = after, page + 1
            after = gl.load(table + page + 2, mask=page + 2 < high, other=0)
            count = gl.where(following < high, length - following * 64, 0)
            words = _page_words(data_ptr, block, data_block, count, WORDS)
            by = scale
            scales = scale_ptr + block.to(gl.int64) * scale_block + place
            scale = gl.load(scales, mask=place < count, other=0.0)
            products = warpgroup_mma_wait(0, deps=[products])
            logits = gl.sum(gl.maximum(products, 0.0) * weights[None, :], 1) * by
            key = page * 64 + place
            gl.store(out + key, logits, mask=key < length)
