"""Structures: groups of arguments that Gluon kernels hand from one device function to the next.

A launch has flat arguments, and a kernel makes the structures from them in its first lines. A field
costs no more than an argument: the PTX is the same. A field in capitals is a constexpr.

Triton reads the types of fields from the annotations of a class. This module must therefore not
postpone annotations.
"""

from typing import TypeAlias

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn.kernels.lang.compat import aggregate, arrive_behind_gathers
from attn.kernels.lang.masks import last_visible, masked, own_range, seen_by_all
from builders.splitkv.device.segments import first_visible

Value: TypeAlias = gl.tensor | gl.constexpr
"""The type of a field that is a tensor, or a constexpr where a caller gives None or a number."""
Descriptor: TypeAlias = tma.tensor_descriptor | gl.constexpr
"""The type of a field that is a tensor descriptor, or None where rows are read by pointers."""


@aggregate
class Mask:
    """The rules that say which keys a query sees, and pointers to each request's own rules."""

    causal_ptr: Value
    """``[R]`` bool, whether each request is causal; read where CAUSAL is 2."""
    ranges_ptr: Value
    """``[R, num_ranges, 2]`` int32, first and last position of ranges; read with RANGES.

    Tokens of a range see each other. An unused range has its first position above its last."""
    num_ranges: Value
    """int32, number of ranges of a request."""
    window: Value
    """int32, number of keys that a query sees, its own included; read with WINDOW or CLAMP."""
    chunk: Value
    """int32, tokens of a chunk; read with CHUNK."""
    lookback: Value
    """int32, number of chunks that a query sees before its own chunk."""
    CAUSAL: gl.constexpr
    """0: no query is causal; 1: every query is causal; 2: ``causal_ptr`` says it per request."""
    WINDOW: gl.constexpr
    """bool, whether queries see a window only."""
    CHUNK: gl.constexpr
    """bool, whether queries see chunks only."""
    RANGES: gl.constexpr
    """bool, whether requests have ranges."""
    CLAMP: gl.constexpr
    """bool, whether ranges end at the window."""

    @gluon.jit
    def ranges_of(self, req):
        """Pointer to the ranges of request ``req``."""
        ranges = self.ranges_ptr
        if self.RANGES:
            ranges = ranges + req.to(gl.int64) * self.num_ranges * 2
        return ranges

    @gluon.jit
    def keys_seen(self, req, first, last, kv_len):
        """The keys that a request's queries from position ``first`` to ``last`` may see.

        Returns:
            Whether the request is causal, int32; and the keys ``[start, stop)``.
        """
        causal = 1
        if self.CAUSAL == 2:
            causal = gl.load(self.causal_ptr + req).to(gl.int32)
        ranges = self.ranges_of(req)
        start = first_visible(
            first, last, self.window, self.chunk, self.lookback, ranges, self.num_ranges,
            self.WINDOW or self.CHUNK, self.CHUNK, self.RANGES, self.CLAMP,
        )  # fmt: skip
        stop = last_visible(first, last, kv_len, causal, ranges, self, False)
        return causal, start, stop

    @gluon.jit
    def seen_by_all(self, first, last, kv_len, causal):
        """Keys ``[low, high)`` that every query from position ``first`` to ``last`` sees.

        Ranges are left out: they can only add keys.
        """
        return seen_by_all(first, last, kv_len, causal, self, False)

    @gluon.jit
    def own_range(self, query, req):
        """First and last key of the ranges that queries ``[M]`` of request ``req`` lie in."""
        range_first = query
        range_last = query
        if self.RANGES:
            range_first, range_last = own_range(query, self.ranges_of(req), self.num_ranges)
        return range_first, range_last

    @gluon.jit
    def masked(self, scores, query, key, reach, kv_len, range_first, range_last):
        """Scores ``[M, N]`` of queries ``[M]`` and keys ``[N]``, -inf where a query does not see.

        ``reach`` ``[M]`` is the last key that causality and the request's length leave to a query.
        ``range_first`` and ``range_last`` ``[M]`` are the results of :meth:`own_range`.
        """
        return masked(scores, query, key, reach, kv_len, 0, range_first, range_last, self, False)


