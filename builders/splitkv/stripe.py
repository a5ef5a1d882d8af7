"""Which tokens of a request one rank keeps under decode context parallelism."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stripe:
    """The tokens that one rank keeps of every request under decode context parallelism (DCP)."""

    size: int
    """Ranks."""
    rank: int
    interleave: int
    """Consecutive tokens of a rank, before the next rank's turn; they stay in order there."""

    def local_len(self, length: int) -> int:
        """How many of a request's first ``length`` tokens are kept here."""
        turn = self.interleave * self.size
        rest = length % turn - self.rank * self.interleave
        return length // turn * self.interleave + min(max(rest, 0), self.interleave)
