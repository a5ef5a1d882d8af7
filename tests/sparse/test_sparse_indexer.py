"""The indexer's builder and object, and the whole sparse layer, against the oracle's lists and
states.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn.impls.sparse.indexer import IndexInputs, SparseIndexer
from attn.kernels.sparse.indexer.select_launch import select_topk_calls
from attn.ops import indexer as ops
from attn.ops.dispatch import has_kernel
from builders.launch.call import KernelCall
from builders.sparse import indexer as builders
from builders.sparse.indexer import IndexerMetadataBuilder
from builders.sparse.tiles import IndexTile
from specs.dtypes import DType
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec, IndexerSpec
from specs.sparse_mla import STORED_FORMATS
from tests.emulators.flashinfer_emulator import MadeOnDevice, OnDevice, on_device
from tests.sparse.sparse_layers import Drafts, Sizes, SparseLayer
from tests.tools.interpreter import variant_of

BF16, RAW, SCALED = STORED_FORMATS
SMALL = Sizes(rank=128, rope=32, nope=16, v=16)
STEPS = {
    "prompts": ([(0, 0, 70), (1, 0, 9)], 0),
    "decodes": ([(0, 70, 1), (1, 9, 1)], 0),
    "verify": ([(0, 71, 4), (1, 10, 2)], 2),
    "mixed": ([(0, 75, 1), (1, 12, 4), (2, 0, 30), (3, 0, 5)], 3),
    "later prompts": ([(2, 30, 36), (3, 5, 8)], 0),
    "idle": ([], 0),
    "at the end": ([(3, 13, 1), (0, 76, 54)], 0),
}
"""Steps in which pages of 64 tokens end within first and later chunks of prompts."""
REPLAYED = (
    ([(0, 60, 4), (1, 9, 4), (2, 20, 4)], 0),
    ([(2, 24, 1), (0, 64, 4), (1, 13, 2)], 5),
    ([(1, 15, 1), (2, 25, 1), (0, 68, 1)], 9),
    ([(0, 69, 4), (2, 26, 4), (1, 16, 4)], 0),
)
"""A step of as many requests and tokens as the captured step, with padding."""


def run_all(layer: SparseLayer) -> None:
    for parts, padding in STEPS.values():
        step = layer.step(parts, padding)
        layer.check(step, layer.run(step))


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_a_layer_runs_step_after_step(layout: Any) -> None:
    run_all(SparseLayer(layout, sizes=SMALL))


def test_a_warm_up_meets_every_variant_and_leaves_the_cache_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[KernelCall] = []
    launch = KernelCall.launch_through_triton

    def noted(call: KernelCall) -> None:
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    layer = SparseLayer(BF16, sizes=SMALL)
    kept = layer.index_cache.clone()
    step = layer.step(STEPS["mixed"][0])
    query, key = step.index_query[:1], step.index_key[:1]
    layer.indexer.warm_up(query, key, layer.index_cache, layer.index_builder)
    assert torch.equal(layer.index_cache, kept)
    known = {variant_of(call) for call in launches}
    for parts, padding in STEPS.values():
        launches.clear()
        step = layer.step(parts, padding)
        _, record = layer.records(step)
        given = step.index_query, step.index_key, step.weights, layer.index_cache, record
        layer.indexer.forward(IndexInputs(*given))
        assert {variant_of(call) for call in launches} <= known


def test_in_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_kernel", lambda rows: False)
    run_all(SparseLayer(BF16, sizes=SMALL))


def test_logits_and_keys_that_do_not_fit_are_held_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens' logits of the longest request, or one request's keys, fit at a time."""
    monkeypatch.setattr(builders, "LOGIT_BYTES", 3 * SMALL.longest * 4)
    monkeypatch.setattr(builders, "KEY_BYTES", 0)
    layer = SparseLayer(BF16, sizes=SMALL)
    step = layer.step([(0, 100, 40), (1, 100, 40), (2, 0, 9)])
    _, record = layer.records(step)
    assert record.prefill is not None
    groups = record.prefill.groups
    assert [(one.first_row, one.num_rows) for one in groups] == [(0, 40), (40, 49)]
    assert {chunk.logits.shape for chunk in groups[0].chunks} == {(5, 140)}
    run_all(layer)


def test_a_row_s_bits_are_its_own_where_that_is_asked_for() -> None:
    layer = SparseLayer(BF16, sizes=SMALL, batch_invariant=True)
    step = layer.step([(0, 0, 70)])
    _, record = layer.records(step)
    assert record.prefill is None
    assert record.decode is not None
    assert "data" not in layer.index_builder.buffers
    run_all(layer)


