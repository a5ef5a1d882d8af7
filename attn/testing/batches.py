"""Named batches, and a hostile paged cache around each of them.

Requests are made unpaged (the oracle judges those) and then laid into a cache the way an engine
does. Whatever must not be read is poison: every byte of unused slots, unused blocks, block 0 and
padding rows is 0xFF, which is NaN in every float format, and unused table entries hold ids far
outside the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn.testing import oracle
from attn.testing.budget import peaked_queries
from attn.testing.oracle import Rules
from builders.batch import CommonAttentionMetadata

POISON_BYTE = 0xFF
WILD_BLOCK = 2**30
SPARE_BLOCKS = 2
SPARE_COLUMNS = 2


@dataclass(frozen=True)
class BatchSpec:
    """Lengths of one step, decode rows first."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    """After the step, the decoder's own."""
    encoder_lens: tuple[int, ...] | None = None
    """For cross attention: what is cached in place of ``seq_lens``."""
    num_padding_tokens: int = 0
    """Rows of query, key, value and output past the last request's."""
    pads_num_actual_tokens: bool = False
    """``num_actual_tokens`` counts the padding rows."""
    pads_slots: bool = True
    """``slot_mapping`` has -1 for the padding rows; otherwise it is shorter than ``key``."""
    num_speculative_tokens: int | None = None

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Cached tokens of each request."""
        return self.encoder_lens or self.seq_lens

    @property
    def num_tokens(self) -> int:
        """Real tokens."""
        return sum(self.query_lens)

    @property
    def starts(self) -> list[int]:
        """``[R + 1]`` first token of each request."""
        return [sum(self.query_lens[:row]) for row in range(len(self.query_lens) + 1)]

    @property
    def live_rows(self) -> list[int]:
        """Requests with new tokens."""
        return [row for row, query_len in enumerate(self.query_lens) if query_len]

    @property
    def fills_no_context(self) -> bool:
        """Every request is computed whole, as encoders are."""
        return self.encoder_lens is None and self.query_lens == self.seq_lens


_PADDED = {"query_lens": (1, 1, 3, 0, 0), "seq_lens": (17, 40, 30, 0, 0), "num_padding_tokens": 3}

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
        BatchSpec("padding_rows", **_PADDED),
        BatchSpec("padding_tokens_counted", **_PADDED, pads_num_actual_tokens=True),
        BatchSpec("fewer_slots_than_keys", **_PADDED, pads_slots=False),
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


# -- where each token lies in the cache


@dataclass(frozen=True, eq=False)
class Paging:
    """A block table with permuted blocks; the CPU holds every tensor."""

    block_size: int
    num_blocks: int
    table: Tensor
    """``[R, columns]`` int32, wild past the last used entry."""

    def slots(self, row: int, start: int, stop: int) -> Tensor:
        """int64 slots of positions ``[start, stop)`` of one request."""
        positions = torch.arange(start, stop)
        blocks = self.table[row].long()[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def num_used(self, kv_len: int) -> int:
        """Blocks that ``kv_len`` tokens use."""
        return -(-kv_len // self.block_size)


def paginate(
    generator: torch.Generator, kv_lens: Sequence[int], block_size: int, num_shared_blocks: int = 0
) -> Paging:
    """Blocks in random order; 0 is reserved, and a few belong to nobody."""
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
    """Leading blocks of which no query sees a key become block 0, as an engine frees them."""
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
    """The same cache with its blocks in another order: its paging and its bytes."""
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
    """One request of a step, on the CPU. Latent ones have one KV head and no ``value``."""

    row: int
    tokens: slice
    """Its rows of the batch."""
    first_position: int
    query: Tensor
    """``[Tq, H, D]``."""
    key: Tensor
    """``[Tk, Hk, D]``; latent rows ``[Tk, 1, L + r]``."""
    value: Tensor
    """``[Tk, Hk, Dv]``."""
    rules: Rules
    visible: Tensor
    """bool ``[Tq, Tk]``."""

    @property
    def context_len(self) -> int:
        """Keys that earlier steps wrote."""
        return max(0, len(self.key) - len(self.query))


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of a dense layer."""

    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    head_size_v: int | None = None

    @property
    def v_size(self) -> int:
        return self.head_size_v or self.head_size

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        v_size = "" if self.head_size_v is None else f"-{self.head_size_v}"
        return f"h{self.num_heads}of{self.num_kv_heads}-d{self.head_size}{v_size}"


