"""Masks at the borders of key tiles: a mask's edge at every distance from a tile's border.

A kernel applies no mask to a tile that every query sees whole, and skips a tile that no query sees.
It decides both by comparing the mask's edges with the tile's borders. A comparison that is off by
one shows at one context length only, among as many lengths as a tile has keys. The batches here
have requests on both sides of each border.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from attn.backends.triton_attn import TritonAttentionBackend
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import FEATURES, Case, Feature
from attn.testing.conformance import check_case
from attn.testing.dense_trial import DenseTrial
from builders.device import interprets
from specs.dtypes import DType

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = Heads(2, 2, 64)
QUERIES = 20
"""New tokens of a request: so many that the prefill kernel runs it, not the split-KV kernel."""
TILE = 64
"""Keys of the prefill kernel's tile in fp16, at the head size of these tests."""
WINDOW = 2 * TILE + QUERIES
"""A window so wide that every query of a request sees a tile in its middle whole."""
AROUND = (-2, -1, 0, 1)

pytestmark = pytest.mark.skipif(
    not (interprets() or DEVICE.type == "cuda"), reason="needs Triton's interpreter or a GPU"
)


@dataclass(frozen=True)
class Edge:
    """A mask, and the contexts that put one of its edges at the border between two tiles."""

    feature: Feature
    contexts: tuple[int, ...]


def contexts_around(*places: int) -> tuple[int, ...]:
    return tuple(place + offset for place in places for offset in AROUND)


EDGES = {
    # The first and the last query each see keys up to their own position.
    "causal, first query": Edge(FEATURES["causal"], contexts_around(TILE, 2 * TILE)),
    "causal, last query": Edge(FEATURES["causal"], contexts_around(2 * TILE - QUERIES)),
    # Tiles that all queries see begin at the last query's window. Tiles that any query sees begin
    # at the first query's window.
    "window, last query": Edge(
        replace(FEATURES["window"], sliding_window=WINDOW),
        contexts_around(2 * TILE + WINDOW - QUERIES),
    ),
    "window, first query": Edge(
        replace(FEATURES["window"], sliding_window=WINDOW), contexts_around(2 * TILE + WINDOW - 1)
    ),
    "window to both sides": Edge(
        replace(FEATURES["non_causal_window"], sliding_window=TILE - QUERIES),
        contexts_around(TILE, TILE + QUERIES, 2 * TILE - QUERIES),
    ),
    "no mask": Edge(FEATURES["non_causal"], contexts_around(TILE - QUERIES, 2 * TILE - QUERIES)),
    "chunks": Edge(
        replace(FEATURES["chunked"], attention_chunk_size=TILE),
        contexts_around(2 * TILE, 2 * TILE - QUERIES),
    ),
    "chunks with lookback": Edge(
        replace(FEATURES["chunked_lookback"], attention_chunk_size=TILE),
        contexts_around(3 * TILE, 3 * TILE - QUERIES),
    ),
    "prefix and window": Edge(
        replace(FEATURES["rswa"], rswa_window=WINDOW),
        contexts_around(2 * TILE + WINDOW - QUERIES, 2 * TILE + WINDOW - 1),
    ),
    "causal for some": Edge(FEATURES["causal_per_request"], contexts_around(TILE, 2 * TILE)),
}


@pytest.mark.parametrize("name", EDGES)
def test_prefill_masks_the_tiles_that_an_edge_crosses(name: str) -> None:
    edge = EDGES[name]
    lens = tuple(context + QUERIES for context in edge.contexts)
    batch = BatchSpec("borders", (QUERIES,) * len(lens), lens)
    case = Case(heads=HEADS, dtype=DType.FLOAT16, batch=batch, feature=edge.feature)
    planner = DenseTrial(TritonAttentionBackend, case, DEVICE).builder().planner
    assert planner.short_query < QUERIES
    assert planner.prefill.kv_tile == TILE
    check_case(TritonAttentionBackend, case, DEVICE)


