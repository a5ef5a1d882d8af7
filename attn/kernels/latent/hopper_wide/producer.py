"""The producer of the wide Hopper latent kernel: a warp that loads each latent row once, by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn.kernels.dense.hopper_decode.parts import FIELDS
from attn.kernels.dense.hopper_decode.producer import pages_of
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import async_load
from attn.kernels.lang.opaque import opaque_zero
from attn.kernels.latent.hopper_wide.parts import BLOCK, cut_at, share_with_item_at
from attn.kernels.latent.structures import clear_padding


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
    pages, key_tile, turn, boxes, desc, cache, ring, COLUMN: gl.constexpr, PARTS: gl.constexpr,
    PLACE: gl.constexpr, STAGES: gl.constexpr, BLOCK_OF: gl.constexpr,
):  # fmt: skip
    """Load some columns of one of a tile's two blocks into one of STAGES stages.

    These are PARTS boxes of 64 elements of ``desc`` from COLUMN on, of block BLOCK_OF. ``pages``
    ``[2 * RUNS]`` int32 are the pages of the tile's runs. PLACE is the number of the first stage's
    barrier.
    """
    RUNS: gl.constexpr = BLOCK // ring.RUN
    BOX_BYTES: gl.constexpr = BLOCK * boxes.shape[3] * 2
    run = gl.arange(0, 2 * RUNS, layout=gl.BlockedLayout([2 * RUNS], [32], [1], [0]))
    number = 2 * turn + BLOCK_OF
    stage = number % STAGES
    # A fresh barrier lets parity 1 pass at once.
    mbarrier.wait(ring.empty.index(PLACE + stage), ((number // STAGES) & 1) ^ 1)
    mbarrier.expect(ring.full.index(PLACE + stage), PARTS * BOX_BYTES)
    for i in range(RUNS):
        # Page -1 is outside the cache, where TMA fills a box with zeros.
        page = gl.max(gl.where(run == BLOCK_OF * RUNS + i, pages, -1), 0)
        within = (key_tile * (2 * BLOCK) + (BLOCK_OF * RUNS + i) * ring.RUN) % cache.BLOCK_SIZE
        for part in gl.static_range(PARTS):
            async_load(
                desc,
                [page, within, COLUMN + part * 64],
                ring.full.index(PLACE + stage),
                boxes.index((stage * PARTS + part) * RUNS + i),
            )


@gluon.jit
def _prefetch(
    pages, key_tile, lane, cache, HEADS: gl.constexpr, BLOCK_OF: gl.constexpr, RUN: gl.constexpr
):
    """Prefetch a block of the next tile into L2; the program of each head tile asks for a share.

    ``pages`` ``[2 * RUNS]`` int32 are the pages of that tile's runs.
    """
    RUNS: gl.constexpr = BLOCK // RUN
    ROW: gl.constexpr = 288 if cache.E4M3 else 576
    SHARE: gl.constexpr = RUN * ROW // HEADS
    run = gl.arange(0, 2 * RUNS, layout=gl.BlockedLayout([2 * RUNS], [32], [1], [0]))
    for i in range(RUNS):
        page = gl.max(gl.where(run == BLOCK_OF * RUNS + i, pages, -1), 0)
        within = (key_tile * (2 * BLOCK) + (BLOCK_OF * RUNS + i) * RUN) % cache.BLOCK_SIZE
        if page >= 0:
            prefetch_l2(
                cache.cache_ptr
                + wide(page) * wide(cache.cache_block)
                + (within * ROW + lane * SHARE),
                2 * SHARE,
            )


@gluon.jit
def produce_latents(num_rows, cache, ring, room, plan, out, HEADS: gl.constexpr):
    """Load the latent rows of the program's share, tile after tile; then clear padding.

    The producer is done before the consumers are, so that padding costs no time.

    Each of a tile's two blocks comes in the order in which consumers need it: rope, left half,
    right half.
    """
    TILE: gl.constexpr = 2 * BLOCK
    # Half of a row has as many boxes of 64 elements, where two e4m3 are one element.
    SIDE: gl.constexpr = 2 if cache.E4M3 else 4
    first_row, begin, past_row, mine, fields = share_with_item_at(plan.shares_ptr, plan.HEADS)
    turn = 0
    for r in range(first_row, past_row):
        cut = cut_at(r, mine, fields, begin)
        # A block table has fewer than 2^31 entries, so that 32 bits hold the offset.
        table = cache.table_ptr + cut.req * cache.table_row
        pages = pages_of(table, begin, 0, cut.kv_len, TILE, ring.RUN, cache.BLOCK_SIZE)
        for key_tile in range(begin, cut.high):
            # Page ids are loaded one tile ahead; those past the part's last tile are not used.
            after = gl.minimum(key_tile + 1, cut.high - 1)
            ahead = pages_of(table, after, 0, cut.kv_len, TILE, ring.RUN, cache.BLOCK_SIZE)
            for block in gl.static_range(2):
                _load_block(
                    pages, key_tile, turn, ring.rope_boxes, cache.rope_desc, cache, ring,
                    2 * SIDE * 64, 1, 0, 2, block,
                )  # fmt: skip
                _load_block(
                    pages, key_tile, turn, ring.left_boxes, cache.k_desc, cache, ring, 0, SIDE, 2,
                    ring.LEFT, block,
                )  # fmt: skip
                if block == 0 and not cache.E4M3:
                    if turn == 0:
                        # At the start all programs load at once. If all of the ring were asked for
                        # first, queries would arrive last, and no product can begin without them.
                        mbarrier.wait(room.loaded.index(0), 0)
                _load_block(
                    pages, key_tile, turn, ring.right_boxes, cache.k_desc, cache, ring, SIDE * 64,
                    SIDE, 2 + ring.LEFT, ring.RIGHT, block,
                )  # fmt: skip
                if block == 0 and cache.E4M3:
                    if turn == 0:
                        # A block of e4m3 has as many bytes as half a block of 16 bits. The queries
                        # have arrived when groups have loaded them, before they store them.
                        mbarrier.wait(room.loaded.index(1), 0)
                if cache.PREFETCH:
                    if key_tile + 1 < cut.high:
                        lane = gl.program_id(0) % plan.HEADS
                        _prefetch(ahead, after, lane, cache, plan.HEADS, block, ring.RUN)
            pages = ahead
            turn += 1
        begin = 0
        fields = plan.rows_ptr + ((r + 1) // plan.HEAD_LOOPS) * FIELDS
    # With few registers an address for each column would be spilled. Over 16 bits Triton 3.9 spills
    # if stores are wide.
    zero = 8 * opaque_zero() if cache.E4M3 else opaque_zero()
    clear_padding(num_rows, plan, out, zero, HEADS)
