"""Tokens/s of vLLM's engine with our backend beside vLLM's own: ``python -m attn.bench.vllm``.

Needs vLLM and a GPU, no model and no network: the model is of Llama-3.1-8B's shape, its weights are
drawn on the GPU. Every backend has two processes of its own, for speed and for log-probabilities,
because vLLM selects its backends once per process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, unique
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

import torch
from pydantic import Field, StrictBool

from attn.bench.kernels import KernelBench, environment_of
from attn.bench.results import Check, Verdict
from specs.base import PositiveInt, Spec, parse_spec

OURS: Final = "CUSTOM"
"""Our backend's name in vLLM."""
FLASH, TRITON = "FLASH_ATTN", "TRITON_ATTN"
BACKENDS: Final = (FLASH, TRITON, OURS)
PLUGIN: Final = "attn.integrations.vllm.plugin:register"
MEMBERS: Final = "attn.integrations.vllm.members"
"""Module of our impls in vLLM."""
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
"""``config.json`` of Llama-3.1-8B's shape."""
LAYERS: Final = 32
LOGPROB_LAYERS: Final = 4
MAX_MODEL_LEN: Final = 16384

ANSWER_LENS: Final = (5, 64, 300, 1000, 2000)
"""Prompts whose log-probabilities are compared."""
ANSWER_TOKENS: Final = 32
TOP_LOGPROBS: Final = 8
"""Per generated position, beside the token taken."""

Log = Callable[[str], None]


class Workload(Spec):
    """Requests that are given to the engine at once."""

    name: str
    num_prompts: PositiveInt
    prompt_len: PositiveInt
    output_len: PositiveInt
    rates_output: StrictBool = False
    """Rated by generated tokens, else by the prompts'."""

    @property
    def tokens(self) -> int:
        """That the rate counts."""
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
    """A bound on ours as a multiple of another backend's: tokens/s at least, seconds at most."""

    what: str
    """A workload, or ``START_UP``."""
    against: str
    ratio: float = Field(gt=0)

    @property
    def text(self) -> str:
        """The bound in words."""
        sign = "<=" if self.what == START_UP else ">="
        return f"{self.what} {sign} {self.ratio:.2f} x {self.against}"


TARGETS: Final = (
    Target(what="decode", against=FLASH, ratio=1.0),
    Target(what="prefill", against=FLASH, ratio=0.95),
    Target(what="long", against=FLASH, ratio=0.9),
    Target(what="prefill", against=TRITON, ratio=1.4),
    Target(what="long", against=TRITON, ratio=1.9),
    Target(what=START_UP, against=TRITON, ratio=1.0),
)
"""What ours has to reach on the whole model."""


# -- Results.


class Speed(Spec):
    """Times of one workload."""

    workload: str
    seconds: tuple[float, ...] = Field(min_length=1)
    """Of each round."""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(longest - shortest) / median of the rounds."""
        return (max(self.seconds) - min(self.seconds)) / self.median


class Answer(Spec):
    """What the engine said to one prompt."""

    prompt: tuple[float, ...]
    """Log-probability of each token of the prompt but the first."""
    tokens: tuple[int, ...]
    """Greedy."""
    logprobs: tuple[dict[int, float], ...]
    """Per generated token: log-probabilities of some tokens, the one taken among them."""


class BackendResult(Spec):
    """All that was measured of a backend."""

    backend: str
    start_up_s: float | None = None
    """The engine's constructor, with every cache empty."""
    speeds: tuple[Speed, ...] = ()
    speed_error: str = ""
    """Why there are no speeds."""
    answers: tuple[Answer, ...] = ()
    answer_error: str = ""
    """Why there are no answers."""

    def speed(self, workload: str) -> Speed | None:
        """Of a workload by name; None when it was not measured."""
        return next((speed for speed in self.speeds if speed.workload == workload), None)


class EngineEnvironment(Spec):
    """Where and when."""

    date: str = "unknown"
    device: str = "unknown"
    torch: str = "unknown"
    triton: str = "unknown"
    vllm: str = "unknown"
    commit: str = "unknown"


