"""When neighbouring tokens of prompts attend together over joint lists, and with what memory.

With few heads, a tile of 64 rows has room for the heads of several tokens. Neighbouring tokens of a
prompt list mostly the same keys, so a tile of several tokens reads fewer rows than its tokens would
alone. How many fewer depends on the lists: among keys that are few beside a list's length, most are
in every list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch

from builders.buffers import GraphBuffers
from builders.sparse.arguments import JointLists
from builders.sparse.hopper_tiles import HopperOptions, hopper_sparse_tile, wide_options
from builders.sparse.launches import SparseLaunch, SparseWorkspace
from builders.sparse.tiles import MOST_ROWS, NarrowSparseTile, SparseShape, SparseTile
from specs.base import cdiv
from specs.rows import LatentFormat

MOST_JOINED: Final = 8
"""Most tokens of a joint list."""
REACH: Final = {LatentFormat.BF16: 16, LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: 3}
"""Most keys of a request, in lengths of a list, for which lists are joined; by the format of rows.

Rows that are converted cost more in a tile of 64 heads. 16 heads, 4,096 tokens, lists of 2,048 keys
drawn evenly: from 16,384 keys of 16 bits joint lists took 2,058 us and lists of tokens 2,257; from
32,768 keys 2,192 and 2,098, but 1,476 and 2,055 where neighbours have half of their keys in common.
Now 2,048 tokens of 32,768 keys take 923 us by joint lists and 924 us by lists of tokens. From 8,192
converted keys joint lists took 1,774 us and lists of tokens 1,338."""
_WINDOW: Final = 32768
"""Positions that a program which joins lists marks at a time."""
_PROGRAMS_PER_SM: Final = 4
"""Programs on each multiprocessor that join lists."""


@dataclass(frozen=True, eq=False)
class JointRows:
    """The rows of a phase as groups of neighbouring tokens."""

    lists: JointLists
    """Room for the joint lists."""
    launch: SparseLaunch
    """How the kernel that attends the groups is launched."""

    @cached_property
    def joins(self) -> dict[tuple[int, ...], Callable[[], None]]:
        """Launches that join the step's lists, by addresses of lists and block table.

        The step's first layer prepares them for the layers after it.
        """
        return {}


def joint_tokens(shape: SparseShape, options: HopperOptions | None) -> int:
    """Tokens whose heads fill a tile; 1 where every token attends alone.

    Args:
        shape: the layers.
        options: options of the Hopper kernel that takes the rows one by one; None for the portable
            kernel.
    """
    if not isinstance(options, NarrowSparseTile):
        return 1
    if shape.layout not in REACH:
        return 1
    tokens = MOST_JOINED
    while tokens > 1 and tokens * shape.num_heads > MOST_ROWS:
        tokens //= 2
    return tokens


def joint_tile(shape: SparseShape, tokens: int, multiprocessors: int) -> SparseTile:
    """The wide Hopper kernel's tile for joint lists, none of which is cut.

    Args:
        shape: the layers, with the lists of single tokens.
        tokens: tokens of a group, from :func:`joint_tokens`.
        multiprocessors: multiprocessors of the device.
    """
    whole = replace(shape, topk=shape.topk * tokens)
    options = replace(wide_options(shape), tokens=tokens, balanced=False)
    # With a list for each multiprocessor no list is cut.
    return hopper_sparse_tile(whole, multiprocessors, multiprocessors, options)


class JointPrefill:
    """Groups of the tokens of prompts, for the layers of one KV cache group."""

    def __init__(
        self, shape: SparseShape, tokens: int, multiprocessors: int, buffers: GraphBuffers
    ) -> None:
        """
        Args:
            shape: the layers.
            tokens: tokens of a group, from :func:`joint_tokens`.
            multiprocessors: multiprocessors of the device.
            buffers: ``marks`` and ``joint_counts`` are declared here. Joint lists take the place of
                the lists of ``indices``, which have room for :data:`MOST_JOINED` lists more than
                any step has rows.
        """
        self.tokens, self._topk, self._buffers = tokens, shape.topk, buffers
        self._multiprocessors = multiprocessors
        self._reach = REACH[shape.layout] * shape.topk
        tile = joint_tile(shape, tokens, multiprocessors)
        none = torch.empty(0, dtype=torch.float32, device=buffers.device)
        rows = len(buffers["indices"]) // shape.topk
        self._launch = SparseLaunch(tile, tile, rows, SparseWorkspace(none, none))
        programs = _PROGRAMS_PER_SM * multiprocessors
        window = min(_WINDOW, self._reach)
        window = 1 << (window - 1).bit_length()
        buffers.declare("marks", (programs, window // 4), torch.int32)
        buffers.declare("joint_counts", (cdiv(rows, tokens),), torch.int32)

    def serves(self, count: int, bounds: Sequence[int]) -> bool:
        """Whether the rows of a step attend together.

        Args:
            count: rows of the prompts.
            bounds: host bounds on the keys of each prompt.
        """
        fills = cdiv(count, self.tokens) >= self._multiprocessors
        return fills and max(bounds, default=0) <= self._reach

    def rows(self, first: int, count: int) -> JointRows:
        """Groups of ``count`` rows, in place of the lists of rows from row ``first`` on."""
        groups, width = cdiv(count, self.tokens), self.tokens * self._topk
        begin = first * self._topk
        room = self._buffers["indices"][begin : begin + groups * width]
        lists = JointLists(
            self.tokens,
            room.view(groups, width),
            self._buffers["joint_counts"][:groups],
            self._buffers["marks"],
        )
        return JointRows(lists, self._launch)
