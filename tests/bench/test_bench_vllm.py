"""The engine benchmark without an engine: what its numbers mean, and what its tables say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn.bench.engine import vllm as bench
from attn.bench.engine.engine import (
    BACKENDS,
    FLASH,
    MAX_MODEL_LEN,
    MODEL,
    OURS,
    START_UP,
    TARGETS,
    TRITON,
    WORKLOADS,
    Answer,
    BackendResult,
    EngineEnvironment,
    EngineResults,
    Speed,
    check_of,
    compare_answers,
    reference_of,
    render_markdown,
    require_varied,
    value_of,
)
from attn.bench.engine.vllm import (
    EngineBench,
    Report,
    bench_engine,
    last_words,
    main,
    select_workloads,
    worker_environment,
)
from attn.bench.engine.vllm_worker import Job, JobResult, Kind, draw_weights, make_prompts
from attn.bench.results.results import Verdict
from specs.base import SpecError

ENVIRONMENT = EngineEnvironment(
    date="2026-11-21",
    device="NVIDIA H200",
    torch="2.11.0+cu130",
    triton="3.6.0",
    vllm="0.26.0",
    commit="0123456789ab",
)
# Tokens/s and seconds of the peers, as measured once.
RATES = {
    FLASH: {"prefill": 40720.0, "decode": 3670.0, "long": 30068.0, START_UP: 31.0},
    TRITON: {"prefill": 27573.0, "decode": 3371.0, "long": 14156.0, START_UP: 35.0},
    OURS: {"prefill": 41000.0, "decode": 3700.0, "long": 31000.0, START_UP: 30.0},
}


def answer(tokens=(4, 5, 6), logprobs=(-1.0, -1.0, -1.0), prompt=(-2.0, -3.0)):
    """Log-probabilities of the tokens themselves."""
    rows = tuple({token: value} for token, value in zip(tokens, logprobs, strict=True))
    return Answer(prompt=prompt, tokens=tokens, logprobs=rows)


def backend_result(name, rates, **fields):
    speeds = [
        Speed(workload=item.name, seconds=(item.tokens / rates[item.name],))
        for item in WORKLOADS
        if item.name in rates
    ]
    values = {"start_up_s": rates.get(START_UP), "speeds": tuple(speeds), "answers": (answer(),)}
    return BackendResult(backend=name, **{**values, **fields})


def results_of(rates=None, **fields):
    made = tuple(backend_result(name, found) for name, found in (rates or RATES).items())
    return EngineResults(environment=ENVIRONMENT, rounds=3, **{"backends": made, **fields})


def changed(backend, what, value):
    """``RATES`` with one number replaced, or taken out."""
    rates = {name: dict(found) for name, found in RATES.items()}
    rates[backend].pop(what)
    if value is not None:
        rates[backend][what] = value
    return rates


def verdicts(results):
    return {check.text: check.verdict for check in (check_of(results, item) for item in TARGETS)}


# -- Workloads and targets.


def test_the_workloads_are_those_that_peers_were_measured_on():
    assert [item.what for item in WORKLOADS] == [
        "32 x (4096 in + 1 out), in tok/s",
        "128 x (1024 in + 128 out), out tok/s",
        "8 x (12288 in + 64 out), in tok/s",
    ]
    assert [item.tokens for item in WORKLOADS] == [32 * 4096, 128 * 128, 8 * 12288]
    assert max(item.prompt_len + item.output_len for item in WORKLOADS) <= MAX_MODEL_LEN


def test_the_targets_are_all_there():
    assert [item.text for item in TARGETS] == [
        "decode >= 1.00 x FLASH_ATTN",
        "prefill >= 1.00 x FLASH_ATTN",
        "long >= 1.00 x FLASH_ATTN",
        "prefill >= 1.40 x TRITON_ATTN",
        "long >= 1.90 x TRITON_ATTN",
        "start-up <= 1.00 x TRITON_ATTN",
    ]


def test_workloads_are_chosen_by_name_in_their_order():
    assert select_workloads([]) == WORKLOADS
    assert [item.name for item in select_workloads(["long", "prefill"])] == ["prefill", "long"]
    with pytest.raises(ValueError, match="prefill, decode, long; got 'train'"):
        select_workloads(["train"])


def test_a_rate_is_of_the_median_round():
    speed = Speed(workload="decode", seconds=(5.0, 4.0, 8.0))
    result = BackendResult(backend=OURS, speeds=(speed,), start_up_s=12.0)
    assert value_of(result, "decode", WORKLOADS) == 128 * 128 / 5.0
    assert speed.spread == pytest.approx(0.8)
    assert value_of(result, "long", WORKLOADS) is None
    assert value_of(result, START_UP, WORKLOADS) == 12.0
    assert value_of(None, "decode", WORKLOADS) is None


def test_targets_are_met_by_measurements():
    assert set(verdicts(results_of()).values()) == {Verdict.MET}


@pytest.mark.parametrize(
    ("what", "value", "missed"),
    [
        ("decode", 3669.0, {"decode >= 1.00 x FLASH_ATTN"}),
        ("prefill", 0.999 * 40720, {"prefill >= 1.00 x FLASH_ATTN"}),
        (
            "prefill",
            1.39 * 27573,
            {"prefill >= 1.00 x FLASH_ATTN", "prefill >= 1.40 x TRITON_ATTN"},
        ),
        ("long", 1.905 * 14156, {"long >= 1.00 x FLASH_ATTN"}),
        ("long", 1.89 * 14156, {"long >= 1.00 x FLASH_ATTN", "long >= 1.90 x TRITON_ATTN"}),
        (START_UP, 35.1, {"start-up <= 1.00 x TRITON_ATTN"}),
    ],
)
def test_a_miss_is_a_miss_in_the_table_too(what, value, missed):
    results = results_of(changed(OURS, what, value))
    found = verdicts(results)
    assert {text for text, verdict in found.items() if verdict is Verdict.NOT_MET} == missed
    assert {found[text] for text in set(found) - missed} == {Verdict.MET}
    rows = [line for line in render_markdown(results).splitlines() if "| NOT met |" in line]
    assert {line.split("|")[1].strip() for line in rows} == missed
    assert f"{len(TARGETS) - len(missed)} met, {len(missed)} NOT met, 0 not measured" in (
        render_markdown(results)
    )


@pytest.mark.parametrize("backend", [TRITON, OURS])
@pytest.mark.parametrize("what", ["prefill", "long", START_UP])
def test_a_missing_number_leaves_its_targets_open(backend, what):
    found = verdicts(results_of(changed(backend, what, None)))
    for target in TARGETS:
        is_open = target.what == what and backend in (OURS, target.against)
        assert found[target.text] is (Verdict.NOT_MEASURED if is_open else Verdict.MET)


@pytest.mark.parametrize("absent", BACKENDS)
def test_an_absent_backend_leaves_its_targets_open_and_listed(absent):
    results = results_of({name: found for name, found in RATES.items() if name != absent})
    for target in TARGETS:
        is_open = absent in (OURS, target.against)
        expected = Verdict.NOT_MEASURED if is_open else Verdict.MET
        assert verdicts(results)[target.text] is expected
    text = render_markdown(results)
    assert all(target.text in text for target in TARGETS)


def test_an_engine_of_ours_that_fails_meets_nothing():
    failed = BackendResult(backend=OURS, speed_error="exit code 1: ValueError: outputs must vary")
    peers = results_of().backends[:2]
    results = results_of(backends=(*peers, failed))
    assert set(verdicts(results).values()) == {Verdict.NOT_MET}
    text = render_markdown(results)
    assert "- CUSTOM, speed: exit code 1: ValueError: outputs must vary" in text
    assert "| CUSTOM | failed |" in text


def test_a_smaller_model_or_other_workloads_judge_nothing():
    assert set(verdicts(results_of(layers=4)).values()) == {Verdict.NOT_MEASURED}
    smaller = WORKLOADS[0].replace(num_prompts=4)
    found = verdicts(results_of(workloads=(smaller, *WORKLOADS[1:])))
    assert found["prefill >= 1.00 x FLASH_ATTN"] is Verdict.NOT_MEASURED
    assert found["decode >= 1.00 x FLASH_ATTN"] is Verdict.MET


# -- Log-probabilities.


def test_answers_are_compared_while_the_tokens_agree():
    ours = answer((4, 5, 6, 7), (-1.0, -1.5, -2.0, -9.0), prompt=(-2.0, -3.0))
    theirs = Answer(
        prompt=(-2.0, -3.25),
        tokens=(4, 5, 8, 7),
        logprobs=({4: -1.0}, {5: -1.0, 9: -3.0}, {8: -1.9, 6: -2.125}, {7: 0.0}),
    )
    found = compare_answers([ours], [theirs])
    # Two positions of the prompt, and three generated ones: the third has the same prefix still.
    assert found.positions == 5
    assert found.largest == pytest.approx(0.5)
    assert found.mean == pytest.approx((0 + 0.25 + 0 + 0.5 + 0.125) / 5)
    assert (found.same_tokens, found.tokens) == (2, 4)


def test_equal_answers_differ_by_nothing():
    assert compare_answers([answer()], [answer()]) == (5, 0.0, 0.0, 3, 3)


def test_answers_to_other_prompts_are_not_compared():
    with pytest.raises(ValueError, match="same prompts"):
        compare_answers([answer()], [answer(prompt=(-1.0,))])
    with pytest.raises(ValueError, match="got none"):
        compare_answers([], [])


def test_the_reference_is_flash_attention_or_the_first_of_vllms():
    results = results_of()
    assert reference_of(results).backend == FLASH
    without = results_of(backends=(results.backends[2], results.backends[1]))
    assert reference_of(without).backend == TRITON
    assert reference_of(results_of(backends=(results.backends[2],))) is None


@pytest.mark.parametrize(
    "outputs",
    [
        [[3], [3], [3]],
        [[3, 4, 5], [3, 4, 5]],
        [[3, 3, 3], [4, 4, 4]],
        [[3, 3, 3], [4, 4, 4], [5, 6, 7]],
        [[3, 3]],
    ],
)
def test_constant_outputs_are_an_error(outputs):
    with pytest.raises(ValueError, match="outputs must vary"):
        require_varied(outputs)


@pytest.mark.parametrize("outputs", [[[3], [4]], [[3]], [[3, 4]], [[3, 4], [3, 5], [6, 6]]])
def test_varied_outputs_are_not(outputs):
    assert require_varied(outputs) is None


# -- Rendering.


def test_the_tables_show_every_number():
    differing = backend_result(OURS, RATES[OURS], answers=(answer(prompt=(-2.5, -3.0)),))
    results = results_of(backends=(*results_of().backends[:2], differing))
    text = render_markdown(results)
    assert text.startswith("# vLLM 0.26.0 on NVIDIA H200\n")
    assert "2026-11-21, commit 0123456789ab; torch 2.11.0+cu130, triton 3.6.0." in text
    prefill = "prefill: 32 x (4096 in + 1 out), in tok/s"
    assert f"| {prefill} | FLASH_ATTN | 40720 | 0.0 % | 1.000 | 1.477 |" in text
    assert f"| {prefill} | CUSTOM | 41000 | 0.0 % | 1.007 | 1.487 |" in text
    assert "| CUSTOM | 30.0 | 0.968 | 0.857 |" in text
    assert "| FLASH_ATTN | reference |  |  |  |" in text
    assert "| CUSTOM | 0.5000 | 0.10000 | 5 | 3 of 3 |" in text
    assert "| prefill >= 1.40 x TRITON_ATTN | 1.487 x | met |" in text
    assert "Targets: 6 met, 0 NOT met, 0 not measured." in text
    assert "Not measured" not in text
    header = [line for line in text.splitlines() if line.startswith("| --- ")]
    assert len(header) == 4


def test_what_was_not_measured_is_said():
    rates = changed(OURS, "long", None)
    text = render_markdown(results_of(rates))
    assert "| CUSTOM | not measured |  |  |  |" in text
    assert "| long >= 1.00 x FLASH_ATTN |  | not measured |" in text
    without = results_of().backends[2].replace(answers=(), answer_error="took longer than 5 s")
    text = render_markdown(results_of(backends=(*results_of().backends[:2], without)))
    assert "| CUSTOM | failed |  |  |  |" in text
    assert "- CUSTOM, answers: took longer than 5 s" in text


def test_results_without_any_backend_render():
    text = render_markdown(EngineResults(rounds=1, layers=4))
    assert "cut to 4 layers" in text
    assert "Targets: 0 met, 0 NOT met, 6 not measured." in text


def test_results_survive_json():
    results = results_of()
    assert EngineResults.model_validate_json(results.model_dump_json()) == results
    with pytest.raises(SpecError):
        Speed(workload="decode", seconds=())


# -- Merging.


def test_a_backend_measured_again_replaces_the_earlier_one():
    earlier = results_of({FLASH: RATES[FLASH], OURS: RATES[OURS]}).replace(
        environment=ENVIRONMENT.replace(commit="old")
    )
    later = results_of({TRITON: RATES[TRITON], OURS: {**RATES[OURS], "decode": 9999.0}})
    whole = later.merged(earlier)
    assert [result.backend for result in whole.backends] == list(BACKENDS)
    assert whole.environment.commit == "old, 0123456789ab"
    assert value_of(whole.of(OURS), "decode", WORKLOADS) == pytest.approx(9999.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": 4},
        {"workloads": WORKLOADS[:1]},
        {"environment": ENVIRONMENT.replace(device="another")},
        {"environment": ENVIRONMENT.replace(vllm="0.33.0")},
    ],
)
def test_results_of_something_else_do_not_merge(fields):
    with pytest.raises(ValueError, match="earlier results must have"):
        results_of().merged(results_of().replace(**fields))


def test_a_failed_run_merges_with_an_earlier_one():
    failed = EngineResults(rounds=3, backends=(BackendResult(backend=OURS, speed_error="no"),))
    whole = failed.merged(results_of())
    assert whole.environment.device == "NVIDIA H200"
    assert whole.of(OURS).speed_error == "no"


# -- What a process does, as far as it goes without vLLM.


def test_importing_the_benchmark_loads_no_vllm():
    code = (
        "import sys, attn.bench.engine.vllm\n"
        "print('vllm' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class TinyLlama(torch.nn.Module):
    """A model with parameters named and shaped as in vLLM."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64, 256)
        self.qkv_proj = torch.nn.Linear(256, 512, bias=False)
        self.down_proj = torch.nn.Linear(1024, 256, bias=False)
        self.input_layernorm = torch.nn.LayerNorm(256, bias=False)
        self.lm_head = torch.nn.Linear(256, 512, bias=False)


