"""The page of a kernel benchmark: ratios to peers, roofline and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from attn.bench.results.lines import Line
from attn.bench.results.moves import COLUMNS, Direction, Move
from attn.bench.results.pages.charts import ALERT, COLORS, draw_svg, put_legend
from attn.bench.results.pages.frame import Cell, Chart, Page, Section, Table, Tone, pairs
from attn.bench.results.pages.roofline import Roof, roof_of
from attn.bench.results.results import (
    BenchResults,
    CaseResult,
    Contender,
    Standing,
    Status,
    Verdict,
    checks_of,
    line_check,
    verdict_of,
)

_TONES = {
    Verdict.MET: Tone.GOOD,
    Verdict.LEVEL: Tone.FAINT,
    Verdict.NOT_MET: Tone.BAD,
    Verdict.NOT_MEASURED: Tone.FAINT,
}
_MOVE_TONES = {
    Direction.BETTER: Tone.GOOD,
    Direction.WORSE: Tone.BAD,
    Direction.LEVEL: Tone.FAINT,
    Direction.CHANGED: Tone.BAD,
}
_ROW_HEIGHT = 0.2
"""Inches of a case in the chart of ratios."""


def bench_page(
    results: BenchResults, moves: Sequence[Move] = (), against: str = "", age: str = ""
) -> Page:
    """The page of a run's results.

    Args:
        results: the results.
        moves: the comparison with an older file; empty without one.
        against: name of that file; empty without one.
        age: a sentence on what has changed since the results were measured; empty for none.
    """
    environment = results.environment
    sections = [*moves_section(moves, against)]
    if results.cases:
        sections += _case_sections(results)
    if results.lines:
        sections.append(_line_section(results.lines))
    sections.append(
        Section(
            "How it was measured",
            notes=[age] if age else [],
            tables=[
                pairs(
                    "setting",
                    [
                        ("date", environment.date),
                        ("commit", environment.commit),
                        ("table", environment.table.value),
                        ("backend", environment.backend),
                        ("rounds", environment.rounds),
                        ("most calls per round", environment.reps),
                    ],
                )
            ],
        )
    )
    missing = _missing(results)
    if missing:
        sections.append(
            Section("Not measured", tables=[Table(("kernel", "case", "why"), missing, sentences=2)])
        )
    return Page(
        title=f"{environment.backend} on {environment.device}: {environment.table.value} kernels",
        verdict=_verdict(results),
        command=environment.command,
        facts=_facts(results),
        sections=sections,
        versions=environment.versions
        or {name: getattr(environment, name) for name in ("torch", "triton", "vllm", "flashinfer")},
    )


def moves_section(moves: Sequence[Move], against: str) -> list[Section]:
    """The section of a comparison with an older file; [] without one."""
    if not against:
        return []
    counts = Counter(move.direction for move in moves)
    said = ", ".join(f"{counts[one]} {one.value}" for one in Direction)
    moved = [move for move in moves if move.direction is not Direction.LEVEL]
    level = [move for move in moves if move.direction is Direction.LEVEL]
    tables = []
    if moved:
        tables.append(_move_table(moved, ""))
    if level:
        tables.append(_move_table(level, f"{len(level)} within the noise"))
    note = f"{said}. A value moved where it changed by more than the noise of its measurements."
    return [Section(f"Against {against}", notes=[note], tables=tables)]


def _move_table(moves: Sequence[Move], folded: str) -> Table:
    rows: list[list[Cell | str]] = []
    for move in moves:
        what, moved, *numbers = move.cells
        rows.append([what, Cell(moved, _MOVE_TONES[move.direction]), *numbers])
    return Table(COLUMNS, rows, numbers=4, folded=folded)


def _checks(results: BenchResults) -> list[Verdict]:
    found = [
        check.verdict for result in results.cases for check in checks_of(result, results.cases)
    ]
    return found + [check.verdict for line in results.lines if (check := line_check(line))]


def _verdict(results: BenchResults) -> Cell:
    broken = [
        result.case.name
        for result in results.cases
        if result.ours.status in (Status.WRONG, Status.FAILED)
    ]
    broken += [line.case for line in results.lines if line.is_broken and not line.is_refused]
    if broken:
        return Cell(f"wrong or failed: {', '.join(dict.fromkeys(broken))}", Tone.BAD)
    counts = Counter(_checks(results))
    said = ", ".join(f"{counts[one]} {one.value}" for one in Verdict)
    return Cell(
        f"every kernel of ours that ran is within its error budget; targets: {said}", Tone.GOOD
    )


_STANDING_TONES = {
    Standing.AHEAD: Tone.GOOD,
    Standing.LEVEL: Tone.FAINT,
    Standing.BEHIND: Tone.BAD,
    Standing.NOT_MEASURED: Tone.FAINT,
}


def _standing(result: CaseResult) -> Cell:
    """Ahead of, behind or level with the fastest peer; alone without peers."""
    if result.best() is None:
        return Cell("alone" if result.ours.time_us is not None else "", Tone.FAINT)
    standing = result.standing()
    return Cell(standing.value, _STANDING_TONES[standing])


def _facts(results: BenchResults) -> list[tuple[str, str]]:
    environment = results.environment
    facts = [("device", environment.device), ("date", environment.date)]
    if results.cases:
        standings = Counter(_standing(result).text for result in results.cases)
        facts.append(("cases", str(len(results.cases))))
        facts += [
            (f"{name} the fastest peer", str(number))
            for name, number in (
                ("ahead of", standings["ahead"]),
                ("level with", standings["level"]),
                ("behind", standings["behind"]),
            )
            if number
        ]
    if results.lines:
        facts.append(("lines", str(len(results.lines))))
    return facts


def _case_sections(results: BenchResults) -> list[Section]:
    sections = []
    charts = _ratio_charts(results)
    if charts:
        notes = [
            "Our time per layer over another kernel's: forward and the layer's part of the plan. "
            "Left of 1 ours is faster. The band around 1 is the spread of our rounds: a point "
            "inside it is level."
        ]
        sections.append(Section("Ratios to peers", notes=notes, charts=charts))
    measured = [result for result in results.cases if result.ours.time_us is not None]
    if measured:
        roof = roof_of(results.environment.device)
        known = (
            f"The line is the data sheet's limit: {roof.bandwidth:g} TB/s and {roof.products:g} "
            "TFLOP/s in bf16."
            if roof
            else f"No limits are known of {results.environment.device}, so no line is drawn."
        )
        chart = draw_svg(lambda panel: _draw_roofline(panel, measured, roof), 3.4)
        sections.append(
            Section(
                "Roofline",
                notes=[f"Rate over arithmetic intensity. {known}"],
                charts=[Chart(chart, "TFLOP/s of each case by its operations per byte")],
            )
        )
    sections.append(Section("Cases", tables=[_case_table(results)]))
    return sections


def _ratio_charts(results: BenchResults) -> list[Chart]:
    shown = [result for result in results.cases if any(result.ratio(peer) for peer in result.peers)]
    if not shown:
        return []
    names = list(dict.fromkeys(peer.name for result in shown for peer in result.peers))

    def draw(panel: Any) -> None:
        for row, result in enumerate(reversed(shown)):
            spread = result.ours.spread or 0.0
            panel.barh(row, 2 * spread, left=1 - spread, height=0.8, color="#e3e7ee")
        for index, name in enumerate(names):
            points = [
                (ratio, row)
                for row, result in enumerate(reversed(shown))
                if (ratio := result.ratio(result.peer(name)))
            ]
            if points:
                style = {"color": COLORS[index % len(COLORS)], "s": 16, "label": name}
                panel.scatter(*zip(*points, strict=True), zorder=3, **style)
        panel.axvline(1.0, color="#16202c", lw=0.8)
        panel.set_xscale("log")
        _plain_ticks(panel)
        panel.set_yticks(range(len(shown)), [one.case.name for one in reversed(shown)], fontsize=7)
        panel.set_ylim(-0.6, len(shown) - 0.4)
        panel.set_xlabel("ours / peer")
        put_legend(panel)

    height = 1.0 + _ROW_HEIGHT * len(shown)
    return [Chart(draw_svg(draw, height), "Time of ours over the time of each peer, by case")]


def _plain_ticks(panel: Any) -> None:
    """Ticks such as 0.5, 1 and 2 on a logarithmic axis of ratios."""
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    low, high = panel.get_xlim()
    low, high = min(low, 0.8), max(high, 1.25)
    panel.set_xlim(low, high)
    steps = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
    panel.xaxis.set_major_locator(FixedLocator([step for step in steps if low <= step <= high]))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _draw_roofline(panel: Any, measured: Sequence[CaseResult], roof: Roof | None) -> None:
    at = [result.case.flops / result.case.nbytes for result in measured]
    for index, kind in enumerate(("ours", "fastest peer")):
        points = []
        for where, result in zip(at, measured, strict=True):
            contender = result.best() if index else result.ours
            time = None if contender is None else contender.time_us
            if time is not None:
                points.append((where, result.case.flops / time * 1e-6))
        if points:
            style = {"marker": "ox"[index], "color": COLORS[index], "s": 18, "label": kind}
            panel.scatter(*zip(*points, strict=True), zorder=3 - index, **style)
    panel.set_xscale("log")
    panel.set_yscale("log")
    if roof is not None:
        ridge = roof.products / roof.bandwidth
        low, high = min(min(at) / 2, ridge / 4), max(max(at) * 2, ridge * 4)
        xs = [low, ridge, high]
        panel.plot(xs, [roof.rate(x) for x in xs], color="#16202c", lw=1.0, label="data sheet")
    panel.set_xlabel("operations per byte")
    panel.set_ylabel("TFLOP/s")
    panel.grid(visible=True, alpha=0.25)
    put_legend(panel)


def _case_table(results: BenchResults) -> Table:
    peers = list(dict.fromkeys(peer.name for one in results.cases for peer in one.peers))
    columns = ["case", "what", "against the fastest", "target", "ours, us", "rate", "spread"]
    columns += ["error", "ours / fastest", *(f"{name}, us" for name in peers)]
    rows: list[list[Cell | str]] = []
    for result in results.cases:
        ours, best, time = result.ours, result.best(), result.ours.time_us
        verdict, ratio = verdict_of(checks_of(result, results.cases)), result.ratio(best)
        rows.append(
            [
                result.case.name,
                result.case.what,
                _standing(result),
                Cell("") if verdict is None else Cell(verdict.value, _TONES[verdict]),
                Cell(ours.status.value, Tone.BAD) if time is None else _time(result, ours),
                "" if time is None else f"{result.case.rate(time):.0f} {result.case.unit}",
                "" if ours.spread is None else f"{100 * ours.spread:.1f} %",
                "" if ours.error is None else f"{ours.error:.1e}",
                "" if ratio is None or best is None else f"{ratio:.3f} ({best.name})",
                *(_time(result, result.peer(name)) for name in peers),
            ]
        )
    return Table(columns, rows, numbers=5 + len(peers), sentences=1)


def _time(result: CaseResult, contender: Contender | None) -> str:
    """Time per layer, with that of ``forward`` alone in brackets."""
    if contender is None or contender.time_us is None:
        return "" if contender is None else contender.status.value
    return f"{result.cost(contender):.1f} ({contender.time_us:.1f})"


def _line_section(lines: Sequence[Line]) -> Section:
    columns = ["backend", "case", "time of", "beside", "target", "ours, us", "its, us"]
    columns += ["ours / its", "spread", "error"]
    rows: list[list[Cell | str]] = []
    ratios: list[tuple[str, float, float, bool]] = []
    for line in lines:
        check, ours, its = line_check(line), line.ours_us, line.other_us
        ratio = None if ours is None or its is None else ours / its
        if ratio is not None:
            name = f"{line.case} {line.how.value}"
            ratios.append((name, ratio, line.spread or 0.0, line.holds is False))
        rows.append(
            [
                line.backend,
                f"{line.case}: {line.what}",
                line.how.value,
                line.other,
                Cell("")
                if check is None
                else Cell(f"{check.text}: {check.verdict.value}", _TONES[check.verdict]),
                ("failed" if line.is_broken else "n/a") if ours is None else f"{ours:.1f}",
                "n/a" if its is None else f"{its:.1f}",
                "" if ratio is None else f"{ratio:.3f}",
                "" if line.spread is None else f"{100 * line.spread:.1f} %",
                "" if line.error is None else f"{line.error:.1e}",
            ]
        )

    def draw(panel: Any) -> None:
        for row, (_, ratio, spread, is_over) in enumerate(reversed(ratios)):
            panel.barh(row, 2 * spread, left=1 - spread, height=0.8, color="#e3e7ee")
            panel.scatter(ratio, row, s=16, zorder=3, color=ALERT if is_over else COLORS[0])
        panel.axvline(1.0, color="#16202c", lw=0.8)
        panel.set_xscale("log")
        _plain_ticks(panel)
        panel.set_yticks(range(len(ratios)), [one[0] for one in reversed(ratios)], fontsize=7)
        panel.set_ylim(-0.6, len(ratios) - 0.4)
        panel.set_xlabel("ours / the other call")

    charts = []
    if ratios:
        drawn = draw_svg(draw, 1.0 + _ROW_HEIGHT * len(ratios))
        charts.append(Chart(drawn, "Time of ours over the time of the other call, by line"))
    return Section(
        "Pairs of calls", charts=charts, tables=[Table(columns, rows, numbers=5, sentences=1)]
    )


def _missing(results: BenchResults) -> list[tuple[str, str, str]]:
    found = []
    for result in results.cases:
        extra = (result.free_partition, result.batch_invariant, result.plain)
        for contender in (result.ours, *result.peers, *(one for one in extra if one)):
            if contender.reason:
                what = f"{contender.name}, {contender.status.value}"
                found.append((what, result.case.name, contender.reason))
    found += [
        (line.backend, f"{line.case} {line.how.value}", line.reason)
        for line in results.lines
        if line.reason
    ]
    return found
