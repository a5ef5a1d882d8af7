"""TRTLLM_MLA on a machine without a GPU.

Conformance runs over emulated calls, and by TRITON_MLA's kernel under the interpreter. Every
argument of the calls matters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn.backends.trtllm_mla import TrtllmMlaBackend
from attn.kernels.lang.numerics import INTERPRETED
from attn.testing.batches import BATCHES, BatchSpec
from attn.testing.cases import LatentCase, cases_for
from attn.testing.conformance import check_case, run_case
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult
from specs.attention import MlaKernel
from specs.dtypes import CacheDType, DType
from tests.emulators.flashinfer_emulator import ContractError
from tests.emulators.flashinfer_signatures import installed_version, known_version
from tests.emulators.trtllm_mla_emulator import (
    FUNCTIONS,
    NEW,
    OLD,
    VERSIONS,
    Mutation,
    emulated,
    installed_functions,
    installed_shape_check,
)

BACKEND = TrtllmMlaBackend
CPU = torch.device("cpu")


def runnable_cases() -> list[LatentCase]:
    """A kernel that the interpreter runs slowly expands latents."""
    kept = []
    for place, case in enumerate(cases_for(BACKEND)):
        assert isinstance(case, LatentCase)
        decode_len = 1 + (case.batch.num_speculative_tokens or 0)
        if max(case.batch.query_lens) > decode_len:
            case = replace(case, rank=256, num_heads=min(case.num_heads, 3))
        kept.append(replace(case, block_size=(32, 64)[place % 2]))
    return list(dict.fromkeys(kept))


CASES = runnable_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_triple_conforms_over_emulated_calls(case: LatentCase) -> None:
    with emulated(VERSIONS[CASES.index(case) % 2]):
        check_case(BACKEND, case)


def test_the_cases_ask_for_all_that_the_backend_declares() -> None:
    declared = BACKEND.capabilities
    assert {case.dtype for case in CASES} == set(declared.dtypes)
    assert {case.cache_dtype for case in CASES} == set(declared.kv_cache_dtypes)
    assert {case.block_size for case in CASES} == {32, 64}
    assert {case.num_heads for case in CASES} == {1, 3, 16}


def test_the_recorded_signatures_are_the_installed_ones() -> None:
    version = known_version(FUNCTIONS)
    assert installed_functions() == FUNCTIONS[version]


@pytest.mark.skipif(installed_version() is None, reason="needs a FlashInfer")
def test_flashinfer_s_own_check_of_shapes_runs_on_what_is_passed() -> None:
    check = installed_shape_check()
    assert check is not None
    bad = torch.zeros(2, 1, 3, 576), torch.zeros(4, 1, 32, 576), 512, 64, 0
    with pytest.raises(ValueError, match="block_num"):
        check(*bad, torch.zeros(2, 3, dtype=torch.int32), 32)
    with emulated() as calls:
        check_case(BACKEND, DECODES)
    assert calls.shapes_checked > 0


# -- The same builder, with TRITON_MLA's kernel.


class ByTriton(LatentTrial):
    mla_kernel = MlaKernel.TRITON


BY_TRITON = [
    LatentCase(BATCHES[batch], dtype=DType.FLOAT16, cache_dtype=cache, rank=64, rope_size=32)
    for batch in (
        *("uniform_decode", "ragged_decode", "speculative_verify", "ragged_verify"),
        *("padding_tokens_counted", "keyless_rows", "empty_request", "mixed", "all_padding"),
    )
    for cache in (CacheDType.AUTO, CacheDType.FP8)
]


@pytest.mark.skipif(not INTERPRETED.value, reason="needs Triton's interpreter")
@pytest.mark.parametrize("case", BY_TRITON, ids=str)
def test_triton_s_kernel_gives_the_same_flow(
    case: LatentCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    monkeypatch.setattr("attn.testing.conformance.LatentTrial", ByTriton)
    findings = run_case(BACKEND, replace(case, block_size=32)).findings
    if case.batch.name == "ragged_verify":
        # The interpreter's numpy sums products in an order that depends on a row's place.
        findings.pop("same_bits", None)
    assert findings == {}


# -- A query that was quantised together with the cache's rows.


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("batch", ["ragged_decode", "ragged_verify", "speculative_verify"])
def test_a_fused_rotation_gives_what_its_steps_give(batch: str, version: str) -> None:
    with emulated(version):
        trial = LatentTrial(BACKEND, replace(FP8, batch=BATCHES[batch]), CPU)
        trial.write()
        record, wanted = trial.build(trial.builder()), trial.cache().clone()
        query = trial._absorbed(trial.inputs.query)
        nope, rope = query[..., :512], query[..., 512:]
        expected, expected_lse = trial.impl.forward_mqa(query, wanted, record, trial.layer)
        kv_c, k_pe = trial._parts(trial.inputs.key)
        # Position 0 rotates nothing.
        table = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], -1)
        positions, cache = torch.zeros(len(query), dtype=torch.int64), trial.cache()
        q_out = torch.zeros(query.shape).to(torch.float8_e4m3fn)
        rows = trial.inputs.batch.slot_mapping
        cache.view(torch.uint8).flatten(0, 1)[rows[rows >= 0]] = 0
        trial.impl.do_rope_quantize_and_kv_cache_update(
            trial.layer, nope, rope, kv_c, k_pe, positions, table, False, cache, rows, q_out
        )
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))
        out, lse = trial.impl.forward_mqa(q_out, cache, record, trial.layer)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.skipif(not INTERPRETED.value, reason="needs Triton's interpreter")
@pytest.mark.parametrize("batch", ["ragged_decode", "ragged_verify", "padding_tokens_counted"])
def test_triton_s_kernel_takes_a_fused_rotation_s_queries(batch: str) -> None:
    (case,) = (
        case for case in BY_TRITON if (case.batch.name, case.cache_dtype.value) == (batch, "fp8")
    )
    trial = ByTriton(BACKEND, replace(case, block_size=32), CPU)
    trial.write()
    record = trial.build(trial.builder())
    query = trial._absorbed(trial.inputs.query)
    nope, rope = query[..., :64], query[..., 64:]
    kv_c, k_pe = trial._parts(trial.inputs.key)
    # Position 0 rotates nothing.
    table = torch.cat([torch.ones(1, 16), torch.zeros(1, 16)], -1)
    positions = torch.zeros(len(query), dtype=torch.int64)
    q_out = torch.zeros(query.shape).to(torch.float8_e4m3fn)
    rows, before = trial.inputs.batch.slot_mapping, trial.buffer.clone()
    trial.impl.do_rope_quantize_and_kv_cache_update(
        *(trial.layer, nope, rope, kv_c, k_pe, positions, table, False, trial.cache(), rows, q_out)
    )
    assert torch.equal(trial.buffer.view(torch.uint8), before.view(torch.uint8))
    found = trial.impl.forward_mqa(q_out, trial.cache(), record, trial.layer)
    read = (q_out.float() * trial.layer._q_scale).to(trial.dtype)
    wanted = trial.impl.forward_mqa(read, trial.cache(), record, trial.layer)
    assert found[0].dtype == trial.dtype
    assert all(map(torch.equal, found, wanted))


def test_pieces_that_an_fp8_cache_needs_are_named() -> None:
    with emulated():
        trial = LatentTrial(BACKEND, FP8, CPU)
        plain = LatentTrial(BACKEND, DECODES, CPU)
    query = trial._absorbed(trial.inputs.query)
    kv_c, k_pe = trial._parts(trial.inputs.key)
    rows, positions = trial.inputs.batch.slot_mapping, torch.zeros(len(query)).long()
    q_out, table = torch.zeros(query.shape).to(torch.float8_e4m3fn), torch.zeros(1, 64)
    for impl, missing, given_table, message in (
        (trial.impl, None, table, "k_pe is needed"),
        (trial.impl, k_pe, None, "cos_sin_cache is needed"),
        (plain.impl, k_pe, table, "kv_cache_dtype must be fp8.*got 'auto'"),
    ):
        with pytest.raises(ValueError, match=message):
            impl.do_rope_quantize_and_kv_cache_update(
                *(trial.layer, query[..., :512], query[..., 512:], kv_c, missing, positions),
                *(given_table, False, trial.cache(), rows, q_out),
            )


# -- Padding that comes after the step was built, and graphs.


@pytest.mark.parametrize("version", VERSIONS)
def test_padding_may_grow_after_a_build(version: str) -> None:
    with emulated(version):
        trial = LatentTrial(BACKEND, DECODES, CPU)
        trial.write()
        record = trial.build(trial.builder())
        query = trial._absorbed(trial.inputs.query)
        longer = torch.cat([query, torch.full_like(query, float("nan"))])
        out, lse = trial.impl.forward_mqa(longer, trial.cache(), record, trial.layer)
        wanted, _ = trial.impl.forward_mqa(query, trial.cache(), record, trial.layer)
    assert torch.equal(out[: len(query)], wanted)
    assert not out[len(query) :].any()
    assert bool((lse[len(query) :] == float("-inf")).all())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("lens", [(20, 4, 51, 0, 0), (0,) * 5, (9, 64, 65, 128, 4)])
def test_a_graph_replays_batches_with_padding(lens: tuple[int, ...], version: str) -> None:
    """One captured record over five requests of four tokens each, whatever the batch holds."""
    live = tuple(4 if length else 0 for length in lens)
    spec = BatchSpec(
        "replayed",
        live,
        lens,
        num_padding_tokens=20 - sum(live),
        pads_num_actual_tokens=True,
        num_speculative_tokens=3,
    )
    full = BatchSpec("captured", (4,) * 5, (50,) * 5, num_speculative_tokens=3)
    case = replace(FP8, batch=spec)
    with emulated(version):
        trial = LatentTrial(BACKEND, case, CPU)
        trial.write()
        builder = trial.builder(trial.config.replace(max_model_len=192))
        captured = LatentTrial(BACKEND, replace(case, batch=full), CPU).inputs.batch
        batch = trial.inputs.batch
        static = captured.replace(
            query_start_loc=captured.query_start_loc.clone(),
            seq_lens=captured.seq_lens.clone(),
        )
        record = builder.build_for_cudagraph_capture(static)
        assert record.decode.pages.shape == (5, 64)
        assert record.decode.max_kv_len == 192
        again = trial.build(builder)
        if again.decode is not None:
            assert again.decode.pages.data_ptr() == record.decode.pages.data_ptr()
            assert again.decode.kv_lens.data_ptr() == record.decode.kv_lens.data_ptr()
        result = CaseResult()
        trial.judge(trial.attend(record, trial.inputs, trial.cache()), record, result)
        assert result.findings == {}
        query = trial._absorbed(trial.inputs.query)
        out, _ = trial.impl.forward_mqa(query, trial.cache(), record, trial.layer)
        assert not out[sum(live) :].any()
        assert batch.num_actual_tokens == 20


# -- Mutations.

Change = Callable[[dict[str, Any]], None]


def put(argument: str, with_: Callable[[Any], Any]) -> Change:
    """Put another value for one argument."""

    def change(given: dict[str, Any]) -> None:
        if given.get(argument) is not None:
            given[argument] = with_(given[argument])

    return change


def first_page_again(tables: torch.Tensor) -> torch.Tensor:
    tables = tables.clone()
    tables[:, 1] = tables[:, 0]
    return tables


def shorter(lens: torch.Tensor) -> torch.Tensor:
    lens = lens.clone()
    lens[-1] -= 1
    return lens


def other_rows(starts: torch.Tensor) -> torch.Tensor:
    starts = starts.clone()
    starts[1] -= 1
    return starts


def dirty(workspace: torch.Tensor) -> torch.Tensor:
    workspace[7] = 1
    return workspace


def times(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


DECODES = LatentCase(BATCHES["ragged_decode"], dtype=DType.BFLOAT16, block_size=32)
VERIFY = replace(DECODES, batch=BATCHES["speculative_verify"])
FP8 = replace(DECODES, cache_dtype=CacheDType.FP8)
PREFILL = replace(DECODES, batch=BATCHES["chunked_prefill"], rank=256)
FULL = replace(PREFILL, batch=BATCHES["full_prefill"])
MUTATIONS: dict[str, tuple[str, LatentCase, Change]] = {
    "block": ("decode", DECODES, put("block_tables", first_page_again)),
    "block outside the cache": ("decode", DECODES, put("block_tables", lambda x: x + 2**20)),
    "blocks of int64": ("decode", DECODES, put("block_tables", torch.Tensor.long)),
    "odd number of blocks": ("decode", DECODES, put("block_tables", lambda x: x[:, :-1])),
    "length": ("decode", DECODES, put("seq_lens", shorter)),
    "bound of the lengths": ("decode", DECODES, put("max_seq_len", lambda _: 16)),
    "softmax scale": ("decode", DECODES, put("bmm1_scale", times(1.1))),
    "scale of keys": ("decode", FP8, put("bmm1_scale", times(1 / 0.037))),
    "scale of values": ("decode", FP8, put("bmm2_scale", times(1 / 0.037))),
    "scale on the device": ("decode", FP8, put("bmm1_scale", torch.tensor)),
    "query": ("decode", DECODES, put("query", lambda query: query.roll(1, 2))),
    "query of another type": ("decode", DECODES, put("query", torch.Tensor.half)),
    "verify's tokens": ("decode", VERIFY, put("query", lambda query: query.flip(1))),
    "cache": ("decode", DECODES, put("kv_cache", lambda cache: cache.roll(1, 0))),
    "backend of its own choice": ("decode", DECODES, put("backend", lambda _: "auto")),
    "workspace byte": ("decode", DECODES, put("workspace_buffer", dirty)),
    "no lse": ("decode", DECODES, put("return_lse", lambda _: False)),
    "ragged causality": ("ragged", FULL, put("is_causal", lambda _: False)),
    "causal context": ("ragged", PREFILL, put("is_causal", lambda _: True)),
    "no causality": ("ragged", PREFILL, lambda given: given.update(is_causal=False)),
    "ragged scale": ("ragged", FULL, put("bmm1_scale", times(1.1))),
    "ragged scale of values": ("ragged", FULL, put("bmm2_scale", times(1.1))),
    "query starts": ("ragged", FULL, put("cum_seq_lens_q", other_rows)),
    "key starts": ("ragged", PREFILL, put("cum_seq_lens_kv", other_rows)),
    "ragged length": ("ragged", FULL, put("seq_lens", shorter)),
    "bound of the rows": ("ragged", FULL, put("max_q_len", lambda length: length - 1)),
    "bound of the keys": ("ragged", FULL, put("max_kv_len", lambda _: 3)),
    "number of requests": ("ragged", FULL, put("batch_size", lambda size: size - 1)),
    "keys": ("ragged", FULL, put("key", lambda key: key.roll(1, 1))),
    "values": ("ragged", FULL, put("value", lambda value: value.roll(1, 1))),
    "block scale": ("ragged", FULL, put("o_sf_scale", lambda _: 1.0)),
    "ragged workspace": ("ragged", FULL, put("workspace_buffer", lambda buffer: buffer[:64])),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_of_a_call_makes_the_suite_fail(name: str, version: str) -> None:
    kernel, case, change = MUTATIONS[name]
    seen: list[str] = []

    def mutate(called: str, given: dict[str, Any]) -> None:
        if called == kernel:
            before = dict(given)
            change(given)
            seen.extend(key for key in given if given[key] is not before.get(key))

    mutation: Mutation = mutate
    with emulated(version, mutation), pytest.raises((AssertionError, ContractError)):
        check_case(BACKEND, case)
    assert seen or name == "workspace byte"


def test_each_call_has_ten_mutations_and_more() -> None:
    kernels = [kernel for kernel, _, _ in MUTATIONS.values()]
    assert min(kernels.count("decode"), kernels.count("ragged")) >= 10


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("case", [DECODES, VERIFY, FP8, PREFILL, FULL], ids=str)
def test_the_cases_of_the_mutations_pass_without_them(case: LatentCase, version: str) -> None:
    with emulated(version) as calls:
        check_case(BACKEND, case)
    assert calls.called
