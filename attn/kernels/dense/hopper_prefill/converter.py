"""Producers of 8-bit caches: warp groups that make operands of 16 bits of keys and values.

Bytes go from the cache to registers and from there, dequantised, to where products read them. By
way of shared memory, as TMA would bring them, they would cross it twice more: the products
themselves need most of what it can deliver.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_prefill.producer import load_queries, next_tile, say_the_end
from attn.kernels.dense.hopper_prefill.scheduler import tile_at, told_of_keys, wide
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.packed import E4M3_PAIRS
from attn.kernels.lang.stored import E4M3, E5M2
from attn.kernels.lang.structures import QueryTile, StoredRows

_E4M3, _E5M2 = gl.constexpr(E4M3), gl.constexpr(E5M2)


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
def dequantised(words, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Words of four bytes as twice as many words of two numbers of 16 bits, of type DTYPE."""
    if KIND == _E5M2:
        gl.static_assert(DTYPE.is_bf16(), "fp16 has e5m2's infinities")
        low, high = gl.inline_asm_elementwise(
            _E5M2_BF16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    elif gl.bfloat16 == DTYPE:
        low, high = gl.inline_asm_elementwise(
            _E4M3_BF16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            E4M3_PAIRS, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    return gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1] * 2])


@gluon.constexpr_function
def words_layout(rows: int, width: int) -> gl.DistributedLinearLayout:
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
    """Keys of a tile, by row of :func:`words_layout`, whose threads have the lower six bits."""
    row = gl.arange(0, KV_TILE, layout=gl.SliceLayout(1, LAYOUT))
    own, rest = (row & 63) + opaque_zero(), row & ~63
    # Without a sign, pages and places in them are a shift and a mask.
    return (tile * KV_TILE + own + rest).to(gl.uint32)


@gluon.jit
def _pages(table, key_tile, start, kv_len, cache, shape, LAYOUT: gl.constexpr):
    """The page of each key of a tile; -1 where no row of the query sees it."""
    key = _keys(key_tile, shape.KV_TILE, LAYOUT)
    return gl.load(
        cache.table_ptr + table + key // cache.BLOCK_SIZE,
        mask=(key < kv_len) & (key >= start),
        other=-1,
    )


@gluon.jit
def _words(rows, pages, key_tile, cache, shape, LAYOUT: gl.constexpr):
    """A tile of one head's rows, as words; zeros where there is no page."""
    key = _keys(key_tile, shape.KV_TILE, LAYOUT)
    column = gl.arange(0, shape.WIDTH // 4, layout=gl.SliceLayout(0, LAYOUT))
    row = pages.to(gl.int64) * wide(rows.per_block)
    row += (key % cache.BLOCK_SIZE) * wide(rows.per_token)
    mask = (pages >= 0)[:, None]
    if shape.SIZE < shape.WIDTH:
        mask = mask & (column < shape.SIZE // 4)[None, :]
    return gl.load(rows.rows_ptr + row[:, None] + column[None, :], mask=mask, other=0)


@gluon.jit
def _put(words, turn, ring, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Dequantise a tile into the ring's stage of ``turn``."""
    stage = turn % ring.STAGES
    ring.wait_empty(turn)
    ring.words.index(stage).store(dequantised(words, KIND, DTYPE))
    # Generic stores before wgmma reads them.
    fence_async_shared()
    mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _of_head(rows, kv_head):
    """Rows of one KV head, as words of four bytes."""
    words_ptr = rows.rows_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    return StoredRows(
        rows_ptr=words_ptr + kv_head * wide(rows.per_head), per_block=rows.per_block,
        per_token=rows.per_token, per_head=rows.per_head,
    )  # fmt: skip


@gluon.jit
def _convert_tiles(
    done, tile, table, rows, ring, DTYPE: gl.constexpr, others, other_ring, BOTH: gl.constexpr,
    cache, shape,
):  # fmt: skip
    """Convert all keys or all values that a tile of queries sees, from the last down.

    ``rows`` are those of the tile's KV head; they go through ``ring`` as DTYPE. With BOTH they are
    keys, and ``others`` are the values, which go through ``other_ring``. Returns the turn after.
    """
    LAYOUT: gl.constexpr = words_layout(shape.KV_TILE, shape.WIDTH)
    # Pages are looked up a tile ahead.
    pages = _pages(table, tile.high - 1, tile.start, tile.kv_len, cache, shape, LAYOUT)
    for i in range(tile.high - 1, tile.low - 1, -1):
        words = _words(rows, pages, i, cache, shape, LAYOUT)
        if BOTH:
            other_words = _words(others, pages, i, cache, shape, LAYOUT)
        pages = _pages(table, gl.maximum(i - 1, 0), tile.start, tile.kv_len, cache, shape, LAYOUT)
        _put(words, done, ring, shape.KIND, DTYPE)
        if BOTH:
            _put(other_words, done, other_ring, shape.KIND, shape.VALUE)
        done += 1
    return done


@gluon.jit
def convert(
    BOTH: gl.constexpr, queries, rings, stored_keys, stored_values, cache, schedule, mask, shape
):
    """A warp group: what :func:`produce` does, for 8 bits; of keys, or BOTH of keys and values."""
    num_tiles = gl.load(schedule.num_tiles_ptr)
    total = num_tiles * schedule.HEADS
    work = gl.program_id(0)
    turn = 0
    done = 0
    # The end within the loop: behind it, ptxas 12.8 spills what thread it is.
    goes_on = 1
    while goes_on == 1:
        if work < total:
            tile = tile_at(work, num_tiles, schedule, mask, shape)
            load_queries(turn, tile, queries, shape, 4)
            work = next_tile(total, schedule)
            kv_head = tile.head * shape.PACKED // shape.GROUP
            keys, values = _of_head(stored_keys, kv_head), _of_head(stored_values, kv_head)
            # A table has fewer than 2^31 entries.
            table = tile.req * cache.table_row
            done = _convert_tiles(
                done, tile, table, keys, rings.keys, shape.DTYPE, values, rings.values, BOTH, cache,
                shape,
            )  # fmt: skip
            turn += 1
        else:
            say_the_end(turn, queries, 4)
            goes_on = 0


@gluon.jit
def convert_values(queries, ring, stored_values, cache, shape):
    """A warp group beside :func:`convert`, for values, which is told as the consumers are.

    Each waits for its loads in the other's time. One warp group for both had no loads under way
    while it dequantised: ptxas counts all loads of a loop on one scoreboard, and waits for all of
    them.
    """
    turn = 0
    done = 0
    mbarrier.wait(queries.full.index(0), 0)
    # No structure, which would change the order in which the loop carries these, and PTX with it.
    head, req, start, kv_len, low, high = told_of_keys(queries.records, 0)
    while high > 0:
        mbarrier.arrive(queries.empty.index(turn % queries.STAGES), count=1)
        values = _of_head(stored_values, head * shape.PACKED // shape.GROUP)
        tile = QueryTile(
            head=head, req=req, row=None, left=None, position=None, kv_len=kv_len, causal=None,
            start=start, low=low, high=high,
        )  # fmt: skip
        done = _convert_tiles(
            done, tile, req * cache.table_row, values, ring, shape.VALUE, values, ring, False,
            cache, shape,
        )  # fmt: skip
        turn += 1
        queries.wait_full(turn)
        stage = turn % queries.STAGES
        head, req, start, kv_len, low, high = told_of_keys(queries.records, stage)
