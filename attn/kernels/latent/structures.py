"""Structures of the Hopper latent kernels: groups of arguments that only these kernels have.

:mod:`attn.kernels.lang.structures` has the structures that they share with other kernels, and says
how structures are made. Triton reads the types of fields from the annotations of a class. This
module must therefore not postpone annotations.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from attn.kernels.dense.hopper_decode.parts import FIELDS
from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import aggregate
from attn.kernels.lang.structures import Descriptor, Value

QUERY_UNIT = gl.constexpr(8)
"""16-bit elements of 16 bytes, the unit in which the strides of queries are counted."""


@aggregate
class LatentQuery:
    """The step's absorbed queries in two parts, which may be parts of two tensors.

    Strides are counted in units of 16 bytes, so that the compiler knows that a thread may load 16
    bytes at a time. They are no constexprs: an engine's absorbed part lies head by head, so that
    its stride of heads depends on the number of tokens in the batch.
    """

    query_ptr: gl.tensor
    """``[T, H, 512]`` of 16-bit elements, the parts that are multiplied with latents."""
    rotary_ptr: gl.tensor
    """``[T, H, 64]`` of 16-bit elements, the rotary parts."""
    query_token: Value
    """int32, units from a token's absorbed part to the next one's."""
    query_head: Value
    """int32, units from a head's absorbed part to the next one's."""
    rotary_token: Value
    """int32, units from a token's rotary part to the next one's."""
    rotary_head: Value
    """int32, units from a head's rotary part to the next one's."""
    scale: gl.tensor
    """fp32, the layer's scale."""

    @gluon.jit
    def absorbed_at(self, token, head):
        """Pointers to the absorbed parts of tokens and heads, int32 of one shape."""
        at = token.to(gl.int64) * wide(self.query_token) + head.to(gl.int64) * wide(self.query_head)
        return self.query_ptr + at * QUERY_UNIT

    @gluon.jit
    def rotary_at(self, token, head):
        """Pointers to the rotary parts of tokens and heads, int32 of one shape."""
        at = token.to(gl.int64) * wide(self.rotary_token)
        at += head.to(gl.int64) * wide(self.rotary_head)
        return self.rotary_ptr + at * QUERY_UNIT


