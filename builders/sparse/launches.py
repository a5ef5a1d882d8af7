"""Launches of the library's own sparse kernel: decided once per step, with scratch that stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

import torch

from builders.buffers import GraphBuffers
from builders.device import device_facts
from builders.sparse.hopper_tiles import HopperOptions, deciding_rows, hopper_sparse_tile
from builders.sparse.tiles import SparseShape, SparseTile, sparse_tile
from specs.sparse_mla import SparsePhase

STATE_BYTES: Final = 256 << 20
"""Of the states that one launch stores; a launch has at least one row."""
_FLOAT: Final = 4


@dataclass(frozen=True, eq=False)
class SparseWorkspace:
    """Scratch of split rows; graphs need it to stay where it is."""

    states: torch.Tensor
    """fp32, any content."""
    sums: torch.Tensor
    """Likewise."""
    counters: torch.Tensor | None = None
    """int32, zeros, which launches leave as they find them; None where no tile has any."""


@dataclass(frozen=True, eq=False)
class SparseLaunch:
    """How the rows of a phase are launched."""

    tile: SparseTile
    twin: SparseTile
    """The plain kernel's, for tensors that the one for Hopper cannot read; the tile itself where it
    is that."""
    rows: int
    """Rows of a launch, one after another where there are more: what there is scratch for."""
    workspace: SparseWorkspace


def workspace_for(
    tile: SparseTile, num_rows: int, num_heads: int, topk: int, rank: int, device: torch.device
) -> SparseWorkspace:
    """Scratch for up to ``num_rows`` rows of a launch."""
    states, sums = tile.state_floats(num_rows, num_heads, topk, rank)
    return SparseWorkspace(
        torch.empty(states, dtype=torch.float32, device=device),
        torch.empty(sums, dtype=torch.float32, device=device),
        torch.zeros(tile.counters, dtype=torch.int32, device=device),
    )


class SparseLaunches:
    """A group's launches, of any number of rows, over scratch in a builder's buffers."""

    def __init__(
        self,
        shape: SparseShape,
        most_rows: int,
        batch_invariant: bool,
        hopper: Mapping[SparsePhase, HopperOptions | None],
        buffers: GraphBuffers,
    ) -> None:
        """
        Args:
            shape: of the layers.
            most_rows: of any step.
            batch_invariant: a row's bits depend on the row alone.
            hopper: of each phase that comes to the library's own kernels what the one for Hopper is
                asked for, None for the plain one; from
                :func:`builders.sparse.hopper_tiles.sparse_kernel_of`.
            buffers: where ``states``, ``sums`` and ``counters`` are declared, on the device that is
                launched on.
        """
        self._shape, self._is_invariant = shape, batch_invariant
        self._hopper = hopper
        self._row_sizes = shape.num_heads, shape.topk, shape.rank
        self._gpu = device_facts(buffers.device)
        few = min(most_rows, deciding_rows(self._gpu.num_multiprocessors))
        self._sizes = sizes = {*range(1, few + 1), most_rows}
        counts = [
            (*tile.state_floats(launch_rows, *self._row_sizes), tile.counters)
            for phase, rows in product(hopper, sizes)
            for *tiles, launch_rows in [self._sized(rows, phase)]
            for tile in tiles
        ]
        states, sums, counters = (max(each) for each in zip(*counts, strict=True))
        self._workspace = SparseWorkspace(
            buffers.declare("states", (states,), torch.float32),
            buffers.declare("sums", (sums,), torch.float32),
            buffers.declare("counters", (counters,), torch.int32),
        )

    def of(self, num_rows: int, phase: SparsePhase) -> SparseLaunch:
        """The launch of a phase: a function of its number of rows, padding included."""
        return SparseLaunch(*self._sized(num_rows, phase), self._workspace)

    def variants(self, phase: SparsePhase) -> tuple[SparseLaunch, ...]:
        """A launch for each way that some number of a phase's rows is launched."""
        found: dict[tuple[SparseTile, SparseTile], SparseLaunch] = {}
        for rows in sorted(self._sizes):
            launch = self.of(rows, phase)
            found.setdefault((launch.tile, launch.twin), launch)
        return tuple(found.values())

    def _sized(self, num_rows: int, phase: SparsePhase) -> tuple[SparseTile, SparseTile, int]:
        """The tile and its twin, and how many rows a launch takes."""
        shape, multiprocessors = self._shape, self._gpu.num_multiprocessors
        given = shape, self._gpu.kind, multiprocessors
        twin = tile = sparse_tile(*given, num_rows, self._is_invariant)
        options = self._hopper[phase]
        if options is not None:
            tile = hopper_sparse_tile(shape, multiprocessors, num_rows, options)
        # Programs' shares meet at as many places whatever the number of rows.
        one = _FLOAT * max(
            sum(each.state_floats(1, *self._row_sizes)) if each.shares == 0 else 0
            for each in (tile, twin)
        )
        fits = num_rows if one == 0 else max(STATE_BYTES // one, 1)
        return tile, twin, max(min(num_rows, fits), 1)
