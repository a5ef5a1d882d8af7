"""The split of a step into TRTLLM_MHA's decodes and prefills, and the masks of XQA's verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specs.base import cdiv

MASK_BITS = 16


@dataclass(frozen=True)
class StepSplit:
    """A step's split into decodes and prefills, from the host's query lengths."""

    num_decodes: int
    """Requests with tokens that the decode kernel takes."""
    num_listed: int
    """Leading requests up to the last decode, requests without tokens included."""
    num_decode_tokens: int
    decode_query_len: int
    """Tokens of every decode, or a bound where they are ragged; 0 without decodes."""
    is_ragged: bool
    """The kernel needs each decode's number of tokens, because the numbers differ or are neither 1
    nor the threshold."""
    num_tokens: int
    max_prefill_len: int
    """Most tokens of a request behind the decodes; 0 where no such request has tokens."""


def split_step(query_lens: Sequence[int], threshold: int, takes_ragged: bool) -> StepSplit:
    """Find the leading requests that the decode kernel takes in one call.

    A decode kernel without ``takes_ragged`` gets only requests of one token, or only whole
    verifies. Thereby the kernel of a request, and with it the type of its query, hardly depends on
    the batch. With ``takes_ragged``, equal lengths other than 1 and the threshold count as ragged
    too, so that no kernel is compiled for each length.

    Args:
        query_lens: tokens of each request.
        threshold: most tokens of a decode; 0 leaves every request to the prefill kernel.
        takes_ragged: the decode kernel takes requests with different numbers of tokens.
    """
    reqs, first = len(query_lens), query_lens[0] if query_lens else 0
    if 0 < first <= threshold and first in (1, threshold) and query_lens.count(first) == reqs:
        # In most steps every request is a decode; this spares the loop over requests.
        return StepSplit(reqs, reqs, reqs * first, first, False, reqs * first, 0)
    listed = 0
    own: list[int] = []
    for row, length in enumerate(query_lens):
        if length == 0:
            continue
        fits = takes_ragged or (length in (1, threshold) and own.count(length) == len(own))
        if length > threshold or not fits:
            break
        listed = row + 1
        own.append(length)
    is_ragged = bool(own) and not (len(set(own)) == 1 and own[0] in (1, threshold))
    return StepSplit(
        num_decodes=len(own),
        num_listed=listed,
        num_decode_tokens=sum(own),
        decode_query_len=threshold if is_ragged else max(own, default=0),
        is_ragged=is_ragged,
        num_tokens=sum(query_lens),
        max_prefill_len=max(query_lens[listed:], default=0),
    )


def causal_mask(num_reqs: int, query_len: int) -> torch.Tensor:
    """Causal mask of a verify's own tokens in XQA's form: bit j of row i is set for j <= i.

    Args:
        num_reqs: number of requests.
        query_len: tokens of each request.

    Returns:
        ``[num_reqs, query_len, words]`` uint16, with an even number of words per row.
    """
    words = cdiv(query_len, 2 * MASK_BITS) * 2
    full = (1 << MASK_BITS) - 1
    rows = [
        [
            (1 << min(max(row + 1 - word * MASK_BITS, 0), MASK_BITS)) - 1 & full
            for word in range(words)
        ]
        for row in range(query_len)
    ]
    return torch.tensor([rows] * num_reqs, dtype=torch.uint16)


def ragged_mask(mask: torch.Tensor, query_starts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Causal mask of requests with different numbers of tokens; nothing is copied to the host.

    Args:
        mask: ``[Tq, words]`` uint16, the mask of one request with the most tokens.
        query_starts: ``[R + 1]`` int32, from 0.
        num_tokens: tokens of all requests.

    Returns:
        ``[num_tokens, words / 2]`` int32 with the same bits, as not every device can index uint16.
    """
    places = torch.arange(num_tokens, dtype=torch.int32, device=query_starts.device)
    request = torch.searchsorted(query_starts[1:], places, right=True)
    return mask.view(torch.int32)[(places - query_starts[request]).long()]
