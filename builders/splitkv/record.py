"""The records of a step's plan, and the layout of the plan's numbers on the device.

A plan tells the split-KV kernel and the prefill kernel which program attends which keys of which
request. A *work item* (``row`` in names) is a tile of query tokens of one request over one *segment
group* of its keys; its keys may be cut between programs where segments begin, see
:mod:`builders.splitkv.segments`. Programs of a *group* walk the same keys for different heads. A
group's *share* is a run of consecutive tiles of keys, which may end in the middle of a work item.

:mod:`builders.splitkv.planner` fills the plan; the launchers of :mod:`attn.kernels` read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from builders.launch.pointers import Pointers
from builders.splitkv.stripe import Stripe
from builders.splitkv.tiles import (
    HopperDecodeTile,
    PrefillTile,
    SplitTile,
)

SHORT_QUERY = 16
"""Most query tokens of a request that the split-KV kernel takes, verifies apart; see
:func:`longest_short_query`."""
_WALKS = 64
"""Most times that all programs walk a request's keys before the request goes to the prefill kernel.

This is about half of the number of walks that take as long as one program of the prefill kernel
takes for the request, reckoned from an H200's rates of both kernels (docs/notebook/prefill.md)."""
SPARE_STATES = 4
"""State slots that a program of the latent kernel has for itself: for what it has folded so far,
and for the segments that it folds next."""
WASTE = 24
"""At most one in ``WASTE`` programs may idle so that the others get whole work items, or equal
parts of one."""
MOST_SHARED = 1 << 30
"""Most KV tiles for which whole work items, or equal parts of one, are tried.

The bound holds for the tiles of a step, and for the tiles of as many work items as there are
groups: twice as many still fit 32 bits. Beyond it, shares are equal numbers of tiles."""
ONE_WARP = 32
"""Threads of a warp. Every warp of the plan kernel can hold so many requests and work items, one a
thread, and plan them without a barrier."""
SLICE = ONE_WARP // 2 - 1
"""Requests of a program of the plan kernel where there are several. The next thread has the request
behind them. So few mostly have no more work items than a warp has threads, though keys are cut into
segment groups."""
ROW_FIELDS = 12
"""int32 numbers per work item.

In this order: request, first token, tokens, KV length, first position, first KV tile, KV tiles,
place of the first tile among all tiles of the step, first segment, segments, segment group, segment
groups of the tokens' keys. Work items of the same tokens follow one another."""
SHARE_FIELDS = 4 + ROW_FIELDS
"""int32 numbers per group of programs.

In this order: work item x head loop where the group starts, segment where it starts, both numbers
of the next group, and a copy of the work item where it starts. Thanks to the copy a program begins
with one load, not with two that depend on each other."""

PLAN_POINTERS = (
    "rows_ptr",
    "total_ptr",
    "starts_ptr",
    "shares_ptr",
    "counters_ptr",
    "states_ptr",
    "sums_ptr",
)
"""Names of a kernel's arguments for the tensors of a :class:`SplitPlan`, in the order of its
fields."""
TILE_POINTERS = ("tile_starts_ptr", "num_tiles_ptr", "counter_ptr")
"""Names of a kernel's arguments for the tensors of a :class:`HopperPlan`, in the order of its
fields."""


@dataclass(frozen=True)
class SplitLimits:
    """The limits of a step for which a plan's buffers are sized."""

    max_num_seqs: int
    """Most requests of a step."""
    max_num_tokens: int
    """Most tokens of a step."""
    max_kv_len: int
    """Most keys of a request."""
    window: int | None
    """Most keys from the first to the last that one query sees; None for all."""


