"""Registers our attention in Transformers."""

from __future__ import annotations

import importlib.util

from attn.errors import MissingDependencyError, UnsupportedError
from attn.registry import AttentionBackendEnum


def register_implementation(backend: str | None) -> None:
    """See :func:`attn.integrations.transformers.register`."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependencyError("transformers", "attn_implementation 'attn'")
    if backend is not None:
        backend = _dense(backend)
    from attn.integrations.transformers import attention, compat
    from attn.integrations.transformers.masks import padding_mask

    compat.check_version()
    attention.choose(backend)
    compat.register_functions(attention.attend, padding_mask)
    compat.serve_continuous_batching()


def _dense(name: str) -> str:
    """The registered name of a dense backend.

    Raises:
        ValueError: the backend is unknown.
        UnsupportedError: it serves no dense layers.
    """
    member = AttentionBackendEnum[name]
    if member.get_class().is_mla():
        raise UnsupportedError(
            f"backend {member.name} cannot serve Transformers", ["it serves latent layers only"]
        )
    return member.name
