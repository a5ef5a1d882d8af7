"""How many threads a run on the CPU takes, by the cores that are idle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from specs.devices import Device, DeviceKind

MOST: Final = 8
"""Most threads by default: a step of a replay is too small to share among more."""
_QUOTA_V2: Final = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1: Final = tuple(
    Path("/sys/fs/cgroup/cpu") / f"cpu.cfs_{part}_us" for part in ("quota", "period")
)


@dataclass(frozen=True)
class Threads:
    """A number of threads and the reason for it."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} CPU {'thread' if self.count == 1 else 'threads'}: {self.why}"


def use_threads(asked: int | None, device: Device) -> Threads | None:
    """Choose and set the number of threads of a run; None on a GPU, where none was asked for.

    Args:
        asked: the number that the user named; None chooses.
        device: where the run's kernels run.
    """
    if asked is None and device.kind is not DeviceKind.CPU:
        return None
    chosen = choose_threads(asked)
    torch.set_num_threads(chosen.count)
    return chosen


def choose_threads(asked: int | None) -> Threads:
    """The number of threads for the work of this process.

    PyTorch takes a thread for every core by default. Where other processes keep the cores busy,
    its threads then wait for each other at the end of every operation, which costs far more than
    the other cores bring.

    Args:
        asked: the number that the user named; None chooses.
    """
    if asked is not None:
        return Threads(asked, "--threads")
    cores, busy = usable_cores(), busy_cores()
    # PyTorch's own number keeps to OMP_NUM_THREADS and to what the process set before.
    limit = torch.get_num_threads()
    count = max(1, min(limit, MOST, int(cores - busy)))
    return Threads(
        count,
        f"{cores:g} {'core' if cores == 1 else 'cores'}, {busy:.1f} busy with other work "
        "(--threads sets another number)",
    )


def usable_cores() -> float:
    """Cores that this process may use: those of its affinity, at most the quota of its group."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    return min(cores, _quota() or cores)


def busy_cores() -> float:
    """Cores of :func:`usable_cores` that are busy, by the load of the last minute."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return 0.0
    # The load is the whole machine's; a process with a part of its cores has a part of the load.
    return load * usable_cores() / (os.cpu_count() or 1)


def _quota() -> float | None:
    """Cores that the control group allows; None where it sets no limit."""
    try:
        quota, period = _QUOTA_V2.read_text("utf-8").split()
    except (OSError, ValueError):
        try:
            quota, period = (path.read_text("utf-8").strip() for path in _QUOTA_V1)
        except OSError:
            return None
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None
    return int(quota) / int(period) or None
