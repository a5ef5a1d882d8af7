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
    """Consecutive query rows, with the arguments of the one call that takes them."""

    rule: KernelRule
    calls: DirectCalls
    attend: Callable[[DirectCalls, StepCall, LayerCall], None]
    """The method of :class:`DirectCalls` that takes these rows."""
    first_token: int
    num_tokens: int
    query: torch.Tensor | None
    """``[T, H, D]`` scratch for a kernel that needs the query in another type or dense, else None.
    """


@dataclass
class DecodeRows(CalledRows):
    """Query rows of requests with one or a few tokens each."""


@dataclass
class PrefillRows(CalledRows):
    """Query rows of requests of any length: prefills, extends, padding."""


@dataclass
class TrtllmMhaMetadata(AttentionMetadata):
    """A step of dense attention for one KV cache group."""

    num_actual_tokens: int
    num_reqs: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: first query row of each request."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths, this step's tokens included."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    sliding_window: int | None
    """Window that the page tables are cut to; None where they list every key."""
    split: StepSplit
    decode: DecodeRows | None
    prefill: PrefillRows | None
    keyless: torch.Tensor | None
    """``[T, 1, 1]`` bool, device: True for rows without any key, whose output kernels leave
    undefined; None where there cannot be such rows."""
