"""Inputs of a case of latent attention over lists: rows of a cache, lists and queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import torch

from attn.bench.cases.case import MODEL_DTYPE, KernelCase
from attn.bench.cases.inputs import Expected, engine_parts
from attn.bench.cases.needles import LONG_DRAWS, MOST_DRAWS, SHORT_QUERY, STEP, Draw, aimed
from attn.reference import sparse_mla as reference
from specs.base import cdiv
from specs.layouts import latent_views
from specs.rows import INDEXER_PAGE, RowFormat

JUDGED: Final = 3
"""Number of rows that are compared with float64."""
K_SCALE: Final = 0.5


@dataclass(frozen=True)
class SparseContent:
    """Tensors of a case with T new tokens of R requests."""

    case: KernelCase
    cache: torch.Tensor
    """``[N, P, row]`` bytes of cached rows."""
    query: torch.Tensor
    """``[T, H, L + r]`` absorbed queries."""
    parts: tuple[torch.Tensor, torch.Tensor]
    """The queries as an engine passes them; see
    :func:`attn.bench.cases.inputs.engine_parts`."""
    block_table: torch.Tensor
    """``[R, pages]`` int32, permuted."""
    positions: torch.Tensor
    """``[T, topk]`` int32 positions in the token's request, without duplicates in a row."""
    requests: torch.Tensor
    """``[T]`` int32 request of each token."""
    indices: torch.Tensor
    """``[T, topk]`` int32 slots of ``positions``."""
    k_scale: torch.Tensor

    def load(self, query: torch.Tensor) -> None:
        """Write ``[T, H, L + r]`` queries to every tensor that kernels read them from."""
        rank = self.case.head_size_v
        self.query.copy_(query)
        self.parts[0].copy_(query[..., :rank])
        self.parts[1].copy_(query[..., rank:])

    def rows(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[..., L + r]`` values of cached rows.

        Args:
            slots: ``[...]`` int64.
            dtype: type of the result; float64 is exact.
        """
        case = self.case
        # The arithmetic is float64, but BF16 rows of the cache must be read in the model's dtype.
        found = reference.read_listed(
            self.cache,
            slots.flatten(),
            layout=case.latent_format,
            rank=case.head_size_v,
            rope_size=case.rope_size,
            k_scale=self.k_scale,
            model_dtype=self.query.dtype,
            dtype=dtype,
        )
        return found.view(*slots.shape, case.head_size)

    def exact(self, token: int, heads: torch.Tensor) -> torch.Tensor:
        """``[len(heads), L]`` float64 output of a token."""
        keys = self.rows(self.indices[token].long(), torch.float64)
        scores = self.query[token, heads].double() @ keys.T * self.case.scale
        return scores.softmax(-1) @ keys[:, : self.case.head_size_v]

    @cached_property
    def expected(self) -> Expected:
        """Sampled rows in float64."""
        case, device = self.case, self.query.device
        some = sorted({0, case.num_heads // 2, case.num_heads - 1})
        heads = torch.tensor(some, device=device)
        tokens = range(min(JUDGED, len(self.query)))
        wanted = torch.stack([self.exact(token, heads) for token in tokens])
        return Expected(torch.tensor([*tokens], device=device), heads, wanted)

    def draws(self) -> Iterator[Draw]:
        """Queries that each look for one entry of their list.

        In a decode or a verify every entry is the needle of some head.
        """
        case, device = self.case, self.query.device
        count = LONG_DRAWS
        if max(case.query_lens) <= SHORT_QUERY:
            count = min(case.topk // case.num_heads + 1, MOST_DRAWS)
        heads = torch.arange(case.num_heads, device=device)
        tokens = torch.arange(case.num_tokens, device=device)[:, None]
        for draw in range(count):
            places = ((draw * case.num_heads + heads + 7 * tokens) * STEP) % case.topk
            rows = self.rows(self.indices.gather(1, places).long(), torch.float32)

            def exact(token: int, head: int) -> torch.Tensor:
                return self.exact(token, heads[head : head + 1])[0]

            query = aimed(rows, case.scale).to(self.query.dtype)
            yield Draw(query, rows[..., : case.head_size_v], exact)


def filled_cache(
    row: RowFormat, blocks: int, device: torch.device, seed: int, scales: bool
) -> torch.Tensor:
    """``[N, 64, row]`` bytes of normally distributed rows; scales are powers of two, or all 1."""
    generator = torch.Generator(device).manual_seed(seed)
    cache = torch.empty(blocks, INDEXER_PAGE, row.nbytes, dtype=torch.uint8, device=device)
    for name, view in latent_views(cache, row).items():
        # Filled in parts, because the random values are drawn in fp32.
        for start in range(0, len(view), 4096):
            part = view[start : start + 4096]
            values = torch.randn(*part.shape, device=device, generator=generator)
            if name == "scale":
                values = torch.exp2(values.round()) if scales else torch.ones_like(values)
            part.copy_(values)
    return cache


def sparse_content(case: KernelCase, device: torch.device, seed: int) -> SparseContent:
    """Random tensors of a case; requests share no cached rows, and a token lists what it sees.

    Raises:
        ValueError: a token sees fewer keys than it must list.
    """
    pages = cdiv(max(case.seq_lens), INDEXER_PAGE)
    generator = torch.Generator(device).manual_seed(seed + 1)
    cache = filled_cache(case.latent_row, case.num_reqs * pages, device, seed, scales=True)
    shape = case.num_tokens, case.num_heads, case.head_size
    query = (3 * torch.randn(*shape, device=device, generator=generator)).to(MODEL_DTYPE.torch)
    blocks = torch.randperm(case.num_reqs * pages, device=device, generator=generator)
    table = blocks.view(case.num_reqs, pages).int()
    lists, requests = [], []
    draw = partial(torch.randperm, device=device, generator=generator)
    for request, (new, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        if length - new + 1 < case.topk:
            raise ValueError(f"topk must be at most the keys of a token, got {case.topk}")
        lists += [draw(length - new + 1 + index)[: case.topk].int() for index in range(new)]
        requests += [request] * new
    positions, owner = torch.stack(lists), torch.tensor(requests, device=device)
    page = table[owner].gather(1, (positions // INDEXER_PAGE).long())
    parts = engine_parts(case, query)
    assert parts is not None
    return SparseContent(
        case=case,
        cache=cache,
        query=query,
        parts=parts,
        block_table=table,
        positions=positions,
        requests=owner.int(),
        indices=page * INDEXER_PAGE + positions % INDEXER_PAGE,
        k_scale=torch.tensor(K_SCALE, device=device),
    )
