"""One run of vLLM's engine, scored: ``python -m tests.vllm.engine.worker RUN_JSON RESULT_JSON``.

A run has a process of its own, because vLLM selects its backends once per process. The engine core
stays in that process, so that layers can be looked at and kernels recorded.

The model is small and random, made with ``transformers`` and saved, so that vLLM loads it like any
other. The right answer is what ``transformers`` computes from the same weights in float32, on the
tokens that this very run took. So two runs can be compared however soon their tokens part.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tests.vllm.engine import latent
from tests.vllm.engine.latent import Lists, Oracle
from tests.vllm.engine.models import (
    ENCODER,
    MAX_LEN,
    PROMPT_LENS,
    VOCAB,
    make_model,
    prompts_of,
)

OUTPUT_LEN = 24
WORKER = "tests.vllm.engine.recorder.RecordingWorker"
"""vLLM's worker in latent engines."""


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    model: str
    """Name of a model of :mod:`tests.vllm.engine.models`."""
    folder: str
    """Folder of the model; it is made there if it is missing."""
    backend: str
    """Name of the backend in vLLM's registry."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``vllm.LLM`` beyond, or instead of, the usual ones."""
    prompt_logprobs: bool = True
    """Score the prompts' positions too; vLLM then reads nothing from its prefix cache."""
    calls: int = 1
    """Times that the same prompts are run; the last is scored."""
    prompt_lens: tuple[int, ...] = PROMPT_LENS
    reloads: bool = False
    """Start with other weights, run once, and load the model's weights into the running engine."""

    @property
    def is_latent(self) -> bool:
        """Whether the reference is the oracle of :mod:`tests.vllm.engine.latent`."""
        return self.model in latent.CONFIGS

    @property
    def is_spread(self) -> bool:
        """Whether the engine has workers in processes of their own, on several GPUs."""
        return int(self.options.get("tensor_parallel_size", 1)) > 1


@dataclass(frozen=True)
class Error:
    """Distance of some positions' answers from float32's.

    A position's error is the root of the mean square, over the vocabulary, of the differences of
    log-probabilities. For an encoder it is the relative L2 norm of the hidden state's difference.
    """

    positions: int
    mean: float
    max: float
    rounding_mean: float
    """Mean error of float32's own answers, once rounded to bf16."""
    rounding_max: float
    largest: float
    """Largest difference of a single number."""


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    tokens: list[list[int]]
    """Greedy tokens of each prompt."""
    gaps: list[list[float]]
    """At each token, float32's most likely log-probability minus the next one."""
    prompt: Error | None
    """Errors at the prompt's positions; for an encoder, at every position."""
    generated: Error | None
    impls: list[str]
    """Modules of the attention layers' impls, one per layer."""
    builders: list[list[str]]
    """Modules of the metadata builders' classes and their bases, one per group of layers."""
    kernels: list[str]
    """Names of everything that ran on the GPU in the last call."""
    cached_tokens: list[int]
    """Tokens of each prompt that the last call read from the prefix cache."""
    drafts: int
    """Speculated tokens that were verified."""
    runner: str
    """Module of vLLM's model runner."""
    graphs: str
    """CUDA graph mode that vLLM settled on."""
    preemptions: int = 0
    """Requests that gave up their blocks and were computed again."""
    lists: Lists | None = None
    """What is wrong with the lists of keys that the indexers wrote; None without indexers."""
    plain_prompt: Error | None = None
    """Errors of the oracle's own run in bf16, which rounds keys as the cache does."""
    plain_generated: Error | None = None
    plain_lists: Lists | None = None
    """What is wrong with the lists of that run, by its own scores of queries and keys in fp8."""
    parallel: tuple[int, int] = (1, 1)
    """Ranks of tensor parallelism, and of decode context parallelism."""


# -- The engine.


