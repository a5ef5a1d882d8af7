"""Masks that the builder of a dense group refuses, in an engine's settings and in each batch."""

from __future__ import annotations

from builders.batch import CommonAttentionMetadata
from specs.engine import EngineConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
)


def refuse_dcp(config: EngineConfig, backend: str) -> None:
    """Refuse decode context parallelism (DCP).

    Raises:
        ValueError: the engine uses DCP.
    """
    size = config.parallel.decode_context_parallel_size
    if size > 1:
        raise ValueError(f"decode_context_parallel_size must be 1 for {backend}, got {size}")


def check_dcp(spec: AnyKVCacheSpec, config: EngineConfig) -> None:
    """Under DCP, refuse a group whose keys cannot be divided over ranks.

    Encoders cache no keys and are not refused. With ``dcp_sharded=False`` every rank has all keys,
    so that R-SWA is not refused either.

    Raises:
        ValueError: the spec is not of full attention, or the engine has R-SWA.
    """
    size = config.parallel.decode_context_parallel_size
    if size == 1 or isinstance(spec, EncoderOnlyAttentionSpec):
        return
    if not isinstance(spec, FullAttentionSpec):
        raise ValueError(
            f"kv_cache_spec must be FullAttentionSpec with decode_context_parallel_size {size}, "
            f"got {type(spec).__name__}: the builder of a group that every rank keeps whole has "
            "decode_context_parallel_size 1"
        )
    if config.rswa_window is not None and spec.dcp_sharded:
        raise ValueError(
            f"decode_context_parallel_size ({size}) does not go together with rswa_window "
            f"({config.rswa_window})"
        )


def check_rswa(spec: AnyKVCacheSpec, config: EngineConfig) -> None:
    """Refuse R-SWA together with chunks.

    Raises:
        ValueError: the group has chunked layers and the engine an ``rswa_window``.
    """
    if config.rswa_window is not None and isinstance(spec, ChunkedLocalAttentionSpec):
        raise ValueError(
            f"rswa_window ({config.rswa_window}) does not go together with attention_chunk_size "
            f"({spec.attention_chunk_size})"
        )


def check_batch_masks(batch: CommonAttentionMetadata, config: EngineConfig, ranks: int) -> None:
    """Refuse masks of a batch that do not go together with the group's settings.

    Args:
        batch: our batch, or vLLM's own object.
        config: the builder's settings.
        ranks: number of ranks that share the group's keys; 1 where each rank has all keys.

    Raises:
        ValueError: the batch has R-SWA prefixes but the engine no R-SWA window, or it has masks by
            positions while ranks share the keys.
    """
    prefixes = batch.rswa_prefix_lens
    if prefixes is not None and config.rswa_window is None:
        raise ValueError("rswa_prefix_lens needs vllm_config.rswa_window, got None")
    if ranks == 1:
        return
    ranges = getattr(batch, "mm_req_doc_ranges", None) or {}
    asked = {"mm_req_doc_ranges": any(ranges.values()), "rswa_prefix_lens": prefixes is not None}
    names = ", ".join(name for name, is_asked in asked.items() if is_asked)
    if names:
        raise ValueError(
            f"decode_context_parallel_size ({ranks}) does not go together with {names}"
        )


def refuse_masks(causal: bool, chunk: int | None, rswa_window: int | None) -> None:
    """Refuse chunks or R-SWA without causal attention, and both in one layer.

    Raises:
        ValueError: two masks do not go together; the message names them.
    """
    if chunk is not None and rswa_window is not None:
        raise ValueError(
            f"attention_chunk_size ({chunk}) does not go together with rswa_window ({rswa_window})"
        )
    for name, value in (("attention_chunk_size", chunk), ("rswa_window", rswa_window)):
        if value is not None and not causal:
            raise ValueError(f"{name} ({value}) is defined for causal attention only")
