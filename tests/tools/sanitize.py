"""The Hopper kernels under compute-sanitizer: what it reports is explained here, or a finding.

    python -m tests.tools.sanitize --commit C --out FILE       # on a Hopper GPU, with both tools
    python -m tests.tools.sanitize --tool racecheck --set latent --seconds 60 --processes 8

Each tool runs shares of the launches in processes of their own, until time is up; how many of them
were reached is said.

Racecheck orders accesses by barriers of all threads, and by what each thread does itself. It does
not see that a barrier of one partition, or a warp's, is before the one arrival by which Triton
releases what all threads of the partition have written: it reports such writes, but for the
arriving thread's. PTX orders them (a barrier orders its participants, and an arrival releases what
is ordered before it). The controls here are the smallest such exchange; one that is read where the
arriving thread has written; a race that is none of these, which has to be found; and copies that
arrive by themselves, once, and once more into room that was given back by such an arrival.

Memcheck sees every tensor by itself, but for two sets, whose cases capture graphs: there it sees
torch's larger pieces of memory only.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = (ROOT / "attn/kernels", ROOT / "builders", ROOT / "tests/tools")
"""Folders, with all folders below, where a source file is looked for by its name."""
SETS: Final = {
    "plan": 1, "kinds": 3, "index": 1, "decode": 3, "prefill": 5, "invariant": 2, "latent": 3,
    "sparse": 2,
}  # fmt: skip
"""Sets of launches, and their weights among the processes."""
PORTABLE: Final = ("plan",)
"""Sets whose kernels are for every GPU. A launch of any other set fails if it launches no Hopper
kernel: the tool would not have seen the kernels that the set is for."""
CAPTURING: Final = ("decode", "prefill")
"""Sets that capture graphs. In the others memcheck sees each tensor by itself: torch does not cut
them out of larger pieces of memory, which a capture does not allow."""
CONTROLS: Final = {
    "the arriving thread's": False, "another thread's": False, "a race": True, "a copy": False,
    "a second copy": False,
}  # fmt: skip
"""Controls, and whether racecheck has to find an unexplained race in each."""
PREFIX: Final = "========= "
UNKNOWN: Final = "unknown"
"""Commit of a run that was not told its commit."""
EVERY: Final = ("*",)
"""Patterns that every launch's name matches."""
LEFT_OUT: Final = "regex=_Z|xmma_gemm"
"""Kernels that racecheck leaves out: those of C++, and cuBLAS's products in float64. They are the
references that launches are compared with, and take longer and gigabytes more than all else.
cuBLAS's products of 16 bits have to stay: without them the tool failed, with an "Internal Sanitizer
Error" in every latent case. It seems not to bear a kernel that it does not watch ahead of a kernel
that it watches, where the two may overlap."""
HOPPER: Final = "hopper_"
"""How names of Hopper kernels begin."""
KERNELS: Final = "KERNELS "
"""How a line begins that names the kernels of a launch."""
TRIES: Final = 3
"""How often a process is started, at most, if nothing is wrong but reports that name no kernel.
Racecheck wrote such a report of a kernel's first launch, and named the kernel in all others."""
GRACE: Final = 150.0
"""Seconds for a process to begin, and for launches that have begun to end."""

