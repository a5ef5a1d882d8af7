"""Targets are met only by measurements, and the tables are a function of the results."""

import math
import re

import pytest

from attn.bench.cases.case import PEERS
from attn.bench.cases.dense import (
    CASES,
    HOPPER_CASES,
    INVARIANCE_CASES,
    MAX_SCRATCH_BYTES,
    BenchTable,
)
from attn.bench.cases.latent import MLA_CASES, SPARSE_CASES
from attn.bench.results import host
from attn.bench.results.chart import cases_of
from attn.bench.results.render import render_markdown
from attn.bench.results.report import load_results
from attn.bench.results.results import (
    BenchResults,
    CaseResult,
    Contender,
    Environment,
    PlanOfSize,
    PlanTime,
    Standing,
    Status,
    Verdict,
    allocation_check,
    checks_of,
    free_partition_check,
    host_check,
    invariant_check,
    is_level,
    plan_check,
    scratch_check,
    verdict_of,
)
from specs.base import SpecError

BY_NAME = {case.name: case for case in CASES}
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
)


def measured(name, time_us, **fields):
    given = {"spread": 0.012, "calls": 100, "error": 2e-3, **fields}
    return Contender(name=name, status=Status.MEASURED, time_us=time_us, **given)


def not_measured(name, status=Status.UNAVAILABLE, reason="no such thing"):
    return Contender(name=name, status=status, reason=reason)


def result_of(name, ours, peers=None, **fields):
    """A result; ``ours`` and each of ``peers``, by name, is microseconds or a contender."""
    made = [
        value if isinstance(value, Contender) else measured(peer, value)
        for peer, value in (peers or {}).items()
    ]
    ours = ours if isinstance(ours, Contender) else measured("ours", ours)
    return CaseResult(case=BY_NAME[name], ours=ours, peers=tuple(made), **fields)


ALL_PEERS = {"fa3": 100.0, "flashinfer": 90.0, "xqa": 95.0, "vllm_triton": 120.0}


def verdicts(result):
    return {check.text: check.verdict for check in checks_of(result)}


@pytest.mark.parametrize(
    ("ours", "against_best", "against_triton"),
    [
        (98.9, Verdict.MET, Verdict.MET),
        (99.1, Verdict.NOT_MET, Verdict.MET),
        (118.5, Verdict.NOT_MET, Verdict.MET),
        (118.6, Verdict.NOT_MET, Verdict.LEVEL),
        (121.4, Verdict.NOT_MET, Verdict.LEVEL),
        (121.5, Verdict.NOT_MET, Verdict.NOT_MET),
    ],
)
def test_a_decode_is_judged_against_the_best_and_against_triton(ours, against_best, against_triton):
    result = result_of("dec_b8_8k", ours, ALL_PEERS)
    assert result.best().name == "flashinfer"
    assert verdicts(result) == {"<= 1.10 x best": against_best, "< vllm_triton": against_triton}


def test_equal_to_triton_is_not_faster():
    peers = dict.fromkeys(PEERS, 100.0)
    assert verdicts(result_of("dec_b8_8k", 100.0, peers))["< vllm_triton"] is Verdict.LEVEL


@pytest.mark.parametrize(
    ("ratio", "ours", "theirs", "level"),
    [
        (0.99, 0.01, 0.0, True),
        (0.989, 0.01, 0.0, False),
        (1.01, 0.0, 0.01, True),
        (1.011, 0.0, 0.01, False),
        (1.0, None, None, True),
        (1.001, None, None, False),
        # Times that scatter by half: no lead below that, and no lag beyond a tenth is excused.
        (0.6, 0.5, 0.0, True),
        (0.4, 0.5, 0.0, False),
        (1.1, 0.5, 0.0, True),
        (1.101, 0.5, 0.0, False),
    ],
)
def test_level_is_within_the_larger_spread(ratio, ours, theirs, level):
    assert is_level(ratio, ours, theirs) is level


