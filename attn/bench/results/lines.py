"""Lines of the tables of backends over FlashInfer: two times, and how far apart they may be."""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Self

from pydantic import Field, StrictBool, model_validator

from specs.base import NonNegativeInt, Spec


@unique
class Part(StrEnum):
    """What is compared."""

    OVERHEAD = "overhead"
    """A layer's forward with FlashInfer's own call on the same tensors."""
    WRITE = "write"
    """Cache write and decode over fp8 with the same over bf16."""
    BUILD = "build"
    """A step's build with vLLM's FlashInfer builder."""
    ROPE = "rope"
    """Rotation, e4m3 and cache write in one launch, with FlashInfer's function and a write."""
    KERNEL = "kernel"
    """One backend by another's kernel, with that backend."""
    LISTS = "lists"
    """Latent attention over lists, with FlashMLA."""
    STREAM = "stream"
    """Operations that move bytes, against a rate."""


@unique
class How(StrEnum):
    """What a time is of."""

    DEVICE = "device"
    """The GPU alone, launches queued ahead of it, L2 emptied."""
    EAGER = "eager"
    """Calls one after the other until the last is done, the host's time included."""
    GRAPH = "graph"
    """Replays of a CUDA graph."""
    HOST = "host"
    """The host alone; the GPU is not waited for."""


class Line(Spec):
    """One comparison of one backend on one case."""

    part: Part
    case: str
    what: str
    """The case in words."""
    backend: str
    how: How
    other: str
    """With what it is compared."""
    ours_us: float | None = Field(default=None, gt=0)
    other_us: float | None = Field(default=None, gt=0)
    spread: float | None = None
    """(largest - smallest) / median of our rounds' medians."""
    error: float | None = None
    """Largest relative norm of a sampled row's error."""
    max_ratio: float | None = Field(default=None, gt=0)
    """Of ours to the other, at most."""
    is_strict: StrictBool = False
    """Below it, not at it."""
    max_more_us: float | None = Field(default=None, ge=0)
    """Of ours beyond the other, at most."""
    max_us: float | None = Field(default=None, gt=0)
    """Of ours, at most."""
    amount: float | None = Field(default=None, gt=0)
    """Operations or bytes of a call, in millions of ``unit`` times a second."""
    unit: str = ""
    """Of the rate: TF or TB/s."""
    min_rate: float | None = Field(default=None, gt=0)
    """Of ours, at least."""
    waits: NonNegativeInt | None = None
    """Calls that wait for the device, where that is asked; the target is none."""
    asks_waits: StrictBool = False
    is_broken: StrictBool = False
    """Ours was wrong, or failed, or was refused."""
    is_refused: StrictBool = False
    """The backend does not serve the case here."""
    reason: str = ""
    """Why a number is missing."""

    @model_validator(mode="after")
    def _broken_without_time(self) -> Self:
        """What is broken has no time."""
        if self.is_broken and self.ours_us is not None:
            raise ValueError(f"ours_us must be None when broken, got {self.ours_us}")
        return self

    @property
    def key(self) -> tuple[str, ...]:
        """What it replaces in earlier results."""
        return self.part.value, self.case, self.backend, self.how.value, self.other

    @property
    def rate(self) -> float | None:
        """Of ours."""
        if self.amount is None or self.ours_us is None:
            return None
        return self.amount / self.ours_us

    @property
    def target(self) -> str:
        """In words; empty without one."""
        parts = []
        if self.max_ratio is not None:
            parts.append(f"{'<' if self.is_strict else '<='} {self.max_ratio:g} x {self.other}")
        if self.max_more_us is not None:
            parts.append(f"<= {self.other} + {self.max_more_us:g} us")
        if self.max_us is not None:
            parts.append(f"<= {self.max_us:g} us")
        if self.min_rate is not None:
            parts.append(f">= {self.min_rate:g} {self.unit}")
        if self.asks_waits:
            parts.append("0 waits")
        return ", ".join(parts)

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None where that was not measured, or nothing is asked."""
        if not self.target:
            return None
        if self.is_broken:
            return False
        found: list[bool | None] = [None if self.waits is None else self.waits == 0]
        found = found if self.asks_waits else []
        ours, other = self.ours_us, self.other_us
        if self.max_ratio is not None:
            known = ours is not None and other is not None
            bound = (other or 0.0) * self.max_ratio
            below = (ours or 0.0) < bound if self.is_strict else (ours or 0.0) <= bound
            found.append(below if known else None)
        if self.max_more_us is not None:
            known = ours is not None and other is not None
            found.append((ours or 0.0) - (other or 0.0) <= self.max_more_us if known else None)
        if self.max_us is not None:
            found.append(None if ours is None else ours <= self.max_us)
        if self.min_rate is not None:
            found.append(None if self.rate is None else self.rate >= self.min_rate)
        if False in found:
            return False
        return None if None in found else True
