"""Metadata of TRITON_MLA: absorbed decode rows with a split-KV plan, expanded prefill in chunks.

Nothing is read back from the device: grids, and the number of context chunks, come from host
bounds; lengths stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.buffers import GraphBuffers
from builders.common import CommonAttentionMetadata, refuse_fields
from builders.debug import debug_batch
from builders.hopper_dense import (
    LayerAsks,
    prefill_kernel_of,
)
from builders.hopper_latent import latent_kernel_of
from builders.latent_tiles import LatentShape, latent_tile
from builders.split import split_decodes_and_prefills
from builders.split_kv import (
    SplitPlanner,
)
from builders.split_plan import (
    HopperPlan,
    PrefillPlan,
    SplitLimits,
    VisibleKeys,
)
from builders.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    SplitTile,
    prefill_tile,
)
from builders.triton_attn import (
    BLOCK_MULTIPLE,
    HEAD_SIZES,
    TritonAttentionMetadata,
    check_dtypes,
    device_facts,
    runs_gluon,
)
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, EngineConfig, PrefillKernel
from specs.kv_cache import AnyKVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

CACHE_DTYPES = (
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E4M3,
)
_LatentSpec = MLAAttentionSpec | SlidingWindowMLASpec
WORKSPACE_BYTES = 1 << 30
"""Of cached context that a prefill holds expanded at a time, over all requests, where the engine
names no bound; more where one chunk needs more."""
PAGE = BLOCK_MULTIPLE
"""Rows of a page of that workspace; a chunk has one of each request at least."""
EXPANDED_WIDTH = 256
"""Largest width of expanded heads, 192 and up rounded to a power of two: sizes the tile, and the
workspace, whose keys and values are no wider."""


@dataclass(frozen=True)
class PagedRows:
    """Up to ``span`` tokens of every request of a cache, from ``starts`` on."""

    block_table: torch.Tensor
    """``[R, max blocks]`` int32; entries past a request's tokens can be anything."""
    lens: torch.Tensor
    """``[R]`` int32: tokens of each request from its start on, at most ``span``."""
    starts: torch.Tensor
    """``[R]`` int32."""
    span: int


@dataclass
class LatentContext:
    """What a step's prefill rows see in the cache, in chunks that a workspace holds expanded.

    The workspace is a paged cache of its own: request r owns rows ``[r * C, (r + 1) * C)``. Chunks
    of a request begin with the first token that its rows see.
    """

    block_table: torch.Tensor
    """``[R', max_blocks]`` int32, device: the latent cache's."""
    span: int
    """C, tokens of a chunk, whole pages of the workspace."""
    lens: torch.Tensor
    """``[chunks, R']`` int32, device: tokens of each request in a chunk, 0 past its context."""
    starts: torch.Tensor
    """``[chunks, R']`` int32, device: the first of them."""
    left: torch.Tensor
    """``[chunks, R']`` int32, device: context from there on, past the chunk too: new tokens stand
    behind it."""
    step: TritonAttentionMetadata
    """Attention of the new tokens over one chunk, not causal; ``block_table`` is the workspace's,
    lengths and positions are to be the chunk's."""

    def rows(self, chunk: int) -> PagedRows:
        """What of the cache a chunk is expanded from."""
        return PagedRows(self.block_table, self.lens[chunk], self.starts[chunk], self.span)

    def step_over(self, chunk: int) -> TritonAttentionMetadata:
        """Attention of the new tokens over a chunk."""
        return replace(self.step, seq_lens=self.lens[chunk], first_positions=self.left[chunk])


@dataclass
class LatentPrefill:
    """The prefill rows of a step; tokens are counted from the first of them."""

    num_tokens: int
    """Tokens of these rows, without padding."""
    own: TritonAttentionMetadata
    """The new tokens among themselves, causal, keys one after another."""
    context: LatentContext | None
    """None where no request has any."""


