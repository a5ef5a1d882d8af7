"""``ATTN_DEBUG=1``: full checks of tables, slots and lengths on every call."""

from __future__ import annotations

import os

import torch

from builders.batch import CommonAttentionMetadata
from builders.checks.invariants import check_invariants
from builders.checks.step_limits import StepLimits
from builders.pages.paging import check_block_table
from specs.attention import AttentionType
from specs.kv_cache import AnyKVCacheSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec


def debug_enabled() -> bool:
    """The switch, read here and nowhere else."""
    return os.environ.get("ATTN_DEBUG", "0") not in ("", "0")


def debug_batch(
    batch: CommonAttentionMetadata, spec: AnyKVCacheSpec, limits: StepLimits | None = None
) -> None:
    """At build: check a batch's invariants; nothing unless debugging.

    Args:
        batch: the step's.
        spec: the layers' cache.
        limits: of the builder; None leaves them unchecked.

    Raises:
        TypeError: a tensor of the wrong dtype.
        ValueError: any other broken invariant, naming field, expectation and value; a length of
            the device beyond the limits.
    """
    if not debug_enabled():
        return
    attn_type = AttentionType.DECODER
    if isinstance(spec, CrossAttentionSpec):
        attn_type = AttentionType.ENCODER_DECODER
    elif isinstance(spec, EncoderOnlyAttentionSpec):
        attn_type = AttentionType.ENCODER_ONLY
    block_size = spec.block_size if limits is None else limits.column_tokens
    check_invariants(batch, attn_type=attn_type, block_size=block_size)
    if limits is not None:
        is_encoders = limits.is_cross and batch.encoder_seq_lens is not None
        lens = batch.encoder_seq_lens if is_encoders else batch.seq_lens
        assert lens is not None
        debug_limits(lens, limits)


def debug_limits(seq_lens: torch.Tensor, limits: StepLimits) -> None:
    """At build, and where a draft step moved the device's lengths: none exceeds what the builder's
    plans and buffers are sized for; nothing unless debugging, or while a graph is captured.

    Args:
        seq_lens: ``[R]`` int32, device.
        limits: of the builder.

    Raises:
        ValueError: a length does; the message has both values.
    """
    if not debug_enabled() or len(seq_lens) == 0:
        return
    if seq_lens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    lens = seq_lens.cpu()
    row = int(lens.argmax())
    if int(lens[row]) > limits.max_kv_len:
        raise ValueError(
            f"the device's length of request {row} ({int(lens[row])}) exceeds {limits.keys_name} "
            f"({limits.max_kv_len}), which the builder's plans and buffers are sized for"
        )


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
