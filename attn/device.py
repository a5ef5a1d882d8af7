"""Devices as data: this machine's device, and devices that are known by name."""

from __future__ import annotations

from attn.errors import UnsupportedError
from specs.devices import KNOWN_DEVICES, ComputeCapability, Device, DeviceKind, kind_of
from specs.names import find_name, near_miss


def detect_device(index: int | None = None) -> Device:
    """The current GPU, or the CPU where there is none.

    Asking a GPU for its properties initialises CUDA in this process: do not fork afterwards.

    Args:
        index: GPU index; None is the current one.

    Raises:
        UnsupportedError: a CUDA GPU older than compute capability 8.0.
    """
    # Imported here, because the command line reads names of devices before it needs torch.
    import torch

    if not torch.cuda.is_available():
        return KNOWN_DEVICES["cpu"]
    index = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(index)
    common = {
        "name": properties.name,
        "num_multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    if torch.version.hip is not None:
        return Device(kind=DeviceKind.ROCM, **common)
    capability = ComputeCapability(major=properties.major, minor=properties.minor)
    kind = kind_of(capability)
    if kind is None:
        raise UnsupportedError(
            f"{properties.name} cannot be used:",
            [f"compute capability {capability} is below 8.0"],
        )
    return Device(kind=kind, compute_capability=capability, **common)


def known_device(name: str) -> Device:
    """A device by name, in upper or lower case, present or not.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    found = find_name(name, KNOWN_DEVICES)
    if found is None:
        raise ValueError(
            f"unknown device {name!r}{near_miss(name, KNOWN_DEVICES)}; "
            f"expected one of {', '.join(KNOWN_DEVICES)}"
        )
    return KNOWN_DEVICES[found]
