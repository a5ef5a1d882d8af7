"""Runs Gluon kernels for Hopper as plain Python over numpy: it shows what they compute, without a
GPU.

A kernel's source runs unchanged, with numpy behind the names of Gluon. Partitions are threads,
which meet at barriers that count as mbarriers do. Programs run one after another. A load or store
outside the tensor's storage is an error. Layouts, proxies and the order of memory are not checked:
compiles and a GPU check them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton.language.core import constexpr

from attn.kernels.dense import hopper_launch
from attn.kernels.dense.hopper_prefill import vector_store as quads
from attn.kernels.lang import packed
from builders.launch.call import KernelCall

PATIENCE = 10
"""Seconds that a thread waits at a barrier before it counts as a deadlock."""
_here = threading.local()
_memory: dict[str, tuple[int, ...]] = {"grid": (1,)}
"""The numbers of programs in the dimensions of the launch."""
_lag = {"share": 0.0}
"""Share of the loads into shared memory that arrive late."""
LATE = 0.03
"""Seconds until late loads arrive; several later loads overtake them."""
GATHERING = 128
"""Threads of a warp group; each of them arrives after the loads that it has asked for."""
_dice = random.Random(1)


class Value(np.ndarray):
    """A tensor or a number of a kernel."""

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if dtype == "e4m3":
            return value(rounded_to_e4m3(self))
        return self.view(dtype) if bitcast else self.astype(dtype)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def broadcast_to(self, *shape: int) -> Value:
        return value(np.broadcast_to(self, shape))

    def __getitem__(self, index: Any) -> Value:
        return value(np.asarray(self)[index])


def value(x: Any) -> Value:
    return np.asarray(x).view(Value)


def _is_open() -> bool:
    """Whether the partition may use memory: it has waited for earlier kernels, or need not wait."""
    return getattr(_here, "is_open", True)


def _open() -> None:
    _here.is_open = True


class BFloat16(np.ndarray):
    """Numbers of bf16, which numpy has not, as fp32. Kernels round what they store to fp16."""


class Half(np.float16):
    """The type of bf16 numbers where a kernel names it: numpy takes it for fp16."""


class BFloat16Bits(np.ndarray):
    """The bits of numbers of bf16, as a kernel sees memory of another type."""


class Pointer:
    """A pointer to one element of a storage, or to several."""

    def __init__(self, storage: np.ndarray, offset: Any) -> None:
        self.storage, self.offset = storage, offset

    def to(self, dtype: Any, bitcast: bool) -> Pointer:
        if dtype is Half:
            words = self.storage.view(np.uint16).view(BFloat16Bits)
        else:
            words = self.storage.view(dtype)
        return Pointer(words, self.offset * len(words) // len(self.storage))

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.storage, self.offset + np.asarray(elements))

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.storage, np.asarray(self.offset)[index])

    @property
    def dtype(self) -> Any:
        element = Half if isinstance(self.storage, BFloat16) else self.storage.dtype.type
        return types.SimpleNamespace(element_ty=element)

    def within(self, mask: Any, *others: Any) -> list[np.ndarray]:
        """Offsets where the mask is set, and the elements of ``others`` there."""
        assert _is_open(), "kernels before this one may still run"
        offset, mask, *others = np.broadcast_arrays(self.offset, mask, *others)
        used = offset[mask]
        assert ((used >= 0) & (used < len(self.storage))).all(), "outside of the tensor"
        return [mask, used, *(other[mask] for other in others)]


def _load(at: Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Value:
    mask, used = at.within(np.asarray(mask))
    out = np.full(mask.shape, other, at.storage.dtype)
    out[mask] = at.storage[used]
    return value(out)


def _store(at: Pointer, x: Any, mask: Any = True, eviction_policy: str = "") -> None:
    _, used, x = at.within(np.asarray(mask), np.asarray(x))
    if isinstance(at.storage, BFloat16Bits):
        rounded = torch.from_numpy(x.astype(np.float32)).bfloat16()
        x = rounded.view(torch.int16).numpy().view(np.uint16)
    at.storage[used] = x.astype(at.storage.dtype)


def _atomic_add(at: Pointer, x: Any, sem: str, scope: str) -> Value:
    before = _load(at)
    _store(at, before + x)
    return before


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.phase = self.bytes = self.missing = self.count = 0
        self._late: tuple[int, bool] = -1, False

    def is_late(self, share: float) -> bool:
        """Whether the loads of this phase come late; one draw decides for all of them."""
        if self._late[0] != self.phase:
            self._late = self.phase, _dice.random() < share
        return self._late[1]

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, count: int = 1, more: int = 0, fewer: int = 0, pred: Any = True) -> None:
        if not pred:
            return
        with self.changed:
            assert self.missing >= count, "somebody arrived twice"
            self.missing -= count
            self.bytes += more - fewer
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: Any, pred: Any = True) -> None:
        if not pred:
            return
        with self.changed:
            passed = self.changed.wait_for(lambda: self.phase % 2 != int(parity), PATIENCE)
        assert passed, "nobody arrives"


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:
        return self[int(i)]


class Memory:
    """Shared memory, by its first axis. Boxes of 64 columns can be read as wider tiles."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape: Sequence[int] = array.shape

    def index(self, i: Any) -> Memory:
        return Memory(self.array[int(i)])

    @property
    def dtype(self) -> Any:
        return self.array.dtype.type

    def slice(self, start: int, length: int, dim: int) -> Memory:
        return Memory(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.array.transpose(order))

    def load(self, layout: None) -> Value:
        return value(self.array.copy())

    def store(self, x: np.ndarray) -> None:
        self.array[...] = np.asarray(x).reshape(self.array.shape)


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if layout is Barrier:
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) > 1 else Barrier()
    # Fresh memory is NaN in every type; a word of e4m3 holds two NaN.
    nans = {"int16": 0x7F7F, "uint8": 0x7F, "int32": -1}
    nan = nans.get(np.dtype(dtype).name, np.nan)
    return Memory(np.full(shape, nan, dtype))


