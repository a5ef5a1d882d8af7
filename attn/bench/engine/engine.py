"""Records of a benchmark of vLLM's engine: workloads, targets, results, and tables of results."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from pydantic import Field, StrictBool

from attn.bench.results.results import Check, Verdict
from specs.base import PositiveInt, Spec

OURS: Final = "CUSTOM"
"""Name of our backend in vLLM."""
FLASH, TRITON = "FLASH_ATTN", "TRITON_ATTN"
BACKENDS: Final = (FLASH, TRITON, OURS)
PLUGIN: Final = "attn.integrations.vllm.plugin:register"
MEMBERS: Final = "attn.integrations.vllm.members"
"""Module that holds our impls as vLLM knows them."""
START_UP: Final = "start-up"
LOAD_FORMAT: Final = "attn_random"

MODEL: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""A ``config.json`` with the sizes of Llama-3.1-8B."""
LAYERS: Final = 32
LOGPROB_LAYERS: Final = 4
MAX_MODEL_LEN: Final = 16384

ANSWER_LENS: Final = (5, 64, 300, 1000, 2000)
"""Lengths of the prompts whose log-probabilities are compared, in tokens."""
ANSWER_TOKENS: Final = 32
TOP_LOGPROBS: Final = 8
"""Log-probabilities per generated position, in addition to that of the token taken."""

Log = Callable[[str], None]


class Workload(Spec):
    """Requests that the engine gets together."""

    name: str
    num_prompts: PositiveInt
    prompt_len: PositiveInt
    output_len: PositiveInt
    rates_output: StrictBool = False
    """True where the rate counts generated tokens, False where it counts the prompts' tokens."""

    @property
    def tokens(self) -> int:
        """Tokens that the rate counts."""
        return self.num_prompts * (self.output_len if self.rates_output else self.prompt_len)

    @property
    def what(self) -> str:
        """Sizes in a few words."""
        unit = "out" if self.rates_output else "in"
        return f"{self.num_prompts} x ({self.prompt_len} in + {self.output_len} out), {unit} tok/s"


WORKLOADS: Final = (
    Workload(name="prefill", num_prompts=32, prompt_len=4096, output_len=1),
    Workload(name="decode", num_prompts=128, prompt_len=1024, output_len=128, rates_output=True),
    Workload(name="long", num_prompts=8, prompt_len=12288, output_len=64),
)


class Target(Spec):
    """A bound on our result as a multiple of another's: tokens/s at least, seconds at most."""

    what: str
    """Name of a workload, or ``START_UP``."""
    against: str
    ratio: float = Field(gt=0)

    @property
    def text(self) -> str:
        """The bound in words."""
        sign = "<=" if self.what == START_UP else ">="
        return f"{self.what} {sign} {self.ratio:.2f} x {self.against}"


TARGETS: Final = (
    Target(what="decode", against=FLASH, ratio=1.0),
    Target(what="prefill", against=FLASH, ratio=1.0),
    Target(what="long", against=FLASH, ratio=1.0),
    Target(what="prefill", against=TRITON, ratio=1.4),
    Target(what="long", against=TRITON, ratio=1.9),
    Target(what=START_UP, against=TRITON, ratio=1.0),
)
"""Targets of our backend on the whole model."""


# -- Results.


class Speed(Spec):
    """Times of one workload."""

    workload: str
    seconds: tuple[float, ...] = Field(min_length=1)
    """Seconds of each round."""

    @property
    def median(self) -> float:
        """Median of the rounds, in seconds."""
        return statistics.median(self.seconds)

    @property
    def quartile_spread(self) -> float:
        """(third quartile - first quartile) / median of the rounds; the spread of fewer than eight.

        A slow round among many does not change it, nor does it change the median.
        """
        if len(self.seconds) < 8:
            return self.spread
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (third - first) / self.median

    @property
    def spread(self) -> float:
        """(longest - shortest) / median of the rounds."""
        return (max(self.seconds) - min(self.seconds)) / self.median


