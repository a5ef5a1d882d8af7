"""Files of a kernel benchmark's results, merging of several runs, comparison with an older one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attn.bench.command import check_writable
from attn.bench.results.age import age_sentence
from attn.bench.results.moves import Move, bench_moves, move_lines
from attn.bench.results.origin import KERNELS_SCHEMA, command_line, read_results
from attn.bench.results.pages.bench import bench_page
from attn.bench.results.pages.frame import check_page, render_page
from attn.bench.results.render import render_markdown
from attn.bench.results.results import BenchResults


@dataclass(frozen=True)
class Report:
    """Files that results are written to, and files with earlier results."""

    out: Path | None = None
    """File for the markdown; None prints it."""
    json: Path | None = None
    """File for the results as JSON; None writes none."""
    merge: tuple[Path, ...] = ()
    """Files with earlier results; a case measured now replaces its earlier result."""
    html: Path | None = None
    """File for the page; None writes none."""
    compare: Path | None = None
    """File with older results to compare with; None compares with none."""
    words: Sequence[str] | None = None
    """Arguments of the command, for the results; None means those of this process."""

    @property
    def command(self) -> str:
        """The command line."""
        return command_line(self.words)

    def check(self) -> None:
        """Check all files before the work.

        Raises:
            ValueError: a file cannot be written, or earlier results cannot be read.
            MissingDependencyError: a package that the page needs is not installed.
        """
        check_writable("--out", self.out)
        check_writable("--json", self.json)
        check_writable("--html", self.html)
        check_page("--html", self.html)
        for path in (*self.merge, *([] if self.compare is None else [self.compare])):
            load_results(path)

    def check_fits(self, new: BenchResults) -> None:
        """Check before the work that earlier results fit those to come.

        Args:
            new: results without a measurement, of what is going to be measured.

        Raises:
            ValueError: earlier results are of another backend, device, table or version.
        """
        if self.merge:
            self.combined(new)
        if self.compare is not None:
            bench_moves(load_results(self.compare), new)

    def combined(self, results: BenchResults | None) -> BenchResults:
        """Merge new results, if any, with the earlier ones.

        Raises:
            ValueError: earlier results cannot be read, or are of another backend, device, table
                or version.
        """
        found = [load_results(path) for path in self.merge] + ([results] if results else [])
        if not found:
            raise ValueError("merge must name results to render, got none")
        order = [case.name for case in found[0].environment.table.cases]
        whole = found[0]
        for later in found[1:]:
            whole = later.merged(whole, order)
        return whole

    def age(self, results: BenchResults) -> str:
        """A sentence on what has changed since the results were measured; empty if git cannot say.

        No file that can be committed holds it, since the next commit would make it wrong.
        """
        return age_sentence(results.environment.commit, results.environment.table)

    def write(self, results: BenchResults) -> None:
        """Write the markdown and the JSON that were asked for."""
        for path, text in (
            (self.out, render_markdown(results)),
            (self.json, results.model_dump_json() + "\n"),
        ):
            if path is not None:
                path.write_text(text, encoding="utf-8")

    def finish(self, results: BenchResults) -> list[str]:
        """Write everything that was asked for.

        Returns:
            A line on what has changed since the results were measured, where git can say, and lines
            on what moved, where there is a comparison.

        Raises:
            ValueError: the older results cannot be read or do not fit. All files are written then,
                the page without the comparison.
        """
        self.write(results)
        moves: Sequence[Move] = ()
        try:
            if self.compare is not None:
                moves = bench_moves(load_results(self.compare), results)
        except ValueError:
            self._write_page(results, (), "")
            raise
        against = "" if self.compare is None else str(self.compare)
        self._write_page(results, moves, against)
        aged = [line for line in [self.age(results)] if line and self.out is not None]
        return aged + (move_lines(moves, against) if against else [])

    def _write_page(self, results: BenchResults, moves: Sequence[Move], against: str) -> None:
        if self.html is not None:
            page = render_page(bench_page(results, moves, against, self.age(results)))
            self.html.write_text(page, encoding="utf-8")


def load_results(path: Path) -> BenchResults:
    """Read results from a JSON file that :class:`Report` wrote.

    Raises:
        SpecError: the file cannot be read or holds no results; the message names it.
    """
    versions = range(KERNELS_SCHEMA, KERNELS_SCHEMA + 1)
    return read_results(BenchResults, path, "results of attn bench kernels", versions)
