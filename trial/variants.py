"""Variants of the Hopper kernel of the indexer's paged logits, to be measured."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.lang.compat import (
    async_gather,
    let_kernels_behind_start,
    thread_barrier,
    wait_for_kernels_before,
)
from present import _as_operand, _page_words, _words_layout

_BULK = gl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; "
    "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)


@gluon.jit
def _ask_l2(ptr, nbytes, is_mine):
    gl.inline_asm_elementwise(
        _BULK, "=r,l,r,r", [ptr, nbytes, is_mine.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit(
    do_not_specialize=["table_row", "logits_row", "most"],
    do_not_specialize_on_alignment=["lens_ptr", "requests_ptr", "table_ptr", "logits_ptr"],
)
def l2_kernel(
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
    AHEAD: gl.constexpr,
):
    """Today's kernel, and pages are asked into L2 AHEAD pages before they are loaded."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    WORDS: gl.constexpr = _words_layout(64)
    QUERY: gl.constexpr = _words_layout(HEADS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
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
        lane = gl.arange(0, 128, layout=LANES)
        # Page low + 1 + i for thread i.
        mine = gl.load(table + low + 1 + lane, mask=(lane < AHEAD) & (low + 1 + lane < high), other=0)
        _ask_l2(data_ptr + mine.to(gl.int64) * data_block, 8448, (lane < AHEAD) & (low + 1 + lane < high))
        after = gl.load(table + low + 1, mask=low + 1 < high, other=0)
        far = gl.load(table + low + 1 + AHEAD, mask=low + 1 + AHEAD < high, other=0)
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
            _ask_l2(
                data_ptr + (gl.zeros([128], gl.int64, LANES) + far.to(gl.int64) * data_block), 8448,
                (lane == 0) & (page + 1 + AHEAD < high),
            )
            keys = gl.convert_layout(_as_operand(words, 64, True), OPERAND)
            products = warpgroup_mma(
                keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True
            )
            # The next page is loaded while the products run; its table entry was loaded a page ago.
            block, following = after, page + 1
            after = gl.load(table + page + 2, mask=page + 2 < high, other=0)
            far = gl.load(table + page + 2 + AHEAD, mask=page + 2 + AHEAD < high, other=0)
            count = gl.where(following < high, length - following * 64, 0)
            words = _page_words(data_ptr, block, data_block, count, WORDS)
            by = scale
            scales = scale_ptr + block.to(gl.int64) * scale_block + place
            scale = gl.load(scales, mask=place < count, other=0.0)
            products = warpgroup_mma_wait(0, deps=[products])
            logits = gl.sum(gl.maximum(products, 0.0) * weights[None, :], 1) * by
            key = page * 64 + place
            gl.store(out + key, logits, mask=key < length)


@gluon.jit
def _copy_page(data_ptr, scale_ptr, block, is_there, data_block, scale_block, pages, scales, stage):
    """Ask for a page's keys and scales; asks for nothing unless ``is_there``."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, COPY))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, COPY))
    at = data_ptr + block.to(gl.int64) * data_block
    at = at + (row * 32)[:, None] + word[None, :]
    there = is_there & (row >= 0)[:, None] & (word >= 0)[None, :]
    async_gather(pages.index(stage), at, mask=there)
    # Scales lie in the order of the product's rows.
    line = gl.arange(0, 64, layout=SCALES)
    place = line // 8 % 2 * 32 + line // 16 * 8 + line % 8
    at = scale_ptr + block.to(gl.int64) * scale_block + place
    async_gather(scales.index(stage), at, mask=is_there & (line >= 0))
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["table_row", "logits_row", "most", "count"],
    do_not_specialize_on_alignment=["lens_ptr", "requests_ptr", "table_ptr", "logits_ptr"],
)
def ring_kernel(
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
    count,
    NUM_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    MODE: gl.constexpr,
    WAITS: gl.constexpr,
):
    """Pages come through STAGES stages of shared memory."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    WORDS: gl.constexpr = _words_layout(64)
    QUERY: gl.constexpr = _words_layout(HEADS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    # Two rows of 64 bytes each are at different banks.
    STORED: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if WAITS:
        wait_for_kernels_before()
        let_kernels_behind_start()
    token = gl.program_id(1).to(gl.int64)
    length = gl.minimum(gl.load(lens_ptr + token), most)
    request = token
    if requests_ptr is not None:
        request = gl.load(requests_ptr + token).to(gl.int64)
    low = gl.program_id(0) * count
    # The first entries of the table are loaded ahead of the length's arrival.
    table = table_ptr + request * table_row
    limit = (most + 63) // 64
    first = gl.load(table + low, volatile=EARLY)
    second = gl.load(table + low + 1, mask=low + 1 < limit, other=0, volatile=EARLY)
    third = gl.load(table + low + 2, mask=low + 2 < limit, other=0, volatile=EARLY)
    after = gl.load(
        table + (low + STAGES - 1), mask=low + STAGES - 1 < limit, other=0, volatile=EARLY
    )
    high = gl.minimum(low + count, (length + 63) // 64)
    if low < high:
        pages = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 32], STORED)
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT)
        for i in gl.static_range(STAGES - 1):
            block = first if i == 0 else second if i == 1 else third
            _copy_page(
                data_ptr, scale_ptr, block, low + i < high, data_block, scale_block, pages, scales, i
            )
        # The key that each row of the product stands for.
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
        place = (row // 8) % 2 * 32 + row // 16 * 8 + row % 8
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
            turn = page - low
            async_copy.wait_group(STAGES - 2)
            thread_barrier()
            stage = turn % STAGES
            words = pages.index(stage).load(WORDS)
            by = gl.convert_layout(scales.index(stage).load(gl.SliceLayout(1, PRODUCT)), place.type.layout)
            coming = page + STAGES - 1
            _copy_page(
                data_ptr, scale_ptr, after, coming < high, data_block, scale_block, pages, scales,
                (turn + STAGES - 1) % STAGES,
            )
            after = gl.load(table + coming + 1, mask=coming + 1 < high, other=0)
            if MODE == 0:
                keys = gl.convert_layout(_as_operand(words, 64, True), OPERAND)
                products = warpgroup_mma(
                    keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True
                )
                products = warpgroup_mma_wait(0, deps=[products])
                logits = gl.sum(gl.maximum(products, 0.0) * weights[None, :], 1)
            else:
                some = gl.sum(words, 1).to(gl.float32)
                logits = gl.convert_layout(some, place.type.layout)
            key = page * 64 + place
            gl.store(out + key, logits * by, mask=key < length)
        async_copy.wait_group(0)


_ROWS = gl.constexpr(512)


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _pages_of(lens_ptr, first, rows, most):
    # Every warp has all rows: reductions stay inside a warp.
    LAYOUT: gl.constexpr = gl.BlockedLayout([_ROWS // 32], [32], [4], [0])
    row = first + gl.arange(0, _ROWS, layout=LAYOUT)
    lens = gl.load(lens_ptr + row, mask=row < rows, other=0)
    return (gl.minimum(lens, most) + 63) // 64


@gluon.jit
def _share_of(lens_ptr, rows, most, slots):
    """The program's pages ``[begin, end)`` of all rows' pages, the row of the first, and the pages before that row."""
    total = 0
    for first in range(0, rows, _ROWS):
        total += gl.sum(_pages_of(lens_ptr, first, rows, most), 0)
    programs = gl.num_programs(0)
    share = gl.maximum((total + programs - 1) // programs, gl.minimum((total + slots - 1) // slots, 8))
    begin = gl.program_id(0) * share
    row = 0
    start = 0
    before = 0
    for first in range(0, rows, _ROWS):
        pages = _pages_of(lens_ptr, first, rows, most)
        ends = before + gl.associative_scan(pages, 0, _add)
        row += gl.sum((ends <= begin).to(gl.int32), 0)
        start = gl.maximum(start, gl.max(gl.where(ends <= begin, ends, 0), 0))
        before += gl.sum(pages, 0)
    return begin, gl.minimum(begin + share, total), row, start


@gluon.jit(
    do_not_specialize=["table_row", "logits_row", "most", "rows", "slots"],
    do_not_specialize_on_alignment=["lens_ptr", "requests_ptr", "table_ptr", "logits_ptr"],
)
def even_kernel(
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
    slots,
    NUM_HEADS: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Every program has as many pages as any other, of one row or of several."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    WORDS: gl.constexpr = _words_layout(64)
    QUERY: gl.constexpr = _words_layout(HEADS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    STORED: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    begin, end, own, start = _share_of(lens_ptr, rows, most, slots)
    pages = gl.allocate_shared_memory(gl.int32, [STAGES, 64, 32], STORED)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT)
    q_tile = gl.allocate_shared_memory(gl.float16, [HEADS, 128], SHARED)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, PRODUCT))
    place = (row // 8) % 2 * 32 + row // 16 * 8 + row % 8
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, PRODUCT))
    mine = gl.arange(0, HEADS, layout=gl.SliceLayout(1, QUERY))
    word = gl.arange(0, 32, layout=gl.SliceLayout(0, QUERY))
    zero = gl.zeros([64, HEADS], gl.float32, PRODUCT)
    while begin < end:
        token = own.to(gl.int64)
        length = gl.minimum(gl.load(lens_ptr + token), most)
        low = begin - start
        high = gl.minimum((length + 63) // 64, low + end - begin)
        if low < high:
            request = token
            if requests_ptr is not None:
                request = gl.load(requests_ptr + token).to(gl.int64)
            table = table_ptr + request * table_row
            for i in gl.static_range(STAGES - 1):
                block = gl.load(table + (low + i), mask=low + i < high, other=0)
                _copy_page(
                    data_ptr, scale_ptr, block, low + i < high, data_block, scale_block, pages, scales, i
                )
            after = gl.load(table + (low + STAGES - 1), mask=low + STAGES - 1 < high, other=0)
            weights = gl.load(
                weights_ptr + token * weights_token + head, mask=head < NUM_HEADS, other=0.0
            )
            at = q_ptr + token * q_token + (mine * q_head)[:, None] + word[None, :]
            q = gl.load(at, mask=(mine < NUM_HEADS)[:, None] & (word >= 0)[None, :], other=0)
            thread_barrier()
            q_tile.store(_as_operand(q, HEADS, False))
            fence_async_shared()
            thread_barrier()
            out = logits_ptr + token * logits_row
            for page in range(low, high):
                turn = page - low
                async_copy.wait_group(STAGES - 2)
                thread_barrier()
                stage = turn % STAGES
                words = pages.index(stage).load(WORDS)
                by = scales.index(stage).load(gl.SliceLayout(1, PRODUCT))
                coming = page + STAGES - 1
                _copy_page(
                    data_ptr, scale_ptr, after, coming < high, data_block, scale_block, pages, scales,
                    (turn + STAGES - 1) % STAGES,
                )
                after = gl.load(table + (coming + 1), mask=coming + 1 < high, other=0)
                keys = gl.convert_layout(_as_operand(words, 64, True), OPERAND)
                products = warpgroup_mma(
                    keys, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True
                )
                products = warpgroup_mma_wait(0, deps=[products])
                logits = gl.sum(gl.maximum(products, 0.0) * weights[None, :], 1)
                key = page * 64 + place
                gl.store(out + key, logits * by, mask=key < length)
            async_copy.wait_group(0)
        begin += gl.maximum(high - low, 0)
        start += (length + 63) // 64
        own += 1
