"""Launches that are prepared once: what they share, and what differs from call to call."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from builders.launch.call import KernelCall, collected
from builders.launch.launcher import Relauncher, Repeat
from builders.launch.prepared import GROUPS, picker

Entry = TypeVar("Entry")

MOST_REPEATS = 64
"""Of a layer; those of a cache that is gone are of no use any more."""


def alignment(x: torch.Tensor) -> int:
    """Bytes, a power of two up to 16, that the address of every row is a multiple of."""
    size, strides = x.element_size(), x.stride()[:-1]
    used = (stride * size for stride, count in zip(strides, x.shape, strict=False) if count > 1)
    return math.gcd(16, x.data_ptr(), *used)


def as_bytes(stored: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes, so that GPUs without such a type compile the kernel."""
    dtype = stored.dtype
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    return stored.view(torch.uint8) if is_float8 else stored


class KernelForm:
    """A kernel's launches that differ in few arguments: the others stand ready, in its order."""

    def __init__(
        self,
        kernel: Any,
        fixed: Mapping[str, Any],
        varying: Collection[str],
        num_warps: int = 4,
        num_stages: int = 2,
        max_registers: int | None = None,
        waits: bool = False,
        few_registers: bool = False,
    ) -> None:
        """
        Args:
            kernel: the ``triton.jit`` function.
            fixed: arguments that every launch of this form shares.
            varying: names of those that :meth:`call` is given; a group's stands for all of it.
            num_warps: as in :class:`KernelCall`.
            num_stages: likewise.
            max_registers: likewise.
            waits: likewise.
            few_registers: likewise.

        Raises:
            TypeError: the two do not add up to the kernel's arguments.
        """
        first = {name: GROUPS.get(name, (name,))[0] for name in varying}
        named = {*fixed, *(one for name in varying for one in GROUPS.get(name, (name,)))}
        wanted = set(kernel.arg_names)
        if named != wanted:
            raise TypeError(
                f"fixed and varying must name the kernel's arguments; missing "
                f"{sorted(wanted - named)}, unknown {sorted(named - wanted)}"
            )
        self.kernel = kernel
        self.arguments = {name: fixed.get(name) for name in kernel.arg_names}
        places = {name: place for place, name in enumerate(kernel.arg_names)}
        self.varying = tuple(sorted(first, key=lambda name: places[first[name]]))
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.max_registers = max_registers
        self.waits = waits
        self.few_registers = few_registers
        self.relauncher = Relauncher(kernel, self.varying)
        self._values = picker(self.varying)

    def call(self, grid: tuple[int, ...], varying: Mapping[str, Any]) -> FormCall:
        """One launch.

        Args:
            grid: programs.
            varying: a value for each of the names that vary; others are passed over.
        """
        return FormCall(self, grid, self._values(varying))


class FormCall:
    """One launch of a form; made anew at every forward, so that it is little more than a grid."""

    __slots__ = ("_form", "_grid", "_values")

    def __init__(self, form: KernelForm, grid: tuple[int, ...], values: tuple[Any, ...]) -> None:
        """
        Args:
            form: what it shares with others.
            grid: programs.
            values: of the arguments that vary, in the kernel's order.
        """
        self._form = form
        self._grid = grid
        self._values = values

    def launch(self) -> None:
        """As :meth:`KernelCall.launch`, and past Triton where it made a launch like this before."""
        form = self._form
        if collected.get() is None and 0 not in self._grid:
            if form.relauncher.launch(self._grid, self._values):
                return
        record = self.record
        form.relauncher.learn(record.launch(), self._values, record.arguments)

    def repeat(self, names: Sequence[str]) -> Repeat | None:
        """For launches like this one, which was made, but for the values of those names.

        Args:
            names: as of :meth:`builders.launch.launcher.Relauncher.repeat`.
        """
        return self._form.relauncher.repeat(self._values, names)

    @property
    def form(self) -> KernelForm:
        """What it shares with others."""
        return self._form

    @property
    def record(self) -> KernelCall:
        """The launch with every argument by name."""
        form = self._form
        varying: dict[str, Any] = {}
        for name, value in zip(form.varying, self._values, strict=True):
            members = GROUPS.get(name)
            if members is None:
                varying[name] = value
            else:
                varying |= zip(members, value.tensors, strict=True)
        return KernelCall(
            form.kernel,
            self._grid,
            form.arguments | varying,
            form.num_warps,
            form.num_stages,
            form.max_registers,
            form.waits,
            form.few_registers,
            in_order=True,
        )


class Kept(Generic[Entry]):
    """What was prepared, by what it depends on.

    Most calls are like the one before, and comparing what they depend on costs less than its hash.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Entry] = {}
        self._latest: tuple[Any, ...] | None = None
        self._entry: Entry | None = None

    def __len__(self) -> int:
        return len(self._known)

    def has(self, key: tuple[Any, ...]) -> bool:
        """Whether there is an entry, which is the latest then."""
        if key != self._latest:
            if key not in self._known:
                return False
            self._latest, self._entry = key, self._known[key]
        return True

    def keep(self, key: tuple[Any, ...], entry: Entry) -> None:
        """A new entry."""
        self._known[key] = entry
        self._latest, self._entry = key, entry

    @property
    def latest(self) -> Entry | None:
        """The entry last asked for."""
        return self._entry


class Forms(Kept[KernelForm | None]):
    """Forms; None stands for launches that are left to another kernel."""


class Repeats(Kept[Entry]):
    """Launches to be made again, by all that they depend on but addresses and numbers."""

    def of(self, key: tuple[Any, ...]) -> Entry | None:
        """The one that was kept; None too where launches are collected and not made."""
        if (key != self._latest and not self.has(key)) or collected.get() is not None:
            return None
        return self._entry

    def keep(self, key: tuple[Any, ...], entry: Entry | None) -> None:
        """A new entry, if it is one."""
        if entry is None:
            return
        if len(self) == MOST_REPEATS:
            self._known.clear()
        super().keep(key, entry)
