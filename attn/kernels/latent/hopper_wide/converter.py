"""The producer of the wide Hopper latent kernel over e4m3: four warps that convert rows to fp16.

Bytes go from the cache to registers and from there, as fp16, into the ring that the products read.
Shared memory has no room for bytes that wait to be converted: queries, one tile of converted keys
and weights take 231,400 bytes of it. Registers hold half of a block's bytes, too few to hide the
latency of memory, so the next tile is prefetched into L2.

Conversion is exact: fp16 has every number of e4m3. It is one instruction for two numbers where
bf16 takes four. The cache's scale is a factor of the scores and of the output. What limits the
kernel are the stores to shared memory: products read so much of it that little is left for them
(``docs/notebook/latent.md``).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attn.kernels.dense.hopper_decode.parts import FIELDS, share_at
from attn.kernels.dense.hopper_prefill.converter import dequantised
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import reinterpret
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.lang.stored import E4M3
from attn.kernels.latent.hopper_wide.parts import BLOCK, HALF, cut_at
from attn.kernels.latent.structures import clear_padding

_KIND = gl.constexpr(E4M3)
_TILE = gl.constexpr(2 * BLOCK.value)
_ROPE = gl.constexpr(64)
_ROW = gl.constexpr(2 * HALF.value + _ROPE.value)
"""Bytes of a row of the cache."""


def _words_layout(width: int) -> gl.DistributedLinearLayout:
    """How a block's words ``[BLOCK, width]`` lie in a warp group: a thread has 16 bytes of a row.

    Four threads read 64 bytes side by side, in one request to L2. Eight neighbouring threads have
    the same columns of eight rows, whose places in the swizzled ring are in different banks.
    """
    beyond = [[0, 16 << k] for k in range((width // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *beyond, [32, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [0, 4], [0, 8]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[BLOCK.value, width],
    )


_PIECE = gl.constexpr(128)
"""Latent columns that are loaded at a time, a quarter of a row; the ring's parts are halves."""
_PIECE_WORDS = gl.constexpr(_words_layout(_PIECE.value // 4))
"""The layout of a piece of a block's latents."""
_ROPE_WORDS = gl.constexpr(_words_layout(_ROPE.value // 4))
"""The layout of a block's rotary part."""
_ROWS = gl.constexpr(gl.SliceLayout(1, _PIECE_WORDS.value))


@gluon.jit
def prefetch_runs(ptrs, nbytes, wanted):
    """Prefetch ``nbytes`` from each of ``ptrs`` on into the L2 cache where ``wanted`` is not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r", [ptrs.to(gl.int64, bitcast=True), gl.to_tensor(nbytes), wanted],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _prefetch_tile(table, key_tile, end, cache, RUN: gl.constexpr, HEADS: gl.constexpr):
    """Prefetch the rows of a tile; the program of each head tile asks for some of the runs.

    A run is RUN keys of one page. ``end`` is the key after the last that is wanted.
    """
    KEYS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # Each thread has a key; that of a run's first key asks for the run.
    key = key_tile * _TILE + gl.arange(0, _TILE, layout=KEYS) + opaque_zero()
    lane = gl.program_id(0) % HEADS
    mine = (key % RUN == 0) & (key // RUN % HEADS == lane) & (key < end)
    page = gl.load(table + key // cache.BLOCK_SIZE, mask=mine, other=0)
    row = page.to(gl.int64) * wide(cache.cache_block) + key % cache.BLOCK_SIZE * cache.ROW_UNITS
    prefetch_runs(cache.cache_ptr + row * 16, RUN * _ROW, mine.to(gl.int32))


@gluon.jit
def _pages(table, first, end, cache):
    """The pages of the block of keys from ``first`` on, ``[BLOCK]`` int32; -1 from ``end`` on."""
    key = first + gl.arange(0, BLOCK, layout=_ROWS) + opaque_zero()
    return gl.load(table + key // cache.BLOCK_SIZE, mask=key < end, other=-1)


@gluon.jit
def _starts(pages, first, cache):
    """Pointers to the rows of the block of keys from ``first`` on, as int32 words, ``[BLOCK]``."""
    key = first + gl.arange(0, BLOCK, layout=_ROWS) + opaque_zero()
    row = pages.to(gl.int64) * wide(cache.cache_block) + key % cache.BLOCK_SIZE * cache.ROW_UNITS
    return cache.cache_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + row * 4


@gluon.jit
def _load(starts, pages, AT: gl.constexpr, BYTES: gl.constexpr, LAYOUT: gl.constexpr):
    """BYTES bytes of a block's rows from byte AT on, as int32 words ``[BLOCK, BYTES // 4]``.

    Where there is no page, they are zeros: such slots may hold anything, and as values they are
    multiplied with weights of zero.
    """
    starts = gl.convert_layout(starts, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    live = gl.convert_layout(pages >= 0, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    column = gl.arange(0, BYTES // 4, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(starts[:, None] + (column + AT // 4)[None, :], mask=live[:, None], other=0)


@gluon.jit
def _piece(starts, pages, NUMBER: gl.constexpr):
    """One of the four pieces of a block's latents, ``[BLOCK, 32]`` int32."""
    return _load(starts, pages, NUMBER * _PIECE, _PIECE, _PIECE_WORDS)


@gluon.jit
def _await(turn, ring, PART: gl.constexpr):
    """Wait until a part's place in the ring is free."""
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(ring.empty.index(PART), (turn & 1) ^ 1)


@gluon.jit
def _put(words, place, COLUMN: gl.constexpr):
    """Convert words of four e4m3 into the columns of ``place`` from pair COLUMN on.

    ``place`` ``[BLOCK, width]`` int32 is a part of a block in the ring, in pairs of fp16.
    """
    pairs = dequantised(words, _KIND, gl.float16)
    place.slice(COLUMN, pairs.shape[1], dim=1).store(pairs)


@gluon.jit
def _hand_over(ring, PART: gl.constexpr):
    """Say that a part has arrived."""
    # Make the stores visible to the products, which read through another proxy.
    fence_async_shared()
    mbarrier.arrive(ring.full.index(PART), count=1)


@gluon.jit
def _convert_half(
    even, odd, place, turn, starts, pages, ring, PART: gl.constexpr, NEXT: gl.constexpr
):
    """Convert two pieces into ``place``, half of a block's latents, and hand it over.

    Each piece's registers are filled again when it has been converted: with the pieces NEXT and
    ``NEXT + 1`` of the rows at ``starts``, which are returned.
    """
    _await(turn, ring, PART)
    _put(even, place, 0)
    even = _piece(starts, pages, NEXT)
    _put(odd, place, _PIECE // 2)
    _hand_over(ring, PART)
    return even, _piece(starts, pages, NEXT + 1)


@gluon.jit
def convert_latents(num_rows, cache, ring, plan, out, HEADS: gl.constexpr):
    """Convert the latent rows of the program's share, tile after tile; then clear padding.

    The parts of a tile come in the order of
    :func:`attn.kernels.latent.hopper_wide.producer.produce_latents`. Two pieces are under way: when
    one has been converted, the piece behind the other is loaded into its registers.
    """
    SHAPE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    left = reinterpret(ring.left_boxes, gl.int32, [2, BLOCK, HALF // 2], SHAPE)
    right = reinterpret(ring.right_boxes, gl.int32, [2, BLOCK, HALF // 2], SHAPE)
    rope = reinterpret(ring.rope_boxes, gl.int32, [2, BLOCK, _ROPE // 2], SHAPE)
    first_row, begin, past_row, mine, fields = share_at(plan.shares_ptr, plan.HEADS)
    turn = 0
    for r in range(first_row, past_row):
        cut = cut_at(r, mine, fields, begin)
        # A block table has fewer than 2^31 entries, so that 32 bits hold the offset.
        table = cache.table_ptr + cut.req * cache.table_row
        # Keys past the part's last tile are not loaded.
        end = gl.minimum(cut.kv_len, cut.high * _TILE)
        if cache.PREFETCH:
            _prefetch_tile(table, begin, end, cache, ring.RUN, plan.HEADS)
        pages = _pages(table, begin * _TILE, end, cache)
        starts = _starts(pages, begin * _TILE, cache)
        rotary = _load(starts, pages, 2 * HALF, _ROPE, _ROPE_WORDS)
        even = _piece(starts, pages, 0)
        odd = _piece(starts, pages, 1)
        for key_tile in range(begin, cut.high):
            for block in gl.static_range(2):
                after = key_tile * _TILE + (block + 1) * BLOCK
                next_pages = _pages(table, after, end, cache)
                if cache.PREFETCH and block == 0:
                    _prefetch_tile(table, key_tile + 1, end, cache, ring.RUN, plan.HEADS)
                _await(turn, ring, block)
                _put(rotary, rope.index(block), 0)
                _hand_over(ring, block)
                even, odd = _convert_half(
                    even, odd, left.index(block), turn, starts, pages, ring, 2 + block, 2
                )
                pages = next_pages
                starts = _starts(pages, after, cache)
                rotary = _load(starts, pages, 2 * HALF, _ROPE, _ROPE_WORDS)
                even, odd = _convert_half(
                    even, odd, right.index(block), turn, starts, pages, ring, 4 + block, 0
                )
            turn += 1
        begin = 0
        fields = plan.rows_ptr + ((r + 1) // plan.HEAD_LOOPS) * FIELDS
    clear_padding(num_rows, plan, out, opaque_zero(), HEADS, 4)
