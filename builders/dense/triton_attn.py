"""The metadata builder of TRITON_ATTN.

At construction it chooses the kernels and their tiles, and allocates persistent buffers. For every
step it launches one kernel that plans the step on the device into these buffers, and returns a
record with views of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch

from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_enabled, debug_limits
from builders.checks.kernel_limits import BLOCK_MULTIPLE, check_dtypes, check_head_sizes
from builders.checks.masks import check_batch_masks, check_dcp, check_rswa
from builders.checks.step_limits import check_common_prefix
from builders.dense.choice import (
    LayerRequirements,
    decode_kernel_of,
    hopper_tile,
    prefill_kernel_of,
    segmented_prefill_of,
)
from builders.dense.dequantised import LEAST_ROWS, PAGE, DequantisedPages
from builders.dense.record import SharedPrefix, TritonAttentionMetadata
from builders.dense.shared_prefix import SharedBuffers, debug_prefix
from builders.device import device_facts, runs_gluon
from builders.splitkv.planner import PlannerOptions, SplitPlanner
from builders.splitkv.record import (
    DequantisedKeys,
    PrefillPlan,
    SplitLimits,
    VisibleKeys,
)
from builders.splitkv.stripe import Stripe
from builders.splitkv.tiles import (
    DenseShape,
    HopperDecodeTile,
    HopperTile,
    invariant_split_tile,
)
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, EngineConfig, PrefillKernel
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from specs.positions import cut_chunks, cut_range, cut_window


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder[TritonAttentionMetadata]):
    """Builds records of dense attention; one plan per step serves all layers of the group."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
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
            kv_cache_spec: the KV cache group's spec.
            layer_names: layers of the group.
            vllm_config: limits and settings of the engine; ``num_heads`` is needed.
            device: where the records' tensors live.

        Raises:
            ValueError: ``num_heads`` is missing or does not fit the KV heads; no kernel takes the
                spec's head size, block size or dtype; ``kernels.dense.prefill`` or
                ``kernels.dense.decode`` names a kernel that does not serve the group; the engine
                has decode context parallelism or R-SWA, and the group cannot have it.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        heads = _check_support(spec, vllm_config)
        check_dcp(kv_cache_spec, vllm_config)
        check_rswa(kv_cache_spec, vllm_config)
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
        self.visible = _visible_keys(spec, vllm_config)
        self.gpu = device_facts(self.device)
        self.buffers = GraphBuffers(self.device)
        self._limits = SplitLimits(
            vllm_config.max_num_seqs,
            vllm_config.max_num_batched_tokens,
            self.step_limits.max_kv_len,
            self.visible.span,
        )
        self.planner = self._new_planner(self.buffers)
        self._dequantised = self._dequantised_pages()
        self._shared: SharedBuffers | None = None
        self.shares_prefix = (
            isinstance(kv_cache_spec, FullAttentionSpec)
            and not vllm_config.batch_invariant
            and self.visible.stripe is None
        )
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    @property
    def phase_kernels(self) -> dict[str, str]:
        """See the base class; with batch invariance the decode kernel may take prefills too."""
        decode = "triton" if self.planner.hopper_decode is None else "hopper"
        prefill = "triton" if self.planner.hopper is None else "hopper"
        if self.is_encoder:
            return {"prefill": prefill}
        takes_prefills = self.vllm_config.batch_invariant and not self.planner.is_segmented
        return {"decode": decode, "prefill": decode if takes_prefills else prefill}

    @classmethod
    def for_free_partition(
        cls,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> Self:
        """A builder that cuts work items where the load is even, so that bits depend on the batch.

        Benchmarks measure with it what batch invariance costs. Arguments and errors are the
        constructor's.
        """
        builder = cls(kv_cache_spec, layer_names, vllm_config, device)
        builder.planner = builder._new_planner(GraphBuffers(builder.device), depends_on_batch=True)
        return builder

    def _new_planner(self, buffers: GraphBuffers, depends_on_batch: bool = False) -> SplitPlanner:
        config, segmented, split, asks = self.vllm_config, None, None, self._asks()
        tokens = config.max_decode_query_len
        if config.batch_invariant and not self.is_encoder and not depends_on_batch:
            split = invariant_split_tile(self.shape, self.gpu, tokens, self._limits.window)
            found = segmented_prefill_of(self.shape, self.gpu, split, asks)
            if not isinstance(found, str):
                segmented, asks = found, replace(asks, kv_tile=found.kv_tile, split=split)
        hopper_decode = None
        if not depends_on_batch:
            hopper_decode = self._hopper_decode_tile(asks)
        options = PlannerOptions(
            every_row=config.batch_invariant and not self.is_encoder and segmented is None,
            segmented=segmented,
            depends_on_batch=depends_on_batch,
            takes_rows=not self.is_encoder,
            split=None if segmented is None else split,
            hopper=self._hopper_tile(asks),
            requires_hopper=config.kernels.dense.prefill is PrefillKernel.HOPPER,
            hopper_decode=hopper_decode,
            requires_hopper_decode=config.kernels.dense.decode is DecodeKernel.HOPPER,
        )
        return SplitPlanner(self.shape, self.gpu, self._limits, tokens, buffers, options)

    def _asks(self) -> LayerRequirements:
        """Requirements of this group's layers on the Hopper kernels, as far as they are known."""
        config, spec = self.vllm_config, cast(Any, self.kv_cache_spec)
        return LayerRequirements(
            batch_invariant=config.batch_invariant,
            is_local=self.visible.span is not None,
            dcp=self.visible.stripe is not None,
            query=spec.dtype,
            cache_dtype=spec.cache_dtype,
        )

    @property
    def _page(self) -> int:
        """Tokens of a page of the cache; 0 for encoders, which have no pages."""
        return 0 if self.is_encoder else self.kv_cache_spec.block_size

    def _hopper_tile(self, asks: LayerRequirements) -> HopperTile | None:
        """The Hopper prefill kernel's tile; None if no layer of this group may take the kernel."""
        wanted = self.vllm_config.kernels.dense.prefill
        if wanted is PrefillKernel.AUTO and not runs_gluon(self.device):
            return None
        return prefill_kernel_of(self.shape, self.gpu.kind, self._page, asks, wanted)[0]

    def _hopper_decode_tile(self, asks: LayerRequirements) -> HopperDecodeTile | None:
        """The Hopper split-KV kernel's tile; None if layers of this group do not take it."""
        config = self.vllm_config
        wanted, tokens = config.kernels.dense.decode, config.max_decode_query_len
        if wanted is DecodeKernel.AUTO and not runs_gluon(self.device):
            return None
        # There is one plan for all layers. If the engine has R-SWA, steps will go to the portable
        # kernel, so the plan is not made for the Hopper kernel.
        asks = replace(asks, rswa=config.rswa_window is not None)
        return decode_kernel_of(self.shape, self.gpu.kind, self._page, tokens, asks, wanted)[0]

    def _dequantised_pages(self) -> DequantisedPages | None:
        """The workspace where prefills of this group may have a quantised cache dequantised.

        None where they may not. A step's prefill runs over the workspace or over the cache itself,
        and both have to give the same bits. So both need tiles of the same query tokens, which the
        plan is made for, and of the same keys.
        """
        config, spec, visible = self.vllm_config, cast(Any, self.kv_cache_spec), self.visible
        of_cache = self.planner.hopper
        if of_cache is None or self.shape.stored_bits != 8 or config.prefill_workspace_bytes == 0:
            return None
        if self.is_cross or visible.chunk is not None or config.rswa_window is not None:
            return None
        if not config.exact_host_lengths:
            return None
        asks = replace(self._asks(), cache_dtype=CacheDType.AUTO, dequantised=True)
        tile = hopper_tile(replace(self.shape, stored_bits=16), self.gpu.kind, PAGE, asks)
        sides = of_cache.query_tile, of_cache.kv_tile
        if isinstance(tile, str) or (tile.query_tile, tile.kv_tile) != sides:
            return None
        short, most = self.planner.short_query, config.prefill_workspace_bytes
        sizes = self.shape, spec.dtype.torch, spec.cache_dtype, self._limits
        return DequantisedPages(*sizes, short, visible.window, most, self.device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """Build the step's record. One kernel plans the step; nothing is read back from the device.

        With a common prefix, causal full attention gets a second plan beside the first, and scratch
        for two states of every token, which the first such build allocates. With batch invariance
        there is none of this, since a request's bits would depend on the rest of the batch. A step
        whose long prompts are worth a dequantised cache has one more launch.

        Args:
            common_prefix_len: leading tokens that all requests share, in the same blocks. At least
                as many of each request's tokens come before its queries.
            common_attn_metadata: the batch.
            fast_build: makes no difference to the record.

        Raises:
            ValueError: the batch exceeds the engine's limits; its masks do not go together with the
                group's settings; ``common_prefix_len`` is no whole number of the table's blocks, or
                more than a request's computed tokens.
        """
        batch = common_attn_metadata
        stripe = self.visible.stripe
        self.check_batch(common_prefix_len, batch, fast_build)
        check_batch_masks(batch, self.vllm_config, 1 if stripe is None else stripe.size)
        self._check_prefix(common_prefix_len, batch)
        if stripe is None:
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
        tiles, has_short = 0, True
        if batch.max_query_len > self.planner.short_query:
            tiles, has_short = self._kinds_of_rows(batch)
        prefixes = batch.rswa_prefix_lens
        ranges = _range_tensor(batch, self.device)
        record = TritonAttentionMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_reqs=batch.num_reqs,
            query_start_loc=_leading(batch.query_start_loc, batch.num_reqs + 1),
            seq_lens=_leading(seq_lens, batch.num_reqs),
            block_table=batch.block_table_tensor,
            split=self.planner.split() if has_short and not self.is_encoder else None,
            prefill=self.planner.prefill_plan(batch.num_reqs, tiles, 1 << 30),
            causal=causal,
            mm_ranges=ranges,
            rswa_prefix_lens=prefixes,
            rswa_window=None if prefixes is None else cut_window(self.vllm_config.rswa_window),
            stripe=stripe,
            **self.pages,
        )
        self.update_draft_decode_metadata(record)
        record.shared = self._shared_prefix(record, batch, common_prefix_len)
        # Multimodal ranges may reach further back than the window, and the workspace begins with
        # the window.
        sees_more = ranges is not None and self.visible.window is not None
        if self._dequantised is not None and tiles and record.shared is None and not sees_more:
            record.prefill = _over(record.prefill, self._dequantised.plan(batch))
        return record

    def update_draft_decode_metadata(self, metadata: TritonAttentionMetadata) -> None:
        """Plan a record anew from what its lengths are now: one launch, which can be captured.

        Args:
            metadata: a record of this builder.
        """
        debug_limits(metadata.seq_lens, self.step_limits)
        metadata.prefill = _over(metadata.prefill, None)
        self.planner.fill(
            metadata.query_start_loc,
            metadata.seq_lens,
            self.visible,
            is_causal=metadata.causal is True and metadata.mm_ranges is None,
        )

    def update_block_table(
        self,
        metadata: TritonAttentionMetadata,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> TritonAttentionMetadata:
        """The record of a step for another KV cache group, see the base class.

        If ``metadata`` is another builder's, its plan is computed again in this builder's buffers,
        since a graph that was captured with this builder reads this builder's buffers.
        """
        updated = super().update_block_table(metadata, block_table, slot_mapping)
        split, prefill = metadata.split, metadata.prefill
        starts = self.planner.buffers.view("tile_starts", metadata.num_reqs + 1)
        has_own_rows = split is None or split.rows is self.planner.buffers["rows"]
        has_own_tiles = prefill is None or prefill.tile_starts.data_ptr() == starts.data_ptr()
        if not (has_own_rows and has_own_tiles):
            self.update_draft_decode_metadata(updated)
            updated.split = None if split is None else self.planner.split()
            if prefill is not None:
                updated.prefill = self.planner.own_prefill(prefill, metadata.num_reqs)
                pages = None if prefill.hopper is None else prefill.hopper.dequantised
                if pages is not None and self._dequantised is not None:
                    # This builder has a workspace of its own. The number of its pages is that of
                    # the other builder, since it does not depend on the blocks.
                    lens = metadata.query_start_loc, metadata.seq_lens
                    updated.prefill = _over(
                        updated.prefill, self._dequantised.of(*lens, pages.pages)
                    )
        return updated

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TritonAttentionMetadata:
        """Build the record to capture a CUDA graph with.

        The graph can replay any batch of up to as many tokens. Nothing in the record depends on the
        lengths of this batch: the prefill kernel is captured too, unless a batch of so few tokens
        cannot have a request for it.
        """
        batch = common_attn_metadata
        tokens, short = batch.num_actual_tokens, self.planner.short_query
        tiles = 0
        if tokens > short:
            rows = min(batch.num_reqs, tokens // (short + 1))
            tiles = tokens // self.planner.prefill.query_tile + rows
        # Call build, because a wrapper may have replaced it.
        record = self.build(0, batch)
        programs = 2 * self.planner.num_multiprocessors
        record.prefill = self.planner.prefill_plan(batch.num_reqs, tiles, programs)
        record.split = None if self.is_encoder else self.planner.split()
        return record

    def warm_up_batches(
        self,
        *,
        non_causal: bool = False,
        per_request_causal: bool = False,
        mm_ranges: bool = False,
        shared_prefix: bool = False,
    ) -> Iterator[tuple[int, CommonAttentionMetadata]]:
        """One small step for every compiled variant: common prefix length and batch.

        The steps are one decode, one request for the prefill kernel if the limits allow it, and one
        with enough tokens for a dequantised cache if the group may have that. Each comes once
        without features, and once more for each feature that is asked for. If the engine has R-SWA,
        causal steps come with that too. All steps read block 0 and write nothing to the cache.

        Args:
            non_causal: steps with ``causal`` False will come.
            per_request_causal: steps with a flag per request will come.
            mm_ranges: steps with multimodal ranges will come.
            shared_prefix: steps with a common prefix will come.
        """
        config, block_size, device = self.vllm_config, self.kv_cache_spec.block_size, self.device
        one = torch.ones(1, dtype=torch.int32, device=device)
        kinds: list[dict[str, Any]] = [{}]
        if non_causal:
            kinds.append({"causal": False})
        if per_request_causal:
            kinds.append({"causal": one})
        if mm_ranges:
            kinds.append({"mm_req_doc_ranges": {0: [(0, 0)]}})
        if config.rswa_window is not None:
            causal = [kind for kind in kinds if "causal" not in kind]
            kinds += [{**kind, "rswa_prefix_lens": one} for kind in causal]
        width = cdiv(config.max_model_len, block_size)
        table = torch.zeros((1, width), dtype=torch.int32, device=device)
        most = min(config.max_num_batched_tokens, config.max_model_len)
        counts = [1, min(self.planner.short_query + 1, most)]
        if self._dequantised is not None:
            counts.append(min(cdiv(LEAST_ROWS, self.shape.group), most))
        for tokens in dict.fromkeys(counts):
            for prefix in (0, block_size) if shared_prefix else (0,):
                if prefix + tokens > config.max_model_len:
                    continue
                batch = CommonAttentionMetadata.from_lengths(
                    [tokens], [prefix + tokens], table, block_size
                )
                unwritten = torch.full_like(batch.slot_mapping, -1)
                batch = batch.replace(
                    slot_mapping=unwritten,
                    encoder_seq_lens=one,
                    encoder_seq_lens_cpu=torch.ones(1, dtype=torch.int32).numpy(),
                )
                for kind in kinds[:1] if prefix else kinds:
                    yield prefix, batch.replace(**kind)

    def _kinds_of_rows(self, batch: CommonAttentionMetadata) -> tuple[int, bool]:
        """The host's estimate of the step's prefill tiles, and whether requests may be short.

        The estimate is at least 1. Short requests are the split-KV kernel's. Unless the host's
        lengths are exact, there may always be some.
        """
        lens = batch.query_start_loc_cpu.diff()
        short = self.planner.short_query
        long = lens[lens > short]
        size = self.planner.prefill.query_tile
        tiles = max(1, int(((long + (size - 1)) // size).sum()))
        is_exact = self.vllm_config.exact_host_lengths
        return tiles, not is_exact or len(long) != int((lens > 0).sum())

    def _shared_prefix(
        self, record: TritonAttentionMetadata, batch: CommonAttentionMetadata, length: int
    ) -> SharedPrefix | None:
        """The records of cascade attention; None where the step cannot have them."""
        if (
            length == 0
            or not self.shares_prefix
            or record.causal is not True
            or record.mm_ranges is not None
            or record.rswa_prefix_lens is not None
        ):
            return None
        # The host's total is exact, whatever drafts the device has trimmed. Rows of the buffers
        # beyond it mean nothing.
        num_tokens = int(batch.query_start_loc_cpu[-1])
        if num_tokens == 0:
            return None
        block_size = self.kv_cache_spec.block_size
        if debug_enabled():
            debug_prefix(batch, length, block_size)
        if self._shared is None:
            self._shared = SharedBuffers(self._new_planner(GraphBuffers(self.device)), self.shape)
        self._shared.fill(record.query_start_loc, record.seq_lens, num_tokens, length)
        return self._shared.parts(record, num_tokens, length, block_size)

    def _set_block_table(
        self, metadata: TritonAttentionMetadata, block_table: torch.Tensor
    ) -> None:
        metadata.block_table = block_table
        shared = metadata.shared
        if shared is None:
            return
        slots, skipped = metadata.slot_mapping, shared.length // self.kv_cache_spec.block_size
        metadata.shared = replace(
            shared,
            prefix=replace(shared.prefix, slot_mapping=slots, block_table=block_table[:1]),
            own=replace(shared.own, slot_mapping=slots, block_table=block_table[:, skipped:]),
        )

    def _check_prefix(self, length: int, batch: CommonAttentionMetadata) -> None:
        block_size, block_table = self.kv_cache_spec.block_size, batch.block_table_tensor
        if length % block_size:
            raise ValueError(
                f"common_prefix_len must be a multiple of block_size ({block_size}), got {length}"
            )
        if length and length > block_table.shape[1] * block_size:
            raise ValueError(
                f"common_prefix_len must be within block_table_tensor's {block_table.shape[1]} "
                f"blocks of {block_size}, got {length}"
            )
        known, reqs = batch.seq_lens_cpu_upper_bound, batch.num_reqs
        if length and known is not None and self.vllm_config.exact_host_lengths:
            query_lens = batch.query_start_loc_cpu[: reqs + 1].diff()
            check_common_prefix(length, query_lens.numpy(), known[:reqs].numpy())


def _over(plan: PrefillPlan | None, dequantised: DequantisedKeys | None) -> PrefillPlan | None:
    """A prefill plan whose Hopper kernel reads dequantised keys, or None for the cache itself."""
    if plan is None or plan.hopper is None or plan.hopper.dequantised is dequantised:
        return plan
    return replace(plan, hopper=replace(plan.hopper, dequantised=dequantised))


def _leading(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` elements of a tensor.

    If it has no others, the tensor itself is returned, which is cheaper than a view.
    """
    return tensor if len(tensor) == count else tensor[:count]


def _visible_keys(spec: Any, config: EngineConfig) -> VisibleKeys:
    """Which keys a layer's queries see, and which of them this rank keeps."""
    stripe = Stripe.of(config) if getattr(spec, "dcp_sharded", False) else None
    if isinstance(spec, SlidingWindowSpec):
        return VisibleKeys(window=cut_window(spec.sliding_window))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        chunk, lookback = cut_chunks(spec.attention_chunk_size, spec.chunk_lookback)
        return VisibleKeys(chunk=chunk, lookback=lookback)
    return VisibleKeys(stripe=stripe)


def _check_support(spec: Any, config: EngineConfig) -> int:
    """Check that the kernels serve a spec.

    Returns:
        The number of query heads.

    Raises:
        ValueError: the kernels do not serve the spec; the message has the value.
    """
    heads = config.num_heads
    if heads is None:
        raise ValueError("vllm_config.num_heads is needed by TRITON_ATTN, got None")
    if heads % spec.num_kv_heads:
        raise ValueError(
            f"vllm_config.num_heads ({heads}) must be a multiple of the spec's num_kv_heads "
            f"({spec.num_kv_heads})"
        )
    check_head_sizes(spec.head_size, spec.v_size)
    check_dtypes(spec.dtype.torch, spec.cache_dtype)
    if spec.block_size % BLOCK_MULTIPLE and not isinstance(spec, EncoderOnlyAttentionSpec):
        raise ValueError(
            f"block_size must be a multiple of {BLOCK_MULTIPLE}, got {spec.block_size}"
        )
    return heads


def _range_tensor(batch: CommonAttentionMetadata, device: torch.device) -> torch.Tensor | None:
    """The batch's multimodal ranges, ``[R, max_ranges, 2]`` int32; None when there are none."""
    ranges = getattr(batch, "mm_req_doc_ranges", None)
    if not ranges or not any(ranges.values()):
        return None
    most = max(len(spans) for spans in ranges.values())
    table = torch.zeros((batch.num_reqs, most, 2), dtype=torch.int32)
    for req, spans in ranges.items():
        if spans:
            table[req, : len(spans)] = torch.tensor(
                [cut_range(*span) for span in spans], dtype=torch.int32
            )
    return table.to(device, non_blocking=True)
