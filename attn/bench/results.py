"""Results of the kernel benchmark: records, targets judged, and the markdown of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum, unique
from typing import NamedTuple, Self

from pydantic import model_validator

from attn.bench.cases import (
    MAX_FREE_PARTITION_RATIO,
    MAX_SCRATCH_BYTES,
    PEERS,
    KernelCase,
)
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


class PlanTime(Spec):
    """Cost of building a step's metadata, once per step."""

    host_us: float
    """Median time of ``builder.build`` on the host."""
    gpu_us: float | None = None
    """Its kernels in a CUDA graph; None where that cannot be measured."""
    reason: str = ""
    """Why ``gpu_us`` is None."""


class CaseResult(Spec):
    """All that was measured on a case."""

    case: KernelCase
    ours: Contender
    peers: tuple[Contender, ...] = ()
    free_partition: Contender | None = None
    """The same kernel, with a partition of the keys that looks at the whole batch."""
    batch_invariant: Contender | None = None
    """The same backend with ``EngineConfig.batch_invariant=True``."""
    plan: PlanTime | None = None
    allocations: NonNegativeInt | None = None
    """Of device memory, in ten calls of ``forward``; None where it cannot be counted."""

    def peer(self, name: str) -> Contender | None:
        """A peer's result by name; None when it was not asked for."""
        return next((peer for peer in self.peers if peer.name == name), None)

    @property
    def best_peer(self) -> Contender | None:
        """The fastest of the measured peers."""
        measured = [peer for peer in self.peers if peer.time_us is not None]
        return min(measured, key=lambda peer: peer.time_us or 0.0, default=None)


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


class BenchResults(Spec):
    """A whole run, or several that were put together."""

    environment: Environment
    cases: tuple[CaseResult, ...] = ()
    scratch_bytes: NonNegativeInt | None = None
    """Device memory that a builder, a step and its forward take beyond inputs and output."""
    scratch_reason: str = ""
    """Why ``scratch_bytes`` is None."""

    def merged(self, earlier: BenchResults, order: Sequence[str]) -> BenchResults:
        """These results, and of ``earlier`` the cases that are not among them.

        Args:
            earlier: of the same backend and device.
            order: names of all cases; the result follows it, unknown names last.

        Raises:
            ValueError: ``earlier`` is of another backend or device.
        """
        for name in ("backend", "device"):
            ours, theirs = getattr(self.environment, name), getattr(earlier.environment, name)
            if ours != theirs:
                raise ValueError(f"earlier results must have {name} {ours!r}, got {theirs!r}")
        cases = {result.case.name: result for result in (*earlier.cases, *self.cases)}
        ranks = {name: rank for rank, name in enumerate(order)}
        ranked = sorted(cases.values(), key=lambda result: ranks.get(result.case.name, len(ranks)))
        commits = [earlier.environment.commit, self.environment.commit]
        commit = ", ".join(dict.fromkeys(name for text in commits for name in text.split(", ")))
        measured = self if self.scratch_bytes is not None else earlier
        return self.replace(
            environment=self.environment.replace(commit=commit),
            cases=tuple(ranked),
            scratch_bytes=measured.scratch_bytes,
            scratch_reason=measured.scratch_reason,
        )


# -- Targets.


class Check(NamedTuple):
    """One bound, and whether it holds."""

    text: str
    verdict: Verdict


def checks_of(result: CaseResult) -> list[Check]:
    """Every bound of a case's target, judged."""
    target, unit = result.case.target, result.case.unit
    checks = []
    if target.max_ratio_to_best is not None:
        text = f"<= {target.max_ratio_to_best:.2f} x best"
        checks.append(Check(text, _against_best(result, target.max_ratio_to_best)))
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


def verdict_of(checks: Iterable[Check]) -> Verdict | None:
    """All of them together: met only when each is; None without any."""
    verdicts = {check.verdict for check in checks}
    for verdict in (Verdict.NOT_MET, Verdict.NOT_MEASURED, Verdict.MET):
        if verdict in verdicts:
            return verdict
    return None


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
    result: CaseResult, other: Contender | None, max_ratio: float, strict: bool = False
) -> Verdict:
    """Our time against ``max_ratio`` times another's; ``strict`` refuses equality."""
    holds = None
    if other is not None and other.time_us is not None and result.ours.time_us is not None:
        ours, bound = result.ours.time_us, max_ratio * other.time_us
        holds = ours < bound if strict else ours <= bound
    return _judge(result.ours, holds)


