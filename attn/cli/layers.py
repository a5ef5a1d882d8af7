"""Layers of a replay: each has a backend's triple, a cache, inputs, and tokens to check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attn.backends.base import AttentionBackend
from attn.cli.check import (
    TokenCheck,
    better_than_listed,
    dense_cache_rounding,
    fp8_query,
    latent_cache_rounding,
    visible_positions,
)
from attn.cli.tensors import LayerTensors, TensorSource
from attn.impls.base import LayerScales
from attn.impls.sparse.indexer import IndexInputs, SparseIndexer
from attn.ops.mla import mla_attention
from builders.sparse.indexer import IndexerMetadata
from specs.attention import AttentionType
from specs.dtypes import KVQuantMode
from specs.kv_cache import AnyKVCacheSpec, IndexerSpec
from specs.model import LayerGeometry


@dataclass
class Row:
    """One request's new tokens in a step."""

    request_id: int
    tokens: slice
    positions: torch.Tensor
    """``[T_row]`` int64 position of each new token."""


@dataclass
class StepInputs:
    """The tensors of one layer in one step."""

    rows: Sequence[Row]
    query: torch.Tensor
    """``[T, H, D]`` queries of the new tokens."""
    tensors: list[LayerTensors] = field(default_factory=list)
    """Keys and values of each row's request."""
    read_query: torch.Tensor | None = None
    """``[T, H, D]`` queries as rounded by kernels that compute in fp8; None where the cache is not
    per-tensor fp8."""
    index: tuple[torch.Tensor, torch.Tensor] | None = None
    """Indexer queries ``[T, Hi, Di]`` and head weights ``[T, Hi]`` of a sparse layer."""
    index_metadata: IndexerMetadata | None = None
    """The indexer's record of the step."""

    def new(self, side: str) -> torch.Tensor:
        """``[T, ...]`` new rows of this step, from each request's ``key``, ``value`` or
        ``index_key``.
        """
        parts = zip(self.rows, self.tensors, strict=True)
        return torch.cat([getattr(tensors, side)[row.positions] for row, tensors in parts])


@dataclass(frozen=True)
class LayerSetup:
    """The parts that a replay layer is made of."""

    geometry: LayerGeometry
    index: int
    """Number of the layer in the model."""
    spec: AnyKVCacheSpec
    """Spec of the layer's cache."""
    backend: type[AttentionBackend]
    """Backend of the triple whose impl the layer has."""
    num_blocks: int
    """Blocks of its cache, the null block included."""
    source: TensorSource
    """Where its tensors come from."""


