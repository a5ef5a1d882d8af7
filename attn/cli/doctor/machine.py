"""The machine and what is installed on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

import torch

from attn.bench.results.origin import installed, versions
from attn.cli.terminal.threads import busy_cores, usable_cores
from attn.device import detect_device
from attn.errors import UnsupportedError, one_line
from specs.base import Spec
from specs.devices import KNOWN_DEVICES, Device, DeviceKind

USES: Final = {
    "triton": "TRITON_ATTN, TRITON_MLA, SPARSE_MLA",
    "flashinfer-python": "FLASHINFER, TRTLLM_MHA, FLASHINFER_MLA, TRTLLM_MLA",
    "vllm": "the vLLM plugin; FlashMLA and FlashAttention-3 as peers of benchmarks",
    "flash-mla": "kernels that SPARSE_MLA takes by name",
    "matplotlib": "timeline.png and --html",
}
"""What each optional package is for."""


class Machine(Spec):
    """The machine, as far as kernels and speed depend on it."""

    system: str
    processor: str
    usable_cores: float
    busy_cores: float
    """Cores that other work keeps busy, by the load of the last minute."""
    threads: int
    """Threads that torch uses."""
    memory_gib: float
    device: str
    device_kind: str
    compute_capability: str | None
    device_memory_gib: float | None
    free_device_memory_gib: float | None
    cuda: str | None
    """CUDA or ROCm that torch was built for; None in a build for CPUs."""
    driver: str | None
    """Version of the GPU's driver; None where it is unknown."""
    problem: str | None
    """Why the GPU cannot be used; None where it can, or where there is none."""


class Installation(Spec):
    """What is installed."""

    versions: dict[str, str]
    missing: dict[str, str]
    """Optional packages that are not installed, and what each is for."""


def find_device() -> tuple[Device, str | None]:
    """The device of this machine; or the CPU, and why its GPU cannot be used."""
    try:
        return detect_device(), None
    except (UnsupportedError, RuntimeError) as error:
        return KNOWN_DEVICES["cpu"], one_line(error)


def find_machine(device: Device, problem: str | None) -> Machine:
    """The machine that this process runs on.

    Args:
        device: this machine's device.
        problem: why its GPU cannot be used; None where it can, or where there is none.
    """
    is_gpu = device.kind is not DeviceKind.CPU
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    capability = device.compute_capability
    total = device.memory_bytes
    return Machine(
        system=platform.platform(),
        processor=_processor(),
        usable_cores=usable_cores(),
        busy_cores=round(busy_cores(), 1),
        threads=torch.get_num_threads(),
        memory_gib=round(memory, 1),
        device=device.name,
        device_kind=device.kind.value,
        compute_capability=None if capability is None else str(capability),
        device_memory_gib=None if total is None else round(total / 2**30, 1),
        free_device_memory_gib=round(torch.cuda.mem_get_info()[0] / 2**30, 1) if is_gpu else None,
        cuda=torch.version.cuda or torch.version.hip,
        driver=_driver(),
        problem=problem,
    )


def find_installation() -> Installation:
    """The packages that this library uses; none is imported."""
    extra = {name: version for name in USES if (version := installed(name)) is not None}
    return Installation(
        versions={**versions(), **extra},
        missing={name: use for name, use in USES.items() if name not in extra},
    )


def plugin_is_registered() -> bool:
    """True where vLLM finds the plugin's entry point."""
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(entry.value.startswith("attn.integrations.vllm.plugin:") for entry in entries)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _driver() -> str | None:
    """The version that NVIDIA's driver tells in a file."""
    try:
        text = Path("/sys/module/nvidia/version").read_text("utf-8").strip()
    except OSError:
        return None
    return text or None
