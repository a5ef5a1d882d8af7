"""Results of the kernel benchmark: records, and targets judged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum, unique
from typing import NamedTuple, Self

from pydantic import model_validator

from attn.bench.cases.case import KernelCase
from attn.bench.cases.dense import (
    MAX_FREE_PARTITION_RATIO,
    MAX_PLAN_US,
    MAX_SCRATCH_BYTES,
    BenchTable,
)
from attn.bench.results.lines import Line
from specs.base import NonNegativeInt, PositiveInt, Spec


@unique
class Status(StrEnum):
    """What became of a kernel on a case."""

    MEASURED = "measured"
    WRONG = "WRONG"
    """Its result is off by more than its tolerance; it was not timed."""
    FAILED = "failed"
    """It raised an error."""
    UNSUPPORTED = "unsupported"
    """It does not have this kind of case."""
    UNAVAILABLE = "unavailable"
    """It is not installed, or cannot run here."""


@unique
class Verdict(StrEnum):
    """A target against what was measured."""

    MET = "met"
    NOT_MET = "NOT met"
    NOT_MEASURED = "not measured"


class Contender(Spec):
    """One kernel on one case."""

    name: str
    status: Status
    time_us: float | None = None
    """Median, microseconds; only when measured."""
    planned_us: float | None = None
    """Likewise with the step's plan before it, where it has one; only in tables that ask."""
    spread: float | None = None
    """(largest - smallest) / median of the rounds' medians."""
    calls: NonNegativeInt = 0
    """Timed calls."""
    error: float | None = None
    """Largest relative norm of a sampled row's error; None when it did not run."""
    reason: str = ""
    """Why it was not measured."""

    @model_validator(mode="after")
    def _time_when_measured(self) -> Self:
        """A time comes with the status ``measured``, and with no other."""
        if (self.status is Status.MEASURED) != (self.time_us is not None):
            raise ValueError(
                f"time_us must be given when measured and only then, got {self.time_us} with "
                f"status {self.status.value!r}"
            )
        if self.time_us is not None and self.time_us <= 0:
            raise ValueError(f"time_us must be positive, got {self.time_us}")
        return self

    def cost(self, planned: bool = False) -> float | None:
        """Its time; ``planned`` with the step's plan where it has one. None when not measured."""
        return self.time_us if not planned or self.planned_us is None else self.planned_us


class PlanTime(Spec):
    """Cost of building a step's metadata, once per step."""

    host_us: float
    """Median time of ``builder.build`` on the host."""
    gpu_us: float | None = None
    """Its kernels in a CUDA graph; None where that cannot be measured."""
    reason: str = ""
    """Why ``gpu_us`` is None."""


class PlanOfSize(Spec):
    """A step's plan by the number of its decodes, all of one engine."""

    num_reqs: PositiveInt
    even_us: float
    """The kernels of ``build`` in a CUDA graph, all requests as long."""
    uneven_us: float
    """Likewise, from one to many keys."""


class CaseResult(Spec):
    """All that was measured on a case."""

    case: KernelCase
    ours: Contender
    peers: tuple[Contender, ...] = ()
    free_partition: Contender | None = None
    """The same kernel, with a partition of the keys that looks at the whole batch."""
    batch_invariant: Contender | None = None
    """The same backend with ``EngineConfig.batch_invariant=True``."""
    plain: Contender | None = None
    """The same backend by its kernels in plain Triton."""
    plan: PlanTime | None = None
    host_us: float | None = None
    """Median time of one forward on the host; None where no target asks for it."""
    allocations: NonNegativeInt | None = None
    """Of device memory, in ten calls of ``forward``; None where it cannot be counted."""
    run: NonNegativeInt = 0
    """Which of the runs that were put together; a target names cases of the same run."""

    def peer(self, name: str) -> Contender | None:
        """A peer's result by name; None when it was not asked for."""
        return next((peer for peer in self.peers if peer.name == name), None)

    @property
    def best_peer(self) -> Contender | None:
        """The fastest of the measured peers."""
        return self.best()

    def best(self, planned: bool = False) -> Contender | None:
        """The fastest of the measured peers; ``planned`` counts what each plans per step."""
        measured = [peer for peer in self.peers if peer.time_us is not None]
        return min(measured, key=lambda peer: peer.cost(planned) or 0.0, default=None)


class Environment(Spec):
    """Where, when and how the times were taken."""

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


class BenchResults(Spec):
    """A whole run, or several that were put together."""

    environment: Environment
    cases: tuple[CaseResult, ...] = ()
    scratch_bytes: NonNegativeInt | None = None
    """Device memory that a builder, a step and its forward take beyond inputs and output."""
    scratch_reason: str = ""
    """Why ``scratch_bytes`` is None."""
    plans: tuple[PlanOfSize, ...] = ()
    """In tables that bound them."""
    plans_reason: str = ""
    """Why there are none."""
    lines: tuple[Line, ...] = ()
    """Of a table of pairs of times, in place of cases."""

    def merged(self, earlier: BenchResults, order: Sequence[str]) -> BenchResults:
        """These results, and of ``earlier`` the cases that are not among them.

        Args:
            earlier: of the same backend and device.
            order: names of all cases; the result follows it, unknown names last.

        Raises:
            ValueError: ``earlier`` is of another backend, device or table.
        """
        for name in ("backend", "device", "table"):
            ours, theirs = (str(getattr(x.environment, name)) for x in (self, earlier))
            if ours != theirs:
                raise ValueError(f"earlier results must have {name} {ours!r}, got {theirs!r}")
        run = 1 + max((result.run for result in earlier.cases), default=-1)
        mine = (result.replace(run=run + result.run) for result in self.cases)
        cases = {result.case.name: result for result in (*earlier.cases, *mine)}
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
    """One bound, and whether it holds."""

    text: str
    verdict: Verdict


