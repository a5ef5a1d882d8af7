"""Structures of the Hopper kernels of sparse attention: groups of arguments of device functions.

A kernel makes them from its flat arguments, as :mod:`attn.kernels.lang.structures` describes. This
module must not postpone annotations, since Triton reads the types of fields from them.

The wide kernel serves many heads, and the narrow kernel few. The first structures serve both; the
others say by their names which kernel they belong to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attn.kernels.dense.hopper_prefill.scheduler import wide
from attn.kernels.lang.compat import aggregate, reinterpret
from attn.kernels.lang.structures import Value
from attn.kernels.sparse.listed_rows import row_offsets


@aggregate
class SparseQuery:
    """The queries of a step, in two parts; strides are in units of 16 bytes."""

    query_ptr: gl.tensor
    """``[T, HEADS, 512]`` of 16-bit elements, the parts that meet the latents of rows."""
    rotary_ptr: gl.tensor
    """``[T, HEADS, 64]`` of 16-bit elements, the rotary parts."""
    query_token: Value
    """int32, from a token of ``query_ptr`` to the next one."""
    query_head: Value
    """int32, from a head of ``query_ptr`` to the next one."""
    rotary_token: Value
    """int32, from a token of ``rotary_ptr`` to the next one."""
    rotary_head: Value
    """int32, from a head of ``rotary_ptr`` to the next one."""
    scale: gl.tensor
    """fp32, the factor of products; the wide kernel includes log2(e) in it."""


@aggregate
class Lists:
    """The list of each token: the rows of the cache that it attends to."""

    ids_ptr: gl.tensor
    """``[T, topk]`` int32, numbers of rows; -1 lists no row."""
    lens_ptr: Value
    """``[T]`` int32, how many entries of each list count; read with HAS_LENS."""
    ids_row: Value
    """int32, elements from a list to the next one."""
    topk: Value
    """int32, entries of a list."""
    HAS_LENS: gl.constexpr
    """bool, whether only some entries of a list count; else all do."""

    @gluon.jit
    def of(self, token):
        """Pointer to the list of a token."""
        return self.ids_ptr + token.to(gl.int64) * wide(self.ids_row)

    @gluon.jit
    def length_of(self, token):
        """How many entries of a token's list count: those before it, of which there may be more
        than the list has.
        """
        length = self.topk
        if self.HAS_LENS:
            length = gl.load(self.lens_ptr + token)
        return length


@aggregate
class LatentRows:
    """The rows of a latent cache, each of them 512 latent and 64 rotary columns."""

    latent_ptr: gl.tensor
    """``[N, BLOCK_SIZE, row]``, the paged rows: in words of int32 for the narrow kernel, in the
    queries' type for the wide kernel."""
    scale_ptr: Value
    """``[1]`` fp32, the scale that all e4m3 rows share; only the narrow kernel serves such rows."""
    BLOCK_SIZE: gl.constexpr
    """int, rows of a page."""
    BLOCK_UNITS: gl.constexpr
    """int, from a page to the next one, in units of 16 bytes."""
    ROW_UNITS: gl.constexpr
    """int, from a row to the next one of its page, in units of 16 bytes."""
    ROPE_AT: gl.constexpr
    """int, first byte of a row's rotary part; None in the narrow kernel."""
    SCALES_AT: gl.constexpr
    """int, first byte of a row's scales; None in the narrow kernel."""

    @gluon.jit
    def offsets(self, ids):
        """Offsets of listed rows, int64 in units of 16 bytes; an id of -1 has none."""
        return row_offsets(ids, self.BLOCK_UNITS, self.ROW_UNITS, self.BLOCK_SIZE)


