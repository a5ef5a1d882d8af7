"""Producers of 8-bit caches: warp groups that make operands of 16 bits of keys and values.

Bytes go from the cache to registers and from there, widened, to where products read them. By way of
shared memory, as TMA would bring them, they would cross it twice more: the products themselves need
most of what it can deliver.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_prefill.producer import load_queries, next_tile, say_the_end
from attn.kernels.dense.hopper_prefill.scheduler import tile_at, told_of_keys, wide
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.stored import E4M3, E5M2

_E4M3, _E5M2 = gl.constexpr(E4M3), gl.constexpr(E5M2)


_FP16 = gl.constexpr(
    "{ .reg .b16 x, y; mov.b32 {x, y}, $2; cvt.rn.f16x2.e4m3x2 $0, x; cvt.rn.f16x2.e4m3x2 $1, y; }"
)
"""PTX: four bytes of e4m3 in ``$2`` to pairs of fp16 in ``$0`` and ``$1``."""


def _ptx(steps: str) -> gl.constexpr:
    """PTX of the same to pairs of bf16: ``steps`` for each of the pairs."""
    pairs = (("$0", "x", "0x1404"), ("$1", "y", "0x3424"))
    both = " ".join(steps.format(to=to, half=half, place=place) for to, half, place in pairs)
    return gl.constexpr(
        "{ .reg .b16 x, y, p, q; .reg .b32 a, b; .reg .f32 low, high; mov.b32 {x, y}, $2; "
        + both
        + " }"
    )


# By way of fp16 and fp32: four instructions for two numbers. To move the bits and to multiply by
# 2^120, for the other bias, takes five, four of them of the pipe that compares and packs, too.
_E4M3_BF16 = _ptx(
    "cvt.rn.f16x2.e4m3x2 a, {half}; mov.b32 {{p, q}}, a; cvt.f32.f16 low, p; cvt.f32.f16 high, q;"
    " cvt.rn.bf16x2.f32 {to}, high, low;"
)
# A byte goes to the top of a half word, its exponent and mantissa down to where bf16 has them, and
# 2^112 makes up for the bias. What is no number becomes a finite one.
_E5M2_BF16 = _ptx(
    "prmt.b32 a, $2, 0, {place}; and.b32 b, a, 0x7F007F00; shr.u32 b, b, 3;"
    " and.b32 a, a, 0x80008000; or.b32 a, a, b; mov.b32 b, 0x77807780; mul.rn.bf16x2 {to}, a, b;"
)


@gluon.jit
def _widened(words, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Words of four bytes as twice as many of two numbers of 16 bits."""
    if KIND == _E5M2:
        gl.static_assert(DTYPE.is_bf16(), "fp16 has e5m2's infinities")
        low, high = gl.inline_asm_elementwise(
            _E5M2_BF16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    elif DTYPE.is_bf16():
        low, high = gl.inline_asm_elementwise(
            _E4M3_BF16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            _FP16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    return gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1] * 2])


