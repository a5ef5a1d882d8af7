"""The report: totals follow from the steps, NaN never passes, files and summary are written."""

import io
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from attn.cli.report import (
    LayerGroupReport,
    RunReport,
    StepRecord,
    print_summary,
    write_report,
)
from attn.errors import MissingDependencyError
from specs.base import SpecError

FULL = LayerGroupReport(
    name="full attention",
    backend="TORCH_REF",
    passed_over=("TRITON_ATTN: device cpu is not [sm80]",),
    num_layers=2,
    kv_layout="NHD [64, 8, 16, 256] bfloat16",
    kv_bytes=3 << 20,
    num_blocks=63,
)
WINDOW = LayerGroupReport(
    name="sliding_window 128", backend="TORCH_REF", kv_layout="NHD", kv_bytes=1 << 20, num_blocks=63
)


def step(index: int, **changes: object) -> StepRecord:
    values: dict[str, object] = {
        "step": index,
        "num_decodes": 3,
        "num_prefills": 1,
        "decode_tokens": 3,
        "prefill_tokens": 7,
        "build_seconds": 0.001,
        "forward_seconds": 0.004,
        "blocks_in_use": (10, 5),
        "worst_error": 1e-3,
        "worst_error_ratio": 0.5,
        "num_checked_rows": 4,
    }
    return StepRecord.model_validate(values | changes)


def report(*steps: StepRecord, **changes: object) -> RunReport:
    values: dict[str, object] = {
        "model": "llama",
        "device": "cpu",
        "layer_groups": (FULL, WINDOW),
        "settings": {"max_num_seqs": 8, "backend": None, "check": True, "scale": 1.0},
        "steps": steps,
        "num_requests": 5,
        "finished_requests": 4,
        "clipped_requests": 1,
        "seed": 0,
        "versions": {"torch": "2.13"},
    }
    return RunReport.model_validate(values | changes)


def summary_of(run: RunReport, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_summary(run, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def long_run(num_steps: int) -> RunReport:
    """Steps with spikes of prefill, a slow first step and preemptions."""
    source = random.Random(0)
    steps = [
        step(
            index,
            decode_tokens=20 + index % 7,
            prefill_tokens=2000 if index % 40 < 3 else 0,
            build_seconds=source.uniform(1e-4, 2e-4) + (index == 0),
            forward_seconds=source.uniform(1e-3, 2e-3),
            blocks_in_use=(40 + index % 20, 9),
            num_preemptions=int(index % 50 == 49),
        )
        for index in range(num_steps)
    ]
    return report(*steps)


def test_totals_are_sums_and_percentiles_of_the_steps() -> None:
    steps = [
        step(index, build_seconds=0.001 * index, forward_seconds=0.01, num_preemptions=index % 2)
        for index in range(101)
    ]
    totals = report(*steps).totals
    assert (totals.steps, totals.tokens) == (101, 1010)
    assert (totals.decode_tokens, totals.prefill_tokens) == (303, 707)
    assert totals.seconds == pytest.approx(5.05 + 1.01)
    assert totals.tokens_per_second == pytest.approx(1010 / 6.06)
    assert (totals.build_ms.p50, totals.build_ms.p99) == pytest.approx((50, 99))
    assert (totals.forward_ms.p50, totals.forward_ms.p99) == pytest.approx((10, 10))
    assert (totals.step_ms.p50, totals.step_ms.p99) == pytest.approx((60, 109))
    assert (totals.checked_rows, totals.preemptions) == (404, 50)


def test_the_worst_step_is_the_one_nearest_its_budget() -> None:
    run = report(
        step(0, worst_error=9e-3, worst_error_ratio=0.1, blocks_in_use=(1, 8)),
        step(1, worst_error=1e-3, worst_error_ratio=0.9, blocks_in_use=(7, 2)),
    )
    assert (run.totals.worst_error, run.totals.worst_error_ratio) == (9e-3, 0.9)
    assert run.totals.worst_step == 1
    assert run.totals.peak_blocks_in_use == (7, 8)
    assert run.passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, math.nextafter(1.0, 2.0)])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_row_over_its_budget_or_nan_fails_wherever_it_is(bad: float, position: int) -> None:
    ratios = [0.5, 0.6]
    ratios.insert(position, bad)
    run = report(*[step(i, worst_error_ratio=r, worst_error=r) for i, r in enumerate(ratios)])
    assert not run.passed
    assert run.totals.worst_step == position
    assert run.totals.worst_error_ratio == pytest.approx(bad, nan_ok=True)
    assert run.totals.worst_error == pytest.approx(bad, nan_ok=True)
    assert "FAILED" in summary_of(run)


def test_a_run_exactly_at_its_budget_passes() -> None:
    assert report(step(0, worst_error_ratio=1.0)).passed


@pytest.mark.parametrize("steps", [(), (step(0, num_checked_rows=0, worst_error_ratio=0.0),)])
def test_a_run_that_checked_nothing_does_not_pass(steps: tuple[StepRecord, ...]) -> None:
    run = report(*steps)
    assert not run.passed
    assert run.totals.worst_step is None
    assert "NOT CHECKED" in summary_of(run)


