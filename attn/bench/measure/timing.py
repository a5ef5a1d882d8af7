"""Clocks for kernels: CUDA events around each call with a cold L2, or a CPU clock."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

FLUSH_BYTES = 256 << 20
"""Bytes written before each timed call to flush the L2 cache: several times any GPU's L2."""
ROUND_BUDGET_US = 200_000.0
"""Most microseconds of one kernel in one round; a slow kernel is called fewer times."""
MIN_REPS = 3
LEAD_CYCLES_PER_SECOND = 2_000_000_000
"""Cycles per second of wait that keep the host ahead of the GPU: no GPU's clock is faster."""
MAX_LEAD_SECONDS = 0.1
GRAPH_CALLS = 20
"""Calls in a captured graph, as a step's graph is launched once for all of its layers."""

Call = Callable[[], object]
K = TypeVar("K", bound=Hashable)
_cuda: Any = torch.cuda
"""``torch.cuda`` without types, which some of its classes lack."""


@dataclass(frozen=True)
class Timing:
    """Median time over all calls of all rounds."""

    median_us: float
    spread: float
    """(largest - smallest) / median of the rounds' medians."""
    calls: int


class Clock(Protocol):
    """A clock for calls on one kind of device."""

    def warm_up(self, call: Call) -> float:
        """Run a call a few times and return roughly its microseconds."""

    def measure(self, call: Call, reps: int) -> list[float]:
        """Microseconds of each of ``reps`` calls."""


class CpuClock:
    """A wall clock that flushes no cache."""

    def warm_up(self, call: Call) -> float:
        """Run one call and return its microseconds."""
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
    """CUDA events around each call, with the L2 flushed before it and the host ahead of the GPU."""

    def __init__(self, device: torch.device, reps: int) -> None:
        """
        Args:
            device: the GPU.
            reps: most calls per :meth:`measure`; the constructor makes their events.
        """
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.begins = [_cuda.Event(enable_timing=True) for _ in range(reps)]
        self.ends = [_cuda.Event(enable_timing=True) for _ in range(reps)]
        self._host_seconds: dict[int, float] = {}

    def warm_up(self, call: Call) -> float:
        """Run three calls, then time two more and return their microseconds per call."""
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
        # The GPU sleeps while calls queue up, so that no event includes a wait for a launch.
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
    calls: Mapping[K, Call], clock: Clock, rounds: int, reps: int
) -> dict[K, Timing]:
    """Median time of each call; calls take turns in every round, backwards in every other round.

    A GPU's clock rate depends on the power drawn just before. Reversing the order keeps any call
    from always following the one that draws the most power.

    Args:
        calls: the calls to time, by name.
        clock: clock of the device that the calls run on.
        rounds: number of rounds.
        reps: calls per round; slow calls are made fewer times.
    """
    counts = {}
    for name, call in calls.items():
        enough = int(ROUND_BUDGET_US / max(clock.warm_up(call), 1.0))
        counts[name] = min(reps, max(MIN_REPS, enough))
    times: dict[K, list[list[float]]] = {name: [] for name in calls}
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
    """Number of allocations of device memory during ``repeats`` warm calls; None on a CPU."""
    if device.type != "cuda":
        return None
    call()
    name = "allocation.all.allocated"
    before = torch.cuda.memory_stats(device)[name]
    for _ in range(repeats):
        call()
    return int(torch.cuda.memory_stats(device)[name] - before)


def host_time_us(call: Call, repeats: int = 50) -> float:
    """Median microseconds that the host spends in a call, without waiting for a GPU's work."""
    call()
    return statistics.median(CpuClock().measure(call, repeats))


def host_times_us(
    calls: Mapping[K, Call], device: torch.device, rounds: int, reps: int
) -> dict[K, Timing]:
    """Time that the host spends in each call; calls take turns, each with an idle GPU."""

    class Clock(CpuClock):
        def measure(self, call: Call, reps: int) -> list[float]:
            _wait(device)
            return super().measure(call, reps)

    return time_interleaved(calls, Clock(), rounds, reps)


