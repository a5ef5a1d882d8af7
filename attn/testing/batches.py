"""Named batches of requests, their tensors, and a paged cache that punishes every wrong read.

- ``BATCHES`` names the batches: how many requests, of which lengths.
- :func:`dense_requests` and :func:`latent_requests` make the tensors of each request, unpaged, as
  the oracle takes them.
- :func:`paginate` gives each request blocks of a cache, in random order.
- :func:`make_batch` makes the ``CommonAttentionMetadata`` that a metadata builder receives.
- :class:`Layer`, :class:`Indexer` and :class:`Projection` stand in for the parts of a model that an
  impl sees.

What must not be read is poison. Unused slots, unused blocks, block 0 and padding rows are filled
with the byte 0xFF, which is NaN in every float format. Unused entries of the block table hold ids
far outside the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attn.testing import oracle
from attn.testing.budget import peaked_queries
from attn.testing.oracle import Rules
from builders.batch import CommonAttentionMetadata

POISON_BYTE = 0xFF
"""Fills what must not be read; NaN in every float format."""
WILD_BLOCK = 2**30
"""Entry of a block table that names no block: an id far outside every cache."""
SPARE_BLOCKS = 2
"""Blocks of a cache that belong to no request."""
SPARE_COLUMNS = 2
"""Columns of a block table behind the last used entry of the longest request."""


@dataclass(frozen=True)
class BatchSpec:
    """The lengths of one step's requests, decodes first."""

    name: str
    query_lens: tuple[int, ...]
    """New tokens of each request."""
    seq_lens: tuple[int, ...]
    """Tokens of each request after the step; in cross attention, of the decoder."""
    encoder_lens: tuple[int, ...] | None = None
    """Cross attention only: encoder tokens of each request, whose keys are in the cache."""
    num_padding_tokens: int = 0
    """Rows of query, key, value and output past the last request's."""
    pads_num_actual_tokens: bool = False
    """True: the batch's ``num_actual_tokens`` counts the padding rows."""
    pads_slots: bool = True
    """True: ``slot_mapping`` has -1 for the padding rows. False: it ends before them."""
    num_speculative_tokens: int | None = None
    """Drafts of each verify; None: the engine does not speculate."""

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Keys of each request: the encoder's in cross attention, else its tokens."""
        return self.encoder_lens or self.seq_lens

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, without padding rows."""
        return sum(self.query_lens)

    @property
    def starts(self) -> list[int]:
        """First row of each request in the batch, and the end of the last: ``[R + 1]``."""
        return [sum(self.query_lens[:row]) for row in range(len(self.query_lens) + 1)]

    @property
    def live_rows(self) -> list[int]:
        """Indices of the requests that have new tokens."""
        return [row for row, query_len in enumerate(self.query_lens) if query_len]

    @property
    def fills_no_context(self) -> bool:
        """True where no request has context, so that encoders can take the batch."""
        return self.encoder_lens is None and self.query_lens == self.seq_lens


_PADDED = BatchSpec("padding_rows", (1, 1, 3, 0, 0), (17, 40, 30, 0, 0), num_padding_tokens=3)

BATCHES: dict[str, BatchSpec] = {
    spec.name: spec
    for spec in (
        BatchSpec("single_token", (1,), (1,)),
        BatchSpec("uniform_decode", (1,) * 4, (40,) * 4),
        BatchSpec("ragged_decode", (1,) * 5, (50, 2, 16, 131, 33)),
        BatchSpec("mixed", (1, 1, 1, 9, 30), (18, 5, 47, 60, 30)),
        BatchSpec("empty_request", (1, 0, 1, 5), (20, 33, 40, 5)),
        # Rows without any key: cross attention without an encoder, padded draft steps.
        BatchSpec("keyless_rows", (1, 1, 2), (20, 0, 9), num_speculative_tokens=1),
        _PADDED,
        replace(_PADDED, name="padding_tokens_counted", pads_num_actual_tokens=True),
        replace(_PADDED, name="fewer_slots_than_keys", pads_slots=False),
        BatchSpec("all_padding", (0, 0, 0), (0, 0, 0), num_padding_tokens=3),
        BatchSpec(
            "all_padding_counted",
            (0, 0, 0),
            (0, 0, 0),
            num_padding_tokens=3,
            pads_num_actual_tokens=True,
        ),
        BatchSpec(  # around the ends of blocks of 16, 48 and 64 tokens
            "block_boundary",
            (1,) * 11 + (15, 16, 17, 16),
            (15, 16, 17, 32, 33, 47, 48, 49, 63, 64, 65, 15, 16, 17, 32),
        ),
        BatchSpec("full_prefill", (33, 7, 16), (33, 7, 16)),
        BatchSpec("chunked_prefill", (16, 5, 33), (48, 70, 49)),
        BatchSpec("single_long_prefill", (130,), (130,)),
        BatchSpec("speculative_verify", (4, 4, 4), (20, 4, 51), num_speculative_tokens=3),
        BatchSpec("ragged_verify", (1, 2, 3, 4, 5), (17, 33, 40, 64, 21), num_speculative_tokens=4),
        BatchSpec("long_context", (1,), (4093,)),
        BatchSpec("shared_prefix", (1, 1, 4, 9), (135, 170, 150, 140)),
        BatchSpec("cross_decode", (1, 1, 1, 1), (7, 30, 2, 9), (33, 5, 0, 48)),
        BatchSpec("cross_prefill", (1, 5, 40), (12, 5, 40), (33, 48, 17)),
    )
}
"""Every batch of the conformance cases, by name."""


# -- where each token lies in the cache


@dataclass(frozen=True, eq=False)
class Paging:
    """Which block of a cache holds which tokens of which request, on the CPU."""

    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """Blocks of the cache, the reserved block 0 and spare ones included."""
    table: Tensor
    """int32 ``[R, columns]``: the block table, :data:`WILD_BLOCK` past the last used entry."""

    def slots(self, row: int, start: int, stop: int) -> Tensor:
        """int64 cache slots of the positions ``[start, stop)`` of one request."""
        positions = torch.arange(start, stop)
        blocks = self.table[row].long()[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def num_used(self, kv_len: int) -> int:
        """Number of blocks that ``kv_len`` tokens use."""
        return -(-kv_len // self.block_size)


def paginate(
    generator: torch.Generator, kv_lens: Sequence[int], block_size: int, num_shared_blocks: int = 0
) -> Paging:
    """Deal blocks to requests in random order. Block 0 is reserved, and a few belong to nobody.

    Args:
        generator: of the order.
        kv_lens: cached tokens of each request.
        block_size: tokens of a block.
        num_shared_blocks: leading blocks that all requests have in common.
    """
    needed = [-(-kv_len // block_size) for kv_len in kv_lens]
    num_blocks = 1 + sum(needed) + SPARE_BLOCKS
    free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    shared = [free.pop() for _ in range(num_shared_blocks)]
    table = torch.full((len(needed), max(needed, default=0) + SPARE_COLUMNS), WILD_BLOCK)
    for row, count in enumerate(needed):
        own = [free.pop() for _ in range(count - num_shared_blocks)]
        table[row, :count] = torch.tensor(shared[:count] + own)
    return Paging(block_size, num_blocks, table.int())


def forget_unseen_blocks(paging: Paging, requests: Sequence[Request]) -> Paging:
    """Free leading blocks as an engine does behind a window: where no query of a request sees a key
    of a block or of any before it, the request's table holds block 0 in its place.
    """
    table = paging.table.clone()
    for request in requests:
        if len(request.visible) == 0:
            continue
        seen = request.visible.any(0).nonzero().flatten()
        first = int(seen[0]) if len(seen) else 0
        table[request.row, : first // paging.block_size] = 0
    return Paging(paging.block_size, paging.num_blocks, table)


def move_blocks(
    generator: torch.Generator, paging: Paging, buffer: Tensor
) -> tuple[Paging, Tensor]:
    """Move a cache's blocks into another order.

    Args:
        generator: of the order.
        paging: of the cache as it is.
        buffer: ``[num_blocks * block bytes]`` bytes of the cache as it is.

    Returns:
        Paging and bytes of the new order.
    """
    others = 1 + torch.randperm(paging.num_blocks - 1, generator=generator)
    order = torch.cat([torch.zeros(1, dtype=torch.int64), others])
    moved = torch.empty_like(buffer).view(paging.num_blocks, -1)
    moved[order.to(buffer.device)] = buffer.view(paging.num_blocks, -1)
    used = paging.table < paging.num_blocks
    ids = order[paging.table.long().clamp(max=paging.num_blocks - 1)].int()
    table = torch.where(used, ids, WILD_BLOCK + 1)
    return Paging(paging.block_size, paging.num_blocks, table.int()), moved.view(-1)


# -- requests, unpaged


@dataclass(eq=False)
class Request:
    """One request of a step, unpaged, on the CPU: Tq new tokens, Tk keys, the new ones included."""

    row: int
    """Index of the request in the batch."""
    tokens: slice
    """The request's rows in the batch."""
    first_position: int
    """Position of the first query."""
    query: Tensor
    """``[Tq, H, D]``; of a latent layer ``[Tq, H, P + r]``, before absorption."""
    key: Tensor
    """``[Tk, Hk, D]``; of a latent layer the latent rows ``[Tk, 1, L + r]``."""
    value: Tensor
    """``[Tk, Hk, Dv]``; of a latent layer the latent part of ``key``, ``[Tk, 1, L]``."""
    rules: Rules
    """Mask, scale and score changes of the layer for this request."""
    visible: Tensor
    """bool ``[Tq, Tk]``: which query sees which key."""

    @property
    def context_len(self) -> int:
        """Number of keys that earlier steps wrote."""
        return max(0, len(self.key) - len(self.query))


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of a dense layer."""

    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int | None = None
    """Head size of values; None: that of keys."""

    @property
    def v_size(self) -> int:
        """Head size of values."""
        return self.head_size_v or self.head_size

    @property
    def group(self) -> int:
        """Query heads of each KV head."""
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        v_size = "" if self.head_size_v is None else f"-{self.head_size_v}"
        return f"h{self.num_heads}of{self.num_kv_heads}-d{self.head_size}{v_size}"


def block_edges(kv_len: int, block_size: int) -> list[int]:
    """Positions on both sides of the first and of the last block border, those below ``kv_len``.

    Queries peak on these keys, as they do on the edges of the mask, so that a key lost at a border
    of blocks shows in the result (``attn.testing.budget`` explains such needles).
    """
    borders = {block_size, (kv_len - 1) // block_size * block_size}
    edges = [position for border in borders for position in (border - 1, border)]
    return sorted(position for position in edges if 0 <= position < kv_len)


def dense_requests(
    generator: torch.Generator,
    spec: BatchSpec,
    heads: Heads,
    rules: Sequence[Rules],
    dtype: torch.dtype,
    block_size: int,
    common_prefix_len: int = 0,
) -> list[Request]:
    """Queries, keys and values of every request of a dense layer, random but peaked.

    Args:
        generator: of the numbers.
        spec: lengths of the requests.
        heads: head counts and sizes.
        rules: of each request.
        dtype: of the tensors.
        block_size: of the cache, whose block borders queries peak on.
        common_prefix_len: leading keys and values that all requests have in common.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    prefix_key = normal(common_prefix_len, heads.num_kv_heads, heads.head_size)
    prefix_value = normal(common_prefix_len, heads.num_kv_heads, heads.v_size)
    requests = []
    for row, (kv_len, tokens) in enumerate(zip(spec.kv_lens, pairwise(spec.starts), strict=True)):
        own = kv_len - common_prefix_len
        key = torch.cat([prefix_key, normal(own, heads.num_kv_heads, heads.head_size)])
        value = torch.cat([prefix_value, normal(own, heads.num_kv_heads, heads.v_size)])
        num_queries = tokens[1] - tokens[0]
        first = max(0, kv_len - num_queries)
        visible = oracle.mask(num_queries, kv_len, first, rules[row])
        extra = block_edges(kv_len, block_size)
        query = peaked_queries(generator, key, heads.num_heads, visible, rules[row].scale, extra)
        requests.append(
            Request(row, slice(*tokens), first, query.to(dtype), key, value, rules[row], visible)
        )
    return requests


