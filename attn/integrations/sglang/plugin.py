"""Entry point of ``sglang.srt.plugins``: makes ``--attention-backend attn`` known to SGLang."""

from __future__ import annotations

import logging
from typing import Any, Final

NAME: Final = "attn"
"""Our name in SGLang's registry and on its command line."""

logger = logging.getLogger("sglang.srt.attn_backends")


def register() -> None:
    """Register :data:`NAME`; SGLang calls it in every process, once or more often.

    The function imports no kernel and touches no device. In a version of SGLang that the plugin
    does not serve it registers nothing, and the log says so.
    """
    from attn.integrations.sglang import compat

    version = compat.version()
    if not compat.is_served(version):
        first, last = (".".join(map(str, bound)) for bound in (compat.FIRST, compat.LAST))
        logger.warning(
            "attn-backends: serves SGLang %s to %s, this is %s; nothing is registered",
            *(first, last, version),
        )
        return
    if not compat.add_choice(NAME):
        return
    compat.register_factory(NAME, make_backend)
    compat.serve_latent_models(NAME)
    compat.serve_sparse_models(sparse_class, start)
    compat.adjust_arguments(NAME)
    compat.serve_drafts(NAME, make_draft, make_backend)
    logger.info(
        "attn-backends: --attention-backend %s is there, for dense, MLA and DSA models", NAME
    )


def make_backend(runner: Any) -> Any:
    """The backend of a model, warmed up; SGLang calls it once for each of its runners.

    Args:
        runner: SGLang's ``ModelRunner``.

    Raises:
        ValueError: the engine or the model asks for something that is not served; the message has
            every reason, and what to set.
    """
    from attn.integrations.sglang.dense import DenseBackend

    if runner.use_mla_backend:
        from attn.integrations.sglang.latent import LatentBackend

        return start(LatentBackend(runner))
    return start(DenseBackend(runner))


def start(backend: Any) -> Any:
    """A new backend, warmed up on a GPU."""
    from attn.integrations.sglang.backend import started

    return started(backend)


def sparse_class() -> Any:
    """The class of the backend of sparse latent layers."""
    from attn.integrations.sglang.sparse import SparseBackend

    return SparseBackend


def make_draft(runner: Any, topk: int, num_steps: int) -> Any:
    """The backends of a draft model's decode steps; arguments are SGLang's."""
    from attn.integrations.sglang.drafts import DraftBackends

    return DraftBackends(runner, topk, num_steps)
