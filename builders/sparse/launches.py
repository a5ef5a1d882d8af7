"""How the library's own sparse kernels are launched: decided once per step, over fixed scratch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Final

import torch

from builders.buffers import GraphBuffers
from builders.device import device_facts
from builders.sparse.hopper_tiles import HopperOptions, deciding_rows, hopper_sparse_tile
from builders.sparse.tiles import SparseShape, SparseTile, sparse_tile
from specs.sparse_mla import SparsePhase

STATE_BYTES: Final = 256 << 20
"""Most bytes of the states that one launch stores; but a launch has at least one row."""
_FLOAT: Final = 4


@dataclass(frozen=True, eq=False)
class SparseWorkspace:
    """Scratch for rows whose lists are cut; CUDA graphs need it to keep its addresses."""

    states: torch.Tensor
    """fp32 outputs of parts of lists; contents between launches mean nothing."""
    sums: torch.Tensor
    """fp32 maxima and sums of these parts; contents between launches mean nothing."""
    counters: torch.Tensor | None = None
    """int32, zero between launches; None where no tile has counters."""


@dataclass(frozen=True, eq=False)
class SparseLaunch:
    """How the rows of a phase are launched."""

    tile: SparseTile
    twin: SparseTile
    """The portable kernel's tile, for tensors that the Hopper kernel cannot read. Equal to ``tile``
    where the portable kernel takes the rows anyway, and where there is no other tile."""
    rows: int
    """Most rows of a launch, for which there is scratch; a phase with more rows takes several
    launches."""
    workspace: SparseWorkspace
    """Scratch of the launches."""

    @cached_property
    def transforms(self) -> dict[tuple[int, ...], Callable[[], None]]:
        """Launches that make the lists of the step ready, by addresses of lists and block table.

        The step's first layer prepares them for the layers after it.
        """
        return {}


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
    """Launches of one KV cache group, for any number of rows; scratch is in a builder's buffers."""

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
            shape: the layers of the group.
            most_rows: most rows of any step.
            batch_invariant: a row's bits must depend on the row alone.
            hopper: the Hopper kernel's options, or None for the portable kernel, for each phase
                that the library's own kernels may take. They come from
                :func:`builders.sparse.hopper_tiles.sparse_kernel_of`.
            buffers: ``states``, ``sums`` and ``counters`` are declared here, on the device of the
                launches.
        """
        self._shape, self._is_invariant = shape, batch_invariant
        self._hopper = hopper
        self._row_sizes = shape.num_heads, shape.topk, shape.rank
        self._known: dict[tuple[int, SparsePhase], tuple[SparseTile, SparseTile, int]] = {}
        self._tiles: dict[SparseTile, SparseTile] = {}
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

    def is_hopper(self, phase: SparsePhase) -> bool:
        """Whether a phase's rows are the Hopper kernel's; its launches name the portable twin."""
        return self._hopper.get(phase) is not None

    def of(self, num_rows: int, phase: SparsePhase) -> SparseLaunch:
        """How a phase is launched, which follows from its number of rows, padding included."""
        sized = self._known.get((num_rows, phase))
        if sized is None:
            *tiles, launch_rows = self._sized(num_rows, phase)
            # Equal tiles are one object, since variant keys compare objects faster than fields.
            tile, twin = (self._tiles.setdefault(one, one) for one in tiles)
            sized = self._known[num_rows, phase] = tile, twin, launch_rows
        return SparseLaunch(*sized, self._workspace)

    def variants(self, phase: SparsePhase) -> tuple[SparseLaunch, ...]:
        """One launch for each pair of tiles that any number of a phase's rows leads to."""
        found: dict[tuple[SparseTile, SparseTile], SparseLaunch] = {}
        for rows in sorted(self._sizes):
            launch = self.of(rows, phase)
            found.setdefault((launch.tile, launch.twin), launch)
        return tuple(found.values())

    def _sized(self, num_rows: int, phase: SparsePhase) -> tuple[SparseTile, SparseTile, int]:
        """The tile, the portable kernel's tile, and most rows of a launch."""
        shape, multiprocessors = self._shape, self._gpu.num_multiprocessors
        given = shape, self._gpu.kind, multiprocessors
        twin = tile = sparse_tile(*given, num_rows, self._is_invariant)
        options = self._hopper[phase]
        if options is not None:
            tile = hopper_sparse_tile(shape, multiprocessors, num_rows, options)
        # Where programs share lists by tiles, scratch does not grow with the number of rows.
        one = _FLOAT * max(
            sum(each.state_floats(1, *self._row_sizes)) if each.shares == 0 else 0
            for each in (tile, twin)
        )
        fits = num_rows if one == 0 else max(STATE_BYTES // one, 1)
        return tile, twin, max(min(num_rows, fits), 1)
