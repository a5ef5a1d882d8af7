"""Tensors that the launches of all layers of a step share, as one argument of a launcher."""

from __future__ import annotations

from typing import Any

import torch


class Pointers:
    """Several tensors whose addresses are read once, for the launches of all layers of a step."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """
        Args:
            tensors: they keep their addresses.
        """
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.kinds = tuple(
            (tensor.dtype, tensor.is_cuda, address % 16 == 0)
            for tensor, address in zip(tensors, self.addresses, strict=True)
        )
        """Type, place and alignment of each tensor: all that a kernel is compiled for."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy reads the addresses of its own tensors."""
        return Pointers, self.tensors
