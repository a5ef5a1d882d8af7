"""A cache of objects that launches prepare once per compiled variant, found by the variant key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class Variants(Generic[Entry]):
    """Entries by variant key; the latest entry is found without computing a hash.

    Most launches have the key of the launch before them. To compare these two keys costs less than
    to hash one, since their parts are the same objects.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Entry] = {}
        self._latest: tuple[tuple[Any, ...] | None, Any] = (None, None)

    def __len__(self) -> int:
        return len(self._known)

    def of(self, key: tuple[Any, ...], make: Callable[..., Entry], *arguments: Any) -> Entry:
        """The entry of a key, which is made if the key is new.

        Args:
            key: everything that the entry depends on.
            make: makes the entry; its exceptions are passed on.
            *arguments: what ``make`` is called with. To pass them on costs less than to make a
                function that holds them.
        """
        # Key and entry are read as one tuple, since another thread may replace both meanwhile.
        latest, entry = self._latest
        if key != latest:
            if key not in self._known:
                self._known[key] = make(*arguments)
            entry = self._known[key]
            self._latest = (key, entry)
        found: Entry = entry
        return found
