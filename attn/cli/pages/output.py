"""The files that ``attn run`` writes and reads: report folder, page, older report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from attn.bench.command import check_writable
from attn.bench.results.moves import Direction, Move, move_lines
from attn.bench.results.origin import read_results
from attn.bench.results.pages.frame import check_page, render_page
from attn.cli.pages.moves import run_moves
from attn.cli.pages.run import run_page
from attn.cli.report import RunReport, write_report


@dataclass(frozen=True)
class RunOutput:
    """Where the results of a replay go, and the older report that they are compared with."""

    folder: Path | None = None
    """Folder for ``report.json`` and ``timeline.png``; None writes neither."""
    html: Path | None = None
    """File for the page; None writes none."""
    compare: Path | None = None
    """File with an older report; None compares with none."""

    def check(self) -> None:
        """Check everything before the run, and make the folder.

        Raises:
            ValueError: a path cannot be written, or the older report cannot be read; the message
                names it.
            MissingDependencyError: a package that the page needs is not installed.
        """
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = "it is a file" if self.folder.is_file() else error.strerror
                raise ValueError(
                    f"--report must be a folder, got {str(self.folder)!r}: {problem}"
                ) from None
            check_writable("--report", self.folder / "report.json")
        check_writable("--html", self.html)
        check_page("--html", self.html)
        if self.compare is not None:
            load_report(self.compare)

    def write(self, report: RunReport, console: Console) -> None:
        """Write the files, and print what moved.

        The report comes first, so that an older report that cannot be read any more, or a page that
        cannot be written, does not lose what was measured.

        Raises:
            ValueError: the older report cannot be read.
            OSError: a file cannot be written.
        """
        # Read before anything is written: the new report may replace the older one.
        moves: Sequence[Move] = ()
        broken: ValueError | None = None
        if self.compare is not None:
            try:
                moves = run_moves(load_report(self.compare), report)
            except ValueError as error:
                broken = error
        against = "" if self.compare is None or broken else str(self.compare)
        if self.folder is not None:
            for path in write_report(report, self.folder):
                console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        if self.html is not None:
            page = render_page(run_page(report, moves, against))
            self.html.write_text(page, encoding="utf-8")
            console.print(f"wrote {self.html}", highlight=False, soft_wrap=True)
        if broken is not None:
            raise broken
        if against:
            _print_moves(moves, against, console)


def _print_moves(moves: Sequence[Move], against: str, console: Console) -> None:
    head, *moved = move_lines(moves, against)
    console.print(Text(head, style="bold"), soft_wrap=True)
    for line in moved:
        is_worse = line.strip().startswith(Direction.WORSE.value)
        console.print(Text(line, style="red" if is_worse else ""), soft_wrap=True)


def load_report(path: Path) -> RunReport:
    """Read a report that ``attn run --report`` wrote.

    Raises:
        SpecError: the file cannot be read or holds no report; the message names it.
    """
    return read_results(RunReport, path, "the report.json of attn run")
