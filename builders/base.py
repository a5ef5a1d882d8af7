"""The metadata builder: the one place where a step's decisions are made."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from builders.common import CommonAttentionMetadata
from builders.debug import debug_batch
from builders.limits import StepLimits
from specs.attention import AttentionCGSupport
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec


@dataclass
class AttentionMetadata:
    """Base of every step record: plain and writable, since vLLM's wrapper classes assign on it.

    Our own code never writes one after ``build``.
    """

    slot_mapping: torch.Tensor
    """``[T]`` int64: where each new token is written; -1 skips it."""


M = TypeVar("M", bound=AttentionMetadata)


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Turns a step's batch into what one backend's impl needs; vLLM v1's interface by name.

    ``build`` returns a record and changes nothing else. Memory that a CUDA graph must find at the
    same address lives in the builder; records hold views of it.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    """Rows with at most this many new tokens come first, as decodes; None leaves the order."""
    supports_update_block_table: bool = True
    shares_prefix: bool = False
    """A common prefix saves reads: worth asking for where many requests have a long one."""
    plans_on_host: bool = False
    """Every step is planned from host lengths, which must be the device's: not inside a graph, and
    draft steps only where :class:`builders.multi_step_draft.MultiStepDraft` knows them."""
    supports_draft_decode_metadata_update: bool = False
    """True when :meth:`update_draft_decode_metadata` may be called."""

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            kv_cache_spec: the group's spec, cut to the kernel's block size.
            layer_names: layers of the group.
            vllm_config: engine limits; the parameter has vLLM's name.
            device: where the records' tensors live.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = list(layer_names)
        self.vllm_config = vllm_config
        self.device = torch.device(device)
        self.step_limits = StepLimits.of(kv_cache_spec, vllm_config)
        """What every batch is held against; a builder with room for more says so here."""

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: EngineConfig, kv_cache_spec: AnyKVCacheSpec
    ) -> AttentionCGSupport:
        """Which batches a captured graph can replay, for this configuration."""
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """The step's record.

        Args:
            common_prefix_len: leading tokens that all requests share (cascade attention), or 0.
            common_attn_metadata: the batch; ours or vLLM's own object. Never written.
            fast_build: prefer a quick build over a quick forward (draft steps).
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """The record to capture a graph with: only persistent buffers, static bounds."""
        return self.build(0, common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> M:
        """The record of draft step ``draft_index`` (0 is the first forward of the draft model)."""
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata: M) -> None:
        """Bring ``metadata`` up to date with its own tensors, whose contents a draft step changed.

        Recorded in the graph of the draft steps: only capture-safe work, in persistent buffers.
        """
        raise NotImplementedError(f"{type(self).__name__} builds every draft step anew")

    def update_block_table(
        self, metadata: M, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """The same step for another KV cache group: only table and slots differ.

        Attributes that a wrapper added to ``metadata`` are kept.
        """
        updated = copy.copy(metadata)
        updated.slot_mapping = slot_mapping
        self._set_block_table(updated, block_table)
        return updated

    def _check_batch(self, batch: CommonAttentionMetadata, fast_build: bool = False) -> None:
        """Hold a batch against the builder's limits; while debugging, check all of it.

        Args:
            batch: the step's.
            fast_build: of a draft step, whose lengths the host knows only where the builder plans
                there.

        Raises:
            ValueError: the batch exceeds a limit; the message has both values.
        """
        self.step_limits.check(batch, is_draft=fast_build and not self.plans_on_host)
        debug_batch(batch, self.kv_cache_spec, self.step_limits)

    def _set_block_table(self, metadata: M, block_table: torch.Tensor) -> None:
        """Put ``block_table`` where this builder's record keeps it."""
        fields: Any = metadata
        fields.block_table = block_table

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold: int | None = 1, supports_spec_as_decode: bool = False
    ) -> None:
        """Set the decode threshold; verify rows count as decodes where the kernel takes them."""
        self.reorder_batch_threshold = reorder_batch_threshold
        if reorder_batch_threshold is not None and supports_spec_as_decode:
            self.reorder_batch_threshold = max(
                reorder_batch_threshold, self.vllm_config.max_decode_query_len
            )
