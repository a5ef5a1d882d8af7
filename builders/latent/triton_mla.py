"""Metadata of TRITON_MLA: absorbed decode rows with a split-KV plan, expanded prefill in chunks.

Nothing is read back from the device: grids, and the number of context chunks, come from host
bounds; lengths stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields, split_decodes_and_prefills
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_limits
from builders.checks.kernel_limits import BLOCK_MULTIPLE, HEAD_SIZES, check_dtypes
from builders.checks.masks import refuse_dcp
from builders.dense.choice import (
    LayerAsks,
)
from builders.dense.record import TritonAttentionMetadata
from builders.device import device_facts, runs_gluon
from builders.latent.choice import latent_kernel_of
from builders.latent.prefill import PAGE, ExpandedPrefill, LatentPrefill, with_block_table
from builders.latent.tiles import LatentShape, latent_tile
from builders.splitkv.planner import (
    PlannerOptions,
    SplitPlanner,
)
from builders.splitkv.record import (
    SplitLimits,
    VisibleKeys,
)
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    SplitTile,
)
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.devices import DeviceKind, GpuFacts
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, EngineConfig
from specs.kv_cache import AnyKVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec
from specs.positions import cut_window

CACHE_DTYPES = (
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E4M3,
)
_LatentSpec = MLAAttentionSpec | SlidingWindowMLASpec


@dataclass(frozen=True)
class LatentGroup:
    """What a group's steps are planned for: scratch and chunks are as large as that needs."""

    rank: int
    rope_size: int
    window: int | None
    """Keys that a token sees, itself included: others are left out. None where all are there."""


@dataclass
class TritonMLAMetadata(AttentionMetadata):
    """A step of latent attention: decode rows first. None means that a phase has no rows."""

    num_actual_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    """Padding included, where the batch counts it."""
    num_covered_tokens: int
    """Of these, what requests own, from the first on: the decode kernel writes their rows."""
    num_prefill_tokens: int
    decode: TritonAttentionMetadata | None
    """Rows of up to ``reorder_batch_threshold`` tokens, over the latent cache."""
    prefill: LatentPrefill | None
    group: LatentGroup


