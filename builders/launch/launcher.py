"""Launchers: they make launches of one kernel, and spare the host Triton's work at each of them.

At each launch Triton binds all arguments, specialises the kernel on them, makes a key of both,
looks up the compiled kernel, encodes every tensor descriptor and asks the driver about every
pointer. That takes tens of microseconds on the host. A :class:`Launcher` keeps the compiled kernel
that a launch through Triton returned. Later it puts other addresses and numbers into that launch's
arguments, and calls the C function at the bottom of Triton's launcher
(:mod:`builders.launch.compiled`). This is a *relaunch*.

Launches still go through Triton

- where Triton would compile another kernel;
- where hooks, profilers or ``TRITON_DEBUG`` watch launches;
- on another device than the kernel was compiled on, and on AMD;
- under the interpreter;
- with a version of Triton that :mod:`builders.launch.compiled` does not know;
- with ``ATTN_RELAUNCH=0``.

Capturing a CUDA graph needs no special care, since a captured launch copies its parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from builders.launch.call import KernelCall, LaunchOptions, collected
from builders.launch.compiled import CompiledLaunch, UnknownError, is_known_triton

MOST_SPECIALISED = 8
"""Most compiled kernels that a launcher keeps; launches that need others go through Triton."""
MOST_LAUNCHERS = 1024
"""Most launchers that :func:`launcher_of` and :func:`launch` keep, each."""
_KNOBS = ("launch_enter_hook", "launch_exit_hook", "debug", "add_stages_inspection_hook")
"""Knobs of Triton's runtime that make launches visible to others, or change how Triton compiles."""
_DEFAULT_OPTIONS = LaunchOptions()
_BY_VALUE = (float, bool, type(None), str)
"""Types of arguments whose value is a part of the variant key in :func:`launch`, as constexprs'
values are."""


def keeps_compiled() -> bool:
    """Whether launchers keep compiled kernels to relaunch them: unless ``ATTN_RELAUNCH=0``."""
    return os.environ.get("ATTN_RELAUNCH") != "0"


