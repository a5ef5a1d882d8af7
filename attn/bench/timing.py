"""Times of kernels: CUDA events around each call with a cold L2, or a CPU clock."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FLUSH_BYTES = 256 << 20
"""Written before each timed call: several times the L2 cache of any GPU."""
ROUND_BUDGET_US = 200_000.0
"""Time of one round of one kernel, beyond which it is called fewer times."""
MIN_REPS = 3
LEAD_CYCLES_PER_SECOND = 2_000_000_000
"""Of the wait that keeps the host ahead of the GPU: at least any GPU's clock."""
MAX_LEAD_SECONDS = 0.1
GRAPH_REPLAYS = 20

Call = Callable[[], object]
_cuda: Any = torch.cuda
"""Some of its classes have no types."""


@dataclass(frozen=True)
class Timing:
    """Median over all calls of all rounds."""

    median_us: float
    spread: float
    """(largest - smallest) / median of the rounds' medians."""
    calls: int


class Clock(Protocol):
    """Times calls on one kind of device."""

    def warm_up(self, call: Call) -> float:
        """Run a few times; microseconds that one call takes, roughly."""

    def measure(self, call: Call, reps: int) -> list[float]:
        """Microseconds of each of ``reps`` calls."""


class CpuClock:
    """Wall clock; no cache is flushed."""

    def warm_up(self, call: Call) -> float:
        """One call."""
        return self.measure(call, 1)[0]

    def measure(self, call: Call, reps: int) -> list[float]:
        """Microseconds of each call."""
        times = []
        for _ in range(reps):
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1000)
        return times


class CudaClock:
    """Events around each call, the L2 flushed before it, the host ahead of the GPU."""

    def __init__(self, device: torch.device, reps: int) -> None:
        """
        Args:
            device: the GPU.
            reps: most calls per :meth:`measure`; their events are made here.
        """
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.begins = [_cuda.Event(enable_timing=True) for _ in range(reps)]
        self.ends = [_cuda.Event(enable_timing=True) for _ in range(reps)]
        self._host_seconds: dict[int, float] = {}

    def warm_up(self, call: Call) -> float:
        """Three calls, then two timed ones."""
        for _ in range(3):
            call()
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        self._enqueue(call, min(2, len(self.begins)))
        enqueued = (time.perf_counter() - begin) / min(2, len(self.begins))
        self._host_seconds[id(call)] = enqueued
        torch.cuda.synchronize(self.device)
        return float(self.begins[0].elapsed_time(self.ends[0])) * 1000

    def measure(self, call: Call, reps: int) -> list[float]:
        """Microseconds of each call. Nothing waits for the GPU until all are enqueued."""
        lead = min(MAX_LEAD_SECONDS, 1.5 * reps * self._host_seconds.get(id(call), 1e-3))
        torch.cuda.synchronize(self.device)
        # Events must not see the GPU waiting for launches: let it sleep while calls queue up.
        _cuda._sleep(int(lead * LEAD_CYCLES_PER_SECOND))
        self._enqueue(call, reps)
        torch.cuda.synchronize(self.device)
        pairs = zip(self.begins[:reps], self.ends[:reps], strict=True)
        return [float(begin.elapsed_time(end)) * 1000 for begin, end in pairs]

    def _enqueue(self, call: Call, reps: int) -> None:
        for begin, end in zip(self.begins[:reps], self.ends[:reps], strict=True):
            self.flush.zero_()
            begin.record()
            call()
            end.record()


def make_clock(device: torch.device, reps: int) -> Clock:
    """The clock of a device, for at most ``reps`` calls at a time."""
    return CudaClock(device, reps) if device.type == "cuda" else CpuClock()


def time_interleaved(
    calls: Mapping[str, Call], clock: Clock, rounds: int, reps: int
) -> dict[str, Timing]:
    """Each call's median time; in every round each is timed in turn, every other round backwards.

    Clocks follow what ran just before: nobody is always behind the one that draws the most power.

    Args:
        calls: what to time, by name.
        clock: of the device that they run on.
        rounds: turns.
        reps: calls per turn; long-running ones are called fewer times.
    """
    counts = {}
    for name, call in calls.items():
        enough = int(ROUND_BUDGET_US / max(clock.warm_up(call), 1.0))
        counts[name] = min(reps, max(MIN_REPS, enough))
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in [*calls][:: -1 if turn % 2 else 1]:
            times[name].append(clock.measure(calls[name], counts[name]))
    return {name: _timing(turns) for name, turns in times.items()}


def _timing(turns: list[list[float]]) -> Timing:
    flat = [value for turn in turns for value in turn]
    medians = [statistics.median(turn) for turn in turns]
    median = statistics.median(flat)
    return Timing(median, (max(medians) - min(medians)) / median, len(flat))


def count_allocations(call: Call, device: torch.device, repeats: int = 10) -> int | None:
    """Blocks that the caching allocator handed out during ``repeats`` warm calls; None on a CPU."""
    if device.type != "cuda":
        return None
    call()
    name = "allocation.all.allocated"
    before = torch.cuda.memory_stats(device)[name]
    for _ in range(repeats):
        call()
    return int(torch.cuda.memory_stats(device)[name] - before)


def host_time_us(call: Call, repeats: int = 50) -> float:
    """Median microseconds that the host spends in a call; a GPU's work is not waited for."""
    call()
    return statistics.median(CpuClock().measure(call, repeats))


def graph_time_us(call: Call, device: torch.device, rounds: int = 5) -> float | None:
    """GPU time of a call's kernels: captured in a CUDA graph, replayed back to back.

    Returns:
        Microseconds per replay, median over ``rounds``; None on a CPU.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    if device.type != "cuda":
        return None
    stream = _cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        # A call that launches nothing makes an empty graph, and torch warns of it.
        warnings.simplefilter("ignore")
        with torch.cuda.graph(graph):
            call()
    graph.replay()
    begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize(device)
        _cuda._sleep(LEAD_CYCLES_PER_SECOND // 1000)
        begin.record()
        for _ in range(GRAPH_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(float(begin.elapsed_time(end)) * 1000 / GRAPH_REPLAYS)
    return statistics.median(times)
