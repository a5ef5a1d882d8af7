"""The page of a replay and the comparison with an older report, in a browser and as files."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn.bench.results.moves import Direction, Move
from attn.bench.results.pages.frame import render_page
from attn.cli.app import app
from attn.cli.pages.moves import run_moves
from attn.cli.pages.output import RunOutput, load_report
from attn.cli.pages.run import run_page
from attn.cli.report import Place, RunReport
from specs.base import SpecError
from tests.cli.test_report import long_run, report, step
from tests.tools.browser import PHONE, find_browser, loads_from, visit

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on PATH")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """``attn run`` on a small model and trace."""
    model, trace = tmp_path / "model.json", tmp_path / "trace.csv"
    model.write_text(json.dumps(CONFIG))
    rows = [f"2023-11-16 18:15:4{n}.68059,{n * 20},{n + 4}" for n in range(1, 5)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    small = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--layers", "1"]
    return ["run", "--model", str(model), "--trace", str(trace), *small]


def attn(*arguments: str) -> Any:
    torch.set_num_threads(1)
    return CliRunner().invoke(app, list(arguments))


def a_page(run: RunReport, older: RunReport | None = None) -> str:
    moves = () if older is None else run_moves(older, run)
    return render_page(run_page(run, moves, "" if older is None else "old.json"))


# -- In a browser.


@needs_browser
@pytest.mark.parametrize("width", [PHONE, 1200])
def test_a_browser_shows_the_page_of_a_long_run_in_silence(tmp_path: Path, width: int) -> None:
    assert BROWSER is not None
    page = tmp_path / "run.html"
    run = long_run(300).replace(command="attn run " + "--option value " * 30)
    page.write_text(a_page(run, long_run(300)), encoding="utf-8")
    seen = visit(BROWSER, page, width)
    assert seen.console == []
    assert seen.width == width
    assert seen.needed <= width
    assert seen.characters > 1000


@needs_browser
def test_the_browser_tells_noise_and_width(tmp_path: Path) -> None:
    assert BROWSER is not None
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><p style='width:900px'>wide</p><script>console.error('oh')</script>"
    )
    seen = visit(BROWSER, page, PHONE)
    assert len(seen.console) == 1
    assert "oh" in seen.console[0]
    assert seen.needed >= 900


@pytest.mark.parametrize("num_steps", [0, 1, 2, 700])
def test_a_page_needs_no_network_and_no_script(num_steps: int) -> None:
    text = a_page(long_run(num_steps))
    assert loads_from(text) == []
    assert "<script" not in text
    assert text.count("<svg") == (4 if num_steps else 0)
    assert '<meta name="viewport"' in text


def test_the_check_of_loads_knows_right_from_wrong() -> None:
    assert loads_from('<a href="#x"><img src="data:,">') == []
    assert loads_from('<img src="https://a.b/c.png"> p { background: url(d.png) }') == [
        "https://a.b/c.png",
        "d.png",
    ]


def test_words_of_a_report_are_escaped() -> None:
    text = a_page(report(step(0), model="<b>bold</b>", command="attn run '<script>'"))
    assert "<b>bold" not in text
    assert "<script>" not in text
    assert "&lt;b&gt;bold" in text


def test_the_page_says_what_failed_and_where() -> None:
    place = Place(layer=1, group="full attention", request=2, position=57)
    bad = step(1, worst_error_ratio=7.5, worst_error=0.3, worst_place=place)
    run = report(step(0), bad, settings={"corrupt": "wrong-slot"})
    text = a_page(run)
    assert "FAILED" in text
    assert "fault seen: wrong-slot, in 1 of 2 checked steps" in text
    assert "layer 1 (full attention), request 2, position 57" in text


# -- What moved.


def moved(moves: list[Move]) -> dict[str, Direction]:
    return {move.what: move.direction for move in moves if move.direction is not Direction.LEVEL}


def slower(run: RunReport, factor: float) -> RunReport:
    steps = (
        record.replace(forward_seconds=factor * record.forward_seconds) for record in run.steps
    )
    return run.replace(steps=tuple(steps))


def test_the_same_run_is_level() -> None:
    assert moved(run_moves(long_run(60), long_run(60))) == {}


def test_times_that_all_steps_share_have_moved() -> None:
    old = long_run(60)
    found = moved(run_moves(old, slower(old, 1.3)))
    assert found == {
        "forward of a step, median of 59": Direction.WORSE,
        "a whole step, median of 59": Direction.WORSE,
    }
    assert set(moved(run_moves(slower(old, 1.3), old)).values()) == {Direction.BETTER}


def test_times_that_go_up_and_down_are_noise() -> None:
    old = long_run(61)
    steps = (
        record.replace(forward_seconds=record.forward_seconds * (0.8, 1.02, 1.2)[record.step % 3])
        for record in old.steps
    )
    assert moved(run_moves(old, old.replace(steps=tuple(steps)))) == {}


def test_times_of_other_batches_or_devices_are_not_compared() -> None:
    old = long_run(60)
    steps = (record.replace(prefill_tokens=5) for record in old.steps)
    other = slower(old.replace(steps=tuple(steps)), 2.0)
    assert moved(run_moves(old, other)) == {"batches": Direction.CHANGED}
    assert moved(run_moves(old, slower(old, 2.0).replace(device="H200"))) == {
        "device": Direction.CHANGED
    }


def test_a_larger_error_and_other_settings_are_told() -> None:
    old = report(step(0))
    new = report(step(0, worst_error_ratio=0.6), settings={"max_num_seqs": 16})
    found = moved(run_moves(old, new))
    assert found["worst error of its budget"] is Direction.WORSE
    assert found["setting max_num_seqs"] is Direction.CHANGED


@pytest.mark.parametrize(
    ("old", "new", "direction"),
    [
        (math.inf, math.inf, Direction.LEVEL),
        (0.5, math.inf, Direction.WORSE),
        (0.5, math.nan, Direction.WORSE),
        (math.inf, 0.5, Direction.BETTER),
        (0.0, 0.0, Direction.LEVEL),
        (0.0, 0.5, Direction.CHANGED),
    ],
)
def test_errors_that_are_no_numbers_are_compared(
    old: float, new: float, direction: Direction
) -> None:
    assert Move("error", old, new, noise=0.01).direction is direction


# -- Files.


def test_a_run_writes_its_page_and_is_compared(command: list[str], tmp_path: Path) -> None:
    first, page = tmp_path / "first", tmp_path / "run.html"
    assert attn(*command, "--report", str(first)).exit_code == 0
    old = first / "report.json"
    result = attn(*command, "--seed", "1", "--html", str(page), "--compare", str(old))
    assert result.exit_code == 0, result.output + result.stderr
    assert f"against {old}: " in result.output
    assert "changed: seed 0 -> 1" in result.output
    assert f"Against {old}" in page.read_text()
    data = json.loads(old.read_text())
    assert data["schema_version"] == 1
    assert data["command"].startswith("attn run --model ")
    assert {"attn-backends", "python", "torch"} <= set(data["versions"])
    assert data["settings"]["threads"] == 1
    assert data["steps"][0]["worst_place"]["layer"] == 0


def test_a_run_may_be_compared_with_the_report_that_it_replaces(
    command: list[str], tmp_path: Path
) -> None:
    given = ["--report", str(tmp_path)]
    assert attn(*command, *given).exit_code == 0
    old = str(tmp_path / "report.json")
    result = attn(*command, "--seed", "1", *given, "--compare", old)
    assert result.exit_code == 0, result.stderr
    assert "against" in result.output


def test_a_fault_is_named_with_its_first_place(command: list[str]) -> None:
    result = attn(*command, "--corrupt", "wrong-slot")
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "fault seen: wrong-slot, in " in said
    assert "first failure: step 0, error " in said
    assert re.search(r"layer 0 \(full_attention\), request \d, position \d+$", said)


BAD = {
    "not there": (None, "cannot be read: No such file"),
    "no JSON": ("hello", "expected the report.json of attn run, got no JSON"),
    "bytes": (b"\xff\xfe\x00", "expected the report.json of attn run, got no JSON"),
    "a list": ("[1]", "got a JSON list"),
    "foreign": ('{"loss": 3}', "which has no schema_version: field "),
    "newer": ('{"schema_version": 9}', "of schema_version 1, got 9"),
    "no version": ('{"schema_version": "x"}', "of schema_version 1, got 'x'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_report_is_one_line_that_names_it(
    command: list[str], tmp_path: Path, case: str
) -> None:
    text, words = BAD[case]
    path = tmp_path / "older.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = attn(*command, "--compare", str(path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {path}: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.parametrize("option", ["--report", "--html"])
def test_a_path_of_the_wrong_kind_is_one_line_that_names_it(
    command: list[str], tmp_path: Path, option: str
) -> None:
    path = tmp_path / "there"
    if option == "--report":
        path.write_text("kept")
    else:
        path.mkdir()
    result = attn(*command, option, str(path))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {option} must be a ")
    assert repr(str(path)) in result.stderr
    assert result.stderr.count("\n") == 1
    assert path.is_dir() or path.read_text() == "kept"


def test_a_report_that_breaks_meanwhile_does_not_lose_what_was_measured(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(report(step(0)).model_dump_json())
    folder, page = tmp_path / "new", tmp_path / "run.html"
    output = RunOutput(folder, page, old)
    output.check()
    old.write_text("gone")
    from rich.console import Console

    with pytest.raises(SpecError, match=r"old\.json: expected"):
        output.write(report(step(0), step(1)), Console(quiet=True))
    assert len(load_report(folder / "report.json").steps) == 2
    assert "<svg" in page.read_text()


def test_a_report_without_a_version_is_read_where_its_fields_fit(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    data = json.loads(report(step(0)).model_dump_json())
    del data["schema_version"], data["command"]
    path.write_text(json.dumps(data))
    assert load_report(path).command == ""
