"""What moved between two results: a value moved where it changed by more than its noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Final

from attn.bench.results.lines import Line
from attn.bench.results.results import BenchResults, CaseResult, Contender


@unique
class Direction(StrEnum):
    """Where a value went."""

    BETTER = "better"
    WORSE = "WORSE"
    LEVEL = "level"
    """The change is within the noise."""
    CHANGED = "changed"
    """The value is no number, or was measured in one of the two results alone."""


@dataclass(frozen=True)
class Move:
    """One value in an older and a newer result; a smaller number is better."""

    what: str
    old: float | str
    new: float | str
    unit: str = ""
    noise: float = 0.0
    """Largest relative change that is no more than noise."""
    relative: float | None = None
    """``new / old``, where it is known better than from the two numbers."""

    @property
    def ratio(self) -> float | None:
        """``new / old``; None where one of them is no positive number."""
        if self.relative is not None:
            return self.relative
        if isinstance(self.old, str) or isinstance(self.new, str) or self.old <= 0:
            return None
        return self.new / self.old

    @property
    def direction(self) -> Direction:
        """Whether the value moved, and where to."""
        ratio = self.ratio
        # Equal first: the ratio of two infinite errors is no number.
        if self.old == self.new and self.relative is None:
            return Direction.LEVEL
        if ratio is None:
            return Direction.CHANGED
        if abs(ratio - 1.0) <= self.noise:
            return Direction.LEVEL
        return Direction.BETTER if ratio < 1.0 else Direction.WORSE

    @property
    def cells(self) -> tuple[str, str, str, str, str, str]:
        """The move as cells of a table, under :data:`COLUMNS`."""
        ratio = self.ratio
        return (
            self.what,
            self.direction.value,
            self._text(self.old),
            self._text(self.new),
            "" if ratio is None else f"{ratio:.3f}",
            "" if ratio is None else f"{100 * self.noise:.1f} %",
        )

    def _text(self, value: float | str) -> str:
        if isinstance(value, str):
            return value
        number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
        return f"{number} {self.unit}".rstrip()

    def __str__(self) -> str:
        ratio = self.ratio
        change = "" if ratio is None else f", {ratio:.3f} of it, noise {100 * self.noise:.1f} %"
        return (
            f"{self.direction.value}: {self.what} {self._text(self.old)} -> "
            f"{self._text(self.new)}{change}"
        )


COLUMNS: Final = ("what", "moved", "old", "new", "new / old", "noise")
"""Heads of a table of :attr:`Move.cells`."""


def move_lines(moves: Sequence[Move], against: str) -> list[str]:
    """A line that counts, and a line for everything that moved.

    Args:
        moves: all values that were compared.
        against: name of the older result.
    """
    counts = Counter(move.direction for move in moves)
    said = ", ".join(f"{counts[one]} {one.value}" for one in Direction)
    moved = [f"  {move}" for move in moves if move.direction is not Direction.LEVEL]
    return [f"against {against}: {said}", *moved]


def bench_moves(old: BenchResults, new: BenchResults) -> list[Move]:
    """The times of all kernels that both results have, and kernels whose status changed.

    The noise of a time is the larger spread of the two: (largest - smallest) / median of the
    rounds' medians. Peers are compared too: where they move as well, the machine did.

    Raises:
        ValueError: the older results are of another backend, device or table.
    """
    for name in ("backend", "device", "table"):
        ours, theirs = (str(getattr(one.environment, name)) for one in (new, old))
        if ours != theirs:
            raise ValueError(f"compare must have results of {name} {ours!r}, got {theirs!r}")
    earlier = {result.case.name: result for result in old.cases}
    moves = []
    for result in new.cases:
        before = earlier.get(result.case.name)
        if before is None or before.case != result.case.replace(target=before.case.target):
            continue
        moves += _case_moves(before, result)
    lines = {line.key: line for line in old.lines}
    for line in new.lines:
        then = lines.get(line.key)
        if then is None:
            continue
        what = f"{line.backend}, {line.case}, {line.how.value}"
        if line.ours_us is None or then.ours_us is None:
            moves.append(Move(what, _state(then), _state(line)))
            continue
        noise = max(then.spread or 0.0, line.spread or 0.0)
        moves.append(Move(what, then.ours_us, line.ours_us, "us", noise))
    return moves


def _state(line: Line) -> str:
    return "not measured" if line.ours_us is None else "measured"


def _case_moves(old: CaseResult, new: CaseResult) -> list[Move]:
    moves = []
    for contender in (new.ours, *new.peers):
        then = old.ours if contender is new.ours else old.peer(contender.name)
        if then is not None:
            moves.append(_contender_move(new.case.name, then, contender))
    return moves


def _contender_move(case: str, old: Contender, new: Contender) -> Move:
    what = f"{case}, {new.name}"
    if old.time_us is None or new.time_us is None:
        return Move(what, old.status.value, new.status.value)
    noise = max(old.spread or 0.0, new.spread or 0.0)
    return Move(what, old.time_us, new.time_us, "us", noise)
