"""The metadata builders of TORCH_REF_MLA and its sparse variant, the latent references in torch.

The references compute one request after the other, so the builders read exact lengths back from the
device once per step. On a GPU that is a sync, and such a step cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields, split_decodes_and_prefills
from builders.checks.masks import refuse_dcp
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec


@dataclass
class LatentRows:
    """The R' requests of one phase, decode or prefill.

    Tokens are counted from the phase's first one.
    """

    query_starts: list[int]
    """First token of each of R' requests, and the end of the last: numbers on the host, exact."""
    kv_lens: list[int]
    """KV length of each of R' requests: numbers on the host, exact."""
    block_table: torch.Tensor
    """``[R', max_blocks]`` int32, device: blocks of each request."""


@dataclass
class TorchRefMLAMetadata(AttentionMetadata):
    """A step of latent attention for the reference: decodes come first, then prefills."""

    num_actual_tokens: int
    """Tokens to compute, padding included."""
    num_decodes: int
    """Leading requests, which are computed in latent space."""
    num_prefills: int
    """Requests behind the decodes, which are computed with expanded keys and values."""
    num_decode_tokens: int
    """Tokens of the decodes, padding included if there are no prefills."""
    num_prefill_tokens: int
    """Tokens of the prefills, padding included."""
    decode: LatentRows | None
    """The decodes; None without any."""
    prefill: LatentRows | None
    """The prefills; None without any."""


class TorchRefMLAMetadataBuilder(AttentionMetadataBuilder[TorchRefMLAMetadata]):
    """Splits the batch: short queries are computed in latent space, longer ones expanded."""

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """Make a builder that counts verifies as decodes. The arguments are the base class's.

        Raises:
            ValueError: the engine has decode context parallelism.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_dcp(vllm_config, "TORCH_REF_MLA")
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TorchRefMLAMetadata:
        """Build the step's record, see the base class.

        Raises:
            ValueError: the batch exceeds the engine's limits.
            NotImplementedError: the batch asks for something that the backend does not compute.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        ignored = ("dcp_local_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens")
        refuse_fields(batch, "TORCH_REF_MLA", *ignored)
        if isinstance(batch.causal, torch.Tensor) or not batch.causal:
            raise NotImplementedError(f"TORCH_REF_MLA supports causal=True, got {batch.causal}")
        decodes = self._num_decodes(batch)
        starts: list[int] = batch.query_start_loc.tolist()
        kv_lens: list[int] = batch.seq_lens.tolist()
        boundary = starts[decodes]
        decode = prefill = None
        table = batch.block_table_tensor
        if decodes:
            decode = LatentRows(starts[: decodes + 1], kv_lens[:decodes], table[:decodes])
        if decodes < batch.num_reqs:
            moved = [start - boundary for start in starts[decodes:]]
            prefill = LatentRows(moved, kv_lens[decodes:], table[decodes:])
        return TorchRefMLAMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_decodes=decodes,
            num_prefills=batch.num_reqs - decodes,
            num_decode_tokens=boundary if prefill else batch.num_actual_tokens,
            num_prefill_tokens=batch.num_actual_tokens - boundary if prefill else 0,
            decode=decode,
            prefill=prefill,
            **self.pages,
        )

    def _num_decodes(self, batch: CommonAttentionMetadata) -> int:
        threshold = self.reorder_batch_threshold or 0
        return split_decodes_and_prefills(batch, threshold).num_decodes

    def _set_block_table(self, metadata: TorchRefMLAMetadata, block_table: torch.Tensor) -> None:
        decodes = metadata.num_decodes
        if metadata.decode is not None:
            rows = metadata.decode
            metadata.decode = LatentRows(rows.query_starts, rows.kv_lens, block_table[:decodes])
        if metadata.prefill is not None:
            rows = metadata.prefill
            metadata.prefill = LatentRows(rows.query_starts, rows.kv_lens, block_table[decodes:])


class TorchRefSparseMLAMetadataBuilder(TorchRefMLAMetadataBuilder):
    """Counts every request as a decode, which is computed in latent space.

    Tokens of a prefill attend only their listed positions too.
    """

    def _num_decodes(self, batch: CommonAttentionMetadata) -> int:
        return batch.num_reqs