def _against_best(result: CaseResult, max_ratio: float) -> Verdict:
    """Against the fastest of ``PEERS``: met only when each was measured or has no such kernel."""
    verdict = _against(result, result.best_peer, max_ratio)
    known = (Status.MEASURED, Status.UNSUPPORTED)
    results = [result.peer(name) for name in PEERS]
    complete = all(peer is not None and peer.status in known for peer in results)
    return Verdict.NOT_MEASURED if verdict is Verdict.MET and not complete else verdict


# -- Markdown.

_HOW = (
    "Median of single calls ({reps} per round at most, {rounds} rounds, the kernels in turn within "
    "a round), {clock}. `forward` only: a plan is made before, and those of decodes have a table "
    "of their own. GB/s counts each live key and value once, plus query and output; TF counts "
    "visible pairs only, 4 x head size flops per pair and query head. Keys and values are random, "
    "block tables permuted, pages hold {block_sizes} tokens, unused slots of our cache NaN. A "
    "kernel's sampled rows are compared with float64 before it is timed and again after; `error` "
    "is the largest relative norm. `spread` is (largest - smallest) / median of our rounds' "
    "medians."
)
_CUDA_CLOCK = (
    "CUDA events around each call, 256 MiB written before it to empty the L2 cache, launches "
    "queued ahead of the GPU"
)
_CPU_CLOCK = "by the host's clock, caches as they are"
_LEGEND = "Times in us. `-`: no such kernel; `n/a`: cannot run here; empty: not asked for."


