"""SGLang's engine by our backend and by its own: log-probabilities, and tokens/s.

    python -m attn.bench.engine.slots check --json check.json
    python -m attn.bench.engine.slots bench --json bench.json
    python -m attn.bench.engine.slots render check.json bench.json --out PAGE.md

It needs SGLang and a GPU, but no model files and no network: small models are made with random
weights, and the benchmark's weights are drawn by SGLang. Every engine is a process of its own with
a limit of time; one that fails leaves the end of its output in the results, and the others run.
With several GPUs, engines run side by side, one on each.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

OURS: Final = "attn"
PAGE_SIZE: Final = 64
MARK: Final = "RESULT "
STOPPED: Final = "stopped after"
"""First words of the problem of a process that took too long."""
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
LATENT: Final[dict[str, Any]] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    # Fields of real configurations that Transformers does not know.
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 2,
}
MODELS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **WINDOWED}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            **WINDOWED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            # SGLang asks for it; Transformers has this number in its code.
            "swiglu_limit": 7.0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        LATENT,
    ),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        # No prompt has as many tokens as a list, so that lists hold every key.
        {**LATENT, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    ),
}
"""Name -> class of the model, class of its configuration, and fields beside :data:`COMMON`."""
NEEDS_DEEP_GEMM: Final = "deepseek_v32"
"""The model that is checked on demand: SGLang's indexer needs a package of its own."""
RIVAL: Final = "triton"
SPARSE_RIVAL: Final = "dsa"
"""SGLang's backends beside ours: of all models but the sparse one, and of that one."""
SPARSE_SETTINGS: Final[dict[str, Any]] = {
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "flashmla_sparse",
}
"""Kernels of SGLang's sparse backend that need no FlashAttention-3."""
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
PROMPTS: Final = (5, 63, 64, 130, 300, 900)
"""Tokens of the prompts whose log-probabilities are checked."""
CHECK_SETTINGS: Final[dict[str, Any]] = {
    "mem_fraction_static": 0.3,
    "kv_cache_dtype": "bfloat16",
    "max_total_tokens": 65536,
    "max_running_requests": 16,
    # Fewer graphs than SGLang's own choice, which is meant for large models: captures take longest.
    "cuda_graph_max_bs_decode": 8,
    # Prompts of 300 and 900 tokens have none; the others have.
    "cuda_graph_max_bs_prefill": 256,
}
BENCH_SETTINGS: Final[dict[str, Any]] = {
    "mem_fraction_static": 0.8,
    "cuda_graph_max_bs_decode": 64,
    "disable_radix_cache": True,
    "load_format": "dummy",
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
    # Where embeddings are the last layer too, large ones would make every token follow itself.
    embedded = 0.03 if config.tie_word_embeddings else 0.06
    for name, weights in made.named_parameters():
        if weights.dim() > 1:
            weights.data.normal_(0, embedded if "embed_tokens" in name else 0.06)
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
        "grammar_backend": "none",
        "log_level": "info",
        **(BENCH_SETTINGS if job["kind"] == "bench" else CHECK_SETTINGS),
        **(SPARSE_SETTINGS if job["backend"] == SPARSE_RIVAL else {}),
        **job.get("settings", {}),
    }
    started = time.perf_counter()
    engine = sglang.Engine(**settings)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - started}
    work = _bench if job["kind"] == "bench" else _log_probabilities
    result.update(work(engine))
    engine.shutdown()
    return result | _about()


def _about() -> dict[str, str]:
    """Machine, versions, commit and date of a job that ended."""
    from attn.bench.settings import KernelBench, environment_of

    found = environment_of(KernelBench())
    names = ("device", "torch", "triton", "commit", "date")
    return {**{name: str(getattr(found, name)) for name in names}, "sglang": version("sglang")}


