"""The kernels for Hopper under compute-sanitizer: what it reports is explained here, or a finding.

    python -m tests.sanitize --out FILE                  # on a Hopper GPU, with both tools
    python -m tests.sanitize --tool racecheck --seconds 60 --processes 8

Each tool runs shares of the launches in processes of their own, until time is up; how many of them
were reached is said.

Racecheck orders accesses by barriers of all threads, and by what each thread does itself. It does
not see that a barrier of one partition, or a warp's, is before the one arrival by which Triton
releases what all threads of the partition have written: it reports such writes, but for the
arriving thread's. PTX orders them (a barrier orders its participants, and an arrival releases what
is ordered before it). The controls here are the smallest such exchange, one that is read where the
arriving thread has written, and a race that is none of these.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = ("attn/kernels/hopper", "attn/kernels", "builders", "tests/kernels")
"""Where a file is looked for, by its name, in this order."""
SETS: Final = {"plan": 1, "decode": 5, "prefill": 6}
"""Sets of launches, and their weights among the processes."""
PREFIX: Final = "========= "
GRACE: Final = 90.0
"""Seconds in which launches that have begun must end."""

EXPLAINED: Final = {
    ("_put", "_take"): "a tile's record, behind a warp's barrier and one arrival",
    ("_send", "_with_sent"): "a state to the other consumer, behind a partition's barrier and one "
    "arrival",
    ("give", "take"): "a control: behind a barrier and one arrival",
}
"""Functions that write and read, of exchanges that racecheck reports although they are ordered."""
DISPATCH: Final = "which partition a warp runs: Triton's own words, between barriers of all threads"


# -- What a tool said.


@dataclass(frozen=True)
class Place:
    """An access of a kernel."""

    kind: str
    """Read or Write."""
    kernel: str
    file: str
    line: int

    @property
    def function(self) -> str:
        """The innermost function around it."""
        return function_at(self.file, self.line)


@dataclass(frozen=True)
class Race:
    """Two accesses that racecheck takes for unordered."""

    writer: Place
    other: Place

    @property
    def what(self) -> str:
        """In words, without addresses."""
        kind = "writes" if self.other.kind == "Write" else "reads"
        places = [f"{place.function} ({place.file})" for place in (self.writer, self.other)]
        return f"{self.writer.kernel}: {places[0]} writes, {places[1]} {kind}"

    @property
    def reason(self) -> str:
        """Why it is ordered; empty where that is not known."""
        if self.other.kind != "Read":
            return ""
        kernels = {self.writer.kernel, self.other.kernel}
        if {self.writer.function, self.other.function} == kernels:
            return DISPATCH
        return EXPLAINED.get((self.writer.function, self.other.function), "")


_PLACE: Final = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in ([\w.]+):(\d+)")


def reports(log: str) -> list[list[Race]]:
    """Of a log in racecheck's analysis mode: each report's first access with every other of it.

    Raises:
        ValueError: a report that is not understood.
    """
    found_reports: list[list[Race]] = []
    first: Place | None = None
    for line in log.splitlines():
        is_first = line.startswith(PREFIX) and "Race reported between" in line
        if not is_first and not (first and line.startswith(PREFIX + "    and ")):
            first = None
            continue
        found = _PLACE.search(line)
        if found is None:
            raise ValueError(f"racecheck said {line!r}")
        place = Place(found[1], found[2], found[3], int(found[4]))
        if is_first:
            first = place
            found_reports.append([])
        elif first is not None:
            pair = (first, place) if first.kind == "Write" else (place, first)
            found_reports[-1].append(Race(*pair))
    return found_reports


def complaints(log: str) -> int:
    """Errors that a tool counted.

    Raises:
        ValueError: it ended without its summary.
    """
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards? displayed)", log)
    if found is None:
        raise ValueError(f"no summary, but {log[-300:]!r}")
    return int(found[1])


@cache
def function_at(file: str, line: int) -> str:
    """The innermost function of a source file's line; the file's name where there is none.

    Args:
        file: name without folders.
        line: from 1.
    """
    paths = [ROOT / folder / file for folder in SOURCES] + [Path(__file__).with_name(file)]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return file
    inner, size = file, sys.maxsize
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            own = node.end_lineno - node.lineno
            if node.lineno <= line <= node.end_lineno and own < size:
                inner, size = node.name, own
    return inner


# -- The launches.


def _plans() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.builders import test_split_kv

    test: Any = test_split_kv.test_the_kernels_plan_is_the_hosts
    for number, example in enumerate(test.hypothesis_explicit_examples):
        yield f"plan {number}", partial(test.hypothesis.inner_test, **example.kwargs)


def _decodes() -> Iterator[tuple[str, Callable[[], object]]]:
    from attn.backends.triton_attn import TritonAttentionBackend
    from specs.engine import DecodeKernel
    from tests import test_gpu_hopper_decode, test_gpu_triton_attn, trials
    from tests.conformance import check_case

    trials.Trial.decode_kernel = DecodeKernel.HOPPER
    for name, (setup, query_len) in test_gpu_hopper_decode.KINDS.items():
        longest = 1500 if setup.window is None else min(setup.max_len, setup.window + 1000)
        small = replace(setup, max_len=longest, num_blocks=1024)
        yield name, partial(test_gpu_triton_attn.check_launches, small, query_len, 9, 4)
    for case in test_gpu_hopper_decode.CASES:
        yield str(case), partial(check_case, TritonAttentionBackend, case, "cuda")


def _prefills() -> Iterator[tuple[str, Callable[[], object]]]:
    from attn.backends.triton_attn import TritonAttentionBackend
    from builders import widened
    from specs.engine import PrefillKernel
    from tests import test_gpu_hopper, trials
    from tests.conformance import check_case

    trials.Trial.prefill_kernel = PrefillKernel.HOPPER

    def check(case: Any, least_rows: int) -> None:
        widened.LEAST_ROWS = least_rows
        check_case(TritonAttentionBackend, case, "cuda")

    for case in test_gpu_hopper.CASES:
        yield str(case), partial(check, case, widened.LEAST_ROWS)
    for size in (128, 256):
        for case in test_gpu_hopper.WIDENED_CASES:
            heads = replace(case.heads, head_size=size, head_size_v=None)
            wide = replace(case, heads=heads)
            yield f"widened {wide}", partial(check, wide, 0)


def _controls() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.kernels.exchanges import CONTROLS

    yield from CONTROLS.items()


JOBS: Final = {"plan": _plans, "decode": _decodes, "prefill": _prefills, "control": _controls}


def run_share(which: str, share: int, shares: int, seconds: float) -> None:
    """Launches of a set in this process, until time is up; says which, and what failed.

    Args:
        which: set.
        share: number of the process.
        shares: processes of the set.
        seconds: to begin launches in.
    """
    import random

    end = time.monotonic() + seconds
    jobs = list(JOBS[which]())
    # Neighbours are of one kind: what is reached should be of every kind.
    random.Random(share).shuffle(own := jobs[share::shares])
    for name, job in own:
        if time.monotonic() > end:
            break
        try:
            job()
        except Exception as error:
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"DONE {name}", flush=True)
    print(f"OF {len(own)}", flush=True)


# -- Both together.


@dataclass
class Outcome:
    """Of a tool over a set."""

    tool: str
    which: str
    done: int = 0
    of: int = 0
    failed: tuple[str, ...] = ()
    errors: int = 0
    """That the tool counted; with racecheck those without an explanation."""
    found: Counter[tuple[str, str]] | None = None
    """Races and their reasons."""


def outcome_of(tool: str, which: str, logs: Iterable[str]) -> Outcome:
    """What a set's processes said, put together.

    Args:
        tool: memcheck or racecheck.
        which: set.
        logs: of each process.
    """
    outcome = Outcome(tool, which, found=Counter())
    assert outcome.found is not None
    for log in logs:
        lines = log.splitlines()
        outcome.done += sum(line.startswith("DONE ") for line in lines)
        outcome.failed += tuple(line for line in lines if line.startswith("FAILED "))
        outcome.of += sum(int(line[3:]) for line in lines if re.fullmatch(r"OF \d+", line))
        outcome.errors += complaints(log)
        for report in reports(log):
            outcome.found.update((race.what, race.reason) for race in report)
            outcome.errors -= bool(report) and all(race.reason for race in report)
    return outcome


def _alone(names: Iterable[str], logs: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    for name, log in zip(names, logs, strict=True):
        yield f"control: {name}", [log]


class Running:
    """A share's process; what it says goes to a file, for a full pipe would stop it."""

    def __init__(self, command: Sequence[str]) -> None:
        """
        Args:
            command: what to run, from the project's root.
        """
        # It outlives this call.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log(self, deadline: float) -> str:
        """All that it said, by a time of the monotonic clock; then it is ended, and said to be."""
        ended = ""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            # The tool's own child too.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            ended = "\nFAILED to end in time\n========= ERROR SUMMARY: 1 error\n"
        with self._said as said:
            said.seek(0)
            return said.read() + ended


