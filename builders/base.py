"""The metadata builder: the one place where a step's decisions are made."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

import torch

from builders.batch import CommonAttentionMetadata
from builders.checks.debug import debug_batch
from builders.checks.step_limits import StepLimits
from specs.attention import AttentionCGSupport
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, EncoderOnlyAttentionSpec


class CachePages(TypedDict):
    """What a step's record knows of the cache that it was built for."""

    block_size: int
    cache_dtype: torch.dtype


@dataclass
class AttentionMetadata:
    """Base of every step record: plain and writable, since vLLM's wrapper classes assign on it.

    Our own code never writes one after ``build``.
    """

    slot_mapping: torch.Tensor
    """``[T]`` int64: where each new token is written; -1 skips it."""
    block_size: int | None = field(default=None, kw_only=True)
    """Tokens of a block of the cache that the step was built for."""
    cache_dtype: torch.dtype | None = field(default=None, kw_only=True)
    """Type of the elements of that cache's rows: of the first part of a row with several, and bytes
    for planes of the indexer."""

    def check_cache(self, block_size: int, dtype: torch.dtype) -> None:
        """A cache is the kind that the step was built for; at every call that reads it.

        Args:
            block_size: tokens of a block of the cache.
            dtype: of its stored elements, as the layer reads them.

        Raises:
            ValueError: one is not what the step was built for; both values are named.
        """
        if block_size != self.block_size:
            raise ValueError(
                f"kv_cache must have blocks of {self.block_size} tokens, for which the step was "
                f"built, got blocks of {block_size}"
            )
        if dtype != self.cache_dtype:
            raise ValueError(
                f"kv_cache must hold {self.cache_dtype}, for which the step was built, got {dtype}"
            )


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
    draft steps only where :class:`builders.drafts.multi_step.MultiStepDraft` knows them."""
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

        Raises:
            ValueError: a device that this machine does not have.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = list(layer_names)
        self.vllm_config = vllm_config
        self.device = torch.device(device)
        self.step_limits = StepLimits.of(kv_cache_spec, vllm_config)
        """What every batch is held against; a builder with room for more says so here."""
        _check_device(self.device)

    @cached_property
    def pages(self) -> CachePages:
        """What every record of this builder is given of its cache."""
        layout = self.kv_cache_spec.layout()
        # Rows of the indexer lie in planes of bytes.
        stored = layout.storage_dtype if layout.row.planar else layout.row.fields[0].dtype
        return {"block_size": self.kv_cache_spec.block_size, "cache_dtype": stored.torch}

    def check_batch(
        self, common_prefix_len: int, batch: CommonAttentionMetadata, fast_build: bool = False
    ) -> None:
        """Hold a batch against the builder's cache and limits; while debugging, check all of it.

        Args:
            common_prefix_len: leading tokens that all requests share.
            batch: the step's; ours or vLLM's own object.
            fast_build: of a draft step, whose lengths the host knows only where the builder plans
                there.

        Raises:
            ValueError: a negative ``common_prefix_len``; a batch made for blocks of another size
                than the builder's; a batch beyond a limit. The message has both values.
        """
        if common_prefix_len < 0:
            raise ValueError(f"common_prefix_len must not be negative, got {common_prefix_len}")
        spec, block_size = self.kv_cache_spec, getattr(batch, "block_size", None)
        # Nothing of encoders lies in blocks.
        if block_size not in (None, spec.block_size) and not isinstance(
            spec, EncoderOnlyAttentionSpec
        ):
            raise ValueError(
                f"block_size of the batch must be the KV cache spec's {spec.block_size}, got "
                f"{block_size}"
            )
        self.step_limits.check(batch, is_draft=fast_build and not self.plans_on_host)
        debug_batch(batch, spec, self.step_limits)

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
        updated.block_size = self.pages["block_size"]
        updated.cache_dtype = self.pages["cache_dtype"]
        self._set_block_table(updated, block_table)
        return updated

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


def _check_device(device: torch.device) -> None:
    """The machine has it.

    Raises:
        ValueError: it has not.
    """
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(f"device must be there, got {str(device)!r} on a machine of {count} GPUs")