@gluon.constexpr_function
def _layout(rows: int, width: int) -> gl.DistributedLinearLayout:
    """How ``[rows, width]`` bytes, in words of four, lie in a warp group: 16 bytes side by side.

    Eight neighbouring threads have the same columns of eight rows, which stores of operands,
    swizzled by row, want; two such groups read a sector of each. The fewer rows a thread has, the
    fewer registers their addresses take.
    """
    columns = [[0, 4 << k] for k in range((width // 16).bit_length() - 1)]
    beyond = [[8 << k, 0] for k in range(rows.bit_length() - 4)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *columns[1:], *beyond[3:]],
        lane_bases=[[1, 0], [2, 0], [4, 0], columns[0], beyond[0]],
        warp_bases=beyond[1:3],
        block_bases=[],
        shape=[rows, width // 4],
    )


@gluon.jit
def _keys(tile, KV_TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Keys of a tile, by row of :func:`_layout`, whose threads have the lower six bits."""
    row = gl.arange(0, KV_TILE, layout=gl.SliceLayout(1, LAYOUT))
    own, rest = (row & 63) + opaque_zero(), row & ~63
    # Without a sign, pages and places in them are a shift and a mask.
    return (tile * KV_TILE + own + rest).to(gl.uint32)


@gluon.jit
def _pages(
    table_ptr, table, tile, start, kv_len, KV_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The page of each key of a tile; -1 where no row of the query sees it."""
    key = _keys(tile, KV_TILE, LAYOUT)
    return gl.load(
        table_ptr + table + key // BLOCK_SIZE, mask=(key < kv_len) & (key >= start), other=-1
    )


@gluon.jit
def _words(
    rows_ptr, pages, tile, per_block, per_token, KV_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WIDTH: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A tile of keys or values of one head, as words; zeros where there is no page."""
    key = _keys(tile, KV_TILE, LAYOUT)
    column = gl.arange(0, WIDTH // 4, layout=gl.SliceLayout(0, LAYOUT))
    row = pages.to(gl.int64) * wide(per_block) + (key % BLOCK_SIZE) * wide(per_token)
    mask = (pages >= 0)[:, None]
    if SIZE < WIDTH:
        mask = mask & (column < SIZE // 4)[None, :]
    return gl.load(rows_ptr + row[:, None] + column[None, :], mask=mask, other=0)


@gluon.jit
def _put(
    words, turn, tiles, full, empty, KIND: gl.constexpr, DTYPE: gl.constexpr, STAGES: gl.constexpr
):
    """Widen a tile into stage ``turn % STAGES``."""
    stage = turn % STAGES
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
    tiles.index(stage).store(_widened(words, KIND, DTYPE))
    # Generic stores before wgmma reads them.
    fence_async_shared()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def _convert_tiles(
    done, rows_ptr, more_ptr, tiles, more, full, empty, more_full, more_empty, table_ptr, table,
    start, kv_len, low, high, per_block, per_token, more_block, more_token, BOTH: gl.constexpr,
    KIND: gl.constexpr, DTYPE: gl.constexpr, VALUE: gl.constexpr, KV_TILE: gl.constexpr,
    WIDTH: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """All keys or all values of a tile of queries, from the last down, or BOTH; the turn after."""
    LAYOUT: gl.constexpr = _layout(KV_TILE, WIDTH)
    # Pages are looked up a tile ahead.
    pages = _pages(table_ptr, table, high - 1, start, kv_len, KV_TILE, BLOCK_SIZE, LAYOUT)
    for i in range(high - 1, low - 1, -1):
        words = _words(
            rows_ptr, pages, i, per_block, per_token, KV_TILE, BLOCK_SIZE, WIDTH, SIZE, LAYOUT
        )
        if BOTH:
            others = _words(
                more_ptr, pages, i, more_block, more_token, KV_TILE, BLOCK_SIZE, WIDTH, SIZE, LAYOUT
            )
        pages = _pages(
            table_ptr, table, gl.maximum(i - 1, 0), start, kv_len, KV_TILE, BLOCK_SIZE, LAYOUT
        )
        _put(words, done, tiles, full, empty, KIND, DTYPE, STAGES)
        if BOTH:
            _put(others, done, more, more_full, more_empty, KIND, VALUE, STAGES)
        done += 1
    return done


@gluon.jit
def convert(
    BOTH: gl.constexpr, q_desc, rows_ptr, more_ptr, q_boxes, tiles, more, records, q_full, q_empty,
    full, empty, more_full, more_empty, table_ptr, tile_starts_ptr, num_tiles_ptr, counter_ptr,
    query_start_ptr, seq_lens_ptr, causal_ptr, ranges_ptr, num_reqs, programs, num_ranges,
    table_row, window, chunk, lookback, per_block, per_token, per_head, more_block, more_token,
    more_head, HEADS: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr,
    WARP_GROUPS: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, VALUE: gl.constexpr,
    KV_TILE: gl.constexpr, HALVES: gl.constexpr, WIDTH: gl.constexpr, SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CHUNK: gl.constexpr, RANGES: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """A warp group: what :func:`produce` does, for 8 bits; of keys, or BOTH of keys and values."""
    TOKENS: gl.constexpr = WARP_GROUPS * 64 // PACKED
    words_ptr = rows_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    others_ptr = more_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    num_tiles = gl.load(num_tiles_ptr)
    total = num_tiles * HEADS
    work = gl.program_id(0)
    turn = 0
    done = 0
    # The end within the loop: behind it, ptxas 12.8 spills what thread it is.
    goes_on = 1
    while goes_on == 1:
        if work < total:
            head, req, row, left, position, kv_len, causal, start, low, high = tile_at(
                work, num_tiles, programs, tile_starts_ptr, query_start_ptr, seq_lens_ptr,
                causal_ptr, ranges_ptr, num_reqs, num_ranges, window, chunk, lookback, HEADS,
                GROUP // PACKED, TOKENS, KV_TILE, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
            )  # fmt: skip
            load_queries(
                turn, q_desc, q_boxes, q_boxes, records, q_full, q_empty, head, req, row, left,
                position, kv_len, causal, start, low, high, PACKED, WARP_GROUPS, HALVES, 0,
                Q_STAGES, 4,
            )  # fmt: skip
            work = next_tile(counter_ptr, total, programs)
            kv_head = head * PACKED // GROUP
            # A table has fewer than 2^31 entries.
            done = _convert_tiles(
                done, words_ptr + kv_head * wide(per_head), others_ptr + kv_head * wide(more_head),
                tiles, more, full, empty, more_full, more_empty, table_ptr, req * table_row, start,
                kv_len, low, high, per_block, per_token, more_block, more_token, BOTH, KIND, DTYPE,
                VALUE, KV_TILE, WIDTH, SIZE, BLOCK_SIZE, STAGES,
            )  # fmt: skip
            turn += 1
        else:
            say_the_end(turn, records, q_full, q_empty, Q_STAGES, 4)
            goes_on = 0


@gluon.jit
def convert_values(
    rows_ptr, tiles, records, q_full, q_empty, full, empty, table_ptr, table_row, per_block,
    per_token, per_head, GROUP: gl.constexpr, PACKED: gl.constexpr, KIND: gl.constexpr,
    VALUE: gl.constexpr, KV_TILE: gl.constexpr, WIDTH: gl.constexpr, SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group beside :func:`convert`, for values, which is told as the consumers are.

    Each waits for its loads in the other's time. One warp group for both had no loads under way
    while it widened: ptxas counts all loads of a loop on one scoreboard, and waits for all of them.
    """
    words_ptr = rows_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    turn = 0
    done = 0
    mbarrier.wait(q_full.index(0), 0)
    head, req, start, kv_len, low, high = told_of_keys(records, 0)
    while high > 0:
        mbarrier.arrive(q_empty.index(turn % Q_STAGES), count=1)
        values = words_ptr + head * PACKED // GROUP * wide(per_head)
        done = _convert_tiles(
            done, values, values, tiles, tiles, full, empty, full, empty, table_ptr,
            req * table_row, start, kv_len, low, high, per_block, per_token, per_block, per_token,
            False, KIND, VALUE, VALUE, KV_TILE, WIDTH, SIZE, BLOCK_SIZE, STAGES,
        )  # fmt: skip
        turn += 1
        stage = turn % Q_STAGES
        mbarrier.wait(q_full.index(stage), (turn // Q_STAGES) & 1)
        head, req, start, kv_len, low, high = told_of_keys(records, stage)