class Answer(Spec):
    """The engine's answer to one prompt."""

    prompt: tuple[float, ...]
    """Log-probability of each token of the prompt but the first."""
    tokens: tuple[int, ...]
    """Generated tokens, by greedy sampling."""
    logprobs: tuple[dict[int, float], ...]
    """For each generated token the log-probabilities of some tokens, including the token taken."""


class BackendResult(Spec):
    """Results of one backend."""

    backend: str
    start_up_s: float | None = None
    """Seconds of the engine's constructor with every compilation cache empty."""
    speeds: tuple[Speed, ...] = ()
    speed_error: str = ""
    """Why there are no speeds."""
    answers: tuple[Answer, ...] = ()
    answer_error: str = ""
    """Why there are no answers."""

    def speed(self, workload: str) -> Speed | None:
        """Speed of a workload by name; None when it was not measured."""
        return next((speed for speed in self.speeds if speed.workload == workload), None)


class EngineEnvironment(Spec):
    """Machine, versions and time of a run."""

    date: str = "unknown"
    device: str = "unknown"
    torch: str = "unknown"
    triton: str = "unknown"
    vllm: str = "unknown"
    commit: str = "unknown"


class EngineResults(Spec):
    """Results of a run, or of several runs merged."""

    environment: EngineEnvironment = EngineEnvironment()
    layers: PositiveInt = LAYERS
    logprob_layers: PositiveInt = LOGPROB_LAYERS
    rounds: PositiveInt
    workloads: tuple[Workload, ...] = WORKLOADS
    backends: tuple[BackendResult, ...] = ()

    def of(self, backend: str) -> BackendResult | None:
        """A backend's result; None when it was not asked for."""
        return next((result for result in self.backends if result.backend == backend), None)

    def merged(self, earlier: EngineResults) -> EngineResults:
        """Add the results of ``earlier`` for backends that have no result here.

        Raises:
            ValueError: ``earlier`` has other layers, workloads, versions or another device.
        """
        for name in ("layers", "logprob_layers", "workloads"):
            if getattr(self, name) != getattr(earlier, name):
                raise ValueError(
                    f"earlier results must have {name} {getattr(self, name)!r}, got "
                    f"{getattr(earlier, name)!r}"
                )
        for name in ("device", "torch", "triton", "vllm"):
            ours, theirs = getattr(self.environment, name), getattr(earlier.environment, name)
            if ours != theirs and "unknown" not in (ours, theirs):
                raise ValueError(f"earlier results must have {name} {ours!r}, got {theirs!r}")
        known = self if self.environment != EngineEnvironment() else earlier
        commits = [earlier.environment.commit, self.environment.commit]
        commit = ", ".join(dict.fromkeys(name for text in commits for name in text.split(", ")))
        backends = {result.backend: result for result in (*earlier.backends, *self.backends)}
        order = [*BACKENDS, *backends]
        return self.replace(
            environment=known.environment.replace(commit=commit),
            backends=tuple(sorted(backends.values(), key=lambda item: order.index(item.backend))),
        )


class Difference(NamedTuple):
    """Difference of two backends' log-probabilities at positions with equal tokens before them."""

    positions: int
    mean: float
    """Mean of the absolute differences."""
    largest: float
    same_tokens: int
    """Generated tokens that are equal before the first different one."""
    tokens: int


_VERDICTS: Final = (Verdict.MET, Verdict.NOT_MET, Verdict.NOT_MEASURED)
"""The verdicts of this table, which has no spread that would make a ratio level."""


