"""Our attention in Transformers: :func:`register`, then ``attn_implementation="attn"``.

Importing this package imports neither Transformers nor torch.
"""

from __future__ import annotations

from attn.integrations.transformers.names import NAME


def register(backend: str | None = None) -> None:
    """Make ``attn_implementation="attn"`` known to the installed Transformers.

    After this call the name serves ``generate``, and continuous batching (``generate_batch``,
    ``init_continuous_batching``), which runs our kernels over its own paged cache. Calling it again
    changes the backend.

    Args:
        backend: name of a dense backend; None is TRITON_ATTN on a GPU and TORCH_REF elsewhere.

    Raises:
        MissingDependencyError: Transformers is not installed.
        ValueError: the backend is unknown or serves no dense layers, or this version of
            Transformers is not served.
    """
    from attn.integrations.transformers.plugin import register_implementation

    register_implementation(backend)


__all__ = ["NAME", "register"]
