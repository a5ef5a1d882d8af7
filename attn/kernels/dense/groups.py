"""Groups of arguments of the portable dense kernels; :mod:`attn.kernels.lang.groups` has more."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from attn.kernels.lang.groups import OptionalTensor


class Query(NamedTuple):
    """The step's queries, and the numbers that turn their products with keys into scores."""

    query_ptr: tl.tensor
    """``[T, H, K_SIZE]``."""
    slopes_ptr: OptionalTensor
    """``[H]``, slope of each head's position bias; read with ALIBI."""
    query_token: tl.tensor
    """int32, elements from a token's query to the next one's."""
    query_head: tl.tensor
    """int32, elements from a head's query to the next one's."""
    scale: tl.tensor
    """fp32, factor of the products."""
    soft_cap: tl.tensor
    """fp32, the bound of the scores; read with SOFT_CAP."""
    GUARD: tl.constexpr
    """bool, whether bf16 queries are multiplied in fp16."""
    SOFT_CAP: tl.constexpr
    """bool, whether scores are bounded."""
    ALIBI: tl.constexpr
    """int, the position bias: 0 (none), 1 (linear) or 2 (square root)."""
    SIMPLE: tl.constexpr
    """bool, whether scores are products times a factor of their row, and nothing else."""


class Cache(NamedTuple):
    """The KV cache of a layer; with BLOCK_SIZE 0, the keys and values of the step's own tokens.

    Strides count stored words. Rows are padded to a power of two columns.
    """

    key_ptr: tl.tensor
    """``[N, BLOCK_SIZE, Hk, words]``; with BLOCK_SIZE 0 ``[T, Hk, words]``."""
    value_ptr: tl.tensor
    """Values, which are shaped as the keys are."""
    k_inline_ptr: OptionalTensor
    """``[N, BLOCK_SIZE, Hk]``, factor of each key; read with INLINE."""
    v_inline_ptr: OptionalTensor
    """``[N, BLOCK_SIZE, Hk]``, factor of each value; read with INLINE."""
    k_scale_ptr: OptionalTensor
    """``[1]`` or ``[Hk]`` fp32, factor of keys; read with PER_TENSOR."""
    v_scale_ptr: OptionalTensor
    """``[1]`` or ``[Hk]`` fp32, factor of values; read with PER_TENSOR."""
    table_ptr: OptionalTensor
    """``[R, table_row]`` int32, pages of the requests."""
    table_row: tl.tensor
    """int32, elements of a row of the table."""
    k_block: tl.tensor
    """int32, words from a page of keys to the next one."""
    k_token: tl.tensor
    """int32, words from a token's keys to the next one's."""
    k_head: tl.tensor
    """int32, words from a head's keys to the next one's."""
    v_block: tl.tensor
    """int32, words from a page of values to the next one."""
    v_token: tl.tensor
    """int32, words from a token's values to the next one's."""
    v_head: tl.tensor
    """int32, words from a head's values to the next one's."""
    s_block: tl.tensor
    """int32, elements from the factors of a page to those of the next one."""
    s_token: tl.tensor
    """int32, elements from the factors of a token to those of the next one."""
    s_head: tl.tensor
    """int32, elements from the factors of a head to those of the next one."""
    scale_head: tl.tensor
    """int32, elements from a head's scale to the next one's: 0 where all heads share one scale."""
    BLOCK_SIZE: tl.constexpr
    """int, tokens of a page; 0 where keys have no pages and lie one after another."""
    SAME_ROWS: tl.constexpr
    """bool, whether values have the strides of keys."""
    K_SIZE: tl.constexpr
    """int, elements of a key."""
    K_WIDTH: tl.constexpr
    """int, columns of a plane of keys, padding included."""
    K_USED: tl.constexpr
    """int, columns of a plane of keys."""
    V_WIDTH: tl.constexpr
    """int, columns of a plane of values, padding included."""
    V_USED: tl.constexpr
    """int, columns of a plane of values."""
    KIND: tl.constexpr
    """int, how elements are stored: a kind of :mod:`attn.kernels.lang.stored`."""
    PLANES: tl.constexpr
    """int, planes of a stored word: 1, 2 or 4."""
    DECODE: tl.constexpr
    """int, how words are decoded: a constant of :mod:`attn.kernels.lang.stored`."""
    INLINE: tl.constexpr
    """bool, whether each key and each value has a factor."""
    PER_TENSOR: tl.constexpr
    """bool, whether all keys of a head share a factor, and all values."""
    ALIGN: tl.constexpr
    """int, words that all strides are a multiple of."""