@pytest.mark.parametrize("window", [*range(TILE, TILE + 4), 3 * TILE - 1, 3 * TILE])
@pytest.mark.parametrize("name", ["non_causal_window", "encoder_only_window"])
def test_prefill_reaches_as_far_ahead_as_a_window_to_both_sides(name: str, window: int) -> None:
    """Windows reach ahead of the queries too, up to the end of the request's keys.

    The request has keys behind the window of its first query tile; the keys of the last query tile
    end with the request. Queries 0 and 127 are the first and the last of a tile of 128. Each window
    puts an edge ahead of one of these queries at another distance from a border between two key
    tiles. With the wider windows there are tiles that all queries see whole.
    """
    lens = (3 * 2 * TILE,)
    batch = BatchSpec("three_tiles", lens, lens)
    feature = replace(FEATURES[name], sliding_window=window)
    case = Case(heads=Heads(1, 1, 64), dtype=DType.FLOAT16, batch=batch, feature=feature)
    planner = DenseTrial(TritonAttentionBackend, case, DEVICE).builder().planner
    assert planner.prefill.query_tile == 2 * TILE
    check_case(TritonAttentionBackend, case, DEVICE)


SHORT_EDGES = {
    "causal": (FEATURES["causal"], 0),
    "window": (replace(FEATURES["window"], sliding_window=300), 300),
    "window to both sides": (replace(FEATURES["non_causal_window"], sliding_window=300), 300),
    "no mask": (FEATURES["non_causal"], 0),
    "prefix and window": (replace(FEATURES["rswa"], rswa_window=300), 300),
}


@pytest.mark.parametrize("name", SHORT_EDGES)
def test_split_kv_masks_the_tiles_that_an_edge_crosses(name: str) -> None:
    feature, window = SHORT_EDGES[name]
    drafts = 3
    case = Case(heads=HEADS, dtype=DType.FLOAT16, feature=feature)
    probe = BatchSpec("probe", (1 + drafts,), (512,), num_speculative_tokens=drafts)
    trial = DenseTrial(TritonAttentionBackend, replace(case, batch=probe), DEVICE)
    tile = trial.builder().planner.tile.kv_tile
    # The end of the keys, and the beginning of a window, at the border between two tiles.
    lens = [border + offset for border in (tile, 2 * tile) for offset in (*AROUND, 2, 3, 4)]
    lens = [length + window for length in lens]
    batch = BatchSpec(
        "short_borders",
        (1 + drafts,) * len(lens),
        tuple(lens),
        num_speculative_tokens=drafts,
    )
    check_case(TritonAttentionBackend, replace(case, batch=batch), DEVICE)


@pytest.mark.parametrize("window", [2, 3])
def test_split_kv_reaches_as_far_ahead_as_a_window_to_both_sides(window: int) -> None:
    """A verify has two query tiles, and the request has keys beyond the first tile's window."""
    drafts, heads = 15, Heads(8, 1, 64)
    feature = replace(FEATURES["non_causal_window"], sliding_window=window)
    case = Case(heads=heads, dtype=DType.FLOAT16, feature=feature)
    probe = BatchSpec("probe", (1 + drafts,), (512,), num_speculative_tokens=drafts)
    trial = DenseTrial(TritonAttentionBackend, replace(case, batch=probe), DEVICE)
    tile = trial.builder().planner.tile
    assert tile.query_tokens < 1 + drafts
    last = tile.query_tokens - 1
    # The end of what the first tile's last query sees, at the border between two tiles of keys.
    ends = [2 * tile.kv_tile + offset for offset in AROUND]
    lens = tuple(end - window - last + 1 + drafts for end in ends)
    batch = BatchSpec("short_ahead", (1 + drafts,) * len(lens), lens, num_speculative_tokens=drafts)
    check_case(TritonAttentionBackend, replace(case, batch=batch), DEVICE)