def checks_of(result: CaseResult, others: Iterable[CaseResult] = ()) -> list[Check]:
    """Every bound of a case's target, judged.

    Args:
        result: of the case.
        others: all results, where a target can name another case; of other runs they do not count.
    """
    target, unit = result.case.target, result.case.unit
    checks = []
    if target.max_ratio_to_best is not None:
        text = f"<= {target.max_ratio_to_best:.2f} x best"
        checks.append(Check(text, _against_best(result, target.max_ratio_to_best)))
    if target.max_planned_ratio_to_best is not None:
        text = f"<= {target.max_planned_ratio_to_best:.2f} x best, plans included"
        verdict = _against_best(result, target.max_planned_ratio_to_best, planned=True)
        checks.append(Check(text, verdict))
    if target.no_slower_than is not None:
        beside = (other for other in others if other.run == result.run)
        named = (other.ours for other in beside if other.case.name == target.no_slower_than)
        verdict = _against(result, next(named, None), 1.0 / target.min_speedup)
        share = "" if target.min_speedup == 1.0 else f"1 / {target.min_speedup:g} of "
        checks.append(Check(f"<= {share}{target.no_slower_than}", verdict))
    for name in target.faster_than:
        checks.append(Check(f"< {name}", _against(result, result.peer(name), 1.0, strict=True)))
    for bound in target.max_ratios:
        text = f"<= {bound.max_ratio:.2f} x {bound.peer}"
        checks.append(Check(text, _against(result, result.peer(bound.peer), bound.max_ratio)))
    if target.min_rate is not None:
        time_us = result.ours.time_us
        holds = None if time_us is None else result.case.rate(time_us) >= target.min_rate
        checks.append(Check(f">= {target.min_rate:g} {unit}", _judge(result.ours, holds)))
    return checks


def plain_check(result: CaseResult) -> Check | None:
    """The kernel in plain Triton against the case's bound; None without one."""
    bound, plain = result.case.target.min_plain_rate, result.plain
    if bound is None:
        return None
    text = f">= {bound:g} {result.case.unit}"
    if plain is None:
        return Check(text, Verdict.NOT_MEASURED)
    holds = None if plain.time_us is None else result.case.rate(plain.time_us) >= bound
    return Check(text, _judge(plain, holds))


def host_check(result: CaseResult) -> Check | None:
    """One forward on the host against the case's bound; None without one."""
    bound = result.case.target.max_host_us
    if bound is None:
        return None
    holds = None if result.host_us is None else result.host_us <= bound
    return Check(f"<= {bound:g} us", _judge(result.ours, holds))


def verdict_of(checks: Iterable[Check]) -> Verdict | None:
    """All of them together: met only when each is; None without any."""
    verdicts = {check.verdict for check in checks}
    for verdict in (Verdict.NOT_MET, Verdict.NOT_MEASURED, Verdict.MET):
        if verdict in verdicts:
            return verdict
    return None


def line_check(line: Line) -> Check | None:
    """A line against its target; None without one."""
    if not line.target:
        return None
    verdicts = {None: Verdict.NOT_MEASURED, True: Verdict.MET, False: Verdict.NOT_MET}
    return Check(line.target, verdicts[line.holds])


def free_partition_check(result: CaseResult) -> Check:
    """Our time over the free partition's."""
    text = f"<= {MAX_FREE_PARTITION_RATIO:.2f} x free"
    return Check(text, _against(result, result.free_partition, MAX_FREE_PARTITION_RATIO))


def scratch_check(results: BenchResults) -> Check:
    """The builder's scratch against its bound."""
    size = results.scratch_bytes
    verdict = Verdict.NOT_MEASURED
    if size is not None:
        verdict = Verdict.MET if size < MAX_SCRATCH_BYTES else Verdict.NOT_MET
    return Check(f"< {MAX_SCRATCH_BYTES >> 20} MiB", verdict)


def plan_check(results: BenchResults) -> Check | None:
    """The slowest plan, of any case and of any number of decodes; None in tables that do not bound
    it.
    """
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
    """No forward of any case allocates; cases where it was not counted leave that open."""
    counts = [result.allocations for result in results.cases]
    verdict = Verdict.MET
    if any(counts):
        verdict = Verdict.NOT_MET
    elif None in counts or not counts:
        verdict = Verdict.NOT_MEASURED
    return Check("0", verdict)


def _judge(ours: Contender, holds: bool | None) -> Verdict:
    """``holds`` is None where a number is missing: ours counts against us, a peer's leaves it open.

    A kernel of ours that is wrong, fails or is refused never meets a target.
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
    strict: bool = False,
    planned: bool = False,
) -> Verdict:
    """Our time against ``max_ratio`` times another's.

    ``strict`` refuses equality; ``planned`` counts what each plans per step, and ours must have
    been measured so.
    """
    holds = None
    ours = result.ours.planned_us if planned else result.ours.time_us
    theirs = None if other is None else other.cost(planned)
    if theirs is not None and ours is not None:
        holds = ours < max_ratio * theirs if strict else ours <= max_ratio * theirs
    return _judge(result.ours, holds)


def _against_best(result: CaseResult, max_ratio: float, planned: bool = False) -> Verdict:
    """Against the fastest peer: met only when each was measured or has no such kernel."""
    verdict = _against(result, result.best(planned), max_ratio, planned=planned)
    known = (Status.MEASURED, Status.UNSUPPORTED)
    results = [result.peer(name) for name in result.case.target.against]
    complete = all(peer is not None and peer.status in known for peer in results)
    return Verdict.NOT_MEASURED if verdict is Verdict.MET and not complete else verdict
