"""Stand-ins for packages that SGLang imports and the tests do not need.

The published torchvision is a CUDA build, which does not go together with a torch for CPUs.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

NAMES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class Kind(type):
    """The type of classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Nothing(metaclass=Kind):
    """An object whose attributes and results are such objects too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Nothing:
        return Nothing()


class StandIn(types.ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kind(name, (Nothing,), {}) if name[0].isupper() else Nothing()


def put_in_place() -> None:
    """Let torchvision be importable, and FlashInfer, which looks for a GPU, be missing."""
    sys.modules["flashinfer"] = None  # type: ignore[assignment]
    for name in NAMES:
        module = StandIn(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__version__ = "0.28.0"
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
