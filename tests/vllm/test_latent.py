"""VLLM's MLA layer with our triple in it, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, mla_attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.oracle import Rules, attention
from tests.vllm.runner import NAME, Runner, Tokens

HEADS, RANK, NOPE, ROPE, VALUE = 4, 64, 32, 32, 32
SCALE = (NOPE + ROPE) ** -0.5
MIX = ((1, 30, 4, 1), (40, 30, 52, 1))
"""A decode, a prompt, a prompt's next chunk, a decode of a first token."""
WEIGHT = (
    torch.randn(HEADS * (NOPE + VALUE), RANK, generator=torch.Generator().manual_seed(3))
    * RANK**-0.5
)


class Projection(torch.nn.Module):
    """``kv_b_proj`` without quantisation."""

    quant_method = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(WEIGHT.to(dtype), requires_grad=False)

    def forward(self, rows: Tensor) -> tuple[Tensor]:
        return (rows @ self.weight.T,)


class LatentRunner(Runner):
    """The layer, made and called as vLLM does it."""

    def call(
        self, record: Any, query: Tensor, key: Tensor | None, value: Tensor | None, batch: Any
    ) -> Tensor:
        metadata = None if record is None else {NAME: record}
        assert key is not None
        latent, rope = key.split([RANK, ROPE], dim=-1)
        with set_forward_context(metadata, self.config, slot_mapping={NAME: batch.slot_mapping}):
            output: Tensor = self.layer(
                query,
                latent[:, 0],
                rope,
                output_shape=(len(query), HEADS * VALUE),
            )
        return output.view(-1, HEADS, VALUE)


def make_layer(config: Any) -> Any:
    dtype = config.model_config.dtype
    return mla_attention.MLAAttention(
        HEADS,
        SCALE,
        NOPE,
        ROPE,
        VALUE,
        None,
        RANK,
        Projection(dtype),
        cache_config=config.cache_config,
        prefix=NAME,
    )


def make_dense(config: Any) -> Any:
    prefix = "model.layers.1.self_attn.attn"
    return Attention(2, 64, 1.0, num_kv_heads=2, cache_config=config.cache_config, prefix=prefix)


def tokens_of(lens: tuple[int, ...], dtype: torch.dtype) -> Tokens:
    """Queries ``[T, H, P + r]``; as keys latent rows ``[T, 1, L + r]``; values are none."""
    generator = torch.Generator().manual_seed(11)

    def rows(heads: int, width: int) -> list[Tensor]:
        return [torch.randn(n, heads, width, generator=generator).to(dtype) for n in lens]

    keys = rows(1, RANK + ROPE)
    return Tokens(rows(HEADS, NOPE + ROPE), keys, keys)


def expected_rows(tokens: Tokens, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> Tensor:
    """By definition: keys and values of every head, expanded."""
    weight = tokens.key[0].new_tensor(WEIGHT.to(tokens.key[0].dtype).tolist(), dtype=torch.float64)
    per_head = weight.T.reshape(RANK, HEADS, NOPE + VALUE)
    parts = []
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        stored = tokens.key[row][:length, 0].double()
        expanded = torch.einsum("sl,lhx->shx", stored[:, :RANK], per_head)
        rope = stored[:, None, RANK:].expand(-1, HEADS, -1)
        key = torch.cat([expanded[..., :NOPE], rope], dim=-1)
        query = tokens.query[row][length - count : length].double()
        out, _ = attention(query, key, expanded[..., NOPE:], length - count, Rules(SCALE))
        parts.append(out)
    return torch.cat(parts)


def error_of(actual: Tensor, exact: Tensor) -> float:
    """Largest relative norm of a row's error."""
    difference = (actual.double() - exact).flatten(1).norm(dim=1)
    return float((difference / exact.flatten(1).norm(dim=1)).max())


class NoPrefill:
    """For vLLM's own choice of a prefill kernel, of which none is there and ours asks none."""

    def __init__(self, **_: Any) -> None:
        pass


@pytest.fixture
def runner_of(
    plugin: Any, make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LatentRunner]:
    def make(dtype: str = "float32", **settings: Any) -> LatentRunner:
        monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, "TRITON_MLA")
        plugin.register()
        monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
        return LatentRunner(make_config(dtype=dtype, backend="TRITON_MLA", **settings), make_layer)

    return make


KINDS = {
    "fp32": ("float32", {}, 1e-4),
    # The absorbed query and the latent output are rounded too.
    "fp16": ("float16", {}, 1e-2),
    "fp8 blocks of 48": (
        "float16",
        {"cache_dtype": "fp8", "block_size": 48, "max_model_len": 240},
        0.1,
    ),
}
"""Model dtype, settings of the engine, and the largest relative error of a row."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_latent_layer_runs_on_ours_and_is_right(
    cuda: Callable[..., None], runner_of: Callable[..., LatentRunner], kind: str
) -> None:
    cuda()
    dtype, settings, tolerance = KINDS[kind]
    runner = runner_of(dtype, **settings)
    assert type(runner.layer.impl).__module__ == "attn.integrations.vllm.members"
    tokens, table = tokens_of(MIX[1], runner.dtype), runner.table
    before = [length - count for count, length in zip(*MIX, strict=True)]

    def check(rows: list[int], query_lens: list[int], seq_lens: list[int]) -> None:
        runner.table = table[rows]
        parts = (tokens.query, tokens.key, tokens.value)
        chosen = Tokens(*([part[row] for row in rows] for part in parts))
        output = runner.step(chosen, query_lens, seq_lens)
        assert error_of(output, expected_rows(chosen, query_lens, seq_lens)) < tolerance

    # What there is already comes as prompts; then a mix, decodes first, as vLLM orders them.
    rows = [row for row, length in enumerate(before) if length]
    check(rows, [before[row] for row in rows], [before[row] for row in rows])
    rows = sorted(range(len(before)), key=lambda row: MIX[0][row] > 1)
    check(rows, [MIX[0][row] for row in rows], [MIX[1][row] for row in rows])


def test_a_latent_layer_without_metadata_gives_zeros(
    cuda: Callable[..., None], runner_of: Callable[..., LatentRunner]
) -> None:
    cuda()
    runner = runner_of()
    tokens = tokens_of((5,), runner.dtype)
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
    monkeypatch.setenv(plugin.OVERRIDE_VARIABLE, "TRITON_MLA")
    plugin.register()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    config = make_config(dtype="float16", backend=None)
    config.attention_config.backend_per_kind = {
        "full_attention": AttentionBackendEnum.CUSTOM,
        "mla_attention": AttentionBackendEnum.TRITON_MLA,
    }
    with set_current_vllm_config(config):
        layers = {"CUSTOM": make_dense(config), "TRITON_MLA": make_layer(config)}
    for backend, layer in layers.items():
        assert layer.get_attn_backend().get_name() == backend
        assert type(layer.impl).__module__ == "attn.integrations.vllm.members"


def test_decode_context_parallelism_of_latent_layers_is_refused(
    cuda: Callable[..., None], runner_of: Callable[..., LatentRunner]
) -> None:
    cuda()
    runner = runner_of()
    runner.config.parallel_config.decode_context_parallel_size = 2
    builder = type(runner.builder)
    with pytest.raises(ValueError, match="decode_context_parallel_size must be 1 for MLA layers"):
        builder(runner.spec, [NAME], runner.config, torch.device("cpu"))