def test_a_run_without_steps_has_zero_totals() -> None:
    totals = report().totals
    assert (totals.tokens, totals.tokens_per_second, totals.step_ms.p99) == (0, 0.0, 0.0)
    assert totals.peak_blocks_in_use == (0, 0)


FINITE = st.floats(0, 1e6, allow_nan=False)
STEPS = st.lists(
    st.builds(
        step,
        st.integers(0, 100),
        num_decodes=st.integers(0, 9),
        prefill_tokens=st.integers(0, 9),
        build_seconds=FINITE,
        worst_error_ratio=FINITE | st.just(math.inf),
        blocks_in_use=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    ),
    max_size=5,
)


@given(STEPS, st.booleans())
@settings(deadline=None)
def test_a_report_read_back_from_json_is_the_same(
    steps: list[StepRecord], interrupted: bool
) -> None:
    run = report(*steps, interrupted=interrupted)
    again = RunReport.model_validate_json(run.model_dump_json())
    assert again == run
    assert again.totals == run.totals
    assert RunReport.model_validate(run.model_dump()) == run
    assert RunReport.model_validate(run) == run


def test_a_nan_survives_json() -> None:
    run = report(step(0, worst_error=math.nan, worst_error_ratio=math.nan))
    again = RunReport.model_validate_json(run.model_dump_json())
    assert math.isnan(again.steps[0].worst_error)
    assert not again.passed


def test_totals_in_json_are_not_believed() -> None:
    data = json.loads(report(step(0, worst_error_ratio=2.0)).model_dump_json())
    data["totals"]["passed"] = True
    assert not RunReport.model_validate(data).passed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"steps": (step(3, blocks_in_use=(1,)),)},
            r"step 3 must have one entry per.*\(2\), got 1",
        ),
        ({"speed": 3}, "Extra inputs are not permitted"),
        ({"clipped_requests": -1}, "greater than or equal to 0"),
        ({"settings": {"a": [1]}}, "settings.a"),
    ],
)
def test_a_report_with_a_wrong_field_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        report(**changes)


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(SpecError, match="forward_seconds"):
        step(0, forward_seconds=seconds)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 600, 601, 5000])
def test_any_number_of_steps_is_written_as_json_and_picture(tmp_path: Path, num_steps: int) -> None:
    run = long_run(num_steps)
    json_path, png_path = write_report(run, tmp_path / "new" / "directory")
    assert json_path.name == "report.json"
    assert png_path.name == "timeline.png"
    assert RunReport.model_validate_json(json_path.read_text()) == run
    assert json.loads(json_path.read_text())["totals"]["steps"] == num_steps
    picture = imread(png_path)[:, :, :3]
    assert min(picture.shape[:2]) >= 900
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 30
    # Each of the three panels of a run with steps is painted.
    for panel in np.array_split(picture, 3):
        painted = (panel.max(axis=2) - panel.min(axis=2) > 0.3).mean()
        assert painted > (0.001 if num_steps else -1)


def test_a_report_replaces_an_earlier_one(tmp_path: Path) -> None:
    write_report(long_run(3), tmp_path)
    json_path, _ = write_report(report(step(0)), tmp_path)
    assert len(RunReport.model_validate_json(json_path.read_text()).steps) == 1


def test_names_with_dollars_and_brackets_are_printed_and_drawn_as_they_are(tmp_path: Path) -> None:
    group = FULL.replace(name="$x^$ [bold]", backend="[red]B", passed_over=("A: not [sm90]",))
    run = report(step(0), model="$m^$ [x]", layer_groups=(group, WINDOW))
    write_report(run, tmp_path)
    text = summary_of(run)
    for expected in ("$m^$ [x]", "$x^$ [bold]", "[red]B", "not [sm90]", "[64, 8, 16, 256]"):
        assert expected in text


def test_times_of_zero_are_drawn(tmp_path: Path) -> None:
    zero = step(0, build_seconds=0, forward_seconds=0, blocks_in_use=(0, 0))
    json_path, picture = write_report(report(zero), tmp_path)
    assert RunReport.model_validate_json(json_path.read_text()).steps == (zero,)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_json_is_written_and_the_extra_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"attn-backends\[cli\]"):
        write_report(report(step(0)), tmp_path)
    assert (tmp_path / "report.json").exists()


def test_the_summary_says_what_ran_where_how_fast_and_how_exactly() -> None:
    text = summary_of(long_run(200))
    for expected in (
        "llama",
        "cpu",
        "4 of 5 finished",
        "1 clipped",
        "max_num_seqs=8",
        "torch=2.13",
    ):
        assert expected in text
    for expected in ("TORCH_REF", "passed over TRITON_ATTN", "3.0", "full attention", "p99"):
        assert expected in text
    assert "PASSED: worst error 0.001, 0.5 of its budget at step 0, 800 rows checked" in text
    assert "INTERRUPTED" not in text


def test_the_summary_of_an_interrupted_run_says_so() -> None:
    assert "INTERRUPTED, PASSED" in summary_of(report(step(0), interrupted=True))


def test_the_summary_fits_a_narrow_terminal() -> None:
    assert max(len(line) for line in summary_of(long_run(5), width=60).splitlines()) <= 60
