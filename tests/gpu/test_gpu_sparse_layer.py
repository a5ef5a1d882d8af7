"""SPARSE_MLA with its indexer on a real GPU: from projections to values, also in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn.bench.measure.timing import waits_are_errors
from specs.rows import LatentFormat
from specs.sparse_mla import STORED_FORMATS
from tests.sparse.sparse_layers import Drafts, Sizes, SparseLayer

pytestmark = pytest.mark.gpu

DEEPSEEK = {
    "nope": 128, "v": 128, "topk": 2048, "index_heads": 64, "index_dim": 128,
    "longest": 6144, "most_tokens": 4096, "requests": 4,
}  # fmt: skip
HEADS = (8, 16, 128)
PROMPTS = ([(0, 0, 2500), (1, 0, 70)], 0)
STEPS: tuple[tuple[list[tuple[int, int, int]], int], ...] = (
    ([(0, 2500, 1), (1, 70, 1), (2, 0, 2100)], 0),
    ([(0, 2501, 4), (1, 71, 2), (3, 0, 9)], 3),
    ([(1, 73, 300), (3, 9, 2200)], 0),
)
REPLAYED: tuple[tuple[list[tuple[int, int, int]], int], ...] = (
    ([(0, 2500, 4), (1, 70, 4), (2, 0, 4)], 0),
    ([(2, 4, 1), (0, 2504, 4), (1, 74, 2)], 5),
    ([(1, 76, 1), (2, 5, 1), (0, 2508, 1)], 9),
    ([(0, 2509, 4), (2, 6, 4), (1, 77, 4)], 0),
)


def layer_of(layout: LatentFormat, heads: int, **settings: Any) -> SparseLayer:
    sizes = Sizes(num_heads=heads, **DEEPSEEK)  # type: ignore[arg-type]
    return SparseLayer(layout, "cuda", sizes=sizes, **settings)


@pytest.mark.parametrize("is_invariant", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_a_layer_runs_step_after_step(layout: LatentFormat, heads: int, is_invariant: bool) -> None:
    layer = layer_of(layout, heads, batch_invariant=is_invariant)
    for parts, padding in (PROMPTS, *STEPS):
        step = layer.step(parts, padding)
        layer.check(step, layer.run(step))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_a_graph_replays_other_batches(layout: LatentFormat, heads: int) -> None:
    layer = layer_of(layout, heads)
    prompts = layer.step(*PROMPTS)
    layer.check(prompts, layer.run(prompts))
    captured = layer.capture(layer.step([(0, 0, 4), (1, 0, 4), (2, 0, 4)]))
    for parts, padding in REPLAYED:
        step = layer.step(parts, padding)
        output = captured.replay(step)
        layer.check(step, output)
        assert torch.equal(output[: 12 - padding], layer.run(step)[: 12 - padding])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_draft_steps_are_one_graph(layout: LatentFormat, heads: int) -> None:
    layer = layer_of(layout, heads)
    layer.fill()
    lens = [[700, 9, 3000, 1], [2048, 0, 64, 63], [1, 128, 6000, 2046], [5000, 4500, 3, 70]]
    Drafts(layer, 4).check(lens)


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_nothing_waits_for_the_device(layout: LatentFormat) -> None:
    layer = layer_of(layout, 16)
    steps = [layer.step(parts, padding) for parts, padding in (PROMPTS, *STEPS)]
    outputs = [layer.blank(step) for step in steps]
    for step in steps:
        layer.run(step)
    with waits_are_errors():
        for step, output in zip(steps, outputs, strict=True):
            layer.forward(step, layer.records(step), output)
    layer.check(steps[-1], outputs[-1])


def test_a_row_s_bits_are_its_own_where_that_is_asked_for() -> None:
    """A row has the same bits alone, as a decode, and in the middle of a prompt."""
    for heads in HEADS:
        layer = layer_of(STORED_FORMATS[2], heads, batch_invariant=True)
        whole = layer.step([(0, 0, 2300), (1, 0, 300)])
        layer.run(whole)
        query = layer.absorbed(whole)
        wanted, wanted_lse = layer.latents(whole, query)
        lists = layer.indexer.topk_indices_buffer[2299].clone()
        alone = layer.step([(0, 2299, 1)])
        for name in ("query", "index_query", "weights"):
            getattr(alone, name).copy_(getattr(whole, name)[2299:2300])
        layer.run(alone)
        found, lse = layer.latents(alone, query[2299:2300])
        assert torch.equal(layer.indexer.topk_indices_buffer[0], lists)
        assert torch.equal(found[0], wanted[2299])
        assert torch.equal(lse[0], wanted_lse[2299])
