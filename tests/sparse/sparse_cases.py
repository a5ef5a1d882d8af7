"""Query tokens that list rows of a latent cache, with poison wherever nothing may be read.

Bytes of a cache are written and read here by offset, in code that shares nothing with the code
under test. Expected states come from ``attn.testing.oracle``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.ops.sparse_mla import launch_with, sparse_mla
from attn.testing import oracle
from attn.testing.budget import (
    budget,
    low_precision,
    lse_budget,
    lse_errors,
    peaked_queries,
    row_errors,
)
from attn.testing.oracle import Rules
from builders.sparse.arguments import ListedRows
from builders.sparse.launches import SparseLaunch, SparseWorkspace
from builders.sparse.tiles import SparseTile
from specs.rows import LatentFormat

E4M3 = torch.float8_e4m3fn
LAYOUTS = (
    LatentFormat.BF16,
    LatentFormat.FP8_NOPE_FP8_ROPE,
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE,
)
WILD = 2**30
"""An id far outside the cache: reading its row is an access outside the cache's memory."""
K_SCALE = 0.25


PATHS = ("kernel", "torch")
"""The ways of an operation: by its kernel in Triton's interpreter, and by its twin in torch."""


def use(path: str, operation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the operation of a module of ``attn.ops`` take one of :data:`PATHS`."""
    if path == "torch":
        monkeypatch.setattr(operation, "has_kernel", lambda rows: False)
    elif not operation.has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")


@dataclass(frozen=True)
class SparseCase:
    """Sizes and formats of one call."""

    layout: LatentFormat
    num_heads: int
    lens: tuple[int, ...]
    """How many entries of each token's list count."""
    topk: int = 96
    rank: int = 128
    rope_size: int = 32
    block_size: int = 16
    num_blocks: int = 12
    dtype: torch.dtype = torch.float16
    sinks: bool = False
    padded_blocks: bool = False
    """The stride of blocks is larger than their rows need."""
    device: str = "cpu"

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return float((self.rank + self.rope_size) ** -0.5)


def packed(case: SparseCase, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of rows ``[S, row]`` and the real values ``[S, L + r]`` float64 that these bytes stand
    for.
    """
    if case.layout is LatentFormat.BF16:
        whole = torch.cat([latent, rope], -1).to(case.dtype)
        return whole.view(torch.uint8), whole.double()
    if case.layout is LatentFormat.FP8_NOPE_FP8_ROPE:
        codes = (torch.cat([latent, rope], -1) / K_SCALE).clamp(-448, 448).to(E4M3)
        return codes.view(torch.uint8), codes.double() * K_SCALE
    blocks = latent.view(len(latent), -1, 128)
    # Scales differ from block to block and from row to row.
    largest = blocks.abs().amax(-1).clamp(min=1e-3)
    scales = torch.exp2((largest / 448).log2().ceil())
    codes = (blocks / scales[..., None]).clamp(-448, 448).to(E4M3)
    narrow = rope.bfloat16()
    parts = [codes.flatten(1).view(torch.uint8), scales.float().view(torch.uint8)]
    real = (codes.double() * scales[..., None].double()).flatten(1)
    data = torch.cat([*parts, narrow.contiguous().view(torch.uint8)], -1)
    return data, torch.cat([real, narrow.double()], -1)


def attend(
    *, tile: SparseTile | None = None, workspace: SparseWorkspace | None = None, **given: Any
) -> None:
    """Call :func:`attn.ops.sparse_mla.sparse_mla`.

    Args:
        tile: the tile of the launch; None takes the usual one.
        workspace: scratch of the launch; None allocates it.
        **given: the arguments of the function, those of ``ListedRows`` one by one.
    """
    listed = ListedRows(*(given.pop(name) for name in ListedRows._fields))
    if tile is not None and workspace is None:
        given["launch"] = launch_with(tile, given["query"], listed.indices)
    elif tile is not None:
        given["launch"] = SparseLaunch(tile, tile, len(listed.indices), workspace)
    sparse_mla(listed=listed, **given)


class SparseTrial:
    """The inputs of a case, and the judge of its results."""

    def __init__(self, case: SparseCase, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        slots = case.num_blocks * case.block_size
        latent = torch.randn(slots, case.rank, generator=generator)
        # Blocks of 128 elements have very different sizes.
        sizes = torch.exp2(torch.randint(-3, 3, (slots, case.rank // 128, 1), generator=generator))
        latent = (latent.view(slots, -1, 128) * sizes).flatten(1)
        rope = torch.randn(slots, case.rope_size, generator=generator)
        data, self.real = packed(case, latent, rope)
        # No list names block 0 or a third of the other rows, so none of them may be read.
        used = torch.rand(slots, generator=generator) < 0.66
        used[: case.block_size] = False
        data = torch.where(used[:, None], data, torch.full_like(data, 0xFF))
        width = data.shape[1]
        blocks = data.view(case.num_blocks, case.block_size, width)
        if case.padded_blocks:
            room = torch.full(
                (case.num_blocks, case.block_size + 2, width), 0xFF, dtype=torch.uint8
            )
            room[:, : case.block_size] = blocks
            blocks = room[:, : case.block_size]
        self.cache = blocks.to(case.device)
        if case.padded_blocks and case.device != "cpu":
            self.cache = room.to(case.device)[:, : case.block_size]
        rows = len(case.lens)
        live = used.nonzero().flatten()
        self.indices = torch.full((rows, case.topk), WILD, dtype=torch.int32)
        self.query = torch.zeros(rows, case.num_heads, case.rank + case.rope_size)
        for row, length in enumerate(case.lens):
            listed = live[torch.randint(len(live), (length,), generator=generator)]
            gaps = torch.rand(length, generator=generator) < 0.1
            listed = torch.where(gaps, -1, listed)
            if length > 3:
                listed[[0, length - 1]] = live[:2]
                listed[2] = listed[length - 1]  # A duplicate.
            self.indices[row, :length] = listed.int()
            kept = listed[listed >= 0]
            if len(kept):
                extra = [0, len(kept) - 1]
                found = peaked_queries(
                    generator,
                    self.real[kept][:, None],
                    case.num_heads,
                    torch.ones(1, len(kept), dtype=torch.bool),
                    case.scale,
                    extra,
                )
                self.query[row] = found[0].float()
        self.query = self.query.to(case.dtype)
        self.sinks = torch.randn(case.num_heads, generator=generator) + 4 if case.sinks else None
        self.lens = torch.tensor(case.lens, dtype=torch.int32)

    def arguments(self) -> dict[str, Any]:
        """The input arguments of :func:`attend`."""
        case, device = self.case, self.case.device
        query = self.query.to(device)
        return {
            "query": query[..., : case.rank],
            "rotary": self._apart(query[..., case.rank :]),
            "kv_cache": self.cache,
            "indices": self.indices.to(device),
            "topk_lens": self.lens.to(device),
            "layout": case.layout,
            "scale": case.scale,
            "k_scale": torch.tensor(K_SCALE, device=device),
            "sinks": None if self.sinks is None else self.sinks.to(device),
        }

    @staticmethod
    def _apart(rows: Tensor) -> Tensor:
        """A copy of rows with strides of its own: an engine rotates in a tensor beside the query,
        and a kernel that took the query's strides for both would read other numbers here.
        """
        tokens, heads, width = rows.shape
        room = rows.new_full((tokens, heads + 1, width + 8), float("nan"))
        apart = room[:, :heads, :width]
        apart.copy_(rows)
        return apart

    def results(self) -> tuple[Tensor, Tensor]:
        """Tensors for the results, filled with NaN."""
        case = self.case
        shape = (len(case.lens), case.num_heads)
        out = torch.full((*shape, case.rank), float("nan"), dtype=case.dtype, device=case.device)
        return out, torch.full(shape, float("nan"), device=case.device)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The expected state of each query token, float64."""
        listed = self.indices.clone()
        for row, length in enumerate(self.case.lens):
            listed[row, length:] = -1
        rank, query = self.case.rank, self.query.double()
        latent, rope = self.real[:, :rank], self.real[:, rank:]
        sinks = None if self.sinks is None else self.sinks.double()
        return oracle.sparse_mla(
            query[..., :rank], query[..., rank:], latent, rope, listed, self.case.scale, sinks
        )

    def misses(self, out: Tensor, lse: Tensor) -> dict[str, float]:
        """How far results exceed twice the error of the same maths in the low precision."""
        case = self.case
        wanted, wanted_lse = self.expected()
        lows, low_lses = [], []
        rules = Rules(scale=case.scale, causal=False, sinks=self.sinks)
        for row, length in enumerate(case.lens):
            listed = self.indices[row, :length]
            keys = self.real[listed[listed >= 0].long()][:, None]
            low, low_lse = low_precision(
                self.query[row : row + 1], keys, keys[..., : case.rank], 0, rules, case.dtype
            )
            lows.append(low)
            low_lses.append(low_lse)
        low, low_lse = torch.cat(lows), torch.cat(low_lses)
        found = {
            "output": float(row_errors(out.cpu(), wanted).max()) / budget(wanted, low, case.dtype),
            "lse": float(lse_errors(lse.cpu(), wanted_lse).max()) / lse_budget(wanted_lse, low_lse),
        }
        return {name: ratio for name, ratio in found.items() if not ratio <= 1}
