"""``ATTN_DEBUG=1``: full checks of tables, slots and lengths on every call."""

from __future__ import annotations

import os

import torch

from builders.common import CommonAttentionMetadata, check_invariants
from builders.paging import check_block_table
from specs.attention import AttentionType
from specs.kv_cache import AnyKVCacheSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec


def debug_enabled() -> bool:
    """The switch, read here and nowhere else."""
    return os.environ.get("ATTN_DEBUG", "0") not in ("", "0")


def debug_batch(batch: CommonAttentionMetadata, spec: AnyKVCacheSpec, dcp_size: int = 1) -> None:
    """At build: check a batch's invariants; nothing unless debugging.

    Args:
        batch: the step's.
        spec: the layers' cache.
        dcp_size: ranks that share the tokens of a request; each has blocks for its own.

    Raises:
        TypeError: a tensor of the wrong dtype.
        ValueError: any other broken invariant, naming field, expectation and value.
    """
    if not debug_enabled():
        return
    attn_type = AttentionType.DECODER
    if isinstance(spec, CrossAttentionSpec):
        attn_type = AttentionType.ENCODER_DECODER
    elif isinstance(spec, EncoderOnlyAttentionSpec):
        attn_type = AttentionType.ENCODER_ONLY
    check_invariants(batch, attn_type=attn_type, block_size=spec.block_size * dcp_size)


def debug_read(
    block_table: torch.Tensor, seq_lens: torch.Tensor, num_blocks: int, block_size: int
) -> None:
    """At forward: check a table against the cache it is used with; nothing unless debugging.

    Raises:
        ValueError: a block id outside the cache, or a length beyond the table.
    """
    if debug_enabled():
        check_block_table(block_table, seq_lens, block_size, num_blocks)


def debug_slots(slot_mapping: torch.Tensor, num_tokens: int) -> None:
    """At forward: every new token of a step has its slot; nothing unless debugging.

    Args:
        slot_mapping: ``[T]`` of a record.
        num_tokens: of the step.

    Raises:
        ValueError: fewer slots than tokens.
    """
    if debug_enabled() and len(slot_mapping) < num_tokens:
        raise ValueError(
            f"slot_mapping must have a slot for each of the step's {num_tokens} tokens, got "
            f"{len(slot_mapping)}"
        )
