"""The step's plan on the host: the plan kernel's twin, in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from builders.splitkv.record import EVERY_KEY, MOST_SHARED, WASTE, VisibleKeys
from builders.splitkv.segments import segment_of, segment_start
from builders.splitkv.tiles import (
    SplitTile,
)
from specs.base import cdiv


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
    visible: VisibleKeys = EVERY_KEY,
    is_causal: bool = False,
    bundle_of: int = 0,
    least_tiles: int | None = None,
    row_cost: int = 0,
) -> HostPlan:
    """What :func:`builders.splitkv.device.plan.plan_kernel` computes, on the host.

    Args:
        query_lens: new tokens of each request.
        kv_lens: KV length of each request.
        tile: the split-KV tile.
        groups: groups of programs that share the work.
        head_loops: walks over the keys of each row.
        short_query: longest query of a row.
        visible: which keys.
        is_causal: no query sees past itself.
        bundle_of: segments of a bundle; rows are cut where bundles begin, and every key is seen. 0
            where they are not.
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
        bundles = segment_of(last_tile * tile.segment_unit) // bundle_of + 1 if bundle_of else 1
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
                if bundle_of:
                    first_tile = segment_start(bundle * bundle_of) // tile.segment_unit
                    past = segment_start((bundle + 1) * bundle_of) // tile.segment_unit
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
