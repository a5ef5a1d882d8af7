"""Weights of vLLM's latent layers in every form, and others after a reload: prefill and decode are
right by those that were loaded last.

The layers, the quantisation and the reload are vLLM's own; only the product of a quantised layer,
which needs a GPU, is not there, and nothing here calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearMethodBase
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import reload
from vllm.model_executor.utils import set_weight_attrs

from attn.testing.batches import LatentWeights
from tests.vllm.test_latent import (
    HEADS,
    NAME,
    NOPE,
    RANK,
    ROPE,
    VALUE,
    LatentRunner,
    NoPrefill,
    expected_rows,
    make_layer,
    tokens_of,
    whole_requests,
)

WIDTH, BLOCK = HEADS * (NOPE + VALUE), 32
LENS = (20, 7)
Checkpoint = dict[str, Tensor]
"""Parameters of ``kv_b_proj`` by name."""


class PackedConfig(QuantizationConfig):
    """Four bits per weight, two weights to a byte, and a scale per output."""

    def get_name(self) -> Any:
        return "packed"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PackedConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return PackedMethod() if isinstance(layer, ColumnParallelLinear) else None


class PackedMethod(LinearMethodBase):
    """As vLLM's methods of packed weights are: no ``weight``, and a product for everything."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        weight_loader: Any,
        **others: Any,
    ) -> None:
        rows = sum(output_partition_sizes)
        shapes = {
            "weight_packed": torch.empty(rows, input_size_per_partition // 2, dtype=torch.uint8),
            "weight_scale": torch.empty(rows, 1),
        }
        for name, tensor in shapes.items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            set_weight_attrs(parameter, {"output_dim": 0, "weight_loader": weight_loader})
            layer.register_parameter(name, parameter)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ unpacked(layer.weight_packed, layer.weight_scale).T.to(x.dtype)


def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 ``[out, in]`` of ``[out, in / 2]`` bytes."""
    halves = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return (halves.float() - 8) * scale


# -- Checkpoints, each with the weight ``[out, in]`` fp32 that it stands for.


def plain(weight: Tensor) -> tuple[Checkpoint, Tensor]:
    return {"weight": weight}, weight


def fp8_per_tensor(weight: Tensor) -> tuple[Checkpoint, Tensor]:
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def fp8_blocks(weight: Tensor) -> tuple[Checkpoint, Tensor]:
    tiles = weight.view(WIDTH // BLOCK, BLOCK, RANK // BLOCK, BLOCK)
    scale = tiles.abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    stored = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * wide


def packed(weight: Tensor) -> tuple[Checkpoint, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 7
    numbers = ((weight / scale).round() + 8).to(torch.uint8)
    stored = numbers[:, ::2] | numbers[:, 1::2] << 4
    return {"weight_packed": stored, "weight_scale": scale}, unpacked(stored, scale)


def quantised(rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a kernel of vLLM's: a checkpoint's shards get one scale by it."""
    return (rows / scale).to(torch.float8_e4m3fn), scale


def fp8_config(block: list[int] | None) -> Any:
    config = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=block
    )
    config.use_deep_gemm = False
    return config


FORMS: dict[str, tuple[Callable[[], Any], Callable[[Tensor], tuple[Checkpoint, Tensor]]]] = {
    "plain": (lambda: None, plain),
    "fp8": (lambda: fp8_config(None), fp8_per_tensor),
    "fp8 blocks": (lambda: fp8_config([BLOCK, BLOCK]), fp8_blocks),
    "packed": (PackedConfig, packed),
}


