"""Tokens/s of vLLM's engine with our backend beside vLLM's own: ``python -m
attn.bench.engine.vllm``.

The benchmark needs vLLM and a GPU, but no model files and no network: the model has the sizes of
Llama-3.1-8B, and its weights are drawn on the GPU. Each backend runs in two processes of its own,
for speed and for log-probabilities, because vLLM selects its backend once per process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attn.bench.command import USER_ERRORS, Parser, check_writable, require_gpu, usage_error
from attn.bench.engine.engine import (
    BACKENDS,
    LAYERS,
    LOGPROB_LAYERS,
    MODEL,
    OURS,
    WORKLOADS,
    BackendResult,
    EngineResults,
    Log,
    Workload,
    render_markdown,
    value_of,
)
from attn.bench.engine.vllm_worker import Job, JobResult, Kind, perform
from attn.errors import MissingDependencyError
from specs.base import parse_spec


@dataclass(frozen=True)
class EngineBench:
    """Settings of the engine benchmark."""

    backends: tuple[str, ...] = BACKENDS
    workloads: tuple[Workload, ...] = WORKLOADS
    layers: int = LAYERS
    logprob_layers: int = LOGPROB_LAYERS
    rounds: int = 3
    commit: str | None = None
    """Commit of the measured code; None asks the environment, then git."""
    timeout_s: float = 1800
    """Most seconds of one process."""

    def __post_init__(self) -> None:
        for name in ("layers", "logprob_layers", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.backends:
            raise ValueError("backends must name at least one, got none")


def select_workloads(names: Sequence[str]) -> tuple[Workload, ...]:
    """Workloads by name, in their order; no name means all.

    Raises:
        ValueError: a name is no workload's.
    """
    known = [workload.name for workload in WORKLOADS]
    for name in names:
        if name not in known:
            raise ValueError(f"workload must be one of {', '.join(known)}; got {name!r}")
    return tuple(workload for workload in WORKLOADS if not names or workload.name in names)


def worker_environment(folder: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a worker process, whose compilation caches are all empty.

    Args:
        folder: new and empty folder for the caches.
        outer: environment variables of this process.
    """
    caches = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return {
        # All sampling is greedy, so FlashInfer's sampler would only add its compile time.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        **outer,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **{name: str(folder / name.lower()) for name in caches},
    }


