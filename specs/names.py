"""Names that a user types: looked up in upper or lower case, and suggested where misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib.resources import files


def find_name(name: object, known: Iterable[str]) -> str | None:
    """The known name that ``name`` spells, in upper or lower case; None when there is none."""
    names = list(known)
    if name in names:
        return str(name)
    folded = str(name).casefold()
    return next((one for one in names if one.casefold() == folded), None)


def near_miss(name: object, known: Iterable[str]) -> str:
    """Part of an error message: the known name most like ``name``, empty where none is like it."""
    by_folded = {one.casefold(): str(one) for one in known}
    near = difflib.get_close_matches(str(name).casefold(), by_folded, n=1)
    return f" (did you mean {by_folded[near[0]]!r}?)" if near else ""


def bundled_model_names() -> tuple[str, ...]:
    """Names that :func:`specs.hf_config.load_model_geometry` knows without a file, sorted."""
    entries = (files("specs") / "models").iterdir()
    return tuple(sorted(e.name.removesuffix(".json") for e in entries if e.name.endswith(".json")))
