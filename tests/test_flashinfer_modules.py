"""What is compiled ahead is what the calls of the GPU tests ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.bench.flashinfer_jit import xqa_module
from specs.dtypes import CacheDType, DType
from tests import flashinfer_modules
from tests.batches import BATCHES
from tests.cases import FEATURES, Case, LatentCase
from tests.conformance import check_case
from tests.flashinfer_modules import DEVICE, all_modules, emulated, main, modules_of, named
from tests.trials import LatentTrial
from tests.trtllm_emulator import NEW, OLD
from tests.trtllm_emulator import emulated as emulated_calls

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def asked_for(case: Case, version: str) -> set[str]:
    """Modules by what the conformance suite really calls."""
    found: set[str] = set()

    def look(kernel: str, given: dict[str, Any]) -> None:
        if kernel.endswith("xqa"):
            key = given["kv_cache"][0]
            module = xqa_module(
                given["query"].dtype,
                key.dtype,
                *(key.shape[1], key.shape[3], given["query"].shape[1] // key.shape[2]),
                given["window_left"] >= 0,
                given["q_len_per_req"],
                kernel == "ragged_xqa",
            )
            found.add(named(module))
        else:
            query, layout = given["qkv"][0], given["input_layout"]
            output = "bfloat16" if query.dtype == E4M3 else "None"
            found.add(f"fmha_v2-{layout}-{str(query.dtype).removeprefix('torch.')}-{output}")

    with emulated_calls(DEVICE, version, look):
        check_case(TrtllmMhaBackend, case)
    return found


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("name", ["mixed", "ragged_verify", "speculative_verify", "full_prefill"])
@pytest.mark.parametrize("feature", ["causal", "window"])
def test_modules_are_those_that_the_suite_calls(version: str, name: str, feature: str) -> None:
    for cache in (CacheDType.AUTO, CacheDType.FP8):
        case = Case(FEATURES[feature], BATCHES[name], dtype=DType.BFLOAT16, cache_dtype=cache)
        with emulated(version):
            own = {named(module) for module in modules_of(TrtllmMhaBackend, case)}
        if cache is CacheDType.FP8 and version == OLD:
            assert own == set()
            continue
        assert asked_for(case, version) <= own


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("cache", [CacheDType.AUTO, CacheDType.FP8])
def test_latent_modules_are_those_that_the_suite_calls(version: str, cache: CacheDType) -> None:
    case = LatentCase(
        BATCHES["ragged_verify"], dtype=DType.BFLOAT16, cache_dtype=cache, rank=512, rope_size=64
    )
    with emulated(version):
        module = flashinfer_modules.of_latent(case)
        trial = LatentTrial(FlashInferMlaBackend, case, torch.device("cpu"))
        record = trial.build(trial.builder())
    wrapper = record.decode.wrapper
    planned = wrapper.planned
    assert wrapper.backend == "fa3"
    assert module[2:5] == ("fa3", planned["q_data_type"], planned["kv_data_type"])
    assert module[7:9] == (planned["head_dim_ckv"], planned["head_dim_kpe"])


def test_modules_have_names_that_patterns_choose_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = flashinfer_modules.groups
    # A few cases of each: all of them take a minute.
    few = [(name, backend, cases[:15]) for name, backend, cases in every()]
    monkeypatch.setattr(flashinfer_modules, "groups", lambda: iter(few))
    modules = all_modules(OLD)
    assert {name.rsplit("/", 1)[0] for name in modules} == {
        "conformance/FLASHINFER",
        "conformance/TRTLLM_MHA",
        "gpu/FLASHINFER",
        "gpu/TRTLLM_MHA",
        "gpu/TRTLLM_MHA/mixed",
        "conformance/FLASHINFER_MLA",
        "gpu/FLASHINFER_MLA",
        "gpu/rope",
        "bench/trtllm_mla",
    }
    latent = {name for name in modules if name.startswith(("gpu/FLASHINFER_MLA", "bench"))}
    batch_mla = "batch_mla-fa3-bfloat16-{}-bfloat16-int32-512-64-False"
    assert latent == {
        *(f"gpu/FLASHINFER_MLA/{batch_mla.format(kv)}" for kv in ("bfloat16", "float8_e4m3fn")),
        *(f"bench/trtllm_mla/{batch_mla.format(kv)}" for kv in ("bfloat16", "float8_e4m3fn")),
        "bench/trtllm_mla/rope",
    }
    assert {name for name in modules if name.startswith("gpu/rope")} == {"gpu/rope/rope"}
    assert "gpu/TRTLLM_MHA/xqa-bfloat16-bfloat16-p16-d64-g4-q1" in modules
    compiled: list[Any] = []
    monkeypatch.setattr(flashinfer_modules, "all_modules", lambda version: modules)
    monkeypatch.setattr(
        flashinfer_modules, "compile_modules", lambda chosen: not compiled.extend(chosen)
    )
    assert main(["gpu/TRTLLM_MHA/xqa-*-p16-d64-g4-q1", "--list"]) == 0
    assert "gpu/TRTLLM_MHA/xqa-bfloat16-bfloat16-p16-d64-g4-q1" in capsys.readouterr().out
    assert compiled == []
    assert main(["gpu/TRTLLM_MHA/xqa-*-p16-d64-g4-q1"]) == 0
    assert compiled == [xqa_module(BF16, BF16, 16, 64, 4, False)]
    assert main(["none/*"]) == 2
