"""Worker process of the engine benchmark: it starts one engine of vLLM and measures it.

:mod:`attn.bench.engine.vllm` starts these processes.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from enum import StrEnum, unique
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from attn.bench.engine.engine import (
    ANSWER_LENS,
    ANSWER_TOKENS,
    LOAD_FORMAT,
    MAX_MODEL_LEN,
    MEMBERS,
    OURS,
    PLUGIN,
    TOP_LOGPROBS,
    WORKLOADS,
    Answer,
    EngineEnvironment,
    Speed,
    Workload,
    require_varied,
)
from attn.bench.settings import KernelBench, environment_of
from specs.base import PositiveInt, Spec


@unique
class Kind(StrEnum):
    """Kind of a process: what it measures."""

    SPEED = "speed"
    ANSWERS = "answers"


class Job(Spec):
    """Settings of one worker process."""

    kind: Kind
    backend: str
    model: dict[str, Any]
    """Content of the model's ``config.json``."""
    workloads: tuple[Workload, ...] = WORKLOADS
    rounds: PositiveInt = 3
    max_model_len: PositiveInt = MAX_MODEL_LEN
    answer_lens: tuple[PositiveInt, ...] = ANSWER_LENS
    commit: str | None = None


class JobResult(Spec):
    """Measurements of one worker process."""

    environment: EngineEnvironment
    start_up_s: float
    speeds: tuple[Speed, ...] = ()
    answers: tuple[Answer, ...] = ()


def draw_weights(model: torch.nn.Module) -> None:
    """Fill a Llama with random weights, each drawn from a seed that its name gives.

    The weights are large enough that attention prefers a few of a hundred keys and that logits
    differ between tokens. With vLLM's own dummy weights, which are very small, every position gives
    the same answer.
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
    """``count`` different prompts of ``length`` random tokens below ``vocab``."""
    generator = random.Random(seed)
    return [
        {"prompt_token_ids": [generator.randrange(vocab) for _ in range(length)]}
        for _ in range(count)
    ]


def _make_engine(job: Job, folder: Path, **options: Any) -> Any:
    """Make a ``vllm.LLM`` whose weights come from a loader that this process registers."""
    vllm = import_module("vllm")
    loaders = import_module("vllm.model_executor.model_loader")
    base: Any = import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    methods = {
        "download_model": lambda self, model_config: None,
        "load_weights": lambda self, model, model_config: draw_weights(model),
    }
    loaders.register_model_loader(LOAD_FORMAT)(type("RandomWeights", (base,), methods))
    if job.backend == OURS:
        # Called here because vLLM finds no entry point where this library is not installed.
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
    """Answers to all prompts, given in one batch so that prompts share steps."""
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
        job: the process's job.
        folder: folder for the model's configuration file.
    """
    import_module("vllm")
    # Processes for answers run side by side and share the GPU's memory, and log-probabilities of
    # long prompts need memory in addition to the cache.
    options = {"gpu_memory_utilization": 0.25} if job.kind is Kind.ANSWERS else {}
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
