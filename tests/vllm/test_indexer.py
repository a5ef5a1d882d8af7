"""vLLM's indexer by our kernels: its cache layer, its op and its module, against float64 scores."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import platforms
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as vllm_op
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer as vllm_builders

from attn.integrations.vllm import indexer as ours
from builders.sparse.indexer import IndexerMetadata
from tests.vllm.views import cache_view

PAGE, WIDTH, HEADS, TOPK = 64, 128, 4, 24
CACHE_NAME = "model.layers.0.self_attn.indexer.k_cache"
LONGEST, REQS = 256, 4
E4M3 = torch.float8_e4m3fn
DEVICE = torch.device("cpu")
Part = tuple[int, int, int]
"""A part of a step: request, cached tokens, new tokens."""


def stored(key: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's quantisation of keys ``[T, 128]``: e4m3 and scale ``[T]``, restated."""
    absmax = key.float().abs().amax(-1).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(absmax / 448.0)))
    return (key.float() / scale[:, None]).clamp(-448, 448).to(E4M3), scale


def quantised(query: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's quantisation of queries: e4m3, with the scales folded into the weights."""
    absmax = query.float().abs().amax(-1).clamp(min=1e-10)
    scale = torch.exp2(torch.ceil(torch.log2(absmax / 448.0)))
    fp8 = (query.float() / scale[..., None]).clamp(-448, 448).to(E4M3)
    return fp8, weights.float() * scale * WIDTH**-0.5 * query.shape[1] ** -0.5


class Layer:
    """An indexer of vLLM's with random requests, made and called as vLLM does it."""

    def __init__(self, config: Any, *, adopted: bool = True, seed: int = 0) -> None:
        self.config, self.random = config, torch.Generator().manual_seed(seed)
        self.topk = config.model_config.hf_text_config.index_topk
        self.buffer = torch.full((512, self.topk), 1 << 30, dtype=torch.int32)
        with set_current_vllm_config(config):
            self.cache = deepseek_v2.DeepseekV32IndexerCache(
                WIDTH + 4, torch.uint8, CACHE_NAME, config.cache_config
            )
            self.op = vllm_op.SparseAttnIndexer(
                self.cache, WIDTH, "ue8m0", self.topk, WIDTH, LONGEST, 40 * LONGEST, self.buffer
            )
            self.module = types.SimpleNamespace(
                k_cache=self.cache, indexer_op=self.op, n_head=HEADS, use_fused_indexer_q=True
            )
            if adopted:
                ours.adopt(self.module)
                ours.serve_op("CPU")
            spec = self.cache.get_kv_cache_spec(config)
            backend = self.cache.get_attn_backend()
        pages = spec.block_size // PAGE
        self.per = LONGEST // PAGE
        num_blocks = 1 + -(-REQS * self.per // pages)
        view = cache_view(spec, num_blocks, backend, PAGE)
        self.cache.kv_cache = view
        if hasattr(self.cache, "bind_kv_cache"):
            self.cache.bind_kv_cache(view)
        spec = spec.copy_with_new_block_size(PAGE)
        self.builder = backend.get_builder_cls()(spec, [CACHE_NAME], config, DEVICE)
        ids = torch.randperm(REQS * self.per, generator=self.random).int() + pages
        self.table = ids.view(REQS, self.per)
        self.keys = self.normal(REQS, LONGEST, WIDTH).to(config.model_config.dtype)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def batch(self, parts: Sequence[Part], padding: int = 0) -> CommonAttentionMetadata:
        """vLLM's own batch object, filled as its runner fills it; padded as for a full graph."""
        reqs = [req for req, _, _ in parts]
        starts = torch.tensor([0, *accumulate(new for _, _, new in parts)], dtype=torch.int32)
        lens = torch.tensor([done + new for _, done, new in parts], dtype=torch.int32)
        slots = [
            int(self.table[req, place // PAGE]) * PAGE + place % PAGE
            for req, done, new in parts
            for place in range(done, done + new)
        ]
        return CommonAttentionMetadata(
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=lens.clone(),
            num_reqs=len(parts),
            num_actual_tokens=len(slots) + padding,
            max_query_len=max(new for _, _, new in parts),
            max_seq_len=LONGEST,
            block_table_tensor=self.table[reqs],
            slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
            # Only an upper bound, as with drafts that were rejected.
            seq_lens_cpu_upper_bound=(lens + 3).clamp(max=LONGEST),
        )

    def step(
        self, parts: Sequence[Part], padding: int = 0, *, capture: bool = False, stores: bool = True
    ) -> None:
        """Run the op over a step and check every list and every stored byte."""
        batch = self.batch(parts, padding)
        build = self.builder.build_for_cudagraph_capture if capture else None
        record = build(batch) if build else self.builder.build(0, batch)
        given = self.inputs(parts, padding)
        self.buffer.fill_(1 << 30)
        self.op.skip_k_cache_insert = not stores
        with set_forward_context({CACHE_NAME: record}, self.config):
            found = self.op(*given)
        assert found.data_ptr() == self.buffer.data_ptr()
        self.check(parts, given, padding)

    def inputs(self, parts: Sequence[Part], padding: int) -> tuple[Tensor, ...]:
        tokens = sum(new for _, _, new in parts) + padding
        rows = tokens + 2
        query = self.normal(rows, HEADS, WIDTH).bfloat16()
        fp8, weights = quantised(query, self.normal(rows, HEADS))
        own = [self.keys[req, done : done + new] for req, done, new in parts]
        key = torch.cat([*own, torch.full((padding + 2, WIDTH), math.nan)]).to(self.keys.dtype)
        return torch.empty(rows, 8), fp8, key, weights

    def real_keys(self, req: int, length: int) -> Tensor:
        """Keys of a request in float64, from vLLM's layout: a page's keys, then its scales."""
        pages = self.cache.kv_cache.reshape(len(self.cache.kv_cache), -1)[self.table[req].long()]
        data = pages[:, : PAGE * WIDTH].contiguous().view(E4M3).double().view(-1, WIDTH)
        scale = pages[:, PAGE * WIDTH :].contiguous().view(torch.float32).double().view(-1, 1)
        return (data * scale)[:length]

    def check(self, parts: Sequence[Part], given: tuple[Tensor, ...], padding: int) -> None:
        _, query, _, weights = given
        at = 0
        for req, done, new in parts:
            keys = self.real_keys(req, done + new)
            fp8, scale = stored(self.keys[req, : done + new])
            assert torch.equal(keys, fp8.double() * scale[:, None].double())
            for row in range(at, at + new):
                seen = done + row - at + 1
                check_list(self.buffer[row], query[row], weights[row], keys[:seen])
            at += new
        assert bool((self.buffer[at : at + padding] == -1).all())
        assert bool((self.buffer[at + padding :] == 1 << 30).all())


def check_list(listed: Tensor, query: Tensor, weights: Tensor, keys: Tensor) -> None:
    """Check a list against float64 scores: it may differ only where fp32 sums cannot tell."""
    count = min(len(listed), len(keys))
    taken = listed[:count].long()
    assert bool((listed[count:] == -1).all())
    assert bool((taken[1:] > taken[:-1]).all())
    assert 0 <= int(taken[0])
    assert int(taken[-1]) < len(keys)
    query, weights = query.double(), weights.double()
    products = query @ keys.T
    scores = (products.relu() * weights[:, None]).sum(0)
    sizes = ((query.abs() @ keys.abs().T) * weights.abs()[:, None]).sum(0)
    error = (WIDTH + len(weights) + 4) * 2.0**-23 * sizes
    is_taken = torch.zeros(len(keys), dtype=torch.bool)
    is_taken[taken] = True
    if bool(is_taken.all()):
        return
    assert float((scores + error)[is_taken].min()) >= float((scores - error)[~is_taken].max())


@pytest.fixture
def layer_of(
    cuda: Callable[..., None], make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Layer]]:
    """A maker of layers on a pretended GPU; what adopting replaced is put back afterwards."""

    def make(
        *,
        capability: tuple[int, int] = (9, 0),
        adopted: bool = True,
        topk: int = TOPK,
        drafts: int = 0,
        **settings: Any,
    ) -> Layer:
        cuda(*capability)
        for module in (vllm_op, vllm_builders, deepseek_v2, ours):
            monkeypatch.setattr(module, "current_platform", platforms.current_platform)
        # DeepGEMM need not be there for ours, and its calls must not happen.
        monkeypatch.setattr(vllm_op, "has_deep_gemm", lambda: True)
        for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"):
            monkeypatch.setattr(vllm_op, name, None)
        monkeypatch.setattr(vllm_builders, "get_paged_mqa_logits_metadata", None)
        given = {"dtype": "bfloat16", "block_size": PAGE, "max_model_len": LONGEST} | settings
        config = make_config(backend=None, **given)
        config.model_config.hf_text_config.index_topk = topk
        if drafts:
            config.speculative_config = types.SimpleNamespace(num_speculative_tokens=drafts)
        return Layer(config, adopted=adopted)

    yield make
    for library in ours._libraries.values():
        library._destroy()
    ours._libraries.clear()
    ours._reserved.clear()


STEPS: dict[str, tuple[list[Part], int]] = {
    "prompts": ([(0, 0, 70), (1, 0, 9)], 0),
    "decodes": ([(0, 70, 1), (1, 9, 1)], 0),
    "padded decodes": ([(0, 71, 1), (1, 10, 1)], 3),
    "mixed": ([(0, 72, 1), (1, 11, 1), (2, 0, 30), (3, 0, 5)], 0),
    "later chunks": ([(2, 30, 66), (3, 5, 8)], 0),
    "decodes again": ([(0, 73, 1), (2, 96, 1), (3, 13, 1)], 0),
}


@pytest.mark.parametrize("block_size", [PAGE, 2 * PAGE])
def test_the_op_lists_the_best_keys_step_after_step(
    layer_of: Callable[..., Layer], block_size: int
) -> None:
    layer = layer_of(block_size=block_size)
    assert isinstance(layer.builder, ours.IndexerBuilder)
    for parts, padding in STEPS.values():
        layer.step(parts, padding)
