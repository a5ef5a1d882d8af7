"""Results of compared engines: rows, verdicts, merging, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum, unique
from statistics import median

from pydantic import Field, StrictBool

from attn.bench.engine.engine import EngineEnvironment, Speed
from attn.bench.engine.parts import KernelTime, PartName, part_of, time_of
from attn.bench.engine.shapes import MODELS, Contender, EngineModel, Goal, Load, Measure
from specs.base import NonNegativeInt, PositiveInt, Spec


@unique
class Judgement(StrEnum):
    """Verdict on a goal."""

    MET = "met"
    LEVEL = "level"
    NOT_MET = "NOT met"
    NOT_MEASURED = "not measured"


class Profile(Spec):
    """Kernels of one load."""

    load: str
    kernels: tuple[KernelTime, ...]

    def ms(self, part: PartName) -> float:
        """Milliseconds of a part."""
        return time_of(self.kernels, part) / 1000


class Row(Spec):
    """Result of a contender on a model."""

    model: str
    contender: Contender
    start_ups: tuple[float, ...] = ()
    """Seconds of each start-up."""
    starts_alone: StrictBool = False
    """True where no other engine started on its cores at the same time."""
    cores: NonNegativeInt = 0
    """Cores of an engine that started beside others on other cores; 0 where it did not."""
    speeds: tuple[Speed, ...] = ()
    profiles: tuple[Profile, ...] = ()
    error: str = ""
    """The last line of the traceback of an engine that failed."""
    vllm_line: str = ""
    """What vLLM itself said last before it failed."""
    compiled: tuple[str, ...] = ()
    """Compiled modules of vLLM that were installed."""

    @property
    def start_up_s(self) -> float | None:
        """Median seconds of a start-up; None when none was measured."""
        return median(self.start_ups) if self.start_ups else None

    @property
    def start_up_spread(self) -> float | None:
        """(Longest - shortest) / median of the start-ups; None for fewer than two."""
        if len(self.start_ups) < 2:
            return None
        return (max(self.start_ups) - min(self.start_ups)) / median(self.start_ups)

    def speed(self, load: str) -> Speed | None:
        """Speed of a load by name; None when it was not measured."""
        return next((speed for speed in self.speeds if speed.workload == load), None)

    def profile(self, load: str) -> Profile | None:
        """Kernels of a load by name; None when they were not recorded."""
        return next((profile for profile in self.profiles if profile.load == load), None)

    def after(self, earlier: Row) -> Row:
        """The row, completed by an earlier one of the same contender.

        An engine that failed now does not undo a result. A row of start-ups alone adds them to
        earlier speeds and to earlier start-ups alone on as many cores, which are kept; it replaces
        start-ups on other cores.
        """
        if self.error:
            return earlier
        start_ups, cores = self.start_ups, self.cores
        if earlier.starts_alone and not self.starts_alone:
            start_ups, cores = earlier.start_ups, earlier.cores
        elif earlier.starts_alone and earlier.cores == cores:
            start_ups = earlier.start_ups + start_ups
        is_whole = self.speeds or earlier.error
        return (self if is_whole else earlier).replace(
            start_ups=start_ups,
            starts_alone=self.starts_alone or earlier.starts_alone,
            cores=cores,
        )


class Comparison(Spec):
    """Results of the engines of one model, measured in turn on one machine."""

    model: str
    environment: EngineEnvironment = EngineEnvironment()
    rounds: PositiveInt
    loads: tuple[Load, ...] = ()
    """What was asked for, which a later version may change."""
    rows: tuple[Row, ...] = ()

    def row(self, contender: Contender) -> Row | None:
        """A contender's result; None when it was not asked for."""
        return next((row for row in self.rows if row.contender == contender), None)

    def merged(self, earlier: Comparison) -> Comparison:
        """Add what ``earlier`` has and this lacks, see :meth:`Row.after`.

        Raises:
            ValueError: ``earlier`` is of another model, device or version.
        """
        if self.model != earlier.model:
            raise ValueError(f"earlier results must be of {self.model}, got {earlier.model}")
        for name in ("device", "torch", "triton", "vllm"):
            ours, theirs = getattr(self.environment, name), getattr(earlier.environment, name)
            if ours != theirs and "unknown" not in (ours, theirs):
                raise ValueError(
                    f"earlier results of {self.model} must have {name} {ours!r}, got {theirs!r}"
                )
        kept = {row.contender: row for row in earlier.rows}
        for row in self.rows:
            known_row = kept.get(row.contender)
            kept[row.contender] = row if known_row is None else row.after(known_row)
        known = self if self.environment.device != "unknown" else earlier
        order = [*MODELS[self.model].contenders, *kept]
        commits = [earlier.environment.commit, self.environment.commit]
        names = [name for text in commits for name in text.split(", ") if name != "unknown"]
        commit = ", ".join(dict.fromkeys(names)) or "unknown"
        # Start-ups have no rounds.
        is_timed = any(row.speeds for row in self.rows)
        return self.replace(
            rounds=self.rounds if is_timed else earlier.rounds,
            environment=known.environment.replace(commit=commit),
            rows=tuple(sorted(kept.values(), key=lambda row: order.index(row.contender))),
        )


