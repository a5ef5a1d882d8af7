"""Kernels of vLLM's layers, compiled while vLLM loads the model, into a cache that stays.

vLLM makes builders, which warm up our kernels, after it has loaded weights and compiled the model.
A process that starts with the first layer has compiled our kernels by then. The engine waits for it
before the first warm-up, and compiles what is still missing.

When vLLM 0.26 compiles a model, it moves Triton's cache into a folder of that model and these
settings, and 0.33 does so unless ``TRITON_CACHE_DIR`` is set. Our kernels stay in the folder that
was Triton's before, for every engine, and for ``attn warm``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Final

from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.platforms import current_platform

from attn.ahead.layers import LayerAhead
from attn.ahead.process import AheadProcess, Order
from attn.integrations.vllm import choice, compat, settings, translate
from specs.attention import AttentionType
from specs.devices import ComputeCapability, Device
from specs.dtypes import CacheDType, DType
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from specs.model import IndexerGeometry, LayerGeometry, LayerKind, MLAGeometry

logger = init_logger("vllm.attn_backends")

MOST_SECONDS: Final = 120.0
"""How long the engine waits for the process at most."""
MOST_JOBS: Final = 8
"""Most threads of the process."""
_VARIABLE: Final = "TRITON_CACHE_DIR"

_processes: list[AheadProcess] = []
"""The process of this engine, from its first layer to its first warm-up."""


def offer(impl: Any) -> None:
    """Have the kernels of a layer compiled ahead, if they can be; a failure is only logged.

    Args:
        impl: a layer's impl, whose constructor vLLM has called.
    """
    config = get_current_vllm_config_or_none()
    if config is None or not settings.compiles_ahead() or not current_platform.is_cuda():
        return
    try:
        if compat.local_rank() != 0:
            # Ranks of one machine have the same kernels.
            return
        orders = [
            Order(ahead=one, device=_device(), jobs=_jobs()) for one in ahead_of(impl, config)
        ]
        if orders and not _processes:
            _processes.append(AheadProcess(settings.environment_at_start()))
        for order in orders:
            _processes[0].compile(order)
    except Exception as error:
        logger.debug("attn-backends: a layer's kernels are not compiled ahead: %s", error)


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """Warm up with the kernels that were compiled ahead, and keep the others beside them."""
    while _processes:
        begin = time.monotonic()
        found = _processes.pop().finish(MOST_SECONDS)
        waited = time.monotonic() - begin
        if found is None:
            logger.warning("attn-backends: no kernels were compiled ahead, waited %.1f s", waited)
        else:
            logger.info(
                "attn-backends: %d kernels compiled while the model was loaded, %d were in "
                "Triton's cache, in %.1f s; waited %.1f s",
                *(found.compiled, found.cached, found.seconds, waited),
            )
            for problem in found.problems:
                logger.debug("attn-backends: not compiled ahead: %s", problem)
    kept, first = os.environ.get(_VARIABLE), settings.environment_at_start().get(_VARIABLE)
    _set_folder(first)
    try:
        yield
    finally:
        _set_folder(kept)


def _set_folder(folder: str | None) -> None:
    if folder is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = folder


def ahead_of(impl: Any, vllm_config: Any) -> list[LayerAhead]:
    """What :mod:`attn.ahead.layers` has to know of a layer; empty where it serves no such layer.

    Args:
        impl: an impl of ours.
        vllm_config: vLLM's configuration.
    """
    served = _BACKENDS.get(impl.ours.__name__)
    is_decoder = getattr(impl, "attn_type", AttentionType.DECODER) == AttentionType.DECODER
    # Tables of ranks, and latent layers behind a window, are rare and left to the engine.
    is_rare = impl.dcp_world_size > 1 or (
        served != "TRITON_ATTN" and impl.sliding_window is not None
    )
    if served is None or not is_decoder or is_rare:
        return []
    backend = impl.backend
    layer = _dense_layer(impl) if served == "TRITON_ATTN" else _latent_layer(impl)
    dtype = DType.parse(vllm_config.model_config.dtype)
    given = vllm_config.cache_config
    # vLLM asks the backend when the model is loaded.
    size = given.block_size
    if not given.user_specified_block_size:
        size = backend.get_preferred_block_size(type(given).DEFAULT_BLOCK_SIZE)
    spec = _spec_of(impl, layer, dtype, int(size))
    engine = translate.engine_config(vllm_config, None, impl.num_heads)
    features = compat.features_of(vllm_config, None)
    made = LayerAhead(
        backend=served,
        layer=layer,
        dtype=dtype,
        spec=spec,
        engine=engine,
        non_causal=features.non_causal,
        mm_ranges=features.mm_ranges,
        shared_prefix=features.shared_prefix,
        output_quant=features.output_quant,
    )
    if served != "SPARSE_MLA":
        return [made]
    # Which way short prompts go is known when all layers are made.
    ways = (False, True) if impl.expands else (False,)
    return [made.replace(engine=engine.replace(dense_short_prompts=is_dense)) for is_dense in ways]


_BACKENDS: Final = {
    "TritonAttentionImpl": "TRITON_ATTN",
    "TritonMLAImpl": "TRITON_MLA",
    "SparseMLAImpl": "SPARSE_MLA",
}
"""Backends whose launches :mod:`attn.ahead.layers` makes, by the name of the impl."""


def _dense_layer(impl: Any) -> LayerGeometry:
    rules = impl.rules
    kind = LayerKind.FULL
    if rules.attention_chunk_size is not None:
        kind = LayerKind.CHUNKED_LOCAL
    elif rules.sliding_window is not None:
        kind = LayerKind.SLIDING_WINDOW
    return LayerGeometry(
        kind=kind,
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_size=impl.head_size,
        head_size_v=impl.head_size_v,
        scale=impl.scale,
        sliding_window=rules.sliding_window if kind is LayerKind.SLIDING_WINDOW else None,
        attention_chunk_size=rules.attention_chunk_size,
        logits_soft_cap=rules.logits_soft_cap,
        has_sinks=rules.sinks is not None,
        use_alibi=rules.alibi_slopes is not None,
    )


def _latent_layer(impl: Any) -> LayerGeometry:
    indexer: Any = getattr(impl, "indexer", None)
    lists = None
    sizes = MLAGeometry(
        q_lora_rank=None,
        kv_lora_rank=impl.kv_lora_rank,
        qk_nope_head_dim=impl.qk_nope_head_dim,
        qk_rope_head_dim=impl.qk_rope_head_dim,
        v_head_dim=impl.v_head_dim,
    )
    if impl.is_sparse:
        lists = impl.topk_indices_buffer.shape[1]
    own = None
    if hasattr(indexer, "indexer_op"):
        own = IndexerGeometry(
            index_topk=indexer.indexer_op.topk_tokens,
            index_n_heads=indexer.n_head,
            index_head_dim=indexer.indexer_op.head_dim,
        )
    return LayerGeometry(
        kind=LayerKind.SPARSE_MLA if impl.is_sparse else LayerKind.MLA,
        num_heads=impl.num_heads,
        num_kv_heads=1,
        head_size=sizes.qk_head_dim,
        head_size_v=sizes.v_head_dim,
        scale=impl.scale,
        mla=sizes,
        indexer=own,
        shared_index_topk=None if own is not None else lists,
    )


def _spec_of(impl: Any, layer: LayerGeometry, dtype: DType, block_size: int) -> AnyKVCacheSpec:
    """The spec that the layer's builder will plan with."""
    common: dict[str, Any] = {
        "block_size": block_size,
        "dtype": dtype,
        "cache_dtype": CacheDType.parse(impl.kv_cache_dtype),
    }
    if layer.mla is not None:
        rank, rope = layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim
        return MLAAttentionSpec(**common, kv_lora_rank=rank, qk_rope_head_dim=rope)
    common |= {
        "num_kv_heads": layer.num_kv_heads,
        "head_size": layer.head_size,
        "head_size_v": layer.head_size_v,
    }
    rules = impl.rules
    if layer.kind is LayerKind.CHUNKED_LOCAL:
        chunks = rules.attention_chunk_size, rules.chunk_lookback
        names = "attention_chunk_size", "chunk_lookback"
        return ChunkedLocalAttentionSpec(**common, **dict(zip(names, chunks, strict=True)))
    if layer.kind is LayerKind.SLIDING_WINDOW:
        return SlidingWindowSpec(**common, sliding_window=rules.sliding_window)
    return FullAttentionSpec(**common)


def _device() -> Device:
    """The GPU that vLLM runs on."""
    import torch

    found = current_platform.get_device_capability()
    capability = ComputeCapability(major=found.major, minor=found.minor)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Device(
        name=properties.name,
        kind=choice.device_of(found),
        compute_capability=capability,
        num_multiprocessors=properties.multi_processor_count,
    )


def _jobs() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(MOST_JOBS, cores))
