"""Metadata of TRTLLM_MLA: block tables, padded rows and expanded prefill, without a plan.

Everything that depends on KV lengths is on the device, in buffers whose addresses a CUDA graph may
keep. The host splits a step into decodes and prefills by its query lengths alone; its bounds of KV
lengths decide nothing. The record serves the vendor's kernels, and TRITON_MLA's decode kernel where
that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_limits
from builders.dense.record import TritonAttentionMetadata
from builders.device import device_facts
from builders.latent.prefill import ExpandedPrefill, with_block_table
from builders.latent.record import LatentStep, captured_query_len, split_step
from builders.latent.rows import flag_keyless, pad_rows, unpad_rows
from builders.latent.tables import LatentTables
from builders.latent.triton_mla import decode_planner
from builders.splitkv.planner import SplitPlanner
from builders.splitkv.record import SplitLimits, VisibleKeys
from builders.vendor.trtllm_parts import mha_choice as trtllm_mha_choice
from builders.vendor.trtllm_parts import mla_calls as compat
from builders.vendor.trtllm_parts.mha_buffers import MAX_MULTIPROCESSORS
from builders.vendor.trtllm_parts.mla_calls import LatentCalls
from builders.vendor.trtllm_parts.mla_choice import NAME, check_support
from specs.attention import AttentionCGSupport, MlaKernel
from specs.base import cdiv
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec

WORKSPACE_BYTES = 128 << 20
"""Bytes of scratch of one of the vendor's kernels: counters, then partial states."""


@dataclass
class LatentRows:
    """The decode rows of a step, from decodes, verifies or draft-extends."""

    calls: LatentCalls | None
    """The vendor's functions; None where TRITON_MLA's kernel takes the rows."""
    planned: TritonAttentionMetadata | None
    """The record for TRITON_MLA's kernel; None where the vendor's kernel takes the rows."""
    num_reqs: int
    query_len: int
    """Query rows that the kernel has for each request, padding included."""
    num_tokens: int
    """Tokens of the requests; they are the step's first query rows."""
    pages: torch.Tensor
    """``[R, width]`` int32, contiguous."""
    kv_lens: torch.Tensor
    """``[R]`` int32 keys of each request."""
    max_kv_len: int
    """Bound of ``kv_lens``, equal in all steps."""
    workspace: torch.Tensor | None
    """uint8 scratch of the decode kernel alone, zeroed when made."""
    counters: torch.Tensor | None
    """uint8 counters of the decode kernel alone, zeroed when made."""
    query: torch.Tensor
    """``[R * query_len, H, L + r]`` scratch in the kernel's type."""
    padded: torch.Tensor | None
    """``[R * query_len]`` int32 token of each of the kernel's rows, -1 for padding, which precedes
    a request's tokens; None where every request has ``query_len`` tokens."""
    unpadded: torch.Tensor | None
    """``[num_tokens]`` int32 kernel row of each token; None where every request has ``query_len``
    tokens."""


@dataclass
class RaggedChunks:
    """Prefill rows for the vendor's kernel, which reads keys of one request behind another."""

    calls: LatentCalls
    dtype: torch.dtype
    """Type in which the kernel reads queries, keys and values: the model's, or e4m3."""
    workspace: torch.Tensor
    """uint8 scratch of the prefill kernel alone, zeroed when made."""
    starts: torch.Tensor | None
    """``[chunks, R' + 1]`` int32: first key of each request in a chunk; None without context."""
    keyless: torch.Tensor | None
    """``[chunks, T']`` bool: True for tokens of requests without a key in a chunk, whose output the
    kernel leaves undefined; None without context."""


@dataclass
class TrtllmMlaMetadata(LatentStep):
    """A step of latent attention, split into decodes and prefills by the host's query lengths."""

    query_lens: tuple[int, ...]
    """Tokens of each decode, on the host."""
    decode: LatentRows | None
    ragged: RaggedChunks | None
    """Further arguments for the vendor's prefill kernel; None where that kernel is not used."""


