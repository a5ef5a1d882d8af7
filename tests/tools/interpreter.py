"""Makes Triton's interpreter faster by skipping repeated work; kernels compute the same."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from builders.launch.call import KernelCall
from tests.tools.quick_operators import QuickOperators

OPERATIONS = (
    *("cache", "clear", "indexer", "latent_convert", "rank_topk", "sparse_mla"),
    "topk_transform",
)
"""Modules of operations that a sparse layer uses."""
_NARROW = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
"""Integer types whose sums and products are checked for overflow."""


@contextmanager
def in_torch(*names: str) -> Iterator[None]:
    """Let the reference do operations of ``attn.ops``: the named ones, or all of a sparse layer.

    This is for tests of the code around kernels. The kernels have tests of their own, and the
    interpreter would take most of the time.
    """
    with ExitStack() as stack:
        for name in names or OPERATIONS:
            module = importlib.import_module(f"attn.ops.{name}")
            stack.enter_context(mock.patch.object(module, "has_kernel", return_value=False))
        yield


def make_quick() -> None:
    """Make the interpreter quick for all launches of this process, before the first launch."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _patch_once_per_launch(interpreter)
    _look_up_types_once(interpreter)
    _look_up_shapes_once(interpreter)
    _compare_shapes_quickly(interpreter)
    _call_builtins_directly(interpreter)
    _multiply_in_single_precision(interpreter)
    _look_for_overflows_quickly(interpreter)
    _look_up_narrow_floats(interpreter)
    _pass_tensors_through(interpreter)
    _combine_whole_blocks(interpreter)


