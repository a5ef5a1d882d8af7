"""Progress of long commands: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

SECONDS: Final = 5.0
"""Seconds between two lines of progress."""

Update = Callable[[int, int], None]
"""Takes the work done so far and the whole work, in the same unit."""


def print_line(line: str) -> None:
    """Print a line of progress; results go to standard output, progress does not."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(console: Console, what: str, unit: str) -> Iterator[Update]:
    """Show progress until the block ends; gives the function that takes it.

    Args:
        console: where a bar goes. Where it is no terminal, lines go to standard error.
        what: the work in a word.
        unit: name of what is counted.
    """
    if not console.is_terminal:
        yield _Lines(what, unit).update
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """A line of progress every few seconds."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._begin = self._last = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Print a line where the last one is old enough."""
        now = time.monotonic()
        if now - self._last < SECONDS:
            return
        self._last, seconds = now, now - self._begin
        print_line(
            f"{self._what}: {done:,} of {total:,} {self._unit}, {seconds:.0f} s, "
            f"{done / seconds:,.0f} {self._unit}/s"
        )


class Heartbeat:
    """A log that says every few seconds what is still going on, where there is no terminal.

    Compiling a kernel may take minutes in which nothing else is printed.
    """

    def __init__(self, log: Callable[[str], None], is_terminal: bool) -> None:
        """
        Args:
            log: takes the lines of the work.
            is_terminal: a person watches, who needs no sign of life.
        """
        self._log = log
        self._latest = "starting"
        self._since = time.monotonic()
        self._done = threading.Event()
        self._thread = None if is_terminal else threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def __call__(self, line: str) -> None:
        """Log a line."""
        self._latest = next(iter(line.strip().splitlines()), self._latest)
        self._since = time.monotonic()
        self._log(line)

    def _beat(self) -> None:
        while not self._done.wait(SECONDS):
            seconds = time.monotonic() - self._since
            if seconds >= SECONDS:
                print_line(f"still after {self._latest!r}, for {seconds:.0f} s")
