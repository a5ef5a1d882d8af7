"""Our builder on vLLM's batches: the records of our own batches; graphs, drafts, cascade."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.cross_attention import CrossAttention
from vllm.model_executor.layers.attention.static_sink_attention import StaticSinkAttention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from attn.integrations.vllm import adapter, compat, members
from attn.testing.oracle import Rules
from builders.batch import CommonAttentionMetadata as OurBatch
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from tests.vllm.runner import NAME, Runner, Tokens, expected, plain_rules
from tests.vllm.test_layers import dense, scaled

STEPS = {
    "decode": ((1, 1, 1), (9, 40, 1)),
    "mix": ((1, 30, 4), (40, 30, 52)),
    "prefill": ((20, 60), (20, 60)),
    "padding": ((1, 2, 0, 0), (9, 40, 0, 0)),
}


@pytest.fixture
def runner(
    plugin: Any, cuda: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Runner:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    return Runner(make_config(), dense())


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a record by its path; a tensor as a copy."""
    if isinstance(value, Tensor):
        return {path: value.clone()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {}
        for item in dataclasses.fields(value):
            found |= flat(getattr(value, item.name), f"{path}.{item.name}")
        return found
    return {path: value}


def same(one: Any, other: Any) -> bool:
    left, right = flat(one), flat(other)
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, Tensor) else value == right[key]
        for key, value in left.items()
    )


@pytest.mark.parametrize("name", STEPS)
def test_a_record_from_vllms_batch_is_the_one_from_ours(runner: Runner, name: str) -> None:
    lens = STEPS[name]
    batch = runner.batch(*lens)
    kept = copy.deepcopy(batch)
    record = runner.builder.build(0, batch)
    first = flat(record)
    assert same(batch, kept), "the engine's batch was written"
    ours = OurBatch(
        **{
            item.name: getattr(batch, item.name)
            for item in dataclasses.fields(OurBatch)
            if hasattr(batch, item.name)
        }
    )
    again = flat(runner.builder.build(0, ours))
    assert first.keys() == again.keys()
    for key, value in first.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, again[key]), key
        else:
            assert value == again[key], key


def test_the_level_of_graph_support_is_vllms(runner: Runner) -> None:
    level = type(runner.builder).get_cudagraph_support(runner.config, runner.spec)
    assert level is AttentionCGSupport.ALWAYS
    with_ranges = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True))
    level = type(runner.builder).get_cudagraph_support(with_ranges, runner.spec)
    assert level is AttentionCGSupport.UNIFORM_BATCH
    reference = members.CUSTOM_TORCH_REF.get_builder_cls()
    level = reference.get_cudagraph_support(runner.config, runner.spec)
    assert level is AttentionCGSupport.NEVER


def test_what_was_captured_serves_any_batch_of_the_size(runner: Runner) -> None:
    lens = ((1, 30, 4), (40, 30, 52))
    tokens = Tokens.random(lens[1], runner.dtype)
    runner.step(tokens, (39, 0, 48), (39, 0, 48))
    captured = runner.batch((12, 12, 11), (12, 12, 11))
    captured.slot_mapping.fill_(-1)
    record = runner.builder.build_for_cudagraph_capture(captured)
    # The runner's buffers change in place, the metadata is built again, the graph is replayed.
    batch = runner.batch(*lens)
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        getattr(captured, name).copy_(getattr(batch, name))
    runner.builder.build(0, batch)
    output = runner.forward(record, tokens, *lens, batch)
    expected(tokens, *lens, plain_rules()).assert_is(output)


def test_draft_steps_refresh_in_place(runner: Runner) -> None:
    tokens = Tokens.random((40, 40), runner.dtype)
    runner.step(tokens, (38, 30), (38, 30))
    batch = runner.batch((1, 1), (39, 31))
    record = runner.builder.build_for_drafting(batch, 0)
    runner.forward(record, tokens, (1, 1), (39, 31), batch)
    later = runner.batch((1, 1), (40, 32))
    batch.seq_lens.copy_(later.seq_lens)
    batch.slot_mapping.copy_(later.slot_mapping)
    assert runner.builder.supports_draft_decode_metadata_update
    runner.builder.update_draft_decode_metadata(record)
    output = runner.forward(record, tokens, (1, 1), (40, 32), batch)
    expected(tokens, (1, 1), (40, 32), plain_rules()).assert_is(output)


def test_another_groups_table_replaces_the_records(runner: Runner) -> None:
    batch = runner.batch(*STEPS["mix"])
    record = runner.builder.build(0, batch)
    record.added_by_a_wrapper = 7
    table, slots = batch.block_table_tensor + 1, batch.slot_mapping + 16
    updated = runner.builder.update_block_table(record, table, slots)
    assert updated.block_table is table
    assert updated.slot_mapping is slots
    assert updated.added_by_a_wrapper == 7
    assert record.block_table is batch.block_table_tensor


