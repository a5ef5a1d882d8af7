"""Results of the kernel benchmark as records, and judging of their targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum, unique
from typing import Final, NamedTuple, Self

from pydantic import Field, model_validator

from attn.bench.cases.case import KernelCase
from attn.bench.cases.dense import (
    MAX_FREE_PARTITION_RATIO,
    MAX_PLAN_US,
    MAX_SCRATCH_BYTES,
    BenchTable,
)
from attn.bench.results.lines import Line
from attn.bench.results.origin import KERNELS_SCHEMA
from specs.base import NonNegativeInt, PositiveInt, Spec


@unique
class Status(StrEnum):
    """Outcome of a kernel on a case."""

    MEASURED = "measured"
    WRONG = "WRONG"
    """The kernel's error exceeds its tolerance, so it has no time."""
    FAILED = "failed"
    """The kernel raised an error."""
    UNSUPPORTED = "unsupported"
    """The kernel does not support this kind of case."""
    UNAVAILABLE = "unavailable"
    """The kernel is not installed, or cannot run here."""


@unique
class Verdict(StrEnum):
    """Verdict on a target."""

    MET = "met"
    LEVEL = "level"
    """A lead or a lag within the larger spread of the two times, where the bound is the other
    kernel's time itself."""
    NOT_MET = "NOT met"
    NOT_MEASURED = "not measured"


class Contender(Spec):
    """Result of one kernel on one case."""

    name: str
    status: Status
    time_us: float | None = None
    """Median microseconds of ``forward`` alone; None unless the kernel was measured."""
    plan_us: float | None = Field(default=None, ge=0)
    """Median microseconds of the step's plan alone; None for a kernel without a plan, or one whose
    plan is a part of its first call."""
    planned_us: float | None = Field(default=None, gt=0)
    """Median microseconds of the step's plan and the kernel together; None for a kernel without a
    plan."""
    spread: float | None = None
    """(largest - smallest) / median of the rounds' medians of ``time_us``."""
    graph_us: float | None = Field(default=None, gt=0)
    """Median microseconds of one of many calls of ``forward`` in a captured graph."""
    graph_spread: float | None = None
    """Spread of ``graph_us``."""
    host_us: float | None = Field(default=None, gt=0)
    """Median microseconds of the host in one eager ``forward``, without waiting for the GPU."""
    plan_host_us: float | None = Field(default=None, gt=0)
    """Median microseconds of the host in the step's plan."""
    launches: NonNegativeInt | None = None
    """Kernels, copies and fills that one eager ``forward`` launches."""
    graph_launches: NonNegativeInt | None = None
    """Kernels, copies and fills of one ``forward`` that is captured."""
    calls: NonNegativeInt = 0
    """Number of timed calls."""
    error: float | None = None
    """Largest relative norm of a sampled row's error; None when the kernel did not run."""
    reason: str = ""
    """Why the kernel was not measured."""

    @model_validator(mode="after")
    def _time_when_measured(self) -> Self:
        """A kernel has a time if and only if its status is ``measured``."""
        if (self.status is Status.MEASURED) != (self.time_us is not None):
            raise ValueError(
                f"time_us must be given when measured and only then, got {self.time_us} with "
                f"status {self.status.value!r}"
            )
        if self.time_us is not None and self.time_us <= 0:
            raise ValueError(f"time_us must be positive, got {self.time_us}")
        return self

    def layer_us(self, layers: int, in_graph: bool = False) -> float | None:
        """Microseconds per layer: ``forward + plan / layers``; None when it was not measured.

        A plan that is a part of the first call cannot be timed apart. There the result is the mean
        of one call with its plan and ``layers - 1`` calls without.

        Args:
            layers: layers that share a step's plan.
            in_graph: take the time in a captured graph.
        """
        time = self.graph_us if in_graph else self.time_us
        if time is None:
            return None
        if self.plan_us is not None:
            return time + self.plan_us / layers
        if self.planned_us is not None:
            return (self.planned_us + (layers - 1) * time) / layers
        return time

    def spread_of(self, in_graph: bool = False) -> float:
        """Spread of the time of ``forward``; 0 where it is unknown."""
        return (self.graph_spread if in_graph else self.spread) or 0.0