_ARRIVAL: Final = "behind a partition's barrier and one arrival"
_GIVEN_BACK: Final = "into room that was given back behind a partition's barrier and one arrival"
EXPLAINED: Final = {
    "hopper_prefill_kernel": {
        ("scheduler.py:_put", "scheduler.py:_take"): (
            "a tile's record, behind a warp's barrier and one arrival"
        ),
    },
    "hopper_decode_kernel": {
        (
            "consumer.py:_send",
            "consumer.py:_with_sent",
        ): f"a state to the other consumer, {_ARRIVAL}",
    },
    "hopper_mla_kernel": {
        ("consumer.py:_publish", "consumer.py:_take_first"): (
            f"weights and maxima to the other consumer, {_ARRIVAL}"
        ),
        ("consumer.py:_publish", "consumer.py:_take_second"): (
            f"weights and maxima to the other consumer, {_ARRIVAL}"
        ),
        ("consumer.py:_with_all_sums", "consumer.py:_with_all_sums"): (
            f"sums to the other consumer, {_ARRIVAL}"
        ),
        ("scorer.py:_store_weights", "columns.py:_attend"): (
            "whether rows have new references, behind the scorer's barrier and one arrival"
        ),
        ("scorer.py:weigh_latents", "columns.py:_numbers_of"): (
            "sums of weights, behind the scorer's barrier and one arrival"
        ),
        ("queries.py:store_scale", "queries.py:cache_scale"): (
            "the cache's scale: every thread of both groups stores the same number before it reads"
        ),
    },
    "hopper_sparse_kernel": {
        ("consumer.py:_publish", "consumer.py:_take_first"): (
            f"weights and maxima to the other consumer, {_ARRIVAL}"
        ),
        ("consumer.py:_publish", "consumer.py:_take_second"): (
            f"weights and maxima to the other consumer, {_ARRIVAL}"
        ),
        ("consumer.py:_sums_of_both", "consumer.py:_sums_of_both"): (
            f"sums to the other consumer, {_ARRIVAL}"
        ),
        ("producer.py:_gather_rope", "consumer.py:_scores"): f"gaps of a list, {_ARRIVAL}",
        ("dequantise.py:dequantise_rows", "consumer.py:_scores"): f"gaps of a list, {_ARRIVAL}",
        ("dequantise.py:dequantise_rows", "consumer.py:_all_scores"): f"gaps of a list, {_ARRIVAL}",
    },
    "hopper_narrow_sparse_kernel": {
        ("kernel.py:_copy_rows", "consumer.py:_scores"): f"copies of rows, {_GIVEN_BACK}",
        ("kernel.py:_copy_rows", "consumer.py:_fold_values"): f"copies of rows, {_GIVEN_BACK}",
        ("kernel.py:_copy_rows", "scores.py:_block"): f"copies of rows, {_GIVEN_BACK}",
        ("kernel.py:_copy_rows", "scores.py:group_scores"): f"copies of rows, {_GIVEN_BACK}",
        ("consumer.py:_with_other_half", "consumer.py:_with_other_half"): (
            f"a state to the other consumer, {_ARRIVAL}"
        ),
    },
    "exchange_kernel": {
        ("exchanges.py:give", "exchanges.py:take"): "a control: behind a barrier and one arrival",
    },
    "copies_kernel": {
        ("exchanges.py:copy", "exchanges.py:take_copies"): f"a control: copies, {_GIVEN_BACK}",
    },
}
"""For each kernel, functions that write and read in exchanges that racecheck reports, and why they
are right."""
REWRITTEN: Final = {
    ("hopper_sparse_kernel", "consumer.py:_sums_of_both"): (
        "sums of another piece of work, by threads of the same partition: its barriers are between"
    ),
}
"""For a kernel and a function, why cells may be written again by the same line."""
CUBLAS: Final = "nvjet_"
"""How names of cuBLAS's kernels for Hopper begin, which have no lines of source."""
OF_CUBLAS: Final = "between threads of a product of cuBLAS, which racecheck has to watch"
DISPATCH: Final = "which partition a warp runs: Triton's own words, between barriers of all threads"


# -- What a tool said.


@dataclass(frozen=True)
class Place:
    """An access of a kernel."""

    kind: str
    """``Read`` or ``Write``."""
    kernel: str
    file: str
    line: int

    @property
    def function(self) -> str:
        """The file, and the innermost function around the line; "?" without lines of source."""
        if not self.file:
            return "?"
        return f"{self.file}:{function_at(self.file, self.line, self.kernel)}"

    @property
    def is_dispatch(self) -> bool:
        """Whether Triton ascribes its own code for ``warp_specialize`` to this line."""
        return self.line in dispatch_lines(self.file, self.kernel)


