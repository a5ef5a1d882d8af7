"""Prompts that are no longer than a list: attended densely where the engine asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.ops.mla import mla_attention
from attn.testing import stored_rows
from attn.testing.batches import LatentWeights, Request
from attn.testing.budget import budget, low_precision, row_errors
from attn.testing.latent_trial import latent_output, low_latent_output
from attn.testing.oracle import Rules, mask
from builders.sparse.record import SparseMLAMetadata
from builders.sparse.rows import chunk_slots
from specs.rows import LatentFormat
from specs.sparse_mla import STORED_FORMATS
from tests.sparse.sparse_layers import BLOCK, K_SCALE, NAMES, Part, Sizes, SparseLayer, Step

BF16, RAW, SCALED = STORED_FORMATS
SIZES = Sizes(v=32, topk=48)
CHUNKED = {"mla_workspace_bytes": 4 * 16 * 4 * 2 * 256 * 2}
"""Room for a page of 16 tokens of each of four requests, so context comes in several chunks."""
FIRST: list[Part] = [(0, 0, 40), (1, 0, 9)]
MIXED: list[Part] = [(2, 30, 1), (0, 40, 8), (1, 9, 12)]


def layer_of(layout: LatentFormat = BF16, sizes: Sizes = SIZES, **settings: Any) -> SparseLayer:
    return SparseLayer(layout, sizes=sizes, **{"dense_short_prompts": True, **settings})


def record_of(layer: SparseLayer, parts: Sequence[Part], padding: int = 0) -> SparseMLAMetadata:
    record: SparseMLAMetadata = layer.builder.build(0, layer.step(parts, padding).batch)
    return record


def expected_of(layer: SparseLayer, step: Step) -> tuple[Tensor, Tensor]:
    """The definition of a step's rows ``[T, H, V]``, each of which sees every token up to it."""
    impl, sizes, dtype = layer.impl, layer.sizes, layer.sizes.dtype.torch
    weights = LatentWeights(sizes.num_heads, impl.W_UK, impl.W_UV, sizes.rope)
    rules, exact, low, at = Rules(layer.scale), [], [], 0
    for row, (req, done, new) in enumerate(step.parts):
        keys = layer.keys[req, : done + new]
        request = Request(
            *(row, slice(at, at + new), done, step.query[at : at + new]),
            *(
                keys[:, None],
                keys[:, None, : sizes.rank],
                rules,
                mask(new, done + new, done, rules),
            ),
        )
        at += new
        scale = torch.tensor(K_SCALE)
        stored = stored_rows.quantized_latent(keys, NAMES[layer.layout], scale, sizes.rank)

        def attend(query: Tensor, rows: Tensor, done: int = done) -> Tensor:
            values = rows[:, None, : sizes.rank]
            return low_precision(query, rows[:, None], values, done, rules, dtype)[0]

        exact.append(latent_output(weights, request))
        low.append(low_latent_output(weights, request, stored, attend if new == 1 else None))
    return torch.cat(exact), torch.cat(low).double()


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_short_prompts_are_right_and_read_no_list(layout: LatentFormat) -> None:
    layer = layer_of(layout, **CHUNKED)
    layer.fill()
    for parts in (FIRST, MIXED):
        step = layer.step(parts)
        record, index = layer.records(step)
        assert record.prefill is not None
        assert record.prefill_rows is None
        output = layer.blank(step)
        layer.forward(step, (record, index), output)
        # A list that is read now names rows outside the cache.
        layer.indexer.topk_indices_buffer[record.num_decode_tokens :] = 2**30
        again, rows = layer.blank(step), (step.new[:, : SIZES.rank], step.new[:, SIZES.rank :])
        mla_attention(layer.impl, layer.scales, step.query, *rows, layer.cache, record, again)
        assert torch.equal(output, again)
        wanted, low = expected_of(layer, step)
        limit = budget(wanted, low, SIZES.dtype.torch)
        values = output.view(len(output), SIZES.num_heads, SIZES.v)
        assert float(row_errors(values, wanted).max()) <= limit


