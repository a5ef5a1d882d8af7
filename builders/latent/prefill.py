"""The plan of expanded prefill of latent layers, for every backend that has it.

Prefill expands latent rows to keys and values per head. New tokens attend each other first; then
they attend the cached context, which is expanded in chunks that fit a workspace, and the states are
merged. The number of chunks follows from host bounds; lengths stay on the device.

Under decode context parallelism (DCP) every rank has all new tokens, for its own query heads, but
only a part of the context. A chunk is then as many cached rows of every rank. Each rank reads its
own, all ranks exchange them, and each attends them rank by rank. New tokens see the whole context,
so that the order of its keys does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch

from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.checks.kernel_limits import BLOCK_MULTIPLE, HEAD_SIZES
from builders.dense.choice import LATENT_OPTION, LayerRequirements, prefill_kernel_of
from builders.dense.record import TritonAttentionMetadata
from builders.device import runs_gluon
from builders.splitkv.record import HopperPlan, PrefillPlan
from builders.splitkv.stripe import Stripe
from builders.splitkv.tiles import DenseShape, HopperTile, prefill_tile
from specs.base import cdiv
from specs.devices import DeviceKind, GpuFacts
from specs.dtypes import CacheDType
from specs.engine import EngineConfig, PrefillKernel

WORKSPACE_BYTES = 1 << 30
"""Bytes of cached context that a prefill holds expanded at a time, over all requests, if the engine
names no bound. The workspace is larger if one chunk needs more."""
PAGE = BLOCK_MULTIPLE
"""Tokens of a page of the workspace. A chunk has at least one page of each request."""
EXPANDED_WIDTH = 256
"""Largest width of expanded keys and values: 192 columns rounded up to a power of two. It sizes the
tile and the workspace."""


@dataclass(frozen=True)
class PagedRows:
    """Up to ``span`` cached tokens of every request, from ``starts`` on, to be expanded."""

    block_table: torch.Tensor
    """``[R, max blocks]`` int32; entries past a request's tokens can be anything."""
    lens: torch.Tensor
    """``[R]`` int32: tokens of each request from its start on, at most ``span``."""
    starts: torch.Tensor
    """``[R]`` int32: first token of each request."""
    span: int
    """Most tokens of a request."""
    packed: torch.Tensor | None = None
    """``[R + 1]`` int32: first row of each request in the workspace, for kernels that need requests
    one behind another. None where request r owns rows ``[r * span, (r + 1) * span)``."""

    @cached_property
    def types(self) -> tuple[tuple[torch.dtype, bool] | None, ...]:
        """Type of each tensor, and whether it is on a GPU; None for one that is not there."""
        tensors = self.block_table, self.lens, self.starts, self.packed
        return tuple(None if one is None else (one.dtype, one.is_cuda) for one in tensors)


@dataclass
class LatentContext:
    """The cached context that a step's prefills see, in chunks that a workspace holds expanded.

    The workspace is a paged cache of its own: request r owns rows ``[r * C, (r + 1) * C)``. The
    first chunk of a request begins with the first token that any of its new tokens sees. R' is the
    number of prefills.

    Under DCP a chunk has one piece for each rank, in the order of ranks, and tokens are counted
    among those that the piece's rank keeps. Without DCP a chunk is one piece.
    """

    block_table: torch.Tensor
    """``[R', max_blocks]`` int32, device: blocks of the latent cache."""
    span: int
    """C, the tokens of a chunk per request: whole pages of the workspace."""
    lens: torch.Tensor
    """``[pieces, R']`` int32, device: tokens of each request in a piece, 0 past its context."""
    starts: torch.Tensor
    """``[pieces, R']`` int32, device: first token of each request in a piece."""
    left: torch.Tensor
    """``[pieces, R']`` int32, device: context of each request from the piece's start to its end.

    Without DCP this is the position of the first new token, counted from the piece's first token.
    """
    step: TritonAttentionMetadata
    """Attention of the new tokens over one piece, not causal. ``block_table`` is the workspace's;
    :meth:`step_over` puts in a piece's lengths and positions."""
    stripe: Stripe | None = None
    """The tokens that this rank keeps under DCP; None without it."""

    @property
    def ranks(self) -> int:
        """Pieces of a chunk."""
        return 1 if self.stripe is None else self.stripe.size

    def rows(self, piece: int) -> PagedRows:
        """The cached tokens that a piece is expanded from, in the cache of the rank that keeps
        them.
        """
        return self._pieces[piece][0]

    def exchanged(self, piece: int) -> PagedRows:
        """The tokens of a piece, among the rows of a chunk that ranks have exchanged.

        These rows are a paged cache ``[ranks * R' * C / PAGE, PAGE, row]``: rank by rank, and
        within a rank request by request.
        """
        pages = self.step.block_table
        first = piece % self.ranks * pages.numel()
        lens = self.lens[piece]
        return PagedRows(pages + first, lens, torch.zeros_like(lens), self.span)

    def step_over(self, piece: int) -> TritonAttentionMetadata:
        """The step of the new tokens' attention over a piece."""
        return self._pieces[piece][1]

    @cached_property
    def _pieces(self) -> tuple[tuple[PagedRows, TritonAttentionMetadata], ...]:
        """The cached tokens and the step of each piece, which all layers of the step share."""
        table, span = self.block_table, self.span
        return tuple(
            (
                PagedRows(table, lens, starts, span),
                replace(self.step, seq_lens=lens, first_positions=left),
            )
            for lens, starts, left in zip(self.lens, self.starts, self.left, strict=True)
        )


