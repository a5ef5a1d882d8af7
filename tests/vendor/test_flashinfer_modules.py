"""The modules compiled ahead are the modules that the GPU tests' calls ask for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.bench.peers import flashinfer_jit
from attn.bench.peers.flashinfer_jit import xqa_module
from attn.impls.vendor.flashinfer import FlashInferImpl
from attn.testing.batches import BATCHES
from attn.testing.cases import FEATURES, Case, LatentCase
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from specs.dtypes import CacheDType, DType
from specs.kv_cache import FullAttentionSpec
from specs.layouts import KVOrder, KVPacking
from tests.emulators import flashinfer_modules
from tests.emulators.flashinfer_modules import (
    DEVICE,
    all_modules,
    emulated,
    main,
    modules_of,
    named,
)
from tests.emulators.flashinfer_signatures import installed_version, parsed
from tests.emulators.trtllm_emulator import NEW, OLD
from tests.emulators.trtllm_emulator import emulated as emulated_calls

FAS = ("fa2", "fa3")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def asked_for(case: Case, version: str) -> set[str]:
    """Modules that the conformance suite's calls ask for."""
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


@pytest.fixture
def fa2_maker() -> Iterator[Callable[[], tuple[str, str]]]:
    """The choice is made anew, and forgotten afterwards."""
    flashinfer_jit.fa2_maker.cache_clear()
    yield flashinfer_jit.fa2_maker
    flashinfer_jit.fa2_maker.cache_clear()


@pytest.mark.parametrize("has_primary", [False, True])
def test_fa2_s_module_is_the_one_that_the_installed_version_loads(
    has_primary: bool,
    fa2_maker: Callable[[], tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    public, primary = flashinfer_jit.PREFILL_MAKER, flashinfer_jit.FA2_MAKER
    own = primary if has_primary else public
    source = tmp_path.joinpath(*flashinfer_jit.FA2_FILE)
    source.parent.mkdir(parents=True)
    source.write_text(f"def {own[1]}(\n    backend): ...\n")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(flashinfer_jit.PathFinder, "find_spec", lambda name: found)
    assert fa2_maker() == own
    fa2, fa3 = (flashinfer_jit.prefill_module(name, BF16, BF16, 64, False) for name in FAS)
    assert fa2[:3] == (*own, "fa2")
    assert fa3[:3] == (*public, "fa3")
    assert named(fa2) == named(fa3).replace("fa3", "fa2")
    assert named(fa2).startswith("batch_prefill-fa2-bfloat16")


def test_without_flashinfer_modules_are_named_all_the_same(
    fa2_maker: Callable[[], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_jit.PathFinder, "find_spec", lambda name: None)
    assert fa2_maker() == flashinfer_jit.PREFILL_MAKER


@pytest.mark.skipif(installed_version() is None, reason="no flashinfer is installed")
def test_the_installed_wrappers_load_the_module_that_is_named() -> None:
    (body,) = (
        node
        for node in parsed("prefill.py").body
        if isinstance(node, ast.FunctionDef) and node.name == "get_batch_prefill_module"
    )
    called = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    assert flashinfer_jit.PREFILL_MAKER[1] in called
    loads_primary = flashinfer_jit.FA2_MAKER[1] in called
    assert loads_primary == (flashinfer_jit.fa2_maker() == flashinfer_jit.FA2_MAKER)


@pytest.mark.parametrize("cache", [CacheDType.AUTO, CacheDType.FP8])
@pytest.mark.parametrize("packing", KVPacking)
@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize(("heads", "blocks", "padding"), [(2, 4, 0), (1, 4, 0), (2, 1, 64)])
def test_no_layout_asks_fa2_for_keys_and_values_of_other_strides(
    cache: CacheDType, packing: KVPacking, order: KVOrder, heads: int, blocks: int, padding: int
) -> None:
    spec = FullAttentionSpec(
        block_size=16, dtype=DType.BFLOAT16, num_kv_heads=heads, head_size=64, cache_dtype=cache
    )
    spec = spec.replace(page_size_padded=spec.page_size_bytes + padding) if padding else spec
    impl = FlashInferImpl(8, 64, 0.125, heads, kv_cache_dtype=cache.value)
    views = impl._views(spec.layout(packing, order).allocate(num_blocks=blocks), BF16)
    assert views.key.stride() == views.value.stride()


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
    # A few cases of each group: all cases take a minute.
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
