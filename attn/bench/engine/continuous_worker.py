"""Worker process of :mod:`attn.bench.engine.continuous`: one contender, one continuous batch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import Field

from attn.bench.engine.vllm import last_words
from attn.bench.settings import KernelBench, environment_of
from specs.base import PositiveInt, Spec, parse_spec

OURS: Final = "attn"
REFERENCE: Final = "sdpa"
CONTENDERS: Final = (OURS, REFERENCE, "attn_eager")
"""In this order, so that the two that are compared are measured first."""
LOGIT_TOKENS: Final = 300
SHOWN: Final = (8, 32)
"""Requests, and tokens of each, that results keep."""


class Job(Spec):
    """What a contender does."""

    contender: str = OURS
    layers: PositiveInt = 8
    requests: PositiveInt = 64
    prompt_tokens: PositiveInt = 2048
    new_tokens: PositiveInt = 256
    page_tokens: PositiveInt = 256
    step_tokens: PositiveInt = 8192
    rounds: PositiveInt = 2
    hidden: PositiveInt = 4096
    """Width of the model; heads are a 128th of it, KV heads a quarter of the heads."""
    vocabulary: PositiveInt = 128256


class Measured(Spec):
    """What one contender measured, or why it measured nothing."""

    contender: str
    step_tokens: int = Job.model_fields["step_tokens"].default
    """Most tokens of a step."""
    environment: dict[str, str] = Field(default_factory=dict)
    seconds: tuple[float, ...] = ()
    """Each round's ``generate_batch``."""
    new_tokens: int = 0
    """Tokens that a round generates, of all requests together."""
    logits: float | None = None
    """Largest difference of a prompt's logits from ``sdpa``, over the largest of those."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Leading new tokens of the first requests."""
    problem: str | None = None
    """Why nothing was measured, or fewer rounds than were asked for."""

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of the best round."""
        return self.new_tokens / min(self.seconds)

    @property
    def spread(self) -> float:
        """(longest - shortest) / shortest of the rounds."""
        return max(self.seconds) / min(self.seconds) - 1

    @property
    def line(self) -> str:
        """The result in a line."""
        if not self.seconds:
            return f"failed: {self.problem}"
        rounds = ", ".join(f"{seconds:.1f}" for seconds in self.seconds)
        cut = f"; {self.problem}" if self.problem else ""
        return (
            f"{self.tokens_per_s:,.0f} tokens/s ({rounds} s), logits differ by {self.logits}{cut}"
        )


def run_job(job: Job, timeout_s: float) -> Measured:
    """Run a job in a process of its own; a failure is in the result."""
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "job.json", Path(name) / "result.json"
        source.write_text(job.model_dump_json(), encoding="utf-8")
        module = "attn.bench.engine.continuous"
        command = [sys.executable, "-m", module, "--worker", str(source), str(target)]
        try:
            done = subprocess.run(
                command,
                env={"HF_HUB_OFFLINE": "1", **os.environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            if not target.exists():
                problem = f"took longer than {timeout_s:.0f} s"
                return Measured(contender=job.contender, problem=problem)
            found = parse_spec(Measured, target.read_text(encoding="utf-8"), str(target))
            count = (
                f"stopped after {timeout_s:.0f} s and {len(found.seconds)} of {job.rounds} rounds"
            )
            return found.replace(problem=count)
        if done.returncode == 0 and target.exists():
            return parse_spec(Measured, target.read_text(encoding="utf-8"), str(target))
        print(done.stdout[-6000:], flush=True)
        problem = f"exit code {done.returncode}: {last_words(done.stdout)}"
        return Measured(contender=job.contender, problem=problem)


def perform(job: Job) -> Iterator[Measured]:
    """Measure a contender in this process; gives what is measured after each round.

    The first round warms up. It counts until a later one has ended.
    """
    is_ours = job.contender != REFERENCE
    import_module("attn.integrations.transformers").register()
    transformers = import_module("transformers")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _make_model(job, device)
    logits = _logit_difference(model, job) if is_ours else None
    model.set_attn_implementation(OURS if is_ours else REFERENCE)
    generator = torch.Generator().manual_seed(1)
    shape = (job.requests, job.prompt_tokens)
    prompts = torch.randint(2, job.vocabulary, shape, generator=generator).tolist()
    settings = _settings(transformers, job)
    generation = transformers.GenerationConfig(
        max_new_tokens=job.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    found = environment_of(KernelBench())
    names = ("date", "device", "torch", "triton", "commit")
    environment = {name: str(getattr(found, name)) for name in names}
    seconds: list[float] = []
    # One manager for all rounds, so that graphs are captured once.
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=settings
    ) as manager:
        for _ in range(job.rounds + 1):
            begin = time.perf_counter()
            ids = manager.add_requests(prompts, max_new_tokens=job.new_tokens) or []
            done = _collect(manager, job.requests)
            seconds.append(time.perf_counter() - begin)
            print(f"{job.contender}: {seconds[-1]:.2f} s, {len(ids)} ids", flush=True)
            texts = [done[key] for key in sorted(done, key=_number_of)]
            counts = sum(map(len, texts))
            if counts != job.requests * job.new_tokens:
                raise RuntimeError(
                    f"{job.requests * job.new_tokens} new tokens were asked for, {counts} came"
                )
            yield Measured(
                contender=job.contender,
                step_tokens=job.step_tokens,
                environment={**environment, "transformers": transformers.__version__},
                seconds=tuple(seconds[1:] or seconds),
                new_tokens=counts,
                logits=logits,
                tokens=tuple(tuple(text[: SHOWN[1]]) for text in texts[: SHOWN[0]]),
            )


def _number_of(request: str) -> int:
    """``12`` of ``req_12``."""
    return int(request.rsplit("_", 1)[-1])


def _collect(manager: Any, count: int) -> dict[str, list[int]]:
    """The new tokens of the requests that end next."""
    done: dict[str, list[int]] = {}
    while len(done) < count:
        result = manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError(f"{len(done)} of {count} requests ended, then none for a minute")
        if getattr(result, "error", None):
            raise RuntimeError(str(result.error))
        if result.is_finished():
            done[result.request_id] = list(result.generated_tokens)
    return done


def _settings(transformers: Any, job: Job) -> Any:
    """Continuous batching's settings: the same pages for all, and for ours graphs of decodes."""
    cls = transformers.ContinuousBatchingConfig
    known = {field.name for field in fields(cls)}
    pages = -(-(job.prompt_tokens + job.new_tokens) // job.page_tokens)
    wanted: dict[str, Any] = {
        # The word changed between versions.
        "page_size" if "page_size" in known else "block_size": job.page_tokens,
        "num_blocks": job.requests * (pages + 1),
        "max_batch_tokens": job.step_tokens,
        "max_requests_per_batch": job.requests,
        "max_blocks_per_request": pages + 1,
        # Prompts differ, so that there is nothing to share.
        "allow_block_sharing": False,
        "auto_switch_to_flash": False,
    }
    if job.contender != REFERENCE:
        wanted["use_cuda_graph"] = (False, job.contender == OURS)
    else:
        wanted.pop("max_blocks_per_request")
    return cls(**{name: value for name, value in wanted.items() if name in known})


def _make_model(job: Job, device: torch.device) -> Any:
    """A Llama with random weights under which attention prefers some keys and tokens differ."""
    transformers = import_module("transformers")
    heads = job.hidden // 128
    config = transformers.LlamaConfig(
        hidden_size=job.hidden,
        intermediate_size=job.hidden * 7 // 2,
        num_hidden_layers=job.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=128,
        vocab_size=job.vocabulary,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(kept)
    import_module("attn.bench.engine.vllm_worker").draw_weights(model)
    return model


@torch.no_grad()
def _logit_difference(model: Any, job: Job) -> float:
    """Largest difference of a prompt's logits between ours and ``sdpa``, over the largest logit."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, job.vocabulary, (2, LOGIT_TOKENS), generator=generator)
    found = []
    for name in (OURS, REFERENCE):
        model.set_attn_implementation(name)
        found.append(model(ids.to(model.device)).logits.float())
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())
