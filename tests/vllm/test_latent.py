"""vLLM's MLA layer with our backend in it, against the definition."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, mla_attention

from attn.integrations.vllm import members
from attn.testing import stored_rows
from attn.testing.batches import BatchSpec, LatentWeights, Request, latent_requests, latent_weights
from attn.testing.budget import low_precision
from attn.testing.latent_trial import latent_output, low_latent_output
from tests.vllm.runner import NAME, Answer, Runner, Tokens

HEADS, RANK, NOPE, ROPE, VALUE = 4, 64, 32, 32, 32
SCALE = (NOPE + ROPE) ** -0.5
MIX = ((1, 30, 4, 1), (40, 30, 52, 1))
"""A decode, a prompt, a prompt's next chunk, a decode of a first token."""


def weights_of(dtype: torch.dtype, heads: int = HEADS) -> LatentWeights:
    generator = torch.Generator().manual_seed(3)
    return latent_weights(generator, heads, dtype, RANK, NOPE, ROPE, VALUE)


class Projection(torch.nn.Module):
    """Stands in for ``kv_b_proj`` without quantisation."""

    quant_method = None

    def __init__(self, dtype: torch.dtype, heads: int = HEADS) -> None:
        super().__init__()
        weight = weights_of(dtype, heads).kv_b_proj()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, rows: Tensor) -> tuple[Tensor]:
        return (rows @ self.weight.T,)


class LatentRunner(Runner):
    """The layer, made and called like vLLM does it."""

    def call(
        self, record: Any, query: Tensor, key: Tensor | None, value: Tensor | None, batch: Any
    ) -> Tensor:
        metadata = None if record is None else {NAME: record}
        assert key is not None
        latent, rope = key.split([RANK, ROPE], dim=-1)
        heads = self.layer.num_heads
        with set_forward_context(metadata, self.config, slot_mapping={NAME: batch.slot_mapping}):
            output: Tensor = self.layer(
                query,
                latent[:, 0],
                rope,
                output_shape=(len(query), heads * VALUE),
            )
        return output.view(-1, heads, VALUE)


def make_layer(config: Any, projection: Any = None, heads: int = HEADS, **given: Any) -> Any:
    return mla_attention.MLAAttention(
        heads,
        SCALE,
        NOPE,
        ROPE,
        VALUE,
        None,
        RANK,
        projection or Projection(config.model_config.dtype, heads),
        cache_config=config.cache_config,
        prefix=NAME,
        **given,
    )


def make_dense(config: Any) -> Any:
    prefix = "model.layers.1.self_attn.attn"
    return Attention(2, 64, 1.0, num_kv_heads=2, cache_config=config.cache_config, prefix=prefix)


def whole_requests(
    lens: tuple[int, ...], dtype: torch.dtype, window: int | None = None, heads: int = HEADS
) -> list[Request]:
    """Requests with queries ``[T, H, P + r]`` and latent rows ``[T, 1, L + r]`` of every token."""
    generator, spec = torch.Generator().manual_seed(11), BatchSpec("whole", lens, lens)
    weights = weights_of(dtype, heads)
    return latent_requests(generator, spec, weights, dtype, 16, sliding_window=window)


def tokens_of(requests: list[Request]) -> Tokens:
    """Tokens as the runner gives them; there are no values."""
    keys = [request.key for request in requests]
    return Tokens([request.query for request in requests], keys, keys)


def expected_rows(
    requests: list[Request],
    query_lens: list[int],
    seq_lens: list[int],
    cache_dtype: str,
    weights: LatentWeights | None = None,
) -> Answer:
    """The oracle's answer for a step's new tokens: one new token is absorbed, more are expanded."""
    first_query = requests[0].query
    weights, answers = weights or weights_of(first_query.dtype, first_query.shape[1]), []
    for whole, count, length in zip(requests, query_lens, seq_lens, strict=True):
        first = length - count
        query, rows = whole.query[first:length], whole.key[:length]
        asked = replace(whole, first_position=first, query=query, key=rows, value=rows[..., :RANK])
        one = torch.ones(())
        stored = stored_rows.quantized_latent(rows[:, 0], cache_dtype, one, RANK)

        def attend(query: Tensor, rows: Tensor, asked: Request = asked) -> Tensor:
            keys, first = rows[:, None], asked.first_position
            state = low_precision(
                query, keys, keys[..., :RANK], first, asked.rules, asked.query.dtype
            )
            return state[0]

        low = low_latent_output(weights, asked, stored, attend if count == 1 else None)
        answers.append((latent_output(weights, asked), low.double()))
    return Answer(*(torch.cat(side) for side in zip(*answers, strict=True)))


class NoPrefill:
    """For vLLM's own choice of a prefill kernel, of which none is there and ours asks none."""

    def __init__(self, **_: Any) -> None:
        pass


@pytest.fixture
def runner_of(
    plugin: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LatentRunner]:
    def make(
        dtype: str = "float32",
        layer: dict[str, Any] | None = None,
        member: str = "CUSTOM",
        **settings: Any,
    ) -> LatentRunner:
        if member != "CUSTOM":
            monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, member)
        plugin.register()
        monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
        config = make_config(dtype=dtype, backend=member, **settings)
        return LatentRunner(config, partial(make_layer, **(layer or {})))

    return make


@dataclass(frozen=True)
class Kind:
    """A latent layer and its engine."""

    dtype: str = "float16"
    window: int | None = None
    heads: int = HEADS
    member: str = "CUSTOM"
    named: str = ""
    """Our backend for ``CUSTOM``; the best one where empty."""
    settings: dict[str, Any] = field(default_factory=dict)