@dataclass(frozen=True)
class VisibleKeys:
    """Which of a request's keys a step's queries may see, causality apart.

    All layers that share a plan see the same keys.
    """

    window: int | None = None
    """Keys that a query sees, itself included; None for all."""
    chunk: int | None = None
    """Tokens of a chunk of chunked local attention, which has no window; None without chunks."""
    lookback: int = 0
    """Chunks before its own that a query sees."""
    stripe: Stripe | None = None
    """The tokens that this rank keeps under decode context parallelism, without window or chunk;
    None where the cache holds all keys."""

    @property
    def span(self) -> int | None:
        """Most keys from the first to the last that a query sees; None for all."""
        return self.window if self.chunk is None else self.chunk * (1 + self.lookback)


EVERY_KEY = VisibleKeys()


@dataclass(frozen=True)
class SplitPlan:
    """The step's plan for the split-KV kernel: views of the builder's buffers, and static numbers.

    The *owning program* of a work item has its first segment. The *lending program* is the first
    one, if any, that starts in the middle of the work item; a program starts in the middle of at
    most one. All programs of a work item that is cut store states of its segments in the lending
    program's *state slots*. Where keys are cut into segment groups, more slots hold the states of
    segment groups. The last program to arrive folds the states and writes the result.
    """

    tile: SplitTile
    rows: torch.Tensor
    """``[max work items, ROW_FIELDS]`` int32: the work items."""
    total: torch.Tensor
    """``[2]`` int32: work items of the step, and the KV tiles that the groups share."""
    starts: torch.Tensor
    """``[groups + 1, 2]`` int32: work item x head loop, and segment, where each group starts."""
    shares: torch.Tensor
    """``[groups, SHARE_FIELDS]`` int32: the share of each group."""
    counters: torch.Tensor
    """``[groups * heads * (1 + head_loops)]`` int32, zero between launches.

    One counter per program is for the work item in whose middle the program starts: how many of its
    segments have arrived. Its higher bits may say in which slots states lie
    (:mod:`attn.kernels.latent.hopper_narrow.finish`). One more per program and head loop is for the
    tokens in the middle of whose keys the program starts: how many of their segment groups have
    arrived."""
    states: torch.Tensor
    """fp32 scratch: outputs of segments and segment groups that are not folded yet. Where work
    items are cut between any two tiles, it holds outputs of parts, in the output's 16 bits."""
    sums: torch.Tensor
    """fp32 scratch: two numbers for each query row of a state, its maximum and its sum. A part has
    one, its LSE in units of log 2."""
    groups: int
    """Groups of programs that share the tiles of the step."""
    heads: int
    """Head tiles that the programs of a group take, one each."""
    head_loops: int
    """Times that the keys of each work item are walked, for ``heads`` head tiles each time."""
    slots: int
    """State slots for segments, per program."""
    segment_groups: int
    """Most segment groups of a request's keys. Where there are several, a program has more state
    slots, see :func:`area_of` and :func:`latent_states`."""
    short_query: int
    """Longest query, in tokens, of a request that has work items."""
    hopper: HopperDecodeTile | None = None
    """Tile of the Hopper kernel that the plan is made for; None for the portable kernel.

    ``tile`` is then ``hopper.split``. The portable kernel runs with it in layers whose tensors turn
    out not to be served by the Hopper kernel."""
    requires_hopper: bool = False
    """True makes a layer that the Hopper kernel does not serve an error; otherwise the portable
    kernel takes that layer."""
    depends_on_batch: bool = False
    """Work items are cut between any two tiles, so that a result's bits depend on the batch.

    Some Hopper kernels need this, see :class:`builders.splitkv.tiles.HopperDecodeTile`; benchmarks
    set it to measure what batch invariance costs."""
    sums_apart: int = 0
    """Columns whose sums of weights are kept apart, where the prefill kernel gives rows of the same
    requests the same bits (batch invariance); else 0. See :attr:`SplitTile.sums_apart`."""
    waits: bool = False
    """The kernel may start while the kernel before it still runs, and itself waits for its end."""

    @cached_property
    def static(self) -> tuple[Any, ...]:
        """Everything of the plan that kernels are compiled for: tiles, numbers and flags."""
        return (
            self.tile,
            self.hopper,
            self.requires_hopper,
            self.groups,
            self.heads,
            self.head_loops,
            self.slots,
            self.segment_groups,
            self.depends_on_batch,
            self.sums_apart,
            self.waits,
        )

    @cached_property
    def pointers(self) -> Pointers:
        """The plan's tensors, in the order of the fields and of :data:`PLAN_POINTERS`."""
        return Pointers(
            self.rows,
            self.total,
            self.starts,
            self.shares,
            self.counters,
            self.states,
            self.sums,
        )


