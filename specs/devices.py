"""Devices as data: what selection needs to know, also of a device that is not present."""

from __future__ import annotations

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
    """Major and minor of ours, or of vLLM's ``DeviceCapability``; None for anything else."""
    major, minor = getattr(value, "major", None), getattr(value, "minor", None)
    return (major, minor) if isinstance(major, int) and isinstance(minor, int) else None


@unique
class DeviceKind(StrEnum):
    """Rows of the selector's priority table."""

    CPU = "cpu"
    SM80 = "sm80"
    SM89 = "sm89"
    SM90 = "sm90"
    SM100 = "sm100"
    SM120 = "sm120"
    ROCM = "rocm"


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
    "l40s": _cuda("l40s", "8.9", 142, 48),
    "h100": _cuda("h100", "9.0", 132, 80),
    "h200": _cuda("h200", "9.0", 132, 141),
    "b200": _cuda("b200", "10.0", 148, 180),
    "b300": _cuda("b300", "10.3", 148, 288),
    "rtx-pro-6000": _cuda("rtx-pro-6000", "12.0", 188, 96),
    "mi300x": Device(
        name="mi300x", kind=DeviceKind.ROCM, num_multiprocessors=304, memory_bytes=192 * _GIB
    ),
}
"""Devices that ``attn explain --device`` knows by name, present or not."""