def test_weights_keep_the_size_of_what_they_transform_and_are_always_the_same():
    model, again = TinyLlama(), TinyLlama()
    for made in (model, again):
        draw_weights(made)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, again.get_parameter(name)), name
    assert model.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.1)
    assert model.qkv_proj.weight.std().item() * 256**0.5 == pytest.approx(1.6, rel=0.1)
    assert model.down_proj.weight.std().item() * 1024**0.5 == pytest.approx(1.0, rel=0.1)
    assert model.lm_head.weight.std().item() * 256**0.5 == pytest.approx(3.0, rel=0.1)
    assert model.input_layernorm.weight.mean().item() == pytest.approx(1.0, abs=0.05)
    states = model.embed_tokens(torch.arange(64))
    tokens = model.lm_head(model.input_layernorm(states)).argmax(-1)
    require_varied([[token] for token in tokens.tolist()])


def test_prompts_are_random_distinct_and_repeatable():
    prompts = make_prompts(4, 100, 64, seed=1)
    assert prompts == make_prompts(4, 100, 64, seed=1)
    assert prompts != make_prompts(4, 100, 64, seed=2)
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    assert len({tuple(tokens) for tokens in ids}) == 4
    assert {len(tokens) for tokens in ids} == {100}
    assert all(0 <= token < 64 for tokens in ids for token in tokens)


