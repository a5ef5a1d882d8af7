"""FLASHINFER_MLA on a machine without a GPU: conformance over an emulated wrapper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.testing.batches import BATCHES, BatchSpec
from attn.testing.cases import LatentCase, cases_for
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult
from builders.vendor import flashinfer_mla
from builders.vendor.flashinfer_parts import mla_choice as flashinfer_mla_choice
from specs.dtypes import CacheDType, DType
from tests.emulators.flashinfer_emulator import ContractError
from tests.emulators.flashinfer_mla_emulator import (
    NEW,
    OLD,
    SIGNATURES,
    VERSIONS,
    Mutation,
    emulated,
    installed_methods,
)
from tests.emulators.flashinfer_signatures import known_version

BACKEND = FlashInferMlaBackend


def has_prefills(case: LatentCase) -> bool:
    return max(case.batch.query_lens) > 1 + (case.batch.num_speculative_tokens or 0)


def runnable_cases() -> list[LatentCase]:
    """Triton's kernels prefill, which the interpreter runs in fp16 only, and slowly."""
    kept = []
    for case in cases_for(BACKEND):
        assert isinstance(case, LatentCase)
        if has_prefills(case):
            case = replace(case, dtype=DType.FLOAT16, cache_dtype=CacheDType.AUTO, rank=128)
        kept.append(case)
    return list(dict.fromkeys(kept))


CASES = runnable_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_triple_conforms_over_an_emulated_wrapper(case: LatentCase) -> None:
    with emulated(VERSIONS[CASES.index(case) % 2]):
        check_case(BACKEND, case)


def test_the_cases_ask_for_all_that_the_backend_declares() -> None:
    declared = BACKEND.capabilities
    assert {case.dtype for case in CASES} == set(declared.dtypes)
    assert {case.cache_dtype for case in CASES} == set(declared.kv_cache_dtypes)
    assert any(has_prefills(case) for case in CASES)
    assert {case.num_heads for case in CASES} == {1, 3, 16}


def test_the_recorded_signatures_are_the_installed_ones() -> None:
    version = known_version(SIGNATURES)
    assert installed_methods() == SIGNATURES[version]


# -- Heads that do not fill a tile.

EDGE = BatchSpec("edge_of_a_tile", (6, 6, 6, 6), (65, 130, 68, 69), num_speculative_tokens=5)
"""Verifies in which the last keys of tokens begin tiles of keys."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads", [24, 48, 96])
def test_no_key_is_dropped_whatever_the_heads(
    heads: int, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = LatentCase(EDGE, num_heads=heads, dtype=DType.BFLOAT16, rank=128, rope_size=64)
    with emulated(version):
        check_case(BACKEND, case)
    for module in (flashinfer_mla, flashinfer_mla_choice):
        monkeypatch.setattr(module, "padded_heads", lambda count: count)
    monkeypatch.setattr("attn.impls.vendor.flashinfer_mla.padded_heads", lambda count: count)
    expected = AssertionError if version == OLD else ContractError
    with emulated(version), pytest.raises(expected):
        check_case(BACKEND, case)


def test_padding_does_not_shrink_the_tile_below_a_token_s_heads() -> None:
    """The kernel's tile follows the average number of tokens of a request."""
    with_padding = BatchSpec(
        "mostly_padding",
        (2, *[0] * 7),
        (66, *[0] * 7),
        num_padding_tokens=14,
        pads_num_actual_tokens=True,
        num_speculative_tokens=1,
    )
    case = LatentCase(with_padding, num_heads=128, dtype=DType.BFLOAT16, rank=128, rope_size=64)
    for version in VERSIONS:
        with emulated(version):
            check_case(BACKEND, case)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("lens", [(20, 4, 51, 0, 0), (0,) * 5, (9, 64, 65, 128, 4)])
def test_a_graph_replays_batches_with_padding(lens: tuple[int, ...], version: str) -> None:
    """One captured record over five requests of four tokens each, whatever the batch holds."""
    live = [4 if length else 0 for length in lens]
    spec = BatchSpec(
        "replayed",
        tuple(live),
        lens,
        num_padding_tokens=20 - sum(live),
        pads_num_actual_tokens=True,
        num_speculative_tokens=3,
    )
    full = BatchSpec("captured", (4,) * 5, (50,) * 5, num_speculative_tokens=3)
    case = LatentCase(spec, num_heads=3, dtype=DType.BFLOAT16, rank=128, rope_size=64)
    with emulated(version):
        captured = LatentTrial(BACKEND, replace(case, batch=full), torch.device("cpu"))
        trial = LatentTrial(BACKEND, case, torch.device("cpu"))
        trial.write()
        config = trial.config.replace(max_model_len=max(64, trial.config.max_model_len))
        builder = trial.builder(config)
        record = builder.build_for_cudagraph_capture(captured.inputs.batch)
        wrapper, indices = record.decode.wrapper, record.decode.indices.data_ptr()
        again = trial.build(builder)
        assert again.decode.wrapper is wrapper
        assert again.decode.indices.data_ptr() == indices
        assert again.num_decode_tokens == record.num_decode_tokens == 20
        result = CaseResult()
        trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
        assert result.findings == {}
        out, lse = trial.impl.forward_mqa(
            trial._absorbed(trial.inputs.query), trial.cache(), record, trial.layer
        )
        count = sum(live)
        assert not out[count:].any()
        assert bool((lse[count:] == float("-inf")).all())