@dataclass(frozen=True)
class Race:
    """Two accesses that racecheck takes for unordered."""

    writer: Place
    other: Place

    @property
    def what(self) -> str:
        """The race in words, without addresses."""
        kind = "writes" if self.other.kind == "Write" else "reads"
        return f"{self.writer.kernel}: {self.writer.function} writes, {self.other.function} {kind}"

    @property
    def reason(self) -> str:
        """Why the accesses are ordered; empty where that is not known."""
        kernel, functions = self.writer.kernel, (self.writer.function, self.other.function)
        if self.writer.kind != "Write" or self.other.kernel != kernel:
            return ""
        if kernel.startswith(CUBLAS):
            return OF_CUBLAS
        if self.other.kind == "Write":
            return REWRITTEN.get((kernel, functions[0]), "") if self.writer == self.other else ""
        if self.writer.is_dispatch and self.other.is_dispatch:
            return DISPATCH
        return EXPLAINED.get(kernel, {}).get(functions, "")


_PLACE: Final = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+(?: in ([\w.]+):(\d+))?")


def reports(log: str) -> list[list[Race]]:
    """The reports in a log of racecheck's analysis mode: the first access with each other access.

    A report with a line that is not understood is empty: it is counted, and never explained.
    """
    found_reports: list[list[Race]] = []
    first: Place | None = None
    is_broken = False
    for line in log.splitlines():
        is_first = line.startswith(PREFIX) and "Race reported between" in line
        is_other = line.startswith(PREFIX + "    and ")
        if not is_first and not is_other:
            continue
        if is_first:
            found_reports.append([])
            first, is_broken = None, False
        found = _PLACE.search(line)
        has_place = found is not None and bool(found[3] or found[2].startswith(CUBLAS))
        if not has_place or not found_reports:
            is_broken = True
        if is_broken:
            if found_reports:
                found_reports[-1].clear()
            continue
        assert found is not None
        place = Place(found[1], found[2], found[3] or "", int(found[4] or 0))
        if is_first:
            first = place
        elif first is not None:
            pair = (first, place) if first.kind == "Write" else (place, first)
            found_reports[-1].append(Race(*pair))
    return found_reports


def nameless_reports(log: str) -> int:
    """Number of racecheck's reports with an access that names no kernel."""
    found = log.split("Race reported between ")[1:]
    return sum(bool(re.search(r"(Read|Write) access at +(\[|$)", one, re.M)) for one in found)


def complaints(log: str) -> int | None:
    """Number of errors that a tool counted; None if it ended without saying so."""
    said = r"SUMMARY: (\d+) (?:errors?|hazards? displayed)"
    found = re.findall(said, log)
    return sum(map(int, found)) if found else None


@cache
def source_of(file: str, kernel: str) -> ast.Module | None:
    """A source file by its name; of several files, the file in the folder that defines the kernel.

    Folders of Hopper kernels are for these kernels alone.
    """
    is_hopper = kernel.startswith("hopper_")
    paths = [path for folder in SOURCES for path in sorted(folder.rglob(file))]
    found = [path for path in paths if is_hopper or not path.parent.name.startswith("hopper_")]
    at_home = [path for path in found if _defines(path.parent, kernel)]
    return ast.parse([*at_home, *found][0].read_text()) if found else None


def _defines(folder: Path, kernel: str) -> bool:
    """Whether a file of the folder has a function of that name."""
    return any(f"def {kernel}(" in path.read_text() for path in folder.glob("*.py"))


