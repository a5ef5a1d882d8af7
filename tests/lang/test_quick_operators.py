"""The tests' quick operators of Triton's interpreter give what Triton's own operators give."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Final

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from builders.device import interprets
from tests.tools.quick_operators import QuickOperators

pytestmark = pytest.mark.skipif(not interprets(), reason="needs Triton's interpreter")

BINARY: Final = (
    *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__"),
    *("__and__", "__or__", "__xor__", "__lshift__", "__rshift__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"),
)
TURNED: Final = tuple(f"__r{name[2:]}" for name in BINARY[:11])
EXTREMES: Final = ("maximum", "minimum")
KINDS: Final = ("int1", "int8", "int16", "int32", "int64", "uint32", "fp16", "fp32", "bf16")
SHAPES: Final = (None, (1,), (4,), (1, 4), (2, 4), (2, 1))
"""Shapes of blocks; None is a number."""
PAIRED: Final = (None, (1,), (4,), (2, 1))
NUMBERS: Final = (
    *(0, 1, 3, -2, 31, 2**24 + 1, 2**31 - 1, 2**31, -(2**31), 2**40, True, False),
    *(2**15 - 1, 2**15, -(2**15) - 1),
    *(0.0, -0.0, 0.5, -7.25, 1e-40, 1e300, float("inf"), float("nan")),
)
OWN: Final = {name: getattr(tl.tensor, name) for name in (*BINARY, *TURNED, "__getitem__", "to")}
OWN.update((name, getattr(tl, name)) for name in (*EXTREMES, "where", "load", "store", "arange"))
OWN.update((name, getattr(tl, name)) for name in ("exp2", "log2", "fma", "full"))
CHECKS: Final[list[Callable[[], None]]] = []


@triton.jit
def _checking(done_ptr):
    CHECKS.pop()()
    tl.store(done_ptr, 1)


def inside(check: Callable[[], None]) -> None:
    """Make a check from a kernel, where the language's functions are the interpreter's."""
    failures: list[BaseException] = []

    def kept() -> None:
        try:
            check()
        except AssertionError as failure:
            failures.append(failure)

    CHECKS.append(kept)
    done = torch.zeros(1, dtype=torch.int32)
    _checking[(1,)](done)
    assert done.item() == 1
    for failure in failures:
        raise failure


class Both:
    """An operator of Triton, and the quick one in its place.

    Args:
        name: of the operator.
        place: where the language has it.
    """

    def __init__(self, name: str, place: Any) -> None:
        from triton.runtime import interpreter

        self.passed_on = 0
        member = getattr(OWN[name], "__wrapped__", OWN[name])

        def slow(*args: Any, **named: Any) -> Any:
            return member(*args, **named, _semantic=interpreter.interpreter_semantic)

        def noted(*args: Any, **named: Any) -> Any:
            self.passed_on += 1
            return slow(*args, **named)

        self.slow = slow
        self.quick = QuickOperators(interpreter).replacement(place, name, noted)

    def agree(self, *args: Any, **named: Any) -> None:
        found, wanted = (outcome(f, *args, **named) for f in (self.quick, self.slow))
        shown = [(str(x.type), x.handle.data) if isinstance(x, tl.tensor) else x for x in args]
        assert found == wanted, (shown, named)


def tensor_of(kind: str, shape: tuple[int, ...] | None, seed: int = 1) -> Any:
    """A tensor of small numbers; of the bits of small numbers where numpy has no such type."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    generator, element = np.random.default_rng(seed), tl.core.dtype(kind)
    is_signed = kind.startswith(("int", "fp")) and kind != "int1"
    numbers = generator.integers(-9 if is_signed else 0, 9, shape or (1,))
    if kind == "fp32":
        numbers = numbers + generator.choice([0.0, 0.25, np.nan, np.inf], numbers.shape)
    data = numbers > 3 if kind == "int1" else numbers.astype(_get_np_dtype(element))
    whole = element if shape is None else tl.block_type(element, [*shape])
    return tl.tensor(TensorHandle(data, element), whole)


