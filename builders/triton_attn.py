"""Metadata of TRITON_ATTN: the step's plan, computed on the device, in persistent buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.buffers import GraphBuffers
from builders.common import CommonAttentionMetadata, refuse_fields
from builders.debug import debug_batch
from builders.split_kv import (
    DenseShape,
    PrefillPlan,
    SplitLimits,
    SplitPlan,
    SplitPlanner,
    interprets,
)
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.devices import ComputeCapability, DeviceKind, kind_of
from specs.engine import EngineConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    SlidingWindowSpec,
)

CROSS_KV_LEN = 32768
"""Encoder length that scratch is sized for: an engine's limit is that of the decoder."""


@dataclass
class TritonAttentionMetadata(AttentionMetadata):
    """A step of dense attention, for the split-KV kernel and the prefill kernel."""

    num_actual_tokens: int
    num_reqs: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths (cross attention: the encoder's)."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    split: SplitPlan | None
    """Rows with few query tokens; None for encoders."""
    prefill: PrefillPlan | None
    """Rows with many; None where the host knows that there are none."""
    causal: bool | torch.Tensor = True
    """One flag, or ``[R]`` per request on the device."""
    mm_ranges: torch.Tensor | None = None
    """``[R, max_ranges, 2]`` int32, device: inclusive, attended in both directions; zeros pad."""
    rswa_prefix_lens: torch.Tensor | None = None
    """``[R]`` int32, device."""
    rswa_window: int | None = None
    shared: SharedPrefix | None = None
    """The batch's common prefix, computed once for all requests; None without one."""


@dataclass
class SharedPrefix:
    """Cascade attention: the common prefix as one request that every token attends whole."""

    length: int
    """Tokens of the prefix, a multiple of the block size."""
    prefix: TritonAttentionMetadata
    """All tokens as one request over the prefix, not causal."""
    own: TritonAttentionMetadata
    """The batch with every request's keys after the prefix."""
    outputs: torch.Tensor
    """``[2, T, H, Dv]`` scratch in the model dtype's accumulator: prefix part, own part."""
    lses: torch.Tensor
    """``[2, T, H]`` fp32 scratch."""


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder[TritonAttentionMetadata]):
    """One plan per step and KV geometry, shared by all layers of the group."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            kv_cache_spec: the group's spec.
            layer_names: layers of the group.
            vllm_config: engine limits; ``num_heads`` is needed.
            device: where the records' tensors live.

        Raises:
            ValueError: ``num_heads`` is missing or does not fit the KV heads.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        heads = vllm_config.num_heads
        if heads is None:
            raise ValueError("vllm_config.num_heads is needed by TRITON_ATTN, got None")
        if heads % spec.num_kv_heads:
            raise ValueError(
                f"vllm_config.num_heads ({heads}) must be a multiple of the spec's num_kv_heads "
                f"({spec.num_kv_heads})"
            )
        self.shape = DenseShape(
            num_heads=heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.v_size,
            itemsize=spec.dtype.itemsize,
            stored_bits=spec.cache_dtype.element(spec.dtype).itemsize
            * 8
            // spec.cache_dtype.packing,
        )
        self.is_encoder = isinstance(spec, EncoderOnlyAttentionSpec)
        self.is_cross = isinstance(spec, CrossAttentionSpec)
        self.window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self.chunk, self.lookback = None, 0
        span = self.window
        if isinstance(spec, ChunkedLocalAttentionSpec):
            self.chunk, self.lookback = spec.attention_chunk_size, spec.chunk_lookback
            span = self.chunk * (1 + self.lookback)
        self.kind, multiprocessors = _device_facts(self.device)
        self.buffers = GraphBuffers(self.device)
        longest = vllm_config.max_model_len
        self.planner = SplitPlanner(
            self.shape,
            self.kind,
            multiprocessors,
            SplitLimits(
                vllm_config.max_num_seqs,
                vllm_config.max_num_batched_tokens,
                max(longest, CROSS_KV_LEN) if self.is_cross else longest,
                span,
            ),
            vllm_config.max_decode_query_len,
            self.buffers,
            every_row=vllm_config.batch_invariant and not self.is_encoder,
        )
        if self.is_encoder:
            self.planner.short_query = 0
        self._shared: _SharedBuffers | None = None
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """The step's record; one kernel is launched, nothing is read back."""
        batch = common_attn_metadata
        tiles = 0
        if batch.max_query_len > self.planner.short_query:
            tiles = self._prefill_tiles(batch)
        return self._build(batch, common_prefix_len, tiles, 1 << 30)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """The record to capture with: any batch of up to as many tokens can be replayed.

        Nothing of it depends on this batch's lengths: the prefill kernel is captured too, unless no
        row of so few tokens could reach it.
        """
        batch = common_attn_metadata
        tokens, short = batch.num_actual_tokens, self.planner.short_query
        tiles = 0
        if tokens > short:
            rows = min(batch.num_reqs, tokens // (short + 1))
            tiles = tokens // self.planner.prefill.query_tile + rows
        return self._build(batch, 0, tiles, 2 * self.planner.num_multiprocessors)

    def _prefill_tiles(self, batch: CommonAttentionMetadata) -> int:
        """The host's estimate of the step's prefill tiles; at least one."""
        lens = batch.query_start_loc_cpu.diff()
        long = lens[lens > self.planner.short_query]
        size = self.planner.prefill.query_tile
        return max(1, int(((long + (size - 1)) // size).sum()))

    def _build(
        self,
        batch: CommonAttentionMetadata,
        common_prefix_len: int,
        tiles: int,
        most_programs: int,
    ) -> TritonAttentionMetadata:
        debug_batch(batch, self.kv_cache_spec)
        self._check_limits(batch)
        refuse_fields(batch, "TRITON_ATTN", "dcp_local_seq_lens")
        seq_lens = batch.seq_lens
        causal: bool | torch.Tensor = batch.causal
        if self.is_cross or self.is_encoder:
            causal = False
            if self.is_cross and batch.encoder_seq_lens is not None:
                seq_lens = batch.encoder_seq_lens
        if isinstance(causal, torch.Tensor) and tuple(causal.shape) != (batch.num_reqs,):
            raise ValueError(
                f"causal must be a bool or have shape [{batch.num_reqs}], got {[*causal.shape]}"
            )
        prefixes = batch.rswa_prefix_lens
        self.planner.fill(batch.query_start_loc, seq_lens, self.window, self.chunk, self.lookback)
        record = TritonAttentionMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_reqs=batch.num_reqs,
            query_start_loc=batch.query_start_loc,
            seq_lens=seq_lens,
            block_table=batch.block_table_tensor,
            split=None if self.is_encoder else self.planner.split(),
            prefill=self.planner.prefill_plan(batch.num_reqs, tiles, most_programs),
            causal=causal,
            mm_ranges=_range_tensor(batch, self.device),
            rswa_prefix_lens=prefixes,
            rswa_window=None if prefixes is None else self.vllm_config.rswa_window,
        )
        return record

    def _check_limits(self, batch: CommonAttentionMetadata) -> None:
        limits = self.planner.limits
        for name, value, limit in (
            ("num_reqs", batch.num_reqs, limits.max_num_seqs),
            ("num_actual_tokens", batch.num_actual_tokens, limits.max_num_tokens),
        ):
            if value > limit:
                raise ValueError(
                    f"{name} ({value}) exceeds the engine's limit ({limit}), which the builder's "
                    "buffers are sized for"
                )


def _device_facts(device: torch.device) -> tuple[DeviceKind, int]:
    """Kind and number of multiprocessors; a CPU stands for a small GPU, to test with."""
    if device.type != "cuda":
        return DeviceKind.SM90, 3
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return DeviceKind.ROCM, properties.multi_processor_count
    capability = ComputeCapability(major=properties.major, minor=properties.minor)
    return kind_of(capability) or DeviceKind.SM80, properties.multi_processor_count


def _range_tensor(batch: CommonAttentionMetadata, device: torch.device) -> torch.Tensor | None:
    """``[R, max_ranges, 2]`` int32 of the batch's multimodal ranges; None when there are none."""
    ranges = getattr(batch, "mm_req_doc_ranges", None)
    if not ranges or not any(ranges.values()):
        return None
    most = max(len(spans) for spans in ranges.values())
    table = torch.zeros((batch.num_reqs, most, 2), dtype=torch.int32)
    for req, spans in ranges.items():
        if spans:
            table[req, : len(spans)] = torch.tensor(spans, dtype=torch.int32)
    return table.to(device, non_blocking=True)
