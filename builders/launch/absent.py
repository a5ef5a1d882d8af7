"""A GPU that is not there: launches for it are collected on the CPU, and their kernels compiled.

Builders and impls make launches for the GPU that tensors and torch tell them of. In
:func:`absent_gpu` torch tells of a GPU that this machine need not have, and tensors on it are
tensors in the CPU's memory. No kernel can run there: launches must be collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import torch
from torch.overrides import TorchFunctionMode

from builders.launch.call import collected
from specs.devices import ComputeCapability

_CPU: Final = torch.device("cpu")
_GPU: Final = "cuda"


class AbsentTensor(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU; each GPU has a subclass."""

    gpu: ClassVar[torch.device]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU that is not there."""
        return self.gpu

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """False."""
        return False


class _OnCpu(TorchFunctionMode):
    """Runs torch's functions on the CPU, and marks results that a caller wants on the GPU."""

    def __init__(self, gpu: torch.device) -> None:
        super().__init__()
        self._kind = type(AbsentTensor.__name__, (AbsentTensor,), {"gpu": gpu})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **named)
        devices = [*filter(None, map(_device_of, (*args, *named.values())))]
        if func is torch.Tensor.cpu:
            devices.append(_CPU)
        # Memory for copies to a GPU can be pinned only where there is one.
        named.pop("pin_memory", None)
        result = func(*map(_on_cpu, args), **{name: _on_cpu(x) for name, x in named.items()})
        if not devices or not isinstance(result, torch.Tensor):
            return result
        kind = self._kind if devices[0].type == _GPU else torch.Tensor
        return result.as_subclass(kind)


def _device_of(value: object) -> torch.device | None:
    """The device that an argument of a torch function names, if it names one."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str) and value.split(":")[0] in (_CPU.type, _GPU):
        return torch.device(value)
    return None


def _on_cpu(value: object) -> object:
    return value if _device_of(value) is None else _CPU


@contextmanager
def absent_gpu(capability: ComputeCapability, num_multiprocessors: int) -> Iterator[torch.device]:
    """Have torch tell of a GPU, which this machine need not have.

    The functions of ``torch.cuda`` that tell are replaced for the whole process, so nothing else
    must use a GPU meanwhile.

    Args:
        capability: compute capability of the GPU.
        num_multiprocessors: its multiprocessors.

    Yields:
        The device to make builders and tensors on.

    Raises:
        RuntimeError: launches are not collected here, see
            :func:`builders.launch.call.collected_calls`.
    """
    if collected.get() is None:
        raise RuntimeError("launches for a GPU that is not there must be collected")
    major, minor = capability.major, capability.minor
    # Some facts are kept by device, so that each compute capability is a device of its own.
    gpu = torch.device(_GPU, capability.to_int())
    properties = SimpleNamespace(
        major=major, minor=minor, multi_processor_count=num_multiprocessors
    )
    told: dict[str, Callable[..., Any]] = {
        "device_count": lambda: gpu.index + 1,
        "current_device": lambda: gpu.index,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "is_current_stream_capturing": lambda: False,
    }
    kept = {name: getattr(torch.cuda, name) for name in told}
    try:
        for name, function in told.items():
            setattr(torch.cuda, name, function)
        with _OnCpu(gpu):
            yield gpu
    finally:
        for name, function in kept.items():
            setattr(torch.cuda, name, function)