@dataclass
class LatentPrefill:
    """The prefills of a step; tokens are counted from the first prefill's first one."""

    num_tokens: int
    """New tokens of all prefills, without padding."""
    max_query_len: int
    """Most new tokens of a request."""
    own: TritonAttentionMetadata
    """Causal attention of the new tokens among themselves; their keys follow one another in one
    tensor, not in pages."""
    context: LatentContext | None
    """The cached context of the prefills; None if no request has any."""


_Prefill = TypeVar("_Prefill", bound=LatentPrefill)


class ExpandedPrefill:
    """Plans the prefills of one KV cache group."""

    def __init__(
        self,
        spec: Any,
        config: EngineConfig,
        gpu: GpuFacts,
        buffers: GraphBuffers,
        window: int | None = None,
        stripe: Stripe | None = None,
    ) -> None:
        """
        Args:
            spec: the group's spec, of latent rows.
            config: limits and settings of the engine; ``num_heads`` is needed.
            gpu: the GPU that runs the group.
            buffers: the builder's buffers.
            window: keys that a token sees, itself included; None for all.
            stripe: the tokens that this rank keeps under DCP; None without it.

        Raises:
            ValueError: the engine's bound of the workspace is smaller than one chunk.
        """
        assert config.num_heads is not None
        # Prefills attend with the query heads of this rank alone.
        heads = config.num_heads // (1 if stripe is None else stripe.size)
        self.config, self.window, self._heads = config, window, heads
        self._stripe = stripe
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
        token_bytes = heads * 2 * EXPANDED_WIDTH * spec.dtype.itemsize
        if stripe is not None:
            # While a chunk is exchanged, a rank also holds its own cached rows and those of all.
            token_bytes += (1 + stripe.size) * spec.layout().row.nbytes
        self.workspace_tokens = _workspace_tokens(config, heads, token_bytes)

    def _hopper_tile(self, expanded: DenseShape, kind: DeviceKind, spec: Any) -> HopperTile | None:
        """The Hopper prefill kernel's tile; None if no layer of this group may take the kernel.

        The tile has the same query tokens for every pair of head sizes that the kernel serves with
        as many KV heads as query heads, so DeepSeek's head sizes stand for all of them.
        """
        wanted = self.config.kernels.latent.prefill
        if wanted is PrefillKernel.AUTO and not runs_gluon(self._buffers.device):
            return None
        shape = replace(expanded, head_size=192, head_size_v=128)
        asks = LayerRequirements(query=spec.dtype, cache_dtype=CacheDType.AUTO)
        return prefill_kernel_of(shape, kind, 0, asks, wanted, LATENT_OPTION)[0]

    @property
    def kernel(self) -> str:
        """Name of the kernel that attends the expanded keys."""
        return "triton" if self._hopper is None else "hopper"

    def plan(self, batch: CommonAttentionMetadata, decodes: int) -> LatentPrefill:
        """Plan the requests behind the leading decodes; nothing is read back from the device.

        Args:
            batch: the step's batch.
            decodes: leading requests, which another kernel takes.
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
        """The Hopper kernel's plan for requests of ``counts`` new tokens; None without the kernel.

        Args:
            counts: ``[R']`` int32, device.
        """
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
        # The host's bound may be larger than any context can be.
        longest = min(_longest_context(batch, decodes, host), self.config.max_model_len)
        visible = context_lens
        if self.window is not None:
            # A new token sees itself and the window - 1 tokens before it.
            longest = min(longest, self.window - 1)
            visible = context_lens.clamp(max=self.window - 1)
        if longest == 0:
            return None
        stripe = self._stripe
        if stripe is not None:
            every = [replace(stripe, rank=rank) for rank in range(stripe.size)]
            longest = every[0].local_len(longest)
            visible = torch.stack([one.local_lens(context_lens) for one in every])
            context_lens = visible
        reqs, device = own.num_reqs, self._buffers.device
        # Each chunk's state is rounded, so with batch invariance a chunk's size must not depend on
        # the requests of the step.
        sharers = _most_prefills(self.config) if self.config.batch_invariant else reqs
        size = min(max(self.workspace_tokens // sharers // PAGE, 1), cdiv(longest, PAGE)) * PAGE
        starts = torch.arange(0, longest, size, dtype=torch.int32, device=device)
        starts = starts[:, None] if stripe is None else starts[:, None, None]
        left = (visible - starts).clamp(min=0)
        blocks = torch.arange(reqs * size // PAGE, dtype=torch.int32, device=device)
        step = replace(own, causal=False, block_table=blocks.view(reqs, -1))
        lens, firsts = left.clamp(max=size), context_lens - left
        lens, firsts, left = (piece.reshape(-1, reqs) for piece in (lens, firsts, left))
        return LatentContext(own.block_table, size, lens, firsts, left, step, stripe)


def with_block_table(prefill: _Prefill, block_table: torch.Tensor, slots: torch.Tensor) -> _Prefill:
    """The plan of the same prefills over another KV cache group's blocks.

    Args:
        prefill: the plan for one group.
        block_table: ``[R', max_blocks]`` int32: the other group's blocks of the prefills.
        slots: ``[T]`` int64: the other group's slots of the step.
    """
    own, context = prefill.own, prefill.context
    if context is not None:
        step = replace(context.step, slot_mapping=slots)
        context = replace(context, block_table=block_table, step=step)
    own = replace(own, slot_mapping=slots, block_table=block_table)
    return replace(prefill, own=own, context=context)


def _tile_starts(counts: torch.Tensor, query_tile: int) -> torch.Tensor:
    """``[R + 1]`` int32: first tile of each request with ``counts`` tokens, and the end of all."""
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum((counts + (query_tile - 1)) // query_tile, 0, out=starts[1:])
    return starts


def _workspace_tokens(config: EngineConfig, heads: int, token_bytes: int) -> int:
    """Cached tokens that are held expanded at a time, within the bound of bytes.

    Args:
        config: the engine's limits and bound.
        heads: query heads, for messages.
        token_bytes: bytes that are held for a token.

    Raises:
        ValueError: the engine's bound is smaller than one chunk.
    """
    reqs = _most_prefills(config)
    chunk_bytes = reqs * PAGE * token_bytes
    bound = config.mla_workspace_bytes
    if bound is not None and bound < chunk_bytes:
        raise ValueError(
            f"mla_workspace_bytes ({bound}) must hold one chunk of context, which takes up to "
            f"{chunk_bytes} bytes: {PAGE} tokens of each of {reqs} requests, {heads} heads"
        )
    return (max(WORKSPACE_BYTES, chunk_bytes) if bound is None else bound) // token_bytes


def _most_prefills(config: EngineConfig) -> int:
    """Most prefills of a step; each has two new tokens or more, since shorter ones are decodes."""
    return min(config.max_num_seqs, cdiv(config.max_num_batched_tokens, 2))


def _longest_context(batch: CommonAttentionMetadata, decodes: int, host: list[int]) -> int:
    """Host bound on the cached tokens of a prefill, exact where the batch has host lengths."""
    counts = [until - since for since, until in pairwise(host)]
    bounds = batch.seq_lens_cpu_upper_bound
    if bounds is None:
        return max(batch.max_seq_len - min(counts), 0)
    lens = bounds[decodes : batch.num_reqs].tolist()
    return max((length - count for length, count in zip(lens, counts, strict=True)), default=0)


def check_head_pair(size: int, size_v: int) -> None:
    """Check that kernels take expanded heads of these sizes.

    Args:
        size: elements of a key of a head.
        size_v: elements of a value of a head.

    Raises:
        ValueError: no kernel takes them.
    """
    if not all(one in HEAD_SIZES and one <= EXPANDED_WIDTH for one in (size, size_v)):
        raise ValueError(
            f"qk_head_dim and v_head_dim must be multiples of {HEAD_SIZES.step} from "
            f"{HEAD_SIZES.start} to {EXPANDED_WIDTH}, got {size} and {size_v}"
        )
