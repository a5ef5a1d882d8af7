"""vLLM's own attention layers of every kind, with our backends in them, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.cross_attention import CrossAttention
from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention
from vllm.model_executor.layers.attention.prefill_prefix_lm_attention import (
    PrefillPrefixLMAttention,
)
from vllm.model_executor.layers.attention.rswa_attention import RSWAAttention
from vllm.model_executor.layers.attention.static_sink_attention import StaticSinkAttention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

from attn.testing.oracle import Rules
from tests.vllm.runner import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    NAME,
    SCALE,
    Runner,
    Tokens,
    answer_of,
    encoder_lens,
    expected,
    plain_rules,
)

TRIPLES = ("TRITON_ATTN", "TORCH_REF")
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
SLOPES = [0.5, 0.25, 0.125, 0.0625]
MIX = ((1, 30, 4, 1), (40, 30, 52, 1))
PREFIX = ((39, 0, 48, 0), (39, 0, 48, 0))


def dense(kind: Any = Attention, **extras: Any) -> Callable[[Any], Any]:
    """What makes a layer of that kind."""

    def make(config: Any) -> Any:
        return kind(
            HEADS,
            HEAD_SIZE,
            SCALE,
            num_kv_heads=KV_HEADS,
            cache_config=config.cache_config,
            prefix=NAME,
            **extras,
        )

    return make


def scaled(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The layer with scales: of static sinks 0.26 forgets them, in a second constructor."""

    def made(config: Any) -> Any:
        layer = make(config)
        if not hasattr(layer, "_k_scale"):
            set_default_quant_scales(layer, register_buffer=True)
        return layer

    return made


@dataclass(frozen=True)
class Kind:
    """A kind of layer, and what it has to compute."""

    make: Callable[[Any], Any]
    rules: Rules
    config: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)
    override: bool = False
    """vLLM serves the kind under the name TRITON_ATTN only."""


KINDS = {
    "full": Kind(dense(), plain_rules()),
    "fp32": Kind(dense(), plain_rules(), {"dtype": "float32"}),
    "block size 48": Kind(dense(), plain_rules(), {"block_size": 48, "max_model_len": 240}),
    "window": Kind(dense(per_layer_sliding_window=20), plain_rules(sliding_window=20)),
    "soft cap": Kind(dense(logits_soft_cap=2.0), plain_rules(logits_soft_cap=2.0)),
    "alibi": Kind(dense(alibi_slopes=SLOPES), plain_rules(alibi_slopes=torch.tensor(SLOPES))),
    "alibi square root": Kind(
        dense(alibi_slopes=SLOPES, use_alibi_sqrt=True),
        plain_rules(alibi_slopes=torch.tensor(SLOPES), use_alibi_sqrt=True),
    ),
    "sinks": Kind(dense(sinks=SINKS), plain_rules(sinks=SINKS)),
    "sinks window": Kind(
        dense(sinks=SINKS, per_layer_sliding_window=20),
        plain_rules(sinks=SINKS, sliding_window=20),
    ),
    "fp8": Kind(dense(), plain_rules(), {"cache_dtype": "fp8"}),
    "fp8 e5m2": Kind(dense(), plain_rules(), {"cache_dtype": "fp8_e5m2"}),
    "int8 inline": Kind(dense(), plain_rules(), {"cache_dtype": "int8_per_token_head"}),
    "fp8 inline": Kind(dense(), plain_rules(), {"cache_dtype": "fp8_per_token_head"}),
    "int4 inline": Kind(dense(), plain_rules(), {"cache_dtype": "int4_per_token_head"}),
    "chunked local": Kind(
        dense(ChunkedLocalAttention, attention_chunk_size=32),
        plain_rules(attention_chunk_size=32),
    ),
    "chunk lookback": Kind(
        dense(per_layer_sliding_window=16, chunk_lookback=1),
        plain_rules(attention_chunk_size=16, chunk_lookback=1),
        override=True,
    ),
    "prefix LM": Kind(dense(PrefillPrefixLMAttention), plain_rules(causal=False)),
    "multimodal ranges": Kind(
        dense(),
        plain_rules(mm_ranges=((3, 12), (20, 29))),
        batch={"mm_req_doc_ranges": {row: [(3, 12), (20, 29)] for row in range(4)}},
    ),
    "R-SWA": Kind(
        dense(RSWAAttention, rswa_window=9),
        plain_rules(rswa_prefix_len=5, rswa_window=9),
        batch={"rswa_prefix_lens": torch.full((4,), 5, dtype=torch.int32)},
    ),
    "fp32 HND": Kind(dense(), plain_rules(), {"dtype": "float32"}),
}


