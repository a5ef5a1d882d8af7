"""The base classes of metadata builders, and of the records that they build.

A builder is the only place where a step's decisions are made; an impl carries them out.
"""

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
    """The fields of a step's record that describe the cache that it was built for.

    :class:`AttentionMetadata` has fields of the same names.
    """

    block_size: int
    """Tokens of a block."""
    cache_dtype: torch.dtype
    """Type of the cache's elements."""


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
    """Type of the elements of the cache that the step was built for.

    Where a cached row has several parts, this is the type of the first part's elements. Planes of
    the indexer's cache are bytes."""

    def check_cache(self, block_size: int, dtype: torch.dtype) -> None:
        """Check that a cache is of the kind that the step was built for.

        Every call that reads or writes the cache checks this.

        Args:
            block_size: tokens of a block of the cache.
            dtype: of its stored elements, as the layer reads them.

        Raises:
            ValueError: the block size or the type is another than the step was built for; the
                message has both values.
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
    """Turns a step's batch into the record that one backend's impl needs.

    Methods and attributes have the names of vLLM v1's interface. The builder owns the memory that a
    CUDA graph must find at the same address, and records hold views of it. ``build`` fills that
    memory and returns a record; it does not change the batch.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int | None = None
    """Most new tokens of a request that counts as a decode; decodes must come first in a batch.

    None leaves the order of requests open."""
    supports_update_block_table: bool = True
    """True when :meth:`update_block_table` may be called."""
    shares_prefix: bool = False
    """True when a common prefix is read once for all requests, so that an engine should look for
    one."""
    plans_on_host: bool = False
    """True when the builder plans every step from host lengths.

    Host lengths must then equal the device's. A step cannot be planned inside a graph. A draft step
    can be planned only if :class:`builders.drafts.multi_step.MultiStepDraft` knows its lengths."""
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
            kv_cache_spec: the KV cache group's spec, with the kernel's block size.
            layer_names: layers of the group.
            vllm_config: limits and settings of the engine; the parameter has vLLM's name.
            device: where the records' tensors live.

        Raises:
            ValueError: this machine does not have the device.
        """
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = list(layer_names)
        self.vllm_config = vllm_config
        self.device = torch.device(device)
        self.step_limits = StepLimits.of(kv_cache_spec, vllm_config)
        """Limits that every batch is checked against; a builder with larger buffers replaces
        them."""
        _check_device(self.device)

    @property
    def phase_kernels(self) -> dict[str, str]:
        """Names of the kernels that were chosen for the group's steps, by phase.

        Phases are ``decode`` and ``prefill``; for sparse layers also ``short``, prefills that
        attend every key. A phase that the layers do not have is left out. Empty where a backend
        names no kernels.
        """
        return {}

    @cached_property
    def pages(self) -> CachePages:
        """The fields that describe this builder's cache, for every record that it builds."""
        layout = self.kv_cache_spec.layout()
        # The indexer's rows are stored in planes of bytes.
        stored = layout.storage_dtype if layout.row.planar else layout.row.fields[0].dtype
        return {"block_size": self.kv_cache_spec.block_size, "cache_dtype": stored.torch}

    def check_batch(
        self, common_prefix_len: int, batch: CommonAttentionMetadata, fast_build: bool = False
    ) -> None:
        """Check a batch against the builder's cache and limits.

        With ``ATTN_DEBUG=1`` the contents of its tensors are checked too, see
        :func:`builders.checks.debug.debug_batch`.

        Args:
            common_prefix_len: leading tokens that all requests share.
            batch: the step's batch, ours or vLLM's own object.
            fast_build: True for a draft step. The host knows its lengths only if the builder plans
                on the host.

        Raises:
            ValueError: ``common_prefix_len`` is negative, the batch was made for blocks of another
                size than the builder's, or the batch exceeds a limit. The message has both values.
        """
        if common_prefix_len < 0:
            raise ValueError(f"common_prefix_len must not be negative, got {common_prefix_len}")
        spec, block_size = self.kv_cache_spec, getattr(batch, "block_size", None)
        # Encoders cache nothing, so their block size means nothing.
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
        """Which batches a captured CUDA graph can replay, for this configuration."""
        return cls._cudagraph_support

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """Build the step's record.

        Args:
            common_prefix_len: leading tokens that all requests share (cascade attention), or 0.
            common_attn_metadata: the batch, ours or vLLM's own object; it is never written.
            fast_build: prefer a quick build over a quick forward (draft steps).
        """

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Build the record to capture a CUDA graph with: its bounds hold for every replay."""
        return self.build(0, common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> M:
        """Build the record of a draft step.

        Args:
            common_attn_metadata: the batch of the draft step.
            draft_index: number of the draft step; 0 is the first forward of the draft model.
        """
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata: M) -> None:
        """Plan a record anew after a draft step changed the contents of its tensors.

        The graph of the draft steps records this call, so it does only work that can be captured,
        in persistent buffers.

        Args:
            metadata: a record of this builder.
        """
        raise NotImplementedError(f"{type(self).__name__} builds every draft step anew")

    def update_block_table(
        self, metadata: M, block_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> M:
        """The record of a step for another KV cache group, from the record of one group.

        The groups differ in block table and slots only. Attributes that a wrapper added to
        ``metadata`` are kept.

        Args:
            metadata: the step's record of the other group.
            block_table: ``[R, max_blocks]`` int32 of this builder's group.
            slot_mapping: ``[T]`` int64 of this builder's group.
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
        """Set the decode threshold; verifies count as decodes if ``supports_spec_as_decode``."""
        self.reorder_batch_threshold = reorder_batch_threshold
        if reorder_batch_threshold is not None and supports_spec_as_decode:
            self.reorder_batch_threshold = max(
                reorder_batch_threshold, self.vllm_config.max_decode_query_len
            )


def _check_device(device: torch.device) -> None:
    """Check that this machine has ``device``.

    Raises:
        ValueError: the machine has fewer GPUs.
    """
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ValueError(f"device must be there, got {str(device)!r} on a machine of {count} GPUs")
