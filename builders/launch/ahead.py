"""Compiling kernels into Triton's cache for a GPU that this process does not use."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from builders.launch.call import KernelCall, by_variant
from specs.devices import ComputeCapability

_WARP = 32
"""Threads of a warp of an NVIDIA GPU."""


@dataclass(frozen=True)
class Outcome:
    """What became of the launches of one variant."""

    kernel: str
    """Name of the kernel's function."""
    compiled: int
    """Kernels that were compiled: launches of a variant may differ in what Triton specialises on.
    """
    cached: int
    """Kernels that were in Triton's cache already."""
    seconds: float
    error: str = ""
    """Why a launch did not compile; empty if all did."""


class GpuDriver:
    """A driver for Triton that knows the GPU to compile for and nothing else."""

    def __init__(self, capability: ComputeCapability) -> None:
        self.target = GPUTarget("cuda", capability.to_int(), _WARP)

    def get_current_device(self) -> int:
        """The GPU's number, which is its compute capability."""
        # Kernels remember the target of each device, so every target is a device of its own.
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> Any:
        """What Triton compiles for."""
        return self.target


def cache_folder() -> str:
    """The folder of Triton's cache."""
    return str(knobs.cache.dir)


def compile_ahead(
    calls: Sequence[KernelCall],
    capability: ComputeCapability,
    jobs: int,
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Compile the kernels of launches side by side, and keep them in Triton's cache.

    Most of a compile is native code that other threads run beside, so threads suffice. From now on
    Triton compiles for this GPU in this process, which therefore must launch no kernel.

    Args:
        calls: the launches.
        capability: compute capability of the GPU that will run them.
        jobs: threads.
        report: is called with each outcome as soon as it is there, by one thread at a time.
    """
    driver.set_active(GpuDriver(capability))
    states = threading.local()
    reporting = threading.Lock()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        states.hits.append(cache_hit)

    def compile_variant(group: Sequence[KernelCall]) -> Outcome:
        states.hits, error = [], ""
        begin = time.monotonic()
        try:
            for call in group:
                compiled = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
                _build_launch_function(compiled)
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised).strip()}".splitlines()[0]
        hits = sum(states.hits)
        name = group[0].kernel.__name__
        seconds = time.monotonic() - begin
        outcome = Outcome(name, len(states.hits) - hits, hits, seconds, error)
        with reporting:
            report(outcome)
        return outcome

    listener, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(compile_variant, by_variant(calls)))
    finally:
        knobs.compilation.listener = listener


def _build_launch_function(compiled: Any) -> None:
    """Build the C function that launches a kernel, which Triton 3.6 keeps in its cache too.

    It needs a C compiler and the driver's library; where one is missing, the function is built when
    the kernel is launched.
    """
    from triton.backends.nvidia import driver as nvidia

    if not hasattr(nvidia, "make_launcher"):
        return
    missing = (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)
    with contextlib.suppress(*missing):
        nvidia.CudaLauncher(compiled.src, compiled.metadata)
