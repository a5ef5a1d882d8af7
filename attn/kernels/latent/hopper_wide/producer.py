"""The producer of the wide Hopper latent kernel: a warp that loads each latent row once, by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_decode.parts import FIELDS, share_at
from attn.kernels.dense.hopper_decode.producer import pages_of
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import async_load
from attn.kernels.latent.hopper_wide.parts import BLOCK, cut_at


@gluon.jit
def prefetch_l2(ptr, nbytes):
    """Prefetch ``nbytes`` from ``ptr`` on into the L2 cache; one lane of the warp asks."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.s32 p, l, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [ptr.to(gl.int64, bitcast=True), gl.to_tensor(nbytes)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_block(
    desc, pages, tile, turn, full, empty, boxes, COLUMN: gl.constexpr, PARTS: gl.constexpr,
    PLACE: gl.constexpr, BLOCK_OF: gl.constexpr, RUN: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Load some columns of one of a tile's two blocks; each block has a buffer of its own."""
    RUNS: gl.constexpr = BLOCK // RUN
    run = gl.arange(0, 2 * RUNS, layout=gl.BlockedLayout([2 * RUNS], [32], [1], [0]))
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(empty.index(PLACE + BLOCK_OF), (turn & 1) ^ 1)
    mbarrier.expect(full.index(PLACE + BLOCK_OF), PARTS * BLOCK * 128)
    for i in range(RUNS):
        # Page -1 is outside the cache, where TMA fills a box with zeros.
        page = gl.max(gl.where(run == BLOCK_OF * RUNS + i, pages, -1), 0)
        within = (tile * (2 * BLOCK) + (BLOCK_OF * RUNS + i) * RUN) % BLOCK_SIZE
        for part in gl.static_range(PARTS):
            async_load(
                desc,
                [page, within, COLUMN + part * 64],
                full.index(PLACE + BLOCK_OF),
                boxes.index((BLOCK_OF * PARTS + part) * RUNS + i),
            )


@gluon.jit
def _prefetch(
    cache_ptr, pages, tile, lane, cache_block, HEADS: gl.constexpr, BLOCK_OF: gl.constexpr,
    RUN: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Prefetch a block of the next tile into L2; the program of each head tile asks for a share."""
    RUNS: gl.constexpr = BLOCK // RUN
    SHARE: gl.constexpr = RUN * 576 // HEADS
    run = gl.arange(0, 2 * RUNS, layout=gl.BlockedLayout([2 * RUNS], [32], [1], [0]))
    for i in range(RUNS):
        page = gl.max(gl.where(run == BLOCK_OF * RUNS + i, pages, -1), 0)
        within = (tile * (2 * BLOCK) + (BLOCK_OF * RUNS + i) * RUN) % BLOCK_SIZE
        if page >= 0:
            prefetch_l2(
                cache_ptr + wide(page) * wide(cache_block) + (within * 576 + lane * SHARE),
                2 * SHARE,
            )


@gluon.jit
def produce_latents(
    k_desc, cache_ptr, rope_boxes, left_boxes, right_boxes, full, empty, table_ptr, rows_ptr,
    shares_ptr, table_row, cache_block, HEADS: gl.constexpr, HEAD_LOOPS: gl.constexpr,
    RUN: gl.constexpr, BLOCK_SIZE: gl.constexpr, PREFETCH: gl.constexpr,
):  # fmt: skip
    """Load the latent rows of the program's share, tile after tile.

    Each of a tile's two blocks comes in the order in which consumers need it: rope, left half,
    right half.
    """
    TILE: gl.constexpr = 2 * BLOCK
    first_row, begin, past_row, mine, fields = share_at(shares_ptr, HEADS)
    turn = 0
    for r in range(first_row, past_row):
        _, req, kv_len, _, high = cut_at(r, mine, fields, begin)
        # A block table has fewer than 2^31 entries, so that 32 bits hold the offset.
        table = table_ptr + req * table_row
        pages = pages_of(table, begin, 0, kv_len, TILE, RUN, BLOCK_SIZE)
        for tile in range(begin, high):
            # Page ids are loaded one tile ahead; those past the part's last tile are not used.
            after = gl.minimum(tile + 1, high - 1)
            ahead = pages_of(table, after, 0, kv_len, TILE, RUN, BLOCK_SIZE)
            for block in gl.static_range(2):
                _load_block(
                    k_desc, pages, tile, turn, full, empty, rope_boxes, 512, 1, 0, block, RUN,
                    BLOCK_SIZE,
                )  # fmt: skip
                _load_block(
                    k_desc, pages, tile, turn, full, empty, left_boxes, 0, 4, 2, block, RUN,
                    BLOCK_SIZE,
                )  # fmt: skip
                _load_block(
                    k_desc, pages, tile, turn, full, empty, right_boxes, 256, 4, 4, block, RUN,
                    BLOCK_SIZE,
                )  # fmt: skip
                if PREFETCH:
                    if tile + 1 < high:
                        lane = gl.program_id(0) % HEADS
                        _prefetch(
                            cache_ptr, ahead, after, lane, cache_block, HEADS, block, RUN,
                            BLOCK_SIZE,
                        )  # fmt: skip
            pages = ahead
            turn += 1
        begin = 0
        fields = rows_ptr + ((r + 1) // HEAD_LOOPS) * FIELDS
