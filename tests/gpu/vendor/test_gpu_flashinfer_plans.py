"""FlashInfer's plans with the real package.

A later plan equals the plan that FlashInfer would have made, and a host that runs ahead of the GPU
changes no plan that is still on its way there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BatchSpec
from attn.testing.cases import LatentCase, device_for
from attn.testing.latent_trial import LatentTrial
from builders.batch import CommonAttentionMetadata
from builders.vendor.flashinfer import FlashInferMetadata, FlashInferMetadataBuilder
from builders.vendor.flashinfer_parts import install as flashinfer_compat
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec, SlidingWindowSpec

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
P, HEADS, KV_HEADS, SIZE, PAGES = 16, 32, 8, 128, 4096
AHEAD_CYCLES = 400_000_000
"""Cycles for which the GPU is kept busy, about a fifth of a second: the host plans many steps."""
STEPS = 8
FULL: dict[str, Any] = {
    "block_size": P,
    "dtype": DType.BFLOAT16,
    "num_kv_heads": KV_HEADS,
    "head_size": SIZE,
}
SPECS = {
    "full": FullAttentionSpec(**FULL),
    "fp8": FullAttentionSpec(**FULL, cache_dtype=CacheDType.FP8),
    "window": SlidingWindowSpec(**FULL, sliding_window=300),
}
FIRST = ([1] * 7, [900, 3, 1700, 40, 16, 17, 555])
SECOND = {
    "decodes": ([1] * 9, [31, 2500, 16, 1, 800, 64, 65, 1200, 5]),
    "verifies": ([4] * 7, [4, 2900, 333, 16, 20, 47, 1024]),
    "prefills": ([700, 20, 64], [700, 1400, 65]),
    "both": ([1, 1, 1, 5, 130], [77, 1600, 2, 5, 400]),
}
POINTERS = {
    "_float_workspace_buffer",
    "_int_workspace_buffer",
    "_pin_memory_int_workspace_buffer",
    # Only kernels for Blackwell read this buffer.
    "_kv_lens_buffer",
    "_vector_sparse_indices_buffer",
    "_vector_sparse_indptr_buffer",
}
"""Attributes of a wrapper that hold its memory, which is not compared."""


@pytest.fixture(autouse=True)
def needs_flashinfer() -> None:
    if device_for(AttentionBackendEnum["FLASHINFER"]) is None:
        pytest.skip("flashinfer cannot be used here")


def builder_of(spec: str) -> FlashInferMetadataBuilder:
    config = EngineConfig(
        max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=2048, num_heads=HEADS
    )
    return FlashInferMetadataBuilder(SPECS[spec], ["layers.0"], config, CUDA)


def batch_of(query_lens: list[int], seq_lens: list[int], seed: int = 0) -> CommonAttentionMetadata:
    columns = 4096 // P
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(PAGES, (len(seq_lens), columns), dtype=torch.int32, generator=generator)
    return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table.to(CUDA), P)


def cache_of(spec: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(CUDA).manual_seed(1)
    shape = 2, PAGES, P, KV_HEADS, SIZE
    rows = torch.randn(shape, device=CUDA, generator=generator, dtype=torch.bfloat16)
    key, value = rows.to(SPECS[spec].cache_dtype.element(DType.BFLOAT16).torch)
    return key, value


def query_of(tokens: int) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(2)
    shape = tokens, HEADS, SIZE
    return torch.randn(shape, device=CUDA, generator=generator, dtype=torch.bfloat16)


def run(record: FlashInferMetadata, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    out = torch.full_like(query, float("nan"))
    for part in (record.decode, record.prefill):
        if part is not None:
            rows = slice(part.first_token, part.first_token + part.num_tokens)
            part.wrapper.run(query[rows], cache, out=out[rows], q_scale=SIZE**-0.5)
    return out


def state_of(wrapper: Any) -> dict[str, Any]:
    """The attributes that a plan leaves in a wrapper, as values that can be compared."""
    found = {}
    for name, value in vars(wrapper).items():
        if name in POINTERS:
            continue
        if isinstance(value, Tensor):
            found[name] = value.dtype, value.device.type, value.tolist()
        elif name == "_plan_info":
            found[name] = [int(number) for number in value]
        elif value is None or isinstance(value, bool | int | float | str | torch.dtype):
            found[name] = value
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "graph"])
def test_a_later_plan_is_what_flashinfer_would_have_made(
    name: str, spec: str, is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens, seqs = SECOND[name]
    if is_captured and len(set(lens)) > 1:
        pytest.skip("graphs are of requests of one length")
    first = (lens, [max(seqs[-1], lens[0])] * len(lens)) if len(set(lens)) == 1 else SECOND["both"]
    batch, cache, query = batch_of(lens, seqs), cache_of(spec), query_of(sum(lens))
    states, outs = [], []
    for known in (flashinfer_compat.can_replan, lambda *_: False):
        monkeypatch.setattr(flashinfer_compat, "can_replan", known)
        builder = builder_of(spec)
        if is_captured:
            builder.build_for_cudagraph_capture(batch_of(*first))
        builder.build(0, batch_of(*first, seed=3))
        if name == "prefills":
            builder.build(0, batch_of([600, 30], [650, 400], seed=4))
        record = builder.build(0, batch)
        parts = [part for part in (record.decode, record.prefill) if part is not None]
        for part in parts:
            assert builder.flashinfer.replans(part.wrapper) != bool(states)
        states.append([state_of(part.wrapper) for part in parts])
        outs.append(run(record, query, cache))
    for own, theirs in zip(*states, strict=True):
        assert own.keys() == theirs.keys()
        for field in own:
            assert own[field] == theirs[field], field
    assert torch.equal(*outs)
    assert outs[0].isfinite().all()


def steps_of() -> list[CommonAttentionMetadata]:
    """Steps of the same number of requests, each step with other lengths and pages."""
    seqs = SECOND["decodes"][1]
    return [
        batch_of([1] * len(seqs), seqs[step:] + seqs[:step], seed=step) for step in range(STEPS)
    ]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("is_known", [True, False], ids=["later plans", "own plans"])
def test_a_host_that_runs_ahead_changes_no_plan_on_its_way(
    spec: str, is_captured: bool, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_known:
        monkeypatch.setattr(flashinfer_compat, "can_replan", lambda *_: False)
    batches, cache = steps_of(), cache_of(spec)
    query = query_of(batches[0].num_reqs)
    builder = builder_of(spec)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(query)
    if is_captured:
        record = builder.build_for_cudagraph_capture(batches[0])
        run(record, query, cache)
        with torch.cuda.graph(graph):
            out.copy_(run(record, query, cache))

    def step(batch: CommonAttentionMetadata) -> Tensor:
        record = builder.build(0, batch)
        if not is_captured:
            return run(record, query, cache)
        graph.replay()
        return out.clone()

    expected = []
    for batch in batches:
        expected.append(step(batch))
        torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    found = [step(batch) for batch in batches]
    torch.cuda.synchronize()
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("cache", [CacheDType.AUTO, CacheDType.FP8])
def test_a_latent_plan_is_not_changed_either(cache: CacheDType) -> None:
    seqs = (50, 3, 17, 33, 8)
    specs = [
        BatchSpec(f"step_{step}", (1,) * 5, seqs[step:] + seqs[:step]) for step in range(len(seqs))
    ]
    cases = [
        LatentCase(spec, num_heads=16, dtype=DType.BFLOAT16, cache_dtype=cache, block_size=64)
        for spec in specs
    ]
    if not cases[0].is_served_by(FlashInferMlaBackend):
        pytest.skip("not served on this GPU")
    trials = [LatentTrial(FlashInferMlaBackend, case, CUDA) for case in cases]
    trial = trials[0]
    builder, kept = trial.builder(), trial.cache()
    # Fill every page, because every step reads pages of its own.
    element = torch.float8_e4m3fn if cache is CacheDType.FP8 else kept.dtype
    kept.view(element).copy_(torch.randn(kept.view(element).shape))
    query = trial._absorbed(trial.inputs.query)

    def step(batch: CommonAttentionMetadata) -> Tensor:
        out, _ = trial.impl.forward_mqa(query, kept, builder.build(0, batch), trial.layer)
        found: Tensor = out.clone()
        return found

    expected = []
    for other in trials:
        expected.append(step(other.inputs.batch))
        torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    found = [step(other.inputs.batch) for other in trials]
    torch.cuda.synchronize()
    for own, known in zip(found, expected, strict=True):
        assert torch.equal(own, known)
    assert not torch.equal(expected[0], expected[1])