def outcome(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The type, shape and bytes that a call gives; whether it fails of an overflow if it fails."""
    with np.errstate(all="ignore"):
        try:
            found = function(*args, **named)
        except Exception as error:
            return isinstance(error, OverflowError)
    if found is None or found.dtype.name == "void":
        return "nothing"
    assert (found.type is found.dtype) is not found.type.is_block()
    data = found.handle.data
    # Triton's own comparisons may leave truths in wider integers.
    data = data.astype(bool) if found.dtype.name == "int1" else data
    return str(found.type), str(data.dtype), data.shape, data.tobytes()


@pytest.mark.parametrize("name", [*BINARY, *EXTREMES])
def test_operators_of_two_tensors(name: str) -> None:
    both = Both(name, tl if name in EXTREMES else tl.tensor)

    def check() -> None:
        for left, right, first, second in product(KINDS, KINDS, PAIRED, PAIRED):
            y = tensor_of(right, second, 2)
            if "shift" in name:
                y.handle.data = abs(y.handle.data)
            both.agree(tensor_of(left, first), y)

    inside(check)
    assert both.passed_on < len(KINDS) ** 2 * len(PAIRED) ** 2


@pytest.mark.parametrize("name", [*BINARY, *TURNED, *EXTREMES])
def test_operators_of_a_tensor_and_a_number(name: str) -> None:
    both = Both(name, tl if name in EXTREMES else tl.tensor)

    def check() -> None:
        for kind, shape, number in product(KINDS, (None, (1,), (2, 4)), NUMBERS):
            width = min(tl.core.dtype(kind).primitive_bitwidth, 32)
            if "shift" in name and not (type(number) is int and 0 <= number < width):
                continue
            x = tensor_of(kind, shape)
            if "shift" in name:
                x.handle.data = abs(x.handle.data)
            both.agree(x, number)
            both.agree(x, tl.constexpr(number))
            if name in EXTREMES:
                both.agree(number, x)

    inside(check)
    assert both.passed_on < len(KINDS) * 3 * len(NUMBERS) * (3 if name in EXTREMES else 2)


def test_sums_of_32_bits_must_fit_them() -> None:
    names = {"__add__": (2**31 - 1, 1), "__sub__": (-(2**31), 1), "__mul__": (2**16, 2**15)}

    def check() -> None:
        for (name, (x, y)), shape, other in product(names.items(), SHAPES, SHAPES):
            both = Both(name, tl.tensor)
            left, right = tensor_of("int32", shape), tensor_of("int32", other)
            left.handle.data[...], right.handle.data[...] = x, y
            for given in (right, y):
                assert outcome(both.quick, left, given) is True
                both.agree(left, given)
            left.handle.data[...] = x // 4
            both.agree(left, right)

    inside(check)


def test_pointers_and_offsets() -> None:
    both, turned = Both("__add__", tl.tensor), Both("__radd__", tl.tensor)

    def check() -> None:
        for kind, first, offset, second in product(KINDS, SHAPES, ("int32", "int64"), SHAPES):
            pointer, by = pointer_to(kind, first), tensor_of(offset, second)
            both.agree(pointer, by)
            both.agree(by, pointer)
            for number in (0, 5, -3):
                both.agree(pointer, number)
                turned.agree(pointer, number)

    inside(check)


def pointer_to(kind: str, shape: tuple[int, ...] | None, address: int = 1 << 40) -> Any:
    """Pointers to elements one after the other."""
    from triton.runtime.interpreter import TensorHandle

    own = tl.pointer_type(tl.core.dtype(kind))
    count = int(np.prod(shape or (1,)))
    width = max(1, own.element_ty.primitive_bitwidth // 8)
    data = (address + width * np.arange(count, dtype=np.uint64)).reshape(shape or (1,))
    return tl.tensor(
        TensorHandle(data, own), own if shape is None else tl.block_type(own, [*shape])
    )


def test_choices() -> None:
    both = Both("where", tl)

    def check() -> None:
        for shape, first, second in product(SHAPES, SHAPES, SHAPES):
            condition = tensor_of("int1", shape, 3)
            for kind, other in product(KINDS, ("int32", "fp32")):
                x = tensor_of(kind, first)
                both.agree(condition, x, tensor_of(kind, second, 2))
                both.agree(condition, x, tensor_of(other, second, 2))
            for kind, number in product(("int32", "fp32", "fp16"), NUMBERS):
                x = tensor_of(kind, first)
                both.agree(condition, x, number)
                both.agree(condition, number, x)
        for shape, number, other in product((None, (2, 4)), NUMBERS, NUMBERS):
            both.agree(tensor_of("int1", shape, 3), number, other)

    inside(check)


def test_sums_over_an_axis() -> None:
    from triton.runtime import interpreter

    slow, passed_on = tl.standard.sum, []

    def noted(*args: Any, **named: Any) -> Any:
        passed_on.append(args)
        return slow(*args, **named)

    quick = QuickOperators(interpreter).sum(noted)

    def check() -> None:
        for kind, shape, axis in product(KINDS, ((1,), (4,), (2, 4), (2, 1), (2, 4, 8)), range(3)):
            x = tensor_of(kind, shape)
            for at in (axis, tl.constexpr(axis)) if axis < len(shape) else ():
                assert outcome(quick, x, at) == outcome(slow, x, at), (kind, shape, at)
        of = {args[0].dtype.name for args in passed_on}
        assert of == {*KINDS} - {"fp32", "int32", "int64"}
        x = tensor_of("int32", (2, 4))
        assert outcome(quick, x) == outcome(slow, x)
        assert outcome(quick, x, 0, keep_dims=True) == outcome(slow, x, 0, keep_dims=True)
        for shape in ((4,), (4, 2)):
            too_much = tensor_of("int32", shape)
            too_much.handle.data[:] = 2**30
            assert outcome(quick, too_much, 0) == outcome(slow, too_much, 0)

    inside(check)


def test_conversions() -> None:
    both = Both("to", tl.tensor)

    def check() -> None:
        for kind, wanted, shape in product(KINDS, KINDS, SHAPES):
            both.agree(tensor_of(kind, shape), tl.core.dtype(wanted))
            both.agree(tensor_of(kind, shape), tl.constexpr(tl.core.dtype(wanted)))
        both.agree(tensor_of("fp32", (4,)), tl.int32, bitcast=True)

    inside(check)


def test_new_axes_and_ranges() -> None:
    axes, ranges = Both("__getitem__", tl.tensor), Both("arange", tl)

    def check() -> None:
        every = slice(None)
        for shape in SHAPES:
            x = tensor_of("int32", shape)
            for slices in ((None,), (None, every), (every, None), (every, None, every), None, (0,)):
                axes.agree(x, slices)
        for start, end in ((0, 1), (0, 8), (4, 8), (0, 3), (2, 2)):
            ranges.agree(start, end)
            ranges.agree(start, tl.constexpr(end))

    inside(check)


@pytest.mark.parametrize("name", ["exp2", "log2"])
def test_functions_of_one_number(name: str) -> None:
    both = Both(name, tl)

    def check() -> None:
        for kind, shape in product(KINDS, SHAPES):
            both.agree(tensor_of(kind, shape))

    inside(check)
    assert both.passed_on == (len(KINDS) - 1) * len(SHAPES)


def test_products_with_a_sum() -> None:
    both = Both("fma", tl)

    def check() -> None:
        for first, second, third in product(SHAPES, SHAPES, SHAPES):
            x, y = tensor_of("fp32", first), tensor_of("fp32", second, 2)
            for kind in ("fp32", "int32", "fp16"):
                both.agree(x, y, tensor_of(kind, third, 3))
        for shape, number in product(SHAPES, NUMBERS):
            x, y = tensor_of("fp32", shape), tensor_of("fp32", shape, 2)
            for given in ((x, y, number), (x, number, y), (number, x, tl.constexpr(number))):
                both.agree(*given)

    inside(check)


def test_blocks_of_one_number() -> None:
    both = Both("full", tl)

    def check() -> None:
        for shape, number, kind in product(SHAPES, NUMBERS, KINDS):
            sizes = [] if shape is None else [*shape]
            both.agree(sizes, number, tl.core.dtype(kind))
            both.agree([tl.constexpr(n) for n in sizes], number, tl.constexpr(tl.core.dtype(kind)))
        both.agree([3], 1, tl.int32)
        both.agree([4], tensor_of("int32", None), tl.int32)
        before = both.passed_on
        for number, kind in ((0, tl.int32), (-1, tl.int64), (0.5, tl.float32)):
            both.agree([2, 4], number, kind)
        assert both.passed_on == before

    inside(check)


@pytest.mark.parametrize("kind", [*KINDS[1:], "fp8e4nv"])
def test_loads_and_stores(kind: str) -> None:
    loads, stores = Both("load", tl), Both("store", tl)
    memory = np.arange(64, dtype=np.uint8) % 7

    def check() -> None:
        address = memory.ctypes.data
        for shape, other in product(SHAPES, (None, *SHAPES)):
            pointer = pointer_to(kind, shape, address)
            loads.agree(pointer)
            for mask in (True, tensor_of("int1", other, 3), None):
                for number in (None, 0, 0.0, 1, -0.5):
                    loads.agree(pointer, mask, number)
                    loads.agree(pointer, mask=mask, other=number, cache_modifier=".cg")
                for value in (0, 1, 0.5, tensor_of(kind, other), tensor_of("int32", other)):
                    left = []
                    for store in (stores.quick, stores.slow):
                        memory[:] = 5
                        left.append((outcome(store, pointer, value, mask), memory.tobytes()))
                    assert left[0] == left[1], (shape, other, mask, value)

    inside(check)
    assert loads.passed_on < 6 * 7 * 31
