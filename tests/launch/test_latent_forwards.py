"""Forwards of latent and sparse layers launch few kernels, copy nothing and go past Triton.

Queries are as an engine gives them: the absorbed part lies head by head, so that its strides depend
on the number of tokens, and the rotary part is a slice of a wider tensor.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton.runtime.jit import JITFunction

import attn.kernels.latent.hopper_wide.launch
import attn.kernels.latent.launcher
import attn.kernels.sparse.hopper_launch
import attn.kernels.sparse.joint_lists
import attn.kernels.sparse.launcher
import attn.kernels.sparse.topk_transform
import attn.ops.joint_lists
import attn.ops.sparse_mla
import attn.ops.topk_transform
import builders.latent.triton_mla
import builders.sparse.launches
import builders.sparse.sparse_mla
from attn.impls.base import LayerScales
from attn.impls.latent.triton_mla import TritonMLAImpl
from attn.impls.sparse.sparse_mla import SparseMLAImpl
from builders.batch import CommonAttentionMetadata
from builders.latent.triton_mla import TritonMLAMetadataBuilder
from builders.sparse.sparse_mla import SparseMLAMetadataBuilder
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, Kernels
from specs.kv_cache import MLAAttentionSpec
from tests.launch.test_launcher import Driver, compiled_for, gpu, waived
from tests.tools.gpus import hopper

__all__ = ["gpu"]
RANK, ROPE, NOPE, BLOCK, BLOCKS, TOPK = 512, 64, 128, 64, 64, 2048
MOST_TOKENS = 1024
KERNEL = 4
"""Place of the compiled kernel among the C function's arguments, behind the grid and the stream."""
MODULES: tuple[Any, ...] = (
    attn.kernels.latent.launcher,
    attn.kernels.latent.hopper_wide.launch,
    attn.kernels.sparse.launcher,
    attn.kernels.sparse.hopper_launch,
    attn.kernels.sparse.joint_lists,
    attn.kernels.sparse.topk_transform,
)
KINDS: dict[str, tuple[bool, int, CacheDType, str, int]] = {
    # Whether the layer is sparse, heads, KV cache dtype, kernel, launches.
    "wide": (False, 128, CacheDType.AUTO, "hopper", 2),
    "narrow": (False, 16, CacheDType.AUTO, "hopper", 1),
    "narrow e4m3": (False, 16, CacheDType.FP8, "hopper", 1),
    "portable": (False, 16, CacheDType.AUTO, "triton", 1),
    "sparse wide": (True, 128, CacheDType.FP8_DS_MLA, "auto", 2),
    "sparse narrow": (True, 16, CacheDType.FP8_DS_MLA, "auto", 2),
    "sparse bf16": (True, 16, CacheDType.AUTO, "auto", 2),
    "sparse e4m3": (True, 16, CacheDType.FP8, "auto", 2),
}


