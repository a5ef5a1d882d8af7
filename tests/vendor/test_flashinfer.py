"""FLASHINFER on a machine without a GPU: the conformance suite over an emulated FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn.backends.flashinfer import FlashInferBackend
from attn.impls.vendor import flashinfer as impl
from attn.testing.batches import BATCHES
from attn.testing.cases import FEATURES, AnyCase, Case, cases_for
from attn.testing.conformance import check_case
from specs.dtypes import CacheDType, DType
from tests.emulators import flashinfer_signatures
from tests.emulators.flashinfer_emulator import VERSIONS, ContractError, Mutation, emulated
from tests.emulators.flashinfer_signatures import SIGNATURES, installed_signatures, known_version

CASES = cases_for(FlashInferBackend)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_triple_conforms_over_an_emulated_flashinfer(case: AnyCase) -> None:
    version = VERSIONS[CASES.index(case) % len(VERSIONS)]
    with emulated(version):
        check_case(FlashInferBackend, case)


def test_the_cases_ask_for_all_that_the_backend_declares() -> None:
    features = {case.feature.name for case in CASES if isinstance(case, Case)}
    assert {"causal", "window", "window_of_one", "soft_cap", "soft_cap_window"} <= features
    assert {"cascade", "cascade_window"} <= features
    assert {case.cache_dtype for case in CASES} == set(
        FlashInferBackend.capabilities.kv_cache_dtypes
    )


def test_the_recorded_signatures_are_the_installed_ones() -> None:
    version = known_version(SIGNATURES)
    assert installed_signatures() == SIGNATURES[version]


def test_a_version_that_nobody_recorded_fails_and_none_skips(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer_signatures, "installed_version", lambda: "0.6.99")
    with pytest.raises(AssertionError, match=r"FlashInfer 0.6.99 is installed.* record it too"):
        known_version(SIGNATURES)
    monkeypatch.setattr(flashinfer_signatures, "installed_version", lambda: None)
    with pytest.raises(pytest.skip.Exception, match="FlashInfer is not installed"):
        known_version(SIGNATURES)


# -- Mutations.


def change(method: str, argument: str, with_: Callable[[Any], Any]) -> Mutation:
    def mutate(called: str, given: dict[str, Any]) -> None:
        if called == method and given.get(argument) is not None:
            given[argument] = with_(given[argument])

    return mutate


def any_of(*mutations: Mutation) -> Mutation:
    def mutate(called: str, given: dict[str, Any]) -> None:
        for one in mutations:
            one(called, given)

    return mutate


def moved(values: torch.Tensor) -> torch.Tensor:
    """List the first page again in place of the last listed page; zeros follow it."""
    values = values.clone()
    values[int(values.nonzero()[-1])] = int(values[0])
    return values


def added(amount: int) -> Callable[[Any], Any]:
    def add(values: Any) -> Any:
        return values + amount

    return add


def shorter(values: torch.Tensor) -> torch.Tensor:
    """Make the last request one key shorter, or one key longer if it has a single key."""
    values = values.clone()
    values[-1] = values[-1] - 1 if values[-1] > 1 else values[-1] + 1
    return values


def uncached(called: str, given: dict[str, Any]) -> None:
    """Change a length of the plan, in both arguments that give it."""
    for name in ("last_page_len", "paged_kv_last_page_len", "seq_lens"):
        if called == "plan" and name in given:
            given[name] = shorter(given[name])


def shift_rows(called: str, given: dict[str, Any]) -> None:
    """Give a token of the first request to the second."""
    starts = given.get("qo_indptr")
    if called == "plan" and starts is not None and len(starts) > 2:
        starts = starts.clone()
        starts[1] -= 1
        given["qo_indptr"] = starts
        given["max_token_per_sequence"] = int(starts.diff().max())


def dirty(workspace: torch.Tensor) -> torch.Tensor:
    workspace[7] = 1
    return workspace


PAGES = ("indices", "paged_kv_indices")
FP8 = Case(batch=BATCHES["mixed"], dtype=DType.BFLOAT16, cache_dtype=CacheDType.FP8)
PLAIN = Case(batch=BATCHES["mixed"], dtype=DType.FLOAT16)
WINDOW = Case(FEATURES["window"], BATCHES["mixed"], dtype=DType.FLOAT16)
CAPPED = Case(FEATURES["soft_cap"], BATCHES["mixed"], dtype=DType.FLOAT16)
PREFILL = Case(batch=BATCHES["full_prefill"], dtype=DType.FLOAT16)
DECODES = Case(batch=BATCHES["ragged_decode"], dtype=DType.FLOAT16)

MUTATIONS: dict[str, tuple[Case, Mutation]] = {
    "table entry": (PLAIN, any_of(*(change("plan", name, moved) for name in PAGES))),
    "table entry outside the cache": (
        PLAIN,
        any_of(*(change("plan", name, added(2**20)) for name in PAGES)),
    ),
    "table of int64": (PLAIN, any_of(*(change("plan", name, torch.Tensor.long) for name in PAGES))),
    "length": (PREFILL, uncached),
    "length of a decode": (DECODES, uncached),
    "last page length alone": (DECODES, change("plan", "last_page_len", shorter)),
    "page pointers": (PLAIN, change("plan", "paged_kv_indptr", shorter)),
    "query pointers": (PREFILL, shift_rows),
    "causality": (PREFILL, change("plan", "causal", lambda _: False)),
    "window": (WINDOW, change("plan", "window_left", added(1))),
    "no window": (WINDOW, change("plan", "window_left", lambda _: -1)),
    "soft cap": (CAPPED, change("plan", "logits_soft_cap", lambda _: None)),
    "softmax scale": (PLAIN, change("run", "q_scale", lambda scale: scale * 1.1)),
    "key scale": (FP8, change("run", "k_scale", lambda _: None)),
    "value scale": (FP8, change("run", "v_scale", lambda _: None)),
    "keys for values": (PLAIN, change("run", "paged_kv_cache", lambda cache: cache[::-1])),
    "dirty workspace": (PLAIN, change("init", "float_workspace_buffer", dirty)),
    "page size": (PLAIN, change("plan", "page_size", lambda size: size // 2)),
    "backend of its own choice": (PLAIN, change("init", "backend", lambda _: "auto")),
    "fa3 over fp8": (FP8, change("init", "backend", lambda _: "fa3")),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_of_a_call_makes_the_suite_fail(name: str, version: str) -> None:
    case, mutation = MUTATIONS[name]
    seen = []

    def mutate(called: str, given: dict[str, Any]) -> None:
        before = dict(given)
        mutation(called, given)
        seen.extend(key for key in given if given[key] is not before[key])

    with (
        emulated(version, mutate),
        pytest.raises((AssertionError, ContractError)),
    ):
        check_case(FlashInferBackend, case)
    assert seen or name == "dirty workspace"


def test_a_log_sum_exp_in_base_two_makes_the_suite_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impl, "LSE_UNIT", 1.0)
    with emulated(), pytest.raises(AssertionError, match="lse: error"):
        check_case(FlashInferBackend, PLAIN)


@pytest.mark.parametrize("case", dict.fromkeys(case for case, _ in MUTATIONS.values()), ids=str)
def test_the_cases_of_the_mutations_pass_without_them(case: Case) -> None:
    with emulated():
        check_case(FlashInferBackend, case)
