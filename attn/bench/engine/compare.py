"""Tokens/s of vLLM's engine with our backends beside vLLM's own, by model: ``python -m
attn.bench.engine.compare``.

The command needs vLLM and a GPU, but no model files and no network: weights are drawn on the GPU.
All contenders of a model have a process each. They are alive at the same time and are asked in
turn, so that a drift of the machine reaches all. Results are written after each round, and a later
call adds to them: a run can be cut by ``--only`` and ``--backends`` into calls of any length.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from attn.bench.command import USER_ERRORS, Parser, check_writable, usage_error
from attn.bench.engine.compare_worker import ANSWERS, Answer, Job, Request, compiled_parts
from attn.bench.engine.engine import EngineEnvironment, Log, Speed
from attn.bench.engine.parts import PartName
from attn.bench.engine.rows import (
    Comparison,
    Comparisons,
    Profile,
    Row,
    rate_of,
    render,
    render_kernels,
)
from attn.bench.engine.shapes import MODELS, Contender, EngineModel, Load, select_models
from attn.bench.engine.vllm import last_words, require_engine, worker_environment
from specs.base import parse_spec


class EngineError(Exception):
    """An engine's process ended, or answered too late; the text is its last error."""


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison."""

    models: tuple[EngineModel, ...] = tuple(MODELS.values())
    backends: tuple[str, ...] = ()
    """Names of vLLM's backends; none takes all of a model's contenders."""
    caches: tuple[str, ...] = ()
    """KV cache types; none takes all."""
    rounds: int = 5
    starts_alone: bool = False
    """Start one engine after another, so that start-ups can be compared. Otherwise all start at
    once, which is faster."""
    only_starts: bool = False
    """Measure the start-up alone."""
    own_cores: bool = False
    """Start all engines at once, each on cores of its own, so that start-ups can be compared and
    do not take the time of all."""
    profiles: bool = True
    limit_s: float = 500.0
    """Begin no round later than this."""
    answer_s: float = 300.0
    """Most seconds of a start-up, and of an answer."""
    commit: str | None = None
    logs: Path | None = None
    """Folder that keeps the engines' output; None keeps none."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be positive, got {self.rounds}")
        if self.own_cores and not self.only_starts:
            raise ValueError("cores of their own are for start-ups alone: add --only-starts")

    def contenders(self, model: EngineModel) -> tuple[Contender, ...]:
        """The contenders of a model that are asked for."""
        return tuple(
            contender
            for contender in model.contenders
            if (not self.backends or contender.backend in self.backends)
            and (not self.caches or contender.cache in self.caches)
        )


@contextmanager
def running_on(cores: Sequence[int]) -> Iterator[None]:
    """Within, this process and those that it starts run on some cores; on all of its, for none."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores or before)
        yield
    finally:
        os.sched_setaffinity(0, before)


class Engine:
    """A process with an engine.

    Args:
        model: the model.
        contender: backend and cache.
        folder: new and empty folder for the process's files and compilation caches.
        settings: settings of the comparison.
        cores: numbers of the cores that it runs on; none takes all.
    """

    def __init__(
        self,
        model: EngineModel,
        contender: Contender,
        folder: Path,
        settings: CompareSettings,
        cores: Sequence[int] = (),
    ) -> None:
        self.contender, self.settings = contender, settings
        folder.mkdir(parents=True)
        kept = settings.logs or folder
        self.log_path = kept / f"{model.name}-{contender.backend}-{contender.cache}.log"
        job = Job(model=model, contender=contender, commit=settings.commit)
        (folder / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
        reading, writing = os.pipe()
        environment = worker_environment(folder, os.environ)
        # Engines that start at once look for free ports at different places.
        environment["VLLM_PORT"] = str(20000 + abs(hash(str(folder))) % 400 * 64)
        with running_on(cores), self.log_path.open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "attn.bench.engine.compare_worker", str(folder)],
                env={**environment, ANSWERS: str(writing)},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                text=True,
            )
        os.close(writing)
        self.answers = os.fdopen(reading, encoding="utf-8")
        self.begin = time.monotonic()

    def answer(self) -> Answer:
        """The next answer.

        Raises:
            EngineError: the process ended, or takes too long.
        """
        if not select.select([self.answers], [], [], self.settings.answer_s)[0]:
            self.close()
            raise EngineError(f"took longer than {self.settings.answer_s:.0f} s")
        line = self.answers.readline()
        if not line:
            code = self.process.wait()
            raise EngineError(f"exit code {code}: {last_words(self.output())}")
        return Answer.model_validate_json(line)

    def ask(self, request: Request) -> Answer:
        """The answer to a request.

        Raises:
            EngineError: the process ended, or takes too long.
        """
        assert self.process.stdin is not None
        # An engine that ended reads nothing; its answer tells why.
        with suppress(BrokenPipeError):
            self.process.stdin.write(request.model_dump_json() + "\n")
            self.process.stdin.flush()
        return self.answer()

    def output(self) -> str:
        """What the process has written so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the process; closing twice does no harm."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        self.answers.close()