class Comparisons(Spec):
    """Results of several models."""

    models: tuple[Comparison, ...] = Field(default=())

    def of(self, model: str) -> Comparison | None:
        """A model's results; None when it was not measured."""
        return next((found for found in self.models if found.model == model), None)

    def merged(self, earlier: Comparisons) -> Comparisons:
        """Add the results of ``earlier``.

        Raises:
            ValueError: results of one model do not fit together.
        """
        found = {comparison.model: comparison for comparison in earlier.models}
        for comparison in self.models:
            known = found.get(comparison.model)
            found[comparison.model] = comparison if known is None else comparison.merged(known)
        order = [*MODELS, *found]
        return Comparisons(
            models=tuple(sorted(found.values(), key=lambda item: order.index(item.model)))
        )


# -- Verdicts.


def rate_of(row: Row | None, load: Load) -> float | None:
    """Tokens/s of a load; None when not measured."""
    speed = None if row is None else row.speed(load.name)
    return None if speed is None else load.tokens / speed.median


def ratio_of(comparison: Comparison, goal: Goal, rival: Contender) -> float | None:
    """Our speed as a multiple of a rival's, or our seconds of start-up as a multiple of its."""
    ours, other = comparison.row(goal.ours), comparison.row(rival)
    if ours is None or other is None:
        return None
    if goal.measure is Measure.START_UP:
        if ours.start_up_s is None or other.start_up_s is None:
            return None
        return ours.start_up_s / other.start_up_s
    if goal.measure is Measure.RATE:
        mine, its = ours.speed(goal.load), other.speed(goal.load)
        return None if mine is None or its is None else its.median / mine.median
    profiles = ours.profile(goal.load), other.profile(goal.load)
    if profiles[0] is None or profiles[1] is None:
        return None
    times = [profile.ms(PartName.ATTENTION) for profile in profiles if profile is not None]
    return times[1] / times[0] if all(times) else None


def noise_of(comparison: Comparison, goal: Goal, rival: Contender) -> float:
    """The larger spread of the two engines: of rounds by quartiles, of start-ups whole.

    Zero for what was measured once, and for kernels.
    """
    rows = comparison.row(goal.ours), comparison.row(rival)
    if goal.measure is Measure.START_UP:
        spreads = [None if row is None else row.start_up_spread for row in rows]
        return max((spread for spread in spreads if spread is not None), default=0.0)
    if goal.measure is not Measure.RATE:
        return 0.0
    speeds = [None if row is None else row.speed(goal.load) for row in rows]
    return max((speed.quartile_spread for speed in speeds if speed is not None), default=0.0)


def judge(comparison: Comparison | None, goal: Goal) -> tuple[float | None, Judgement]:
    """The ratio to the hardest rival, and the verdict.

    A bound that is missed or held by less than the larger spread of the rounds is ``level``. A goal
    is judged when all rivals were measured, or missed already by one that was; an engine of ours
    that failed meets none.
    """
    if comparison is None:
        return None, Judgement.NOT_MEASURED
    row = comparison.row(goal.ours)
    if row is not None and row.error:
        return None, Judgement.NOT_MET
    found = [(ratio_of(comparison, goal, rival), rival) for rival in goal.rivals]
    known = [(ratio, rival) for ratio, rival in found if ratio is not None]
    if not known:
        return None, Judgement.NOT_MEASURED
    is_less = goal.measure is Measure.START_UP
    pick = max if is_less else min
    ratio, rival = pick(known, key=lambda pair: pair[0])
    holds = ratio <= goal.ratio if is_less else ratio >= goal.ratio
    if abs(ratio / goal.ratio - 1.0) <= noise_of(comparison, goal, rival):
        verdict = Judgement.LEVEL
    else:
        verdict = Judgement.MET if holds else Judgement.NOT_MET
    # A rival whose engine failed is beaten by none; one that was not asked for leaves it open.
    absent = [rival for rival in goal.rivals if comparison.row(rival) is None]
    if absent and verdict is not Judgement.NOT_MET:
        verdict = Judgement.NOT_MEASURED
    return ratio, verdict


# -- Markdown.

