"""Inputs of a kernel case: cache content, block tables, and rows computed in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn.bench.cases.case import MODEL_DTYPE, NOPE_SIZE, KernelCase
from builders.pages.paging import compute_slot_mapping
from specs.base import cdiv
from specs.sentinels import NULL_BLOCK_ID

SPARE_BLOCKS = 7
"""Number of unused blocks in a cache, in addition to block 0."""


@dataclass(frozen=True)
class Content:
    """Tensors of a case as peers take them: T new tokens, R requests, N blocks of P tokens."""

    case: KernelCase
    query: torch.Tensor
    """``[T, H, D]`` bf16 queries of the new tokens."""
    key: torch.Tensor
    """``[N, P, Hk, D]`` contiguous, bf16 or e4m3 (scale 1); zero in slots without a token."""
    value: torch.Tensor
    """``[N, P, Hk, Dv]``, bf16 or e4m3 (scale 1); in a latent case the first columns of ``key``."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32 contiguous, permuted; unused entries are block 0."""
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, first new token of each request."""
    seq_lens: torch.Tensor
    """``[R]`` int32 KV lengths, the new tokens included."""
    slots: torch.Tensor
    """``[sum of seq_lens]`` int64 slot of each cached token, request after request."""
    sinks: torch.Tensor | None
    """``[H]`` fp32, exact in bf16; None without sinks."""
    parts: tuple[torch.Tensor, torch.Tensor] | None = None
    """``[T, H, L]`` and ``[T, H, r]``: the latent and the rotary part of the queries of a latent
    case, as an engine passes them: see :func:`engine_parts`. None in other cases."""

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        return self.query.device

    def rows(self, which: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """``[len(slots), Hk, D]`` bf16 rows of ``key`` or ``value``; bf16 holds e4m3 exactly."""
        flat = which.flatten(0, 1)
        if flat.element_size() == 1:
            # Not every device has indexed reads of 8-bit floats, but all have them of bytes.
            return flat.view(torch.uint8)[slots].view(flat.dtype).to(MODEL_DTYPE.torch)
        return flat[slots]

    def picked(
        self, which: torch.Tensor, slots: torch.Tensor, kv_heads: torch.Tensor
    ) -> torch.Tensor:
        """``[T, H, D]`` bf16 rows of ``key`` or ``value``, of one slot for each token and head.

        Args:
            which: ``key`` or ``value``.
            slots: ``[T, H]`` int64.
            kv_heads: ``[H]`` int64 KV head of each query head.
        """
        flat = which.flatten(0, 1)
        if flat.element_size() == 1:
            found = flat.view(torch.uint8)[slots, kv_heads]
            return found.view(flat.dtype).to(MODEL_DTYPE.torch)
        return flat[slots, kv_heads]

    def load_query(self, query: torch.Tensor) -> None:
        """Write ``[T, H, D]`` queries to every tensor that kernels read them from."""
        self.query.copy_(query)
        if self.parts is not None:
            rank = self.case.head_size_v
            self.parts[0].copy_(query[..., :rank])
            self.parts[1].copy_(query[..., rank:])

    def own_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, Hk, D]`` keys and ``[T, Hk, Dv]`` values of new tokens without a context."""
        return self.rows(self.key, self.slots), self.rows(self.value, self.slots)