class PlainExperts(nn.Module):
    """Gpt-oss's experts in plain torch, in place of kernels that not every build of vLLM has.

    Its parameters have the names and shapes that vLLM's loader of gpt-oss fills.
    """

    def __init__(self, vllm_config: Any, layer_idx: int, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        count, hidden = config.num_local_experts, config.hidden_size
        inner = config.intermediate_size
        self.router = nn.Linear(hidden, count)
        self.experts = nn.Module()
        shapes = {
            "w13_weight": (count, 2 * inner, hidden),
            "w13_bias": (count, 2 * inner),
            "w2_weight": (count, hidden, inner),
            "w2_bias": (count, hidden),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
            self.experts.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Output ``[T, hidden]`` of the experts."""
        experts: Any = self.experts
        shares = self.router(x).float().softmax(-1).to(x.dtype)  # [T, E]
        inner = torch.einsum("th,eih->tei", x, experts.w13_weight) + experts.w13_bias
        gate, up = inner[..., ::2].clamp(max=7.0), inner[..., 1::2].clamp(-7.0, 7.0)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        found = torch.einsum("tei,ehi->teh", inner, experts.w2_weight) + experts.w2_bias
        return (found * shares[..., None]).sum(1)


def _without_numba() -> None:
    """Without numba, run the n-gram proposer uncompiled: numba only makes it faster."""
    try:
        import numba  # noqa: F401
    except ImportError:

        def plain(*args: Any, **options: Any) -> Any:
            return args[0] if args and callable(args[0]) else plain

        fake: Any = types.ModuleType("numba")
        fake.jit = fake.njit = plain
        fake.prange = range
        fake.get_num_threads = lambda: 1
        fake.set_num_threads = lambda count: None
        sys.modules["numba"] = fake


def make_engine(run: Run) -> Any:
    """``vllm.LLM`` of a run, with our backends registered."""
    if run.options.get("speculative_config"):
        _without_numba()
    from vllm import LLM

    from attn.integrations.vllm.plugin import register

    # The entry point exists only where the project is installed; registering twice does no harm.
    register()
    if run.model == "gpt_oss":
        from vllm.model_executor.models import gpt_oss

        gpt_oss.TransformerBlock.mlp_cls = PlainExperts
    folder = other_weights_of(run) if run.reloads else run.folder
    return LLM(model=folder, attention_backend=run.backend, **options_of(run))


def options_of(run: Run) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` but for the model and the backend."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 512 if run.model == ENCODER else MAX_LEN,
        "max_num_seqs": 16,
        "max_logprobs": VOCAB,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 256 << 20,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if run.is_latent:
        options["worker_cls"] = WORKER
    if run.is_spread:
        options["distributed_executor_backend"] = "mp"
    if run.model == ENCODER:
        from vllm.config import PoolerConfig

        options.update(
            runner="pooling",
            pooler_config=PoolerConfig(task="token_embed"),
            skip_tokenizer_init=False,
        )
    return {**options, **run.options}


def other_weights_of(run: Run) -> str:
    """Folder of the run's model with other weights."""
    return f"{run.folder}-other"


def _insides_of(worker: Any) -> dict[str, Any]:
    """The fields of a result that say what the engine is made of."""
    compilation, runner = worker.vllm_config.compilation_config, worker.model_runner
    layers = compilation.static_forward_context.values()
    return {
        "impls": [type(layer.impl).__module__ for layer in layers if hasattr(layer, "impl")],
        "builders": [
            [base.__module__ for base in type(builder).__mro__]
            for groups in runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
        ],
        "runner": type(runner).__module__,
        "graphs": compilation.cudagraph_mode.name,
        "parallel": (
            worker.vllm_config.parallel_config.tensor_parallel_size,
            worker.vllm_config.parallel_config.decode_context_parallel_size,
        ),
    }


def _recorded(llm: Any, run: Run, call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of a call, and the names of the kernels that it ran on the first GPU."""
    if not torch.cuda.is_available():
        return call(), []
    if run.is_spread:
        llm.collective_rpc("begin_kernels")
        returned = call()
        return returned, llm.collective_rpc("end_kernels")[0]
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        returned = call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return returned, sorted({event.name for event in profile.events() if event.device_type == cuda})


def _generate(llm: Any, run: Run, prompts: Sequence[Sequence[int]]) -> Any:
    """``LLM.generate``, greedy, with the whole vocabulary's log-probabilities."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=OUTPUT_LEN,
        ignore_eos=True,
        detokenize=False,
        logprobs=VOCAB,
        prompt_logprobs=VOCAB if run.prompt_logprobs else None,
    )
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def _counted(llm: Any) -> dict[str, int]:
    """The fields of a result that the engine itself counts."""
    names = {
        "vllm:spec_decode_num_draft_tokens": "drafts",
        "vllm:num_preemptions": "preemptions",
    }
    found = dict.fromkeys(names.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] = int(metric.value)
    return found


# -- Scores.


def reference_of(run: Run, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """The answer of ``transformers`` in float32 on a CPU, for each sequence of T tokens.

    Returns float64 ``[T, VOCAB]`` logits of the next token; for an encoder, hidden states ``[T,
    hidden]``.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    factory = AutoModel if run.model == ENCODER else AutoModelForCausalLM
    model = factory.from_pretrained(
        run.folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = []
    with torch.no_grad():
        for sequence in sequences:
            output = model(input_ids=torch.tensor([sequence]))
            answer = output.last_hidden_state if run.model == ENCODER else output.logits
            answers.append(answer[0].double())
    return answers


def table_of(rows: Sequence[Any]) -> Tensor:
    """vLLM's log-probabilities, a mapping of token to record per position, as ``[N, VOCAB]``.

    Raises:
        ValueError: some token's is missing.
    """
    table = torch.full((len(rows), VOCAB), torch.nan, dtype=torch.float64)
    for row, found in zip(table, rows, strict=True):
        row[list(found)] = torch.tensor([item.logprob for item in found.values()]).double()
    if table.isnan().any():
        raise ValueError("log-probabilities must be given for the whole vocabulary, and are not")
    return table


def logprob_error(actual: Tensor, logits: Tensor) -> Error:
    """Error of log-probabilities against float32's logits, both ``[N, VOCAB]`` float64."""
    expected = logits.log_softmax(-1)

    def sizes(table: Tensor) -> Tensor:
        return (table - expected).square().mean(-1).sqrt()

    return _error(actual, expected, logits.bfloat16().double().log_softmax(-1), sizes)


def taken_error(actual: Tensor, logits: Tensor, tokens: Tensor) -> Error:
    """Error of the log-probabilities of given tokens, both ``[N]``, against float32's logits.

    Args:
        actual: float64 log-probabilities.
        logits: float32's, ``[N, VOCAB]`` in float64.
        tokens: int64 token ids.
    """

    def of_tokens(table: Tensor) -> Tensor:
        return table.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    def sizes(logprobs: Tensor) -> Tensor:
        return (logprobs - expected).abs()

    expected = of_tokens(logits)
    return _error(actual, expected, of_tokens(logits.bfloat16().double()), sizes)


def state_error(actual: Tensor, expected: Tensor) -> Error:
    """Error of states ``[N, hidden]`` float64; only directions count, as poolers normalise."""
    actual, expected = normalize(actual, dim=-1), normalize(expected, dim=-1)

    def sizes(table: Tensor) -> Tensor:
        return (table - expected).norm(dim=-1)

    return _error(actual, expected, expected.bfloat16().double(), sizes)


def _error(
    actual: Tensor, expected: Tensor, rounded: Tensor, sizes: Callable[[Tensor], Tensor]
) -> Error:
    found, floor = sizes(actual), sizes(rounded)
    return Error(
        positions=len(found),
        mean=float(found.mean()),
        max=float(found.max()),
        rounding_mean=float(floor.mean()),
        rounding_max=float(floor.max()),
        largest=float((actual - expected).abs().max()),
    )


Attempt = tuple[range, dict[int, Tensor] | None]
"""Positions whose answers an attempt gave, and the lists ``[end of the positions, index_topk]`` of
each layer with an indexer; None without indexers."""


def lists_of(
    path: Path, sequences: Sequence[list[int]], prompts: Sequence[list[int]]
) -> list[list[Attempt]]:
    """The attempts of each sequence, which has several where it was preempted.

    The last token of a sequence was never an input, so that it has neither answer nor list.

    Raises:
        ValueError: a token's list is missing.
    """
    kept = torch.load(path, weights_only=True)
    if not kept:
        return [[(range(len(sequence) - 1), None)] for sequence in sequences]
    found = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        attempts = kept[tuple(prompt)]
        begins = [0, *(begin for begin, _ in attempts[1:])]
        ends = [*begins[1:], len(sequence) - 1]
        parts: list[Attempt] = []
        for begin, end, (_, layers) in zip(begins, ends, attempts, strict=True):
            lists = {layer: rows[:end] for layer, rows in layers.items()}
            for layer, rows in lists.items():
                if (rows == -2).any():
                    first = int((rows == -2).any(-1).int().argmax())
                    raise ValueError(f"layer {layer} must list keys of token {first}, and does not")
            parts.append((range(begin, end), lists))
        found.append(parts)
    return found


@dataclass
class _Judged:
    """What the oracle says of the sequences of a run."""

    exact: list[Tensor] = field(default_factory=list)
    """Logits in float32, of each sequence."""
    plain: list[Tensor] = field(default_factory=list)
    """Logits of a plain run in bf16, whose keys are rounded as the cache does."""
    lists: Lists | None = None
    """What is wrong with the recorded lists."""
    plain_lists: Lists | None = None
    """What is wrong with the lists that the plain run's fp8 scores would give."""


def _judged_by_oracle(
    run: Run, path: Path, prompts: Sequence[list[int]], sequences: Sequence[list[int]]
) -> _Judged:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The reference may not be shortened to TF32.
    torch.set_float32_matmul_precision("highest")
    cache = str(run.options.get("kv_cache_dtype", "auto"))
    exact = Oracle(Path(run.folder), torch.float32, "auto", device)
    plain = Oracle(Path(run.folder), torch.bfloat16, cache, device)
    found, faults, plain_faults = _Judged(), [], []
    for sequence, attempts in zip(sequences, lists_of(path, sequences, prompts), strict=True):
        rows, other_rows = [], []
        for positions, lists in attempts:
            tokens = sequence[: positions.stop]
            mine, other = exact.answer(tokens, lists), plain.answer(tokens, lists)
            rows.append(mine.logits[positions.start :])
            other_rows.append(other.logits[positions.start :])
            faults.append(mine.faults)
            plain_faults.append(mine.faults_of(other))
        found.exact.append(_with_one_more(torch.cat(rows)))
        found.plain.append(_with_one_more(torch.cat(other_rows)))
    if "index_topk" in exact.config:
        found.lists, found.plain_lists = Lists.merged(faults), Lists.merged(plain_faults)
    return found


def _with_one_more(logits: Tensor) -> Tensor:
    """Logits in float64 on the host, with a row more for the last token."""
    found = logits.double().cpu()
    return torch.cat([found, found[-1:]])


def _scored(run: Run, prompts: Sequence[list[int]], outputs: Any, path: Path) -> dict[str, Any]:
    """The fields of a result that come from a decoder's answers; ``path`` holds the lists."""
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    sequences = [prompt + new for prompt, new in zip(prompts, tokens, strict=True)]
    judged = _Judged()
    if run.is_latent:
        judged = _judged_by_oracle(run, path, prompts, sequences)
    else:
        judged.exact = reference_of(run, sequences)
    answers, others = judged.exact, judged.plain
    found, expected, gaps = [], [], []
    for prompt, output, answer in zip(prompts, outputs, answers, strict=True):
        found.append(table_of(output.outputs[0].logprobs))
        expected.append(answer[len(prompt) - 1 : -1])
        top = expected[-1].topk(2, dim=-1).values
        gaps.append((top[:, 0] - top[:, 1]).tolist())
    fields: dict[str, Any] = {
        "tokens": tokens,
        "gaps": gaps,
        "generated": logprob_error(torch.cat(found), torch.cat(expected)),
        "prompt": None,
        "cached_tokens": [output.num_cached_tokens or 0 for output in outputs],
        "lists": judged.lists,
        "plain_lists": judged.plain_lists,
    }
    for name, ends in (("plain_prompt", False), ("plain_generated", True)):
        if others:
            rows = [
                (other[len(prompt) - 1 : -1], answer[len(prompt) - 1 : -1])
                if ends
                else (other[: len(prompt) - 1], answer[: len(prompt) - 1])
                for prompt, other, answer in zip(prompts, others, answers, strict=True)
            ]
            mine, exact = (torch.cat(parts) for parts in zip(*rows, strict=True))
            fields[name] = logprob_error(mine.log_softmax(-1), exact)
    if run.prompt_logprobs:
        # The first token has no prefix, and hence no entry.
        found_rows = [row for output in outputs for row in output.prompt_logprobs[1:]]
        known = [answer[: len(prompt) - 1] for prompt, answer in zip(prompts, answers, strict=True)]
        fields["prompt"] = logprob_error(table_of(found_rows), torch.cat(known))
    return fields


def perform(run: Run, lists: Path) -> Result:
    """Make the model if it is missing, run it, and score the run.

    Args:
        run: the run's settings.
        lists: file that the recorded lists of keys are written to.
    """
    make_model(run.model, Path(run.folder))
    if run.reloads:
        make_model(run.model, Path(other_weights_of(run)), seed=1)
    prompts = prompts_of(lens=run.prompt_lens)
    llm = make_engine(run)
    insides = llm.collective_rpc(_insides_of)[0]
    if run.model == ENCODER:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs, kernels = _recorded(
            llm, run, lambda: llm.encode(inputs, pooling_task="token_embed", use_tqdm=False)
        )
        states = torch.cat([output.outputs.data for output in outputs]).double().cpu()
        error = state_error(states, torch.cat(reference_of(run, prompts)))
        fields = {"tokens": [], "gaps": [], "prompt": error, "generated": None, "cached_tokens": []}
        return Result(kernels=kernels, drafts=0, **fields, **insides)
    if run.reloads:
        _generate(llm, run, prompts)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": run.folder})
    for _ in range(run.calls - 1):
        _generate(llm, run, prompts)
    outputs, kernels = _recorded(llm, run, lambda: _generate(llm, run, prompts))
    if run.is_latent:
        llm.collective_rpc("write_lists", args=(str(lists),))
    scores = _scored(run, prompts, outputs, lists)
    # Those of a long prompt fill hundreds of megabytes.
    lists.unlink(missing_ok=True)
    return Result(kernels=kernels, **_counted(llm), **scores, **insides)


def run_of(text: str) -> Run:
    """A run in the form that the tests write."""
    fields = json.loads(text)
    return Run(**{**fields, "prompt_lens": tuple(fields["prompt_lens"])})


def result_of(text: str) -> Result:
    """A result in the form that the worker writes."""
    fields = json.loads(text)
    for name in ("prompt", "generated", "plain_prompt", "plain_generated"):
        fields[name] = None if fields[name] is None else Error(**fields[name])
    for name in ("lists", "plain_lists"):
        fields[name] = None if fields.get(name) is None else Lists(**fields[name])
    return Result(**fields)


def main(arguments: Sequence[str]) -> None:
    """Read the run, perform it, and write the result."""
    source, target = map(Path, arguments)
    # The engine core has to be in this process, where the layers can be reached. Workers on several
    # GPUs have processes of their own, to which functions are sent.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    result = perform(
        run_of(source.read_text(encoding="utf-8")), target.with_name(f"{target.stem}-lists.pt")
    )
    target.write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
