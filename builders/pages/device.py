"""Triton kernels that write tables and lists of pages.

The module is imported where a kernel is launched, so that builders need no Triton. Each kernel has
a twin in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_reqs", "table_width", "num_leading"])
def page_list_kernel(
    block_table_ptr,
    seq_lens_ptr,
    skipped_ptr,
    indices_ptr,
    query_start_ptr,
    places_ptr,
    num_reqs,
    table_width,
    num_leading,
    table_stride: tl.int64,
    PAGE_SIZE: tl.constexpr,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Kernel for :func:`builders.pages.lists.list_pages`; a program is a tile of a table row.

    ``places_ptr`` is None where only the list is wanted.
    """
    req = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, REQS)
    seq_lens = tl.load(seq_lens_ptr + i, mask=i < num_reqs, other=0)
    pages = tl.minimum(tl.cdiv(seq_lens, PAGE_SIZE), table_width)
    skipped = i * 0
    if skipped_ptr is not None:
        skipped = tl.load(skipped_ptr + i, mask=i < num_reqs, other=0).to(tl.int32)
    counts = pages - skipped
    before = tl.sum(tl.where(i < req, counts, 0), 0)
    first = tl.sum(tl.where(i == req, skipped, 0), 0)
    count = tl.sum(tl.where(i == req, counts, 0), 0)
    listed = (column >= first) & (column < first + count)
    block = tl.load(block_table_ptr + req * table_stride + column, mask=listed, other=0)
    # Each unlisted column of this row writes a zero behind the last page of the list, at a place
    # that no other column writes.
    behind = tl.sum(counts, 0) + req * table_width - before
    behind += tl.where(column < first, column, column - count)
    place = tl.where(listed, before + column - first, behind)
    tl.store(indices_ptr + place, block, mask=column < table_width)
    if places_ptr is not None:
        if tl.program_id(1) == 0:
            # Prefix sums of the requests behind the leading ones start again at 0. Their places are
            # shifted by one, because the leading sums have one entry more than requests.
            is_behind = req >= num_leading
            shift = is_behind.to(tl.int32)
            start_of_part = tl.where(is_behind, num_leading, 0)
            first_row = tl.load(query_start_ptr + start_of_part)
            first_page = tl.sum(tl.where((i < num_leading) & is_behind, counts, 0), 0)
            rows = places_ptr + req + shift
            pages_at = rows + num_reqs + 2
            tl.store(rows, tl.load(query_start_ptr + req) - first_row)
            tl.store(pages_at, before - first_page)
            if (req + 1 == num_leading) | (req + 1 == num_reqs):
                tl.store(rows + 1, tl.load(query_start_ptr + req + 1) - first_row)
                tl.store(pages_at + 1, before + count - first_page)
            last = tl.sum(tl.where(i == req, seq_lens - (pages - 1) * PAGE_SIZE, 0), 0)
            last = tl.where(count > 0, last, 0)
            tl.store(places_ptr + 2 * (num_reqs + 2) + req, last)


