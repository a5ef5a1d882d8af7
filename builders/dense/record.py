"""The records of a step of dense attention, which TRITON_ATTN's kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from builders.base import AttentionMetadata
from builders.splitkv.record import PrefillPlan, SplitPlan
from builders.splitkv.stripe import Stripe


@dataclass
class TritonAttentionMetadata(AttentionMetadata):
    """A step of dense attention, for the split-KV kernels and the prefill kernels."""

    num_actual_tokens: int
    """Tokens to compute, padding included; kernels touch no row beyond them."""
    num_reqs: int
    """R, padding included."""
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: first token of each request, and the end of the last."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths (cross attention: the encoder's)."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device: blocks of each request."""
    split: SplitPlan | None
    """Plan of the split-KV kernel, for requests with few new tokens; None where the host knows that
    there are none, and for encoders."""
    prefill: PrefillPlan | None
    """Plan of the prefill kernel, for requests with many new tokens; None where the host knows that
    there are none."""
    causal: bool | torch.Tensor = True
    """One flag, or ``[R]`` per request on the device."""
    first_positions: torch.Tensor | None = None
    """``[R]`` int32, device: position of each request's first query, counted from its first key.

    The portable prefill kernel reads it. None where a request's last keys are its queries' own."""
    mm_ranges: torch.Tensor | None = None
    """``[R, max_ranges, 2]`` int32, device: multimodal ranges, whose tokens see each other.

    Both ends are inclusive, and zeros pad the rows. None without ranges."""
    rswa_prefix_lens: torch.Tensor | None = None
    """``[R]`` int32, device: leading tokens that stay visible beside the window; None without
    R-SWA."""
    rswa_window: int | None = None
    """Keys that a query sees beside that prefix, itself included; None without R-SWA."""
    stripe: Stripe | None = None
    """The tokens that this rank keeps under decode context parallelism; None without it.

    The cache then holds this rank's keys only, while ``seq_lens`` are the requests' lengths."""
    shared: SharedPrefix | None = None
    """The batch's common prefix, computed once for all requests; None without one."""


@dataclass
class SharedPrefix:
    """Two records by which cascade attention computes a step with a common prefix.

    One record attends the prefix once for all requests, the other one attends the keys after the
    prefix, and both states are merged. A layer may use them in place of the record that they belong
    to if its mask is plain causality: every query sees the whole prefix, and the mask of the other
    keys is the same if positions are counted from the end of the prefix.
    """

    length: int
    """Tokens of the prefix, a multiple of the block size."""
    prefix: TritonAttentionMetadata
    """All tokens of the batch as one request over the prefix, not causal."""
    own: TritonAttentionMetadata
    """The batch over every request's keys after the prefix."""
    outputs: torch.Tensor
    """``[2, T, H, Dv]`` fp32 scratch: outputs over the prefix, then over each request's own
    keys."""
    lses: torch.Tensor
    """``[2, T, H]`` fp32 scratch: log-sum-exps over the prefix, then over each request's own
    keys."""
