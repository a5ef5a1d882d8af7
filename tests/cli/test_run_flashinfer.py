"""``attn run`` with the backends over FlashInfer, on an emulated GPU.

The path is a real one's, except for the device of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.cli import app as command
from attn.cli import replay
from attn.cli.check import fp8_query, judge
from attn.cli.corrupt import Fault
from attn.cli.report import RunReport
from specs.devices import KNOWN_DEVICES, Device
from tests.emulators import flashinfer_emulator, trtllm_emulator
from tests.emulators.trtllm_emulator import NEW, OLD

AZURE = Path(__file__).parents[3] / "shared/data/azure_llm_2023_conv.csv"
H200, B200, PRO = (KNOWN_DEVICES[name] for name in ("h200", "b200", "rtx-pro-6000"))
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 160,
    },
    "sinks": {
        "model_type": "gpt_oss",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 160,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "soft_cap": {
        "model_type": "gemma2",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 160,
        "sliding_window": 24,
        "attn_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 64,
    },
}
REQUESTS = [(100, 30), (17, 40), (64, 1), (33, 5), (150, 90)]


@contextmanager
def emulated(device: Device, version: str) -> Iterator[trtllm_emulator.Emulator]:
    """FlashInfer runs here, and the command believes in the device."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(flashinfer_emulator.emulated(version))
        calls = stack.enter_context(trtllm_emulator.emulated(device, version))
        patch.setattr(command, "detect_device", lambda: device)
        patch.setattr(Device, "torch_type", property(lambda _: "cpu"))
        yield calls


@pytest.fixture
def model(tmp_path: Path) -> Any:
    def write(name: str) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"torch_dtype": "bfloat16", **MODELS[name]}))
        return str(path)

    return write


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second, (context, generated) in enumerate(REQUESTS):
        lines.append(f"2023-11-16 18:15:{46 + second}.6805900,{context},{generated}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(*arguments: str) -> Any:
    small = ["--layers", "2", "--max-num-seqs", "8", "--max-num-batched-tokens", "96"]
    torch.set_num_threads(1)
    return CliRunner().invoke(command.app, ["run", *small, *arguments])


SERVED = [
    ("TRTLLM_MHA", "dense", H200, OLD, "auto"),
    ("TRTLLM_MHA", "dense", H200, NEW, "fp8"),
    ("TRTLLM_MHA", "sinks", H200, NEW, "auto"),
    ("TRTLLM_MHA", "dense", B200, OLD, "fp8"),
    ("TRTLLM_MHA", "sinks", B200, NEW, "auto"),
    ("TRTLLM_MHA", "dense", PRO, OLD, "auto"),
    ("FLASHINFER", "dense", H200, OLD, "auto"),
    ("FLASHINFER", "dense", H200, NEW, "fp8"),
    ("FLASHINFER", "soft_cap", H200, NEW, "auto"),
]


@pytest.mark.parametrize(
    ("backend", "name", "device", "version", "cache"),
    SERVED,
    ids=[f"{row[0]}-{row[1]}-{row[2].name}-{row[3]}-{row[4]}" for row in SERVED],
)
def test_a_trace_is_served_within_budget(
    backend: str,
    name: str,
    device: Device,
    version: str,
    cache: str,
    model: Any,
    trace: str,
    tmp_path: Path,
) -> None:
    options = ["--backend", backend, "--kv-cache-dtype", cache, "--report", str(tmp_path / "r")]
    with emulated(device, version) as calls:
        result = run("--model", model(name), "--trace", trace, *options)
    assert result.exit_code == 0, result.output + result.stderr
    outcome = RunReport.model_validate_json((tmp_path / "r" / "report.json").read_text())
    assert outcome.passed
    assert outcome.finished_requests == len(REQUESTS)
    assert {group.backend for group in outcome.layer_groups} == {backend}
    if backend == "TRTLLM_MHA":
        decode, prefill = ("gen_decode", "gen_prefill") if device is B200 else ("xqa", "fmha_v2")
        assert {decode, prefill} == set(calls.called)


@pytest.mark.parametrize("fault", [Fault.WRONG_SLOT, Fault.WRONG_SCALE, Fault.WRONG_KV_SCALE])
@pytest.mark.parametrize("backend", ["FLASHINFER", "TRTLLM_MHA"])
def test_faults_are_seen(fault: Fault, backend: str, model: Any, trace: str) -> None:
    cache = "fp8" if fault is Fault.WRONG_KV_SCALE else "auto"
    options = ["--backend", backend, "--kv-cache-dtype", cache, "--corrupt", fault.value]
    with emulated(H200, NEW):
        result = run("--model", model("dense"), "--trace", trace, *options)
    assert result.exit_code == 1, result.output


@pytest.mark.skipif(not AZURE.exists(), reason="the real trace is not here")
def test_the_real_trace_is_served(model: Any, tmp_path: Path) -> None:
    options = ["--backend", "TRTLLM_MHA", "--trace", str(AZURE), "--requests", "3"]
    with emulated(H200, OLD):
        result = run("--model", model("dense"), *options, "--block-size", "64")
    assert result.exit_code == 0, result.output + result.stderr


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        (H200, ["--block-size", "48"], "block_size must be one of 16, 32, 64, 128, got 48"),
        (KNOWN_DEVICES["a100"], [], "compute capability 8.0: 9.0, "),
        (H200, ["--kv-cache-dtype", "fp8_e5m2"], "kv_cache_dtype fp8_e5m2: auto"),
        (PRO, ["--kv-cache-dtype", "fp8"], "must not be quantised for prefill by fmha_v2"),
    ],
)
def test_what_is_not_served_is_an_error_with_the_reason(
    device: Device, options: list[str], reason: str, model: Any, trace: str
) -> None:
    with emulated(device, NEW):
        result = run("--model", model("dense"), "--trace", trace, "-b", "TRTLLM_MHA", *options)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_fp8_prefills_of_the_old_version_are_refused_with_what_to_install(
    model: Any, trace: str
) -> None:
    options = ["-b", "TRTLLM_MHA", "--kv-cache-dtype", "fp8"]
    with emulated(H200, OLD):
        result = run("--model", model("dense"), "--trace", trace, *options)
    assert result.exit_code == 2
    assert "flashinfer-python>=0.7" in result.stderr


def test_kernels_that_compute_in_fp8_are_judged_as_such(
    model: Any, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of such a row includes e4m3's error; another backend's budget does not."""
    budgets: dict[str, list[float]] = {}
    for backend in ("TRTLLM_MHA", "FLASHINFER"):
        found = budgets[backend] = []

        def kept(actual: Any, check: Any, found: list[float] = found) -> Any:
            verdict = judge(actual, check)
            found.append(verdict.budget)
            return verdict

        monkeypatch.setattr(replay, "judge", kept)
        options = ["--backend", backend, "--kv-cache-dtype", "fp8"]
        with emulated(H200, NEW):
            assert run("--model", model("dense"), "--trace", trace, *options).exit_code == 0
    own, other = (torch.tensor(budgets[name]).median() for name in ("TRTLLM_MHA", "FLASHINFER"))
    assert own > other
    assert fp8_query(torch.tensor([0.3, 500.0]), 1.0).tolist() == [0.3125, 448.0]