def eager_times_us(
    calls: Mapping[str, Call], device: torch.device, rounds: int, reps: int
) -> dict[str, Timing]:
    """Time per call of many calls in a row, as of a model's layers; different calls take turns.

    A turn is timed from the end of a first call to the end of the last. The result is the host's
    time per call where that exceeds the GPU's.
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
    """GPU time of a call's kernels in a CUDA graph that holds the call many times.

    Returns:
        Microseconds per call, median over ``rounds``; None on a CPU.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    times = graph_times_us({"call": call}, device, rounds)
    return None if times is None else times["call"].median_us


def graph_times_us(
    calls: Mapping[str, Call],
    device: torch.device,
    rounds: int,
    failed: dict[str, Exception] | None = None,
) -> dict[str, Timing] | None:
    """:func:`graph_time_us` of several calls; the replays of their graphs take turns.

    Args:
        calls: the calls to capture, by name.
        device: where they run.
        rounds: replays of each graph.
        failed: receives the error of each call that cannot be captured, which then has no time;
            None raises the error.
    """
    if device.type != "cuda":
        return None
    graphs: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            graphs[name] = _captured(call, device)
        except Exception as error:
            if failed is None:
                raise
            failed[name] = error
    times: dict[str, list[list[float]]] = {name: [] for name in graphs}
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
        # torch warns of an empty graph, which a call without launches makes.
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
"""Full names of functions of CUDA's runtime and driver that wait until the GPU is done."""
LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel"),
    *("cuLaunchCooperativeKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cuMemcpy", "cuMemset"),
)
"""How the names of functions of CUDA's runtime and driver begin that enqueue a kernel, a copy or a
fill."""
_PROFILED = "attn.bench.profiled"


def count_waits(call: Call, device: torch.device) -> int | None:
    """Number of calls into CUDA that wait for the device, in one warm call, by torch's profiler.

    Returns:
        None on a CPU.

    Raises:
        RuntimeError: torch reports an operation that waits, or the profiler saw no launch.
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
    """Make operations of torch that wait for a GPU raise ``RuntimeError``."""
    with warnings.catch_warnings():
        # torch warns that its debug mode does not detect every wait.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits_of(events: Sequence[Any]) -> int:
    """Number of a profiler's events that wait, inside the profiled range."""
    return sum(name in WAITS for name in _names_within(events))


def launches_of(events: Sequence[Any]) -> int:
    """Number of a profiler's events that launch a kernel, a copy or a fill, inside the range."""
    return sum(name.startswith(LAUNCHES) for name in _names_within(events))


def _names_within(events: Sequence[Any]) -> list[str]:
    """Names of the host's events inside the profiled range.

    Raises:
        RuntimeError: none of them is a launch.
    """
    # The profiler lists the range for the GPU too, where it begins later; the host's is needed.
    ranges = [event.time_range for event in events if event.name == _PROFILED]
    own = min(ranges, key=lambda one: one.start)
    names = [event.name for event in events if own.start <= event.time_range.start <= own.end]
    if not any("Launch" in name for name in names):
        raise RuntimeError("the profiler saw no launch")
    return names


def count_launches(call: Call, device: torch.device, in_graph: bool = False) -> int | None:
    """Number of kernels, copies and fills that a warm call launches, by torch's profiler.

    Args:
        call: the call.
        device: where it runs.
        in_graph: count what the call launches while a graph captures it.

    Returns:
        None on a CPU.

    Raises:
        RuntimeError: the call cannot be captured, or the profiler saw no launch.
    """
    if device.type != "cuda":
        return None

    def captured() -> None:
        graph = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
        with graph, record_function(_PROFILED):
            call()

    def eager() -> None:
        with record_function(_PROFILED):
            call()

    from torch.profiler import ProfilerActivity, profile, record_function

    call()
    torch.cuda.synchronize(device)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler:
        (captured if in_graph else eager)()
        torch.cuda.synchronize(device)
    return launches_of(profiler.events() or [])
