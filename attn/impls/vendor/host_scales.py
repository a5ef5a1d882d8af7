"""Scales that kernels take as numbers of the host: read once a tensor, never while capturing."""

from __future__ import annotations

import weakref

import torch

from attn.impls.base import AttentionLayer


class HostScales:
    """The scales of one layer, for a backend whose calls take Python floats."""

    def __init__(self, backend: str) -> None:
        """
        Args:
            backend: name for messages.
        """
        self._backend = backend
        self._kept: dict[str, _ScaleOnHost] = {}

    def of(self, layer: AttentionLayer, name: str) -> float:
        """The scale ``name`` of a layer: its host copy ``<name>_float`` where it has one, as vLLM's
        layers do, else the tensor's value, read again only when the tensor changed.

        Raises:
            ValueError: no such scale, or not one fp32 number; or the first call of all is made
                while a CUDA graph is captured.
        """
        known = getattr(layer, f"{name}_float", None)
        if isinstance(known, float):
            return known
        scale = getattr(layer, name, None)
        if scale is None:
            raise ValueError(f"{name} of the layer is needed by {self._backend}, got None")
        return self.value_of(name, scale)

    def value_of(self, name: str, scale: torch.Tensor) -> float:
        """The scale ``name``, where its tensor is all that is known; as of :meth:`of`."""
        kept = self._kept.get(name)
        if kept is None or not kept.is_of(scale):
            kept = self._kept[name] = _ScaleOnHost(name, scale, self._backend)
        return kept.value


class _ScaleOnHost:
    """The value of a device scalar, read once."""

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
        """True when it is this tensor's, as it is now."""
        return self._scale() is scale and self._version == scale._version