@unique
class Standing(StrEnum):
    """Our time per layer beside the fastest peer's."""

    AHEAD = "ahead"
    LEVEL = "level"
    """The lead or lag is within the larger spread of the two times."""
    BEHIND = "behind"
    NOT_MEASURED = "not measured"


MOST_SPREAD: Final = 0.1
"""Largest part by which our time may exceed another and count as level with it."""


def is_level(ratio: float, *spreads: float | None) -> bool:
    """Whether a ratio of two times is 1 within the larger of their spreads.

    A lead must exceed the whole spread. A lag counts from ``MOST_SPREAD`` on, however much the
    times scatter.

    Args:
        ratio: our time over the other.
        spreads: (largest - smallest) / median of the rounds' medians of each; None is 0.
    """
    largest = max((spread or 0.0 for spread in spreads), default=0.0)
    return 1.0 - largest <= ratio <= 1.0 + min(largest, MOST_SPREAD)


class PlanTime(Spec):
    """Cost of building a step's metadata, once per step."""

    host_us: float
    """Median microseconds of ``builder.build`` on the host."""
    gpu_us: float | None = None
    """Microseconds of its kernels in a CUDA graph; None where that cannot be measured."""
    reason: str = ""
    """Why ``gpu_us`` is None."""


class PlanOfSize(Spec):
    """Times of a step's plan for a number of decodes, by the builder of one engine."""

    num_reqs: PositiveInt
    even_us: float
    """Microseconds of the kernels of ``build`` in a CUDA graph; requests have equal lengths."""
    uneven_us: float
    """Microseconds of the kernels of ``build`` in a CUDA graph; lengths go from one key to many."""


class CaseResult(Spec):
    """Results of all kernels on a case."""

    case: KernelCase
    ours: Contender
    peers: tuple[Contender, ...] = ()
    free_partition: Contender | None = None
    """Our kernel with a partition of the keys that depends on the whole batch."""
    batch_invariant: Contender | None = None
    """Our backend with ``EngineConfig.batch_invariant=True``."""
    plain: Contender | None = None
    """Our backend with its portable kernels."""
    plan: PlanTime | None = None
    allocations: NonNegativeInt | None = None
    """Allocations of device memory in ten calls of ``forward``; None where they are not counted."""
    run: NonNegativeInt = 0
    """Number of the run in merged results; a target compares with cases of the same run only."""

    def peer(self, name: str) -> Contender | None:
        """A peer's result by name; None when it was not asked for."""
        return next((peer for peer in self.peers if peer.name == name), None)

    def cost(self, contender: Contender | None, in_graph: bool = False) -> float | None:
        """The judged time of a kernel of this case: its microseconds per layer.

        Where a peer's call with its whole plan took less, that time counts.
        """
        if contender is None:
            return None
        layer = contender.layer_us(self.case.layers, in_graph)
        planned = contender.planned_us
        if layer is None or planned is None or in_graph or contender not in self.peers:
            return layer
        return min(layer, planned)

    def best(self, in_graph: bool = False) -> Contender | None:
        """The peer with the least time per layer among those that were measured."""
        measured = [peer for peer in self.peers if self.cost(peer, in_graph) is not None]
        return min(measured, key=lambda peer: self.cost(peer, in_graph) or 0.0, default=None)

    def ratio(self, other: Contender | None, in_graph: bool = False) -> float | None:
        """Our time per layer over another kernel's; None where one of them is missing."""
        ours, theirs = self.cost(self.ours, in_graph), self.cost(other, in_graph)
        return None if ours is None or theirs is None else ours / theirs

    def standing(self, in_graph: bool = False) -> Standing:
        """Our time per layer beside the fastest peer's.

        Ahead and level need every peer of the target to be measured or to have no kernel for the
        case. One faster peer is enough to be behind.
        """
        best = self.best(in_graph)
        ratio = self.ratio(best, in_graph)
        if best is None or ratio is None:
            return Standing.NOT_MEASURED
        level = is_level(ratio, self.ours.spread_of(in_graph), best.spread_of(in_graph))
        if ratio > 1.0 and not level:
            return Standing.BEHIND
        if not self.knows_every_peer(in_graph):
            return Standing.NOT_MEASURED
        return Standing.LEVEL if level else Standing.AHEAD

    def knows_every_peer(self, in_graph: bool = False) -> bool:
        """True where each peer of the target has a time, or has no kernel for the case."""
        peers = [self.peer(name) for name in self.case.target.against]
        return all(
            peer is not None
            and (peer.status is Status.UNSUPPORTED or self.cost(peer, in_graph) is not None)
            for peer in peers
        )