@gluon.jit
def causal_mask():
    """The mask of causal attention, without windows, chunks and ranges."""
    return Mask(
        causal_ptr=None, ranges_ptr=None, num_ranges=0, window=0, chunk=1, lookback=0, CAUSAL=1,
        WINDOW=False, CHUNK=False, RANGES=False, CLAMP=False,
    )  # fmt: skip


@aggregate
class Plan:
    """The plan of split KV, and the scratch that its programs share.

    :class:`builders.splitkv.record.SplitPlan` describes both. A row of the plan is query tokens of
    one request with one segment group of its keys. A work item is a row of the plan in one head
    loop.
    """

    rows_ptr: gl.tensor
    """``[max rows, ROW_FIELDS]`` int32, the rows of the plan."""
    total_ptr: gl.tensor
    """``[2]`` int32: rows of the step, and the KV tiles that the groups share."""
    starts_ptr: gl.tensor
    """``[groups + 1, 2]`` int32: the work item and the segment at which each group starts."""
    shares_ptr: gl.tensor
    """``[groups, SHARE_FIELDS]`` int32, the share of each group of programs."""
    counters_ptr: gl.tensor
    """int32, how much has arrived: ``[groups, HEADS]`` segments, then
    ``[groups, HEADS, HEAD_LOOPS]`` segment groups. All are zero between launches."""
    states_ptr: gl.tensor
    """``[slots, USED, SIZE]`` fp32, the outputs of states; USED and SIZE are the tile's."""
    sums_ptr: gl.tensor
    """``[slots, 2, USED]`` fp32, the maxima and sums of states."""
    groups: Value
    """int32, number of groups of programs."""
    HEADS: gl.constexpr
    """int, programs of a group: one for each tile of heads that the group takes at a time."""
    HEAD_LOOPS: gl.constexpr
    """int, how many times the groups walk the keys until all tiles of heads are done."""
    HEAD_TILES: gl.constexpr
    """int, tiles into which the query heads of one KV head are cut."""
    SLOTS: gl.constexpr
    """int, state slots for segments that a program lends."""
    SEGMENT_GROUPS: gl.constexpr
    """int, most segment groups of a request's keys."""
    AREA: gl.constexpr
    """int, state slots of a program in all."""
    SEGMENT_UNIT: gl.constexpr
    """int, length of a KV tile in the unit of segment starts: KV_TILE, or a fraction of it where
    segments are longer."""


@aggregate
class Out:
    """Where results are written, and the factors that they get on the way."""

    out_ptr: gl.tensor
    """``[T, H, SIZE]`` of 16-bit elements; with FP8_OUT of e4m3, as uint8."""
    lse_ptr: Value
    """``[T, H]`` fp32; written with LSE."""
    sinks_ptr: Value
    """``[H]``, the logit of each head's sink; read with SINKS."""
    output_scale_ptr: Value
    """One fp32 by which outputs are divided; read with FP8_OUT."""
    out_token: Value
    """int32, elements from a token's output to the next one's."""
    out_head: Value
    """int32, elements from a head's output to the next one's."""
    lse_token: Value
    """int32, elements from a token's LSE to the next one's."""
    SINKS: gl.constexpr
    """bool, whether heads have sinks."""
    FP8_OUT: gl.constexpr
    """bool, whether outputs are e4m3."""
    LSE: gl.constexpr
    """bool, whether the LSE is written."""


@aggregate
class Query:
    """The step's queries, and the numbers that turn their products with keys into scores."""

    query_ptr: gl.tensor
    """``[T, H, SIZE]`` of 16-bit elements."""
    query_token: Value
    """int32, elements from a token's query to the next one's."""
    query_head: Value
    """int32, elements from a head's query to the next one's."""
    scale: gl.tensor
    """fp32 factor of the products, without that of quantised keys."""
    soft_cap: Value
    """fp32, the bound of the scores; read with SOFT_CAP."""
    SOFT_CAP: gl.constexpr
    """bool, whether scores are bounded."""


