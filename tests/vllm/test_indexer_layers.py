"""vLLM's indexer by our kernels: its cache layer, its op and its module, against float64 scores."""

from __future__ import annotations

import ast
import importlib
import logging
import math
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch
from torch import Tensor
from vllm import platforms
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor import custom_op
from vllm.model_executor.layers import sparse_attn_indexer as vllm_op
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer as vllm_builders
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend

from attn.impls.sparse import indexer as impls
from attn.integrations.vllm import compat, members, model_hooks
from attn.integrations.vllm import indexer as ours
from attn.ops.indexer import write_index_keys
from tests.vllm.fresh import FreshProcesses
from tests.vllm.runner import torch_rotary
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

    def __init__(
        self,
        config: Any,
        *,
        adopted: bool = True,
        is_built: bool = True,
        heads: int = HEADS,
        module: Any = types.SimpleNamespace,
    ) -> None:
        """Without ``is_built`` there is no metadata builder, and without ``adopted`` no kernel of
        ours; ``module`` is the class of the indexer.
        """
        self.heads = heads
        self.config, self.random = config, torch.Generator().manual_seed(0)
        self.topk = config.model_config.hf_text_config.index_topk
        self.buffer = torch.full((512, self.topk), 1 << 30, dtype=torch.int32)
        with set_current_vllm_config(config):
            self.cache = deepseek_v2.DeepseekV32IndexerCache(
                WIDTH + 4, torch.uint8, CACHE_NAME, config.cache_config
            )
            self.op = vllm_op.SparseAttnIndexer(
                self.cache, WIDTH, "ue8m0", self.topk, WIDTH, LONGEST, 40 * LONGEST, self.buffer
            )
            self.module = module(
                k_cache=self.cache, indexer_op=self.op, n_head=heads, use_fused_indexer_q=True
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
        if is_built:
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

    def batch_of_too_many(self) -> Any:
        """Build a step of more tokens than the engine allows."""
        return self.builder.build(0, self.batch([(0, 0, 200), (1, 0, 200)]))

    def inputs(self, parts: Sequence[Part], padding: int) -> tuple[Tensor, ...]:
        tokens = sum(new for _, _, new in parts) + padding
        rows = tokens + 2
        query = self.normal(rows, self.heads, WIDTH).bfloat16()
        fp8, weights = quantised(query, self.normal(rows, self.heads))
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
    assert int(taken[0]) >= 0
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
        topk: int = TOPK,
        drafts: int = 0,
        has_deep_gemm: bool = True,
        change: Callable[[Any], None] = lambda config: None,
        layer: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Layer:
        cuda(*capability)
        for module in (vllm_op, vllm_builders, deepseek_v2, ours):
            monkeypatch.setattr(module, "current_platform", platforms.current_platform)
        # DeepGEMM need not be there for ours, and its calls must not happen.
        monkeypatch.setattr(vllm_op, "has_deep_gemm", lambda: has_deep_gemm)
        for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits"):
            monkeypatch.setattr(vllm_op, name, None)
        monkeypatch.setattr(vllm_builders, "get_paged_mqa_logits_metadata", None)
        given = {"dtype": "bfloat16", "block_size": PAGE, "max_model_len": LONGEST} | settings
        config = make_config(backend=None, **given)
        config.model_config.hf_text_config.index_topk = topk
        if drafts:
            config.speculative_config = types.SimpleNamespace(num_speculative_tokens=drafts)
        change(config)
        return Layer(config, **(layer or {}))

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


@pytest.mark.parametrize("topk", [512, 1024, 2048])
def test_lists_longer_than_a_request_end_in_minus_one(
    layer_of: Callable[..., Layer], topk: int
) -> None:
    layer = layer_of(topk=topk)
    layer.step([(1, 0, 3)])
    layer.step([(1, 3, 1)], padding=1)


@pytest.mark.parametrize("heads", [32, 64])
def test_a_step_may_have_as_many_tokens_as_the_engine_allows(
    layer_of: Callable[..., Layer], heads: int
) -> None:
    layer = layer_of(max_num_batched_tokens=LONGEST, max_num_seqs=2, layer={"heads": heads})
    layer.step([(0, 0, 150), (1, 0, LONGEST - 150)])
    layer.step([(0, 150, 1), (1, LONGEST - 150, 1)])
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        layer.batch_of_too_many()


def test_rows_of_a_verify_see_one_key_more_each(layer_of: Callable[..., Layer]) -> None:
    layer = layer_of(drafts=3, topk=8)
    assert layer.builder.threshold == 4
    layer.step([(0, 0, 62), (1, 0, 20)])
    layer.step([(0, 62, 4), (1, 20, 4), (2, 0, 9)])
    # Three drafts of the first request and one of the second were rejected.
    layer.step([(0, 63, 4), (1, 23, 4)], padding=2)


def test_a_cached_prefix_is_scored_without_being_written(layer_of: Callable[..., Layer]) -> None:
    layer = layer_of()
    layer.step([(0, 0, 70)])
    layer.table[1, 0] = layer.table[0, 0]
    layer.keys[1, :PAGE] = layer.keys[0, :PAGE]
    layer.step([(0, 70, 1), (1, PAGE, 20)])
    layer.step([(1, 84, 1)])


def test_a_captured_step_reads_what_later_builds_write(layer_of: Callable[..., Layer]) -> None:
    layer = layer_of(topk=8)
    layer.step([(0, 0, 66), (1, 0, 5), (2, 0, 30)])
    static = layer.batch([(0, 0, 1), (1, 0, 1), (2, 0, 1)])
    record = layer.builder.build_for_cudagraph_capture(static)
    for parts in ([(0, 66, 1), (2, 30, 1), (1, 5, 1)], [(2, 31, 1), (1, 6, 1), (0, 67, 1)]):
        batch = layer.batch(parts)
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            getattr(static, name).copy_(getattr(batch, name))
        layer.builder.build(0, static)
        given = layer.inputs(parts, 0)
        layer.buffer.fill_(1 << 30)
        with set_forward_context({CACHE_NAME: record}, layer.config):
            layer.op(*given)
        layer.check(parts, given, 0)


def test_a_padding_request_of_a_captured_batch_sees_no_key(layer_of: Callable[..., Layer]) -> None:
    layer = layer_of(topk=8)
    layer.step([(0, 0, 20)])
    batch = layer.batch([(0, 20, 1)], padding=2)
    # As vLLM pads: the last start is repeated, lengths are 0, and the table's rows are arbitrary.
    batch.query_start_loc = torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    batch.query_start_loc_cpu = batch.query_start_loc.clone()
    batch.seq_lens = torch.tensor([21, 0, 0], dtype=torch.int32)
    batch.seq_lens_cpu_upper_bound = batch.seq_lens
    batch.block_table_tensor = layer.table[[0, 1, 2]]
    batch.num_reqs = 3
    given = layer.inputs([(0, 20, 1)], 2)
    layer.buffer.fill_(1 << 30)
    with set_forward_context({CACHE_NAME: layer.builder.build(0, batch)}, layer.config):
        layer.op(*given)
    layer.check([(0, 20, 1)], given, 2)


FAULTS: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {}


def fault(name: str) -> Callable[[Any], Any]:
    def keep(change: Any) -> Any:
        FAULTS[name] = change
        return change

    return keep


@fault("lists of positions that are one too high")
def _shifted(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = impls.select_topk

    def select(logits: Tensor, lens: Tensor, out: Tensor) -> None:
        real(logits, lens, out)
        out[out >= 0] += 1

    monkeypatch.setattr(impls, "select_topk", select)


@fault("the newest key is not seen")
def _short(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = impls.select_topk
    monkeypatch.setattr(impls, "select_topk", lambda x, lens, out: real(x, lens - 1, out))


@fault("weights without the query's scale")
def _unscaled(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = impls.paged_index_logits

    def score(query: Tensor, weights: Tensor, *others: Any) -> None:
        real(query, weights.sign(), *others)

    monkeypatch.setattr(impls, "paged_index_logits", score)


@fault("keys with scales of another rule")
def _other_scale(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = impls.write_index_keys

    def write(keys: Tensor, cache: Tensor, slots: Tensor) -> None:
        real(keys, cache, slots)
        scales = cache.view(len(cache), -1)[:, PAGE * WIDTH :].view(torch.float32)
        scales *= 2

    monkeypatch.setattr(impls, "write_index_keys", write)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(
    layer_of: Callable[..., Layer], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    layer = layer_of(topk=8)
    layer.step([(0, 0, 40)])
    FAULTS[name](layer, monkeypatch)
    with pytest.raises(AssertionError):
        layer.step([(0, 40, 1)])


def test_the_profiling_run_takes_the_memory_that_the_builder_will_take(
    layer_of: Callable[..., Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(topk=8)
    given = layer.inputs([(0, 0, 3)], 0)

    def profile() -> None:
        with set_forward_context(None, layer.config):
            assert layer.op(*given).data_ptr() == layer.buffer.data_ptr()

    # The builder is there, so a dummy run takes nothing.
    profile()
    assert not ours._reserved
    monkeypatch.setattr(getattr(layer.cache, ours._ADOPTED), "is_planned", False)
    profile()
    buffers = layer.builder.buffers
    owned = sum(buffers[name].nbytes for name in ("logits", "data", "scale"))
    assert {device: held.nbytes for device, held in ours._reserved.items()} == {DEVICE: owned}
    profile()
    with set_current_vllm_config(layer.config):
        type(layer.builder)(
            layer.cache.get_kv_cache_spec(layer.config), [CACHE_NAME], layer.config, DEVICE
        )
    assert not ours._reserved


def test_an_indexer_that_was_not_adopted_is_vllm_s(layer_of: Callable[..., Layer]) -> None:
    layer = layer_of(layer={"adopted": False, "is_built": False})
    assert layer.cache.get_attn_backend() is vllm_builders.DeepseekV32IndexerBackend
    assert not ours._libraries
    # Another layer of the process is adopted: vLLM's function still runs for this one.
    ours.serve_op("CPU")
    record = vllm_record(slots=torch.empty(0, dtype=torch.int64))
    layer.op.skip_k_cache_insert = True
    given = layer.inputs([(0, 0, 3)], 0)
    with set_forward_context({CACHE_NAME: record}, layer.config):
        layer.op(*given)
    # It clears the rows of all inputs, which ours leaves alone.
    assert bool((layer.buffer[: len(given[0])] == -1).all())
    assert bool((layer.buffer[len(given[0]) :] == 1 << 30).all())


def vllm_record(slots: Tensor) -> Any:
    """vLLM's record of an empty step."""
    return vllm_builders.DeepseekV32IndexerMetadata(
        seq_lens=torch.empty(0, dtype=torch.int32),
        max_seq_len=0,
        slot_mapping=slots,
        num_decodes=0,
        num_decode_tokens=0,
        num_prefills=0,
        num_prefill_tokens=0,
    )


def test_models_that_call_the_function_and_store_keys_themselves_are_served(
    layer_of: Callable[..., Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("a_model_s_module")
    module.sparse_attn_indexer = vllm_op.sparse_attn_indexer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made_by = type("Indexer", (types.SimpleNamespace,), {"__module__": module.__name__})
    layer = layer_of(topk=8, layer={"module": made_by})
    assert module.sparse_attn_indexer is ours.indexer_step()
    assert vllm_op.sparse_attn_indexer is not ours.indexer_step()
    layer.step([(0, 0, 20)])
    # The model stores the keys of the next step, then calls the function without keys.
    parts = [(0, 20, 1), (1, 0, 30)]
    record, given = layer.builder.build(0, layer.batch(parts)), layer.inputs(parts, 0)
    write_index_keys(given[2], layer.cache.kv_cache, record.slot_mapping)
    layer.buffer.fill_(1 << 30)
    hidden, query, _, weights = given
    with set_forward_context({CACHE_NAME: record}, layer.config):
        module.sparse_attn_indexer(
            *(hidden, CACHE_NAME, layer.cache.kv_cache, query, None, None, weights, WIDTH),
            *("ue8m0", 8, WIDTH, LONGEST, 40 * LONGEST, layer.buffer),
            skip_k_cache_insert=True,
            use_pcp=False,
            skip_topk_buffer_clear=True,
        )
    layer.check(parts, given, 0)


def test_the_models_call_the_function_by_that_name() -> None:
    """The module is only read: its import wants vLLM's binaries."""
    folder = Path(vllm_op.__file__).parents[2] / "models" / "deepseek_v32"
    path = folder / ("nvidia/attention.py" if compat.BACKENDS_SHAPE_CACHES else "attention.py")
    tree = ast.parse(path.read_text())
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == vllm_op.__name__
        for name in node.names
    }
    called = {node.func.id for node in ast.walk(tree) if is_named_call(node)}
    assert "sparse_attn_indexer" in imported & called
    assert "DeepseekV32Indexer" in {
        node.name for node in tree.body if isinstance(node, ast.ClassDef)
    }


def is_named_call(node: ast.AST) -> TypeGuard[Any]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def test_another_plugin_s_op_stays(
    layer_of: Callable[..., Layer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Theirs(vllm_op.SparseAttnIndexer):  # type: ignore[misc]
        pass

    monkeypatch.setitem(custom_op.op_registry_oot, "SparseAttnIndexer", Theirs)
    logging.getLogger("vllm.attn_backends").addHandler(caplog.handler)
    try:
        layer = layer_of(layer={"is_built": False})
    finally:
        logging.getLogger("vllm.attn_backends").removeHandler(caplog.handler)
    assert isinstance(layer.op, Theirs)
    assert layer.cache.get_attn_backend() is vllm_builders.DeepseekV32IndexerBackend
    assert "the indexer's op is tests.vllm.test_indexer_layers" in caplog.text


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Any], None], str]] = {
    "pages": ({"block_size": 96}, lambda _: None, "block_size 96 not supported by the indexer"),
    "fp4": ({}, lambda config: set_fp4(config), "indexer cache of mxfp4 not supported"),
    "ranks": (
        {},
        lambda config: setattr(config.parallel_config, "prefill_context_parallel_size", 2),
        "prefill_context_parallel_size 2 not supported by the indexer",
    ),
    "a kernel by name": (
        {},
        lambda config: set_topk_kernel(config),
        "sparse_indexer_topk_backend 'persistent' not supported",
    ),
}


def set_fp4(config: Any) -> None:
    if compat.BACKENDS_SHAPE_CACHES:
        config.attention_config.use_fp4_indexer_cache = True
    else:
        config.attention_config.indexer_kv_dtype = "mxfp4"


def set_topk_kernel(config: Any) -> None:
    if not hasattr(config.kernel_config, "sparse_indexer_topk_backend"):
        pytest.skip("this vLLM has no such setting")
    config.kernel_config.sparse_indexer_topk_backend = "persistent"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_when_the_layer_is_made(
    layer_of: Callable[..., Layer], name: str
) -> None:
    settings, change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        layer_of(change=change, **settings)


def test_gpus_without_e4m3_get_vllm_s_unfused_queries(layer_of: Callable[..., Layer]) -> None:
    bare = {"is_built": False}
    assert layer_of(capability=(8, 9), layer=bare).module.use_fused_indexer_q
    assert not layer_of(capability=(8, 0), layer=bare).module.use_fused_indexer_q


def test_a_step_makes_the_same_lists_with_batch_invariance(
    layer_of: Callable[..., Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn.integrations.vllm.translate.batch_invariant", lambda: True)
    layer = layer_of(topk=8)
    layer.step([(0, 0, 20)])
    layer.step([(0, 20, 1), (1, 0, 12)])
    assert "data" not in layer.builder.buffers


def test_without_deep_gemm_only_indexers_that_will_be_ours_are_made(
    layer_of: Callable[..., Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_op.SparseAttnIndexer, "__init__", vllm_op.SparseAttnIndexer.__init__)
    model_hooks.spare_deep_gemm(vllm_op)
    kept = vllm_op.SparseAttnIndexer.__init__
    model_hooks.spare_deep_gemm(vllm_op)
    assert vllm_op.SparseAttnIndexer.__init__ is kept
    backend = type("Ours", (), {"__module__": members.__name__})
    chosen: list[Any] = [backend]
    monkeypatch.setattr("vllm.v1.attention.selector.get_attn_backend", lambda *_, **__: chosen[0])
    layer = layer_of(topk=8, has_deep_gemm=False)
    layer.step([(0, 0, 12)])
    chosen[0] = vllm_builders.DeepseekV32IndexerBackend
    with pytest.raises(RuntimeError, match="requires DeepGEMM"):
        layer_of(has_deep_gemm=False)


IMPORTS = """
import sys
from attn.integrations.vllm import model_hooks
before = set(sys.modules)
model_hooks.install_when_imported()
new = set(sys.modules) - before
assert model_hooks.OP_MODULE not in sys.modules, "the op's module was imported"
import vllm.model_executor.layers.sparse_attn_indexer as module
assert hasattr(module.SparseAttnIndexer.__init__, model_hooks._MARK)
assert module.__spec__.loader.get_source(module.__name__)
assert "attn.integrations.vllm.indexer" not in sys.modules
print(len(new))
"""


def test_the_op_s_module_is_changed_when_it_is_imported(fresh: FreshProcesses) -> None:
    printed = fresh.run(IMPORTS.replace("\nbefore", f"\n{WITHOUT}\nbefore"))
    assert int(printed.splitlines()[-1]) < 10


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's registry of models, to be changed for a test."""
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    return ModelRegistry.models


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_gpus_without_e4m3_get_the_generic_models(
    cuda: Callable[..., None], models: dict[str, Any], capability: tuple[int, int]
) -> None:
    cuda(*capability)
    before = dict(models)
    model_hooks.use_generic_models()
    changed = {name for name, model in models.items() if model is not before[name]}
    is_old = capability < (8, 9)
    fused = {} if compat.BACKENDS_SHAPE_CACHES else model_hooks.GENERIC_MODELS
    assert changed == (set(fused) if is_old else set())
    for name, path in fused.items():
        module, _, cls = path.partition(":")
        generic = getattr(importlib.import_module(module), cls)
        if is_old:
            assert models[name].load_model_cls() is generic
            continue
        assert models[name].module_name == model_hooks.FUSED_MODELS
    kept = dict(models)
    model_hooks.use_generic_models()
    assert models == kept


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_model_that_the_user_points_elsewhere_stays(
    cuda: Callable[..., None], models: dict[str, Any], capability: tuple[int, int]
) -> None:
    cuda(*capability)
    theirs = types.SimpleNamespace(module_name="a_users.module")
    models["DeepseekV32ForCausalLM"] = theirs
    model_hooks.use_generic_models()
    assert models["DeepseekV32ForCausalLM"] is theirs


WITHOUT = "import vllm.utils.import_utils as utils; utils.has_deep_gemm = lambda: False"


def test_vllm_s_whole_indexer_runs_over_ours(
    layer_of: Callable[..., Layer],
    one_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Projections, norm and rotation are vLLM's; the op gets what they make.

    vLLM's kernels that quantise queries need a GPU, so a restatement stands for them.
    """

    def quantise(rows: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        fp8, scale = stored(rows)
        return fp8, scale[:, None]

    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", quantise)
    layer = layer_of(topk=8)
    del layer.config.compilation_config.static_forward_context[CACHE_NAME]
    hidden, rank, rope = 64, 32, 64
    hf = types.SimpleNamespace(
        index_topk=8, index_n_heads=HEADS, index_head_dim=WIDTH, qk_rope_head_dim=rope
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(layer.config):
            one_process()
            prefix = CACHE_NAME.removesuffix(".k_cache")
            indexer = deepseek_v2.Indexer(
                *(layer.config, hf, hidden, rank, None, layer.config.cache_config, layer.buffer),
                prefix,
            )
            rotary = torch_rotary(rope, LONGEST)
            ours.adopt(indexer)
    finally:
        torch.set_default_dtype(default)
    for parameter in indexer.parameters():
        parameter.data.normal_(generator=layer.random)
    indexer.use_fused_indexer_q = False
    indexer.k_cache.kv_cache = layer.cache.kv_cache
    calls: list[tuple[Tensor, ...]] = []
    op = indexer.indexer_op.forward
    monkeypatch.setattr(
        indexer.indexer_op, "forward", lambda *given: (calls.append(given), op(*given))[1]
    )
    parts: list[Part] = [(0, 0, 20), (1, 0, 4)]
    later: list[Part] = [(0, 20, 1), (1, 4, 1)]
    for step in (parts, later):
        tokens = sum(new for _, _, new in step)
        states = layer.normal(tokens, hidden).bfloat16()
        positions = torch.cat([torch.arange(done, done + new) for _, done, new in step])
        record = layer.builder.build(0, layer.batch(step))
        layer.buffer.fill_(1 << 30)
        with (
            set_current_vllm_config(layer.config),
            set_forward_context({CACHE_NAME: record}, layer.config),
            torch.no_grad(),
        ):
            found = indexer(states, layer.normal(tokens, rank).bfloat16(), positions, rotary)
        assert found.data_ptr() == layer.buffer.data_ptr()
        _, query, key, weights = calls[-1]
        assert query.dtype == E4M3
        assert weights.dtype == torch.float32
        at = 0
        for req, done, new in step:
            layer.keys[req, done : done + new] = key[at : at + new]
            at += new
        layer.check(step, (states, query, key, weights), 0)


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "pages"])
def test_the_selection_gives_the_same_reasons(
    plugin: Any, cuda: Callable[..., None], make_config: Callable[..., Any], name: str
) -> None:
    cuda()
    _, change, message = REFUSED[name]
    path = members.path_of(members.CUSTOM, "SPARSE_MLA")
    register_backend(AttentionBackendEnum.CUSTOM, path)
    try:
        config = make_config(block_size=PAGE)
        with set_current_vllm_config(config):
            assert get_attn_backend(*ASKED, use_mla=True, use_sparse=True).get_name() == "CUSTOM"
        change(config)
        _cached_get_attn_backend.cache_clear()
        with (
            set_current_vllm_config(config),
            pytest.raises(ValueError, match=f"CUSTOM is not valid.*{message}"),
        ):
            get_attn_backend(*ASKED, use_mla=True, use_sparse=True)
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        _cached_get_attn_backend.cache_clear()


ASKED = (576, torch.bfloat16, "auto")


UNCHANGED = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from attn.integrations.vllm.plugin import register
register()
import vllm.model_executor.layers.sparse_attn_indexer as op
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backends.mla import indexer
assert not [name for name in sys.modules if name.endswith("integrations.vllm.indexer")]
assert op.SparseAttnIndexer.__init__.__code__.co_filename == op.__file__
assert deepseek_v2.SparseAttnIndexer is op.SparseAttnIndexer
cache = deepseek_v2.DeepseekV32IndexerCache.__new__(deepseek_v2.DeepseekV32IndexerCache)
assert cache.get_attn_backend() is indexer.DeepseekV32IndexerBackend
builder = indexer.DeepseekV32IndexerBackend.get_builder_cls()
assert builder is indexer.DeepseekV32IndexerMetadataBuilder
assert not deepseek_v2.SparseAttnIndexer.__name__ in __import__(
    "vllm.model_executor.custom_op", fromlist=["x"]
).op_registry_oot
"""


@pytest.mark.parametrize("has_deep_gemm", [True, False])
def test_registering_changes_nothing_of_vllm_s(fresh: FreshProcesses, has_deep_gemm: bool) -> None:
    """Where DeepGEMM is missing, only the op's constructor is wrapped."""
    given = (
        f"import vllm.utils.import_utils as utils; utils.has_deep_gemm = lambda: {has_deep_gemm}"
    )
    lines = UNCHANGED.splitlines()
    if not has_deep_gemm:
        lines = [line for line in lines if "__init__" not in line]
    fresh.run("\n".join([given, *lines]))
