"""The records of a step of SPARSE_MLA, from which the impl launches kernels phase by phase.

A row is one query token with its list of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from builders.base import AttentionMetadata
from builders.latent.prefill import LatentContext, LatentPrefill
from builders.sparse.choice import PhasePlan, SparsePlan
from builders.sparse.joint import JointRows
from builders.sparse.launches import SparseLaunch
from builders.sparse.rows import RowLengths
from builders.sparse.vendor_calls import PlannedCalls
from builders.splitkv.stripe import Stripe
from specs.rows import RowFormat


@dataclass
class RowChunk:
    """Query rows whose converted keys are in the buffer at the same time."""

    first_row: int
    """First query row, counted from the phase's first."""
    num_rows: int
    """Query rows of the chunk."""
    slots: torch.Tensor
    """``[S]`` int32: cache slots that are converted to rows 0 to S - 1 of the buffer, -1 for none.

    For ``RAGGED`` the builder has written them. For ``GATHERED`` they are room for
    ``num_rows * index_width`` slots, which the transform of the chunk's lists writes."""
    first_req: int = 0
    """First request of the chunk, counted from the phase's first; only ``RAGGED`` needs it."""
    ends: torch.Tensor | None = None
    """``[R'']`` int32: end of each of the chunk's requests among the buffer's rows; None unless
    ``RAGGED``."""


@dataclass
class SparseRows:
    """The query rows of one phase, each of one query token, of R' requests."""

    plan: PhasePlan
    """How the rows are attended."""
    first_req: int
    """First request of the phase, in the batch."""
    first_token: int
    """First token of the phase, in the batch."""
    num_rows: int
    """Query rows, padding included where the batch counts it."""
    query_start_loc: torch.Tensor
    """``[R' + 1]`` int32, device: first token of each request, counted in the batch's tokens."""
    seq_lens: torch.Tensor
    """``[R']`` int32, device: KV lengths."""
    block_table: torch.Tensor
    """``[R', max_blocks]`` int32, device: blocks of each request."""
    block_size: int
    """Tokens of a block."""
    lengths: RowLengths
    """Request, visible keys and list length of each row, ``[num_rows]``."""
    indices: torch.Tensor
    """``[num_rows, index_width]`` int32: room for the lists as the kernel reads them."""
    counts: torch.Tensor | None
    """``[num_rows]`` int32: room for the number of entries of each list; None where the kernel
    skips entries of -1."""
    offsets: torch.Tensor | None
    """``[R']`` int32: first row of each request's context in its chunk; None unless ``RAGGED``."""
    chunks: tuple[RowChunk, ...]
    """All rows in order, in chunks; empty where nothing is converted."""
    converted: torch.Tensor | None
    """``[rows, row]``: room for converted rows, whole pages of 64, in the type of their elements;
    None where nothing is converted."""
    converted_row: RowFormat | None
    """Format of the converted rows; None where nothing is converted."""
    launch: SparseLaunch | None
    """How the library's own kernel is launched; None where a vendor's kernel takes all rows."""
    planned: PlannedCalls | None = None
    """Objects that all layers' calls of a vendor's kernel share in this step; None without one."""
    joint: JointRows | None = None
    """How the rows attend together where neighbouring tokens share a tile of heads; None where each
    attends alone. The impl takes the rows alone where the tensors do not allow more."""
    stripe: Stripe | None = None
    """Under DCP, the keys that this rank keeps: the block table is that of these keys, while
    ``seq_lens`` and ``lengths`` count the keys of all ranks. None where the rank has all keys."""

    @property
    def cached_lens(self) -> torch.Tensor:
        """``[R']`` int32, device: keys of each request that this rank keeps."""
        return self.seq_lens if self.stripe is None else self.stripe.local_lens(self.seq_lens)


@dataclass
class ShortPrefill(LatentPrefill):
    """Prefills whose requests have no more tokens than a list has entries.

    Their lists would hold every key that a row sees. Dense attention over keys that are expanded
    for every head costs less and reads no list.
    """

    context_slots: tuple[torch.Tensor, ...] = field(kw_only=True)
    """``[R' * span]`` int32 for each chunk of context: the cache slot of each row of the workspace,
    -1 for none. Empty where the cache's rows are expanded as they are."""
    max_seq_len: int = field(kw_only=True)
    """Host bound on the keys of a request."""
    use_dense_mha: ClassVar[bool] = True
    """vLLM 0.33 asks for this name. Where it is True, no row of a step without decodes is scored
    by the indexer."""

    @property
    def chunked_context(self) -> LatentContext | None:
        """The cached context of the prefills, by the name that vLLM 0.26 asks for."""
        return self.context


@dataclass
class SparseMLAMetadata(AttentionMetadata):
    """A step of sparse latent attention: decodes come first, then prefills.

    ``forward_mqa`` computes the rows of ``decode`` and ``prefill_rows``, so these count as decodes
    in the numbers that an engine reads. ``forward_mha`` computes the prompts of ``prefill``.
    """

    num_actual_tokens: int
    """Tokens to compute, padding included."""
    num_decodes: int
    """Requests of ``decode`` and ``prefill_rows``."""
    num_prefills: int
    """Requests of ``prefill``."""
    num_decode_tokens: int
    """Tokens of ``decode`` and ``prefill_rows``, padding included where the batch counts it."""
    num_prefill_tokens: int
    """Tokens of ``prefill``, padding included where the batch counts it."""
    prefill_max_seq_len: int
    """Host bound on the keys of a request of ``prefill``; 0 without any."""
    topk_tokens: int
    """Entries of a list."""
    plan: SparsePlan
    """The step's plan."""
    decode: SparseRows | None
    """Rows of the decodes; None without any."""
    prefill_rows: SparseRows | None
    """Rows of prefills that attend their lists; None without any."""
    prefill: ShortPrefill | None
    """Plan of prefills that attend every key that they see; None without any."""
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: first token of each request, and the end of the last."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths."""
    ranks: int
    """Ranks that share the keys (DCP): ``forward_mqa`` attends with the query heads of all."""