def drawn(seed: int) -> Tensor:
    """``[out, in]`` fp32: of very different sizes, so that a scale that is left out shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 4, (WIDTH // BLOCK, 1), generator=generator)
    weight = torch.randn(WIDTH, RANK, generator=generator) * RANK**-0.5
    return weight * sizes.repeat_interleave(BLOCK, 0)


def split(weight: Tensor) -> LatentWeights:
    per_head = weight.T.reshape(RANK, HEADS, NOPE + VALUE)
    return LatentWeights(HEADS, per_head[..., :NOPE], per_head[..., NOPE:], ROPE)


def load(layer: nn.Module, checkpoint: Checkpoint) -> None:
    parameters = dict(layer.kv_b_proj.named_parameters())
    assert parameters.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        parameters[name].weight_loader(parameters[name], tensor)


def assert_right(runner: LatentRunner, weight: Tensor) -> None:
    """Prompts, then a decode beside a prompt's next chunk."""
    requests = whole_requests(LENS, runner.dtype)
    for query_lens, seq_lens in (([13, 6], [13, 6]), ([1, 7], [7, 20])):
        # Decodes come first, as vLLM orders them.
        order = [1, 0] if query_lens[0] == 1 else [0, 1]
        runner.table = runner.blocks[order]
        rows = [requests[row] for row in order]
        output = runner.step(tokens_of(rows), query_lens, seq_lens)
        answer = expected_rows(rows, query_lens, seq_lens, "auto", split(weight))
        answer.assert_is(output)


@pytest.mark.parametrize("form", FORMS)
def test_prefill_and_decode_go_by_the_weights_that_were_loaded_last(
    cuda: Callable[..., None],
    plugin: Any,
    make_config: Callable[..., Any],
    one_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
) -> None:
    quantisation, checkpoint_of = FORMS[form]
    cuda()
    plugin.register()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    monkeypatch.setattr(fp8, "cutlass_fp8_supported", lambda: False)
    monkeypatch.setattr(fp8, "cutlass_block_fp8_supported", lambda: False, raising=False)
    no_product = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: no_product)
    monkeypatch.setattr("vllm._custom_ops.scaled_fp8_quant", quantised)
    first, weight = checkpoint_of(drawn(1))

    def make(config: Any) -> Any:
        projection = ColumnParallelLinear(
            *(RANK, WIDTH),
            bias=False,
            quant_config=quantisation(),
            params_dtype=torch.float32,
            prefix=NAME.replace("attn", "kv_b_proj"),
        )
        layer = make_layer(config, projection)
        reload.record_metadata_for_reloading(layer)
        load(layer, first)
        projection.quant_method.process_weights_after_loading(projection)
        return layer

    config = make_config(dtype="float32", backend="CUSTOM")
    with set_current_vllm_config(config):
        one_process()
    runner = LatentRunner(config, make)
    runner.blocks = runner.table
    assert_right(runner, weight)
    layer = runner.layer
    # There is no copy of ours, which nobody would have counted when the KV cache was sized.
    for mine, theirs in ((layer.impl.W_UK, layer.W_UK_T), (layer.impl.W_UV, layer.W_UV)):
        assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
    second, other = checkpoint_of(drawn(2))
    assert not torch.allclose(weight, other)
    with set_current_vllm_config(config):
        reload.initialize_layerwise_reload(layer)
        load(layer, second)
        reload.finalize_layerwise_reload(layer, config.model_config)
    assert_right(runner, other)


def test_what_keeps_quantised_up_projections_is_refused(
    cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm._aiter_ops import rocm_aiter_ops

    from attn.integrations.vllm import members

    cuda()
    monkeypatch.setattr(rocm_aiter_ops, "is_fp8bmm_enabled", lambda: True)
    asked = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": None,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": None,
        "attn_type": "decoder",
    }
    reasons = members.TRITON_MLA.validate_configuration(**asked)
    assert reasons == ["quantised up-projections not supported (VLLM_ROCM_USE_AITER_FP8BMM)"]


def test_a_layer_without_a_builder_says_what_is_missing(
    cuda: Callable[..., None],
    plugin: Any,
    make_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda()
    plugin.register()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    config = make_config(dtype="float32", backend="CUSTOM")
    with set_current_vllm_config(config):
        layer = make_layer(config)
    with pytest.raises(ValueError, match="a metadata builder of the layer's group"):
        _ = layer.impl.W_UK
