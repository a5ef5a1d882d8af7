"""Checks that a kernel's result is right, before it is timed and after."""

from __future__ import annotations

import traceback

import torch

from attn.bench.cases.inputs import Expected
from attn.bench.cases.needles import NeedleSource
from attn.bench.peers.dense import KernelRun
from attn.bench.results.reasons import describe
from attn.bench.results.results import Contender, Status


def check_run(
    name: str, run: KernelRun, expected: Expected, needles: NeedleSource | None = None
) -> Contender | float:
    """Run a kernel into an output filled with NaN; returns its error, or why it failed.

    Args:
        name: the kernel's name.
        run: the kernel.
        expected: sampled rows of the case's own queries.
        needles: queries that each look for one key; None leaves them out.
    """
    run.output.fill_(float("nan"))
    try:
        run.call()
        error = expected.error_of(output_of(run))
        if error < run.tolerance and needles is not None:
            missed = needle_error(run, needles)
            if not missed < run.tolerance:
                reason = f"error {missed:.1e} where a query looks for one key, allowed "
                reason += f"{run.tolerance:g}"
                return Contender(name=name, status=Status.WRONG, error=missed, reason=reason)
    except Exception as problem:
        # Only the place of the error: a compiler's message can have thousands of lines.
        traceback.print_tb(problem.__traceback__, limit=-4)
        return Contender(name=name, status=Status.FAILED, reason=describe(problem))
    return judged(name, run, error)


def needle_error(run: KernelRun, needles: NeedleSource) -> float:
    """Largest relative norm of a row's error over all draws, or that of the first wrong draw.

    Every row of the output is compared with the value of its needle. A row that is not near it is
    compared with float64 over all of its keys, since another key may be much like the needle.
    """
    own, worst = needles.query.clone(), 0.0
    try:
        for draw in needles.draws():
            needles.load(draw.query)
            if run.refresh is not None:
                run.refresh()
            run.output.fill_(float("nan"))
            run.call()
            output = output_of(run)
            errors = (output.float() - draw.values).norm(dim=-1) / draw.values.norm(dim=-1)
            for token, head in (~(errors < run.tolerance)).nonzero().tolist():
                wanted = draw.exact(token, head)
                off = float((output[token, head].double() - wanted).norm() / wanted.norm())
                if not off < run.tolerance:
                    return off
                errors[token, head] = off
            worst = max(worst, float(errors.max()))
    finally:
        needles.load(own)
        if run.refresh is not None:
            run.refresh()
    return worst


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
