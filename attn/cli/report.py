"""Reports of a replay: a record per step, totals, a JSON file, a timeline and a summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import numpy as np
from pydantic import Field, computed_field, model_validator
from rich.table import Table
from rich.text import Text

from attn.bench.results.origin import SCHEMA_VERSION
from attn.errors import MissingDependencyError
from specs.base import NonNegativeInt, PositiveInt, Spec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    _Values = NDArray[np.float64]

NonNegativeFloat = Annotated[float, Field(ge=0)]
Setting = bool | int | float | str | None
"""Value of one setting in a report."""

_MAX_COLUMNS: Final = 600
"""Most columns of a timeline; where there are more steps, a column shows several."""
# Okabe and Ito's palette, which colour-blind readers can tell apart.
_DECODE, _PREFILL, _BUILD, _FORWARD, _ALERT = "#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#B00020"
_GROUPS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")


class Place(Spec):
    """Where a checked row is."""

    layer: NonNegativeInt
    """Number of the layer among the layers that the replay ran."""
    group: str
    """Name of the layer's group, as ``LayerGroupReport.name``."""
    request: NonNegativeInt
    """Number of the request in the trace."""
    position: NonNegativeInt
    """Position of the token in its request."""

    def __str__(self) -> str:
        return (
            f"layer {self.layer} ({self.group}), request {self.request}, position {self.position}"
        )


class StepRecord(Spec):
    """One step of a replay."""

    step: NonNegativeInt
    num_decodes: NonNegativeInt
    num_prefills: NonNegativeInt
    decode_tokens: NonNegativeInt
    prefill_tokens: NonNegativeInt
    build_seconds: NonNegativeFloat
    """Seconds of the metadata builders of all groups."""
    forward_seconds: NonNegativeFloat
    """Seconds of cache writes and attention of all layers that the replay ran."""
    blocks_in_use: tuple[NonNegativeInt, ...]
    """Blocks owned in each KV cache group, in the order of ``RunReport.layer_groups``."""
    worst_error: float = 0.0
    """Largest error of a checked row; 0 when none was checked, NaN when a result was NaN."""
    worst_error_ratio: float = 0.0
    """Largest error of a checked row over its budget; above 1 fails."""
    worst_place: Place | None = None
    """Row of ``worst_error_ratio``; None when no row was checked."""
    num_checked_rows: NonNegativeInt = 0
    num_preemptions: NonNegativeInt = 0

    @property
    def failed(self) -> bool:
        """True where a checked row was over its budget, or not a number."""
        return self.num_checked_rows > 0 and not self.worst_error_ratio <= 1.0

    @property
    def tokens(self) -> int:
        """Tokens computed in the step."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def seconds(self) -> float:
        """Seconds of build and forward, without scheduling and checks."""
        return self.build_seconds + self.forward_seconds


class LayerGroupReport(Spec):
    """Layers that share a backend, a KV cache layout and block tables."""

    name: str
    backend: str
    passed_over: tuple[str, ...] = ()
    """Why each better-ranked backend was not chosen."""
    num_layers: PositiveInt = 1
    """Layers of the group that the replay ran."""
    num_heads: PositiveInt = 1
    """Query heads of the rank that was run."""
    num_kv_heads: PositiveInt = 1
    """KV heads of the rank that was run."""
    kv_layout: str
    """The cache layout in words."""
    kv_bytes: NonNegativeInt
    """Bytes of the KV cache of all layers of the group."""
    num_blocks: PositiveInt
    """Blocks that requests can own."""


class Percentiles(Spec):
    """Median and tail of a step's seconds."""

    p50: float
    p99: float


class RunTotals(Spec):
    """Totals of a run, computed from its steps."""

    steps: int
    tokens: int
    decode_tokens: int
    prefill_tokens: int
    seconds: float
    """Seconds of build and forward of all steps."""
    tokens_per_second: float
    """Tokens over ``seconds``: the speed of attention alone, without scheduling and checks."""
    step_ms: Percentiles
    build_ms: Percentiles
    forward_ms: Percentiles
    worst_error: float
    worst_error_ratio: float
    worst_step: int | None
    """Step of ``worst_error_ratio``; None when no row was checked."""
    checked_rows: int
    preemptions: int
    peak_blocks_in_use: tuple[int, ...]
    passed: bool
    """True where at least one row was checked and every checked row was within its budget."""


