"""Kernels around sparse latent attention, on a real GPU: bit for bit against their twins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.bench.measure.timing import waits_are_errors
from attn.ops import latent_convert, topk_transform
from attn.ops.latent_convert import convert_blocks, convert_rows, write_latent_rows
from attn.ops.topk_transform import transform_topk
from attn.testing.batches import POISON_BYTE, WILD_BLOCK
from builders.batch import CommonAttentionMetadata
from builders.sparse import choice as sparse_mla_choice
from builders.sparse import vendor_calls as sparse_calls
from builders.sparse.arguments import TopkLists
from builders.sparse.rows import RowLengths, context_slots, expand_rows, fill_rows, list_context
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from specs.dtypes import DType
from specs.engine import EngineConfig, Kernels, SparseKernels, SpeculativeConfig
from specs.kv_cache import MLAAttentionSpec, latent_spec
from specs.layouts import LatentKVLayout, latent_views
from specs.rows import LatentFormat
from specs.sparse_mla import CONVERSIONS, STORED_FORMATS, IndexKind, SparseKernel

pytestmark = pytest.mark.gpu
CUDA, K = torch.device("cuda"), SparseKernel
N, P = 40, 64
MODELS = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = [(one.source, one.target) for one in CONVERSIONS]


@contextmanager
def by_twin() -> Iterator[None]:
    """Make the operations run by their twins in torch, on the GPU too."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (latent_convert, topk_transform):
            monkeypatch.setattr(module, "has_kernel", lambda rows: False)
        yield


def layout_of(latent: LatentFormat, model: torch.dtype) -> LatentKVLayout:
    return LatentKVLayout(block_size=P, format=latent, model_dtype=DType.parse(model))


def filled(latent: LatentFormat, model: torch.dtype) -> tuple[LatentKVLayout, Tensor]:
    """A cache of finite values of many magnitudes, with zeros among them."""
    random = torch.Generator().manual_seed(0)
    layout = layout_of(latent, model)
    x = torch.randn(N * P, 576, generator=random) * torch.logspace(-4, 4, N * P)[:, None]
    x[7], x[8, :128] = 0, 0
    x = x.to(model).to(CUDA)
    cache = layout.allocate(N, CUDA, fill_byte=POISON_BYTE)
    slots, scale = torch.arange(N * P, device=CUDA), torch.tensor(0.25, device=CUDA)
    with by_twin():
        write_latent_rows(x[:, :512], x[:, 512:], cache, slots, scale, layout.row)
    return layout, cache


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("latent", STORED_FORMATS)
def test_writers_write_what_their_twins_do(latent: LatentFormat, model: torch.dtype) -> None:
    layout, wanted = filled(latent, model)
    wide = torch.randn(200, 600, device=CUDA).mul(torch.logspace(-5, 5, 200, device=CUDA)[:, None])
    wide[3] = 0
    wide = wide.to(model)
    found = wanted.clone()
    slots = torch.randperm(N * P, device=CUDA)[:190]
    slots[5] = -1
    scale = torch.tensor(0.03, device=CUDA)
    arguments = (wide[:, :512], wide[:, 512:576])
    write_latent_rows(*arguments, found, slots, scale, layout.row)
    with by_twin():
        write_latent_rows(*arguments, wanted, slots, scale, layout.row)
    assert torch.equal(as_bytes(found), as_bytes(wanted))


@pytest.mark.parametrize("k_scale", [0.25, 0.03])
@pytest.mark.parametrize("snap_scales", [False, True])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_conversions_give_what_their_twins_do(
    source: LatentFormat,
    target: LatentFormat,
    model: torch.dtype,
    snap_scales: bool,
    k_scale: float,
) -> None:
    layout, cache = filled(source, model)
    to, scale = layout_of(target, model), torch.tensor(k_scale, device=CUDA)
    slots = torch.randint(-1, N * P, (1000,), device=CUDA)

    def run() -> tuple[Tensor, Tensor]:
        out = torch.zeros(1010, *to.logical_shape(1)[2:], dtype=to.storage_dtype.torch, device=CUDA)
        whole = to.allocate(N, CUDA)
        convert_rows(cache, layout.row, slots, out, to.row, scale, snap_scales)
        convert_blocks(cache, layout.row, whole, to.row, scale, snap_scales=snap_scales)
        return as_bytes(out), as_bytes(whole)

    found = run()
    with by_twin():
        wanted = run()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_cache_beyond_31_bits_of_elements_is_converted() -> None:
    raw, scaled = STORED_FORMATS[1:]
    layout, to = layout_of(raw, torch.bfloat16), layout_of(scaled, torch.bfloat16)
    blocks = (1 << 32) // layout.page_size_bytes + 2
    if torch.cuda.mem_get_info()[0] < 3 * blocks * to.page_size_bytes:
        pytest.skip("needs 15 GB")
    cache = layout.allocate(blocks, CUDA)
    last = latent_views(cache, layout.row)["nope"][-1, -1]
    last.view(torch.uint8).fill_(0x38)
    out, one = to.allocate(1, CUDA)[0], torch.ones((), device=CUDA)
    slots = torch.tensor([blocks * P - 1], device=CUDA)
    convert_rows(cache, layout.row, slots, out, to.row, one)
    assert bool((latent_views(out[None], to.row)["nope"][0, 0].float() == 1).all())
    whole = to.allocate(blocks, CUDA, fill_byte=POISON_BYTE)
    convert_blocks(cache, layout.row, whole, to.row, one)
    assert torch.equal(whole[-1, -1], out[0])
    assert not as_bytes(whole[0]).view(P, -1)[:, :512].any()


