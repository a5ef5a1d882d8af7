"""Triton kernels that write tables and lists of pages. Imported lazily; twins in torch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_reqs", "added", "table_width", "width"])
def page_table_kernel(
    block_table_ptr,
    seq_lens_ptr,
    page_table_ptr,
    kv_lens_ptr,
    kv_starts_ptr,
    num_reqs,
    added,
    table_width,
    width,
    table_stride: tl.int64,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
):
    """See :func:`builders.page_tables.write_page_table`; a program is a tile of one row."""
    req = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, REQS)
    seq_lens = tl.load(seq_lens_ptr + i, mask=i < num_reqs, other=0)
    kv_lens = tl.where(seq_lens > 0, seq_lens + added, 0)
    kv_len = tl.sum(tl.where(i == req, kv_lens, 0), 0)
    used = tl.minimum(tl.cdiv(kv_len, PAGE_SIZE), table_width * PAGES_PER_BLOCK)
    row_ptr = block_table_ptr + req * table_stride
    block = tl.load(row_ptr + page // PAGES_PER_BLOCK, mask=page < used, other=0)
    entry = tl.where(page < used, block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK, 0)
    tl.store(page_table_ptr + req * width + page, entry, mask=page < width)
    is_first = tl.program_id(1) == 0
    tl.store(kv_lens_ptr + req, kv_len, mask=is_first)
    tl.store(kv_starts_ptr + req + 1, tl.sum(tl.where(i <= req, kv_lens, 0), 0), mask=is_first)
    tl.store(kv_starts_ptr, 0, mask=is_first & (req == 0))


@triton.jit(do_not_specialize=["num_reqs", "table_width"])
def page_list_kernel(
    block_table_ptr,
    seq_lens_ptr,
    skipped_ptr,
    indices_ptr,
    num_reqs,
    table_width,
    table_stride: tl.int64,
    PAGE_SIZE: tl.constexpr,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
):
    """See :func:`builders.page_tables.list_pages`; a program is a tile of one row of the table."""
    req = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, REQS)
    seq_lens = tl.load(seq_lens_ptr + i, mask=i < num_reqs, other=0)
    pages = tl.minimum(tl.cdiv(seq_lens, PAGE_SIZE), table_width)
    skipped = i * 0
    if skipped_ptr is not None:
        skipped = tl.load(skipped_ptr + i, mask=i < num_reqs, other=0).to(tl.int32)
    before = tl.sum(tl.where(i < req, pages - skipped, 0), 0)
    first = tl.sum(tl.where(i == req, skipped, 0), 0)
    listed = (column >= first) & (column < tl.sum(tl.where(i == req, pages, 0), 0))
    block = tl.load(block_table_ptr + req * table_stride + column, mask=listed)
    tl.store(indices_ptr + before + column - first, block, mask=listed)
