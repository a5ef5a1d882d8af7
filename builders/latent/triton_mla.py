"""The metadata builder of TRITON_MLA.

Decodes run in latent space over a split-KV plan; prefills are expanded, in chunks of context. For
every step one kernel plans the decodes on the device. Nothing is read back from the device: grids
and the number of context chunks follow from host bounds, and lengths stay on the device.
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
from builders.dense.choice import (
    LayerRequirements,
)
from builders.dense.record import TritonAttentionMetadata
from builders.device import device_facts, runs_gluon
from builders.latent.choice import latent_kernel_of
from builders.latent.prefill import PAGE, ExpandedPrefill, LatentPrefill, with_block_table
from builders.latent.ranks import RankDecode, RankRows
from builders.latent.rows import leading
from builders.latent.tiles import LatentShape, latent_tile
from builders.splitkv.planner import (
    PlannerOptions,
    SplitPlanner,
)
from builders.splitkv.record import (
    SplitLimits,
    VisibleKeys,
)
from builders.splitkv.stripe import Stripe
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
"""Types of a latent cache's elements that the kernels read."""
_LatentSpec = MLAAttentionSpec | SlidingWindowMLASpec


@dataclass(frozen=True)
class LatentGroup:
    """The facts of a KV cache group that its steps are planned for, and their scratch sized for."""

    rank: int
    """Elements of the latent."""
    rope_size: int
    """Elements of the rotary part."""
    window: int | None
    """Keys that a token sees, itself included; plans leave out all others. None for all keys."""
    ranks: int = 1
    """Ranks that share the keys (DCP): decodes attend with the query heads of all of them."""


@dataclass
class TritonMLAMetadata(AttentionMetadata):
    """A step of latent attention for TRITON_MLA's kernels: decodes come first, then prefills."""

    num_actual_tokens: int
    """Tokens to compute, padding included."""
    num_decodes: int
    """Leading requests, each of up to ``reorder_batch_threshold`` new tokens."""
    num_prefills: int
    """Requests behind the decodes."""
    num_decode_tokens: int
    """Tokens of the decodes, padding included where the batch counts it."""
    num_covered_tokens: int
    """Leading tokens that requests own, without padding: the decode kernel writes their rows."""
    num_prefill_tokens: int
    """Tokens of the prefills, padding included where the batch counts it."""
    decode: TritonAttentionMetadata | None
    """The step of the decodes over the latent cache; None without any."""
    prefill: LatentPrefill | None
    """The plan of the prefills; None without any."""
    group: LatentGroup
    """The group that the step was planned for."""
    query_start_loc: torch.Tensor | None = None
    """``[R + 1]`` int32, device: first token of each request, and the end of the last. None for a
    step that was not built from a batch."""
    ranked: RankDecode | None = None
    """Under DCP, the decodes as the decode kernel takes them, while ``decode`` has the batch's
    requests with the keys that this rank keeps of each. None without DCP, or without decodes."""