@aggregate
class Cache:
    """The paged KV cache of a layer."""

    k_desc: Descriptor
    """Descriptor of keys ``[N, BLOCK_SIZE, Hk, columns]`` in boxes ``[1, RUN, 1, 64]``; dense keys,
    which have no pages, are ``[1, T, Hk, columns]``."""
    v_desc: Descriptor
    """Descriptor of values, which are shaped as the keys are."""
    table_ptr: gl.tensor
    """``[R, table_row]`` int32, pages of the requests."""
    table_row: Value
    """int32, elements of a row of the table."""
    k_scale_ptr: Value
    """``[1]`` or ``[Hk]`` fp32, factor of keys in e4m3; None for a cache of another type."""
    v_scale_ptr: Value
    """``[1]`` or ``[Hk]`` fp32, factor of values in e4m3; None for a cache of another type."""
    scale_head: Value
    """int32, elements from a head's scale to the next one's: 0 where all heads share one scale."""
    BLOCK_SIZE: gl.constexpr
    """int, tokens of a page; 0 where keys are dense."""


@aggregate
class StoredRows:
    """Keys, or values, of a paged cache of 8 bits, which are read by pointers."""

    rows_ptr: Value
    """``[N, BLOCK_SIZE, Hk, SIZE]`` of 8 bits; None where the cache has 16 bits."""
    per_block: Value
    """int32, words of four bytes from a page to the next one."""
    per_token: Value
    """int32, words of four bytes from a token to the next one of its page."""
    per_head: Value
    """int32, words of four bytes from a head to the next one."""


@aggregate
class Ring:
    """The ring of stages in shared memory through which tiles of keys and values arrive."""

    k_boxes: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, 1, RUN, 1, 64]``, keys as TMA writes them."""
    v_boxes: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, 1, RUN, 1, 64]``, values as TMA writes them."""
    k_tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, SIZE]``, the memory of ``k_boxes`` as products read it."""
    v_tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, columns]``, the memory of ``v_boxes`` as products read it."""
    v_runs: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, RUN, 64]``, the memory of ``v_boxes`` run by run."""
    k_full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the keys are there."""
    v_full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the values are there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: keys and values have been read."""
    STAGES: gl.constexpr
    """int, tiles that the ring holds."""
    HALVES: gl.constexpr
    """int, boxes of 64 columns that make up a row."""
    KV_TILE: gl.constexpr
    """int, tokens of a tile."""
    RUN: gl.constexpr
    """int, tokens of a box: they lie in one page."""

    @gluon.jit
    def stage_of(self, turn):
        """The stage of the ``turn``-th tile, and the parity of its phase in that stage."""
        return turn % self.STAGES, (turn // self.STAGES) & 1


@aggregate
class Mailbox:
    """Shared memory in which the second consumer hands a state to the first."""

    acc: gl.shared_memory_descriptor
    """``[1, ROWS, SIZE]`` fp32, the output of the state."""
    top: gl.shared_memory_descriptor
    """``[ROWS]`` fp32, the maxima of the state."""
    sums: gl.shared_memory_descriptor
    """``[ROWS]`` fp32, the sums of the state."""
    sent: gl.shared_memory_descriptor
    """mbarrier: a state is in the mailbox."""
    taken: gl.shared_memory_descriptor
    """mbarrier: the state in the mailbox has been read."""


@aggregate
class Room:
    """The shared memory of a consumer.

    As the kernel makes it, every field except the mailbox has a leading axis of consumers, which
    :meth:`of` takes away.
    """

    exchange: gl.shared_memory_descriptor
    """``[16, 4]`` fp32, the maximum of each row in each warp."""
    turned: gl.shared_memory_descriptor
    """``[16, KV_TILE]``, weights on their way to the layout of an operand."""
    queries: gl.shared_memory_descriptor
    """``[ROWS, SIZE]``, the queries, for products that read them from shared memory."""
    mailbox: Mailbox
    """The mailbox, which both consumers share."""

    @gluon.jit
    def of(self, PART: gl.constexpr):
        """The room of consumer PART."""
        return Room(
            exchange=self.exchange.index(PART),
            turned=self.turned.index(PART),
            queries=self.queries.index(PART),
            mailbox=self.mailbox,
        )


@aggregate
class Tile:
    """The sizes, types and layouts of the tile that a program computes at a time."""

    GROUP: gl.constexpr
    """int, query heads of a KV head."""
    TILE_HEADS: gl.constexpr
    """int, query heads of the tile: row ``i`` belongs to head ``i % TILE_HEADS``."""
    USED: gl.constexpr
    """int, rows that can hold a query: TILE_HEADS times the most tokens of a work item."""
    ROWS: gl.constexpr
    """int, rows of the products, 16 or 64."""
    SIZE: gl.constexpr
    """int, elements of a head."""
    WIDTH: gl.constexpr
    """int, columns that the tile has for a head: SIZE rounded up to a power of two."""
    DTYPE: gl.constexpr
    """Type of the products' operands."""
    E4M3: gl.constexpr
    """bool, whether the cache is e4m3, read as int16 words of two elements; else it is DTYPE."""
    SCORES: gl.constexpr
    """Layout of scores ``[ROWS, KV_TILE]``."""
    OUTPUT: gl.constexpr
    """Layout of output sums ``[ROWS, WIDTH]``, or of those of their columns that are summed
    together: one plane, or one consumer's half."""
    CONSUMERS: gl.constexpr
    """int, number of consumers: 1 or 2."""
    FINISH_ROWS: gl.constexpr
    """int, rows of stored states that are folded at a time."""
    FINISH_WIDTH: gl.constexpr
    """int, columns of stored states that are folded at a time."""


