"""TRTLLM_MLA's prefill in e4m3, over emulated calls.

Conformance holds with scales on both sides of 1, every argument matters, and unsupported requests
are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn.backends.trtllm_mla import TrtllmMlaBackend
from attn.testing.batches import BATCHES
from attn.testing.cases import LatentCase
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from specs.attention import MlaKernel
from specs.dtypes import CacheDType, DType
from specs.engine import Kernels
from tests.emulators.flashinfer_emulator import ContractError
from tests.emulators.trtllm_mla_emulator import VERSIONS, emulated
from tests.vendor.test_trtllm_mla import Change, dirty, other_rows, put, shorter, times

BACKEND = TrtllmMlaBackend
CPU = torch.device("cpu")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALE = 2.5
PREFILL = LatentCase(
    BATCHES["chunked_prefill"],
    dtype=DType.BFLOAT16,
    block_size=32,
    rank=256,
    cache_dtype=CacheDType.FP8,
)
FULL = replace(PREFILL, batch=BATCHES["full_prefill"])


class InFp8(LatentTrial):
    """A trial of e4m3 prefill; a scale below 1 applies to the cache's rows alone."""

    fp8_mla_prefill = True


class Scaled(InFp8):
    fp8_k_scale = SCALE


@pytest.fixture(params=[InFp8, Scaled], ids=["0.037", "2.5"])
def trial(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[LatentTrial]:
    monkeypatch.setattr("attn.testing.conformance.LatentTrial", request.param)
    found: type[LatentTrial] = request.param
    return found


@pytest.mark.usefixtures("trial")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "batch", ["full_prefill", "chunked_prefill", "mixed", "empty_request", "padding_tokens_counted"]
)
def test_prefills_conform(batch: str, version: str) -> None:
    with emulated(version) as calls:
        check_case(BACKEND, replace(PREFILL, batch=BATCHES[batch]))
    assert "ragged" in calls.called


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_stored_and_what_multiplies_it(trial: type[LatentTrial], version: str) -> None:
    given: list[dict[str, Any]] = []
    with emulated(version, lambda name, call: given.append(call) if name == "ragged" else None):
        own = trial(BACKEND, PREFILL, CPU)
        own.write()
        record = own.build(own.builder())
        own.attend(record, own.inputs, own.cache())
    assert record.ragged.dtype == E4M3
    # New tokens attend one another, then their context.
    assert [call["is_causal"] for call in given] == [True] + [False] * (len(given) - 1)
    assert len(given) > 1
    scale = max(own.fp8_k_scale, 1.0)
    for call in given:
        assert {call[name].dtype for name in ("query", "key", "value")} == {E4M3}
        assert call["out"].dtype == BF16
        assert call["bmm1_scale"] == pytest.approx(scale * own.weights.scale)
        assert call["bmm2_scale"] == scale
    first = record.num_decode_tokens
    query = own.inputs.query[first : first + record.prefill.num_tokens]
    wanted = query.float().clamp(-448, 448).to(E4M3)
    assert torch.equal(given[0]["query"].view(torch.uint8), wanted.view(torch.uint8))


def test_values_beyond_the_range_become_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    with emulated(mutation=lambda name, call: given.append(call)):
        own = InFp8(BACKEND, FULL, CPU)
        own.inputs.query[0, 0, 0], own.inputs.query[0, 0, 1] = 1e4, -1e4
        own.write()
        own.attend(own.build(own.builder()), own.inputs, own.cache())
    row = given[0]["query"][0, 0].float()
    assert row[:2].tolist() == [448, -448]
    assert not row.isnan().any()


def as_bf16(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().bfloat16()


MUTATIONS: dict[str, tuple[LatentCase, Change]] = {
    "causality": (FULL, put("is_causal", lambda _: False)),
    "causal context": (PREFILL, put("is_causal", lambda _: True)),
    "scale of keys": (FULL, put("bmm1_scale", times(1 / SCALE))),
    "scale of values": (FULL, put("bmm2_scale", times(1 / SCALE))),
    "scale of keys twice": (PREFILL, put("bmm1_scale", times(SCALE))),
    "scale of values twice": (PREFILL, put("bmm2_scale", times(SCALE))),
    "scale on the device": (FULL, put("bmm1_scale", torch.tensor)),
    "query of another type": (FULL, put("query", as_bf16)),
    "keys of another type": (FULL, put("key", as_bf16)),
    "output in e4m3": (FULL, put("out", lambda out: out.to(E4M3))),
    "query": (FULL, put("query", lambda query: query.view(torch.uint8).roll(1, 1).view(E4M3))),
    "keys": (FULL, put("key", lambda key: key.view(torch.uint8).roll(1, 1).view(E4M3))),
    "values": (PREFILL, put("value", lambda rows: rows.view(torch.uint8).roll(1, 1).view(E4M3))),
    "query starts": (FULL, put("cum_seq_lens_q", other_rows)),
    "key starts": (PREFILL, put("cum_seq_lens_kv", other_rows)),
    "length": (FULL, put("seq_lens", shorter)),
    "block scale": (FULL, put("o_sf_scale", lambda _: 1.0)),
    "workspace": (FULL, put("workspace_buffer", lambda buffer: buffer[:64])),
    "workspace byte": (FULL, put("workspace_buffer", dirty)),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_of_a_call_makes_the_suite_fail(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn.testing.conformance.LatentTrial", Scaled)
    case, change = MUTATIONS[name]
    seen: list[str] = []

    def mutate(called: str, given: dict[str, Any]) -> None:
        if called == "ragged":
            seen.append(called)
            change(given)

    with emulated(version, mutate), pytest.raises((AssertionError, ContractError)):
        check_case(BACKEND, case)
    assert seen


@pytest.mark.parametrize(
    ("cache", "settings", "message"),
    [
        (CacheDType.AUTO, {}, "fp8_mla_prefill needs an fp8 cache, got 'auto'"),
        (
            CacheDType.FP8,
            {"kernels": Kernels.own(rows=MlaKernel.TRITON)},
            "must be False with kernel triton",
        ),
        (CacheDType.FP8, {"skip_prefill": True}, "must be False with skip_prefill, got True"),
    ],
)
def test_what_is_not_served_is_refused(
    cache: CacheDType, settings: dict[str, Any], message: str
) -> None:
    with emulated():
        own = InFp8(BACKEND, FULL, CPU)
        spec = own.spec.replace(cache_dtype=cache)
        make = BACKEND.get_builder_cls()
        with pytest.raises(ValueError, match=message):
            make(spec, ["layers.0"], own.config.replace(**settings), CPU)
        # Without being asked, prefill is in the model's type.
        plain = LatentTrial(BACKEND, FULL, CPU)
        assert plain.build(plain.builder()).ragged.dtype == BF16