@cache
def function_at(file: str, line: int, kernel: str = "") -> str:
    """The innermost function of a source file's line; "?" where there is none.

    Args:
        file: name without folders.
        line: from 1.
        kernel: that the line was compiled into.
    """
    inner, size = "?", sys.maxsize
    source = source_of(file, kernel)
    for node in () if source is None else ast.walk(source):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            own = node.end_lineno - node.lineno
            if node.lineno <= line <= node.end_lineno and own < size:
                inner, size = node.name, own
    return inner


@cache
def dispatch_lines(file: str, kernel: str) -> frozenset[int]:
    """Lines where a kernel divides its warps: its own line and its calls of ``warp_specialize``.

    An ``if`` that decides between such calls counts too. A kernel without such a call has none.
    """
    source = source_of(file, kernel)
    lines: set[int] = set()
    for node in () if source is None else ast.walk(source):
        if not isinstance(node, ast.FunctionDef) or node.name != kernel:
            continue
        for inner in ast.walk(node):
            if isinstance(inner, ast.If):
                calls = [one for one in ast.walk(inner) if _is_dispatch(one)]
                lines |= {inner.lineno} if calls else set()
            elif isinstance(inner, ast.Call) and _is_dispatch(inner):
                lines |= {*range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)}
        lines |= {node.lineno} if lines else set()
    return frozenset(lines)