@aggregate
class Work:
    """A program's part of a work item: a run of its segments, for one tile of heads."""

    number: Value
    """int32, number of the work item: row of the plan times HEAD_LOOPS, plus head loop."""
    lane: Value
    """int32, number of the program in its group."""
    fields: gl.tensor
    """Pointer to the ROW_FIELDS numbers of the row of the plan."""
    begin: Value
    """int32, the first segment of the part, counted from the row's first segment."""
    end: Value
    """int32, the segment after the part's last, counted from the row's first segment."""
    req: Value
    """int32, number of the request."""
    kv_len: Value
    """int32, number of the request's keys."""
    first: Value
    """int32, position of the first query."""
    last: Value
    """int32, position of the last query."""
    causal: Value
    """int32, not 0 where the request is causal."""
    start: Value
    """int32, the first key that a query sees."""
    low: Value
    """int32, the first tile of keys."""
    high: Value
    """int32, the tile of keys after the last."""


@aggregate
class Head:
    """The heads of a part, and the factors that depend on them."""

    kv_head: Value
    """int32, number of the KV head."""
    in_group: Value
    """int32, the tile's first query head, counted from the KV head's first query head."""
    natural: Value
    """fp32, with E4M3 ``[ROWS]`` fp32: the factor of products, which includes the keys' scale."""
    v_factor: Value
    """fp32, the factor of outputs: the values' scale."""


@aggregate
class SumsApart:
    """How sums of weights are kept until a segment ends, where other kernels give rows of the same
    request the same bits (batch invariance): by column, in as many columns as they have.
    """

    COLUMNS: gl.constexpr
    """int, the columns; 0 where bits need not be those of other kernels."""
    LAYOUT: gl.constexpr
    """Layout of the sums ``[ROWS, COLUMNS]``."""


@aggregate
class Planes:
    """Queries as two operands: e4m3 keys are stored in words of an even and an odd column."""

    even: gl.tensor
    """``[ROWS, WIDTH / 2]``, the even columns."""
    odd: gl.tensor
    """``[ROWS, WIDTH / 2]``, the odd columns."""


@aggregate
class Bounds:
    """Bounds of the keys that a part's queries see, which hold for all tiles of keys."""

    range_first: gl.tensor
    """``[ROWS]`` int32, the first key of each query's own ranges."""
    range_last: gl.tensor
    """``[ROWS]`` int32, the last key of each query's own ranges."""
    all_low: Value
    """int32, the first key that all queries see."""
    all_high: Value
    """int32, the key after the last that all queries see."""


