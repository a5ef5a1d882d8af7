"""A draft loop of five steps, captured once and replayed, against eager steps that are built anew.

Where the host plans, each step's forward is a graph of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.backends.triton_mla import TritonMLABackend
from attn.backends.trtllm_mla import TrtllmMlaBackend
from attn.registry import AttentionBackendEnum
from attn.testing import budget, oracle
from attn.testing.batches import Layer, Projection
from attn.testing.budget import low_precision
from attn.testing.cases import device_for
from attn.testing.oracle import Rules
from builders.batch import CommonAttentionMetadata
from builders.drafts.advance import advance
from builders.drafts.multi_step import MultiStepDraft
from specs.attention import AttentionType, MlaKernel
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, Kernels
from specs.kv_cache import MLAAttentionSpec

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
STEPS, REQS, HEADS, P, LONGEST = 5, 64, 16, 64, 1024
SCALE = 192**-0.5
TRIPLES: dict[str, tuple[type[AttentionBackend], MlaKernel]] = {
    "TRITON_MLA": (TritonMLABackend, MlaKernel.AUTO),
    "TRTLLM_MLA": (TrtllmMlaBackend, MlaKernel.TRITON),
}
ON_HOST: dict[str, tuple[type[AttentionBackend], MlaKernel]] = {
    "FLASHINFER_MLA": (FlashInferMlaBackend, MlaKernel.AUTO)
}


class Drafting:
    """A layer over a cache with a row for every token that drafting may reach."""

    def __init__(self, name: str, cache_dtype: CacheDType) -> None:
        backend, kernel = (TRIPLES | ON_HOST)[name]
        self.spec = MLAAttentionSpec(block_size=P, dtype=DType.BFLOAT16, cache_dtype=cache_dtype)
        self.config = EngineConfig(
            max_model_len=LONGEST,
            max_num_seqs=REQS,
            max_num_batched_tokens=4 * REQS,
            num_heads=HEADS,
            softmax_scale=SCALE,
            kernels=Kernels.own(rows=kernel),
            skip_prefill=True,
        )
        self.builder_cls: Any = backend.get_builder_cls()
        impl_cls: Any = backend.get_impl_cls()
        self.impl = impl_cls(
            *(HEADS, 576, SCALE, 1, None, None, cache_dtype.value, None),
            *(AttentionType.DECODER.value, None),
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            qk_head_dim=192,
            v_head_dim=128,
            kv_b_proj=Projection(torch.zeros(HEADS * 256, 512, device=CUDA)),
        )
        self.impl.process_weights_after_loading(torch.bfloat16)
        one = torch.ones((), device=CUDA)
        self.layer = Layer(one, 0.05 * one, 0.05 * one)
        generator = torch.Generator(CUDA).manual_seed(0)
        columns = LONGEST // P
        blocks = 1 + torch.randperm(REQS * columns, device=CUDA, generator=generator)
        self.table = blocks.view(REQS, columns).int()
        self.cache = self.spec.layout().allocate(REQS * columns + 1, CUDA, fill_byte=0xFF)
        self.rows = torch.randn(REQS, LONGEST, 576, device=CUDA, generator=generator).bfloat16()
        slots = self.table.long()[:, :, None] * P + torch.arange(P, device=CUDA)
        rows = self.rows.flatten(0, 1)
        self.impl.do_kv_cache_update(
            *(rows[:, :512], rows[:, 512:], self.cache, slots.flatten()),
            *(cache_dtype.value, self.layer._k_scale),
        )
        self.queries = torch.randn(
            STEPS, REQS, HEADS, 576, device=CUDA, generator=generator
        ).bfloat16()

    def builder(self) -> Any:
        return self.builder_cls(self.spec, ["layer.0"], self.config, CUDA)

    def verified(self, seed: int) -> tuple[CommonAttentionMetadata, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        lens = torch.randint(4, LONGEST + 1, (REQS,), generator=generator).tolist()
        lens[:3] = [LONGEST, LONGEST - 1, LONGEST - 3]
        query_lens = [4] * REQS
        query_lens[-1] = lens[-1] = 0
        batch = CommonAttentionMetadata.from_lengths(query_lens, lens, self.table, P)
        rejected = torch.randint(0, 4, (REQS,), dtype=torch.int32, generator=generator)
        return batch, rejected.to(CUDA)

    def forward(self, record: Any, step: int) -> tuple[Tensor, Tensor]:
        out, lse = self.impl.forward_mqa(self.queries[step], self.cache, record, self.layer)
        return out, lse


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
@pytest.mark.parametrize("name", TRIPLES)
def test_a_replayed_loop_equals_eager_steps(name: str, cache_dtype: CacheDType) -> None:
    layer = Drafting(name, cache_dtype)
    draft = MultiStepDraft(layer.builder(), STEPS)

    def loop(record: Any) -> list[tuple[Tensor, Tensor]]:
        found = [layer.forward(record, 0)]
        for step in range(1, STEPS):
            found.append(layer.forward(draft.next(), step))
        return found

    # This first run compiles the kernels, outside the graph.
    loop(draft.begin(*layer.verified(0)))
    record = draft.begin(*layer.verified(0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loop(record)
    for seed in (1, 2):
        batch, rejected = layer.verified(seed)
        draft.begin(batch, rejected)
        graph.replay()
        torch.cuda.synchronize()
        for step in range(STEPS):
            batch = advance(batch, P, LONGEST, rejected if step == 0 else None)
            eager = layer.forward(layer.builder().build_for_drafting(batch, step), step)
            lens = batch.seq_lens.tolist()
            live = [row for row, length in enumerate(lens) if length]
            for one, other in zip(captured[step], eager, strict=True):
                assert torch.equal(one[live], other[live])
            row = live[(7 * seed + step) % len(live)]
            _check_row(layer, captured[step][0][row], lens[row], row, step, cache_dtype)


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_steps_planned_on_the_host_replay_their_forwards(cache_dtype: CacheDType) -> None:
    if device_for(AttentionBackendEnum["FLASHINFER_MLA"]) is None:
        pytest.skip(FlashInferMlaBackend.unavailable_reason() or "flashinfer is not installed")
    if cache_dtype is CacheDType.FP8 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("rows of e4m3 need sm90")
    layer = Drafting("FLASHINFER_MLA", cache_dtype)
    builder = layer.builder()
    draft = MultiStepDraft(builder, STEPS)
    batch, rejected = layer.verified(0)
    draft.begin(batch, rejected, rejected.cpu())
    record = builder.build_for_cudagraph_capture(draft.batch)
    # This first run compiles the kernels and reads the scales, outside the graph.
    layer.forward(record, 0)
    torch.cuda.synchronize()
    graphs: list[tuple[Any, tuple[Tensor, Tensor]]] = []
    for step in range(STEPS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer.forward(record, step)
        graphs.append((graph, captured))
    for seed in (1, 2):
        batch, rejected = layer.verified(seed)
        counts = rejected.cpu()
        for step, (graph, captured) in enumerate(graphs):
            planned = draft.begin(batch, rejected, counts) if step == 0 else draft.next()
            assert planned.decode.wrapper is record.decode.wrapper
            graph.replay()
            torch.cuda.synchronize()
            lens = draft.batch.seq_lens.tolist()
            assert draft.batch.seq_lens_cpu_upper_bound.tolist() == lens
            live = [row for row, length in enumerate(lens) if length]
            for row in live[(7 * seed + step) % 8 :: 8]:
                _check_row(layer, captured[0][row], lens[row], row, step, cache_dtype)
            assert not captured[0][[row for row, length in enumerate(lens) if not length]].any()


def _check_row(
    layer: Drafting, found: Tensor, length: int, row: int, step: int, cache_dtype: CacheDType
) -> None:
    """Check one request against float64, over the keys that should be in the cache."""
    keys = layer.rows[row, :length].double().cpu()
    if cache_dtype is CacheDType.FP8:
        keys = (keys / 0.05).clamp(-448, 448).to(torch.float8_e4m3fn).double() * 0.05
    query = layer.queries[step, row][None].double().cpu()
    rules = Rules(scale=SCALE)
    parts = query[..., :512], query[..., 512:], keys[:, :512], keys[:, 512:]
    wanted, _ = oracle.mla_absorbed(*parts, length - 1, rules)
    key = keys[:, None]
    given = query.bfloat16(), key.bfloat16(), key[..., :512].bfloat16()
    low, _ = low_precision(*given, length - 1, rules, torch.bfloat16)
    error = float(budget.row_errors(found[None].cpu(), wanted).max())
    assert error <= budget.budget(wanted, low, torch.bfloat16)
