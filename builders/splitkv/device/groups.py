"""Groups of arguments that device functions of the plan kernel hand to one another.

A launch has flat arguments, and the kernel makes the groups from them. A field costs no more than
an argument: the PTX is the same. A field in capitals is a constexpr.

Triton makes tensors of a tuple's constexprs where the tuple is assigned to a name. So a group with
a field in capitals is made among the arguments of a call, and device functions read its fields by
the parameter's name. A group of tensors alone may be assigned and returned. Triton 3.6.0 forgets
the fields of groups in a tuple, where they are made anew: ``Rows(*turns[k])``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl


class Batch(NamedTuple):
    """The step's requests, as the engine gives them."""

    seq_lens_ptr: tl.tensor
    """``[R]`` int32, KV length of each request."""
    query_start_ptr: tl.tensor
    """``[R + 1]`` int32, first token of each request, and the number of tokens."""
    num_reqs: tl.tensor
    """int32, number of requests."""
    max_kv_len: tl.tensor
    """int32, largest KV length that is planned; greater lengths are cut to it."""


class Requests(NamedTuple):
    """Requests in registers; the four tensors have one shape, an element per request."""

    begin: tl.tensor
    """int32, first token."""
    count: tl.tensor
    """int32, number of query tokens."""
    kv_len: tl.tensor
    """int32, KV length."""
    segment_groups: tl.tensor
    """int32, number of segment groups."""


class Mask(NamedTuple):
    """The rules that say which keys a query sees."""

    window: tl.tensor
    """int32, number of keys that a query sees, its own included; read with WINDOW."""
    chunk: tl.tensor
    """int32, tokens of a chunk; read with CHUNK."""
    lookback: tl.tensor
    """int32, number of chunks that a query sees before its own chunk."""
    WINDOW: tl.constexpr
    """bool, whether queries see a window only."""
    CHUNK: tl.constexpr
    """bool, whether queries see chunks only."""
    TRIM: tl.constexpr
    """bool, whether no query sees past itself."""


class Stripe(NamedTuple):
    """The keys of one rank, see :class:`builders.splitkv.stripe.Stripe`."""

    size: tl.tensor
    """int32, number of ranks."""
    rank: tl.tensor
    """int32, number of this rank."""
    interleave: tl.tensor
    """int32, consecutive tokens of a rank."""
    DCP: tl.constexpr
    """bool, whether keys are striped; if not, the other fields are not read."""


class Tile(NamedTuple):
    """Sizes of the work items and of the KV tiles in which their keys are read."""

    QUERY_TOKENS: tl.constexpr
    """int, most query tokens of a work item."""
    KV_TILE: tl.constexpr
    """int, keys of a KV tile."""
    SEGMENT_UNIT: tl.constexpr
    """int, length of a KV tile in the unit of segment starts."""
    SEGMENTS_PER_GROUP: tl.constexpr
    """int, segments of a segment group; 0 where a work item has all keys."""


class Rules(NamedTuple):
    """How requests are cut into work items."""

    mask: Mask
    """The keys that a query sees."""
    stripe: Stripe
    """The keys that this rank has."""
    tile: Tile
    """The sizes of work items."""


class Split(NamedTuple):
    """How groups of programs share the work items; :func:`plan_kernel` explains the switches."""

    HEAD_LOOPS: tl.constexpr
    """int, how many times the groups walk the keys until all tiles of heads are done."""
    DEPENDS_ON_BATCH: tl.constexpr
    """bool, whether a group starts at its share's first tile, and not at a segment."""
    LEAST: tl.constexpr
    """int, fewest tiles of a share; read with DEPENDS_ON_BATCH."""
    ROW_COST: tl.constexpr
    """int, tiles that the beginning of a work item counts as."""
    NUM_GROUPS: tl.constexpr
    """int, number of groups of programs."""


class Shares(NamedTuple):
    """The sizes of a step's shares, see :func:`builders.splitkv.device.work_items.sharing`.

    The fields are scalars, or tensors of one element for each line of threads.
    """

    cost: tl.tensor
    """int32, tiles that the beginning of a work item counts as in this step."""
    total: tl.tensor
    """int32, tiles of all head loops, costs included."""
    sharers: tl.tensor
    """int32, number of groups that get tiles."""
    shared: tl.tensor
    """int32, number of tiles that these groups share."""


class Plan(NamedTuple):
    """The tensors of the plan, all int32."""

    rows_ptr: tl.tensor
    """``[work items, ROW_FIELDS]``, the work items."""
    total_ptr: tl.tensor
    """``[2]``, the number of work items, and the tiles that the groups share."""
    starts_ptr: tl.tensor
    """``[NUM_GROUPS + 1, 2]``, work item and segment at which each group starts."""
    shares_ptr: tl.tensor
    """``[NUM_GROUPS, SHARE_FIELDS]``, the share of each group."""


class PrefillTiles(NamedTuple):
    """Where the prefill tiles of each request start, for two kernels."""

    starts_ptr: tl.tensor
    """``[max_reqs + 1]`` int32, first tile of each request for the portable prefill kernel."""
    hopper_starts_ptr: tl.tensor
    """``[max_reqs + 1]`` int32, first tile of each request for the Hopper prefill kernel."""
    max_reqs: tl.tensor
    """int32, most requests of a step."""
    decode_max: tl.tensor
    """int32, most query tokens of a request that has work items; longer queries have tiles."""
    TILE: tl.constexpr
    """int, query tokens of a tile of the portable kernel."""
    HOPPER_TILE: tl.constexpr
    """int, query tokens of a tile of the Hopper kernel; 0 where there is none."""
    MOST_REQS: tl.constexpr
    """int, ``max_reqs`` rounded up to a power of two."""


class Counts(NamedTuple):
    """Sums over requests that the plan of a slice of them needs: int32 scalars."""

    num_rows: tl.tensor
    """Work items of the step."""
    rows_before: tl.tensor
    """Work items of the requests before the slice."""
    total: tl.tensor
    """KV tiles of the step's work items."""
    tiles_before: tl.tensor
    """KV tiles of the requests before the slice."""
    largest: tl.tensor
    """Most KV tiles of a work item of the step."""


class Rows(NamedTuple):
    """Work items in registers, before their places are known; all int32 and of one shape."""

    req: tl.tensor
    """Request."""
    token: tl.tensor
    """First token."""
    tokens: tl.tensor
    """Number of tokens."""
    kv_len: tl.tensor
    """KV length of the request."""
    first: tl.tensor
    """Position of the first token."""
    first_tile: tl.tensor
    """First KV tile."""
    tiles: tl.tensor
    """Number of KV tiles; 0 where a thread has no work item."""
    segment_group: tl.tensor
    """Number of the segment group among the request's."""
    segment_groups: tl.tensor
    """Segment groups of the request."""
