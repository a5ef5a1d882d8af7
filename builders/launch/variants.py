"""What is prepared once for all launches that differ in nothing but addresses and lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

Entry = TypeVar("Entry")


class Variants(Generic[Entry]):
    """Entries by a key that holds all that they depend on; the latest is found without a hash.

    Most launches are like the one before them. Comparing two keys costs less than hashing one,
    since their parts are the same objects.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Entry] = {}
        self._latest: tuple[tuple[Any, ...] | None, Entry | None] = (None, None)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, key: tuple[Any, ...], make: Callable[[], Entry]) -> Entry:
        """The entry of a key.

        Args:
            key: all that the entry depends on.
            make: makes the entry of a key that is new. What it raises is raised here.
        """
        # One piece, for several threads.
        latest, entry = self._latest
        if key != latest:
            if key not in self._known:
                self._known[key] = make()
            entry = self._known[key]
            self._latest = (key, entry)
        return cast("Entry", entry)