def _is_dispatch(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "warp_specialize"


# -- The launches.


def _plans() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.splitkv import test_split_kv

    test: Any = test_split_kv.test_the_kernels_plan_is_the_hosts
    for number, example in enumerate(test.hypothesis_explicit_examples):
        yield f"plan {number}", partial(test.hypothesis.inner_test, **example.kwargs)


def _kinds() -> Iterator[tuple[str, Callable[[], object]]]:
    from attn.testing.trial import Trial
    from specs.engine import DecodeKernel
    from tests.gpu import test_gpu_hopper_decode, test_gpu_triton_attn

    Trial.decode_kernel = DecodeKernel.HOPPER
    for name, (setup, query_len) in test_gpu_hopper_decode.KINDS.items():
        longest = 1500 if setup.window is None else min(setup.max_len, setup.window + 1000)
        small = replace(setup, max_len=longest, num_blocks=1024)
        yield name, partial(test_gpu_triton_attn.check_launches, small, query_len, 9, 4)


def _decodes() -> Iterator[tuple[str, Callable[[], object]]]:
    from attn.backends.triton_attn import TritonAttentionBackend
    from attn.testing.conformance import check_case
    from attn.testing.trial import Trial
    from specs.engine import DecodeKernel
    from tests.gpu import test_gpu_hopper_decode

    Trial.decode_kernel = DecodeKernel.HOPPER
    for case in test_gpu_hopper_decode.CASES:
        yield str(case), partial(check_case, TritonAttentionBackend, case, "cuda")


def _prefills() -> Iterator[tuple[str, Callable[[], object]]]:
    from attn.backends.triton_attn import TritonAttentionBackend
    from attn.testing.conformance import check_case
    from attn.testing.trial import Trial
    from builders.dense import dequantised
    from specs.engine import PrefillKernel
    from tests.gpu import test_gpu_hopper

    Trial.prefill_kernel = PrefillKernel.HOPPER

    def check(case: Any, least_rows: int) -> None:
        dequantised.LEAST_ROWS = least_rows
        check_case(TritonAttentionBackend, case, "cuda")

    for case in test_gpu_hopper.CASES:
        yield str(case), partial(check, case, dequantised.LEAST_ROWS)
    for size in (128, 256):
        for case in test_gpu_hopper.DEQUANTISED_CASES:
            heads = replace(case.heads, head_size=size, head_size_v=None)
            wide = replace(case, heads=heads)
            yield f"dequantised {wide}", partial(check, wide, 0)


def _invariants() -> Iterator[tuple[str, Callable[[], object]]]:
    import torch

    from specs.engine import PrefillKernel
    from tests.dense.chunked import Prompt, Setup
    from tests.gpu import test_gpu_invariance

    def run(setup: Setup) -> None:
        prompt = Prompt(setup, torch.device("cuda"))
        prompt.rows(0, setup.queries, ((1, 700), (40, 900)))

    for name, setup in test_gpu_invariance.LAYERS.items():
        if name in test_gpu_invariance.OF_HOPPER:
            # Three segments of keys, and tiles that end in each.
            small = replace(setup, keys=1200, queries=200, prefill=PrefillKernel.HOPPER)
            yield name, partial(run, small)


def _latents() -> Iterator[tuple[str, Callable[[], object]]]:
    from attn.backends.triton_mla import TritonMLABackend
    from attn.testing.cases import LatentCase
    from attn.testing.conformance import check_case
    from attn.testing.trial import Trial
    from specs.engine import DecodeKernel
    from tests.gpu import test_gpu_hopper_mla

    Trial.decode_kernel = DecodeKernel.HOPPER
    tests = test_gpu_hopper_mla

    def check(case: LatentCase, rounds_queries: bool) -> None:
        Trial.fp8_mla_queries = rounds_queries
        # Racecheck takes long for each launch of these kernels.
        check_case(TritonMLABackend, case, "cuda", one_step=True)

    for case in (*tests.CASES, *tests.LONG_CASES, *tests.SHORT_CASES):
        yield str(case), partial(check, case, False)
        if tests.rounds_queries(case):
            yield f"{case}, rounded queries", partial(check, case, True)


def _index_logits() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.gpu import test_gpu_sparse_mla as tests

    def run(lens: list[int], heads: int) -> None:
        keys = tests.Keys(lens, heads, tests.E4M3)
        keys.check(keys.paged(), tests.share_of_terms(tests.E4M3))

    def run_gathered(heads: int) -> None:
        given = tests.Gathered(heads, tests.E4M3)
        given.check(given.logits(), tests.share_of_terms(tests.E4M3))

    for heads in (20, 32, 64):
        for lens in ([5000, 1, 64, 65, 0, 2048], [300] * 130):
            yield f"{heads} heads, {len(lens)} rows", partial(run, lens, heads)
    for heads in (4, 20, 32, 64):
        yield f"{heads} heads, gathered keys", partial(run_gathered, heads)


def _sparse_lists() -> Iterator[tuple[str, Callable[[], object]]]:
    from specs.rows import LatentFormat
    from tests.gpu import test_gpu_hopper_sparse as tests
    from tests.sparse.sparse_cases import SparseTrial
    from tests.sparse.sparse_layers import Sizes, SparseLayer

    def run(layout: LatentFormat, heads: int, rows: int, changes: dict[str, Any]) -> None:
        trial = SparseTrial(tests.case_of(layout, heads))
        misses = trial.misses(*tests.run(trial, tests.tile_of(trial.case, rows, **changes)))
        assert misses == {}, misses

    def run_prompts(layout: LatentFormat, heads: int) -> None:
        sizes = Sizes(
            num_heads=heads, nope=128, v=128, topk=256, index_heads=64, index_dim=128,
            requests=2, longest=1024, most_tokens=1024,
        )  # fmt: skip
        layer = SparseLayer(layout, "cuda", sizes=sizes)
        step = layer.step([(0, 0, 600), (1, 0, 50)])
        rows = layer.records(step)[0].prefill_rows
        assert rows is not None
        assert rows.joint is not None
        layer.check(step, layer.run(step))

    # Lists are cut for one row and whole for many; with many heads, programs may share them.
    ways: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("cut lists", 1, {}),
        ("whole lists", 10**6, {}),
        ("shared lists", 10**6, {"balanced": True}),
    )
    for pair in tests.served(16, 20, 65, 128):
        layout, heads = pair.values
        for name, rows, changes in ways:
            if heads > tests.FEW or not changes:
                job = partial(run, layout, heads, rows, changes)
                yield f"{heads} heads, {layout.value}, {name}", job
    for layout in tests.SERVED:
        for heads in (16, 32):
            job = partial(run_prompts, layout, heads)
            yield f"{heads} heads, {layout.value}, joint lists of prompts", job