@aggregate
class Division:
    """How the work of a step is divided into pieces, which programs take.

    A piece is one token with one tile of its heads and one part of its list. With TOKENS above 1 it
    is that many neighbouring tokens with all their heads: they share a tile of heads, and they read
    one joint list, as :mod:`attn.kernels.sparse.joint_lists` makes it.
    """

    tokens: Value
    """int32, number of query tokens."""
    TOKENS: gl.constexpr
    """int, tokens of a piece: 1, 2, 4 or 8."""
    HEADS: gl.constexpr
    """int, query heads."""
    HEAD_TILES: gl.constexpr
    """int, tiles into which the heads are cut."""
    SEGMENT: gl.constexpr
    """int, entries of a part of a list."""
    PARTS: gl.constexpr
    """int, parts of a list."""
    BALANCED: gl.constexpr
    """bool, whether programs take equally many tiles of keys, so that a list may lie in two
    programs."""

    @gluon.jit
    def pieces(self):
        """Number of pieces."""
        if self.TOKENS > 1:
            count = (self.tokens + (self.TOKENS - 1)) // self.TOKENS
        else:
            count = self.tokens * (self.PARTS * self.HEAD_TILES)
        return count

    @gluon.jit
    def row_of(self, place, first, head_tile):
        """The token and the head of a row of a tile of heads, and whether there is such a row.

        ``place`` is the number of the row in the tile. ``first`` is the number of the piece's token
        or, with TOKENS above 1, of its group of tokens.
        """
        if self.TOKENS > 1:
            EACH: gl.constexpr = 64 // self.TOKENS
            token = first * self.TOKENS + place // EACH
            head = place % EACH
            there = (head < self.HEADS) & (token < self.tokens)
        else:
            token = first + place * 0
            head = head_tile * 64 + place
            there = head < self.HEADS
        return token, head, there


@aggregate
class Scratch:
    """The states that programs store where a list lies in several pieces."""

    states_ptr: gl.tensor
    """fp32, outputs: ``[T, HEAD_TILES, PARTS, heads, 512]`` where lists have parts; with BALANCED
    as :func:`attn.kernels.sparse.finish.finish_shared` says."""
    sums_ptr: gl.tensor
    """fp32, maxima and sums: ``[T, HEAD_TILES, PARTS, 2, heads]`` where lists have parts; with
    BALANCED as that function says."""
    counters_ptr: Value
    """int32, arrivals of warp groups as that function says, zero between launches; read with
    BALANCED."""


@aggregate
class NarrowQueries:
    """The shared memory of a tile of heads' queries in the narrow kernel."""

    latent: gl.shared_memory_descriptor
    """``[4, ROWS, 128]`` of 16-bit elements, the parts that meet latents, in blocks of columns."""
    rotary: gl.shared_memory_descriptor
    """``[1, ROWS, 64]`` of 16-bit elements, the rotary parts."""
    undo: gl.shared_memory_descriptor
    """``[2, ROWS]`` fp32, factors that undo the scaling to fp16's range: of the latent parts, and
    of the rotary parts."""
    full: gl.shared_memory_descriptor
    """mbarrier: the queries are there."""


@aggregate
class NarrowRing:
    """The ring of stages in shared memory through which the narrow kernel's tiles of rows come."""

    latents: gl.shared_memory_descriptor
    """``[STAGES, KEYS, words]`` int32, the latents of rows as the cache stores them."""
    tails: gl.shared_memory_descriptor
    """``[STAGES, KEYS, words]`` int32, what follows the latents in rows."""
    full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the rows are there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the rows have been read."""
    STAGES: gl.constexpr
    """int, tiles that the ring holds."""


@aggregate
class NarrowRoom:
    """The shared memory of a consumer of the narrow kernel.

    As the kernel makes it, ``scores`` and ``logs`` have a leading axis of consumers, which
    :meth:`of` takes away.
    """

    scores: gl.shared_memory_descriptor
    """``[KEYS, ROWS]`` fp32, scores on their way from the threads of keys to those of columns."""
    logs: gl.shared_memory_descriptor
    """``[4, KEYS]`` fp32, logarithms of the scales of rows; used where rows have scales."""
    ends: gl.shared_memory_descriptor
    """``[2, ROWS]`` fp32, the second consumer's maxima and sums for the first consumer."""
    done: gl.shared_memory_descriptor
    """mbarrier: the second consumer has stored its maxima, its sums and its output."""

    @gluon.jit
    def of(self, W: gl.constexpr):
        """The room of consumer W."""
        return NarrowRoom(
            scores=self.scores.index(W), logs=self.logs.index(W), ends=self.ends, done=self.done
        )