@dataclass(eq=False)
class LatentWeights:
    """Sizes and up-projections of an MLA layer, by the names of ``attn.testing.oracle``."""

    num_heads: int
    w_uk: Tensor
    """``[L, H, P]``: from the latent to the keys of each head, without the rotary part."""
    w_uv: Tensor
    """``[L, H, V]``: from the latent to the values of each head."""
    rope_size: int
    """r, the width of the rotary part."""

    @property
    def rank(self) -> int:
        """L, the width of the latent."""
        return self.w_uk.shape[0]

    @property
    def nope_size(self) -> int:
        """P, the width of a head's key without the rotary part."""
        return self.w_uk.shape[2]

    @property
    def v_size(self) -> int:
        """V, the width of a head's value."""
        return self.w_uv.shape[2]

    @property
    def scale(self) -> float:
        """The factor of q.k: ``(P + r) ** -0.5``."""
        return float((self.nope_size + self.rope_size) ** -0.5)

    def kv_b_proj(self) -> Tensor:
        """The weight of the model's ``kv_b_proj``: ``[H * (P + V), L]``, both up-projections."""
        return torch.cat([self.w_uk, self.w_uv], -1).flatten(1).T.contiguous()


def latent_weights(
    generator: torch.Generator,
    num_heads: int,
    dtype: torch.dtype,
    rank: int = 512,
    nope_size: int = 128,
    rope_size: int = 64,
    v_size: int = 128,
) -> LatentWeights:
    """Random up-projections, scaled so that keys and values are as large as the latent.

    Args:
        generator: of the numbers.
        num_heads: H.
        dtype: of the weights.
        rank: L.
        nope_size: P.
        rope_size: r.
        v_size: V.
    """
    size = float(rank**-0.5)

    def weight(width: int) -> Tensor:
        return (torch.randn(rank, num_heads, width, generator=generator) * size).to(dtype)

    return LatentWeights(num_heads, weight(nope_size), weight(v_size), rope_size)


