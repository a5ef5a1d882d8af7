"""Checks that a kernel's result is right, before it is timed and after."""

from __future__ import annotations

import traceback

import torch

from attn.bench.cases.inputs import Expected
from attn.bench.peers.dense import KernelRun
from attn.bench.results.reasons import describe
from attn.bench.results.results import Contender, Status


def check_run(name: str, run: KernelRun, expected: Expected) -> Contender | float:
    """Run a kernel once into an output filled with NaN; returns its error, or why it failed."""
    run.output.fill_(float("nan"))
    try:
        run.call()
        error = expected.error_of(output_of(run))
    except Exception as problem:
        # Only the place of the error: a compiler's message can have thousands of lines.
        traceback.print_tb(problem.__traceback__, limit=-4)
        return Contender(name=name, status=Status.FAILED, reason=describe(problem))
    return judged(name, run, error)


def output_of(run: KernelRun) -> torch.Tensor:
    """The output of the last call."""
    if run.collect is not None:
        run.collect()
    return run.output


def judged(name: str, run: KernelRun, error: float) -> Contender | float:
    """The error if the kernel's tolerance allows it, else a result with the status ``WRONG``."""
    if error < run.tolerance:
        return error
    reason = f"error {error:.1e}, allowed {run.tolerance:g}"
    return Contender(name=name, status=Status.WRONG, error=error, reason=reason)
