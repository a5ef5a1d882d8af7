"""Masks of a dense group that its builder refuses: by its settings, then by each batch.

Which features no layer has both of is said by :data:`specs.conflicts.CONFLICTS`; here is what a
builder can see of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from builders.batch import CommonAttentionMetadata
from specs.conflicts import CHUNKS, DCP, NON_CAUSAL, RANGES, RSWA, among
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
        rswa = f"rswa_window ({config.rswa_window})"
        refuse_conflicts({DCP: f"decode_context_parallel_size ({size})", RSWA: rswa})


def check_rswa(spec: AnyKVCacheSpec, config: EngineConfig) -> None:
    """Refuse R-SWA together with chunks.

    Raises:
        ValueError: the group has chunked layers and the engine an ``rswa_window``.
    """
    if config.rswa_window is not None and isinstance(spec, ChunkedLocalAttentionSpec):
        chunks = f"attention_chunk_size ({spec.attention_chunk_size})"
        refuse_conflicts({RSWA: f"rswa_window ({config.rswa_window})", CHUNKS: chunks})


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
    asked = {DCP: f"decode_context_parallel_size ({ranks})"}
    ranges = getattr(batch, "mm_req_doc_ranges", None) or {}
    if any(ranges.values()):
        asked[RANGES] = "mm_req_doc_ranges"
    if prefixes is not None:
        asked[RSWA] = "rswa_prefix_lens"
    refuse_conflicts(asked)


def refuse_masks(causal: bool, chunk: int | None, rswa_window: int | None) -> None:
    """Refuse chunks or R-SWA without causal attention, and both in one layer.

    Raises:
        ValueError: two masks do not go together; the message names them.
    """
    asked = {}
    if chunk is not None:
        asked[CHUNKS] = f"attention_chunk_size ({chunk})"
    if rswa_window is not None:
        asked[RSWA] = f"rswa_window ({rswa_window})"
    refuse_conflicts(asked)
    for feature, name in asked.items():
        if not causal and among({feature, NON_CAUSAL}):
            raise ValueError(f"{name} is defined for causal attention only")


def refuse_conflicts(asked: Mapping[str, str]) -> None:
    """Refuse features that no layer has both of, by :data:`specs.conflicts.CONFLICTS`.

    Args:
        asked: by feature, the setting that asks for it, as a message names it.

    Raises:
        ValueError: two of the features conflict; the message names the first setting that is in
            conflict, and all that it is in conflict with.
    """
    for feature, name in asked.items():
        others = [asked[other] for other in asked if among({feature, other})]
        if others:
            raise ValueError(f"{name} does not go together with {', '.join(others)}")