def test_a_plan_is_shared_by_the_layers_of_a_model():
    alone = measured("fa3", 100.0)
    assert alone.layer_us(32) == 100.0
    planned = alone.replace(plan_us=64.0, planned_us=150.0)
    assert planned.layer_us(32) == 102.0
    assert planned.replace(plan_us=0.0).layer_us(32) == 100.0
    # A plan inside of the first call: one call with it, the others without.
    inside = alone.replace(planned_us=132.0)
    assert inside.layer_us(32) == pytest.approx(101.0)
    # Even where the first call took less by chance, no time is negative.
    assert inside.replace(planned_us=1.0).layer_us(2) == pytest.approx(50.5)
    assert planned.layer_us(32, in_graph=True) is None
    captured = planned.replace(graph_us=90.0)
    assert captured.layer_us(32, in_graph=True) == 92.0
    assert not_measured("fa3").layer_us(32) is None
    assert {case.layers for case in CASES} == {32}
    assert {case.layers for case in (*MLA_CASES, *SPARSE_CASES)} == {61}


def test_a_peer_s_better_time_counts_and_ours_does_not():
    quick = measured("fa3", 100.0, plan_us=64.0, planned_us=98.0)
    result = result_of("dec_b8_8k", quick.replace(name="ours"), {"fa3": quick})
    assert result.cost(result.ours) == 102.0
    assert result.cost(result.peer("fa3")) == 98.0
    assert result.ratio(result.best()) == pytest.approx(102.0 / 98.0)
    assert result.cost(None) is None


@pytest.mark.parametrize(
    ("ours", "xqa", "standing"),
    [
        (80.0, 95.0, Standing.AHEAD),
        (89.5, 95.0, Standing.LEVEL),
        (91.0, 95.0, Standing.LEVEL),
        (92.0, 95.0, Standing.BEHIND),
        (80.0, Status.UNSUPPORTED, Standing.AHEAD),
        (80.0, Status.UNAVAILABLE, Standing.NOT_MEASURED),
        (89.5, Status.FAILED, Standing.NOT_MEASURED),
        # One faster peer is enough.
        (92.0, Status.UNAVAILABLE, Standing.BEHIND),
        (Status.WRONG, 95.0, Standing.NOT_MEASURED),
    ],
)
def test_cases_are_ahead_level_or_behind(ours, xqa, standing):
    xqa = not_measured("xqa", xqa) if isinstance(xqa, Status) else xqa
    ours = not_measured("ours", ours) if isinstance(ours, Status) else ours
    result = result_of("dec_b8_8k", ours, {**ALL_PEERS, "xqa": xqa})
    assert result.standing() is standing
    text = render_markdown(BenchResults(environment=ENVIRONMENT, cases=(result,)))
    counts = ", ".join(f"{int(one is standing)} {one.value}" for one in Standing)
    assert f"Per layer, beside the fastest peer: {counts}." in text
    assert cells(text, "Cases", "dec_b8_8k")[-3] == standing.value


def test_a_captured_graph_is_judged_by_itself():
    (case,) = (case for case in MLA_CASES if case.name == "mla_h16_b32_8k")
    peers = tuple(
        measured(name, 100.0, graph_us=90.0, graph_spread=0.001) for name in case.target.against
    )
    ours = measured("ours", 99.0, plan_us=6.1, graph_us=92.0, graph_spread=0.002)
    result = CaseResult(case=case, ours=ours, peers=peers)
    assert verdicts(result) == {
        "<= 1.00 x best": Verdict.LEVEL,
        "<= 1.00 x best in a graph": Verdict.NOT_MET,
    }
    environment = ENVIRONMENT.replace(table=BenchTable.MLA)
    text = render_markdown(BenchResults(environment=environment, cases=(result,)))
    assert (
        "In a captured graph, per layer, beside the fastest peer: 0 ahead, 0 level, 1 beh" in text
    )
    row = cells(text, "In a captured graph", "mla_h16_b32_8k")
    assert row[1:3] == ["**92.1**", "0.2 %"]
    assert row[-4:] == [case.target.against[0], "0.1 %", "1.023", "behind"]
    # A peer that cannot be captured leaves the verdict open.
    lost = peers[0].replace(graph_us=None, graph_spread=None)
    open_ = result.replace(ours=ours.replace(graph_us=50.0), peers=(lost, *peers[1:]))
    assert verdicts(open_)["<= 1.00 x best in a graph"] is Verdict.NOT_MEASURED
    assert open_.standing(in_graph=True) is Standing.NOT_MEASURED


