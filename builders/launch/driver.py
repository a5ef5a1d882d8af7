"""Launches by the CUDA driver itself, past the C function at the bottom of Triton's launcher.

That function reads every argument of every launch anew. Here the parameters stand in memory as the
kernel takes them; those that changed are written there, and the driver is called, which copies
them before it returns.

What parameters a compiled kernel has is derived from Triton's signature of it, as that function
does, and the driver is asked whether it has that many, of those sizes. Where anything else is found
than is known here of Triton 3.6 to 3.9, launches stay that function's.

Every thread has memory of its own: others run between the writing and the call, whoever holds the
interpreter's lock. The call gives that lock up, as Triton's does: where the queue of launches is
full it waits for the GPU, which may wait for another thread.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

MAP = "nvTmaDesc"
"""Triton's name for the type of what TMA reads of a descriptor."""
CONSTANT = "constexpr"
"""Compiled in: no parameter."""
_CELLS = {
    "i1": "b7x",
    "i8": "b7x",
    "i16": "h6x",
    "i32": "i4x",
    "i64": "q",
    "u1": "B7x",
    "u8": "B7x",
    "u16": "H6x",
    "u32": "I4x",
    "u64": "Q",
    "fp32": "f4x",
    "f32": "f4x",
}
"""How words of these types fill cells of 8 bytes."""
_POINTER = "Q"
_WORD = 8
"""Bytes of a cell, and of a pointer."""
_SCRATCH = 2
"""Pointers that Triton adds to the parameters; kernels that use them are not launched here."""
_MAP_BYTES = 128
_MAP_OBJECTS = (64 + _MAP_BYTES, 128 + _MAP_BYTES)
"""Sizes of Triton's object that holds a map: head, and map at the alignment of one or the other
CUDA."""
_MOST_SHARED = 228 << 10
"""Bytes; Triton 3.9 launches kernels with more by an attribute of their own."""
_MOST_PARAMETERS = 4096
_FIRST = ("function", "runs together", "waits")
"""What the C function is given first, behind the stream; then, in each version in another order,
what the launcher has of its own, and None for hooks and scratch memory."""
_CONFIG = struct.Struct("=7I4xQQI4x")
"""``CUlaunchConfig``: grid, block and shared memory; stream; attributes and their number."""
_STREAM = 4
"""Its stream, in words of 8 bytes."""
_ATTRIBUTE = struct.Struct("=i4xi60x")
"""``CUlaunchAttribute``: what it is, and a value of 64 bytes."""
_PROGRAMMATIC = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""
_INVALID_VALUE = 1
_INVALID_CONTEXT = 201


@dataclass(frozen=True)
class DriverFunctions:
    """What is called of the driver."""

    launch: Callable[[Any, Any, Any, Any], int]
    """``cuLaunchKernelEx``."""
    param_sizes: Callable[[int], list[int] | None]
    """Bytes of a function's parameters; None where the driver does not say."""
    error_text: Callable[[int], str]


@cache
def driver_functions() -> DriverFunctions | None:
    """Of the driver of this machine, loaded at the first call; None without one that has them."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch, ask = library.cuLaunchKernelEx, library.cuFuncGetParamInfo
        describe = library.cuGetErrorString
    except (OSError, AttributeError):
        return None

    def param_sizes(function: int) -> list[int] | None:
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        found = ctypes.byref(offset), ctypes.byref(size)
        while len(sizes) < _MOST_PARAMETERS:
            code = ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), *found)
            if code:
                return sizes if code == _INVALID_VALUE else None
            sizes.append(size.value)
        return None

    def error_text(code: int) -> str:
        text = ctypes.c_char_p()
        describe(code, ctypes.byref(text))
        return (text.value or b"unknown error").decode()

    return DriverFunctions(launch, param_sizes, error_text)


@dataclass(frozen=True)
class DriverKernel:
    """A compiled kernel whose parameters the driver confirmed."""

    functions: DriverFunctions
    function: int
    threads: int
    """Of a program."""
    shared: int
    """Bytes of its shared memory."""
    waits: bool
    """It may start while those before it end."""
    types: tuple[str, ...]
    """Triton's, of every word that its C function takes."""


