"""A step's plan of the split-KV and prefill kernels: records, and the layout of its numbers.

:mod:`builders.splitkv.planner` fills it; launchers read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from builders.launch.pointers import Pointers
from builders.pages.paging import Stripe
from builders.splitkv.tiles import (
    HopperDecodeTile,
    PrefillTile,
    SplitTile,
)

SHORT_QUERY = 16
"""Longest query of the split-KV kernel beside verifies, see :func:`longest_short_query`."""
_WALKS = 64
"""Walks over a request's keys by all programs: about half of those that take as long as one program
of the prefill kernel does, reckoned from an H200's rates of both (docs/performance.md)."""
SPARE_STATES = 4
"""States of the segments that a program of the latent kernel is at: what is folded so far, and
those that are to be folded next."""
WASTE = 24
"""One in so many programs may idle where the others then get whole rows, or equal parts of one."""
MOST_SHARED = 1 << 30
"""Most tiles of a step, and of as many rows as there are groups, that are cut into equal shares:
twice as many still fit 32 bits. More are cut where the load is even."""
ONE_WARP = 32
"""Requests, and rows, that every warp has all of: their plan needs no barriers."""
ROW_FIELDS = 12
"""int32 per row of the plan: request, first token, tokens, KV length, first position, first KV
tile, KV tiles, place of its first tile among all tiles of the step, first segment, segments, bundle
of segments, bundles of the tokens' keys. Rows of the same tokens follow one another."""
SHARE_FIELDS = 4 + ROW_FIELDS
"""int32 per group of programs: row x head loop and segment where it starts, the same of the next
group, and a copy of that row, so that a program begins with one load and not with two in turn."""

PLAN_POINTERS = (
    "rows_ptr",
    "total_ptr",
    "starts_ptr",
    "shares_ptr",
    "counters_ptr",
    "states_ptr",
    "sums_ptr",
)
"""A kernel's arguments for the tensors of a :class:`SplitPlan`, in their order."""


@dataclass(frozen=True)
class SplitLimits:
    """What the buffers of a plan are sized for."""

    max_num_seqs: int
    max_num_tokens: int
    max_kv_len: int
    window: int | None
    """Largest visible span of one query, or None."""


@dataclass(frozen=True)
class VisibleKeys:
    """Which of a request's keys a step's queries may see, causality apart."""

    window: int | None = None
    """Visible keys of a query, of the layers that share the plan; None for all."""
    chunk: int | None = None
    """Chunk size of chunked local attention, in place of a window."""
    lookback: int = 0
    """Chunks before the own one."""
    stripe: Stripe | None = None
    """The keys are those of one rank; window and chunk are None then."""

    @property
    def span(self) -> int | None:
        """Most keys between the first and the last that a query sees; None for all."""
        return self.window if self.chunk is None else self.chunk * (1 + self.lookback)


EVERY_KEY = VisibleKeys()


@dataclass(frozen=True)
class SplitPlan:
    """The step's plan for the split-KV kernel: views of the builder's buffers, and static numbers.

    Scratch holds, per program, states of one bundle's segments (of all that a row can touch where
    keys are not bundled), since a program enters at most one row in its middle; and of bundles.
    """

    tile: SplitTile
    rows: torch.Tensor
    """``[max rows, ROW_FIELDS]`` int32."""
    total: torch.Tensor
    """``[2]`` int32: rows of the step, and the KV tiles that the groups share."""
    starts: torch.Tensor
    """``[groups + 1, 2]`` int32: row x head loop and segment where each group starts."""
    shares: torch.Tensor
    """``[groups, SHARE_FIELDS]`` int32."""
    counters: torch.Tensor
    """int32 zeros between launches, per program: segments of the row in whose middle it starts that
    have arrived, and bundles of the tokens in the middle of whose keys it starts, per head loop."""
    states: torch.Tensor
    """fp32 scratch."""
    sums: torch.Tensor
    """fp32 scratch."""
    groups: int
    heads: int
    """Head tiles that the programs of a group take, one each."""
    head_loops: int
    """Times that all groups' programs walk the keys, for heads beyond those."""
    slots: int
    """States of segments per program."""
    bundles: int
    """Most bundles of a row's keys; twice as many states, per head loop, follow those slots."""
    short_query: int
    """Longest query of a row."""
    hopper: HopperDecodeTile | None = None
    """The tile of the kernel for Hopper, where the plan is for that; ``tile`` is its part of it
    then, by which the plain kernel takes layers that only their tensors show not to be served."""
    requires_hopper: bool = False
    """A layer that the kernel for Hopper does not serve is an error; else the plain kernel's."""
    is_free: bool = False
    """Rows are cut between any two tiles: see :class:`builders.splitkv.tiles.HopperDecodeTile`; and
    for benchmarks of what invariance costs."""
    waits: bool = False
    """The kernel may start while those before it end, and waits by itself."""

    @cached_property
    def static(self) -> tuple[Any, ...]:
        """Everything of it that a kernel is compiled for: the tiles, the numbers and the flags."""
        return (
            self.tile,
            self.hopper,
            self.requires_hopper,
            self.groups,
            self.heads,
            self.head_loops,
            self.slots,
            self.bundles,
            self.is_free,
            self.waits,
        )

    @cached_property
    def pointers(self) -> Pointers:
        """Its tensors, in the order in which they stand here and among a kernel's arguments."""
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
class WidenedKeys:
    """Keys and values of a step's prefills as elements of the model: see
    :mod:`builders.dense.widened`.

    Every layer writes its own there before it reads them.
    """

    key: torch.Tensor
    """``[W, P, Hk, D]``: a workspace of W pages of P tokens."""
    value: torch.Tensor
    """``[W, P, Hk, Dv]``."""
    table: torch.Tensor
    """``[R, max_pages]`` int32: the workspace's pages of each request with a long query, from the
    first that a window leaves; others may be anything."""
    sources: torch.Tensor
    """``[W, 3]`` int32, of each page of the workspace: request, which of its pages, and the first
    key that any of its queries sees. What lies before that may be gone from the cache."""
    total: torch.Tensor
    """``[1]`` int32: pages in use."""
    pages: int
    """The same as the host knows it: programs to launch."""