@contextmanager
def wrapping() -> Iterator[None]:
    """Let integers wrap as on a GPU.

    This is for kernels with lanes whose results nobody uses; the tests look at the results of all
    other lanes.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    with mock.patch.object(builder, "options", replace(builder.options, sanitize_overflow=False)):
        yield


def _patch_once_per_launch(interpreter: Any) -> None:
    """Replace the functions of Triton's language once per launch.

    For a launch Triton replaces them and puts them back at the end. In between, it looks for
    functions to replace at every call of a device function, and finds none.
    """
    language, patch, scope = interpreter.tl, interpreter._patch_lang, interpreter._LangPatchScope
    places = (language, language.core, language.tensor, language.math)
    builtins = {
        id(place): [name for name, x in inspect.getmembers(place) if language.core.is_builtin(x)]
        for place in (*places, language.core.tensor_descriptor_base)
    }
    patched: set[int] = set()

    class Scope(scope):  # type: ignore[misc]
        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name in builtins[id(place)]:
            member = getattr(place, name)
            if language.core.is_builtin(member):
                interpreter._patch_attr(place, name, member, builder, scope)

    modules: dict[tuple[int, int], set[int]] = {}

    def patch_new(function: Callable[..., Any]) -> Any:
        names = function.__globals__
        # Rewriting a function adds names to its module.
        key = id(names), len(names)
        seen = modules.get(key)
        if seen is None:
            seen = {id(x) for x in names.values() if x is language or x is language.core}
            modules[key] = seen
        if seen and seen <= patched:
            return scope()
        changes = patch(function)
        patched.update(seen)
        return changes

    interpreter._LangPatchScope = Scope
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_new


def _look_up_types_once(interpreter: Any) -> None:
    """Keep the table of types, which Triton makes anew for every question."""
    of_scalar = functools.cache(interpreter._get_np_dtype)
    language = interpreter.tl

    def of(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        # Those of pointers are no keys; their addresses are numbers.
        return of_scalar(language.uint64 if element.is_ptr() else element)

    interpreter._get_np_dtype = of


def _look_up_shapes_once(interpreter: Any) -> None:
    """Keep wrapped shapes: there are few, and every result of every operation has one."""
    core = interpreter.tl.core

    @functools.cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    @functools.cache
    def block(shape: tuple[int, ...]) -> tuple[Any, int, str]:
        made = make_block(core.float32, list(shape))
        return made.shape, made.numel, str(made.shape)

    def make_block(element: Any, shape: Any) -> Any:
        made = core.block_type.__new__(core.block_type)
        init_block(made, element, shape)
        return made

    init_block = core.block_type.__init__

    def new_block(self: Any, element: Any, shape: Any) -> None:
        if all(type(n) is int for n in shape):
            self.element_ty = element
            self.shape, self.numel, text = block(tuple(shape))
            self.name = f"<{text}, {element}>"
        else:
            init_block(self, element, shape)

    def new_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = wrapped(tuple(kind.shape) if kind.is_block() else ())

    core.block_type.__init__ = new_block
    core.tensor.__init__ = new_tensor


def _compare_shapes_quickly(interpreter: Any) -> None:
    """Skip conversion and broadcast for operands of equal types and shapes, which most are.

    Dimensions of other operands are compared as numbers, not as wrapped numbers.
    """
    language = interpreter.tl
    semantic = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value
    check = semantic.binary_op_type_checking_impl
    plain = {id(language.float32), id(language.int32), id(language.int64)}

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(lhs, self.tensor) and isinstance(rhs, self.tensor):
            left, right = lhs.type, rhs.type
            if left.scalar is right.scalar and id(left.scalar) in plain:
                is_block = left.is_block()
                if is_block is right.is_block() and (
                    not is_block or left.shape.values == right.shape.values
                ):
                    return lhs, rhs
        return check(self, lhs, rhs, *rest, **more)

    semantic.binary_op_type_checking_impl = binary_op_type_checking_impl

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (lhs, rhs) if not right.is_block() else broadcast(self, lhs, rhs)
        if not right.is_block():
            return broadcast(self, lhs, rhs)
        left_shape, right_shape = left.shape.values, right.shape.values
        if left_shape == right_shape:
            return lhs, rhs
        if len(left_shape) != len(right_shape):
            return broadcast(self, lhs, rhs)
        shape = [max(pair) for pair in zip(left_shape, right_shape, strict=True)]
        if any(n not in (1, m) for given in (left_shape, right_shape)
               for n, m in zip(given, shape, strict=True)):  # fmt: skip
            return broadcast(self, lhs, rhs)

        def spread(x: Any, own: list[int]) -> Any:
            if own == shape:
                return x
            kind = language.block_type(x.type.scalar, shape)
            return self.tensor(self.builder.create_broadcast(x.handle, shape), kind)

        return spread(lhs, left_shape), spread(rhs, right_shape)

    semantic.broadcast_impl_value = broadcast_impl_value


def _call_builtins_directly(interpreter: Any) -> None:
    """Call builtins without the check that they are called from a kernel, and the most frequent
    ones by :mod:`tests.tools.quick_operators`.
    """
    calls: dict[tuple[int, str], Callable[..., Any]] = {}
    quick = QuickOperators(interpreter)

    def direct(member: Any) -> Callable[..., Any]:
        function = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_attr(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        call = calls.get((id(place), name))
        if call is None:
            call = quick.replacement(place, name, direct(member))
            calls[id(place), name] = call
        scope.set_attr(place, name, call)

    interpreter._patch_attr = patch_attr
    # ``sum`` is a function of the language, not a builtin: a launch does not replace it.
    interpreter.tl.sum = quick.sum(interpreter.tl.sum)


def _multiply_in_single_precision(interpreter: Any) -> None:
    """Multiply matrices as float32, for which numpy has a library, unlike for 16-bit floats."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply = builder.create_dot

    def dequantised(x: Any) -> Any:
        if x.data.dtype != np.float16:
            return x
        return handle(x.data.astype(np.float32), interpreter.tl.float32)

    def create_dot(self: Any, left: Any, right: Any, total: Any, *rest: Any) -> Any:
        if total.data.dtype == np.float32:
            left, right = dequantised(left), dequantised(right)
        return multiply(self, left, right, total, *rest)

    builder.create_dot = create_dot


