"""Launch records: what a launcher decided, as data; to run it, or to compile it for another GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelCall:
    """One launch of one Triton kernel."""

    kernel: Any
    """The ``triton.jit`` function."""
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    """Every argument by name: tensors, numbers, None and constexprs."""
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    """Registers per thread, to fit several programs on a multiprocessor; None leaves it open."""

    def launch(self) -> None:
        """Enqueue it on the current stream; an empty grid is nothing to do."""
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, int]:
        """Compile options, in Triton's names."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options
