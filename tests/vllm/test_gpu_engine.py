"""vLLM's engine answers with our backend as with its own, and none of its own kernels runs.

The budget is computed. Our bf16 run may differ from float32 by ``MAX_RATIO`` times the difference
of vLLM's own bf16 run of the same weights, plus the cost of rounding float32's answers to bf16.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.engine.models import ENCODER, HYBRID, LATENT
from tests.vllm.engine.runs import (
    FOLDER_VARIABLE,
    Engines,
    WorkerError,
    beyond_budget,
    constant_outputs,
)
from tests.vllm.engine.worker import Result, Run

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

OURS = "CUSTOM"
THEIRS = ("FLASH_ATTN", "TRITON_ATTN")
"""vLLM's backends; ours is compared with the first of them that serves the case."""
LATENT_OURS = "TRITON_MLA"
"""Latent layers are ours by vLLM's own name, which ours replaces."""
LATENT_THEIRS = ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA")
MEMBERS = "attn.integrations.vllm.members"
MAMBA = "vllm.v1.attention.backends.mamba2_attn"

DECODE, PREFILL = "decode_kernel", "prefill_kernel"
LATENT_DECODE = "mla_decode_kernel"
NARROW, WIDE, FOLD = "hopper_mla_narrow_kernel", "hopper_mla_kernel", "fold_cuts_kernel"
"""Hopper's latent kernels: for up to 16 rows (tokens x heads) of a request, or for more rows, whose
cuts are then folded."""
EXPAND, MERGE = "expand_kernel", "merge_kernel"
KERNELS = {DECODE, PREFILL, LATENT_DECODE, NARROW, WIDE, FOLD, EXPAND, MERGE}
HOPPER = {"ATTN_VLLM_DECODE_KERNEL": "hopper"}
PLAIN = {"ATTN_VLLM_DECODE_KERNEL": "triton", "ATTN_VLLM_PREFILL_KERNEL": "triton"}
"""Environment that names the portable kernels; without it, a Hopper GPU runs the Hopper kernels."""
VLLM_KERNELS = (
    "kernel_unified_attention",
    "reduce_segments",
    "reshape_and_cache",
    "flash_fwd",
    "flash::",
    "flashattn",
    "flashinfer",
    # Kernels of latent layers.
    "_kernel_stage",
    "get_mla_metadata",
    "splitkv_mla",
    "concat_and_cache",
    "gather_and_maybe_dequant",
    "cp_gather",
    "merge_attn_states",
    "mask_empty_context",
)
"""Lower-case parts of the names of vLLM's own attention and cache kernels."""


@dataclass(frozen=True)
class Case:
    """An engine with our backend in it."""

    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``vllm.LLM``."""
    shared_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``vllm.LLM`` for our run and for the run it is compared with."""
    prompt_logprobs: bool = True
    calls: int = 1
    kernels: tuple[str, ...] = (DECODE, PREFILL)
    """Names of our kernels that have to run in the last call."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_latent(self) -> bool:
        return self.model == LATENT

    @property
    def is_for_hopper(self) -> bool:
        return HOPPER.items() <= self.environment.items()


def _graphs(cudagraph_mode: str, **options: Any) -> dict[str, Any]:
    """Options of an engine whose every step fits a CUDA graph."""
    sizes = [1, 2, 4, 8, 16, 64, 256, 1024]
    compilation = {"cudagraph_mode": cudagraph_mode, "cudagraph_capture_sizes": sizes, **options}
    return {"enforce_eager": False, "compilation_config": compilation}


NGRAMS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}


def _latent(*kernels: str, shared: dict[str, Any] | None = None, **given: Any) -> Case:
    """Latent layers in blocks that all of vLLM's backends take; prefill expands heads."""
    options = {"block_size": 64, **(shared or {})}
    given["environment"] = {**PLAIN, **given.get("environment", {})}
    return Case(LATENT, shared_options=options, kernels=(*kernels, EXPAND, PREFILL), **given)


