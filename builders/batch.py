"""The batch of one step, as every metadata builder receives it, and the order of its requests.

Field names and meanings are vLLM's. So a builder takes vLLM's own ``CommonAttentionMetadata``
object as it is: builders read only fields that vLLM 0.26 and 0.33 both have.

Builders expect decodes first. :func:`decode_first_order` with :func:`reorder` puts decodes first,
and :func:`split_decodes_and_prefills` finds where they end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from builders.pages.paging import compute_slot_mapping

if TYPE_CHECKING:
    import numpy as np


@dataclass
class CommonAttentionMetadata:
    """One step's batch for one KV cache group: R requests and T tokens, padding included in both.

        |---------- context_len ----------|-- query_len --|
        |-------------------- seq_len --------------------|

    Nothing in the library writes on a batch: a changed batch is a new object (:meth:`replace`).
    """

    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: request i owns tokens ``[q[i], q[i + 1])``."""
    query_start_loc_cpu: torch.Tensor
    """``[R + 1]`` int32, host copy of ``query_start_loc``.

    When drafts are trimmed on the device, the lengths of single requests can differ from the
    device's; the total never does."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV length after this step's write.

    For cross attention it is the encoder's length, which can be below the query length. For
    encoders it is the input's length."""
    num_reqs: int
    """R."""
    num_actual_tokens: int
    """Tokens to compute; kernels touch no row of query or output beyond them."""
    max_query_len: int
    """Host bound on the query lengths."""
    max_seq_len: int
    """Host bound on ``seq_lens``: sizes grids, never decides a result."""
    block_table_tensor: torch.Tensor
    """``[R, max_blocks]`` int32, device: physical block of each logical block. Entries past
    ``ceil(seq_len / block_size)`` are undefined."""
    slot_mapping: torch.Tensor
    """``[T]`` int64, device: ``block * block_size + offset`` of each new token; -1 skips it."""
    causal: bool | torch.Tensor = True
    """One flag for all requests, or ``[R]`` per request (nonzero means causal), device."""
    logits_indices_padded: torch.Tensor | None = None
    """Indices of the tokens whose logits are wanted (KV-sharing fast prefill), padded; device."""
    num_logits_indices: int | None = None
    """vLLM's; no builder of this library reads it."""
    max_logits_per_req: int | None = None
    """vLLM's; no builder of this library reads it."""
    encoder_seq_lens: torch.Tensor | None = None
    """``[R]`` int32, device: encoder lengths, for cross attention."""
    encoder_seq_lens_cpu: np.ndarray | None = None
    """``[R]`` host copy of ``encoder_seq_lens``, exact; 0 for a request whose encoder keys an
    earlier step wrote.

    It is needed where the block table has room for more keys than
    ``EngineConfig.max_encoder_len``."""
    dcp_local_seq_lens: torch.Tensor | None = None
    """``[R]`` int32, device: this decode-context-parallel rank's share of ``seq_lens``."""
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    """``[T]`` int64, device: absolute position of each token."""
    is_prefilling: torch.Tensor | None = None
    """``[R]`` bool, host: the request's prompt is not yet fully computed."""
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    """``[R]`` int32, host: at least ``seq_lens``; exact for prefill rows."""
    req_idx: np.ndarray | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    """Request -> inclusive position ranges attended in both directions (multimodal tokens)."""
    rswa_prefix_lens: torch.Tensor | None = None
    """``[R]`` int32, device: leading tokens that stay visible beside the window (R-SWA)."""
    replayssm_decode_base_cpu: torch.Tensor | None = None
    block_size: int | None = None
    """Tokens per block of the table; None where the maker of the batch does not say, as in vLLM's
    own object. Builders refuse a batch with another block size than their cache's."""

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor,
        block_size: int,
    ) -> CommonAttentionMetadata:
        """Make a decoder batch from host lengths, as an engine's runner assembles it.

        Args:
            query_lens: new tokens of each of R requests.
            seq_lens: KV length of each of R requests, the new tokens included.
            block_table: ``[R, max_blocks]`` int32; its device is the batch's. A table without
                columns belongs to layers that cache nothing.
            block_size: tokens per block.

        Raises:
            ValueError: a length is negative; ``query_lens``, ``seq_lens`` and ``block_table`` have
                different numbers of requests; a query is longer than its sequence; a table that
                has columns has fewer than a request with new tokens needs; ``block_size`` is not
                positive.
        """
        _check_lengths(query_lens, seq_lens, block_table, block_size)
        device = block_table.device
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(query_lens, dtype=torch.int32).cumsum(0)
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        num_tokens = int(starts[-1])
        starts_device, lens_device = starts.to(device), lens.to(device)
        positions = [
            torch.arange(seq_len - query_len, seq_len)
            for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
        ]
        return cls(
            query_start_loc=starts_device,
            query_start_loc_cpu=starts,
            seq_lens=lens_device,
            num_reqs=len(query_lens),
            num_actual_tokens=num_tokens,
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            block_table_tensor=block_table,
            slot_mapping=compute_slot_mapping(
                block_table, starts_device, lens_device, num_tokens, block_size
            ),
            positions=torch.cat([*positions, torch.arange(0)]).to(device),
            seq_lens_cpu_upper_bound=lens,
            block_size=block_size,
        )

    def batch_size(self) -> int:
        """R, from the device tensor's shape."""
        return int(self.seq_lens.shape[0])

    def naive_query_lens(self) -> torch.Tensor:
        """``[R]`` int32, device: new tokens of each request."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    def compute_num_computed_tokens(self) -> torch.Tensor:
        """``[R]`` int32, device: context lengths (decoder self-attention only)."""
        return self.seq_lens - self.naive_query_lens()

    def token_to_req_indices(self, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """``[T]`` int32, device: the request of each token, computed without a host sync.

        Args:
            buffer: ``[>= T]`` int32 to write into, for CUDA graphs; None allocates.
        """
        tokens = torch.arange(
            self.num_actual_tokens, dtype=torch.int32, device=self.query_start_loc.device
        )
        ends = self.query_start_loc[1:].contiguous()
        out = None if buffer is None else buffer[: self.num_actual_tokens]
        rows = torch.searchsorted(ends, tokens, right=True, out_int32=True, out=out)
        # Padding tokens follow the last request. They get its index, which is in range at least.
        return rows.clamp_(max=max(self.num_reqs - 1, 0))

    def replace(self, **changes: Any) -> CommonAttentionMetadata:
        """A copy with some fields changed; every other field is kept."""
        return dataclasses.replace(self, **changes)

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """The batch without padding requests and tokens: its tensors are views of this batch's.

        Args:
            num_actual_tokens: real tokens, at most ``num_actual_tokens`` of this object.
            num_actual_reqs: real requests, at most ``num_reqs``.

        Raises:
            ValueError: one of the two is negative or larger than this batch's.
        """
        if not 0 <= num_actual_reqs <= self.num_reqs:
            raise ValueError(
                f"num_actual_reqs must be in [0, {self.num_reqs}], got {num_actual_reqs}"
            )
        if not 0 <= num_actual_tokens <= self.num_actual_tokens:
            raise ValueError(
                f"num_actual_tokens must be in [0, {self.num_actual_tokens}], "
                f"got {num_actual_tokens}"
            )
        changes: dict[str, Any] = {
            "num_reqs": num_actual_reqs,
            "num_actual_tokens": num_actual_tokens,
        }
        for name, (extent, extra) in LEADING_AXIS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                stop = num_actual_reqs + extra if extent == "reqs" else num_actual_tokens
                changes[name] = value[:stop]
        if self.mm_req_doc_ranges is not None:
            changes["mm_req_doc_ranges"] = {
                req: ranges
                for req, ranges in self.mm_req_doc_ranges.items()
                if req < num_actual_reqs
            }
        return dataclasses.replace(self, **changes)


def replace_known(batch: CommonAttentionMetadata, **changes: Any) -> CommonAttentionMetadata:
    """A copy of a batch with some fields changed; changes to fields that it lacks are left out.

    vLLM's own object can be given in place of ours, and vLLM's versions differ in optional fields.
    """
    known = {field.name for field in dataclasses.fields(batch)}
    return dataclasses.replace(batch, **{k: v for k, v in changes.items() if k in known})


def refuse_fields(batch: CommonAttentionMetadata, backend: str, *names: str) -> None:
    """Refuse a batch with fields that a backend would silently ignore.

    Args:
        batch: ours or vLLM's own object.
        backend: name of the backend, for the message.
        *names: the fields.

    Raises:
        NotImplementedError: one of the fields is set; the message names it.
    """
    for name in names:
        if getattr(batch, name, None) is not None:
            raise NotImplementedError(f"{backend} does not support {name}")


# Fields in which vLLM's own object (0.26, 0.33) caches values derived from its lengths. A copy with
# other lengths must not keep them. Our class does not have these fields.
VLLM_CACHES = (
    "dcp_local_seq_lens_cpu",
    "_seq_lens_cpu",
    "_num_computed_tokens_cpu",
    "_num_computed_tokens_cache",
    "_token_to_req_indices_cache",
)

# Leading axis of each tensor field, and how many entries it has beyond one per request or token. A
# test checks that no field is missing.
LEADING_AXIS = {
    "query_start_loc": ("reqs", 1),
    "query_start_loc_cpu": ("reqs", 1),
    "seq_lens": ("reqs", 0),
    "block_table_tensor": ("reqs", 0),
    "slot_mapping": ("tokens", 0),
    "causal": ("reqs", 0),
    "encoder_seq_lens": ("reqs", 0),
    "encoder_seq_lens_cpu": ("reqs", 0),
    "dcp_local_seq_lens": ("reqs", 0),
    "dcp_local_seq_lens_cpu_upper_bound": ("reqs", 0),
    "positions": ("tokens", 0),
    "is_prefilling": ("reqs", 0),
    "seq_lens_cpu_upper_bound": ("reqs", 0),
    "req_idx": ("reqs", 0),
    "rswa_prefix_lens": ("reqs", 0),
    "replayssm_decode_base_cpu": ("reqs", 0),
}


def _check_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor, block_size: int
) -> None:
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    if not len(query_lens) == len(seq_lens) == block_table.shape[0]:
        raise ValueError(
            f"query_lens, seq_lens and block_table must have one entry per request, got "
            f"{len(query_lens)}, {len(seq_lens)} and {block_table.shape[0]}"
        )
    columns = block_table.shape[1]
    for row, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if seq_len < 0:
            raise ValueError(f"seq_lens[{row}] must not be negative, got {seq_len}")
        if not 0 <= query_len <= seq_len:
            raise ValueError(
                f"query_lens[{row}] must be in [0, seq_lens[{row}]] = [0, {seq_len}], "
                f"got {query_len}"
            )
        # A request without new tokens is padding.
        if query_len and 0 < columns * block_size < seq_len:
            raise ValueError(
                f"block_table must have a column for each block of {block_size} tokens of "
                f"seq_lens[{row}] = {seq_len}, got {columns} columns"
            )


@dataclass(frozen=True)
class BatchSplit:
    """Where the decodes of a batch end: leading requests are decodes, the others prefills.

    Both numbers of requests sum to the batch's requests, and both numbers of tokens to its tokens.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(
    batch: CommonAttentionMetadata,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
) -> BatchSplit:
    """Find where decodes end in a batch ordered decode, short extend, long extend, prefill.

    The function reads host lengths only. If they are not exact, the boundary may cost speed but no
    correctness, since the decode path and the prefill path both compute any request.

    Args:
        batch: a decode-first batch.
        decode_threshold: most new tokens of a decode.
        require_uniform: decodes must share one query length; padding requests (length 0) may
            follow.
        treat_short_extends_as_decodes: a short chunk of a prompt counts as a decode; otherwise
            ``batch.is_prefilling`` must be given.

    Raises:
        ValueError: short extends are no decodes, and ``batch.is_prefilling`` is missing.
    """
    num_reqs, num_tokens = batch.num_reqs, batch.num_actual_tokens
    if (
        batch.max_query_len <= decode_threshold
        and (not require_uniform or decode_threshold <= 1)
        and treat_short_extends_as_decodes
    ):
        return BatchSplit(num_reqs, 0, num_tokens, 0)
    starts: list[int] = batch.query_start_loc_cpu.tolist()
    lens = [stop - start for start, stop in pairwise(starts)]
    prefilling: list[bool] = [False] * num_reqs
    if not treat_short_extends_as_decodes:
        if batch.is_prefilling is None:
            raise ValueError("is_prefilling is needed when short extends are not decodes")
        prefilling = batch.is_prefilling.tolist()
    uniform = lens[0] if lens else 0
    for row, query_len in enumerate(lens):
        odd = require_uniform and query_len not in (uniform, 0)
        if query_len > decode_threshold or odd or prefilling[row]:
            return BatchSplit(row, num_reqs - row, starts[row], num_tokens - starts[row])
    return BatchSplit(num_reqs, 0, num_tokens, 0)


