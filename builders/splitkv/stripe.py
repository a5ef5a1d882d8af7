"""Which tokens of a request one rank keeps under decode context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specs.engine import EngineConfig


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

    @classmethod
    def of(cls, config: EngineConfig) -> Stripe | None:
        """The tokens that this rank of an engine keeps; None without DCP."""
        parallel = config.parallel
        size = parallel.decode_context_parallel_size
        if size == 1:
            return None
        return cls(size, parallel.decode_context_parallel_rank, parallel.dcp_interleave)

    def local_len(self, length: int) -> int:
        """Number of a request's first ``length`` tokens that this rank keeps."""
        turn = self.interleave * self.size
        rest = length % turn - self.rank * self.interleave
        return length // turn * self.interleave + min(max(rest, 0), self.interleave)

    def local_lens(self, lens: torch.Tensor) -> torch.Tensor:
        """:meth:`local_len` of every element of ``lens``, int32; nothing is read by the host."""
        turn = self.interleave * self.size
        turns = torch.div(lens, turn, rounding_mode="floor")
        rest = (lens - turns * turn - self.rank * self.interleave).clamp(0, self.interleave)
        return turns * self.interleave + rest

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Place of tokens among those that this rank keeps of their request, -1 for all others.

        Args:
            positions: int32, positions in the request; negative ones stand for no token.
        """
        turn = self.interleave * self.size
        turns = torch.div(positions, turn, rounding_mode="floor")
        within = positions - turns * turn - self.rank * self.interleave
        is_here = (positions >= 0) & (within >= 0) & (within < self.interleave)
        return torch.where(is_here, turns * self.interleave + within, -1)

    def global_positions(self, places: torch.Tensor) -> torch.Tensor:
        """Positions in the request of tokens that this rank keeps; -1 stays -1.

        Args:
            places: int32, places among the tokens that this rank keeps of the request, or -1.
        """
        turns = torch.div(places, self.interleave, rounding_mode="floor")
        first = (turns * self.size + self.rank) * self.interleave
        return torch.where(places >= 0, first + places - turns * self.interleave, -1)