def _started(tool: str, which: str, share: int, shares: int, seconds: float) -> Running:
    options = ["--racecheck-report", "analysis"] if tool == "racecheck" else []
    options += ["--report-api-errors", "no", "--show-backtrace", "no", "--print-limit", "100000"]
    own = [sys.executable, "-m", "tests.sanitize", "--share", which, str(share), str(shares)]
    command = ["compute-sanitizer", "--tool", tool, *options, *own]
    return Running([*command, "--seconds", str(seconds)])


def run(tools: Sequence[str], seconds: float, processes: int) -> list[Outcome]:
    """Every set with every tool, as many processes at once as there may be for each tool."""
    outcomes, weights = [], sum(SETS.values())
    for tool in tools:
        started: dict[str, list[Running]] = {}
        deadline = time.monotonic() + seconds + GRACE
        for which, weight in SETS.items():
            shares = max(1, processes * weight // weights)
            started[which] = [_started(tool, which, n, shares, seconds) for n in range(shares)]
        if tool == "racecheck":
            started["control"] = [_started(tool, "control", n, 3, seconds) for n in range(3)]
        for which, running in started.items():
            logs = [share.log(deadline) for share in running]
            if which == "control":
                names = (name for name, _ in _controls())
                outcomes += [outcome_of(tool, *one) for one in _alone(names, logs)]
            else:
                outcomes.append(outcome_of(tool, which, logs))
    return outcomes


def render(outcomes: Sequence[Outcome], head: str) -> str:
    """The table, and each kind of race once."""
    lines = [
        "# The kernels for Hopper under compute-sanitizer",
        "",
        head,
        "",
        "`python -m tests.sanitize` says what is run, and what racecheck does not see.",
        "",
        "| tool | launches of | done | failed | errors | explained |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    found: Counter[tuple[str, str]] = Counter()
    for one in outcomes:
        races_of = one.found or Counter()
        found.update(races_of)
        explained = sum(count for (_, reason), count in races_of.items() if reason)
        cells = [one.tool, one.which, f"{one.done} of {one.of}", str(len(one.failed))]
        lines.append(f"| {' | '.join(cells)} | {one.errors} | {explained} |")
    if found:
        lines += ["", "| race | pairs of instructions | why it is ordered |", "| --- | --- | --- |"]
        for (what, reason), count in sorted(found.items()):
            lines.append(f"| {what} | {count} | {reason or 'NOT known'} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 without findings."""
    parser = argparse.ArgumentParser("python -m tests.sanitize", description=__doc__)
    parser.add_argument("--tool", action="append", choices=["memcheck", "racecheck"])
    parser.add_argument("--seconds", type=float, default=120.0, help="to begin launches in")
    parser.add_argument("--processes", type=int, default=12, help="of each tool")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.share is not None:
        which, share, shares = given.share
        run_share(which, int(share), int(shares), given.seconds)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH")
    import torch
    import triton

    outcomes = run(given.tool or ["memcheck", "racecheck"], given.seconds, given.processes)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    head = (
        f"{device}, commit {given.commit}; torch {torch.__version__}, triton {triton.__version__}."
    )
    text = render(outcomes, head)
    if given.out is not None:
        given.out.write_text(text)
    print(text)
    for one in outcomes:
        print(*one.failed, sep="\n")
    ours = [one for one in outcomes if one.which in SETS]
    return int(any(one.errors or one.failed or not one.done for one in ours))


if __name__ == "__main__":
    sys.exit(main())