def test_a_process_keeps_the_engine_and_starts_with_empty_caches(tmp_path):
    outer = {"PATH": "bin", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TRITON_CACHE_DIR": "warm"}
    made = worker_environment(tmp_path, outer)
    assert made["PATH"] == "bin"
    assert made["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    caches = [made[f"{name}"] for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")]
    assert all(Path(cache).parent == tmp_path for cache in caches)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("INFO x\n[rank0]: ValueError: head | size\nWARNING bye\n", "ValueError: head / size"),
        ("killed\n", "killed"),
        ("", "no output"),
    ],
)
def test_a_failure_is_told_by_its_last_error(text, said):
    assert last_words(text) == said


# -- A run, its processes replaced.


def fake_job(job, timeout_s, log):
    """A job that answers as measured, except that ours fails to answer."""
    if job.kind is Kind.ANSWERS:
        if job.backend == OURS:
            return "exit code 1: ValueError: outputs must vary"
        return JobResult(environment=ENVIRONMENT, start_up_s=1.0, answers=(answer(),))
    rates = RATES[job.backend]
    speeds = tuple(
        Speed(workload=item.name, seconds=(item.tokens / rates[item.name],) * job.rounds)
        for item in job.workloads
    )
    return JobResult(environment=ENVIRONMENT, start_up_s=rates[START_UP], speeds=speeds)


