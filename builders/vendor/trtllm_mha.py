"""Metadata of TRTLLM_MHA: page tables and lengths for kernels that are called without a plan.

Everything that depends on KV lengths is on the device, in buffers whose addresses a CUDA graph may
keep. The host splits a step into decodes and prefills by its query lengths alone; its bounds of KV
lengths decide nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_limits
from builders.pages.paging import compute_slot_mapping
from builders.pages.phase_tables import PhaseTable, StepRows, fill_tables
from builders.pages.window_pool import translate_blocks, translate_slots
from builders.vendor.flashinfer_parts import install as compat
from builders.vendor.flashinfer_parts.install import DirectCalls
from builders.vendor.trtllm_parts import mha_choice as choice
from builders.vendor.trtllm_parts.mha_buffers import DraftBuffers, PhaseBuffers
from builders.vendor.trtllm_parts.mha_choice import NAME, KernelRule, Phase, VendorKernel
from builders.vendor.trtllm_parts.mha_record import DecodeRows, PrefillRows, TrtllmMhaMetadata
from builders.vendor.trtllm_parts.mha_split import StepSplit, causal_mask, ragged_mask, split_step
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.dtypes import KVQuantMode
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, SlidingWindowSpec
from specs.positions import cut_window
from specs.sentinels import PAD_SLOT_ID

if TYPE_CHECKING:
    import numpy as np


class TrtllmMhaMetadataBuilder(AttentionMetadataBuilder[TrtllmMhaMetadata]):
    """Builder that gives leading short requests to the decode kernel, others to prefill."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True
    phases: tuple[Phase, ...] = (Phase.PREFILL, Phase.DECODE)

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
            ValueError: the kernels do not serve the spec, a setting or the device; the message
                holds every reason.
            FlashInferUnavailableError: FlashInfer cannot be used here.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        capability = choice.capability_of(self.device)
        self.num_heads = choice.check_support(spec, vllm_config, capability, self.phases)
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self.sliding_window = cut_window(window)
        self.query_dtype = spec.dtype.torch
        self._is_fp8 = spec.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        self.calls = compat.load_calls()
        self._buffers = GraphBuffers(self.device)
        self._masks: dict[int, torch.Tensor] = {}
        self._drafts: list[DraftBuffers] = []
        self.block_map: torch.Tensor | None = None
        self._captured = False
        rules = {phase: choice.rule_of(phase, capability) for phase in self.phases}
        reason = choice.version_reason(self.phases, capability, spec.cache_dtype, self.calls)
        decode = rules.get(Phase.DECODE)
        reason = reason or choice.stride_reason(decode, spec)
        if reason is not None:
            raise ValueError(f"{NAME}: {reason}")
        self._threshold = self._decode_threshold(decode)
        self._takes_ragged = decode is not None and self._is_ragged(decode)
        longest = min(vllm_config.max_num_batched_tokens, vllm_config.max_model_len)
        limits = {Phase.PREFILL: longest, Phase.DECODE: self._threshold}
        self._phases = {
            phase: PhaseBuffers(
                self, self.num_heads, self.sliding_window, rule, limits[phase], self._is_fp8
            )
            for phase, rule in rules.items()
            if rule is not None
        }
        self._declare()
        self._init_reorder_batch_threshold(self._threshold)

    def _decode_threshold(self, rule: KernelRule | None) -> int:
        """Most tokens of a request that the decode kernel takes; 0 without a decode kernel."""
        if rule is None:
            return 0
        most = self.vllm_config.max_decode_query_len
        if rule.kernel is not VendorKernel.XQA:
            return most
        is_right = self.calls.verifies_windows or self.sliding_window is None
        is_right &= self.calls.verifies_fp8 or not self._is_fp8
        if self.vllm_config.has_sinks:
            spec: Any = self.kv_cache_spec
            most = choice.most_tokens_with_sinks(self.num_heads // spec.num_kv_heads, most)
        return most if is_right else 1

    def _is_ragged(self, rule: KernelRule) -> bool:
        """True where one call takes requests with different numbers of tokens."""
        if rule.kernel is VendorKernel.XQA:
            return self._threshold > 1 and self.calls.verifies_ragged
        return rule.ragged

    def _declare(self) -> None:
        config, spec = self.vllm_config, self.kv_cache_spec
        tokens, head_size = config.max_num_batched_tokens, getattr(spec, "head_size", 0)
        dtypes = {"fp8_query": torch.float8_e4m3fn, "dense_query": self.query_dtype}
        for name in {own.query_name for own in self._phases.values()} - {None}:
            assert name is not None
            shape = tokens, self.num_heads, head_size
            self._buffers.declare(name, shape, dtypes[name])
        self._buffers.declare("keyless", (tokens, 1, 1), torch.bool)
        words = cdiv(self._threshold, 32)
        if words and self._takes_ragged:
            self._buffers.declare("ragged_mask", (tokens, words), torch.int32)

    def use_pool(self, block_map: torch.Tensor) -> None:
        """Tell the builder, before the first build, that the group's layers have their own pool.

        Args:
            block_map: ``[N]`` int32, device: for each block in the batches' tables the block of the
                pool, 0 where there is none. Each build reads it, so blocks may move between steps.
        """
        tokens = self.vllm_config.max_num_batched_tokens
        self._buffers.declare("slots", (tokens,), torch.int64, fill=PAD_SLOT_ID)
        self.block_map = block_map

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TrtllmMhaMetadata:
        """The step's record; nothing is copied back to the host.

        Args:
            common_prefix_len: ignored, since every request reads its own pages.
            common_attn_metadata: the batch; its host query lengths must equal the device's.
            fast_build: ignored.

        Raises:
            ValueError: the batch exceeds the engine's limits.
            NotImplementedError: the batch's mask is not plainly causal.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        refuse_fields(batch, NAME, "dcp_local_seq_lens", "rswa_prefix_lens")
        if batch.causal is not True:
            raise NotImplementedError(f"{NAME} takes causal batches, got causal={batch.causal!r}")
        if any((getattr(batch, "mm_req_doc_ranges", None) or {}).values()):
            raise NotImplementedError(f"{NAME} does not support mm_req_doc_ranges")
        reqs = batch.num_reqs
        # As a numpy array: an operation on a few hundred numbers takes a tensor four times as long.
        starts = batch.query_start_loc_cpu.numpy()[: reqs + 1]
        query_lens = starts[1:] - starts[:-1]
        split = self.split(query_lens.tolist())
        if split.num_tokens > batch.num_actual_tokens:
            raise ValueError(
                f"query_start_loc_cpu must end at most at num_actual_tokens "
                f"({batch.num_actual_tokens}), got {split.num_tokens}"
            )
        record = TrtllmMhaMetadata(
            slot_mapping=self.own_slots(batch.slot_mapping),
            num_actual_tokens=split.num_tokens,
            num_reqs=reqs,
            query_start_loc=batch.query_start_loc[: reqs + 1],
            seq_lens=batch.seq_lens[:reqs],
            block_table=self.own_blocks(batch.block_table_tensor[:reqs]),
            sliding_window=self.sliding_window,
            split=split,
            decode=None,
            prefill=None,
            keyless=None,
            **self.pages,
        )
        if self._may_lack_keys(batch, query_lens):
            record.keyless = self._keyless(record)
        self._fill(record)
        return record

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TrtllmMhaMetadata:
        """The record to capture a graph with.

        After a build, the graph can be replayed for any batch of the same number of requests with
        the captured number of tokens each. A graph of decodes or verifies can also be replayed for
        fewer requests followed by padding.

        Args:
            common_attn_metadata: a batch of requests of one query length, without padding.

        Raises:
            ValueError: the requests have several query lengths.
        """
        batch = common_attn_metadata
        lens = batch.query_start_loc_cpu[: batch.num_reqs + 1].diff().tolist()
        if len(set(lens)) != 1 or lens[0] == 0:
            raise ValueError(
                "query_start_loc_cpu must give every request of a captured batch the same number "
                f"of tokens, got {lens}"
            )
        self._captured = True
        # Calls self.build, since a wrapper around this builder may have replaced it.
        return self.build(0, batch)

    def update_draft_decode_metadata(self, metadata: TrtllmMhaMetadata) -> None:
        """Write the tables again from the current values of the record's lengths; safe to capture.

        Args:
            metadata: a record of this builder.
        """
        debug_limits(metadata.seq_lens, self.step_limits)
        self._fill(copy.copy(metadata))
        if metadata.keyless is not None:
            self._keyless(metadata)

    def build_draft_steps(
        self, common_attn_metadata: CommonAttentionMetadata, num_steps: int
    ) -> list[TrtllmMhaMetadata]:
        """Records of consecutive draft steps, all made before the first of them runs.

        Step i has one token per request, and i + 1 keys more than the batch. Each step has tables
        of its own, at addresses that a graph may keep. A request that would outgrow the model or
        its table becomes padding: no keys, slot -1.

        Args:
            common_attn_metadata: the batch before the draft steps; all its keys are written.
            num_steps: number of draft steps.

        Raises:
            ValueError: the batch exceeds the engine's limits.
        """
        self.check_batch(0, common_attn_metadata, fast_build=True)
        page, reqs = self.kv_cache_spec.block_size, common_attn_metadata.num_reqs
        table = common_attn_metadata.block_table_tensor[:reqs]
        room = min(self.vllm_config.max_model_len, table.shape[1] * page)
        is_live = common_attn_metadata.query_start_loc[: reqs + 1].diff() > 0
        own_table, records = self.own_blocks(table), []
        for step in range(num_steps):
            own = self.draft_buffers(step)
            starts = own.starts[: reqs + 1]
            lens = common_attn_metadata.seq_lens[:reqs] + (step + 1)
            own.seq_lens[:reqs] = torch.where(is_live & (lens <= room) & (lens > step + 1), lens, 0)
            slots = compute_slot_mapping(table, starts, own.seq_lens[:reqs], reqs, page)
            if self.block_map is not None:
                slots = translate_slots(slots, self.block_map, page)
            own.slots[:reqs] = slots
            torch.eq(own.seq_lens[:reqs, None, None], 0, out=own.keyless[:reqs])
            record = TrtllmMhaMetadata(
                slot_mapping=own.slots[:reqs],
                num_actual_tokens=reqs,
                num_reqs=reqs,
                query_start_loc=starts,
                seq_lens=own.seq_lens[:reqs],
                block_table=own_table,
                sliding_window=self.sliding_window,
                split=self.split([1] * reqs),
                decode=None,
                prefill=None,
                keyless=own.keyless[:reqs],
                **self.pages,
            )
            self.fill(record, own.phase, None)
            records.append(record)
        return records

    def draft_buffers(self, step: int) -> DraftBuffers:
        """Buffers of one draft step; made when they are first asked for."""
        while len(self._drafts) <= step:
            decode = self._phases[Phase.DECODE]
            config, page = self.vllm_config, self.kv_cache_spec.block_size
            table = PhaseTable(config.max_num_seqs, decode.max_kv_len, page, self.device)
            self._drafts.append(DraftBuffers.of(decode.with_table(table)))
        return self._drafts[step]

    def own_blocks(self, block_table: torch.Tensor) -> torch.Tensor:
        """A batch's block table, in blocks of the group's own pool where it has one."""
        return (
            block_table if self.block_map is None else translate_blocks(block_table, self.block_map)
        )

    def own_slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """A batch's slots, in the group's own pool where it has one.

        Translated slots are in a buffer, because a graph that writes the cache keeps its address.
        """
        if self.block_map is None:
            return slot_mapping
        page = self.kv_cache_spec.block_size
        return self._buffers.write("slots", translate_slots(slot_mapping, self.block_map, page))

    def _set_block_table(self, metadata: TrtllmMhaMetadata, block_table: torch.Tensor) -> None:
        metadata.block_table = self.own_blocks(block_table[: metadata.num_reqs])
        metadata.slot_mapping = self.own_slots(metadata.slot_mapping)
        metadata.sliding_window = self.sliding_window
        self._fill(metadata)

    def split(self, query_lens: list[int]) -> StepSplit:
        """The leading requests that the decode kernel takes."""
        return split_step(query_lens, self._threshold, self._takes_ragged)

    # -- arguments of the calls

    def _fill(self, record: TrtllmMhaMetadata) -> None:
        """Store the arguments of the step's calls in a record that no caller has yet."""
        split = record.split
        record.decode = record.prefill = None
        # A captured graph of decodes may be replayed for a step without tokens, so its tables are
        # written.
        decode = prefill = None
        if split.num_decodes or (self._captured and split.num_tokens == 0):
            decode = self._phases.get(Phase.DECODE)
        if split.max_prefill_len:
            prefill = self._phases.get(Phase.PREFILL)
            if prefill is None:
                raise ValueError(
                    f"query_start_loc_cpu must give every request 1 to {self._threshold} tokens "
                    f"where {NAME} takes decodes alone, got one of {split.max_prefill_len}"
                )
        self.fill(record, decode, prefill)

    def fill(
        self, record: TrtllmMhaMetadata, decode: PhaseBuffers | None, prefill: PhaseBuffers | None
    ) -> None:
        """Write the tables of a step's phases in one launch, and store their calls' arguments.

        Where there are no prefills, padding behind the decodes is listed with the decodes, because
        the replay of a graph may count it as decodes.
        """
        if decode is None and prefill is None:
            return
        split = record.split
        listed = split.num_listed if prefill is not None else record.num_reqs
        step = StepRows(
            record.block_table,
            record.seq_lens,
            record.query_start_loc,
            num_decodes=listed if decode is not None else 0,
            # A row without keys reads keys of page 0 instead, and its output is cleared.
            least_len=1 if split.is_ragged else split.decode_query_len or max(self._threshold, 1),
        )
        own, others = (None if phase is None else phase.table for phase in (decode, prefill))
        fill_tables(step, own, others, self.sliding_window)
        if decode is not None and split.num_decodes:
            record.decode = self._decode(split, decode)
        if prefill is not None:
            record.prefill = self._prefill(record, prefill, record.num_reqs - step.num_decodes)

    def _decode(self, split: StepSplit, own: PhaseBuffers) -> DecodeRows:
        live, length, table = split.num_decodes, split.decode_query_len, own.table
        query_starts = table.query_starts[: live + 1] if split.is_ragged else None
        mask = None
        if own.rule.kernel is VendorKernel.XQA and length > 1:
            mask = self._mask(length)[:live]
            if query_starts is not None:
                bits = ragged_mask(self._mask(length)[0], query_starts, split.num_decode_tokens)
                mask = self._buffers.write("ragged_mask", bits).view(torch.uint16)
        kv_lens, attend = table.kv_lens[:live], DirectCalls.gen_decode
        if own.rule.kernel is VendorKernel.XQA:
            kv_lens = kv_lens.view(torch.uint32)
            attend = DirectCalls.xqa if query_starts is None else DirectCalls.ragged_xqa
        return DecodeRows(
            **self._common(own, 0, split.num_decode_tokens),
            attend=attend,
            pages=table.pages[:live],
            kv_lens=kv_lens,
            max_query_len=length,
            mask=mask,
            query_starts=query_starts,
            kv_starts=None,
        )

    def _prefill(self, record: TrtllmMhaMetadata, own: PhaseBuffers, reqs: int) -> PrefillRows:
        split, table = record.split, own.table
        first, is_v2 = split.num_decode_tokens, own.rule.kernel is VendorKernel.FMHA_V2
        return PrefillRows(
            **self._common(own, first, split.num_tokens - first),
            attend=DirectCalls.fmha_v2 if is_v2 else DirectCalls.gen_prefill,
            pages=table.pages[:reqs],
            kv_lens=table.kv_lens[:reqs],
            max_query_len=split.max_prefill_len,
            mask=None,
            query_starts=table.query_starts[: reqs + 1],
            kv_starts=table.kv_starts[: reqs + 1],
        )

    def _common(self, own: PhaseBuffers, first_token: int, num_tokens: int) -> dict[str, Any]:
        query = None
        if own.query_name is not None:
            query = self._buffers[own.query_name][first_token : first_token + num_tokens]
        return {
            "rule": own.rule,
            "calls": self.calls,
            "first_token": first_token,
            "num_tokens": num_tokens,
            "max_kv_len": own.max_kv_len,
            "workspace": own.workspace,
            "counters": own.counters,
            "query": query,
        }

    def _mask(self, query_len: int) -> torch.Tensor:
        if query_len not in self._masks:
            mask = causal_mask(self.vllm_config.max_num_seqs, query_len)
            self._masks[query_len] = mask.to(self.device)
        return self._masks[query_len]

    # -- rows without keys

    def _may_lack_keys(self, batch: CommonAttentionMetadata, query_lens: np.ndarray) -> bool:
        """True where a row may have tokens but no key, as padding left by draft steps has."""
        if self.vllm_config.speculative is not None:
            return True
        bound = getattr(batch, "seq_lens_cpu_upper_bound", None)
        if bound is None or query_lens.size == 0:
            return False
        lens = bound.numpy()[: query_lens.size]
        return bool(lens.min() <= 0) and bool(((lens <= 0) & (query_lens > 0)).any())

    def _keyless(self, record: TrtllmMhaMetadata) -> torch.Tensor | None:
        tokens = record.num_actual_tokens
        if tokens == 0:
            return None
        ends = record.query_start_loc[1:].contiguous()
        places = torch.arange(tokens, dtype=torch.int32, device=ends.device)
        rows = torch.searchsorted(ends, places, right=True).clamp_(max=len(ends) - 1)
        keyless = record.seq_lens[rows] == 0
        return self._buffers.write("keyless", keyless[:, None, None])
