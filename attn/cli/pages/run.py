"""The page of a replay: timeline, errors over steps, tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from attn.bench.results.moves import Move
from attn.bench.results.pages.bench import moves_section
from attn.bench.results.pages.charts import draw_svg, put_legend
from attn.bench.results.pages.frame import Cell, Chart, Page, Section, Table, Tone, pairs
from attn.cli.report import (
    Columns,
    RunReport,
    StepRecord,
    draw_blocks,
    draw_errors,
    draw_times,
    draw_tokens,
    failure_lines,
    verdict,
)

_SLOWEST: Final = 8
"""Steps of the table of slow steps."""
_MOST_STEPS: Final = 500
"""Most steps of the table of all steps; the JSON has every one."""


def run_page(report: RunReport, moves: Sequence[Move] = (), against: str = "") -> Page:
    """The page of a replay.

    Args:
        report: the replay.
        moves: the comparison with an older report; empty without one.
        against: name of that file; empty without one.
    """
    totals = report.totals
    tone = Tone.GOOD if report.passed else Tone.BAD
    return Page(
        title=f"Replay of {report.model} on {report.device}",
        verdict=Cell(verdict(report), tone),
        notes=failure_lines(report),
        command=report.command,
        facts=[
            ("tokens/s of attention", f"{totals.tokens_per_second:,.0f}"),
            ("tokens", f"{totals.tokens:,}"),
            ("steps", f"{totals.steps:,}"),
            ("requests finished", f"{report.finished_requests:,} of {report.num_requests:,}"),
            ("median step", _ms(totals.step_ms.p50)),
            ("99th percentile", _ms(totals.step_ms.p99)),
            ("worst error of its budget", f"{totals.worst_error_ratio:.3g}"),
            ("rows checked", f"{totals.checked_rows:,}"),
        ],
        sections=[
            *moves_section(moves, against),
            *_timeline(report),
            _groups(report),
            _times(report),
            _settings(report),
            _steps(report.steps),
        ],
        versions=report.versions,
    )


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.{0 if milliseconds >= 100 else 3}f} ms"


def _timeline(report: RunReport) -> list[Section]:
    if not report.steps:
        return []
    columns = Columns(report.steps)
    parts: dict[str, tuple[str, Callable[[Any], None]]] = {
        "Tokens of each step, on a square-root scale": (
            "tokens",
            lambda panel: draw_tokens(panel, columns),
        ),
        "Time of each step": ("milliseconds", lambda panel: draw_times(panel, columns)),
        "KV cache blocks in use": (
            "blocks",
            lambda panel: draw_blocks(panel, columns, report.layer_groups),
        ),
        "Worst error of each step over its budget": (
            "error / budget",
            lambda panel: draw_errors(panel, columns),
        ),
    }
    charts = []
    for caption, (unit, paint) in parts.items():

        def draw(panel: Any, unit: str = unit, paint: Callable[[Any], None] = paint) -> None:
            paint(panel)
            panel.set_ylabel(unit)
            panel.set_xlabel("step")
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.set_xlim(columns.edges[0], columns.edges[-1])
            panel.set_ylim(bottom=0)
            panel.grid(visible=True, axis="y", alpha=0.3)
            put_legend(panel)

        charts.append(Chart(draw_svg(draw), caption))
    return [Section("Timeline", charts=charts)]


def _groups(report: RunReport) -> Section:
    columns = ("group", "backend", "KV cache layout", "heads", "layers", "MiB", "blocks", "peak")
    rows = [
        (
            group.name,
            group.backend,
            group.kv_layout,
            f"{group.num_heads}/{group.num_kv_heads}",
            str(group.num_layers),
            f"{group.kv_bytes / 2**20:,.1f}",
            f"{group.num_blocks:,}",
            f"{peak:,}",
        )
        for group, peak in zip(report.layer_groups, report.totals.peak_blocks_in_use, strict=True)
    ]
    passed_over = [
        (group.name, *reason.partition(": ")[::2])
        for group in report.layer_groups
        for reason in group.passed_over
    ]
    tables = [Table(columns, rows, numbers=5, sentences=2)]
    if passed_over:
        heads = ("group", "backend", "why it was passed over")
        tables.append(
            Table(heads, passed_over, sentences=2, folded="Backends that were passed over")
        )
    return Section("Layers", tables=tables)


def _times(report: RunReport) -> Section:
    totals = report.totals
    rows = [
        (name, f"{part.p50:.3f}", f"{part.p99:.3f}")
        for name, part in (
            ("build", totals.build_ms),
            ("forward", totals.forward_ms),
            ("step", totals.step_ms),
        )
    ]
    slow = sorted(report.steps, key=lambda record: -record.seconds)[:_SLOWEST]
    tables = [Table(("part", "p50, ms", "p99, ms"), rows, numbers=2)]
    if slow:
        tables.append(_step_table(slow, f"The {len(slow)} slowest steps"))
    return Section("Time of a step", tables=tables)


def _settings(report: RunReport) -> Section:
    given = {name: value for name, value in report.settings.items() if value is not None}
    items = {**given, "seed": report.seed, "clipped requests": report.clipped_requests}
    return Section("Settings", tables=[pairs("setting", items.items())])


def _steps(steps: Sequence[StepRecord]) -> Section:
    shown = steps[:_MOST_STEPS]
    left = len(steps) - len(shown)
    note = f"{left:,} further steps are in report.json alone." if left else ""
    return Section(
        "Steps",
        notes=[note] if note else [],
        tables=[_step_table(shown, f"{len(shown):,} steps")] if shown else [],
    )


def _step_table(steps: Sequence[StepRecord], folded: str) -> Table:
    columns = ["step", "checked row", "decodes", "prefills", "tokens", "build, ms", "forward, ms"]
    columns += ["error / budget", "preemptions"]
    rows: list[list[Cell | str]] = [
        [
            str(record.step),
            Cell(str(record.worst_place or ""), Tone.BAD if record.failed else Tone.FAINT),
            str(record.num_decodes),
            str(record.num_prefills),
            f"{record.tokens:,}",
            f"{1000 * record.build_seconds:.3f}",
            f"{1000 * record.forward_seconds:.3f}",
            Cell(f"{record.worst_error_ratio:.3g}", Tone.BAD if record.failed else Tone.PLAIN),
            str(record.num_preemptions),
        ]
        for record in steps
    ]
    return Table(columns, rows, numbers=7, sentences=1, folded=folded)
