"""A step's lengths on the host, for FlashInfer's plans: checked, and in CSR form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from builders.batch import CommonAttentionMetadata
from builders.checks.step_limits import check_common_prefix
from builders.vendor.flashinfer_parts.choice import NAME
from builders.vendor.flashinfer_parts.csr import CsrOnHost
from specs.base import cdiv

if TYPE_CHECKING:
    import numpy as np


@dataclass
class HostLengths:
    """A step's exact lengths on the host.

    They are numpy arrays, since an operation on a few hundred numbers takes a quarter of the time
    that it takes on a tensor. FlashInfer needs numpy anyway.
    """

    query_start_loc: np.ndarray
    """``[R + 1]`` int32 first query row of each request."""
    kv_lens: np.ndarray
    """``[R]`` int32 keys of each request, this step's tokens included."""
    query_lens: np.ndarray
    """``[R]`` int32 query rows of each request."""
    common_prefix_len: int
    lacks_keys: bool
    """True where a request has tokens but no key."""

    @property
    def num_tokens(self) -> int:
        """Query rows of all requests."""
        return int(self.query_start_loc[-1])

    @property
    def num_decodes(self) -> int:
        """Number of requests with one token before the first request with another number."""
        others = self.query_lens != 1
        first = int(others.argmax()) if others.size else 0
        return first if others.size and others[first] else others.size


def host_lengths(
    batch: CommonAttentionMetadata, common_prefix_len: int, page_size: int, name: str = NAME
) -> HostLengths:
    """Copies of the batch's host lengths, checked against each other and the table.

    Args:
        batch: our batch, or vLLM's own object.
        common_prefix_len: leading tokens that all requests share, or 0.
        page_size: tokens per block.
        name: name of the backend, for messages.

    Raises:
        ValueError: the batch has no host lengths, or they do not fit; the message names the
            argument and both values.
    """
    bound, reqs = batch.seq_lens_cpu_upper_bound, batch.num_reqs
    if bound is None:
        raise ValueError(
            f"seq_lens_cpu_upper_bound is needed by {name}, which plans on the host, got None"
        )
    starts = batch.query_start_loc_cpu
    if bound.shape[0] < reqs or starts.shape[0] <= reqs:
        raise ValueError(
            f"seq_lens_cpu_upper_bound and query_start_loc_cpu must have at least num_reqs "
            f"({reqs}) and num_reqs + 1 elements, got {len(bound)} and {len(starts)}"
        )
    own = starts.numpy()[: reqs + 1].astype("int32")
    kv_lens, query_lens = bound.numpy()[:reqs].astype("int32"), own[1:] - own[:-1]
    short = kv_lens < query_lens
    lengths = HostLengths(own, kv_lens, query_lens, common_prefix_len, bool(short.any()))
    if lengths.lacks_keys:
        _check_short(lengths, short)
    _check_extents(lengths, batch.block_table_tensor.shape[1], page_size)
    return lengths


def _check_short(lengths: HostLengths, short: np.ndarray) -> None:
    """Refuse a request with fewer keys than tokens, unless it has no key at all."""
    wrong = (short & (lengths.kv_lens > 0)).nonzero()[0]
    if wrong.size:
        row = int(wrong[0])
        raise ValueError(
            f"seq_lens_cpu_upper_bound[{row}] must be at least the query length "
            f"{int(lengths.query_lens[row])}, got {int(lengths.kv_lens[row])}"
        )


def _check_extents(lengths: HostLengths, width: int, size: int) -> None:
    """Check that the longest request fits its table row, and that requests hold the prefix."""
    longest = int(lengths.kv_lens.max()) if lengths.kv_lens.size else 0
    if longest > width * size:
        raise ValueError(
            f"seq_lens_cpu_upper_bound of up to {longest} needs {cdiv(longest, size)} blocks "
            f"of {size}, block_table_tensor has {width} columns"
        )
    prefix = lengths.common_prefix_len
    if prefix < 0 or prefix % size:
        raise ValueError(
            f"common_prefix_len must be a multiple of block_size ({size}) and not negative, "
            f"got {prefix}"
        )
    check_common_prefix(prefix, lengths.query_lens, lengths.kv_lens)


