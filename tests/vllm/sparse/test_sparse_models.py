"""A whole model of vLLM's with sparse layers, over our backend, against ``transformers``.

A stand-in for the indexer lists random tokens for every row, other ones in each of its layers. The
reference is a dense model whose masks show each layer the tokens of its lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import CommonAttentionMetadata

from attn.integrations.vllm import members
from tests.vllm.engine.models import LATENT, make_model, prompts_of
from tests.vllm.test_latent import NoPrefill
from tests.vllm.test_latent_model import BLOCK_SIZE, TOLERANCE, config_of, define_silu, loaded

TOPK = 8
PATTERN = "FSF"
"""A full layer with its own lists, a layer that shares them, and a full layer."""
STEPS = (6, 10, 1, 3, 1)
"""Tokens of each step: a short prompt, a chunk beyond the length of lists, decodes, a chunk."""
LENGTH = sum(STEPS)


def lists_of(layer: int) -> list[Tensor]:
    """The list of each position in a layer: every token up to it, or ``TOPK`` random ones."""
    generator = torch.Generator().manual_seed(layer)
    return [torch.randperm(place + 1, generator=generator)[:TOPK] for place in range(LENGTH)]


class Lister(nn.Module):
    """Stands in for vLLM's indexer module: it has no weights and knows each layer's lists."""

    topk_tokens = TOPK

    def __init__(self, *given: Any, **others: Any) -> None:
        super().__init__()
        (self.topk_indices_buffer,) = (one for one in given if isinstance(one, Tensor))
        (prefix,) = (one for one in given if isinstance(one, str))
        self.lists = lists_of(int(prefix.split(".")[2]))

    def forward(self, hidden: Tensor, latent: Tensor, positions: Tensor, rotary: Any) -> Tensor:
        self.topk_indices_buffer.fill_(-1)
        for row, place in enumerate(positions.tolist()):
            listed = self.lists[place]
            self.topk_indices_buffer[row, : len(listed)] = listed.int()
        return self.topk_indices_buffer


def reference_of(folder: Path, tokens: list[int]) -> Tensor:
    """Logits ``[T, V]`` in float32, with a mask for each layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    source = 0
    for index, layer in enumerate(model.model.layers):
        source = index if PATTERN[index] == "F" else source
        mask = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min)
        for row, listed in enumerate(lists_of(source)):
            mask[0, 0, row, listed] = 0

        def masked(
            module: nn.Module, given: Any, named: dict[str, Any], mask: Tensor = mask
        ) -> tuple[Any, dict[str, Any]]:
            return given, {**named, "attention_mask": mask}

        layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits.double()


def answers_of(model: Any, config: Any, tokens: list[int]) -> Tensor:
    """Logits ``[T, V]`` of a request that comes in steps."""
    layers = config.compilation_config.static_forward_context
    first = next(iter(layers.values()))
    backend, spec = first.get_attn_backend(), first.get_kv_cache_spec(config)
    builder = backend.get_builder_cls()(spec, list(layers), config, torch.device("cpu"))
    table = torch.tensor([[3, 2, 1, 4]], dtype=torch.int32)
    answers, length = [], 0
    for count in STEPS:
        places = torch.arange(length, length + count)
        length += count
        starts, lens = torch.tensor([0, count]).int(), torch.tensor([length]).int()
        batch = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lens,
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=length,
            block_table_tensor=table,
            slot_mapping=3 * BLOCK_SIZE + places,
            seq_lens_cpu_upper_bound=lens,
        )
        record = builder.build(0, batch)
        assert (record.prefill is not None) == (count > 1 and length <= TOPK)
        slots = dict.fromkeys(layers, batch.slot_mapping)
        with (
            set_forward_context(dict.fromkeys(layers, record), config, slot_mapping=slots),
            torch.no_grad(),
        ):
            states = model(torch.tensor(tokens)[places], places, None)
        answers.append(states @ model.lm_head.weight.detach().T)
    return torch.cat(answers)


def test_a_model_with_sparse_layers_answers_as_its_definition(
    cuda: Callable[..., None],
    plugin: Any,
    one_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    make_model(LATENT, folder)
    tokens = prompts_of()[-1][:LENGTH]
    expected = reference_of(folder, tokens)
    path = folder / "config.json"
    sparse = {"index_topk": TOPK, "index_topk_pattern": PATTERN}
    path.write_text(json.dumps(json.loads(path.read_text()) | sparse))
    cuda()
    plugin.register()
    # vLLM makes the buffer of lists on the platform's device.
    monkeypatch.setattr(deepseek_v2.current_platform, "device_type", "cpu")
    define_silu()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)
    monkeypatch.setattr(deepseek_v2, "Indexer", Lister)
    config = config_of(folder)
    with set_current_vllm_config(config):
        one_process()
        model = loaded(config, folder)
        layers = config.compilation_config.static_forward_context.values()
        assert [type(layer.impl).__module__ for layer in layers] == [members.__name__] * 3
        assert [layer.indexer is None for layer in layers] == [one == "S" for one in PATTERN]
        actual = answers_of(model, config, tokens).double()
    assert (actual - expected).abs().max() < TOLERANCE