def _controls() -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.tools.exchanges import exchange, exchange_copies

    jobs = (
        *(partial(exchange, 0, False), partial(exchange, 100, False), partial(exchange, 0, True)),
        *(partial(exchange_copies, 1), partial(exchange_copies, 2)),
    )
    yield from zip(CONTROLS, jobs, strict=True)


JOBS: Final = {
    "plan": _plans,
    "kinds": _kinds,
    "index": _index_logits,
    "decode": _decodes,
    "prefill": _prefills,
    "invariant": _invariants,
    "latent": _latents,
    "sparse": _sparse_lists,
    "control": _controls,
}


@contextmanager
def launched_kernels() -> Iterator[set[str]]:
    """Collects the names of the kernels that launchers launch inside the context."""
    from builders.launch.call import collected
    from builders.launch.launcher import Launcher

    names: set[str] = set()
    plain = Launcher.__call__

    def launch(self: Launcher, grid: tuple[int, ...], *values: Any) -> None:
        if collected.get() is None and 0 not in grid:
            names.add(self.kernel.__name__)
        plain(self, grid, *values)

    Launcher.__call__ = launch  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Launcher.__call__ = plain  # type: ignore[method-assign]


def run_share(
    which: str, share: int, shares: int, seconds: float, patterns: Sequence[str] = EVERY
) -> None:
    """Launches of a set in this process, until time is up; prints names, kernels and failures.

    Args:
        which: set.
        share: number of the process.
        shares: processes of the set.
        seconds: to begin launches in.
        patterns: shell patterns, one of which a launch's name has to match.
    """
    import random

    import torch

    end = time.monotonic() + seconds
    jobs = [
        (name, job)
        for name, job in JOBS[which]()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    # Neighbouring launches are alike; a process that runs out of time should have run every kind.
    random.Random(share).shuffle(own := jobs[share::shares])
    for name, job in own:
        if time.monotonic() > end:
            break
        try:
            with launched_kernels() as kernels:
                job()
            if torch.cuda.is_available():
                # The tools report a kernel when it ends, which a process may not live to see.
                torch.cuda.synchronize()
            is_of_hopper = any(kernel.startswith(HOPPER) for kernel in kernels)
            if which in SETS and which not in PORTABLE and not is_of_hopper:
                raise RuntimeError(f"no Hopper kernel was launched, only {sorted(kernels)}")
            print(f"{KERNELS}{' '.join(sorted(kernels))}", flush=True)
        # A test that fails by pytest's own means raises no Exception.
        except BaseException as error:
            print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)
        else:
            print(f"DONE {name}", flush=True)
    print(f"OF {len(own)}", flush=True)


# -- Both together.


