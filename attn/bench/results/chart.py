"""A picture of committed benchmark tables, from their Markdown alone.

    python -m attn.bench.results.chart docs/benchmarks/h200_hopper.md --out docs/images/kernels.svg

Each table becomes one panel: a kernel table our time beside the fastest other kernel's, per kind of
work; an engine table tokens per second beside vLLM's own backends. The module measures nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attn.bench.command import USER_ERRORS, Parser, check_writable, usage_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS: Final = "#2a62c9"
OTHERS: Final = ("#b9c0cb", "#dde1e7")
KINDS: Final = (
    "decode",
    "decode, fp8 cache",
    "decode, window",
    "verify of drafts",
    "prefill",
    "prefill, fp8 cache",
    "prefill, window",
    "mixed batches",
)
"""Kinds of work, in the order in which a chart shows them."""


@dataclass(frozen=True)
class Case:
    """One line of a kernel table that has a time of ours and of another kernel."""

    name: str
    what: str
    kind: str
    """One of :data:`KINDS`."""
    ours: float
    """Microseconds of ours by which the line is judged: per layer, or in older tables with or
    without the step's plan."""
    alone: float
    """Microseconds of our ``forward`` alone."""
    best: float
    """Microseconds of the fastest other kernel, on the same terms."""
    peer: str
    """Name of the fastest other kernel."""
    ratio: float
    """``ours / best``, as the table has it."""
    spread: float
    """The larger spread of the rounds' medians of the two kernels; ours in tables that have no
    other."""

    @property
    def verdict(self) -> str:
        """``ahead`` or ``behind`` where the ratio differs from 1 by more than the spread, else
        ``level``.
        """
        if abs(1 - self.ratio) <= self.spread:
            return "level"
        return "ahead" if self.ratio < 1 else "behind"


@dataclass(frozen=True)
class Workload:
    """Tokens per second of one workload of an engine table, by backend."""

    what: str
    tokens: dict[str, float]
    spread: float
    """Relative spread of ours."""