# -- Mutations.


def change(method: str, argument: str, with_: Callable[[Any], Any]) -> Mutation:
    def mutate(called: str, given: dict[str, Any]) -> None:
        if called == method and given.get(argument) is not None:
            given[argument] = with_(given[argument])

    return mutate


def moved(values: torch.Tensor) -> torch.Tensor:
    """Read the first page in place of the last."""
    values = values.clone()
    values[-1] = values[0]
    return values


def shorter(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values[-1] -= 1
    return values


def other_rows(starts: torch.Tensor) -> torch.Tensor:
    """Give a token of the first request to the second."""
    starts = starts.clone()
    starts[1] -= 1
    return starts


def swapped(called: str, given: dict[str, Any]) -> None:
    """Take the rotary queries of another head."""
    if called != "run":
        return
    if "query" in given:
        nope, pe = given["query"]
        given["query"] = nope, pe.roll(1, 1)
    else:
        given["q_pe"] = given["q_pe"].roll(1, 1)


def other_cache(called: str, given: dict[str, Any]) -> None:
    """Read the latents of the previous page."""
    if called != "run":
        return
    if "kv_cache" in given:
        latent, rope = given["kv_cache"]
        given["kv_cache"] = latent.roll(1, 0), rope
    else:
        given["ckv_cache"] = given["ckv_cache"].roll(1, 0)


DECODES = LatentCase(BATCHES["ragged_decode"], num_heads=3, dtype=DType.BFLOAT16)
VERIFY = replace(DECODES, batch=BATCHES["speculative_verify"])
FP8 = replace(DECODES, cache_dtype=CacheDType.FP8)
MUTATIONS: dict[str, tuple[LatentCase, Mutation]] = {
    "page": (DECODES, change("plan", "kv_indices", moved)),
    "page outside the cache": (DECODES, change("plan", "kv_indices", lambda x: x + 2**20)),
    "pages of int64": (DECODES, change("plan", "kv_indices", torch.Tensor.long)),
    "page pointers": (DECODES, change("plan", "kv_indptr", shorter)),
    "query pointers": (VERIFY, change("plan", "qo_indptr", other_rows)),
    "length": (DECODES, change("plan", "kv_len_arr", shorter)),
    "causality": (VERIFY, change("plan", "causal", lambda _: False)),
    "softmax scale": (DECODES, change("plan", "sm_scale", lambda scale: scale * 1.1)),
    "heads": (DECODES, change("plan", "num_heads", lambda heads: heads // 2)),
    "page size": (DECODES, change("plan", "page_size", lambda size: size // 2)),
    "type of the cache": (FP8, change("plan", "kv_data_type", lambda _: torch.bfloat16)),
    "scale of latents": (FP8, change("run", "ckv_scale", lambda _: 1.0)),
    "scale of rotary keys": (FP8, change("run", "kpe_scale", lambda _: 1.0)),
    "rotary query": (DECODES, swapped),
    "latents": (DECODES, other_cache),
    "base of the log-sum-exp": (DECODES, change("run", "return_lse_base_on_e", lambda _: False)),
    "backend of its own choice": (DECODES, change("init", "backend", lambda _: "auto")),
    "fa2 over fp8": (FP8, change("init", "backend", lambda _: "fa2")),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_of_a_call_makes_the_suite_fail(name: str, version: str) -> None:
    case, mutation = MUTATIONS[name]
    seen: list[str] = []

    def mutate(called: str, given: dict[str, Any]) -> None:
        before = dict(given)
        mutation(called, given)
        seen.extend(key for key in given if given[key] is not before.get(key))

    with emulated(version, mutate), pytest.raises((AssertionError, ContractError)):
        check_case(BACKEND, case)
    assert seen


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("case", [DECODES, VERIFY, FP8], ids=str)
def test_the_cases_of_the_mutations_pass_without_them(case: LatentCase, version: str) -> None:
    with emulated(version):
        check_case(BACKEND, case)