def _log_probabilities(engine: Any) -> dict[str, Any]:
    prompts = prompts_of(PROMPTS, COMMON["vocab_size"])
    sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    rows, cached = [], 0
    # SGLang reads no cached token behind the first whose log-probability is asked for: the second
    # round asks from the start of each prompt's last page, so that the pages before it are cached;
    # the third from a page in its first third, so that many new tokens follow those.
    last = [(len(one) - 1) // PAGE_SIZE * PAGE_SIZE for one in prompts]
    third = [len(one) // 3 // PAGE_SIZE * PAGE_SIZE for one in prompts]
    for starts in ([0] * len(prompts), last, third):
        done = engine.generate(
            input_ids=prompts,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=starts,
        )
        for prompt, one in zip(prompts, done, strict=True):
            info = one["meta_info"]
            cached += info["cached_tokens"]
            new = [int(entry[1]) for entry in info["output_token_logprobs"]]
            given = [*info["input_token_logprobs"], *info["output_token_logprobs"]]
            # The first entry has no log-probability.
            rows.append({"tokens": [*prompt, *new], "given": [one[0] for one in given[1:]]})
    return {"rows": rows, "cached": cached}


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
        found = row["given"]
        exact = logits.gather(1, tokens[0, 1:, None])[-len(found) :, 0].tolist()
        errors += [abs(one - other) for one, other in zip(found, exact, strict=True)]
    return {"mean": sum(errors) / len(errors), "max": max(errors), "count": len(errors)}


def in_process(job: Mapping[str, Any], limit: float, gpu: str | None = None) -> dict[str, Any]:
    """Do a job in a process of its own.

    Args:
        job: what :func:`run_engine` or :func:`run_reference` reads.
        limit: seconds after which the process is stopped.
        gpu: the GPU that the process sees, as in ``CUDA_VISIBLE_DEVICES``; None for all.

    Returns:
        The job's result; or ``problem``, the end of the process's output.
    """
    paths = [str(prepared(Path(job["folder"]))), str(Path.cwd())]
    known = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *([known] if known else [])]),
        # SGLang would wait a minute for dumps of a process that crashed.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # SGLang's sparse backend would take FlashAttention-3 for short prompts.
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
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
    why = f"{STOPPED} {limit:.0f} s" if code is None else f"exit code {code}"
    return {"problem": f"{why}\n{text[-TAIL:]}"}


def prepared(where: Path) -> Path:
    """A folder for ``PYTHONPATH``: our entry point, and stand-ins for what is not installed.

    Args:
        where: parent folder; made if it is not there.
    """
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


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as ``CUDA_VISIBLE_DEVICES`` names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(number) for number in range(torch.cuda.device_count())]


def side_by_side(
    jobs: Mapping[Any, Callable[[str | None], dict[str, Any]]], gpus: Sequence[str]
) -> dict[Any, dict[str, Any]]:
    """Run jobs, as many at the same time as there are GPUs.

    Args:
        jobs: functions of a GPU, by any key.
        gpus: see :func:`visible_gpus`; jobs run one after the other where there is none.

    Returns:
        Each job's result, in the order of ``jobs``.
    """
    free: queue.Queue[str | None] = queue.Queue()
    for number in range(max(len(gpus), 1)):
        free.put(gpus[number] if gpus else None)

    def run(key: Any) -> dict[str, Any]:
        gpu = free.get()
        try:
            done = jobs[key](gpu)
        finally:
            free.put(gpu)
        print(key, done.get("problem") or done, flush=True)
        return done

    with ThreadPoolExecutor(max(len(gpus), 1)) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


def backends_of(model: str) -> tuple[str, str]:
    """Our backend and SGLang's for a model."""
    return OURS, SPARSE_RIVAL if model == NEEDS_DEEP_GEMM else RIVAL


