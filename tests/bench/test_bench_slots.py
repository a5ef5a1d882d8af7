"""SGLang's engine: jobs in processes of their own, and the page of their results."""

import json
from importlib.metadata import distributions

from attn.bench.engine import slots

CHECKED = {
    "llama": {"attn": {"mean": 0.02, "max": 0.3}, "triton": {"mean": 0.02, "max": 0.2}},
    "gpt_oss": {"attn": {"mean": 0.9, "max": 3.0}, "triton": {"mean": 0.02, "max": 0.2}},
    "gemma3": {"attn": {"problem": "exit code 1"}, "triton": {"mean": 0.02, "max": 0.2}},
}


def test_the_page_says_what_is_within_budget():
    page = slots.page({"check": CHECKED})
    assert "| llama | attn | 0.0200 | 0.3000 | within budget |" in page
    assert "| gpt_oss | attn | 0.9000 | 3.0000 | beyond budget |" in page
    assert "| gemma3 | attn | | | failed |" in page


def test_the_page_has_the_best_round():
    seconds = {name: [4.0, 2.0, 3.0] for name in slots.WORKLOADS}
    page = slots.page({"bench": {"attn": {"seconds": seconds}, "triton": {"problem": "x"}}})
    assert "| decode: 64 x 512 + 256 | 8192 | failed |" in page
    assert "| prefill: 8 x 8192 + 1 | 32768 | failed |" in page


def test_results_of_two_runs_are_one_page(tmp_path):
    first, second, out = (tmp_path / name for name in ("a.json", "b.json", "page.md"))
    first.write_text(json.dumps({"check": CHECKED}))
    second.write_text(json.dumps({"bench": {"attn": {"problem": "x"}}}))
    assert slots.main(["render", str(first), str(second), "--out", str(out)]) == 0
    assert "llama" in out.read_text()
    assert "tokens/s" in out.read_text()


def test_a_process_that_fails_leaves_the_end_of_its_output(tmp_path):
    done = slots.in_process({"folder": str(tmp_path), "kind": "nothing"}, 60)
    assert "exit code 1" in done["problem"]
    assert "Error" in done["problem"]


def test_a_process_is_stopped_at_its_limit(tmp_path):
    done = slots.in_process({"folder": str(tmp_path), "kind": "check"}, 0.05)
    assert done["problem"].startswith("stopped after 0 s")


def test_sglang_finds_our_entry_point(tmp_path):
    folder = slots.prepared(tmp_path)
    (found,) = distributions(path=[str(folder)])
    (entry_point,) = found.entry_points
    assert entry_point.group == "sglang.srt.plugins"
    assert callable(entry_point.load())


def test_prompts_are_the_same_in_every_process():
    assert slots.prompts_of((3, 5), 50) == slots.prompts_of((3, 5), 50)
    assert [len(one) for one in slots.prompts_of((3, 5), 50)] == [3, 5]
