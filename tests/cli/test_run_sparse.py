"""``attn run`` with SPARSE_MLA, in Triton's interpreter, as if it served machines without a GPU.

Its kernels are chosen by phase and its rows by name; some choices are refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.cli.app import app
from attn.cli.check import better_than_listed
from attn.cli.corrupt import Fault
from attn.cli.report import RunReport
from attn.impls.sparse.indexer import SparseIndexer
from attn.registry import AttentionBackendEnum
from builders.sparse import choice as sparse_mla_choice
from specs.devices import DeviceKind
from specs.hf_config import load_model_geometry

CONFIG = {
    "model_type": "deepseek_v32",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 160,
    "q_lora_rank": 32,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 32,
    "v_head_dim": 16,
    "index_topk": 24,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
REQUESTS = [(70, 9), (17, 12), (40, 1), (33, 5)]
SMALL = ["--layers", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
LAYOUTS = {
    "bf16": "bf16",
    "fp8_nope_fp8_rope": "fp8_nope_fp8_rope",
    "fp8_nope_block_scale_bf16_rope": "fp8_nope_block_scale_bf16_rope",
    # SGLang's name of the layout before this one.
    "FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE": "fp8_nope_block_scale_bf16_rope",
}
OWN = ["--sparse-prefill-kernel", "triton_sparse", "--sparse-decode-kernel", "triton_sparse"]

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter"
)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SPARSE_MLA serve machines without a GPU, as TORCH_REF does."""
    backend = AttentionBackendEnum["SPARSE_MLA"].get_class()
    kinds = (*backend.capabilities.device_kinds, DeviceKind.CPU)
    capabilities = backend.capabilities.replace(device_kinds=kinds)
    monkeypatch.setattr(backend, "capabilities", capabilities)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A small model and a trace."""
    model, trace = tmp_path / "model.json", tmp_path / "trace.csv"
    model.write_text(json.dumps(CONFIG))
    rows = [f"2023-11-16 18:15:4{at}.68,{one},{two}" for at, (one, two) in enumerate(REQUESTS)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return ["run", "--model", str(model), "--trace", str(trace), *SMALL]


def attn(*arguments: str) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, list(arguments))


@interpreted
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_checked_for_every_layout(given: list[str], tmp_path: Path, layout: str) -> None:
    result = attn(*given, *OWN, "--kv-layout", layout, "--report", str(tmp_path))
    assert result.exit_code == 0, result.output + result.stderr
    outcome = RunReport.model_validate_json((tmp_path / "report.json").read_text())
    (group,) = outcome.layer_groups
    assert outcome.passed
    assert outcome.finished_requests == len(REQUESTS)
    assert group.backend == "SPARSE_MLA"
    assert group.kv_layout.startswith(f"latent {LAYOUTS[layout]},")
    assert outcome.settings["sparse_prefill_kernel"] == "triton_sparse"
    assert outcome.settings["sparse_decode_kernel"] == "triton_sparse"
    assert outcome.settings["kv_layout"] == layout


@interpreted
@pytest.mark.usefixtures("served")
def test_drafts_are_verified_and_aliases_name_the_backend(given: list[str]) -> None:
    result = attn(*given, "--backend", "NSA", "--speculative", "2", "--kv-cache-dtype", "fp8")
    assert result.exit_code == 0, result.output + result.stderr
    assert "SPARSE_MLA" in result.output


@interpreted
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("fault", [Fault.ZEROS, Fault.WRONG_SLOT, Fault.PERMUTED_BLOCK_TABLE])
def test_faults_are_seen(given: list[str], fault: Fault) -> None:
    result = attn(*given, *OWN, "--corrupt", fault.value)
    assert result.exit_code == 1, result.output + result.stderr


@pytest.mark.parametrize("shift", [1, -1])
def test_lists_that_are_not_the_best_are_seen(
    given: list[str], monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    """A list has the right number of positions, but each is shifted by one, on or back."""
    forward = SparseIndexer.forward

    def shifted(self: SparseIndexer, inputs: Any) -> torch.Tensor:
        lists = forward(self, inputs)
        full = (lists >= 0).all(1)
        seen = torch.cat(
            [one.lengths.visible_lens for one in (inputs.metadata.decode, inputs.metadata.prefill)
             if one is not None]
        )  # fmt: skip
        moved = (lists + shift) % seen.clamp(min=1)[:, None]
        lists.copy_(torch.where(full[:, None], moved, lists))
        return lists

    monkeypatch.setattr(SparseIndexer, "forward", shifted)
    result = attn(*given)
    assert result.exit_code == 2
    assert "the indexer must list the best of positions up to" in result.stderr


def test_a_position_left_out_is_named() -> None:
    query, weights = torch.ones(2, 16), torch.ones(2)
    keys = torch.arange(1.0, 7.0)[:, None].expand(6, 16)
    assert better_than_listed(query, weights, keys, torch.tensor([4, 5])) is None
    assert better_than_listed(query, weights, keys, torch.tensor([3, 5])) == 4
    assert better_than_listed(query, weights, keys, torch.arange(6)) is None


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "no gpu for the kernel": (
        ["--sparse-prefill-kernel", "flashmla_sparse"],
        [
            "prefill by flashmla_sparse needs compute capability 9.0 or 10.0 to 10.3",
            "use triton_sparse",
        ],
    ),
    "rows that a kernel does not read": (
        ["--sparse-decode-kernel", "fa3", "--kv-layout", "fp8_nope_fp8_rope"],
        ["decode by fa3 reads bf16 rows alone, and the cache holds fp8_nope_fp8_rope"],
    ),
    "another backend": (
        ["--backend", "TORCH_REF_SPARSE_MLA", "--sparse-decode-kernel", "fa3"],
        ["sparse-decode-kernel fa3 is a kernel of SPARSE_MLA, got TORCH_REF_SPARSE_MLA"],
    ),
    "unknown rows": (["--kv-layout", "fp4"], ["kv-layout must be one of bf16, ", "got 'fp4'"]),
    "rows of the indexer": (["--kv-layout", "indexer_fp8"], ["format must be one of"]),
    "rows and another dtype": (
        ["--kv-layout", "bf16", "--kv-cache-dtype", "fp8"],
        ["kv-layout bf16 is kv-cache-dtype 'auto', got 'fp8' too"],
    ),
}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_with_the_reason(given: list[str], case: str) -> None:
    arguments, expected = REFUSED[case]
    # Vendors' kernels are for rows of DeepSeek's widths.
    given[2] = "deepseek-v3.2"
    result = attn(*given, *arguments)
    assert result.exit_code == 2, result.output
    for said in expected:
        assert said in result.stderr


def test_options_of_sparse_layers_are_for_sparse_layers(given: list[str], tmp_path: Path) -> None:
    path = tmp_path / "dense.json"
    dense = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 160,
    }
    path.write_text(json.dumps(dense))
    arguments = ["run", "--model", str(path), *given[3:]]
    result = attn(*arguments, "--sparse-decode-kernel", "trtllm")
    assert result.exit_code == 2
    assert "sparse-decode-kernel trtllm is a kernel of sparse latent layers" in result.stderr
    result = attn(*arguments, "--kv-layout", "bf16")
    assert result.exit_code == 2
    assert "kv-layout names rows of latent layers" in result.stderr


def test_a_named_kernel_asks_for_the_triple(given: list[str]) -> None:
    """A named kernel needs the backend that has it, and no machine without a GPU serves that."""
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    result = attn(*given, *OWN)
    assert result.exit_code == 2
    assert "SPARSE_MLA cannot serve this layer" in result.stderr
    assert "device cpu: sm80, sm89" in result.stderr


def test_deepseeks_indexer() -> None:
    model = load_model_geometry("deepseek-v3.2")
    for layer in model.layers:
        assert layer.indexer is not None
        found = layer.indexer.index_topk, layer.indexer.index_n_heads, layer.indexer.index_head_dim
        assert found == (2048, 64, 128)


@pytest.mark.parametrize("device", ["h200", "b200", "a100"])
def test_it_is_explained_and_listed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: dict[str, str] = {}
    monkeypatch.setattr(sparse_mla_choice, "unavailable_kernels", lambda: missing)
    monkeypatch.setenv("COLUMNS", "200")
    result = attn("explain", "--model", "deepseek-v3.2", "--device", device, "--json")
    assert result.exit_code == 0, result.output
    (decision,) = json.loads(result.output)
    assert decision["chosen"] == "SPARSE_MLA"
    (chosen,) = [one for one in decision["candidates"] if one["name"] == "SPARSE_MLA"]
    assert chosen["reasons"][1].startswith("prefill and decode by triton_sparse")
    others = {reason.split()[0] for reason in chosen["reasons"][2:]}
    assert (
        others
        == {
            "h200": {"flashmla_sparse", "flashmla_kv", "flashinfer_mla", "fa3"},
            "b200": {"flashmla_sparse", "flashmla_kv", "trtllm"},
            "a100": set(),
        }[device]
    )
    assert "SPARSE_MLA" in attn("backends").output