class RunReport(Spec):
    """Report of a replay, complete or interrupted."""

    schema_version: NonNegativeInt = SCHEMA_VERSION
    command: str = ""
    """The command line that made the report; empty where it is unknown."""
    model: str
    device: str
    layer_groups: tuple[LayerGroupReport, ...]
    settings: dict[str, Setting]
    steps: tuple[StepRecord, ...] = ()
    num_requests: NonNegativeInt
    finished_requests: NonNegativeInt
    clipped_requests: NonNegativeInt = 0
    """Requests cut to the longest sequence of the model."""
    seed: int
    interrupted: bool = False
    versions: dict[str, str]
    """Versions of this library, Python, torch and the packages that backends use."""

    @model_validator(mode="before")
    @classmethod
    def _totals_are_never_read(cls, data: Any) -> Any:
        """Drop totals that are read from JSON, which are computed from the steps."""
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if name != "totals"}
        return data

    @model_validator(mode="after")
    def _steps_know_every_group(self) -> Self:
        """Every step counts the blocks of every group."""
        groups = len(self.layer_groups)
        for record in self.steps:
            if len(record.blocks_in_use) != groups:
                raise ValueError(
                    f"blocks_in_use of step {record.step} must have one entry per layer group "
                    f"({groups}), got {len(record.blocks_in_use)}"
                )
        return self

    @computed_field  # type: ignore[prop-decorator]
    @cached_property
    def totals(self) -> RunTotals:
        """Sums, percentiles and worst errors of the steps."""
        steps = self.steps
        tokens = sum(record.tokens for record in steps)
        seconds = sum(record.seconds for record in steps)
        checked = [record for record in steps if record.num_checked_rows]
        worst = max(checked, key=lambda r: _badness(r.worst_error_ratio), default=None)
        ratio = 0.0 if worst is None else worst.worst_error_ratio
        return RunTotals(
            steps=len(steps),
            tokens=tokens,
            decode_tokens=sum(record.decode_tokens for record in steps),
            prefill_tokens=sum(record.prefill_tokens for record in steps),
            seconds=seconds,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            step_ms=_percentiles(record.seconds for record in steps),
            build_ms=_percentiles(record.build_seconds for record in steps),
            forward_ms=_percentiles(record.forward_seconds for record in steps),
            worst_error=max((r.worst_error for r in checked), key=_badness, default=0.0),
            worst_error_ratio=ratio,
            worst_step=None if worst is None else worst.step,
            checked_rows=sum(record.num_checked_rows for record in steps),
            preemptions=sum(record.num_preemptions for record in steps),
            peak_blocks_in_use=tuple(
                max((record.blocks_in_use[group] for record in steps), default=0)
                for group in range(len(self.layer_groups))
            ),
            passed=worst is not None and ratio <= 1.0,
        )

    @property
    def passed(self) -> bool:
        """True where at least one row was checked and every checked row was within its budget."""
        return self.totals.passed

    @property
    def fault(self) -> str | None:
        """Name of the deliberate fault that the replay ran with; None without one."""
        fault = self.settings.get("corrupt")
        return None if fault is None else str(fault)


def write_report(report: RunReport, directory: Path) -> tuple[Path, Path]:
    """Write ``report.json`` and ``timeline.png``, making the directory when it is missing.

    Returns:
        The two paths. The JSON file is written first, even where matplotlib is missing and the
        timeline raises an error.
    """
    directory.mkdir(parents=True, exist_ok=True)
    json_path, png_path = directory / "report.json", directory / "timeline.png"
    json_path.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    _draw_timeline(report, png_path)
    return json_path, png_path


def print_summary(report: RunReport, console: Console) -> None:
    """Print what ran, on which backends, how fast and how exactly."""
    totals = report.totals
    run = _table("Run", "what", "value")
    rows = {
        "model": report.model,
        "device": report.device,
        "requests": f"{report.finished_requests:,} of {report.num_requests:,} finished, "
        f"{report.clipped_requests:,} clipped to the model's length",
        "steps": f"{totals.steps:,}",
        "tokens": f"{totals.prefill_tokens:,} prefill, {totals.decode_tokens:,} decode",
        "rate": f"{totals.tokens_per_second:,.0f} tokens/s of build and forward",
        "preemptions": f"{totals.preemptions:,}",
        "seed": str(report.seed),
    }
    for what, items in (("settings", report.settings), ("versions", report.versions)):
        rows[what] = ", ".join(f"{name}={value}" for name, value in items.items())
    for name, value in rows.items():
        run.add_row(Text(name), Text(value))
    console.print(run)
    console.print(_group_table(report))
    for group in report.layer_groups:
        for reason in group.passed_over:
            console.print(Text(f"  {group.name}: passed over {reason}"))
    times = _table("Time per step (ms)", "part", "p50", "p99", numbers=2)
    parts = {"build": totals.build_ms, "forward": totals.forward_ms, "step": totals.step_ms}
    for name, part in parts.items():
        times.add_row(name, f"{part.p50:.3f}", f"{part.p99:.3f}")
    console.print(times)
    console.print(Text(verdict(report), style="bold green" if totals.passed else "bold red"))
    for line in failure_lines(report):
        console.print(Text(line))


