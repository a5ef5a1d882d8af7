"""Groups of arguments that kernels in Gluon hand from one device function to the next.

A launch has flat arguments. A kernel makes the structures from them in its first lines, and a field
costs nothing over an argument: PTX is the same. A field that is written in capitals is a constexpr.

Triton reads the types of fields from the annotations of a class: they must not be postponed here.
"""

from typing import TypeAlias

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attn.kernels.lang.compat import aggregate
from attn.kernels.lang.masks import last_visible, masked, own_range, seen_by_all
from builders.splitkv.device.segments import first_visible

Value: TypeAlias = gl.tensor | gl.constexpr
"""A tensor; or a constexpr, where a launch gives None or a caller gives a plain number."""
Descriptor: TypeAlias = tma.tensor_descriptor | gl.constexpr
"""A tensor descriptor; or a constexpr, where a launch gives None: rows are read by pointers."""


@aggregate
class Mask:
    """Which keys a query sees, and where a request's own rules for that are."""

    causal_ptr: Value
    """``[R]`` bool, whether each request is causal; read where CAUSAL is 2."""
    ranges_ptr: Value
    """``[R, num_ranges, 2]`` int32, first and last position of ranges whose queries see each other,
    first above last where there is none; read with RANGES."""
    num_ranges: Value
    """int32, ranges of a request."""
    window: Value
    """int32, tokens: keys that a query sees, its own included; read with WINDOW or CLAMP."""
    chunk: Value
    """int32, tokens of a chunk; read with CHUNK."""
    lookback: Value
    """int32, chunks before its own that a query sees."""
    CAUSAL: gl.constexpr
    """0: no query is causal; 1: every one is; 2: as ``causal_ptr`` says."""
    WINDOW: gl.constexpr
    """bool, there is a window."""
    CHUNK: gl.constexpr
    """bool, there are chunks."""
    RANGES: gl.constexpr
    """bool, there are ranges."""
    CLAMP: gl.constexpr
    """bool, ranges end at the window."""

    @gluon.jit
    def ranges_of(self, req):
        """Pointer to the ranges of request ``req``."""
        ranges = self.ranges_ptr
        if self.RANGES:
            ranges = ranges + req.to(gl.int64) * self.num_ranges * 2
        return ranges

    @gluon.jit
    def keys_seen(self, req, first, last, kv_len):
        """What a request's queries from position ``first`` to ``last`` see: whether it is causal,
        and keys ``[start, stop)``.
        """
        causal = 1
        if self.CAUSAL == 2:
            causal = gl.load(self.causal_ptr + req).to(gl.int32)
        ranges = self.ranges_of(req)
        start = first_visible(
            first, last, self.window, self.chunk, self.lookback, ranges, self.num_ranges,
            self.WINDOW or self.CHUNK, self.CHUNK, self.RANGES, self.CLAMP,
        )  # fmt: skip
        stop = last_visible(
            last, kv_len, causal, self.window, ranges, self.num_ranges, first, self.CAUSAL,
            self.WINDOW, self.CHUNK, False, self.RANGES,
        )  # fmt: skip
        return causal, start, stop

    @gluon.jit
    def seen_by_all(self, first, last, kv_len, causal):
        """Keys ``[low, high)`` that every query from position ``first`` to ``last`` sees, ranges
        left out.
        """
        return seen_by_all(
            first, last, kv_len, causal, self.window, self.chunk, self.lookback, self.CAUSAL,
            self.WINDOW, self.CHUNK, False,
        )  # fmt: skip

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

        ``reach`` ``[M]`` is the last key that causality and the request's length leave to a query,
        ``range_first`` and ``range_last`` ``[M]`` are those of :meth:`own_range`.
        """
        return masked(
            scores, query, key, reach, kv_len, self.window, self.chunk, self.lookback, 0,
            range_first, range_last, self.CAUSAL, self.WINDOW, self.CHUNK, False, self.RANGES,
            self.CLAMP,
        )  # fmt: skip


@gluon.jit
def causal_mask():
    """The mask of causal attention, without windows, chunks and ranges."""
    return Mask(
        causal_ptr=None, ranges_ptr=None, num_ranges=0, window=0, chunk=1, lookback=0, CAUSAL=1,
        WINDOW=False, CHUNK=False, RANGES=False, CLAMP=False,
    )  # fmt: skip


@aggregate
class Plan:
    """The plan of split KV, and the scratch that its programs share; see ``SplitPlan``.

    A work item is a row of the plan in one head loop.
    """

    rows_ptr: gl.tensor
    """``[max rows, ROW_FIELDS]`` int32, the rows of the plan."""
    total_ptr: gl.tensor
    """``[2]`` int32: rows of the step, and the KV tiles that the groups share."""
    starts_ptr: gl.tensor
    """``[groups + 1, 2]`` int32: work item and segment at which each group starts."""
    shares_ptr: gl.tensor
    """``[groups, SHARE_FIELDS]`` int32, what each group of programs takes."""
    counters_ptr: gl.tensor
    """int32 zeros between launches, what has arrived: ``[groups, HEADS]`` of segments, then
    ``[groups, HEADS, HEAD_LOOPS]`` of segment groups."""
    states_ptr: gl.tensor
    """fp32 outputs of states, ``[slots, USED, SIZE]`` of the tile."""
    sums_ptr: gl.tensor
    """fp32 ``[slots, 2, USED]``, maxima and sums of states."""
    groups: Value
    """int32, groups of programs."""
    HEADS: gl.constexpr
    """int, programs of a group, one for each tile of heads that it takes at a time."""
    HEAD_LOOPS: gl.constexpr
    """int, times that the groups walk the keys, for all tiles of heads."""
    HEAD_TILES: gl.constexpr
    """int, tiles of the query heads that share a KV head."""
    SLOTS: gl.constexpr
    """int, states of segments that a program lends."""
    BUNDLES: gl.constexpr
    """int, most segment groups of a row's keys."""
    AREA: gl.constexpr
    """int, states that a program has room for."""
    SEGMENT_UNIT: gl.constexpr
    """int, tokens of a unit in which segments are measured: a tile of keys."""


