"""After warm-up, a sparse layer and its indexer serve steps of any size and compile nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attn.impls.base import LayerScales
from attn.impls.sparse.indexer import IndexInputs, SparseIndexer
from attn.impls.sparse.sparse_mla import SparseMLAImpl
from builders.batch import CommonAttentionMetadata
from builders.sparse.indexer import IndexerMetadataBuilder
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from specs.engine import EngineConfig
from specs.kv_cache import IndexerSpec, latent_spec
from specs.rows import LatentFormat, cache_dtype_of
from specs.sparse_mla import STORED_FORMATS

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16, RAW, SCALED = STORED_FORMATS
PAGE, TOPK, BLOCKS, LONGEST = 64, 2048, 8, 4096
RANK, ROPE, NOPE, V = 512, 64, 128, 128
INDEX_HEADS, INDEX_SIZE = 64, 128
STEPS = [
    *([1] * count for count in (1, 2, 3, 5, 8, 9, 17, 33, 44, 66, 67, 131, 132, 133, 200)),
    *([7], [300], [500], [1, 1, 90]),
]


def config_of(heads: int) -> EngineConfig:
    return EngineConfig(
        max_model_len=LONGEST,
        max_num_seqs=200,
        max_num_batched_tokens=512,
        num_heads=heads,
        index_topk=TOPK,
        softmax_scale=576**-0.5,
    )


def batch_of(lens: list[int]) -> CommonAttentionMetadata:
    table = torch.ones(len(lens), LONGEST // PAGE, dtype=torch.int32, device=CUDA)
    return CommonAttentionMetadata.from_lengths(lens, [one + 3 for one in lens], table, PAGE)


@contextmanager
def compiled() -> Iterator[list[str]]:
    """The names of kernels that Triton compiles for a launch while the context is open."""
    import triton

    names: list[str] = []

    def note(*, fn: Any, is_manual_warmup: bool, **_: Any) -> None:
        if not is_manual_warmup:
            names.append(fn.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
        yield names


@pytest.mark.parametrize(
    ("layout", "heads"), [(SCALED, 128), (SCALED, 16), (BF16, 64), (BF16, 8), (RAW, 128)]
)
def test_a_layer_that_is_warm_compiles_nothing(layout: LatentFormat, heads: int) -> None:
    spec = latent_spec(layout, PAGE, topk=TOPK)
    builder = SparseMLAMetadataBuilder(spec, ["0"], config_of(heads), CUDA)
    lists = torch.full((512, TOPK), -1, dtype=torch.int32, device=CUDA)
    impl = SparseMLAImpl(
        *(heads, RANK + ROPE, 576**-0.5, 1, None, None, cache_dtype_of(layout).value),
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        qk_head_dim=NOPE + ROPE,
        v_head_dim=V,
        kv_b_proj=SimpleNamespace(weight=torch.zeros(heads * (NOPE + V), RANK, device=CUDA)),
        indexer=SimpleNamespace(topk_indices_buffer=lists),
    )
    impl.process_weights_after_loading(torch.bfloat16)
    scales = LayerScales.of(device=CUDA)
    cache = spec.layout().allocate(BLOCKS, device=CUDA)
    impl.warm_up(scales, cache, builder, torch.bfloat16)
    lists[:, :2] = torch.arange(2, dtype=torch.int32, device=CUDA)
    with compiled() as names:
        for lens in STEPS:
            batch = batch_of(lens)
            count = batch.num_actual_tokens
            record = builder.build(0, batch)
            rows = torch.zeros(count, RANK + ROPE, dtype=torch.bfloat16, device=CUDA)
            impl.do_kv_cache_update(
                *(rows[:, :RANK], rows[:, None, RANK:], cache, batch.slot_mapping),
                *(impl.kv_cache_dtype, scales._k_scale),
            )
            absorbed = rows.new_zeros(heads, count, RANK).transpose(0, 1)
            query = rows.new_zeros(count, heads, NOPE + ROPE)
            out, _ = impl.forward_mqa((absorbed, query[..., NOPE:]), cache, record, scales)
            assert not out.any()
    assert names == []


def test_an_indexer_that_is_warm_compiles_nothing() -> None:
    spec = IndexerSpec(index_head_dim=INDEX_SIZE)
    builder = IndexerMetadataBuilder(spec, ["0"], config_of(128), CUDA)
    indexer = SparseIndexer(torch.empty(512, TOPK, dtype=torch.int32, device=CUDA))
    cache = spec.layout().allocate(BLOCKS, device=CUDA)
    key = torch.zeros(512, INDEX_SIZE, dtype=torch.bfloat16, device=CUDA)
    query = torch.zeros(512, INDEX_HEADS, INDEX_SIZE, device=CUDA).to(torch.float8_e4m3fn)
    weights = torch.zeros(512, INDEX_HEADS, device=CUDA)
    indexer.warm_up(query[:1], key[:1], cache, builder)
    with compiled() as names:
        for lens in STEPS:
            batch = batch_of(lens)
            count = batch.num_actual_tokens
            for record in (builder.build(0, batch), builder.build_for_drafting(batch, 0)):
                given = query[:count], key[:count], weights[:count], cache, record
                indexer.forward(IndexInputs(*given))
    assert names == []
