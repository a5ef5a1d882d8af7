"""Keys by which Triton keeps compiled kernels, of launches that are not made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

from triton.runtime import JITFunction, driver

from builders.launch.ahead import GpuDriver
from builders.launch.call import KernelCall
from specs.devices import Device


def keys_of(calls: Iterable[KernelCall], device: Device) -> set[tuple[str, str]]:
    """Name of the kernel and Triton's key of each launch; nothing is compiled.

    Args:
        calls: the launches.
        device: the GPU that they are for.
    """
    assert device.compute_capability is not None
    driver.set_active(GpuDriver(device.compute_capability))
    found: set[tuple[str, str]] = set()

    def note(kernel: Any, key: object, *_: Any) -> None:
        found.add((kernel.__name__, str(key)))

    with mock.patch.object(JITFunction, "_do_compile", note):
        for call in calls:
            call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
    return found