def block_edges(kv_len: int, block_size: int) -> list[int]:
    """Both sides of the first and of the last block border: needles besides the mask's edges."""
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
    """Peaked queries, keys and values of every request; the prefix is the same for all."""

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
    """Sizes and up-projections of an MLA layer; the oracle's names."""

    num_heads: int
    w_uk: Tensor
    """``[L, H, P]``."""
    w_uv: Tensor
    """``[L, H, V]``."""
    rope_size: int

    @property
    def rank(self) -> int:
        return self.w_uk.shape[0]

    @property
    def nope_size(self) -> int:
        return self.w_uk.shape[2]

    @property
    def v_size(self) -> int:
        return self.w_uv.shape[2]

    @property
    def scale(self) -> float:
        return float((self.nope_size + self.rope_size) ** -0.5)

    def kv_b_proj(self) -> Tensor:
        """The linear layer's weight, ``[H * (P + V), L]``."""
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
    """Random up-projections that keep the latent's magnitude."""

    def weight(width: int) -> Tensor:
        return (torch.randn(rank, num_heads, width, generator=generator) * rank**-0.5).to(dtype)

    return LatentWeights(num_heads, weight(nope_size), weight(v_size), rope_size)


VisibleOf = Callable[[int, int, int, int], Tensor]
"""Mask bool ``[Tq, Tk]`` of (row, queries, keys, first position)."""


def latent_requests(
    generator: torch.Generator,
    spec: BatchSpec,
    weights: LatentWeights,
    dtype: torch.dtype,
    block_size: int,
    visible_of: VisibleOf | None = None,
    sliding_window: int | None = None,
) -> list[Request]:
    """Queries ``[Tq, H, P + r]`` peaked on the expanded keys, and latent rows; the mask is that of
    a causal layer unless ``visible_of`` gives another.
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
    """This step's keys of a request: those not cached yet, poison where there are none."""
    new = rows[num_cached:]
    missing = num_queries - len(new)
    nothing = poisoned(missing, *rows.shape[1:], dtype=rows.dtype, device=torch.device("cpu"))
    return torch.cat([new, nothing])


# -- the batch object


def make_batch(
    spec: BatchSpec, paging: Paging, is_cached: bool, device: torch.device, **fields: Any
) -> CommonAttentionMetadata:
    """The step as builders receive it: host bounds are loose wherever they may be.

    Args:
        spec: lengths.
        paging: block table to hand out.
        is_cached: a decoder's own cache, which the new tokens are written to.
        device: of the device tensors.
        fields: further fields of the batch.
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
        fields.setdefault(
            "encoder_seq_lens", torch.tensor(spec.encoder_lens, dtype=torch.int32).to(device)
        )
        fields.setdefault("encoder_seq_lens_cpu", np.array(spec.encoder_lens, dtype=np.int32))
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
    """A tensor of 0xFF bytes."""
    width = shape[-1] * dtype.itemsize
    return torch.full((*shape[:-1], width), POISON_BYTE, dtype=torch.uint8, device=device).view(
        dtype
    )


def is_poison(tensor: Tensor) -> bool:
    """True when every byte is as ``poisoned`` left it."""
    return bool((tensor.contiguous().view(torch.uint8) == POISON_BYTE).all())


def stack_rows(
    parts: Sequence[Tensor], num_padding: int, device: torch.device, strided: bool = False
) -> Tensor:
    """Rows of all requests, then poisoned ones; ``strided`` as a slice of a fused projection."""
    rows = torch.cat(list(parts)).to(device)
    margin = rows.shape[-2] if strided else 0
    shape = (len(rows) + num_padding, rows.shape[1] + 2 * margin, rows.shape[2])
    whole = poisoned(*shape, dtype=rows.dtype, device=device)
    view = whole[:, margin : margin + rows.shape[1]]
    view[: len(rows)] = rows
    return view


@dataclass
class Layer:
    """What a model's layer shows its impl."""

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    mm_prefix_clamp_sliding_window: bool = False


@dataclass
class Indexer:
    """What a sparse impl reads of its indexer."""

    topk_indices_buffer: Tensor = field(repr=False)
    """``[max_tokens, K]`` int32."""


@dataclass
class Projection:
    """Stands in for a model's ``kv_b_proj``."""

    weight: Tensor = field(repr=False)