def rows_under(text: str, first_column: str) -> list[dict[str, str]]:
    """The rows of the Markdown table whose first column has that heading, by column.

    Args:
        text: a page in Markdown.
        first_column: heading of the table's first column.

    Raises:
        ValueError: the page has no such table.
    """
    start = re.search(rf"^\| {re.escape(first_column)} \|", text, re.MULTILINE)
    if start is None:
        raise ValueError(f"table must have a first column {first_column!r}, and this page has none")
    lines = text[start.start() :].split("\n\n")[0].splitlines()
    cells = [[cell.strip(" *") for cell in line.strip().strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def kind_of(what: str) -> str:
    """Kind of work of a case, from the words of the table.

    Args:
        what: such as ``decode 32/8/128, 1 x 8192``.
    """
    first = what.split()[0]
    if first == "mixed":
        return "mixed batches"
    if first == "verify":
        return "verify of drafts"
    if "fp8" in what:
        return f"{first}, fp8 cache"
    return f"{first}, window" if "window" in what else first


def cases_of(text: str) -> list[Case]:
    """The cases of a kernel table that were measured beside another kernel.

    Args:
        text: the page with the table.
    """
    found = []
    for row in rows_under(text, "case"):
        if not row.get("ours / best"):
            continue
        # Older tables have two times in a cell, and judge by one or the other.
        is_planned = "plans included" in row["target"]
        spreads = [row[name] for name in ("spread", "its spread") if row.get(name)]
        # Some tables have the peer's rate behind its name.
        peer = row["best peer"].split()[0]
        found.append(
            Case(
                name=row["case"],
                what=row["what"],
                kind=kind_of(row["what"]),
                ours=_time(row["ours"], is_planned),
                alone=_time(row.get("alone") or row["ours"], is_planned=False),
                best=_time(row[peer], is_planned),
                peer=peer,
                ratio=float(row["ours / best"]),
                spread=max(float(text.split()[0]) for text in spreads) / 100,
            )
        )
    return found


def _time(cell: str, is_planned: bool) -> float:
    """Microseconds of ``20.5 (22.1)``: the second number where plans count."""
    alone, _, planned = cell.replace("**", "").partition(" (")
    return float(planned.rstrip(")") if is_planned and planned else alone)


def mean_ratio(cases: Sequence[Case]) -> float:
    """Geometric mean of ``ours / best``."""
    return exp(sum(log(case.ratio) for case in cases) / len(cases))


def workloads_of(text: str) -> list[Workload]:
    """The workloads of an engine table.

    Args:
        text: the page with the table.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows_under(text, "workload"):
        found.setdefault(row["workload"], {})[row["backend"]] = row
    return [
        Workload(
            what=what,
            tokens={name: float(row["tokens/s"]) for name, row in rows.items()},
            spread=float(rows["CUSTOM"]["spread"].split()[0]) / 100,
        )
        for what, rows in found.items()
    ]


def chart(pages: Sequence[str]) -> Figure:
    """A figure with one panel for each page.

    Args:
        pages: texts of result tables.

    Raises:
        ValueError: a page has neither a kernel table nor an engine table.
    """
    from matplotlib.figure import Figure

    heights = [_height(page) for page in pages]
    figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
    panels: Any = figure.subplots(len(pages), 1, height_ratios=heights, squeeze=False)
    for page, axes in zip(pages, panels[:, 0], strict=True):
        (_draw_workloads if _is_engine(page) else _draw_cases)(axes, page)
    return figure


def _is_engine(page: str) -> bool:
    return re.search(r"^\| workload \|", page, re.MULTILINE) is not None


def _height(page: str) -> float:
    lines = len(workloads_of(page)) * 1.4 if _is_engine(page) else len(_by_kind(page))
    if not lines:
        raise ValueError("no case has a time beside another kernel's")
    return 1.1 + 0.42 * lines


def _by_kind(page: str) -> dict[str, list[Case]]:
    cases = cases_of(page)
    found = {kind: [case for case in cases if case.kind == kind] for kind in KINDS}
    return {kind: cases for kind, cases in found.items() if cases}


def _draw_cases(axes: Any, page: str) -> None:
    kinds = _by_kind(page)
    for place, cases in enumerate(kinds.values()):
        mean = mean_ratio(cases)
        axes.barh(place + 0.2, 1, 0.36, color=OTHERS[0], label="" if place else "fastest other")
        axes.barh(place - 0.2, mean, 0.36, color=OURS, label="" if place else "attn-backends")
        axes.plot(
            [case.ratio for case in cases],
            [place - 0.2] * len(cases),
            "o",
            color="white",
            markeredgecolor="#10295c",
            markersize=4,
            label="" if place else "one case",
        )
        axes.text(1.06, place - 0.2, f"{mean:.2f}", va="center", color=OURS, weight="bold")
    axes.set_yticks(range(len(kinds)), [f"{kind} ({len(kinds[kind])})" for kind in kinds])
    axes.set_xlim(0, 1.2)
    _finish(axes, f"Time on {_device(page)}, fastest other kernel = 1 (lower is better)", columns=3)


def _draw_workloads(axes: Any, page: str) -> None:
    workloads = workloads_of(page)
    names = list(workloads[0].tokens)
    colours = dict(zip(names, (OURS, *OTHERS), strict=False))
    for place, workload in enumerate(workloads):
        for index, name in enumerate(names):
            relative = workload.tokens[name] / workload.tokens["FLASH_ATTN"]
            at = place + (index - 1) * 0.28
            label = "" if place else {"CUSTOM": "attn-backends"}.get(name, f"vLLM's {name}")
            axes.barh(at, relative, 0.26, color=colours[name], label=label)
            count = f"{workload.tokens[name]:,.0f}"
            axes.text(relative + 0.01, at, count, va="center", fontsize=8)
    shown = [workload.what.split(":")[0] for workload in workloads]
    axes.set_yticks(range(len(workloads)), shown)
    axes.set_xlim(0, 1.2)
    _finish(axes, "Tokens/s in vLLM, FLASH_ATTN = 1 (higher is better)", columns=3)


def _device(page: str) -> str:
    """``NVIDIA H200`` of the page's heading."""
    found = re.match(r"# .*? on ([^,\n]+)", page)
    return found[1] if found else "this device"


def _finish(axes: Any, title: str, columns: int) -> None:
    axes.invert_yaxis()
    axes.axvline(1, color="#555b66", linewidth=0.8)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, length=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.06), ncols=columns, frameon=False)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same numbers.

    Args:
        figure: from :func:`chart`.
        path: where it goes.
    """
    import matplotlib

    settings: Any = {"svg.hashsalt": "attn", "svg.fonttype": "none", "font.family": "sans-serif"}
    with matplotlib.rc_context(settings):
        figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
    # Matplotlib leaves blanks at the ends of lines.
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw tables; the exit code is 2 for bad input.

    Args:
        argv: the arguments; None takes the process's.
    """
    parser = Parser(
        prog="python -m attn.bench.results.chart", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("tables", nargs="+", type=Path, help="results in Markdown, as committed")
    parser.add_argument("--out", required=True, type=Path, help="the picture, in SVG")
    asked: argparse.Namespace = parser.parse_args(argv)
    try:
        check_writable("--out", asked.out)
        pages = []
        for table in asked.tables:
            pages.append(table.read_text(encoding="utf-8"))
            try:
                _height(pages[-1])
            except (ValueError, KeyError) as error:
                raise ValueError(f"{table} is no table that can be drawn: {error}") from None
        write(chart(pages), asked.out)
    except USER_ERRORS as error:
        return usage_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
