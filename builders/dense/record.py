"""What a step of dense attention is, for TRITON_ATTN's kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.base import AttentionMetadata
from builders.dense.shared_prefix import SharedPrefix
from builders.pages.paging import Stripe
from builders.splitkv.record import PrefillPlan, SplitPlan


@dataclass
class TritonAttentionMetadata(AttentionMetadata):
    """A step of dense attention, for the split-KV kernel and the prefill kernel."""

    num_actual_tokens: int
    num_reqs: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths (cross attention: the encoder's)."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    split: SplitPlan | None
    """Rows with few query tokens; None where the host knows of none, and for encoders."""
    prefill: PrefillPlan | None
    """Rows with many; None where the host knows that there are none."""
    causal: bool | torch.Tensor = True
    """One flag, or ``[R]`` per request on the device."""
    first_positions: torch.Tensor | None = None
    """``[R]`` int32, device: where each request's first query stands, counted from its first key,
    of rows of the plain prefill kernel; None where the last keys are the queries' own."""
    mm_ranges: torch.Tensor | None = None
    """``[R, max_ranges, 2]`` int32, device: inclusive, attended in both directions; zeros pad."""
    rswa_prefix_lens: torch.Tensor | None = None
    """``[R]`` int32, device."""
    rswa_window: int | None = None
    stripe: Stripe | None = None
    """Decode context parallelism: the cache holds this rank's keys; lengths are the requests'."""
    shared: SharedPrefix | None = None
    """The batch's common prefix, computed once for all requests; None without one."""
