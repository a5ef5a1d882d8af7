"""The page of a benchmark and the comparison with an older file."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attn.bench.cases.dense import HOPPER_CASES, HOPPER_PEERS, BenchTable
from attn.bench.kernels import main
from attn.bench.results.lines import How, Line, Part
from attn.bench.results.moves import Direction, bench_moves, move_lines
from attn.bench.results.pages.bench import bench_page
from attn.bench.results.pages.frame import render_page
from attn.bench.results.pages.roofline import roof_of
from attn.bench.results.report import Report, load_results
from attn.bench.results.results import BenchResults, CaseResult, Contender, Environment, Status
from attn.cli.app import app
from specs.base import SpecError
from tests.tools.browser import PHONE, find_browser, loads_from, visit

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on PATH")
ENVIRONMENT = Environment(
    date="2026-11-21",
    device="NVIDIA H200",
    torch="2.11.0+cu130",
    triton="3.6.0",
    vllm="0.26.0",
    flashinfer="0.6.14",
    commit="0123456789ab",
    backend="TRITON_ATTN",
    rounds=5,
    reps=20,
    table=BenchTable.HOPPER,
)


def contender(name: str, time_us: float, spread: float = 0.02) -> Contender:
    fields = {"planned_us": time_us + 2, "calls": 9, "error": 2e-3}
    return Contender(name=name, status=Status.MEASURED, time_us=time_us, spread=spread, **fields)


def results(factor: float = 1.0, spread: float = 0.02, **changes: Any) -> BenchResults:
    """Every case of the Hopper table: ours at ``factor`` x 10 us, the peers around it."""
    cases = []
    for case in HOPPER_CASES:
        peers = [contender(name, 11.0 + at) for at, name in enumerate(HOPPER_PEERS[:-1])]
        refused = Contender(
            name=HOPPER_PEERS[-1], status=Status.UNSUPPORTED, reason="no such head size"
        )
        ours = contender("ours", 10.0 * factor, spread)
        cases.append(CaseResult(case=case, ours=ours, peers=(*peers, refused)))
    return BenchResults(environment=ENVIRONMENT.replace(**changes), cases=tuple(cases))


def lines() -> BenchResults:
    """A table of lines, one of them refused."""
    common = {"part": Part.OVERHEAD, "backend": "FLASHINFER", "other": "direct call"}
    made = (
        Line(**common, case="a", what="decode", how=How.EAGER, ours_us=9.0, other_us=8.8),
        Line(**common, case="b", what="decode", how=How.GRAPH, is_refused=True, reason="no GPU"),
    )
    environment = ENVIRONMENT.replace(table=BenchTable.FLASHINFER, backend="FLASHINFER")
    return BenchResults(environment=environment, lines=made)


def a_page(found: BenchResults, older: BenchResults | None = None) -> str:
    moves = () if older is None else bench_moves(older, found)
    return render_page(bench_page(found, moves, "" if older is None else "old.json"))


# -- The page.


@needs_browser
@pytest.mark.parametrize("width", [PHONE, 1200])
def test_a_browser_shows_the_page_in_silence(tmp_path: Path, width: int) -> None:
    assert BROWSER is not None
    page = tmp_path / "bench.html"
    page.write_text(a_page(results(1.2), results()), encoding="utf-8")
    seen = visit(BROWSER, page, width)
    assert seen.console == []
    assert seen.width == width
    assert seen.needed <= width
    assert seen.characters > 1000


@pytest.mark.parametrize("found", [results(), lines(), results().replace(cases=())])
def test_a_page_needs_no_network_and_no_script(found: BenchResults) -> None:
    text = a_page(found)
    assert loads_from(text) == []
    assert "<script" not in text


def test_the_page_has_ratios_and_a_roofline() -> None:
    text = a_page(results())
    assert text.count("<svg") == 2
    assert "4.8 TB/s and 989 TFLOP/s" in text
    # 10 us and 1 / 32 of 2 us of plan, over 11 us and as much.
    assert "0.910" in text
    assert "no such head size" in text
    unknown = a_page(results(device="cpu"))
    assert "No limits are known of cpu" in unknown


def test_a_lead_within_the_spread_is_level() -> None:
    assert ">ahead<" in a_page(results())
    text = a_page(results(1.1, spread=0.05))
    assert ">level<" in text
    assert ">ahead<" not in text


def test_a_wrong_kernel_is_the_verdict() -> None:
    found = results()
    wrong = Contender(name="ours", status=Status.WRONG, error=0.5, reason="off by 0.5")
    cases = (found.cases[0].replace(ours=wrong), *found.cases[1:])
    text = a_page(found.replace(cases=cases))
    assert f"wrong or failed: {found.cases[0].case.name}" in text


def test_lines_have_a_page_too() -> None:
    text = a_page(lines())
    assert text.count("<svg") == 1
    assert "1.023" in text
    assert "no GPU" in text


@pytest.mark.parametrize(
    ("device", "bandwidth"),
    [("NVIDIA H200", 4.8), ("NVIDIA H100 80GB HBM3", 3.35), ("NVIDIA H100 PCIe", 2.0)],
)
def test_roofs_are_found_by_the_drivers_names(device: str, bandwidth: float) -> None:
    roof = roof_of(device)
    assert roof is not None
    assert roof.bandwidth == bandwidth
    assert roof.rate(1.0) == bandwidth
    assert roof.rate(1e6) == roof.products
    assert roof_of("NVIDIA H20") is None


# -- What moved.


def test_a_time_moved_where_it_left_the_larger_spread() -> None:
    for factor, direction in ((1.05, "WORSE"), (0.95, "better"), (1.015, "level")):
        ours = [
            move for move in bench_moves(results(), results(factor)) if move.what.endswith("ours")
        ]
        assert len(ours) == len(HOPPER_CASES)
        assert {move.direction.value for move in ours} == {direction}
    noisy = bench_moves(results(spread=0.1), results(1.05))
    assert {move.direction for move in noisy} == {Direction.LEVEL}


def test_peers_are_compared_and_a_lost_kernel_is_told() -> None:
    old, new = results(), results()
    lost = Contender(name="fa3", status=Status.FAILED, reason="boom")
    case = new.cases[0].replace(peers=(lost, *new.cases[0].peers[1:]))
    moves = bench_moves(old, new.replace(cases=(case, *new.cases[1:])))
    (changed,) = [move for move in moves if move.direction is not Direction.LEVEL]
    assert str(changed) == f"changed: {case.case.name}, fa3 measured -> failed"
    assert move_lines(moves, "old.json")[0].startswith("against old.json: 0 better, 0 WORSE, ")


def test_lines_are_compared() -> None:
    old = lines()
    slow = old.lines[0].replace(ours_us=12.0, spread=0.1)
    found = bench_moves(old, old.replace(lines=(slow, old.lines[1])))
    assert [move.direction for move in found] == [Direction.WORSE, Direction.LEVEL]


@pytest.mark.parametrize("changes", [{"device": "NVIDIA H100"}, {"backend": "TORCH_REF"}])
def test_results_of_something_else_are_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueError, match=f"compare must have results of {name} "):
        bench_moves(results(**changes), results())


# -- Files.


def test_both_commands_render_the_page_and_compare(tmp_path: Path, capsys: Any) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    new.write_text(results(1.3).model_dump_json())
    old.write_text(results().model_dump_json())
    page = tmp_path / "bench.html"
    given = ["--render", "--merge", str(new), "--html", str(page), "--compare", str(old)]
    given += ["--out", str(tmp_path / "table.md")]
    assert main(given) == 0
    assert f"against {old}: 0 better, {len(HOPPER_CASES)} WORSE" in capsys.readouterr().out
    text = page.read_text()
    assert f"Against {old}" in text
    page.unlink()
    result = CliRunner().invoke(app, ["bench", "kernels", *given])
    assert result.exit_code == 0, result.output + result.stderr
    assert f"against {old}: " in result.stdout
    assert page.read_text() == text


def test_an_older_file_that_breaks_meanwhile_does_not_lose_what_was_measured(
    tmp_path: Path,
) -> None:
    old = tmp_path / "old.json"
    old.write_text(results().model_dump_json())
    report = Report(json=tmp_path / "new.json", html=tmp_path / "bench.html", compare=old)
    report.check()
    report.check_fits(results())
    old.write_text("{}")
    with pytest.raises(SpecError, match=r"old\.json: expected results of attn bench kernels"):
        report.finish(results())
    assert load_results(tmp_path / "new.json") == results()
    assert "<svg" in (tmp_path / "bench.html").read_text()


def test_an_older_file_of_another_device_is_refused_before_the_work(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text(results(device="NVIDIA H100").model_dump_json())
    with pytest.raises(ValueError, match="device"):
        Report(compare=old).check_fits(results().replace(cases=()))
