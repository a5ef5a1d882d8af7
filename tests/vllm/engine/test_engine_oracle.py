"""The oracle of latent engines: the models of ``transformers`` answer alike, and its judgement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engine import latent
from tests.vllm.engine.latent import CONFIGS, Oracle, judged, save_model, stored_latent

ARCHITECTURES = {
    latent.DENSE: "DeepseekV3ForCausalLM",
    latent.SPARSE: "DeepseekV32ForCausalLM",
    latent.SHARED: "GlmMoeDsaForCausalLM",
}
SMALL_TOPK = 12


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Save a model whose lists are short; returns its folder."""

    def save(name: str) -> Path:
        if "index_topk" in CONFIGS[name]:
            monkeypatch.setitem(CONFIGS, name, {**CONFIGS[name], "index_topk": SMALL_TOPK})
        save_model(name, tmp_path)
        return tmp_path

    return save


def tokens_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(latent.VOCAB, (length,), generator=generator).tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_oracle_answers_as_transformers_does(name: str, small: Any) -> None:
    import transformers

    architecture = getattr(transformers, ARCHITECTURES[name], None)
    if architecture is None:
        pytest.skip(f"transformers {transformers.__version__} has no {ARCHITECTURES[name]}")
    folder = small(name)
    # Not by its name: vLLM registers classes of its own.
    config = architecture.config_class.from_pretrained(folder)
    model = architecture.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = tokens_of(40)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    actual = Oracle(folder).answer(tokens)[0].log_softmax(-1)
    assert (actual - expected).abs().max() < 2e-3
    # The model is no constant: positions differ by more than any tolerance.
    assert expected.std(0).mean() > 0.5


@pytest.mark.parametrize("name", [latent.SPARSE, latent.SHARED])
def test_own_lists_given_back_change_nothing_and_are_faultless(name: str, small: Any) -> None:
    folder, tokens = small(name), tokens_of(50)
    expected, _, found = Oracle(folder).answer(tokens)
    layers = range(CONFIGS[name]["num_hidden_layers"])
    assert list(found) == [i for i in layers if latent.lists_own_keys(CONFIGS[name], i)]
    seen = {layer: part.own for layer, part in found.items()}
    actual, lists, _ = Oracle(folder).answer(tokens, seen)
    torch.testing.assert_close(actual, expected)
    assert (lists.missed_max, lists.malformed) == (0.0, 0)
    assert lists.rows == len(seen) * (50 - SMALL_TOPK)
    assert 0 < lists.rounding_mean < 0.1


@pytest.mark.parametrize("name", [latent.SPARSE, latent.SHARED])
def test_other_lists_change_the_answer(name: str, small: Any) -> None:
    """Lists of the last keys are well formed; their keys are missed, and the answer shows it."""
    oracle, tokens = Oracle(small(name)), tokens_of(50)
    last = torch.arange(50)[:, None] - torch.arange(SMALL_TOPK)
    last = torch.where(last < 0, -1, last).int()
    layers = [i for i in range(5) if latent.lists_own_keys(CONFIGS[name], i)]
    actual, lists, _ = oracle.answer(tokens, dict.fromkeys(layers, last))
    assert lists.malformed == 0
    assert lists.sequential == lists.rows
    assert lists.missed_mean > 0.3
    expected = oracle.answer(tokens)[0].log_softmax(-1)
    assert (actual.log_softmax(-1) - expected).square().mean().sqrt() > 0.1


def test_lists_are_judged_row_by_row() -> None:
    rows = torch.tensor([1, 5, 6, 7, 8])
    own = torch.tensor([[0, 1, -1], [0, 2, 4], [0, 2, 4], [0, 2, 4], [0, 2, 4]]).int()
    given = torch.tensor([[1, 0, -1], [0, 2, 4], [2, 2, 4], [5, 6, 7], [0, 2, 9]]).int()
    found = judged(given, own, own, rows)
    assert found.rows == 4
    assert found.malformed == 2
    assert found.sequential == 1
    assert found.missed_max == 1.0
    assert found.missed_mean == pytest.approx((0 + 1 / 3 + 1 + 1 / 3) / 4)
    assert found.rounding_max == 0.0


def test_a_cache_rounds_what_it_stores() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(9, width, generator=generator) for width in (512, 64)]
    assert all(map(torch.equal, stored_latent(*rows, "auto"), rows))
    for cache, largest in (("fp8", 0.07), ("fp8_ds_mla", 0.07)):
        kept = stored_latent(*rows, cache)
        errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(kept, rows, strict=True)]
        assert 0 < errors[0] < largest
        assert (errors[1] == 0) == (cache == "fp8_ds_mla")


@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_reads_the_models(name: str, tmp_path: Path) -> None:
    config = pytest.importorskip("vllm.config")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    made = config.ModelConfig(
        model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096
    )
    assert made.use_mla
    assert made.get_head_size() == 576
    assert getattr(made.hf_config, "index_topk", None) == CONFIGS[name].get("index_topk")
    assert made.hf_config.num_nextn_predict_layers == 1
    if name == latent.SHARED:
        assert made.hf_config.index_topk_freq == 2
