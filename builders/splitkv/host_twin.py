"""The twin of the plan kernel on the host: it computes a step's plan in Python's numbers.

It plans on a CPU without Triton's interpreter, and tests hold the kernel against it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from builders.splitkv.record import EVERY_KEY, MOST_SHARED, WASTE, VisibleKeys
from builders.splitkv.segments import segment_of, segment_start
from builders.splitkv.tiles import SplitTile
from specs.base import cdiv, power_of_two


@dataclass(frozen=True)
class HostPlan:
    """A step's plan as Python's numbers."""

    rows: list[list[int]]
    """Work items, each of :data:`builders.splitkv.record.ROW_FIELDS` numbers."""
    shared: int
    """KV tiles that the groups of programs share."""
    starts: list[tuple[int, int]]
    """Work item x head loop where each group starts, and the segment (or the tile) in it; one entry
    more than there are groups."""


@dataclass(frozen=True)
class SplitRules:
    """How the work of every step is cut, in a plan of one kernel and one layer."""

    tile: SplitTile
    """The split-KV tile."""
    groups: int
    """Groups of programs that share the work."""
    head_loops: int
    """Walks over the keys of each work item."""
    short_query: int
    """Longest query, in tokens, of a request that has work items."""
    group_segments: int = 0
    """Segments of a segment group, for plans without window or chunk; 0 where a work item has all
    keys."""
    least_tiles: int | None = None
    """Fewest tiles of a share, where work items are cut between any two tiles; the plan's starts
    then hold tiles of work items, not segments. None cuts work items at segments."""
    row_cost: int = 0
    """Tiles that the beginning of a work item counts as, where work items have different numbers of
    tiles. They lie before its first tile. Where work items are cut at segments, there is one head
    loop."""


def plan_rows(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    rules: SplitRules,
    visible: VisibleKeys = EVERY_KEY,
    is_causal: bool = False,
) -> HostPlan:
    """Compute on the host what :func:`builders.splitkv.device.plan.plan_kernel` computes.

    Args:
        query_lens: new tokens of each request.
        kv_lens: KV length of each request.
        rules: how work is cut.
        visible: the keys that queries may see.
        is_causal: True if no query of any request sees past itself.
    """
    tile, groups, head_loops = rules.tile, rules.groups, rules.head_loops
    group_segments, least_tiles = rules.group_segments, rules.least_tiles
    window, chunk, stripe = visible.window, visible.chunk, visible.stripe
    rows: list[list[int]] = []
    token = 0
    for req, (count, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        short = 0 < count <= rules.short_query
        keys = kv_len if stripe is None else stripe.local_len(kv_len)
        last_tile = max(cdiv(keys, tile.kv_tile) - 1, 0)
        segment_groups = (
            segment_of(last_tile * tile.segment_unit) // group_segments + 1 if group_segments else 1
        )
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
            for segment_group in range(segment_groups):
                first_tile, stop_tile = max(start, 0) // tile.kv_tile, cdiv(stop, tile.kv_tile)
                if group_segments:
                    first_tile = segment_start(segment_group * group_segments) // tile.segment_unit
                    past = segment_start((segment_group + 1) * group_segments) // tile.segment_unit
                    stop_tile = min(stop_tile, past)
                tiles = max(stop_tile - first_tile, 1)
                part = segment_of(first_tile * tile.segment_unit)
                parts = segment_of((first_tile + tiles - 1) * tile.segment_unit) + 1 - part
                where = [first_tile, tiles, 0, part, parts, segment_group, segment_groups]
                rows.append([req, token + skipped, taken, kv_len, first, *where])
        token += count
    row_tiles = [fields[6] for fields in rows]
    aligned = None
    if group_segments and len(query_lens) == 1 and len(set(row_tiles)) > 1:
        aligned = aligned_tiles(sum(row_tiles) * head_loops, groups)
    # Work items of one length are cut into equal parts, so each share has as many beginnings.
    # Few aligned shares have the beginning of a second work item.
    cost = rules.row_cost if len(set(row_tiles)) > 1 and aligned is None else 0
    place = 0
    for fields in rows:
        fields[7] = place + cost
        place += (fields[6] + cost) * head_loops
    depends_on_batch, sharers = least_tiles is not None, groups
    if least_tiles is not None:
        # Arrivals of groups are counted, and a group without a tile would never arrive.
        sharers = max(min(groups, place // least_tiles), 1)
    shared = shared_tiles(place, row_tiles, sharers) if aligned is None else aligned
    starts = [
        _start_of(
            cdiv(c * shared, sharers),
            place,
            rows,
            tile.segment_unit,
            head_loops,
            depends_on_batch,
            cost,
        )
        for c in range(groups + 1)
    ]
    return HostPlan(rows, shared, starts)


def aligned_tiles(total: int, groups: int) -> int | None:
    """KV tiles that the groups share if each gets a power of two.

    It is for a request by itself whose keys are cut into segment groups, which begin at multiples
    of powers of two. With other shares some programs go on from one segment group to the next,
    which takes them as long as several tiles, and all others wait for them.

    Args:
        total: tiles of the step.
        groups: groups of programs.

    Returns:
        None where that leaves more than one in ``WASTE`` programs idle.
    """
    shared = power_of_two(cdiv(total, groups)) * groups
    return shared if total <= MOST_SHARED and (shared - total) * WASTE <= total else None


def shared_tiles(total: int, row_tiles: Sequence[int], groups: int) -> int:
    """KV tiles that the groups share evenly: the step's, or a few more to keep work items whole.

    A group that goes on to another work item waits for memory once more. Where all work items have
    as many tiles, they are given out whole, or cut into equal parts, if that leaves no more than
    one in ``WASTE`` programs idle.

    Args:
        total: tiles of the step.
        row_tiles: tiles of each work item.
        groups: groups of programs.
    """
    if len(set(row_tiles)) != 1:
        return total
    tiles = row_tiles[0]
    if tiles > MOST_SHARED // groups or total > MOST_SHARED:
        return total
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
    depends_on_batch: bool,
    cost: int,
) -> tuple[int, int]:
    """Work item (times head loops) and segment of the first segment at or after a position.

    Where work items are cut between any two tiles (``depends_on_batch``), the second number is a
    tile of the work item, not a segment.
    """
    if position >= total:
        return len(rows) * head_loops, 0
    row = bisect_right(rows, position, key=lambda fields: fields[7] - cost) - 1
    first_tile, tiles, place = rows[row][5:8]
    loop, offset = divmod(position - place + cost, tiles + cost)
    offset = max(offset - cost, 0)
    if depends_on_batch:
        return row * head_loops + loop, offset
    tile = first_tile + offset
    at = segment_of(tile * unit)
    if max(segment_start(at) // unit, first_tile) < tile:
        at += 1
    if at > segment_of((first_tile + tiles - 1) * unit):
        return row * head_loops + loop + 1, 0
    return row * head_loops + loop, at - segment_of(first_tile * unit)
