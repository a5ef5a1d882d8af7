"""GPUs that tests pretend to be on, as builders see them."""

from __future__ import annotations

from dataclasses import replace

from specs.devices import KNOWN_DEVICES, GpuFacts


def hopper(num_multiprocessors: int) -> GpuFacts:
    """A GPU of compute capability 9.0."""
    return replace(KNOWN_DEVICES["h200"].facts, num_multiprocessors=num_multiprocessors)
