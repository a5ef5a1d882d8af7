"""A runner of vLLM's sparse layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def runner_of(
    cuda: Callable[..., None], make_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Makes a runner of a layer on a pretended H100."""
    from vllm.model_executor.layers.attention import mla_attention

    from tests.vllm.sparse.sparse_runner import BLOCK_SIZE, NARROW, TOPK, Sizes, SparseRunner
    from tests.vllm.test_latent import NoPrefill

    cuda()
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: NoPrefill)

    def make(
        sizes: Sizes = NARROW,
        *,
        is_shared: bool = False,
        topk: int = TOPK,
        prepare: Callable[[Any], None] = lambda config: None,
        **settings: Any,
    ) -> SparseRunner:
        config = make_config(**{"block_size": BLOCK_SIZE, "dtype": "bfloat16", **settings})
        prepare(config)
        return SparseRunner(config, sizes, is_shared=is_shared, topk=topk)

    return make