@pytest.fixture(params=TRIPLES)
def triple(
    request: pytest.FixtureRequest, plugin: Any, cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setenv("ATTN_VLLM_BACKEND", request.param)
    monkeypatch.setenv("ATTN_VLLM_OVERRIDE", "TRITON_ATTN")
    plugin.register()
    return request.param


def assert_is_ours(runner: Runner) -> None:
    for part in (runner.layer.impl, runner.builder):
        ours = [base for base in type(part).__mro__ if "integrations.vllm" in base.__module__]
        assert ours


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_computes_attention(
    triple: str, make_config: Callable[..., Any], name: str
) -> None:
    kind = KINDS[name]
    if kind.override and triple != "TRITON_ATTN":
        pytest.skip("is refused to all but TRITON_ATTN by vLLM")
    config = make_config(**kind.config, backend="TRITON_ATTN" if kind.override else "CUSTOM")
    runner = Runner(config, kind.make, layout="HND" if "HND" in name else "NHD")
    assert_is_ours(runner)
    tokens = Tokens.random(MIX[1], runner.dtype)
    # Tokens computed before this step come first, as prefills of their own.
    before = [seq - new for new, seq in zip(*MIX, strict=True)]
    for row, length in enumerate(before):
        if length:
            lens = [length if other == row else 0 for other in range(4)]
            fields = {key: value for key, value in kind.batch.items() if key != "mm_req_doc_ranges"}
            runner.step(
                tokens, lens, [length if other == row else 0 for other in range(4)], **fields
            )
    output = runner.step(tokens, *MIX, **kind.batch)
    stored = kind.config.get("cache_dtype", "auto")
    expected(tokens, *MIX, kind.rules, cache_dtype=stored).assert_is(output)


def test_a_profiling_call_gives_zeros(triple: str, make_config: Callable[..., Any]) -> None:
    runner = Runner(make_config(), dense())
    tokens = Tokens.random((3,), runner.dtype)
    batch = runner.batch((3,), (3,))
    assert not runner.forward(None, tokens, (3,), (3,), batch).any()


@pytest.mark.parametrize("window", [None, 7])
def test_an_encoder_attends_both_ways(
    triple: str, make_config: Callable[..., Any], window: int | None
) -> None:
    runner = Runner(make_config(), dense(EncoderOnlyAttention, per_layer_sliding_window=window))
    lens = (30, 5, 21)
    tokens = Tokens.random(lens, runner.dtype)
    rules = plain_rules(causal=False, sliding_window=window)
    expected(tokens, lens, lens, rules).assert_is(runner.step(tokens, lens, lens))
    assert_is_ours(runner)


def test_cross_attention_reads_what_the_encoder_wrote_once(
    triple: str, make_config: Callable[..., Any]
) -> None:
    runner = Runner(make_config(), dense(CrossAttention))
    assert_is_ours(runner)
    encoded = Tokens.random((35, 20), runner.dtype)
    asked = Tokens.random((4, 4), runner.dtype, seed=1)
    right = [
        answer_of(*rows, 0, plain_rules(causal=False))
        for rows in zip(asked.query, encoded.key, encoded.value, strict=True)
    ]
    # The first decoder step writes the encoder's keys; the later ones find them.
    batch = runner.batch((4, 4), (4, 4), **encoder_lens((35, 20)))
    record = runner.builder.build(0, batch)
    query, key, value = (torch.cat(rows) for rows in (asked.query, encoded.key, encoded.value))
    output = runner.call(record, query, key, value, batch)
    for part, want in zip(output.split(4), right, strict=True):
        want.assert_is(part)
    batch = runner.batch((1, 1), (5, 5), **encoder_lens((35, 20)))
    record = runner.builder.build(0, batch)
    last = torch.stack([rows[-1] for rows in asked.query])
    output = runner.call(record, last, None, None, batch)
    for part, want in zip(output.split(1), right, strict=True):
        want.rows(torch.tensor([-1])).assert_is(part)


def test_static_sinks_come_before_every_request(
    triple: str, make_config: Callable[..., Any]
) -> None:
    config = make_config()
    runner = Runner(config, scaled(dense(StaticSinkAttention, sink_len=16)))
    assert_is_ours(runner)
    lens = (1, 20), (33, 20)
    tokens = Tokens.random((16 + 33, 16 + 20), runner.dtype)
    # Block 1 holds the sinks; the requests' block table does not list it.
    runner.table = torch.tensor([[5, 9, 3, 0], [2, 8, 0, 0]], dtype=torch.int32)
    sinks = torch.arange(16, 32)
    first = Tokens(
        *([rows[0][16:], rows[1][16:]] for rows in (tokens.query, tokens.key, tokens.value))
    )
    for rows in (tokens.key, tokens.value):
        rows[1][:16] = rows[0][:16]
    layer, impl = runner.layer, runner.layer.impl
    layer.sink_key, layer.sink_value, layer.sink_populated = first.key[0], first.value[0], True
    impl.do_kv_cache_update(layer, tokens.key[0][:16], tokens.value[0][:16], layer.kv_cache, sinks)
    runner.step(first, (32, 0), (32, 0))
    output = runner.step(first, *lens)
    right = expected(tokens, lens[0], (16 + 33, 16 + 20), plain_rules())
    right.assert_is(output)


def test_a_layer_reads_the_cache_of_another(triple: str, make_config: Callable[..., Any]) -> None:
    config = make_config()
    runner = Runner(config, dense())
    tokens = Tokens.random((30,), runner.dtype)
    runner.step(tokens, (30,), (30,))
    target, cache = NAME, runner.layer.kv_cache
    other = NAME.replace(".0.", ".1.")

    def make(config: Any) -> Any:
        return Attention(
            HEADS,
            HEAD_SIZE,
            SCALE,
            num_kv_heads=KV_HEADS,
            cache_config=config.cache_config,
            prefix=other,
            kv_sharing_target_layer_name=target,
        )

    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    with set_current_vllm_config(config):
        torch.set_default_dtype(runner.dtype)
        layer = make(config)
        torch.set_default_dtype(torch.float32)
    layer.kv_cache = cache
    batch = runner.batch((1,), (30,))
    record = runner.builder.build(0, batch)
    kept = cache.clone()
    with set_forward_context({other: record}, config, slot_mapping={other: batch.slot_mapping}):
        output = layer(tokens.query[0][-1:].flatten(1), None, None).view(-1, HEADS, HEAD_SIZE)
    expected(tokens, (1,), (30,), plain_rules()).assert_is(output)
    assert torch.equal(kept.view(torch.uint8), cache.view(torch.uint8))


def test_fast_prefill_computes_the_wanted_tokens_only(
    triple: str, make_config: Callable[..., Any]
) -> None:
    runner = Runner(
        make_config(),
        dense(),
        wrap=lambda backend: create_fast_prefill_custom_backend("F", backend),
    )
    lens = ((30, 4), (30, 50))
    tokens = Tokens.random(lens[1], runner.dtype)
    has_most = "max_logits_per_req" in CommonAttentionMetadata.__dataclass_fields__

    def wanting(*tokens: int) -> dict[str, Any]:
        fields = {"logits_indices_padded": torch.tensor(tokens), "num_logits_indices": len(tokens)}
        return fields | ({"max_logits_per_req": 1} if has_most else {})

    runner.step(tokens, (0, 46), (0, 46), **wanting(45))
    wanted = torch.tensor([29, 33])
    batch = runner.batch(*lens, **wanting(29, 33))
    record = runner.builder.build(0, batch)
    assert record.num_logits_indices == 2
    query, key, value = (
        torch.cat([rows[0], rows[1][46:]]) for rows in (tokens.query, tokens.key, tokens.value)
    )
    runner.layer.impl.do_kv_cache_update(
        runner.layer, key, value, runner.layer.kv_cache, batch.slot_mapping
    )
    output = torch.empty(2, HEADS, HEAD_SIZE, dtype=runner.dtype)
    runner.layer.impl.forward(
        runner.layer, query[wanted], None, None, runner.layer.kv_cache, record, output
    )
    right = expected(tokens, *lens, plain_rules())
    right.rows(wanted).assert_is(output)


def test_attention_types_reach_the_impl(triple: str, make_config: Callable[..., Any]) -> None:
    runner = Runner(make_config(), dense(CrossAttention))
    assert runner.layer.impl.attn_type == AttentionType.ENCODER_DECODER
    assert not runner.layer.impl.rules.causal