@gluon.jit
def clear_padding(num_rows, plan, out, zero, HEADS: gl.constexpr, WARPS: gl.constexpr = 1):
    """Write zeros, and -inf as LSE, to the rows of output from the last work item's on.

    Output has ``num_rows`` rows, int32, of HEADS heads with 512 columns each. A captured graph is
    replayed for steps with fewer tokens than it was captured for, and its other rows go through the
    projections that follow, so they must hold numbers. All programs share the rows; WARPS warps of
    each run this. ``zero`` is 0; where the compiler does not know that, it computes a thread's
    columns and the number of the rows' heads here and not early. Where it knows a multiple of 8, it
    stores eight columns at a time.
    """
    items = gl.load(plan.total_ptr)
    # Work items have the order of their tokens.
    last = plan.rows_ptr + gl.maximum(items - 1, 0) * FIELDS
    past = gl.load(last + 1) + gl.load(last + 2)
    first = gl.where(items > 0, past, 0) * HEADS
    LAYOUT: gl.constexpr = gl.BlockedLayout([min(8, 16 // WARPS)], [32], [WARPS], [0])
    column = zero + gl.arange(0, 512, layout=LAYOUT)
    zeros = gl.zeros([512], out.out_ptr.dtype.element_ty, LAYOUT)
    for i in range(first + gl.program_id(0), (num_rows + zero) * HEADS, gl.num_programs(0)):
        token = i // HEADS
        head = i % HEADS
        at = token.to(gl.int64) * out.out_token + head * out.out_head
        gl.store(out.out_ptr + at + column, zeros)
        if out.LSE:
            gl.store(out.lse_ptr + token.to(gl.int64) * out.lse_token + head, float("-inf"))


@aggregate
class LatentCache:
    """The paged cache of a latent layer: rows of 512 latent and 64 rotary columns."""

    k_desc: tma.tensor_descriptor
    """Descriptor of rows ``[N, BLOCK_SIZE, columns]`` in boxes ``[1, RUN, 64]``. A row has 576
    columns of 16 bits, or 288 words of two e4m3."""
    rope_desc: Descriptor
    """Descriptor of the same rows in boxes as wide as the rotary part."""
    table_ptr: gl.tensor
    """``[R, table_row]`` int32, pages of the requests."""
    table_row: Value
    """int32, elements of a row of the table."""
    k_scale_ptr: Value
    """One fp32, factor of keys and values in e4m3; None for a cache of another type."""
    cache_ptr: Value
    """Pointer to the rows of ``k_desc``; None where no row is prefetched."""
    cache_block: Value
    """int64, elements of ``k_desc`` from a page to the next one; read with PREFETCH."""
    BLOCK_SIZE: gl.constexpr
    """int, tokens of a page."""
    PREFETCH: gl.constexpr
    """bool, whether the producer prefetches the next tile into L2."""
    E4M3: gl.constexpr
    """bool, whether rows are e4m3."""


@aggregate
class CausalBounds:
    """Bounds of the keys that a part's queries see, which hold for all tiles of keys."""

    limit: gl.tensor
    """``[ROWS]`` int32, the last key that each query sees."""
    all_high: Value
    """int32, the key after the last that all queries see."""
    kv_len: Value
    """int32, number of the request's keys."""


@gluon.jit
def causal_bounds(first, kv_len, tile):
    """Compute the :class:`CausalBounds` of a part whose first query has position ``first``."""
    row = gl.arange(0, tile.ROWS, layout=gl.SliceLayout(1, tile.SCORES))
    # The limit is the last visible key, not the key after it: LLVM would add that 1 in pairs of 16
    # bits, which ptxas 12.8 gets wrong.
    limit = gl.minimum(first + row // tile.TILE_HEADS, kv_len - 1)
    all_high = gl.minimum(first + 1, kv_len)
    return CausalBounds(limit=limit, all_high=all_high, kv_len=kv_len)


@aggregate
class NarrowRing:
    """The ring of stages in shared memory through which the narrow kernel's latent rows arrive.

    TMA writes boxes. Products read the same memory as keys and as values, which are the left half
    of the latent columns, their right half, and for keys the rotary columns.
    """

    left_boxes: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE / RUN, 1, RUN, 64]``, left halves as TMA writes them: elements of
    16 bits, or words of two e4m3."""
    right_boxes: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE / RUN, 1, RUN, 64]``, right halves as TMA writes them."""
    rope_boxes: gl.shared_memory_descriptor
    """``[STAGES * KV_TILE / RUN, 1, RUN, columns]``, rotary parts as TMA writes them."""
    k_left: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, 256]``, left halves as keys."""
    k_right: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, 256]``, right halves as keys."""
    k_rope: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, 64]``, rotary parts as keys."""
    v_left: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, BOXES * 64]``, left halves as values: words of two elements with E4M3."""
    v_right: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, BOXES * 64]``, right halves as values."""
    left_rows: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE, 32]`` int32, rows of the boxes of left halves."""
    right_rows: gl.shared_memory_descriptor
    """``[STAGES * BOXES * KV_TILE, 32]`` int32, rows of the boxes of right halves."""
    full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the rows are there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the rows have been read."""
    STAGES: gl.constexpr
    """int, tiles that the ring holds."""
    BOXES: gl.constexpr
    """int, boxes of 64 columns that make up half of a row's latent columns."""
    ROW_BYTES: gl.constexpr
    """int, bytes of a row."""
    KV_TILE: gl.constexpr
    """int, tokens of a tile."""
    RUN: gl.constexpr
    """int, tokens of a box: they lie in one page."""


@aggregate
class NarrowRoom:
    """The shared memory of the narrow kernel's consumer."""

    q_left: gl.shared_memory_descriptor
    """``[1, 16, 256]``, the queries' left halves. With an e4m3 cache, columns are in the order that
    ``_query_of`` in ``attn/kernels/latent/hopper_narrow/consumer.py`` explains."""
    q_right: gl.shared_memory_descriptor
    """``[1, 16, 256]``, the queries' right halves, in the same order."""
    q_rope: gl.shared_memory_descriptor
    """``[1, 16, 64]``, the queries' rotary parts, in the same order."""
    exchange: gl.shared_memory_descriptor
    """``[16, 8]`` fp32, the maximum of each row in each warp."""
    turned: gl.shared_memory_descriptor
    """``[16, KV_TILE]``, weights on their way to the layout of an operand."""
    prefix: gl.shared_memory_descriptor
    """``[1, 16, 512]`` fp32, the fold of a part's blocks of segments."""
    prefix_sums: gl.shared_memory_descriptor
    """``[2, 16]`` fp32, maxima and sums of that fold."""


@aggregate
class KeptQueries:
    """The columns of a part's queries that stay in registers, as the first operand of products."""

    left: gl.tensor
    """``[16, 128]``, the first columns of the left half."""
    rope: gl.tensor
    """``[16, 64]``, the rotary columns."""


