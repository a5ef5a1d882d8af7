"""The ``attn`` command as a user meets it: the main job, its reports, its errors, its faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from attn.cli.app import app, parse_bytes
from attn.cli.corrupt import Fault
from attn.cli.report import RunReport
from attn.registry import AttentionBackendEnum
from specs.devices import KNOWN_DEVICES, DeviceKind
from specs.hf_config import load_model_geometry

AZURE = Path(__file__).parents[3] / "shared/data/azure_llm_2023_conv.csv"
SMALL = ["--layers", "2", "--max-num-seqs", "8", "--max-num-batched-tokens", "96"]
REQUESTS = [(100, 30), (17, 40), (64, 1), (33, 5), (150, 90)]
"""Prompt and generated tokens of the test trace."""

CONFIGS = {
    "dense": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 160,
    },
    "windows": {
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 160,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "soft_cap": {
        "model_type": "gemma2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 160,
        "sliding_window": 24,
        "attn_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 16,
    },
    "chunks": {
        "model_type": "llama4_text",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 160,
        "attention_chunk_size": 40,
    },
    "alibi": {
        "model_type": "bloom",
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "seq_length": 160,
    },
    "latent": {
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 160,
        "q_lora_rank": 32,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "sparse": {
        "model_type": "deepseek_v32",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 160,
        "q_lora_rank": 32,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "index_topk": 24,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
}

FAULT_SHOWN_BY = {
    Fault.WINDOW_OFF_BY_ONE: "windows",
    Fault.DROPPED_SINK: "windows",
    Fault.WRONG_SOFT_CAP: "soft_cap",
    Fault.SHIFTED_ALIBI: "alibi",
    Fault.WRONG_CHUNK: "chunks",
}


@pytest.fixture
def model(tmp_path):
    def write(name: str) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(CONFIGS[name]))
        return str(path)

    return write


@pytest.fixture
def trace(tmp_path) -> str:
    path = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for second, (context, generated) in enumerate(REQUESTS):
        lines.append(f"2023-11-16 18:15:{46 + second}.6805900,{context},{generated}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def attn(*arguments: str):
    torch.set_num_threads(1)
    return CliRunner().invoke(app, list(arguments))


def run(model: str, trace: str, *arguments: str):
    return attn("run", "--model", model, "--trace", trace, *SMALL, *arguments)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float16", "fp8"])
def test_every_kind_of_model_is_served_within_budget(model, trace, tmp_path, name, kv_cache_dtype):
    report = tmp_path / "report"
    extra = ["--kv-cache-dtype", kv_cache_dtype, "--report", str(report)]
    result = run(model(name), trace, *extra)
    assert result.exit_code == 0, result.output + result.stderr
    outcome = RunReport.model_validate_json((report / "report.json").read_text())
    assert outcome.passed
    assert not outcome.interrupted
    assert outcome.finished_requests == 5
    assert outcome.clipped_requests == 1
    # Each request has its tokens less one that is never fed back; the last is clipped to 150 + 10.
    assert outcome.totals.tokens == 129 + 56 + 64 + 37 + 159
    assert outcome.totals.checked_rows >= 3 * outcome.totals.steps
    assert (report / "timeline.png").stat().st_size > 10_000
    assert "PASSED" in result.output


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_is_seen_and_exits_non_zero(model, trace, fault):
    name = FAULT_SHOWN_BY.get(fault, "dense")
    arguments = ["--kv-cache-dtype", "fp8"] if fault is Fault.WRONG_KV_SCALE else []
    result = run(model(name), trace, "--corrupt", fault.value, *arguments)
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output


@pytest.mark.parametrize("name", ["latent", "sparse"])
@pytest.mark.parametrize("fault", ["wrong-slot", "wrong-scale", "zeros", "stale-output"])
def test_latent_layers_show_faults_too(model, trace, name, fault):
    assert run(model(name), trace, "--corrupt", fault).exit_code == 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_any_number_of_ranks_that_divides_the_heads_is_served(tmp_path, trace, ranks):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**CONFIGS["latent"], "num_attention_heads": 16}))
    extra = ["--tp", str(ranks), "--layers", "1", "--report", str(tmp_path)]
    result = run(str(path), trace, *extra)
    assert result.exit_code == 0, result.output + result.stderr
    outcome = RunReport.model_validate_json((tmp_path / "report.json").read_text())
    (group,) = outcome.layer_groups
    assert (group.num_heads, group.num_kv_heads) == (16 // ranks, 1)
    assert outcome.settings["tp"] == ranks
    assert outcome.passed


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_deepseeks_heads_are_divided_over_the_ranks(ranks):
    whole = load_model_geometry("deepseek-v3")
    assert {layer.num_heads for layer in whole.layers} == {128}
    assert {layer.num_heads for layer in whole.local(ranks).layers} == {128 // ranks}


@pytest.mark.parametrize(("ranks", "heads"), [(2, (2, 1)), (4, (1, 1))])
def test_dense_ranks_divide_kv_heads_while_they_last(model, trace, tmp_path, ranks, heads):
    result = run(model("dense"), trace, "--tp", str(ranks), "--report", str(tmp_path))
    assert result.exit_code == 0, result.output + result.stderr
    outcome = RunReport.model_validate_json((tmp_path / "report.json").read_text())
    (group,) = outcome.layer_groups
    assert (group.num_heads, group.num_kv_heads) == heads


@pytest.mark.parametrize("ranks", [3, 5, 12])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks):
    result = attn("run", "--model", "deepseek-v3", "--tp", str(ranks))
    assert result.exit_code == 2
    assert f"tensor_parallel_size must divide num_heads (128), got {ranks}" in result.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_ranks_are_served_by_kernels_too(tmp_path, trace, monkeypatch, ranks):
    """TRITON_MLA serves ranks in Triton's interpreter, as if it served machines without a GPU."""
    backend = AttentionBackendEnum["TRITON_MLA"].get_class()
    kinds = (*backend.capabilities.device_kinds, DeviceKind.CPU)
    declared = backend.capabilities.replace(device_kinds=kinds)
    monkeypatch.setattr(backend, "capabilities", declared)
    path, short = tmp_path / "model.json", tmp_path / "short.csv"
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    config = {**CONFIGS["latent"], **sizes, "num_attention_heads": 16}
    path.write_text(json.dumps({**config, "torch_dtype": "float16"}))
    lines = Path(trace).read_text().splitlines()
    short.write_text("\n".join([lines[0], "2023-11-16 18:15:46.6805900,40,3", ""]))
    extra = ["--tp", str(ranks), "--layers", "1", "--backend", "TRITON_MLA"]
    result = run(str(path), str(short), *extra, "--max-num-batched-tokens", "24")
    assert result.exit_code == 0, result.output + result.stderr
    assert f"{16 // ranks}/1" in result.output


