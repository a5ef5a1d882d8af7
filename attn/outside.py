"""Backends that other packages offer: the entry points of the group ``attn.backends``.

Nothing here runs when ``attn`` is imported. The registry asks for the offers when it is asked for a
name that it does not know, or for all names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attn.errors import BackendPackageError, one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "attn.backends"
"""The entry-point group. The name of an entry is the name of the backend; its value leads to the
backend's ``BackendRow``."""


@dataclass(frozen=True)
class Offer:
    """One backend that an installed package offers."""

    name: str
    """Name of the entry point, which the backend must have too."""
    package: str
    """The package and its version, in words."""
    entry: EntryPoint

    def load(self) -> object:
        """Import what the entry point leads to.

        Raises:
            BackendPackageError: the import fails, whatever the package raised.
        """
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:
            raise self.error(f"cannot be imported: {_told(error)}") from error

    def error(self, problem: str) -> BackendPackageError:
        """An error that names package, backend and problem, on one line."""
        return BackendPackageError(f"{self.package}, backend {self.name}: {problem}")


def offers(group: str) -> list[Offer]:
    """What installed packages offer in an entry-point group, by name and package."""
    from importlib.metadata import entry_points

    found = [Offer(entry.name, _package(entry), entry) for entry in entry_points(group=group)]
    return sorted(found, key=lambda offer: (offer.name, offer.package))


def _package(entry: EntryPoint) -> str:
    dist = entry.dist
    return "package ?" if dist is None else f"package {dist.name} {dist.version}"


def _told(error: BaseException) -> str:
    """An error's message, with the class of the error where that says more than "import"."""
    text = one_line(error)
    if isinstance(error, ImportError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
