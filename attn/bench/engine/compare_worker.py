"""A process of the comparison: one engine of vLLM, which measures what it is told to.

:mod:`attn.bench.engine.compare` starts it, writes a request a line to its input, and reads an
answer a line from a pipe. vLLM's own output goes to a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import torch
from pydantic import StrictBool
from torch import Tensor, nn

from attn.bench.engine.engine import (
    LOAD_FORMAT,
    MEMBERS,
    OURS,
    PLUGIN,
    EngineEnvironment,
    require_varied,
)
from attn.bench.engine.parts import KernelTime, kernel_times
from attn.bench.engine.shapes import BLOCK_SIZE, MAX_MODEL_LEN, Contender, EngineModel, Load
from attn.bench.engine.vllm_worker import draw_weights, make_prompts
from attn.bench.settings import KernelBench, environment_of
from specs.base import Spec, parse_spec

ANSWERS: Final = "ATTN_ANSWERS"
"""Number of the pipe's descriptor on which an engine's process answers the benchmark that started
it."""


class Job(Spec):
    """The engine of a process."""

    model: EngineModel
    contender: Contender
    commit: str | None = None


class Request(Spec):
    """What a process is asked for."""

    load: Load
    seed: int = 0
    profiles: StrictBool = False
    """Ask for the times of kernels rather than for seconds."""


class Answer(Spec):
    """What a process answers; the first answer says that its engine has started."""

    environment: EngineEnvironment | None = None
    start_up_s: float | None = None
    seconds: float | None = None
    kernels: tuple[KernelTime, ...] = ()


class DenseMlp(nn.Module):
    """An MLP in place of gpt-oss's experts, whose kernels not every build of vLLM has."""

    def __init__(self, vllm_config: Any, layer_idx: int, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Output ``[T, hidden]`` of tokens ``[T, hidden]``."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(torch.nn.functional.silu(gate) * up)
        return out


def engine_options(model: EngineModel, contender: Contender) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` but for the model's folder."""
    return {
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "attention_backend": contender.backend,
        "kv_cache_dtype": contender.cache,
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 8192,
        # All engines of a model share the GPU's memory: none may ask how much of it is free.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": model.kv_cache_gib << 30,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
        "seed": 0,
    }


def make_engine(model: EngineModel, contender: Contender, folder: Path) -> Any:
    """A ``vllm.LLM`` with random weights.

    Raises:
        RuntimeError: vLLM took another backend than was asked for.
    """
    vllm = import_module("vllm")
    loaders = import_module("vllm.model_executor.model_loader")
    base: Any = import_module("vllm.model_executor.model_loader.base_loader").BaseModelLoader
    methods = {
        "download_model": lambda self, model_config: None,
        "load_weights": lambda self, model, model_config: draw_weights(model),
    }
    loaders.register_model_loader(LOAD_FORMAT)(type("RandomWeights", (base,), methods))
    if contender.backend == OURS:
        # Called here because vLLM finds no entry point where this library is not installed.
        resolve_name(PLUGIN)()
    if model.config["model_type"] == "gpt_oss":
        import_module("vllm.model_executor.models.gpt_oss").TransformerBlock.mlp_cls = DenseMlp
    (folder / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    llm = vllm.LLM(model=str(folder), **engine_options(model, contender))
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    modules = {type(layer.impl).__module__ for layer in layers if hasattr(layer, "impl")}
    if not modules or (modules == {MEMBERS}) != (contender.backend == OURS):
        found = ", ".join(sorted(modules)) or "none"
        raise RuntimeError(f"{contender.backend} was asked for, attention layers are of {found}")
    return llm


def compiled_parts() -> tuple[str, ...]:
    """Compiled modules of vLLM that are installed: a backend without its own cannot run."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return ()
    root = Path(spec.origin).parent
    return tuple(sorted(path.relative_to(root).as_posix() for path in root.rglob("*.so")))


def generated(llm: Any, model: EngineModel, load: Load, seed: int) -> float:
    """Seconds of ``LLM.generate`` of a load; cached prompts are the same for every seed.

    Raises:
        RuntimeError: there are fewer tokens than were asked for.
        ValueError: the tokens do not depend on the prompts.
    """
    params = import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=load.output_len, ignore_eos=True, detokenize=False
    )
    drawn = 0 if load.is_cached else seed + 1
    vocab = model.config["vocab_size"]
    prompts = make_prompts(load.num_prompts, load.prompt_len, vocab, seed=drawn)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    if [len(found) for found in tokens] != [load.output_len] * load.num_prompts:
        raise RuntimeError(f"{load.name} gave fewer tokens than asked for")
    require_varied(tokens)
    return seconds


def profiled(llm: Any, model: EngineModel, load: Load, seed: int) -> tuple[KernelTime, ...]:
    """Kernels of a load, with their counts and times."""
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        generated(llm, model, load, seed)
        torch.cuda.synchronize()
    cuda = import_module("torch.autograd").DeviceType.CUDA
    ranges = [
        (event.name, event.time_range)
        for event in profile.events()
        # An annotation spans the kernels that were launched in it.
        if event.device_type == cuda and not event.is_user_annotation
    ]
    return kernel_times((name, float(found.start), float(found.end)) for name, found in ranges)


def serve(model: EngineModel, contender: Contender, folder: Path, commit: str | None) -> None:
    """Start an engine, then answer each line of the standard input on a pipe.

    :data:`ANSWERS` names the variable of the environment that has the pipe's descriptor.
    """
    with os.fdopen(int(os.environ[ANSWERS]), "w", encoding="utf-8") as answers:

        def answer(**fields: Any) -> None:
            answers.write(Answer(**fields).model_dump_json() + "\n")
            answers.flush()

        import_module("vllm")
        begin = time.perf_counter()
        llm = make_engine(model, contender, folder)
        start_up = time.perf_counter() - begin
        found = environment_of(KernelBench(commit=commit))
        names = EngineEnvironment.model_fields
        environment = EngineEnvironment(**{name: getattr(found, name) for name in names})
        answer(environment=environment, start_up_s=start_up)
        for line in sys.stdin:
            request = Request.model_validate_json(line)
            if request.profiles:
                answer(kernels=profiled(llm, model, request.load, request.seed))
            else:
                answer(seconds=generated(llm, model, request.load, request.seed))


def main(arguments: Sequence[str]) -> None:
    """Serve a model and a contender, whose JSON is in the given folder."""
    folder = Path(arguments[0])
    job = parse_spec(Job, (folder / "job.json").read_text(encoding="utf-8"), "job.json")
    serve(job.model, job.contender, folder, job.commit)


if __name__ == "__main__":
    main(sys.argv[1:])