def driver_kernel(
    compiled: Any, base: Sequence[Any], kinds: Sequence[tuple[str, int]], words: Sequence[Any]
) -> DriverKernel | None:
    """For launches by the driver; None where they stay the C function's.

    Args:
        compiled: Triton's compiled kernel.
        base: what its C function is given between the stream and the arguments.
        kinds: Triton's type of each argument, and the words that stand for it.
        words: of a launch.
    """
    functions = driver_functions()
    if functions is None or not _is_plain(compiled, base):
        return None
    try:
        types = tuple(one for kind, count in kinds for one in _types_of(kind, count))
        sizes = [_size_of(one) for one in types if one != CONSTANT]
        for one, word in zip(types, words, strict=True):
            if one == MAP:
                _address_of(word)
    except (LookupError, ValueError):
        return None
    sizes += [_WORD] * _SCRATCH
    if functions.param_sizes(compiled.function) != sizes:
        return None
    warps, _, shared = compiled.packed_metadata
    return DriverKernel(functions, compiled.function, 32 * warps, shared, bool(base[2]), types)


def _is_plain(compiled: Any, base: Sequence[Any]) -> bool:
    """The C function launches single programs, with no attribute but one, and adds nothing."""
    run, packed, meta = compiled.run, compiled.packed_metadata, compiled.metadata
    names = ("num_warps", "num_ctas", "shared")
    if packed != tuple(getattr(meta, name, None) for name in names):
        return False
    if any(type(number) is not int for number in packed):
        return False
    rest = [one for one in base[len(_FIRST) :] if one is not None]
    known = [getattr(run, name, None) for name in ("arg_annotations", "kernel_signature")]
    return (
        packed[1] == getattr(run, "num_ctas", None) == 1
        and packed[2] <= _MOST_SHARED
        and not getattr(run, "gsan_enabled", False)
        and type(compiled.function) is int
        and (*base[: len(_FIRST)],) == (compiled.function, False, getattr(run, "launch_pdl", None))
        and [one is packed for one in rest].count(True) == 1
        and all(one is packed or any(one is other for other in known) for one in rest)
    )


def _types_of(kind: str, count: int) -> list[str]:
    """Triton's types of the words that stand for an argument.

    Raises:
        ValueError: they are others than is known here.
    """
    if kind.startswith("tensordesc"):
        match = re.match(r"tensordesc<[^\[>]*\[([^\]]*)\]", kind)
        dims = 0 if match is None else match[1].count(",") + 1
        types = [MAP, *["i32"] * dims, *["i64"] * dims]
    else:
        types = [kind]
    if len(types) != count:
        raise ValueError(f"{count} words stand for {kind}")
    return types


def _cell_of(kind: str) -> str:
    """How a word of this type is packed.

    Raises:
        KeyError: the type is not known here.
    """
    return _POINTER if kind.startswith("*") else _CELLS[kind]


def _size_of(kind: str) -> int:
    return _MAP_BYTES if kind == MAP else struct.calcsize(_cell_of(kind)[0])


def _address_of(word: Any) -> int:
    """Where the map of Triton's object is: at the end of it.

    Raises:
        ValueError: it is another object.
    """
    kind = type(word)
    size = kind.__basicsize__
    is_known = kind.__name__ == "PyCUtensorMap" and size in _MAP_OBJECTS
    if not is_known or kind.__itemsize__ or kind.__dictoffset__ or id(word) % _MAP_BYTES:
        raise ValueError(f"{kind} is not the map that is known here")
    return id(word) + size - _MAP_BYTES