class ReplayLayer(ABC):
    """One attention layer: a triple's impl, a cache filled with NaN, and random inputs."""

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate the cache and make the impl."""
        self.geometry = setup.geometry
        self.index = setup.index
        self.spec = setup.spec
        self.source = setup.source
        device = setup.source.device
        # Values up to 5 then use the range of e4m3 well.
        self.scales = LayerScales.of(k=0.02, v=0.015, device=device)
        self.kept: dict[int, LayerTensors] = {}
        # Poisoned with NaN: a slot read before it is written shows.
        layout = setup.backend.kv_cache_layout(setup.spec)
        self.cache = layout.allocate(setup.num_blocks, device, 0xFF)
        self.impl: Any = self._make_impl(setup.backend)

    @abstractmethod
    def _make_impl(self, backend: type[AttentionBackend]) -> Any:
        """The triple's impl for this layer."""

    @abstractmethod
    def run(self, inputs: StepInputs, metadata: Any, output: torch.Tensor) -> None:
        """Write the cache, then attend; the replay times this method."""

    @abstractmethod
    def token_check(self, inputs: StepInputs, row: int, offset: int) -> TokenCheck:
        """The check of token ``offset`` of a row."""

    @property
    def output_size(self) -> int:
        """Elements of a head's output."""
        return self.geometry.v_size

    def inputs(self, rows: Sequence[Row], lengths: Sequence[int], step: int) -> StepInputs:
        """Make a step's tensors; a request's keys and values are made once and kept."""
        generator = self.source.generator(1, self.index, step)
        tensors, queries = [], []
        for row in rows:
            kept = self.kept.get(row.request_id)
            if kept is None:
                kept = self.source.request(
                    self.geometry, self.index, row.request_id, lengths[row.request_id]
                )
                self.kept[row.request_id] = kept
            tensors.append(kept)
            queries.append(self.source.queries(self.geometry, kept, row.positions, generator))
        index = self._index_inputs(sum(len(q) for q in queries), generator)
        return StepInputs(rows, torch.cat(queries), tensors, index=index)

    def _index_inputs(
        self, num_tokens: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def forget(self, request_ids: set[int]) -> None:
        """Drop the tensors of finished requests."""
        for request_id in request_ids & self.kept.keys():
            del self.kept[request_id]

    def _common_arguments(self, head_size: int, num_kv_heads: int) -> tuple[Any, ...]:
        geometry = self.geometry
        slopes = None
        if geometry.use_alibi:
            slopes = self.alibi_slopes()
        return (
            geometry.num_heads,
            head_size,
            geometry.scale,
            num_kv_heads,
            slopes,
            geometry.sliding_window,
            self.spec.cache_dtype.value,
            geometry.logits_soft_cap,
            AttentionType.DECODER,
            None,
        )

    def alibi_slopes(self) -> torch.Tensor:
        """``[H]``: the geometric series of the ALiBi paper, 2^(-8 i / H)."""
        heads = torch.arange(1, self.geometry.num_heads + 1, device=self.source.device)
        return torch.exp2(-8.0 * heads / self.geometry.num_heads)


class DenseReplayLayer(ReplayLayer):
    """A layer of dense attention: MHA, GQA or MQA."""

    def _make_impl(self, backend: type[AttentionBackend]) -> Any:
        geometry = self.geometry
        extras: dict[str, Any] = {}
        self.sinks: torch.Tensor | None = None
        if geometry.has_sinks:
            generator = self.source.generator(2, self.index)
            self.sinks = 4 + self.source.normal(generator, geometry.num_heads)
            extras["sinks"] = self.sinks
        if geometry.attention_chunk_size is not None:
            extras["attention_chunk_size"] = geometry.attention_chunk_size
        if geometry.v_size != geometry.head_size:
            extras["head_size_v"] = geometry.v_size
        arguments = self._common_arguments(geometry.head_size, geometry.num_kv_heads)
        impl_cls: Any = backend.get_impl_cls()
        return impl_cls(*arguments, **extras)

    def run(self, inputs: StepInputs, metadata: Any, output: torch.Tensor) -> None:
        """Write the cache, then attend."""
        key, value = inputs.new("key"), inputs.new("value")
        self.impl.do_kv_cache_update(self.scales, key, value, self.cache, metadata.slot_mapping)
        self.impl.forward(self.scales, inputs.query, key, value, self.cache, metadata, output)
        if self.spec.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR:
            inputs.read_query = self._read_query(inputs.query, metadata)

    def _read_query(self, query: torch.Tensor, metadata: Any) -> torch.Tensor:
        """Queries rounded to fp8 for the tokens of kernels that compute in fp8; NaN for others."""
        read = torch.full(query.shape, float("nan"), device=query.device)
        for part in (getattr(metadata, "decode", None), getattr(metadata, "prefill", None)):
            rule = getattr(part, "rule", None)
            if part is None or rule is None or not rule.computes_fp8:
                continue
            tokens = slice(part.first_token, part.first_token + part.num_tokens)
            scale = float(self.scales._q_scale) if rule.query_is_fp8 else 1.0
            read[tokens] = fp8_query(query[tokens], scale)
        return read

    def token_check(self, inputs: StepInputs, row: int, offset: int) -> TokenCheck:
        """What is needed to judge token ``offset`` of a row."""
        read = inputs.read_query
        read = None if read is None else read[inputs.rows[row].tokens][offset]
        position = int(inputs.rows[row].positions[offset])
        first, last = visible_positions(self.geometry, position)
        key = inputs.tensors[row].key[first : last + 1]
        value = inputs.tensors[row].value[first : last + 1]
        cache_dtype = self.spec.cache_dtype
        key_rounding = dense_cache_rounding(cache_dtype, self.scales._k_scale)
        value_rounding = dense_cache_rounding(cache_dtype, self.scales._v_scale)
        return TokenCheck(
            query=inputs.query[inputs.rows[row].tokens][offset],
            key=key,
            value=value,
            distance=torch.arange(first, last + 1, device=key.device) - position,
            scale=self.geometry.scale,
            soft_cap=self.geometry.logits_soft_cap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes() if self.geometry.use_alibi else None,
            read_query=None if read is None or bool(read.isnan().any()) else read,
            stored_key=None if key_rounding is None else key_rounding(key),
            stored_value=None if value_rounding is None else value_rounding(value),
        )


@dataclass
class _UpProjection:
    """A stand-in for a model's ``kv_b_proj``."""

    weight: torch.Tensor
    """``[H * (P + V), L]`` up-projection of keys and values."""


class LatentReplayLayer(ReplayLayer):
    """A layer of multi-head latent attention over all cached tokens."""

    def _make_impl(self, backend: type[AttentionBackend]) -> Any:
        mla = self.geometry.mla
        assert mla is not None
        rank, heads = mla.kv_lora_rank, self.geometry.num_heads
        generator = self.source.generator(2, self.index)
        width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        weight = self.source.normal(generator, width, rank) * rank**-0.5
        impl_cls: Any = backend.get_impl_cls()
        impl = impl_cls(
            *self._common_arguments(mla.latent_size, 1),
            q_lora_rank=mla.q_lora_rank,
            kv_lora_rank=rank,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            qk_head_dim=mla.qk_head_dim,
            v_head_dim=mla.v_head_dim,
            kv_b_proj=_UpProjection(weight.to(self.source.dtype)),
            indexer=self._make_indexer(),
        )
        impl.process_weights_after_loading(self.source.dtype)
        return impl

    def _make_indexer(self) -> Any:
        return None

    def run(self, inputs: StepInputs, metadata: Any, output: torch.Tensor) -> None:
        """Write the latent rows, then attend."""
        mla = self.geometry.mla
        assert mla is not None
        rows = inputs.new("key")[:, 0]
        kv_c, k_pe = rows[:, : mla.kv_lora_rank], rows[:, mla.kv_lora_rank :]
        dtype = self.spec.cache_dtype.value
        scale, slots = self.scales._k_scale, metadata.slot_mapping
        self.impl.do_kv_cache_update(kv_c, k_pe, self.cache, slots, dtype, scale)
        given = (inputs.query, kv_c, k_pe, self.cache, metadata, output, self._index(inputs))
        mla_attention(self.impl, self.scales, *given)

    def _index(self, inputs: StepInputs) -> IndexInputs | None:
        """Inputs of the layer's indexer; None for a layer without one."""
        return None

    def token_check(self, inputs: StepInputs, row: int, offset: int) -> TokenCheck:
        """The check of a token in latent space: absorbed query, latent rows as keys and values."""
        mla = self.geometry.mla
        assert mla is not None
        position = int(inputs.rows[row].positions[offset])
        listed = self._listed(inputs, row, offset, position)
        key = inputs.tensors[row].key[listed]
        query = inputs.query[inputs.rows[row].tokens][offset].double()
        q_nope, q_pe = query[:, : mla.qk_nope_head_dim], query[:, mla.qk_nope_head_dim :]
        absorbed = torch.einsum("hp,lhp->hl", q_nope, self.impl.W_UK.double())
        rounding = latent_cache_rounding(
            self.spec.cache_dtype, self.scales._k_scale, mla.kv_lora_rank
        )
        stored = None if rounding is None else rounding(key[:, 0])[:, None]
        return TokenCheck(
            query=torch.cat([absorbed, q_pe], dim=-1),
            key=key,
            value=key[..., : mla.kv_lora_rank],
            distance=listed - position,
            scale=self.geometry.scale,
            stored_key=stored,
            stored_value=None if stored is None else stored[..., : mla.kv_lora_rank],
            project=self.impl.W_UV,
        )

    def _listed(self, inputs: StepInputs, row: int, offset: int, position: int) -> torch.Tensor:
        return torch.arange(position + 1, device=self.source.device)


class SparseReplayLayer(LatentReplayLayer):
    """A layer of top-k sparse latent attention with an indexer of its own."""

    def __init__(self, setup: LayerSetup) -> None:
        """Allocate the indexer's pages too, which follow the latent cache's blocks."""
        indexer, device = setup.geometry.indexer, setup.source.device
        assert indexer is not None
        layout = index_spec(setup.geometry, setup.spec).layout()
        self.index_cache = layout.allocate(setup.num_blocks, device, 0xFF)
        lists = torch.empty((0, indexer.index_topk), dtype=torch.int32)
        self.indexer = SparseIndexer(lists.to(device))
        super().__init__(setup)

    def _make_indexer(self) -> Any:
        return self.indexer

    def _index_inputs(
        self, num_tokens: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        indexer = self.geometry.indexer
        assert indexer is not None
        heads, size = indexer.index_n_heads, indexer.index_head_dim
        query = self.source.normal(generator, num_tokens, heads, size).to(self.source.dtype)
        return query, self.source.normal(generator, num_tokens, heads)

    def _index(self, inputs: StepInputs) -> IndexInputs:
        assert inputs.index is not None
        assert inputs.index_metadata is not None
        lists, tokens = self.indexer.topk_indices_buffer, len(inputs.query)
        if len(lists) < tokens:
            self.indexer.topk_indices_buffer = lists.new_empty(tokens, lists.shape[1])
        query, weights = inputs.index
        key = inputs.new("index_key")
        return IndexInputs(query, key, weights, self.index_cache, inputs.index_metadata)

    def _listed(self, inputs: StepInputs, row: int, offset: int, position: int) -> torch.Tensor:
        listed = _attended(self.indexer, inputs, row, offset)
        expected = min(position + 1, self.indexer.topk_indices_buffer.shape[1])
        distinct = len(set(listed.tolist()))
        if distinct != expected or int(listed.max()) > position:
            raise ValueError(
                f"the indexer must list {expected} distinct positions up to {position}, "
                f"got {distinct} up to {int(listed.max())}"
            )
        assert inputs.index is not None
        query, weights = (part[inputs.rows[row].tokens][offset] for part in inputs.index)
        keys = inputs.tensors[row].index_key
        assert keys is not None
        missed = better_than_listed(query, weights, keys[: position + 1], listed)
        if missed is not None:
            raise ValueError(
                f"the indexer must list the best of positions up to {position}, and left out "
                f"{missed}"
            )
        return listed


class SharedListReplayLayer(LatentReplayLayer):
    """A layer of top-k sparse latent attention over the lists that an earlier layer makes."""

    def __init__(self, setup: LayerSetup, maker: ReplayLayer) -> None:
        """
        Args:
            setup: what it is made of.
            maker: the layer whose lists it attends; its step must run first.
        """
        assert isinstance(maker, SparseReplayLayer)
        self.indexer = maker.indexer
        super().__init__(setup)

    def _make_indexer(self) -> Any:
        return self.indexer

    def _listed(self, inputs: StepInputs, row: int, offset: int, position: int) -> torch.Tensor:
        return _attended(self.indexer, inputs, row, offset)


def _attended(indexer: SparseIndexer, inputs: StepInputs, row: int, offset: int) -> torch.Tensor:
    """Positions in the step's list for token ``offset`` of a row."""
    listed = indexer.topk_indices_buffer[inputs.rows[row].tokens][offset].long()
    return listed[listed >= 0]


def index_spec(geometry: LayerGeometry, spec: AnyKVCacheSpec) -> IndexerSpec:
    """The spec of a sparse layer's indexer cache, whose pages follow the latent cache's blocks."""
    assert geometry.indexer is not None
    return IndexerSpec(block_size=spec.block_size, index_head_dim=geometry.indexer.index_head_dim)


def make_layer(setup: LayerSetup, maker: ReplayLayer | None = None) -> ReplayLayer:
    """The replay layer for a kind of attention.

    Args:
        setup: what it is made of.
        maker: the layer whose lists a sparse layer without an indexer attends.
    """
    geometry = setup.geometry
    if geometry.shared_index_topk is not None:
        assert maker is not None
        return SharedListReplayLayer(setup, maker)
    if geometry.indexer is not None:
        return SparseReplayLayer(setup)
    return DenseReplayLayer(setup) if geometry.mla is None else LatentReplayLayer(setup)
