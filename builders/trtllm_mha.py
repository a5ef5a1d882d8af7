"""Metadata of TRTLLM_MHA: page tables and lengths for kernels that are called without a plan.

Everything that varies with lengths is on the device, in buffers that a CUDA graph may keep. The
host's query lengths alone split a step; its bounds of the lengths of keys decide nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from builders import flashinfer_compat as compat
from builders import trtllm_mha_choice as choice
from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.buffers import GraphBuffers
from builders.common import CommonAttentionMetadata, refuse_fields
from builders.debug import debug_batch
from builders.flashinfer_compat import DirectCalls
from builders.flashinfer_lengths import skipped_pages
from builders.page_tables import PageTableBuffers
from builders.paging import compute_slot_mapping
from builders.trtllm_mha_choice import NAME, KernelRule, Phase, VendorKernel
from builders.window_pool import translate_blocks, translate_slots
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.dtypes import KVQuantMode
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, SlidingWindowSpec
from specs.sentinels import PAD_SLOT_ID

WORKSPACE_BYTES = 136 << 20
"""Scratch of one kernel family in one phase: 8 MiB of semaphores or counters, then partial states.
"""
MAX_MULTIPROCESSORS = 256
"""Of any GPU that trtllm-gen runs on: it has a counter for each."""
MASK_BITS = 16


@dataclass
class CalledRows:
    """Consecutive rows of the query, and what their one call is given."""

    rule: KernelRule
    calls: DirectCalls
    first_token: int
    num_tokens: int
    pages: torch.Tensor
    """``[R, width]`` int32, contiguous: the first page holds the first key of ``kv_lens``."""
    kv_lens: torch.Tensor
    """``[R]`` int32: keys that the table lists."""
    max_kv_len: int
    """Static bound of ``kv_lens``."""
    max_query_len: int
    workspace: torch.Tensor
    """uint8, zeroed when made, of this kernel and phase alone."""
    counters: torch.Tensor
    """uint8, likewise."""
    query: torch.Tensor | None
    """``[T, H, D]`` scratch where the kernel wants the query in another type, or dense."""


@dataclass
class DecodeRows(CalledRows):
    """Requests of one or a few tokens each."""

    mask: torch.Tensor | None
    """``[R, Tq, words]`` uint16: bits of the call's own keys that a row sees; XQA's verify."""
    query_starts: torch.Tensor | None
    """``[R + 1]`` int32 where requests have different numbers of tokens, at most
    ``max_query_len``; None where each has exactly so many."""


@dataclass
class PrefillRows(CalledRows):
    """Requests of any length: prefills, extends, padding."""

    query_starts: torch.Tensor
    """``[R + 1]`` int32, from 0."""
    kv_starts: torch.Tensor
    """``[R + 1]`` int32, from 0."""


@dataclass(frozen=True)
class StepSplit:
    """How the requests of a step go to the two phases, from the host's query lengths."""

    decode_rows: tuple[int, ...]
    """Requests that the decode kernel takes; empty ones may lie between."""
    num_decode_tokens: int
    decode_query_len: int
    """Tokens of every decode, or most of one where they are ragged; 0 without decodes."""
    is_ragged: bool
    num_tokens: int
    max_prefill_len: int
    """Most tokens of a request behind the decodes; 0 where none has any."""


@dataclass
class TrtllmMhaMetadata(AttentionMetadata):
    """A step of dense attention for one KV cache group."""

    num_actual_tokens: int
    num_reqs: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    sliding_window: int | None
    """Window that the page tables were cut to; None where they list every key."""
    split: StepSplit
    decode: DecodeRows | None
    prefill: PrefillRows | None
    keyless: torch.Tensor | None
    """``[T, 1, 1]`` bool, device: rows without any key, which kernels leave undefined; None where
    there cannot be such rows."""


def causal_mask(num_reqs: int, query_len: int) -> torch.Tensor:
    """Which of a verify's own tokens each of its rows sees, as XQA reads it: bit j of row i is set
    for j <= i.

    Args:
        num_reqs: requests.
        query_len: tokens of each.

    Returns:
        ``[num_reqs, query_len, words]`` uint16, an even number of words a row.
    """
    words = cdiv(query_len, 2 * MASK_BITS) * 2
    full = (1 << MASK_BITS) - 1
    rows = [
        [
            (1 << min(max(row + 1 - word * MASK_BITS, 0), MASK_BITS)) - 1 & full
            for word in range(words)
        ]
        for row in range(query_len)
    ]
    return torch.tensor([rows] * num_reqs, dtype=torch.uint16)


