"""Metadata of the plain-torch dense backend: exact host lengths, to walk rows one by one.

The reference is the one place that reads lengths back from the device: once per step, here. On a
CPU that costs nothing; on a GPU it is a sync, and such a step cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields
from builders.checks.masks import check_batch_masks, check_rswa, refuse_dcp
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec
from specs.positions import cut_window


@dataclass
class TorchRefMetadata(AttentionMetadata):
    """A step of dense attention."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths (cross attention: the encoder's)."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    query_starts: list[int]
    """``[R + 1]`` host copy of ``query_start_loc``, exact."""
    kv_lens: list[int]
    """``[R]`` host copy of ``seq_lens``, exact."""
    causal: list[bool]
    """``[R]`` per request."""
    mm_ranges: dict[int, list[tuple[int, int]]]
    """Request -> inclusive position ranges attended in both directions."""
    rswa_prefix_lens: list[int] | None
    """``[R]``, or None without R-SWA."""
    rswa_window: int | None
    """Window beside those prefixes, in place of the layer's own; None without R-SWA."""
    common_prefix_len: int
    """Leading positions that all requests share in their block tables, or 0."""


class TorchRefMetadataBuilder(AttentionMetadataBuilder[TorchRefMetadata]):
    """Copies the batch's lengths to the host; every other decision is the identity."""

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """As every builder.

        Raises:
            ValueError: decode context parallelism, or R-SWA of chunked layers.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_dcp(vllm_config, "TORCH_REF")
        check_rswa(kv_cache_spec, vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TorchRefMetadata:
        """The step's record; the batch, ours or vLLM's own, is not written.

        Raises:
            ValueError: a batch beyond the engine's limits.
            NotImplementedError: a batch that asks for what the backend does not compute.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        refuse_fields(batch, "TORCH_REF", "dcp_local_seq_lens")
        check_batch_masks(batch, self.vllm_config, 1)
        seq_lens = batch.seq_lens
        causal: bool | torch.Tensor = batch.causal
        if isinstance(self.kv_cache_spec, CrossAttentionSpec):
            causal = False
            if batch.encoder_seq_lens is not None:
                seq_lens = batch.encoder_seq_lens
        elif isinstance(self.kv_cache_spec, EncoderOnlyAttentionSpec):
            causal = False
        prefixes = batch.rswa_prefix_lens
        return TorchRefMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            query_start_loc=batch.query_start_loc,
            seq_lens=seq_lens,
            block_table=batch.block_table_tensor,
            query_starts=batch.query_start_loc.tolist(),
            kv_lens=seq_lens.tolist(),
            causal=_causal_flags(causal, batch.num_reqs),
            mm_ranges=batch.mm_req_doc_ranges or {},
            rswa_prefix_lens=None if prefixes is None else prefixes.tolist(),
            rswa_window=None if prefixes is None else cut_window(self.vllm_config.rswa_window),
            common_prefix_len=common_prefix_len,
            **self.pages,
        )


def _causal_flags(causal: bool | torch.Tensor, num_reqs: int) -> list[bool]:
    """``[R]`` flags from one for all or one per request."""
    if not isinstance(causal, torch.Tensor):
        return [bool(causal)] * num_reqs
    if tuple(causal.shape) != (num_reqs,):
        raise ValueError(f"causal must be a bool or have shape [{num_reqs}], got {causal.shape}")
    return [bool(flag) for flag in causal.tolist()]