def test_a_run_measures_each_backend_twice_and_reports_after_each(monkeypatch):
    jobs, parts = [], []

    def recorded(job, timeout_s, log):
        jobs.append(job)
        return fake_job(job, timeout_s, log)

    monkeypatch.setattr(bench, "run_job", recorded)
    results = bench_engine(EngineBench(rounds=2, layers=8), lambda line: None, parts.append)
    answered, timed = sorted(jobs[:3], key=lambda job: BACKENDS.index(job.backend)), jobs[3:]
    assert [job.backend for job in timed] == [job.backend for job in answered] == list(BACKENDS)
    assert {(job.kind, job.model["num_hidden_layers"]) for job in timed} == {(Kind.SPEED, 8)}
    assert {(job.kind, job.model["num_hidden_layers"]) for job in answered} == {(Kind.ANSWERS, 4)}
    assert all({**MODEL, **job.model} == job.model for job in jobs)
    assert [[bool(one.speeds) for one in part.backends] for part in parts] == [
        [True] * done + [False] * (3 - done) for done in range(4)
    ]
    assert all(render_markdown(part) for part in parts)
    assert parts[-1] == results
    assert results.environment == ENVIRONMENT
    assert results.of(OURS).answer_error.endswith("outputs must vary")


def test_the_command_writes_tables_and_data_and_tells_a_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "run_job", fake_job)
    monkeypatch.setattr(bench, "require_engine", lambda: None)
    out, data = tmp_path / "engine.md", tmp_path / "engine.json"
    arguments = ["--out", str(out), "--json", str(data), "--commit", "abc"]
    assert main([*arguments, "--backends", FLASH, OURS]) == 1
    assert "exit code 1: ValueError: outputs must vary" in out.read_text()
    assert "CUSTOM: answers, 4 layers" in capsys.readouterr().out
    # Another backend is added to what is in the file already.
    assert main([*arguments, "--backends", TRITON, "--merge", str(data)]) == 1
    found = EngineResults.model_validate_json(data.read_text())
    assert [result.backend for result in found.backends] == list(BACKENDS)
    assert "Targets: 6 met" in out.read_text()
    assert main(["--render", "--merge", str(data)]) == 1
    assert "Targets: 6 met" in capsys.readouterr().out
    assert main(["--backends", FLASH, "--workloads", "decode"]) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--workloads", "train"], "workload must be one of"),
        (["--rounds", "0"], "rounds must be positive"),
        (["--render"], "merge must name results"),
        (["--render", "--merge", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_told_apart_from_failure(arguments, problem, capsys):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_earlier_results_that_cannot_be_read_are_bad_input(tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"rounds": 0}))
    assert main(["--render", "--merge", str(path)]) == 2
    assert "rounds" in capsys.readouterr().err
    with pytest.raises(ValueError, match="got none"):
        Report().combined(None)


def test_a_process_that_fails_is_a_reason():
    lines = []
    # Without vLLM the process cannot import it; with it, there is no such backend.
    job = Job(kind=Kind.SPEED, backend="NO_SUCH", model={"vocab_size": 8}, workloads=WORKLOADS[:1])
    found = bench.run_job(job, 120.0, lines.append)
    assert isinstance(found, str)
    assert found.startswith("exit code 1: ")
    assert lines
