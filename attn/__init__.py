"""Attention backends for LLM serving: pick one, lay out its KV cache, build metadata, run it."""

from attn.neighbours import check_neighbours

check_neighbours()

# The modules below import builders and specs.
from attn.errors import (  # noqa: E402
    BackendPackageError,
    MissingDependencyError,
    UnknownBackendError,
    UnsupportedError,
)
from attn.registry import AttentionBackendEnum, BackendRow, register_backend  # noqa: E402
from attn.selector import SelectionReport, explain, get_attn_backend, select  # noqa: E402

__version__ = "0.1.0"
"""The version of the library; ``pyproject.toml`` reads it from here."""

__all__ = [
    "AttentionBackendEnum",
    "BackendPackageError",
    "BackendRow",
    "MissingDependencyError",
    "SelectionReport",
    "UnknownBackendError",
    "UnsupportedError",
    "__version__",
    "explain",
    "get_attn_backend",
    "register_backend",
    "select",
]
