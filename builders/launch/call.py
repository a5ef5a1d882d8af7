"""A launch as data: it can be made, collected in a list, or compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final

import torch

_COMPILERS = 8
"""Threads that compile; at any time each compiles another kernel variant."""
collected: ContextVar[list[KernelCall] | None] = ContextVar("collected", default=None)
"""The list that collects this thread's launches in place of making them; None if they are made."""


@cache
def triton_release() -> tuple[int, int]:
    """The first two numbers of Triton's version."""
    # Imported only here, since Triton decides when it is imported whether it interprets.
    import triton

    first, second = triton.__version__.split(".")[:2]
    return int(first), int(second)


def is_by_ptxas_13() -> bool:
    """Whether Triton compiles for Hopper with ptxas 13, not with ptxas 12.

    ptxas 13 keeps values in registers that ptxas 12 computes anew. With it, Triton can have LLVM
    order instructions so that they need few registers.
    """
    return triton_release() >= (3, 9)


@contextmanager
def collected_calls() -> Iterator[list[KernelCall]]:
    """Collect this thread's launches in the list that the context yields; they are not made."""
    calls: list[KernelCall] = []
    token = collected.set(calls)
    try:
        yield calls
    finally:
        collected.reset(token)


# Triton 3.6 loads every C function as a Python module of one name. Where a module is loaded again,
# Python puts its functions into the module of that name that was loaded last, from which another
# thread may be about to take its own.
_LOADING: Final = Lock()


def compile_calls(calls: Sequence[KernelCall], device: torch.device) -> None:
    """Compile the kernels of launches in several threads, since one takes seconds.

    Args:
        calls: the launches.
        device: the GPU that will run them.
    """
    # Every thread has its own current device, so threads are given the index.
    index = torch.cuda.current_device() if device.index is None else device.index

    def compile_group(group: Sequence[KernelCall]) -> None:
        # Calls of one variant may still differ in properties that Triton specialises on. Where they
        # do not, Triton finds the kernel compiled already.
        with torch.cuda.device(index):
            for call in group:
                compiled = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
                # Load the kernel here too: Triton 3.6 compiles a C function for it then.
                with _LOADING:
                    getattr(compiled, "run", None)

    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(compile_group, by_variant(calls)))


def by_variant(calls: Sequence[KernelCall]) -> list[list[KernelCall]]:
    """Launches in lists of one variant each, in the order of first appearance."""
    groups: dict[object, list[KernelCall]] = {}
    for call in calls:
        groups.setdefault(call.variant, []).append(call)
    return [*groups.values()]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a kernel is compiled and launched."""

    num_warps: int = 4
    """Warps of a program."""
    num_stages: int = 2
    """Stages of loops that Triton pipelines."""
    max_registers: int | None = None
    """Most registers per thread, so that several programs fit a multiprocessor; None leaves the
    number to the compiler."""
    waits: bool = False
    """The kernel may start while the kernels before it still run, and itself waits for their end
    (programmatic dependent launch)."""
    few_registers: bool = False
    """LLVM orders instructions so that they need few registers, if :func:`is_by_ptxas_13`."""


@dataclass(frozen=True)
class KernelCall(LaunchOptions):
    """One launch of one Triton kernel, with its options."""

    kernel: Any
    """The ``triton.jit`` function."""
    grid: tuple[int, ...]
    """Programs in up to three dimensions."""
    arguments: Mapping[str, Any]
    """Every argument by name: tensors, numbers, None and constexprs."""

    def launch_through_triton(self) -> Any:
        """Enqueue the launch by Triton's own launcher.

        Returns:
            Triton's result of a launch, which on a GPU is the compiled kernel.
        """
        return self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def variant(self) -> object:
        """The variant key: equal for calls with the same kernel, constexprs and options."""
        constants = (
            self.arguments[parameter.name]
            for parameter in self.kernel.params
            if parameter.is_constexpr
        )
        return self.kernel, tuple(self.options.items()), tuple(constants)

    @property
    def options(self) -> dict[str, int]:
        """Compile options, with Triton's names."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # A product and a sum become one instruction. Triton 3.10 does that only with this option.
        options["enable_fp_fusion"] = True
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        if self.waits:
            options["launch_pdl"] = True
        if self.few_registers and is_by_ptxas_13():
            options["sched4reg"] = True
        return options