class Environment(Spec):
    """Machine, versions, time and settings of a run."""

    date: str
    device: str
    torch: str
    triton: str
    vllm: str
    flashinfer: str
    commit: str
    backend: str
    rounds: PositiveInt
    reps: PositiveInt
    table: BenchTable = BenchTable.DENSE
    command: str = ""
    """The command line that measured; empty where it is unknown."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of this library, Python and the installed packages; empty where they are unknown."""

    @property
    def identity(self) -> dict[str, str]:
        """What results must have in common to stand in one table: backend, device, table, and the
        versions of everything that was measured.

        A package that is missing in one of them is another version too.
        """
        named = ("backend", "device", "table", "torch", "triton", "vllm", "flashinfer")
        return {**self.versions, **{name: str(getattr(self, name)) for name in named}}


class BenchResults(Spec):
    """Results of a run, or of several runs merged."""

    schema_version: NonNegativeInt = KERNELS_SCHEMA
    environment: Environment
    cases: tuple[CaseResult, ...] = ()
    scratch_bytes: NonNegativeInt | None = None
    """Bytes of device memory that a builder, a step and its forward take beyond inputs and output.
    """
    scratch_reason: str = ""
    """Why ``scratch_bytes`` is None."""
    plans: tuple[PlanOfSize, ...] = ()
    """Times of plans, in tables that bound them."""
    plans_reason: str = ""
    """Why ``plans`` is empty in such a table."""
    lines: tuple[Line, ...] = ()
    """Results of a table of lines, which has no cases."""

    def merged(self, earlier: BenchResults, order: Sequence[str]) -> BenchResults:
        """Add the results of ``earlier`` for cases and lines that have no result here.

        Args:
            earlier: results of the same backend, device, table and versions.
            order: names of all cases; the merged results follow it, with unknown names last.

        Raises:
            ValueError: ``earlier`` is of another backend, device, table or version.
        """
        mine, older = self.environment.identity, earlier.environment.identity
        for name in dict.fromkeys([*mine, *older]):
            ours, theirs = mine.get(name, "unknown"), older.get(name, "unknown")
            if ours != theirs:
                raise ValueError(f"earlier results must have {name} {ours!r}, got {theirs!r}")
        run = 1 + max((result.run for result in earlier.cases), default=-1)
        newer = (result.replace(run=run + result.run) for result in self.cases)
        cases = {result.case.name: result for result in (*earlier.cases, *newer)}
        ranks = {name: rank for rank, name in enumerate(order)}
        ranked = sorted(cases.values(), key=lambda result: ranks.get(result.case.name, len(ranks)))
        commits = [earlier.environment.commit, self.environment.commit]
        commit = ", ".join(dict.fromkeys(name for text in commits for name in text.split(", ")))
        measured = self if self.scratch_bytes is not None else earlier
        lines = {line.key: line for line in (*earlier.lines, *self.lines)}
        return self.replace(
            lines=tuple(sorted(lines.values(), key=lambda line: ranks.get(line.case, len(ranks)))),
            environment=self.environment.replace(commit=commit),
            cases=tuple(ranked),
            scratch_bytes=measured.scratch_bytes,
            scratch_reason=measured.scratch_reason,
            plans=self.plans or earlier.plans,
            plans_reason="" if self.plans or earlier.plans else self.plans_reason,
        )


# -- Targets.


class Check(NamedTuple):
    """One bound in words, and the verdict on it."""

    text: str
    verdict: Verdict


