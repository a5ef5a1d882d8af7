"""Which tokens of a request one rank keeps under decode context parallelism."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stripe:
    """The tokens that one rank keeps of every request under decode context parallelism (DCP)."""

    size: int
    """Number of ranks."""
    rank: int
    """This rank, from 0."""
    interleave: int
    """Consecutive tokens that a rank keeps before it is the next rank's turn; ranks take turns in
    the order of their numbers."""

    def local_len(self, length: int) -> int:
        """Number of a request's first ``length`` tokens that this rank keeps."""
        turn = self.interleave * self.size
        rest = length % turn - self.rank * self.interleave
        return length // turn * self.interleave + min(max(rest, 0), self.interleave)
