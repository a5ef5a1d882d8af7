"""A kernel that Triton compiled and launched, and how its C function is called again.

This module is the only one that knows Triton's launcher from inside: the C function at its bottom,
what that function is given before the kernel's arguments, and how tensor descriptors are encoded.
Triton 3.6 to 3.9 are known. Whatever looks different is left to Triton.

Two launches are specialised alike if each argument that varies has the same type: a tensor the same
dtype, and the same alignment to 16 bytes where the kernel does not waive that; an integer the same
width, and where the kernel does not waive it the same answers to whether it is 1 and whether it is
a multiple of 16; a descriptor the same
dtype, box and layout. The tests ask Triton whether that is so.
"""

from __future__ import annotations

import copy
import logging
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, cast

import torch
import triton
from triton.runtime import driver

from builders.launch.pointers import Pointers

KNOWN_TRITON = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions whose launcher is known here."""
ALIGNMENT = 16
"""Bytes, by which Triton specialises addresses."""
TENSORS = (torch.Tensor, torch.nn.Parameter)
_BASE = ("grid x", "grid y", "grid z", "stream")
"""What the C function is given first."""
_logger = logging.getLogger(__name__)


@cache
def is_known_triton() -> bool:
    """Whether compiled kernels of the installed Triton are launched past it; said once if not."""
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
    """A launch that is left to Triton."""


class CompiledLaunch:
    """A compiled kernel on one device, and the arguments of its C function."""

    def __init__(
        self,
        kernel: Any,
        varying: Mapping[str, Any],
        groups: Mapping[str, tuple[str, ...]],
        compiled: Any,
        arguments: Mapping[str, Any],
    ) -> None:
        """
        Args:
            kernel: the ``triton.jit`` function.
            varying: arguments that differ from launch to launch, by name, in the kernel's order.
            groups: names among these that stand for several arguments.
            compiled: what the launch through Triton returned.
            arguments: every argument of that launch, by name and in the kernel's order.

        Raises:
            UnknownError: Triton's launcher, or an argument, is not as it is known here.
        """
        self._compiled = compiled
        """Kept alive: its code is unloaded with it."""
        self._driver = driver.active
        self._device = self._driver.get_current_device()
        self._current_device = _device_getter(self._driver)
        self._call, self._base, self._is_nested = _bottom_of(compiled, [*arguments.values()])
        self._words, places, encoders = self._expanded(arguments)
        self._types = [*map(type, varying.values())]
        self._groups: list[tuple[int, slice, tuple[Any, ...]]] = []
        self._descriptors: list[tuple[int, slice, _Encoder]] = []
        self._tensor_places: list[int] = []
        self._integer_places: list[tuple[int, int]] = []
        tensors: list[int] = []
        aligned: list[int] = []
        integers: list[int] = []
        specialised: list[int] = []
        params = {param.name: param for param in kernel.params}
        for index, (name, value) in enumerate(varying.items()):
            members = [params[member] for member in groups.get(name, (name,))]
            if any(one.is_constexpr or one.is_const or one.annotation_type for one in members):
                raise UnknownError
            param, place = members[0], places[members[0].name]
            is_waived = param.do_not_specialize or param.do_not_specialize_on_alignment
            if type(value) is Pointers:
                where = [places[member.name].start for member in members]
                if where != [*range(where[0], where[0] + len(where))]:
                    raise UnknownError
                self._groups.append((index, slice(where[0], where[-1] + 1), value.kinds))
            elif type(value) in TENSORS:
                self._tensor_places.append(place.start)
                tensors.append(index)
                if not is_waived:
                    aligned.append(len(tensors) - 1)
            elif type(value) is int:
                self._integer_places.append((index, place.start))
                integers.append(index)
                if not param.do_not_specialize:
                    specialised.append(index)
            elif name in encoders:
                self._descriptors.append((index, place, encoders[name]))
            elif value is not None:
                raise UnknownError
        self._tensors, self._aligned = picker(tensors), picker(aligned)
        self._integers, self._specialised = picker(integers), picker(specialised)
        values = [*varying.values()]
        chosen = self._tensors(values)
        self._dtypes = [tensor.dtype for tensor in chosen]
        self._on_gpu = [tensor.is_cuda for tensor in chosen]
        addresses = [tensor.data_ptr() for tensor in chosen]
        self._remainders = [at % ALIGNMENT != 0 for at in self._aligned(addresses)]
        self._widths = [value >> 31 for value in self._integers(values)]
        self._marks = [*map(_mark, self._specialised(values))]

    def _expanded(
        self, arguments: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, slice], dict[str, _Encoder]]:
        """What the C function is given, where each argument is in it, and how it is encoded.

        No tensor is among it: it would be kept alive.
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

    def words_of(self, values: Sequence[Any]) -> list[Any] | None:
        """The C function's arguments for these values of what varies.

        Args:
            values: in the kernel's order.

        Returns:
            None where Triton would compile another kernel, or another device is current.
        """
        if [*map(type, values)] != self._types:
            return None
        tensors = self._tensors(values)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if (
            [tensor.dtype for tensor in tensors] != self._dtypes
            # Triton refuses what a GPU cannot read.
            or [tensor.is_cuda for tensor in tensors] != self._on_gpu
            or [at % ALIGNMENT != 0 for at in self._aligned(addresses)] != self._remainders
            or [value >> 31 for value in self._integers(values)] != self._widths
            or [*map(_mark, self._specialised(values))] != self._marks
            or driver.active is not self._driver
            or self._current_device() != self._device
        ):
            return None
        words = self._words.copy()
        for place, address in zip(self._tensor_places, addresses, strict=True):
            words[place] = address
        for index, place in self._integer_places:
            words[place] = values[index]
        for index, where, kinds in self._groups:
            pointers = values[index]
            if pointers.kinds != kinds:
                return None
            words[where] = pointers.addresses
        for index, where, encoder in self._descriptors:
            encoded = encoder.words_of(values[index])
            if encoded is None:
                return None
            words[where] = encoded
        return words

    def stream(self) -> int:
        """The current one."""
        stream: int = self._driver.get_current_stream(self._device)
        return stream

    def launch(self, grid: tuple[int, ...], words: list[Any]) -> None:
        """Enqueue on the current stream.

        Args:
            grid: programs in up to three dimensions, none of them 0.
            words: as :meth:`words_of` gives them.
        """
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        stream = self._driver.get_current_stream(self._device)
        if self._is_nested:
            self._call(x, y, z, stream, *self._base, words)
        else:
            self._call(x, y, z, stream, *self._base, *words)


