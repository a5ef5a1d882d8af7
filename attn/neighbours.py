"""``builders`` and ``specs`` are top-level packages of this library too: are they found?."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec
from typing import Final

NEIGHBOURS: Final = ("builders", "specs")
"""Top-level packages that are installed beside ``attn``."""


def check_neighbours() -> None:
    """Check that ``builders`` and ``specs`` are those beside ``attn``.

    Nothing is imported. Both names are common, so a project may have a folder or a file that
    Python finds first.

    Raises:
        ImportError: another module has the name; the message names its file. Or there is none.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in NEIGHBOURS:
        spec = importlib.util.find_spec(name)
        own = os.path.join(home, name, "__init__.py")
        found = None if spec is None else _place(spec)
        if found is None:
            raise ImportError(f"attn needs its package {name!r} at {own}, which is not there")
        if found != own and os.path.realpath(found) != os.path.realpath(own):
            raise ImportError(
                f"attn needs its package {name!r} at {own}, but Python finds {found} first: "
                "rename that, or start where its folder is not on sys.path"
            )


def _place(spec: ModuleSpec) -> str | None:
    """The file of a module, or the folder of a package without an ``__init__`` file."""
    if spec.origin is not None:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), None)
