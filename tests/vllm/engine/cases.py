"""Cases of engines with latent and sparse layers, and the runs that judge them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.engine import latent
from tests.vllm.engine.latent import DENSE, SHARED, SPARSE, SPARSE_LONG, Lists
from tests.vllm.engine.runs import Engines, WorkerError
from tests.vllm.engine.worker import Error, Result, Run

OURS = "CUSTOM"
LATENT_THEIRS = ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA")
SPARSE_THEIRS = ("FLASHMLA_SPARSE",)
"""vLLM's backends; ours is compared with the first of them that serves the case."""

PROMPT_LENS = {
    # The token that is drawn first predicts itself: alone it would be repeated for ever.
    DENSE: (7, 1, 65, 190, 420, 1300),
    SPARSE: (1, 17, 65, 400, 700, 2100),
    SPARSE_LONG: (17, 600, 2100, 8200),
    SHARED: (1, 17, 400, 700, 2100),
}
"""Lengths of a model's prompts: the longest has more than four times the keys of a list."""
LIMITS = {
    DENSE: {"max_model_len": 1536, "max_num_batched_tokens": 1024},
    SPARSE: {"max_model_len": 2560, "max_num_batched_tokens": 2048},
    SPARSE_LONG: {"max_model_len": 8448, "max_num_batched_tokens": 4096},
    SHARED: {"max_model_len": 2560, "max_num_batched_tokens": 2048},
}

TIGHT_LENS = (1015, 1015, 1015, 1015)
"""Prompts that need 64 blocks of 64 tokens together, and a block more each before they end."""
TIGHT: dict[str, Any] = {
    "max_model_len": 1152,
    "max_num_batched_tokens": 4096,
    # vLLM keeps one block for itself.
    "num_gpu_blocks_override": 66,
}


@dataclass(frozen=True)
class LatentCase:
    """An engine whose latent or sparse layers are ours."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``vllm.LLM``."""
    cache: str = "auto"
    """vLLM's ``kv_cache_dtype``."""
    prompt_lens: tuple[int, ...] | None = None
    """Lengths of the prompts; None takes the model's."""
    prompt_logprobs: bool = True
    calls: int = 1
    reloads: bool = False
    gpus: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_sparse(self) -> bool:
        return "index_topk" in latent.CONFIGS[self.model]

    def run(self, engines: Engines, backend: str, **options: Any) -> Run:
        """The run of a backend; ``options`` are arguments of ``vllm.LLM``."""
        known = {**LIMITS[self.model], "block_size": 64, "kv_cache_dtype": self.cache}
        return Run(
            model=self.model,
            folder=engines.model_folder(self.model),
            backend=backend,
            options={**known, **options},
            prompt_lens=PROMPT_LENS[self.model],
        )


def graphs(mode: str, **options: Any) -> dict[str, Any]:
    """Options of an engine whose every decode fits a CUDA graph."""
    sizes = [1, 2, 4, 8, 16, 64]
    # Without compilation, so that what a graph does is what the layers do.
    compilation = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes, **options}
    return {"enforce_eager": False, "compilation_config": compilation}


