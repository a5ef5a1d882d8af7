"""The metadata builder of SDPA_ATTN: everything that is decided once per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields


@dataclass
class SdpaAttnMetadata(AttentionMetadata):
    """What the impl needs to know about a step."""

    num_actual_tokens: int
    """Tokens to compute, padding included."""
    query_starts: list[int]
    """First token of each of R requests, and the end of the last."""
    kv_lens: list[int]
    """Keys of each of R requests."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32: blocks of each request."""


class SdpaAttnMetadataBuilder(AttentionMetadataBuilder[SdpaAttnMetadata]):
    """Copies the batch's lengths to the host.

    A builder for production plans on the device instead, so that CUDA graphs can replay the step,
    and says so in ``_cudagraph_support``.
    """

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SdpaAttnMetadata:
        """Build the step's record, see the base class."""
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        unsupported = ("dcp_local_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens")
        refuse_fields(batch, "SDPA_ATTN", *unsupported)
        if isinstance(batch.causal, torch.Tensor) or not batch.causal:
            raise NotImplementedError(f"SDPA_ATTN supports causal=True, got {batch.causal}")
        return SdpaAttnMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            query_starts=batch.query_start_loc.tolist(),
            kv_lens=batch.seq_lens.tolist(),
            block_table=batch.block_table_tensor,
            **self.pages,
        )
