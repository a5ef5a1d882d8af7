"""One launcher argument for several tensors that the launches of all layers of a step share."""

from __future__ import annotations

from typing import Any

import torch


class Pointers:
    """Several tensors whose addresses are read once, for the launches of all layers of a step."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """
        Args:
            tensors: tensors whose addresses do not change.
        """
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]
        self.kinds = tuple((tensor.dtype, tensor.is_cuda) for tensor in tensors)
        """Type of each tensor, and whether it is on a GPU."""
        self.aligned = tuple(address % 16 == 0 for address in self.addresses)
        """Whether the address of each tensor is aligned to 16 bytes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and unpickle through the constructor, which reads the new tensors' addresses."""
        return Pointers, self.tensors