class TrtllmMlaMetadataBuilder(AttentionMetadataBuilder[TrtllmMlaMetadata]):
    """Builder that gives decodes and verifies to the decode kernel, and expands prefills."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            kv_cache_spec: the group's spec, :class:`specs.kv_cache.MLAAttentionSpec`.
            layer_names: layers of the group.
            vllm_config: engine limits; ``num_heads`` is needed.
            device: where the records' tensors live.

        Raises:
            ValueError: the kernels do not serve the spec, a setting or the device, with every
                reason; or the bound of the workspace is smaller than one chunk.
            FlashInferUnavailableError: the vendor's kernels are wanted and FlashInfer cannot be
                used here.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        capability = trtllm_mha_choice.capability_of(self.device)
        self.num_heads = check_support(spec, vllm_config, capability)
        self._is_gen = vllm_config.kernels.latent.rows is not MlaKernel.TRITON
        self.calls = compat.load_latent_calls() if self._is_gen else None
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.threshold = self.reorder_batch_threshold or 1
        self.buffers = GraphBuffers(self.device)
        self.planner: SplitPlanner | None = None
        gpu = device_facts(self.device)
        most = vllm_config.max_num_seqs
        self.step_limits = self.step_limits.with_verifies(self.threshold)
        tokens = self.step_limits.max_num_tokens
        if not self._is_gen:
            limits = SplitLimits(most, tokens, vllm_config.max_model_len, None)
            self.planner = decode_planner(spec, vllm_config, gpu, limits, self.buffers)
        self.expanded: ExpandedPrefill | None = None
        if not vllm_config.skip_prefill:
            self.expanded = ExpandedPrefill(spec, vllm_config, gpu, self.buffers)
        self._max_kv_len = vllm_config.max_model_len
        self._tables = LatentTables(most, self._max_kv_len, spec.block_size, self.device)
        self._has_padding = False
        self._declare(tokens)

    def _declare(self, tokens: int) -> None:
        spec: Any = self.kv_cache_spec
        most, buffers, device = self.vllm_config.max_num_seqs, self.buffers, self.device
        rows, width = most * self.threshold, spec.kv_lora_rank + spec.qk_rope_head_dim
        is_fp8 = self._is_gen and spec.cache_dtype.is_quantized
        dtype = torch.float8_e4m3fn if is_fp8 else spec.dtype.torch
        buffers.declare("query", (rows, self.num_heads, width), dtype)
        buffers.declare("keyless", (tokens,), torch.bool)
        for name, extent in (("padded", rows), ("unpadded", rows), ("row_starts", most + 1)):
            buffers.declare(name, (extent,), torch.int32)
        self._one_each = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.workspace = self.counters = self.prefill_workspace = None
        if not self._is_gen:
            return
        # Zeroed once and used by this kernel alone, which leaves its counters at zero.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        entries = max(rows * self.num_heads, MAX_MULTIPROCESSORS)
        self.counters = torch.zeros(cdiv(entries, 8) * 32, dtype=torch.uint8, device=device)
        if self.expanded is not None:
            self.prefill_workspace = torch.zeros_like(self.workspace)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TrtllmMlaMetadata:
        """The step's record; nothing is copied back to the host.

        Args:
            common_prefix_len: ignored, since every request reads its own pages.
            common_attn_metadata: the batch; its host query lengths must equal the device's.
            fast_build: ignored.

        Raises:
            ValueError: the batch exceeds the engine's limits, or has prefills although
                ``skip_prefill`` is set.
            NotImplementedError: the batch's mask is not plainly causal.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        fields = split_step(batch, self.threshold, NAME)
        decodes = fields["num_decodes"]
        lens = batch.query_start_loc_cpu[: decodes + 1].diff()
        record = TrtllmMlaMetadata(
            **fields, **self.pages, query_lens=tuple(lens.tolist()), decode=None, ragged=None
        )
        if self._may_lack_keys(batch, record):
            flags = self.buffers.view("keyless", record.num_decode_tokens)
            starts = record.query_start_loc[: decodes + 1]
            record.keyless = flag_keyless(starts, record.seq_lens[:decodes], flags)
        self._fill(record)
        if record.num_prefills:
            self._plan_prefill(record, batch)
        return record

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TrtllmMlaMetadata:
        """The record to capture a graph with.

        After a build, the graph can be replayed for any batch of the same number of requests, which
        have the captured number of tokens or, at the end, none.

        Args:
            common_attn_metadata: a batch of requests of one query length; padding may follow.

        Raises:
            ValueError: the requests have several query lengths.
        """
        batch = common_attn_metadata
        captured_query_len(batch)
        self._has_padding = True
        # Calls self.build, since a wrapper around this builder may have replaced it.
        return self.build(0, batch)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> TrtllmMlaMetadata:
        """The record of one draft step; requests that outgrow the model become padding, which only
        the device knows.
        """
        self._has_padding = True
        return self.build(0, common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata: TrtllmMlaMetadata) -> None:
        """Write tables and lengths again from the record's current values; safe to capture.

        Args:
            metadata: a record of this builder in which every row is a decode.
        """
        debug_limits(metadata.seq_lens, self.step_limits)
        if metadata.keyless is not None:
            flag_keyless(metadata.query_start_loc, metadata.seq_lens, metadata.keyless)
        self._filled_rows(metadata)

    def _set_block_table(self, metadata: TrtllmMlaMetadata, block_table: torch.Tensor) -> None:
        reqs, first = len(metadata.seq_lens), metadata.num_decodes
        metadata.block_table = block_table[:reqs]
        if metadata.prefill is not None:
            table, slots = block_table[first:reqs], metadata.slot_mapping
            metadata.prefill = with_block_table(metadata.prefill, table, slots)
        self._fill(metadata)

    # -- decodes

    def _fill(self, record: TrtllmMlaMetadata) -> None:
        """Store the decode rows in a record that no caller has yet."""
        record.decode = self._filled_rows(record)

    def _filled_rows(self, record: TrtllmMlaMetadata) -> LatentRows | None:
        """Write the decode rows' tables; None where no decode has tokens.

        Padding behind the decodes is written too, because a graph's replay may count it as decodes.
        """
        lens, reqs = record.query_lens, record.num_decodes
        live = [row for row, length in enumerate(lens) if length]
        query_len = max(lens, default=0)
        starts, seq_lens = record.query_start_loc[: reqs + 1], record.seq_lens[:reqs]
        table = record.block_table[:reqs]
        if live != list(range(len(live))):
            chosen = self._on_device(live)
            ends = starts[1:][chosen]
            starts = torch.cat([ends.new_zeros(1), ends])
            seq_lens, table = seq_lens[chosen], table[chosen]
        pages, kv_lens = self._tables.fill(table, starts.diff(), seq_lens, self.threshold)
        if not live:
            return None
        count, is_ragged = len(live), len({lens[row] for row in live}) > 1
        rows, tokens = count * query_len, sum(lens)
        padded = unpadded = None
        if is_ragged:
            view = self.buffers.view
            padded = pad_rows(starts[: count + 1], query_len, view("padded", rows))
            unpadded = unpad_rows(starts[: count + 1], query_len, view("unpadded", tokens))
        planned = None
        if self.planner is not None:
            if is_ragged:
                starts = self.buffers.view("row_starts", count + 1)
                torch.mul(self._one_each[: count + 1], query_len, out=starts)
                kv_lens, pages = kv_lens[:count], pages[:count]
            self.planner.fill(starts, kv_lens, VisibleKeys(None), is_causal=True)
            planned = self._planned(record, starts, kv_lens, pages)
        spec: Any = self.kv_cache_spec
        width = spec.kv_lora_rank + spec.qk_rope_head_dim
        return LatentRows(
            calls=self.calls,
            planned=planned,
            num_reqs=count,
            query_len=query_len,
            num_tokens=tokens,
            pages=pages[:count],
            kv_lens=kv_lens[:count],
            max_kv_len=self._max_kv_len,
            workspace=self.workspace,
            counters=self.counters,
            query=self.buffers.view("query", rows, self.num_heads, width),
            padded=padded,
            unpadded=unpadded,
        )

    def _planned(
        self,
        record: TrtllmMlaMetadata,
        starts: torch.Tensor,
        kv_lens: torch.Tensor,
        pages: torch.Tensor,
    ) -> TritonAttentionMetadata:
        assert self.planner is not None
        return TritonAttentionMetadata(
            slot_mapping=record.slot_mapping,
            num_actual_tokens=record.num_decode_tokens,
            num_reqs=len(kv_lens),
            query_start_loc=starts,
            seq_lens=kv_lens,
            block_table=pages,
            split=self.planner.split(),
            prefill=None,
            **self.pages,
        )

    def _may_lack_keys(self, batch: CommonAttentionMetadata, record: TrtllmMlaMetadata) -> bool:
        """True where a row may have no request or no key, as padding left by draft steps has."""
        if self._has_padding or self.vllm_config.speculative is not None:
            return True
        if sum(record.query_lens) < record.num_decode_tokens:
            return True
        bound = getattr(batch, "seq_lens_cpu_upper_bound", None)
        if bound is None:
            return False
        lens = torch.tensor(record.query_lens, dtype=torch.int32)
        return bool(((bound[: len(lens)] <= 0) & (lens > 0)).any())

    def _on_device(self, values: Sequence[int]) -> torch.Tensor:
        """An int64 tensor on the device, made without waiting for the device."""
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    # -- prefill

    def _plan_prefill(self, record: TrtllmMlaMetadata, batch: CommonAttentionMetadata) -> None:
        if self.expanded is None:
            raise ValueError(
                f"query_start_loc_cpu must give every request at most {self.threshold} tokens "
                f"where {NAME} was told skip_prefill, got one of {batch.max_query_len}"
            )
        prefill = record.prefill = self.expanded.plan(batch, record.num_decodes)
        if self.calls is None:
            return
        assert self.prefill_workspace is not None
        context, starts, keyless = prefill.context, None, None
        if context is not None:
            chunks, reqs = context.lens.shape
            starts = torch.zeros((chunks, reqs + 1), dtype=torch.int32, device=self.device)
            torch.cumsum(context.lens, 1, out=starts[:, 1:])
            ends = prefill.own.query_start_loc[1:].contiguous()
            places = torch.arange(prefill.num_tokens, dtype=torch.int32, device=self.device)
            rows = torch.searchsorted(ends, places, right=True).clamp_(max=reqs - 1)
            keyless = context.lens[:, rows] == 0
        spec: Any = self.kv_cache_spec
        is_fp8 = self.vllm_config.fp8_mla_prefill
        dtype = torch.float8_e4m3fn if is_fp8 else spec.dtype.torch
        record.ragged = RaggedChunks(self.calls, dtype, self.prefill_workspace, starts, keyless)