def _look_for_overflows_quickly(interpreter: Any) -> None:
    """Sums, differences and products of integers are computed once more in 64 bits, as Triton's
    own check does by a dozen operations of its language.

    Compiled kernels check nothing and go on with the number that is left. Triton's own random
    numbers, which overflow on purpose, ask for no check; so do sums of bit patterns in
    :mod:`attn.kernels.lang.numerics`.
    """
    semantic = type(interpreter.interpreter_semantic)
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    of_numbers = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
    limits = {kind: (np.iinfo(kind).min, np.iinfo(kind).max) for kind in map(np.dtype, _NARROW)}
    least, most = np.minimum.reduce, np.maximum.reduce

    def binary_op_sanitize_overflow_impl(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        left, right = lhs.handle.data, rhs.handle.data
        bounds = limits.get(left.dtype)
        if bounds is None or not self.builder.options.sanitize_overflow:
            return
        if left.size == right.size == 1:
            # Python computes single numbers ten times faster than numpy.
            exact_number = of_numbers[binary_op.__name__](left.item(), right.item())
            if bounds[0] <= exact_number <= bounds[1]:
                return
        exact = operations[binary_op.__name__](left, right, dtype=np.int64).reshape(-1)
        if least(exact) < bounds[0] or most(exact) > bounds[1]:
            raise OverflowError(
                f"{binary_op.__name__} of {left.dtype}: results are {exact.min()} to {exact.max()}"
            )

    semantic.binary_op_sanitize_overflow_impl = binary_op_sanitize_overflow_impl


def _look_up_narrow_floats(interpreter: Any) -> None:
    """Convert floats of 8 and 16 bits by a table of all of them, which Triton's function makes."""
    convert = interpreter._convert_float

    @functools.cache
    def table(own: Any, wanted: Any, rounding: Any) -> Any:
        bits = np.dtype(f"uint{own.primitive_bitwidth}")
        return convert(np.arange(1 << own.primitive_bitwidth, dtype=bits), own, wanted, rounding)

    def _convert_float(data: Any, own: Any, wanted: Any, rounding: Any) -> Any:
        if own.primitive_bitwidth > 16:
            return convert(data, own, wanted, rounding)
        return table(own, wanted, rounding)[data.view(f"uint{own.primitive_bitwidth}")]

    interpreter._convert_float = _convert_float


def _pass_tensors_through(interpreter: Any) -> None:
    """Return a tensor as it is where a kernel assigns it to a name, which most assignments do."""
    semantic = type(interpreter.interpreter_semantic)
    convert, tensor = semantic.to_tensor, semantic.tensor

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else convert(self, x, check_type)

    semantic.to_tensor = to_tensor


def _combine_whole_blocks(interpreter: Any) -> None:
    """Reduce and scan by a kernel's own function in a few steps over blocks.

    Triton calls the function for each element. Functions are associative, as a GPU too needs them.
    """

    def combined(self: Any, left: list[Any], right: list[Any], kinds: list[Any]) -> list[Any]:
        tensors = [self.to_tensor(x, kind) for x, kind in zip(left + right, kinds * 2, strict=True)]
        found = self.combine_fn.fn(*tensors)
        return [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]

    def reduced(self: Any, input: tuple[Any, ...]) -> list[Any]:
        parts, axis = self.unravel(input, self.axis)
        kinds, blocks = [x.dtype for x in parts], [x.handle.data for x in parts]
        while (count := blocks[0].shape[axis]) > 1:
            # Neighbours, so that the order stays.
            left, right = (
                [np.take(x, range(first, count, 2), axis) for x in blocks] for first in (0, 1)
            )
            blocks = combined(self, left, right, kinds)
        if self.axis is None:
            blocks = [x if self.keep_dims else x.item() for x in blocks]
        elif not self.keep_dims:
            blocks = [np.squeeze(x, axis) for x in blocks]
        return [self.to_tensor(x, kind) for x, kind in zip(blocks, kinds, strict=True)]

    def scanned(self: Any, input: tuple[Any, ...]) -> list[Any]:
        kinds, blocks = [x.dtype for x in input], [x.handle.data for x in input]
        count, step = blocks[0].shape[self.axis], 1
        while step < count:
            is_behind = np.arange(count) >= step
            shape = [count if axis == self.axis else 1 for axis in range(blocks[0].ndim)]
            is_behind = is_behind.reshape(shape)
            before = [np.where(is_behind, np.roll(x, step, self.axis), 0) for x in blocks]
            after = combined(self, before, blocks, kinds)
            blocks = [np.where(is_behind, new, x) for new, x in zip(after, blocks, strict=True)]
            step *= 2
        return [self.to_tensor(x, kind) for x, kind in zip(blocks, kinds, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduced
    interpreter.ScanOps.generic_scan = scanned


def variant_of(call: KernelCall) -> tuple[Any, ...]:
    """The key of a compiled variant in Triton: constants, types, and facts about other arguments.

    The facts are whether integers are 1 or multiples of 16, and whether pointers are aligned to 16,
    unless the kernel forbids a variant for it.
    """
    kernel: Any = call.kernel
    constants = {
        name
        for name, parameter in inspect.signature(kernel.fn).parameters.items()
        if "constexpr" in str(parameter.annotation)
    }
    asked = getattr(kernel, "kwargs", {})
    free = {*(asked.get("do_not_specialize") or ())}
    anywhere = free | {*(asked.get("do_not_specialize_on_alignment") or ())}
    found: list[Any] = [kernel.fn.__name__, *call.options.items()]
    for name, value in call.arguments.items():
        if name in constants or value is None:
            found.append((name, str(value)))
        elif isinstance(value, torch.Tensor):
            found.append((name, value.dtype, name in anywhere or value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and not isinstance(value, bool):
            fits = -(2**31) <= value < 2**31
            found.append((name, fits, name in free or (value == 1, value % 16 == 0)))
    return tuple(found)
