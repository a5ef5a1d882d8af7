"""The Hopper kernel of the indexer's logits over gathered keys: e4m3 products by warp group.

A program scores a block of query tokens over tiles of keys. Each of two warp groups of consumers
keeps 128 keys of a tile in registers, as the rows of two products; the columns of a product are the
heads of one token. So a logit is a sum over columns, most of which a thread adds up by itself. One
warp is the producer: it asks TMA for the keys, and then for queries and weights, token by token.
While a warp group adds up one product, its other product is under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attn.kernels.lang.compat import async_load, reinterpret
from attn.kernels.sparse.indexer.structures import (
    KeyRows,
    KeyTile,
    LogitRows,
    QueryRing,
    TokenBlock,
)
from builders.sparse.hopper_tiles import INDEX_KEYS, MOST_INDEX_TOKENS

_ROWS = gl.constexpr(64)
"""Rows of a product, and keys of a box."""
_WIDTH = gl.constexpr(128)
"""Columns of keys and queries."""
_TILE = gl.constexpr(INDEX_KEYS)
_REGISTERS = gl.constexpr(216)
"""Registers of a consumer's thread."""
_MOST_TOKENS = gl.constexpr(MOST_INDEX_TOKENS)
EXCHANGE = gl.constexpr(
    "{ .reg .pred p; .reg .b32 a; .reg .f32 s, t; and.b32 a, $3, $4; setp.ne.b32 p, a, 0;"
    " selp.f32 s, $1, $2, p; selp.f32 t, $2, $1, p; shfl.sync.bfly.b32 s, s, $4, 31, -1;"
    " add.f32 $0, s, t; }"
)
"""Add two values over two threads whose numbers differ in a bit: the first of the threads gets the
sum of the first value, the other of the second."""


@gluon.jit
def _spans(block, LAYOUT: gl.constexpr):
    """Keys ``[start, end)`` that each token of the block sees, and the token's place in the block.

    A token without keys, or past the last, has an end of 0.
    """
    place = gl.arange(0, block.MOST, layout=LAYOUT)
    token = block.first + place
    real = (place < block.count) & (token < block.num_rows)
    starts = gl.load(block.starts_ptr + token, mask=real, other=0)
    ends = gl.load(block.ends_ptr + token, mask=real, other=0)
    ends = gl.minimum(ends, block.num_keys)
    return place, starts, gl.where(ends > starts, ends, 0)


@gluon.jit
def _bounds(spans):
    """The keys ``[low, high)`` that tokens of the block see."""
    _, starts, ends = spans
    low = gl.min(gl.where(ends > 0, starts, 2147483647), 0)
    return low, gl.max(ends, 0)


@gluon.jit
def _tokens_that_see(spans, key, COUNT: gl.constexpr):
    """Tokens ``[first, stop)`` of the block, outside which no token sees a key of
    ``[key, key + COUNT)``.
    """
    place, starts, ends = spans
    sees = (starts < key + COUNT) & (ends > key)
    first = gl.min(gl.where(sees, place, 2147483647), 0)
    stop = gl.max(gl.where(sees, place + 1, 0), 0)
    return gl.minimum(first, stop), stop


