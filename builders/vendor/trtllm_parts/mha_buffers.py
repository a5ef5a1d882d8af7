"""What the calls of TRTLLM_MHA keep from step to step, at addresses that a CUDA graph may keep."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from builders.base import AttentionMetadataBuilder
from builders.pages.phase_tables import PhaseTable
from builders.vendor.trtllm_parts.mha_choice import KernelRule
from specs.base import cdiv
from specs.sentinels import PAD_SLOT_ID

WORKSPACE_BYTES = 136 << 20
"""Bytes of scratch of one kernel family in one phase: 8 MiB of semaphores or counters, then partial
states."""
MAX_MULTIPROCESSORS = 256
"""Most multiprocessors of a GPU that trtllm-gen runs on, which has a counter for each."""


class PhaseBuffers:
    """Buffers of one phase's calls, kept from step to step."""

    def __init__(
        self,
        builder: AttentionMetadataBuilder[Any],
        num_heads: int,
        window: int | None,
        rule: KernelRule,
        max_query_len: int,
        fp8: bool,
    ) -> None:
        """
        Args:
            builder: whose limits and device they are made for.
            num_heads: of queries.
            window: keys that a token sees, its own included; None for all.
            rule: the phase's kernel.
            max_query_len: most tokens of a request.
            fp8: the cache is quantised.
        """
        config, page = builder.vllm_config, builder.kv_cache_spec.block_size
        self.rule = rule
        self.max_query_len = max_query_len
        self.max_kv_len = config.max_model_len
        if window is not None:
            # Both ends of the visible keys may lie inside a page.
            pages = cdiv(window - 1 + max_query_len, page) + 1
            self.max_kv_len = min(cdiv(config.max_model_len, page), pages) * page
        device = builder.device
        self.table = PhaseTable(config.max_num_seqs, self.max_kv_len, page, device)
        # Zeroed once, and never given to another kernel: each leaves its counters at zero.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        entries = max(config.max_num_seqs * num_heads, MAX_MULTIPROCESSORS)
        self.counters = torch.zeros(cdiv(entries, 8) * 32, dtype=torch.uint8, device=device)
        self.query_name: str | None = None
        if fp8 and rule.query_is_fp8:
            self.query_name = "fp8_query"
        elif rule.query_is_dense:
            self.query_name = "dense_query"

    def with_table(self, table: PhaseTable) -> PhaseBuffers:
        """A copy with another page table: the tables of several draft steps exist at once."""
        own = copy.copy(self)
        own.table = table
        return own


@dataclass(frozen=True)
class DraftBuffers:
    """Tensors of one draft step, whose addresses a graph may keep."""

    phase: PhaseBuffers
    """Buffers of the decode phase, with the step's own page table."""
    starts: torch.Tensor
    """``[R + 1]`` int32 first query row of each request, which has one token."""
    seq_lens: torch.Tensor
    """``[R]`` int32 KV lengths in this step."""
    slots: torch.Tensor
    """``[R]`` int64 slot of each request's token."""
    keyless: torch.Tensor
    """``[R, 1, 1]`` bool, True for padding, which has no keys."""

    @classmethod
    def of(cls, phase: PhaseBuffers) -> DraftBuffers:
        """Make buffers for as many requests as the phase's page table has rows."""
        lens = phase.table.kv_lens
        reqs, device = len(lens), lens.device
        return cls(
            phase,
            torch.arange(reqs + 1, dtype=torch.int32, device=device),
            torch.zeros_like(lens),
            torch.full((reqs,), PAD_SLOT_ID, dtype=torch.int64, device=device),
            torch.zeros(reqs, 1, 1, dtype=torch.bool, device=device),
        )