@pytest.mark.parametrize("status", [None, Status.UNAVAILABLE, Status.FAILED, Status.WRONG])
def test_a_missing_peer_leaves_the_best_open_and_is_never_met(status):
    peers = dict(ALL_PEERS)
    del peers["xqa"]
    if status is not None:
        peers["xqa"] = not_measured("xqa", status)
    assert verdicts(result_of("dec_b8_8k", 50.0, peers))["<= 1.10 x best"] is Verdict.NOT_MEASURED
    # A time that is too slow against the measured contenders stays too slow.
    assert verdicts(result_of("dec_b8_8k", 110.0, peers))["<= 1.10 x best"] is Verdict.NOT_MET


def test_a_peer_without_such_a_kernel_is_not_missing():
    peers = {**ALL_PEERS, "xqa": not_measured("xqa", Status.UNSUPPORTED)}
    assert verdicts(result_of("dec_b8_8k", 50.0, peers))["<= 1.10 x best"] is Verdict.MET


def test_without_peers_only_rates_can_be_met():
    result = result_of("dec_b128_8k", 1000.0)
    assert verdicts(result) == {
        "<= 1.10 x best": Verdict.NOT_MEASURED,
        "< vllm_triton": Verdict.NOT_MEASURED,
        ">= 4100 GB/s": Verdict.MET,
    }
    assert verdict_of(checks_of(result)) is Verdict.NOT_MEASURED


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (Status.WRONG, Verdict.NOT_MET),
        (Status.FAILED, Verdict.NOT_MET),
        (Status.UNSUPPORTED, Verdict.NOT_MET),
        (Status.UNAVAILABLE, Verdict.NOT_MEASURED),
    ],
)
@pytest.mark.parametrize("name", ["dec_b128_8k", "pre_1x8k", "mix_64dec8k_2kpre"])
def test_a_kernel_of_ours_without_a_time_meets_nothing(name, status, verdict):
    result = result_of(name, not_measured("ours", status), ALL_PEERS)
    assert {check.verdict for check in checks_of(result)} == {verdict}


def test_a_prefill_is_judged_by_its_rate():
    tflops = BY_NAME["pre_1x8k"].flops * 1e-6
    for ours, verdict in ((tflops / 375.5, Verdict.MET), (tflops / 374.5, Verdict.NOT_MET)):
        assert verdicts(result_of("pre_1x8k", ours)) == {">= 375 TF": verdict}
    assert checks_of(result_of("pre_16x1k", 1.0)) == []
    assert verdict_of([]) is None


def test_a_mixed_batch_is_judged_against_one_peer():
    peers = {"fa3": 1000.0}
    for ours, verdict in ((1250.0, Verdict.MET), (1251.0, Verdict.NOT_MET)):
        assert verdicts(result_of("mix_64dec8k_2kpre", ours, peers)) == {"<= 1.25 x fa3": verdict}
    alone = result_of("mix_64dec8k_2kpre", 1.0)
    assert verdicts(alone) == {"<= 1.25 x fa3": Verdict.NOT_MEASURED}


@pytest.mark.parametrize(
    ("free", "verdict"),
    [
        (100.0, Verdict.MET),
        (99.9, Verdict.NOT_MET),
        (None, Verdict.NOT_MEASURED),
    ],
)
def test_invariance_is_judged_against_the_free_partition(free, verdict):
    other = None if free is None else measured("free partition", free)
    result = result_of("dec_b1_8k", 103.0, free_partition=other)
    assert free_partition_check(result).verdict is verdict


def test_memory_is_judged():
    results = BenchResults(environment=ENVIRONMENT)
    assert scratch_check(results).verdict is Verdict.NOT_MEASURED
    assert allocation_check(results).verdict is Verdict.NOT_MEASURED
    for size, verdict in ((MAX_SCRATCH_BYTES - 1, Verdict.MET), (64 << 20, Verdict.NOT_MET)):
        assert scratch_check(results.replace(scratch_bytes=size)).verdict is verdict
    for counts, verdict in (
        ((0, 0), Verdict.MET),
        ((0, None), Verdict.NOT_MEASURED),
        ((None, 10), Verdict.NOT_MET),
    ):
        cases = tuple(result_of("dec_b8_8k", 1.0, allocations=count) for count in counts)
        assert allocation_check(results.replace(cases=cases)).verdict is verdict