def decode_first_order(
    query_lens: torch.Tensor, context_lens: torch.Tensor, decode_threshold: int = 1
) -> torch.Tensor:
    """A stable order of requests: decode, short extend, long extend, prefill.

    Args:
        query_lens: ``[R]`` integer, host.
        context_lens: ``[R]`` integer, host: tokens already cached.
        decode_threshold: most new tokens of a decode or a short extend.

    Returns:
        ``[R]`` int64 permutation: position i of the new batch is request ``order[i]``.
    """
    has_context = context_lens > 0
    short = query_lens <= decode_threshold
    rank = torch.full_like(query_lens, 3)
    rank[has_context & ~short] = 2
    rank[has_context & short & (query_lens > 1)] = 1
    rank[has_context & (query_lens <= 1)] = 0
    # Padding requests stay at the end, where unpadded() cuts them off.
    rank[query_lens == 0] = 4
    return torch.argsort(rank, stable=True)


def reorder(batch: CommonAttentionMetadata, order: torch.Tensor) -> CommonAttentionMetadata:
    """The batch with its requests in another order; tokens move with their requests.

    Tokens are moved by the host's lengths, which must agree with the device's.

    Args:
        batch: any batch.
        order: ``[R]`` int64 permutation, host.

    Raises:
        ValueError: the batch lists tokens whose logits are wanted, which must be listed after
            reordering.
    """
    if batch.logits_indices_padded is not None:
        raise ValueError("logits_indices_padded counts tokens in the old order: reorder before it")
    starts = batch.query_start_loc_cpu.long()
    lens = (starts[1:] - starts[:-1])[order]
    new_starts = torch.zeros(batch.num_reqs + 1, dtype=torch.int32)
    new_starts[1:] = lens.cumsum(0)
    moved = [torch.arange(int(starts[row]), int(starts[row + 1])) for row in order.tolist()]
    tokens = torch.cat([*moved, torch.arange(0)])
    changes: dict[str, Any] = {
        "query_start_loc": new_starts.to(batch.query_start_loc.device),
        "query_start_loc_cpu": new_starts,
    }
    for name, (extent, _) in LEADING_AXIS.items():
        value = getattr(batch, name, None)
        if name in changes or value is None or isinstance(value, bool):
            continue
        index = order
        if extent == "tokens":
            # Tokens past the last request's are padding and stay where they are.
            index = torch.cat([tokens, torch.arange(len(tokens), len(value))])
        is_tensor = isinstance(value, torch.Tensor)
        changes[name] = value[index.to(value.device) if is_tensor else index.tolist()]
    if batch.mm_req_doc_ranges is not None:
        inverse = {old: new for new, old in enumerate(order.tolist())}
        ranges = batch.mm_req_doc_ranges.items()
        changes["mm_req_doc_ranges"] = {inverse[req]: spans for req, spans in ranges}
    return replace_known(batch, **changes, **dict.fromkeys(VLLM_CACHES))