@dataclass(frozen=True)
class DequantisedKeys:
    """Dequantised keys and values of a step's prefills, in a workspace of 16-bit elements.

    :mod:`builders.dense.dequantised` says when a step has one. All layers share the workspace: each
    layer writes its keys and values there before it reads them.
    """

    key: torch.Tensor
    """``[W, P, Hk, D]``: keys in a workspace of W pages of P tokens."""
    value: torch.Tensor
    """``[W, P, Hk, Dv]``: values in the same pages."""
    table: torch.Tensor
    """``[R, max_pages]`` int32: the workspace page of each page of a request's keys.

    Only requests with long queries have pages, from the first page that holds a visible key on; all
    other entries are undefined."""
    sources: torch.Tensor
    """``[W, 3]`` int32, for each page of the workspace: the request, the number of the page among
    the request's pages, and the first key that any of the request's queries sees. Keys before that
    one may be gone from the cache."""
    total: torch.Tensor
    """``[1]`` int32: pages of the workspace in use."""
    pages: int
    """Pages of the workspace in use as the host counts them: programs to launch."""


@dataclass(frozen=True)
class SegmentedKeys:
    """How the prefill kernels cut keys so that their rows have the split-KV kernel's bits."""

    kv_tile: int
    """Keys of a tile."""
    segment_unit: int
    """Positions of :mod:`builders.splitkv.segments` that a tile of keys spans."""
    segment_group: int
    """Segments of a segment group; 0 where every request has one segment group."""
    sums_apart: int
    """:attr:`SplitTile.sums_apart` of the split-KV kernel's tile."""
    states: torch.Tensor
    """fp32 scratch: outputs of each program's query rows over whole segment groups, and behind them
    those over segments of one group if the kernel's tile ``stores_totals``; empty where nothing
    needs it."""
    sums: torch.Tensor
    """fp32 scratch: two numbers for each query row of a state, its maximum and its sum."""

    @property
    def static(self) -> tuple[int, ...]:
        """Everything that a prefill kernel is compiled for."""
        return self.kv_tile, self.segment_unit, self.segment_group, self.sums_apart


@dataclass(frozen=True)
class HopperPlan:
    """The step's plan for the Hopper prefill kernel, in layers with tiles of ``query_tile``."""

    query_tile: int
    """Query tokens of a tile."""
    tile_starts: torch.Tensor
    """``[R + 1]`` int32: first tile of each request."""
    num_tiles: torch.Tensor
    """``[1]`` int32: the tiles of all requests. A view of the last element of ``tile_starts``, so
    that no program has to compute the address."""
    counter: torch.Tensor
    """``[1]`` int32: how many tiles were taken after each program's first; 0 between launches."""
    programs: int
    """Programs to launch. Any number gives the right result, since the programs share the tiles."""
    is_required: bool = False
    """True makes a layer that the Hopper kernel does not serve an error; otherwise the portable
    kernel takes that layer."""
    dequantised: DequantisedKeys | None = None
    """Workspace into which keys and values of a quantised cache are dequantised first; None where
    each tile dequantises the keys that it reads."""
    segmented: SegmentedKeys | None = None
    """How keys are cut with batch invariance; None where they are one run.

    The kernel's states then have slots for ``programs`` programs."""

    @cached_property
    def pointers(self) -> Pointers:
        """The plan's tensors, in the order of the fields and of :data:`TILE_POINTERS`."""
        return Pointers(self.tile_starts, self.num_tiles, self.counter)


