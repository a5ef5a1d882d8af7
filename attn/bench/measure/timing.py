"""Times of kernels: CUDA events around each call with a cold L2, or a CPU clock."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
GRAPH_CALLS = 20
"""Of a captured graph: a step's graph is launched once for all of its layers."""

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


def host_times_us(
    calls: Mapping[str, Call], device: torch.device, rounds: int, reps: int
) -> dict[str, Timing]:
    """Time that the host spends in each call, in turn; a GPU is waited for before each turn."""

    class Clock(CpuClock):
        def measure(self, call: Call, reps: int) -> list[float]:
            _wait(device)
            return super().measure(call, reps)

    return time_interleaved(calls, Clock(), rounds, reps)


def eager_times_us(
    calls: Mapping[str, Call], device: torch.device, rounds: int, reps: int
) -> dict[str, Timing]:
    """Time of each call among many of its own, in turn, from the end of a first one to that of the
    last: the host's where that is longer than the GPU's, as of layers that are run one after the
    other, none of which the GPU waits for alone.
    """

    class Clock(CpuClock):
        def measure(self, call: Call, reps: int) -> list[float]:
            if device.type != "cuda":
                begin = time.perf_counter_ns()
                for _ in range(reps):
                    call()
                return [(time.perf_counter_ns() - begin) / 1000 / reps]
            first, last = (_cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            call()
            first.record()
            for _ in range(reps):
                call()
            last.record()
            torch.cuda.synchronize(device)
            return [float(first.elapsed_time(last)) * 1000 / reps]

    return time_interleaved(calls, Clock(), rounds, reps)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_time_us(call: Call, device: torch.device, rounds: int = 5) -> float | None:
    """GPU time of a call's kernels, captured many times over in one CUDA graph.

    Returns:
        Microseconds per call, median over ``rounds``; None on a CPU.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    times = graph_times_us({"call": call}, device, rounds)
    return None if times is None else times["call"].median_us


def graph_times_us(
    calls: Mapping[str, Call], device: torch.device, rounds: int
) -> dict[str, Timing] | None:
    """:func:`graph_time_us` of several calls, whose replays take turns."""
    if device.type != "cuda":
        return None
    graphs = {name: _captured(call, device) for name, call in calls.items()}
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append([_replay_us(graph, device)])
    return {name: _timing(turns) for name, turns in times.items()}


def _captured(call: Call, device: torch.device) -> Any:
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
            for _ in range(GRAPH_CALLS):
                call()
    graph.replay()
    return graph


def _replay_us(graph: Any, device: torch.device) -> float:
    begin, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    _cuda._sleep(LEAD_CYCLES_PER_SECOND // 1000)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) * 1000 / GRAPH_CALLS


WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)
"""Calls of CUDA's runtime and driver that return when the GPU is done; names are whole."""
_PROFILED = "attn.bench.profiled"


def count_waits(call: Call, device: torch.device) -> int | None:
    """Calls into CUDA that wait for the device, in one warm call, by torch's profiler.

    Returns:
        None on a CPU.

    Raises:
        RuntimeError: torch finds an operation that waits, or the profiler saw no launch.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile, record_function

    call()
    torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        with record_function(_PROFILED):
            call()
        torch.cuda.synchronize(device)
    with waits_are_errors():
        call()
    return waits_of(profiler.events() or [])


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """What waits for a GPU raises ``RuntimeError``, as far as torch knows of it."""
    with warnings.catch_warnings():
        # That it knows not of all.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits_of(events: Sequence[Any]) -> int:
    """Of the profiled range of a profiler's events, those that wait."""
    # The range stands on the GPU's side too, later.
    ranges = [event.time_range for event in events if event.name == _PROFILED]
    own = min(ranges, key=lambda one: one.start)
    names = [event.name for event in events if own.start <= event.time_range.start <= own.end]
    if not any("Launch" in name for name in names):
        raise RuntimeError("the profiler saw no launch")
    return sum(name in WAITS for name in names)