class TritonMLAMetadataBuilder(AttentionMetadataBuilder[TritonMLAMetadata]):
    """One decode plan per step, shared by all layers of the group."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            kv_cache_spec: the group's spec, :class:`specs.kv_cache.MLAAttentionSpec` or
                :class:`specs.kv_cache.SlidingWindowMLASpec`.
            layer_names: layers of the group.
            vllm_config: engine limits; ``num_heads`` is needed.
            device: where the records' tensors live.

        Raises:
            ValueError: ``num_heads`` is missing; a width, block size or dtype that no kernel takes;
                a bound of the workspace that is smaller than one chunk; ``kernels.latent.decode``
                is one that does not serve the group; decode context parallelism.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec = kv_cache_spec
        _check_support(spec, vllm_config)
        assert isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
        window = spec.sliding_window if isinstance(spec, SlidingWindowMLASpec) else None
        self.window = cut_window(window)
        self._group = LatentGroup(spec.kv_lora_rank, spec.qk_rope_head_dim, self.window)
        self.gpu = device_facts(self.device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.buffers = GraphBuffers(self.device)
        limits = SplitLimits(
            vllm_config.max_num_seqs,
            vllm_config.max_num_batched_tokens,
            vllm_config.max_model_len,
            self.window,
        )
        self.planner = decode_planner(spec, vllm_config, self.gpu, limits, self.buffers)
        self.expanded = ExpandedPrefill(spec, vllm_config, self.gpu, self.buffers, self.window)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMLAMetadata:
        """The step's record; the batch, ours or vLLM's own, is not written.

        Raises:
            NotImplementedError: a batch that is not causal.
            ValueError: a batch beyond the engine's limits.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        ignored = ("dcp_local_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens")
        refuse_fields(batch, "TRITON_MLA", *ignored)
        if isinstance(batch.causal, torch.Tensor) or not batch.causal:
            raise NotImplementedError(f"TRITON_MLA supports causal=True, got {batch.causal}")
        found = split_decodes_and_prefills(batch, self.reorder_batch_threshold or 1)
        return TritonMLAMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_decodes=found.num_decodes,
            num_prefills=found.num_prefills,
            num_decode_tokens=found.num_decode_tokens,
            num_covered_tokens=int(batch.query_start_loc_cpu[found.num_decodes]),
            num_prefill_tokens=found.num_prefill_tokens,
            decode=self._decode(batch, found.num_decodes) if found.num_decodes else None,
            prefill=self.expanded.plan(batch, found.num_decodes) if found.num_prefills else None,
            group=self._group,
            **self.pages,
        )

    def update_draft_decode_metadata(self, metadata: TritonMLAMetadata) -> None:
        """Plan the record's decodes anew from its lengths as they are now; safe to capture."""
        step = metadata.decode
        if step is not None:
            debug_limits(step.seq_lens, self.step_limits)
            visible = VisibleKeys(self.window)
            self.planner.fill(step.query_start_loc, step.seq_lens, visible, is_causal=True)

    def warm_up_steps(self) -> Iterator[tuple[CommonAttentionMetadata, TritonMLAMetadata]]:
        """One small step of every kind that kernels differ in, with its record.

        A decode; then, where the limits allow, a prefill without context, with one chunk of it, and
        with two. All of it reads block 0 and writes nowhere; chunks are as small as can be.
        """
        config, block_size = self.vllm_config, self.kv_cache_spec.block_size
        width = cdiv(config.max_model_len, block_size)
        table = torch.zeros((1, width), dtype=torch.int32, device=self.device)
        long = (self.reorder_batch_threshold or 1) + 1
        steps = [(1, 0), *((long, chunks * PAGE) for chunks in (0, 1, 2))]
        tokens = self.expanded.workspace_tokens
        self.expanded.workspace_tokens = PAGE
        try:
            for count, context in steps:
                most = min(config.max_num_batched_tokens, config.max_model_len - context)
                if count > most:
                    continue
                batch = CommonAttentionMetadata.from_lengths(
                    [count], [context + count], table, block_size
                )
                unwritten = torch.full_like(batch.slot_mapping, -1)
                batch = batch.replace(slot_mapping=unwritten)
                # Whatever a wrapper of an engine's has put over it.
                yield batch, TritonMLAMetadataBuilder.build(self, 0, batch)
        finally:
            self.expanded.workspace_tokens = tokens

    def _decode(self, batch: CommonAttentionMetadata, decodes: int) -> TritonAttentionMetadata:
        starts, lens = batch.query_start_loc[: decodes + 1], batch.seq_lens[:decodes]
        self.planner.fill(starts, lens, VisibleKeys(self.window), is_causal=True)
        return TritonAttentionMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_reqs=decodes,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=batch.block_table_tensor[:decodes],
            split=self.planner.split(),
            prefill=None,
            **self.pages,
        )

    def _set_block_table(self, metadata: TritonMLAMetadata, block_table: torch.Tensor) -> None:
        slots, decodes = metadata.slot_mapping, metadata.num_decodes
        if metadata.decode is not None:
            table = block_table[:decodes]
            metadata.decode = replace(metadata.decode, slot_mapping=slots, block_table=table)
        if metadata.prefill is not None:
            table = block_table[decodes : decodes + metadata.num_prefills]
            metadata.prefill = with_block_table(metadata.prefill, table, slots)