@dataclass(frozen=True)
class HopperPlan:
    """The step's plan for the prefill kernel on Hopper, in layers whose tiles have those tokens."""

    query_tile: int
    """Query tokens of a tile."""
    tile_starts: torch.Tensor
    """``[R + 1]`` int32: first tile of each request."""
    num_tiles: torch.Tensor
    """``[1]`` int32: its last, the tiles of all, at an address that no program computes."""
    counter: torch.Tensor
    """``[1]`` int32: how many tiles were taken after each program's first; 0 between launches."""
    programs: int
    """Programs to launch; any number is right, they share the tiles."""
    is_required: bool = False
    """A layer that the kernel does not serve is an error; else the plain kernel's."""
    widened: WidenedKeys | None = None
    """Where keys and values of a quantised cache are put first; None where tiles convert theirs."""


@dataclass(frozen=True)
class PrefillPlan:
    """The step's plan for the prefill kernel."""

    tile: PrefillTile
    tile_starts: torch.Tensor
    """``[R + 1]`` int32: first tile of each request."""
    programs: int
    """Programs to launch; any number is right, they share the tiles."""
    hopper: HopperPlan | None = None
    """The same for the kernel that takes its place in every layer that it serves, which only a
    launcher knows: a layer's ALiBi or the type of its output is not the builder's to see. Both are
    planned by one launch. None where there is none."""


def longest_short_query(num_kv_heads: int, tile: SplitTile, max_query_len: int) -> int:
    """Longest query of the split-KV kernel; longer ones go to the prefill kernel.

    Every head tile of every few tokens walks their keys, by all programs; in the prefill kernel one
    program does for all tokens of a head tile. That takes long where it is waited for, and next to
    nothing beside tiles of other prompts: in a step of many, 17 of 48 requests with up to 16 tokens
    took 3 to 8 % of the time by their walks. Which it is a row may not ask, since its bits are its
    own: at half of the walks that take as long as one program either choice is as far from the
    better one as the other.

    Args:
        num_kv_heads: of the layer.
        tile: of the split-KV kernel.
        max_query_len: query tokens of a verify, which are always short.
    """
    walks = num_kv_heads * tile.head_tiles
    return max(max_query_len, min(SHORT_QUERY, max(_WALKS // walks, 1) * tile.query_tokens))


def area_of(slots: int, bundles: int, head_loops: int) -> int:
    """States of a program: segments that it lends, bundles that it lends, bundles of its own."""
    return slots + (2 * bundles * head_loops if bundles > 1 else 0)


def latent_states(slots: int, bundles: int, head_loops: int) -> tuple[int, int]:
    """States that a program of the latent kernel lends, and those behind all of these that are its
    own.

    What must exist at once: a program starts in the middle of at most one row, and lends to it a
    state for every segment of the row's bundle, since whoever comes late to a row cannot fold what
    it has without what comes before; likewise one for every bundle of the row's tokens, per head
    loop. Of tokens that are all its own it folds bundles as they come, into one state per head
    loop; and there are the spare ones. A state is ``rows * columns`` fp32.

    For 128 heads of 512 columns and 128k tokens on 132 multiprocessors: 64 rows make 128 KiB,
    segments have 1024 tokens and bundles 16 of them, so that there are 16 + 8 lent and 1 + 4 own:
    29 x 128 KiB x 132 = 479 MiB, however many requests there are; at 256k tokens 37.
    """
    if bundles == 1:
        return slots, SPARE_STATES
    return slots + bundles * head_loops, head_loops + SPARE_STATES
