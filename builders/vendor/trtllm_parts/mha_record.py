"""A step of TRTLLM_MHA: its page tables, its lengths, and what each of its calls is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from builders.base import AttentionMetadata
from builders.vendor.flashinfer_parts.calls import DirectCalls, LayerCall, StepCall
from builders.vendor.trtllm_parts.mha_choice import KernelRule
from builders.vendor.trtllm_parts.mha_split import StepSplit


@dataclass
class CalledRows(StepCall):
    """Consecutive rows of the query, and what their one call is given."""

    rule: KernelRule
    calls: DirectCalls
    attend: Callable[[DirectCalls, StepCall, LayerCall], None]
    """The one of ``calls`` that takes these rows."""
    first_token: int
    num_tokens: int
    query: torch.Tensor | None
    """``[T, H, D]`` scratch where the kernel wants the query in another type, or dense."""


@dataclass
class DecodeRows(CalledRows):
    """Requests of one or a few tokens each."""


@dataclass
class PrefillRows(CalledRows):
    """Requests of any length: prefills, extends, padding."""


@dataclass
class TrtllmMhaMetadata(AttentionMetadata):
    """A step of dense attention for one KV cache group."""

    num_actual_tokens: int
    num_reqs: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    sliding_window: int | None
    """Window that the page tables were cut to; None where they list every key."""
    split: StepSplit
    decode: DecodeRows | None
    prefill: PrefillRows | None
    keyless: torch.Tensor | None
    """``[T, 1, 1]`` bool, device: rows without any key, which kernels leave undefined; None where
    there cannot be such rows."""
