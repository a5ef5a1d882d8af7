"""Persistent tensors of a builder, which a CUDA graph must find at the same addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GraphBuffers:
    """Named tensors allocated once for declared limits; records hold views of them.

    Writing copies in place. To ask for more than was declared is an error, because a buffer that
    grows after a capture would leave the graph with a dangling address.
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
        """Allocate the buffer ``name`` and fill it.

        Args:
            name: the buffer's name.
            shape: its largest shape.
            dtype: type of its elements.
            fill: value of all elements.

        Raises:
            ValueError: a buffer of that name is declared already.
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
        """The leading part of the buffer ``name``, with ``shape``; no data is copied.

        Raises:
            ValueError: ``shape`` exceeds the declared shape, or has another number of dimensions.
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
        """Copy ``source`` into the leading part of the buffer ``name``, and return that part."""
        target = self.view(name, *source.shape)
        target.copy_(source, non_blocking=True)
        return target

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