class Tile(Memory):
    """One stage: a tile of rows."""

    def __init__(self, boxes: np.ndarray) -> None:
        halves, rows, columns = boxes.shape
        super().__init__(boxes.transpose(1, 0, 2).reshape(rows, halves * columns))
        self.boxes = boxes

    def store(self, x: np.ndarray, first: int = 0) -> None:
        """Store whole boxes of columns, from column ``first`` on."""
        _, rows, width = self.boxes.shape
        boxes = np.asarray(x).reshape(rows, -1, width).transpose(1, 0, 2)
        self.boxes[first // width :][: len(boxes)] = boxes


class Bytes(Memory):
    """Rows of codes of e4m3. Loads see what was there before."""

    def __init__(self, codes: np.ndarray) -> None:
        super().__init__(_e4m3(codes))
        self._codes = codes

    def slice(self, start: int, length: int, dim: int) -> Memory:
        return Bytes(self._codes[(slice(None),) * dim + (slice(start, start + length),)])

    def store(self, x: np.ndarray) -> None:
        self._codes[...] = _codes(x)


class Numbers(Memory):
    """A tile of codes of e4m3. Loads see what is there then."""

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Numbers(self.array.transpose(order))

    def load(self, layout: None) -> Value:
        return value(_e4m3(self.array))


class Words(Memory):
    """Stages of rows, seen as words of two numbers."""

    def __init__(self, boxes: np.ndarray, shape: Sequence[int]) -> None:
        super().__init__(boxes)
        stages, rows, words = shape
        self._tiles = Tiles(boxes, (stages, rows, 2 * words), False)

    def index(self, i: Any) -> Memory:
        tile = self._tiles.index(i)
        assert isinstance(tile, Tile)
        return _Words(tile)


class _Words(Memory):
    """Columns of one stage's words, from column ``first`` on. Loads see what was there before."""

    def __init__(self, tile: Tile, first: int = 0) -> None:
        words = np.ascontiguousarray(tile.array).view(np.int32)
        super().__init__(words[:, first:])
        self._tile, self._first = tile, first

    def slice(self, start: int, length: int, dim: int) -> Memory:
        if dim == 0:
            return super().slice(start, length, dim)
        found = _Words(self._tile, self._first + start)
        found.array = found.array[:, :length]
        found.shape = found.array.shape
        return found

    def store(self, x: np.ndarray) -> None:
        numbers = np.ascontiguousarray(x).view(self._tile.array.dtype)
        self._tile.store(numbers, 2 * self._first)


class Tiles(Memory):
    """Stages of rows, where runs of a tile and halves of a row lie in boxes of their own."""

    def __init__(self, boxes: np.ndarray, shape: Sequence[int], is_e4m3: bool) -> None:
        super().__init__(boxes)
        self.shape, self.is_e4m3 = shape, is_e4m3

    def index(self, i: Any) -> Memory:
        stages, rows, columns = self.shape
        boxes, width = self.array, self.array.shape[-1]
        if self.is_e4m3 and columns <= boxes.itemsize * width:
            codes = boxes.reshape(-1).view(np.uint8)[: stages * rows * columns]
            return Bytes(codes.reshape(self.shape)[int(i)])
        # The allocation may have more boxes, for another purpose.
        used = stages * rows * (columns // (boxes.itemsize * width if self.is_e4m3 else width))
        tile = Tile(boxes.reshape(-1, width)[:used].reshape(stages, -1, rows, width)[int(i)])
        return _WideBytes(tile) if self.is_e4m3 else tile


class _WideBytes(Memory):
    """Rows of codes of e4m3 that go on in the next box. Loads see what was there before."""

    def __init__(self, tile: Tile, rows: slice = slice(None)) -> None:
        super().__init__(_e4m3(tile.array)[rows])
        self._tile, self._rows = tile, rows

    def slice(self, start: int, length: int, dim: int) -> Memory:
        if dim > 0:
            return super().slice(start, length, dim)
        return _WideBytes(self._tile, slice(start, start + length))

    def store(self, x: np.ndarray) -> None:
        # Another thread may store other rows.
        boxes = self._tile.boxes.view(np.uint8)[:, self._rows]
        boxes[...] = _codes(x).reshape(boxes.shape[1], len(boxes), -1).transpose(1, 0, 2)


def _codes(x: np.ndarray) -> np.ndarray:
    """The codes of the e4m3 numbers next to ``x``, which is cut to their range."""
    clipped = torch.from_numpy(np.asarray(x, np.float32)).clamp(-448, 448)
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def rounded_to_e4m3(x: np.ndarray) -> np.ndarray:
    """The e4m3 numbers next to ``x``."""
    return _e4m3(_codes(x))


def _e4m3(words: np.ndarray) -> np.ndarray:
    rows = torch.from_numpy(np.ascontiguousarray(words).view(np.uint8))
    return rows.view(torch.float8_e4m3fn).float().numpy()


def _e4m3_planes(words: np.ndarray) -> tuple[Value, Value]:
    elements = _e4m3(words).astype(np.float16)
    return value(elements[:, 0::2]), value(elements[:, 1::2])


def _e4m3_pairs(words: np.ndarray) -> tuple[np.ndarray, ...]:
    pairs = _e4m3(words).astype(np.float16).view(np.int32)
    return pairs[..., 0::2], pairs[..., 1::2]


def _reinterpret(memory: Memory, dtype: Any, shape: Sequence[int], layout: None) -> Memory:
    boxes = memory.array.shape[0]
    if dtype is np.float32:
        flat = memory.array.view(np.float32).reshape(-1)
        return Memory(flat[: int(np.prod(shape))].reshape(shape))
    if dtype is np.int32:
        if shape[-1] * 4 > memory.array.shape[-1] * memory.array.itemsize:
            # A row goes on in the next box.
            return Words(memory.array, shape)
        return Memory(memory.array.view(np.int32).reshape(shape))
    if dtype == "e4m3" and len(shape) == 2:
        return Numbers(memory.array.reshape(shape))
    if shape[0] == boxes and dtype != "e4m3":
        return Memory(memory.array.reshape(shape))
    return Tiles(memory.array, shape, dtype == "e4m3")


def _async_load(rows: np.ndarray, place: Sequence[Any], full: Barrier, box: Memory) -> None:
    assert _is_open(), "kernels before this one may still run"
    starts = [int(x) for x in place]
    if len(starts) == 4 and 0 <= starts[0] < len(rows) > 1:
        assert starts[1] + box.array.shape[1] <= rows.shape[1], "a box leaves its page"
    found = np.zeros_like(box.array)
    if min(starts) >= 0:
        part = rows[tuple(slice(x, x + n) for x, n in zip(starts, found.shape, strict=True))]
        found[tuple(slice(0, n) for n in part.shape)] = part

    def arrive() -> None:
        box.store(found)
        full.arrive(0, fewer=box.array.nbytes)

    if full.is_late(_lag["share"]):
        threading.Timer(LATE, arrive).start()
    else:
        arrive()


def _gather(box: Memory, at: Pointer, mask: Any) -> None:
    """Load the elements at once; they are written when the asking thread arrives at a barrier."""
    if not hasattr(_here, "gathers"):
        _here.gathers = []
    _here.gathers.append((box, _load(at, mask)))


def _arrive_behind_gathers(full: Barrier, increment_count: bool) -> None:
    assert not increment_count, "the barrier counts threads"
    gathers, _here.gathers = getattr(_here, "gathers", []), []

    def arrive() -> None:
        for box, found in gathers:
            box.store(found)
        full.arrive(GATHERING)

    if full.is_late(_lag["share"]):
        threading.Timer(LATE, arrive).start()
    else:
        arrive()


def _commit_group() -> None:
    """Close a group of the loads that the thread has asked for; a late group comes when it is
    waited for.
    """
    gathers, _here.gathers = _here.gathers, []
    if _dice.random() < _lag["share"]:
        _here.groups = [*getattr(_here, "groups", []), gathers]
        return
    # Groups arrive in the order in which they were asked for.
    _wait_group(0)
    for box, found in gathers:
        box.store(found)
    _here.groups = [*_here.groups, []]


def _wait_group(pending: int) -> None:
    groups = getattr(_here, "groups", [])
    done = max(len(groups) - pending, 0)
    for gathers in groups[:done]:
        for box, found in gathers:
            box.store(found)
    _here.groups = groups[done:]


def _multiply(
    left: Any, right: Any, total: Any, use_acc: bool = True, is_async: bool = False
) -> Value:
    x, y = (
        np.asarray(part.load(None) if isinstance(part, Memory) else part, np.float32)
        for part in (left, right)
    )
    return value(x @ y + (np.asarray(total) if use_acc else 0))


def _halves(words: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(words[..., None].view(np.int16)[..., i] for i in range(2))


def _e4m3_of(words: np.ndarray) -> np.ndarray:
    """The four e4m3 of each word as fp16, ``[..., 4]``."""
    parts = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    return torch.from_numpy(parts).view(torch.float8_e4m3fn).half().numpy()


def _split_e4m3(words: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(_e4m3_of(words)[..., i] for i in range(4))


def _woven_e4m3(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, ...]:
    pairs = _e4m3_of(first), _e4m3_of(second)
    return tuple(part[..., i] for i in range(4) for part in pairs)


def _woven_numbers(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.fmin(x, np.float16(448)) for x in _woven_e4m3(first, second))


def _runs_exchanged(words: np.ndarray) -> np.ndarray:
    """A thread's words of four runs are one run of its own."""
    runs = words.reshape(len(words), -1, 4, 4)
    return runs.swapaxes(2, 3).reshape(words.shape)


ASSEMBLY: dict[str, Callable[..., Any]] = {
    packed.JOIN_HALVES.value: lambda low, high: np.stack([low, high], -1).view(np.int32)[..., 0],
    quads._QUADS.value: _runs_exchanged,
    packed.SPLIT_HALVES.value: _halves,
    packed.E4M3_PAIRS.value: _e4m3_pairs,
    packed.SPLIT_E4M3.value: _split_e4m3,
    packed.WOVEN_E4M3.value: _woven_e4m3,
    packed.WOVEN_NUMBERS.value: _woven_numbers,
}
"""The functions that inline assembly computes, by its text, on one or several arrays.

Assembly that several kernels use is here."""


def _assembly(
    text: Any, constraints: str, given: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    # A default of a parameter is still a constexpr.
    text = text.value if isinstance(text, constexpr) else text
    found = ASSEMBLY[text](*(np.asarray(x) for x in given))
    return tuple(value(x) for x in found) if isinstance(found, tuple) else value(found)


def _where(condition: Any, x: Any, y: Any) -> Value:
    arrays = [part.dtype for part in (x, y) if isinstance(part, np.ndarray)]
    plain = np.int32 if isinstance(x, int) and isinstance(y, int) else np.float32
    return value(np.where(condition, x, y).astype(np.result_type(*arrays) if arrays else plain))


def _warp_specialize(partitions: Any, warps: Sequence[int], registers: Sequence[int]) -> None:
    program, is_open, failures = _here.program, _is_open(), []
    waited: list[bool] = []

    def run(function: Callable[..., None], arguments: Sequence[Any]) -> None:
        _here.program, _here.is_open = program, is_open
        try:
            with np.errstate(all="ignore"):
                function(*arguments)
            waited.append(_is_open())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    _here.is_open = all(waited)


def _range(*limits: Any) -> Any:
    return (value(np.int32(i)) for i in range(*(int(limit) for limit in limits)))


def _assert(holds: Any, message: str = "") -> None:
    assert holds, message


def _nothing(*_: Any, **__: Any) -> None:
    pass


_LAYOUTS = (
    "Blocked Slice NVMMADistributed NVMMAShared SwizzledShared SharedLinear DotOperand "
    "DistributedLinear"
)


def _runs(x: Any, length: int) -> np.ndarray:
    """Numbers in runs of ``length``: ``[..., length]``."""
    return np.asarray(x).reshape(-1, length)


def _multiple_of(x: Any, divisor: int) -> Any:
    if isinstance(x, Pointer):
        # Addresses are not known here.
        return x
    # ``multiple_of`` is about the first number of each run of ``divisor`` numbers.
    assert (_runs(x, divisor)[:, 0] % divisor == 0).all()
    return x


def _contiguous(x: Any, length: int) -> Any:
    runs = _runs(x, length)
    assert (runs - runs[:, :1] == np.arange(length)).all()
    return x


def _constant(x: Any, length: int) -> Any:
    runs = _runs(x, length)
    assert (runs == runs[:, :1]).all()
    return x


def _scan(x: Any, axis: int, combine: Callable[[Any, Any], Any]) -> Any:
    parts = np.split(np.asarray(x), np.shape(x)[axis], axis)
    found = itertools.accumulate((value(part) for part in parts), combine)
    return value(np.concatenate([*map(np.asarray, found)], axis))


def _program(axis: int) -> int:
    """The number of the program that runs, in one dimension of the grid."""
    grid = _memory["grid"]
    return int(_here.program) // math.prod(grid[:axis]) % grid[axis]


_GLUON = types.SimpleNamespace(
    **{f"{name}Layout": _nothing for name in _LAYOUTS.split()},
    **{name: getattr(np, name) for name in ("int16", "int32", "int64", "uint8", "uint32")},
    constexpr=constexpr,
    pointer_type=lambda dtype: dtype,
    constexpr_function=lambda function: function,
    float16=np.float16,
    float32=np.float32,
    bfloat16="bf16",
    float8e4nv="e4m3",
    PropagateNan=types.SimpleNamespace(ALL=True),
    arange=lambda start, stop, layout: value(np.arange(start, stop, dtype=np.int32)),
    full=lambda shape, x, dtype, layout: value(np.full(shape, x, dtype)),
    zeros=lambda shape, dtype, layout: value(np.zeros(shape, dtype)),
    zeros_like=lambda x: value(np.zeros_like(x)),
    to_tensor=value,
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    where=_where,
    maximum=lambda x, y: value(np.maximum(x, y)),
    minimum=lambda x, y: value(np.minimum(x, y)),
    clamp=lambda x, low, high, propagate_nan: value(np.clip(x, low, high)),
    max=lambda x, axis: value(np.max(np.asarray(x), axis)),
    min=lambda x, axis: value(np.min(np.asarray(x), axis)),
    sum=lambda x, axis: value(np.sum(np.asarray(x), axis)),
    associative_scan=_scan,
    abs=np.abs,
    exp2=lambda x: value(np.exp2(np.asarray(x))),
    log2=lambda x: value(np.log2(np.asarray(x))),
    fma=lambda x, y, z: value(x * y + z),
    broadcast=lambda x, y: tuple(value(part) for part in np.broadcast_arrays(x, y)),
    reshape=lambda x, shape: value(np.asarray(x).reshape(shape)),
    join=lambda x, y: value(np.stack([x, y], -1)),
    split=lambda x: (value(np.asarray(x)[..., 0]), value(np.asarray(x)[..., 1])),
    permute=lambda x, order: value(np.asarray(x).transpose(order)),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    inline_asm_elementwise=_assembly,
    static_assert=_assert,
    static_range=range,
    # Check what a kernel tells the compiler about numbers.
    multiple_of=_multiple_of,
    max_contiguous=_contiguous,
    max_constancy=_constant,
    program_id=lambda axis: value(np.int32(_program(axis))),
    num_programs=lambda axis: value(np.int32(_memory["grid"][axis])),
    allocate_shared_memory=_allocate,
    warp_specialize=_warp_specialize,
)
_NAMES: dict[str, Any] = {
    "gl": _GLUON,
    "tl": _GLUON,
    "range": _range,
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=lambda: Barrier,
        init=Barrier.init,
        wait=Barrier.wait,
        arrive=Barrier.arrive,
        expect=lambda barrier, more: barrier.arrive(1, more=more),
    ),
    "async_load": _async_load,
    "async_gather": _gather,
    "arrive_behind_gathers": _arrive_behind_gathers,
    "async_copy": types.SimpleNamespace(commit_group=_commit_group, wait_group=_wait_group),
    "reinterpret": _reinterpret,
    "thread_barrier": _nothing,
    "fence_async_shared": _nothing,
    "mma_v2": _multiply,
    "warpgroup_mma": _multiply,
    "warpgroup_mma_wait": lambda pending, deps: deps if len(deps) > 1 else deps[0],
    "e4m3_planes": _e4m3_planes,
    "opaque_zero": lambda: 0,
    "opaque": lambda x: x,
    "opaque_int": lambda x: x,
    "program_number": lambda hidden=True: value(np.int32(_program(0))),
    "prefetch_l2": _nothing,
    "prefetch_runs": _nothing,
    "let_kernels_behind_start": _nothing,
    "wait_for_kernels_before": _open,
}


def _is_kernel(x: Any) -> bool:
    return hasattr(x, "fn") and hasattr(x, "arg_names")


def _is_structure(x: Any) -> bool:
    return isinstance(x, type) and getattr(x, "__triton_aggregate__", False)


def _function(kernel: Any, names: dict[str, Any]) -> Callable[..., Any]:
    source = kernel.fn
    return types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)


class _Structure:
    """A structure of a kernel; its fields are given by keyword and cannot change."""

    _fields: tuple[str, ...]

    def __init__(self, **fields: Any) -> None:
        assert fields.keys() == set(self._fields), "fields missing or unknown"
        vars(self).update(fields)

    def __setattr__(self, name: str, x: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is assigned to")


def _plain_class(aggregate: Any, names: dict[str, Any]) -> type:
    methods = {name: x for name, x in vars(aggregate).items() if _is_kernel(x)}
    members = {name: _function(x, names) for name, x in methods.items()}
    members |= {"_fields": aggregate.__aggregate_fields__, "__module__": aggregate.__module__}
    return type(aggregate.__name__, (_Structure,), members)


class Translation:
    """Kernels as Python functions, together with everything that they call."""

    def __init__(self, **instead: Any) -> None:
        """
        Args:
            instead: functions to take in place of those of that name.
        """
        self._names = _NAMES | instead
        self._modules: dict[str, dict[str, Any]] = {}

    def function(self, kernel: Any) -> Callable[..., None]:
        source = kernel.fn
        return self._module(source.__module__)[source.__name__]

    def structure(self, aggregate: type) -> type:
        """The class of a structure, with its methods as Python functions."""
        return self._module(aggregate.__module__)[aggregate.__name__]

    def _module(self, module: str) -> dict[str, Any]:
        found = self._modules.get(module)
        if found is not None:
            return found
        names = self._modules[module] = dict(vars(sys.modules[module]))
        names |= {"range": _range}
        kernels = {name: x for name, x in names.items() if _is_kernel(x)}
        structures = {name: x for name, x in names.items() if _is_structure(x)}
        for name, x in kernels.items():
            if x.fn.__module__ == module:
                names[name] = _function(x, names)
        for name, x in structures.items():
            if x.__module__ == module:
                names[name] = _plain_class(x, names)
        for name, x in kernels.items():
            if x.fn.__module__ != module:
                names[name] = self._module(x.fn.__module__)[x.fn.__name__]
        for name, x in structures.items():
            if x.__module__ != module:
                names[name] = self._module(x.__module__)[x.__name__]
        for name, x in list(names.items()):
            if name in self._names:
                names[name] = self._names[name]
            elif isinstance(x, constexpr):
                names[name] = x.value
        return names


def delay(monkeypatch: pytest.MonkeyPatch, share: float = 0.2) -> None:
    """Let a share of the loads into shared memory arrive late, as memory may answer."""
    monkeypatch.setitem(_lag, "share", share)


def take_over(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, translation: Translation
) -> list[KernelCall]:
    """Run the kernel's launches by numpy, their programs in another order every time.

    Returns:
        The launches, as they come.
    """
    calls: list[KernelCall] = []
    launch = KernelCall.launch_through_triton

    def launched(call: KernelCall) -> None:
        if call.kernel is not kernel:
            launch(call)
            return
        calls.append(call)
        programs = list(range(math.prod(call.grid)))
        random.Random(len(calls)).shuffle(programs)
        run(call, programs, translation)

    monkeypatch.setattr(KernelCall, "launch_through_triton", launched)
    monkeypatch.setattr(hopper_launch, "_describe", _described)
    return calls


def _described(rows: torch.Tensor, box: tuple[int, ...]) -> torch.Tensor:
    return rows if rows.dim() == len(box) else rows[None]


def run(call: KernelCall, programs: Sequence[int], translation: Translation) -> None:
    """Run a launch whose descriptors are tensors, with its programs in this order."""
    function = translation.function(call.kernel)
    with _arguments(call.arguments) as arguments:
        for _here.program in programs:
            _memory["grid"] = call.grid
            _here.is_open = not call.waits
            function(**arguments)
            assert _is_open(), "a partition does not wait"


@contextlib.contextmanager
def _arguments(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The arguments as numpy has them. Tensors of bf16 are copied to fp32, and back afterwards."""
    found: dict[str, Any] = {}
    copies: list[tuple[torch.Tensor, np.ndarray]] = []
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and name.endswith("_desc"):
            found[name] = value((x.view(torch.uint8) if x.element_size() == 1 else x).numpy())
            continue
        if isinstance(x, torch.Tensor):
            # numpy has no floats of 8 bits. Kernels read them as words.
            dtype = torch.uint8 if x.element_size() == 1 else x.dtype
            storage = torch.empty(0, dtype=dtype).set_(x.untyped_storage())
            if dtype is torch.bfloat16:
                numbers = storage.float().numpy().view(BFloat16)
                copies.append((storage, numbers))
            else:
                numbers = storage.numpy()
            x = Pointer(numbers, x.storage_offset())
        elif not name.isupper() and isinstance(x, (int, float)):
            x = value(np.int32(x) if isinstance(x, int) else np.float32(x))
        found[name] = x
    yield found
    for storage, numbers in copies:
        storage.copy_(torch.from_numpy(np.asarray(numbers)))