def test_a_fault_without_anything_to_break_is_refused(model, trace):
    result = run(model("dense"), trace, "--corrupt", "dropped-sink")
    assert result.exit_code == 2
    assert "nothing to break in dense" in result.stderr


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_models_of_other_dtypes_are_within_budget(tmp_path, trace, dtype):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**CONFIGS["dense"], "head_dim": 128, "torch_dtype": dtype}))
    for seed in ("0", "1", "2"):
        result = run(str(path), trace, "--seed", seed, "--check-rows", "16")
        assert result.exit_code == 0, result.output + result.stderr


def test_a_fault_that_no_request_reaches_is_not_called_a_pass(model, tmp_path):
    path = tmp_path / "short.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,5\n")
    result = run(model("windows"), str(path), "--corrupt", "window-off-by-one")
    assert result.exit_code == 2
    assert "no sampled row was long enough" in result.stderr


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "int8_per_token_head", "int4_per_token_head"])
def test_a_quantiser_that_is_wrong_is_seen(model, trace, monkeypatch, dtype):
    from attn.reference import cache

    name = "quantize_per_token_head" if dtype.endswith("head") else "quantize_per_tensor"
    quantize = getattr(cache, name)

    def halved(x, *arguments):
        return quantize(x / 2, *arguments)

    monkeypatch.setattr(cache, name, halved)
    assert run(model("dense"), trace, "--kv-cache-dtype", dtype).exit_code == 1


def test_preemption_by_recompute_still_passes(model, trace, tmp_path):
    result = run(model("dense"), trace, "--kv-memory", "46kB", "--report", str(tmp_path))
    assert result.exit_code == 0, result.output + result.stderr
    outcome = RunReport.model_validate_json((tmp_path / "report.json").read_text())
    assert outcome.totals.preemptions > 0
    assert outcome.finished_requests == 5


def test_the_same_seed_gives_the_same_errors(model, trace, tmp_path):
    errors = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        run(model("dense"), trace, "--seed", "3", "--report", str(folder))
        outcome = RunReport.model_validate_json((folder / "report.json").read_text())
        errors.append([record.worst_error for record in outcome.steps])
    assert errors[0] == errors[1]


@pytest.mark.skipif(not AZURE.exists(), reason="the public trace is not here")
def test_a_public_trace_is_read(model):
    result = attn("run", "-m", model("dense"), "--trace", str(AZURE), "--requests", "3", *SMALL)
    assert result.exit_code == 0, result.stderr


