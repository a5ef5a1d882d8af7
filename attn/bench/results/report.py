"""Where a kernel benchmark's results go, and how runs are put together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attn.bench.command import check_writable
from attn.bench.results.render import render_markdown
from attn.bench.results.results import BenchResults
from specs.base import parse_spec


@dataclass(frozen=True)
class Report:
    """Where the results go, and which earlier ones to put with them."""

    out: Path | None = None
    """Markdown; None prints it."""
    json: Path | None = None
    """Results as data."""
    merge: tuple[Path, ...] = ()
    """Earlier results; a case measured now replaces theirs."""

    def check(self) -> None:
        """Try the files before the work.

        Raises:
            ValueError: one that cannot be written, or earlier results that cannot be read.
            OSError: earlier results that are not there.
        """
        check_writable("--out", self.out)
        check_writable("--json", self.json)
        for path in self.merge:
            load_results(path)

    def combined(self, results: BenchResults | None) -> BenchResults:
        """New results, if any, over the earlier ones.

        Raises:
            ValueError: earlier results that cannot be read, or of another backend, device or
                table.
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
    """Results as :class:`Report` writes them.

    Raises:
        SpecError: not such a file; the message names field and value.
    """
    return parse_spec(BenchResults, path.read_text(encoding="utf-8"), str(path))