def test_the_slowest_plan_of_an_engine_is_judged():
    results = BenchResults(environment=ENVIRONMENT)
    assert plan_check(results) is None
    assert "Plans of one engine" not in render_markdown(results)
    results = results.replace(environment=ENVIRONMENT.replace(table="hopper"))
    assert plan_check(results).verdict is Verdict.NOT_MEASURED
    assert "none was measured. Every plan, of cases too, <= 4 us: not measured." in (
        render_markdown(results)
    )
    for uneven, verdict in ((4.0, Verdict.MET), (4.1, Verdict.NOT_MET)):
        plans = (
            PlanOfSize(num_reqs=1, even_us=1.5, uneven_us=1.25),
            PlanOfSize(num_reqs=1024, even_us=3.5, uneven_us=uneven),
        )
        found = results.replace(plans=plans)
        assert plan_check(found).verdict is verdict
        text = render_markdown(found)
        assert f"Every plan, of cases too, <= 4 us: {verdict.value}." in text
        assert cells(text, "Plans of one engine", "1024")[1:] == ["3.5", f"{uneven:.1f}"]
    for gpu_us, verdict in ((4.0, Verdict.NOT_MEASURED), (4.1, Verdict.NOT_MET)):
        slow = hopper_result("dec_b64_zipf", 9.0, plan=PlanTime(host_us=9.0, gpu_us=gpu_us))
        assert plan_check(results.replace(cases=(slow,))).verdict is verdict
    unknown = hopper_result("dec_b64_zipf", 9.0, plan=PlanTime(host_us=9.0, reason="no graph"))
    for plans, verdict in ((found.plans, Verdict.NOT_MET), (found.plans[:1], Verdict.NOT_MEASURED)):
        partly = results.replace(plans=plans, cases=(unknown,))
        assert plan_check(partly).verdict is verdict
    later = results.replace(plans_reason="needs a CUDA device")
    assert later.merged(found, []).plans == found.plans
    assert later.merged(found, []).plans_reason == ""
    assert found.merged(later, []).plans_reason == ""
    assert "plans of one engine: needs a CUDA device" in render_markdown(later)


@pytest.mark.parametrize(
    ("status", "time_us"), [("measured", None), ("WRONG", 1.0), ("measured", 0.0)]
)
def test_a_time_comes_with_a_measurement_only(status, time_us):
    with pytest.raises(SpecError, match="time_us must be"):
        Contender(name="ours", status=status, time_us=time_us)


# -- Rendering.


@pytest.fixture
def results():
    wrong = Contender(name="xqa", status="WRONG", error=math.nan, reason="error nan, allowed 0.01")
    peers = {**ALL_PEERS, "xqa": wrong, "flashinfer": not_measured("flashinfer")}
    return BenchResults(
        environment=ENVIRONMENT,
        scratch_bytes=5 << 20,
        cases=(
            result_of(
                "dec_b1_8k",
                97.0,
                peers,
                free_partition=measured("free partition", 96.0),
                plan=PlanTime(host_us=21.25, gpu_us=3.5),
                allocations=0,
            ),
            result_of(
                "pre_1x8k",
                1100.0,
                {"xqa": not_measured("xqa", Status.UNSUPPORTED, "decodes only")},
                batch_invariant=measured("batch invariant", 1155.0),
                allocations=0,
            ),
            result_of("pre_16x1k", not_measured("ours", Status.WRONG, "error 1"), allocations=0),
        ),
    )


def cells(markdown, section, name):
    """The row of ``name`` in a section's table."""
    body = markdown.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith(f"| {name} ")]
    assert len(lines) == 1, lines
    return [cell.strip() for cell in lines[0].strip("|").split("|")]


