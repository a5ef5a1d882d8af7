"""Masks of a dense group that its builder refuses: by its settings, then by each batch."""

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
        ValueError: the engine has it.
    """
    size = config.parallel.decode_context_parallel_size
    if size > 1:
        raise ValueError(f"decode_context_parallel_size must be 1 for {backend}, got {size}")


def check_dcp(spec: AnyKVCacheSpec, config: EngineConfig) -> None:
    """Refuse a group whose keys ranks cannot share, where the engine shares them.

    Encoders have no keys in a cache, and ``dcp_sharded=False`` says that every rank has them all.

    Raises:
        ValueError: a spec of another kind than full attention, or R-SWA.
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
    """Refuse R-SWA beside chunks.

    Raises:
        ValueError: a group of chunked layers of an engine with ``rswa_window``.
    """
    if config.rswa_window is not None and isinstance(spec, ChunkedLocalAttentionSpec):
        raise ValueError(
            f"rswa_window ({config.rswa_window}) does not go together with attention_chunk_size "
            f"({spec.attention_chunk_size})"
        )


def check_batch_masks(batch: CommonAttentionMetadata, config: EngineConfig, ranks: int) -> None:
    """Refuse what a batch asks of masks beside the group's settings.

    Args:
        batch: ours or vLLM's own object.
        config: of the builder.
        ranks: that share the group's keys; 1 where each has them all.

    Raises:
        ValueError: prefixes of R-SWA without its window, or masks of positions where ranks share
            the keys.
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
    """Chunks and R-SWA are of causal attention, and of no layer both.

    Raises:
        ValueError: they are asked for otherwise; the message names what does not go together.
    """
    if chunk is not None and rswa_window is not None:
        raise ValueError(
            f"attention_chunk_size ({chunk}) does not go together with rswa_window ({rswa_window})"
        )
    for name, value in (("attention_chunk_size", chunk), ("rswa_window", rswa_window)):
        if value is not None and not causal:
            raise ValueError(f"{name} ({value}) is defined for causal attention only")
