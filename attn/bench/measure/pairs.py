"""Measurement of lines, which are pairs of times: two calls in turn, on the same tensors."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch

from attn.bench.cases.inputs import Expected
from attn.bench.measure.judge import check_run
from attn.bench.measure.timing import (
    Call,
    Timing,
    eager_times_us,
    graph_times_us,
    make_clock,
    time_interleaved,
)
from attn.bench.peers.dense import KernelRun
from attn.bench.results.lines import How, Line
from attn.bench.results.reasons import describe
from attn.bench.results.results import Contender

Log = Callable[[str], None]


@dataclass(frozen=True)
class Rounds:
    """Settings of a measurement: device, seed, rounds and calls."""

    device: torch.device
    rounds: int
    reps: int
    seed: int


class BrokenError(Exception):
    """Our call cannot be timed; the message says why."""


def lines_or_reason(
    asked: Sequence[Line], reasons: Sequence[str], measure: Callable[[], Iterable[Line]], log: Log
) -> Iterator[Line]:
    """Yield the measured lines or, where they cannot be measured, the asked lines with a reason.

    Args:
        asked: the lines without numbers.
        reasons: why the backend does not serve the case here.
        measure: yields the measured lines.
        log: receives the place of an error.
    """
    if reasons:
        refused = {"is_broken": True, "is_refused": True, "reason": "; ".join(reasons)}
        yield from (line.replace(**refused) for line in asked)
        return
    try:
        yield from measure()
    except Exception as error:
        if not isinstance(error, BrokenError):
            log(traceback.format_exc(limit=-4))
        reason = str(error) if isinstance(error, BrokenError) else describe(error)
        yield from (line.replace(is_broken=True, reason=reason) for line in asked)


def checked(run: KernelRun, expected: Expected) -> float:
    """The error of a kernel, which must be within the kernel's tolerance."""
    found = check_run("ours", run, expected)
    if isinstance(found, Contender):
        raise BrokenError(f"{found.status.value}: {found.reason}")
    return found


def timed(
    asked: Iterable[Line], calls: dict[str, Call], rounds: Rounds, error: float
) -> Iterator[Line]:
    """Fill in the times of the call ``ours`` and of the call that a line compares with, if any."""
    device, turns, reps = rounds.device, rounds.rounds, rounds.reps
    for line in asked:
        times: dict[str, Timing] | None
        if line.how is How.DEVICE:
            times = time_interleaved(calls, make_clock(device, reps), turns, reps)
        elif line.how is How.EAGER:
            times = eager_times_us(calls, device, turns, reps)
        else:
            times = graph_times_us(calls, device, turns)
        if times is None:
            reason = "; ".join(filter(None, [line.reason, "needs a CUDA device"]))
            yield line.replace(error=error, reason=reason)
            continue
        ours, other = times["ours"], times.get(line.other)
        yield line.replace(
            ours_us=ours.median_us,
            other_us=None if other is None else other.median_us,
            spread=ours.spread,
            other_spread=None if other is None else other.spread,
            error=error,
        )


def direct_call(record: Any, attend: Callable[[Any], object]) -> partial[object]:
    """The call that one forward makes into FlashInfer, with the arguments of that forward.

    Args:
        record: the record of a step of decodes.
        attend: runs a forward over a record.
    """
    found: list[partial[object]] = []

    def kept(function: Any) -> Any:
        def keep(*args: Any, **kwargs: Any) -> Any:
            found.append(partial(function, *args, **kwargs))
            return function(*args, **kwargs)

        return keep

    step, part = copy.copy(record), copy.copy(record.decode)
    step.decode = part
    if hasattr(part, "wrapper"):
        part.wrapper = _Wrapper(kept(part.wrapper.run))
    else:
        functions = {
            item.name: kept(getattr(part.calls, item.name))
            for item in fields(part.calls)
            if item.name.endswith("_function") and getattr(part.calls, item.name) is not None
        }
        part.calls = replace(part.calls, **functions)
    attend(step)
    if len(found) != 1:
        raise BrokenError(f"a step of decodes must make one call, got {len(found)}")
    return found[0]


@dataclass(frozen=True)
class _Wrapper:
    """A stand-in for a wrapper of FlashInfer's."""

    run: Any