@pytest.mark.parametrize("kind", list(IndexKind))
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("topk", [2048, 2000, 7])
def test_lists_become_what_their_twin_says(kind: IndexKind, compact: bool, topk: int) -> None:
    rows, reqs, width = 300, 5, -(-topk // 128) * 128
    ids = torch.randint(-1, 9000, (rows, topk), dtype=torch.int32, device=CUDA)
    table = torch.randint(1, 2**20, (reqs, 9000 // P), dtype=torch.int32, device=CUDA)
    owner = torch.randint(0, reqs, (rows,), dtype=torch.int32, device=CUDA)
    visible = torch.randint(0, 9100, (rows,), dtype=torch.int32, device=CUDA)
    offsets = torch.randint(0, 2**20, (reqs,), dtype=torch.int32, device=CUDA)

    def run() -> list[Tensor]:
        out, slots = (torch.zeros(rows, width, dtype=torch.int32, device=CUDA) for _ in range(2))
        counts = torch.zeros(rows, dtype=torch.int32, device=CUDA)
        transform_topk(
            *(TopkLists(ids, visible, owner), kind, out),
            block_table=table,
            block_size=P,
            offsets=offsets,
            slots=slots,
            counts=counts if compact else None,
        )
        return [out, slots, counts]

    found = run()
    with by_twin():
        wanted = run()
    if kind is not IndexKind.GATHERED:
        wanted[1] = found[1]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reqs", [1, 7, 256])
def test_rows_and_contexts_are_those_of_their_twins(reqs: int) -> None:
    random = torch.Generator().manual_seed(reqs)
    new = torch.randint(0, 6, (reqs,), generator=random)
    lens = (new + torch.randint(0, 300, (reqs,), generator=random)).int()
    lens[torch.rand(reqs, generator=random) < 0.2] = 0
    starts = torch.cat([torch.zeros(1), new.cumsum(0)]).int()
    count = int(starts[-1]) + 5
    starts, lens = starts.to(CUDA), lens.to(CUDA)

    def rows() -> RowLengths:
        return RowLengths(
            *(torch.full((count,), 7, dtype=torch.int32, device=CUDA) for _ in range(3))
        )

    found, wanted = rows(), rows()
    fill_rows(starts, lens, 0, 64, found, 256)
    expand_rows(starts, lens, 0, 64, wanted)
    for name in ("reqs", "visible_lens", "topk_lens"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    table = torch.randint(1, 1000, (reqs, 6), dtype=torch.int32, device=CUDA)
    ends = lens.cumsum(0, dtype=torch.int32)
    total = int(ends[-1]) + 33
    slots = context_slots(table, ends, total, P, 256)
    expected = torch.empty_like(slots)
    list_context(table, ends, expected, P, 256)
    assert torch.equal(slots, expected)


STEPS = [
    (K.TRITON_SPARSE, K.TRITON_SPARSE),
    (K.FLASHMLA_SPARSE, K.FLASHMLA_KV),
]


@pytest.mark.parametrize(("prefill", "decode"), STEPS)
def test_a_step_is_built_without_waiting_and_replayed(
    prefill: SparseKernel, decode: SparseKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decode is not K.TRITON_SPARSE and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashMLA's plans here are for compute capability 9.0")
    # The test only makes plans, and calls no vendor's kernel.
    monkeypatch.setattr(sparse_mla_choice, "unavailable_kernels", dict)
    monkeypatch.setattr(sparse_calls, "LOADERS", {})
    spec = latent_spec(STORED_FORMATS[1], P, topk=64)
    assert isinstance(spec, MLAAttentionSpec)
    config = EngineConfig(
        max_model_len=4096,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_heads=16,
        speculative=SpeculativeConfig(num_speculative_tokens=3),
        kernels=Kernels(sparse=SparseKernels(prefill=prefill, decode=decode)),
    )
    builder = SparseMLAMetadataBuilder(spec, ["layers.0"], config, CUDA)
    table = torch.full((3, 64), WILD_BLOCK, dtype=torch.int32, device=CUDA)
    table[:, :60] = torch.arange(1, 61, device=CUDA)

    def batch_of(new: list[int], lens: list[int]) -> CommonAttentionMetadata:
        return CommonAttentionMetadata.from_lengths(new, lens, table[: len(new)], P)

    ids = torch.randint(0, 4096, (12, 64), dtype=torch.int32, device=CUDA)

    def listed(record: Any) -> Tensor:
        rows = record.decode
        slots = rows.chunks[0].slots.view_as(rows.indices) if rows.chunks else None
        transform_topk(
            TopkLists(ids, rows.lengths.visible_lens, rows.lengths.reqs),
            rows.plan.index_kind,
            rows.indices,
            block_table=rows.block_table,
            block_size=P,
            slots=slots,
        )
        return rows.indices if slots is None else slots

    batch, other = batch_of([4, 4, 4], [70, 4, 3000]), batch_of([4, 2, 4], [200, 90, 1000])
    # Some steps convert whole contexts, others only the rows that few tokens list.
    steps = [batch, other, batch_of([1, 300, 100], [500, 300, 900]), batch_of([5], [3500])]
    for one in steps:
        builder.build(0, one)
    torch.cuda.synchronize()
    with waits_are_errors():
        for one in steps:
            builder.build(0, one)
    lens, starts = batch.seq_lens.clone(), batch.query_start_loc.clone()
    static = batch.replace(seq_lens=lens, query_start_loc=starts)
    captured = builder.build_for_cudagraph_capture(static)
    before = listed(captured).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        builder.update_draft_decode_metadata(captured)
        held = listed(captured)
    lens.copy_(torch.tensor([100, 64, 3500], dtype=torch.int32))
    graph.replay()
    replayed = held.clone()
    fresh = listed(builder.build(0, batch_of([4, 4, 4], [100, 64, 3500])))
    assert torch.equal(replayed, fresh)
    assert not torch.equal(replayed, before)