@aggregate
class State:
    """Attention over a run of keys; it can be folded with the state of the keys that follow."""

    m: gl.tensor
    """``[ROWS]`` fp32, maxima of the scores, in units of log 2."""
    l: gl.tensor
    """``[ROWS]`` fp32, sums of the weights; within a segment one sum per thread,
    ``[ROWS, threads]``."""
    acc: gl.tensor
    """``[ROWS, columns]`` fp32, sums of values times weights."""


@aggregate
class Cells:
    """Offsets of the elements of a stored state that are folded at a time."""

    row: gl.tensor
    """``[FINISH_ROWS]`` int32, the rows."""
    cell: gl.tensor
    """``[FINISH_ROWS, FINISH_WIDTH]`` int32, offsets in an output of ``[USED, WIDTH]``."""
    mine: gl.tensor
    """``[FINISH_ROWS]`` bool, whether a state has the row."""
    mask: gl.tensor
    """``[FINISH_ROWS, FINISH_WIDTH]`` bool, whether a state has the element."""


@aggregate
class Scaling:
    """The factors that turn products of queries and keys into scores."""

    factor: gl.tensor
    """fp32, by which products are multiplied: the layer's scale; without SOFT_CAP times log2(e); of
    a tile, times the scale of its keys."""
    soft_cap: Value
    """fp32, bound of the scores; read with SOFT_CAP."""
    SOFT_CAP: gl.constexpr
    """bool, scores are bounded."""

    @gluon.jit
    def with_factor(self, factor):
        """Make the scaling of a tile, whose factor is ``factor``."""
        return Scaling(factor=factor, soft_cap=self.soft_cap, SOFT_CAP=self.SOFT_CAP)


@aggregate
class Shape:
    """Sizes and layouts of prefill: a tile of queries by tiles of keys."""

    GROUP: gl.constexpr
    """int, query heads of a KV head."""
    PACKED: gl.constexpr
    """int, query heads of a tile: row ``i`` is of head ``i % PACKED``."""
    WARP_GROUPS: gl.constexpr
    """int, warp groups that multiply, each 64 rows of a tile."""
    KV_TILE: gl.constexpr
    """int, tokens of a tile of keys."""
    WIDTH: gl.constexpr
    """int, columns of queries, keys and values in shared memory, a multiple of 64."""
    EXTRA: gl.constexpr
    """int, columns that queries and keys have beyond WIDTH: 0, 16, 32 or 64. Values have them where
    SIZE is more than WIDTH."""
    SIZE: gl.constexpr
    """int, columns of a head's values."""
    KIND: gl.constexpr
    """int, how the cache stores elements, as in ``attn/kernels/lang/stored.py``: above 0, as 8 bits
    that the kernel converts."""
    DTYPE: gl.constexpr
    """Type of queries and keys in shared memory."""
    VALUE: gl.constexpr
    """Type of values in shared memory, and of weights."""
    SCORES: gl.constexpr
    """Layout of scores ``[64, KV_TILE]``."""
    OUTPUT: gl.constexpr
    """Layout of outputs ``[64, WIDTH]``."""
    HELD: gl.constexpr
    """bool, the softmax is computed under the output's product."""
    REFERRED: gl.constexpr
    """bool, weights are relative to a reference that seldom changes, and not to the maximum so far:
    a row of more than 128 columns is then seldom multiplied by what its past is worth."""
    EXTRA_OUTPUT: gl.constexpr
    """Layout of outputs ``[64, EXTRA]``; not read unless values have EXTRA columns."""
    ASCENDING: gl.constexpr
    """bool, keys are walked from the first visible one up; else from the last one down."""


@aggregate
class Segments:
    """How prefill cuts keys so that its rows have the split-KV kernel's bits (batch invariance).

    Every warp group of every program has a slot of 64 rows for its state over whole segment groups;
    and with STORED, behind those of all, a slot for outputs over the segments of one group. A
    thread reads there the outputs that it has written itself.
    """

    states_ptr: Value
    """``[slots, 64, WIDTH + EXTRA]`` fp32, outputs; read with PER_GROUP or STORED."""
    sums_ptr: Value
    """``[slots, 2, 64]`` fp32, maxima and sums; read with PER_GROUP."""
    UNIT: gl.constexpr
    """int, positions of :mod:`builders.splitkv.segments` that a tile of keys spans; 0 where keys
    are one run."""
    PER_GROUP: gl.constexpr
    """int, segments of a segment group; 0 where every request has one group."""
    SUMS: gl.constexpr
    """int, columns of which sums of weights are kept apart until a segment ends."""
    STORED: gl.constexpr
    """bool, outputs over the segments of a group wait in memory: registers have no room."""


