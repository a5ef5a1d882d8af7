"""Persistent tensors of a builder: what a CUDA graph must find at the same address."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GraphBuffers:
    """Named tensors allocated once for declared limits; records hold views of them.

    Writing copies in place. Asking for more than was declared is an error, because growing after a
    capture would leave the graph with a dangling address.
    """

    def __init__(self, device: torch.device | str) -> None:
        """
        Args:
            device: where every buffer lives.
        """
        self.device = torch.device(device)
        self._buffers: dict[str, torch.Tensor] = {}

    def declare(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, fill: float = 0
    ) -> torch.Tensor:
        """Allocate ``name`` for its largest shape, filled with ``fill``.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._buffers:
            raise ValueError(f"graph buffer {name!r} is declared already")
        buffer = torch.full(tuple(shape), fill, dtype=dtype, device=self.device)
        self._buffers[name] = buffer
        return buffer

    def __contains__(self, name: str) -> bool:
        """True when ``name`` is declared."""
        return name in self._buffers

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole buffer."""
        return self._buffers[name]

    def view(self, name: str, *shape: int) -> torch.Tensor:
        """The leading part of a buffer, of ``shape``.

        Raises:
            ValueError: ``shape`` exceeds what was declared.
        """
        buffer = self._buffers[name]
        if len(shape) != buffer.dim() or any(
            extent > limit for extent, limit in zip(shape, buffer.shape, strict=True)
        ):
            raise ValueError(
                f"graph buffer {name!r} was declared {tuple(buffer.shape)}, asked for {shape}"
            )
        for axis, extent in enumerate(shape):
            buffer = buffer.narrow(axis, 0, extent)
        return buffer

    def write(self, name: str, source: torch.Tensor) -> torch.Tensor:
        """Copy ``source`` into the leading part of ``name`` and return that view."""
        target = self.view(name, *source.shape)
        target.copy_(source, non_blocking=True)
        return target

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