class Tile(NamedTuple):
    """The tile of query rows by keys that a program computes at a time."""

    GROUP: tl.constexpr
    """int, query heads of a KV head."""
    TILE_HEADS: tl.constexpr
    """int, query heads of the tile: row ``i`` belongs to head ``i % TILE_HEADS``."""
    HEAD_TILES: tl.constexpr
    """int, tiles into which the query heads of one KV head are cut."""
    ROWS: tl.constexpr
    """int, query rows of the tile, padding included."""
    KV_TILE: tl.constexpr
    """int, tokens of a tile of keys."""
    COMPUTE: tl.constexpr
    """Type of the products' operands."""
    STAGES: tl.constexpr
    """int, tiles of keys that are under way."""
    REST: tl.constexpr = 0
    """int, columns of keys beyond K_WIDTH."""
    SUMS: tl.constexpr = 0
    """int, columns of which sums of weights are kept apart until a segment ends, so that sums have
    the same bits in tiles of any number of rows (batch invariance); 0 where they need not."""
    UNIT: tl.constexpr = 0
    """int, positions of :mod:`builders.splitkv.segments` that a tile of keys of the prefill kernel
    spans, where its states are folded segment by segment (batch invariance); 0 where keys are one
    run."""
    PER_GROUP: tl.constexpr = 0
    """int, segments of a segment group; 0 where every request has one group. Read with UNIT."""
    STORED: tl.constexpr = False
    """bool, whether outputs over the segments before wait in the program's second slot (with UNIT):
    registers have no room for two states of wide heads."""


class Queries(NamedTuple):
    """A tile of query rows in registers."""

    q0: tl.tensor
    """``[ROWS, K_WIDTH]``, the elements that the first plane of keys is multiplied with."""
    q1: tl.tensor
    """``[ROWS, K_WIDTH]``, for the second plane; with REST ``[ROWS, REST]``, for more columns."""
    q2: tl.tensor
    """``[ROWS, K_WIDTH]``, for the third plane."""
    q3: tl.tensor
    """``[ROWS, K_WIDTH]``, for the fourth plane."""
    position: tl.tensor
    """``[ROWS]`` int32, position of each query in its request."""
    scale: tl.tensor
    """``[ROWS]`` fp32, factor of each row's products; it includes log2(e) without SOFT_CAP."""
    slope: tl.tensor
    """``[ROWS]`` fp32, slope of each row's position bias; read with ALIBI."""


class Keys(NamedTuple):
    """The keys of a request for one KV head, and which of them a tile of query rows sees."""

    table_ptr: OptionalTensor
    """``[pages]`` int32, the request's pages; read where the cache has pages."""
    ranges_ptr: OptionalTensor
    """``[num_ranges, 2]`` int32, the request's ranges; read with RANGES."""
    kv_len: tl.tensor
    """int32, number of keys. Slots from there on are not read."""
    causal: tl.tensor
    """int32, not 0 where the request is causal."""
    prefix: tl.tensor
    """int32, number of first keys that all queries see; 0 without RSWA."""
    safe_low: tl.tensor
    """int32, the first slot that may be read."""
    hole: tl.tensor
    """int32, with RSWA: slots below this one may be read too."""
    k_base: tl.tensor
    """int64, offset of the first key."""
    v_base: tl.tensor
    """int64, offset of the first value."""
    s_base: tl.tensor
    """int64, offset of the first key's factors."""


class Run(NamedTuple):
    """A run of tiles of keys."""

    low: tl.tensor
    """int32, the first tile."""
    high: tl.tensor
    """int32, the tile after the last."""
    full_low: tl.tensor
    """int32, the first tile of which every row sees all keys."""
    full_high: tl.tensor
    """int32, the tile after the last of which every row sees all keys."""
    begin: OptionalTensor = None
    """int32, the first tile of the segment group that the run is a part of; read where states are
    folded segment by segment in the prefill kernel."""


class Slots(NamedTuple):
    """Where the states of a run's segments go."""

    segment: tl.tensor
    """int32, the run's first segment."""
    slot: tl.tensor
    """int32, the state slot of segment 0: segment ``s`` has slot ``slot + s``."""
    stores: tl.tensor
    """bool, whether states are stored in slots; if not, they are folded in registers."""