class TritonMLAMetadataBuilder(AttentionMetadataBuilder[TritonMLAMetadata]):
    """Builds records of latent attention; one decode plan per step serves all layers of a group."""

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
            vllm_config: limits and settings of the engine; ``num_heads`` is needed.
            device: where the records' tensors live.

        Raises:
            ValueError: ``num_heads`` is missing; no kernel takes the spec's widths, block size or
                dtype; the bound of the workspace is smaller than one chunk;
                ``kernels.latent.decode`` names a kernel that does not serve the group; the engine
                has decode context parallelism (DCP) and ranks cannot share the group's keys, or
                ``num_heads`` is not a multiple of the ranks.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec = kv_cache_spec
        _check_support(spec, vllm_config)
        assert isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
        window = spec.sliding_window if isinstance(spec, SlidingWindowMLASpec) else None
        self.window, stripe = cut_window(window), Stripe.of(vllm_config)
        widths = spec.kv_lora_rank, spec.qk_rope_head_dim
        self._group = LatentGroup(*widths, self.window, 1 if stripe is None else stripe.size)
        self.gpu = device_facts(self.device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.buffers = GraphBuffers(self.device)
        self._ranks: RankRows | None = None
        reqs, keys = vllm_config.max_num_seqs, vllm_config.max_model_len
        tokens = vllm_config.max_decode_query_len
        if stripe is not None:
            self._ranks = RankRows(stripe, vllm_config, spec.block_size, self.buffers)
            reqs, keys, tokens = self._ranks.max_rows, self._ranks.max_kv_len, 1
        limits = SplitLimits(reqs, vllm_config.max_num_batched_tokens, keys, self.window)
        self.planner = decode_planner(spec, vllm_config, self.gpu, limits, self.buffers, tokens)
        self.expanded = ExpandedPrefill(
            spec, vllm_config, self.gpu, self.buffers, self.window, stripe
        )

    @property
    def phase_kernels(self) -> dict[str, str]:
        """See the base class."""
        tile = self.planner.hopper_decode
        decode = "triton" if tile is None else "hopper"
        if tile is not None and tile.rounds_queries:
            decode += " with queries rounded to e4m3"
        return {"decode": decode, "prefill": self.expanded.kernel}

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonMLAMetadata:
        """Build the step's record, see the base class.

        Raises:
            NotImplementedError: the batch is not causal, or asks for a mask that the backend does
                not compute.
            ValueError: the batch exceeds the engine's limits.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        refuse_fields(batch, "TRITON_MLA", "mm_req_doc_ranges", "rswa_prefix_lens")
        if self._ranks is None:
            refuse_fields(batch, "TRITON_MLA", "dcp_local_seq_lens")
        if isinstance(batch.causal, torch.Tensor) or not batch.causal:
            raise NotImplementedError(f"TRITON_MLA supports causal=True, got {batch.causal}")
        found = split_decodes_and_prefills(batch, self.reorder_batch_threshold or 1)
        covered = int(batch.query_start_loc_cpu[found.num_decodes])
        decode, ranked = None, None
        if found.num_decodes:
            decode, ranked = self._decode(batch, found.num_decodes, covered)
        return TritonMLAMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_decodes=found.num_decodes,
            num_prefills=found.num_prefills,
            num_decode_tokens=found.num_decode_tokens,
            num_covered_tokens=covered,
            num_prefill_tokens=found.num_prefill_tokens,
            decode=decode,
            prefill=self.expanded.plan(batch, found.num_decodes) if found.num_prefills else None,
            group=self._group,
            query_start_loc=leading(batch.query_start_loc, batch.num_reqs + 1),
            ranked=ranked,
            **self.pages,
        )

    def update_draft_decode_metadata(self, metadata: TritonMLAMetadata) -> None:
        """Plan a record's decodes anew from what its lengths are now; this can be captured."""
        step, ranked = metadata.decode, metadata.ranked
        if step is None:
            return
        if ranked is None:
            debug_limits(step.seq_lens, self.step_limits)
            self._plan(step)
            return
        assert self._ranks is not None
        debug_limits(ranked.seq_lens, self.step_limits)
        self._ranks.refill(step, ranked, metadata.num_covered_tokens)
        self._plan(ranked.step)

    def _plan(self, step: TritonAttentionMetadata) -> None:
        visible = VisibleKeys(self.window)
        self.planner.fill(step.query_start_loc, step.seq_lens, visible, is_causal=True)

    def warm_up_steps(self) -> Iterator[tuple[CommonAttentionMetadata, TritonMLAMetadata]]:
        """One small step for every compiled variant: its batch and its record.

        The steps are a decode and, if the limits allow, prefills without context, with one chunk of
        context, and with two. All steps read block 0 and write nothing to the cache. A chunk has
        one page.
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
                # Call this class's build, even if an engine's wrapper has replaced it.
                yield batch, TritonMLAMetadataBuilder.build(self, 0, batch)
        finally:
            self.expanded.workspace_tokens = tokens

    def _decode(
        self, batch: CommonAttentionMetadata, decodes: int, tokens: int
    ) -> tuple[TritonAttentionMetadata, RankDecode | None]:
        """The step of the leading ``decodes`` requests, which have ``tokens`` tokens; and under DCP
        the rows of this rank.
        """
        step = TritonAttentionMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_reqs=decodes,
            query_start_loc=leading(batch.query_start_loc, decodes + 1),
            seq_lens=leading(batch.seq_lens, decodes),
            block_table=leading(batch.block_table_tensor, decodes),
            split=self.planner.split(),
            prefill=None,
            **self.pages,
        )
        if self._ranks is None:
            self._plan(step)
            return step, None
        local, ranked = self._ranks.split(step, tokens)
        self._plan(ranked.step)
        return replace(step, seq_lens=local), ranked

    def _set_block_table(self, metadata: TritonMLAMetadata, block_table: torch.Tensor) -> None:
        slots, decodes = metadata.slot_mapping, metadata.num_decodes
        if metadata.decode is not None:
            table = block_table[:decodes]
            metadata.decode = replace(metadata.decode, slot_mapping=slots, block_table=table)
            if metadata.ranked is not None:
                assert self._ranks is not None
                metadata.ranked = self._ranks.update_table(metadata.decode, metadata.ranked)
        if metadata.prefill is not None:
            table = block_table[decodes : decodes + metadata.num_prefills]
            metadata.prefill = with_block_table(metadata.prefill, table, slots)


def decode_planner(
    spec: _LatentSpec,
    config: EngineConfig,
    gpu: GpuFacts,
    limits: SplitLimits,
    buffers: GraphBuffers,
    max_query_len: int | None = None,
) -> SplitPlanner:
    """Make the planner of a group's decodes, for the library's own kernels.

    Args:
        spec: the group's spec.
        config: limits and settings of the engine; ``num_heads`` is needed.
        gpu: the GPU that runs the decodes.
        limits: the largest step that the buffers must hold, and the window.
        buffers: the builder's buffers.
        max_query_len: query tokens of a verify; None for as many as the engine may have.

    Raises:
        ValueError: ``kernels.latent.decode`` names a kernel that does not serve the group.
    """
    heads, tokens = config.num_heads, max_query_len or config.max_decode_query_len
    assert heads is not None
    shape = DenseShape(
        num_heads=heads,
        num_kv_heads=1,
        head_size=spec.kv_lora_rank + spec.qk_rope_head_dim,
        head_size_v=spec.kv_lora_rank,
        itemsize=spec.dtype.itemsize,
        stored_bits=spec.cache_dtype.element(spec.dtype).itemsize * 8,
    )
    tile = _hopper_tile(shape, gpu.kind, spec, config, tokens, buffers.device)
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
    tokens: int,
    device: torch.device,
) -> HopperDecodeTile | None:
    """The Hopper decode kernel's tile; None if the group's layers do not take the kernel."""
    wanted = config.kernels.latent.decode
    if wanted is DecodeKernel.AUTO and not runs_gluon(device):
        return None
    asks = LayerRequirements(
        batch_invariant=config.batch_invariant,
        is_local=isinstance(spec, SlidingWindowMLASpec),
        query=spec.dtype,
        cache_dtype=spec.cache_dtype,
        fp8_queries=config.fp8_mla_queries,
        # The alignment of a block; the engine's buffer itself is aligned.
        alignments=(("key", math.gcd(16, spec.page_size_bytes)),),
    )
    return latent_kernel_of(shape, kind, spec.block_size, tokens, asks, wanted)[0]


def _latent_tile(spec: _LatentSpec, gpu: GpuFacts, heads: int, tokens: int) -> SplitTile:
    """The portable decode kernel's tile for the group's layers."""
    stored = spec.cache_dtype.element(spec.dtype)
    # If cache and model have different 16-bit types, neither holds the other's range and precision.
    # So products are in fp32.
    mixed = stored.itemsize > 1 and stored is not spec.dtype
    shape = LatentShape(
        num_heads=heads,
        rank=spec.kv_lora_rank,
        rope_size=spec.qk_rope_head_dim,
        itemsize=4 if mixed else spec.dtype.itemsize,
        # A tile of a different type is converted as a whole.
        stored_bits=32 if mixed else 8 * stored.itemsize,
    )
    return latent_tile(shape, gpu, tokens)


def _check_support(spec: Any, config: EngineConfig) -> None:
    """Check that the kernels serve a spec.

    Raises:
        ValueError: the kernels do not serve it; the message has the value.
    """
    if not isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        raise ValueError(
            "kv_cache_spec must be MLAAttentionSpec or SlidingWindowMLASpec, got "
            f"{type(spec).__name__}"
        )
    if config.num_heads is None:
        raise ValueError("vllm_config.num_heads is needed by TRITON_MLA, got None")
    check_shared(spec, config)
    check_latent_dtypes(spec.dtype.torch, spec.cache_dtype)
    check_latent_widths(spec.kv_lora_rank, spec.qk_rope_head_dim)
    if spec.block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size must be a multiple of {BLOCK_MULTIPLE}, got {spec.block_size}"
        )


def check_shared(spec: AnyKVCacheSpec, config: EngineConfig) -> None:
    """Under DCP, check that ranks can share the keys of a latent group.

    Raises:
        ValueError: the spec has a window or is of a group that every rank keeps whole; or the heads
            of all ranks are not a multiple of the ranks.
    """
    size = config.parallel.decode_context_parallel_size
    if size == 1:
        return
    if not isinstance(spec, MLAAttentionSpec) or not spec.dcp_sharded:
        got = "dcp_sharded=False" if isinstance(spec, MLAAttentionSpec) else type(spec).__name__
        raise ValueError(
            f"kv_cache_spec must be MLAAttentionSpec with decode_context_parallel_size {size}, "
            f"got {got}: the builder of a group that every rank keeps whole has "
            "decode_context_parallel_size 1"
        )
    if config.num_heads is not None and config.num_heads % size:
        raise ValueError(
            f"vllm_config.num_heads ({config.num_heads}) counts the heads of all ranks and must be "
            f"a multiple of decode_context_parallel_size ({size})"
        )


def check_latent_widths(rank: int, rope_size: int) -> None:
    """Check that kernels take latent rows of these widths.

    Args:
        rank: elements of the latent.
        rope_size: elements of the rotary part.

    Raises:
        ValueError: no kernel takes them.
    """
    if rank not in HEAD_SIZES or rope_size not in HEAD_SIZES:
        raise ValueError(
            f"kv_lora_rank and qk_rope_head_dim must be multiples of {HEAD_SIZES.step} from "
            f"{HEAD_SIZES.start} to {HEAD_SIZES.stop - 1}, got {rank} and {rope_size}"
        )


def check_latent_dtypes(model: torch.dtype | None, cache: CacheDType) -> None:
    """Check that kernels take the types of the model and of the KV cache.

    Args:
        model: type of the model's elements; None where it is not known yet.
        cache: type of the cache's elements.

    Raises:
        ValueError: no kernel takes one of them.
    """
    check_dtypes(model, cache, CACHE_DTYPES)