class Launcher:
    """A kernel and the arguments that its launches share; each launch is given the others."""

    def __init__(
        self,
        kernel: Any,
        fixed: Mapping[str, Any],
        varying: Sequence[str] | None = None,
        *,
        groups: Mapping[str, tuple[str, ...]] | None = None,
        options: LaunchOptions = _DEFAULT_OPTIONS,
        is_typed: bool = False,
    ) -> None:
        """
        Args:
            kernel: the ``triton.jit`` or ``gluon.jit`` function.
            fixed: arguments that every launch shares, by name; no tensors, since a launcher keeps
                no address.
            varying: names of the arguments that each launch is given, in the order in which it is
                given their values; None for all that are not fixed, in the kernel's order.
            groups: names in ``varying`` that stand for several consecutive arguments of the kernel.
                A launch is given one :class:`~builders.launch.pointers.Pointers` for them.
            options: how the kernel is compiled and launched.
            is_typed: all launches are given values of the same types, and tensors of the same
                dtypes, on the GPU. A launcher checks that at every launch otherwise; an owner that
                has a launcher for each combination need not.

        Raises:
            TypeError: ``fixed`` and ``varying`` do not add up to the kernel's arguments, or a
                tensor is fixed.
        """
        self._groups = groups or {}
        given = [name for name in kernel.arg_names if name not in fixed]
        wanted = [*given] if varying is None else [*varying]
        named = {*fixed, *(one for name in wanted for one in self._groups.get(name, (name,)))}
        arguments = set(kernel.arg_names)
        if named != arguments:
            raise TypeError(
                f"fixed and varying must name the kernel's arguments; missing "
                f"{sorted(arguments - named)}, unknown {sorted(named - arguments)}"
            )
        for name, value in fixed.items():
            if isinstance(value, torch.Tensor):
                raise TypeError(f"{name} must vary, for it is a tensor")
        self.kernel = kernel
        self.arguments: dict[str, Any] = {name: fixed.get(name) for name in kernel.arg_names}
        """Every argument in the kernel's order; None for arguments that vary."""
        self.varying = tuple(wanted)
        """Names of the arguments that vary, in the order in which launches are given values."""
        self._is_typed = is_typed
        self._options = {
            field.name: getattr(options, field.name) for field in fields(LaunchOptions)
        }
        self._pick = _picker(self.varying)
        self._compiled: list[CompiledLaunch] = []
        has_knobs = all(hasattr(knobs.runtime, name) for name in _KNOBS)
        self._learns = (
            keeps_compiled() and isinstance(kernel, JITFunction) and has_knobs and is_known_triton()
        )

    def bind(self, grid: tuple[int, ...], varying: Mapping[str, Any]) -> Launch:
        """Prepare one launch without making it.

        Args:
            grid: programs in up to three dimensions.
            varying: a value for each argument that varies, by name; other names are ignored.
        """
        return Launch(self, grid, self._pick(varying))

    def __call__(self, grid: tuple[int, ...], *values: Any) -> None:
        """Enqueue a launch on the current stream; with an empty grid, do nothing.

        Args:
            grid: programs in up to three dimensions.
            *values: values of the arguments that vary, in the order of :attr:`varying`.
        """
        if 0 in grid:
            return
        calls = collected.get()
        if calls is not None:
            calls.append(self.call(grid, values))
            return
        if self._compiled and not self.kernel.pre_run_hooks and not is_watched():
            for compiled in self._compiled:
                if compiled.launch(grid, values):
                    return
        call = self.call(grid, values)
        self._learn(call.launch_through_triton(), values, call.arguments)

    def call(self, grid: tuple[int, ...], values: Sequence[Any]) -> KernelCall:
        """A launch as data, with every argument by name.

        Args:
            grid: programs in up to three dimensions.
            values: values of the arguments that vary, in the order of :attr:`varying`.
        """
        varying: dict[str, Any] = {}
        for name, value in zip(self.varying, values, strict=True):
            members = self._groups.get(name)
            if members is None:
                varying[name] = value
            else:
                varying |= zip(members, value.tensors, strict=True)
        return KernelCall(self.kernel, grid, self.arguments | varying, **self._options)

    def _learn(self, compiled: object, values: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        """Keep the compiled kernel that a launch through Triton returned, if it can be relaunched.

        Args:
            compiled: the result of the launch through Triton.
            values: values of the arguments that vary, in the order of :attr:`varying`.
            arguments: every argument of that launch, by name.
        """
        if not self._learns or not isinstance(compiled, CompiledKernel) or is_watched():
            return
        varying = dict(zip(self.varying, values, strict=True))
        try:
            kept = CompiledLaunch(
                *(self.kernel, varying, self._groups, compiled, arguments), is_typed=self._is_typed
            )
            self._compiled.append(kept)
        except (LookupError, AttributeError, StopIteration, TypeError, ValueError, UnknownError):
            # Triton's launcher is unknown now, and will be at the next launch too.
            self._learns = False
        if len(self._compiled) == MOST_SPECIALISED:
            self._learns = False


class Launch:
    """One launch of a :class:`Launcher` that is prepared and not made yet.

    Every forward makes a new one, so it holds little more than a grid and values.
    """

    __slots__ = ("_grid", "_values", "launcher")

    def __init__(self, launcher: Launcher, grid: tuple[int, ...], values: tuple[Any, ...]) -> None:
        """
        Args:
            launcher: the launcher of the kernel.
            grid: programs in up to three dimensions.
            values: values of the arguments that vary, in the launcher's order.
        """
        self.launcher = launcher
        self._grid = grid
        self._values = values

    def launch(self) -> None:
        """Enqueue the launch on the current stream."""
        self.launcher(self._grid, *self._values)

    @property
    def call(self) -> KernelCall:
        """The launch as data."""
        return self.launcher.call(self._grid, self._values)


@lru_cache(maxsize=MOST_LAUNCHERS)
def launcher_of(kernel: Any, **fixed: Any) -> Launcher:
    """The launcher of a kernel with these fixed arguments; the same object at every call.

    It keeps the latest ``MOST_LAUNCHERS`` launchers.
    """
    return Launcher(kernel, fixed)


_launchers: dict[tuple[Any, ...], Launcher] = {}
"""Launchers that :func:`launch` keeps, by variant key."""


def launch(call: KernelCall) -> None:
    """Enqueue a launch that comes without a launcher: the launcher of its variant key makes it.

    Launches with the same kernel, options, constexprs, floats, booleans, strings and Nones share a
    launcher. Tensors, descriptors and integers that are no constexprs vary between them.

    Args:
        call: the launch; with an empty grid nothing is done.
    """
    if 0 in call.grid:
        return
    calls = collected.get()
    if calls is not None:
        calls.append(call)
        return
    kernel = call.kernel
    if not isinstance(kernel, JITFunction):
        call.launch_through_triton()
        return
    arguments = call.arguments
    # A kernel's own hash reads its source and all that this calls. Its launcher keeps it alive, so
    # that no other kernel has its number.
    key: list[Any] = [id(kernel), *call.options.items()]
    values = []
    for param in kernel.params:
        value = arguments[param.name]
        if param.is_constexpr or isinstance(value, _BY_VALUE):
            # The type is a part of the key, since 1, 1.0 and True are equal but compiled apart.
            key.append((type(value), value))
        else:
            key.append(None)
            values.append(value)
    launcher = _launchers.get((*key,))
    if launcher is None:
        if len(_launchers) >= MOST_LAUNCHERS:
            _launchers.clear()
        fixed = {
            param.name: arguments[param.name]
            for param, entry in zip(kernel.params, key[1 + len(call.options) :], strict=True)
            if entry is not None
        }
        # A call is the options of its launch, too.
        launcher = _launchers[(*key,)] = Launcher(kernel, fixed, options=call)
    launcher(call.grid, *values)


def is_watched() -> bool:
    """Whether a knob of Triton's runtime is set, so that launches must go through Triton."""
    runtime: Any = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    is_changed = runtime.debug or runtime.add_stages_inspection_hook
    try:
        # Hooks are chains, which are empty as a rule.
        return bool(enter.calls or leave.calls or is_changed)
    except AttributeError:
        # A hook may also be a single function, or None.
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or is_changed)


def _picker(keys: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that takes the values of ``keys`` out of a mapping, as a tuple."""
    if not keys:
        return lambda values: ()
    if len(keys) == 1:
        (key,) = keys
        return lambda values: (values[key],)
    return itemgetter(*keys)