_HOW = (
    "Random bf16 weights under which tokens differ from position to position; the widths are the "
    "model's own, the layers fewer, the MLPs dense. All engines of a model are processes that are "
    "alive at the same time on one GPU; each round asks one after the other for the same load, and "
    "every other round in reverse, so that a drift of the machine reaches all. The first round is "
    "not counted. Tokens/s is by the wall clock over one `LLM.generate` of all prompts, median of "
    "the rounds, each of which asks for `decode` twice; `spread` is (third quartile - first "
    "quartile) / median, of fewer than eight times (longest - shortest) / median. Prompts of "
    "`decode` are in the prefix cache, so that its rate is of generated tokens alone; the other "
    "prompts are new in every round. `attention` and `indexer` are milliseconds of GPU kernels in "
    "one more round under `torch.profiler`, told by their names: attention counts its cache, plan "
    "and list kernels, no product with weights, and none of torch's own copies and fills, whose "
    "names do not tell whom they serve. A kernel that starts while an earlier one runs, and waits "
    "for it, is charged only the time in which no earlier kernel still ran. A start-up is the time "
    "that `LLM(...)` takes in a new process, with empty caches of compiled kernels; its `spread` "
    "is (longest - shortest) / median. A ratio that differs from its bound by less than the larger "
    "spread is `level`. `CUSTOM` is ours."
)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render(comparisons: Comparisons) -> str:
    """The markdown page of some results, from these alone; it lists models that have rows."""
    found = {item.model: item for item in comparisons.models if item.rows}
    models = [model for model in MODELS.values() if model.name in found]
    judged = [
        (model, goal, *judge(found[model.name], goal)) for model in models for goal in model.goals
    ]
    counts = Counter(verdict for *_, verdict in judged)
    devices = dict.fromkeys(item.environment.device for item in found.values())
    versions = dict.fromkeys(item.environment.vllm for item in found.values())
    title = f"# Engines of vLLM {', '.join(versions)} on {', '.join(devices)}"
    parts = [
        title if models else "# Engines of vLLM: no results",
        _HOW,
        "Goals: " + ", ".join(f"{counts[word]} {word.value}" for word in Judgement) + ".",
    ]
    for model in models:
        parts.append(f"## {model.title}")
        parts += _model_section(model, found[model.name])
        rows = [
            [goal.text, "" if ratio is None else f"{ratio:.3f} x", verdict.value]
            for its, goal, ratio, verdict in judged
            if its is model
        ]
        parts.append(markdown_table(["goal", "measured", "verdict"], rows))
    others = [model.title for model in MODELS.values() if model not in models]
    if others:
        parts.append(f"Not measured: {'; '.join(others)}.")
    return "\n\n".join(parts) + "\n"


def _model_section(model: EngineModel, comparison: Comparison) -> list[str]:
    environment = comparison.environment
    where = (
        f"{environment.device}, {environment.date}, commit {environment.commit}; torch "
        f"{environment.torch}, triton {environment.triton}; {comparison.rounds} rounds."
    )
    header = ["load", "backend", "tokens/s", "spread", "/ CUSTOM", "attention ms", "indexer ms"]
    rows = [_cells(model, comparison, load, row) for load in model.loads for row in comparison.rows]
    starts = [
        [
            row.contender.label,
            "failed" if row.error else _number(row.start_up_s, 1),
            "" if row.start_up_spread is None else f"{100 * row.start_up_spread:.1f} %",
            _started(row) + (f", {len(row.start_ups)} times" if len(row.start_ups) > 1 else ""),
        ]
        for row in comparison.rows
    ]
    parts = [
        where,
        markdown_table(header, rows),
        markdown_table(["backend", "start-up s", "spread", "started"], starts),
    ]
    failed = [_failure(row) for row in comparison.rows if row.error]
    return [*parts, *(["Not run:", "\n".join(failed)] if failed else [])]


def _started(row: Row) -> str:
    if row.cores:
        return f"on {row.cores} cores of its own"
    return "alone" if row.starts_alone else "beside the others"


def _cells(model: EngineModel, comparison: Comparison, load: Load, row: Row) -> list[str]:
    rate, speed, profile = rate_of(row, load), row.speed(load.name), row.profile(load.name)
    same = row.contender.replace(backend="CUSTOM")
    ours = rate_of(comparison.row(same), load)
    indexes = "index_topk" in model.config
    return [
        f"{load.name}: {load.what}",
        row.contender.label,
        ("failed" if row.error else "not measured") if rate is None else f"{rate:.0f}",
        "" if speed is None else f"{100 * speed.quartile_spread:.1f} %",
        "" if rate is None or ours is None else f"{rate / ours:.3f}",
        "" if profile is None else _number(profile.ms(PartName.ATTENTION), 1),
        _number(profile.ms(PartName.INDEXER), 1) if profile is not None and indexes else "",
    ]


def _number(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def _failure(row: Row) -> str:
    lines = [f"- {row.contender.label}: `{row.error}`"]
    if row.vllm_line:
        lines.append(f"  - vLLM: `{row.vllm_line}`")
    lines.append(f"  - installed: {', '.join(row.compiled) or 'no compiled module of vLLM'}")
    return "\n".join(lines)


def named(kernel: str) -> str:
    """A kernel's name for a table's cell, cut where it is long."""
    return f"`{kernel[:160].replace('|', '/')}`"


def render_kernels(comparisons: Comparisons) -> str:
    """A page of the kernels that each row's times are of, so that a reader can check the parts."""
    parts = ["# Kernels of the compared engines"]
    for comparison in comparisons.models:
        for row in comparison.rows:
            for profile in row.profiles:
                parts.append(f"## {comparison.model}, {row.contender.label}, {profile.load}")
                rows = [
                    [
                        part_of(item.name).value,
                        f"{item.us / 1000:.2f}",
                        str(item.count),
                        named(item.name),
                    ]
                    for item in profile.kernels[:40]
                ]
                parts.append(markdown_table(["part", "ms", "launches", "kernel"], rows))
    return "\n\n".join(parts) + "\n"
