"""A kernel that Triton compiled and launched, and how to launch it again without Triton.

This module is the only one that knows Triton's launcher from inside: the C function that it calls,
the arguments that this function takes before the kernel's, and how tensor descriptors are encoded.
It knows Triton 3.6 to 3.9. Launches that look different from these are left to Triton.

Triton compiles the same kernel for two launches if every varying argument has the same type, and

- a tensor has the same dtype and the same alignment to 16 bytes;
- an integer has the same width, and in both launches is 1 or not, and a multiple of 16 or not (the
  width of an integer that the kernel annotates does not count, but is compared all the same);
- a descriptor has the same dtype, box and layout.

A kernel can waive the alignment, and both questions about an integer. The tests ask Triton whether
all this is so.
"""

from __future__ import annotations

import copy
import logging
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
import triton
from triton.runtime import driver

from builders.launch.pointers import Pointers

KNOWN_TRITON = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose launcher this module knows."""
INTEGERS = ("i32", "i64")
"""Annotations of integers, with Triton's names: of such arguments only the value decides which
kernel Triton compiles."""
ALIGNMENT = 16
"""Bytes; Triton compiles aligned and other addresses apart."""
TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of arguments that are passed as an address."""
_ENCODED = "encoded"
"""The names of the attributes that :class:`_Encoder` adds to descriptors start with this word."""
_BASE = ("grid x", "grid y", "grid z", "stream")
"""The first arguments of the C function."""
_logger = logging.getLogger(__name__)


@cache
def is_known_triton() -> bool:
    """Whether the installed Triton is one of ``KNOWN_TRITON``; if it is not, warns once."""
    version = triton.__version__
    is_known = tuple(int(part) for part in version.split(".")[:2]) in KNOWN_TRITON
    if not is_known:
        known = ", ".join(".".join(map(str, one)) for one in KNOWN_TRITON)
        _logger.warning(
            "Triton %s launches every kernel itself, which costs the host tens of microseconds a "
            "launch: kernels are launched past it by Triton %s",
            version,
            known,
        )
    return is_known


class UnknownError(Exception):
    """A launch looks unlike the launches that this module knows, and is left to Triton."""