def decode_planner(
    spec: _LatentSpec,
    config: EngineConfig,
    gpu: GpuFacts,
    limits: SplitLimits,
    buffers: GraphBuffers,
) -> SplitPlanner:
    """The planner of a group's decodes by the library's own kernels.

    Args:
        spec: the group's.
        config: engine limits; ``num_heads`` is needed.
        gpu: what runs them.
        limits: what the buffers must hold, the window included.
        buffers: of the builder.

    Raises:
        ValueError: ``kernels.latent.decode`` is one that does not serve the group.
    """
    heads, tokens = config.num_heads, config.max_decode_query_len
    assert heads is not None
    shape = DenseShape(
        num_heads=heads,
        num_kv_heads=1,
        head_size=spec.kv_lora_rank + spec.qk_rope_head_dim,
        head_size_v=spec.kv_lora_rank,
        itemsize=spec.dtype.itemsize,
        stored_bits=spec.cache_dtype.element(spec.dtype).itemsize * 8,
    )
    tile = _hopper_tile(shape, gpu.kind, spec, config, buffers.device)
    options = PlannerOptions(
        latent=None if tile is not None else _latent_tile(spec, gpu, heads, tokens),
        hopper_decode=tile,
        requires_hopper_decode=config.kernels.latent.decode is DecodeKernel.HOPPER,
    )
    return SplitPlanner(shape, gpu, limits, tokens, buffers, options)


def _hopper_tile(
    shape: DenseShape,
    kind: DeviceKind,
    spec: _LatentSpec,
    config: EngineConfig,
    device: torch.device,
) -> HopperDecodeTile | None:
    """The tile of the decode kernel for Hopper, where the group's layers take it."""
    wanted, tokens = config.kernels.latent.decode, config.max_decode_query_len
    if wanted is DecodeKernel.AUTO and not runs_gluon(device):
        return None
    asks = LayerAsks(
        batch_invariant=config.batch_invariant,
        is_local=isinstance(spec, SlidingWindowMLASpec),
        query=spec.dtype,
        cache_dtype=spec.cache_dtype,
        # Of blocks; an engine's buffer is aligned.
        alignments=(("key", math.gcd(16, spec.page_size_bytes)),),
    )
    return latent_kernel_of(shape, kind, spec.block_size, tokens, asks, wanted)[0]


def _latent_tile(spec: _LatentSpec, gpu: GpuFacts, heads: int, tokens: int) -> SplitTile:
    """The decode tile of the group's layers."""
    stored = spec.cache_dtype.element(spec.dtype)
    # Of two 16-bit types neither holds the other's range and precision: fp32 does.
    mixed = stored.itemsize > 1 and stored is not spec.dtype
    shape = LatentShape(
        num_heads=heads,
        rank=spec.kv_lora_rank,
        rope_size=spec.qk_rope_head_dim,
        itemsize=4 if mixed else spec.dtype.itemsize,
        # A tile of the other type is converted as a whole.
        stored_bits=32 if mixed else 8 * stored.itemsize,
    )
    return latent_tile(shape, gpu, tokens)


def _check_support(spec: Any, config: EngineConfig) -> None:
    """Everything that a spec can ask of the kernels is checked."""
    if not isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        raise ValueError(
            "kv_cache_spec must be MLAAttentionSpec or SlidingWindowMLASpec, got "
            f"{type(spec).__name__}"
        )
    if config.num_heads is None:
        raise ValueError("vllm_config.num_heads is needed by TRITON_MLA, got None")
    refuse_dcp(config, "TRITON_MLA")
    check_latent_dtypes(spec.dtype.torch, spec.cache_dtype)
    check_latent_widths(spec.kv_lora_rank, spec.qk_rope_head_dim)
    if spec.block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size must be a multiple of {BLOCK_MULTIPLE}, got {spec.block_size}"
        )


def check_latent_widths(rank: int, rope_size: int) -> None:
    """Kernels take rows of these widths.

    Raises:
        ValueError: they do not.
    """
    if rank not in HEAD_SIZES or rope_size not in HEAD_SIZES:
        raise ValueError(
            f"kv_lora_rank and qk_rope_head_dim must be multiples of {HEAD_SIZES.step} from "
            f"{HEAD_SIZES.start} to {HEAD_SIZES.stop - 1}, got {rank} and {rope_size}"
        )


def check_latent_dtypes(model: torch.dtype | None, cache: CacheDType) -> None:
    """Model and KV cache dtype are such that the kernels take them; None where not known yet.

    Raises:
        ValueError: one is not.
    """
    check_dtypes(model, cache, CACHE_DTYPES)
