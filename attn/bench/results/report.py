"""Files of a kernel benchmark's results, and merging of several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn.bench.command import check_writable
from attn.bench.results.render import render_markdown
from attn.bench.results.results import BenchResults
from specs.base import parse_spec


@dataclass(frozen=True)
class Report:
    """Files that results are written to, and files with earlier results to merge."""

    out: Path | None = None
    """File for the markdown; None prints it."""
    json: Path | None = None
    """File for the results as JSON; None writes none."""
    merge: tuple[Path, ...] = ()
    """Files with earlier results; a case measured now replaces its earlier result."""

    def check(self) -> None:
        """Check all files before the work.

        Raises:
            ValueError: a file cannot be written, or earlier results cannot be read.
            OSError: a file with earlier results does not exist.
        """
        check_writable("--out", self.out)
        check_writable("--json", self.json)
        for path in self.merge:
            load_results(path)

    def combined(self, results: BenchResults | None) -> BenchResults:
        """Merge new results, if any, with the earlier ones.

        Raises:
            ValueError: earlier results cannot be read, or are of another backend, device or table.
        """
        found = [load_results(path) for path in self.merge] + ([results] if results else [])
        if not found:
            raise ValueError("merge must name results to render, got none")
        order = [case.name for case in found[0].environment.table.cases]
        whole = found[0]
        for later in found[1:]:
            whole = later.merged(whole, order)
        return whole

    def write(self, results: BenchResults) -> None:
        """Write the files that were asked for."""
        for path, text in (
            (self.out, render_markdown(results)),
            (self.json, results.model_dump_json() + "\n"),
        ):
            if path is not None:
                path.write_text(text, encoding="utf-8")


def load_results(path: Path) -> BenchResults:
    """Read results from a JSON file that :class:`Report` wrote.

    Raises:
        SpecError: the file holds no results; the message names field and value.
    """
    return parse_spec(BenchResults, path.read_text(encoding="utf-8"), str(path))
