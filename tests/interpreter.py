"""Triton's interpreter without what it does over and over; what kernels compute stays the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def make_quick() -> None:
    """For all launches of this process, before the first one."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    # It looks for overflows in every sum, which compiled kernels do in debug builds only.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    _patch_once_per_launch(interpreter)
    _look_up_types_once(interpreter)


def _patch_once_per_launch(interpreter: Any) -> None:
    """For a launch, Triton replaces the functions of its language and puts them back at the end; in
    between, it looks for some to replace at every call of a device function, and finds none.
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

    def patch_new(function: Callable[..., Any]) -> Any:
        seen = {id(x) for x in function.__globals__.values() if x is language or x is language.core}
        if seen and seen <= patched:
            return scope()
        changes = patch(function)
        patched.update(seen)
        return changes

    interpreter._LangPatchScope = Scope
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_new


def _look_up_types_once(interpreter: Any) -> None:
    """Triton makes the whole table of them for every question."""
    of_scalar = functools.cache(interpreter._get_np_dtype)
    language = interpreter.tl

    def of(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        # Those of pointers are no keys; their addresses are numbers.
        return of_scalar(language.uint64 if element.is_ptr() else element)

    interpreter._get_np_dtype = of