@aggregate
class NarrowTile:
    """The sizes, types and layouts of the narrow kernel's tiles: heads by keys."""

    KIND: gl.constexpr
    """int, the format of rows: NATIVE, RAW or SCALED of the narrow kernel's consumer."""
    ROWS: gl.constexpr
    """int, heads of a tile, 8 or 16."""
    KEYS: gl.constexpr
    """int, keys of a tile."""
    DTYPE: gl.constexpr
    """Type of the queries, and of 16-bit elements of rows."""
    PRODUCT: gl.constexpr
    """Layout of score products: ``[16, KEYS]`` where KIND is NATIVE, else ``[64, ROWS]``."""
    WEIGHTS: gl.constexpr
    """Layout of weights ``[4, KEYS, ROWS]``, for each block of columns."""
    SUMS: gl.constexpr
    """Layout of output sums ``[4, 128, ROWS]``, in blocks of columns."""


@aggregate
class NarrowState:
    """A narrow consumer's attention over the tiles of keys that it has taken so far."""

    m: gl.tensor
    """Maxima of scores that each thread keeps for itself, fp32 in units of log 2: ``[16, 16]``
    where KIND is NATIVE, else ``[32, ROWS]``."""
    l: gl.tensor
    """Sums of weights that each thread keeps for itself, shaped as ``m``."""
    top: gl.tensor
    """``[4, ROWS]`` fp32, maxima of score plus log2 of the scale, for each block of columns."""
    acc: gl.tensor
    """``[4, 128, ROWS]`` fp32, sums of values times weights."""


@aggregate
class WideQueries:
    """The shared memory of a tile of heads' queries in the wide kernel."""

    latent: gl.shared_memory_descriptor
    """``[8, 64, 64]`` of 16-bit elements, the parts that meet latents, in blocks of columns;
    :meth:`in_halves` makes it ``[2, 64, 256]``, as products read it."""
    rotary: gl.shared_memory_descriptor
    """``[1, 64, 64]`` of 16-bit elements, the rotary parts."""
    full: gl.shared_memory_descriptor
    """mbarrier: the queries are there."""
    empty: gl.shared_memory_descriptor
    """mbarrier: both consumers have read the queries."""

    @gluon.jit
    def in_halves(self):
        """The queries with their latent parts as products read them."""
        return WideQueries(
            latent=halves_of(self.latent), rotary=self.rotary, full=self.full, empty=self.empty
        )


@aggregate
class WideRing:
    """The shared memory of the wide kernel's tile of keys, which is two blocks.

    Block ``b`` arrives in parts, each of which has a barrier in ``full``: number ``b`` is of the
    rotary part and the gaps, ``2 + b`` of the half that comes first, and ``4 + b`` of the other
    half. The left half of block 0 comes first, and the right half of block 1. In ``empty``, number
    ``b`` is of the rotary part and the gaps, ``2 + b`` of the left half, and ``4 + b`` of the right
    half.
    """

    left: gl.shared_memory_descriptor
    """``[8, KEYS, 64]`` of 16-bit elements, the left halves of the latents of both blocks, in
    blocks of columns; :meth:`in_halves` makes it ``[2, KEYS, 256]``, as products read it."""
    right: gl.shared_memory_descriptor
    """The right halves of the latents of both blocks, shaped as ``left``."""
    rope: gl.shared_memory_descriptor
    """``[2, KEYS, 64]`` of 16-bit elements, the rotary parts of both blocks."""
    gaps: gl.shared_memory_descriptor
    """``[2, KEYS]`` fp32, terms of scores: -inf for entries that list no row, else 0. With joint
    lists int32: bit i says whether token i of the piece lists the row."""
    full: gl.shared_memory_descriptor
    """``[6, 1]`` mbarriers: the part of the block is there. With WHOLE it is ``[2, 1]``: the block
    is there."""
    empty: gl.shared_memory_descriptor
    """``[6, 1]`` mbarriers: the part of the block has been read."""

    @gluon.jit
    def in_halves(self):
        """The ring with its latents as products read them."""
        return WideRing(
            left=halves_of(self.left), right=halves_of(self.right), rope=self.rope, gaps=self.gaps,
            full=self.full, empty=self.empty,
        )  # fmt: skip