def compare_answers(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Difference:
    """Compare the log-probabilities of two backends on the same prompts.

    A generated position counts while all tokens before it are equal. At a position every token that
    both backends list is compared.

    Raises:
        ValueError: the prompts differ, or no position can be compared.
    """
    if [len(answer.prompt) for answer in ours] != [len(answer.prompt) for answer in theirs]:
        raise ValueError("answers must be to the same prompts, got prompts of different lengths")
    gaps: list[float] = []
    positions, same, tokens = 0, 0, 0
    for mine, other in zip(ours, theirs, strict=True):
        gaps += [abs(a - b) for a, b in zip(mine.prompt, other.prompt, strict=True)]
        positions += len(mine.prompt)
        tokens += min(len(mine.tokens), len(other.tokens))
        pairs = zip(mine.tokens, other.tokens, mine.logprobs, other.logprobs, strict=True)
        for token, its, listed, their in pairs:
            gaps += [abs(value - their[key]) for key, value in listed.items() if key in their]
            positions += 1
            if token != its:
                break
            same += 1
    if not gaps:
        raise ValueError("answers must have a position to compare, got none")
    return Difference(positions, statistics.fmean(gaps), max(gaps), same, tokens)


def require_varied(outputs: Sequence[Sequence[int]]) -> None:
    """Refuse outputs that do not depend on the input, which say nothing about attention.

    Raises:
        ValueError: all prompts got the same tokens, or most outputs repeat one token.
    """
    if len(outputs) > 1 and len({tuple(tokens) for tokens in outputs}) == 1:
        raise ValueError(f"outputs must vary, got the same tokens for {len(outputs)} prompts")
    longer = [tokens for tokens in outputs if len(tokens) > 1]
    constant = [tokens for tokens in longer if len(set(tokens)) == 1]
    if 2 * len(constant) > len(longer):
        raise ValueError(f"outputs must vary, got one token only in {len(constant)} of them")


# -- Targets.


def value_of(
    result: BackendResult | None, what: str, workloads: Iterable[Workload]
) -> float | None:
    """Tokens/s of a workload, or seconds of ``START_UP``; None when not measured."""
    if result is None:
        return None
    if what == START_UP:
        return result.start_up_s
    speed = result.speed(what)
    workload = next((item for item in workloads if item.name == what), None)
    return None if speed is None or workload is None else workload.tokens / speed.median


def check_of(results: EngineResults, target: Target) -> Check:
    """Judge a target. Our engine meets none if it failed; with a smaller model none is judged."""
    ours = results.of(OURS)
    standard = {item.name: item for item in WORKLOADS}
    asked = {item.name: item for item in results.workloads}
    is_standard = results.layers == LAYERS and (
        target.what == START_UP or asked.get(target.what) == standard.get(target.what)
    )
    mine = value_of(ours, target.what, results.workloads)
    other = value_of(results.of(target.against), target.what, results.workloads)
    verdict = Verdict.NOT_MEASURED
    if is_standard and ours is not None and ours.speed_error:
        verdict = Verdict.NOT_MET
    elif is_standard and mine is not None and other is not None:
        bound = target.ratio * other
        holds = mine <= bound if target.what == START_UP else mine >= bound
        verdict = Verdict.MET if holds else Verdict.NOT_MET
    return Check(target.text, verdict)


# -- Markdown.

_HOW = (
    "Llama-3.1-8B's shape{layers}, random bf16 weights under which tokens differ from position to "
    "position, vLLM's default settings but for prefix caching, which is off. The engine core runs "
    "in the process that asks; each backend has its own, with empty compilation caches. Tokens/s "
    "is by the wall clock over one `LLM.generate` of all prompts, median of {rounds} rounds after "
    "one to warm up; `spread` is (longest - shortest) / median. Start-up is the constructor of "
    "`LLM`. `CUSTOM` is ours."
)
_LOGPROBS = (
    "{layers} layers of the same shape, {prompts} prompts of {shortest} to {longest} tokens, "
    "greedy. Compared with {reference}: the prompts' own tokens, and of the generated positions "
    "those before which all tokens agree."
)


def reference_of(results: EngineResults) -> BackendResult | None:
    """Result to compare answers with: FLASH_ATTN's, else the first of vLLM's that has answers."""
    theirs = [item for item in results.backends if item.backend != OURS and item.answers]
    return next((item for item in theirs if item.backend == FLASH), theirs[0] if theirs else None)


def render_markdown(results: EngineResults) -> str:
    """The markdown tables of a run, from ``results`` alone."""
    environment = results.environment
    versions = ", ".join(f"{name} {getattr(environment, name)}" for name in ("torch", "triton"))
    checks = [check_of(results, target) for target in TARGETS]
    counts = Counter(check.verdict for check in checks)
    layers = "" if results.layers == LAYERS else f" cut to {results.layers} layers"
    parts = [
        f"# vLLM {environment.vllm} on {environment.device}",
        f"{environment.date}, commit {environment.commit}; {versions}.",
        _HOW.format(layers=layers, rounds=results.rounds),
        "Targets: " + ", ".join(f"{counts[one]} {one.value}" for one in _VERDICTS) + ".",
        "## Tokens/s",
        _speed_table(results),
        "## Start-up",
        _start_up_table(results),
        "## Log-probabilities",
        *_logprob_section(results),
        "## Targets",
        _target_table(results, checks),
    ]
    reasons = _reasons(results)
    return "\n\n".join([*parts, *(["## Not measured", reasons] if reasons else [])]) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(value: float | None, other: float | None) -> str:
    return "" if value is None or other is None else f"{value / other:.3f}"


def _missing(result: BackendResult) -> str:
    return "failed" if result.speed_error else "not measured"


def _speed_table(results: EngineResults) -> str:
    header = ["workload", "backend", "tokens/s", "spread", f"/ {FLASH}", f"/ {TRITON}"]
    rows = []
    for workload in results.workloads:
        peers = [
            value_of(results.of(name), workload.name, results.workloads) for name in (FLASH, TRITON)
        ]
        for result in results.backends:
            rate = value_of(result, workload.name, results.workloads)
            speed = result.speed(workload.name)
            rows.append(
                [
                    f"{workload.name}: {workload.what}",
                    result.backend,
                    _missing(result) if rate is None else f"{rate:.0f}",
                    "" if speed is None else f"{100 * speed.spread:.1f} %",
                    *(_ratio(rate, peer) for peer in peers),
                ]
            )
    return _table(header, rows)


def _start_up_table(results: EngineResults) -> str:
    peers = [value_of(results.of(name), START_UP, ()) for name in (FLASH, TRITON)]
    rows = []
    for result in results.backends:
        seconds = result.start_up_s
        cell = _missing(result) if seconds is None else f"{seconds:.1f}"
        rows.append([result.backend, cell, *(_ratio(seconds, peer) for peer in peers)])
    return _table(["backend", "seconds", f"/ {FLASH}", f"/ {TRITON}"], rows)


def _logprob_section(results: EngineResults) -> list[str]:
    reference = reference_of(results)
    header = ["backend", "largest difference", "mean", "positions", "same tokens"]
    rows = []
    for result in results.backends:
        cells = ["failed" if result.answer_error else "not measured", "", "", ""]
        if result.answers and result is reference:
            cells = ["reference", "", "", ""]
        elif result.answers and reference is not None:
            found = compare_answers(result.answers, reference.answers)
            same = f"{found.same_tokens} of {found.tokens}"
            cells = [f"{found.largest:.4f}", f"{found.mean:.5f}", str(found.positions), same]
        rows.append([result.backend, *cells])
    how = _LOGPROBS.format(
        layers=results.logprob_layers,
        prompts=len(ANSWER_LENS),
        shortest=min(ANSWER_LENS),
        longest=max(ANSWER_LENS),
        reference="nothing, for want of a result" if reference is None else reference.backend,
    )
    return [how, _table(header, rows)]


def _target_table(results: EngineResults, checks: Sequence[Check]) -> str:
    rows = []
    for target, check in zip(TARGETS, checks, strict=True):
        mine = value_of(results.of(OURS), target.what, results.workloads)
        other = value_of(results.of(target.against), target.what, results.workloads)
        ratio = _ratio(mine, other)
        rows.append([check.text, f"{ratio} x" if ratio else "", check.verdict.value])
    return _table(["target", "measured", "verdict"], rows)


def _reasons(results: EngineResults) -> str:
    lines = []
    for result in results.backends:
        for what, reason in (("speed", result.speed_error), ("answers", result.answer_error)):
            if reason:
                lines.append(f"- {result.backend}, {what}: {reason}")
    return "\n".join(lines)
