"""Lines of tables that compare pairs of times: two times, and a bound on their difference."""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Self

from pydantic import Field, StrictBool, model_validator

from specs.base import NonNegativeInt, Spec


@unique
class Part(StrEnum):
    """Subject of a comparison."""

    OVERHEAD = "overhead"
    """A layer's forward against FlashInfer's own call on the same tensors."""
    WRITE = "write"
    """Cache write and decode over an fp8 cache against both over a bf16 cache."""
    BUILD = "build"
    """A step's build against the build of vLLM's FlashInfer builder."""
    ROPE = "rope"
    """Rotation, e4m3 and cache write in one launch against FlashInfer's function and a write."""
    KERNEL = "kernel"
    """One backend with another backend's kernel against that other backend."""
    LISTS = "lists"
    """Latent attention over lists against FlashMLA."""
    STREAM = "stream"
    """An operation that moves bytes against a rate."""


@unique
class How(StrEnum):
    """The way in which a time is measured."""

    DEVICE = "device"
    """Time of the GPU alone, with launches queued ahead and an empty L2."""
    EAGER = "eager"
    """Time per call of calls in a row until the last is done, the host's time included."""
    GRAPH = "graph"
    """Time per call in replays of a CUDA graph."""
    HOST = "host"
    """Time of the host alone, without waiting for the GPU."""


class Line(Spec):
    """One comparison of one backend on one case."""

    part: Part
    case: str
    what: str
    """The case in words."""
    backend: str
    how: How
    other: str
    """Name of the call that our backend is compared with."""
    ours_us: float | None = Field(default=None, gt=0)
    other_us: float | None = Field(default=None, gt=0)
    spread: float | None = None
    """(largest - smallest) / median of our rounds' medians."""
    other_spread: float | None = None
    """(largest - smallest) / median of the medians of the other call's rounds."""
    error: float | None = None
    """Largest relative norm of a sampled row's error."""
    max_ratio: float | None = Field(default=None, gt=0)
    """Most of our time over the other's."""
    max_more_us: float | None = Field(default=None, ge=0)
    """Most microseconds of our time beyond the other's."""
    max_us: float | None = Field(default=None, gt=0)
    """Most microseconds of our time."""
    amount: float | None = Field(default=None, gt=0)
    """Operations or bytes of a call, in millions: divided by microseconds it is a rate in ``unit``.
    """
    unit: str = ""
    """Unit of the rate: TF or TB/s."""
    min_rate: float | None = Field(default=None, gt=0)
    """Least rate of ours, in ``unit``."""
    waits: NonNegativeInt | None = None
    """Number of calls in our code that wait for the device; None where it is not asked for."""
    asks_waits: StrictBool = False
    is_broken: StrictBool = False
    """Our call was wrong, failed or was refused."""
    is_refused: StrictBool = False
    """The backend does not serve the case here."""
    reason: str = ""
    """Why a number is missing."""

    @model_validator(mode="after")
    def _broken_without_time(self) -> Self:
        """A broken line has no time."""
        if self.is_broken and self.ours_us is not None:
            raise ValueError(f"ours_us must be None when broken, got {self.ours_us}")
        return self

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the line; it replaces an earlier result's line with the same key."""
        return self.part.value, self.case, self.backend, self.how.value, self.other

    @property
    def rate(self) -> float | None:
        """Rate of our call, in ``unit``; None without an amount or a time."""
        if self.amount is None or self.ours_us is None:
            return None
        return self.amount / self.ours_us

    @property
    def target(self) -> str:
        """The target in words; empty for a line without a target."""
        parts = []
        if self.max_ratio is not None:
            parts.append(f"<= {self.max_ratio:g} x {self.other}")
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
        """Whether the target is met; None without a target or where it was not measured."""
        if not self.target:
            return None
        if self.is_broken:
            return False
        found: list[bool | None] = [None if self.waits is None else self.waits == 0]
        found = found if self.asks_waits else []
        ours, other = self.ours_us, self.other_us
        if self.max_ratio is not None:
            known = ours is not None and other is not None
            found.append((ours or 0.0) <= (other or 0.0) * self.max_ratio if known else None)
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