def test_a_long_shared_prefix_is_worth_a_pass_of_its_own(runner: Runner) -> None:
    def wanted(prefix: int = 4096, reqs: int = 64, **changes: Any) -> bool:
        given = {
            "num_query_heads": 4,
            "num_kv_heads": 2,
            "use_alibi": False,
            "use_sliding_window": False,
            "use_local_attention": False,
            "num_sms": 132,
            "dcp_world_size": 1,
            **changes,
        }
        return runner.builder.use_cascade_attention(prefix, np.ones(reqs), **given)

    assert wanted()
    # vLLM cascades from these lengths and numbers on, and not below.
    assert wanted(prefix=256, reqs=8)
    assert not wanted(prefix=255, reqs=8)
    assert not wanted(prefix=256, reqs=7)
    for mask in ("use_alibi", "use_sliding_window", "use_local_attention"):
        assert not wanted(**{mask: True})
    assert not wanted(dcp_world_size=2)


def test_a_shared_prefix_changes_no_result(runner: Runner) -> None:
    lens = ((1, 1, 1), (40, 52, 36))
    tokens = Tokens.random(lens[1], runner.dtype)
    for rows in (tokens.query, tokens.key, tokens.value):
        for row in rows[1:]:
            row[:32] = rows[0][:32]
    runner.table[:, :2] = runner.table[0, :2]
    for row, length in enumerate((39, 51, 35)):
        runner.step(
            tokens,
            [length * (row == at) for at in range(3)],
            [length * (row == at) for at in range(3)],
        )
    batch = runner.batch(*lens)
    record = runner.builder.build(32, batch)
    assert record.shared is not None
    output = runner.forward(record, tokens, *lens, batch)
    expected(tokens, *lens, plain_rules()).assert_is(output)


@pytest.mark.parametrize("kind", [Attention, CrossAttention, StaticSinkAttention])
def test_warming_up_asks_nothing_of_wrappers(
    runner: Runner, make_config: Callable[..., Any], kind: Any
) -> None:
    extras = {"sink_len": 16} if kind is StaticSinkAttention else {}
    made = Runner(make_config(), scaled(dense(kind, **extras)))
    features = compat.features_of(made.config, made.spec)
    assert features == compat.Features(False, False, False, False)
    everything = compat.Features(True, True, kind is Attention, True)
    kept = made.layer.kv_cache.clone()
    for asked in (features, everything):
        adapter.warm_up(made.builder, [made.layer, made.layer], asked)
    assert torch.equal(made.layer.kv_cache.view(torch.uint8), kept.view(torch.uint8))


def test_layers_that_differ_in_numbers_alone_are_warmed_up_once(
    runner: Runner, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [Runner(make_config(), dense(sinks=torch.full((4,), number))) for number in (0.0, 1.0)]
    layers = [each.layer for each in made]
    called = []
    monkeypatch.setattr(
        type(layers[0].impl), "warm_up", lambda impl, *args, **options: called.append(impl)
    )
    features = compat.features_of(made[0].config, made[0].spec)
    adapter.warm_up(made[0].builder, [*layers, runner.layer], features)
    assert called == [layers[0].impl, runner.layer.impl]


def test_per_request_causality_reaches_the_kernel(runner: Runner) -> None:
    lens = ((20, 20), (20, 20))
    tokens = Tokens.random(lens[1], runner.dtype)
    flags = torch.tensor([1, 0], dtype=torch.int32)
    output = runner.step(tokens, *lens, causal=flags)
    rules: tuple[Rules, ...] = (plain_rules(), plain_rules(causal=False))
    expected(tokens, *lens, *rules).assert_is(output)


def test_layers_with_other_numbers_of_heads_are_told_apart(
    plugin: Any, cuda: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    runner = Runner(make_config(), dense())
    runner.layer.num_heads = 6
    runner.config.compilation_config.static_forward_context["other"] = copy.copy(runner.layer)
    runner.config.compilation_config.static_forward_context["other"].num_heads = 8
    with pytest.raises(ValueError, match=r"\[6, 8\]"):
        type(runner.builder)(runner.spec, [NAME, "other"], runner.config, torch.device("cpu"))


def test_the_log_says_what_a_group_of_layers_got(
    plugin: Any,
    cuda: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", "TRITON_ATTN")
    plugin.register()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        runner = Runner(make_config(cache_dtype="fp8"), dense(per_layer_sliding_window=20))
    assert isinstance(runner.builder, TritonAttentionMetadataBuilder)
    (line,) = {line for line in caplog.messages if "serves 1 layers" in line}
    for words in (
        "TRITON_ATTN as CUSTOM",
        NAME,
        "sliding_window 20",
        "fp8",
        "4 query and 2 KV heads of 32",
        "; decode: triton, prefill: triton",
    ):
        assert words in line


def test_the_batch_of_both_versions_has_the_fields_that_builders_read() -> None:
    fields = {item.name for item in dataclasses.fields(CommonAttentionMetadata)}
    shared = {item.name for item in dataclasses.fields(OurBatch)}
    needed = {
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "block_table_tensor",
        "slot_mapping",
        "causal",
        "encoder_seq_lens",
        "mm_req_doc_ranges",
        "rswa_prefix_lens",
    }
    assert needed <= fields & shared