@aggregate
class Folded:
    """The state of a warp group's rows over closed segments of a segment group."""

    m: gl.tensor
    """``[64]`` fp32, their maxima, in units of log 2."""
    l: gl.tensor
    """``[64]`` fp32, their sums of weights."""
    acc: gl.tensor
    """``[64, WIDTH]`` fp32, their outputs; not read with STORED."""
    rest: gl.tensor
    """``[64, EXTRA]`` fp32, their further outputs; not read unless values have EXTRA columns."""


@aggregate
class KeyRun:
    """A run of tiles of keys within one segment group."""

    low: Value
    """int32, the first tile."""
    high: Value
    """int32, the tile after the last."""
    end: Value
    """int32, the tile after the last that the queries see."""
    follows: Value
    """bool, whether there are runs of the same queries before this one."""


@aggregate
class QueryRing:
    """Stages in shared memory, through which tiles of queries come, and which tile each is."""

    desc: tma.tensor_descriptor
    """Descriptor of queries ``[T, H, columns]`` in boxes ``[64 / PACKED, PACKED, 64]``."""
    extra_desc: Descriptor
    """Descriptor of the same queries in boxes of EXTRA columns; not read without EXTRA."""
    boxes: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS * WIDTH / 64, 64 / PACKED, PACKED, 64]``, queries as TMA writes
    them."""
    extra_boxes: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS, 64 / PACKED, PACKED, EXTRA]``, columns of queries behind WIDTH as
    TMA writes them; not read without EXTRA."""
    tiles: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS, 64, WIDTH]``, the same queries as products read them."""
    extra_tiles: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS, 64, EXTRA]``, the same columns as products read them."""
    records: gl.shared_memory_descriptor
    """``[STAGES * RECORD, 1]`` int32, the numbers of each stage's :class:`QueryTile`."""
    full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: queries and numbers are there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: they have been read."""
    STAGES: gl.constexpr
    """int, tiles of queries that are under way."""

    @gluon.jit
    def wait_full(self, turn):
        """Wait until the tile of that turn is there."""
        mbarrier.wait(self.full.index(turn % self.STAGES), (turn // self.STAGES) & 1)

    @gluon.jit
    def wait_empty(self, turn):
        """Wait until there is room for the tile of that turn."""
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(self.empty.index(turn % self.STAGES), ((turn // self.STAGES) & 1) ^ 1)


@aggregate
class TileRing:
    """Stages in shared memory, through which tiles of keys come, or tiles of values."""

    extra_desc: Descriptor
    """Descriptor of the rows in boxes ``[1, RUN, 1, EXTRA]``; not read without EXTRA."""
    boxes: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, 1, RUN, 1, 64]``, rows as TMA writes them."""
    extra_boxes: gl.shared_memory_descriptor
    """``[STAGES * KV_TILE / RUN, 1, RUN, 1, EXTRA]``, further columns as TMA writes them; not read
    without EXTRA."""
    tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, columns]``, the same rows as products read them."""
    extra_tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, EXTRA]``, the further columns as products read them."""
    runs: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, RUN, 64]``, the same values by runs; not read of keys."""
    extra_runs: gl.shared_memory_descriptor
    """``[STAGES * KV_TILE / RUN, RUN, EXTRA]``, further columns of values by runs; not read of
    keys."""
    words: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, columns / 2]`` int32, the same rows in pairs, as converters write them;
    not written where TMA writes boxes."""
    full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the tile is there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: it has been read."""
    STAGES: gl.constexpr
    """int, tiles that are under way."""
    HALVES: gl.constexpr
    """int, boxes of 64 columns side by side, without EXTRA ones."""
    EXTRA: gl.constexpr
    """int, columns beyond them: 0 for values."""
    KV_TILE: gl.constexpr
    """int, tokens of a tile."""
    RUN: gl.constexpr
    """int, tokens of a box: they lie in one page."""
    BY_THREAD: gl.constexpr
    """bool, each thread of a warp group says that it has read a tile; else one thread says so for
    all, behind a barrier of the group."""

    @gluon.jit
    def stage(self, turn):
        """The stage of a turn, int32. A turn without a sign takes fewer instructions."""
        return gl.to_tensor(turn % self.STAGES).to(gl.int32)

    @gluon.jit
    def parity(self, turn):
        """The parity of a turn's phase of its stage's barriers, int32."""
        return gl.to_tensor((turn // self.STAGES) & 1).to(gl.int32)

    @gluon.jit
    def wait_full(self, turn, there_is=True):
        """Wait until the tile of that turn is there, if there is one."""
        mbarrier.wait(self.full.index(self.stage(turn)), self.parity(turn), pred=there_is)

    @gluon.jit
    def wait_empty(self, turn):
        """Wait until there is room for the tile of that turn."""
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(self.empty.index(self.stage(turn)), self.parity(turn) ^ 1)

    @gluon.jit
    def give_back(self, turn, there_is=True):
        """Say that the tile of that turn has been read, if there is one."""
        if self.BY_THREAD:
            if there_is:
                # No gather is under way, so the thread arrives at once.
                arrive_behind_gathers(self.empty.index(self.stage(turn)), increment_count=False)
        else:
            mbarrier.arrive(self.empty.index(self.stage(turn)), count=1, pred=there_is)


@aggregate
class Rings:
    """The rings of keys and of values, which turn together."""

    keys: TileRing
    """The ring of keys."""
    values: TileRing
    """The ring of values. With JOINT its ``empty`` are the barriers of the ring of keys."""
    cleared: gl.shared_memory_descriptor
    """``[1]`` mbarrier: the values behind a request's last token have been cleared."""
    JOINT: gl.constexpr
    """bool, keys of a turn and the values of the turn before are given back by one barrier."""


