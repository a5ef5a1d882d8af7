"""The planner of split KV: it owns a plan's buffers and scratch, and fills the plan once per step.

Split KV cuts the keys of a request between programs, so that few requests fill a GPU too. The plan
says which program attends which keys; :mod:`builders.splitkv.record` explains its words.

One launch per step computes the plan on the device, from ``seq_lens`` and ``query_start_loc``
alone. Values on the host size grids and buffers, and decide no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from builders.buffers import GraphBuffers
from builders.device import interprets
from builders.launch.call import LaunchOptions, collected
from builders.launch.pointers import Pointers
from builders.splitkv.host_twin import SplitRules, plan_rows
from builders.splitkv.record import (
    EVERY_KEY,
    ONE_WARP,
    ROW_FIELDS,
    SHARE_FIELDS,
    SLICE,
    HopperPlan,
    PrefillPlan,
    SegmentedKeys,
    SplitLimits,
    SplitPlan,
    VisibleKeys,
    area_of,
    latent_states,
    longest_short_query,
)
from builders.splitkv.sizes import (
    PARTS_OF_A_PROGRAM,
    most_rows,
    most_slots,
    parallel_heads,
    segment_groups_of_keys,
)
from builders.splitkv.stripe import Stripe
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    PrefillTile,
    SplitTile,
    prefill_tile,
    split_tile,
)
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind, GpuFacts

_FILLED = {
    "rows_ptr": "rows",
    "total_ptr": "total",
    "starts_ptr": "starts",
    "shares_ptr": "shares",
    "prefill_starts_ptr": "tile_starts",
    "hopper_starts_ptr": "hopper_starts",
}
"""The buffer that the plan kernel fills for each of these arguments, in the kernel's order."""
PLAN_SIZES = (ONE_WARP, 4 * ONE_WARP, 16 * ONE_WARP)
"""Most requests of each compiled variant of the plan kernel. One more variant is for as many
requests as the engine may have."""
FEWEST_PLAN_WARPS, MOST_PLAN_WARPS = 4, 8
"""Bounds on the warps of a program of the plan kernel."""


@dataclass(frozen=True)
class PlannerOptions:
    """Which requests have work items, where work items are cut, and which kernels a plan is for.

    By default the plan is for the portable dense kernels.
    """

    every_row: bool = False
    """Every request has work items, whatever its query length (batch invariance)."""
    segmented: PrefillTile | None = None
    """Tile of a prefill kernel whose rows have the split-KV kernel's bits (batch invariance); None
    where the prefill kernel may round in another order."""
    depends_on_batch: bool = False
    """Work items are cut between any two tiles, see :class:`SplitPlan`."""
    takes_rows: bool = True
    """False leaves every request to the prefill kernel (encoders)."""
    hopper: HopperTile | None = None
    """Tile of the Hopper prefill kernel; None where no layer may take that kernel."""
    requires_hopper: bool = False
    """A layer that the Hopper prefill kernel does not serve is an error, see
    :class:`HopperPlan`."""
    hopper_decode: HopperDecodeTile | None = None
    """Tile of the Hopper split-KV kernel that the plan is for; None for another kernel."""
    requires_hopper_decode: bool = False
    """A layer that the Hopper split-KV kernel does not serve is an error, see
    :class:`SplitPlan`."""
    split: SplitTile | None = None
    """Tile of the portable split-KV kernel where it is not the default's (batch invariance)."""
    latent: SplitTile | None = None
    """Tile of the portable latent decode kernel where the plan is for that; None for all others."""


NO_OPTIONS = PlannerOptions()
PREFILL_WARPS = 16
"""Warps of the prefill kernel's programs on each multiprocessor where each has a slot: twice as
many as run at a time, so that long programs do not end alone."""


