"""Do the runs of engine tests, several at a time: ``python -m tests.vllm.engine.sweep FOLDER``.

Results stay in the folder, so that a sweep that was stopped goes on where it was. With ``--judge``
the tests then read them; so they do where the variable ``ATTN_ENGINE_RUNS`` names the folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.vllm.engine import cases
from tests.vllm.engine.models import make_model
from tests.vllm.engine.runs import FOLDER_VARIABLE, ROOT, Engines, WorkerError
from tests.vllm.engine.worker import Result, Run, other_weights_of

Job = tuple[str, Run, dict[str, str], int]
"""Name, run, environment, and GPUs."""


def jobs_of(engines: Engines, match: Sequence[str], dense: bool) -> list[Job]:
    """The runs of all cases whose names hold one of the words; each run once.

    Args:
        engines: the folder.
        match: words; without any, all cases are taken.
        dense: take the cases of ``test_gpu_engine`` too.
    """
    found: list[Job] = []
    for name, case in cases.CASES.items():
        if match and not any(word in name for word in match):
            continue
        found.append((name, *cases.our_run(engines, case), case.gpus))
        found += [
            (f"{name}: {run.backend}", run, environment, 1)
            for run, environment in list(cases.their_runs(engines, case))[:1]
        ]
    if dense:
        from tests.vllm import test_gpu_engine as others

        known = others.DenseEngines(engines.folder)
        for name, its in others.CASES.items():
            if match and not any(word in name for word in match):
                continue
            found.append((name, *known.our_run(its), 1))
            backend = others.LATENT_THEIRS[0] if its.is_latent else others.THEIRS[0]
            found.append((f"{name}: {backend}", *known.their_run(its, backend), 1))
    once = {
        engines.key_of(run, environment): (name, run, environment, gpus)
        for name, run, environment, gpus in reversed(found)
    }
    return [job for job in reversed(once.values()) if job[3] <= max(torch.cuda.device_count(), 1)]


def line_of(name: str, result: Result, seconds: float) -> str:
    """A result in one line."""
    parts = [f"{name}: {seconds:.0f} s"]
    for what in ("prompt", "generated", "plain_prompt", "plain_generated"):
        error = getattr(result, what)
        if error is not None:
            parts.append(f"{what} {error.mean:.4f}/{error.max:.4f}")
    if result.lists is not None:
        lists = result.lists
        parts.append(
            f"lists {lists.rows} rows, missed {lists.missed_mean:.4f}/{lists.missed_max:.4f}, "
            f"rounding {lists.rounding_mean:.4f}/{lists.rounding_max:.4f}, "
            f"{lists.malformed} malformed, {lists.sequential} sequential"
        )
    if result.plain_lists is not None:
        known = result.plain_lists
        parts.append(f"plain lists missed {known.missed_mean:.4f}/{known.missed_max:.4f}")
    parts.append(f"{result.graphs}, drafts {result.drafts}, preempted {result.preemptions}")
    return "; ".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Run the sweep; the exit code is 1 when a run of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--match", nargs="*", default=[], help="Words of case names.")
    parser.add_argument("--exact", nargs="*", default=[], help="Whole case names.")
    parser.add_argument("--dense", action="store_true", help="Take test_gpu_engine's cases too.")
    parser.add_argument("--jobs", type=int, default=6, help="Runs at a time.")
    parser.add_argument("--limit-s", type=float, default=540.0, help="Start nothing after it.")
    parser.add_argument("--judge", action="store_true", help="Run the tests over the results.")
    parser.add_argument("--again", action="store_true", help="Do failed runs once more.")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.again:
        for path in options.folder.glob("*-failure.txt"):
            path.unlink()
    engines, begin = Engines(options.folder), time.monotonic()
    jobs = jobs_of(engines, options.match, options.dense)
    if options.exact:
        jobs = [job for job in jobs if job[0].split(": ")[0] in options.exact]
    for _, run, _, _ in jobs:
        make_model(run.model, Path(run.folder))
        if run.reloads:
            make_model(run.model, Path(other_weights_of(run)), seed=1)
    print(f"{time.monotonic() - begin:5.0f} s: models made, {len(jobs)} runs", flush=True)

    def work(job: Job) -> bool:
        name, run, environment, _ = job
        start = time.monotonic()
        if start - begin > options.limit_s:
            print(f"        {name}: left for a later sweep", flush=True)
            return True
        try:
            line = line_of(name, engines.result(run, environment), time.monotonic() - start)
        except WorkerError as error:
            words = [text for text in str(error).splitlines() if text.strip()]
            line = f"{name}: FAILED after {time.monotonic() - start:.0f} s: {words[-1][:300]}"
        print(f"{time.monotonic() - begin:5.0f} s: {line}", flush=True)
        return "FAILED" not in line or run.backend != cases.OURS

    with ThreadPoolExecutor(options.jobs) as pool:
        passed = list(pool.map(work, jobs))
    return 0 if all(passed) and not (options.judge and judged(options.folder, options.dense)) else 1


def judged(folder: Path, dense: bool) -> int:
    """Exit code of the tests over the results in a folder."""
    files = ["test_gpu_latent_engines.py", "test_gpu_serve.py"]
    paths = [str(ROOT / "tests" / "vllm" / "engine" / name) for name in files]
    if dense:
        paths.append(str(ROOT / "tests" / "vllm" / "test_gpu_engine.py"))
    environment = {**os.environ, FOLDER_VARIABLE: str(folder.resolve())}
    command = [sys.executable, "-m", "pytest", "-q", "-o", "filterwarnings=default", *paths]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