def _mark(value: int) -> int:
    """All that Triton specialises a kernel on of an integer, but its width."""
    return 1 if value == 1 else value % ALIGNMENT and 2


def _device_getter(active: Any) -> Callable[[], int]:
    """What tells the current device of a driver that has launched a kernel: torch's own function
    sees to it first that CUDA is initialised, which takes longer than the answer.
    """
    known: Callable[[], int] = active.get_current_device
    if known is torch.cuda.current_device:
        return getattr(torch._C, "_cuda_getDevice", known)
    return known


class _Encoder:
    """Descriptors of one kind as the C function takes them, encoded once for each."""

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
        # With this in the C function's place, it returns what that would be given.
        self._expand = expand(lambda *given: given, {0: signature}, [metadata])
        self._base = (1, 1, 1, 0, *base)
        self._is_nested = is_nested
        self._key = f"{signature} {metadata}"
        self._kind = _kind_of(descriptor)

    def words_of(self, descriptor: Any) -> list[Any] | None:
        """The map that TMA reads, shape and strides; None for a descriptor of another kind."""
        known: dict[str, list[Any]] = vars(descriptor).setdefault("encoded", {})
        words = known.get(self._key)
        if words is None:
            if _kind_of(descriptor) != self._kind:
                return None
            if self._is_nested:
                words = list(self._expand(*self._base, (descriptor,))[-1])
            else:
                words = list(self._expand(*self._base, descriptor)[len(self._base) :])
            known[self._key] = words
        return words


def _kind_of(descriptor: Any) -> tuple[Any, ...]:
    """All but address, shape and strides."""
    places = ("base", "shape", "strides", "encoded")
    rest = {name: value for name, value in vars(descriptor).items() if name not in places}
    return descriptor.base.dtype, rest


def _bottom_of(
    compiled: Any, values: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """The C function of a compiled kernel's launcher, and what it takes beside the arguments.

    Returns:
        The function; what it is given between the stream and the arguments; whether it takes them
        as one sequence.

    Raises:
        UnknownError: the launcher does something else.
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
    """What expands descriptors is a closure around the C function; without them it stands alone."""
    if not isinstance(launch, types.FunctionType):
        return cast("Callable[..., Any]", launch)
    held = [cell.cell_contents for cell in launch.__closure__ or ()]
    found = [one for one in held if callable(one) and not isinstance(one, types.FunctionType)]
    if len(found) != 1:
        raise UnknownError
    return cast("Callable[..., Any]", found[0])


def picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Takes those out of a sequence or a mapping, as a tuple however many they are."""
    if not keys:
        return lambda values: ()
    if len(keys) == 1:
        (key,) = keys
        return lambda values: (values[key],)
    return itemgetter(*keys)
