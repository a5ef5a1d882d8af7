"""Split KV: scratch and the step's plan of the dense attention kernels.

The plan is computed on the device, by one launch per step, from ``seq_lens`` and
``query_start_loc`` alone: host values size grids and buffers and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from builders.buffers import GraphBuffers
from builders.paging import Stripe
from builders.segments import BUNDLE, max_segments, segment_of, segment_start
from builders.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    PrefillTile,
    SplitTile,
    power_of_two,
    prefill_tile,
    split_tile,
)
from specs.base import cdiv
from specs.devices import DeviceKind

SHORT_QUERY = 16
"""Longest query of the split-KV kernel; longer ones go to the prefill kernel."""
SPARE_STATES = 4
"""States of the segments that a program of the latent kernel is at: what is folded so far, and
those that are to be folded next."""
PARTS_OF_A_PROGRAM = 2
"""Of rows that are cut anywhere, and folded by another kernel: the last part of the row that a
program's share begins in, and the first one of that which it ends in."""
WASTE = 24
"""One in so many programs may idle where the others then get whole rows, or equal parts of one."""
ROW_FIELDS = 12
"""int32 per row of the plan: request, first token, tokens, KV length, first position, first KV
tile, KV tiles, place of its first tile among all tiles of the step, first segment, segments, bundle
of segments, bundles of the tokens' keys. Rows of the same tokens follow one another."""
SHARE_FIELDS = 4 + ROW_FIELDS
"""int32 per group of programs: row x head loop and segment where it starts, the same of the next
group, and a copy of that row, so that a program begins with one load and not with two in turn."""


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