CASES = {
    "llama": Case(),
    "llama, portable kernels": Case(environment=PLAIN),
    "llama, first model runner": Case(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "fp8 KV": Case(shared_options={"kv_cache_dtype": "fp8"}),
    "chunked prefill": Case(options={"max_num_batched_tokens": 64}),
    # A prompt whose prefix was read from the cache has a short rest.
    "prefix caching": Case(
        options={"enable_prefix_caching": True},
        prompt_logprobs=False,
        calls=2,
        kernels=(DECODE,),
    ),
    "FULL graphs": Case(options=_graphs("FULL", mode=0)),
    "PIECEWISE graphs": Case(options=_graphs("PIECEWISE")),
    "n-gram speculation": Case(options=NGRAMS),
    "gemma2": Case(model="gemma2"),
    "gemma3": Case(model="gemma3"),
    "gpt-oss": Case(model="gpt_oss"),
    "bert": Case(model=ENCODER, kernels=()),
    "Mamba beside attention": Case(model=HYBRID),
    "Mamba beside attention, graphs": Case(model=HYBRID, options=_graphs("FULL_AND_PIECEWISE")),
    "MLA": _latent(LATENT_DECODE),
    "MLA, first model runner": _latent(
        LATENT_DECODE, environment={"VLLM_USE_V2_MODEL_RUNNER": "0"}
    ),
    "MLA, chunked prefill": _latent(LATENT_DECODE, MERGE, options={"max_num_batched_tokens": 64}),
    "MLA, FULL graphs": _latent(LATENT_DECODE, options=_graphs("FULL", mode=0)),
    "MLA, Hopper": _latent(NARROW, environment={**HOPPER, "ATTN_VLLM_PREFILL_KERNEL": "auto"}),
    "MLA, Hopper, FULL graphs": _latent(
        NARROW, options=_graphs("FULL", mode=0), environment=HOPPER
    ),
    "MLA, Hopper, n-gram speculation": _latent(WIDE, FOLD, options=NGRAMS, environment=HOPPER),
    "MLA, fp8 KV": _latent(LATENT_DECODE, shared={"kv_cache_dtype": "fp8"}),
    "MLA, fp8 weights": _latent(LATENT_DECODE, shared={"quantization": "fp8"}),
}
DECODERS = [name for name, case in CASES.items() if case.model != ENCODER]


class DenseEngines(Engines):
    """Results of the cases' runs."""

    def ours(self, case: Case) -> Result:
        if case.is_for_hopper and torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("kernels for Hopper run there only")
        return self.result(*self.our_run(case))

    def our_run(self, case: Case) -> tuple[Run, dict[str, str]]:
        """The run with our backend, and its environment."""
        options = {**case.shared_options, **case.options}
        # The kernels that are looked for are this backend's.
        environment = {"ATTN_VLLM_BACKEND": "TRITON_ATTN", **case.environment}
        backend = LATENT_OURS if case.is_latent else OURS
        if case.is_latent:
            environment = {**environment, "ATTN_VLLM_OVERRIDE": backend}
        run = self._run(case, backend, options, case.prompt_logprobs, case.calls)
        return run, environment

    def their_run(self, case: Case, backend: str) -> tuple[Run, dict[str, str]]:
        """The run with a backend of vLLM's, and its environment."""
        return self._run(case, backend, case.shared_options), {}

    def theirs(self, case: Case) -> Result:
        """The result of the first of vLLM's backends that serves the case."""
        refusals = []
        for backend in LATENT_THEIRS if case.is_latent else THEIRS:
            try:
                return self.result(*self.their_run(case, backend))
            except WorkerError as error:
                if f"{backend} is not valid for this configuration" not in str(error):
                    raise
                refusals.append(backend)
        pytest.skip(f"{', '.join(refusals)} do not serve {case.model} here")

    def _run(self, case: Case, backend: str, options: dict[str, Any], *scored: Any) -> Run:
        return Run(case.model, self.model_folder(case.model), backend, options, *scored)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> DenseEngines:
    kept = os.environ.get(FOLDER_VARIABLE)
    return DenseEngines(Path(kept) if kept else tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_as_close_to_float32_as_vllms_own(engines: DenseEngines, name: str) -> None:
    ours, theirs = engines.ours(CASES[name]), engines.theirs(CASES[name])
    assert theirs.prompt is not None
    if ours.prompt is not None:
        assert beyond_budget(ours.prompt, theirs.prompt) == []
    if ours.generated is not None:
        assert theirs.generated is not None
        assert beyond_budget(ours.generated, theirs.generated) == []


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_part_only_where_float32_nearly_ties(
    engines: DenseEngines, name: str
) -> None:
    ours, theirs = engines.ours(CASES[name]), engines.theirs(CASES[name])
    assert ours.generated is not None
    assert theirs.generated is not None
    assert len(ours.tokens) == len(theirs.tokens)
    tie = 2 * max(ours.generated.largest, theirs.generated.largest)
    for mine, other, gaps in zip(ours.tokens, theirs.tokens, ours.gaps, strict=True):
        assert len(mine) == len(other)
        parted = [at for at, pair in enumerate(zip(mine, other, strict=True)) if len(set(pair)) > 1]
        if parted:
            assert gaps[parted[0]] <= tie
    assert constant_outputs(ours) == []
    assert constant_outputs(theirs) == []


@pytest.mark.parametrize("name", CASES)
def test_every_layer_and_every_builder_is_ours(engines: DenseEngines, name: str) -> None:
    ours = engines.ours(CASES[name])
    assert ours.impls
    assert set(ours.impls) == {MEMBERS}
    # vLLM's wrappers, for example of encoders, derive from ours; Mamba layers have vLLM's own
    # impls.
    attending = [modules for modules in ours.builders if MAMBA not in modules]
    assert attending
    assert [modules for modules in attending if MEMBERS not in modules] == []
    assert (attending != ours.builders) == (CASES[name].model == HYBRID)


def _of_vllm(kernels: list[str]) -> list[str]:
    return [name for name in kernels if any(part in name.lower() for part in VLLM_KERNELS)]


@pytest.mark.parametrize("name", CASES)
def test_only_our_kernels_run(engines: DenseEngines, name: str) -> None:
    kernels = engines.ours(CASES[name]).kernels
    assert _of_vllm(kernels) == []
    # One for Hopper stands for the kernel that it is named after.
    ours = {*kernels, *(kernel.removeprefix("hopper_") for kernel in kernels)}
    assert set(CASES[name].kernels) - ours == set()
    assert {DECODE, PREFILL} & ours


@pytest.mark.parametrize("name", CASES)
def test_vllms_own_run_shows_its_kernels_and_none_of_ours(engines: DenseEngines, name: str) -> None:
    theirs = engines.theirs(CASES[name])
    assert _of_vllm(theirs.kernels)
    assert KERNELS & set(theirs.kernels) == set()
    assert MEMBERS not in theirs.impls


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("llama, first model runner", lambda result: "gpu_model_runner" in result.runner),
        ("prefix caching", lambda result: sum(result.cached_tokens) > 0),
        ("FULL graphs", lambda result: result.graphs == "FULL"),
        ("PIECEWISE graphs", lambda result: result.graphs == "PIECEWISE"),
        ("n-gram speculation", lambda result: result.drafts > 0),
        ("MLA, first model runner", lambda result: "gpu_model_runner" in result.runner),
        # Latent kernels serve graphs of decodes, which is what vLLM then makes of it.
        ("MLA, FULL graphs", lambda result: result.graphs == "FULL_DECODE_ONLY"),
        ("MLA, Hopper, FULL graphs", lambda result: result.graphs == "FULL_DECODE_ONLY"),
        ("MLA, Hopper, n-gram speculation", lambda result: result.drafts > 0),
    ],
)
def test_a_case_is_what_it_says(
    engines: DenseEngines, name: str, holds: Callable[[Result], bool]
) -> None:
    assert holds(engines.ours(CASES[name]))