def drafts(method: str) -> dict[str, Any]:
    """Options of an engine that speculates, by ``ngram`` or by the model's own layer (``mtp``)."""
    chosen: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "ngram":
        chosen.update(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    return {"speculative_config": chosen}


def _cases(name: str, model: str, caches: tuple[str, ...], full: bool = True) -> Any:
    """The cases of a model, by their names."""
    two = {"tensor_parallel_size": 2}
    yield name, LatentCase(model)
    yield f"{name}, graphs", LatentCase(model, graphs("FULL"))
    for cache in caches:
        yield f"{name}, {cache}", LatentCase(model, cache=cache)
    yield f"{name}, MTP drafts", LatentCase(model, drafts("mtp"))
    if not full:
        return
    yield f"{name}, n-gram drafts", LatentCase(model, drafts("ngram"))
    yield f"{name}, MTP drafts, graphs", LatentCase(model, {**drafts("mtp"), **graphs("FULL")})
    yield (
        f"{name}, first model runner",
        LatentCase(model, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    )
    caching = {"enable_prefix_caching": True}
    yield f"{name}, prefix caching", LatentCase(model, caching, prompt_logprobs=False, calls=2)
    yield (
        f"{name}, preemption",
        LatentCase(model, TIGHT, prompt_lens=TIGHT_LENS, prompt_logprobs=False),
    )
    yield f"{name}, weight reload", LatentCase(model, reloads=True)
    yield f"{name}, chunked prefill", LatentCase(model, {"max_num_batched_tokens": 128})
    yield f"{name}, TP 2", LatentCase(model, two, gpus=2)
    yield f"{name}, TP 2, graphs", LatentCase(model, {**two, **graphs("FULL")}, gpus=2)
    both = {**two, "decode_context_parallel_size": 2}
    yield f"{name}, DCP 2", LatentCase(model, both, gpus=2)
    yield f"{name}, DCP 2, graphs", LatentCase(model, {**both, **graphs("FULL")}, gpus=2)


ROWS = ("fp8", "fp8_ds_mla")
CASES: dict[str, LatentCase] = {
    **dict(_cases("MLA", DENSE, ("fp8",))),
    **dict(_cases("sparse", SPARSE, ROWS)),
    **dict(_cases("sparse, 2048 keys", SPARSE_LONG, ("fp8_ds_mla",), full=False)),
    **dict(_cases("shared lists", SHARED, ROWS, full=False)),
    "sparse, graphs, fp8_ds_mla": LatentCase(SPARSE, graphs("FULL"), cache="fp8_ds_mla"),
    "sparse, dense prefill off": LatentCase(
        SPARSE, {"attention_config": {"sparse_mla_force_mqa": True}}
    ),
    "sparse, portable kernels": LatentCase(
        SPARSE, environment={"ATTN_VLLM_DECODE_KERNEL": "triton"}
    ),
    "shared lists, graphs, n-gram drafts": LatentCase(
        SHARED, {**drafts("ngram"), **graphs("FULL")}
    ),
}


def our_run(engines: Engines, case: LatentCase) -> tuple[Run, dict[str, str]]:
    """The run with our backend, and its environment."""
    made = case.run(engines, OURS, **case.options)
    fields = {
        "prompt_logprobs": case.prompt_logprobs,
        "calls": case.calls,
        "reloads": case.reloads,
        "prompt_lens": case.prompt_lens or made.prompt_lens,
    }
    return Run(**{**vars(made), **fields}), case.environment


def their_runs(engines: Engines, case: LatentCase) -> Iterator[tuple[Run, dict[str, str]]]:
    """Runs of vLLM's backends of the same model and cache, on one GPU and without graphs.

    None of them has sparse rows of 576 bytes.
    """
    if case.is_sparse and case.cache == "fp8":
        return
    for backend in SPARSE_THEIRS if case.is_sparse else LATENT_THEIRS:
        yield case.run(engines, backend), {}


def theirs(engines: Engines, case: LatentCase) -> Result | None:
    """The result of the first of vLLM's backends that ran; None where none did."""
    for run, environment in their_runs(engines, case):
        try:
            return engines.result(run, environment)
        except WorkerError:
            continue
    return None


def lists_yardstick(engines: Engines, case: LatentCase, ours: Result) -> Lists:
    """What is wrong with the lists that set the budget of ours, of the same runs as ``yardstick``.

    A cache of fp8 rows moves the hidden states that later layers score. So lists of a model over
    such rows differ more from float32's than the rounding of queries and keys alone would explain.
    """
    found = theirs(engines, case)
    lists = ours.plain_lists if found is None else found.lists
    assert lists is not None
    return lists


def yardstick(engines: Engines, case: LatentCase, ours: Result) -> tuple[Error, Error]:
    """Errors at the prompts' and at the generated positions that set the budget of ours.

    They are of vLLM's own backend, or, where that serves neither the cache nor this machine, of the
    same model in plain torch in bf16, whose keys are rounded as the cache rounds them.
    """
    found = theirs(engines, case)
    if found is not None and found.prompt is not None and found.generated is not None:
        return found.prompt, found.generated
    assert ours.plain_prompt is not None
    assert ours.plain_generated is not None
    return ours.plain_prompt, ours.plain_generated
