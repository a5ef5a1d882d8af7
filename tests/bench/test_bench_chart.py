"""The picture of committed tables: what is read from them, what it shows, bad input."""

from pathlib import Path

import pytest

from attn.bench.results import chart

ROOT = Path(__file__).parents[2]
TABLE = """# X on NVIDIA H200, against others

| case | what | ours | spread | fa3 | xqa | best peer | ours / best | target |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| d | decode 8/1/64, 2 x 8 | **9.0 (10.0)** | 2 % | 20 (25) | 12.5 | xqa | 0.800 | plans included |
| w | decode 8/1/64, 2 x 8, window 4 | **9.0** | 2.0 % | 8.0 | - | fa3 | 1.125 | <= 1.00 x best |
| p | prefill 8/1/64, 1 x 8, fp8 KV | **9.9** | 2.0 % | 10.0 | - | fa3 | 0.990 | |
| q | mixed 8/1/64, 1 x 8 | **9.9** | 2.0 % | - | - |  |  | |
"""
ENGINE = (ROOT / "docs/benchmarks/h200_vllm.md").read_text(encoding="utf-8")


def test_cases_are_read_with_times_that_the_verdict_compares():
    decode, window, prefill = chart.cases_of(TABLE)
    assert (decode.ours, decode.best, decode.peer) == (10.0, 12.5, "xqa")
    assert (window.ours, window.best, window.peer) == (9.0, 8.0, "fa3")
    kinds = [case.kind for case in (decode, window, prefill)]
    assert kinds == ["decode", "decode, window", "prefill, fp8 cache"]


def test_a_difference_within_the_spread_is_level():
    verdicts = [case.verdict for case in chart.cases_of(TABLE)]
    assert verdicts == ["ahead", "behind", "level"]


def test_ratios_of_the_committed_table_are_those_of_its_times():
    text = (ROOT / "docs/benchmarks/h200_hopper.md").read_text(encoding="utf-8")
    cases = chart.cases_of(text)
    assert {case.kind for case in cases} == set(chart.KINDS)
    for case in cases:
        assert case.ours / case.best == pytest.approx(case.ratio, abs=2e-3), case.name


def test_the_mean_is_geometric():
    assert chart.mean_ratio(chart.cases_of(TABLE)[:2]) == pytest.approx((0.8 * 1.125) ** 0.5)


def test_a_picture_has_a_panel_for_each_table(tmp_path):
    (tmp_path / "kernels.md").write_text(TABLE)
    (tmp_path / "engine.md").write_text(ENGINE)
    out = tmp_path / "both.svg"
    assert (
        chart.main([str(tmp_path / "kernels.md"), str(tmp_path / "engine.md"), "--out", str(out)])
        == 0
    )
    text = out.read_text()
    assert ">0.80</text>" in text
    assert "Time on NVIDIA H200" in text
    assert ">41,692</text>" in text
    again = tmp_path / "again.svg"
    chart.write(chart.chart([TABLE, ENGINE]), again)
    assert again.read_text() == text


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("# A page\n\nwithout a table\n", "no table that can be drawn"),
        ("| case | what |\n| --- | --- |\n| a | decode |\n", "no table that can be drawn"),
        ("# X\n\n| workload | backend |\n| --- | --- |\n| a | b |\n", "no table that can be drawn"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_drawn_is_named_in_one_line(page, words, tmp_path, capsys):
    table = tmp_path / "table.md"
    if page is not None:
        table.write_text(page)
    assert chart.main([str(table), "--out", str(tmp_path / "x.svg")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "table.md" in line
    assert words in line
    assert not (tmp_path / "x.svg").exists()


def test_a_folder_is_no_place_for_a_picture(tmp_path, capsys):
    (tmp_path / "table.md").write_text(TABLE)
    assert chart.main([str(tmp_path / "table.md"), "--out", str(tmp_path)]) == 2
    assert "--out must be a file" in capsys.readouterr().err