VisibleOf = Callable[[int, int, int, int], Tensor]
"""Gives a request's mask, bool ``[Tq, Tk]``, from its row in the batch, Tq, Tk and the position of
its first query."""


def latent_requests(
    generator: torch.Generator,
    spec: BatchSpec,
    weights: LatentWeights,
    dtype: torch.dtype,
    block_size: int,
    visible_of: VisibleOf | None = None,
    sliding_window: int | None = None,
) -> list[Request]:
    """Queries and latent rows of every request of an MLA layer; queries peak on expanded keys.

    Args:
        generator: of the numbers.
        spec: lengths of the requests.
        weights: of the layer.
        dtype: of the tensors.
        block_size: of the cache, whose block borders queries peak on.
        visible_of: gives the mask of a request; None: that of a causal layer.
        sliding_window: keys that a query sees, its own included; None: all up to its own.
    """
    requests = []
    rules = Rules(scale=weights.scale, sliding_window=sliding_window)
    width = weights.rank + weights.rope_size
    for row, (kv_len, tokens) in enumerate(zip(spec.kv_lens, pairwise(spec.starts), strict=True)):
        rows = torch.randn(kv_len, width, generator=generator).to(dtype)
        nope = torch.einsum("sl,lhp->shp", rows[:, : weights.rank].double(), weights.w_uk.double())
        rope = rows[:, None, weights.rank :].double().expand(-1, weights.num_heads, -1)
        keys = torch.cat([nope, rope], -1)
        num_queries = tokens[1] - tokens[0]
        first = max(0, kv_len - num_queries)
        if visible_of is None:
            visible = oracle.mask(num_queries, kv_len, first, rules)
        else:
            visible = visible_of(row, num_queries, kv_len, first)
        extra = block_edges(kv_len, block_size)
        query = peaked_queries(generator, keys, weights.num_heads, visible, weights.scale, extra)
        requests.append(
            Request(
                row,
                slice(*tokens),
                first,
                query.to(dtype),
                rows[:, None],
                rows[:, None, : weights.rank],
                rules,
                visible,
            )
        )
    return requests