def failure_lines(report: RunReport) -> list[str]:
    """Where a replay failed, and which deliberate fault its checks saw; [] of one that passed."""
    failed = [record for record in report.steps if record.failed]
    if not failed:
        return []
    first, fault = failed[0], report.fault
    checked = sum(record.num_checked_rows > 0 for record in report.steps)
    lines = [
        f"first failure: step {first.step}, error {first.worst_error:.3g}, "
        f"{first.worst_error_ratio:.4g} of its budget"
        + (f", {first.worst_place}" if first.worst_place else "")
    ]
    if fault is not None:
        lines.insert(0, f"fault seen: {fault}, in {len(failed):,} of {checked:,} checked steps")
    return lines


def verdict(report: RunReport) -> str:
    """Whether a replay passed, in a sentence."""
    totals = report.totals
    prefix = "INTERRUPTED, " if report.interrupted else ""
    if not totals.checked_rows:
        return f"{prefix}NOT CHECKED: no row was compared with float64"
    return (
        f"{prefix}{'PASSED' if totals.passed else 'FAILED'}: worst error {totals.worst_error:.3g}, "
        f"{totals.worst_error_ratio:.4g} of its budget at step {totals.worst_step}, "
        f"{totals.checked_rows:,} rows checked against float64"
    )


def _table(title: str, *columns: str, numbers: int = 0) -> Table:
    """A left-aligned table whose last columns are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        number = index >= len(columns) - numbers
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _group_table(report: RunReport) -> Table:
    names = ("group", "backend", "KV cache layout", "heads", "layers", "MiB", "blocks", "peak")
    table = _table("Layer groups", *names, numbers=5)
    for group, peak in zip(report.layer_groups, report.totals.peak_blocks_in_use, strict=True):
        heads = f"{group.num_heads}/{group.num_kv_heads}"
        cells = (group.name, group.backend, group.kv_layout, heads, str(group.num_layers))
        sizes = (f"{group.kv_bytes / 2**20:,.1f}", f"{group.num_blocks:,}", f"{peak:,}")
        # Text instead of str, because rich takes the brackets of a shape for markup.
        table.add_row(*(Text(cell) for cell in (*cells, *sizes)))
    return table


def _badness(error: float) -> float:
    """Sort key that makes NaN the worst error; ``max`` alone may skip NaN, depending on order."""
    return math.inf if math.isnan(error) else error


def _percentiles(seconds: Iterable[float]) -> Percentiles:
    values = [1000 * value for value in seconds]
    if not values:
        return Percentiles(p50=0.0, p99=0.0)
    p50, p99 = np.percentile(values, [50, 99])
    return Percentiles(p50=float(p50), p99=float(p99))


class Columns:
    """Columns of a plot: a step each, or several steps where there are too many to see."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self.steps = steps
        count = min(len(steps), _MAX_COLUMNS)
        bounds = np.linspace(0, len(steps), count + 1).round().astype(np.int64)
        self._starts, self._widths = bounds[:-1], np.diff(bounds)
        self.edges = bounds + steps[0].step
        self.binned = len(steps) > count

    def mean(self, values: _Values) -> _Values:
        """Mean of each column; means of stacked values still add up."""
        means: _Values = np.add.reduceat(values, self._starts) / self._widths
        return means

    def peak(self, values: _Values) -> _Values:
        """Largest of each column."""
        peaks: _Values = np.maximum.reduceat(values, self._starts)
        return peaks


