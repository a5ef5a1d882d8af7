"""Queries that each look for one key, which make a kernel's result show any wrong key.

Over random keys a softmax spreads over all of them, and one key more or less among thousands
changes the output by less than rounding does. A needle is a key at which a query points: it takes
all of the weight, so that the output is the value of that key. A kernel that misses it, or reads it
from another page, is wrong by the size of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from attn.bench.cases.case import KernelCase
from attn.bench.cases.inputs import Content, exact_row, exclusive_sums

NEEDLE_LOGIT: Final = 100.0
"""Logit of a needle; those of other keys are about ``NEEDLE_LOGIT / sqrt(head size)``."""
SHORT_QUERY: Final = 16
"""Most new tokens of a request of which each looks at every key in turn."""
LONG_DRAWS: Final = 4
"""Draws for requests with more new tokens, whose heads have millions of needles in each."""
MOST_DRAWS: Final = 512
"""Most draws. A request with more keys than this times the query heads has a needle every few keys
instead of at every key."""
STEP: Final = 2654435761
"""A prime above any length: its multiples visit every place before they repeat one."""


@dataclass(frozen=True)
class Draw:
    """Queries with one needle each."""

    query: torch.Tensor
    """``[T, H, D]`` in the model's dtype."""
    values: torch.Tensor
    """``[T, H, Dv]`` fp32 values of the needles, which outputs are near to."""
    exact: Callable[[int, int], torch.Tensor]
    """Gives the float64 output ``[Dv]`` of a token and head, with the keys beside the needle."""


class NeedleSource(Protocol):
    """Draws of needles over the cache of a case."""

    @property
    def query(self) -> torch.Tensor:
        """``[T, H, D]`` queries as they are loaded now."""

    def load(self, query: torch.Tensor) -> None:
        """Write queries where kernels read them."""

    def draws(self) -> Iterator[Draw]:
        """The draws, one after another."""


@dataclass(frozen=True)
class ContentNeedles:
    """Needles among the keys that the tokens of a case see.

    In a decode or a verify every key of a request is the needle of some head, as far as
    ``MOST_DRAWS`` draws reach; its place in a draw is random. Among the needles of a long prompt
    are all new keys, and places at random before them.
    """

    content: Content
    seed: int

    @property
    def query(self) -> torch.Tensor:
        """See the protocol."""
        return self.content.query

    def load(self, query: torch.Tensor) -> None:
        """See the protocol."""
        self.content.load_query(query)

    def draws(self) -> Iterator[Draw]:
        """See the protocol."""
        content, case, device = self.content, self.content.case, self.content.device
        cached = torch.tensor(exclusive_sums(case.seq_lens)[:-1], device=device)
        heads = torch.arange(case.num_heads, device=device) // (case.num_heads // case.num_kv_heads)
        tokens = _Tokens.of(case, device, self.seed)
        for draw in range(num_draws(case)):
            slots = content.slots[cached[tokens.request][:, None] + tokens.places(case, draw)]
            key, value = (
                content.picked(side, slots, heads).float() for side in (content.key, content.value)
            )

            def exact(token: int, head: int) -> torch.Tensor:
                return exact_row(content, int(tokens.request[token]), token, head)

            yield Draw(aimed(key, case.scale).to(content.query.dtype), value, exact)


@dataclass(frozen=True)
class _Tokens:
    """Where the new tokens of a case stand, as tensors ``[T]`` int64."""

    request: torch.Tensor
    index: torch.Tensor
    """Index among the new tokens of the request."""
    first: torch.Tensor
    """Position of the first visible key."""
    position: torch.Tensor
    """Position of the token, its last visible key."""
    start: torch.Tensor
    """A random number for the request."""

    @classmethod
    def of(cls, case: KernelCase, device: torch.device, seed: int) -> _Tokens:
        query_lens, seq_lens = torch.tensor(case.query_lens), torch.tensor(case.seq_lens)
        request = torch.repeat_interleave(torch.arange(case.num_reqs), query_lens)
        starts = query_lens.cumsum(0) - query_lens
        index = torch.arange(case.num_tokens) - starts[request]
        position = (seq_lens - query_lens)[request] + index
        first = torch.zeros_like(position)
        if case.sliding_window is not None:
            first = (position + 1 - case.sliding_window).clamp(min=0)
        drawn = torch.randint(
            0, 1 << 20, (case.num_reqs,), generator=torch.Generator().manual_seed(seed)
        )
        made = (request, index, first, position, drawn[request])
        return cls(*(one.to(device) for one in made))

    def places(self, case: KernelCase, draw: int) -> torch.Tensor:
        """``[T, H]`` positions of a draw's needles."""
        heads = torch.arange(case.num_heads, device=self.index.device)
        turn = (
            draw * case.num_heads + heads + (case.num_heads * num_draws(case)) * self.index[:, None]
        )
        span = (self.position - self.first + 1)[:, None]
        places = self.first[:, None] + (turn * STEP + self.start[:, None]) % span
        if draw == 0:
            # The first head looks at its own token's key: the last one, which a cut may lose.
            places[:, 0] = self.position
        return places


def num_draws(case: KernelCase) -> int:
    """Number of draws for a case."""
    if max(case.query_lens) > SHORT_QUERY:
        return LONG_DRAWS
    longest = max(case.seq_lens)
    if case.sliding_window is not None:
        longest = min(longest, case.sliding_window)
    # One more, since the first head of the first draw looks at its own token.
    return min(longest // case.num_heads + 1, MOST_DRAWS)


def aimed(keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries whose logits with their own keys are ``NEEDLE_LOGIT``.

    Args:
        keys: ``[..., D]`` fp32.
        scale: factor of the products of query and key.
    """
    return keys * (NEEDLE_LOGIT / (scale * keys.square().sum(-1, keepdim=True)))