def new_rows(rows: Tensor, num_cached: int, num_queries: int) -> Tensor:
    """The keys (or values) of a request that come new with a step.

    Args:
        rows: ``[Tk, ...]`` of the whole request.
        num_cached: of these, written by earlier steps.
        num_queries: Tq.

    Returns:
        ``[Tq, ...]``: rows that are not cached yet, then poison where there are fewer than Tq.
    """
    new = rows[num_cached:]
    missing = num_queries - len(new)
    nothing = poisoned(missing, *rows.shape[1:], dtype=rows.dtype, device=torch.device("cpu"))
    return torch.cat([new, nothing])


# -- the batch object


def make_batch(
    spec: BatchSpec, paging: Paging, is_cached: bool, device: torch.device, **fields: Any
) -> CommonAttentionMetadata:
    """The step as a metadata builder receives it. Bounds on the host are loose where they may be.

    Args:
        spec: lengths of the requests.
        paging: block table to hand out.
        is_cached: True for a decoder, whose new tokens have slots; False: every slot is -1.
        device: of the device tensors.
        fields: further fields of the batch, or other values of its encoder lengths.
    """
    starts = torch.tensor(spec.starts, dtype=torch.int32)
    seq_lens = torch.tensor(spec.seq_lens, dtype=torch.int32)
    query_lens = torch.tensor(spec.query_lens, dtype=torch.int32)
    own_slots = [torch.empty(0, dtype=torch.int64)]
    positions = [torch.empty(0, dtype=torch.int64)]
    for row, (query_len, seq_len) in enumerate(zip(spec.query_lens, spec.seq_lens, strict=True)):
        first = max(0, seq_len - query_len)
        positions.append(torch.arange(first, first + query_len))
        written = is_cached and seq_len > 0
        own_slots.append(
            paging.slots(row, first, seq_len) if written else torch.full((query_len,), -1)
        )
    padding = spec.num_padding_tokens
    slots = torch.cat([*own_slots, torch.full((padding if spec.pads_slots else 0,), -1)])
    if spec.encoder_lens is not None:
        encoder_lens = torch.tensor(spec.encoder_lens, dtype=torch.int32)
        fields.setdefault("encoder_seq_lens", encoder_lens.to(device))
        fields.setdefault("encoder_seq_lens_cpu", encoder_lens.clone().numpy())
    # A decode's length may be overestimated on the host, a prefill's never is.
    bound = seq_lens + 3 * ((query_lens > 0) & (query_lens <= 5)).int()
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(spec.query_lens),
        num_actual_tokens=spec.num_tokens + (padding if spec.pads_num_actual_tokens else 0),
        max_query_len=max(spec.query_lens, default=0),
        max_seq_len=max(*spec.kv_lens, *spec.seq_lens, 0) + paging.block_size,
        block_table_tensor=paging.table.to(device),
        slot_mapping=slots.to(device),
        positions=torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]).to(device),
        seq_lens_cpu_upper_bound=bound,
        **fields,
    )


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape and dtype whose bytes are all :data:`POISON_BYTE`."""
    width = shape[-1] * dtype.itemsize
    return torch.full((*shape[:-1], width), POISON_BYTE, dtype=torch.uint8, device=device).view(
        dtype
    )


def is_poison(tensor: Tensor) -> bool:
    """True when every byte of a tensor is :data:`POISON_BYTE`, as :func:`poisoned` made it."""
    return bool((tensor.contiguous().view(torch.uint8) == POISON_BYTE).all())


def stack_rows(
    parts: Sequence[Tensor], num_padding: int, device: torch.device, strided: bool = False
) -> Tensor:
    """One tensor of the rows of all requests, poisoned padding rows behind them.

    Args:
        parts: ``[T_i, H, D]`` rows of each request.
        num_padding: padding rows.
        device: of the result.
        strided: True: the result is a slice of a tensor with three times the heads, as the output
            of a fused QKV projection is; the rest of that tensor is poison. False: dense.
    """
    rows = torch.cat(list(parts)).to(device)
    margin = rows.shape[-2] if strided else 0
    shape = (len(rows) + num_padding, rows.shape[1] + 2 * margin, rows.shape[2])
    whole = poisoned(*shape, dtype=rows.dtype, device=device)
    view = whole[:, margin : margin + rows.shape[1]]
    view[: len(rows)] = rows
    return view


@dataclass
class Layer:
    """Stands in for a model's attention layer: what an impl reads of it, by vLLM's names.

    Scales are fp32: real = stored * scale.
    """

    _q_scale: Tensor
    """Scalar, of queries that a kernel rounds to fp8."""
    _k_scale: Tensor
    """Scalar or ``[Hk]``, of cached keys or latent rows."""
    _v_scale: Tensor
    """Scalar or ``[Hk]``, of cached values."""
    mm_prefix_clamp_sliding_window: bool = False
    """True: ranges of multimodal tokens see no further back than the sliding window."""


@dataclass
class Indexer:
    """Stands in for a sparse layer's indexer."""

    topk_indices_buffer: Tensor = field(repr=False)
    """int32 ``[max_tokens, K]``: positions that each token attends, -1 for none."""


@dataclass
class Projection:
    """Stands in for an MLA layer's ``kv_b_proj``, a linear layer."""

    weight: Tensor = field(repr=False)
    """``[H * (P + V), L]``."""
