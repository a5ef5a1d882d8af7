"""Launches of the selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from attn.kernels.sparse.indexer.selection import select_candidates_kernel, select_topk_kernel
from builders.launch.call import KernelCall
from builders.sparse.arguments import RequestPages
from builders.sparse.tiles import IndexTile
from specs.base import cdiv
from specs.rows import INDEXER_PAGE

_FOUR = 4
"""Logits of a load of 16 bytes."""
_SHORT_REGISTERS = 128
"""Most registers of a thread that selects from a short row."""


@dataclass(frozen=True)
class _Rows:
    """Rows of logits of which the largest are selected."""

    logits: torch.Tensor
    """``[T, M]`` fp32."""
    lens: torch.Tensor
    """``[T]`` int32."""
    positions: torch.Tensor | None = None
    """``[T, M]`` int32, the position of each logit; None where it is the column."""

    @property
    def has_vectors(self) -> bool:
        """Whether rows consist of whole fours that begin at 16 bytes."""
        logits = self.logits
        fours = logits.shape[1] % _FOUR == 0 and logits.stride(0) % _FOUR == 0
        return fours and logits.data_ptr() % 16 == 0

    def arguments(self, warps: int) -> dict[str, Any]:
        """The arguments of both kernels that describe the rows."""
        is_vector, stride = self.has_vectors, self.logits.stride(0)
        return {
            "logits_ptr": self.logits,
            "lens_ptr": self.lens,
            "positions_ptr": self.positions,
            "logits_row": stride // _FOUR if is_vector else stride,
            "VECTOR": is_vector,
            "WARPS": warps,
        }


def select_topk_calls(
    logits: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor,
    out_lens: torch.Tensor | None,
    pages: RequestPages | None,
    offsets: torch.Tensor | None,
    tile: IndexTile,
) -> list[KernelCall]:
    """The launches of :func:`attn.ops.indexer.select_topk`, which explains the arguments.

    Rows that may be longer than a tile are cut into segments: all but the last launch leave the
    best of each segment, in memory that is allocated here.
    """
    topk = out.shape[1]
    rows, calls = _Rows(logits, lens), []
    segment = tile.segment_of(topk)
    while rows.logits.shape[1] > segment:
        call, rows = _candidates_of(rows, topk, segment, tile)
        calls.append(call)
    # Candidates are few only if they are of two segments: not worth a kernel of their own.
    is_long = rows.logits.shape[1] > tile.select_short or rows.positions is not None
    warps = tile.select_long_warps if is_long else tile.select_warps
    table = None if pages is None else pages.block_table
    arguments = rows.arguments(warps) | {
        "out_ptr": out,
        "out_lens_ptr": out_lens,
        "table_ptr": table,
        "requests_ptr": None if pages is None else pages.requests,
        "offsets_ptr": offsets,
        "table_row": 0 if table is None else table.stride(0),
        "out_row": out.stride(0),
        "TOPK": topk,
        "WIDTH": triton.next_power_of_2(topk),
        "SHORT": tile.select_short,
        "MOST": segment if is_long else tile.select_short,
        "BLOCK_SIZE": INDEXER_PAGE if pages is None else pages.block_size,
    }
    # Left to itself, ptxas takes more registers for short rows, and fewer programs fit.
    registers = None if is_long else _SHORT_REGISTERS
    call = KernelCall(
        select_topk_kernel, (len(out),), arguments, num_warps=warps, max_registers=registers
    )
    return [*calls, call]


def _candidates_of(
    rows: _Rows, topk: int, segment: int, tile: IndexTile
) -> tuple[KernelCall, _Rows]:
    """The launch that leaves the best of each segment, and the rows that it writes."""
    count, width = len(rows.logits), cdiv(rows.logits.shape[1], segment)
    left = _Rows(
        rows.logits.new_empty(count, width * topk),
        rows.lens.new_empty(count),
        rows.lens.new_empty(count, width * topk),
    )
    warps = tile.select_long_warps
    arguments = rows.arguments(warps) | {
        "out_ptr": left.logits,
        "out_positions_ptr": left.positions,
        "out_lens_ptr": left.lens,
        "out_row": left.logits.stride(0),
        "TOPK": topk,
        "WIDTH": triton.next_power_of_2(topk),
        "SEGMENT": segment,
    }
    return KernelCall(select_candidates_kernel, (count, width), arguments, num_warps=warps), left
