"""The benchmark of Transformers' continuous batching: its page, its limit of time, bad input."""

import pytest

from attn.bench.engine import continuous, continuous_worker
from attn.bench.engine.continuous import ContinuousResults, measure, render_markdown
from attn.bench.engine.continuous_worker import Job, Measured

ENVIRONMENT = {
    "date": "2026-11-27",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "0123abc",
    "transformers": "5.17.0",
}


def measured(contender, *seconds, **fields):
    found = {"environment": ENVIRONMENT, "new_tokens": 16384} | fields
    return Measured(contender=contender, seconds=seconds, **found)


RESULTS = ContinuousResults(
    job=Job(),
    measured=(
        measured("attn", 4.0, 4.2, logits=0.01, tokens=((1, 2, 3), (4, 5, 6))),
        measured("sdpa", 10.0, 10.0, tokens=((1, 2, 9), (4, 5, 6))),
        Measured(contender="attn_eager", problem="took longer than 60 s"),
    ),
)


def test_the_page_has_rates_ratios_and_verdicts():
    page = render_markdown([RESULTS])
    assert "# Transformers' continuous batching on NVIDIA H200" in page
    assert "5.17.0: NVIDIA H200, 2026-11-27, commit 0123abc; torch 2.11.0, triton 3.6.0" in page
    assert "64 requests of 2048 tokens, 256 new tokens each" in page
    ours, other = (line for line in page.splitlines() if line.startswith("| 5.17.0 |"))
    assert "| 4,096 | 5.0 % | 2.50 | 0.0100 | 5 of 6 |" in ours
    assert "| 1,638 | 0.0 % | 1.00 |" in other
    assert "| Transformers 5.17.0: >= 2 x sdpa | 2.50 x | met |" in page
    assert "- Transformers 5.17.0, attn_eager: took longer than 60 s" in page


@pytest.mark.parametrize(("seconds", "verdict"), [(6.0, "NOT met"), (5.0, "met")])
def test_the_target_is_twice_sdpa(seconds, verdict):
    run = RESULTS.replace(measured=(measured("attn", seconds), *RESULTS.measured[1:]))
    assert f"| {verdict} |" in render_markdown([run])


def test_a_run_without_the_reference_has_no_verdict():
    run = RESULTS.replace(measured=RESULTS.measured[:1])
    assert "| - | not measured |" in render_markdown([run])


def test_a_contender_leaves_time_for_those_after_it(monkeypatch):
    clock, limits = [0.0], []

    def run_job(job, limit):
        limits.append((job.contender, limit))
        clock[0] += limit
        return measured(job.contender, 1.0)

    monkeypatch.setattr(continuous, "run_job", run_job)
    monkeypatch.setattr(continuous.time, "monotonic", lambda: clock[0])
    found = measure(Job(), continuous.CONTENDERS, 220)
    assert sum(limit for _, limit in limits) <= 220
    assert [name for name, _ in limits][:2] == ["attn", "sdpa"]
    assert all(one.seconds or one.problem == "no time was left" for one in found.measured)


def test_sdpa_that_fails_is_tried_with_smaller_steps(monkeypatch):
    def run_job(job, limit):
        if job.contender == "sdpa" and job.step_tokens > 2048:
            return Measured(contender="sdpa", problem="OutOfMemoryError: too much")
        return measured(job.contender, 1.0, step_tokens=job.step_tokens)

    monkeypatch.setattr(continuous, "run_job", run_job)
    found = measure(Job(), continuous.CONTENDERS, 220)
    assert found.of("sdpa").step_tokens == 2048
    assert "scaled_dot_product_attention, 2048 tokens a step |" in render_markdown([found])


def test_results_are_read_and_rendered(tmp_path, capsys):
    source, page = tmp_path / "results.json", tmp_path / "page.md"
    source.write_text(RESULTS.model_dump_json())
    assert continuous.main(["--render", str(source), "--out", str(page)]) == 0
    assert page.read_text() == render_markdown([RESULTS])


def test_runs_of_one_version_are_one_run():
    first = RESULTS.replace(measured=(RESULTS.measured[0], Measured(contender="sdpa", problem="x")))
    alone = RESULTS.replace(job=Job(rounds=1), measured=(measured("sdpa", 10.0),))
    (run,) = continuous.joined([first, alone])
    assert [one.contender for one in run.measured] == ["attn", "sdpa"]
    assert run.ratio == 2.5
    (same,) = continuous.joined([alone, first])
    assert same.ratio == 2.5
    other = alone.replace(job=Job(requests=8))
    with pytest.raises(ValueError, match="must have one job"):
        continuous.joined([first, other])


WORKER = """\
import sys, time
from pathlib import Path
from attn.bench.engine.continuous_worker import Measured
found = Measured(contender="sdpa", seconds=(41.0,), new_tokens=16384)
Path(sys.argv[-1]).write_text(found.model_dump_json())
time.sleep({sleep})
"""


@pytest.mark.parametrize("sleep", [0, 60])
def test_a_contender_that_is_stopped_keeps_its_rounds(monkeypatch, tmp_path, sleep):
    module = tmp_path / "worker.py"
    module.write_text(WORKER.format(sleep=sleep))
    run = continuous_worker.subprocess.run

    def run_script(command, **options):
        return run([command[0], str(module), *command[-2:]], **options)

    monkeypatch.setattr(continuous_worker.subprocess, "run", run_script)
    found = continuous_worker.run_job(Job(contender="sdpa"), 60 if sleep == 0 else 10)
    assert found.seconds == (41.0,)
    assert found.problem == ("stopped after 10 s and 1 of 2 rounds" if sleep else None)
    assert found.line.endswith("1 of 2 rounds" if sleep else "None")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--render", "nowhere.json"], "nowhere.json"),
        (["--json", "/"], "--json"),
        ([], "needs a GPU"),
    ],
)
def test_bad_input_is_one_line(arguments, word, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert continuous.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert word in error