@aggregate
class Out:
    """Where results go, and what they are multiplied by."""

    out_ptr: gl.tensor
    """``[T, H, SIZE]``, 16-bit; with FP8_OUT e4m3 as uint8."""
    lse_ptr: Value
    """``[T, H]`` fp32; written with LSE."""
    sinks_ptr: Value
    """``[H]``, logits of the heads' sinks; read with SINKS."""
    output_scale_ptr: Value
    """One fp32 by which outputs are divided; read with FP8_OUT."""
    out_token: Value
    """int32, elements from a token's output to the next one's."""
    out_head: Value
    """int32, elements from a head's output to the next one's."""
    lse_token: Value
    """int32, elements from a token's LSE to the next one's."""
    SINKS: gl.constexpr
    """bool, heads have sinks."""
    FP8_OUT: gl.constexpr
    """bool, outputs are e4m3."""
    LSE: gl.constexpr
    """bool, the LSE is asked for."""


@aggregate
class Query:
    """The step's queries, and what makes scores of their products with keys."""

    query_ptr: gl.tensor
    """``[T, H, SIZE]``, 16-bit."""
    query_token: Value
    """int32, elements from a token's query to the next one's."""
    query_head: Value
    """int32, elements from a head's query to the next one's."""
    factor: gl.tensor
    """fp32, by which products are multiplied: the layer's scale; without SOFT_CAP times log2(e)."""
    soft_cap: Value
    """fp32, bound of the scores; read with SOFT_CAP."""
    SOFT_CAP: gl.constexpr
    """bool, scores are bounded."""


