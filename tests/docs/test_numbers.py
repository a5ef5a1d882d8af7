"""Numbers that pages quote are those of the committed tables."""

import re
import subprocess
from pathlib import Path

import pytest

from attn.bench.results import age
from attn.bench.results.chart import rows_under

DOCS = Path(__file__).parents[2] / "docs"
IN_GIT = (DOCS.parent / ".git").exists()


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


def test_the_cost_of_batch_invariance_is_that_of_the_table():
    page = text_of("benchmarks/h200_invariance.md")
    rows = rows_under(page[page.index("## With batch invariance") :], "case")
    ratios = {row["case"]: float(row["invariant / default"]) for row in rows}
    short = [name for name in ratios if name.startswith(("dec", "spec")) and "fp8" not in name]
    groups = {
        "decodes and verifies, 16-bit cache": short,
        "decodes, fp8 cache": ["dec_fp8_b128_8k"],
        "prompts, head size 64": ["pre_d64_1x8k"],
        "prompts, head size 128": ["pre_1x8k", "pre_16x1k", "chunk_2k_of_16k", "pre_sw1k_1x16k"],
        "prompts, head size 256": ["pre_d256_1x8k"],
    }
    for what, names in groups.items():
        found = sorted({f"{ratios[name]:.2f}" for name in names}, key=float)
        (quoted,) = re.findall(rf"\| {what} \| ([^|]+) \|", text_of("tuning.md"))
        assert quoted == " to ".join(dict.fromkeys([found[0], found[-1]])), what


# -- How old a table is.


@pytest.mark.parametrize(
    "name", [name for name in age.PAGES if (DOCS / "benchmarks" / name).exists()]
)
def test_a_table_says_how_many_commits_since_have_touched_what_it_measures(name):
    text = text_of(f"benchmarks/{name}")
    assert "commits since" not in text, "git is asked when the table is shown"
    for path in age.MEASURED[age.PAGES[name]]:
        assert (DOCS.parent / path).is_dir(), path
    shown = age.with_age(text, name)
    if IN_GIT and shown != text:
        (line,) = set(shown.splitlines()) - set(text.splitlines())
        assert re.match(r"(No|\d+) commits? since ha(ve|s) touched what this table measures", line)


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *named, *words], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_commits_are_counted_by_what_they_touch(tmp_path, monkeypatch):
    git(tmp_path, "init", "-q")
    measured = []
    for place in ("attn/kernels/dense", "docs", "builders/launch", "attn/kernels/latent"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "a.py").write_text("1")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", place)
        measured.append(git(tmp_path, "rev-parse", "--short=12", "HEAD"))
    dense = age.MEASURED[age.BenchTable.HOPPER]
    counts = [age.commits_since(one, dense, tmp_path) for one in measured]
    assert counts == [1, 1, 0, 0]
    assert age.commits_since(f"{measured[2]}, {measured[0]}-dirty", dense, tmp_path) == 1
    page = "# T\n\n2026-11-27, commit {}; torch 2.\n\nTargets\n"
    text = page.format(measured[0])
    shown = age.with_age(text, "h200_hopper.md", tmp_path)
    assert shown.startswith(text.split("Targets")[0] + "1 commit since has touched what this ")
    assert "No commits since" in age.with_age(page.format(measured[3]), "h200_mla.md", tmp_path)
    for unknown in ("0123456789ab", "unknown", "--all"):
        text = page.format(unknown)
        assert age.with_age(text, "h200_hopper.md", tmp_path) == text
    assert age.with_age(text, "h200_vllm.md", tmp_path) == text

    def no_git(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(age.subprocess, "run", no_git)
    assert age.commits_since(measured[0], dense, tmp_path) is None
    assert age.age_sentence(measured[0], age.BenchTable.HOPPER, tmp_path) == ""


def test_the_command_says_it_for_each_table(capsys):
    assert age.main([str(DOCS / "benchmarks/h200_mla.md"), str(DOCS / "vllm.md")]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(str(DOCS / "benchmarks/h200_mla.md: "))
    assert second.endswith("no table of attn bench kernels")
    assert age.main([str(DOCS / "none.md")]) == 2