@aggregate
class Schedule:
    """The tiles of a step: each is of one request's tokens, for PACKED of its query heads."""

    tile_starts_ptr: gl.tensor
    """``[R + 1]`` int32, tiles of tokens before each request."""
    num_tiles_ptr: gl.tensor
    """``[1]`` int32, tiles of tokens."""
    counter_ptr: gl.tensor
    """``[1]`` int32, how often programs took another tile; 0 between launches."""
    query_start_ptr: gl.tensor
    """``[R + 1]`` int32, where each request's tokens begin."""
    seq_lens_ptr: gl.tensor
    """``[R]`` int32, tokens of each request's keys."""
    num_reqs: Value
    """int32, requests."""
    programs: Value
    """int32, programs of the launch."""
    HEADS: gl.constexpr
    """int, tiles of query heads."""


@aggregate
class QueryTile:
    """A tile of queries, and which tiles of keys they see."""

    head: Value
    """int32, tile of query heads."""
    req: Value
    """int32, request."""
    row: Value
    """int32, first row of the query."""
    left: Value
    """int32, tokens of the request from there on."""
    position: Value
    """int32, position of the first token in the request."""
    kv_len: Value
    """int32, tokens of the request's keys."""
    causal: Value
    """int32, not 0 where the request is causal."""
    start: Value
    """int32, the first key that a query sees; None where nobody asks."""
    low: Value
    """int32, the first tile of keys."""
    high: Value
    """int32, the tile of keys after the last; 0 where there is no tile of queries."""


@aggregate
class Rows:
    """A warp group's query rows of a tile, and what is the same for all tiles of keys."""

    first: Value
    """int32, position of the first query."""
    last: Value
    """int32, position of the last query."""
    query: gl.tensor
    """``[64]`` int32, position of each row's query."""
    reach: gl.tensor
    """``[64]`` int32, last key that causality and the request's length leave to each row."""
    range_first: gl.tensor
    """``[64]`` int32, first key of each row's own ranges."""
    range_last: gl.tensor
    """``[64]`` int32, last key of each row's own ranges."""