class CompiledLaunch:
    """A compiled kernel on one device, and the arguments of its C function."""

    def __init__(
        self,
        kernel: Any,
        varying: Mapping[str, Any],
        groups: Mapping[str, tuple[str, ...]],
        compiled: Any,
        arguments: Mapping[str, Any],
        *,
        is_typed: bool = False,
    ) -> None:
        """
        Args:
            kernel: the ``triton.jit`` function.
            varying: arguments that differ from launch to launch, by name.
            groups: names in ``varying`` that stand for several arguments of the kernel.
            compiled: the compiled kernel that a launch through Triton returned.
            arguments: every argument of that launch, by name and in the kernel's order.
            is_typed: see :class:`builders.launch.launcher.Launcher`.

        Raises:
            UnknownError: Triton's launcher or an argument is of an unknown kind.
        """
        self._compiled = compiled
        """Kept alive, since its code is unloaded when it dies."""
        self._driver = driver.active
        self._device = self._driver.get_current_device()
        self._current_device = _device_getter(self._driver)
        self._call, self._base, self._is_nested = _bottom_of(compiled, [*arguments.values()])
        self._words, places, encoders = self._expanded(arguments)
        self._is_typed = is_typed
        self._types = [*map(type, varying.values())]
        self._tensor_types: list[tuple[int, torch.dtype, bool]] = []
        """For each tensor its index in ``varying``, its dtype, and whether it is on a GPU."""
        self._group_types: list[tuple[int, tuple[Any, ...]]] = []
        """For each :class:`Pointers` its index in ``varying``, and its kinds."""
        self._groups: list[tuple[int, slice, tuple[bool, ...] | None]] = []
        self._descriptors: list[tuple[int, slice, _Encoder]] = []
        self._tensors: list[tuple[int, int, bool | None]] = []
        """For each tensor its index in ``varying``, its place, and whether it is aligned; None
        where the kernel is compiled for any alignment."""
        self._integers: list[tuple[int, int, int, int | None]] = []
        """For each integer its index in ``varying``, its place, its width, and its mark; None where
        the kernel is compiled for any integer of that width."""
        params = {param.name: param for param in kernel.params}
        for index, (name, value) in enumerate(varying.items()):
            members = [params[member] for member in groups.get(name, (name,))]
            if any(one.is_constexpr or one.is_const for one in members):
                raise UnknownError
            known = INTEGERS if type(value) is int else ()
            if any(one.annotation_type and one.annotation_type not in known for one in members):
                raise UnknownError
            param, place = members[0], places[members[0].name]
            is_waived = all(
                one.do_not_specialize or one.do_not_specialize_on_alignment for one in members
            )
            if type(value) is Pointers:
                where = [places[member.name].start for member in members]
                if where != [*range(where[0], where[0] + len(where))]:
                    raise UnknownError
                span = slice(where[0], where[-1] + 1)
                self._group_types.append((index, value.kinds))
                self._groups.append((index, span, None if is_waived else value.aligned))
            elif type(value) in TENSORS:
                is_aligned = value.data_ptr() % ALIGNMENT == 0
                self._tensor_types.append((index, value.dtype, value.is_cuda))
                self._tensors.append((index, place.start, None if is_waived else is_aligned))
            elif type(value) is int:
                mark = None if param.do_not_specialize else _mark(value)
                self._integers.append((index, place.start, value >> 31, mark))
            elif name in encoders:
                self._descriptors.append((index, place, encoders[name]))
            elif value is not None:
                raise UnknownError

    def _expanded(
        self, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, slice], dict[str, _Encoder]]:
        """The C function's arguments, the place of each kernel argument, and descriptors' encoders.

        In place of tensors there are zeros, since a tensor would be kept alive.
        """
        words: list[Any] = []
        places, encoders = {}, {}
        signature, metadata = self._compiled.src.signature, self._compiled.metadata
        descriptors = iter(getattr(metadata, "tensordesc_meta", None) or ())
        for name, value in arguments.items():
            start = len(words)
            if signature[name].startswith("tensordesc"):
                encoders[name] = _Encoder(
                    value,
                    self._compiled.run,
                    signature[name],
                    next(descriptors),
                    self._base,
                    self._is_nested,
                )
                words += encoders[name].words_of(value) or ()
            else:
                words.append(0 if isinstance(value, torch.Tensor) else value)
            places[name] = slice(start, len(words))
        return words, places, encoders

    def launch(self, grid: tuple[int, ...], values: Sequence[Any]) -> bool:
        """Enqueue a launch on the current stream.

        Args:
            grid: programs in up to three dimensions, none of them 0.
            values: values of the arguments that vary, in the launcher's order.

        Returns:
            False, without a launch, if Triton would compile another kernel, or another device is
            current.
        """
        if (
            not (self._is_typed or self._have_types(values))
            or driver.active is not self._driver
            or self._current_device() != self._device
        ):
            return False
        words = self._words.copy()
        for index, place, is_aligned in self._tensors:
            words[place] = address = values[index].data_ptr()
            if is_aligned is not None and (address % ALIGNMENT == 0) is not is_aligned:
                return False
        for index, place, width, mark in self._integers:
            value = values[index]
            # Most integers are equal to the first launch's, which are among the words.
            if value != words[place]:
                if value >> 31 != width or (mark is not None and _mark(value) != mark):
                    return False
                words[place] = value
        for index, where, aligned in self._groups:
            pointers = values[index]
            if aligned is not None and pointers.aligned != aligned:
                return False
            words[where] = pointers.addresses
        for index, where, encoder in self._descriptors:
            descriptor = values[index]
            encoded = descriptor.__dict__.get(encoder.key) or encoder.words_of(descriptor)
            if encoded is None:
                return False
            words[where] = encoded
        x, y, z = (grid[0], 1, 1) if len(grid) == 1 else (*grid, 1)[:3]
        stream = self._driver.get_current_stream(self._device)
        if self._is_nested:
            self._call(x, y, z, stream, *self._base, words)
        else:
            self._call(x, y, z, stream, *self._base, *words)
        return True

    def _have_types(self, values: Sequence[Any]) -> bool:
        """Whether the values have the types of the values that Triton compiled this kernel for."""
        if [*map(type, values)] != self._types:
            return False
        for index, dtype, is_on_gpu in self._tensor_types:
            tensor = values[index]
            # Triton refuses tensors that the GPU cannot read.
            if tensor.dtype is not dtype or tensor.is_cuda is not is_on_gpu:
                return False
        # A loop, since a generator would cost more than what it compares.
        for index, kinds in self._group_types:  # noqa: SIM110
            if values[index].kinds != kinds:
                return False
        return True


