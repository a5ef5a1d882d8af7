"""Facts of the device that a builder plans for, and which kernels run on it."""

from __future__ import annotations

import torch

from specs.devices import ComputeCapability, GpuFacts


def device_facts(device: torch.device) -> GpuFacts:
    """The facts of a device that tiles and plans depend on.

    A CPU stands for a Hopper GPU with three multiprocessors, so that plans can be tested on it.
    """
    if device.type != "cuda":
        return GpuFacts.of(ComputeCapability(major=9), 3)
    properties = torch.cuda.get_device_properties(device)
    capability = None
    if torch.version.hip is None:
        capability = ComputeCapability(major=properties.major, minor=properties.minor)
    return GpuFacts.of(capability, properties.multi_processor_count)


def interprets() -> bool:
    """Whether Triton's interpreter runs kernels, on CPU tensors, in this process."""
    from triton.runtime.interpreter import InterpretedFunction

    from builders.splitkv.device.plan import plan_kernel

    return isinstance(plan_kernel, InterpretedFunction)


def runs_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon can run on a device; Triton's interpreter does not run Gluon."""
    return device.type == "cuda" and not interprets()
