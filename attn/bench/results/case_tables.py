"""Markdown tables of a kernel benchmark's cases: our kernel and its peers, judged per layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from attn.bench.results.results import (
    BenchResults,
    CaseResult,
    Check,
    Contender,
    Standing,
    Status,
    Verdict,
    checks_of,
    verdict_of,
)

UNMEASURED: Final = {Status.UNSUPPORTED: "-", Status.UNAVAILABLE: "n/a"}
"""Cells of kernels without a time; every other status is its own cell."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def microseconds(time: float | None) -> str:
    """A time with one decimal; empty where there is none."""
    return "" if time is None else f"{time:.1f}"


def percent(part: float | None) -> str:
    """A part as a percentage; empty where there is none."""
    return "" if part is None else f"{100 * part:.1f} %"


def scientific(error: float | None) -> str:
    """An error; empty where there is none."""
    return "" if error is None else f"{error:.1e}"


def time_text(contender: Contender | None, time: float | None) -> str:
    """A time of a kernel, or what its status says in place of one."""
    if contender is None:
        return ""
    if time is not None or contender.status is Status.MEASURED:
        return microseconds(time)
    return UNMEASURED.get(contender.status, contender.status.value)


def rate_text(result: CaseResult, contender: Contender | None) -> str:
    """Rate of a kernel's ``forward`` alone, in the case's unit."""
    if contender is None or contender.time_us is None:
        return ""
    return f"{result.case.rate(contender.time_us):.0f} {result.case.unit}"


def ratio_text(ratio: float | None) -> str:
    """A ratio; empty where there is none."""
    return "" if ratio is None else f"{ratio:.3f}"


def verdict_text(verdict: Verdict | None, checks: Sequence[Check]) -> str:
    """The verdict, with the bounds that it concerns where it does not concern all."""
    if verdict is None:
        return ""
    about = [check.text for check in checks if check.verdict is verdict]
    if verdict is Verdict.MET or len(about) == len(checks):
        return verdict.value
    return f"{verdict.value}: {', '.join(about)}"


def standings_line(results: BenchResults) -> str:
    """How many cases are ahead of, level with and behind the fastest peer; empty without peers."""
    lines = []
    for words, in_graph in (("Per layer", False), ("In a captured graph, per layer", True)):
        counts = Counter(
            result.standing(in_graph)
            for result in results.cases
            if result.peers and (not in_graph or result.case.target.max_graph_ratio_to_best)
        )
        if counts:
            said = ", ".join(f"{counts[one]} {one.value}" for one in Standing)
            lines.append(f"{words}, beside the fastest peer: {said}.")
    return " ".join(lines)


def case_table(cases: Sequence[CaseResult], peers: Sequence[str]) -> str:
    """A row for each case: our parts of a step, the judged times of all, and the verdict."""
    header = ["case", "what", "ours", "alone", "plan", "planned", "host", "rate", "spread", "error"]
    header += [*peers, "best peer", "its spread", "ours / best", "standing", "target", "verdict"]
    rows = []
    for result in cases:
        ours, best, checks = result.ours, result.best(), checks_of(result, cases)
        rows.append(
            [
                result.case.name,
                result.case.what,
                f"**{time_text(ours, result.cost(ours))}**",
                microseconds(ours.time_us),
                microseconds(ours.plan_us),
                microseconds(ours.planned_us),
                microseconds(ours.host_us),
                rate_text(result, ours),
                percent(ours.spread),
                scientific(ours.error),
                *(_judged(result, name) for name in peers),
                *_beside(result, best),
                ", ".join(check.text for check in checks),
                verdict_text(verdict_of(checks), checks),
            ]
        )
    return table(header, rows)


def graph_table(cases: Sequence[CaseResult], peers: Sequence[str]) -> str:
    """A row for each case whose target judges times in a captured graph; empty without any."""
    header = ["case", "ours", "spread", *peers, "best peer", "its spread", "ours / best"]
    header.append("standing")
    rows = []
    for result in cases:
        if result.case.target.max_graph_ratio_to_best is None:
            continue
        ours = result.ours
        rows.append(
            [
                result.case.name,
                f"**{time_text(ours, result.cost(ours, in_graph=True)) or 'n/a'}**",
                percent(ours.graph_spread),
                *(_judged(result, name, in_graph=True) for name in peers),
                *_beside(result, result.best(in_graph=True), in_graph=True),
            ]
        )
    return table(header, rows) if rows else ""


def kernel_table(cases: Sequence[CaseResult]) -> str:
    """A row for each kernel that was measured on each case, with every part of its time."""
    header = ["case", "kernel", "per layer", "alone", "spread", "plan", "planned", "graph"]
    header += ["spread in the graph", "host", "plan on the host", "launches", "in the graph"]
    header.append("error")
    rows = []
    for result in cases:
        for one in (result.ours, *result.peers):
            if one.time_us is None:
                continue
            rows.append(
                [
                    result.case.name,
                    one.name,
                    microseconds(result.cost(one)),
                    microseconds(one.time_us),
                    percent(one.spread),
                    microseconds(one.plan_us),
                    microseconds(one.planned_us),
                    microseconds(one.graph_us),
                    percent(one.graph_spread),
                    microseconds(one.host_us),
                    microseconds(one.plan_host_us),
                    "" if one.launches is None else str(one.launches),
                    "" if one.graph_launches is None else str(one.graph_launches),
                    scientific(one.error),
                ]
            )
    return table(header, rows) if rows else ""


def _judged(result: CaseResult, name: str, in_graph: bool = False) -> str:
    """The judged time of a peer."""
    peer = result.peer(name)
    text = time_text(peer, result.cost(peer, in_graph))
    return "n/a" if in_graph and peer is not None and not text else text


def _beside(result: CaseResult, best: Contender | None, in_graph: bool = False) -> list[str]:
    """Cells of the fastest peer: its name and spread, the ratio, our standing."""
    standing = result.standing(in_graph) if result.peers else None
    return [
        "" if best is None else best.name,
        "" if best is None else percent(best.spread_of(in_graph)),
        ratio_text(result.ratio(best, in_graph)),
        "" if standing is None else standing.value,
    ]