@triton.jit(
    do_not_specialize=[
        "num_reqs", "num_decodes", "least_len", "window", "table_width", "decode_width",
        "prefill_width",
    ],
    do_not_specialize_on_alignment=["block_table_ptr", "seq_lens_ptr", "query_start_ptr"],
)  # fmt: skip
def phase_tables_kernel(
    block_table_ptr,
    seq_lens_ptr,
    query_start_ptr,
    decode_pages_ptr,
    decode_lens_ptr,
    decode_starts_ptr,
    prefill_pages_ptr,
    prefill_lens_ptr,
    prefill_starts_ptr,
    prefill_kv_starts_ptr,
    num_reqs,
    num_decodes,
    least_len,
    window,
    table_width,
    decode_width,
    prefill_width,
    table_stride: tl.int64,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Kernel for :func:`builders.pages.phase_tables.fill_tables`; a program is a tile of a row."""
    req = tl.program_id(0)
    page = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, REQS)
    real, is_own = i < num_reqs, i == req
    begins = tl.load(query_start_ptr + i, mask=real, other=0)
    counts = tl.load(query_start_ptr + 1 + i, mask=real, other=0) - begins
    kv_lens = tl.load(seq_lens_ptr + i, mask=real, other=0)
    skipped = i * 0
    if WINDOW:
        skipped = tl.maximum(kv_lens - counts - (window - 1), 0) // PAGE_SIZE
        kv_lens -= skipped * PAGE_SIZE
    kv_len = tl.sum(tl.where(is_own, kv_lens, 0), 0)
    count = tl.sum(tl.where(is_own, counts, 0), 0)
    first_page = tl.sum(tl.where(is_own, skipped, 0), 0)
    # In the decode table, requests with tokens come before requests without.
    is_live = (i < num_decodes) & (counts > 0)
    before = tl.sum((is_live & (i < req)).to(tl.int32), 0)
    idle_place = tl.sum(is_live.to(tl.int32), 0) + req - before
    is_decode = req < num_decodes
    place = tl.where(is_decode, tl.where(count > 0, before, idle_place), req - num_decodes)

    used = tl.minimum(tl.cdiv(kv_len, PAGE_SIZE), table_width - first_page)
    row_ptr = block_table_ptr + req * table_stride + first_page
    entry = tl.load(row_ptr + page, mask=page < used, other=0)
    at = place.to(tl.int64)
    decode_row = decode_pages_ptr + at * decode_width
    tl.store(decode_row + page, entry, mask=(page < decode_width) & is_decode)
    prefill_row = prefill_pages_ptr + at * prefill_width
    tl.store(prefill_row + page, entry, mask=(page < prefill_width) & (is_decode == 0))

    is_first = tl.program_id(1) == 0
    decodes, prefills = is_first & is_decode, is_first & (is_decode == 0)
    first_token = tl.load(query_start_ptr + num_decodes)
    end = tl.load(query_start_ptr + 1 + req)
    tl.store(decode_lens_ptr + place, tl.maximum(tl.maximum(kv_len, least_len), count), decodes)
    tl.store(decode_starts_ptr + 1 + place, tl.where(count > 0, end, first_token), decodes)
    tl.store(decode_starts_ptr, 0, decodes & (place == 0))
    keys = tl.sum(tl.where((i >= num_decodes) & (i <= req), kv_lens, 0), 0)
    tl.store(prefill_lens_ptr + place, kv_len, prefills)
    tl.store(prefill_starts_ptr + 1 + place, end - first_token, prefills)
    tl.store(prefill_kv_starts_ptr + 1 + place, keys, prefills)
    tl.store(prefill_starts_ptr, 0, prefills & (place == 0))
    tl.store(prefill_kv_starts_ptr, 0, prefills & (place == 0))


@triton.jit(do_not_specialize=["table_width", "width", "fill"])
def latent_table_kernel(
    block_table_ptr,
    query_lens_ptr,
    seq_lens_ptr,
    pages_ptr,
    kv_lens_ptr,
    table_width,
    width,
    fill,
    table_stride: tl.int64,
    PAGE_SIZE: tl.constexpr,
    BURST: tl.constexpr,
):
    """Kernel for :func:`builders.latent.tables.write_latent_table`; a program is a row's burst."""
    req = tl.program_id(0).to(tl.int64)
    page = tl.program_id(1) * BURST + tl.arange(0, BURST)
    seq_len = tl.load(seq_lens_ptr + req)
    live = (tl.load(query_lens_ptr + req) > 0) & (seq_len > 0)
    kv_len = tl.where(live, seq_len, fill)
    used = tl.minimum(tl.cdiv(kv_len, PAGE_SIZE), table_width)
    listed = page < used
    block = tl.load(block_table_ptr + req * table_stride + page, mask=listed & live, other=0)
    tl.store(pages_ptr + req * width + page, tl.where(listed, block, -1))
    tl.store(kv_lens_ptr + req, kv_len, mask=tl.program_id(1) == 0)


@triton.jit(
    do_not_specialize=["num_reqs", "short_query", "window", "width", "capacity"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr"],
)
def dequantised_pages_kernel(
    query_start_ptr,
    seq_lens_ptr,
    table_ptr,
    sources_ptr,
    total_ptr,
    num_reqs,
    short_query,
    window,
    width,
    capacity,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Kernel for :func:`builders.dense.dequantised.write_dequantised_pages`; one tile a program."""
    req = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, REQS)
    real, is_own = i < num_reqs, i == req
    begins = tl.load(query_start_ptr + i, mask=real, other=0)
    counts = tl.load(query_start_ptr + 1 + i, mask=real, other=0) - begins
    kv_lens = tl.load(seq_lens_ptr + i, mask=real, other=0)
    seen = i * 0
    if WINDOW:
        seen = tl.maximum(kv_lens - counts - (window - 1), 0)
    first = seen // PAGE_SIZE
    stop = tl.minimum(tl.cdiv(kv_lens, PAGE_SIZE), width)
    pages = tl.where(counts > short_query, tl.maximum(stop - first, 0), 0)
    own_first = tl.sum(tl.where(is_own, first, 0), 0)
    own_pages = tl.sum(tl.where(is_own, pages, 0), 0)
    place = tl.sum(tl.where(i < req, pages, 0), 0) + column - own_first
    there = (column >= own_first) & (column < own_first + own_pages) & (place < capacity)
    tl.store(table_ptr + req.to(tl.int64) * width + column, place, mask=there)
    tl.store(sources_ptr + 3 * place, req, mask=there)
    tl.store(sources_ptr + 3 * place + 1, column, mask=there)
    tl.store(sources_ptr + 3 * place + 2, tl.sum(tl.where(is_own, seen, 0), 0), mask=there)
    is_first = (req == 0) & (tl.program_id(1) == 0)
    tl.store(total_ptr, tl.minimum(tl.sum(pages, 0), capacity), mask=is_first)


@triton.jit
def _request_of(ends_ptr, place, num_reqs, STEPS: tl.constexpr):
    """Index of the request that owns ``place``: the number of ascending ``ends`` not above it."""
    low = place * 0
    high = low + num_reqs
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(ends_ptr + middle, mask=is_open, other=0)
        above = is_open & (end <= place)
        high = tl.where(is_open & (end > place), middle, high)
        low = tl.where(above, middle + 1, low)
    return low


@triton.jit(
    do_not_specialize=["num_reqs", "first_token", "num_tokens", "topk"],
    do_not_specialize_on_alignment=[
        *("query_start_ptr", "seq_lens_ptr"),
        # These point to a phase's rows, which may begin at any row of a buffer.
        *("reqs_ptr", "visible_ptr", "topk_lens_ptr"),
    ],
)
def sparse_rows_kernel(
    query_start_ptr,
    seq_lens_ptr,
    reqs_ptr,
    visible_ptr,
    topk_lens_ptr,
    num_reqs,
    first_token,
    num_tokens,
    topk,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Kernel for :func:`builders.sparse.rows.expand_rows`; a program is a tile of the rows."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = first_token + row
    req = _request_of(query_start_ptr + 1, token, num_reqs, STEPS)
    owned = (row < num_tokens) & (req < num_reqs)
    end = tl.load(query_start_ptr + 1 + req, mask=owned, other=0)
    seq_len = tl.load(seq_lens_ptr + req, mask=owned, other=0)
    visible = tl.where(seq_len > 0, tl.maximum(seq_len - (end - 1 - token), 0), 0)
    inside = row < num_tokens
    tl.store(reqs_ptr + row, tl.minimum(req, num_reqs - 1), mask=inside)
    tl.store(visible_ptr + row, visible, mask=inside)
    tl.store(topk_lens_ptr + row, tl.minimum(visible, topk), mask=inside)


@triton.jit(
    do_not_specialize=["num_reqs", "num_rows", "table_width"],
    do_not_specialize_on_alignment=["block_table_ptr", "ends_ptr", "slots_ptr"],
)
def context_slots_kernel(
    block_table_ptr,
    ends_ptr,
    slots_ptr,
    num_reqs,
    num_rows,
    table_width,
    table_stride: tl.int64,
    PAGE_SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Kernel for :func:`builders.sparse.rows.list_context`; a program is a tile of the list."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    req = _request_of(ends_ptr, row, num_reqs, STEPS)
    start = tl.load(ends_ptr + req - 1, mask=(req > 0) & (req < num_reqs), other=0)
    position = row - start
    page = position // PAGE_SIZE
    owned = (row < num_rows) & (req < num_reqs) & (page < table_width)
    entry = block_table_ptr + req.to(tl.int64) * table_stride + page
    block = tl.load(entry, mask=owned, other=0)
    slot = tl.where(owned, block * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots_ptr + row, slot, mask=row < num_rows)


@triton.jit(
    do_not_specialize=[
        *("num_reqs", "query_len", "added", "longest", "width", "num_tokens"),
    ],
    do_not_specialize_on_alignment=["rows_ptr", "lens_ptr", "counts_ptr", "new_slots_ptr"],
)
def slot_tables_kernel(
    slots_ptr,
    rows_ptr,
    lens_ptr,
    counts_ptr,
    window_slots_ptr,
    new_slots_ptr,
    table_ptr,
    window_table_ptr,
    kv_lens_ptr,
    starts_ptr,
    window_new_ptr,
    num_reqs,
    query_len,
    added,
    longest,
    width,
    num_tokens,
    slots_stride: tl.int64,
    PAGE_SIZE: tl.constexpr,
    REQS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Kernel for :func:`builders.pages.slot_tables.write_tables`; a program is a tile of a row.

    ``counts_ptr`` is None where every request has ``query_len`` tokens, ``window_slots_ptr`` where
    there is no second pool.
    """
    req = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows_ptr + req).to(tl.int64)
    kv_len = tl.load(lens_ptr + req).to(tl.int32) + added
    kv_len = tl.minimum(kv_len, longest)
    column = part * TILE + tl.arange(0, TILE)
    used = (column < tl.cdiv(kv_len, PAGE_SIZE)) & (column < width)
    first = slots_ptr + row * slots_stride + column.to(tl.int64) * PAGE_SIZE
    slot = tl.load(first, mask=used, other=0)
    at = req.to(tl.int64) * width + column
    tl.store(table_ptr + at, slot // PAGE_SIZE, mask=used)
    if window_slots_ptr is not None:
        # Slots of pages behind the window are freed: their entries mean nothing, and are not read.
        own = tl.load(window_slots_ptr + slot, mask=used, other=0)
        page = (tl.maximum(own, 0) // PAGE_SIZE).to(tl.int32)
        tl.store(window_table_ptr + at, page, mask=used)
        programs = tl.num_programs(0) * tl.num_programs(1)
        program = req * tl.num_programs(1) + part
        share = tl.cdiv(tl.cdiv(num_tokens, programs), TILE) * TILE
        for start in range(program * share, tl.minimum((program + 1) * share, num_tokens), TILE):
            token = start + tl.arange(0, TILE)
            there = token < num_tokens
            new = tl.load(new_slots_ptr + token, mask=there, other=0)
            written = tl.load(window_slots_ptr + new, mask=there & (new >= 0), other=-1)
            tl.store(window_new_ptr + token, written.to(tl.int64), mask=there)
    if part == 0:
        tl.store(kv_lens_ptr + req, kv_len)
        if counts_ptr is None:
            tl.store(starts_ptr + req + 1, (req + 1) * query_len)
        else:
            i = tl.arange(0, REQS)
            counts = tl.load(counts_ptr + i, mask=i <= req, other=0).to(tl.int32)
            tl.store(starts_ptr + req + 1, tl.sum(counts, 0))
        tl.store(starts_ptr, 0, mask=req == 0)