def split_step(query_lens: Sequence[int], threshold: int, is_ragged: bool) -> StepSplit:
    """Leading requests that the decode kernel takes in one call.

    Args:
        query_lens: tokens of each request.
        threshold: most tokens of a decode; 0 leaves every request to the prefill kernel.
        is_ragged: the kernel takes requests of different numbers of tokens. Another takes rows of
            one token, or whole verifies: which kernel a request goes to, and the type of its query
            with it, then hardly depends on the batch.
    """
    rows: list[int] = []
    own: list[int] = []
    for row, length in enumerate(query_lens):
        if length == 0:
            continue
        fits = is_ragged or (length in (1, threshold) and own.count(length) == len(own))
        if length > threshold or not fits:
            break
        rows.append(row)
        own.append(length)
    behind = rows[-1] + 1 if rows else 0
    return StepSplit(
        decode_rows=tuple(rows),
        num_decode_tokens=sum(own),
        decode_query_len=max(own, default=0),
        is_ragged=len(set(own)) > 1,
        num_tokens=sum(query_lens),
        max_prefill_len=max(query_lens[behind:], default=0),
    )


class _PhaseBuffers:
    """What the calls of one phase keep from step to step."""

    def __init__(
        self, builder: TrtllmMhaMetadataBuilder, rule: KernelRule, max_query_len: int, fp8: bool
    ) -> None:
        config, page = builder.vllm_config, builder.kv_cache_spec.block_size
        self.rule = rule
        self.max_kv_len = config.max_model_len
        window = builder.sliding_window
        if window is not None:
            # Both ends of the visible keys may lie inside a page.
            pages = cdiv(window - 1 + max_query_len, page) + 1
            self.max_kv_len = min(cdiv(config.max_model_len, page), pages) * page
        device = builder.device
        self.width = cdiv(self.max_kv_len, page)
        self.tables = PageTableBuffers(config.max_num_seqs, self.max_kv_len, page, page, device)
        self.columns = torch.arange(self.width, device=device)
        self.lens = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=device)
        # Zeroed once, and never given to another kernel: each leaves its counters at zero.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        entries = max(config.max_num_seqs * builder.num_heads, MAX_MULTIPROCESSORS)
        self.counters = torch.zeros(cdiv(entries, 8) * 32, dtype=torch.uint8, device=device)
        self.slots = self.keyless = torch.empty(0, device=device)
        self.casts_query = fp8 and rule.query_is_fp8
        self.query_name: str | None = None
        if self.casts_query:
            self.query_name = "fp8_query"
        elif rule.query_is_dense:
            self.query_name = "dense_query"

    def for_a_step(self, builder: TrtllmMhaMetadataBuilder) -> _PhaseBuffers:
        """The same calls with tables of their own: draft steps are there at once."""
        own = copy.copy(self)
        config, page = builder.vllm_config, builder.kv_cache_spec.block_size
        reqs, device = config.max_num_seqs, builder.device
        own.tables = PageTableBuffers(reqs, self.max_kv_len, page, page, device)
        own.lens = torch.zeros_like(self.lens)
        own.slots = torch.full((reqs,), PAD_SLOT_ID, dtype=torch.int64, device=device)
        own.keyless = torch.zeros(reqs, 1, 1, dtype=torch.bool, device=device)
        return own


