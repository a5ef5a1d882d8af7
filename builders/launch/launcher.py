"""Launching again what Triton has launched before, without what it does for every launch.

At each launch Triton binds all arguments, specialises the kernel on them, makes a key of both,
looks the compiled kernel up, encodes every tensor descriptor and asks the driver about every
pointer: tens of microseconds on the host. Here the compiled kernel that a launch through Triton
gave is kept, with the arguments of the C function at the bottom of its launcher. A launch whose
arguments Triton would specialise alike calls that function with its own in their places: pointers
as addresses, descriptors as they were encoded before.

Two launches of one form are specialised alike if each argument that varies has the same type: a
tensor the same dtype, and the same alignment to 16 bytes where the kernel does not waive that; an
integer the same width, and the same value where the kernel does not waive specialising on it; a
descriptor the same dtype, box and layout. The tests ask Triton whether that is so.

Whoever compares what its tensors are anyway keeps a :class:`Repeat` of a launch: its arguments, in
which a few addresses and numbers are exchanged.

Where the driver confirms the parameters, it is called in place of that function:
:mod:`builders.launch.driver`.

What is used of Triton 3.6 to 3.9 is looked up when a launch is learnt from, and nothing is learnt
where it looks different. Launches stay Triton's where someone watches them (hooks, profilers,
``TRITON_DEBUG``), on other devices than the one learnt on, on AMD and under the interpreter.
Capturing a CUDA graph needs nothing of its own: a captured launch copies its parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from builders.launch.call import KernelCall, collected
from builders.launch.driver import driver_launches
from builders.launch.prepared import ALIGNMENT, TENSORS, Prepared, UnknownError, picker

MOST_PREPARED = 8
"""Specialisations of a form that are kept; launches like others stay Triton's."""
MOST_SHARED = 256
"""Kernels with fixed arguments that stand ready: an engine has one or two of each, by the strides
of its tables."""
_KNOBS = ("launch_enter_hook", "launch_exit_hook", "debug", "add_stages_inspection_hook")
"""Of Triton's runtime: by these, someone watches launches or has kernels compiled otherwise."""


def relaunches() -> bool:
    """Launches go past Triton where they can, unless ``ATTN_RELAUNCH=0``."""
    return os.environ.get("ATTN_RELAUNCH") != "0"