BLOCKS_OF_48 = {"block_size": 48, "max_model_len": 240}
KINDS = {
    "fp32": Kind("float32"),
    "fp16": Kind(),
    "fp16 by override": Kind(member="TRITON_MLA"),
    "bf16": Kind("bfloat16"),
    "reference": Kind(named="TORCH_REF_MLA"),
    "fp8 blocks of 48": Kind(settings={"cache_dtype": "fp8", **BLOCKS_OF_48}),
    "fp8 e4m3 by override": Kind(member="TRITON_MLA", settings={"cache_dtype": "fp8_e4m3"}),
    "window": Kind(window=13),
    # Numbers of heads that are no power of two, as models have them on a rank.
    "12 heads": Kind(heads=12),
    "20 heads fp8": Kind(heads=20, settings={"cache_dtype": "fp8"}),
    "24 heads": Kind(heads=24),
    "96 heads": Kind(heads=96),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_latent_layer_runs_on_ours_and_is_right(
    plugin: Any,
    cuda: Callable[..., None],
    runner_of: Callable[..., LatentRunner],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    cuda()
    kind = KINDS[name]
    given: dict[str, Any] = {} if kind.window is None else {"sliding_window": kind.window}
    if not given.keys() <= inspect.signature(mla_attention.MLAAttention).parameters.keys():
        pytest.skip("this vLLM has no latent layers with a window")
    layer = {**given, "heads": kind.heads}
    monkeypatch.setenv("ATTN_VLLM_BACKEND", kind.named)
    runner = runner_of(kind.dtype, layer=layer, member=kind.member, **kind.settings)
    impl = type(runner.layer.impl)
    assert impl.__module__ == "attn.integrations.vllm.members"
    assert (kind.named or "TRITON_MLA") in impl.__name__
    assert runner.layer.get_attn_backend().get_name() == kind.member
    requests = whole_requests(MIX[1], runner.dtype, kind.window, kind.heads)
    table = runner.table
    before = [length - count for count, length in zip(*MIX, strict=True)]
    cache_dtype = kind.settings.get("cache_dtype", "auto")

    def check(rows: list[int], query_lens: list[int], seq_lens: list[int]) -> None:
        runner.table = table[rows]
        chosen = [requests[row] for row in rows]
        output = runner.step(tokens_of(chosen), query_lens, seq_lens)
        expected_rows(chosen, query_lens, seq_lens, cache_dtype).assert_is(output)

    # Cached tokens first come as prompts; then comes a mix with decodes first, as vLLM orders them.
    rows = [row for row, length in enumerate(before) if length]
    check(rows, [before[row] for row in rows], [before[row] for row in rows])
    rows = sorted(range(len(before)), key=lambda row: MIX[0][row] > 1)
    check(rows, [MIX[0][row] for row in rows], [MIX[1][row] for row in rows])


def test_a_latent_layer_without_metadata_gives_zeros(
    cuda: Callable[..., None], runner_of: Callable[..., LatentRunner]
) -> None:
    cuda()
    runner = runner_of()
    tokens = tokens_of(whole_requests((5,), runner.dtype))
    batch = runner.batch((5,), (5,))
    output = runner.call(None, tokens.query[0], tokens.key[0], None, batch)
    assert not bool(output.any())


def test_dense_and_latent_layers_of_one_model_are_both_ours(
    cuda: Callable[..., None],
    plugin: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda()
    plugin.register()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    config = make_config(dtype="float16")
    with set_current_vllm_config(config):
        layers = {"TRITON_ATTN": make_dense(config), "TRITON_MLA": make_layer(config)}
    for backend, layer in layers.items():
        assert layer.get_attn_backend() is getattr(members, f"CUSTOM_{backend}")
        assert type(layer.impl).__module__ == "attn.integrations.vllm.members"


def test_the_log_says_what_a_group_of_latent_layers_got(
    cuda: Callable[..., None],
    runner_of: Callable[..., LatentRunner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda()
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        runner_of("float16", cache_dtype="fp8")
    (line,) = {line for line in caplog.messages if "serves 1 layers" in line}
    for words in (
        "TRITON_MLA as CUSTOM",
        NAME,
        "4 query and 1 KV heads of 96",
        "fp8",
        "; decode: triton, prefill: triton",
    ):
        assert words in line


@pytest.mark.parametrize("member", ["CUSTOM", "TRITON_MLA"])
def test_with_batch_invariance_a_prompt_has_the_same_bits_alone_and_beside_others(
    cuda: Callable[..., None],
    runner_of: Callable[..., LatentRunner],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    member: str,
) -> None:
    cuda()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    runner = runner_of("float16", member=member)
    # vLLM turns prefix caching off for this name; for any other the log says what it does.
    warned = any("--no-enable-prefix-caching" in line for line in caplog.messages)
    assert runner.config.cache_config.enable_prefix_caching == (member == "CUSTOM") == warned
    assert runner.builder.vllm_config.batch_invariant
    # One request has room for its whole context at a time, three have not.
    runner.builder.expanded.workspace_tokens = 80
    lens, new, before = (40, 90, 49), (1, 20, 33), (39, 70, 16)
    requests, table = whole_requests(lens, runner.dtype), runner.table
    runner.step(tokens_of(requests), before, before)
    whole = runner.step(tokens_of(requests), new, lens)
    expected_rows(requests, list(new), list(lens), "auto").assert_is(whole)
    for row, output in enumerate(whole.split(new)):
        runner.table = table[row:]
        alone = runner.step(tokens_of(requests[row : row + 1]), new[row : row + 1], (lens[row],))
        assert torch.equal(alone, output), row