@gluon.jit
def halves_of(boxes):
    """View latents ``[8, rows, 64]``, in blocks of columns, as two halves ``[2, rows, 256]``."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return reinterpret(boxes, boxes.dtype, [2, boxes.shape[1], 256], LAYOUT)


@aggregate
class StoredBlocks:
    """The shared memory of blocks of e4m3 rows as the cache stores them, until they are converted.

    Nothing uses it where rows have 16 bits; its fields are then any memory.
    """

    left: gl.shared_memory_descriptor
    """``[STORED_BLOCKS, KEYS, 64]`` int32, the left halves of latents."""
    right: gl.shared_memory_descriptor
    """``[STORED_BLOCKS, KEYS, 64]`` int32, the right halves of latents."""
    rope: gl.shared_memory_descriptor
    """``[STORED_BLOCKS, KEYS, 32]`` int32, rotary parts of two bf16 in a word."""
    scales: gl.shared_memory_descriptor
    """``[STORED_BLOCKS, KEYS, 4]`` int32, the bits of the fp32 scales of latents."""


@aggregate
class WideRoom:
    """The shared memory in which the consumers of the wide kernel exchange what they compute."""

    weights: gl.shared_memory_descriptor
    """``[1, 64, KEYS]`` of 16-bit elements, the weights of one block."""
    first_top: gl.shared_memory_descriptor
    """``[64]`` fp32, maxima after block 0."""
    second_top: gl.shared_memory_descriptor
    """``[64]`` fp32, maxima after block 1."""
    sums: gl.shared_memory_descriptor
    """``[2, 64]`` fp32, each consumer's sums over its own blocks."""
    ready: gl.shared_memory_descriptor
    """``[4, 1]`` mbarriers: 0 and 1, the weights and maxima of either block are there; 2 and 3, the
    sums of either consumer."""


@aggregate
class WideTile:
    """The sizes, types and layouts of the wide kernel's tiles: 64 heads by two blocks of keys."""

    KEYS: gl.constexpr
    """int, keys of a block."""
    DTYPE: gl.constexpr
    """Type of the products' operands."""
    EARLY: gl.constexpr
    """bool, whether consumers free the half of a block that the other consumer's weights meet
    before they wait for more keys."""
    WHOLE: gl.constexpr
    """bool, whether a block of keys arrives as a whole, since the producer converts its rows."""
    TOKENS: gl.constexpr
    """int, tokens whose heads share the tile."""
    SCORES: gl.constexpr
    """Layout of a block's scores ``[64, KEYS]``."""
    OUTPUT: gl.constexpr
    """Layout of a consumer's columns of the output ``[64, 256]``."""


@aggregate
class Piece:
    """A piece of work: a token, a tile of its heads, and keys of its list.

    A tile of keys is one block, or in the narrow kernel one tile, for each of two consumers.
    """

    token: Value
    """int32, number of the token."""
    head_tile: Value
    """int32, number of the tile of heads."""
    part: Value
    """int32, number of the part of the list; 0 with BALANCED."""
    length: Value
    """int32, entries of the list that count."""
    low: Value
    """int32, the first tile of keys."""
    high: Value
    """int32, the tile of keys after the last; there are none if it is ``low`` or less."""
    meets: Value
    """int32, number of the place where this program's share meets the share of the program that has
    the rest of the list, from 1 on; 0 if no other program has any of the list."""
