"""Devices as data: the facts that selection needs, for devices that are present and for others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique
from typing import Any, Final, Self

from pydantic import model_serializer, model_validator

from specs.base import NonNegativeInt, PositiveInt, Spec


class ComputeCapability(Spec):
    """CUDA compute capability, ``major.minor``; also compares with vLLM's ``DeviceCapability``."""

    major: NonNegativeInt
    minor: NonNegativeInt = 0

    @model_validator(mode="before")
    @classmethod
    def _from_text_or_pair(cls, value: Any) -> Any:
        """Accept ``"9.0"``, ``(9, 0)`` and any object with ``major`` and ``minor``."""
        if isinstance(value, str):
            parts = value.split(".")
            if not all(part.isdecimal() for part in parts) or len(parts) > 2:
                raise ValueError("a compute capability is written like '9.0'")
            value = tuple(int(part) for part in (*parts, "0")[:2])
        if isinstance(value, tuple) and len(value) == 2:
            return {"major": value[0], "minor": value[1]}
        if hasattr(value, "major") and hasattr(value, "minor"):
            return {"major": value.major, "minor": value.minor}
        return value

    @model_serializer
    def _as_text(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """``major * 10 + minor``, as in ``sm_90``."""
        return self.major * 10 + self.minor

    def __eq__(self, other: object) -> bool:
        pair = _pair(other)
        return NotImplemented if pair is None else (self.major, self.minor) == pair

    def __hash__(self) -> int:
        return hash((self.major, self.minor))

    def __lt__(self, other: object) -> bool:
        pair = _pair(other)
        return NotImplemented if pair is None else (self.major, self.minor) < pair

    def __le__(self, other: object) -> bool:
        pair = _pair(other)
        return NotImplemented if pair is None else (self.major, self.minor) <= pair

    def __gt__(self, other: object) -> bool:
        pair = _pair(other)
        return NotImplemented if pair is None else (self.major, self.minor) > pair

    def __ge__(self, other: object) -> bool:
        pair = _pair(other)
        return NotImplemented if pair is None else (self.major, self.minor) >= pair


def _pair(value: object) -> tuple[int, int] | None:
    """Major and minor of a ``ComputeCapability`` or of vLLM's ``DeviceCapability``, else None."""
    major, minor = getattr(value, "major", None), getattr(value, "minor", None)
    return (major, minor) if isinstance(major, int) and isinstance(minor, int) else None


@unique
class DeviceKind(StrEnum):
    """Kind of a device: the rows of the selector's priority table."""

    CPU = "cpu"
    SM80 = "sm80"
    SM89 = "sm89"
    SM90 = "sm90"
    SM100 = "sm100"
    SM120 = "sm120"
    ROCM = "rocm"


_KIB: Final = 1 << 10
SHARED_MEMORY: Final = {
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (11, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
    (12, 1): 99 * _KIB,
}
"""Bytes of shared memory that a program can have, by compute capability: "maximum amount of shared
memory per thread block" in the table of technical specifications of the CUDA programming guide."""
ROCM_SHARED_MEMORY: Final = 64 * _KIB
"""Bytes of local data share that a workgroup can have on CDNA 3."""
RESERVED_SHARED_MEMORY: Final = 1 * _KIB
"""Bytes of shared memory that CUDA takes for itself beside each program. A multiprocessor has this
much more shared memory than one program can have."""


@dataclass(frozen=True)
class GpuFacts:
    """The facts about a GPU, present or not, that tiles and plans depend on."""

    kind: DeviceKind
    num_multiprocessors: int
    shared_memory: int
    """Bytes of shared memory that one program can have."""
    reserved_shared_memory: int = RESERVED_SHARED_MEMORY
    """Bytes of shared memory that each program costs in addition to its own."""

    @classmethod
    def of(cls, capability: ComputeCapability | None, num_multiprocessors: int) -> Self:
        """The facts about a GPU of this compute capability.

        Args:
            capability: compute capability of an NVIDIA GPU, None for ROCm. A capability below 8.0,
                which no backend serves, counts as of the kind of 8.0.
            num_multiprocessors: multiprocessors of the GPU.
        """
        if capability is None:
            return cls(DeviceKind.ROCM, num_multiprocessors, ROCM_SHARED_MEMORY, 0)
        kind = kind_of(capability) or DeviceKind.SM80
        return cls(kind, num_multiprocessors, shared_memory_of(capability))

    @property
    def is_nvidia(self) -> bool:
        """True for an NVIDIA GPU, False for ROCm."""
        return self.kind is not DeviceKind.ROCM

    @property
    def converts_float8(self) -> bool:
        """True for a GPU with instructions that convert e4m3; elsewhere kernels use integers."""
        return self.is_nvidia and self.kind not in (DeviceKind.CPU, DeviceKind.SM80)

    def programs(self, needed: int) -> int:
        """Programs that fit on one multiprocessor at the same time, by their shared memory.

        Args:
            needed: bytes of shared memory of each program.
        """
        reserved = self.reserved_shared_memory
        return (self.shared_memory + reserved) // max(needed + reserved, 1)


class Device(Spec):
    """One device, as selection and launch planning see it."""

    name: str
    kind: DeviceKind
    compute_capability: ComputeCapability | None = None
    """None on devices that have none (CPU, ROCm)."""
    num_multiprocessors: PositiveInt | None = None
    memory_bytes: PositiveInt | None = None

    @model_validator(mode="after")
    def _capability_fits_the_kind(self) -> Self:
        """CUDA kinds have a compute capability of their family, others none."""
        expected = None if self.compute_capability is None else kind_of(self.compute_capability)
        if self.kind in (DeviceKind.CPU, DeviceKind.ROCM):
            if self.compute_capability is not None:
                raise ValueError(f"a {self.kind.value} device has no compute capability")
        elif expected is not self.kind:
            raise ValueError(
                f"device {self.name!r} of kind {self.kind.value} cannot have compute capability "
                f"{self.compute_capability}"
            )
        return self

    @property
    def torch_type(self) -> str:
        """``torch.device`` type: ``cpu`` or ``cuda`` (ROCm builds of torch say ``cuda`` too)."""
        return "cpu" if self.kind is DeviceKind.CPU else "cuda"

    @property
    def facts(self) -> GpuFacts:
        """The facts that tiles and plans depend on; one multiprocessor where the number is unknown.

        Raises:
            ValueError: the device is a CPU.
        """
        if self.kind is DeviceKind.CPU:
            raise ValueError(f"device {self.name!r} must be a GPU, got kind {self.kind.value}")
        return GpuFacts.of(self.compute_capability, self.num_multiprocessors or 1)


def shared_memory_of(capability: ComputeCapability) -> int:
    """Bytes of shared memory that a program can have.

    For a compute capability that :data:`SHARED_MEMORY` lacks this is the smallest value of its
    major version, and where that is missing too the smallest of all.
    """
    major = capability.major
    known = SHARED_MEMORY.get((major, capability.minor))
    if known is not None:
        return known
    family = [memory for pair, memory in SHARED_MEMORY.items() if pair[0] == major]
    return min(family or SHARED_MEMORY.values())


def kind_of(capability: ComputeCapability) -> DeviceKind | None:
    """The priority table's row for a compute capability; None below 8.0."""
    number = capability.to_int()
    if number < 80:
        return None
    if number < 89:
        return DeviceKind.SM80
    if number < 90:
        return DeviceKind.SM89
    return {9: DeviceKind.SM90, 10: DeviceKind.SM100, 11: DeviceKind.SM100}.get(
        capability.major, DeviceKind.SM120
    )


_GIB: Final = 1 << 30


def _cuda(name: str, capability: str, num_multiprocessors: int, memory_gib: int) -> Device:
    major, minor = (int(part) for part in capability.split("."))
    cc = ComputeCapability(major=major, minor=minor)
    kind = kind_of(cc)
    assert kind is not None
    return Device(
        name=name,
        kind=kind,
        compute_capability=cc,
        num_multiprocessors=num_multiprocessors,
        memory_bytes=memory_gib * _GIB,
    )


KNOWN_DEVICES: Final[dict[str, Device]] = {
    "cpu": Device(name="cpu", kind=DeviceKind.CPU),
    "a100": _cuda("a100", "8.0", 108, 80),
    "a10": _cuda("a10", "8.6", 72, 24),
    "a40": _cuda("a40", "8.6", 84, 48),
    "rtx-3090": _cuda("rtx-3090", "8.6", 82, 24),
    "orin": _cuda("orin", "8.7", 16, 64),
    "l4": _cuda("l4", "8.9", 58, 24),
    "l40": _cuda("l40", "8.9", 142, 48),
    "l40s": _cuda("l40s", "8.9", 142, 48),
    "h100": _cuda("h100", "9.0", 132, 80),
    "h200": _cuda("h200", "9.0", 132, 141),
    "h20": _cuda("h20", "9.0", 78, 96),
    "b200": _cuda("b200", "10.0", 148, 180),
    "b300": _cuda("b300", "10.3", 148, 288),
    "rtx-5090": _cuda("rtx-5090", "12.0", 170, 32),
    "rtx-pro-6000": _cuda("rtx-pro-6000", "12.0", 188, 96),
    "mi300x": Device(
        name="mi300x", kind=DeviceKind.ROCM, num_multiprocessors=304, memory_bytes=192 * _GIB
    ),
}
"""Devices that ``attn explain --device`` knows by name, present or not."""
