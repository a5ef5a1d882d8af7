"""A step's lengths on the host, for FlashInfer's plans: checked, and in CSR form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.common import CommonAttentionMetadata
from builders.flashinfer_choice import NAME
from builders.flashinfer_compat import CsrOnHost
from specs.base import cdiv


@dataclass
class HostLengths:
    """A step's lengths on the host, exact."""

    query_start_loc: torch.Tensor
    """``[R + 1]`` int32."""
    kv_lens: torch.Tensor
    """``[R]`` int32."""
    common_prefix_len: int

    @property
    def query_lens(self) -> torch.Tensor:
        """``[R]`` int32."""
        return self.query_start_loc.diff()


def host_lengths(
    batch: CommonAttentionMetadata, common_prefix_len: int, page_size: int, name: str = NAME
) -> HostLengths:
    """Copies of the batch's host lengths, checked against each other and the table.

    Args:
        batch: ours or vLLM's own object.
        common_prefix_len: leading tokens that all requests share, or 0.
        page_size: tokens per block.
        name: of the backend, for messages.

    Raises:
        ValueError: there are none, or they do not fit; the message names the argument and both
            values.
    """
    bound, reqs = batch.seq_lens_cpu_upper_bound, batch.num_reqs
    if bound is None:
        raise ValueError(
            f"seq_lens_cpu_upper_bound is needed by {name}, which plans on the host, got None"
        )
    if len(bound) < reqs or len(batch.query_start_loc_cpu) <= reqs:
        raise ValueError(
            f"seq_lens_cpu_upper_bound and query_start_loc_cpu must have at least num_reqs "
            f"({reqs}) and num_reqs + 1 elements, got {len(bound)} and "
            f"{len(batch.query_start_loc_cpu)}"
        )
    starts = batch.query_start_loc_cpu[: reqs + 1].to(torch.int32, copy=True)
    lengths = HostLengths(starts, bound[:reqs].to(torch.int32, copy=True), common_prefix_len)
    _check_lengths(lengths, batch.block_table_tensor.shape[1], page_size)
    return lengths


def _check_lengths(lengths: HostLengths, width: int, size: int) -> None:
    query_lens, kv_lens = lengths.query_lens, lengths.kv_lens
    prefix = lengths.common_prefix_len
    short = torch.nonzero((kv_lens > 0) & (kv_lens < query_lens)).flatten()
    if len(short):
        row = int(short[0])
        raise ValueError(
            f"seq_lens_cpu_upper_bound[{row}] must be at least the query length "
            f"{int(query_lens[row])}, got {int(kv_lens[row])}"
        )
    longest = int(kv_lens.max()) if len(kv_lens) else 0
    if cdiv(longest, size) > width:
        raise ValueError(
            f"seq_lens_cpu_upper_bound of up to {longest} needs {cdiv(longest, size)} blocks "
            f"of {size}, block_table_tensor has {width} columns"
        )
    if prefix < 0 or prefix % size:
        raise ValueError(
            f"common_prefix_len must be a multiple of block_size ({size}) and not negative, "
            f"got {prefix}"
        )
    if not prefix or not query_lens.any():
        return
    context = int((kv_lens - query_lens)[query_lens > 0].min())
    if prefix > context:
        raise ValueError(
            f"common_prefix_len must be at most the computed tokens of every request, got "
            f"{prefix} and {context}"
        )


def csr_on_host(
    query_starts: torch.Tensor, kv_lens: torch.Tensor, page_size: int, is_pinned: bool
) -> CsrOnHost:
    """Lengths of consecutive requests as FlashInfer's plans read them.

    Args:
        query_starts: ``[R + 1]`` int32 first query row of each request, host.
        kv_lens: ``[R]`` int32 keys, host.
        page_size: tokens per block.
        is_pinned: in memory that copies to a GPU need not wait for.
    """
    reqs = len(kv_lens)
    joined = torch.empty(4 * reqs + 2, dtype=torch.int32, pin_memory=is_pinned)
    qo_indptr, kv_indptr = joined[: reqs + 1], joined[reqs + 1 : 2 * reqs + 2]
    last_page_len, lens = joined[2 * reqs + 2 : 3 * reqs + 2], joined[3 * reqs + 2 :]
    torch.sub(query_starts, query_starts[0], out=qo_indptr)
    lens.copy_(kv_lens)
    pages = num_pages(kv_lens, page_size)
    kv_indptr[0] = 0
    torch.cumsum(pages, 0, out=kv_indptr[1:])
    torch.sub(kv_lens, (pages - 1).clamp_(min=0) * page_size, out=last_page_len)
    return CsrOnHost(
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        last_page_len=last_page_len,
        kv_lens=lens,
        num_tokens=int(qo_indptr[-1]),
        num_pages=int(kv_indptr[-1]),
        max_query_len=int(qo_indptr.diff().max()) if reqs else 0,
    )


def num_pages(kv_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[R]`` int32 pages that hold so many keys."""
    return (kv_lens + (page_size - 1)).div_(page_size, rounding_mode="floor")


def keyless_tokens(lengths: HostLengths, device: torch.device) -> torch.Tensor | None:
    """int64 query rows of requests without a key, on the device; None where every row has one."""
    has_none = (lengths.kv_lens == 0) & (lengths.query_lens > 0)
    if not has_none.any():
        return None
    rows = torch.nonzero(has_none).flatten().tolist()
    starts = lengths.query_start_loc.tolist()
    tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
    found = torch.tensor(tokens, dtype=torch.int64)
    if device.type == "cuda":
        found = found.pin_memory()
    return found.to(device, non_blocking=True)


def skipped_pages(
    kv_lens: torch.Tensor, starts: torch.Tensor, window: int | None, page_size: int
) -> torch.Tensor | None:
    """``[R]`` int32 whole pages before the first key that a request's first query sees; None
    without a window.
    """
    if window is None:
        return None
    first = (kv_lens - starts.diff() - (window - 1)).clamp(min=0)
    return first // page_size


def host_drafts_reason(name: str, draft_index: int) -> str:
    """Why a draft step is not planned from a batch alone."""
    return (
        f"{name} cannot plan draft step {draft_index}: its host lengths are not exact, since "
        "rejected drafts are known to the device alone; MultiStepDraft plans it where the host is "
        "told of them"
    )


def debug_lengths(batch: CommonAttentionMetadata, lengths: HostLengths, name: str = NAME) -> None:
    """What the host believes is what the device has; reads device values."""
    for field, host, device in (
        ("query_start_loc_cpu", lengths.query_start_loc, batch.query_start_loc),
        ("seq_lens_cpu_upper_bound", lengths.kv_lens, batch.seq_lens),
    ):
        exact = device[: len(host)].cpu()
        wrong = torch.nonzero(exact != host).flatten()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"{field}[{row}] must be exact for {name}, got {int(host[row])} for the device's "
                f"{int(exact[row])}"
            )