@gluon.jit
def _produce(q_desc, weights_desc, data_desc, block, keys, queries):
    """One warp: the keys of each tile, then queries and weights of the tokens that see them."""
    TILE: gl.constexpr = keys.TILE
    HEADS: gl.constexpr = queries.HEADS
    LAYOUT: gl.constexpr = gl.BlockedLayout([block.MOST // 32], [32], [1], [0])
    spans = _spans(block, LAYOUT)
    low, high = _bounds(spans)
    turn = 0
    tiles = 0
    for key in range(low + gl.program_id(0) * TILE, high, gl.num_programs(0) * TILE):
        first, stop = _tokens_that_see(spans, key, TILE)
        if first < stop:
            mbarrier.wait(keys.empty, (tiles & 1) ^ 1)
            mbarrier.expect(keys.full, TILE * _WIDTH)
            for part in gl.static_range(TILE // _ROWS):
                async_load(data_desc, [key + part * _ROWS, 0], keys.full, keys.boxes.index(part))
            for at in range(first, stop):
                queries.wait_empty(turn)
                stage = queries.stage_of(turn)
                full = queries.full.index(stage)
                mbarrier.expect(full, HEADS * (_WIDTH + 4))
                token = block.first + at
                async_load(q_desc, [token, 0, 0], full, queries.boxes.index(stage))
                async_load(weights_desc, [token, 0], full, queries.weight_boxes.index(stage))
                turn += 1
            tiles += 1


@gluon.jit
def _product(keys, turn, queries, PRODUCT: gl.constexpr):
    """Products of 64 keys with the heads of the token of that turn, under way."""
    heads = queries.tiles.index(queries.stage_of(turn)).permute((1, 0))
    zero = gl.zeros([_ROWS, queries.HEADS], gl.float32, PRODUCT)
    return warpgroup_mma(keys, heads, zero, use_acc=False, is_async=True)


@gluon.jit
def _exchanged(x, y, lanes, BIT: gl.constexpr):
    """Sums over two threads whose numbers differ in BIT: of ``x`` in the first, of ``y`` in the
    other.

    It keeps its place among the products: ptxas would add up a product where its sum is used, and
    there its registers belong to the next product already.
    """
    return gl.inline_asm_elementwise(
        EXCHANGE, "=f,f,f,r,r", [x, y, lanes, BIT], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _sums(products, weights, lanes):
    """Weighted sums over the columns that two of the four threads of a row have, ``[4, 8, 4]``.

    Dimensions are warps, rows r of a warp and the four threads that share rows r and r + 8; threads
    with an even number have the sum of the first row.
    """
    HEADS: gl.constexpr = products.shape[1]
    parts = gl.maximum(products, 0.0) * weights[None, :]
    parts = gl.permute(gl.reshape(parts, [_ROWS, HEADS // 8, 4, 2]), (0, 2, 1, 3))
    # One sum, not two of a dimension each: it is a chain of fused multiplications and additions.
    sums = gl.sum(gl.reshape(parts, [_ROWS, 4, HEADS // 4]), 2)
    x, y = gl.split(gl.permute(gl.reshape(sums, [4, 2, 8, 4]), (0, 2, 3, 1)))
    lanes = gl.convert_layout(gl.reshape(lanes, [4, 8, 4]), x.type.layout)
    return _exchanged(x, y, lanes, 1)


@gluon.jit
def _store(near, far, rows, token, start, end, out):
    """Write the logits of a token over 128 keys: each thread has the logit of one key."""
    lanes = gl.convert_layout(gl.reshape(rows.lanes, [4, 8, 4]), near.type.layout)
    sums = gl.reshape(_exchanged(near, far, lanes, 2), [2 * _ROWS])
    logits = gl.convert_layout(sums, rows.keys.type.layout) * rows.scales
    at = out.logits_ptr + token.to(gl.int64) * out.logits_row
    gl.store(at + (rows.keys - start), logits, mask=(rows.keys >= start) & (rows.keys < end))


@gluon.jit
def _skip(first, stop, turn, queries):
    """Give tokens back unread: their keys are other warp groups'."""
    for _ in range(first, stop):
        queries.wait_full(turn)
        queries.give_back(turn)
        turn += 1
    return turn


@gluon.jit
def _score(rows, turn, token, block, queries, out, COUNT: gl.constexpr, PRODUCT: gl.constexpr):
    """Write the logits of COUNT tokens over the 128 keys of a warp group.

    All products are waited for here: one in flight over a loop's edge would be serialised by ptxas.
    """
    queries.wait_full(turn)
    near = _product(rows.near, turn, queries, PRODUCT)
    far = _product(rows.far, turn, queries, PRODUCT)
    for i in gl.static_range(COUNT):
        start = gl.load(block.starts_ptr + token + i)
        end = gl.minimum(gl.load(block.ends_ptr + token + i), block.num_keys)
        weights = queries.weights.index(queries.stage_of(turn + i))
        weights = weights.load(gl.SliceLayout(0, PRODUCT))
        near = warpgroup_mma_wait(1, deps=[near])
        near_sums = _sums(near, weights, rows.lanes)
        if i + 1 < COUNT:
            queries.wait_full(turn + i + 1)
            near = _product(rows.near, turn + i + 1, queries, PRODUCT)
            far = warpgroup_mma_wait(1, deps=[far])
        else:
            far = warpgroup_mma_wait(0, deps=[far])
        queries.give_back(turn + i)
        far_sums = _sums(far, weights, rows.lanes)
        if i + 1 < COUNT:
            far = _product(rows.far, turn + i + 1, queries, PRODUCT)
        _store(near_sums, far_sums, rows, token + i, start, end, out)


@gluon.jit
def _rows_of(first, near, far, scale_ptr, num_keys):
    """The 128 gathered keys from ``first`` on, of which ``near`` and ``far`` are 64 each."""
    number = gl.arange(0, 2 * _ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    # Four threads share rows r and r + 8 of both products; each of them ends up with one row.
    row = number // 32 * 16 + number % 2 * 8 + number // 4 % 8
    keys = first + number // 2 % 2 * _ROWS + row
    scales = gl.load(scale_ptr + keys, mask=keys < num_keys, other=0.0)
    return KeyRows(near=near, far=far, keys=keys, scales=scales, lanes=number)


@gluon.jit
def _consume(PART: gl.constexpr, scale_ptr, block, keys, queries, out, AT_ONCE: gl.constexpr):
    """A warp group: the logits of the block's tokens over its 128 keys of each tile."""
    TILE: gl.constexpr = keys.TILE
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, queries.HEADS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
    # Every warp has all tokens: reductions stay inside a warp.
    LAYOUT: gl.constexpr = gl.BlockedLayout([block.MOST // 32], [32], [4], [0])
    spans = _spans(block, LAYOUT)
    low, high = _bounds(spans)
    turn = 0
    tiles = 0
    for key in range(low + gl.program_id(0) * TILE, high, gl.num_programs(0) * TILE):
        first, stop = _tokens_that_see(spans, key, TILE)
        if first < stop:
            own = key + PART * 2 * _ROWS
            mine, last = _tokens_that_see(spans, own, 2 * _ROWS)
            if mine == last:
                mine = stop
                last = stop
            mbarrier.wait(keys.full, tiles & 1)
            near_keys = keys.tiles.index(2 * PART).load(OPERAND)
            far_keys = keys.tiles.index(2 * PART + 1).load(OPERAND)
            mbarrier.arrive(keys.empty, count=1)
            rows = _rows_of(own, near_keys, far_keys, scale_ptr, block.num_keys)
            turn = _skip(first, mine, turn, queries)
            token = block.first + mine
            for _ in range((last - mine) // AT_ONCE):
                _score(rows, turn, token, block, queries, out, AT_ONCE, PRODUCT)
                turn += AT_ONCE
                token += AT_ONCE
            for _ in range((last - mine) % AT_ONCE):
                _score(rows, turn, token, block, queries, out, 1, PRODUCT)
                turn += 1
                token += 1
            turn = _skip(last, stop, turn, queries)
            tiles += 1


@gluon.jit(
    do_not_specialize=["num_rows", "num_keys", "tokens", "logits_row"],
    do_not_specialize_on_alignment=["starts_ptr", "ends_ptr", "logits_ptr", "scale_ptr"],
)
def hopper_ragged_logits_kernel(
    q_desc,
    weights_desc,
    data_desc,
    scale_ptr,
    starts_ptr,
    ends_ptr,
    logits_ptr,
    num_rows,
    num_keys,
    tokens,
    logits_row,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Logits of e4m3 query tokens over keys ``[start, end)`` of compact rows; grid
    ``(any number, blocks of ``tokens`` query tokens)``.

    The programs of a block share its tiles of 256 keys, of which the first begins at
    the first key that a token of the block sees. Results are those of
    :func:`attn.kernels.sparse.indexer.kernels.ragged_logits_kernel` with e4m3 products.
    Descriptors: queries ``[T, H, 128]`` in boxes of a token and HEADS heads, weights ``[T, H]`` in
    boxes of a token and HEADS heads, data ``[S, 128]`` in boxes of 64 keys.
    """
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    TILE: gl.constexpr = _TILE
    PRODUCTS: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    key_boxes = gl.allocate_shared_memory(gl.uint8, [TILE // _ROWS, _ROWS, _WIDTH], PRODUCTS)
    key_tiles = reinterpret(key_boxes, gl.float8e4nv, [TILE // _ROWS, _ROWS, _WIDTH], PRODUCTS)
    boxes = gl.allocate_shared_memory(
        gl.uint8, [STAGES, 1, HEADS, _WIDTH], gl.NVMMASharedLayout(128, 8, 3)
    )
    tiles = reinterpret(boxes, gl.float8e4nv, [STAGES, HEADS, _WIDTH], PRODUCTS)
    weight_boxes = gl.allocate_shared_memory(
        gl.float32, [STAGES, 1, HEADS], gl.NVMMASharedLayout(0, 32, 2)
    )
    weights = reinterpret(
        weight_boxes, gl.float32, [STAGES, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    key_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    key_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(key_full, count=1)
    mbarrier.init(key_empty, count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    block = TokenBlock(
        starts_ptr=starts_ptr, ends_ptr=ends_ptr, first=gl.program_id(1) * tokens,
        num_rows=num_rows, num_keys=num_keys, count=tokens, MOST=_MOST_TOKENS,
    )  # fmt: skip
    keys = KeyTile(boxes=key_boxes, tiles=key_tiles, full=key_full, empty=key_empty, TILE=TILE)
    queries = QueryRing(
        boxes=boxes, tiles=tiles, weight_boxes=weight_boxes, weights=weights, full=full,
        empty=empty, HEADS=HEADS, STAGES=STAGES,
    )  # fmt: skip
    out = LogitRows(logits_ptr=logits_ptr, logits_row=logits_row)
    gl.warp_specialize(
        [
            (_consume, (0, scale_ptr, block, keys, queries, out, AT_ONCE)),
            (_consume, (1, scale_ptr, block, keys, queries, out, AT_ONCE)),
            (_produce, (q_desc, weights_desc, data_desc, block, keys, queries)),
        ],
        [4, 1],
        [_REGISTERS, 504 - 2 * _REGISTERS],
    )
