"""Split KV: scratch and the step's plan of the dense attention kernels.

The plan is computed on the device, by one launch per step, from ``seq_lens`` and
``query_start_loc`` alone: host values size grids and buffers and decide nothing.
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
from builders.launch.call import collected
from builders.splitkv.host_twin import plan_rows
from builders.splitkv.record import (
    EVERY_KEY,
    ONE_WARP,
    ROW_FIELDS,
    SHARE_FIELDS,
    HopperPlan,
    PrefillPlan,
    SplitLimits,
    SplitPlan,
    VisibleKeys,
    area_of,
    latent_states,
    longest_short_query,
)
from builders.splitkv.sizes import (
    PARTS_OF_A_PROGRAM,
    key_bundles,
    most_rows,
    most_slots,
    parallel_heads,
)
from builders.splitkv.stripe import Stripe
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    SplitTile,
    prefill_tile,
    split_tile,
)
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind, GpuFacts

PLAN_SIZES = (ONE_WARP, 4 * ONE_WARP, 16 * ONE_WARP)
"""Most requests of forms of the plan's kernel, beside that for as many as an engine may have."""
FEWEST_PLAN_WARPS, MOST_PLAN_WARPS = 4, 8
"""Of the plan's program."""


@dataclass(frozen=True)
class PlannerOptions:
    """Which rows a planner cuts, how, and the kernels that it plans for beside the plain ones."""

    every_row: bool = False
    """Take every row, whatever its query length (batch invariance)."""
    is_free: bool = False
    """Cut rows anywhere, see :class:`SplitPlan`."""
    takes_rows: bool = True
    """False leaves every row to the prefill kernel (encoders)."""
    hopper: HopperTile | None = None
    """Tile of the prefill kernel for Hopper, where that serves."""
    requires_hopper: bool = False
    """A layer that this kernel does not serve is an error, see :class:`HopperPlan`."""
    hopper_decode: HopperDecodeTile | None = None
    """Tile of the split-KV kernel for Hopper, where the plan is for that."""
    requires_hopper_decode: bool = False
    """A layer that this kernel does not serve is an error, see :class:`SplitPlan`."""
    latent: SplitTile | None = None
    """Tile of the latent decode kernel, where the plan is for that."""


NO_OPTIONS = PlannerOptions()