def last_words(text: str) -> str:
    """The last error in a process's output, else its last line, for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors: list[str] = re.findall(r"\w*(?:Error|Exception): .*", "\n".join(lines))
    return ([*lines[-1:], *errors] or ["no output"])[-1][:300].replace("|", "/")


def run_job(job: Job, timeout_s: float, log: Log) -> JobResult | str:
    """Run a job in a process of its own; returns its result, or the reason of its failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = folder / "job.json", folder / "result.json"
        source.write_text(job.model_dump_json(), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "attn.bench.engine.vllm",
            "--worker",
            str(source),
            str(target),
        ]
        try:
            done = subprocess.run(
                command,
                env=worker_environment(folder, os.environ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout_s:.0f} s"
        if done.returncode == 0 and target.exists():
            return parse_spec(JobResult, target.read_text(encoding="utf-8"), str(target))
        log(done.stdout[-6000:])
        return f"exit code {done.returncode}: {last_words(done.stdout)}"


def job_of(bench: EngineBench, backend: str, kind: Kind) -> Job:
    """The job of one process of a run."""
    layers = bench.layers if kind is Kind.SPEED else bench.logprob_layers
    return Job(
        kind=kind,
        backend=backend,
        model={**MODEL, "num_hidden_layers": layers},
        workloads=bench.workloads,
        rounds=bench.rounds,
        commit=bench.commit,
    )


def with_answers(result: BackendResult, found: JobResult | str, log: Log) -> BackendResult:
    """Add a process's answers, or the reason of its failure, to a backend's result."""
    if isinstance(found, str):
        log(f"{result.backend}: no answers: {found}")
        return result.replace(answer_error=found)
    return result.replace(answers=found.answers)


def with_speeds(
    result: BackendResult, found: JobResult | str, workloads: Sequence[Workload], log: Log
) -> BackendResult:
    """Add a process's speeds, or the reason of its failure, to a backend's result."""
    if isinstance(found, str):
        log(f"  failed: {found}")
        return result.replace(speed_error=found)
    result = result.replace(start_up_s=found.start_up_s, speeds=found.speeds)
    log(f"  start-up {found.start_up_s:.1f} s")
    for workload in workloads:
        rate = value_of(result, workload.name, workloads)
        log(f"  {workload.name}: {workload.what}: {rate:.0f}")
    return result


def bench_engine(
    bench: EngineBench, log: Log = print, on_result: Callable[[EngineResults], None] | None = None
) -> EngineResults:
    """Measure all backends: their answers side by side, then their speeds in turn.

    Answers come first, so that vLLM's files are in the page cache before any backend is timed.

    Args:
        bench: settings of the run.
        log: receives lines of progress, and the output of a process that fails.
        on_result: receives the results so far, after the answers and after each process's speeds.
    """
    results = EngineResults(
        layers=bench.layers,
        logprob_layers=bench.logprob_layers,
        rounds=bench.rounds,
        workloads=bench.workloads,
    )

    def run(backend: str, kind: Kind) -> JobResult | str:
        job = job_of(bench, backend, kind)
        log(f"{backend}: {kind.value}, {job.model['num_hidden_layers']} layers")
        return run_job(job, bench.timeout_s, log)

    def report(found: JobResult | str) -> None:
        nonlocal results
        environment = results.environment if isinstance(found, str) else found.environment
        results = results.replace(backends=tuple(backends), environment=environment)
        if on_result is not None:
            on_result(results)

    with ThreadPoolExecutor(len(bench.backends)) as pool:
        answers = list(pool.map(lambda backend: run(backend, Kind.ANSWERS), bench.backends))
    backends = [
        with_answers(BackendResult(backend=backend), found, log)
        for backend, found in zip(bench.backends, answers, strict=True)
    ]
    report(answers[0])
    for index, backend in enumerate(bench.backends):
        found = run(backend, Kind.SPEED)
        backends[index] = with_speeds(backends[index], found, bench.workloads, log)
        report(found)
    return results


@dataclass(frozen=True)
class Report:
    """Files that results are written to, and files with earlier results to merge."""

    out: Path | None = None
    """File for the markdown; None prints it."""
    json: Path | None = None
    """File for the results as JSON; None writes none."""
    merge: tuple[Path, ...] = ()
    """Files with earlier results; a backend measured now replaces its earlier result."""

    def check(self) -> None:
        """Check all files before the work.

        Raises:
            ValueError: a file cannot be written, or earlier results cannot be read.
            OSError: a file with earlier results does not exist.
        """
        check_writable("--out", self.out)
        check_writable("--json", self.json)
        for path in self.merge:
            load_results(path)

    def combined(self, results: EngineResults | None) -> EngineResults:
        """Merge new results, if any, with the earlier ones.

        Raises:
            ValueError: there are no results, or earlier ones cannot be read or do not fit.
        """
        found = [load_results(path) for path in self.merge]
        found += [results] if results is not None else []
        if not found:
            raise ValueError("merge must name results to render, got none")
        whole = found[0]
        for later in found[1:]:
            whole = later.merged(whole)
        return whole

    def write(self, results: EngineResults) -> None:
        """Write the files that were asked for."""
        for path, text in (
            (self.out, render_markdown(results)),
            (self.json, results.model_dump_json() + "\n"),
        ):
            if path is not None:
                path.write_text(text, encoding="utf-8")


def load_results(path: Path) -> EngineResults:
    """Read results from a JSON file that :class:`Report` wrote.

    Raises:
        SpecError: the file holds no results; the message names field and value.
    """
    return parse_spec(EngineResults, path.read_text(encoding="utf-8"), str(path))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m attn.bench.engine.vllm", description=__doc__)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), help="vLLM's names.")
    names = ", ".join(workload.name for workload in WORKLOADS)
    parser.add_argument("--workloads", nargs="+", default=[], help=f"Of {names}; default: all.")
    for name, what in (
        ("layers", "Layers of the model that is timed."),
        ("logprob_layers", "Layers of the model whose log-probabilities are compared."),
        ("rounds", "Times that every workload is timed."),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(EngineBench, name), help=what)
    parser.add_argument("--out", type=Path, help="Markdown file to write; default: print it.")
    parser.add_argument("--json", type=Path, help="File to write the results to as data.")
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        help="Earlier --json file whose other backends are kept, repeatable.",
    )
    parser.add_argument("--render", action="store_true", help="Measure nothing, only merge.")
    parser.add_argument(
        "--commit", help="Commit that is measured; default: $ATTN_COMMIT, then git."
    )
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    return parser


def require_engine() -> None:
    """Refuse to go on where no engine can run.

    Raises:
        MissingDependencyError: vLLM is not installed.
        ValueError: this machine has no GPU.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError("vllm", "the benchmark of whole engines")
    require_gpu("the benchmark of whole engines")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m attn.bench.engine.vllm``; the exit code is 1 when our backend failed."""
    options = _parser().parse_args(arguments)
    if options.worker is not None:
        source, target = options.worker
        job = parse_spec(Job, source.read_text(encoding="utf-8"), str(source))
        target.write_text(perform(job, source.parent).model_dump_json(), encoding="utf-8")
        return 0
    report = Report(options.out, options.json, tuple(options.merge))

    def log(line: str) -> None:
        print(line, flush=True)

    try:
        report.check()
        measured = None
        if not options.render:
            bench = EngineBench(
                backends=tuple(dict.fromkeys(options.backends)),
                workloads=select_workloads(options.workloads),
                layers=options.layers,
                logprob_layers=options.logprob_layers,
                rounds=options.rounds,
                commit=options.commit,
            )
            require_engine()
            measured = bench_engine(bench, log, lambda part: report.write(report.combined(part)))
        whole = report.combined(measured)
        report.write(whole)
    except USER_ERRORS as error:
        return usage_error(error)
    if report.out is None:
        log(render_markdown(whole))
    ours = whole.of(OURS)
    return 1 if ours is not None and (ours.speed_error or ours.answer_error) else 0


if __name__ == "__main__":
    sys.exit(main())
