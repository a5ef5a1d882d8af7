"""Expanded prefill of latent layers, planned once for every backend that has it.

Cached context is expanded in chunks that fit a workspace; the number of chunks comes from host
bounds, lengths stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.checks.kernel_limits import BLOCK_MULTIPLE, HEAD_SIZES
from builders.dense.choice import LATENT_OPTION, LayerAsks, prefill_kernel_of
from builders.dense.record import TritonAttentionMetadata
from builders.device import runs_gluon
from builders.splitkv.record import HopperPlan, PrefillPlan
from builders.splitkv.tiles import DenseShape, HopperTile, prefill_tile
from specs.base import cdiv
from specs.devices import DeviceKind, GpuFacts
from specs.dtypes import CacheDType
from specs.engine import EngineConfig, PrefillKernel

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
    packed: torch.Tensor | None = None
    """``[R + 1]`` int32: first row of each request in the workspace, for kernels that want requests
    one behind another; None where request r owns rows ``[r * span, (r + 1) * span)``."""


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
    max_query_len: int
    """Most tokens of a row."""
    own: TritonAttentionMetadata
    """The new tokens among themselves, causal, keys one after another."""
    context: LatentContext | None
    """None where no request has any."""


class ExpandedPrefill:
    """Plans of the prefill rows of one KV cache group."""

    def __init__(
        self,
        spec: Any,
        config: EngineConfig,
        gpu: GpuFacts,
        buffers: GraphBuffers,
        window: int | None = None,
    ) -> None:
        """
        Args:
            spec: the group's, of latent rows.
            config: engine limits; ``num_heads`` is needed.
            gpu: what runs it.
            buffers: of the builder.
            window: keys that a token sees, itself included; None for all.

        Raises:
            ValueError: a bound of the workspace that is smaller than one chunk.
        """
        heads = config.num_heads
        assert heads is not None
        self.config, self.window, self._heads = config, window, heads
        self._buffers, self._num_multiprocessors = buffers, gpu.num_multiprocessors
        expanded = DenseShape(
            num_heads=heads,
            num_kv_heads=heads,
            head_size=EXPANDED_WIDTH,
            head_size_v=EXPANDED_WIDTH,
            itemsize=spec.dtype.itemsize,
            stored_bits=8 * spec.dtype.itemsize,
        )
        self._tile = prefill_tile(expanded, gpu)
        self._hopper = self._hopper_tile(expanded, gpu.kind, spec)
        if self._hopper is not None and "taken" not in buffers:
            buffers.declare("taken", (1,), torch.int32)
        self.workspace_tokens = _workspace_tokens(config, heads, spec.dtype.itemsize)

    def _hopper_tile(self, expanded: DenseShape, kind: DeviceKind, spec: Any) -> HopperTile | None:
        """The tile of the prefill kernel for Hopper, where layers of this group may take it.

        Of all pairs of head sizes that it serves without groups a tile has the same tokens; those
        of DeepSeek's layers stand for them.
        """
        wanted = self.config.kernels.latent.prefill
        if wanted is PrefillKernel.AUTO and not runs_gluon(self._buffers.device):
            return None
        shape = replace(expanded, head_size=192, head_size_v=128)
        asks = LayerAsks(query=spec.dtype, cache_dtype=CacheDType.AUTO)
        return prefill_kernel_of(shape, kind, 0, asks, wanted, LATENT_OPTION)[0]

    def plan(self, batch: CommonAttentionMetadata, decodes: int) -> LatentPrefill:
        """The plan of the rows behind ``decodes`` requests; nothing is read back.

        Args:
            batch: the step's.
            decodes: leading requests that have another kernel.
        """
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
        longest = max(until - since for since, until in pairwise(host))
        return LatentPrefill(host[-1] - host[0], longest, own, context)

    def _hopper_plan(self, counts: torch.Tensor) -> HopperPlan | None:
        """The same for the kernel for Hopper, where it may take expanded prefill."""
        if self._hopper is None:
            return None
        starts = _tile_starts(counts, self._hopper.query_tile)
        return HopperPlan(
            self._hopper.query_tile,
            starts,
            starts[-1:],
            self._buffers["taken"],
            self._num_multiprocessors,
            self.config.kernels.latent.prefill is PrefillKernel.HOPPER,
        )

    def _context(
        self,
        batch: CommonAttentionMetadata,
        own: TritonAttentionMetadata,
        decodes: int,
        host: list[int],
        context_lens: torch.Tensor,
    ) -> LatentContext | None:
        # A bound may run ahead of the truth.
        longest = min(_longest_context(batch, decodes, host), self.config.max_model_len)
        visible = context_lens
        if self.window is not None:
            # What a new token sees is itself and those just before it.
            longest = min(longest, self.window - 1)
            visible = context_lens.clamp(max=self.window - 1)
        if longest == 0:
            return None
        reqs, device = own.num_reqs, self._buffers.device
        size = min(max(self.workspace_tokens // reqs // PAGE, 1), cdiv(longest, PAGE)) * PAGE
        starts = torch.arange(0, longest, size, dtype=torch.int32, device=device)[:, None]
        left = (visible - starts).clamp(min=0)
        blocks = torch.arange(reqs * size // PAGE, dtype=torch.int32, device=device)
        step = replace(own, causal=False, block_table=blocks.view(reqs, -1))
        lens, firsts = left.clamp(max=size), context_lens - left
        return LatentContext(own.block_table, size, lens, firsts, left, step)


def with_block_table(
    prefill: LatentPrefill, block_table: torch.Tensor, slots: torch.Tensor
) -> LatentPrefill:
    """The same rows over another KV cache group's blocks.

    Args:
        prefill: a plan.
        block_table: ``[R', max_blocks]`` int32 of its rows.
        slots: ``[T]`` int64 of the step.
    """
    own, context = prefill.own, prefill.context
    if context is not None:
        step = replace(context.step, slot_mapping=slots)
        context = replace(context, block_table=block_table, step=step)
    own = replace(own, slot_mapping=slots, block_table=block_table)
    return replace(prefill, own=own, context=context)


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
