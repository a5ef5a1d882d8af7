"""The library's error classes, and error messages for a command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_PACKAGES: Final = {"flashinfer": "flashinfer-python"}
"""Name of the package that installs a module, where it differs from the module's name."""


class UnsupportedError(ValueError):
    """A named backend, or every backend, cannot serve a configuration; ``reasons`` says why."""

    def __init__(self, message: str, reasons: Sequence[str]) -> None:
        self.reasons: list[str] = list(reasons)
        super().__init__("\n".join([message, *(f"  - {reason}" for reason in self.reasons)]))


class UnknownBackendError(KeyError, ValueError):
    """No backend has the name that was given; the message lists the registered names."""

    def __str__(self) -> str:
        return str(self.args[0])


class BackendPackageError(ValueError):
    """Another package offers a backend that cannot be used; one line names package and problem."""


class MissingDependencyError(ImportError):
    """An optional module is missing; the message names it and the package that installs it."""

    def __init__(self, module: str, needed_for: str, extra: str | None = None) -> None:
        """
        Args:
            module: top-level module that cannot be found.
            needed_for: the feature that needs the module.
            extra: the extra of this library that installs the module; None where none does.
        """
        remedy = _remedy(module) if extra is None else f"pip install 'attn-backends[{extra}]'"
        super().__init__(f"{needed_for} needs {module}, which is not installed: {remedy}")
        self.module = module
        self.package = _package_of(module)
        self.extra = extra


def one_line(error: BaseException) -> str:
    """The message of an error on one line; several problems or reasons follow one another."""
    lines = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
    if lines and lines[0].endswith(":"):
        return f"{lines[0]} {'; '.join(lines[1:])}"
    return "; ".join(lines)


def missing_reason(module: str) -> str:
    """The reason against a backend that needs a module which cannot be found."""
    return f"{module} is not installed: {_remedy(module)}"


def _package_of(module: str) -> str:
    return _PACKAGES.get(module, module)


def _remedy(module: str) -> str:
    return f"pip install {_package_of(module)}"
