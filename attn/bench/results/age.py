"""How many commits since a table was measured have touched what it measures.

    python -m attn.bench.results.age docs/benchmarks/*.md

The number is asked of git whenever a table is shown, so no file holds it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attn.bench.cases.dense import BenchTable
from attn.bench.command import USER_ERRORS, Parser, usage_error

ROOT: Final = Path(__file__).resolve().parents[3]
_SHARED: Final = ("attn/kernels/lang", "builders/launch")
_DENSE: Final = (
    *("attn/kernels/dense", "attn/impls/dense", "builders/dense", "builders/splitkv"),
    *_SHARED,
)
_LATENT: Final = (
    *("attn/kernels/latent", "attn/impls/latent", "builders/latent", "builders/splitkv"),
    *_SHARED,
)
_SPARSE: Final = (
    *("attn/kernels/sparse", "attn/impls/sparse", "attn/ops", "builders/sparse"),
    *_SHARED,
)
_VENDOR: Final = ("attn/impls/vendor", "builders/vendor", "attn/kernels/cache")
MEASURED: Final[dict[BenchTable, tuple[str, ...]]] = {
    BenchTable.DENSE: _DENSE,
    BenchTable.HOPPER: _DENSE,
    BenchTable.INVARIANCE: _DENSE,
    BenchTable.MLA: _LATENT,
    BenchTable.FLASHINFER: _VENDOR,
    BenchTable.TRTLLM_MLA: (*_VENDOR, *_LATENT),
    BenchTable.SPARSE_MLA: _SPARSE,
}
"""Folders whose code each table measures."""

PAGES: Final = {
    "h200_triton_attn.md": BenchTable.DENSE,
    "h200_hopper.md": BenchTable.HOPPER,
    "h200_invariance.md": BenchTable.INVARIANCE,
    "h200_mla.md": BenchTable.MLA,
    "h200_flashinfer.md": BenchTable.FLASHINFER,
    "h200_trtllm_mla.md": BenchTable.TRTLLM_MLA,
    "h200_sparse_mla.md": BenchTable.SPARSE_MLA,
}
"""Tables by the name of their file, where they are committed."""

_HEAD = re.compile(r"^\d{4}-\d\d-\d\d, commit ([^;]+);.*$", re.MULTILINE)


def commits_since(commit: str, paths: Sequence[str], root: Path = ROOT) -> int | None:
    """Number of commits after ``commit`` that touched files under ``paths``.

    Args:
        commit: the measured commit, or several with commas, of which the oldest counts. A mark
            that the tree had changes is left out.
        paths: folders, from the root of the repository.
        root: root of the repository.

    Returns:
        None where git is not there, or does not know the commit.
    """
    counts = []
    for name in commit.split(", "):
        known = name.removesuffix("-dirty")
        if not re.fullmatch(r"[0-9a-f]{7,40}", known):
            return None
        command = ["git", "rev-list", "--count", f"{known}..HEAD", "--", *paths]
        try:
            done = subprocess.run(
                command, cwd=root, capture_output=True, text=True, check=False, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        counts.append(int(done.stdout))
    return max(counts)


def age_sentence(commit: str, table: BenchTable, root: Path = ROOT) -> str:
    """A sentence on what has changed since a table was measured; empty where git cannot say.

    Args:
        commit: the measured commit, as the table names it.
        table: the table.
        root: root of the repository.
    """
    paths = MEASURED[table]
    count = commits_since(commit, paths, root)
    if count is None:
        return ""
    folders = ", ".join(f"`{path}`" for path in paths)
    have = "commit since has" if count == 1 else "commits since have"
    return f"{count or 'No'} {have} touched what this table measures ({folders})."


def with_age(text: str, name: str, root: Path = ROOT) -> str:
    """A committed table with the sentence below its date; the text itself where there is none.

    Args:
        text: the page.
        name: name of its file.
        root: root of the repository.
    """
    head, table = _HEAD.search(text), PAGES.get(name)
    said = "" if head is None or table is None else age_sentence(head[1], table, root)
    if head is None or not said:
        return text
    return f"{text[: head.end()]}\n\n{said}{text[head.end() :]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the sentence of each table; the exit code is 2 for bad input.

    Args:
        argv: the arguments; None takes the process's.
    """
    parser = Parser(
        prog="python -m attn.bench.results.age", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("tables", nargs="+", type=Path, help="results in Markdown, as committed")
    asked: argparse.Namespace = parser.parse_args(argv)
    try:
        for path in asked.tables:
            head, table = _HEAD.search(path.read_text(encoding="utf-8")), PAGES.get(path.name)
            said = "" if head is None or table is None else age_sentence(head[1], table)
            print(f"{path}: {said or 'unknown to git, or no table of attn bench kernels'}")
    except USER_ERRORS as error:
        return usage_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
