"""Metadata of a step that two backends share: one takes the decodes, the other takes the rest.

Both backends read one KV cache. The builder splits the batch by the host's query lengths, which
must be the device's.
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
    """A step that two backends share."""

    num_actual_tokens: int
    """Tokens of the step, padding included."""
    num_decode_tokens: int
    """Leading tokens, which the decode backend computes; the prefill backend computes the rest."""
    num_decodes: int
    """Leading requests, whose tokens the decode backend computes."""
    decode: Any
    """The decode backend's record of the leading requests; None if there are none."""
    prefill: Any
    """The prefill backend's record of the other requests; None if there are none."""


def rows_of(
    batch: CommonAttentionMetadata, first_req: int, stop_req: int, first_token: int, stop_token: int
) -> CommonAttentionMetadata:
    """Consecutive requests of a batch as a batch of their own.

    Its tensors are views of the batch's, but for the query starts, which begin with 0.

    Args:
        batch: ours or vLLM's own object.
        first_req: the first request.
        stop_req: the request behind the last one.
        first_token: first token of the first request.
        stop_token: the token behind the last request's last token.
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
    """Gives leading decodes to one builder and all other requests to a second one.

    A subclass names both builders.
    """

    prefill_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]
    """The builder of all requests behind the leading decodes."""
    decode_cls: ClassVar[type[AttentionMetadataBuilder[Any]]]
    """The builder of the leading decodes."""

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """Make both builders. The arguments are those of the base class.

        Raises:
            ValueError: one of the two builders does not serve the spec or a setting, or the engine
                has decode context parallelism.
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
        """Which batches a captured graph can replay: uniform ones at most, if both builders can.

        In a uniform batch one of the two backends takes all requests.
        """
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
        """Build the step's record, which holds the records of both builders.

        Args:
            common_prefix_len: is checked and makes no other difference, since both builders would
                have to share the prefix.
            common_attn_metadata: the batch.
            fast_build: is handed to both builders.

        Raises:
            ValueError: the batch exceeds the engine's limits, or one of the builders refuses its
                part.
        """
        self.check_batch(common_prefix_len, common_attn_metadata, fast_build)
        return self._parts(common_attn_metadata, "build", fast_build)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> MixedMetadata:
        """Build the record to capture a CUDA graph with; one of the builders takes all of it."""
        self.check_batch(0, common_attn_metadata)
        return self._parts(common_attn_metadata, "build_for_cudagraph_capture", False)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> MixedMetadata:
        """Build the record of a draft step, whose requests of one token are all decodes."""
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
        """The record of a step for another KV cache group; each part gets its rows of the table.

        Args:
            metadata: the step's record of the other group.
            block_table: ``[R, max_blocks]`` int32.
            slot_mapping: ``[T]`` int64.
        """
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
        """Do nothing: the records of both builders hold the tables."""

    def _parts(
        self, batch: CommonAttentionMetadata, method: str, fast_build: bool
    ) -> MixedMetadata:
        starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        decodes = self._num_decodes(starts)
        cut = starts[decodes]
        # If only one backend has tokens, padding goes to it too: a captured graph has the padding
        # of its replays.
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
        """How many leading requests the decode builder's kernel takes.

        These requests have one token each, or the tokens of a whole verify each.
        """
        threshold = self.reorder_batch_threshold or 1
        decodes, first = 0, starts[1] - starts[0] if len(starts) > 1 else 0
        for start, stop in pairwise(starts):
            if stop - start != first or first not in (1, threshold):
                break
            decodes += 1
        return decodes
