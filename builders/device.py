"""What a device is, and what runs on it."""

from __future__ import annotations

import torch

from specs.devices import ComputeCapability, GpuFacts


def device_facts(device: torch.device) -> GpuFacts:
    """What tiles and plans depend on; a CPU stands for a small GPU of Hopper's, to test with."""
    if device.type != "cuda":
        return GpuFacts.of(ComputeCapability(major=9), 3)
    properties = torch.cuda.get_device_properties(device)
    capability = None
    if torch.version.hip is None:
        capability = ComputeCapability(major=properties.major, minor=properties.minor)
    return GpuFacts.of(capability, properties.multi_processor_count)


def interprets() -> bool:
    """Triton's interpreter runs kernels on CPU tensors here."""
    from triton.runtime.interpreter import InterpretedFunction

    from builders.splitkv.device.plan import plan_kernel

    return isinstance(plan_kernel, InterpretedFunction)


def runs_gluon(device: torch.device) -> bool:
    """Kernels in Gluon can run on a device; the interpreter has none of it."""
    return device.type == "cuda" and not interprets()
