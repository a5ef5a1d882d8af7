"""Operators of Triton's interpreter for what kernels mostly compute with: numbers and blocks of
plain types, and numbers of Python.

Triton's own operators convert and broadcast both operands by a dozen calls of its language, which
takes ten times as long as numpy takes for the result. A rule here knows the types of two operands
and computes at once; whatever no rule knows goes to Triton's own operator.
"""

from __future__ import annotations

import builtins
import functools
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np

_PLAIN: Final = {
    name: np.dtype(of)
    for name, of in (
        *(("int1", "bool"), ("int8", "int8"), ("int16", "int16"), ("int32", "int32")),
        *(("int64", "int64"), ("uint8", "uint8"), ("uint16", "uint16"), ("uint32", "uint32")),
        *(("uint64", "uint64"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")),
    )
}
"""Types that numpy has too, by their names in Triton."""
_STORED: Final = {
    **{"bf16": np.dtype("uint16")},
    **dict.fromkeys(("fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16", "fp8e4b15"), np.dtype("uint8")),
}
"""Types whose bits are kept as integers."""
_INTEGERS: Final = ("int32", "int64")
_SIGNED: Final = ("int16", *_INTEGERS)
_LIMITS: Final = {"int16": 2**15, "int32": 2**31}
_LEAST_FLOAT: Final = 2.0**-126
_MOST_FLOAT: Final = (2 - 2.0**-23) * 2.0**127
_ONE: Final = (1,)
"""Shape of a number's array."""
_COMPARISONS: Final = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
_SUMS: Final = {
    "__add__": (np.add, operator.add),
    "__sub__": (np.subtract, operator.sub),
    "__mul__": (np.multiply, operator.mul),
}
_BITS: Final = {"__and__": np.bitwise_and, "__or__": np.bitwise_or, "__xor__": np.bitwise_xor}
_SHIFTS: Final = {"__lshift__": np.left_shift, "__rshift__": np.right_shift}
_EXTREMES: Final = {"maximum": np.maximum, "minimum": np.minimum}
_FUNCTIONS: Final = {"exp2": np.exp2, "log2": np.log2}

_NUMBERS: Final = tuple(name for name in _PLAIN if name not in ("int1", "fp16", "fp64"))
_CONVERTED: Final = {
    *((x, y) for x in (*_NUMBERS, "int1") for y in _NUMBERS),
    *(("fp32", "fp16"), ("fp16", "fp32")),
}
"""Types from which and to which numpy converts as Triton does."""

Rule = tuple[Callable[[Any, Any], Any], Any, Any, Any]
"""What computes the result, the types of both operands' arrays, and the result's type."""


def is_exact(number: Any, kind: str) -> bool:
    """Whether a number of Python is the same value as a type of Triton."""
    if type(number) is bool:
        return kind == "int1"
    if type(number) is int:
        if kind == "fp32":
            return -(2**24) <= number <= 2**24
        limit = _LIMITS.get(kind, 2**63)
        return -limit <= number < limit
    if kind == "fp16":
        return _is_half(number)
    size = abs(number)
    return kind == "fp32" and (
        _LEAST_FLOAT <= size <= _MOST_FLOAT or size == 0 or size == float("inf") or size != size
    )


@functools.cache
def _is_half(number: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.float16(number) == number)


def _is_known(x: Any, kind: str) -> bool:
    """Whether something is a number of Python that a block of a type takes as its own type."""
    return kind in (*_INTEGERS, "fp32") and type(x) in (int, float) and is_exact(x, kind)


class QuickOperators:
    """Replacements of the language's builtins, each with Triton's own to fall back on.

    Args:
        interpreter: the module of Triton's interpreter.
    """

    def __init__(self, interpreter: Any) -> None:
        self.language = interpreter.tl
        self.builder = interpreter.interpreter_builder
        self.memory = interpreter._interpreter
        self.handle = interpreter.TensorHandle
        self.tensor = self.language.core.tensor
        self.constexpr = self.language.core.constexpr
        self.kinds = {name: self.language.core.dtype(name) for name in (*_PLAIN, *_STORED)}
        self._forms: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        self._filled: dict[Any, Any] = {}

    # -- Values.

    def value(self, data: Any, kind: Any, is_number: bool) -> Any:
        """A tensor of the language.

        Args:
            data: numpy array; of shape ``[1]`` for a number.
            kind: type of the elements.
            is_number: a number, or a block of the array's shape.
        """
        key = (kind.name, None if is_number else data.shape)
        form = self._forms.get(key)
        if form is None:
            own = kind if is_number else self.language.block_type(kind, list(data.shape))
            like = self.tensor(None, own)
            form = self._forms[key] = (like.type, like.dtype, like.numel, like.shape)
        handle = self.handle.__new__(self.handle)
        handle.data, handle.dtype, handle.attr = data, kind, {}
        made = self.tensor.__new__(self.tensor)
        made.handle = handle
        # A number's type is the very same object as its elements' type: that is how it is told.
        made.type, made.dtype, made.numel, made.shape = form
        return made

    def filled(self, shape: tuple[int, ...], number: Any, of: Any) -> Any:
        """An array of one number, which nobody may write to."""
        key = (shape, number, of)
        found = self._filled.get(key)
        if found is None:
            found = np.full(shape, number, of)
            found.flags.writeable = False
            if number == number:
                self._filled[key] = found
        return found

    # -- Rules by operator.

    def rules_of(self, name: str) -> dict[Any, Rule]:
        """Rules by the names of both operands' types; a type of Python stands for numbers of it."""
        rules: dict[Any, Rule] = {}
        if name in _COMPARISONS:
            self._compare(rules, _COMPARISONS[name])
        elif name in _SUMS:
            self._sum(rules, *_SUMS[name])
            if name == "__add__":
                self._address(rules)
        elif name in _BITS:
            self._of_integers(rules, lambda _: _BITS[name])
            self._same(rules, "int16", _BITS[name])
            self._of_truths(rules, _BITS[name])
        elif name in _SHIFTS:
            for kind in _SIGNED:
                self._same(rules, kind, _SHIFTS[name])
        elif name == "__floordiv__":
            self._of_integers(rules, lambda _: _quotient)
        elif name == "__mod__":
            self._of_integers(rules, lambda _: _remainder)
        elif name == "__truediv__":
            self._same(rules, "fp32", np.divide)
            rules["fp32", int], rules[int, "fp32"] = rules["fp32", float], rules[float, "fp32"]
        elif name in _EXTREMES:
            for kind in _INTEGERS:
                self._same(rules, kind, _EXTREMES[name])
            self._of_floats(rules, _EXTREMES[name])
        return rules

    def _same(self, rules: dict[Any, Rule], kind: str, compute: Any, to: str = "") -> None:
        """Two operands of one type, or one of them a number of Python."""
        same, result = _PLAIN[kind], self.kinds[to or kind]
        rules[kind, kind] = (compute, same, same, result)
        if kind != "fp16":
            number = float if kind == "fp32" else int
            rules[kind, number] = (compute, same, None, result)
            rules[number, kind] = (compute, None, same, result)

    def _of_truths(self, rules: dict[Any, Rule], compute: Any) -> None:
        same, result = _PLAIN["int1"], self.kinds["int1"]
        rules["int1", "int1"] = (compute, same, same, result)
        # An integer would make integers of the truths.
        rules["int1", bool] = (lambda x, y: compute(x, bool(y)), same, None, result)
        rules[bool, "int1"] = (lambda x, y: compute(bool(x), y), None, same, result)

    def _mixed(
        self, rules: dict[Any, Rule], kinds: tuple[str, str], compute: Any, to: str = ""
    ) -> None:
        """Operands of two types: the second is the type that both are computed in."""
        narrow, wide = kinds
        own, other, result = _PLAIN[narrow], _PLAIN[wide], self.kinds[to or wide]
        rules[narrow, wide] = (lambda x, y: compute(x.astype(other), y), own, other, result)
        rules[wide, narrow] = (lambda x, y: compute(x, y.astype(other)), other, own, result)

    def _of_integers(self, rules: dict[Any, Rule], compute_of: Callable[[str], Any]) -> None:
        for kind in _INTEGERS:
            self._same(rules, kind, compute_of(kind))
        self._mixed(rules, _INTEGERS, compute_of("int64"))

    def _compare(self, rules: dict[Any, Rule], compute: Any) -> None:
        for kind in _INTEGERS:
            self._same(rules, kind, compute, "int1")
            self._mixed(rules, (kind, "fp32"), compute, "int1")
        self._mixed(rules, _INTEGERS, compute, "int1")
        self._of_floats(rules, compute, "int1")

    def _sum(self, rules: dict[Any, Rule], compute: Any, of_numbers: Any) -> None:
        checked = self._checked(compute, of_numbers)
        self._of_integers(rules, lambda kind: checked if kind == "int32" else compute)
        self._of_floats(rules, compute)
        half, result = _PLAIN["fp16"], self.kinds["fp16"]
        rules["fp16", float] = (compute, half, None, result)
        rules[float, "fp16"] = (compute, None, half, result)
        for kind in _INTEGERS:
            self._mixed(rules, (kind, "fp32"), compute)

    def _of_floats(self, rules: dict[Any, Rule], compute: Any, to: str = "") -> None:
        for kind in ("fp32", "fp16"):
            self._same(rules, kind, compute, to)
        rules["fp32", int], rules[int, "fp32"] = rules["fp32", float], rules[float, "fp32"]

    def _checked(self, compute: Any, of_numbers: Any) -> Callable[[Any, Any], Any]:
        """Sums, differences or products of 32-bit integers, which must fit them."""
        of, builder = _PLAIN["int32"], self.builder

        def wrong(exact: Any) -> OverflowError:
            name, low, high = of_numbers.__name__, np.min(exact), np.max(exact)
            return OverflowError(f"{name} of int32: results are {low} to {high}")

        def checked(x: Any, y: Any) -> Any:
            if not builder.options.sanitize_overflow:
                return compute(x, y)
            is_one = type(x) is int or x.shape == _ONE
            if is_one and (type(y) is int or y.shape == _ONE):
                # Python computes single numbers ten times faster than numpy.
                first, second = x if type(x) is int else x.item(), y if type(y) is int else y.item()
                exact = of_numbers(first, second)
                if not -(2**31) <= exact < 2**31:
                    raise wrong(exact)
                return np.array([exact], of)
            exact = compute(x, y, dtype=np.int64)
            result = exact.astype(of)
            if (result != exact).any():
                raise wrong(exact)
            return result

        return checked

    def _address(self, rules: dict[Any, Rule]) -> None:
        """Pointers and offsets."""
        pointer = np.dtype("uint64")
        for name, kind in self.kinds.items():
            if name == "int1":
                continue
            own = self.language.pointer_type(kind)
            width = kind.primitive_bitwidth // 8

            def placed(x: Any, y: Any, width: int = width) -> Any:
                return x + np.uint64(width * y % 2**64)

            rules[own.name, int] = (placed, pointer, None, own)
            for offset in _INTEGERS:

                def moved(x: Any, y: Any, width: int = width) -> Any:
                    return x + width * y.astype(pointer)

                def turned(x: Any, y: Any, width: int = width) -> Any:
                    return y + width * x.astype(pointer)

                rules[own.name, offset] = (moved, pointer, _PLAIN[offset], own)
                rules[offset, own.name] = (turned, _PLAIN[offset], pointer, own)

    # -- Replacements.

    def operator(self, name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        """A binary operator of tensors, such as ``__add__`` or ``__radd__``, or an extreme."""
        is_turned = name.startswith("__r") and name not in ("__rshift__",)
        rules = self.rules_of("__" + name[3:] if is_turned else name)
        tensor, constexpr, value = self.tensor, self.constexpr, self.value

        def between(x: Any, y: Any) -> Any:
            rule = rules.get((x.dtype.name, y.dtype.name))
            if rule is None:
                return None
            compute, left, right, kind = rule
            first, second = x.handle.data, y.handle.data
            if first.dtype is not left or second.dtype is not right:
                return None
            return value(compute(first, second), kind, x.type is x.dtype and y.type is y.dtype)

        def with_number(x: Any, number: Any, is_first: bool) -> Any:
            name, of = x.dtype.name, type(number)
            rule = rules.get((of, name) if is_first else (name, of))
            if rule is None or not is_exact(number, name):
                return None
            compute, left, right, kind = rule
            data = x.handle.data
            if data.dtype is not (right if is_first else left):
                return None
            # Zero has no sign: Triton makes a number that equals 0 out of no bits.
            number = number or 0
            result = compute(number, data) if is_first else compute(data, number)
            return value(result, kind, x.type is x.dtype)

        def call(x: Any, other: Any, *rest: Any, **named: Any) -> Any:
            if not rest and not named:
                if type(x) is not tensor:
                    plain = x.value if type(x) is constexpr else x
                    found = with_number(other, plain, True) if type(other) is tensor else None
                elif type(other) is tensor:
                    found = between(other, x) if is_turned else between(x, other)
                else:
                    plain = other.value if type(other) is constexpr else other
                    found = with_number(x, plain, is_turned)
                if found is not None:
                    return found
            return slow(x, other, *rest, **named)

        return call

    def where(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        tensor, constexpr, truth = self.tensor, self.constexpr, _PLAIN["int1"]

        def where(condition: Any, x: Any, y: Any) -> Any:
            if type(condition) is tensor and condition.handle.data.dtype is truth:
                x = x.value if type(x) is constexpr else x
                y = y.value if type(y) is constexpr else y
                kind = x.dtype if type(x) is tensor else getattr(y, "dtype", None)
                if type(x) is type(y) is float and _is_known(x, "fp32"):
                    kind = self.kinds["fp32"]
                of = _PLAIN.get(getattr(kind, "name", ""))
                first, second = self._array(x, kind, of), self._array(y, kind, of)
                if condition.dtype.name == "int1" and first is not None and second is not None:
                    data = np.where(condition.handle.data, first, second)
                    values = (condition, x, y)
                    is_number = all(v.type is v.dtype for v in values if type(v) is tensor)
                    return self.value(data, kind, is_number)
            return slow(condition, x, y)

        return where

    def _array(self, x: Any, kind: Any, of: Any) -> Any:
        """An operand's elements of a plain type; None if they are of another."""
        if of is None:
            return None
        if type(x) is self.tensor:
            data = x.handle.data
            return data if x.dtype.name == kind.name and data.dtype is of else None
        return self.filled(_ONE, x or 0, of) if _is_known(x, kind.name) else None

    def function(self, name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one operand of fp32, such as ``exp2``."""
        tensor, compute = self.tensor, _FUNCTIONS[name]
        kind, of = self.kinds["fp32"], _PLAIN["fp32"]

        def call(x: Any) -> Any:
            if type(x) is tensor and x.dtype.name == "fp32" and x.handle.data.dtype is of:
                return self.value(compute(x.handle.data), kind, x.type is x.dtype)
            return slow(x)

        return call

    def fma(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        tensor, constexpr = self.tensor, self.constexpr
        kind, of = self.kinds["fp32"], _PLAIN["fp32"]

        def fma(x: Any, y: Any, z: Any) -> Any:
            values = [v.value if type(v) is constexpr else v for v in (x, y, z)]
            # Triton makes integers tensors of an integer type, and converts those.
            if any(type(v) is tensor for v in values) and int not in map(type, values):
                first, second, third = (self._array(v, kind, of) for v in values)
                if first is not None and second is not None and third is not None:
                    is_number = all(v.type is v.dtype for v in values if type(v) is tensor)
                    return self.value(first * second + third, kind, is_number)
            return slow(x, y, z)

        return fma

    def sum(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """Sums over one axis. Triton's own is a function of the language, not a builtin."""
        tensor, constexpr = self.tensor, self.constexpr
        kinds = {name: (self.kinds[name], _PLAIN[name]) for name in ("fp32", "int32", "int64")}

        def sum_(x: Any, axis: Any = None, *rest: Any, **named: Any) -> Any:
            axis = axis.value if type(axis) is constexpr else axis
            if type(x) is tensor and type(axis) is int and not rest and not named:
                (kind, of), data = kinds.get(x.dtype.name, (None, None)), x.handle.data
                if data.dtype is of and 0 <= axis < data.ndim and x.type is not x.dtype:
                    total, is_number = data.sum(axis), data.ndim == 1
                    summed = total.astype(of)
                    # Triton's own raises an error for a number that does not fit, not for a block.
                    if not is_number:
                        return self.value(summed, kind, False)
                    if summed == total or total != total:
                        return self.value(summed.reshape(1), kind, True)
            return slow(x, axis, *rest, **named)

        return sum_

    def full(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """Blocks filled with one number. Triton's own function checks each shape once."""
        constexpr = self.constexpr
        checked: set[tuple[int, ...]] = set()

        def full(shape: Any, number: Any, dtype: Any) -> Any:
            sizes = tuple(n.value if type(n) is constexpr else n for n in shape)
            kind = dtype.value if type(dtype) is constexpr else dtype
            plain = number.value if type(number) is constexpr else number
            name = getattr(kind, "name", "")
            if sizes in checked and _is_known(plain, name):
                return self.value(self.filled(sizes, plain or 0, _PLAIN[name]), kind, False)
            made = slow(shape, number, dtype)
            if sizes:
                checked.add(sizes)
            return made

        return full

    def _is_kept(self, x: Any, kind: Any) -> bool:
        """Whether something is a number of Python that memory of a type keeps as it is."""
        if type(x) in (int, float) and x == 0:
            # Triton does not convert integers to floats of 8 bits.
            return type(x) is float or "fp8" not in kind.name
        return _is_known(x, kind.name)

    def _kept(self, mask: Any, shape: tuple[int, ...], is_number: bool) -> Any:
        """The elements of a mask of pointers of a shape; None for a mask of another type."""
        truth = _PLAIN["int1"]
        if mask is None:
            return self.filled(shape, True, truth)
        if type(mask) is not self.tensor or mask.dtype.name != "int1":
            return None
        data = mask.handle.data
        fits = data.dtype is truth and not (is_number and mask.type is not mask.dtype)
        return data if fits else None

    def load(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        tensor, constexpr, memory = self.tensor, self.constexpr, self.memory
        elements = self._elements()

        def quick(pointer: Any, mask: Any, other: Any) -> Any:
            found = elements.get(pointer.dtype.name)
            if found is None:
                return None
            kind, of = found
            data, is_number = pointer.handle.data, pointer.type is pointer.dtype
            shape = data.shape
            number = 0.0 if other is None else other
            kept = self._kept(mask, shape, is_number)
            if kept is None or (mask is None and other is not None):
                return None
            if not self._is_kept(number, kind):
                return None
            if kept.shape != shape:
                data, kept = np.broadcast_arrays(data, kept)
                shape = data.shape
            rest = self.filled(shape, number or 0, of)
            return self.value(memory.load(data, kept, rest, of), kind, is_number)

        def load(
            pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **named: Any
        ) -> Any:
            if not rest and type(pointer) is tensor and (not named or named.keys() <= _HINTS):
                found = quick(
                    pointer,
                    mask.value if type(mask) is constexpr else mask,
                    other.value if type(other) is constexpr else other,
                )
                if found is not None:
                    return found
            return slow(pointer, mask, other, *rest, **named)

        return load

    def store(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        tensor, constexpr, memory = self.tensor, self.constexpr, self.memory
        elements = self._elements()

        def is_done(pointer: Any, value: Any, mask: Any) -> bool:
            found = elements.get(pointer.dtype.name)
            if found is None:
                return False
            kind, of = found
            data, is_number = pointer.handle.data, pointer.type is pointer.dtype
            shape = data.shape
            if type(value) is tensor:
                given = self._converted(value, kind.name)
                if given is None or (is_number and value.type is not value.dtype):
                    return False
            elif self._is_kept(value, kind):
                given = self.filled(shape, value or 0, of)
            else:
                return False
            kept = self._kept(mask, shape, is_number)
            if kept is None:
                return False
            if kept.shape != shape or given.shape != shape:
                if np.broadcast_shapes(shape, kept.shape, given.shape) != shape:
                    return False
                kept, given = np.broadcast_to(kept, shape), np.broadcast_to(given, shape)
            memory.store(data, given, kept)
            return True

        def store(pointer: Any, value: Any, mask: Any = None, *rest: Any, **named: Any) -> Any:
            if not rest and type(pointer) is tensor and (not named or named.keys() <= _HINTS):
                plain = mask.value if type(mask) is constexpr else mask
                if is_done(pointer, value, plain):
                    return None
            return slow(pointer, value, mask, *rest, **named)

        return store

    def _elements(self) -> dict[str, tuple[Any, Any]]:
        """Types of elements, by the names of pointers to them."""
        return {
            self.language.pointer_type(kind).name: (kind, (_PLAIN | _STORED)[name])
            for name, kind in self.kinds.items()
            if name != "int1"
        }

    def cast(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        tensor, constexpr, kinds = self.tensor, self.constexpr, self.kinds

        def cast(x: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
            if not rest and not named and type(x) is tensor:
                kind = dtype.value if type(dtype) is constexpr else dtype
                own, wanted = x.dtype.name, getattr(kind, "name", "")
                if own == wanted:
                    return x
                data = self._converted(x, wanted)
                if data is not None:
                    return self.value(data, kinds[wanted], x.type is x.dtype)
            return slow(x, dtype, *rest, **named)

        return cast

    def _converted(self, x: Any, wanted: str) -> Any:
        """A tensor's elements as another type; None where numpy does not convert as Triton does."""
        own, data = x.dtype.name, x.handle.data
        if own == wanted:
            return data if data.dtype is (_PLAIN.get(own) or _STORED.get(own)) else None
        if (own, wanted) in _CONVERTED and data.dtype is _PLAIN[own]:
            return data.astype(_PLAIN[wanted])
        return None

    def item(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        """New axes of blocks, as in ``x[:, None]``."""
        everything = builtins.slice(None)

        def item(x: Any, slices: Any) -> Any:
            if type(slices) is builtins.tuple and x.type is not x.dtype:
                kept = [one for one in slices if one is not None]
                data = x.handle.data
                if len(kept) <= data.ndim and all(
                    type(one) is builtins.slice and one == everything for one in kept
                ):
                    return self.value(data[slices], x.dtype, False)
            return slow(x, slices)

        return item

    def arange(self, slow: Callable[..., Any]) -> Callable[..., Any]:
        ranges: dict[tuple[int, int], Any] = {}
        kind = self.kinds["int32"]

        def arange(start: Any, end: Any) -> Any:
            if type(start) is int and type(end) is int:
                data = ranges.get((start, end))
                if data is None:
                    data = slow(start, end).handle.data
                    data.flags.writeable = False
                    ranges[start, end] = data
                return self.value(data, kind, False)
            return slow(start, end)

        return arange

    def replacement(self, place: Any, name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        """What to call instead of a builtin of the language."""
        if place is self.tensor:
            if name == "__getitem__":
                return self.item(slow)
            if name in ("to", "cast"):
                return self.cast(slow)
            return self.operator(name, slow) if self._is_binary(name) else slow
        if place not in (self.language, self.language.core):
            return slow
        if name in _EXTREMES:
            return self.operator(name, slow)
        if name in _FUNCTIONS:
            return self.function(name, slow)
        make = {
            "full": self.full,
            "fma": self.fma,
            "where": self.where,
            "load": self.load,
            "store": self.store,
            "cast": self.cast,
            "arange": self.arange,
        }.get(name)
        return slow if make is None else make(slow)

    def _is_binary(self, name: str) -> bool:
        is_own = name.startswith("__")
        return is_own and bool(self.rules_of(name) or self.rules_of("__" + name[3:]))


_HINTS: Final = {"cache_modifier", "eviction_policy"}
"""Arguments of loads and stores that change no value."""


def _quotient(x: Any, y: Any) -> Any:
    """The quotient, rounded towards zero as in C."""
    if type(x) is not int and type(y) is int and x.shape == _ONE and y > 0:
        first = x.item()
        return np.array([first // y if first >= 0 else -(-first // y)], x.dtype)
    return (x - np.fmod(x, y)) // y


def _remainder(x: Any, y: Any) -> Any:
    """The remainder, of the sign of the dividend as in C."""
    if type(x) is not int and type(y) is int and x.shape == _ONE and y > 0:
        first = x.item()
        return np.array([first % y if first >= 0 else -(-first % y)], x.dtype)
    return np.fmod(x, y)
