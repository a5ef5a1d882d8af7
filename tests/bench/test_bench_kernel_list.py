"""The list of kernels of a sparse engine: how the page is written, and the committed page."""

import re
import sys
from pathlib import Path

import pytest

from attn.bench.engine import compare, kernel_list
from attn.bench.engine.engine import EngineEnvironment
from attn.bench.engine.kernel_list import FORBIDDEN, LOADS, MODEL, KernelPage, forbidden_in, render
from attn.bench.engine.parts import KernelTime, PartName, part_of
from attn.bench.engine.shapes import CUSTOM

KEPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "h200_vllm_sparse_kernels.md"
ROW = re.compile(r"^\| (\w+) \| `(.+)` \| (\d+) \| [\d.]+ \|$", re.MULTILINE)


@pytest.mark.parametrize(
    "name",
    [
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<",
        "FlashMLA",
        "void deep_gemm::sm90_fp8_paged_mqa_logits<",
        "void vllm::persistent_topk_kernel<",
        "cooperative_topk",
        "void vllm::topKPerRowDecode<1024, false>",
        "void vllm::cp_gather_indexer_k_quant_cache_kernel<",
    ],
)
def test_a_kernel_of_vllms_own_road_is_found(name):
    assert forbidden_in(["gemm", name]) == [name]


def test_ours_are_not():
    names = ["hopper_narrow_sparse_kernel", "select_topk_kernel", "hopper_paged_logits_kernel"]
    assert forbidden_in(names) == []


def test_the_page_says_what_ran_and_in_which_steps():
    kernels = (
        KernelTime(name="select_topk_kernel", count=3, us=1500.0),
        KernelTime(name="flash_fwd|x", count=1, us=10.0),
    )
    environment = EngineEnvironment(vllm="0.26.0", device="NVIDIA H200")
    text = render(KernelPage(environment=environment, sections=((CUSTOM, LOADS[2], kernels),)))
    assert "## CUSTOM, decode\n\n16 x (8193 cached + 16 out).\n" in text
    assert "| indexer | `select_topk_kernel` | 3 | 1.500 |" in text
    assert "(in any case): `flash_fwd/x`." in text
    assert [found[1] for found in ROW.findall(text)] == ["select_topk_kernel", "flash_fwd/x"]
    assert "(in any case): none." in render(KernelPage())


def test_the_loads_are_shorter_and_longer_than_a_list():
    width = MODEL.config["index_topk"]
    lens = [load.prompt_len for load in LOADS]
    assert min(lens) < width < 4 * width < max(lens)
    assert any(load.output_len > 1 for load in LOADS)


@pytest.mark.skipif(not KEPT.exists(), reason="no list is kept yet")
def test_the_kept_list_holds_no_kernel_of_vllms_own_road():
    rows = ROW.findall(KEPT.read_text(encoding="utf-8"))
    names = {name for _, name, _ in rows}
    assert forbidden_in(names) == []
    # The list is of a run in which attention and the indexer took part.
    assert {part_of(name) for name in names} == set(PartName)
    assert any("sparse" in name for name in names)
    assert any("topk" in name for name in names)
    assert all(f"`{part}`" in KEPT.read_text(encoding="utf-8") for part in FORBIDDEN)


FAKE = """
import json, os, sys, time
job = json.load(open(sys.argv[1] + "/job.json"))
begun = os.path.dirname(os.path.abspath(__file__)) + "/begun-"
open(begun + job["contender"]["cache"], "w").close()
# An engine waits for the other: both must start at once.
while not all(os.path.exists(begun + cache) for cache in ("auto", "fp8_ds_mla")):
    time.sleep(0.01)
out = os.fdopen(int(os.environ["ATTN_ANSWERS"]), "w")
def answer(**fields):
    out.write(json.dumps(fields) + "\\n"); out.flush()
answer(environment={"device": "a GPU"}, start_up_s=1.5)
for line in sys.stdin:
    if "FAILS" == job["contender"]["cache"] and json.loads(line)["load"]["name"] == "decode":
        raise RuntimeError("no memory")
    answer(seconds=1.0, kernels=[{"name": "KERNEL", "count": 2, "us": 10.0}])
"""


@pytest.fixture
def listing(tmp_path, monkeypatch):
    """Run the command with processes that have no engine; returns its exit code and page."""
    real = compare.subprocess.Popen
    monkeypatch.setattr(kernel_list, "require_engine", lambda: None)

    def run(kernel, fails=""):
        worker, page = tmp_path / "worker.py", tmp_path / "page.md"
        worker.write_text(FAKE.replace("KERNEL", kernel).replace("FAILS", fails))

        def popen(command, **options):
            return real([sys.executable, str(worker), command[-1]], **options)

        monkeypatch.setattr(compare.subprocess, "Popen", popen)
        return kernel_list.main(["--out", str(page)]), page.read_text()

    return run


@pytest.mark.parametrize(("name", "code"), [("sparse_mla_kernel", 0), ("flash_fwd", 1)])
def test_the_command_writes_the_page_and_fails_for_a_forbidden_kernel(name, code, listing):
    found, text = listing(name)
    assert found == code
    assert text.count(f"| `{name}` | 2 |") == 2 * len(LOADS)
    assert text.startswith("# Kernels of vLLM unknown with our sparse backend on a GPU")
    assert "failed" not in text


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_what_was_found_is_kept_when_an_engine_fails(cache, listing):
    code, text = listing("sparse_mla_kernel", fails=cache)
    assert code == 1
    # Two loads come before the load that fails.
    assert text.count("| `sparse_mla_kernel` | 2 |") == len(LOADS) + 2
    label = "CUSTOM" if cache == "auto" else "CUSTOM, fp8_ds_mla"
    assert f"{label} failed: `exit code 1: RuntimeError: no memory`" in text


def test_the_page_is_written_after_each_engine(listing, monkeypatch):
    pages, render_page = [], kernel_list.render
    monkeypatch.setattr(kernel_list, "render", lambda page: pages.append(page) or render_page(page))
    listing("sparse_mla_kernel")
    assert [len(page.sections) for page in pages] == [len(LOADS), 2 * len(LOADS)]