def test_a_record_counts_short_prompts_as_prefills() -> None:
    layer = layer_of()
    # Two requests share the room, so a chunk has a page of 16 tokens of each.
    layer.builder.expanded.workspace_tokens = 32
    record = record_of(layer, MIXED, padding=3)
    counts = (record.num_decodes, record.num_decode_tokens)
    assert counts == (1, 1)
    assert (record.num_prefills, record.num_prefill_tokens) == (2, 23)
    assert (record.prefill_max_seq_len, record.topk_tokens) == (48, 48)
    assert record.plan.prefill is None
    assert record.decode is not None
    assert record.decode.num_rows == 1
    short = record.prefill
    assert short is not None
    assert (short.num_tokens, short.max_query_len, short.max_seq_len) == (20, 12, 48)
    assert short.context is not None
    assert short.chunked_context is short.context
    assert short.context.lens.tolist() == [[16, 9], [16, 0], [8, 0]]
    assert short.context_slots == ()


@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        ([(0, 0, 9), (1, 40, 9)], {}),
        ([(0, 0, 9)], {"dense_short_prompts": False}),
        ([(0, 0, 9)], {"batch_invariant": True}),
        ([(0, 8, 1), (1, 3, 4)], {}),
    ],
    ids=["a longer request", "not asked for", "batch invariant", "decodes"],
)
def test_other_steps_attend_lists(parts: list[Part], settings: dict[str, Any]) -> None:
    record = record_of(layer_of(**settings), parts)
    assert record.prefill is None
    assert (record.num_prefills, record.prefill_max_seq_len) == (0, 0)
    assert record.num_decode_tokens == record.num_actual_tokens


def test_slots_of_context_follow_the_table_of_the_group() -> None:
    layer = layer_of(SCALED)
    layer.builder.expanded.workspace_tokens = 32
    step = layer.step([(0, 20, 20), (1, 9, 12)])
    record = layer.builder.build(0, step.batch)
    table = step.batch.block_table_tensor

    def wanted(table: Tensor) -> list[list[int]]:
        first = [int(table[0, 0]) * BLOCK + place for place in range(20)]
        second = [int(table[1, 0]) * BLOCK + place for place in range(9)]
        return [first[:16] + second + [-1] * 7, first[16:] + [-1] * 28]

    assert [one.tolist() for one in record.prefill.context_slots] == wanted(table)
    slots = step.batch.slot_mapping
    moved = layer.builder.update_block_table(record, table + 100, slots)
    assert [one.tolist() for one in moved.prefill.context_slots] == wanted(table + 100)
    assert [one.tolist() for one in record.prefill.context_slots] == wanted(table)


def test_no_slot_lies_beyond_the_table() -> None:
    layer = layer_of(SCALED)
    record = record_of(layer, [(0, 20, 20)])
    assert record.prefill is not None
    assert record.prefill.context is not None
    rows = record.prefill.context.rows(0)
    short = chunk_slots(rows, 8)
    width = rows.block_table.shape[1]
    assert bool((short[8 * width :] == -1).all())


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_the_warm_up_runs_short_prompts_with_and_without_context(
    layout: LatentFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(layout)
    room, ran, attend = layer.builder.expanded.workspace_tokens, [], type(layer.impl).attend_prefill

    def attended(impl: Any, *given: Any) -> None:
        context = given[4].context
        ran.append(0 if context is None else len(context.lens))
        attend(impl, *given)

    monkeypatch.setattr(type(layer.impl), "attend_prefill", attended)
    dtype = SIZES.dtype.torch
    layer.impl.warm_up(layer.scales, layer.cache, layer.builder, dtype)
    assert ran == [0, 1, 2]
    assert layer.builder.expanded.workspace_tokens == room


def test_head_sizes_without_a_kernel_are_refused_where_they_are_needed() -> None:
    layer = layer_of(sizes=Sizes(v=16, topk=48))
    step = layer.step(FIRST)
    with pytest.raises(ValueError, match="qk_head_dim and v_head_dim must be multiples"):
        layer.forward(step, layer.records(step), layer.blank(step))
