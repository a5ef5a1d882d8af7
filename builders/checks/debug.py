"""``ATTN_DEBUG=1``: full checks of tables, slots and lengths on every call."""

from __future__ import annotations

import os
from typing import Final

import torch

from builders.batch import CommonAttentionMetadata
from builders.checks.invariants import check_invariants
from builders.checks.step_limits import StepLimits
from builders.pages.paging import check_block_table
from specs.attention import AttentionType
from specs.kv_cache import AnyKVCacheSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec

VARIABLE: Final = "ATTN_DEBUG"
"""Anything but 0: block tables, slots and lengths are checked on every call, which then waits for
the GPU."""


def debug_enabled() -> bool:
    """Whether the environment asks for full checks; no other function reads :data:`VARIABLE`."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def debug_batch(
    batch: CommonAttentionMetadata, spec: AnyKVCacheSpec, limits: StepLimits | None = None
) -> None:
    """In debug mode, check a batch's invariants when a step is built.

    Args:
        batch: the step's batch.
        spec: spec of the layers' cache.
        limits: limits of the builder; None leaves them unchecked.

    Raises:
        TypeError: a tensor has the wrong dtype.
        ValueError: another invariant is broken, or a length of the device exceeds a limit; the
            message names field, expectation and value.
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
    """In debug mode, check lengths of the device against the limits of plans and buffers.

    Builders call this when a step is built, and after a draft step moved the device's lengths.
    While a graph is captured nothing is checked.

    Args:
        seq_lens: ``[R]`` int32, device.
        limits: limits of the builder.

    Raises:
        ValueError: a length exceeds the limit; the message has both values.
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
    """In debug mode, check a block table against the cache when a forward reads it.

    Raises:
        ValueError: a block id lies outside the cache, or a length exceeds the table.
    """
    if debug_enabled():
        check_block_table(block_table, seq_lens, block_size, num_blocks)


def debug_slots(slot_mapping: torch.Tensor, num_tokens: int) -> None:
    """In debug mode, check in a forward that every new token of the step has a slot.

    Args:
        slot_mapping: ``[T]`` slots of a record.
        num_tokens: tokens of the step.

    Raises:
        ValueError: there are fewer slots than tokens.
    """
    if debug_enabled() and len(slot_mapping) < num_tokens:
        raise ValueError(
            f"slot_mapping must have a slot for each of the step's {num_tokens} tokens, got "
            f"{len(slot_mapping)}"
        )