def check(
    models: Sequence[str], backends: Sequence[str] | None, limit: float, gpus: Sequence[str]
) -> dict[str, Any]:
    """Errors of log-probabilities against float32, by model and backend.

    Args:
        models: names of :data:`MODELS`.
        backends: names of backends; None for ours and SGLang's rival of each model.
        limit: seconds of one process.
        gpus: see :func:`side_by_side`.
    """

    def job_of(where: Path, model: str, backend: str) -> Callable[[str | None], dict[str, Any]]:
        job = {"folder": str(where / f"{model}-{backend}"), "model": model, "backend": backend}

        def run(gpu: str | None) -> dict[str, Any]:
            done = in_process({**job, "kind": "check"}, limit, gpu)
            if "rows" in done:
                rows = Path(job["folder"]) / "rows.json"
                rows.write_text(json.dumps(done.pop("rows")), encoding="utf-8")
                reference = {**job, "kind": "reference", "rows": str(rows)}
                done |= in_process(reference, limit, gpu)
            return done

        return run

    results: dict[str, Any] = {model: {} for model in models}
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(model, backend) for model in models for backend in backends or backends_of(model)]
        jobs = {pair: job_of(Path(folder), *pair) for pair in pairs}
        for (model, backend), done in side_by_side(jobs, gpus).items():
            results[model][backend] = done
    return {"check": results}


def bench(backends: Sequence[str], limit: float, gpus: Sequence[str]) -> dict[str, Any]:
    """Seconds of each workload of Llama-3.1-8B's shape, by backend."""

    def job_of(where: Path, backend: str) -> Callable[[str | None], dict[str, Any]]:
        job = {"folder": str(where / backend), "model": "llama-8b", "backend": backend}
        return lambda gpu: in_process({**job, "kind": "bench"}, limit, gpu)

    with tempfile.TemporaryDirectory() as folder:
        jobs = {backend: job_of(Path(folder), backend) for backend in backends}
        return {"bench": side_by_side(jobs, gpus)}


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
    by_model = results.get("check", {}).values()
    runs = [run for one in by_model for run in one.values()] + [*results.get("bench", {}).values()]
    devices, versions, torches, tritons, commits, dates = (
        ", ".join(sorted({run[name] for run in runs if name in run})) or "unknown"
        for name in ("device", "sglang", "torch", "triton", "commit", "date")
    )
    lines = [
        f"# SGLang {versions} on {devices}",
        "",
        f"{dates}, commit {commits}; torch {torches}, triton {tritons}.",
        "",
        f"CUDA graphs are on, pages have {PAGE_SIZE} tokens. Engines are processes that ran side",
        "by side on the GPUs of one machine; engines of the speed table had a GPU for themselves.",
        f"`{OURS}` is this library's backend, the others are SGLang's own.",
        "",
    ]
    if "check" in results:
        lines += _checked(results["check"])
    if "bench" in results:
        lines += _measured(results["bench"])
    return "\n".join(lines)


def _why_not(run: Mapping[str, Any]) -> str:
    """Why a process has no result: it failed, or it was stopped at its limit of time."""
    return "not measured" if str(run.get("problem", STOPPED)).startswith(STOPPED) else "failed"


