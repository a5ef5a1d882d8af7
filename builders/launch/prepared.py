"""A kernel that Triton compiled and launched, with the arguments of its C function.

What is used of Triton 3.6 to 3.9 is looked up here; what looks different is left to Triton.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from triton.runtime import driver

from builders.launch.driver import CONSTANT, driver_kernel, driver_launches
from builders.splitkv.record import Pointers

GROUPS: Mapping[str, tuple[str, ...]] = {
    "plan": (
        "rows_ptr",
        "total_ptr",
        "starts_ptr",
        "shares_ptr",
        "counters_ptr",
        "states_ptr",
        "sums_ptr",
    ),
}
"""Arguments that forms take as one :class:`Pointers`, by its name."""
ALIGNMENT = 16
"""Bytes, by which Triton specialises addresses."""
TENSORS = (torch.Tensor, torch.nn.Parameter)
_BASE = ("grid x", "grid y", "grid z", "stream")
"""What the C function is given first."""


class UnknownError(Exception):
    """A launch that is left to Triton."""


class Prepared:
    """A compiled kernel on one device, and the arguments of its C function."""

    def __init__(
        self,
        kernel: Any,
        varying: Mapping[str, Any],
        compiled: Any,
        arguments: Mapping[str, Any],
    ) -> None:
        self._compiled = compiled
        """Kept alive: its code is unloaded with it."""
        self._driver = driver.active
        self._device = self._driver.get_current_device()
        self._current_device = _device_getter(self._driver)
        self._call, self._base, self._is_nested = _bottom_of(compiled, [*arguments.values()])
        self._words, places, self.encoders = self._expanded(arguments)
        self.places: dict[str, tuple[int, int | slice]] = {}
        """Of the arguments that vary: which of these it is, and where it is in the C function's."""
        self.waived: dict[str, bool] = {}
        """Of the same: nothing but their type makes a kernel of its own."""
        self._types = [*map(type, varying.values())]
        self._groups: list[tuple[int, slice, tuple[Any, ...]]] = []
        self._descriptors: list[tuple[int, slice, _Encoder]] = []
        self._tensor_places: list[int] = []
        self._integer_places: list[tuple[int, int]] = []
        tensors: list[int] = []
        aligned: list[int] = []
        integers: list[int] = []
        exact: list[int] = []
        params = {param.name: param for param in kernel.params}
        for index, (name, value) in enumerate(varying.items()):
            members = [params[member] for member in GROUPS.get(name, (name,))]
            if any(one.is_constexpr or one.is_const or one.annotation_type for one in members):
                raise UnknownError
            param, place = members[0], places[members[0].name]
            self.places[name] = index, place if name in self.encoders else place.start
            self.waived[name] = param.do_not_specialize or (
                param.do_not_specialize_on_alignment and type(value) in TENSORS
            )
            if type(value) is Pointers:
                where = [places[member.name].start for member in members]
                if where != [*range(where[0], where[0] + len(where))]:
                    raise UnknownError
                self.places[name] = index, slice(where[0], where[-1] + 1)
                self._groups.append((index, slice(where[0], where[-1] + 1), value.kinds))
            elif type(value) in TENSORS:
                self._tensor_places.append(place.start)
                tensors.append(index)
                if not self.waived[name]:
                    aligned.append(len(tensors) - 1)
            elif type(value) is int:
                self._integer_places.append((index, place.start))
                (integers if param.do_not_specialize else exact).append(index)
            elif name in self.encoders:
                self._descriptors.append((index, place, self.encoders[name]))
            elif value is not None:
                raise UnknownError
        self._tensors, self._aligned = picker(tensors), picker(aligned)
        self._integers, self._exact = picker(integers), picker(exact)
        values = [*varying.values()]
        chosen = self._tensors(values)
        self._dtypes = [tensor.dtype for tensor in chosen]
        self._on_gpu = [tensor.is_cuda for tensor in chosen]
        addresses = [tensor.data_ptr() for tensor in chosen]
        self._remainders = [at % ALIGNMENT != 0 for at in self._aligned(addresses)]
        self._widths = [value >> 31 for value in self._integers(values)]
        self._values = self._exact(values)
        signature = compiled.src.signature
        kinds = [(signature[name], place.stop - place.start) for name, place in places.items()]
        self.direct = driver_kernel(compiled, self._base, kinds, self._words)
        """None where only the C function launches it."""
        single = [*self._tensor_places, *(place for _, place in self._integer_places)]
        if self.direct is not None:
            # A number that the kernel was compiled for is no parameter.
            single = [place for place in single if self.direct.types[place] != CONSTANT]
        grouped = [where for _, where, _ in (*self._groups, *self._descriptors)]
        self._single, self._lists = picker(single), picker(grouped)
        parts = [single, *(range(where.start, where.stop) for where in grouped)]
        self._own = driver_launches(self.direct, self._words, parts)

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

    def is_current(self) -> bool:
        """Launches are made on its device."""
        return driver.active is self._driver and self._current_device() == self._device

    def words_of(self, values: Sequence[Any]) -> list[Any] | None:
        """The C function's arguments for these values; None where Triton would specialise anew."""
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
            or self._exact(values) != self._values
            or not self.is_current()
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

    def launch(self, x: int, y: int, z: int, words: list[Any]) -> None:
        """Enqueue on the current stream, by the driver where it can."""
        if self._own is not None:
            direct = self._own.own
            parts = (self._single(words), *self._lists(words))
            if direct.written == parts or direct.write(parts, parts):
                direct.reshape(y, z)
                if direct.launch(x, self.stream()):
                    return
        self.call(x, y, z, words)

    def call(self, x: int, y: int, z: int, words: list[Any]) -> None:
        """Enqueue on the current stream, by the C function."""
        if self._is_nested:
            self._call(x, y, z, self.stream(), *self._base, words)
        else:
            self._call(x, y, z, self.stream(), *self._base, *words)


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
