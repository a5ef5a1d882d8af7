"""Metadata of two backends in one step: decodes by one, every other row by another.

Both read one KV cache. The split is by the host's query lengths, so these must be the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import LEADING_AXIS, CommonAttentionMetadata, replace_known
from builders.checks.masks import refuse_dcp
from specs.attention import AttentionCGSupport
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec


@dataclass
class MixedMetadata(AttentionMetadata):
    """A step of two backends."""

    num_actual_tokens: int
    num_decode_tokens: int
    """Rows before them are the decode backend's, those behind the prefill backend's."""
    num_decodes: int
    decode: Any
    """Record of the decode backend, of leading requests; None without any."""
    prefill: Any
    """Record of the prefill backend, of the requests behind them; None without any."""


def rows_of(
    batch: CommonAttentionMetadata, first_req: int, stop_req: int, first_token: int, stop_token: int
) -> CommonAttentionMetadata:
    """Consecutive requests of a batch as a batch of their own: views, and starts from 0.

    Args:
        batch: ours or vLLM's own object.
        first_req: first request.
        stop_req: behind the last.
        first_token: its first token.
        stop_token: behind the last's last token.
    """
    changes: dict[str, Any] = {
        "num_reqs": stop_req - first_req,
        "num_actual_tokens": stop_token - first_token,
    }
    for name, (extent, extra) in LEADING_AXIS.items():
        value = getattr(batch, name, None)
        if value is None or isinstance(value, bool):
            continue
        if extent == "reqs":
            changes[name] = value[first_req : stop_req + extra]
        else:
            changes[name] = value[first_token:stop_token]
    for name in ("query_start_loc", "query_start_loc_cpu"):
        if first_token:
            changes[name] = changes[name] - first_token
    ranges = getattr(batch, "mm_req_doc_ranges", None)
    if ranges:
        kept = range(first_req, stop_req)
        changes["mm_req_doc_ranges"] = {
            req - first_req: spans for req, spans in ranges.items() if req in kept
        }
    lens = changes["query_start_loc_cpu"].diff().tolist()
    changes["max_query_len"] = max(lens, default=0)
    return replace_known(batch, **changes)


class MixedMetadataBuilder(AttentionMetadataBuilder[MixedMetadata]):
    """Leading short rows to one builder, the others to a second; a subclass names both."""

    prefill_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]
    decode_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """Arguments as of the base class; errors as of both builders.

        Raises:
            ValueError: a spec or setting that one of the two does not serve, or decode context
                parallelism.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_dcp(vllm_config, "a mix of two backends")
        given = kv_cache_spec, layer_names, vllm_config, device
        self.prefill = self.prefill_cls(*given)
        self.decode = self.decode_cls(*given)
        self.plans_on_host = self.decode.plans_on_host
        threshold = self.decode.reorder_batch_threshold
        self._init_reorder_batch_threshold(1 if threshold is None else threshold)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: EngineConfig, kv_cache_spec: AnyKVCacheSpec
    ) -> AttentionCGSupport:
        """What both replay, and never a mix of the two."""
        levels = [
            one.get_cudagraph_support(vllm_config, kv_cache_spec)
            for one in (cls.prefill_cls, cls.decode_cls)
        ]
        return min(*levels, AttentionCGSupport.UNIFORM_BATCH)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MixedMetadata:
        """The step's two records; errors as of the two builders.

        Raises:
            ValueError: a batch beyond the engine's limits.

        Args:
            common_prefix_len: makes no difference: the two would have to share it.
            common_attn_metadata: the batch.
            fast_build: handed on.
        """
        self.check_batch(common_prefix_len, common_attn_metadata, fast_build)
        return self._parts(common_attn_metadata, "build", fast_build)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MixedMetadata:
        """The record to capture with: of one of the two builders."""
        self.check_batch(0, common_attn_metadata)
        return self._parts(common_attn_metadata, "build_for_cudagraph_capture", False)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> MixedMetadata:
        """The record of a draft step: one token per request, all the decode builder's."""
        batch = common_attn_metadata
        record = self.decode.build_for_drafting(batch, draft_index)
        return MixedMetadata(
            batch.slot_mapping,
            batch.num_actual_tokens,
            batch.num_actual_tokens,
            batch.num_reqs,
            record,
            None,
            **self.pages,
        )

    def update_block_table(
        self, metadata: MixedMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> MixedMetadata:
        """See the base class."""
        updated = super().update_block_table(metadata, block_table, slot_mapping)
        reqs, tokens = metadata.num_decodes, metadata.num_decode_tokens
        if metadata.decode is not None:
            updated.decode = self.decode.update_block_table(
                metadata.decode, block_table[:reqs], slot_mapping[:tokens]
            )
        if metadata.prefill is not None:
            updated.prefill = self.prefill.update_block_table(
                metadata.prefill,
                block_table[reqs:],
                slot_mapping[tokens : metadata.num_actual_tokens],
            )
        return updated

    def _set_block_table(self, metadata: MixedMetadata, block_table: torch.Tensor) -> None:
        """Its records keep the tables."""

    def _parts(
        self, batch: CommonAttentionMetadata, method: str, fast_build: bool
    ) -> MixedMetadata:
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        decodes = self._num_decodes(starts)
        cut = starts[decodes]
        # Padding stays with the only part there is: a graph's replay counts it among its own.
        if not any(stop > cut for stop in starts[decodes:]):
            decodes, cut = (batch.num_reqs, batch.num_actual_tokens) if decodes else (0, 0)
        parts: list[Any] = [None, None]
        spans = ((0, decodes, 0, cut), (decodes, batch.num_reqs, cut, batch.num_actual_tokens))
        for place, (builder, span) in enumerate(
            zip((self.decode, self.prefill), spans, strict=True)
        ):
            if span[1] == span[0] or span[3] == span[2]:
                continue
            own = rows_of(batch, *span)
            if method == "build":
                parts[place] = builder.build(0, own, fast_build)
            else:
                parts[place] = builder.build_for_cudagraph_capture(own)
        return MixedMetadata(
            batch.slot_mapping,
            batch.num_actual_tokens,
            cut,
            decodes,
            parts[0],
            parts[1],
            **self.pages,
        )

    def _num_decodes(self, starts: list[int]) -> int:
        """Leading requests that the decode builder's kernel takes: of one token, or of a whole
        verify each.
        """
        threshold = self.reorder_batch_threshold or 1
        decodes, first = 0, starts[1] - starts[0] if len(starts) > 1 else 0
        for start, stop in pairwise(starts):
            if stop - start != first or first not in (1, threshold):
                break
            decodes += 1
        return decodes