class Relauncher:
    """Launches of one kernel that differ in few arguments, past Triton once it made one like it."""

    def __init__(self, kernel: Any, varying: Sequence[str]) -> None:
        """
        Args:
            kernel: the ``triton.jit`` function; of anything else nothing is learnt.
            varying: names of the arguments that differ from launch to launch, in their order.
        """
        self._kernel = kernel
        self._varying = tuple(varying)
        self._prepared: list[Prepared] = []
        knows_knobs = all(hasattr(knobs.runtime, name) for name in _KNOBS)
        self._learns = relaunches() and isinstance(kernel, JITFunction) and knows_knobs

    def launch(self, grid: tuple[int, ...], values: Sequence[Any]) -> bool:
        """Enqueue on the current stream; False, and nothing is done, where that is Triton's to do.

        Args:
            grid: programs, none of them 0.
            values: of the arguments that vary, in the order of their names.
        """
        if not self._prepared or self._kernel.pre_run_hooks or _is_watched():
            return False
        for prepared in self._prepared:
            words = prepared.words_of(values)
            if words is not None:
                x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
                prepared.launch(x, y, z, words)
                return True
        return False

    def repeat(self, values: Sequence[Any], names: Sequence[str]) -> Repeat | None:
        """A launch like one that was made, for others with new values of some names.

        Args:
            values: as :meth:`launch` takes them.
            names: what is given at every launch; those of no argument that varies, and of those
                that are None here, are passed over.

        Returns:
            None where :meth:`launch` leaves it to Triton, or where the kernel is specialised on a
            value of those names by more than a repeat compares.
        """
        for prepared in self._prepared:
            words = prepared.words_of(values)
            if words is not None:
                try:
                    return Repeat(self._kernel, prepared, words, values, names)
                except UnknownError:
                    return None
        return None

    def learn(self, compiled: object, values: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """Keep what a launch through Triton gave, for launches that are specialised alike.

        Args:
            compiled: what the launch returned.
            values: as :meth:`launch` takes them.
            arguments: every argument of it, by name and in the kernel's order.
        """
        if not self._learns or not isinstance(compiled, CompiledKernel) or _is_watched():
            return
        try:
            varying = dict(zip(self._varying, values, strict=True))
            self._prepared.append(Prepared(self._kernel, varying, compiled, arguments))
        except (LookupError, AttributeError, StopIteration, TypeError, ValueError, UnknownError):
            # Triton as it is not known here, and will not be at the next launch.
            self._learns = False
        if len(self._prepared) == MOST_PREPARED:
            self._learns = False


class Repeat:
    """A launch that was made, for those that differ from it in some addresses and numbers alone.

    Types and devices are the caller's to compare; what else Triton specialises on is seen to here.
    """

    def __init__(
        self,
        kernel: Any,
        prepared: Prepared,
        words: list[Any],
        values: Sequence[Any],
        names: Sequence[str],
    ) -> None:
        """
        Args:
            kernel: the ``triton.jit`` function.
            prepared: what it was compiled to.
            words: arguments of its C function.
            values: those that they were made of.
            names: as of :meth:`Relauncher.repeat`.

        Raises:
            UnknownError: the kernel is specialised on the value of one of them.
        """
        self._kernel = kernel
        self._prepared = prepared
        self._words = words
        self._places: list[tuple[int, Any]] = []
        self._aligned: list[int] = []
        self._numbers: list[int] = []
        single: list[int] = []
        lists: list[int] = []
        parts: list[list[int]] = [[]]
        for index, name in enumerate(names):
            at = prepared.places.get(name)
            if at is None or values[at[0]] is None:
                continue
            value, waives = values[at[0]], prepared.waived[name]
            if type(value) in TENSORS and not waives:
                self._aligned.append(index)
                if value.data_ptr() % ALIGNMENT:
                    raise UnknownError
            elif type(value) is int:
                self._numbers.append(index)
                if not waives or value >> 31:
                    raise UnknownError
            self._places.append((index, at[1]))
            if isinstance(at[1], slice):
                lists.append(index)
                parts.append([*range(len(words))[at[1]]])
            else:
                single.append(index)
                parts[0].append(at[1])
        self._single, self._lists = picker(single), picker(lists)
        self._direct = driver_launches(prepared.direct, words, parts)

    def encoded(self, name: str, descriptor: Any) -> list[Any] | None:
        """What stands for a descriptor among what is given; None for one of another kind."""
        return self._prepared.encoders[name].words_of(descriptor)

    def launch(self, programs: int, given: tuple[tuple[Any, ...], ...]) -> bool:
        """Enqueue on the current stream; False, and nothing is done, where that is Triton's to do.

        Args:
            programs: of a grid of one dimension, not 0.
            given: in turn a value of each name: a tensor's address, an integer, the addresses of a
                :class:`Pointers`, an encoded descriptor. Tuples that come back cost nothing.
        """
        prepared = self._prepared
        if self._kernel.pre_run_hooks or _is_watched() or not prepared.is_current():
            return False
        direct = None if self._direct is None else self._direct.own
        if direct is None or direct.written != given:
            values = (*chain.from_iterable(given),)
            if not self._is_alike(values):
                return False
            if direct is not None:
                parts = (self._single(values), *self._lists(values))
                if not direct.write(parts, given):
                    direct = None
        if direct is not None and direct.launch(programs, prepared.stream()):
            return True
        words, values = self._words.copy(), (*chain.from_iterable(given),)
        for index, place in self._places:
            words[place] = values[index]
        prepared.call(programs, 1, 1, words)
        return True

    def _is_alike(self, values: tuple[Any, ...]) -> bool:
        """Triton would not specialise anew."""
        addresses = numbers = 0
        for index in self._aligned:
            addresses |= values[index]
        for index in self._numbers:
            numbers |= values[index]
        return not (addresses % ALIGNMENT or numbers >> 31)


class RepeatedLaunch:
    """Launches of one kernel that differ in few arguments: the others stand ready, in its order."""

    def __init__(
        self, kernel: Any, fixed: Mapping[str, Any], num_warps: int = 4, waits: bool = False
    ) -> None:
        """
        Args:
            kernel: the ``triton.jit`` function.
            fixed: arguments that every launch shares, no tensor among them; the others vary.
            num_warps: as in :class:`builders.launch.call.KernelCall`.
            waits: likewise.

        Raises:
            TypeError: a tensor is to be shared; its address is not kept.
        """
        for name, value in fixed.items():
            if isinstance(value, torch.Tensor):
                raise TypeError(f"{name} must vary, for it is a tensor")
        self._kernel = kernel
        self._options = (num_warps, waits)
        self._arguments = {name: fixed.get(name) for name in kernel.arg_names}
        self._varying = tuple(name for name in kernel.arg_names if name not in fixed)
        self._relauncher = Relauncher(kernel, self._varying)

    def __call__(self, grid: tuple[int, ...], *values: Any) -> None:
        """Enqueue on the current stream, past Triton where it made a launch like this before.

        Args:
            grid: programs, none of them 0.
            values: of the arguments that vary, in the kernel's order.
        """
        if collected.get() is None and self._relauncher.launch(grid, values):
            return
        arguments = self._arguments | dict(zip(self._varying, values, strict=True))
        num_warps, waits = self._options
        call = KernelCall(self._kernel, grid, arguments, num_warps, waits=waits, in_order=True)
        self._relauncher.learn(call.launch(), values, arguments)


@lru_cache(maxsize=MOST_SHARED)
def repeated_launch(kernel: Any, **fixed: Any) -> RepeatedLaunch:
    """Launches of a kernel with the same fixed arguments: always the same ones."""
    return RepeatedLaunch(kernel, fixed)


def _is_watched() -> bool:
    """A knob is set."""
    runtime: Any = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    is_changed = runtime.debug or runtime.add_stages_inspection_hook
    try:
        # Chains of hooks, empty ones as a rule.
        return bool(enter.calls or leave.calls or is_changed)
    except AttributeError:
        # One hook, or None.
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or is_changed)