def test_a_row_per_case_and_section(results):
    text = render_markdown(results)
    assert cells(text, "Cases", "dec_b1_8k") == [
        "dec_b1_8k",
        "decode 32/8/128, 1 x 8192",
        "**97.0**",
        "97.0",
        *["", "", ""],
        "346 GB/s",
        "1.2 %",
        "2.0e-03",
        "100.0",
        "n/a",
        "WRONG",
        "120.0",
        "fa3",
        "1.2 %",
        "0.970",
        "not measured",
        "<= 1.10 x best, < vllm_triton",
        "not measured: <= 1.10 x best",
    ]
    prefill = cells(text, "Cases", "pre_1x8k")
    assert prefill[10:] == ["", "", "-", "", "", "", "", "not measured", ">= 375 TF", "met"]
    assert cells(text, "Cases", "pre_16x1k")[2:] == ["**WRONG**", *[""] * 17]
    free = cells(text, "Batch-invariant decode against a free partition", "dec_b1_8k")
    assert free[1:] == ["97.0", "96.0", "1.010", "<= 1.03 x free", "met"]
    invariant = cells(text, "Batch-invariant prefill", "pre_1x8k")
    assert invariant[1:] == ["1100.0", "500 TF", "1155.0", "476 TF", "1.050"]
    assert cells(text, "The step's plan", "dec_b1_8k")[1:] == ["3.5", "21.2", "97.0"]
    assert cells(text, "Memory", "scratch,")[1:] == ["5.0 MiB", "< 64 MiB", "met"]
    assert cells(text, "Memory", "allocations")[1:] == ["0", "0", "met"]
    reasons = text.split("## Not measured\n")[1]
    assert "- xqa, WRONG: error nan, allowed 0.01 (dec_b1_8k)" in reasons
    assert "Targets: 5 met, 0 level, 0 NOT met, 1 not measured." in text


def test_the_head_says_where_when_and_how(results):
    head = render_markdown(results).split("## Cases")[0]
    assert head.startswith("# TRITON_ATTN on NVIDIA H200\n")
    for field in ("date", "commit", "torch", "triton", "vllm", "flashinfer"):
        assert getattr(ENVIRONMENT, field) in head
    assert "20 per round" in head
    assert "CUDA events" in head
    on_cpu = results.replace(environment=ENVIRONMENT.replace(device="cpu"))
    assert "CUDA events" not in render_markdown(on_cpu)


def test_every_line_of_a_table_has_its_header_s_columns(results):
    width = None
    for line in render_markdown(results).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        width = line.count("|") if width is None else width
        assert line.count("|") == width, line


def test_data_that_was_written_renders_again(results):
    again = BenchResults.model_validate_json(results.model_dump_json())
    assert render_markdown(again) == render_markdown(results)


def test_an_empty_run_renders():
    assert "Targets: 0 met" in render_markdown(BenchResults(environment=ENVIRONMENT))


def test_results_of_several_runs_are_put_together(results):
    order = [case.name for case in CASES]
    later = BenchResults(
        environment=ENVIRONMENT.replace(commit="ba9876543210", rounds=9),
        cases=(result_of("dec_b8_8k", 50.0), result_of("dec_b1_8k", 42.0)),
    )
    whole = later.merged(results, order)
    names = [result.case.name for result in whole.cases]
    assert names == ["dec_b1_8k", "dec_b8_8k", "pre_1x8k", "pre_16x1k"]
    assert whole.cases[0].ours.time_us == 42.0
    assert whole.scratch_bytes == results.scratch_bytes
    assert whole.environment.commit == "0123456789ab, ba9876543210"
    assert whole.environment.rounds == 9
    assert later.merged(whole, order).environment.commit == whole.environment.commit
    with pytest.raises(ValueError, match="must have device 'NVIDIA H100', got 'NVIDIA H200'"):
        later.replace(environment=ENVIRONMENT.replace(device="NVIDIA H100")).merged(results, order)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.12.0"}, "torch '2.12.0', got '2.11.0+cu130'"),
        ({"triton": "3.7.1"}, "triton '3.7.1', got '3.6.0'"),
        ({"vllm": "0.33.0"}, "vllm '0.33.0', got '0.26.0'"),
        ({"flashinfer": "0.7.2"}, "flashinfer '0.7.2', got '0.6.14'"),
        ({"versions": {"numpy": "2.4"}}, "numpy '2.4', got '2.3'"),
        ({"versions": {}}, "numpy 'unknown', got '2.3'"),
        ({"versions": {"numpy": "2.3", "flash-mla": "1"}}, "flash-mla '1', got 'unknown'"),
    ],
)
def test_results_of_other_versions_are_not_put_together(results, change, said):
    known = results.replace(environment=ENVIRONMENT.replace(versions={"numpy": "2.3"}))
    other = known.replace(environment=known.environment.replace(**change))
    assert known.merged(known, []).cases
    with pytest.raises(ValueError, match=f"earlier results must have {re.escape(said)}"):
        other.merged(known, [])


def test_results_that_were_judged_otherwise_are_refused(results, tmp_path):
    path = tmp_path / "old.json"
    for version in ("1", "3"):
        text = results.model_dump_json().replace(
            '"schema_version":2', f'"schema_version":{version}'
        )
        path.write_text(text)
        with pytest.raises(SpecError, match=f"of schema_version 2, got {version}"):
            load_results(path)
    path.write_text(results.model_dump_json())
    assert render_markdown(load_results(path)) == render_markdown(results)