def engine_parts(case: KernelCase, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The parts of absorbed queries with the strides that they have in an engine.

    The latent part is the result of a product for each head, ``[H, T, L]`` in memory. The rotary
    part is the end of a projection's row, which is longer.

    Args:
        case: the case; None is returned unless it is latent.
        query: ``[T, H, L + r]`` queries, which are copied.
    """
    if not case.is_latent:
        return None
    rank, (tokens, heads, _) = case.head_size_v, query.shape
    absorbed = query.new_empty(heads, tokens, rank).transpose(0, 1)
    rotary = query.new_empty(tokens, heads, NOPE_SIZE + case.rope_size)[..., NOPE_SIZE:]
    return absorbed.copy_(query[..., :rank]), rotary.copy_(query[..., rank:])


def permuted_table(case: KernelCase, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """A random block table, on the host.

    Returns:
        ``[R, max_blocks]`` int32, and the number of physical blocks it points into.
    """
    counts = torch.tensor([cdiv(length, case.block_size) for length in case.seq_lens])
    width, total = int(counts.max()), int(counts.sum())
    num_blocks = 1 + total + SPARE_BLOCKS
    ids = 1 + torch.randperm(num_blocks - 1, generator=generator, dtype=torch.int32)
    table = torch.full((case.num_reqs, width), NULL_BLOCK_ID, dtype=torch.int32)
    table[torch.arange(width) < counts[:, None]] = ids[:total]
    return table, num_blocks


def cache_slots(case: KernelCase, block_table: torch.Tensor) -> torch.Tensor:
    """``[sum of seq_lens]`` int64: slot of every cached token, request after request."""
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    starts = torch.zeros(case.num_reqs + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    device = block_table.device
    return compute_slot_mapping(
        block_table, starts.to(device), lens.to(device), int(starts[-1]), case.block_size
    )


def make_content(case: KernelCase, device: torch.device, generator: torch.Generator) -> Content:
    """Normally distributed queries, keys and values over a permuted block table.

    Args:
        case: the case.
        device: device of the tensors.
        generator: host generator; it draws the block table and seeds a generator of the device.
    """
    table, num_blocks = permuted_table(case, generator)
    seed = int(torch.randint(2**31, (), generator=generator))
    on_device = torch.Generator(device).manual_seed(seed)
    dtype = MODEL_DTYPE.torch

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=on_device, device=device, dtype=dtype)

    block_table = table.to(device)
    slots = cache_slots(case, block_table)
    unused = torch.ones(num_blocks * case.block_size, dtype=torch.bool, device=device)
    unused[slots] = False
    sides: list[torch.Tensor] = []
    for _ in ("key",) if case.is_latent else ("key", "value"):
        size = case.head_size_v if sides else case.head_size
        side = draw(num_blocks, case.block_size, case.num_kv_heads, size)
        side.masked_fill_(unused.view(num_blocks, case.block_size, 1, 1), 0)
        if case.kv_cache_dtype.is_quantized:
            side = side.to(torch.float8_e4m3fn)
        sides.append(side)
    starts = torch.zeros(case.num_reqs + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(case.query_lens).cumsum(0)
    query = draw(case.num_tokens, case.num_heads, case.head_size)
    return Content(
        case=case,
        query=query,
        parts=engine_parts(case, query),
        key=sides[0],
        value=sides[0][..., : case.head_size_v] if case.is_latent else sides[1],
        block_table=block_table,
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        slots=slots,
        sinks=draw(case.num_heads).float() if case.sinks else None,
    )


@dataclass(frozen=True)
class Expected:
    """S sampled tokens of the result in float64, at 3 heads (all where there are fewer)."""

    tokens: torch.Tensor
    """``[S]`` int64 index of each sampled token."""
    heads: torch.Tensor
    """``[3]`` int64 index of each sampled head."""
    rows: torch.Tensor
    """``[S, 3, Dv]`` float64 output."""

    def error_of(self, output: torch.Tensor) -> float:
        """Largest relative norm of the error over the sampled rows; NaN if a row holds NaN.

        Args:
            output: ``[T, H, Dv]``.
        """
        if not bool(torch.isfinite(output).all()):
            return float("nan")
        sampled = output[self.tokens][:, self.heads].double()
        errors = (sampled - self.rows).norm(dim=-1) / self.rows.norm(dim=-1)
        return float(errors.max())


def sampled_tokens(case: KernelCase) -> list[tuple[int, int]]:
    """(request, new token) pairs to check: first, middle and last of batch, lengths and queries."""
    by_length = sorted(range(case.num_reqs), key=lambda row: case.seq_lens[row])
    requests = {0, case.num_reqs // 2, case.num_reqs - 1, by_length[0], by_length[-1]}
    tokens = set()
    for row in requests:
        last = case.query_lens[row] - 1
        tokens |= {(row, index) for index in (0, last // 3, last // 2, last)}
    return sorted(tokens)


def expected_rows(content: Content) -> Expected:
    """The sampled rows of a case, computed one by one in float64."""
    case, device = content.case, content.device
    heads = sorted({0, case.num_heads // 2, case.num_heads - 1})
    starts = exclusive_sums(case.query_lens)
    tokens, rows = [], []
    for request, index in sampled_tokens(case):
        token = starts[request] + index
        tokens.append(token)
        seen = visible_rows(content, request, index)
        rows.append(torch.stack([_row(content, token, head, *seen) for head in heads]))
    return Expected(
        torch.tensor(tokens, device=device), torch.tensor(heads, device=device), torch.stack(rows)
    )


def visible_rows(content: Content, request: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[n, Hk, D]`` keys and ``[n, Hk, Dv]`` values that a new token of a request sees."""
    case = content.case
    position = case.seq_lens[request] - case.query_lens[request] + index
    window = position + 1 if case.sliding_window is None else case.sliding_window
    start = sum(case.seq_lens[:request])
    slots = content.slots[start + max(0, position + 1 - window) : start + position + 1]
    return content.rows(content.key, slots), content.rows(content.value, slots)


def exact_row(content: Content, request: int, token: int, head: int) -> torch.Tensor:
    """``[Dv]`` float64 output of a token of a request at a head, over the keys that it sees."""
    index = token - sum(content.case.query_lens[:request])
    return _row(content, token, head, *visible_rows(content, request, index))


def _row(
    content: Content, token: int, head: int, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """``[Dv]`` float64 output of a token and head over ``[n, Hk, D]`` visible keys and values."""
    case = content.case
    kv_head = head // (case.num_heads // case.num_kv_heads)
    scores = key[:, kv_head].double() @ content.query[token, head].double() * case.scale
    if content.sinks is not None:
        scores = torch.cat([scores, content.sinks[head].double()[None]])
    weights = scores.softmax(0)[: key.shape[0]]
    return weights @ value[:, kv_head].double()


def exclusive_sums(lens: Sequence[int]) -> list[int]:
    """Sums of the first 0, 1, ... and of all lengths."""
    sums = [0]
    for length in lens:
        sums.append(sums[-1] + length)
    return sums