def vllm_words(text: str) -> str:
    """The last line in which vLLM itself reports an error or the choice of a backend."""
    words = ("ERROR", "not valid", "attention backend", "Attention backend", "AttentionBackend")
    lines = [line.strip() for line in text.splitlines() if any(word in line for word in words)]
    return lines[-1][:400].replace("|", "/").replace("`", "'") if lines else ""


@dataclass
class _Entry:
    """A contender while its model is measured."""

    engine: Engine
    row: Row
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def with_speeds(self) -> Row:
        """The row with the rounds so far."""
        speeds = tuple(
            Speed(workload=name, seconds=tuple(found))
            for name, found in self.seconds.items()
            if found
        )
        return self.row.replace(speeds=speeds)


class _Session:
    """The engines of a model while they are alive."""

    def __init__(self, model: EngineModel, settings: CompareSettings, log: Log) -> None:
        self.model, self.settings, self._log = model, settings, log
        self.begin = time.monotonic()
        self.environment = EngineEnvironment()
        self.entries: list[_Entry] = []

    @property
    def passed_s(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self.begin

    def log(self, line: str) -> None:
        self._log(f"{self.passed_s:5.0f} s: {line}")

    @property
    def found(self) -> Comparison:
        """The results so far."""
        return Comparison(
            model=self.model.name,
            environment=self.environment,
            rounds=self.settings.rounds,
            loads=self.model.loads,
            rows=tuple(entry.with_speeds() for entry in self.entries),
        )

    @property
    def alive(self) -> list[_Entry]:
        return [entry for entry in self.entries if not entry.row.error]

    def start(self, contender: Contender, folder: Path, cores: Sequence[int] = ()) -> _Entry:
        """Start a contender's process, and do not wait for its engine."""
        place = folder / f"{contender.backend}-{contender.cache}"
        engine = Engine(self.model, contender, place, self.settings, cores)
        row = Row(
            model=self.model.name,
            contender=contender,
            starts_alone=self.settings.starts_alone or self.settings.own_cores,
            cores=len(cores),
        )
        self.entries.append(_Entry(engine, row))
        return self.entries[-1]

    def wait(self, entry: _Entry) -> None:
        """Wait until an engine has started or failed."""
        answer = self._answered(entry, entry.engine.answer)
        if answer is not None:
            self.environment = answer.environment or self.environment
            entry.row = entry.row.replace(start_ups=(answer.start_up_s,))
            self.log(f"{entry.row.contender.label}: started in {answer.start_up_s:.1f} s")

    def time(self, entry: _Entry, load: Load, turn: int) -> None:
        """Time a load once. Turn 0 warms up: it compiles, and it fills the prefix cache."""
        request = Request(load=load, seed=turn)
        answer = self._answered(entry, lambda: entry.engine.ask(request))
        if answer is not None and answer.seconds is not None:
            label = entry.row.contender.label
            self.log(f"  round {turn}, {label}, {load.name}: {answer.seconds:.3f} s")
            if turn:
                entry.seconds.setdefault(load.name, []).append(answer.seconds)

    def profile(self, entry: _Entry, load: Load) -> None:
        """Record the kernels of a load."""
        request = Request(load=load, seed=self.settings.rounds + 1, profiles=True)
        answer = self._answered(entry, lambda: entry.engine.ask(request))
        if answer is not None:
            profile = Profile(load=load.name, kernels=answer.kernels)
            entry.row = entry.row.replace(profiles=(*entry.row.profiles, profile))
            times = ", ".join(f"{part.value} {profile.ms(part):.1f} ms" for part in PartName)
            self.log(f"  {entry.row.contender.label}, {load.name}: {times}")

    def _answered(self, entry: _Entry, ask: Callable[[], Answer]) -> Answer | None:
        """An engine's answer; None where it failed, which its row then tells."""
        try:
            return ask()
        except EngineError as error:
            text = entry.engine.output()
            self.log(f"  {entry.row.contender.label}: {error}\n{text[-3000:]}")
            entry.row = entry.row.replace(
                error=str(error)[:400].replace("`", "'"),
                vllm_line=vllm_words(text),
                compiled=compiled_parts(),
            )
            entry.engine.close()
            return None

    def close(self) -> None:
        """End all processes."""
        for entry in self.entries:
            entry.engine.close()

    def starts(self, folder: Path) -> Iterator[Comparison]:
        """Start all engines; gives the results after each that was waited for."""
        contenders = self.settings.contenders(self.model)
        self.log(f"{self.model.name}: {', '.join(item.label for item in contenders)}")
        if not self.settings.starts_alone:
            for contender, cores in zip(contenders, self.shares(len(contenders)), strict=True):
                self.start(contender, folder, cores)
        for index, contender in enumerate(contenders):
            alone = self.settings.starts_alone
            entry = self.start(contender, folder) if alone else self.entries[index]
            self.wait(entry)
            if self.settings.only_starts:
                entry.engine.close()
            yield self.found

    def shares(self, engines: int) -> list[list[int]]:
        """Cores of each engine: equally many, drawn anew each time; none where they share all.

        Raises:
            ValueError: there are fewer cores than engines.
        """
        if not self.settings.own_cores:
            return [[]] * engines
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // engines
        if not each:
            raise ValueError(f"{engines} engines need as many cores, got {len(cores)}")
        shares = [cores[each * index : each * (index + 1)] for index in range(engines)]
        random.shuffle(shares)
        return shares

    def rounds(self) -> Iterator[Comparison]:
        """Time all loads in turn; gives the results after each round."""
        for turn in range(self.settings.rounds + 1):
            if self.passed_s > self.settings.limit_s:
                self.log(f"no time for round {turn}")
                break
            for load in self.model.loads:
                for repeat in range(load.repeats if turn else 1):
                    for entry in self.alive if (turn + repeat) % 2 else self.alive[::-1]:
                        self.time(entry, load, turn)
            yield self.found

    def profiles(self) -> Iterator[Comparison]:
        """Record the kernels of the first two loads; gives the results after each load."""
        for load in self.model.loads[:2]:
            for entry in self.alive:
                # A profile is one round more of one engine.
                if self.passed_s < self.settings.limit_s + 30:
                    self.profile(entry, load)
            yield self.found


def compare(model: EngineModel, settings: CompareSettings, log: Log) -> Iterator[Comparison]:
    """Measure a model's contenders in turn; gives the results so far after each step."""
    session = _Session(model, settings, log)
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield from session.starts(Path(folder))
            if not settings.only_starts:
                yield from session.rounds()
            if settings.profiles and not settings.only_starts:
                yield from session.profiles()
        finally:
            session.close()
    for row in session.found.rows:
        rates = {load.name: rate_of(row, load) for load in model.loads}
        known = [f"{name} {rate:.0f}" for name, rate in rates.items() if rate is not None]
        session.log(f"{row.contender.label}: {', '.join(known) or row.error or 'started'}")


def load_comparisons(path: Path) -> Comparisons:
    """Read results that this command wrote.

    Raises:
        SpecError: the file holds no results; the message names field and value.
        ValueError: the results are of other loads than this version's, whose rates would be wrong.
    """
    found = parse_spec(Comparisons, path.read_text(encoding="utf-8"), str(path))
    for item in found.models:
        if item.model not in MODELS or item.loads != MODELS[item.model].loads:
            raise ValueError(f"{path}: results of {item.model} are of other loads: measure again")
    return found


def merged_files(paths: Sequence[Path]) -> Comparisons:
    """The results of several files; a later file's row replaces an earlier one's.

    Raises:
        ValueError: results of one model do not fit together.
    """
    whole = Comparisons()
    for path in paths:
        whole = load_comparisons(path).merged(whole)
    return whole


@dataclass(frozen=True)
class Files:
    """Files of a run."""

    json: Path | None
    out: Path | None
    kernels: Path | None
    merge: tuple[Path, ...]

    def check(self) -> None:
        """Check all files before the work.

        Raises:
            ValueError: a file cannot be written.
            OSError: a file with earlier results does not exist.
        """
        for name in ("json", "out", "kernels"):
            check_writable(f"--{name}", getattr(self, name))
        merged_files(self.merge)

    def write(self, comparisons: Comparisons) -> None:
        """Write what was asked for."""
        for path, text in (
            (self.json, comparisons.model_dump_json() + "\n"),
            (self.out, render(comparisons)),
            (self.kernels, render_kernels(comparisons)),
        ):
            if path is not None:
                path.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m attn.bench.engine.compare", description=__doc__)
    known = ", ".join(MODELS)
    parser.add_argument("--only", nargs="+", default=[], help=f"Models of {known}; default: all.")
    parser.add_argument("--backends", nargs="+", default=[], help="vLLM's names; default: all.")
    parser.add_argument("--caches", nargs="+", default=[], help="KV cache types; default: all.")
    parser.add_argument("--rounds", type=int, default=CompareSettings.rounds, help="Rounds timed.")
    parser.add_argument(
        "--starts-alone",
        action="store_true",
        help="Start engines one by one, to compare start-ups.",
    )
    parser.add_argument(
        "--only-starts",
        action="store_true",
        help="Measure start-ups alone, one by one or with --own-cores.",
    )
    parser.add_argument(
        "--own-cores",
        action="store_true",
        help="Start engines at once, each on as many cores of its own.",
    )
    parser.add_argument("--no-profiles", action="store_true", help="Record no kernels.")
    parser.add_argument(
        "--limit-s", type=float, default=CompareSettings.limit_s, help="Begin no round after it."
    )
    parser.add_argument("--json", type=Path, help="File to write the results to as data.")
    parser.add_argument("--out", type=Path, help="Markdown file to write; default: print it.")
    parser.add_argument("--kernels", type=Path, help="Markdown file for the kernels of each part.")
    parser.add_argument("--logs", type=Path, help="Folder that keeps the engines' output.")
    parser.add_argument(
        "--merge", type=Path, action="append", default=[], help="Earlier --json file, repeatable."
    )
    parser.add_argument("--render", action="store_true", help="Measure nothing, only merge.")
    parser.add_argument(
        "--commit", help="Commit that is measured; default: $ATTN_COMMIT, then git."
    )
    return parser


def settings_of(options: argparse.Namespace) -> CompareSettings:
    """Settings from the command line.

    Raises:
        ValueError: a model is not known, or a number is out of range.
    """
    return CompareSettings(
        models=select_models(tuple(options.only)),
        backends=tuple(options.backends),
        caches=tuple(options.caches),
        rounds=options.rounds,
        starts_alone=options.starts_alone or (options.only_starts and not options.own_cores),
        only_starts=options.only_starts,
        own_cores=options.own_cores,
        profiles=not options.no_profiles,
        limit_s=options.limit_s,
        commit=options.commit,
        logs=options.logs,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 when an engine of ours failed, 2 for bad input."""
    options = _parser().parse_args(arguments)
    files = Files(options.json, options.out, options.kernels, tuple(options.merge))

    def log(line: str) -> None:
        print(line, flush=True)

    try:
        settings = settings_of(options)
        files.check()
        whole = merged_files(files.merge)
        if not options.render:
            require_engine()
            if settings.logs is not None:
                settings.logs.mkdir(parents=True, exist_ok=True)
            earlier = whole
            for model in settings.models:
                for part in compare(model, settings, log):
                    whole = Comparisons(models=(part,)).merged(earlier)
                    files.write(whole)
                earlier = whole
        files.write(whole)
    except USER_ERRORS as error:
        return usage_error(error)
    if files.out is None:
        log(render(whole))
    return int(any(row.error for row in ours_of(whole, settings.models)))


def ours_of(comparisons: Comparisons, models: Sequence[EngineModel]) -> Iterator[Row]:
    """Rows of our backend on some models."""
    for model in models:
        comparison = comparisons.of(model.name)
        if comparison is not None:
            yield from (row for row in comparison.rows if row.contender.backend == "CUSTOM")


if __name__ == "__main__":
    sys.exit(main())