def _draw_timeline(report: RunReport, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError("matplotlib", "the timeline", extra="cli") from None
    # Figure instead of pyplot, which keeps figures alive and takes a backend from the environment.
    figure = Figure(figsize=(12, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    summary = f"{report.totals.tokens:,} tokens in {report.totals.steps:,} step(s)"
    title = f"Replay of {report.model} on {report.device}: {summary}\n{verdict(report)}"
    figure.suptitle(title, fontsize=11, parse_math=False)
    panels = figure.subplots(3, 1, sharex=True)
    names = ("Batch composition", "Step time", "KV cache blocks in use")
    units = ("tokens (square-root scale)", "milliseconds", "blocks")
    for panel, name, unit in zip(panels, names, units, strict=True):
        panel.set_title(name, loc="left", fontsize=10, fontweight="bold")
        panel.set_ylabel(unit)
        panel.grid(visible=True, axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels(panels)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    if report.steps:
        columns = Columns(report.steps)
        if columns.binned:
            per = math.ceil(len(report.steps) / _MAX_COLUMNS)
            panels[-1].set_xlabel(f"step (a column is the mean of up to {per} steps)")
        draw_tokens(panels[0], columns)
        draw_times(panels[1], columns)
        draw_blocks(panels[2], columns, report.layer_groups)
        panels[0].set_xlim(columns.edges[0], columns.edges[-1])
        for panel in panels:
            panel.set_ylim(bottom=0)
            panel.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0), frameon=False, fontsize=9)
    else:
        panels[0].text(0.5, 0.5, "no steps", ha="center", transform=panels[0].transAxes)
    figure.savefig(path)


_Area = tuple[str, str, "_Values"]
"""Label, colour and one value per step."""


def _draw_stack(panel: Any, columns: Columns, bottom: _Area, top: _Area) -> None:
    """Draw two filled areas, one on top of the other."""
    low, both = columns.mean(bottom[2]), columns.mean(bottom[2] + top[2])
    # stairs instead of stackplot, so that a single step is a column and not a point.
    panel.stairs(low, columns.edges, fill=True, color=bottom[1], label=bottom[0])
    panel.stairs(both, columns.edges, baseline=low, fill=True, color=top[1], label=top[0])
    if columns.binned:
        peak = columns.peak(bottom[2] + top[2])
        largest = {"label": "largest of a column", "color": "#D0D0D0", "zorder": 0.5}
        panel.stairs(peak, columns.edges, baseline=both, fill=True, **largest)


def draw_tokens(panel: Any, columns: Columns) -> None:
    """Draw the tokens of each step, decodes below prefills."""
    decode = np.array([float(record.decode_tokens) for record in columns.steps])
    prefill = np.array([float(record.prefill_tokens) for record in columns.steps])
    _draw_stack(panel, columns, ("decode", _DECODE, decode), ("prefill", _PREFILL, prefill))
    # On a linear scale a batch of decodes would be a hairline beside a chunk of a prompt.
    panel.set_yscale("function", functions=(lambda y: np.sqrt(np.maximum(y, 0)), np.square))


def draw_times(panel: Any, columns: Columns) -> None:
    """Draw the milliseconds of each step, build below forward."""
    build = np.array([1000 * record.build_seconds for record in columns.steps])
    forward = np.array([1000 * record.forward_seconds for record in columns.steps])
    _draw_stack(panel, columns, ("build", _BUILD, build), ("forward", _FORWARD, forward))
    times = build + forward
    slowest, usual = int(times.argmax()), np.sort(times)[int(0.98 * (len(times) - 1))]
    # A first step that compiles kernels would flatten the rest of the plot.
    if times[slowest] > 3 * usual > 0:
        panel.set_ylim(0, 1.5 * usual)
        step = columns.steps[slowest].step
        note = f"cut off: slowest step {step}, {times[slowest]:,.4g} ms"
        style = {"ha": "right", "va": "top", "color": _ALERT, "backgroundcolor": "white"}
        panel.text(0.995, 0.97, note, transform=panel.transAxes, **style)


def draw_errors(panel: Any, columns: Columns) -> None:
    """Draw the worst error of each step over its budget; the limit is a line at 1."""
    ratios = np.array([record.worst_error_ratio for record in columns.steps])
    ratios[~np.isfinite(ratios)] = np.nan
    checked = np.array([record.num_checked_rows > 0 for record in columns.steps])
    ratios[~checked] = np.nan
    # The smallest number instead of NaN, which every larger one of its column hides.
    peaks = columns.peak(np.nan_to_num(ratios, nan=0.0))
    panel.stairs(peaks, columns.edges, baseline=None, color=_FORWARD, lw=1.4, label="worst error")
    failed = [record.step + 0.5 for record in columns.steps if record.failed]
    if failed:
        style = {"marker": "x", "color": _ALERT, "s": 16, "clip_on": False, "zorder": 3}
        top = panel.get_xaxis_transform()
        panel.scatter(failed, [1.0] * len(failed), transform=top, label="failed", **style)
    panel.axhline(1.0, color=_ALERT, lw=0.9, ls="--", label="budget")


def draw_blocks(panel: Any, columns: Columns, groups: Sequence[LayerGroupReport]) -> None:
    """Draw the blocks in use of each group of layers, and the steps with preemptions."""
    for index, group in enumerate(groups):
        used = np.array([float(record.blocks_in_use[index]) for record in columns.steps])
        label = f"{group.name} (of {group.num_blocks:,})".replace("$", r"\$")
        color = _GROUPS[index % len(_GROUPS)]
        line = {"baseline": None, "color": color, "lw": 1.4, "label": label}
        panel.stairs(columns.peak(used), columns.edges, **line)
        # The limit is drawn only where it is near; far above, it would flatten the lines.
        if 2 * used.max() >= group.num_blocks:
            panel.axhline(group.num_blocks, color=color, lw=0.8, ls="--")
    preempted = [record.step + 0.5 for record in columns.steps if record.num_preemptions]
    if preempted:
        style = {"marker": "v", "color": _ALERT, "s": 14, "clip_on": False, "zorder": 3}
        top = panel.get_xaxis_transform()
        panel.scatter(preempted, [1.0] * len(preempted), transform=top, label="preemption", **style)