class TrtllmMhaMetadataBuilder(AttentionMetadataBuilder[TrtllmMhaMetadata]):
    """Leading rows of one length to the decode kernel, those behind them to the prefill kernel."""

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
            ValueError: a spec, a setting or a device that the kernels do not serve; with every
                reason.
            FlashInferUnavailableError: FlashInfer cannot be used here.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        capability = choice.capability_of(self.device)
        self.num_heads = choice.check_support(spec, vllm_config, capability, self.phases)
        self.sliding_window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self.query_dtype = spec.dtype.torch
        self._is_fp8 = spec.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        self.calls = compat.load_calls()
        self._buffers = GraphBuffers(self.device)
        self._masks: dict[int, torch.Tensor] = {}
        self._drafts: list[_PhaseBuffers] = []
        self._block_map: torch.Tensor | None = None
        self._captured = False
        rules = {phase: choice.rule_of(phase, capability) for phase in self.phases}
        self._check_version(rules)
        self._threshold = self._decode_threshold(rules.get(Phase.DECODE))
        longest = min(vllm_config.max_num_batched_tokens, vllm_config.max_model_len)
        limits = {Phase.PREFILL: longest, Phase.DECODE: self._threshold}
        self._phases = {
            phase: _PhaseBuffers(self, rule, limits[phase], self._is_fp8)
            for phase, rule in rules.items()
            if rule is not None
        }
        reqs = vllm_config.max_num_seqs + 1
        self._one_each = torch.arange(reqs, dtype=torch.int32, device=self.device)
        self._declare()
        self._init_reorder_batch_threshold(self._threshold)

    def _check_version(self, rules: dict[Phase, KernelRule | None]) -> None:
        prefill = rules.get(Phase.PREFILL)
        by_fmha_v2 = prefill is not None and prefill.kernel is VendorKernel.FMHA_V2
        if by_fmha_v2 and self._is_fp8 and not self.calls.prefills_fp8:
            raise ValueError(
                f"{NAME}: kv_cache_dtype must not be quantised for prefill by fmha_v2 of "
                f"flashinfer {self.calls.version}, which may hang, got fp8: install "
                "flashinfer-python>=0.7, or choose another prefill backend"
            )

    def _decode_threshold(self, rule: KernelRule | None) -> int:
        """Most tokens of a request that the decode kernel takes; 0 without one."""
        if rule is None:
            return 0
        most = self.vllm_config.max_decode_query_len
        if rule.kernel is not VendorKernel.XQA:
            return most
        is_right = self.calls.verifies_windows or self.sliding_window is None
        is_right &= self.calls.verifies_fp8 or not self._is_fp8
        return most if is_right else 1

    def _declare(self) -> None:
        config, spec = self.vllm_config, self.kv_cache_spec
        tokens, head_size = config.max_num_batched_tokens, getattr(spec, "head_size", 0)
        dtypes = {"fp8_query": torch.float8_e4m3fn, "dense_query": self.query_dtype}
        for name in {own.query_name for own in self._phases.values()} - {None}:
            assert name is not None
            shape = tokens, self.num_heads, head_size
            self._buffers.declare(name, shape, dtypes[name])
        for name, extent in (
            ("decode_starts", config.max_num_seqs + 1),
            ("prefill_starts", config.max_num_seqs + 1),
        ):
            self._buffers.declare(name, (extent,), torch.int32)
        self._buffers.declare("keyless", (tokens, 1, 1), torch.bool)

    def use_pool(self, block_map: torch.Tensor) -> None:
        """Say that the group's layers have a pool of their own, before the first build.

        Args:
            block_map: ``[N]`` int32, device: the pool's block of each block of the batches' tables,
                0 where it has none. Each build reads it, so that blocks may move between steps.
        """
        tokens = self.vllm_config.max_num_batched_tokens
        self._buffers.declare("slots", (tokens,), torch.int64, fill=PAD_SLOT_ID)
        self._block_map = block_map

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TrtllmMhaMetadata:
        """The step's record; nothing is read back from the device.

        Args:
            common_prefix_len: makes no difference: every request reads its own pages.
            common_attn_metadata: the batch; its host query lengths must be the device's.
            fast_build: makes no difference.

        Raises:
            ValueError: a batch beyond the engine's limits.
            NotImplementedError: a batch that is not plainly causal.
        """
        batch = common_attn_metadata
        debug_batch(batch, self.kv_cache_spec)
        refuse_fields(batch, NAME, "dcp_local_seq_lens", "rswa_prefix_lens")
        if batch.causal is not True:
            raise NotImplementedError(f"{NAME} takes causal batches, got causal={batch.causal!r}")
        if any((getattr(batch, "mm_req_doc_ranges", None) or {}).values()):
            raise NotImplementedError(f"{NAME} does not support mm_req_doc_ranges")
        reqs = batch.num_reqs
        query_lens = batch.query_start_loc_cpu[: reqs + 1].diff()
        split = self._split(query_lens.tolist())
        if split.num_tokens > batch.num_actual_tokens:
            raise ValueError(
                f"query_start_loc_cpu must end at most at num_actual_tokens "
                f"({batch.num_actual_tokens}), got {split.num_tokens}"
            )
        record = TrtllmMhaMetadata(
            slot_mapping=self._slots(batch.slot_mapping),
            num_actual_tokens=split.num_tokens,
            num_reqs=reqs,
            query_start_loc=batch.query_start_loc[: reqs + 1],
            seq_lens=batch.seq_lens[:reqs],
            block_table=self._table(batch.block_table_tensor[:reqs]),
            sliding_window=self.sliding_window,
            split=split,
            decode=None,
            prefill=None,
            keyless=None,
        )
        if self._may_lack_keys(batch, query_lens):
            record.keyless = self._keyless(record)
        self._fill(record)
        return record

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TrtllmMhaMetadata:
        """The record to capture with: any batch of as many requests with so many tokens each can be
        replayed after a build; of decodes and verifies also with padding behind them.

        Args:
            common_attn_metadata: requests of one query length, without padding.

        Raises:
            ValueError: requests of several query lengths.
        """
        batch = common_attn_metadata
        lens = batch.query_start_loc_cpu[: batch.num_reqs + 1].diff().tolist()
        if len(set(lens)) != 1 or lens[0] == 0:
            raise ValueError(
                "query_start_loc_cpu must give every request of a captured batch the same number "
                f"of tokens, got {lens}"
            )
        self._captured = True
        # By way of build, which a wrapper may have replaced.
        return self.build(0, batch)

    def update_draft_decode_metadata(self, metadata: TrtllmMhaMetadata) -> None:
        """Write the tables anew from the record's lengths as they are now; safe to capture.

        Args:
            metadata: a record of this builder.
        """
        self._fill(copy.copy(metadata))
        if metadata.keyless is not None:
            self._keyless(metadata)

    def build_draft_steps(
        self, common_attn_metadata: CommonAttentionMetadata, num_steps: int
    ) -> list[TrtllmMhaMetadata]:
        """Records of consecutive draft steps, made before the first of them: step i has one token
        per request, and i + 1 keys more than the batch.

        Each step has tables of its own, at addresses that a graph may keep. A request that would
        outgrow the model or its table becomes padding: no keys, slot -1.

        Args:
            common_attn_metadata: the batch, whose keys are all written.
            num_steps: of the draft model.
        """
        batch, page = common_attn_metadata, self.kv_cache_spec.block_size
        reqs, table = batch.num_reqs, batch.block_table_tensor[: batch.num_reqs]
        room = min(self.vllm_config.max_model_len, table.shape[1] * page)
        starts = self._one_each[: reqs + 1]
        is_live = batch.query_start_loc[: reqs + 1].diff() > 0
        own_table, records = self._table(table), []
        for step in range(num_steps):
            own = self._draft_buffers(step)
            lens = batch.seq_lens[:reqs] + (step + 1)
            lens = torch.where(is_live & (lens <= room) & (lens > step + 1), lens, 0)
            slots = compute_slot_mapping(table, starts, lens, reqs, page)
            if self._block_map is not None:
                slots = translate_slots(slots, self._block_map, page)
            own.slots[:reqs] = slots
            torch.eq(lens[:, None, None], 0, out=own.keyless[:reqs])
            record = TrtllmMhaMetadata(
                slot_mapping=own.slots[:reqs],
                num_actual_tokens=reqs,
                num_reqs=reqs,
                query_start_loc=starts,
                seq_lens=lens.to(torch.int32),
                block_table=own_table,
                sliding_window=self.sliding_window,
                split=split_step([1] * reqs, self._threshold, own.rule.ragged),
                decode=None,
                prefill=None,
                keyless=own.keyless[:reqs],
            )
            record.decode = self._decode(record, own)
            records.append(record)
        return records

    def _draft_buffers(self, step: int) -> _PhaseBuffers:
        while len(self._drafts) <= step:
            self._drafts.append(self._phases[Phase.DECODE].for_a_step(self))
        return self._drafts[step]

    def _table(self, block_table: torch.Tensor) -> torch.Tensor:
        """The batch's table, in blocks of the group's own pool where it has one."""
        return (
            block_table
            if self._block_map is None
            else translate_blocks(block_table, self._block_map)
        )

    def _slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Likewise; in a buffer, since a graph writes the cache by it."""
        if self._block_map is None:
            return slot_mapping
        page = self.kv_cache_spec.block_size
        return self._buffers.write("slots", translate_slots(slot_mapping, self._block_map, page))

    def _set_block_table(self, metadata: TrtllmMhaMetadata, block_table: torch.Tensor) -> None:
        metadata.block_table = self._table(block_table[: metadata.num_reqs])
        metadata.slot_mapping = self._slots(metadata.slot_mapping)
        metadata.sliding_window = self.sliding_window
        self._fill(metadata)

    def _split(self, query_lens: list[int]) -> StepSplit:
        own = self._phases.get(Phase.DECODE)
        return split_step(query_lens, self._threshold, own is not None and own.rule.ragged)

    # -- what a call is given

    def _fill(self, record: TrtllmMhaMetadata) -> None:
        """Put the calls of the step into its record, which no one else has yet."""
        split = record.split
        record.decode = record.prefill = None
        if split.decode_rows or (self._captured and split.num_tokens == 0):
            record.decode = self._decode(record, self._phases[Phase.DECODE])
        if split.max_prefill_len:
            record.prefill = self._prefill(record)

    def _decode(self, record: TrtllmMhaMetadata, own: _PhaseBuffers) -> DecodeRows | None:
        """Padding behind the decodes is written too: a graph's replay may count it among them."""
        split = record.split
        live, length = len(split.decode_rows), split.decode_query_len
        listed = record.block_table, record.seq_lens, record.query_start_loc
        if split.decode_rows == tuple(range(live)):
            rows = record.num_reqs if split.max_prefill_len == 0 else live
            listed = listed[0][:rows], listed[1][:rows], listed[2][: rows + 1]
        else:
            chosen = self._on_device(split.decode_rows)
            ends = listed[2][1:][chosen]
            starts = torch.cat([ends.new_zeros(1), ends])
            listed = listed[0][chosen], listed[1][chosen], starts
        filled = own.tables.fill(*self._visible(own, *listed))
        lens = own.lens[: len(filled.kv_lens)]
        query_starts = None
        if split.is_ragged:
            query_starts = self._buffers.write("decode_starts", listed[2])[: live + 1]
            torch.maximum(filled.kv_lens, listed[2].diff(), out=lens)
        else:
            # A row without keys reads some of page 0, and its result is dropped.
            torch.clamp(filled.kv_lens, min=max(length, 1), out=lens)
        if live == 0:
            return None
        needs_mask = own.rule.kernel is VendorKernel.XQA and length > 1
        return DecodeRows(
            **self._common(own, 0, split.num_decode_tokens),
            pages=filled.pages[:live],
            kv_lens=lens[:live],
            max_query_len=length,
            mask=self._mask(length)[:live] if needs_mask else None,
            query_starts=query_starts,
        )

    def _prefill(self, record: TrtllmMhaMetadata) -> PrefillRows:
        split, own = record.split, self._phases.get(Phase.PREFILL)
        if own is None:
            raise ValueError(
                f"query_start_loc_cpu must give every request 1 to {self._threshold} tokens where "
                f"{NAME} takes decodes alone, got one of {split.max_prefill_len}"
            )
        first = split.num_decode_tokens
        behind = split.decode_rows[-1] + 1 if split.decode_rows else 0
        table, kv_lens = record.block_table[behind:], record.seq_lens[behind:]
        starts = self._buffers.view("prefill_starts", len(kv_lens) + 1)
        torch.sub(record.query_start_loc[behind:], first, out=starts)
        filled = own.tables.fill(*self._visible(own, table, kv_lens, starts))
        return PrefillRows(
            **self._common(own, first, split.num_tokens - first),
            pages=filled.pages,
            kv_lens=filled.kv_lens,
            max_query_len=split.max_prefill_len,
            query_starts=starts,
            kv_starts=filled.kv_starts,
        )

    def _common(self, own: _PhaseBuffers, first_token: int, num_tokens: int) -> dict[str, Any]:
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

    def _visible(
        self,
        own: _PhaseBuffers,
        table: torch.Tensor,
        kv_lens: torch.Tensor,
        query_starts: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Table and lengths of requests without the blocks before a window, which an engine may
        have given to others: masks stay as they are, since they count from a row's end.
        """
        page = self.kv_cache_spec.block_size
        skipped = skipped_pages(kv_lens, query_starts, self.sliding_window, page)
        if skipped is None:
            return table, kv_lens
        columns = (skipped[:, None] + own.columns).clamp(max=table.shape[1] - 1)
        return table.gather(1, columns), kv_lens - skipped * page

    def _on_device(self, values: Sequence[int]) -> torch.Tensor:
        """int64, without waiting for the device."""
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    def _mask(self, query_len: int) -> torch.Tensor:
        if query_len not in self._masks:
            mask = causal_mask(self.vllm_config.max_num_seqs, query_len)
            self._masks[query_len] = mask.to(self.device)
        return self._masks[query_len]

    # -- rows without keys

    def _may_lack_keys(self, batch: CommonAttentionMetadata, query_lens: torch.Tensor) -> bool:
        """A row may have tokens and no key: draft steps leave such padding."""
        if self.vllm_config.speculative is not None:
            return True
        bound = getattr(batch, "seq_lens_cpu_upper_bound", None)
        if bound is None:
            return False
        return bool(((bound[: len(query_lens)] <= 0) & (query_lens > 0)).any())

    def _keyless(self, record: TrtllmMhaMetadata) -> torch.Tensor | None:
        tokens = record.num_actual_tokens
        if tokens == 0:
            return None
        ends = record.query_start_loc[1:].contiguous()
        places = torch.arange(tokens, dtype=torch.int32, device=ends.device)
        rows = torch.searchsorted(ends, places, right=True).clamp_(max=len(ends) - 1)
        keyless = record.seq_lens[rows] == 0
        return self._buffers.write("keyless", keyless[:, None, None])