class DriverLaunch:
    """A launch in memory, for those that differ from it in some words. Of one thread."""

    def __init__(
        self, kernel: DriverKernel, words: Sequence[Any], parts: Sequence[Sequence[int]]
    ) -> None:
        """
        Args:
            kernel: what is launched.
            words: what its C function would be given.
            parts: which of them differ from launch to launch, in parts of which most stay as they
                are; a map stands first in its part.

        Raises:
            ValueError: a word that differs is no parameter, or a map not known here.
            struct.error: a word is not of its type.
            OverflowError: a number is beyond fp32.
        """
        self.written: Any = None
        """What :meth:`write` was last told to keep."""
        self._functions = kernel.functions
        self._launch, self._function = kernel.functions.launch, ctypes.c_void_p(kernel.function)
        types = dict(enumerate(kernel.types))
        of_map = [place for place in types if types[place] == MAP]
        in_cells = [place for place in types if types[place] not in (CONSTANT, MAP)]
        maps = [[place for place in part[:1] if place in of_map] for part in parts]
        differing = [part[len(own) :] for part, own in zip(parts, maps, strict=True)]
        # Those of a part stand together, so that they are written at once.
        order = [place for part in differing for place in part]
        if not {*order} <= {*in_cells}:
            raise ValueError("what differs is no parameter")
        order += [place for place in in_cells if place not in order]
        pointers = _CONFIG.size + _ATTRIBUTE.size
        self._cells = pointers + _WORD * (len(types) + _SCRATCH)
        end = self._cells + _WORD * (len(order) + _SCRATCH)
        self._memory = bytearray(end + _MAP_BYTES * (len(of_map) + 1))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        first_map = -(-(base + end) // _MAP_BYTES) * _MAP_BYTES
        at = {place: base + self._cells + _WORD * index for index, place in enumerate(order)}
        at |= {place: first_map + _MAP_BYTES * index for index, place in enumerate(of_map)}
        scratch = [base + end - _WORD * (_SCRATCH - index) for index in range(_SCRATCH)]
        parameters = [at[place] for place in sorted(at)] + scratch
        struct.pack_into(f"={len(parameters)}Q", self._memory, pointers, *parameters)
        cells = [_cell_of(types[place]) for place in order]
        given = [0 if words[place] is None else words[place] for place in order]
        struct.pack_into("=" + "".join(cells), self._memory, self._cells, *given)
        for place in of_map:
            ctypes.memmove(at[place], _address_of(words[place]), _MAP_BYTES)
        self._parts: list[tuple[Callable[..., None], int, int | None]] = []
        """How the words of a part are packed, where to, and where its map goes."""
        first = 0
        for part, own in zip(differing, maps, strict=True):
            pack = struct.Struct("=" + "".join(cells[first : first + len(part)])).pack_into
            self._parts.append((pack, self._cells + _WORD * first, at[own[0]] if own else None))
            first += len(part)
        self._held: list[Any] = [None] * len(parts)
        """The parts that are written."""
        block = (kernel.threads, 1, 1, kernel.shared)
        attributes = (base + _CONFIG.size, int(kernel.waits))
        _CONFIG.pack_into(self._memory, 0, 1, 1, 1, *block, 0, *attributes)
        _ATTRIBUTE.pack_into(self._memory, _CONFIG.size, _PROGRAMMATIC, 1)
        config = memoryview(self._memory)[: _CONFIG.size]
        self._grid, self._stream = config.cast("I"), config.cast("Q")
        # References of ctypes: made once, they cost a call less than addresses.
        self._config = ctypes.byref(ctypes.c_char.from_buffer(self._memory))
        self._parameters = ctypes.byref(ctypes.c_char.from_buffer(self._memory, pointers))

    def write(self, parts: Sequence[Sequence[Any]], kept: Any) -> bool:
        """Change what differs; False where it is not of its types, which the C function may know.

        Args:
            parts: the words of each; no list changes after it was given.
            kept: by what the caller knows what is written.
        """
        self.written, held = None, self._held
        try:
            for index, words in enumerate(parts):
                if words != held[index]:
                    held[index] = None
                    pack, start, at_map = self._parts[index]
                    if at_map is None:
                        pack(self._memory, start, *words)
                    else:
                        ctypes.memmove(at_map, _address_of(words[0]), _MAP_BYTES)
                        pack(self._memory, start, *words[1:])
                    held[index] = words
        except (struct.error, ValueError, OverflowError):
            return False
        self.written = kept
        return True

    def reshape(self, y: int, z: int) -> None:
        """Set the grid but for its first dimension; both are 1 at first."""
        self._grid[1] = y
        self._grid[2] = z

    def launch(self, programs: int, stream: int) -> bool:
        """Enqueue what is written; False, and nothing is done, in a thread without a context.

        Args:
            programs: in the grid's first dimension, not 0.
            stream: the driver's.

        Raises:
            RuntimeError: the driver refuses it, or tells of a failure before it.
        """
        self._grid[0] = programs
        self._stream[_STREAM] = stream
        code = self._launch(self._config, self._function, self._parameters, None)
        if not code:
            return True
        if code == _INVALID_CONTEXT:
            return False
        text = self._functions.error_text(code)
        raise RuntimeError(f"cuLaunchKernelEx: CUDA error {code}, {text}")


class DriverLaunches(threading.local):
    """The :class:`DriverLaunch` of every thread, each made when it first asks."""

    def __init__(self, *of: Any) -> None:
        """
        Args:
            of: as :class:`DriverLaunch` takes them.
        """
        self.own = DriverLaunch(*of)


def driver_launches(
    kernel: DriverKernel | None, words: Sequence[Any], parts: Sequence[Sequence[int]]
) -> DriverLaunches | None:
    """For launches like one; None where they stay the C function's.

    Args:
        kernel: what :func:`driver_kernel` gave.
        words: as of :class:`DriverLaunch`.
        parts: likewise.
    """
    if kernel is None:
        return None
    try:
        return DriverLaunches(kernel, words, parts)
    except (struct.error, ValueError, OverflowError):
        return None