def test_times_of_two_runs_do_not_compare():
    order = ["pre_1x8k", "pre_fp8_1x8k"]
    (twin,) = (case for case in HOPPER_CASES if case.name == order[1])
    plain, quantised = result_of("pre_1x8k", 800.0), result_of("pre_1x8k", 700.0)
    quantised = quantised.replace(case=twin)
    one = BenchResults(environment=ENVIRONMENT, cases=(plain, quantised)).cases
    assert verdict_of(checks_of(one[1], one)) is Verdict.MET
    first, second = (BenchResults(environment=ENVIRONMENT, cases=(x,)) for x in (plain, quantised))
    for whole in (second.merged(first, order), first.merged(second, order)):
        assert [result.case.name for result in whole.cases] == order
        assert verdict_of(checks_of(whole.cases[1], whole.cases)) is Verdict.NOT_MEASURED


# -- The Hopper table.

HOPPER = {case.name: case for case in HOPPER_CASES}
UNSUPPORTED = Status.UNSUPPORTED


def hopper_result(name, ours, plan_us=None, peers=None, **fields):
    """A result of the Hopper table; ``peers`` are (forward, plan, both) in microseconds, or
    contenders.
    """
    made = []
    for peer, value in (peers or {}).items():
        if not isinstance(value, Contender):
            time, own, both = value
            value = measured(peer, time, plan_us=own, planned_us=both)
        made.append(value)
    given = {name: fields.pop(name) for name in ("host_us",) if name in fields}
    mine = measured("ours", ours, plan_us=plan_us, **given)
    return CaseResult(case=HOPPER[name], ours=mine, peers=tuple(made), **fields)


QUICK = {
    "fa3": (100.0, 4.8, 104.0),
    "cudnn": not_measured("cudnn", UNSUPPORTED, "prefills and mixed steps only"),
    "flashinfer": (99.0, 320.0, 130.0),
    "xqa": (103.0, None, None),
}
"""Per layer: 100.15, 109 and 103."""


@pytest.mark.parametrize(
    ("plan", "verdict"),
    [(28.0, Verdict.MET), (64.0, Verdict.LEVEL), (104.0, Verdict.LEVEL), (128.0, Verdict.NOT_MET)],
)
def test_a_decode_is_judged_with_everyones_part_of_the_plan(plan, verdict):
    result = hopper_result("dec_b8_8k", 98.0, plan, QUICK)
    assert result.best().name == "fa3"
    assert result.cost(result.peer("flashinfer")) == 109.0
    assert result.cost(result.ours) == 98.0 + plan / 32
    assert verdicts(result) == {"<= 1.00 x best": verdict}


def test_a_verdict_is_open_until_every_peer_is_known():
    peers = {**QUICK, "cudnn": (98.0, None, None), "xqa": not_measured("xqa", UNSUPPORTED)}
    for ours, verdict in ((90.0, Verdict.MET), (98.1, Verdict.LEVEL), (100.0, Verdict.NOT_MET)):
        found = verdicts(hopper_result("pre_4x4k", ours, 0.5, peers))
        assert found == {"<= 1.00 x best": verdict}
    for status in (Status.UNAVAILABLE, Status.WRONG, Status.FAILED):
        without = {**peers, "cudnn": not_measured("cudnn", status)}
        for ours in (10.0, 100.0):
            found = verdicts(hopper_result("pre_4x4k", ours, 0.5, without))
            assert found == {"<= 1.00 x best": Verdict.NOT_MEASURED}


@pytest.mark.parametrize(
    ("fp8", "verdict"),
    [(790.0, Verdict.MET), (809.0, Verdict.LEVEL), (810.0, Verdict.NOT_MET)],
)
def test_an_fp8_cache_is_judged_by_our_own_row(fp8, verdict):
    own = hopper_result("pre_1x8k", 800.0, host_us=9.0)
    result = hopper_result("pre_fp8_1x8k", fp8)
    (check,) = checks_of(result, (own, result))
    assert (check.text, check.verdict) == ("<= pre_1x8k", verdict)
    assert checks_of(result)[0].verdict is Verdict.NOT_MEASURED


