"""Runs of vLLM's engine in processes of their own, and their results in a folder.

The folder is temporary, or is named by ``ATTN_ENGINE_RUNS``. There the results stay:
``python -m tests.vllm.engine.sweep`` fills it with several runs at a time, and tests read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from threading import Lock

import torch

from tests.vllm.engine.latent import Lists
from tests.vllm.engine.worker import Error, Result, Run, result_of

ROOT = Path(__file__).resolve().parents[3]
FOLDER_VARIABLE = "ATTN_ENGINE_RUNS"
TIMEOUT = 900
"""Seconds of one run."""
MAX_RATIO = 1.5


class WorkerError(Exception):
    """A run ended without a result; the text is what it wrote."""


def worker_environment(
    extra: dict[str, str], number: int = 0, device: str | None = None
) -> dict[str, str]:
    """A worker's environment: a case replaces what it asks for, nothing is downloaded or built.

    Args:
        extra: variables of the case.
        number: a number by which engines that run at once differ.
        device: the GPU that the worker sees; None shows it all.
    """
    chosen_by_case = ("ATTN_VLLM_OVERRIDE", "ATTN_VLLM_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in chosen_by_case}
    kept.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # The port at which vLLM begins to look for a free one: another test's engine may look too.
    kept.setdefault("VLLM_PORT", str(20000 + (os.getpid() * 16 + number * 64) % 40000))
    if device is not None:
        kept["CUDA_VISIBLE_DEVICES"] = device
    return {**kept, "HF_HUB_OFFLINE": "1", **extra}


def device_of(run: Run, number: int) -> str | None:
    """The GPU of a run, so that runs at once are spread over all GPUs; None for a run of several.

    Args:
        run: the run.
        number: how many runs were begun before it.
    """
    if run.options.get("tensor_parallel_size", 1) > 1:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [*map(str, range(torch.cuda.device_count()))]
    return devices[number % len(devices)] if devices else None


class Engines:
    """Results of runs; each run is done once.

    Args:
        folder: folder for models, runs and results; what it holds already is not done again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: dict[str, WorkerError] = {}
        self._lock, self._started = Lock(), 0

    def model_folder(self, model: str) -> str:
        """Folder of a model; the run that needs it first makes it."""
        return str(self.folder / model)

    def key_of(self, run: Run, environment: dict[str, str]) -> str:
        """A name of the run's files that differs between runs."""
        known = asdict(run)
        del known["folder"]
        text = json.dumps([known, environment], sort_keys=True)
        return f"{run.model}-{run.backend}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def result(self, run: Run, environment: dict[str, str]) -> Result:
        """The result of a run.

        Raises:
            WorkerError: the run failed, now or when a test asked for it before.
        """
        key = self.key_of(run, environment)
        target = self.folder / f"{key}-result.json"
        if not target.exists():
            if key in self.failures:
                raise self.failures[key]
            failure = self.folder / f"{key}-failure.txt"
            if failure.exists():
                raise WorkerError(failure.read_text(encoding="utf-8"))
            try:
                self._work(run, environment, key)
            except WorkerError as error:
                self.failures[key] = error
                failure.write_text(str(error), encoding="utf-8")
                raise
        return result_of(target.read_text(encoding="utf-8"))

    def _work(self, run: Run, environment: dict[str, str], key: str) -> None:
        with self._lock:
            self._started += 1
            number = self._started
        source, target = (self.folder / f"{key}-{name}.json" for name in ("run", "result"))
        log = self.folder / f"{key}-log.txt"
        source.write_text(json.dumps(asdict(run)), encoding="utf-8")
        begin = time.monotonic()
        with log.open("w", encoding="utf-8") as output:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "tests.vllm.engine.worker", str(source), str(target)],
                    cwd=ROOT,
                    env=worker_environment(environment, number, device_of(run, number)),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=TIMEOUT,
                )
                end = f"exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                end = f"took longer than {TIMEOUT} s"
        if not target.exists():
            text = log.read_text(encoding="utf-8", errors="replace")
            seconds = time.monotonic() - begin
            raise WorkerError(f"{run}: {end} after {seconds:.0f} s\n{text[-8000:]}")


def beyond_budget(ours: Error, theirs: Error) -> list[str]:
    """A message where our error exceeds the budget that another run sets."""
    limits = {
        "mean": MAX_RATIO * theirs.mean + theirs.rounding_mean,
        "max": MAX_RATIO * theirs.max + theirs.rounding_max,
    }
    return [
        f"{name} error {getattr(ours, name):.4f} of {ours.positions} positions, allowed {limit:.4f}"
        for name, limit in limits.items()
        if not getattr(ours, name) <= limit
    ]


def lists_beyond_budget(ours: Lists, theirs: Lists) -> list[str]:
    """A message where our lists miss more of float32's keys than another run's lists allow."""
    limits = {
        "mean": MAX_RATIO * theirs.missed_mean + theirs.rounding_mean,
        "max": MAX_RATIO * theirs.missed_max + theirs.rounding_max,
    }
    return [
        f"{name} share {getattr(ours, f'missed_{name}'):.4f} missed, allowed {limit:.4f}"
        for name, limit in limits.items()
        if not getattr(ours, f"missed_{name}") <= limit
    ]


def constant_outputs(result: Result) -> list[list[int]]:
    """Outputs that repeat one or two tokens: any attention would give them."""
    return [tokens for tokens in result.tokens if len(set(tokens)) < 3]
