"""The producer of 8-bit caches: a warp group that makes operands of 16 bits of keys and values.

Bytes go from the cache to registers and from there, widened, to where products read them. By way of
shared memory, as TMA would bring them, they would cross it twice more: the products themselves need
most of what it can deliver.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.hopper.produce import load_queries, next_tile, say_the_end
from attn.kernels.hopper.tiles import tile_at, wide
from attn.kernels.stored import E4M3, E5M2

_E4M3, _E5M2 = gl.constexpr(E4M3), gl.constexpr(E5M2)


def _ptx(pair: str, shift: int, power: int) -> gl.constexpr:
    """PTX over four bytes in ``$2``, to pairs in ``$0`` and ``$1``.

    A byte goes to the top of a half word, its exponent and mantissa down to where the wider type
    has them; ``power``, a power of two of that type, makes up for the bias of its exponents. All of
    it is exact, subnormals too. What is no number in 8 bits becomes a finite one: slots that
    nothing was written to may hold any byte, and weight 0 has to be enough to leave them out.
    """
    moves = (("0x5040", "$0"), ("0x7060", "$1"))
    steps = [
        f"prmt.b32 a, $2, 0, {_swapped(selector)}; and.b32 b, a, 0x7F007F00; shr.u32 b, b, {shift};"
        f" and.b32 a, a, 0x80008000; or.b32 a, a, b; mul.rn.{pair} {to}, a, c;"
        for selector, to in moves
    ]
    factor = hex(power << 16 | power)
    return gl.constexpr("{ .reg .b32 a, b, c; mov.b32 c, " + factor + "; " + " ".join(steps) + " }")


def _swapped(selector: str) -> str:
    """The selector for ``prmt`` with its two operands exchanged."""
    return "0x" + "".join(str(int(digit) ^ 4) for digit in selector[2:])


# Biases: 7 of e4m3, 15 of e5m2 and fp16, 127 of bf16. 2^120, 2^112 in bf16; 2^8 in fp16.
_E4M3_BF16 = _ptx("bf16x2", 4, 0x7B80)
_E5M2_BF16 = _ptx("bf16x2", 3, 0x7780)
_E4M3_FP16 = _ptx("f16x2", 1, 0x5C00)


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
            _E4M3_FP16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    return gl.reshape(gl.join(low, high), [words.shape[0], words.shape[1] * 2])


@gluon.constexpr_function
def _layout(rows: int, width: int) -> gl.DistributedLinearLayout:
    """How ``[rows, width]`` bytes, in words of four, lie in a warp group: 16 bytes side by side.

    Eight neighbouring threads have the same columns of eight rows, which stores of operands,
    swizzled by row, want; four such groups read two sectors of a row.
    """
    columns = [[0, 4 << k] for k in range((width // 16).bit_length() - 1)]
    beyond = [[8 << k, 0] for k in range(rows.bit_length() - 4)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *columns[2:], *beyond[2:]],
        lane_bases=[[1, 0], [2, 0], [4, 0], *columns[:2]],
        warp_bases=beyond[:2],
        block_bases=[],
        shape=[rows, width // 4],
    )


@gluon.jit
def _pages(
    table_ptr, table, tile, start, kv_len, KV_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """The page of each key of a tile; -1 where no row of the query sees it."""
    key = tile * KV_TILE + gl.arange(0, KV_TILE, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(
        table_ptr + table + key // BLOCK_SIZE, mask=(key < kv_len) & (key >= start), other=-1
    )


@gluon.jit
def _words(
    rows_ptr, pages, tile, per_block, per_token, KV_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WIDTH: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A tile of keys or values of one head, as words; zeros where there is no page."""
    key = tile * KV_TILE + gl.arange(0, KV_TILE, layout=gl.SliceLayout(1, LAYOUT))
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
def convert(
    q_desc, key_ptr, value_ptr, q_boxes, k_words, v_words, records, q_full, q_empty, k_full,
    k_empty, v_full, v_empty, table_ptr, tile_starts_ptr, num_tiles_ptr, counter_ptr,
    query_start_ptr, seq_lens_ptr, causal_ptr, ranges_ptr, num_reqs, programs, num_ranges,
    table_row, window, chunk, lookback, k_block, k_token, k_head, v_block, v_token, v_head,
    HEADS: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, WARP_GROUPS: gl.constexpr,
    KIND: gl.constexpr, DTYPE: gl.constexpr, KV_TILE: gl.constexpr, HALVES: gl.constexpr,
    WIDTH: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CHUNK: gl.constexpr,
    RANGES: gl.constexpr, CLAMP: gl.constexpr,
):  # fmt: skip
    """A warp group: what :func:`produce` does, for keys and values of 8 bits.

    A tile is loaded while the one before it is widened.
    """
    TOKENS: gl.constexpr = WARP_GROUPS * 64 // PACKED
    LAYOUT: gl.constexpr = _layout(KV_TILE, WIDTH)
    key_words = key_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    value_words = value_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    num_tiles = gl.load(num_tiles_ptr)
    total = num_tiles * HEADS
    work = gl.program_id(0)
    turn = 0
    done = 0
    while work < total:
        head, req, row, left, position, kv_len, causal, start, low, high = tile_at(
            work, num_tiles, programs, tile_starts_ptr, query_start_ptr, seq_lens_ptr, causal_ptr,
            ranges_ptr, num_reqs, num_ranges, window, chunk, lookback, HEADS, GROUP // PACKED,
            TOKENS, KV_TILE, CAUSAL, WINDOW, CHUNK, RANGES, CLAMP,
        )  # fmt: skip
        # A table has fewer than 2^31 entries.
        table = req * table_row
        kv_head = head * PACKED // GROUP
        keys = key_words + kv_head * wide(k_head)
        values = value_words + kv_head * wide(v_head)
        pages = _pages(table_ptr, table, high - 1, start, kv_len, KV_TILE, BLOCK_SIZE, LAYOUT)
        key = _words(
            keys, pages, high - 1, k_block, k_token, KV_TILE, BLOCK_SIZE, WIDTH, SIZE, LAYOUT
        )
        load_queries(
            turn, q_desc, q_boxes, q_boxes, records, q_full, q_empty, head, req, row, left,
            position, kv_len, causal, low, high, PACKED, WARP_GROUPS, HALVES, 0, Q_STAGES, 4,
        )  # fmt: skip
        work = next_tile(counter_ptr, total, programs)
        for i in range(high - 1, low, -1):
            # Those of the tile that is loaded after the next.
            pages_below = _pages(
                table_ptr, table, i - 1, start, kv_len, KV_TILE, BLOCK_SIZE, LAYOUT
            )
            value = _words(
                values, pages, i, v_block, v_token, KV_TILE, BLOCK_SIZE, WIDTH, SIZE, LAYOUT
            )
            _put(key, done, k_words, k_full, k_empty, KIND, DTYPE, STAGES)
            key = _words(
                keys, pages_below, i - 1, k_block, k_token, KV_TILE, BLOCK_SIZE, WIDTH, SIZE, LAYOUT
            )
            _put(value, done, v_words, v_full, v_empty, KIND, DTYPE, STAGES)
            pages = pages_below
            done += 1
        value = _words(
            values, pages, low, v_block, v_token, KV_TILE, BLOCK_SIZE, WIDTH, SIZE, LAYOUT
        )
        _put(key, done, k_words, k_full, k_empty, KIND, DTYPE, STAGES)
        _put(value, done, v_words, v_full, v_empty, KIND, DTYPE, STAGES)
        done += 1
        turn += 1
    say_the_end(turn, records, q_full, q_empty, Q_STAGES, 4)
