"""The metadata builder of TORCH_REF, the dense reference in torch.

The reference computes one request after the other, so it needs exact lengths on the host. The
builder reads them back from the device once per step. On a CPU that costs nothing; on a GPU it is a
sync, and such a step cannot be captured.
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
    """A step of dense attention for the reference."""

    num_actual_tokens: int
    """Tokens to compute, padding included."""
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: first token of each request, and the end of the last."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths (cross attention: the encoder's)."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device: blocks of each request."""
    query_starts: list[int]
    """``query_start_loc`` as R + 1 numbers on the host, exact."""
    kv_lens: list[int]
    """``seq_lens`` as R numbers on the host, exact."""
    causal: list[bool]
    """Whether the mask is causal, for each of R requests."""
    mm_ranges: dict[int, list[tuple[int, int]]]
    """Request -> inclusive position ranges attended in both directions."""
    rswa_prefix_lens: list[int] | None
    """Leading tokens that stay visible, for each of R requests; None without R-SWA."""
    rswa_window: int | None
    """Keys that a query sees beside that prefix, in place of the layer's own window; None without
    R-SWA."""
    common_prefix_len: int
    """Leading positions that all requests share in their block tables, or 0."""


class TorchRefMetadataBuilder(AttentionMetadataBuilder[TorchRefMetadata]):
    """Copies the batch's lengths to the host, and leaves everything else as it is."""

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """Make a builder; the arguments are those of the base class.

        Raises:
            ValueError: the engine has decode context parallelism, or R-SWA for chunked layers.
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
        """Build the step's record, see the base class.

        Raises:
            ValueError: the batch exceeds the engine's limits.
            NotImplementedError: the batch asks for something that the backend does not compute.
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
    """One flag for each of R requests, from one flag for all or from a tensor of R flags."""
    if not isinstance(causal, torch.Tensor):
        return [bool(causal)] * num_reqs
    if tuple(causal.shape) != (num_reqs,):
        raise ValueError(f"causal must be a bool or have shape [{num_reqs}], got {causal.shape}")
    return [bool(flag) for flag in causal.tolist()]
