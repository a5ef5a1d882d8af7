"""The plan of split KV: the plan kernel agrees with its twin on the host, and any plan is sound.

In names, a ``row`` is a work item, a ``segment_group`` a segment group, and a ``lending_group`` the
group of programs that lends its state slots.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builders.buffers import GraphBuffers
from builders.dense import triton_attn
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.device import interprets
from builders.launch.call import collected_calls
from builders.splitkv import planner as split_kv
from builders.splitkv.device.work_items import first_place
from builders.splitkv.host_twin import (
    HostPlan,
    SplitRules,
    plan_rows,
)
from builders.splitkv.planner import PlannerOptions, SplitPlanner
from builders.splitkv.record import (
    ROW_FIELDS,
    SHARE_FIELDS,
    SHORT_QUERY,
    WASTE,
    SplitLimits,
    VisibleKeys,
    longest_short_query,
)
from builders.splitkv.segments import SEGMENTS_PER_GROUP, segment_of
from builders.splitkv.sizes import parallel_heads
from builders.splitkv.stripe import Stripe
from builders.splitkv.tiles import DenseShape, SplitTile
from specs.base import cdiv, power_of_two
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, SpeculativeConfig
from specs.kv_cache import FullAttentionSpec
from specs.positions import MOST_POSITIONS
from tests.tools.gpus import hopper
from tests.tools.interpreter import wrapping

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# -- A step, and its plan as a judge reads it.


@dataclass(frozen=True)
class Step:
    """A batch and everything else that its plan depends on."""

    lens: tuple[tuple[int, int], ...]
    """New tokens and KV length of each request."""
    tile: SplitTile
    groups: int = 6
    head_loops: int = 1
    short_query: int = SHORT_QUERY
    window: int | None = None
    chunk: int | None = None
    lookback: int = 0
    is_causal: bool = False
    stripe: Stripe | None = None
    segment_group: int = 0
    least_tiles: int | None = None
    row_cost: int = 0
    max_kv_len: int = 200_000
    unused: int = 40
    """Requests that the planner has room for beyond the step's."""

    @property
    def visible(self) -> VisibleKeys:
        return VisibleKeys(self.window, self.chunk, self.lookback, self.stripe)

    def plan(self) -> HostPlan:
        counts, kv_lens = ([pair[side] for pair in self.lens] for side in (0, 1))
        rules = SplitRules(
            *(self.tile, self.groups, self.head_loops, self.short_query),
            *(self.segment_group, self.least_tiles, self.row_cost),
        )
        return plan_rows(counts, kv_lens, rules, self.visible, self.is_causal)


def tile_of(query_tokens: int = 4, kv_tile: int = 128, scale: int = 1) -> SplitTile:
    return SplitTile(16, 4, 1, query_tokens, kv_tile, scale, 4, 3, 2, None)


tiles = st.builds(
    tile_of,
    query_tokens=st.sampled_from([1, 2, 4, 8, 16]),
    kv_tile=st.sampled_from([16, 32, 64, 128]),
    scale=st.sampled_from([1, 2, 4]),
)
near_borders = st.sampled_from([512, 1024, 16384, 65536, 131072]).flatmap(
    lambda border: st.integers(border - 130, border + 130)
)
kv_lens = st.one_of(st.integers(0, 300), st.integers(0, 200_000), near_borders)
requests = st.lists(st.tuples(st.integers(0, 40), kv_lens), min_size=1, max_size=12)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    lens = draw(requests)
    if draw(st.booleans()):  # a decode batch
        lens = [(min(count, 1), kv_len) for count, kv_len in lens]
        if draw(st.booleans()):  # of more requests than a warp has threads
            lens = [(1, kv_len) for _, kv_len in lens * 12][:128]
    kind = draw(st.sampled_from(["full", "window", "chunk", "stripe"]))
    ranks = draw(st.integers(2, 5))
    stripe = Stripe(ranks, draw(st.integers(0, ranks - 1)), draw(st.sampled_from([1, 3, 16])))
    span = draw(st.one_of(st.integers(1, 300), st.integers(1, 100_000)))
    head_loops = draw(st.integers(1, 3))
    return Step(
        # Padding rows, of both kinds.
        lens=(*lens, *draw(st.sampled_from([(), ((0, 0), (0, 1)), ((0, 77),)]))),
        tile=draw(tiles),
        groups=draw(st.integers(1, 300)),
        head_loops=head_loops,
        # Where work items are cut at segments, beginnings cost something with one head loop only.
        row_cost=draw(st.sampled_from([0, 2, 5])) if head_loops == 1 else 0,
        short_query=draw(st.sampled_from([1, 16, 24, 64])),
        window=span if kind == "window" else None,
        chunk=span if kind == "chunk" else None,
        lookback=draw(st.integers(0, 2)) if kind == "chunk" else 0,
        is_causal=draw(st.booleans()),
        stripe=stripe if kind == "stripe" else None,
        segment_group=draw(st.sampled_from([0, 4, SEGMENTS_PER_GROUP]))
        if kind in ("full", "stripe")
        else 0,
        unused=draw(st.sampled_from([0, 1, 40])),
    )


