"""Which requests of a step TRTLLM_MHA's decode kernel takes, and what their rows see of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specs.base import cdiv

MASK_BITS = 16


@dataclass(frozen=True)
class StepSplit:
    """How the requests of a step go to the two phases, from the host's query lengths."""

    num_decodes: int
    """Leading requests that the decode kernel takes, without empty ones."""
    num_listed: int
    """Requests up to the last decode, empty ones among them."""
    num_decode_tokens: int
    decode_query_len: int
    """Tokens of every decode, or their bound where they are ragged; 0 without decodes."""
    is_ragged: bool
    """Each decode says how many tokens it has: they differ, or have a number of their own."""
    num_tokens: int
    max_prefill_len: int
    """Most tokens of a request behind the decodes; 0 where none has any."""


def split_step(query_lens: Sequence[int], threshold: int, takes_ragged: bool) -> StepSplit:
    """Leading requests that the decode kernel takes in one call.

    Args:
        query_lens: tokens of each request.
        threshold: most tokens of a decode; 0 leaves every request to the prefill kernel.
        takes_ragged: the kernel takes requests of different numbers of tokens. Another takes rows
            of one token, or whole verifies: which kernel a request goes to, and the type of its
            query with it, then hardly depends on the batch. Other lengths are ragged even where
            they are all the same, so that no kernel is compiled for each of them.
    """
    reqs, first = len(query_lens), query_lens[0] if query_lens else 0
    if 0 < first <= threshold and first in (1, threshold) and query_lens.count(first) == reqs:
        # Every request is a decode, as in most steps: no loop over them.
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
    """Which of a verify's own tokens each of its rows sees, as XQA reads it: bit j of row i is set
    for j <= i.

    Args:
        num_reqs: requests.
        query_len: tokens of each.

    Returns:
        ``[num_reqs, query_len, words]`` uint16, an even number of words a row.
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
    """The causal mask of requests of different numbers of tokens; nothing is read back.

    Args:
        mask: ``[Tq, words]`` uint16, of one request of the most tokens.
        query_starts: ``[R + 1]`` int32, from 0.
        num_tokens: tokens of all requests.

    Returns:
        ``[num_tokens, words / 2]`` int32, the same bits: 16 bits are not indexed everywhere.
    """
    places = torch.arange(num_tokens, dtype=torch.int32, device=query_starts.device)
    request = torch.searchsorted(query_starts[1:], places, right=True)
    return mask.view(torch.int32)[(places - query_starts[request]).long()]