class Bench:
    """A layer and its steps, over kernels whose launches a stand-in driver notes."""

    def __init__(self, driver: Driver, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        self.is_sparse, self.heads, self.cache_dtype, kernel, self.count = KINDS[kind]
        numbers = itertools.count(100)
        for module in MODULES:
            for name, known in [*vars(module).items()]:
                if name.endswith("_kernel"):
                    fresh = JITFunction(cast(Any, known).fn, **waived(known))
                    compile_ = self._compiler(fresh, numbers)
                    monkeypatch.setattr(cast(Any, fresh), "_do_compile", compile_)
                    monkeypatch.setattr(module, name, fresh)
        facts = hopper(132)
        for module in (
            *(builders.latent.triton_mla, builders.sparse.sparse_mla),
            *(builders.sparse.launches, attn.ops.sparse_mla),
        ):
            monkeypatch.setattr(module, "device_facts", lambda device: facts)
        monkeypatch.setattr(builders.sparse.sparse_mla, "runs_gluon", lambda device: True)
        monkeypatch.setattr(
            attn.kernels.sparse.hopper_launch, "_multiprocessors", lambda tensors: 132
        )
        for module in (attn.ops.sparse_mla, attn.ops.topk_transform, attn.ops.joint_lists):
            monkeypatch.setattr(module, "has_kernel", lambda rows: True)
        attn.ops.sparse_mla.sparse_launcher.cache_clear()
        attn.kernels.sparse.topk_transform._launcher.cache_clear()
        attn.kernels.sparse.joint_lists._launcher.cache_clear()
        self.spec = MLAAttentionSpec(
            block_size=BLOCK,
            dtype=DType.BFLOAT16,
            cache_dtype=self.cache_dtype,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
        )
        self.config = EngineConfig(
            max_model_len=BLOCK * BLOCKS,
            max_num_seqs=256,
            max_num_batched_tokens=MOST_TOKENS,
            num_heads=self.heads,
            index_topk=TOPK if self.is_sparse else None,
            kernels=Kernels.own("auto", cast(Any, kernel)),
        )
        builder = SparseMLAMetadataBuilder if self.is_sparse else TritonMLAMetadataBuilder
        self.builder: Any = builder(self.spec, ["layer.0"], self.config, "cpu")
        self.indexer = SimpleNamespace(
            topk_indices_buffer=torch.zeros(MOST_TOKENS, TOPK, dtype=torch.int32)
        )
        self.cache = self.spec.layout().allocate(BLOCKS)
        self.layer = LayerScales.of()
        self.impl = self.new_impl()

    def _compiler(self, kernel: Any, numbers: Any) -> Callable[..., Any]:
        def compile_(
            key: Any, signature: Any, device: int, constants: Any, options: Any, *rest: Any
        ) -> Any:
            compiled = compiled_for(self.driver, signature, next(numbers), options)
            kernel.device_caches[device][0][key] = compiled
            return compiled

        return compile_

    def new_impl(self) -> Any:
        sizes = (self.heads, RANK + ROPE, 0.1, 1, None, None, self.cache_dtype.value)
        named: dict[str, Any] = {
            "kv_lora_rank": RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "qk_head_dim": NOPE + ROPE,
            "v_head_dim": NOPE,
            "kv_b_proj": None,
        }
        if self.is_sparse:
            return SparseMLAImpl(*sizes, **named, indexer=self.indexer)
        return TritonMLAImpl(*sizes, **named)

    def step(self, tokens: int) -> Any:
        table = torch.arange(BLOCKS, dtype=torch.int32).repeat(tokens, 1)
        lens = [BLOCK * BLOCKS] * tokens
        batch = CommonAttentionMetadata.from_lengths([1] * tokens, lens, table, BLOCK)
        return self.builder.build(0, batch)

    def prompt(self, tokens: int) -> Any:
        """A step of one prompt, whose last token sees every key of the cache."""
        table = torch.arange(BLOCKS, dtype=torch.int32)[None]
        batch = CommonAttentionMetadata.from_lengths([tokens], [BLOCK * BLOCKS], table, BLOCK)
        return self.builder.build(0, batch)

    def query(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        absorbed = torch.zeros(self.heads, tokens, RANK, dtype=torch.bfloat16).transpose(0, 1)
        whole = torch.zeros(tokens, self.heads, NOPE + ROPE, dtype=torch.bfloat16)
        return absorbed, whole[..., NOPE:]

    def forward(self, impl: Any, query: Any, step: Any, cache: Any = None) -> list[list[Any]]:
        """The launches of a forward as the GPU sees them."""
        self.driver.launches = []
        with torch.inference_mode():
            impl.forward_mqa(query, self.cache if cache is None else cache, step, self.layer)
        every, noted = self.driver.launches, []
        self.are_past_triton = True
        for end in range(1, len(every) + 1):
            self.driver.launches = every[:end]
            noted.append(self.driver.launched())
            self.are_past_triton &= self.driver.was_past_triton
        return noted


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_copies_no_query_and_launches_little(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, kind, monkeypatch)

    def refused(*given: Any, **named: Any) -> Any:
        raise AssertionError("a query is copied, or a row is filled")

    step, query = bench.step(140), bench.query(140)
    for name in ("clone", "contiguous", "copy_", "zero_", "fill_", "__setitem__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    monkeypatch.setattr(torch, "cat", refused)
    for number in range(3):
        launches = bench.forward(bench.impl, query, step)
        assert len(launches) == bench.count
        addresses = [part.data_ptr() for part in query]
        assert any(all(one in words for one in addresses) for words in launches)
        assert bench.are_past_triton == (number > 0)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_other_sizes_need_no_other_variant(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of an absorbed part differ with the number of tokens."""
    bench, known_tiles = Bench(gpu, kind, monkeypatch), []
    for tokens in (160, 144, 192, 137, 161):
        query, step = bench.query(tokens), bench.step(tokens)
        launches = bench.forward(bench.impl, query, step)
        # How sparse rows are cut may depend on their number.
        tile = step.decode.launch.tile if bench.is_sparse else None
        assert bench.are_past_triton == (tile in known_tiles)
        known_tiles.append(tile)
        attn.ops.sparse_mla.sparse_launcher.cache_clear()
        fresh = bench.forward(bench.new_impl(), query, step)
        # A forward makes its own output: compare everything but addresses.
        known = {one for words in (*launches, *fresh) for one in words if _is_address(one)}
        assert [_without(words, known) for words in launches] == [
            _without(words, known) for words in fresh
        ]


def _is_address(word: object) -> bool:
    return isinstance(word, int) and not isinstance(word, bool) and word > 1 << 32


def _without(words: list[Any], addresses: set[int]) -> list[Any]:
    # Numbers of compiled kernels differ from layer to layer too.
    return ["address" if word in addresses else word for word in words[5:] if _hashes(word)]


def _hashes(word: object) -> bool:
    return isinstance(word, int | float | str | type(None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_viewed_anew_is_described_once(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, kind, monkeypatch)
    step, query = bench.step(140), bench.query(140)
    for _ in range(2):
        bench.forward(bench.impl, query, step)
    encoded = len(gpu.encoded)
    for _ in range(3):
        bench.forward(bench.impl, query, step, bench.cache.view(bench.cache.dtype))
        assert bench.are_past_triton
    assert len(gpu.encoded) == encoded


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_a_forward_is_kept_alive(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, kind, monkeypatch)
    step, query = bench.step(140), bench.query(140)
    for _ in range(3):
        bench.forward(bench.impl, query, step)
    kept = [weakref.ref(one) for one in (*query, bench.cache, step)]
    bench.driver.launches = []
    del query, step, bench.cache
    assert [one() for one in kept] == [None] * 4
    for viewed in (bench.impl._viewed, getattr(bench.impl, "_cache_kept", None)):
        assert viewed is None or viewed.views is viewed.made is None


@pytest.mark.parametrize("kind", ["sparse wide", "sparse bf16"])
def test_layers_of_a_step_share_the_launch_that_makes_lists_ready(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, kind, monkeypatch)
    step, query = bench.step(140), bench.query(140)
    first = bench.forward(bench.impl, query, step)[0]
    assert bench.forward(bench.new_impl(), query, step)[0] == first
    # Another buffer of lists, and another block table, have launches of their own.
    bench.indexer.topk_indices_buffer = bench.indexer.topk_indices_buffer.clone()
    buffer = bench.indexer.topk_indices_buffer
    assert buffer.data_ptr() in bench.forward(bench.impl, query, step)[0]
    table = step.decode.block_table.clone()
    moved = bench.builder.update_block_table(step, table, step.slot_mapping)
    assert table.data_ptr() in bench.forward(bench.impl, query, moved)[0]
    assert first[5:] != bench.forward(bench.impl, query, moved)[0][5:]


@pytest.mark.parametrize("kind", ["sparse narrow", "sparse bf16"])
def test_layers_of_a_prompt_share_the_launch_that_joins_lists(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, kind, monkeypatch)
    if kind == "sparse narrow":
        # Rows that are converted are joined where keys are few beside a list.
        bench.builder._joint._reach = BLOCK * BLOCKS
    step, query = bench.prompt(600), bench.query(600)
    assert step.prefill_rows.joint is not None
    for number in range(3):
        launches = bench.forward(bench.impl, query, step)
        assert len(launches) == 2
        assert bench.are_past_triton == (number > 0)
    assert bench.forward(bench.new_impl(), query, step)[0] == launches[0]
    # Another buffer of lists, and another step, have launches of their own.
    bench.indexer.topk_indices_buffer = bench.indexer.topk_indices_buffer.clone()
    buffer = bench.indexer.topk_indices_buffer
    assert buffer.data_ptr() in bench.forward(bench.impl, query, step)[0]
    other, query = bench.prompt(700), bench.query(700)
    launches = bench.forward(bench.impl, query, other)
    assert bench.are_past_triton
    assert other.prefill_rows.block_table.data_ptr() in launches[0]
    assert 700 in launches[0]


def changed(bench: Bench) -> list[tuple[Any, Any]]:
    """Queries and steps that differ in what launches depend on."""
    step, query = bench.step(140), bench.query(140)
    whole = torch.cat(query, -1)
    count = 140 * bench.heads * RANK
    odd = torch.zeros(count + 1, dtype=torch.bfloat16)[1:].view(140, bench.heads, RANK)
    wide = torch.zeros(140, 2 * bench.heads, RANK, dtype=torch.bfloat16)[:, : bench.heads]
    given = [(query, step), (whole, step), ((wide, query[1]), step), ((odd, query[1]), step)]
    if not bench.is_sparse:
        table = step.decode.block_table
        gaps = torch.zeros(140, 2 * BLOCKS, dtype=torch.int32)[:, :BLOCKS]
        for other in (table.long(), table.clone(), gaps):
            given.append((query, replace(step, decode=replace(step.decode, block_table=other))))
    return given


@pytest.mark.parametrize("kind", KINDS)
def test_launches_are_those_of_a_layer_that_never_ran(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, dice = Bench(gpu, kind, monkeypatch), random.Random(kind)
    expected = []
    for query, step in changed(bench):
        attn.ops.sparse_mla.sparse_launcher.cache_clear()
        expected.append((query, step, bench.forward(bench.new_impl(), query, step)))
    attn.ops.sparse_mla.sparse_launcher.cache_clear()
    bench.impl = bench.new_impl()
    for _ in range(60):
        query, step, fresh = dice.choice(expected)
        launches = bench.forward(bench.impl, query, step)
        # Outputs, and copies of queries that are not aligned, are made anew in every forward.
        parts = query if isinstance(query, tuple) else (query,)
        given = {one.data_ptr() for one in (*parts, step.decode.block_table, bench.cache)}
        made = {one for words in (*launches, *fresh) for one in words if _is_address(one)} - given
        assert [_without(words, made) for words in launches] == [
            _without(words, made) for words in fresh
        ]
        # Triton compiled the kernel for these types.
        assert [words[KERNEL] for words in launches] == [words[KERNEL] for words in fresh]