@dataclass(frozen=True)
class PrefillPlan:
    """The step's plan for the prefill kernel."""

    tile: PrefillTile
    tile_starts: torch.Tensor
    """``[R + 1]`` int32: first tile of each request."""
    programs: int
    """Programs to launch. Any number gives the right result, since the programs share the tiles."""
    hopper: HopperPlan | None = None
    """Plan for the Hopper kernel, which replaces the portable kernel in every layer that it serves;
    None without one.

    Both plans are there because only a launcher knows which layers the Hopper kernel serves: the
    builder does not see a layer's ALiBi or the type of its output. One launch makes both plans."""
    segmented: SegmentedKeys | None = None
    """How keys are cut with batch invariance; None where they are one run.

    The kernel's states then have slots for ``programs`` programs."""

    @property
    def static(self) -> tuple[Any, ...]:
        """Everything of the plan that the portable kernel is compiled for."""
        cuts = self.segmented
        if cuts is None:
            return (self.tile,)
        return self.tile, *cuts.static


def longest_short_query(num_kv_heads: int, tile: SplitTile, max_query_len: int) -> int:
    """Longest query, in tokens, of the split-KV kernel; longer ones go to the prefill kernel.

    In the split-KV kernel all programs together walk a request's keys, once for every head tile of
    every ``tile.query_tokens`` tokens. In the prefill kernel one program walks the keys for all
    tokens of a head tile. Such a program takes long if the step waits for it, and costs next to
    nothing beside tiles of other prompts. The choice must not depend on the rest of the batch,
    since a request's bits must not. So the bound is at half of the walks that take as long as one
    program of the prefill kernel: there, neither choice is further from the better one than the
    other. In a step of 48 requests, the walks of 17 requests with up to 16 tokens took 3 to 8 % of
    the time.

    Args:
        num_kv_heads: KV heads of the layer.
        tile: tile of the split-KV kernel.
        max_query_len: query tokens of a verify, which are always short.
    """
    walks = num_kv_heads * tile.head_tiles
    return max(max_query_len, min(SHORT_QUERY, max(_WALKS // walks, 1) * tile.query_tokens))


def area_of(slots: int, segment_groups: int, head_loops: int) -> int:
    """State slots of a program of the dense kernels.

    The program lends slots for segments. Where there are several segment groups, it also lends
    slots for segment groups, and has as many slots for segment groups of its own.

    Args:
        slots: state slots for segments, per program.
        segment_groups: most segment groups of a request's keys.
        head_loops: times that the keys of each work item are walked, for different heads.
    """
    return slots + (2 * segment_groups * head_loops if segment_groups > 1 else 0)


def latent_states(slots: int, segment_groups: int, head_loops: int) -> tuple[int, int]:
    """State slots that a program of the latent kernel lends, and slots that only it uses.

    A program starts in the middle of at most one work item. It lends to that work item a slot for
    every segment of its segment group, since a program that enters a work item late cannot fold its
    states before the earlier ones are there. For the same reason it lends a slot for every segment
    group of the work item's tokens, per head loop. Where all keys of some tokens are its own, the
    program folds segment groups as they come, into one slot per head loop. ``SPARE_STATES`` more
    are for the segments that it works on. A slot is ``rows * columns`` fp32.

    Example: 128 heads of 512 columns and 128k tokens on 132 multiprocessors. A state of 64 rows
    takes 128 KiB. Segments have 1024 tokens, and a segment group has 16 segments. A program lends
    16 + 8 slots and keeps 1 + 4. All slots take 29 x 128 KiB x 132 = 479 MiB, for any number of
    requests. At 256k tokens a program has 37 slots.

    Args:
        slots: state slots for segments, per program.
        segment_groups: most segment groups of a request's keys.
        head_loops: times that the keys of each work item are walked, for different heads.
    """
    if segment_groups == 1:
        return slots, SPARE_STATES
    return slots + segment_groups * head_loops, head_loops + SPARE_STATES