BAD_INPUT = {
    "unknown model": (["--model", "nobody-9b"], ["nobody-9b", "llama-3.1-8b"]),
    "unknown backend": (["--backend", "FASTEST"], ["FASTEST", "TORCH_REF"]),
    "backend almost named": (["--backend", "torch_reff"], ["did you mean 'TORCH_REF'"]),
    "backend that cannot serve": (["--backend", "TORCH_REF_MLA"], ["non-MLA not supported"]),
    "unknown kv dtype": (["--kv-cache-dtype", "fp9"], ["fp9", "fp8_e4m3"]),
    "kv dtype nobody serves": (["--kv-cache-dtype", "nvfp4"], ["nvfp4", "fp8_e4m3"]),
    "kv dtype of other layers": (
        ["--kv-cache-dtype", "fp8_ds_mla"],
        ["TORCH_REF: kv_cache_dtype fp8_ds_mla: auto, float16"],
    ),
    "kernel of other layers": (
        ["--latent-rows-kernel", "triton"],
        ["latent layers", "dense has none"],
    ),
    "size beyond all numbers": (["--kv-memory", "9" * 400], ["kv_memory", "bytes that are free"]),
    "budget below one request": (["--kv-memory", "12kB"], ["KV budget", "request 0", "blocks"]),
    "budget below one block": (["--kv-memory", "10"], ["KV budget", "10 bytes"]),
    "bad size": (["--kv-memory", "much"], ["much", "512MiB"]),
    "budget beyond the memory": (["--kv-memory", "900TiB"], ["kv_memory", "bytes that are free"]),
    "report that cannot be written": (["--report", "/dev/null/x"], ["/dev/null"]),
    "fault that nothing looks for": (["--corrupt", "zeros", "--check-rows", "0"], ["--check-rows"]),
    "two sources": (["--synthetic"], ["--trace or --synthetic"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_gives_one_clear_error(model, trace, case):
    arguments, expected = BAD_INPUT[case]
    result = run(model("dense"), trace, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for text in expected:
        assert text in result.stderr


def test_a_block_size_that_nothing_supports_is_refused(model, trace):
    result = run(model("sparse"), trace, "--block-size", "16")
    assert result.exit_code == 2
    assert "block_size 16: any multiple of 64" in result.stderr
    assert run(model("sparse"), trace, "--block-size", "128").exit_code == 2


@pytest.mark.parametrize(("layers", "said"), [("2", False), ("1000", True)])
def test_more_layers_than_there_are_are_all_run_and_said(model, trace, layers, said):
    result = run(model("dense"), trace, "--layers", layers, "--requests", "1")
    assert result.exit_code == 0, result.stderr
    line = f"--layers {layers}: dense has 2, which are all run\n"
    assert (line in result.output) == said
    assert "layers=2 of 2" in " ".join(result.output.split())


def test_an_encoder_cannot_be_replayed(tmp_path, trace):
    config = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 160,
    }
    path = tmp_path / "bert.json"
    path.write_text(json.dumps(config))
    result = run(str(path), trace)
    assert result.exit_code == 2
    assert "encoder" in result.stderr


def test_a_wrong_trace_line_is_named(model, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,12,many\n"
    )
    result = run(model("dense"), str(path))
    assert result.exit_code == 2
    for text in ("bad.csv", "2", "GeneratedTokens", "many"):
        assert text in result.stderr


def test_a_block_table_outside_the_cache_is_one_clear_error(model, trace, monkeypatch):
    from attn.cli import blocks

    take = blocks.BlockAllocator._take
    monkeypatch.setattr(blocks.BlockAllocator, "_take", lambda self: take(self) + 10_000)
    result = run(model("dense"), trace)
    assert result.exit_code == 2
    assert "slot_mapping must be below" in result.stderr or "block_table" in result.stderr


def test_debug_shows_where_an_error_comes_from(model, trace, monkeypatch):
    monkeypatch.setenv("ATTN_DEBUG", "1")
    result = run(model("dense"), trace, "--backend", "FASTEST")
    assert isinstance(result.exception, ValueError)


INTERRUPTED_RUN = """
import os, signal, sys
from attn.cli import replay
from attn.cli.app import app

# A shell starts background jobs, and so this test there, with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
commit = replay.Replay._commit

def interrupt(self, plan):
    commit(self, plan)
    if len(self.steps) == 3:
        os.kill(os.getpid(), signal.SIGINT)

replay.Replay._commit = interrupt
app(sys.argv[1:])
"""


def test_ctrl_c_writes_what_there_is(model, trace, tmp_path):
    report = tmp_path / "report"
    arguments = ["run", "--model", model("dense"), "--trace", trace, "--report", str(report)]
    result = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_RUN, *arguments, *SMALL],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 130, result.stderr
    assert "INTERRUPTED" in result.stdout
    outcome = RunReport.model_validate_json((report / "report.json").read_text())
    assert outcome.interrupted
    assert 3 <= len(outcome.steps) <= 4
    assert outcome.finished_requests < 5


@pytest.mark.parametrize("device", KNOWN_DEVICES)
@pytest.mark.parametrize(
    ("model_name", "dtype"),
    [("llama-3.1-8b", "auto"), ("deepseek-v3", "fp8"), ("deepseek-v3.2", "fp8_ds_mla")],
)
def test_explain_gives_a_reason_for_every_other_backend(device, model_name, dtype):
    arguments = ["--model", model_name, "--kv-cache-dtype", dtype, "--device", device]
    result = attn("explain", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    for decision in json.loads(result.output):
        assert decision["device"]["name"] == device
        candidates = {item["name"]: item for item in decision["candidates"]}
        assert set(candidates) == {member.name for member in AttentionBackendEnum}
        assert candidates[decision["chosen"]]["verdict"] == "chosen"
        assert all(item["reasons"] and all(item["reasons"]) for item in candidates.values())
    table = attn("explain", *arguments)
    assert f"-> {decision['chosen']}" in table.output


@pytest.mark.parametrize(
    ("device", "dtype", "kernel", "said"),
    [
        (
            "h200",
            "auto",
            "Gluon for Hopper",
            "it serves this layer, and kernels.dense.prefill is 'auto'",
        ),
        ("h200", "fp8", "Gluon for Hopper", "it serves this layer"),
        ("h200", "int8_per_token_head", "plain Triton", "a cache of int8_per_token_head"),
        ("h200", "float16", "plain Triton", "a cache of float16 for a query of bfloat16"),
        ("a100", "auto", "plain Triton", "the device is sm80, not sm90"),
    ],
)
def test_explain_says_which_kernels_serve_and_why(device, dtype, kernel, said):
    arguments = ["--model", "llama-3.1-8b", "--device", device, "--kv-cache-dtype", dtype]
    result = attn("explain", *arguments, "--kernels", "--json")
    (decision,) = json.loads(result.output)
    short, long = decision["kernels"].items()
    assert short[0] == "up to 8 new tokens"
    faster = "it measured faster at this head size"
    refused = "the Hopper kernel does not serve"
    assert short[1].startswith(f"split KV, {kernel}: {faster if 'Hopper' in kernel else refused}")
    assert long[0] == "more than 8 new tokens"
    assert said in long[1]
    assert f"prefill, {kernel}: " in attn("explain", *arguments, "--kernels").output
    assert "kernels" not in attn("explain", *arguments).output


def test_explain_says_where_few_new_tokens_get_the_kernel_for_hopper():
    slower = "did not measure faster with head size 64 and tiles of 8 query rows"
    for model, tokens, kernel in (
        (
            "gemma-3-4b",
            16,
            "Gluon for Hopper: it measured faster at this head size, "
            "and kernels.dense.decode is 'auto'",
        ),
        ("gpt-oss-20b", 8, f"plain Triton: the Hopper kernel serves, but {slower}"),
    ):
        result = attn("explain", "--model", model, "--device", "h200", "--kernels", "--json")
        local, whole = json.loads(result.output)
        said = f"up to {tokens} new tokens"
        assert local["kernels"][said] == whole["kernels"][said] == f"split KV, {kernel}"


def test_explain_exits_non_zero_when_nothing_serves():
    result = attn("explain", "--kv-cache-dtype", "fp8_ds_mla")
    assert result.exit_code == 1
    assert "no backend serves this layer" in result.output


def test_backends_lists_every_registered_one():
    result = attn("backends")
    assert result.exit_code == 0
    for member in AttentionBackendEnum:
        assert member.name in result.output


def test_bench_build_prints_a_line_per_backend():
    result = attn("bench", "build", "--num-reqs", "8", "--repeats", "3")
    assert result.exit_code == 0
    assert "TORCH_REF" in result.output
    assert "target 50 us" in result.output


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("512MiB", 512 << 20), ("2 GB", 2 * 10**9), ("1.5k", 1500)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


def test_the_command_says_what_to_install():
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "from attn.cli.__main__ import main\n"
        "try: main()\nexcept SystemExit as stop: sys.exit(stop.code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "attn-backends[cli]" in result.stderr
