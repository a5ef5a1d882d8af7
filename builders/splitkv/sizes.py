"""What a split-KV plan and its scratch are sized for: worst cases over an engine's limits."""

from __future__ import annotations

from builders.splitkv.record import SplitLimits
from builders.splitkv.segments import bundle_segments, max_segments
from builders.splitkv.tiles import SplitTile
from specs.base import cdiv

PARTS_OF_A_PROGRAM = 2
"""Of rows that are cut anywhere, and folded by another kernel: the last part of the row that a
program's share begins in, and the first one of that which it ends in."""


def parallel_heads(head_tiles: int, programs: int) -> int:
    """How many head tiles walk the same keys at the same time.

    Neighbouring heads lie side by side in a page, so as many as possible; fewer only where that
    would leave more than a thirtieth of the programs idle.
    """
    divisors = [n for n in range(1, head_tiles + 1) if head_tiles % n == 0 and n <= programs]
    used = {n: programs // n * n for n in divisors}
    best = max(used.values())
    return max(n for n in divisors if used[n] * 30 >= best * 29)


def key_bundles(max_kv_len: int, tile: SplitTile) -> tuple[int, int]:
    """How the longest row of keys is cut into bundles.

    Args:
        max_kv_len: its keys.
        tile: of the split-KV kernel.

    Returns:
        Segments of a bundle, and most bundles of a row.
    """
    bundle = bundle_segments(max_kv_len, tile.segment_scale)
    return bundle, cdiv(max_segments(cdiv(max_kv_len, tile.segment_scale)), bundle)


def most_rows(limits: SplitLimits, tile: SplitTile, short_query: int) -> int:
    """Most rows of a plan, before they are cut into bundles.

    Args:
        limits: of the engine.
        tile: of the split-KV kernel.
        short_query: most query tokens of a request that has rows; 0 where none has.
    """
    reqs, tokens = limits.max_num_seqs, limits.max_num_tokens
    return min(
        reqs * cdiv(min(short_query, tokens), tile.query_tokens),
        tokens // tile.query_tokens + reqs,
    )


def most_slots(limits: SplitLimits, tile: SplitTile, moved: int | None, bundle: int) -> int:
    """Most segments of a row, or of a bundle of it, that a program may have states of.

    Args:
        limits: of the engine.
        tile: of the split-KV kernel.
        moved: query tokens that move a window; None for as many as move it through all keys.
        bundle: segments of a bundle; 0 where rows are not cut into any.
    """
    # Behind a window a short query sees little more than it; a long one moves it through all.
    span = None if limits.window is None or moved is None else limits.window + moved
    slots = max_segments(cdiv(limits.max_kv_len, tile.segment_scale), span)
    return min(slots, bundle) if bundle else slots