@aggregate
class Cache:
    """The paged KV cache of a layer."""

    k_desc: Descriptor
    """Descriptor of keys ``[N, BLOCK_SIZE, Hk, columns]`` in boxes ``[1, RUN, 1, 64]``; of dense
    keys, which have no pages, ``[1, T, Hk, columns]``."""
    v_desc: Descriptor
    """The same of values."""
    table_ptr: gl.tensor
    """``[R, table_row]`` int32, pages of the requests."""
    table_row: Value
    """int32, elements of a row of the table."""
    k_scale_ptr: Value
    """``[1]`` or ``[Hk]`` fp32, by which keys of e4m3 are multiplied; else None."""
    v_scale_ptr: Value
    """The same of values."""
    scale_head: Value
    """int32, elements from a head's scale to the next one's: 0 where all heads have one."""
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
    """Stages in shared memory, through which tiles of keys and values come."""

    k_boxes: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, 1, RUN, 1, 64]``, keys as TMA writes them."""
    v_boxes: gl.shared_memory_descriptor
    """The same of values."""
    k_tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, SIZE]``, the same keys as products read them."""
    v_tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, columns]``, the same values."""
    v_runs: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, RUN, 64]``, the same values by runs."""
    k_full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the keys are there."""
    v_full: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: the values are there."""
    empty: gl.shared_memory_descriptor
    """``[STAGES, 1]`` mbarriers: both have been read."""
    STAGES: gl.constexpr
    """int, tiles that are under way."""
    HALVES: gl.constexpr
    """int, boxes of 64 columns side by side."""
    KV_TILE: gl.constexpr
    """int, tokens of a tile."""
    RUN: gl.constexpr
    """int, tokens of a box: they lie in one page."""

    @gluon.jit
    def stage_of(self, turn):
        """Stage of the tile number ``turn``, and the parity of the phase that it is."""
        return turn % self.STAGES, (turn // self.STAGES) & 1


@aggregate
class Mailbox:
    """Shared memory in which the second consumer hands a state to the first."""

    acc: gl.shared_memory_descriptor
    """``[1, ROWS, SIZE]`` fp32, the output."""
    top: gl.shared_memory_descriptor
    """``[ROWS]`` fp32, maxima."""
    sums: gl.shared_memory_descriptor
    """``[ROWS]`` fp32."""
    sent: gl.shared_memory_descriptor
    """mbarrier: a state is there."""
    taken: gl.shared_memory_descriptor
    """mbarrier: it has been read."""


@aggregate
class Room:
    """Shared memory of a consumer."""

    exchange: gl.shared_memory_descriptor
    """``[16, 4]`` fp32, maxima of rows by warp."""
    turned: gl.shared_memory_descriptor
    """``[16, KV_TILE]``, weights on their way to being an operand."""
    queries: gl.shared_memory_descriptor
    """``[ROWS, SIZE]``, the queries where products read them from here."""
    mailbox: Mailbox
    """Shared by both consumers."""

    @gluon.jit
    def of(self, PART: gl.constexpr):
        """One consumer's room; before, its own fields have a leading axis of consumers."""
        return Room(
            exchange=self.exchange.index(PART),
            turned=self.turned.index(PART),
            queries=self.queries.index(PART),
            mailbox=self.mailbox,
        )


@aggregate
class Tile:
    """Sizes of the tile at which a program works: query rows by tokens of the cache."""

    GROUP: gl.constexpr
    """int, query heads of a KV head."""
    TILE_HEADS: gl.constexpr
    """int, query heads of the tile: row ``i`` is of head ``i % TILE_HEADS``."""
    USED: gl.constexpr
    """int, rows that a query can have: TILE_HEADS times the tokens of a work item."""
    ROWS: gl.constexpr
    """int, rows of the products, 16 or 64."""
    SIZE: gl.constexpr
    """int, elements of a head."""
    DTYPE: gl.constexpr
    """Type of the products' operands."""
    E4M3: gl.constexpr
    """bool, the cache has e4m3, read as int16 words of two; else it has DTYPE."""
    SCORES: gl.constexpr
    """Layout of scores ``[ROWS, KV_TILE]``."""
    OUTPUT: gl.constexpr
    """Layout of what products add up to, ``[ROWS, SIZE]`` or a plane of its columns."""
    CONSUMERS: gl.constexpr
    """int, 1 or 2."""
    FINISH_ROWS: gl.constexpr
    """int, rows of stored states that are folded at a time."""
    FINISH_WIDTH: gl.constexpr
    """int, columns of stored states that are folded at a time."""


@aggregate
class Work:
    """A program's part of a work item: segments of one row's keys, for one tile of heads."""

    number: Value
    """int32, of the work item: row of the plan times HEAD_LOOPS, plus head loop."""
    lane: Value
    """int32, which program of its group this is."""
    fields: gl.tensor
    """Pointer to the row's ROW_FIELDS numbers."""
    begin: Value
    """int32, the first segment of the part, counted from the row's first."""
    end: Value
    """int32, the segment after its last."""
    req: Value
    """int32, request."""
    kv_len: Value
    """int32, tokens of the request's keys."""
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
    """int32, KV head."""
    in_group: Value
    """int32, the tile's first query head, counted from the KV head's first."""
    natural: Value
    """fp32, with E4M3 ``[ROWS]``: what products are multiplied by, the keys' scale in it."""
    v_factor: Value
    """fp32, by which outputs are multiplied: the scale of values."""


@aggregate
class Bounds:
    """Which keys a part's queries see, as far as it is the same for all tiles of keys."""

    range_first: gl.tensor
    """``[rows]`` int32, first key of the queries' own ranges."""
    range_last: gl.tensor
    """``[rows]`` int32, last key of the queries' own ranges."""
    all_low: Value
    """int32, the first key that all queries see."""
    all_high: Value
    """int32, the key after the last that all queries see."""


@aggregate
class State:
    """Attention over some keys: it can be folded with that over the keys that follow."""

    m: gl.tensor
    """``[ROWS]`` fp32, maxima of the scores, in units of log 2."""
    l: gl.tensor
    """``[ROWS]`` fp32, sums of the weights; during a segment ``[ROWS, threads]``, by thread."""
    acc: gl.tensor
    """``[ROWS, columns]`` fp32, sums of values times weights."""


@aggregate
class Cells:
    """Where a stored state's elements are, of the rows and columns that are folded at a time."""

    row: gl.tensor
    """``[FINISH_ROWS]`` int32."""
    cell: gl.tensor
    """``[FINISH_ROWS, FINISH_WIDTH]`` int32, places in an output of ``[USED, SIZE]``."""
    mine: gl.tensor
    """``[FINISH_ROWS]`` bool, rows that there are."""
    mask: gl.tensor
    """``[FINISH_ROWS, FINISH_WIDTH]`` bool, the same for each element."""


@aggregate
class Scaling:
    """What makes scores of products of queries and keys."""

    factor: gl.tensor
    """fp32, by which products are multiplied: the layer's scale; without SOFT_CAP times log2(e); of
    a tile, times the scale of its keys."""
    soft_cap: Value
    """fp32, bound of the scores; read with SOFT_CAP."""
    SOFT_CAP: gl.constexpr
    """bool, scores are bounded."""

    @gluon.jit
    def with_factor(self, factor):
        """The same with the factor of a tile."""
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
    """int, columns that queries and keys have beyond WIDTH, 0 or 64."""
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


@aggregate
class QueryRing:
    """Stages in shared memory, through which tiles of queries come, and which tile each is."""

    desc: tma.tensor_descriptor
    """Descriptor of queries ``[T, H, columns]`` in boxes ``[64 / PACKED, PACKED, 64]``."""
    boxes: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS * WIDTH / 64, 64 / PACKED, PACKED, 64]``, queries as TMA writes
    them."""
    extra_boxes: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS, 64 / PACKED, PACKED, 64]``, their EXTRA columns."""
    tiles: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS, 64, WIDTH]``, the same queries as products read them."""
    extra_tiles: gl.shared_memory_descriptor
    """``[STAGES * WARP_GROUPS, 64, 64]``, their EXTRA columns."""
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

    boxes: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, 1, RUN, 1, 64]``, rows as TMA writes them."""
    extra_boxes: gl.shared_memory_descriptor
    """``[STAGES * KV_TILE / RUN, 1, RUN, 1, 64]``, EXTRA columns of keys."""
    tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, columns]``, the same rows as products read them."""
    extra_tiles: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, 64]``, EXTRA columns of keys."""
    runs: gl.shared_memory_descriptor
    """``[STAGES * HALVES * KV_TILE / RUN, RUN, 64]``, the same values by runs; keys have none."""
    words: gl.shared_memory_descriptor
    """``[STAGES, KV_TILE, columns / 2]`` int32, the same rows as converters write them: pairs."""
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

    @gluon.jit
    def wait_full(self, turn, there_is=True):
        """Wait until the tile of that turn is there, if there is one."""
        mbarrier.wait(self.full.index(turn % self.STAGES), (turn // self.STAGES) & 1, pred=there_is)

    @gluon.jit
    def wait_empty(self, turn):
        """Wait until there is room for the tile of that turn."""
        # A fresh barrier lets parity 1 pass at once.
        mbarrier.wait(self.empty.index(turn % self.STAGES), ((turn // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def give_back(self, turn, there_is=True):
        """Say that the tile of that turn has been read, if there is one."""
        mbarrier.arrive(self.empty.index(turn % self.STAGES), count=1, pred=there_is)


@aggregate
class Rings:
    """The rings of keys and of values, which turn together."""

    keys: TileRing
    """Of keys."""
    values: TileRing
    """Of values. JOINT, its stages are empty when those of keys are, by the same barriers."""
    cleared: gl.shared_memory_descriptor
    """``[1]`` mbarriers: who clears the values behind a request's last has done so."""
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
    """``[1]`` int32, 0 between launches: how often a program took another tile."""
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
    """Query rows of a warp group, as far as tiles of keys share what is known of them."""

    first: Value
    """int32, position of the first."""
    last: Value
    """int32, position of the last."""
    query: gl.tensor
    """``[64]`` int32, position of each."""
    reach: gl.tensor
    """``[64]`` int32, last key that causality and the request's length leave to each."""
    range_first: gl.tensor
    """``[64]`` int32, first key of each one's own ranges."""
    range_last: gl.tensor
    """``[64]`` int32, last key of each one's own ranges."""