def checks_of(result: CaseResult, others: Iterable[CaseResult] = ()) -> list[Check]:
    """Judge every bound of a case's target.

    Args:
        result: result of the case.
        others: results of all cases, for a target that names another case; results of other runs
            are ignored.
    """
    target, unit = result.case.target, result.case.unit
    checks = []
    if target.max_ratio_to_best is not None:
        text = f"<= {target.max_ratio_to_best:.2f} x best"
        checks.append(Check(text, _against_best(result, target.max_ratio_to_best)))
    if target.max_graph_ratio_to_best is not None:
        text = f"<= {target.max_graph_ratio_to_best:.2f} x best in a graph"
        verdict = _against_best(result, target.max_graph_ratio_to_best, in_graph=True)
        checks.append(Check(text, verdict))
    if target.no_slower_than is not None:
        beside = (other for other in others if other.run == result.run)
        named = (other.ours for other in beside if other.case.name == target.no_slower_than)
        verdict = _against(result, next(named, None), 1.0 / target.min_speedup)
        share = "" if target.min_speedup == 1.0 else f"1 / {target.min_speedup:g} of "
        checks.append(Check(f"<= {share}{target.no_slower_than}", verdict))
    for name in target.faster_than:
        checks.append(Check(f"< {name}", _against(result, result.peer(name), 1.0)))
    for bound in target.max_ratios:
        text = f"<= {bound.max_ratio:.2f} x {bound.peer}"
        checks.append(Check(text, _against(result, result.peer(bound.peer), bound.max_ratio)))
    if target.max_graph_us is not None:
        captured = result.ours.graph_us
        holds = None if captured is None else captured <= target.max_graph_us
        text = f"<= {target.max_graph_us:g} us in a graph"
        checks.append(Check(text, _judge(result.ours, holds)))
    if target.min_rate is not None:
        time_us = result.ours.time_us
        holds = None if time_us is None else result.case.rate(time_us) >= target.min_rate
        checks.append(Check(f">= {target.min_rate:g} {unit}", _judge(result.ours, holds)))
    return checks


def plain_check(result: CaseResult) -> Check | None:
    """Judge the portable kernel's rate; None for a case without a bound."""
    bound, plain = result.case.target.min_plain_rate, result.plain
    if bound is None:
        return None
    text = f">= {bound:g} {result.case.unit}"
    if plain is None:
        return Check(text, Verdict.NOT_MEASURED)
    holds = None if plain.time_us is None else result.case.rate(plain.time_us) >= bound
    return Check(text, _judge(plain, holds))


def host_check(result: CaseResult) -> Check | None:
    """Judge the host's time of one forward; None for a case without a bound."""
    target, host = result.case.target, result.ours.host_us
    if target.host_at_most is not None:
        peer = result.peer(target.host_at_most)
        bound = None if peer is None else peer.host_us
        holds = None if host is None or bound is None else host <= bound
        return Check(f"<= {target.host_at_most}", _judge(result.ours, holds))
    if target.max_host_us is None:
        return None
    holds = None if host is None else host <= target.max_host_us
    return Check(f"<= {target.max_host_us:g} us", _judge(result.ours, holds))


def invariant_check(result: CaseResult) -> Check | None:
    """Judge our time with batch invariance over that without; None for a case without a bound."""
    bound, other = result.case.target.max_invariant_ratio, result.batch_invariant
    if bound is None:
        return None
    text = f"<= {bound:g} x default"
    if other is None:
        return Check(text, Verdict.NOT_MEASURED)
    ours, invariant = result.cost(result.ours), result.cost(other)
    holds = None if ours is None or invariant is None else invariant <= bound * ours
    return Check(text, _judge(other, holds))


def verdict_of(checks: Iterable[Check]) -> Verdict | None:
    """The worst verdict on several checks; None where there are none."""
    verdicts = {check.verdict for check in checks}
    for verdict in (Verdict.NOT_MET, Verdict.NOT_MEASURED, Verdict.LEVEL, Verdict.MET):
        if verdict in verdicts:
            return verdict
    return None


