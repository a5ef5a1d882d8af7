"""Records of SPARSE_MLA's steps: what the impl launches, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.base import AttentionMetadata
from builders.sparse.choice import PhasePlan, SparsePlan
from builders.sparse.launches import SparseLaunch
from builders.sparse.rows import RowLengths
from builders.sparse.vendor_calls import PlannedCalls
from specs.rows import RowFormat


@dataclass
class RowChunk:
    """Query rows whose converted rows are in the buffer at one time."""

    first_row: int
    """Counted from the phase's first."""
    num_rows: int
    slots: torch.Tensor
    """``[S]`` int32 slots that are converted to rows 0 to S - 1 of the buffer, -1 for none: written
    already for ``RAGGED``; for ``GATHERED`` the room, ``num_rows * index_width``, for what the
    transform of the chunk's lists gives."""
    first_req: int = 0
    """Of ``RAGGED``, counted from the phase's first."""
    ends: torch.Tensor | None = None
    """``[R'']`` int32: last row, exclusive, of each of the chunk's requests, likewise."""


@dataclass
class SparseRows:
    """The rows of one phase: one query token each."""

    plan: PhasePlan
    first_req: int
    """Of the phase, in the batch."""
    first_token: int
    """Likewise."""
    num_rows: int
    """Query rows, padding included, where the batch counts it."""
    query_start_loc: torch.Tensor
    """``[R' + 1]`` int32, device, counted in the batch's tokens."""
    seq_lens: torch.Tensor
    """``[R']`` int32, device."""
    block_table: torch.Tensor
    """``[R', max_blocks]`` int32, device."""
    block_size: int
    lengths: RowLengths
    """What belongs to each row, ``[num_rows]``."""
    indices: torch.Tensor
    """``[num_rows, index_width]`` int32 room for the lists as the kernel reads them."""
    counts: torch.Tensor | None
    """``[num_rows]`` int32 room for the entries of each, where the kernel passes over none."""
    offsets: torch.Tensor | None
    """``[R']`` int32: of ``RAGGED``, first row of each request's context in its chunk."""
    chunks: tuple[RowChunk, ...]
    """In order, all rows; empty where nothing is converted."""
    converted: torch.Tensor | None
    """``[rows, row]`` room for converted rows, whole pages of 64, in the type that they have."""
    converted_row: RowFormat | None
    """What they are."""
    launch: SparseLaunch | None
    """Of the library's own kernel; None of another."""
    planned: PlannedCalls | None = None
    """Of a kernel of others: what its calls of the step share."""


@dataclass
class SparseMLAMetadata(AttentionMetadata):
    """A step of sparse latent attention: decodes first. None means that a phase has no rows.

    All rows are ``forward_mqa``'s, and count as decodes where an engine asks for numbers: which
    kernel takes them is said by ``decode`` and ``prefill``.
    """

    num_actual_tokens: int
    num_decodes: int
    """All requests."""
    num_prefills: int
    """0."""
    num_decode_tokens: int
    """All tokens, padding included, where the batch counts it."""
    num_prefill_tokens: int
    """0."""
    plan: SparsePlan
    decode: SparseRows | None
    prefill: SparseRows | None