class EngineResults(Spec):
    """A whole run, or several that were put together."""

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
        """These results, and of ``earlier`` the backends that are not among them.

        Raises:
            ValueError: ``earlier`` is of other layers, workloads or versions, or another device.
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
    """Log-probabilities of two backends at the positions whose prefix both took."""

    positions: int
    mean: float
    """Of the absolute differences."""
    largest: float
    same_tokens: int
    """Generated tokens before the two part."""
    tokens: int


def compare_answers(ours: Sequence[Answer], theirs: Sequence[Answer]) -> Difference:
    """Where two backends were given the same prompts.

    A generated position counts while all tokens before it agree, with every token that both list.

    Raises:
        ValueError: other prompts, or no position at all.
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
    """A model whose output does not depend on its input measures nothing of attention.

    Raises:
        ValueError: all prompts got the same tokens, or most of them one token over and over.
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
    """A target judged. An engine of ours that failed meets none; a smaller model judges none."""
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
    """What answers are compared with: FLASH_ATTN's, or of the first of vLLM's that has any."""
    theirs = [item for item in results.backends if item.backend != OURS and item.answers]
    return next((item for item in theirs if item.backend == FLASH), theirs[0] if theirs else None)


def render_markdown(results: EngineResults) -> str:
    """The tables; depends on nothing but ``results``."""
    environment = results.environment
    versions = ", ".join(f"{name} {getattr(environment, name)}" for name in ("torch", "triton"))
    checks = [check_of(results, target) for target in TARGETS]
    counts = Counter(check.verdict for check in checks)
    layers = "" if results.layers == LAYERS else f" cut to {results.layers} layers"
    parts = [
        f"# vLLM {environment.vllm} on {environment.device}",
        f"{environment.date}, commit {environment.commit}; {versions}.",
        _HOW.format(layers=layers, rounds=results.rounds),
        "Targets: " + ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict) + ".",
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


# -- One engine, in a process of its own.


@unique
class Kind(StrEnum):
    """What a process measures."""

    SPEED = "speed"
    ANSWERS = "answers"


class Job(Spec):
    """What a process is to do."""

    kind: Kind
    backend: str
    model: dict[str, Any]
    """``config.json``."""
    workloads: tuple[Workload, ...] = WORKLOADS
    rounds: PositiveInt = 3
    max_model_len: PositiveInt = MAX_MODEL_LEN
    answer_lens: tuple[PositiveInt, ...] = ANSWER_LENS
    commit: str | None = None


class JobResult(Spec):
    """What it found."""

    environment: EngineEnvironment
    start_up_s: float
    speeds: tuple[Speed, ...] = ()
    answers: tuple[Answer, ...] = ()


def draw_weights(model: torch.nn.Module) -> None:
    """Random weights of a Llama, the same ones wherever and in whatever order they are drawn.

    Scores spread over a few of a hundred keys, and logits far enough for tokens to differ: vLLM's
    own dummy weights are so small that every position answers the same.
    """
    gains = {"qkv_proj": 1.6, "lm_head": 3.0}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
            module = name.removesuffix(".weight").split(".")[-1]
            if "norm" in module:
                weight.normal_(1.0, 0.1, generator=generator)
            elif "embed" in module:
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                std = gains.get(module, 1.0) / weight.shape[-1] ** 0.5
                weight.normal_(0.0, std, generator=generator)


def make_prompts(count: int, length: int, vocab: int, seed: int) -> list[dict[str, list[int]]]:
    """``count`` prompts of ``length`` random tokens below ``vocab``, no two alike."""
    generator = random.Random(seed)
    return [
        {"prompt_token_ids": [generator.randrange(vocab) for _ in range(length)]}
        for _ in range(count)
    ]


def _make_engine(job: Job, folder: Path, **options: Any) -> Any:
    """``vllm.LLM``; its weights come from a loader that only this process knows."""
    vllm = import_module("vllm")
    loaders = import_module("vllm.model_executor.model_loader")
    base: Any = import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    methods = {
        "download_model": lambda self, model_config: None,
        "load_weights": lambda self, model, model_config: draw_weights(model),
    }
    loaders.register_model_loader(LOAD_FORMAT)(type("RandomWeights", (base,), methods))
    if job.backend == OURS:
        # Where this library is on the path but not installed, vLLM finds no entry point.
        resolve_name(PLUGIN)()
    (folder / "config.json").write_text(json.dumps(job.model), encoding="utf-8")
    llm = vllm.LLM(
        model=str(folder),
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        attention_backend=job.backend,
        enable_prefix_caching=False,
        seed=0,
        **options,
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    modules = {type(layer.impl).__module__ for layer in layers if hasattr(layer, "impl")}
    if not modules or (modules == {MEMBERS}) != (job.backend == OURS):
        found = ", ".join(sorted(modules)) or "none"
        raise RuntimeError(f"{job.backend} was asked for, attention layers are of {found}")
    return llm


def _sampling(output_len: int, **options: Any) -> Any:
    return import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False, **options
    )


def _speed(llm: Any, job: Job, workload: Workload) -> Speed:
    """Time a workload once to warm up, then ``job.rounds`` times."""
    params = _sampling(workload.output_len)
    seconds = []
    for turn in range(job.rounds + 1):
        vocab = job.model["vocab_size"]
        prompts = make_prompts(workload.num_prompts, workload.prompt_len, vocab, seed=turn)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if [len(found) for found in tokens] != [workload.output_len] * workload.num_prompts:
            raise RuntimeError(f"{workload.name} gave fewer tokens than asked for")
        require_varied(tokens)
    return Speed(workload=workload.name, seconds=tuple(seconds[1:]))


def _answers(llm: Any, job: Job) -> tuple[Answer, ...]:
    """All prompts in one batch, so that their rows share steps."""
    prompts = [
        make_prompts(1, length, job.model["vocab_size"], seed=length)[0]
        for length in job.answer_lens
    ]
    params = _sampling(ANSWER_TOKENS, logprobs=TOP_LOGPROBS, prompt_logprobs=0)
    answers = []
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        ids, found = prompt["prompt_token_ids"], output.outputs[0]
        known = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        answer = Answer(
            prompt=tuple(row[token].logprob for token, row in known),
            tokens=tuple(found.token_ids),
            logprobs=tuple(
                {token: item.logprob for token, item in row.items()} for row in found.logprobs
            ),
        )
        answers.append(answer)
    require_varied([answer.tokens for answer in answers])
    return tuple(answers)


def perform(job: Job, folder: Path) -> JobResult:
    """Start an engine and measure it.

    Args:
        job: what to measure.
        folder: where the model's configuration may be written.
    """
    import_module("vllm")
    # Half the memory: log-probabilities of long prompts take some beside the cache.
    options = {"gpu_memory_utilization": 0.5} if job.kind is Kind.ANSWERS else {}
    begin = time.perf_counter()
    llm = _make_engine(job, folder, **options)
    start_up = time.perf_counter() - begin
    found = environment_of(KernelBench(commit=job.commit))
    names = EngineEnvironment.model_fields
    result = JobResult(
        environment=EngineEnvironment(**{name: getattr(found, name) for name in names}),
        start_up_s=start_up,
    )
    if job.kind is Kind.ANSWERS:
        return result.replace(answers=_answers(llm, job))
    return result.replace(speeds=tuple(_speed(llm, job, item) for item in job.workloads))


# -- A run.


@dataclass(frozen=True)
class EngineBench:
    """What to measure."""

    backends: tuple[str, ...] = BACKENDS
    workloads: tuple[Workload, ...] = WORKLOADS
    layers: int = LAYERS
    logprob_layers: int = LOGPROB_LAYERS
    rounds: int = 3
    commit: str | None = None
    """Of the code that is measured; None asks the environment, then git."""
    timeout_s: float = 1800
    """Of one process."""

    def __post_init__(self) -> None:
        for name in ("layers", "logprob_layers", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.backends:
            raise ValueError("backends must name at least one, got none")


def select_workloads(names: Sequence[str]) -> tuple[Workload, ...]:
    """Workloads by name, in their order; no name means all.

    Raises:
        ValueError: a name that is none of theirs.
    """
    known = [workload.name for workload in WORKLOADS]
    for name in names:
        if name not in known:
            raise ValueError(f"workload must be one of {', '.join(known)}; got {name!r}")
    return tuple(workload for workload in WORKLOADS if not names or workload.name in names)


def worker_environment(folder: Path, outer: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a process: the engine in it, and every compilation cache empty.

    Args:
        folder: new and empty.
        outer: of this process.
    """
    caches = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return {
        # All sampling is greedy: a sampler that has to be compiled first helps nobody.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        **outer,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **{name: str(folder / name.lower()) for name in caches},
    }