@dataclass(frozen=True)
class LatentGroup:
    """What a group's steps are planned for: scratch and chunks are as large as that needs."""

    rank: int
    rope_size: int
    block_size: int
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
                a bound of the workspace that is smaller than one chunk; ``decode_kernel`` is one
                that does not serve the group.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec = kv_cache_spec
        heads = _check_support(spec, vllm_config)
        assert isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
        self.window = spec.sliding_window if isinstance(spec, SlidingWindowMLASpec) else None
        sizes = (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.block_size)
        self._group = LatentGroup(*sizes, self.window)
        self.kind, multiprocessors = device_facts(self.device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        shape = DenseShape(
            num_heads=heads,
            num_kv_heads=1,
            head_size=spec.kv_lora_rank + spec.qk_rope_head_dim,
            head_size_v=spec.kv_lora_rank,
            itemsize=spec.dtype.itemsize,
            stored_bits=spec.cache_dtype.element(spec.dtype).itemsize * 8,
        )
        limits = SplitLimits(
            vllm_config.max_num_seqs,
            vllm_config.max_num_batched_tokens,
            vllm_config.max_model_len,
            self.window,
        )
        tokens = vllm_config.max_decode_query_len
        tile = self._hopper_decode_tile(shape, spec, tokens)
        self.buffers = GraphBuffers(self.device)
        self.planner = SplitPlanner(
            shape,
            self.kind,
            multiprocessors,
            limits,
            vllm_config.max_decode_query_len,
            self.buffers,
            latent=None if tile is not None else self._latent_tile(spec, heads, tokens),
            hopper_decode=tile,
            requires_hopper_decode=vllm_config.decode_kernel is DecodeKernel.HOPPER,
        )
        expanded = replace(
            shape,
            num_kv_heads=heads,
            head_size=EXPANDED_WIDTH,
            head_size_v=EXPANDED_WIDTH,
            stored_bits=8 * spec.dtype.itemsize,
        )
        self._tile = prefill_tile(expanded, self.kind)
        self._hopper = self._hopper_tile(expanded)
        self._heads = heads
        self._workspace_tokens = _workspace_tokens(vllm_config, heads, spec.dtype.itemsize)

    def _hopper_decode_tile(
        self, shape: DenseShape, spec: _LatentSpec, tokens: int
    ) -> HopperDecodeTile | None:
        """The tile of the decode kernel for Hopper, where the group's layers take it."""
        wanted = self.vllm_config.decode_kernel
        if wanted is DecodeKernel.AUTO and not runs_gluon(self.device):
            return None
        asks = LayerAsks(
            batch_invariant=self.vllm_config.batch_invariant,
            is_local=self.window is not None,
            query=spec.dtype,
            cache_dtype=spec.cache_dtype,
            # Of blocks; an engine's buffer is aligned.
            alignments=(("key", math.gcd(16, spec.page_size_bytes)),),
        )
        return latent_kernel_of(shape, self.kind, spec.block_size, tokens, asks, wanted)[0]

    def _hopper_tile(self, expanded: DenseShape) -> HopperTile | None:
        """The tile of the prefill kernel for Hopper, where layers of this group may take it.

        Of all pairs of head sizes that it serves without groups a tile has the same tokens; those
        of DeepSeek's layers stand for them.
        """
        wanted, spec = self.vllm_config.prefill_kernel, self.kv_cache_spec
        if wanted is PrefillKernel.AUTO and not runs_gluon(self.device):
            return None
        shape = replace(expanded, head_size=192, head_size_v=128)
        asks = LayerAsks(query=spec.dtype, cache_dtype=CacheDType.AUTO)
        return prefill_kernel_of(shape, self.kind, 0, asks, wanted)[0]

    def _latent_tile(self, spec: _LatentSpec, heads: int, tokens: int) -> SplitTile:
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
        return latent_tile(shape, self.kind, tokens)

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
        debug_batch(batch, self.kv_cache_spec)
        ignored = ("dcp_local_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens")
        refuse_fields(batch, "TRITON_MLA", *ignored)
        if isinstance(batch.causal, torch.Tensor) or not batch.causal:
            raise NotImplementedError(f"TRITON_MLA supports causal=True, got {batch.causal}")
        self.planner.check_limits(batch.num_reqs, batch.num_actual_tokens)
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
            prefill=self._prefill(batch, found.num_decodes) if found.num_prefills else None,
            group=self._group,
        )

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
        tokens = self._workspace_tokens
        self._workspace_tokens = PAGE
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
            self._workspace_tokens = tokens

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
        )

    def _prefill(self, batch: CommonAttentionMetadata, decodes: int) -> LatentPrefill:
        stop = batch.num_reqs
        host = batch.query_start_loc_cpu[decodes : stop + 1].tolist()
        starts = batch.query_start_loc[decodes : stop + 1] - host[0]
        counts, size = starts.diff(), self._tile.query_tile
        tiles = sum(cdiv(until - since, size) for since, until in pairwise(host))
        table = batch.block_table_tensor[decodes:stop]
        own = TritonAttentionMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens - host[0],
            num_reqs=stop - decodes,
            query_start_loc=starts,
            seq_lens=counts,
            block_table=table,
            split=None,
            prefill=PrefillPlan(
                self._tile,
                _tile_starts(counts, size),
                max(tiles, 1) * self._heads,
                self._hopper_plan(counts),
            ),
        )
        context_lens = (batch.seq_lens[decodes:stop] - counts).clamp(min=0)
        context = self._context(batch, own, decodes, host, context_lens)
        return LatentPrefill(host[-1] - host[0], own, context)

    def _hopper_plan(self, counts: torch.Tensor) -> HopperPlan | None:
        """The same for the kernel for Hopper, where it may take expanded prefill."""
        if self._hopper is None:
            return None
        starts = _tile_starts(counts, self._hopper.query_tile)
        return HopperPlan(
            self._hopper.query_tile,
            starts,
            starts[-1:],
            self.buffers["taken"],
            self.planner.num_multiprocessors,
            self.vllm_config.prefill_kernel is PrefillKernel.HOPPER,
        )

    def _context(
        self,
        batch: CommonAttentionMetadata,
        own: TritonAttentionMetadata,
        decodes: int,
        host: list[int],
        context_lens: torch.Tensor,
    ) -> LatentContext | None:
        longest = _longest_context(batch, decodes, host)
        visible = context_lens
        if self.window is not None:
            # What a new token sees is itself and those just before it.
            longest = min(longest, self.window - 1)
            visible = context_lens.clamp(max=self.window - 1)
        if longest == 0:
            return None
        reqs, device = own.num_reqs, self.device
        size = min(max(self._workspace_tokens // reqs // PAGE, 1), cdiv(longest, PAGE)) * PAGE
        starts = torch.arange(0, longest, size, dtype=torch.int32, device=device)[:, None]
        left = (visible - starts).clamp(min=0)
        blocks = torch.arange(reqs * size // PAGE, dtype=torch.int32, device=device)
        step = replace(own, causal=False, block_table=blocks.view(reqs, -1))
        lens, firsts = left.clamp(max=size), context_lens - left
        return LatentContext(own.block_table, size, lens, firsts, left, step)

    def _set_block_table(self, metadata: TritonMLAMetadata, block_table: torch.Tensor) -> None:
        slots, decodes = metadata.slot_mapping, metadata.num_decodes
        if metadata.decode is not None:
            table = block_table[:decodes]
            metadata.decode = replace(metadata.decode, slot_mapping=slots, block_table=table)
        if metadata.prefill is not None:
            own, context = metadata.prefill.own, metadata.prefill.context
            table = block_table[decodes : decodes + metadata.num_prefills]
            if context is not None:
                step = replace(context.step, slot_mapping=slots)
                context = replace(context, block_table=table, step=step)
            own = replace(own, slot_mapping=slots, block_table=table)
            metadata.prefill = replace(metadata.prefill, own=own, context=context)


def _tile_starts(counts: torch.Tensor, query_tile: int) -> torch.Tensor:
    """``[R + 1]`` int32: first tile of each request of so many tokens."""
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum((counts + (query_tile - 1)) // query_tile, 0, out=starts[1:])
    return starts


def _workspace_tokens(config: EngineConfig, heads: int, itemsize: int) -> int:
    """Cached tokens that are held expanded at a time, within the bound of bytes."""
    token_bytes = heads * 2 * EXPANDED_WIDTH * itemsize
    # A prefill row has more tokens than a decode.
    reqs = min(config.max_num_seqs, cdiv(config.max_num_batched_tokens, 2))
    chunk_bytes = reqs * PAGE * token_bytes
    bound = config.mla_workspace_bytes
    if bound is not None and bound < chunk_bytes:
        raise ValueError(
            f"mla_workspace_bytes ({bound}) must hold one chunk of context, which takes up to "
            f"{chunk_bytes} bytes: {PAGE} tokens of each of {reqs} requests, {heads} heads"
        )
    return (max(WORKSPACE_BYTES, chunk_bytes) if bound is None else bound) // token_bytes


def _longest_context(batch: CommonAttentionMetadata, decodes: int, host: list[int]) -> int:
    """Host bound on the cached tokens of a prefill row, exact where the batch has host lengths."""
    counts = [until - since for since, until in pairwise(host)]
    bounds = batch.seq_lens_cpu_upper_bound
    if bounds is None:
        return max(batch.max_seq_len - min(counts), 0)
    lens = bounds[decodes : batch.num_reqs].tolist()
    return max((length - count for length, count in zip(lens, counts, strict=True)), default=0)


def _check_support(spec: Any, config: EngineConfig) -> int:
    """The number of query heads, with everything that a spec can ask of the kernels checked."""
    if not isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        raise ValueError(
            "kv_cache_spec must be MLAAttentionSpec or SlidingWindowMLASpec, got "
            f"{type(spec).__name__}"
        )
    if config.num_heads is None:
        raise ValueError("vllm_config.num_heads is needed by TRITON_MLA, got None")
    check_latent_dtypes(spec.dtype.torch, spec.cache_dtype)
    check_latent_widths(spec.kv_lora_rank, spec.qk_rope_head_dim)
    if spec.block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size must be a multiple of {BLOCK_MULTIPLE}, got {spec.block_size}"
        )
    return config.num_heads


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


def check_head_pair(size: int, size_v: int) -> None:
    """Kernels take expanded heads of these sizes.

    Raises:
        ValueError: they do not.
    """
    if not all(one in HEAD_SIZES and one <= EXPANDED_WIDTH for one in (size, size_v)):
        raise ValueError(
            f"qk_head_dim and v_head_dim must be multiples of {HEAD_SIZES.step} from "
            f"{HEAD_SIZES.start} to {EXPANDED_WIDTH}, got {size} and {size_v}"
        )


def check_latent_dtypes(model: torch.dtype | None, cache: CacheDType) -> None:
    """Model and KV cache dtype are such that the kernels take them; None where not known yet.

    Raises:
        ValueError: one is not.
    """
    check_dtypes(model, CacheDType.AUTO)
    if cache not in CACHE_DTYPES:
        names = ", ".join(dtype.value for dtype in CACHE_DTYPES)
        raise ValueError(f"kv_cache_dtype must be one of {names}, got {cache.value!r}")
