"""SGLang's engine: jobs in processes of their own, and the page of their results."""

import json
import threading
from importlib.metadata import distributions

import pytest

from attn.bench.engine import slots

CHECKED = {
    "llama": {
        "attn": {"mean": 0.02, "max": 0.3, "cached": 2368, "device": "a GPU", "sglang": "0.5.16"},
        "triton": {"mean": 0.02, "max": 0.2},
    },
    "gpt_oss": {"attn": {"mean": 0.9, "max": 3.0}, "triton": {"mean": 0.02, "max": 0.2}},
    "gemma3": {"attn": {"problem": "exit code 1"}, "triton": {"mean": 0.02, "max": 0.2}},
}


def test_the_page_says_what_is_within_budget():
    page = slots.page({"check": CHECKED})
    assert "| llama | attn | 0.0200 | 0.3000 | 2368 | within budget |" in page
    assert "| gpt_oss | attn | 0.9000 | 3.0000 |  | beyond budget |" in page
    assert "| gemma3 | attn | | | | failed |" in page
    assert page.startswith("# SGLang 0.5.16 on a GPU\n")


def test_the_page_has_the_best_round():
    seconds = {name: [4.0, 2.0, 3.0] for name in slots.WORKLOADS}
    page = slots.page({"bench": {"attn": {"seconds": seconds}, "triton": {"problem": "x"}}})
    assert "| decode: 64 x 512 + 256 | 8192 | failed |" in page
    assert "| prefill: 8 x 8192 + 1 | 32768 | failed |" in page


@pytest.mark.parametrize(
    ("ours", "triton", "flashinfer", "words"),
    [
        (2.0, 3.0, 2.5, "1.250 x | met"),
        (2.0, 3.0, 1.5, "0.750 x | NOT met"),
        (2.0, 3.0, None, "1.500 x | not measured"),
        (2.0, 1.0, None, "0.500 x | NOT met"),
        (None, 1.0, 1.0, " | not measured"),
    ],
)
def test_ours_is_held_against_the_fastest(ours, triton, flashinfer, words):
    results = {
        name: {"problem": "stopped after 225 s\nlog"}
        if seconds is None
        else {"seconds": {load: [seconds + 1, seconds] for load in slots.WORKLOADS}}
        for name, seconds in (("attn", ours), ("triton", triton), ("flashinfer", flashinfer))
    }
    page = slots.page({"bench": results})
    for workload in slots.WORKLOADS:
        assert f"| {workload}: attn >= triton and flashinfer | {words} |" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| decode: 64"))
    assert row.count("not measured") == [ours, flashinfer].count(None)


def test_results_of_two_runs_are_one_page(tmp_path):
    first, second, out = (tmp_path / name for name in ("a.json", "b.json", "page.md"))
    first.write_text(json.dumps({"check": CHECKED}))
    other = {"deepseek_v32": {"attn": {"problem": "x"}}}
    second.write_text(json.dumps({"check": other, "bench": {"attn": {"problem": "x"}}}))
    assert slots.main(["render", str(first), str(second), "--out", str(out)]) == 0
    assert "llama" in out.read_text()
    assert "deepseek_v32" in out.read_text()
    assert "tokens/s" in out.read_text()


def test_a_process_that_fails_leaves_the_end_of_its_output(tmp_path):
    done = slots.in_process({"folder": str(tmp_path), "kind": "nothing"}, 60)
    assert "exit code 1" in done["problem"]
    assert "Error" in done["problem"]


def test_a_process_is_stopped_at_its_limit(tmp_path):
    done = slots.in_process({"folder": str(tmp_path), "kind": "check"}, 0.05)
    assert done["problem"].startswith("stopped after 0 s")


def test_jobs_run_side_by_side_and_each_has_a_gpu_for_itself():
    together, apart = threading.Barrier(2, timeout=30), []

    def job(gpu):
        together.wait()
        apart.append(gpu)
        return {"gpu": gpu}

    done = slots.side_by_side(dict.fromkeys("abcd", job), ["3", "5"])
    assert [*done] == ["a", "b", "c", "d"]
    assert sorted(apart) == ["3", "3", "5", "5"]


def test_a_process_sees_its_gpu_alone(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(slots, "in_process", lambda job, limit, gpu: seen.append((job, gpu)) or {})
    slots.bench(["attn", "triton"], 1, ["7"])
    assert [(job["backend"], gpu) for job, gpu in seen] == [("attn", "7"), ("triton", "7")]
    assert len({job["folder"] for job, _ in seen}) == 2


def test_gpus_are_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert slots.visible_gpus() == ["2", "5"]


class Served:
    """SGLang's engine, as far as a check reads it."""

    def __init__(self):
        self.starts = []

    def generate(self, *, input_ids, logprob_start_len, **_):
        self.starts.append(logprob_start_len)
        return [self.one(*pair) for pair in zip(input_ids, logprob_start_len, strict=True)]

    def one(self, prompt, start):
        entries = [
            (None if at == start else -0.5, prompt[at], None) for at in range(start, len(prompt))
        ]
        info = {"input_token_logprobs": entries, "output_token_logprobs": [(-0.5, 9, None)] * 2}
        return {"meta_info": {**info, "cached_tokens": start}}


def test_later_rounds_of_a_check_read_cached_pages():
    engine = Served()
    done = slots._log_probabilities(engine)
    assert engine.starts == [[0] * 6, [0, 0, 0, 128, 256, 896], [0, 0, 0, 0, 64, 256]]
    assert done["cached"] == 128 + 256 + 896 + 64 + 256
    first, second = done["rows"][5], done["rows"][11]
    assert first["tokens"] == second["tokens"]
    assert (len(first["given"]), len(second["given"])) == (899 + 2, 3 + 2)
    assert None not in (*first["given"], *second["given"])


def test_sglang_finds_our_entry_point(tmp_path):
    folder = slots.prepared(tmp_path)
    (found,) = distributions(path=[str(folder)])
    (entry_point,) = found.entry_points
    assert entry_point.group == "sglang.srt.plugins"
    assert callable(entry_point.load())


def test_prompts_are_the_same_in_every_process():
    assert slots.prompts_of((3, 5), 50) == slots.prompts_of((3, 5), 50)
    assert [len(one) for one in slots.prompts_of((3, 5), 50)] == [3, 5]