def line_check(line: Line) -> Check | None:
    """Judge a line's target; None for a line without a target."""
    if not line.target:
        return None
    verdicts = {None: Verdict.NOT_MEASURED, True: Verdict.MET, False: Verdict.NOT_MET}
    asks_who_leads = line.max_ratio == 1.0 and line.ours_us is not None
    if asks_who_leads and line.other_us is not None and line.ours_us is not None:
        level = is_level(line.ours_us / line.other_us, line.spread, line.other_spread)
        # The lead is left open; every other bound of the line must hold by itself.
        if level and line.replace(max_ratio=None).holds in (None, True):
            return Check(line.target, Verdict.LEVEL)
    return Check(line.target, verdicts[line.holds])


def free_partition_check(result: CaseResult) -> Check:
    """Judge our time over that of the free partition."""
    text = f"<= {MAX_FREE_PARTITION_RATIO:.2f} x free"
    return Check(text, _against(result, result.free_partition, MAX_FREE_PARTITION_RATIO))


def scratch_check(results: BenchResults) -> Check:
    """Judge the builder's scratch."""
    size = results.scratch_bytes
    verdict = Verdict.NOT_MEASURED
    if size is not None:
        verdict = Verdict.MET if size < MAX_SCRATCH_BYTES else Verdict.NOT_MET
    return Check(f"< {MAX_SCRATCH_BYTES >> 20} MiB", verdict)


def plan_check(results: BenchResults) -> Check | None:
    """Judge the slowest plan of all cases and numbers of decodes; None in a table without bound."""
    if not results.environment.table.bounds_plans:
        return None
    times = [time for plan in results.plans for time in (plan.even_us, plan.uneven_us)]
    planned = [result.plan.gpu_us for result in results.cases if result.plan is not None]
    times += [time for time in planned if time is not None]
    verdict = Verdict.NOT_MEASURED
    if results.plans and None not in planned:
        verdict = Verdict.MET
    if max(times, default=0.0) > MAX_PLAN_US:
        verdict = Verdict.NOT_MET
    return Check(f"<= {MAX_PLAN_US:g} us", verdict)


def allocation_check(results: BenchResults) -> Check:
    """Judge that no forward allocates device memory; uncounted cases leave the verdict open."""
    counts = [result.allocations for result in results.cases]
    verdict = Verdict.MET
    if any(counts):
        verdict = Verdict.NOT_MET
    elif None in counts or not counts:
        verdict = Verdict.NOT_MEASURED
    return Check("0", verdict)


def _judge(ours: Contender, holds: bool | None) -> Verdict:
    """The verdict for our kernel, given whether a bound holds (None where a number is missing).

    A kernel of ours that is wrong, fails or is refused never meets a target. A missing number of a
    peer leaves the verdict open.
    """
    if ours.status is Status.UNAVAILABLE:
        return Verdict.NOT_MEASURED
    if ours.status is not Status.MEASURED:
        return Verdict.NOT_MET
    if holds is None:
        return Verdict.NOT_MEASURED
    return Verdict.MET if holds else Verdict.NOT_MET


def _against(
    result: CaseResult,
    other: Contender | None,
    max_ratio: float,
    in_graph: bool = False,
) -> Verdict:
    """Judge our time per layer against ``max_ratio`` times another kernel's.

    A bound of 1 asks which of the two is faster: within the larger spread they are level.
    """
    ratio = result.ratio(other, in_graph)
    if ratio is None or other is None:
        return _judge(result.ours, None)
    spreads = result.ours.spread_of(in_graph), other.spread_of(in_graph)
    if max_ratio == 1.0 and is_level(ratio, *spreads):
        return Verdict.LEVEL
    return _judge(result.ours, ratio <= max_ratio)


def _against_best(result: CaseResult, max_ratio: float, in_graph: bool = False) -> Verdict:
    """Judge our time against the fastest peer's.

    The bound is met only if every peer was measured or has no kernel for the case.
    """
    verdict = _against(result, result.best(in_graph), max_ratio, in_graph)
    is_open = not result.knows_every_peer(in_graph)
    favours_us = verdict in (Verdict.MET, Verdict.LEVEL)
    return Verdict.NOT_MEASURED if favours_us and is_open else verdict