def _mark(value: int) -> int:
    """A number that is equal for integers of equal width for which Triton compiles one kernel."""
    return 1 if value == 1 else value % ALIGNMENT and 2


def _device_getter(active: Any) -> Callable[[], int]:
    """A function that returns the current device, for a driver that has launched a kernel already.

    torch's public function first makes sure that CUDA is initialised, which takes longer than the
    answer. So its private function is taken where the driver would use the public one.
    """
    known: Callable[[], int] = active.get_current_device
    if known is torch.cuda.current_device:
        return getattr(torch._C, "_cuda_getDevice", known)
    return known


class _Encoder:
    """Encodes descriptors of one kind for the C function, each descriptor once."""

    def __init__(
        self,
        descriptor: Any,
        run: Any,
        signature: str,
        metadata: Any,
        base: tuple[Any, ...],
        is_nested: bool,
    ) -> None:
        expand = vars(sys.modules[type(run).__module__])["wrap_handle_tensordesc"]
        # Triton's wrapper expands descriptors and calls the C function. Around this function in its
        # place, the wrapper returns the C function's arguments.
        self._expand = expand(lambda *given: given, {0: signature}, [metadata])
        self._base = (1, 1, 1, 0, *base)
        self._is_nested = is_nested
        self.key = f"{_ENCODED} {signature} {metadata}"
        """The name of a descriptor's attribute that keeps the encoded words."""
        self._kind = _kind_of(descriptor)

    def words_of(self, descriptor: Any) -> list[Any] | None:
        """Encode a descriptor: its TMA map, shape and strides; None for one of another kind.

        The descriptor keeps the result as its attribute :attr:`key`.
        """
        if _kind_of(descriptor) != self._kind:
            return None
        if self._is_nested:
            words = list(self._expand(*self._base, (descriptor,))[-1])
        else:
            words = list(self._expand(*self._base, descriptor)[len(self._base) :])
        descriptor.__dict__[self.key] = words
        return words


def _kind_of(descriptor: Any) -> tuple[Any, ...]:
    """Everything that a kernel is compiled for in a descriptor: all but address, shape, strides."""
    places = ("base", "shape", "strides")
    rest = {
        name: value
        for name, value in vars(descriptor).items()
        if name not in places and not name.startswith(_ENCODED)
    }
    return descriptor.base.dtype, rest


def _bottom_of(
    compiled: Any, values: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """The C function that a compiled kernel's launcher calls, and how its arguments are laid out.

    Args:
        compiled: the compiled kernel.
        values: values of all arguments of the kernel.

    Returns:
        The function; its arguments between the stream and the kernel's arguments; and whether it
        takes the kernel's arguments as one sequence.

    Raises:
        UnknownError: the launcher passes other arguments, or needs scratch memory.
    """
    run = compiled.run
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        raise UnknownError
    given: list[tuple[Any, ...]] = []
    probe = copy.copy(run)
    probe.launch = lambda *arguments: given.append(arguments)
    first = (1, 1, 1, 0, compiled.function)
    probe(*first, compiled.packed_metadata, None, None, None, *values)
    (arguments,) = given
    is_nested = isinstance(arguments[-1], tuple) and len(arguments[-1]) == len(values)
    passed = arguments[-1] if is_nested else arguments[-len(values) :]
    same = all(one is other for one, other in zip(passed, values, strict=True))
    if not same or arguments[: len(first)] != first:
        raise UnknownError
    base = arguments[len(_BASE) : -1 if is_nested else -len(values)]
    return _bottom_under(run.launch), base, is_nested


def _bottom_under(launch: Any) -> Callable[..., Any]:
    """The C function itself, also where Triton has wrapped it to expand descriptors.

    The wrapper is a Python function whose closure holds the C function. Kernels without descriptors
    have no wrapper.

    Raises:
        UnknownError: the closure does not hold exactly one such function.
    """
    if not isinstance(launch, types.FunctionType):
        return cast("Callable[..., Any]", launch)
    held = [cell.cell_contents for cell in launch.__closure__ or ()]
    found = [one for one in held if callable(one) and not isinstance(one, types.FunctionType)]
    if len(found) != 1:
        raise UnknownError
    return cast("Callable[..., Any]", found[0])