class SplitPlanner:
    """Owns the buffers and the scratch of a plan, and fills the plan once per step."""

    def __init__(
        self,
        shape: DenseShape,
        gpu: GpuFacts,
        limits: SplitLimits,
        max_query_len: int,
        buffers: GraphBuffers,
        options: PlannerOptions = NO_OPTIONS,
    ) -> None:
        """
        Args:
            shape: the layer.
            gpu: the GPU that runs the layer.
            limits: the largest step that the buffers must hold.
            max_query_len: query tokens of a verify.
            buffers: the plan's buffers are declared here.
            options: requests and kernels; by default the plan is for the portable dense kernels.
        """
        hopper_decode, latent = options.hopper_decode, options.latent
        self.least_tiles = None if hopper_decode is None else hopper_decode.least_tiles
        self.depends_on_batch = options.depends_on_batch or self.least_tiles is not None
        self.hopper_decode = hopper_decode
        self.requires_hopper_decode = options.requires_hopper_decode
        if latent is not None:
            tile = latent
        elif hopper_decode is not None:
            tile = hopper_decode.split
        elif options.split is not None:
            tile = options.split
        else:
            tokens = 16 if options.every_row else max_query_len
            tile = split_tile(shape, gpu, tokens, limits.window)
        self.tile = tile
        # The plan kernel and the attention kernels may start before the kernels before them have
        # ended (programmatic dependent launch, Hopper); they wait by themselves.
        self.starts_ahead = gpu.kind is DeviceKind.SM90 and not interprets()
        self.prefill = options.segmented or prefill_tile(shape, gpu)
        self.is_segmented = options.segmented is not None
        self.hopper = options.hopper
        self.requires_hopper = options.requires_hopper
        self.limits = limits
        self.device = buffers.device
        head_tiles = shape.num_kv_heads * tile.head_tiles
        self.short_query = longest_short_query(shape.num_kv_heads, tile, max_query_len)
        if options.every_row:
            self.short_query = limits.max_num_tokens
        if not options.takes_rows:
            self.short_query = 0
        programs = gpu.num_multiprocessors * tile.programs_per_sm
        self.heads = parallel_heads(head_tiles, programs)
        self.head_loops = head_tiles // self.heads
        self.groups = max(1, programs // self.heads)
        self.row_cost = 0 if hopper_decode is None else hopper_decode.row_cost
        if self.head_loops > 1 and not self.depends_on_batch:
            # Kernels that cut at segments take the loops of a work item for neighbours.
            self.row_cost = 0
        self.num_heads = shape.num_heads
        self.num_multiprocessors = gpu.num_multiprocessors
        # Many keys are cut into segment groups. Behind a window a query sees too few for that.
        self.segment_group, self.segment_groups = 0, 1
        if limits.window is None and not self.depends_on_batch and options.takes_rows:
            self.segment_group, self.segment_groups = segment_groups_of_keys(
                limits.max_kv_len, tile
            )
        self.max_rows = self.segment_groups * most_rows(limits, tile, self.short_query)
        if not options.takes_rows:
            self.slots = 0
        elif self.depends_on_batch:
            # Where shares have at least ``least_tiles``, a program stores parts of at most two work
            # items. Otherwise a program lends a slot to every group, since all groups may have a
            # part of the same work item.
            self.slots = self.groups if self.least_tiles is None else PARTS_OF_A_PROGRAM
        else:
            moved = None if options.every_row else self.short_query
            self.slots = most_slots(limits, tile, moved, self.segment_group)
        self.prefill_programs = 0
        stores = self.prefill.stores_totals
        if self.is_segmented and (stores or self.segment_groups > 1):
            programs = PREFILL_WARPS // self.prefill.num_warps
            self.prefill_programs = programs * gpu.num_multiprocessors
        self._declare(buffers, shape.head_size_v, latent is not None)
        self.buffers = buffers
        self._compiled_for: set[bool] = set()
        self._launches: dict[tuple[int, VisibleKeys, bool], Callable[..., None]] = {}

    def _declare(self, buffers: GraphBuffers, head_size_v: int, is_latent: bool) -> None:
        """Declare the plan's buffers, and the scratch for states."""
        tile, reqs = self.tile, self.limits.max_num_seqs
        used = tile.tile_heads * tile.query_tokens
        launched = self.groups * self.heads
        area = area_of(self.slots, self.segment_groups, self.head_loops)
        if is_latent:
            area = sum(latent_states(self.slots, self.segment_groups, self.head_loops))
        states = launched * area * used
        # Stored rows of a quantised cache are read in planes; each plane's width is rounded up to a
        # power of two.
        width = max(power_of_two(head_size_v), 64)
        int32, fp32 = torch.int32, torch.float32
        buffers.declare("tile_starts", (reqs + 1,), int32)
        buffers.declare("hopper_starts", (reqs + 1,), int32)
        buffers.declare("taken", (1,), int32)
        buffers.declare("rows", (self.max_rows, ROW_FIELDS), int32)
        buffers.declare("total", (2,), int32)
        buffers.declare("starts", (self.groups + 1, 2), int32)
        buffers.declare("shares", (self.groups, SHARE_FIELDS), int32)
        buffers.declare("counters", (launched * (1 + self.head_loops),), int32)
        if self.least_tiles is None:
            buffers.declare("states", (states * width,), fp32)
            buffers.declare("sums", (states * 2,), fp32)
        else:
            # Parts of work items are outputs of 16 bits, and one LSE for each row.
            buffers.declare("states", (states * width // 2,), fp32)
            buffers.declare("sums", (states,), fp32)
        rows = self.prefill_programs * self.prefill.query_tile
        slots = 2 if self.prefill.stores_totals else 1
        hopper = self._hopper_rows()
        buffers.declare("prefill_states", (max(slots * rows, hopper) * width,), fp32)
        buffers.declare("prefill_sums", (max(rows, hopper) * 2,), fp32)

    def _hopper_rows(self) -> int:
        """Rows of the Hopper prefill kernel's states (batch invariance)."""
        tile = self.hopper
        if tile is None or not self.is_segmented:
            return 0
        rows = self.num_multiprocessors * tile.warp_groups * 64
        if tile.stores_totals:
            return 2 * rows
        return rows if self.segment_groups > 1 else 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch for states."""
        names = ("states", "sums", "prefill_states", "prefill_sums")
        return 4 * sum(self.buffers[name].numel() for name in names)

    @cached_property
    def plan_sizes(self) -> tuple[int, ...]:
        """Most requests of each compiled variant of the plan kernel, in ascending order.

        A step takes the smallest variant that holds its requests. There are several because the
        warps of a variant wait for each other as long for few requests as for many.
        """
        most = power_of_two(self.limits.max_num_seqs)
        return (*(size for size in PLAN_SIZES if size < most), most)

    def fill(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: VisibleKeys = EVERY_KEY,
        is_causal: bool = False,
    ) -> None:
        """Compute the plan of a step into the buffers.

        Args:
            query_start_loc: ``[R + 1]`` int32, device.
            seq_lens: ``[R]`` int32, device.
            visible: the keys that queries may see.
            is_causal: True if no query of any request sees past itself.
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
        num_reqs = len(query_start_loc) - 1
        sizes = self.plan_sizes
        own = next((size for size in sizes if num_reqs <= size), sizes[-1])
        if self.device.type == "cuda" and is_causal not in self._compiled_for:
            # Launch every other variant with no requests, so that it is compiled now. A later step
            # with more requests does not wait for the compiler then.
            for reqs in sizes:
                if reqs != own:
                    self._launch_for(reqs, 0, query_start_loc, seq_lens, visible, is_causal)
            # Launches that are only collected compile a kernel without loading it, so the first
            # real step has to launch all variants again.
            if collected.get() is None:
                self._compiled_for.add(is_causal)
        self._launch_for(own, num_reqs, query_start_loc, seq_lens, visible, is_causal)

    def _launch_for(
        self,
        reqs: int,
        num_reqs: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        visible: VisibleKeys,
        is_causal: bool,
    ) -> None:
        """Compute the plan of ``num_reqs`` requests with the variant for at most ``reqs``."""
        kind = (reqs, visible, is_causal)
        launch = self._launches.get(kind)
        if launch is None:
            launch = self._launches[kind] = self._launches_of(reqs, visible, is_causal)
        # One program stores where prefill tiles start, and each further one plans a slice.
        programs = 1 if reqs <= ONE_WARP else 1 + max(cdiv(num_reqs, SLICE), 1)
        launch((programs,), seq_lens, query_start_loc, self._filled, num_reqs)

    @cached_property
    def _filled(self) -> Pointers:
        """The buffers that the plan kernel fills, whose addresses are read once."""
        return Pointers(*(self.buffers[name] for name in _FILLED.values()))

    def _launches_of(self, reqs: int, visible: VisibleKeys, is_causal: bool) -> Callable[..., None]:
        """A launcher of the plan kernel; its launches differ in tensors and number of requests.

        Args:
            reqs: most requests of the compiled variant, a power of two.
            visible: the keys that queries may see.
            is_causal: True if no query of any request sees past itself.
        """
        from builders.launch.launcher import Launcher
        from builders.splitkv.device.plan import plan_kernel

        reqs = max(reqs, ONE_WARP)
        warps = cdiv(max(reqs, self.groups + 1), ONE_WARP)
        warps = min(MOST_PLAN_WARPS, max(FEWEST_PLAN_WARPS, power_of_two(warps)))
        if reqs > ONE_WARP:
            # At least one element per thread. Triton replicates a shorter tensor across threads.
            reqs = max(reqs, ONE_WARP * warps)
        lines = power_of_two(cdiv(self.groups + 1, ONE_WARP))
        stripe = visible.stripe or Stripe(1, 0, 1)
        fixed: dict[str, Any] = {
            "max_reqs": self.limits.max_num_seqs,
            "max_kv_len": self.limits.max_kv_len,
            "decode_max": self.short_query,
            "window": visible.window or 0,
            "chunk": visible.chunk or 1,
            "lookback": visible.lookback,
            "dcp_size": stripe.size,
            "dcp_rank": stripe.rank,
            "dcp_interleave": stripe.interleave,
            "QUERY_TOKENS": self.tile.query_tokens,
            "KV_TILE": self.tile.kv_tile,
            "SEGMENT_UNIT": self.tile.segment_unit,
            "HEAD_LOOPS": self.head_loops,
            "PREFILL_TILE": self.prefill.query_tile,
            "HOPPER_TILE": 0 if self.hopper is None else self.hopper.query_tile,
            "WINDOW": visible.window is not None,
            "CHUNK": visible.chunk is not None,
            "TRIM": is_causal,
            "DCP": visible.stripe is not None,
            "SEGMENTS_PER_GROUP": self.segment_group,
            "MOST_REQS": power_of_two(self.limits.max_num_seqs),
            "REQS": reqs,
            "NUM_GROUPS": self.groups,
            "LINES": max(lines, warps),
            "DEPENDS_ON_BATCH": self.depends_on_batch,
            "LEAST": self.least_tiles or 1,
            "ROW_COST": self.row_cost,
            "WAITS": self.starts_ahead,
        }
        return Launcher(
            plan_kernel,
            fixed,
            ("seq_lens_ptr", "query_start_ptr", "filled", "num_reqs"),
            groups={"filled": tuple(_FILLED)},
            options=LaunchOptions(num_warps=warps, waits=self.starts_ahead),
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
            SplitRules(
                tile=self.tile,
                groups=self.groups,
                head_loops=self.head_loops,
                short_query=self.short_query,
                group_segments=self.segment_group,
                least_tiles=(self.least_tiles or 1) if self.depends_on_batch else None,
                row_cost=self.row_cost,
            ),
            visible,
            is_causal,
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
        """Write the first prefill tile of each request into the buffer ``name``.

        Only requests whose queries are longer than ``short_query`` have tiles.

        Args:
            name: of the buffer, ``[max_num_seqs + 1]`` int32.
            query_tile: query tokens of a tile.
            starts: R + 1 numbers: first token of each request, and the number of tokens.
        """
        lens = [stop - start for start, stop in pairwise(starts)]
        tiles = [cdiv(count, query_tile) if count > self.short_query else 0 for count in lens]
        starts_of_tiles = self.buffers[name]
        starts_of_tiles[: len(starts)] = torch.tensor([0, *tiles]).cumsum(0)
        # Entries past the last request are written too, since a captured graph may have been
        # captured with more requests.
        starts_of_tiles[len(starts) :] = starts_of_tiles[len(starts) - 1]

    def split(self) -> SplitPlan:
        """The plan for the split-KV kernel: one object for all steps, since no buffer moves."""
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
            segment_groups=self.segment_groups,
            short_query=self.short_query,
            hopper=self.hopper_decode,
            requires_hopper=self.requires_hopper_decode,
            depends_on_batch=self.depends_on_batch,
            sums_apart=self.tile.sums_apart if self.is_segmented else 0,
            waits=self.starts_ahead,
        )

    def prefill_plan(self, num_reqs: int, tiles: int, most_programs: int) -> PrefillPlan | None:
        """The plan for the prefill kernel; None where ``tiles`` or ``most_programs`` is 0.

        Args:
            num_reqs: R.
            tiles: the host's estimate of the step's tiles; 0 where it knows that there are none.
            most_programs: programs to launch at most.
        """
        programs = min(tiles * self.num_heads, most_programs)
        if programs == 0:
            return None
        view, hopper, segmented = self.buffers.view, None, None
        if self.is_segmented:
            group = self.segment_group if self.segment_groups > 1 else 0
            states, sums = self.buffers["prefill_states"], self.buffers["prefill_sums"]
            unit, apart = self.tile.segment_unit, self.tile.sums_apart
            segmented = SegmentedKeys(self.tile.kv_tile, unit, group, apart, states, sums)
            if self.prefill_programs:
                programs = min(programs, self.prefill_programs)
        if self.hopper is not None:
            starts = view("hopper_starts", num_reqs + 1)
            hopper = HopperPlan(
                self.hopper.query_tile,
                starts,
                starts[num_reqs:],
                self.buffers["taken"],
                self.num_multiprocessors,
                self.requires_hopper,
                segmented=segmented,
            )
        starts = view("tile_starts", num_reqs + 1)
        return PrefillPlan(self.prefill, starts, programs, hopper, segmented)

    def own_prefill(self, plan: PrefillPlan, num_reqs: int) -> PrefillPlan:
        """A plan for the prefill kernel like ``plan``, in this planner's buffers.

        Args:
            plan: a plan of another planner.
            num_reqs: R.
        """
        own = self.prefill_plan(num_reqs, plan.programs, plan.programs)
        assert own is not None
        return own