@pytest.mark.parametrize(
    ("host_us", "verdict"),
    [(20.0, Verdict.MET), (20.1, Verdict.NOT_MET), (None, Verdict.NOT_MEASURED)],
)
def test_the_host_s_cost_is_a_line_of_one_case(host_us, verdict):
    result = hopper_result("pre_1x8k", 800.0, host_us=host_us)
    assert host_check(result).verdict is verdict
    assert host_check(hopper_result("pre_4x4k", 800.0)) is None
    environment = ENVIRONMENT.replace(table=BenchTable.HOPPER)
    text = render_markdown(BenchResults(environment=environment, cases=(result,)))
    row = cells(text, "On the host", "pre_1x8k")
    assert row[1] == ("n/a" if host_us is None else f"**{host_us}**")
    assert row[-2:] == ["<= 20 us", verdict.value]


@pytest.mark.parametrize(
    ("ours", "fa3", "verdict"),
    [
        (30.0, 32.0, Verdict.MET),
        (33.0, 32.0, Verdict.NOT_MET),
        (None, 32.0, Verdict.NOT_MEASURED),
        (30.0, None, Verdict.NOT_MEASURED),
    ],
)
def test_the_host_s_cost_of_a_latent_forward_is_judged_beside_a_peer(ours, fa3, verdict):
    (case,) = (case for case in MLA_CASES if case.name == "mla_h16_b32_8k")
    peer = measured("fa3", 100.0, host_us=fa3)
    result = CaseResult(case=case, ours=measured("ours", 99.0, host_us=ours), peers=(peer,))
    assert host_check(result) == ("<= fa3", verdict)
    assert host_check(result.replace(peers=())).verdict is Verdict.NOT_MEASURED
    environment = ENVIRONMENT.replace(table=BenchTable.MLA)
    text = render_markdown(BenchResults(environment=environment, cases=(result,)))
    row = cells(text, "On the host", "mla_h16_b32_8k")
    assert row[3] == ("" if fa3 is None else f"{fa3}")
    assert row[-2:] == ["<= fa3", verdict.value]
    for case in (*MLA_CASES, *SPARSE_CASES):
        asked = case.is_latent and case.target.max_ratio_to_best == 1.0
        reads = case.kv_cache_dtype.value == "auto"
        assert case.target.host_at_most == ("fa3" if asked and reads else None), case.name


@pytest.fixture
def hopper_results():
    return BenchResults(
        environment=ENVIRONMENT.replace(table=BenchTable.HOPPER),
        cases=(
            hopper_result(
                *("dec_b8_8k", 90.0, 16.0, QUICK),
                plan=PlanTime(host_us=20.0, gpu_us=7.0),
                host_us=8.25,
            ),
            hopper_result("pre_1x8k", 800.0, 32.0, {"cudnn": (750.0, None, None)}, host_us=9.5),
            hopper_result("pre_fp8_1x8k", 780.0, 32.0),
        ),
    )


def test_the_hopper_table_shows_every_part_of_a_time_and_its_own_peers(hopper_results):
    text = render_markdown(hopper_results)
    assert text.startswith("# TRITON_ATTN on NVIDIA H200, against the fastest kernels for it\n")
    assert cells(text, "Cases", "dec_b8_8k") == [
        "dec_b8_8k",
        "decode 32/8/128, 8 x 8192",
        *["**90.5**", "90.0", "16.0", "", "8.2"],
        "2984 GB/s",
        "1.2 %",
        "2.0e-03",
        *["100.2", "-", "109.0", "103.0", ""],
        "fa3",
        "1.2 %",
        "0.904",
        "ahead",
        "<= 1.00 x best",
        "met",
    ]
    prefill = cells(text, "Cases", "pre_1x8k")
    assert prefill[2:7] == ["**801.0**", "800.0", "32.0", "", "9.5"]
    assert prefill[10:] == [
        "",
        "750.0",
        "",
        "",
        "",
        "cudnn",
        "1.2 %",
        "1.068",
        "behind",
        *prefill[-2:],
    ]
    assert prefill[-2:] == ["<= 1.00 x best", "NOT met"]
    assert cells(text, "Cases", "pre_fp8_1x8k")[-2:] == ["<= pre_1x8k", "met"]
    assert "contiguous keys and values" in text
    assert "`forward + plan / 32`" in text
    body = text.split("## Every kernel\n")[1].split("\n## ")[0]
    row = next(line for line in body.splitlines() if line.startswith("| dec_b8_8k | flashinfer |"))
    assert row.startswith("| dec_b8_8k | flashinfer | 109.0 | 99.0 | 1.2 % | 320.0 | 130.0 |")
    again = BenchResults.model_validate_json(hopper_results.model_dump_json())
    assert render_markdown(again) == text


