"""Scales for kernels that take them as numbers of the host.

A scale is read from the device once per tensor, and never while a CUDA graph is captured.
"""

from __future__ import annotations

import weakref

import torch

from attn.impls.base import AttentionLayer


class HostScales:
    """The scales of one layer, for a backend whose calls take Python floats."""

    def __init__(self, backend: str) -> None:
        """
        Args:
            backend: the backend's name, for messages.
        """
        self._backend = backend
        self._kept: dict[str, _ScaleOnHost] = {}

    def of(self, layer: AttentionLayer, name: str) -> float:
        """The scale ``name`` of a layer.

        A layer may have a copy on the host, ``<name>_float``, as vLLM's layers do. Otherwise the
        tensor is read, and is read again only after it has changed.

        Raises:
            ValueError: the layer has no such scale, the scale is not one fp32 number, or it would
                have to be read while a CUDA graph is captured.
        """
        known = getattr(layer, f"{name}_float", None)
        if isinstance(known, float):
            return known
        scale = getattr(layer, name, None)
        if scale is None:
            raise ValueError(f"{name} of the layer is needed by {self._backend}, got None")
        return self.value_of(name, scale)

    def value_of(self, name: str, scale: torch.Tensor) -> float:
        """The value of the tensor ``scale``; it is read again only after it has changed.

        Raises:
            ValueError: the scale is not one fp32 number, or it would have to be read while a CUDA
                graph is captured. The message calls it ``name``.
        """
        kept = self._kept.get(name)
        if kept is None or not kept.is_of(scale):
            kept = self._kept[name] = _ScaleOnHost(name, scale, self._backend)
        return kept.value


class _ScaleOnHost:
    """The value of a device scalar, read once, with the version of the tensor that it had."""

    def __init__(self, name: str, scale: torch.Tensor, backend: str) -> None:
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(
                f"{name} must be a float32 scalar for {backend}, got {list(scale.shape)} of "
                f"{scale.dtype}"
            )
        if scale.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(f"{name} must be read before a graph is captured: call forward once")
        self.value = float(scale)
        self._version = scale._version
        self._scale = weakref.ref(scale)

    def is_of(self, scale: torch.Tensor) -> bool:
        """Whether this is the present value of the tensor ``scale``."""
        return self._scale() is scale and self._version == scale._version