def csr_on_host(
    query_starts: np.ndarray, kv_lens: np.ndarray, page_size: int, is_pinned: bool
) -> CsrOnHost:
    """Lengths of consecutive requests in the form that FlashInfer's plans read.

    Args:
        query_starts: ``[R + 1]`` int32 first query row of each request.
        kv_lens: ``[R]`` int32 keys of each request.
        page_size: tokens per block.
        is_pinned: allocate pinned memory, so that copies to a GPU do not block the host. torch
            reuses such memory only after the copies from it are done.
    """
    reqs = kv_lens.size
    joined = torch.empty(4 * reqs + 2, dtype=torch.int32, pin_memory=is_pinned)
    written = joined.numpy()
    qo_indptr, kv_indptr = written[: reqs + 1], written[reqs + 1 : 2 * reqs + 2]
    last_page_len, lens = written[2 * reqs + 2 : 3 * reqs + 2], written[3 * reqs + 2 :]
    qo_indptr[:] = query_starts
    if query_starts[0]:
        qo_indptr -= query_starts[0]
    lens[:] = kv_lens
    has_keys = kv_lens > 0
    full = (kv_lens - has_keys) // page_size
    kv_indptr[0] = 0
    (full + has_keys).cumsum(dtype="int32", out=kv_indptr[1:])
    last_page_len[:] = kv_lens - full * page_size
    rows, pages, last, keys = joined.split_with_sizes((reqs + 1, reqs + 1, reqs, reqs))
    return CsrOnHost(
        qo_indptr=rows,
        kv_indptr=pages,
        last_page_len=last,
        kv_lens=keys,
        num_tokens=int(qo_indptr[-1]),
        num_pages=int(kv_indptr[-1]),
    )


def num_pages(kv_lens: np.ndarray, page_size: int) -> int:
    """Pages that hold the keys of all requests together."""
    return int(((kv_lens + (page_size - 1)) // page_size).sum())


def keyless_tokens(lengths: HostLengths, device: torch.device) -> torch.Tensor | None:
    """int64 indices of query rows without a key, on the device; None where every row has one."""
    if not lengths.lacks_keys:
        return None
    rows = ((lengths.kv_lens == 0) & (lengths.query_lens > 0)).nonzero()[0].tolist()
    starts = lengths.query_start_loc.tolist()
    tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
    found = torch.tensor(tokens, dtype=torch.int64)
    if device.type == "cuda":
        found = found.pin_memory()
    return found.to(device, non_blocking=True)


def skipped_pages(kv_lens: Any, starts: Any, window: int, page_size: int) -> Any:
    """``[R]`` int32 whole pages before the first key that a request's first query sees.

    Args:
        kv_lens: ``[R]`` int32 keys of each request; a tensor, or an array on the host.
        starts: ``[R + 1]`` int32 first query row of each request; a tensor, or an array on the
            host.
        window: visible keys, the token's own included.
        page_size: tokens per block.
    """
    first = kv_lens - (starts[1:] - starts[:-1]) - (window - 1)
    return first.clip(0) // page_size


def host_drafts_reason(name: str, draft_index: int) -> str:
    """Why the host cannot plan a draft step from a batch."""
    return (
        f"{name} cannot plan draft step {draft_index}: its host lengths are not exact, since "
        "rejected drafts are known to the device alone; MultiStepDraft plans it where the host is "
        "told of them"
    )


def debug_lengths(batch: CommonAttentionMetadata, lengths: HostLengths, name: str = NAME) -> None:
    """Refuse host lengths that differ from the device's; for debug mode, as it reads the device."""
    for field, host, device in (
        ("query_start_loc_cpu", lengths.query_start_loc, batch.query_start_loc),
        ("seq_lens_cpu_upper_bound", lengths.kv_lens, batch.seq_lens),
    ):
        exact = device[: len(host)].cpu().numpy()
        wrong = (exact != host).nonzero()[0]
        if wrong.size:
            row = int(wrong[0])
            raise ValueError(
                f"{field}[{row}] must be exact for {name}, got {int(host[row])} for the device's "
                f"{int(exact[row])}"
            )