@aggregate
class NarrowState:
    """Attention over tiles of a segment, as products add it up.

    Each half of the output's columns has two accumulators. With an e4m3 cache these are the even
    and the odd columns of the half; otherwise they are its first and its second half.
    """

    m: gl.tensor
    """``[16]`` fp32, maxima of the products."""
    l: gl.tensor
    """``[16, 32]`` fp32, sums of the weights, one for each thread of a row."""
    left0: gl.tensor
    """``[16, 128]`` fp32, even or first columns of the left half."""
    left1: gl.tensor
    """``[16, 128]`` fp32, odd or last columns of the left half."""
    right0: gl.tensor
    """``[16, 128]`` fp32, even or first columns of the right half."""
    right1: gl.tensor
    """``[16, 128]`` fp32, odd or last columns of the right half."""


@aggregate
class Cut:
    """A program's part of a work item of the wide kernel, which is cut between any two tiles.

    Tiles are counted from the request's first key.
    """

    number: Value
    """int32, number of the work item: row of the plan times HEAD_LOOPS, plus head loop."""
    fields: gl.tensor
    """Pointer to the ROW_FIELDS numbers of the row of the plan."""
    begin: Value
    """int32, the first tile of the part."""
    end: Value
    """int32, the tile after the part's last."""
    req: Value
    """int32, number of the request."""
    kv_len: Value
    """int32, number of the request's keys."""
    first: Value
    """int32, position of the first query."""
    high: Value
    """int32, the tile after the part's last of which some query sees a key. It is ``begin`` or less
    if there are none."""


@aggregate
class WideRing:
    """The shared memory through which the wide kernel's latent rows arrive.

    A tile of keys is two blocks of 64 keys. A block arrives in three parts: the rotary columns, the
    left half of the latent columns, and their right half. A box has RUN tokens and 64 elements of
    16 bits, or words of two e4m3.
    """

    left_boxes: gl.shared_memory_descriptor
    """``[LEFT * boxes * 64 / RUN, 1, RUN, 64]`` of 16 bits, left halves as TMA writes them; a
    half of a row is four boxes wide, or two over e4m3."""
    right_boxes: gl.shared_memory_descriptor
    """``[RIGHT * boxes * 64 / RUN, 1, RUN, 64]`` of 16 bits, right halves."""
    rope_boxes: gl.shared_memory_descriptor
    """``[2 * 64 / RUN, 1, RUN, 64]`` of 16 bits, or ``[..., 32]`` over e4m3: rotary columns of the
    blocks of one tile."""
    full: gl.shared_memory_descriptor
    """``[2 + LEFT + RIGHT, 1]`` mbarriers: a part is there. First those of both stages of rotary
    columns, then of left halves, then of right halves."""
    empty: gl.shared_memory_descriptor
    """``[2 + LEFT + RIGHT, 1]`` mbarriers: a part has been read; in the same order."""
    LEFT: gl.constexpr
    """int, stages of left halves; a block takes the next."""
    RIGHT: gl.constexpr
    """int, stages of right halves."""
    RUN: gl.constexpr
    """int, tokens of a box: they lie in one page."""
    EARLY: gl.constexpr
    """bool, whether half of the first block is freed while the second block is still arriving."""


@aggregate
class WideRoom:
    """The shared memory that the wide kernel's two consumers have in common, over 16 bits."""

    q_boxes: gl.shared_memory_descriptor
    """``[8, 64, 64]`` of 16 bits, latent columns of the queries, 64 columns in each box. When the
    queries have been used, the output of the part, on its way to memory."""
    q_rope: gl.shared_memory_descriptor
    """``[1, 64, 64]`` of 16 bits, rotary columns of the queries."""
    weights: gl.shared_memory_descriptor
    """``[1, 64, 64]`` of 16 bits, weights of one of a tile's two blocks, rows by keys."""
    m_first: gl.shared_memory_descriptor
    """``[64]`` fp32, maxima after the first block."""
    m_second: gl.shared_memory_descriptor
    """``[64]`` fp32, maxima after the second block."""
    sums: gl.shared_memory_descriptor
    """``[2, 64]`` fp32, the sums of the weights of each consumer's blocks."""
    ready: gl.shared_memory_descriptor
    """``[4, 1]`` mbarriers. 0 and 1: the weights of either block are stored. 2 and 3: the sums of
    either consumer are stored."""
    loaded: gl.shared_memory_descriptor
    """``[2, 1]`` mbarriers, of which the first: both consumers have stored their half of the
    queries."""


