"""Numbers that pages quote are those of the committed tables."""

import re
from pathlib import Path

import pytest

from attn.bench.results.chart import rows_under

DOCS = Path(__file__).parents[2] / "docs"


def text_of(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_guide_has_the_seconds_of_the_engines_start():
    page = text_of("benchmarks/h200_vllm.md")
    seconds = {row["backend"]: row["seconds"] for row in rows_under(page_from(page), "backend")}
    words = " ".join(text_of("vllm.md").split())
    assert (
        f"it took {seconds['CUSTOM']} s, where vLLM's TRITON_ATTN took {seconds['TRITON_ATTN']} s "
        f"and FLASH_ATTN {seconds['FLASH_ATTN']} s"
    ) in words


def page_from(page: str) -> str:
    return page[page.index("## Start-up") :]


def test_the_cost_of_batch_invariant_prefill_is_that_of_the_table():
    page = text_of("benchmarks/h200_triton_attn.md")
    rows = rows_under(page[page.index("## Batch-invariant prefill") :], "case")
    ratios = [float(row["invariant / default"]) for row in rows]
    (quoted,) = re.findall(r"\| prefill \| ([\d.]+) times", text_of("tuning.md"))
    assert [round(ratio, 1) for ratio in ratios] == [pytest.approx(float(quoted))] * len(ratios)