def lone(kv_len: int, **changes: Any) -> Step:
    """One request by itself, cut into segment groups, as a latent layer of 16 heads plans it."""
    step = Step(
        ((1, kv_len),), tile_of(query_tokens=1, kv_tile=64), groups=132, row_cost=5,
        segment_group=SEGMENTS_PER_GROUP, max_kv_len=1 << 21,
    )  # fmt: skip
    return replace(step, **changes)


EXAMPLES = 60 if DEVICE.type == "cpu" else 10
"""Examples that hypothesis tries; fewer on a GPU, where each one compiles a kernel."""


def planner_of(step: Step) -> SplitPlanner:
    """A planner with the step's tile and groups, which otherwise follow from the device."""
    shape = DenseShape(4, 1, 64, 64, 2, 16)
    most = sum(count for count, _ in step.lens)
    limits = SplitLimits(len(step.lens) + step.unused, max(most, 1), step.max_kv_len, None)
    planner = SplitPlanner(shape, hopper(1), limits, 1, GraphBuffers(DEVICE))
    planner.tile, planner.groups = step.tile, step.groups
    planner.head_loops, planner.short_query = step.head_loops, step.short_query
    rows = sum(cdiv(count, step.tile.query_tokens) for count, _ in step.lens)
    planner.segment_group, planner.least_tiles = step.segment_group, step.least_tiles
    planner.depends_on_batch, planner.row_cost = step.least_tiles is not None, step.row_cost
    longest = segment_of(step.max_kv_len // step.tile.segment_scale) + 1
    most_segment_groups = cdiv(longest, step.segment_group or 1)
    planner.max_rows = max(rows, 1) * (most_segment_groups if step.segment_group else 1)
    buffers = GraphBuffers(DEVICE)
    int32 = torch.int32
    for name, shape_of in {
        "tile_starts": (limits.max_num_seqs + 1,),
        "hopper_starts": (limits.max_num_seqs + 1,),
        "rows": (planner.max_rows, ROW_FIELDS),
        "total": (2,),
        "starts": (step.groups + 1, 2),
        "shares": (step.groups, SHARE_FIELDS),
    }.items():
        buffers.declare(name, shape_of, int32, fill=-5)
    planner.buffers = buffers
    return planner


def filled(step: Step) -> dict[str, list]:
    """The plan that the kernel writes, as lists without entries that mean nothing."""
    planner = planner_of(step)
    starts = torch.tensor([0, *(count for count, _ in step.lens)]).cumsum(0).int().to(DEVICE)
    lens = torch.tensor([kv_len for _, kv_len in step.lens], dtype=torch.int32, device=DEVICE)
    planner.fill(starts, lens, step.visible, step.is_causal)
    b, count = planner.buffers, len(step.lens) + 1
    total = b["total"].tolist()
    return {
        "tile_starts": b["tile_starts"][:count].tolist(),
        "later_starts": b["tile_starts"][count:].tolist(),
        "rows": b["rows"][: total[0]].tolist(),
        "total": total,
        "starts": [tuple(pair) for pair in b["starts"].tolist()],
        "shares": b["shares"].tolist(),
        "past": b["rows"][total[0] :].flatten().tolist(),
    }


# -- The kernel and its twin.


@settings(max_examples=EXAMPLES, deadline=None)
@given(step=steps())
@example(step=Step(((0, 0),), tile_of()))
@example(step=Step(((40, 40),), tile_of()))
@example(step=Step(((1, 0), (0, 5), (1, 131_073)), tile_of(), groups=300, head_loops=3))
@example(step=Step(((1, 7), (1, 131_073), (1, 9), (1, 4000)) * 3, tile_of(), 300, 3))
@example(step=Step(((1, 8192),) * 32, tile_of(), groups=264))
@example(step=Step(((1, 1000),) * 64, tile_of(), groups=33))
# A compiled variant between the smallest and the variant for all requests of the engine.
@example(step=Step(((1, 1000), (3, 40)) * 20, tile_of(), groups=33, unused=300))
# More requests than a program has: a share that is cut in the last segment of a slice's last work
# item starts in the next slice, whose first requests may have none.
@example(step=Step(((1, 1100),) * 31 + ((0, 5), (70, 80)) * 20 + ((1, 900),) * 50, tile_of(1), 97))
@example(step=Step(((1, 5000), (1, 1100)) * 300, tile_of(1), 299, segment_group=4, unused=400))
@example(step=Step(((0, 0),) * 40 + ((1, 9000), (5, 140_000)) * 40, tile_of(), 132, 2))
# Each request has one work item.
@example(step=Step(((1, 700), (2, 9), (1, 0), (3, 4000)) * 25, tile_of(), 132))
@example(step=Step(((1, 5), (1, 130_000), (1, 700)) * 16, tile_of(1), 123, 2))
@example(step=Step(((1, 300), (1, 9000)) * 33, tile_of(1), 247, least_tiles=2, row_cost=2))
@example(step=Step(((1, 300),) * 128, tile_of(1), 16, segment_group=SEGMENTS_PER_GROUP, unused=0))
@example(
    step=Step(((1, 8000),) * 127 + ((1, 9000),), tile_of(1), 132, segment_group=SEGMENTS_PER_GROUP)
)
@example(step=Step(((1, 8000),) * 128, tile_of(1), 248))
# Sizes around a warp's threads: work items of requests among others that have none, and groups that
# need one warp more.
@example(step=Step(((1, 40_000), (70, 80), (1, 9), (0, 7)) * 4, tile_of(), 31, segment_group=4))
@example(step=Step(((1, 9), (2, 131_073), (1, 0)), tile_of(), 30, 2, segment_group=4))
@example(step=Step(((1, 700), (1, 20)) * 15 + ((2, 9), (1, 0)), tile_of(1), 62))
@example(step=Step(((1, 700), (1, 20)) * 15 + ((2, 9),), tile_of(1), 61, least_tiles=2))
@example(step=Step(((1, 700),), tile_of(), 132, unused=0))
@example(step=Step(((1, 700), (2, 9), (1, 9000)), tile_of(1), 132, segment_group=4, unused=0))
# More work items than a thread makes one after the other: prompts of an invariant engine, and
# segment groups of many keys.
@example(step=Step(((40, 300), (1, 9), (0, 4), (33, 33)), tile_of(1), 33, short_query=64))
@example(
    step=Step(
        ((1, 131_073), (2, 199_000), (1, 7)), tile_of(), 66, 2, segment_group=SEGMENTS_PER_GROUP
    )
)
@example(step=Step(((1, 1000), (2, 7), (1, 0)), tile_of(), 33, least_tiles=2))
@example(step=Step(((40, 900), (9, 90)), tile_of(1), 33, short_query=64, least_tiles=2, row_cost=2))
@example(step=Step(((1, 1000), (9, 700)) * 9, tile_of(), 33, 2, least_tiles=1))
@example(step=Step(((0, 0),), tile_of(), least_tiles=2))
@example(step=Step(((1, 9000), (2, 7), (1, 4000)) * 3, tile_of(), 33, 2, least_tiles=2, row_cost=2))
@example(step=Step(((1, 4096),) * 8, tile_of(), 33, least_tiles=2, row_cost=2))
@example(step=Step(((1, 64), (1, 300), (1, 9)) * 4, tile_of(), 3, least_tiles=1, row_cost=5))
# One request whose segment groups get shares of a power of two: a warp of them and more,
# with a cost of beginnings, with a second walk; and such that too many groups would idle.
@example(step=lone(1 << 18))
@example(step=lone(1 << 20))
@example(step=lone((1 << 20) + 200, head_loops=2, row_cost=0))
@example(step=lone(1_000_000))
@example(step=lone(1 << 20, unused=0, lens=((3, 1 << 20),)))
def test_the_kernels_plan_is_the_hosts(step: Step) -> None:
    check_plan(step)


def check_plan(step: Step) -> None:
    plan, found = step.plan(), filled(step)
    assert found["rows"] == plan.rows
    assert found["total"] == [len(plan.rows), plan.shared]
    assert found["starts"] == plan.starts
    assert set(found["past"]) <= {-5}
    assert found["later_starts"] == [found["tile_starts"][-1]] * step.unused
    for share, (start, stop) in zip(found["shares"], pairwise(plan.starts), strict=True):
        assert share[:4] == [*start, *stop]
        idle = start[0] == len(plan.rows) * step.head_loops
        assert share[4:] == ([-5] * ROW_FIELDS if idle else plan.rows[start[0] // step.head_loops])


@pytest.mark.parametrize("groups", [1, 132, 592])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"segment_group": SEGMENTS_PER_GROUP},
        {"window": MOST_POSITIONS},
        {"chunk": 17, "lookback": MOST_POSITIONS // 17 + 1},
        {"stripe": Stripe(2, 1, 16)},
        {"least_tiles": 4, "row_cost": 3},
    ],
)
def test_plans_of_the_longest_requests_there_are(groups: int, rules: dict[str, Any]) -> None:
    """Kernel and twin agree on requests with as many keys as there are positions.

    There is one request, several of one length, and several of different lengths. The number of
    positions is such that sums of them fit 32 bits.
    """
    most = MOST_POSITIONS
    for lens in (((1, most),), ((1, most), (3, most)), ((1, most - 63), (2, 40), (20, most))):
        step = Step(lens, tile_of(kv_tile=64), groups, max_kv_len=most, unused=1, **rules)
        # Threads past the last work item or group compute numbers too, which are not stored.
        with wrapping():
            check_plan(step)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(step=steps())
def test_longer_queries_are_prefill_tiles_and_no_rows(step: Step) -> None:
    found, planner = filled(step), planner_of(step)
    size = planner.prefill.query_tile
    wanted = [0]
    for count, _ in step.lens:
        wanted.append(wanted[-1] + (cdiv(count, size) if count > step.short_query else 0))
    assert found["tile_starts"] == wanted
    long = {req for req, (count, _) in enumerate(step.lens) if count > step.short_query}
    assert not long & {fields[0] for fields in found["rows"]}


# -- Properties of any plan, judged from the batch alone.


def first_seen(step: Step, position: int) -> int:
    """First key that a query sees."""
    if step.chunk is not None:
        return max(0, (position // step.chunk - step.lookback) * step.chunk)
    return 0 if step.window is None else max(0, position - step.window + 1)


@functools.cache
def kept_by(stripe: Stripe, length: int) -> int:
    """Keys of a rank, counted turn by turn; all of a request's work items ask for the same."""
    starts = range(stripe.rank * stripe.interleave, length, stripe.size * stripe.interleave)
    return sum(min(stripe.interleave, length - start) for start in starts)


@given(ranks=st.integers(1, 5), interleave=st.sampled_from([1, 2, 16]), length=st.integers(0, 300))
def test_ranks_take_turns_and_keep_everything(ranks: int, interleave: int, length: int) -> None:
    kept = [Stripe(ranks, rank, interleave).local_len(length) for rank in range(ranks)]
    assert kept == [kept_by(Stripe(ranks, rank, interleave), length) for rank in range(ranks)]
    assert sum(kept) == length


def segment_groups_of(step: Step, kv_len: int) -> int:
    """Segment groups that the keys of a request are cut into."""
    if not step.segment_group:
        return 1
    keys = kv_len if step.stripe is None else kept_by(step.stripe, kv_len)
    tiles = max(cdiv(keys, step.tile.kv_tile), 1)
    return segment_of((tiles - 1) * step.tile.segment_unit) // step.segment_group + 1


def work_of(step: Step) -> list[tuple[tuple[int, int, int], list[int]]]:
    """Work items ``(request, first token, tokens)``, and the tiles of each of their segments.

    The tokens of a request appear once for each segment group.
    """
    size, unit, tokens = step.tile.kv_tile, step.tile.segment_unit, step.tile.query_tokens
    found, token = [], 0
    for req, (count, kv_len) in enumerate(step.lens):
        for skipped in range(0, count if count <= step.short_query else 0, tokens):
            first, taken = max(kv_len - count, 0) + skipped, min(count - skipped, tokens)
            low = first_seen(step, first) // size
            seen = min(kv_len, first + taken) if step.is_causal else kv_len
            if step.stripe is not None:
                seen = kept_by(step.stripe, seen)
            high = max(cdiv(seen, size), low + 1)
            segments = [segment_of(tile * unit) for tile in range(low, high)]
            row = (req, token + skipped, taken)
            for segment_group in range(segment_groups_of(step, kv_len)):
                mine = segments
                if step.segment_group:
                    # A segment group that the queries do not see has one tile all the same.
                    mine = [
                        one for one in segments if one // step.segment_group == segment_group
                    ] or [-1]
                found.append((row, [mine.count(one) for one in dict.fromkeys(mine)]))
        token += count
    return found


def owners(step: Step, plan: HostPlan) -> list[list[int]]:
    """For each group of programs, the tiles of the segments that it owns.

    Segments are in the order of work items, head loops and positions.
    """
    order = [
        (row * step.head_loops + loop, segment, tiles)
        for row, (_, segments) in enumerate(work_of(step))
        for loop in range(step.head_loops)
        for segment, tiles in enumerate(segments)
    ]
    shares = []
    for start, stop in pairwise(plan.starts):
        mine = [
            index for index, (row, segment, _) in enumerate(order) if start <= (row, segment) < stop
        ]
        assert mine == list(range(mine[0], mine[-1] + 1)) if mine else True
        shares.append([order[index][2] for index in mine])
    return shares


@settings(max_examples=150, deadline=None)
@given(step=steps())
def test_rows_are_the_short_queries_cut_into_tiles(step: Step) -> None:
    plan, work = step.plan(), work_of(step)
    assert [tuple(fields[:3]) for fields in plan.rows] == [row for row, _ in work]
    assert [fields[9] for fields in plan.rows] == [len(segments) for _, segments in work]
    assert [fields[6] for fields in plan.rows] == [sum(segments) for _, segments in work]
    tiles = [fields[6] for fields in plan.rows]
    total = step.head_loops * sum(tiles)
    aligned = power_of_two(cdiv(total, step.groups)) * step.groups
    is_alone = step.segment_group > 0 and len(step.lens) == 1
    if len(set(tiles)) > 1 and not (is_alone and aligned <= total * (1 + 1 / WASTE)):
        total += step.row_cost * len(tiles)
    assert total <= plan.shared <= total * (1 + 1 / WASTE)
    for (req, token, _), fields in zip((row for row, _ in work), plan.rows, strict=True):
        count, kv_len = step.lens[req]
        begin = sum(earlier for earlier, _ in step.lens[:req])
        assert fields[3:5] == [kv_len, max(kv_len - count, 0) + token - begin]


@settings(max_examples=150, deadline=None)
@given(step=steps())
def test_every_segment_has_one_owner_and_the_shares_are_even(step: Step) -> None:
    plan = step.plan()
    shares = owners(step, plan)
    everything = [
        tiles for _, segments in work_of(step) for _ in range(step.head_loops) for tiles in segments
    ]
    assert plan.starts[0] == (0, 0)
    assert plan.starts[-1] == (len(plan.rows) * step.head_loops, 0)
    assert list(plan.starts) == sorted(plan.starts)
    # The shares side by side are all of the work, in order and without repetition.
    assert [tiles for share in shares for tiles in share] == everything
    even, longest = plan.shared / step.groups, max(everything, default=0)
    assert all(sum(share) <= even + longest for share in shares)


@settings(max_examples=100, deadline=None)
@given(step=steps())
def test_a_group_enters_at_most_one_row_in_its_middle(step: Step) -> None:
    """A group lends its state slots to one work item at most, since scratch is per group."""
    plan = step.plan()
    lending_groups = []
    for row, fields in enumerate(plan.rows):
        for loop in range(step.head_loops):
            entered = [
                group
                for group, (at, segment) in enumerate(plan.starts[:-1])
                if at == row * step.head_loops + loop and segment
            ]
            place = fields[7] + loop * fields[6]
            if entered:
                lending_groups.append(place * step.groups // plan.shared + 1)
                assert plan.starts[lending_groups[-1]] == plan.starts[entered[0]]
    assert len(lending_groups) == len(set(lending_groups))
    assert all(0 < lending_group < step.groups for lending_group in lending_groups)


@settings(max_examples=100, deadline=None)
@given(step=steps(), least=st.sampled_from([1, 2, 5]))
def test_rows_cut_anywhere_are_shared_out_by_tiles(step: Step, least: int) -> None:
    """Shares differ by one tile at most, idle groups come last, and no share is below the least."""
    plan = replace(step, segment_group=0, least_tiles=least, row_cost=0).plan()
    tiles = [fields[6] for fields in plan.rows for _ in range(step.head_loops)]
    starts = [*itertools.accumulate(tiles, initial=0)]
    places = [starts[at] + tile for at, tile in plan.starts]
    shares = [stop - start for start, stop in pairwise(places)]
    assert plan.starts[0] == (0, 0)
    assert sum(shares) == starts[-1]
    busy = [share for share in shares if share]
    assert shares[: len(busy)] == busy
    sharers = max(min(step.groups, starts[-1] // least), 1)
    assert len(busy) <= sharers
    assert max(busy, default=0) <= cdiv(plan.shared, sharers)
    assert min(busy[:-1], default=least) >= min(least, plan.shared // sharers)


@settings(max_examples=100, deadline=None)
@given(step=steps(), cost=st.sampled_from([1, 2, 5]))
@example(step=Step(((1, 20_000), *((1, 300),) * 40), tile_of(), 4), cost=2)
def test_rows_that_begin_are_shared_out_too(step: Step, cost: int) -> None:
    """A group with many short work items gets fewer tiles, since each beginning costs some."""
    plan = replace(step, segment_group=0, least_tiles=1, row_cost=cost).plan()
    tiles = [fields[6] for fields in plan.rows for _ in range(step.head_loops)]
    starts = [*itertools.accumulate(tiles, initial=0)]
    places = [starts[at] + tile for at, tile in plan.starts]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, starts[-1])
    if len(set(tiles)) < 2:
        assert plan == replace(step, segment_group=0, least_tiles=1, row_cost=0).plan()
        return
    sharers = max(min(step.groups, plan.shared), 1)
    for (row, tile), (next_row, next_tile) in pairwise(plan.starts):
        begun = len(range(row + (tile > 0), next_row + (next_tile > 0)))
        share = starts[next_row] + next_tile - starts[row] - tile + cost * begun
        # A part of the first work item's beginning may lie in the share before.
        assert share <= cdiv(plan.shared, sharers) + cost


@settings(max_examples=100, deadline=None)
@given(step=steps())
@example(
    step=Step(
        ((1, 131_072), (2, 40_000), (1, 9000)), tile_of(), 3, segment_group=SEGMENTS_PER_GROUP
    )
)
@example(
    step=Step(((1, 20_000),) * 9, tile_of(), 7, head_loops=2, segment_group=SEGMENTS_PER_GROUP)
)
def test_no_two_rows_lend_segment_groups_from_one_group(step: Step) -> None:
    """A group lends slots for segment groups to the tokens of one work item at most.

    If no group starts among the segment groups of some tokens, one group has all of them.
    """
    is_local = step.window is not None or step.chunk is not None
    step = replace(step, segment_group=0 if is_local else step.segment_group or SEGMENTS_PER_GROUP)
    plan, loops = step.plan(), step.head_loops
    lending_groups = []
    for at, fields in enumerate(plan.rows):
        segment_group, segment_groups = fields[10:]
        assert segment_groups == segment_groups_of(step, fields[3])
        if segment_group or segment_groups == 1:
            continue
        rows = plan.rows[at : at + segment_groups]
        assert [row[10] for row in rows] == list(range(segment_groups))
        assert {tuple(row[:5]) for row in rows} == {tuple(fields[:5])}
        assert [row[8] for row in rows] == [
            one * step.segment_group for one in range(segment_groups)
        ]
        for loop in range(loops):
            places = [row[7] + loop * row[6] for row in rows]
            ends = [place + row[6] - 1 for place, row in zip(places, rows, strict=True)]
            first, last = (one * step.groups // plan.shared for one in (places[0], ends[-1]))
            if last > first:
                lending_groups.append((first + 1, loop))
                continue
            for one in range(at, at + segment_groups):
                here = one * loops + loop
                assert plan.starts[first] <= (here, 0)
                assert (here, plan.rows[one][9] - 1) < plan.starts[first + 1]
    assert len(lending_groups) == len(set(lending_groups))
    assert all(0 < lending_group < step.groups for lending_group, _ in lending_groups)


@pytest.mark.parametrize(
    ("requests", "kv_len", "groups", "parts"),
    [(32, 4096, 33, 1), (8, 8192, 33, 4), (32, 8192, 264, 8), (256, 1024, 33, 1)],
)
def test_rows_of_one_length_are_given_out_whole_or_in_equal_parts(
    requests: int, kv_len: int, groups: int, parts: int
) -> None:
    step = Step(((1, kv_len),) * requests, tile_of(query_tokens=1, kv_tile=64), groups)
    plan = step.plan()
    sums = {sum(share) for share in owners(step, plan)} - {0}
    assert len(sums) == 1
    inside = [start for start in plan.starts if start[1]]
    assert len(inside) == (parts - 1) * requests


def test_rows_are_not_kept_whole_where_many_programs_would_idle() -> None:
    step = Step(((1, 4096),) * 24, tile_of(query_tokens=1, kv_tile=64), groups=33)
    assert step.plan().shared == 24 * 64


@pytest.mark.parametrize("kv_len", [1 << 18, 1 << 19, 1 << 20, (1 << 20) + 200])
def test_no_program_goes_from_one_segment_group_of_a_lone_request_to_the_next(kv_len: int) -> None:
    plan = lone(kv_len).plan()
    assert len({fields[6] for fields in plan.rows}) > 1
    for (row, _), (next_row, next_segment) in pairwise(plan.starts):
        assert next_row + (next_segment > 0) - row <= 1
    # Beginnings cost nothing, since no program has a second one.
    assert plan.starts == lone(kv_len, row_cost=0).plan().starts


@pytest.mark.parametrize("changes", [{"lens": ((1, 1_000_000),)}, {"lens": ((1, 1 << 20),) * 2}])
def test_shares_are_no_power_of_two_where_programs_would_idle_or_requests_are_several(
    changes: dict[str, Any],
) -> None:
    plan = lone(1 << 20, **changes).plan()
    tiles = [fields[6] for fields in plan.rows]
    assert plan.shared == sum(tiles) + 5 * len(tiles)


def test_requests_without_tokens_cost_nothing_and_keyless_rows_one_tile() -> None:
    plan = Step(((0, 0), (0, 900), (1, 0), (3, 0)), tile_of()).plan()
    assert [fields[0] for fields in plan.rows] == [2, 3]
    assert [fields[6] for fields in plan.rows] == [1, 1]
    assert plan.shared == 2
    assert Step(((0, 0), (0, 7)), tile_of()).plan().starts == [(0, 0)] * 7


@given(head_tiles=st.integers(1, 128), programs=st.integers(1, 600))
def test_heads_side_by_side_leave_few_programs_idle(head_tiles: int, programs: int) -> None:
    heads = parallel_heads(head_tiles, programs)
    assert head_tiles % heads == 0
    assert heads <= programs
    used = {
        one: programs // one * one
        for one in range(1, min(head_tiles, programs) + 1)
        if head_tiles % one == 0
    }
    assert used[heads] * 30 >= max(used.values()) * 29
    more = [one for one in used if one > heads]
    assert all(used[one] * 30 < max(used.values()) * 29 for one in more)


# -- Which requests have work items.


@pytest.mark.parametrize(
    ("kv_heads", "head_tiles", "query_tokens", "verify", "longest"),
    [
        (1, 1, 1, 1, SHORT_QUERY),
        (8, 1, 1, 1, 8),
        (32, 1, 1, 1, 2),
        (64, 2, 1, 1, 1),
        (8, 1, 4, 4, SHORT_QUERY),
        (32, 2, 4, 8, 8),
        (8, 1, 1, 24, 24),
    ],
)
def test_what_walks_its_keys_too_often_is_the_prefill_kernels(
    kv_heads: int, head_tiles: int, query_tokens: int, verify: int, longest: int
) -> None:
    tile = replace(tile_of(1), head_tiles=head_tiles, query_tokens=query_tokens)
    assert longest_short_query(kv_heads, tile, verify) == longest


def test_a_planner_knows_its_longest_row_by_its_heads() -> None:
    limits = SplitLimits(2, 64, 128, None)
    for kv_heads, longest in ((2, SHORT_QUERY), (8, 8), (32, 2)):
        shape = DenseShape(32, kv_heads, 128, 128, 2, 16)
        planner = SplitPlanner(shape, hopper(132), limits, 1, GraphBuffers("cpu"))
        assert planner.short_query == longest


# -- Launches.


def test_every_form_of_the_plan_is_loaded_before_a_step_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = planner_of(Step(((1, 9),), tile_of(), unused=999))
    assert planner.plan_sizes == (32, 128, 512, 1024)
    assert planner_of(Step(((1, 9),), tile_of(), unused=3000)).plan_sizes == (32, 128, 512, 4096)
    assert planner_of(Step(((1, 9),), tile_of(), unused=6)).plan_sizes == (8,)
    assert planner_of(Step(((1, 9),), tile_of(), unused=63)).plan_sizes == (32, 64)
    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(planner, "device", torch.device("cuda"))
    monkeypatch.setattr(
        planner, "_launch_for", lambda reqs, num_reqs, *_: launched.append((reqs, num_reqs))
    )

    def launches(num_reqs: int, is_causal: bool = False) -> list[tuple[int, int]]:
        launched.clear()
        starts = torch.arange(num_reqs + 1, dtype=torch.int32)
        planner.fill(starts, starts[1:], is_causal=is_causal)
        return [*launched]

    with collected_calls():
        # A collected launch loads no kernel, so the first step launches all variants again.
        assert launches(40) == [(32, 0), (512, 0), (1024, 0), (128, 40)]
    assert launches(129) == [(32, 0), (128, 0), (1024, 0), (512, 129)]
    assert launches(1000) == [(1024, 1000)]
    assert launches(32) == [(32, 32)]
    assert launches(33, is_causal=True) == [(32, 0), (512, 0), (1024, 0), (128, 33)]


@pytest.mark.parametrize("device", ["a100", "h100", "rtx-pro-6000"])
def test_on_hopper_the_plan_and_the_kernels_behind_it_start_ahead_and_wait(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_kv, "interprets", lambda: False)
    limits, starts = SplitLimits(4, 4, 512, None), torch.arange(3, dtype=torch.int32)
    shape, gpu = DenseShape(4, 1, 64, 64, 2, 16), KNOWN_DEVICES[device].facts
    planner = SplitPlanner(shape, gpu, limits, 1, GraphBuffers("cpu"))
    # Without a GPU, fill launches the kernel only under the interpreter.
    monkeypatch.setattr(split_kv, "interprets", lambda: True)
    with collected_calls() as calls:
        planner.fill(starts, starts[1:])
    (call,) = calls
    ahead = gpu.kind is DeviceKind.SM90
    assert planner.split().waits == ahead
    assert call.arguments["WAITS"] == call.options.get("launch_pdl", False) == ahead


# -- Scratch.


@pytest.mark.parametrize("speculative", [None, 3])
@pytest.mark.parametrize(
    "cache_dtype", [CacheDType.AUTO, CacheDType.FP8, CacheDType.INT4_PER_TOKEN_HEAD]
)
def test_scratch_of_a_large_engine_is_small(
    monkeypatch: pytest.MonkeyPatch, cache_dtype: CacheDType, speculative: int | None
) -> None:
    monkeypatch.setattr(triton_attn, "device_facts", lambda device: hopper(132))
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=DType.BFLOAT16, cache_dtype=cache_dtype
    )
    config = EngineConfig(
        max_model_len=131072,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        num_heads=32,
        speculative=speculative and SpeculativeConfig(num_speculative_tokens=speculative),
    )
    builder = TritonAttentionMetadataBuilder(spec, ["layers.0"], config, "cpu")
    # The states of a verify grow with its tokens.
    limit = 64 if speculative is None else 64 * (1 + speculative)
    assert builder.planner.scratch_bytes < limit << 20
    assert builder.buffers.nbytes < (limit + 2) << 20


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 16384)), min_size=1, max_size=4),
    span=st.one_of(st.none(), st.integers(1, 5000)),
    every_row=st.booleans(),
    group=st.sampled_from([1, 4, 8, 16]),
    max_query_len=st.sampled_from([1, 4, 16]),
)
@example(lens=[(8000, 8000)], span=13, every_row=True, group=1, max_query_len=1)
def test_no_row_has_more_segments_than_slots_and_no_step_more_rows_than_are_kept(
    lens: list[tuple[int, int]],
    span: int | None,
    every_row: bool,
    group: int,
    max_query_len: int,
) -> None:
    lens = [(min(count, kv_len), kv_len) for count, kv_len in lens]
    shape = DenseShape(group, 1, 64, 64, 2, 16)
    tokens = max(sum(count for count, _ in lens), 1)
    limits = SplitLimits(len(lens), tokens, 16384, span)
    buffers = GraphBuffers("cpu")
    options = PlannerOptions(every_row=every_row)
    planner = SplitPlanner(shape, hopper(3), limits, max_query_len, buffers, options)
    for is_causal in (False, True):
        tile, groups, short = planner.tile, planner.groups, planner.short_query
        step = Step(tuple(lens), tile, groups, 1, short, span, is_causal=is_causal)
        plan = replace(step, segment_group=planner.segment_group).plan()
        assert len(plan.rows) <= planner.max_rows
        assert max((fields[11] for fields in plan.rows), default=1) <= planner.segment_groups
        assert max((fields[9] for fields in plan.rows), default=0) <= planner.slots


# -- The first place of a group.


@triton.jit
def places_kernel(groups_ptr, shared_ptr, sharers_ptr, places_ptr, N: tl.constexpr):
    """:func:`first_place` of groups."""
    i = tl.arange(0, N)
    shared, sharers = tl.load(shared_ptr + i), tl.load(sharers_ptr + i)
    tl.store(places_ptr + i, first_place(tl.load(groups_ptr + i), shared, sharers))


def test_a_group_begins_at_its_part_of_all_tiles_rounded_up() -> None:
    if DEVICE.type == "cpu" and not interprets():
        pytest.skip("needs Triton's interpreter")
    cases = [
        (group, shared, sharers)
        for sharers in (1, 3, 7, 33, 41, 66, 132, 264, 299)
        for shared in (1, 5, sharers, 11 * sharers, 1009 * sharers, 131_073, 41_943_041)
        for group in {0, 1, sharers // 3, sharers // 2, sharers - 1, sharers}
    ]
    size = power_of_two(len(cases))
    cases += [(0, 1, 1)] * (size - len(cases))
    given_ = [
        torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in zip(*cases, strict=True)
    ]
    places = torch.empty(size, dtype=torch.int32, device=DEVICE)
    places_kernel[(1,)](*given_, places, N=size)
    assert places.tolist() == [cdiv(group * shared, sharers) for group, shared, sharers in cases]
