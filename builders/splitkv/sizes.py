"""Sizes of a split-KV plan and its scratch, which hold the worst case within an engine's limits."""

from __future__ import annotations

from builders.splitkv.record import SplitLimits
from builders.splitkv.segments import max_segments, segments_per_group
from builders.splitkv.tiles import SplitTile
from specs.base import cdiv

PARTS_OF_A_PROGRAM = 2
"""State slots of a program where work items are cut between any two tiles and a second kernel folds
the parts: one for the last part of the work item in which its share begins, one for the first part
of the work item in which its share ends."""


def parallel_heads(head_tiles: int, programs: int) -> int:
    """How many head tiles walk the same keys at the same time: a divisor of ``head_tiles``.

    The largest divisor is taken, since neighbouring heads lie side by side in a page. A smaller one
    is taken only where the largest would leave more than a thirtieth of the programs idle.

    Args:
        head_tiles: head tiles of the layer.
        programs: programs that run at the same time.
    """
    divisors = [n for n in range(1, head_tiles + 1) if head_tiles % n == 0 and n <= programs]
    used = {n: programs // n * n for n in divisors}
    best = max(used.values())
    return max(n for n in divisors if used[n] * 30 >= best * 29)


def segment_groups_of_keys(max_kv_len: int, tile: SplitTile) -> tuple[int, int]:
    """How the keys of the longest request are cut into segment groups.

    Args:
        max_kv_len: most keys of any request, in tokens.
        tile: tile of the split-KV kernel.

    Returns:
        Segments of a segment group, and most segment groups of a request.
    """
    segment_group = segments_per_group(max_kv_len, tile.segment_scale)
    return segment_group, cdiv(max_segments(cdiv(max_kv_len, tile.segment_scale)), segment_group)


def most_rows(limits: SplitLimits, tile: SplitTile, short_query: int) -> int:
    """Most work items of a plan, if each had all keys, not one segment group.

    Args:
        limits: the engine's limits.
        tile: tile of the split-KV kernel.
        short_query: most query tokens of a request that has work items; 0 where none has any.
    """
    reqs, tokens = limits.max_num_seqs, limits.max_num_tokens
    return min(
        reqs * cdiv(min(short_query, tokens), tile.query_tokens),
        tokens // tile.query_tokens + reqs,
    )


def most_slots(limits: SplitLimits, tile: SplitTile, moved: int | None, segment_group: int) -> int:
    """State slots for segments that a program needs: most segments that a work item can have.

    Args:
        limits: the engine's limits.
        tile: tile of the split-KV kernel.
        moved: most query tokens of a work item's request, by which a window moves on; None where
            they may move it through all keys.
        segment_group: segments of a segment group; 0 where keys are not cut into segment groups.
    """
    # A short query sees hardly more keys than a window has. A long query moves the window through
    # all keys.
    span = None if limits.window is None or moved is None else limits.window + moved
    slots = max_segments(cdiv(limits.max_kv_len, tile.segment_scale), span)
    return min(slots, segment_group) if segment_group else slots
