"""SGLang's engine by our backend and by its own: log-probabilities, and tokens/s.

    python -m attn.bench.engine.slots check --json check.json
    python -m attn.bench.engine.slots bench --json bench.json
    python -m attn.bench.engine.slots render check.json bench.json --out PAGE.md

It needs SGLang and a GPU, but no model files and no network: small models are made with random
weights, and the benchmark's weights are drawn by SGLang. Every engine is a process of its own with
a limit of time; one that fails leaves the end of its output in the results, and the others run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

OURS: Final = "attn"
PAGE_SIZE: Final = 64
MARK: Final = "RESULT "
TAIL: Final = 8000
"""Characters of a failed process's output that are kept."""
SLACK: Final = (1.5, 0.01)
"""Our mean error against float32 may be this factor times that of SGLang's backend, plus this."""
ENTRY_POINT: Final = """[sglang.srt.plugins]
attn_backends = attn.integrations.sglang.plugin:register
"""
COMMON: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Final[dict[str, Any]] = {"num_key_value_heads": 2, "head_dim": 64}
WINDOWED: Final[dict[str, Any]] = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **WINDOWED}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**GROUPED, **WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": 256,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 2,
        },
    ),
}
"""Name -> class of the model, class of its configuration, and fields beside :data:`COMMON`."""
LLAMA_8B: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
}
WORKLOADS: Final[dict[str, tuple[int, int, int]]] = {
    "prefill": (8, 8192, 1),
    "decode": (64, 512, 256),
    "long": (4, 32768, 128),
}
"""Requests, prompt tokens and new tokens of each request."""


def make_folder(where: Path, model: str) -> Path:
    """Save a small model with random weights in bf16, or only the benchmark's configuration.

    Args:
        where: parent folder.
        model: a name of :data:`MODELS`, or ``llama-8b`` for the configuration alone.
    """
    import torch

    transformers = import_module("transformers")

    folder = where / model
    if model == "llama-8b":
        folder.mkdir(parents=True, exist_ok=True)
        fields = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
        transformers.LlamaConfig(**LLAMA_8B, **fields).save_pretrained(folder)
        return folder
    model_cls, config_cls, fields = MODELS[model]
    config = getattr(transformers, config_cls)(**{**COMMON, **fields})
    torch.manual_seed(1)
    made = getattr(transformers, model_cls)(config).eval()
    for name, weights in made.named_parameters():
        if weights.dim() > 1:
            weights.data.normal_(0, 0.06)
        elif "sinks" in name:
            weights.data.normal_(2, 1)
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def prompts_of(lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Random prompts, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    return [[int(token) for token in one] for one in drawn]


def run_engine(job: Mapping[str, Any]) -> dict[str, Any]:
    """Start SGLang's engine and do a job in it; runs in a process of its own."""
    sglang = import_module("sglang")

    folder = make_folder(Path(job["folder"]), job["model"])
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "attention_backend": job["backend"],
        "page_size": PAGE_SIZE,
        "dtype": "bfloat16",
        "random_seed": 0,
        "mem_fraction_static": job["memory"],
        "grammar_backend": "none",
        "disable_radix_cache": job["kind"] == "bench",
        "log_level": "info",
        **job.get("settings", {}),
    }
    if job["kind"] == "bench":
        settings["load_format"] = "dummy"
    started = time.perf_counter()
    engine = sglang.Engine(**settings)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    work = _bench if job["kind"] == "bench" else _log_probabilities
    result.update(work(engine))
    engine.shutdown()
    return result


def _log_probabilities(engine: Any) -> dict[str, Any]:
    prompts = prompts_of((5, 63, 64, 130, 300, 900), COMMON["vocab_size"])
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    rows = []
    # The second round reads cached prefixes.
    for _ in range(2):
        done = engine.generate(
            input_ids=prompts, sampling_params=sampling, return_logprob=True, logprob_start_len=0
        )
        for prompt, one in zip(prompts, done, strict=True):
            info = one["meta_info"]
            new = [int(entry[1]) for entry in info["output_token_logprobs"]]
            given = [entry[0] for entry in info["input_token_logprobs"]]
            given += [entry[0] for entry in info["output_token_logprobs"]]
            rows.append({"tokens": [*prompt, *new], "given": given[-(len(prompt) + len(new)) :]})
    return {"rows": rows}


def _bench(engine: Any) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    for name, (requests, prompt, new) in WORKLOADS.items():
        prompts = prompts_of([prompt] * requests, LLAMA_8B["vocab_size"])
        sampling = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
        taken = []
        for _ in range(4):
            started = time.perf_counter()
            engine.generate(input_ids=prompts, sampling_params=sampling)
            taken.append(time.perf_counter() - started)
        # The first round compiles.
        seconds[name] = taken[1:]
    return {"seconds": seconds}


def run_reference(job: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probabilities of the same tokens by Transformers in float32."""
    import torch

    transformers = import_module("transformers")

    folder = make_folder(Path(job["folder"]), job["model"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).cuda()
    errors = []
    for row in json.loads(Path(job["rows"]).read_text(encoding="utf-8")):
        tokens = torch.tensor([row["tokens"]], device="cuda")
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1].log_softmax(-1)
        exact = logits.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        found = row["given"][-len(exact) :]
        pairs = zip(found, exact, strict=True)
        errors += [abs(one - other) for one, other in pairs if one is not None]
    return {"mean": sum(errors) / len(errors), "max": max(errors), "count": len(errors)}


def in_process(job: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Do a job in a process of its own.

    Args:
        job: what :func:`run_engine` or :func:`run_reference` reads.
        limit: seconds after which the process is stopped.

    Returns:
        The job's result; or ``problem``, the end of the process's output.
    """
    paths = [str(prepared(Path(job["folder"]))), str(Path.cwd())]
    known = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([known] if known else [])]),
    }
    command = [sys.executable, "-m", "attn.bench.engine.slots", "job", json.dumps(dict(job))]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        # SGLang's engine has processes of its own, which are in the group that was started here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        output.seek(0)
        text = output.read()
    found = [line for line in text.splitlines() if line.startswith(MARK)]
    if found:
        result: dict[str, Any] = json.loads(found[-1][len(MARK) :])
        return result
    why = f"stopped after {limit:.0f} s" if code is None else f"exit code {code}"
    return {"problem": f"{why}\n{text[-TAIL:]}"}