@dataclass
class Outcome:
    """What a tool found in a set of cases."""

    tool: str
    which: str
    done: int = 0
    of: int = 0
    failed: tuple[str, ...] = ()
    errors: int = 0
    """Errors that the tool counted; with racecheck, the errors without an explanation."""
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Races and their reasons."""
    kernels: set[str] = field(default_factory=set)
    """Names of the kernels that were launched."""
    again: int = 0
    """Processes that were started again, because their reports named no kernel."""

    @property
    def is_as_it_should(self) -> bool:
        """Whether nothing is wrong; for a control, whether its race was found."""
        wanted = CONTROLS.get(self.which.removeprefix(CONTROL), False)
        return self.done > 0 and not self.failed and (self.errors > 0) == wanted


CONTROL: Final = "control: "


@dataclass(frozen=True)
class Share:
    """What a process left behind."""

    said: str
    """Output of the launches."""
    log: str
    """Output of the tool."""
    status: int | None = 0
    """Exit status; None if the process had to be ended."""


def outcome_of(tool: str, which: str, shares: Iterable[Share]) -> Outcome:
    """What a set's processes said, put together.

    Args:
        tool: memcheck or racecheck.
        which: set.
        shares: of each process.
    """
    outcome = Outcome(tool, which)
    for share in shares:
        lines = share.said.splitlines()
        outcome.done += sum(line.startswith("DONE ") for line in lines)
        outcome.failed += tuple(line for line in lines if line.startswith("FAILED "))
        for line in lines:
            if line.startswith(KERNELS):
                outcome.kernels.update(line.removeprefix(KERNELS).split())
        of = [int(line[3:]) for line in lines if re.fullmatch(r"OF \d+", line)]
        outcome.of += sum(of)
        counted, found = complaints(share.log), reports(share.log)
        if len(of) != 1 or share.status != 0 or counted is None:
            tail = f"{share.said[-300:]} {share.log[-300:]}".replace("\n", " ")
            outcome.failed += (f"FAILED share of {which}, exit {share.status}: {tail}",)
        explained = 0
        for report in found:
            outcome.found.update((race.what, race.reason) for race in report)
            explained += bool(report) and all(race.reason for race in report)
        outcome.errors += max((counted or 0) - explained, len(found) - explained)
    return outcome


def lacks_names_only(tool: str, which: str, share: Share) -> bool:
    """Whether all that is wrong with a share is that reports of racecheck name no kernel.

    Such a share may be run again. Any other error must stay, since a race need not happen twice.
    """
    outcome = outcome_of(tool, which, [share])
    return not outcome.failed and 0 < nameless_reports(share.log) == outcome.errors


class Running:
    """A share's process; what it says goes to files, for a full pipe would stop it."""

    def __init__(
        self,
        tool: str,
        which: str,
        share: int,
        shares: int,
        seconds: float,
        patterns: Sequence[str] = EVERY,
    ) -> None:
        """
        Args:
            tool: memcheck or racecheck.
            which: set.
            share: number of the process.
            shares: processes of the set.
            seconds: to begin launches in.
            patterns: shell patterns, one of which a launch's name has to match.
        """
        self.again = partial(Running, tool, which, share, shares, seconds, patterns)
        """Starts the same process anew."""
        self._folder = tempfile.TemporaryDirectory()
        options = []
        if tool == "racecheck":
            options = ["--racecheck-report", "analysis", "--kernel-name-exclude", LEFT_OUT]
        options += ["--report-api-errors", "no", "--show-backtrace", "no"]
        options += ["--print-limit", "100000", "--log-file", str(self._path("log"))]
        own = [
            sys.executable,
            "-m",
            "tests.tools.sanitize",
            "--share",
            which,
            str(share),
            str(shares),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if tool == "memcheck" and which not in CAPTURING:
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        with self._path("said").open("w") as said:
            self._process = subprocess.Popen(
                [
                    *("compute-sanitizer", "--tool", tool, *options, *own),
                    *("--seconds", str(seconds)),
                    *(f"--case={pattern}" for pattern in patterns),
                ],
                cwd=ROOT,
                env=environment,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def wait(self, deadline: float) -> Share:
        """What it left, by a time of the monotonic clock; then it is ended."""
        status: int | None = None
        try:
            status = self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self.end()
        files = (self._path(name) for name in ("said", "log"))
        said, log = (path.read_text(errors="replace") if path.exists() else "" for path in files)
        self._folder.cleanup()
        return Share(said, log, status)

    def end(self) -> None:
        """It, and the tool's own child; nothing where it has ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def run(
    tools: Sequence[str],
    seconds: float,
    processes: int,
    sets: Sequence[str] = tuple(SETS),
    patterns: Sequence[str] = EVERY,
) -> list[Outcome]:
    """Every set with every tool, as many processes at once as there may be for each tool."""
    outcomes, weights = [], sum(SETS[which] for which in sets)
    for tool in tools:
        started: dict[str, list[Running]] = {}
        try:
            for which in sets:
                shares = max(1, processes * SETS[which] // weights)
                started[which] = [
                    Running(tool, which, n, shares, seconds, patterns) for n in range(shares)
                ]
            if tool == "racecheck":
                for n, name in enumerate(CONTROLS):
                    one = Running(tool, "control", n, len(CONTROLS), seconds)
                    started[CONTROL + name] = [one]
            deadline = time.monotonic() + seconds + GRACE
            for which, running in started.items():
                left = [share.wait(deadline) for share in running]
                again = 0
                for _ in range(TRIES - 1):
                    nameless = [
                        n for n, share in enumerate(left) if lacks_names_only(tool, which, share)
                    ]
                    for n in nameless:
                        running[n] = running[n].again()
                    deadline = max(deadline, time.monotonic() + seconds + GRACE)
                    for n in nameless:
                        left[n] = running[n].wait(deadline)
                    again += len(nameless)
                outcomes.append(replace(outcome_of(tool, which, left), again=again))
        finally:
            for running in started.values():
                for share in running:
                    share.end()
    return outcomes


def render(outcomes: Sequence[Outcome], head: str) -> str:
    """The table, and each kind of race once."""
    lines = [
        "# The Hopper kernels under compute-sanitizer",
        "",
        head,
        "",
        "`python -m tests.tools.sanitize` says what is run, and what racecheck does not see.",
        "",
        "| tool | launches of | done | failed | errors | explained | kernels |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    found: Counter[tuple[str, str]] = Counter()
    for one in outcomes:
        found.update(one.found)
        explained = sum(count for (_, reason), count in one.found.items() if reason)
        cells = [one.tool, one.which, f"{one.done} of {one.of}", str(len(one.failed))]
        kernels = ", ".join(f"`{name}`" for name in sorted(one.kernels))
        lines.append(f"| {' | '.join(cells)} | {one.errors} | {explained} | {kernels} |")
    again = sum(one.again for one in outcomes)
    if again:
        were = "process was" if again == 1 else "processes were"
        lines += ["", f"{again} {were} started again: the reports had named no kernel."]
    if found:
        lines += ["", "| race | pairs of instructions | why it is ordered |", "| --- | --- | --- |"]
        for (what, reason), count in sorted(found.items()):
            lines.append(f"| {what} | {count} | {reason or 'NOT known'} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 without findings."""
    parser = argparse.ArgumentParser("python -m tests.tools.sanitize", description=__doc__)
    parser.add_argument("--tool", action="append", choices=["memcheck", "racecheck"])
    parser.add_argument("--set", action="append", choices=SETS, help="of launches; default: all")
    parser.add_argument("--case", action="append", help="shell pattern of launches; default: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="to begin launches in")
    parser.add_argument("--processes", type=int, default=12, help="of each tool")
    parser.add_argument("--commit", default=UNKNOWN, help="that is run; a copy may have no git")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    patterns = given.case or EVERY
    if given.share is not None:
        which, share, shares = given.share
        run_share(which, int(share), int(shares), given.seconds, patterns)
        return 0
    if given.out is not None and given.commit == UNKNOWN:
        parser.error("a table says of which commit it is: --commit")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the PATH")
    import torch
    import triton

    tools, sets = given.tool or ["memcheck", "racecheck"], given.set or [*SETS]
    outcomes = run(tools, given.seconds, given.processes, sets, patterns)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    head = (
        f"{device}, commit {given.commit}; torch {torch.__version__}, triton {triton.__version__}."
    )
    if given.case:
        head += f" Launches whose names match `{'`, `'.join(given.case)}`."
    text = render(outcomes, head)
    if given.out is not None:
        given.out.write_text(text)
    print(text)
    for failed in (line for one in outcomes for line in one.failed):
        print(failed)
    return int(not all(one.is_as_it_should for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