def last_words(text: str) -> str:
    """The last error that a process wrote, or its last line, for a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors: list[str] = re.findall(r"\w*(?:Error|Exception): .*", "\n".join(lines))
    return ([*lines[-1:], *errors] or ["no output"])[-1][:300].replace("|", "/")


def run_job(job: Job, timeout_s: float, log: Log) -> JobResult | str:
    """Do a job in a process of its own; the reason when it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = folder / "job.json", folder / "result.json"
        source.write_text(job.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "attn.bench.vllm", "--worker", str(source), str(target)]
        try:
            done = subprocess.run(
                command,
                env=worker_environment(folder, os.environ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout_s:.0f} s"
        if done.returncode == 0 and target.exists():
            return parse_spec(JobResult, target.read_text(encoding="utf-8"), str(target))
        log(done.stdout[-6000:])
        return f"exit code {done.returncode}: {last_words(done.stdout)}"


def measure_backend(
    bench: EngineBench, backend: str, log: Log
) -> tuple[BackendResult, EngineEnvironment | None]:
    """Both jobs of a backend; the environment of one that succeeded."""
    result, environment = BackendResult(backend=backend), None
    for kind, layers in ((Kind.SPEED, bench.layers), (Kind.ANSWERS, bench.logprob_layers)):
        log(f"{backend}: {kind.value}, {layers} layers")
        job = Job(
            kind=kind,
            backend=backend,
            model={**MODEL, "num_hidden_layers": layers},
            workloads=bench.workloads,
            rounds=bench.rounds,
            commit=bench.commit,
        )
        found = run_job(job, bench.timeout_s, log)
        if isinstance(found, str):
            field = "speed_error" if kind is Kind.SPEED else "answer_error"
            result = result.replace(**{field: found})
            log(f"  failed: {found}")
            continue
        environment = found.environment
        if kind is Kind.ANSWERS:
            result = result.replace(answers=found.answers)
            continue
        result = result.replace(start_up_s=found.start_up_s, speeds=found.speeds)
        log(f"  start-up {found.start_up_s:.1f} s")
        for workload in bench.workloads:
            rate = value_of(result, workload.name, bench.workloads)
            log(f"  {workload.name}: {workload.what}: {rate:.0f}")
    return result, environment


def bench_engine(
    bench: EngineBench, log: Log = print, on_result: Callable[[EngineResults], None] | None = None
) -> EngineResults:
    """Measure all backends.

    Args:
        bench: what to measure.
        log: receives lines of progress, and the output of a process that fails.
        on_result: receives the results so far, after each backend.
    """
    results = EngineResults(
        layers=bench.layers,
        logprob_layers=bench.logprob_layers,
        rounds=bench.rounds,
        workloads=bench.workloads,
    )
    for backend in bench.backends:
        measured, environment = measure_backend(bench, backend, log)
        results = results.replace(
            backends=(*results.backends, measured), environment=environment or results.environment
        )
        if on_result is not None:
            on_result(results)
    return results


@dataclass(frozen=True)
class Report:
    """Where the results go, and which earlier ones to put with them."""

    out: Path | None = None
    """Markdown; None prints it."""
    json: Path | None = None
    """Results as data."""
    merge: tuple[Path, ...] = ()
    """Earlier results; a backend measured now replaces theirs."""

    def combined(self, results: EngineResults | None) -> EngineResults:
        """New results, if any, over the earlier ones.

        Raises:
            ValueError: no results, or earlier ones that cannot be read or do not belong.
        """
        found = [
            parse_spec(EngineResults, path.read_text(encoding="utf-8"), str(path))
            for path in self.merge
        ]
        found += [results] if results is not None else []
        if not found:
            raise ValueError("merge must name results to render, got none")
        whole = found[0]
        for later in found[1:]:
            whole = later.merged(whole)
        return whole

    def write(self, results: EngineResults) -> None:
        """Write the files that were asked for."""
        for path, text in (
            (self.out, render_markdown(results)),
            (self.json, results.model_dump_json() + "\n"),
        ):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m attn.bench.vllm", description=__doc__)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), help="vLLM's names.")
    names = ", ".join(workload.name for workload in WORKLOADS)
    parser.add_argument("--workloads", nargs="+", default=[], help=f"Of {names}; default: all.")
    for name, what in (
        ("layers", "Layers of the model that is timed."),
        ("logprob_layers", "Layers of the model whose log-probabilities are compared."),
        ("rounds", "Times that every workload is timed."),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(EngineBench, name), help=what)
    parser.add_argument("--out", type=Path, help="Markdown file to write; default: print it.")
    parser.add_argument("--json", type=Path, help="File to write the results to as data.")
    parser.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        help="Earlier --json file whose other backends are kept, repeatable.",
    )
    parser.add_argument("--render", action="store_true", help="Measure nothing, only merge.")
    parser.add_argument(
        "--commit", help="Commit that is measured; default: $ATTN_COMMIT, then git."
    )
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m attn.bench.vllm``; the exit code: 1 when something of ours failed."""
    options = _parser().parse_args(arguments)
    if options.worker is not None:
        source, target = options.worker
        job = parse_spec(Job, source.read_text(encoding="utf-8"), str(source))
        target.write_text(perform(job, source.parent).model_dump_json(), encoding="utf-8")
        return 0
    report = Report(options.out, options.json, tuple(options.merge))

    def log(line: str) -> None:
        print(line, flush=True)

    try:
        measured = None
        if not options.render:
            bench = EngineBench(
                backends=tuple(dict.fromkeys(options.backends)),
                workloads=select_workloads(options.workloads),
                layers=options.layers,
                logprob_layers=options.logprob_layers,
                rounds=options.rounds,
                commit=options.commit,
            )
            measured = bench_engine(bench, log, lambda part: report.write(report.combined(part)))
        whole = report.combined(measured)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report.write(whole)
    if report.out is None:
        log(render_markdown(whole))
    ours = whole.of(OURS)
    return 1 if ours is not None and (ours.speed_error or ours.answer_error) else 0


if __name__ == "__main__":
    sys.exit(main())
