"""Launch records: what a launcher decided, as data; to run it, or to compile it for another GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_COMPILERS = 8
"""Threads that compile, each in its own kernel."""
collected: ContextVar[list[KernelCall] | None] = ContextVar("collected", default=None)
"""Where launches of this thread go that are collected and not made; None where they are made."""


@cache
def is_by_ptxas_13() -> bool:
    """Whether Triton compiles for Hopper with ptxas 13, not 12: it keeps in registers what ptxas 12
    computes anew, and Triton can have LLVM order instructions for few of them.
    """
    # Not earlier: whether Triton interprets is decided when it is imported.
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)


@contextmanager
def collected_calls() -> Iterator[list[KernelCall]]:
    """Launches of this thread become entries of the list that is given, and do not run."""
    calls: list[KernelCall] = []
    token = collected.set(calls)
    try:
        yield calls
    finally:
        collected.reset(token)


def compile_calls(calls: Sequence[KernelCall], device: torch.device) -> None:
    """Compile kernels side by side, for launches like these on a GPU; one takes seconds."""
    # Every thread has a current device of its own.
    index = torch.cuda.current_device() if device.index is None else device.index
    groups: dict[object, list[KernelCall]] = {}
    for call in calls:
        groups.setdefault(call.variant, []).append(call)

    def compile_group(group: list[KernelCall]) -> None:
        # What is alike may still differ in what Triton specialises on; what does not is there.
        with torch.cuda.device(index):
            for call in group:
                call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)

    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(compile_group, groups.values()))


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
    waits: bool = False
    """The kernel waits for those before it by itself, and may start while they end."""
    few_registers: bool = False
    """Instructions are ordered for few registers where that helps: see :func:`is_by_ptxas_13`."""

    def launch(self) -> None:
        """Enqueue it on the current stream; an empty grid is nothing to do."""
        if 0 in self.grid:
            return
        calls = collected.get()
        if calls is not None:
            calls.append(self)
            return
        # Not earlier: builders are importable without Triton.
        from builders.launch.launcher import launch_call

        launch_call(self)

    def launch_through_triton(self) -> Any:
        """Enqueue it by Triton's own launcher.

        Returns:
            What Triton gives for a launch: the compiled kernel on a GPU.
        """
        return self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def variant(self) -> object:
        """Equal for calls that differ neither in the kernel nor in a constexpr nor in an option."""
        constants = (
            self.arguments[parameter.name]
            for parameter in self.kernel.params
            if parameter.is_constexpr
        )
        return self.kernel, tuple(self.options.items()), tuple(constants)

    @property
    def options(self) -> dict[str, int]:
        """Compile options, in Triton's names."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # Products and sums are one instruction; Triton 3.10 leaves them two unless it is asked.
        options["enable_fp_fusion"] = True
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        if self.waits:
            options["launch_pdl"] = True
        if self.few_registers and is_by_ptxas_13():
            options["sched4reg"] = True
        return options
