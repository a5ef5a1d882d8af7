"""What a device is, and what runs on it."""

from __future__ import annotations

import torch

from specs.devices import ComputeCapability, DeviceKind, kind_of


def device_facts(device: torch.device) -> tuple[DeviceKind, int]:
    """Kind and number of multiprocessors; a CPU stands for a small GPU, to test with."""
    if device.type != "cuda":
        return DeviceKind.SM90, 3
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return DeviceKind.ROCM, properties.multi_processor_count
    capability = ComputeCapability(major=properties.major, minor=properties.minor)
    return kind_of(capability) or DeviceKind.SM80, properties.multi_processor_count


def interprets() -> bool:
    """Triton's interpreter runs kernels on CPU tensors here."""
    from triton.runtime.interpreter import InterpretedFunction

    from builders.plan_kernels import plan_kernel

    return isinstance(plan_kernel, InterpretedFunction)


def runs_gluon(device: torch.device) -> bool:
    """Kernels in Gluon can run on a device; the interpreter has none of it."""
    return device.type == "cuda" and not interprets()