class Pointers:
    """Tensors that the launches of all layers of a step share, read once for them all."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """
        Args:
            tensors: none of which moves.
        """
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.kinds = [
            (tensor.dtype, tensor.is_cuda, address % 16 == 0)
            for tensor, address in zip(tensors, self.addresses, strict=True)
        ]
        """All that a kernel may be compiled for: type, place and alignment."""


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
    """Rows are cut between any two tiles: see :class:`builders.tiles.HopperDecodeTile`; and for
    benchmarks of what invariance costs."""

    @cached_property
    def static(self) -> tuple[Any, ...]:
        """What a kernel is compiled for, or refused: the tiles, the numbers and the flags."""
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


def parallel_heads(head_tiles: int, programs: int) -> int:
    """How many head tiles walk the same keys at the same time.

    Neighbouring heads lie side by side in a page, so as many as possible; fewer only where that
    would leave more than a thirtieth of the programs idle.
    """
    divisors = [n for n in range(1, head_tiles + 1) if head_tiles % n == 0 and n <= programs]
    used = {n: programs // n * n for n in divisors}
    best = max(used.values())
    return max(n for n in divisors if used[n] * 30 >= best * 29)


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


class SplitPlanner:
    """Owns the buffers of the plan, and fills them once per step."""

    def __init__(
        self,
        shape: DenseShape,
        kind: DeviceKind,
        num_multiprocessors: int,
        limits: SplitLimits,
        max_query_len: int,
        buffers: GraphBuffers,
        every_row: bool = False,
        is_free: bool = False,
        takes_rows: bool = True,
        hopper: HopperTile | None = None,
        requires_hopper: bool = False,
        hopper_decode: HopperDecodeTile | None = None,
        requires_hopper_decode: bool = False,
        latent: SplitTile | None = None,
    ) -> None:
        """
        Args:
            shape: the layer.
            kind: device.
            num_multiprocessors: of the device.
            limits: what the buffers must hold.
            max_query_len: query tokens of a verify.
            buffers: where the buffers are declared.
            every_row: take every row, whatever its query length (batch invariance).
            is_free: cut rows anywhere, see :class:`SplitPlan`.
            takes_rows: False leaves every row to the prefill kernel (encoders).
            hopper: tile of the prefill kernel for Hopper, where that serves.
            requires_hopper: see :class:`HopperPlan`.
            hopper_decode: tile of the split-KV kernel for Hopper, where the plan is for that.
            requires_hopper_decode: see :class:`SplitPlan`.
            latent: tile of the latent decode kernel, where the plan is for that.
        """
        self.least_tiles = None if hopper_decode is None else hopper_decode.least_tiles
        self.row_cost = 0 if hopper_decode is None else hopper_decode.row_cost
        self.is_free = is_free or self.least_tiles is not None
        self.hopper_decode = hopper_decode
        self.requires_hopper_decode = requires_hopper_decode
        if latent is not None:
            tile = latent
        elif hopper_decode is not None:
            tile = hopper_decode.split
        else:
            tile = split_tile(shape, kind, 16 if every_row else max_query_len, limits.window)
        self.tile = tile
        self.prefill = prefill_tile(shape, kind)
        self.hopper = hopper
        self.requires_hopper = requires_hopper
        self.limits = limits
        self.device = buffers.device
        self.short_query = limits.max_num_tokens if every_row else max(SHORT_QUERY, max_query_len)
        if not takes_rows:
            self.short_query = 0
        head_tiles = shape.num_kv_heads * tile.head_tiles
        programs = num_multiprocessors * tile.programs_per_sm
        self.heads = parallel_heads(head_tiles, programs)
        self.head_loops = head_tiles // self.heads
        self.groups = max(1, programs // self.heads)
        self.num_heads = shape.num_heads
        self.num_multiprocessors = num_multiprocessors
        reqs, tokens = limits.max_num_seqs, limits.max_num_tokens
        # A long row of keys is cut into bundles; behind a window there are not many.
        self.is_bundled = limits.window is None and not self.is_free and takes_rows
        longest = max_segments(cdiv(limits.max_kv_len, tile.segment_scale))
        self.bundles = cdiv(longest, BUNDLE) if self.is_bundled else 1
        self.max_rows = self.bundles * min(
            reqs * cdiv(min(self.short_query, tokens), tile.query_tokens),
            tokens // tile.query_tokens + reqs,
        )
        # Behind a window a short query sees little more than it; a long one moves it through all.
        span = None
        if limits.window is not None and not every_row:
            span = limits.window + self.short_query
        self.slots = max_segments(cdiv(limits.max_kv_len, tile.segment_scale), span)
        if self.is_bundled:
            self.slots = min(self.slots, BUNDLE)
        if self.is_free:
            # A program has parts of two rows; or it lends states to every other.
            self.slots = self.groups if self.least_tiles is None else PARTS_OF_A_PROGRAM
        if not takes_rows:
            self.slots = 0
        used = tile.tile_heads * tile.query_tokens
        launched = self.groups * self.heads
        area = area_of(self.slots, self.bundles, self.head_loops)
        if latent is not None:
            area = sum(latent_states(self.slots, self.bundles, self.head_loops))
        states = launched * area * used
        # Quantised rows are read in planes, each rounded up to a power of two on its own.
        width = max(power_of_two(shape.head_size_v), 64)
        int32, fp32 = torch.int32, torch.float32
        buffers.declare("tile_starts", (reqs + 1,), int32)
        buffers.declare("hopper_starts", (reqs + 1,), int32)
        buffers.declare("taken", (1,), int32)
        buffers.declare("rows", (self.max_rows, ROW_FIELDS), int32)
        buffers.declare("total", (2,), int32)
        buffers.declare("starts", (self.groups + 1, 2), int32)
        buffers.declare("shares", (self.groups, SHARE_FIELDS), int32)
        buffers.declare("counters", (launched * (1 + self.head_loops),), int32)
        buffers.declare("states", (states * width,), fp32)
        buffers.declare("sums", (states * 2,), fp32)
        self.buffers = buffers

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the states of segments."""
        return 4 * (self.buffers["states"].numel() + self.buffers["sums"].numel())

    def check_limits(self, num_reqs: int, num_actual_tokens: int) -> None:
        """Refuse a batch that the buffers are too small for.

        Raises:
            ValueError: more requests or tokens than the engine's limits.
        """
        for name, value, limit in (
            ("num_reqs", num_reqs, self.limits.max_num_seqs),
            ("num_actual_tokens", num_actual_tokens, self.limits.max_num_tokens),
        ):
            if value > limit:
                raise ValueError(
                    f"{name} ({value}) exceeds the engine's limit ({limit}), which the builder's "
                    "buffers are sized for"
                )

    def fill(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: VisibleKeys = VisibleKeys(),
        is_causal: bool = False,
    ) -> None:
        """Compute the plan of a step into the buffers.

        Args:
            query_start_loc: ``[R + 1]`` int32, device.
            seq_lens: ``[R]`` int32, device.
            visible: which keys.
            is_causal: no query of any request sees past itself.
        """
        if self.device.type == "cuda" or interprets():
            self._launch(query_start_loc, seq_lens, visible, is_causal)
        else:
            self._fill_on_host(query_start_loc, seq_lens, visible, is_causal)

    def _launch(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: VisibleKeys,
        is_causal: bool,
    ) -> None:
        from builders.kernels import plan_kernel

        reqs = power_of_two(self.limits.max_num_seqs)
        b, stripe = self.buffers, visible.stripe or Stripe(1, 0, 1)
        plan_kernel[(1,)](
            seq_lens,
            query_start_loc,
            b["rows"],
            b["total"],
            b["starts"],
            b["shares"],
            b["tile_starts"],
            b["hopper_starts"],
            len(query_start_loc) - 1,
            self.limits.max_num_seqs,
            self.limits.max_kv_len,
            self.groups,
            self.short_query,
            visible.window or 0,
            visible.chunk or 1,
            visible.lookback,
            stripe.size,
            stripe.rank,
            stripe.interleave,
            QUERY_TOKENS=self.tile.query_tokens,
            KV_TILE=self.tile.kv_tile,
            SEGMENT_UNIT=self.tile.segment_unit,
            HEAD_LOOPS=self.head_loops,
            PREFILL_TILE=self.prefill.query_tile,
            HOPPER_TILE=0 if self.hopper is None else self.hopper.query_tile,
            WINDOW=visible.window is not None,
            CHUNK=visible.chunk is not None,
            TRIM=is_causal,
            DCP=visible.stripe is not None,
            BUNDLED=self.is_bundled,
            REQS=reqs,
            GROUPS=power_of_two(self.groups + 1),
            FREE=self.is_free,
            LEAST=self.least_tiles or 1,
            ROW_COST=self.row_cost,
            HASTENS=self.hopper_decode is not None and self.device.type == "cuda",
            num_warps=min(16, max(4, reqs // 32)),
        )

    def _fill_on_host(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: VisibleKeys,
        is_causal: bool,
    ) -> None:
        starts = query_start_loc.tolist()
        plan = plan_rows(
            [stop - start for start, stop in pairwise(starts)],
            seq_lens.clamp(max=self.limits.max_kv_len).tolist(),
            self.tile,
            self.groups,
            self.head_loops,
            self.short_query,
            visible,
            is_causal,
            self.is_bundled,
            (self.least_tiles or 1) if self.is_free else None,
            self.row_cost,
        )
        self._fill_tiles("tile_starts", self.prefill.query_tile, starts)
        if self.hopper is not None:
            self._fill_tiles("hopper_starts", self.hopper.query_tile, starts)
        if plan.rows:
            rows = torch.tensor(plan.rows, dtype=torch.int32)
            self.buffers["rows"][: len(rows), : rows.shape[1]] = rows
        self.buffers["total"].copy_(torch.tensor([len(plan.rows), plan.shared], dtype=torch.int32))
        self.buffers["starts"].copy_(torch.tensor(plan.starts, dtype=torch.int32))
        for share, (start, stop) in zip(self.buffers["shares"], pairwise(plan.starts), strict=True):
            share[:4] = torch.tensor([*start, *stop], dtype=torch.int32)
            if start[0] < len(plan.rows) * self.head_loops:
                share[4:] = self.buffers["rows"][start[0] // self.head_loops]

    def _fill_tiles(self, name: str, query_tile: int, starts: Sequence[int]) -> None:
        """First tile of each request, of those with longer queries."""
        lens = [stop - start for start, stop in pairwise(starts)]
        tiles = [cdiv(count, query_tile) if count > self.short_query else 0 for count in lens]
        starts_of_tiles = self.buffers[name]
        starts_of_tiles[: len(starts)] = torch.tensor([0, *tiles]).cumsum(0)
        # Past the last request too: a graph was captured with more of them, perhaps.
        starts_of_tiles[len(starts) :] = starts_of_tiles[len(starts) - 1]

    def split(self) -> SplitPlan:
        """The record's view of the split-KV part: every step's, since nothing in it moves."""
        return self._split

    @cached_property
    def _split(self) -> SplitPlan:
        b = self.buffers
        return SplitPlan(
            tile=self.tile,
            rows=b["rows"],
            total=b["total"],
            starts=b["starts"],
            shares=b["shares"],
            counters=b["counters"],
            states=b["states"],
            sums=b["sums"],
            groups=self.groups,
            heads=self.heads,
            head_loops=self.head_loops,
            slots=self.slots,
            bundles=self.bundles,
            short_query=self.short_query,
            hopper=self.hopper_decode,
            requires_hopper=self.requires_hopper_decode,
            is_free=self.is_free,
        )

    def prefill_plan(self, num_reqs: int, tiles: int, most_programs: int) -> PrefillPlan | None:
        """The record's view of the prefill part; None where the host knows that there is none.

        Args:
            num_reqs: R.
            tiles: an estimate of the step's tiles.
            most_programs: programs to launch at most.
        """
        programs = min(tiles * self.num_heads, most_programs)
        if programs == 0:
            return None
        view, hopper = self.buffers.view, None
        if self.hopper is not None:
            starts = view("hopper_starts", num_reqs + 1)
            hopper = HopperPlan(
                self.hopper.query_tile,
                starts,
                starts[num_reqs:],
                self.buffers["taken"],
                self.num_multiprocessors,
                self.requires_hopper,
            )
        return PrefillPlan(self.prefill, view("tile_starts", num_reqs + 1), programs, hopper)

    def own_prefill(self, plan: PrefillPlan, num_reqs: int) -> PrefillPlan:
        """The same, of this planner's buffers."""
        own = self.prefill_plan(num_reqs, plan.programs, plan.programs)
        assert own is not None
        return own


def interprets() -> bool:
    """Triton's interpreter runs kernels on CPU tensors here."""
    from triton.runtime.interpreter import InterpretedFunction

    from builders.kernels import plan_kernel

    return isinstance(plan_kernel, InterpretedFunction)


@dataclass(frozen=True)
class HostPlan:
    """The plan as plain numbers: the kernel's twin."""

    rows: list[list[int]]
    shared: int
    starts: list[tuple[int, int]]


def plan_rows(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    tile: SplitTile,
    groups: int,
    head_loops: int,
    short_query: int,
    visible: VisibleKeys = VisibleKeys(),
    is_causal: bool = False,
    is_bundled: bool = False,
    least_tiles: int | None = None,
    row_cost: int = 0,
) -> HostPlan:
    """What :func:`builders.kernels.plan_kernel` computes, on the host.

    Args:
        query_lens: new tokens of each request.
        kv_lens: KV length of each request.
        tile: the split-KV tile.
        groups: groups of programs that share the work.
        head_loops: walks over the keys of each row.
        short_query: longest query of a row.
        visible: which keys.
        is_causal: no query sees past itself.
        is_bundled: rows are cut where bundles begin; every key is seen then.
        least_tiles: rows are cut between any two tiles, for shares of so many at least; starts hold
            tiles of rows, not segments.
        row_cost: tiles that the beginning of such a row counts as, where rows are of several
            lengths.
    """
    window, chunk, stripe = visible.window, visible.chunk, visible.stripe
    rows: list[list[int]] = []
    token = 0
    for req, (count, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        short = 0 < count <= short_query
        keys = kv_len if stripe is None else stripe.local_len(kv_len)
        last_tile = max(cdiv(keys, tile.kv_tile) - 1, 0)
        bundles = segment_of(last_tile * tile.segment_unit) // BUNDLE + 1 if is_bundled else 1
        for skipped in range(0, count if short else 0, tile.query_tokens):
            first = max(kv_len - count, 0) + skipped
            start = 0
            if chunk is not None:
                start = (first // chunk - visible.lookback) * chunk
            elif window is not None:
                start = first - window + 1
            taken = min(count - skipped, tile.query_tokens)
            stop = min(kv_len, first + taken) if is_causal else kv_len
            if stripe is not None:
                stop = stripe.local_len(stop)
            for bundle in range(bundles):
                first_tile, stop_tile = max(start, 0) // tile.kv_tile, cdiv(stop, tile.kv_tile)
                if is_bundled:
                    first_tile = segment_start(bundle * BUNDLE) // tile.segment_unit
                    past = segment_start((bundle + 1) * BUNDLE) // tile.segment_unit
                    stop_tile = min(stop_tile, past)
                tiles = max(stop_tile - first_tile, 1)
                part = segment_of(first_tile * tile.segment_unit)
                parts = segment_of((first_tile + tiles - 1) * tile.segment_unit) + 1 - part
                where = [first_tile, tiles, 0, part, parts, bundle, bundles]
                rows.append([req, token + skipped, taken, kv_len, first, *where])
        token += count
    # Rows of one length are cut into equal parts, which begin alike.
    cost = row_cost if len({fields[6] for fields in rows}) > 1 else 0
    place = 0
    for fields in rows:
        fields[7] = place
        place += (fields[6] + cost) * head_loops
    is_free, sharers = least_tiles is not None, groups
    if least_tiles is not None:
        # A group without a tile would be waited for in vain.
        sharers = max(min(groups, place // least_tiles), 1)
    shared = shared_tiles(place, [fields[6] for fields in rows], sharers)
    starts = [
        _start_of(
            cdiv(c * shared, sharers), place, rows, tile.segment_unit, head_loops, is_free, cost
        )
        for c in range(groups + 1)
    ]
    return HostPlan(rows, shared, starts)


def shared_tiles(total: int, row_tiles: Sequence[int], groups: int) -> int:
    """KV tiles that groups share out evenly: the step's, or a few more so that rows stay whole.

    A group that changes rows waits for memory once more. Rows of one length are given out whole, or
    cut into equal parts, where that leaves no more than one in ``WASTE`` programs idle.

    Args:
        total: tiles of the step.
        row_tiles: of each row.
        groups: groups of programs.
    """
    if len(set(row_tiles)) != 1:
        return total
    tiles = row_tiles[0]
    if total < groups * tiles:
        share = cdiv(tiles, max(groups * tiles // total, 1))
    else:
        share = cdiv(total, groups * tiles) * tiles
    shared = share * groups
    return shared if (shared - total) * WASTE <= total else total


def _start_of(
    position: int,
    total: int,
    rows: list[list[int]],
    unit: int,
    head_loops: int,
    is_free: bool,
    cost: int,
) -> tuple[int, int]:
    """Row (times head loops) and segment of the first segment at or after a position; or, if rows
    are cut anywhere, tile.
    """
    if position >= total:
        return len(rows) * head_loops, 0
    row = max(index for index, fields in enumerate(rows) if fields[7] <= position)
    first_tile, tiles, place = rows[row][5:8]
    loop, offset = divmod(position - place, tiles + cost)
    if is_free:
        return row * head_loops + loop, max(offset - cost, 0)
    tile = first_tile + offset
    at = segment_of(tile * unit)
    if max(segment_start(at) // unit, first_tile) < tile:
        at += 1
    if at > segment_of((first_tile + tiles - 1) * unit):
        return row * head_loops + loop + 1, 0
    return row * head_loops + loop, at - segment_of(first_tile * unit)