def test_a_build_reads_nothing_back() -> None:
    layer = SparseLayer(BF16, sizes=SMALL)
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    with MadeOnDevice():
        builder = IndexerMetadataBuilder(IndexerSpec(index_head_dim=32), ["0"], layer.config, "cpu")
        for parts, padding in STEPS.values():
            batch = layer.step(parts, padding).batch
            if not parts:
                continue
            given = batch.replace(**{name: on_device(getattr(batch, name)) for name in names})
            record = builder.build(0, given)
            builder.update_block_table(record, given.block_table_tensor, given.slot_mapping)
            if batch.max_query_len <= builder.threshold:
                builder.build_for_cudagraph_capture(given)
                builder.update_draft_decode_metadata(builder.build_for_drafting(given, 1))
    assert record.prefill is not None
    assert isinstance(record.prefill.lengths.reqs, OnDevice)


def test_a_captured_step_has_room_for_the_longest_sequence_and_is_rebuilt_in_place() -> None:
    layer = SparseLayer(BF16, sizes=SMALL)
    builder = layer.index_builder
    short = layer.step([(0, 4, 1), (1, 2, 1)])
    (group,) = builder.build(0, short.batch).decode.groups  # type: ignore[union-attr]
    # Five keys, rounded up to a whole number of 16 bytes.
    assert group.chunks[0].logits.shape == (2, 8)
    captured = builder.build_for_cudagraph_capture(short.batch).decode
    assert captured is not None
    (chunk,) = captured.groups[0].chunks
    assert chunk.logits.shape == (2, SMALL.longest)
    rebuilt = builder.build(0, layer.step([(2, 200, 1), (3, 100, 1)]).batch).decode
    assert rebuilt is not None
    assert captured.lengths.visible_lens.tolist() == [201, 101]
    assert captured.lengths.visible_lens.data_ptr() == rebuilt.lengths.visible_lens.data_ptr()
    with pytest.raises(ValueError, match="must be at most 4 for the indexer, got 5"):
        builder.build_for_cudagraph_capture(layer.step([(0, 0, 5)]).batch)
    draft = builder.build_for_drafting(short.batch, 1)
    assert draft.decode is not None
    draft.decode.seq_lens.add_(1)
    builder.update_draft_decode_metadata(draft)
    assert draft.decode.lengths.visible_lens.tolist() == [6, 4]


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_a_captured_layer_replays_other_batches(layout: Any) -> None:
    layer = SparseLayer(layout, sizes=SMALL)
    prompts = layer.step([(0, 0, 60), (1, 0, 9), (2, 0, 20)])
    layer.check(prompts, layer.run(prompts))
    captured = layer.capture(layer.step([(0, 0, 4), (1, 0, 4), (2, 0, 4)]))
    for parts, padding in REPLAYED:
        step = layer.step(parts, padding)
        output = captured.replay(step)
        layer.check(step, output)
        # Bits are equal too, except in padding, whose contents are not defined.
        assert torch.equal(output[: 12 - padding], layer.run(step)[: 12 - padding])


@pytest.mark.parametrize("layout", STORED_FORMATS)
def test_draft_steps_follow_one_another_in_place(layout: Any) -> None:
    layer = SparseLayer(layout, sizes=SMALL)
    layer.fill()
    Drafts(layer, 3).check([[70, 9, 30, 1], [200, 0, 64, 63], [1, 128, 250, 12]])


def test_another_table_moves_what_is_read() -> None:
    layer = SparseLayer(BF16, sizes=SMALL)
    batch = layer.step(STEPS["mixed"][0]).batch
    builder = layer.index_builder
    record = builder.build(0, batch)
    moved = batch.replace(block_table_tensor=batch.block_table_tensor.flip(1).contiguous())
    updated = builder.update_block_table(record, moved.block_table_tensor, moved.slot_mapping)
    fresh = builder.build(0, moved)
    for one, other in ((updated.decode, fresh.decode), (updated.prefill, fresh.prefill)):
        assert one is not None
        assert other is not None
        assert torch.equal(one.block_table, other.block_table)
        for group, wanted in zip(one.groups, other.groups, strict=True):
            if group.keys is not None and wanted.keys is not None:
                assert torch.equal(group.keys.slots, wanted.keys.slots)


