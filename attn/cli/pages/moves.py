"""What moved between two replays: times of equal steps, errors, backends, settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from attn.bench.results.moves import Move
from attn.cli.report import RunReport, StepRecord

ERROR_NOISE: Final = 0.01
"""Relative change of an error that is no more than noise: the same seed gives the same errors."""
_LEAST_STEPS: Final = 4
"""Fewest equal steps whose times say something."""
_TIMES: Final[dict[str, Callable[[StepRecord], float]]] = {
    "build of a step": lambda record: record.build_seconds,
    "forward of a step": lambda record: record.forward_seconds,
    "a whole step": lambda record: record.seconds,
}


def run_moves(old: RunReport, new: RunReport) -> list[Move]:
    """Everything that was compared in two replays.

    Times are compared step by step, where both replays ran equal batches on the same model and
    device: the change is the median of the ratios of equal steps, and its noise is how far the
    middle half of these ratios goes from their median. The first step is left out, which compiles
    kernels.
    """
    moves = [
        Move("model", old.model, new.model),
        Move("device", old.device, new.device),
        Move("seed", str(old.seed), str(new.seed)),
        *_words("setting", dict(old.settings), dict(new.settings)),
        *_words("version of", dict(old.versions), dict(new.versions)),
        *_words(
            "backend of",
            {group.name: group.backend for group in old.layer_groups},
            {group.name: group.backend for group in new.layer_groups},
        ),
    ]
    if old.model == new.model:
        moves.append(Move("batches", _batches(old), _batches(new)))
        if old.device == new.device:
            moves += _time_moves(old, new)
    errors = "worst error of its budget"
    if old.model == new.model and old.totals.checked_rows and new.totals.checked_rows:
        ratios = old.totals.worst_error_ratio, new.totals.worst_error_ratio
        moves.append(Move(errors, ratios[0], ratios[1], noise=ERROR_NOISE))
    moves.append(Move("checks", _passed(old), _passed(new)))
    return moves


def _passed(report: RunReport) -> str:
    return "passed" if report.passed else "not passed"


def _batches(report: RunReport) -> str:
    totals = report.totals
    return (
        f"{totals.steps:,} steps, {totals.prefill_tokens:,} prefill and "
        f"{totals.decode_tokens:,} decode tokens"
    )


def _words(what: str, old: dict[str, object], new: dict[str, object]) -> list[Move]:
    return [
        Move(f"{what} {name}", _said(old.get(name)), _said(new.get(name)))
        for name in dict.fromkeys((*old, *new))
    ]


def _said(value: object) -> str:
    return "none" if value is None else str(value)


def _time_moves(old: RunReport, new: RunReport) -> list[Move]:
    pairs = list(zip(old.steps, new.steps, strict=False))[1:]
    if len(pairs) < _LEAST_STEPS or any(_batch(a) != _batch(b) for a, b in pairs):
        return []
    moves = []
    for name, seconds in _TIMES.items():
        before = np.array([seconds(record) for record, _ in pairs])
        after = np.array([seconds(record) for _, record in pairs])
        if not before.all():
            continue
        low, middle, high = (float(one) for one in np.percentile(after / before, [25, 50, 75]))
        moves.append(
            Move(
                f"{name}, median of {len(pairs):,}",
                float(1000 * np.median(before)),
                float(1000 * np.median(after)),
                unit="ms",
                noise=max(high - middle, middle - low),
                relative=middle,
            )
        )
    return moves


def _batch(record: StepRecord) -> tuple[int, int, int, int]:
    return (
        record.num_decodes,
        record.num_prefills,
        record.decode_tokens,
        record.prefill_tokens,
    )
