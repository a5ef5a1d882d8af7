"""Groups of arguments of the portable latent kernels; :mod:`attn.kernels.lang.groups` has more."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from attn.kernels.lang.groups import OptionalTensor


class Query(NamedTuple):
    """The step's queries, and the numbers that turn their products with keys into scores."""

    query_ptr: tl.tensor
    """``[T, NUM_HEADS, SIZE]``, the absorbed part of queries."""
    rotary_ptr: tl.tensor
    """``[T, NUM_HEADS, ROPE_SIZE]``, the rotary part of queries."""
    query_token: tl.tensor
    """int32, elements from a token's absorbed part to the next one's."""
    query_head: tl.tensor
    """int32, elements from a head's absorbed part to the next one's."""
    rotary_token: tl.tensor
    """int32, elements from a token's rotary part to the next one's."""
    rotary_head: tl.tensor
    """int32, elements from a head's rotary part to the next one's."""
    scale: tl.tensor
    """fp32, factor of the products."""
    window: tl.tensor
    """int32, number of keys that a query sees, its own included; read with WINDOW."""
    WINDOW: tl.constexpr
    """bool, whether queries see a window only."""
    SIMPLE: tl.constexpr
    """bool, whether the maxima of a tile are those of unscaled scores."""


class Cache(NamedTuple):
    """The latent cache of a layer.

    Its rows have a latent and a rotary part, both with the same strides, which count stored words.
    In registers the parts are padded to a power of two columns.
    """

    latent_ptr: tl.tensor
    """``[N, BLOCK_SIZE, words]``, latent parts."""
    rope_ptr: tl.tensor
    """``[N, BLOCK_SIZE, words]``, rotary parts."""
    scale_ptr: OptionalTensor
    """One fp32, the factor of all elements; read where KIND is not 0."""
    table_ptr: tl.tensor
    """``[R, table_row]`` int32, pages of the requests."""
    table_row: tl.tensor
    """int32, elements of a row of the table."""
    block: tl.tensor
    """int32, words from a page to the next one."""
    stride: tl.tensor
    """int32, words from a token to the next one of its page."""
    BLOCK_SIZE: tl.constexpr
    """int, tokens of a page."""
    RUN: tl.constexpr
    """int, tokens of a tile that lie in one page: all of them, or a power of two."""
    SIZE: tl.constexpr
    """int, elements of a latent part."""
    WIDTH: tl.constexpr
    """int, columns of a plane of latent parts, padding included."""
    USED: tl.constexpr
    """int, columns of a plane of latent parts."""
    ROPE_SIZE: tl.constexpr
    """int, elements of a rotary part."""
    ROPE_WIDTH: tl.constexpr
    """int, columns of a plane of rotary parts, padding included."""
    ROPE_USED: tl.constexpr
    """int, columns of a plane of rotary parts."""
    KIND: tl.constexpr
    """int, how elements are stored: a kind of :mod:`attn.kernels.lang.stored`."""
    PLANES: tl.constexpr
    """int, planes of a stored word: 1 or 2."""
    DECODE: tl.constexpr
    """int, how words are decoded: a constant of :mod:`attn.kernels.lang.stored`."""
    ALIGN: tl.constexpr
    """int, words that all strides are a multiple of."""


class Tile(NamedTuple):
    """The tile of query rows by keys that a program computes at a time."""

    NUM_HEADS: tl.constexpr
    """int, query heads."""
    TILE_HEADS: tl.constexpr
    """int, query heads of the tile: row ``i`` belongs to head ``i % TILE_HEADS``."""
    ROWS: tl.constexpr
    """int, query rows of the tile, padding included."""
    USED: tl.constexpr
    """int, rows that can hold a query: TILE_HEADS times the most tokens of a work item."""
    KV_TILE: tl.constexpr
    """int, tokens of a tile of keys."""
    COMPUTE: tl.constexpr
    """Type of the products' operands."""
    SPARE: tl.constexpr
    """int, state slots of a program for segments that wait to be folded."""
    STAGES: tl.constexpr
    """int, tiles of keys that are under way."""


class Program(NamedTuple):
    """A program, and its share of the plan."""

    pid: tl.tensor
    """int32, number of the program."""
    lane: tl.tensor
    """int32, number of the program in its group."""
    share: tl.tensor
    """Pointer to the SHARE_FIELDS numbers of the share of its group."""


class Queries(NamedTuple):
    """A tile of query rows in registers."""

    q0: tl.tensor
    """``[ROWS, WIDTH]``, what the first plane of latent parts is multiplied with."""
    q1: tl.tensor
    """``[ROWS, WIDTH]``, for the second plane; ``q0`` where there is none."""
    r0: tl.tensor
    """``[ROWS, ROPE_WIDTH]``, what the first plane of rotary parts is multiplied with."""
    r1: tl.tensor
    """``[ROWS, ROPE_WIDTH]``, for the second plane; ``r0`` where there is none."""
    position: tl.tensor
    """``[ROWS]`` int32, position of each query in its request."""
    limit: tl.tensor
    """``[ROWS]`` int32, the last key that each query sees."""
    scale: tl.tensor
    """fp32, factor of the products; it includes log2(e) and the cache's factor."""


class Keys(NamedTuple):
    """The keys of a request."""

    table_ptr: tl.tensor
    """``[pages]`` int32, the request's pages."""
    kv_len: tl.tensor
    """int32, number of keys. Slots from there on are not read."""
    floor: tl.tensor
    """int32, the first slot that is read."""


class Item(NamedTuple):
    """A work item: query tokens of one request."""

    req: tl.tensor
    """int32, number of the request."""
    token: tl.tensor
    """int32, the first token in the step."""
    tokens: tl.tensor
    """int32, number of tokens."""
    kv_len: tl.tensor
    """int32, number of the request's keys."""
    first: tl.tensor
    """int32, position of the first token in its request."""


class Segments(NamedTuple):
    """A program's part of a work item."""

    begin: tl.tensor
    """int32, the first segment of the part, counted within the item."""
    end: tl.tensor
    """int32, the segment after the part's last, counted within the item."""
    first: tl.tensor
    """int32, the item's first segment, counted from the request's first key."""
    parts: tl.tensor
    """int32, number of segments of the item."""
    slots: tl.tensor
    """int32, the first of the state slots that are lent to the item."""