class SplitPlanner:
    """Owns the buffers of the plan, and fills them once per step."""

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
            gpu: what runs it.
            limits: what the buffers must hold.
            max_query_len: query tokens of a verify.
            buffers: where the buffers are declared.
            options: rows and kernels; by default the plan is for the plain split-KV kernel.
        """
        hopper_decode, latent = options.hopper_decode, options.latent
        self.least_tiles = None if hopper_decode is None else hopper_decode.least_tiles
        self.row_cost = 0 if hopper_decode is None else hopper_decode.row_cost
        self.is_free = options.is_free or self.least_tiles is not None
        self.hopper_decode = hopper_decode
        self.requires_hopper_decode = options.requires_hopper_decode
        if latent is not None:
            tile = latent
        elif hopper_decode is not None:
            tile = hopper_decode.split
        else:
            tokens = 16 if options.every_row else max_query_len
            tile = split_tile(shape, gpu, tokens, limits.window)
        self.tile = tile
        # The plan's kernel and those behind it, which wait by themselves.
        self.starts_ahead = gpu.kind is DeviceKind.SM90 and not interprets()
        self.prefill = prefill_tile(shape, gpu)
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
        self.num_heads = shape.num_heads
        self.num_multiprocessors = gpu.num_multiprocessors
        # A long row of keys is cut into bundles; behind a window there are not many.
        self.bundle, self.bundles = 0, 1
        if limits.window is None and not self.is_free and options.takes_rows:
            self.bundle, self.bundles = key_bundles(limits.max_kv_len, tile)
        self.max_rows = self.bundles * most_rows(limits, tile, self.short_query)
        if not options.takes_rows:
            self.slots = 0
        elif self.is_free:
            # A program has parts of two rows; or it lends states to every other.
            self.slots = self.groups if self.least_tiles is None else PARTS_OF_A_PROGRAM
        else:
            moved = None if options.every_row else self.short_query
            self.slots = most_slots(limits, tile, moved, self.bundle)
        self._declare(buffers, shape.head_size_v, latent is not None)
        self.buffers = buffers
        self._compiled_for: set[bool] = set()
        self._launches: dict[tuple[int, VisibleKeys, bool], Callable[..., None]] = {}

    def _declare(self, buffers: GraphBuffers, head_size_v: int, is_latent: bool) -> None:
        """Declare the plan's buffers, and the scratch of states."""
        tile, reqs = self.tile, self.limits.max_num_seqs
        used = tile.tile_heads * tile.query_tokens
        launched = self.groups * self.heads
        area = area_of(self.slots, self.bundles, self.head_loops)
        if is_latent:
            area = sum(latent_states(self.slots, self.bundles, self.head_loops))
        states = launched * area * used
        # Quantised rows are read in planes, each rounded up to a power of two on its own.
        width = max(power_of_two(head_size_v), 64)
        int32, fp32 = torch.int32, torch.float32
        buffers.declare("tile_starts", (reqs + 1,), int32)
        buffers.declare("hopper_starts", (reqs + 1,), int32)
        buffers.declare("taken", (1,), int32)
        buffers.declare("row_ends", (power_of_two(reqs),), int32)
        buffers.declare("names", (self.groups + 1, 2), int32)
        buffers.declare("rows", (self.max_rows, ROW_FIELDS), int32)
        buffers.declare("total", (2,), int32)
        buffers.declare("starts", (self.groups + 1, 2), int32)
        buffers.declare("shares", (self.groups, SHARE_FIELDS), int32)
        buffers.declare("counters", (launched * (1 + self.head_loops),), int32)
        buffers.declare("states", (states * width,), fp32)
        buffers.declare("sums", (states * 2,), fp32)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the states of segments."""
        return 4 * (self.buffers["states"].numel() + self.buffers["sums"].numel())

    @cached_property
    def plan_sizes(self) -> tuple[int, ...]:
        """Most requests of each form of the plan's kernel: a step takes the smallest.

        A form's warps wait for each other, few requests as long as many.
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
        num_reqs = len(query_start_loc) - 1
        sizes = self.plan_sizes
        own = next((size for size in sizes if num_reqs <= size), sizes[-1])
        if self.device.type == "cuda" and is_causal not in self._compiled_for:
            # Of no request: no later step waits for the compiler, for having more than this one.
            for reqs in sizes:
                if reqs != own:
                    self._launch_for(reqs, 0, query_start_loc, seq_lens, visible, is_causal)
            # What is collected is compiled, and not loaded yet.
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
        """Compute the plan of ``num_reqs`` requests, by a kernel for ``reqs`` at most."""
        kind = (reqs, visible, is_causal)
        launch = self._launches.get(kind)
        if launch is None:
            launch = self._launches[kind] = self._launches_of(reqs, visible, is_causal)
        b = self.buffers
        launch(
            (1,),
            seq_lens,
            query_start_loc,
            b["rows"],
            b["total"],
            b["starts"],
            b["shares"],
            b["tile_starts"],
            b["hopper_starts"],
            b["row_ends"],
            b["names"],
            num_reqs,
        )

    def _launches_of(self, reqs: int, visible: VisibleKeys, is_causal: bool) -> Callable[..., None]:
        """Launches of the plan's kernel that differ in tensors and the number of requests."""
        from builders.launch.launcher import Launcher
        from builders.splitkv.device.plan import plan_kernel

        steps, starts = reqs.bit_length() - 1, self.groups + 1
        # The last of a warp's threads computes for the one before it.
        lines = power_of_two(cdiv(starts, ONE_WARP - 1))
        if reqs <= ONE_WARP:
            reqs, starts = ONE_WARP, lines * ONE_WARP
        warps = cdiv(max(reqs, power_of_two(starts)), ONE_WARP)
        warps = min(MOST_PLAN_WARPS, max(FEWEST_PLAN_WARPS, warps))
        # Of fewer than threads each would be several threads', and differently where it is stored:
        # tensors would go from one form to another, behind barriers.
        threads = ONE_WARP * warps
        groups = max(power_of_two(starts), threads)
        if reqs > ONE_WARP:
            reqs = max(reqs, threads)
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
            "BUNDLE": self.bundle,
            "MOST_REQS": power_of_two(self.limits.max_num_seqs),
            "REQS": reqs,
            "STEPS": steps,
            "NUM_GROUPS": self.groups,
            "GROUPS": groups,
            "LINES": max(lines, warps),
            "FREE": self.is_free,
            "LEAST": self.least_tiles or 1,
            "ROW_COST": self.row_cost,
            "WAITS": self.starts_ahead,
        }
        return Launcher(plan_kernel, fixed, num_warps=warps, waits=self.starts_ahead)

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
            self.bundle,
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
            waits=self.starts_ahead,
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