def _checked(results: Mapping[str, Any]) -> list[str]:
    factor, slack = SLACK
    lines = [
        "## Log-probabilities",
        "",
        "Small models with random weights in bf16. Errors are those of log-probabilities of given",
        "and of generated tokens, against Transformers in float32. Every prompt is given three",
        "times; after the first time its prefix is read from the cache: `cached` tokens in all.",
        f"Our mean may be {factor} times that of SGLang's backend, plus {slack}.",
        "",
        "| model | backend | mean error | largest | cached | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model, by_backend in results.items():
        others = [one for name, one in by_backend.items() if name != OURS and "mean" in one]
        for name, one in by_backend.items():
            if "mean" not in one:
                lines.append(f"| {model} | {name} | | | | {_why_not(one)} |")
                continue
            verdict = ""
            if name == OURS and others:
                verdict = "within budget" if within_budget(one, others[0]) else "beyond budget"
            numbers = f"{one['mean']:.4f} | {one['max']:.4f} | {one.get('cached', '')}"
            lines.append(f"| {model} | {name} | {numbers} | {verdict} |")
    return [*lines, ""]


def _measured(results: Mapping[str, Any]) -> list[str]:
    names = list(results)
    lines = [
        "## Speed",
        "",
        "Llama-3.1-8B's shape with random weights: tokens per second of the best of three rounds,",
        "after one that compiles. Prompt tokens are counted where a request has one new token,",
        "new tokens elsewhere.",
        "",
        f"| tokens/s | {' | '.join(names)} |",
        "| --- |" + " --- |" * len(names),
    ]
    for workload, (requests, prompt, new) in WORKLOADS.items():
        tokens = requests * (prompt if new == 1 else new)
        cells = []
        for name in names:
            taken = results[name].get("seconds", {}).get(workload)
            cells.append(f"{tokens / min(taken):.0f}" if taken else _why_not(results[name]))
        lines.append(f"| {workload}: {requests} x {prompt} + {new} | {' | '.join(cells)} |")
    return [*lines, "", *_goals(results), ""]


def _goals(results: Mapping[str, Any]) -> list[str]:
    """The rows of a table: ours is at least as fast as the fastest of SGLang's backends."""
    lines = ["| goal | measured | verdict |", "| --- | --- | --- |"]
    others = [name for name in results if name != OURS]
    for workload in WORKLOADS:
        taken = {name: results[name].get("seconds", {}).get(workload) for name in results}
        known = [min(taken[name]) for name in others if taken[name]]
        ours = taken.get(OURS)
        ratio = min(known) / min(ours) if ours and known else None
        holds = ratio is not None and ratio >= 1.0
        # A backend that was not measured leaves a goal open that is not missed already.
        verdict = "met" if holds else "NOT met"
        if ratio is None or (holds and len(known) < len(others)):
            verdict = "not measured"
        cell = "" if ratio is None else f"{ratio:.3f} x"
        lines.append(f"| {workload}: {OURS} >= {' and '.join(others)} | {cell} | {verdict} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m attn.bench.engine.slots")
    commands = parser.add_subparsers(dest="command", required=True)
    usual = [name for name in MODELS if name != NEEDS_DEEP_GEMM]
    checked = commands.add_parser("check", help="log-probabilities against float32")
    checked.add_argument("--models", nargs="+", choices=MODELS, default=usual)
    checked.add_argument("--backends", nargs="+", help="ours and SGLang's of a model if absent")
    measured = commands.add_parser("bench", help="tokens/s of Llama-3.1-8B's shape")
    measured.add_argument("--backends", nargs="+", default=[OURS, "triton", "flashinfer"])
    for one in (checked, measured):
        one.add_argument("--json", type=Path, required=True, help="where results are written")
        one.add_argument("--limit", type=float, default=180, help="seconds of one process")
        one.add_argument("--gpus", type=int, help="GPUs to use, side by side; all if absent")
        one.add_argument("--per-gpu", type=int, default=1, help="engines at the same time on a GPU")
    rendered = commands.add_parser("render", help="tables of results")
    rendered.add_argument("results", nargs="+", type=Path)
    rendered.add_argument("--out", type=Path, required=True)
    job = commands.add_parser("job")
    job.add_argument("job")
    given = parser.parse_args(arguments)
    if given.command == "job":
        asked = json.loads(given.job)
        run = run_reference if asked["kind"] == "reference" else run_engine
        # What a bar of progress has left on the line must not come before the mark.
        print("\n" + MARK + json.dumps(run(asked)), flush=True)
        return 0
    if given.command == "render":
        merged: dict[str, Any] = {}
        for path in given.results:
            for kind, found in json.loads(path.read_text(encoding="utf-8")).items():
                merged.setdefault(kind, {}).update(found)
        given.out.write_text(page(merged), encoding="utf-8")
        return 0
    gpus = visible_gpus()[: given.gpus] * given.per_gpu
    if given.command == "check":
        results = check(given.models, given.backends, given.limit, gpus)
    else:
        results = bench(given.backends, given.limit, gpus)
    given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