@aggregate
class E4m3Room:
    """The shared memory that the wide kernel's warp groups have in common, over e4m3."""

    q_boxes: gl.shared_memory_descriptor
    """``[8, 64, 64]`` of 16 bits, for 128 latent columns of e4m3 in each box: large terms in the
    first four boxes, small terms in the others. When the queries have been used, the output of the
    part, on its way to memory."""
    q_rope: gl.shared_memory_descriptor
    """``[1, 64, 64]`` of 16 bits, for the rotary columns' large terms, and their small terms."""
    weights: gl.shared_memory_descriptor
    """``[4, 64, 64]`` fp16, weights of blocks in turn, keys by rows. Behind the weights of a part,
    the sums of the scorer's four warps, as fp32."""
    references: gl.shared_memory_descriptor
    """``[64]`` fp32, the score, in units of log 2, that a row's weights refer to."""
    grown: gl.shared_memory_descriptor
    """``[4, 64]`` fp32, the factors of rows whose reference a block raised, by buffer."""
    flags: gl.shared_memory_descriptor
    """``[4, 1]`` int32, whether a block raised references, by buffer of weights."""
    votes: gl.shared_memory_descriptor
    """``[128]`` uint8, of which the scorer's four warps say whether a weight may be too large."""
    factors: gl.shared_memory_descriptor
    """``[64]`` fp32, the factors of the rows' products in units of log 2."""
    row_numbers: gl.shared_memory_descriptor
    """``[2, 64]`` fp32, numbers of rows, by group of columns: the factors of its output, behind a
    part's last block. Up to then the memory holds the scorer's limits, as int32."""
    scale: gl.shared_memory_descriptor
    """``[1]`` fp32, the scale of the cache."""
    scale_ptr: gl.tensor
    """Pointer to the scale of the cache, one fp32."""
    ready: gl.shared_memory_descriptor
    """``[4, 1]`` mbarriers: the weights of a buffer are stored."""
    taken: gl.shared_memory_descriptor
    """``[4, 1]`` mbarriers: both groups of columns have multiplied the weights of a buffer."""
    summed: gl.shared_memory_descriptor
    """``[1]`` mbarrier: the sums of a part's weights are stored."""
    loaded: gl.shared_memory_descriptor
    """``[2, 1]`` mbarriers. The first: both groups of columns have stored their half of the
    queries. The second: both groups have written their output of the item before, and asked for
    their half of the queries."""
    TERMS: gl.constexpr
    """int, e4m3 numbers whose sum a query element becomes: 2, or 1 if it is rounded, and then there
    are no small terms."""


@aggregate
class ScoreOperands:
    """Shared memory as the products of the wide kernel's scorer read it, over e4m3."""

    q: gl.shared_memory_descriptor
    """``[8, 64, 128]`` e4m3, latent columns of the queries' terms, see :class:`E4m3Room`."""
    q_rope: gl.shared_memory_descriptor
    """``[2, 64, 64]`` e4m3, rotary columns of the queries' small terms and of their large terms."""
    left: gl.shared_memory_descriptor
    """``[8, 64, 128]`` e4m3, left halves of the latents of four blocks, each two boxes."""
    right: gl.shared_memory_descriptor
    """``[6, 64, 128]`` e4m3, right halves of three blocks."""
    rope: gl.shared_memory_descriptor
    """``[2, 64, 64]`` e4m3, rotary columns of two blocks."""


@aggregate
class ValueOperands:
    """Shared memory as a group of columns of the wide kernel reads it, over e4m3."""

    words: gl.shared_memory_descriptor
    """``[4, 64, 64]`` or ``[3, 64, 64]`` int32, its half of the latents of blocks, by words."""
    weights: gl.shared_memory_descriptor
    """``[16, 16, 64]`` fp16, weights of blocks in turn, 16 keys at a time."""
    sums: gl.shared_memory_descriptor
    """``[128, 64]`` fp32, of which four are sums of weights."""


@aggregate
class Operands:
    """Shared memory as the products of one of the wide kernel's consumers read it."""

    q: gl.shared_memory_descriptor
    """``[2, 64, 256]``, left half and right half of the queries."""
    q_rope: gl.shared_memory_descriptor
    """``[1, 64, 64]``, rotary columns of the queries."""
    left: gl.shared_memory_descriptor
    """``[2, 64, 256]``, left halves of both blocks of keys."""
    right: gl.shared_memory_descriptor
    """``[2, 64, 256]``, right halves of both blocks of keys."""
    rope: gl.shared_memory_descriptor
    """``[2, 64, 64]``, rotary columns of both blocks of keys."""
    rows: gl.shared_memory_descriptor
    """``[8 * 64, 32]`` int32, rows of the boxes of the consumer's half of the values."""
