"""The roofline of a GPU: how fast work of an arithmetic intensity can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Roof:
    """Peaks of a GPU, from its data sheet: dense products in bf16, without sparsity."""

    bandwidth: float
    """TB/s."""
    products: float
    """TFLOP/s."""

    def rate(self, intensity: float) -> float:
        """Highest TFLOP/s of work with so many operations per byte."""
        return min(self.products, self.bandwidth * intensity)


ROOFS: Final = (
    ("H200", Roof(4.8, 989.0)),
    ("H100 PCIe", Roof(2.0, 756.0)),
    ("H100 NVL", Roof(3.9, 835.0)),
    ("H100", Roof(3.35, 989.0)),
    ("A100-SXM4-80GB", Roof(2.039, 312.0)),
    ("A100-SXM4-40GB", Roof(1.555, 312.0)),
    ("L40S", Roof(0.864, 362.0)),
    ("B200", Roof(8.0, 2250.0)),
)
"""Parts of device names as their drivers tell them, the more exact first, with their roofs."""


def roof_of(device: str) -> Roof | None:
    """The roof of a device by its name; None where it is not known."""
    return next((roof for part, roof in ROOFS if part in device), None)
