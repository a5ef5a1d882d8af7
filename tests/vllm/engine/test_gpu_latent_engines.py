"""Engines with latent and sparse layers answer with our backend as float32 does.

The engine selects our backend by ``attention_backend="CUSTOM"``. The lists of keys that its indexer
wrote are recorded: the oracle attends the same keys, and the lists are judged beside float32's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from tests.vllm.engine import latent
from tests.vllm.engine.cases import (
    CASES,
    LatentCase,
    lists_yardstick,
    our_run,
    theirs,
    yardstick,
)
from tests.vllm.engine.runs import (
    FOLDER_VARIABLE,
    Engines,
    beyond_budget,
    constant_outputs,
    lists_beyond_budget,
)
from tests.vllm.engine.worker import Result

pytestmark = pytest.mark.gpu

MEMBERS = "attn.integrations.vllm.members"
SPARSE_CASES = [name for name, case in CASES.items() if case.is_sparse]

LATENT_KERNELS = {"mla_decode_kernel", "hopper_mla_kernel", "hopper_mla_narrow_kernel"}
SPARSE_KERNELS = {
    "sparse_mla_kernel",
    "sparse_mla_many_kernel",
    "hopper_sparse_kernel",
    "hopper_narrow_sparse_kernel",
}
INDEXER_KERNELS = {"write_keys_kernel", "select_topk_kernel"}
OTHERS = (
    "flash",
    "deep_gemm",
    "deepgemm",
    "persistent_topk",
    "cooperative_topk",
    "top_k_per_row",
    "topkperrow",
    "cp_gather_indexer",
    "kernel_unified_attention",
    "splitkv_mla",
    "concat_and_cache",
    "gather_and_maybe_dequant",
    "merge_attn_states",
    "_kernel_stage",
)
"""Lower-case parts of the names of kernels that serve such layers in vLLM."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    kept = os.environ.get(FOLDER_VARIABLE)
    return Engines(Path(kept) if kept else tmp_path_factory.mktemp("engines"))


def result_of(engines: Engines, name: str) -> Result:
    case = CASES[name]
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs, this machine has {torch.cuda.device_count()}")
    return engines.result(*our_run(engines, case))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_within_the_budget_of_float32(engines: Engines, name: str) -> None:
    ours = result_of(engines, name)
    prompt, generated = yardstick(engines, CASES[name], ours)
    assert ours.generated is not None
    assert beyond_budget(ours.generated, generated) == []
    if CASES[name].prompt_logprobs:
        assert ours.prompt is not None
        assert beyond_budget(ours.prompt, prompt) == []
    assert constant_outputs(ours) == []


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_lists_hold_the_best_keys(engines: Engines, name: str) -> None:
    ours = result_of(engines, name)
    lists = ours.lists
    assert lists is not None
    # Lists that are cut exist, and no list is a window or has a fault.
    lens = CASES[name].prompt_lens or our_run(engines, CASES[name])[0].prompt_lens
    width = latent.CONFIGS[CASES[name].model]["index_topk"]
    assert lists.rows >= sum(max(length - width, 0) for length in lens)
    assert lists.rows > 0
    assert (lists.malformed, lists.sequential) == (0, 0)
    assert lists_beyond_budget(lists, lists_yardstick(engines, CASES[name], ours)) == []


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_ours(engines: Engines, name: str) -> None:
    ours = result_of(engines, name)
    assert ours.impls
    assert set(ours.impls) == {MEMBERS}


@pytest.mark.parametrize("name", CASES)
def test_only_our_kernels_attend(engines: Engines, name: str) -> None:
    ours = result_of(engines, name)
    found = [kernel for kernel in ours.kernels if any(part in kernel.lower() for part in OTHERS)]
    assert found == []
    expected = SPARSE_KERNELS if CASES[name].is_sparse else LATENT_KERNELS
    assert expected & set(ours.kernels)
    if CASES[name].is_sparse:
        assert INDEXER_KERNELS - set(ours.kernels) == set()


@pytest.mark.parametrize("name", ["MLA", "sparse", "sparse, fp8_ds_mla"])
def test_vllms_own_run_shows_its_kernels_and_none_of_ours(engines: Engines, name: str) -> None:
    other = theirs(engines, CASES[name])
    if other is None:
        pytest.skip("none of vLLM's backends ran here")
    assert [kernel for kernel in other.kernels if any(part in kernel.lower() for part in OTHERS)]
    ours = LATENT_KERNELS | SPARSE_KERNELS | INDEXER_KERNELS
    assert ours & set(other.kernels) == set()
    assert MEMBERS not in other.impls


def _runs_first_runner(result: Result) -> bool:
    return "gpu_model_runner" in result.runner


def _drafted(result: Result) -> bool:
    return result.drafts > 0


def _captured(result: Result) -> bool:
    return result.graphs == "FULL_DECODE_ONLY"


def _read_from_cache(result: Result) -> bool:
    return sum(result.cached_tokens) > 0


def _was_preempted(result: Result) -> bool:
    return result.preemptions > 0


def claims_of(name: str, case: LatentCase) -> list[Callable[[Result], bool]]:
    """What a case's name promises of its result."""
    claims: list[Callable[[Result], bool]] = []
    for words, claim in (
        ("first model runner", _runs_first_runner),
        ("drafts", _drafted),
        ("graphs", _captured),
        ("prefix caching", _read_from_cache),
        ("preemption", _was_preempted),
    ):
        if words in name:
            claims.append(claim)
    tensor = 2 if ("TP 2" in name or "DCP 2" in name) else 1
    context = 2 if "DCP 2" in name else 1
    claims.append(lambda result: tuple(result.parallel) == (tensor, context))
    return claims


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_what_it_says(engines: Engines, name: str) -> None:
    ours = result_of(engines, name)
    assert all(claim(ours) for claim in claims_of(name, CASES[name]))