def test_a_table_of_cases_is_read_as_it_is_written(hopper_results):
    decode, prefill = cases_of(render_markdown(hopper_results))
    assert (decode.ours, decode.alone, decode.best, decode.peer) == (90.5, 90.0, 100.2, "fa3")
    assert (decode.spread, decode.verdict, prefill.verdict) == (0.012, "ahead", "behind")
    fast, loose = hopper_results.cases[0], {**QUICK, "fa3": measured("fa3", 91.0, spread=0.02)}
    level = hopper_result("dec_b8_8k", 90.0, None, loose)
    (case,) = cases_of(render_markdown(hopper_results.replace(cases=(level,))))
    assert (case.spread, case.verdict) == (0.02, level.standing().value) == (0.02, "level")
    assert fast.standing() is Standing.AHEAD


def test_the_two_tables_do_not_merge(results, hopper_results):
    with pytest.raises(ValueError, match="must have table 'hopper', got 'dense'"):
        hopper_results.merged(results, [])


@pytest.mark.parametrize(
    ("invariant", "verdict"),
    [
        (104.9, Verdict.MET),
        (105.1, Verdict.NOT_MET),
        (None, Verdict.NOT_MEASURED),
        (not_measured("batch invariant", Status.WRONG), Verdict.NOT_MET),
    ],
)
def test_what_batch_invariance_costs_is_judged(invariant, verdict):
    (case,) = (case for case in INVARIANCE_CASES if case.name == "dec_b32_4k")
    if isinstance(invariant, float):
        invariant = measured("batch invariant", invariant)
    result = CaseResult(case=case, ours=measured("ours", 100.0), batch_invariant=invariant)
    assert invariant_check(result) == ("<= 1.05 x default", verdict)
    environment = ENVIRONMENT.replace(table=BenchTable.INVARIANCE)
    text = render_markdown(BenchResults(environment=environment, cases=(result,)))
    row = cells(text, "With batch invariance", "dec_b32_4k")
    assert row[-2:] == ["<= 1.05 x default", verdict.value]
    bounds = {case.name: case.target.max_invariant_ratio for case in INVARIANCE_CASES}
    assert bounds["pre_1x8k"] == 1.3
    assert bounds["pre_d256_1x8k"] == 1.6
    assert bounds["dec_d256_b32_8k"] == 1.05
    assert all(case.compare_batch_invariant for case in INVARIANCE_CASES)


def test_the_page_of_host_times_has_every_case_of_every_table(hopper_results, tmp_path, capsys):
    latent = BenchResults(
        environment=ENVIRONMENT.replace(table=BenchTable.MLA, backend="TRITON_MLA"),
        cases=(
            CaseResult(
                case=next(case for case in MLA_CASES if case.name == "mla_h16_b32_8k"),
                ours=measured("ours", 90.0, host_us=31.0, launches=1),
                peers=(measured("fa3", 92.0, host_us=30.0),),
            ),
        ),
    )
    paths = [tmp_path / "hopper.json", tmp_path / "mla.json"]
    for path, results in zip(paths, (hopper_results, latent), strict=True):
        path.write_text(results.model_dump_json())
    assert host.main([*map(str, paths), "--out", str(tmp_path / "host.md")]) == 0
    text = (tmp_path / "host.md").read_text()
    assert "Targets: 1 met, 0 level, 1 NOT met, 0 not measured." in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    shown = {row[0]: row[1:] for row in rows if len(row) > 5}
    assert shown["dec_b8_8k"] == ["**8.2**", "", "", "", "-", "", "", "", "", ""]
    assert shown["pre_1x8k"][0] == "**9.5**"
    assert shown["pre_1x8k"][-2:] == ["<= 20 us", "met"]
    assert shown["mla_h16_b32_8k"] == ["**31.0**", "", "1", "30.0", "", "", "", "<= fa3", "NOT met"]
    assert "pre_fp8_1x8k" not in shown
    assert host.main([str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
