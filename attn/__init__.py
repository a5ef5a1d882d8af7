"""Attention backends for LLM serving: pick one, lay out its KV cache, build metadata, run it."""

from attn.errors import MissingDependencyError, UnknownBackendError, UnsupportedError
from attn.registry import AttentionBackendEnum, register_backend
from attn.selector import SelectionReport, explain, get_attn_backend, select

__version__ = "0.1.0"

__all__ = [
    "AttentionBackendEnum",
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