def test_host_bounds_may_be_missing_or_too_large() -> None:
    layer = SparseLayer(BF16, sizes=SMALL, exact_host_lengths=False)
    step = layer.step([(0, 0, 70), (1, 0, 10)])
    wanted = layer.run(step)
    for bound in (None, torch.tensor([90, 2000], dtype=torch.int32)):
        batch = step.batch.replace(seq_lens_cpu_upper_bound=bound, max_seq_len=2000)
        record = layer.index_builder.build(0, batch)
        assert record.prefill is not None
        output = layer.blank(step)
        layer.indexer.topk_indices_buffer.fill_(5)
        layer.forward(step, (layer.builder.build(0, step.batch), record), output)
        assert torch.equal(output, wanted)


def test_keys_are_gathered_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    cache = torch.randint(0, 256, (5, 64, 36), dtype=torch.uint8)
    slots = torch.randint(0, 5 * 64, (77,), dtype=torch.int32)
    slots[[3, 76]] = -1
    rooms = []
    for is_kernel in (True, False):
        data = torch.full((77, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.full((77,), 9.0)
        with monkeypatch.context() as patch:
            if not is_kernel:
                patch.setattr(ops, "has_kernel", lambda rows: False)
            ops.gather_index_keys(cache, slots, data, scale)
        rooms.append((data.view(torch.uint8), scale.view(torch.int32)))
    assert all(torch.equal(one, other) for one, other in zip(*rooms, strict=True))
    data, scale = rooms[0]
    slot = int(slots[10])
    page = cache[slot // 64].flatten()
    assert torch.equal(data[10], page[slot % 64 * 32 :][:32])
    assert torch.equal(scale[10:11].view(torch.uint8), page[64 * 32 + slot % 64 * 4 :][:4])
    assert bool((data[3] == 0x7F).all())
    with pytest.raises(ValueError, match=r"data must be contiguous float8_e4m3fn \[77, 32\]"):
        ops.gather_index_keys(cache, slots, torch.zeros(77, 32), torch.zeros(77))
    with pytest.raises(ValueError, match=r"scale must be contiguous float32 \[77\]"):
        ops.gather_index_keys(cache, slots, data.view(torch.float8_e4m3fn), torch.zeros(7))


def test_what_is_not_served_is_refused() -> None:
    config = EngineConfig(max_model_len=128, index_topk=8, max_num_seqs=2)
    make = IndexerMetadataBuilder
    dense = FullAttentionSpec(block_size=64, dtype=DType.FLOAT16, num_kv_heads=1, head_size=64)
    with pytest.raises(ValueError, match="must be IndexerSpec for the indexer, got FullAttention"):
        make(dense, ["0"], config, "cpu")
    with pytest.raises(ValueError, match="index_topk is needed by the indexer, got None"):
        make(IndexerSpec(), ["0"], config.replace(index_topk=None), "cpu")
    layer = SparseLayer(BF16, sizes=SMALL)
    step = layer.step([(0, 0, 2), (1, 0, 2), (2, 0, 2), (3, 0, 2)])
    with pytest.raises(ValueError, match=r"num_reqs \(4\) exceeds max_num_seqs \(2\)"):
        make(IndexerSpec(), ["0"], config, "cpu").build(0, step.batch)
    with pytest.raises(NotImplementedError, match="takes causal batches"):
        layer.index_builder.build(0, step.batch.replace(causal=False))
    layer.indexer.topk_indices_buffer = layer.indexer.topk_indices_buffer[:3]
    with pytest.raises(ValueError, match="a row for each of 8 tokens, got 3"):
        layer.run(step)
    with pytest.raises(ValueError, match="must be int32"):
        SparseIndexer(torch.zeros(4, 8))


@pytest.mark.parametrize(("tokens", "longest", "topk"), [(8192, 163840, 2048), (64, 1 << 20, 512)])
def test_no_selection_allocates_more_than_is_said(tokens: int, longest: int, topk: int) -> None:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=tokens, max_model_len=longest)
    (room,), _ = builders.scratch_of(config, 128)["logits"]
    found = []
    for width in (16388, 20000, 32768, 32772, 65540, longest // 2, longest):
        rows = min(room // width, tokens)
        logits, lists = (
            torch.empty(rows, width, device="meta"),
            torch.empty(rows, topk, device="meta"),
        )
        lens = torch.empty(rows, dtype=torch.int32, device="meta")
        calls = select_topk_calls(logits, lens, lists.int(), None, None, None, IndexTile())
        names = ("out_ptr", "out_positions_ptr", "out_lens_ptr")
        found.append(sum(call.arguments[name].nbytes for call in calls[:-1] for name in names))
    assert 0.99 * builders.selection_bytes(config, topk) < max(found)
    assert max(found) <= builders.selection_bytes(config, topk)
    short = config.replace(max_model_len=IndexTile().segment_of(topk))
    assert builders.selection_bytes(short, topk) == 0
