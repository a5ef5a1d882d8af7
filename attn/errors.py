"""Errors that callers can tell apart."""

from __future__ import annotations

from collections.abc import Sequence


class UnsupportedError(ValueError):
    """No backend, or not the one asked for, can serve a configuration; ``reasons`` says why."""

    def __init__(self, message: str, reasons: Sequence[str]) -> None:
        self.reasons: list[str] = list(reasons)
        super().__init__("\n".join([message, *(f"  - {reason}" for reason in self.reasons)]))


class MissingDependencyError(ImportError):
    """An optional package is needed; the message names it and the extra that installs it."""

    def __init__(self, package: str, needed_for: str, extra: str | None = None) -> None:
        remedy = f"pip install {package}"
        if extra is not None:
            remedy = f"pip install 'attn-backends[{extra}]'"
        super().__init__(f"{needed_for} needs {package}, which is not installed: {remedy}")
        self.package = package
        self.extra = extra