def prepared(where: Path) -> Path:
    """A folder for ``PYTHONPATH``: our entry point, and stand-ins for what is not installed."""
    folder = where / "path"
    metadata = folder / "attn_backends_entry_point-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "entry_points.txt").write_text(ENTRY_POINT, encoding="utf-8")
    name = "Metadata-Version: 2.1\nName: attn-backends-entry-point\nVersion: 0\n"
    (metadata / "METADATA").write_text(name, encoding="utf-8")
    if importlib.util.find_spec("IPython") is None:
        stand_in = folder / "IPython"
        stand_in.mkdir(exist_ok=True)
        (stand_in / "__init__.py").write_text("", encoding="utf-8")
        (stand_in / "display.py").write_text("HTML = display = print\n", encoding="utf-8")
    return folder


def check(models: Sequence[str], backends: Sequence[str], limit: float) -> dict[str, Any]:
    """Errors of log-probabilities against float32, by model and backend."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for backend in backends:
                job = {"folder": folder, "model": model, "backend": backend, "memory": 0.3}
                done = in_process({**job, "kind": "check"}, limit)
                if "rows" in done:
                    rows = Path(folder) / "rows.json"
                    rows.write_text(json.dumps(done.pop("rows")), encoding="utf-8")
                    done |= in_process({**job, "kind": "reference", "rows": str(rows)}, limit)
                results.setdefault(model, {})[backend] = done
                print(model, backend, done.get("problem") or done, flush=True)
    return {"check": results}


def bench(backends: Sequence[str], limit: float) -> dict[str, Any]:
    """Seconds of each workload of Llama-3.1-8B's shape, by backend."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in backends:
            job = {"folder": folder, "model": "llama-8b", "backend": backend, "memory": 0.8}
            results[backend] = done = in_process({**job, "kind": "bench"}, limit)
            print(backend, done.get("problem") or done, flush=True)
    return {"bench": results}


def within_budget(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether our mean error is within the budget that SGLang's backend gives."""
    factor, slack = SLACK
    if "mean" not in ours:
        return False
    return bool(ours["mean"] <= factor * theirs.get("mean", 0.0) + slack)


def page(results: Mapping[str, Any]) -> str:
    """The tables of what was checked and measured, in Markdown.

    Args:
        results: of :func:`check`, of :func:`bench`, or both.
    """
    lines = ["# SGLang's engine", ""]
    if "check" in results:
        lines += [
            "| model | backend | mean error | largest | verdict |",
            "| --- | --- | --- | --- | --- |",
        ]
        for model, by_backend in results["check"].items():
            others = [one for name, one in by_backend.items() if name != OURS and "mean" in one]
            for name, one in by_backend.items():
                if "mean" not in one:
                    lines.append(f"| {model} | {name} | | | failed |")
                    continue
                verdict = ""
                if name == OURS and others:
                    verdict = "within budget" if within_budget(one, others[0]) else "beyond budget"
                numbers = f"{one['mean']:.4f} | {one['max']:.4f}"
                lines.append(f"| {model} | {name} | {numbers} | {verdict} |")
        lines.append("")
    if "bench" in results:
        names = list(results["bench"])
        lines += [
            f"| tokens/s | {' | '.join(names)} |",
            "| --- |" + " --- |" * len(names),
        ]
        for workload, (requests, prompt, new) in WORKLOADS.items():
            tokens = requests * (prompt if new == 1 else new)
            cells = []
            for name in names:
                taken = results["bench"][name].get("seconds", {}).get(workload)
                cells.append(f"{tokens / min(taken):.0f}" if taken else "failed")
            lines.append(f"| {workload}: {requests} x {prompt} + {new} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m attn.bench.engine.slots")
    commands = parser.add_subparsers(dest="command", required=True)
    checked = commands.add_parser("check", help="log-probabilities against float32")
    checked.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    checked.add_argument("--backends", nargs="+", default=[OURS, "triton"])
    measured = commands.add_parser("bench", help="tokens/s of Llama-3.1-8B's shape")
    measured.add_argument("--backends", nargs="+", default=[OURS, "triton", "flashinfer"])
    for one in (checked, measured):
        one.add_argument("--json", type=Path, required=True, help="where results are written")
        one.add_argument("--limit", type=float, default=180, help="seconds of one process")
    rendered = commands.add_parser("render", help="tables of results")
    rendered.add_argument("results", nargs="+", type=Path)
    rendered.add_argument("--out", type=Path, required=True)
    job = commands.add_parser("job")
    job.add_argument("job")
    given = parser.parse_args(arguments)
    if given.command == "job":
        asked = json.loads(given.job)
        run = run_reference if asked["kind"] == "reference" else run_engine
        print(MARK + json.dumps(run(asked)), flush=True)
        return 0
    if given.command == "render":
        merged: dict[str, Any] = {}
        for path in given.results:
            merged |= json.loads(path.read_text(encoding="utf-8"))
        given.out.write_text(page(merged), encoding="utf-8")
        return 0
    if given.command == "check":
        results = check(given.models, given.backends, given.limit)
    else:
        results = bench(given.backends, given.limit)
    given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