def render_markdown(results: BenchResults) -> str:
    """The tables; depends on nothing but ``results``."""
    environment = results.environment
    sizes = sorted({result.case.block_size for result in results.cases})
    how = _HOW.format(
        reps=environment.reps,
        rounds=environment.rounds,
        clock=_CPU_CLOCK if environment.device == "cpu" else _CUDA_CLOCK,
        block_sizes=" or ".join(str(size) for size in sizes) or "no",
    )
    versions = ", ".join(
        f"{name} {getattr(environment, name)}" for name in ("torch", "triton", "vllm", "flashinfer")
    )
    parts = [
        f"# {environment.backend} on {environment.device}",
        f"{environment.date}, commit {environment.commit}; {versions}.",
        how,
        _summary(results),
        "## Cases",
        _LEGEND,
        _case_table(results.cases),
        *_section("Batch-invariant decode against a free partition", _free_table(results)),
        *_section("Batch-invariant prefill", _invariant_table(results)),
        *_section("The step's plan", _plan_table(results)),
        "## Memory",
        _memory_table(results),
        *_section("Not measured", _reasons(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _summary(results: BenchResults) -> str:
    checks = [check for result in results.cases for check in checks_of(result)]
    checks += [free_partition_check(r) for r in results.cases if r.case.compare_free_partition]
    checks += [scratch_check(results), allocation_check(results)]
    counts = Counter(check.verdict for check in checks)
    return "Targets: " + ", ".join(f"{counts[v]} {v.value}" for v in Verdict) + "."


def _time(contender: Contender | None) -> str:
    if contender is None:
        return ""
    if contender.time_us is not None:
        return f"{contender.time_us:.1f}"
    short = {Status.UNSUPPORTED: "-", Status.UNAVAILABLE: "n/a"}
    return short.get(contender.status, contender.status.value)


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f} %"


def _rate(result: CaseResult, contender: Contender | None) -> str:
    if contender is None or contender.time_us is None:
        return ""
    return f"{result.case.rate(contender.time_us):.0f} {result.case.unit}"


def _ratio(ours: Contender, other: Contender | None) -> str:
    if other is None or other.time_us is None or ours.time_us is None:
        return ""
    return f"{ours.time_us / other.time_us:.3f}"


def _error(contender: Contender) -> str:
    return "" if contender.error is None else f"{contender.error:.1e}"


def _case_table(cases: Sequence[CaseResult]) -> str:
    header = ["case", "what", "ours", "rate", "spread", "error", *PEERS]
    header += ["best peer", "ours / best", "target", "verdict"]
    rows = []
    for result in cases:
        checks, best = checks_of(result), result.best_peer
        verdict = verdict_of(checks)
        rows.append(
            [
                result.case.name,
                result.case.what,
                f"**{_time(result.ours)}**",
                _rate(result, result.ours),
                _percent(result.ours.spread),
                _error(result.ours),
                *(_time(result.peer(name)) for name in PEERS),
                "" if best is None else f"{best.name} {_rate(result, best)}",
                _ratio(result.ours, best),
                ", ".join(check.text for check in checks),
                "" if verdict is None else _verdict_text(verdict, checks),
            ]
        )
    return _table(header, rows)


def _verdict_text(verdict: Verdict, checks: Sequence[Check]) -> str:
    """The verdict; which bounds it is about where only some are."""
    about = [check.text for check in checks if check.verdict is verdict]
    if verdict is Verdict.MET or len(about) == len(checks):
        return verdict.value
    return f"{verdict.value}: {', '.join(about)}"


def _free_table(results: BenchResults) -> str:
    header = ["case", "invariant", "free", "invariant / free", "target", "verdict"]
    rows = []
    for result in results.cases:
        if result.case.compare_free_partition:
            check = free_partition_check(result)
            ours, free = result.ours, result.free_partition
            times = [_time(ours), _time(free) or "n/a", _ratio(ours, free)]
            rows.append([result.case.name, *times, check.text, check.verdict.value])
    return _table(header, rows) if rows else ""


def _invariant_table(results: BenchResults) -> str:
    header = ["case", "default", "rate", "invariant", "rate", "invariant / default"]
    rows = []
    for result in results.cases:
        if result.case.compare_batch_invariant:
            ours, other = result.ours, result.batch_invariant
            ratio = "" if other is None else _ratio(other, ours)
            cells = [_time(ours), _rate(result, ours), _time(other) or "n/a", _rate(result, other)]
            rows.append([result.case.name, *cells, ratio])
    return _table(header, rows) if rows else ""


def _plan_table(results: BenchResults) -> str:
    header = ["case", "kernels of build, us", "build on the host, us", "forward, us"]
    rows = []
    for result in results.cases:
        if result.plan is not None:
            gpu = "n/a" if result.plan.gpu_us is None else f"{result.plan.gpu_us:.1f}"
            row = [result.case.name, gpu, f"{result.plan.host_us:.1f}", _time(result.ours)]
            rows.append(row)
    return _table(header, rows) if rows else ""


def _memory_table(results: BenchResults) -> str:
    scratch, allocation = scratch_check(results), allocation_check(results)
    size, counts = results.scratch_bytes, [result.allocations for result in results.cases]
    known = [count for count in counts if count is not None]
    rows = [
        [
            "scratch, 256 sequences, 32/8 heads, head size 128",
            "n/a" if size is None else f"{size / (1 << 20):.1f} MiB",
            scratch.text,
            scratch.verdict.value,
        ],
        [
            f"allocations in ten forwards, most of {len(known)} cases",
            str(max(known)) if known else "n/a",
            allocation.text,
            allocation.verdict.value,
        ],
    ]
    return _table(["what", "measured", "target", "verdict"], rows)


def _reasons(results: BenchResults) -> str:
    """Each reason once, with the cases it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results.cases:
        extra = (result.free_partition, result.batch_invariant)
        for contender in (result.ours, *result.peers, *(item for item in extra if item)):
            if contender.reason:
                what = f"{contender.name}, {contender.status.value}"
                found.setdefault((what, contender.reason), []).append(result.case.name)
        if result.plan is not None and result.plan.reason:
            found.setdefault(("plan", result.plan.reason), []).append(result.case.name)
    if results.scratch_reason:
        found[("scratch", results.scratch_reason)] = []
    lines = []
    for (what, reason), names in found.items():
        lines.append(f"- {what}: {reason}" + (f" ({', '.join(names)})" if names else ""))
    return "\n".join(lines)
