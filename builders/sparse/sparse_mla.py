"""The metadata builder of SPARSE_MLA, sparse latent attention over top-k lists.

A row is one query token with its list. For each phase, decode and prefill, the record says which
kernel takes the rows, what the entries of lists count, and which cached rows are converted for the
kernel. These decisions depend on the step alone. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from builders.base import AttentionMetadataBuilder
from builders.batch import (
    BatchSplit,
    CommonAttentionMetadata,
    refuse_fields,
    split_decodes_and_prefills,
)
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_limits
from builders.device import device_facts, runs_gluon
from builders.latent.prefill import PAGE, ExpandedPrefill, LatentContext, with_block_table
from builders.latent.rows import leading
from builders.sparse.choice import (
    NAME,
    BatchStats,
    PhasePlan,
    SparsePlan,
    check_setup,
    reachable_plans,
    resolve,
    setup_of,
)
from builders.sparse.hopper_tiles import HopperOptions, sparse_kernel_of
from builders.sparse.joint import MOST_JOINED, JointPrefill, JointRows, joint_tokens
from builders.sparse.launches import SparseLaunch, SparseLaunches
from builders.sparse.record import RowChunk, ShortPrefill, SparseMLAMetadata, SparseRows
from builders.sparse.rows import RowLengths, chunk_slots, context_slots, fill_rows
from builders.sparse.tiles import SparseShape
from builders.sparse.vendor_calls import CallPlanner
from builders.splitkv.stripe import Stripe
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec
from specs.rows import INDEXER_PAGE, LatentFormat, RowFormat
from specs.sparse_mla import ForwardMode, IndexKind, SparseKernel, SparsePhase

_RowViews = tuple[RowLengths, torch.Tensor, torch.Tensor | None]
WORKSPACE_BYTES = 256 << 20
"""Bytes of converted rows that are held at a time, unless one request needs more."""
OWN_LAUNCHES = (SparseKernel.TRITON_SPARSE, SparseKernel.FLASHINFER_MLA)
"""Choices with which the library's own kernel takes rows: FlashInfer's kernel leaves it the rows
whose lists are not full."""
OWN_OPTIONS = {SparsePhase.PREFILL: "own_prefill", SparsePhase.DECODE: "own_decode"}
"""Fields of :class:`specs.engine.SparseKernels` that choose between the library's own kernels."""


class SparseMLAMetadataBuilder(AttentionMetadataBuilder[SparseMLAMetadata]):
    """Gives requests of up to a verify's tokens to the decode kernel, and others to prefill's."""

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
            vllm_config: limits and settings of the engine; ``num_heads`` is needed, and
                ``index_topk`` where the spec has no ``topk``.
            device: where the records' tensors live.

        Raises:
            ValueError: the spec or a setting is not served; the chosen kernels cannot work, with
                every reason and the nearest choice that works; or the bound of the workspace is
                smaller than one request needs.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.setup = setup_of(kv_cache_spec, vllm_config, self.device)
        check_setup(self.setup)
        self.stripe = Stripe.of(vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.threshold = self.reorder_batch_threshold or 1
        config = vllm_config
        self.step_limits = self.step_limits.with_verifies(self.threshold)
        self._most_rows = self.step_limits.max_num_tokens
        self._plans = [plan for phase in SparsePhase for plan in reachable_plans(self.setup, phase)]
        self._width = max(plan.index_width for plan in self._plans)
        self.buffers = GraphBuffers(self.device)
        self._declare()
        self._viewed: dict[SparsePhase, tuple[tuple[PhasePlan, int, int], _RowViews]] = {}
        self._calls = CallPlanner(
            *(self._plans, self._most_rows, self.device, self.setup.dtype.torch),
            config.softmax_scale,
        )
        # A row's bits would depend on the lengths of the step's other prefills.
        is_dense = config.dense_short_prompts and not config.batch_invariant
        self.expanded: ExpandedPrefill | None = None
        if is_dense:
            self.expanded = ExpandedPrefill(
                *(self.kv_cache_spec, config, device_facts(self.device), self.buffers),
                stripe=self.stripe,
            )
        # Launches of the library's own kernel; None where no phase may come to it.
        self._launches: SparseLaunches | None = None
        # None where no prompt's tokens attend together.
        self._joint: JointPrefill | None = None
        own = [plan for plan in self._plans if plan.kernel in OWN_LAUNCHES]
        if own:
            self._launches = self._own_launches(own)

    @property
    def phase_kernels(self) -> dict[str, str]:
        """See the base class; a phase with several kernels has their names joined by a slash."""
        found: dict[str, dict[str, None]] = {}
        for plan in self._plans:
            names = found.setdefault(plan.phase.value, {})
            if plan.kernel in OWN_LAUNCHES and self._launches is not None:
                names["hopper" if self._launches.is_hopper(plan.phase) else "triton"] = None
            if plan.kernel is not SparseKernel.TRITON_SPARSE:
                names[plan.kernel.value] = None
        kernels = {phase: "/".join(names) for phase, names in sorted(found.items())}
        # Prefills whose lists would hold every key attend all keys instead.
        return kernels if self.expanded is None else kernels | {"short": self.expanded.kernel}

    def _own_launches(self, plans: Sequence[PhasePlan]) -> SparseLaunches:
        spec: Any = self.kv_cache_spec
        setup, width = self.setup, max(plan.index_width for plan in plans)
        decodes = self.vllm_config.max_num_seqs * self.threshold
        shape = SparseShape(
            *(setup.num_heads, width, setup.layout, setup.dtype.itemsize),
            *(spec.kv_lora_rank, spec.qk_rope_head_dim),
        )
        phases = {plan.phase for plan in plans}
        most = self._most_rows if SparsePhase.PREFILL in phases else decodes
        is_invariant = self.vllm_config.batch_invariant
        hopper = {phase: self._hopper_of(phase, shape) for phase in phases}
        tokens = joint_tokens(shape, hopper.get(SparsePhase.PREFILL))
        if tokens > 1 and self.stripe is None:
            gpu = device_facts(self.device)
            self._joint = JointPrefill(shape, tokens, gpu.num_multiprocessors, self.buffers)
        return SparseLaunches(shape, most, is_invariant, hopper, self.buffers)

    def _hopper_of(self, phase: SparsePhase, shape: SparseShape) -> HopperOptions | None:
        """The Hopper kernel's options; None where the portable kernel takes a phase's rows.

        Raises:
            ValueError: the Hopper kernel is wanted by name and does not serve.
        """
        config = self.vllm_config
        field = OWN_OPTIONS[phase]
        option, wanted = f"kernels.sparse.{field}", getattr(config.kernels.sparse, field)
        if wanted.value == "auto" and not runs_gluon(self.device):
            return None
        return sparse_kernel_of(
            *(shape, device_facts(self.device).kind, self.setup.dtype),
            *(config.batch_invariant, option, wanted),
        )[0]

    def _declare(self) -> None:
        buffers, rows = self.buffers, self._most_rows
        for name in ("reqs", "visible_lens", "topk_lens"):
            buffers.declare(name, (rows,), torch.int32)
        # The last of joint lists may be of fewer tokens than it has room for.
        room = (rows + MOST_JOINED) * self._width
        buffers.declare("indices", (room,), torch.int32, fill=-1)
        if not all(plan.skips_minus_one for plan in self._plans):
            buffers.declare("counts", (rows,), torch.int32)
        room = max((self._bytes_for(plan) for plan in self._plans), default=0)
        if room:
            buffers.declare("converted", (room,), torch.uint8)
            gathers = max(self._room(plan) for plan in self._plans if plan.conversion is not None)
            buffers.declare("slots", (gathers,), torch.int32, fill=-1)

    def _bytes_for(self, plan: PhasePlan) -> int:
        """Bytes of the rows that are converted at a time for a plan; 0 if it converts none.

        Raises:
            ValueError: the engine's bound of the workspace is smaller than one request needs.
        """
        if plan.conversion is None:
            return 0
        config, row = self.vllm_config, self._row(plan).nbytes
        is_prefill = plan.phase is SparsePhase.PREFILL
        least = max(config.max_model_len, plan.index_width) if is_prefill else plan.index_width
        most = self._most_rows if is_prefill else config.max_num_seqs * self.threshold
        most *= plan.index_width
        asked = config.mla_workspace_bytes
        fits = (WORKSPACE_BYTES if asked is None else asked) // row
        if asked is not None and fits < _pages(least):
            raise ValueError(
                f"mla_workspace_bytes must be at least {_pages(least) * row} for {least} rows of "
                f"{row} bytes that {plan.kernel.value} needs converted at one time, got {asked}"
            )
        return _pages(min(max(fits // INDEXER_PAGE * INDEXER_PAGE, least), max(most, least))) * row

    def _room(self, plan: PhasePlan) -> int:
        """Converted rows that the buffer has room for: whole pages."""
        row = self._row(plan).nbytes
        return len(self.buffers["converted"]) // row // INDEXER_PAGE * INDEXER_PAGE

    def _row(self, plan: PhasePlan) -> RowFormat:
        """The format of the rows that a plan's kernel reads."""
        spec: Any = self.kv_cache_spec
        return plan.reads.row(spec.kv_lora_rank, spec.qk_rope_head_dim, spec.dtype)

    # -- Steps.

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMLAMetadata:
        """Build the step's record, see the base class.

        Args:
            common_prefix_len: is checked and makes no other difference, since every row reads its
                own list.
            common_attn_metadata: the batch.
            fast_build: makes no difference to the record.

        Raises:
            NotImplementedError: the batch is not plainly causal.
            ValueError: the batch exceeds the engine's limits.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        self._check(batch)
        found = split_decodes_and_prefills(batch, self.threshold)
        bounds = self._key_bounds(batch, found.num_decodes)
        stats = BatchStats(found.num_prefill_tokens, sum(bounds))
        plan = resolve(self.setup, forward_mode(batch, found), stats)
        short = self._short(batch, found.num_decodes, bounds)
        if short is not None:
            plan = replace(plan, prefill=None)
        decode = prefill = None
        if plan.decode is not None:
            decode = self._rows(plan.decode, batch, 0, found.num_decodes, [])
        if plan.prefill is not None:
            prefill = self._rows(plan.prefill, batch, found.num_decodes, batch.num_reqs, bounds)
        return self._record(batch, plan, (decode, prefill, short))

    def _record(
        self,
        batch: CommonAttentionMetadata,
        plan: SparsePlan,
        parts: tuple[SparseRows | None, SparseRows | None, ShortPrefill | None],
    ) -> SparseMLAMetadata:
        """The record of a step; ``parts`` are its decodes, prefills by lists, short prefills."""
        decode, prefill_rows, prefill = parts
        short_tokens = short_reqs = 0
        if prefill is not None:
            short_tokens = batch.num_actual_tokens - (0 if decode is None else decode.num_rows)
            short_reqs = prefill.own.num_reqs
        return SparseMLAMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            num_decodes=batch.num_reqs - short_reqs,
            num_prefills=short_reqs,
            num_decode_tokens=batch.num_actual_tokens - short_tokens,
            num_prefill_tokens=short_tokens,
            prefill_max_seq_len=0 if prefill is None else prefill.max_seq_len,
            topk_tokens=self.setup.topk,
            plan=plan,
            decode=decode,
            prefill_rows=prefill_rows,
            prefill=prefill,
            query_start_loc=leading(batch.query_start_loc, batch.num_reqs + 1),
            seq_lens=leading(batch.seq_lens, batch.num_reqs),
            ranks=1 if self.stripe is None else self.stripe.size,
            **self.pages,
        )

    def _short(
        self, batch: CommonAttentionMetadata, decodes: int, bounds: list[int]
    ) -> ShortPrefill | None:
        """The plan of prefills that attend every key; None where they attend their lists."""
        if self.expanded is None or not bounds or max(bounds) > self.setup.topk:
            return None
        plan = self.expanded.plan(batch, decodes)
        is_shared = self.stripe is not None and plan.context is not None
        if is_shared and self.setup.layout is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
            # Rows that ranks exchange are not converted.
            return None
        return ShortPrefill(
            *(plan.num_tokens, plan.max_query_len, plan.own, plan.context),
            context_slots=self._context_slots(plan.context),
            max_seq_len=max(bounds),
        )

    def _context_slots(self, context: LatentContext | None) -> tuple[torch.Tensor, ...]:
        """For each chunk of context the slots of its rows, where rows have block scales."""
        if context is None or self.setup.layout is not LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
            return ()
        size = self.kv_cache_spec.block_size
        return tuple(chunk_slots(context.rows(one), size) for one in range(len(context.lens)))

    def warm_up_steps(self) -> Iterator[tuple[CommonAttentionMetadata, SparseMLAMetadata]]:
        """One small step for each kernel that may take rows, and for each way to launch it.

        The steps write nothing to the cache, and read no row of it if their lists are empty.
        """
        config, block_size = self.vllm_config, self.kv_cache_spec.block_size
        width = cdiv(config.max_model_len, block_size)
        table = torch.zeros((1, width), dtype=torch.int32, device=self.device)
        if self.expanded is not None:
            yield from self._short_steps(table)
        for plan in self._plans:
            is_prefill = plan.phase is SparsePhase.PREFILL
            count = self.threshold + 1 if is_prefill else 1
            if count > min(config.max_num_batched_tokens, config.max_model_len):
                continue
            batch = CommonAttentionMetadata.from_lengths([count], [count], table, block_size)
            batch = batch.replace(slot_mapping=torch.full_like(batch.slot_mapping, -1))
            rows = self._rows(plan, batch, 0, 1, [count])
            launches: tuple[SparseLaunch | None, ...] = (rows.launch,)
            if rows.launch is not None:
                assert self._launches is not None
                launches = self._launches.variants(plan.phase)
            ways = [replace(rows, launch=launch) for launch in launches]
            if is_prefill and self._joint is not None:
                ways.append(replace(rows, joint=self._joint.rows(0, count)))
            for given in ways:
                if is_prefill:
                    step = SparsePlan(ForwardMode.EXTEND, None, plan)
                    yield (
                        batch,
                        self._record(batch, step, (None, given, None)),
                    )
                else:
                    step = SparsePlan(ForwardMode.DECODE, plan, None)
                    yield (
                        batch,
                        self._record(batch, step, (given, None, None)),
                    )

    def _short_steps(
        self, table: torch.Tensor
    ) -> Iterator[tuple[CommonAttentionMetadata, SparseMLAMetadata]]:
        """Short prefills without context, with one chunk of context, and with two.

        They read block 0 of the cache; a chunk has one page.
        """
        config, expanded = self.vllm_config, self.expanded
        assert expanded is not None
        count, tokens = self.threshold + 1, expanded.workspace_tokens
        expanded.workspace_tokens = PAGE
        try:
            for context in (0, PAGE, 2 * PAGE):
                most = min(config.max_model_len, self.setup.topk) - context
                if count > min(config.max_num_batched_tokens, most):
                    continue
                batch = CommonAttentionMetadata.from_lengths(
                    [count], [context + count], table, self.kv_cache_spec.block_size
                )
                unwritten = torch.full_like(batch.slot_mapping, -1)
                batch = batch.replace(slot_mapping=unwritten)
                short = self._short(batch, 0, [context + count])
                if short is not None:
                    plan = SparsePlan(ForwardMode.EXTEND, None, None)
                    yield (
                        batch,
                        self._record(batch, plan, (None, None, short)),
                    )
        finally:
            expanded.workspace_tokens = tokens

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> SparseMLAMetadata:
        """Build the record to capture a CUDA graph with.

        After a build, the graph can replay any batch of as many requests and tokens, in which each
        request has at most as many new tokens as a verify. A batch of prompts can be captured if
        prefill reads cached rows without conversion; its replays have as many tokens of each
        request again.

        Raises:
            ValueError: the batch has prompts, and rows are converted for the prefill kernel. The
                host decides step by step how many rows are converted.
        """
        batch = common_attn_metadata
        if batch.max_query_len > self.threshold:
            self._check_captured_prompts(batch.max_query_len)
        self._calls.capture(batch.num_actual_tokens)
        # Call build, because a wrapper may have replaced it.
        return self.build(0, batch)

    def _check_captured_prompts(self, longest: int) -> None:
        for plan in self._plans:
            if plan.phase is SparsePhase.PREFILL and plan.conversion is not None:
                raise ValueError(
                    f"max_query_len of a captured batch must be at most {self.threshold} for "
                    f"{NAME} with {plan.kernel.value} over {plan.stored.value} rows, got {longest}"
                )

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> SparseMLAMetadata:
        """Build the record of a draft step; the first one extends by the tokens of a verify."""
        record = self.build(0, common_attn_metadata, fast_build=True)
        if draft_index == 0 and record.plan.mode is ForwardMode.TARGET_VERIFY:
            record.plan = replace(record.plan, mode=ForwardMode.DRAFT_EXTEND)
        return record

    def update_draft_decode_metadata(self, metadata: SparseMLAMetadata) -> None:
        """Write anew how many keys rows see, from what the record's lengths are now.

        This can be captured.

        Args:
            metadata: a record of this builder whose rows are all decodes.
        """
        if metadata.decode is not None:
            debug_limits(metadata.decode.seq_lens, self.step_limits)
            self._fill(metadata.decode)

    def _check(self, batch: CommonAttentionMetadata) -> None:
        refuse_fields(batch, NAME, "mm_req_doc_ranges", "rswa_prefix_lens")
        if self.stripe is None:
            refuse_fields(batch, NAME, "dcp_local_seq_lens")
        if batch.causal is not True:
            raise NotImplementedError(f"{NAME} takes causal batches, got causal={batch.causal!r}")

    def _key_bounds(self, batch: CommonAttentionMetadata, first: int) -> list[int]:
        """Host bounds on the keys of each request from ``first`` on."""
        if first == batch.num_reqs:
            return []
        most = min(batch.max_seq_len, self.vllm_config.max_model_len)
        bound = getattr(batch, "seq_lens_cpu_upper_bound", None)
        if bound is None:
            return [most] * (batch.num_reqs - first)
        return [min(int(one), most) for one in bound[first : batch.num_reqs].tolist()]

    def _rows(
        self,
        plan: PhasePlan,
        batch: CommonAttentionMetadata,
        first: int,
        stop: int,
        bounds: list[int],
    ) -> SparseRows:
        """The rows of requests ``first`` to ``stop``.

        Args:
            plan: plan of the phase.
            batch: the step's batch.
            first: first request.
            stop: the request behind the last one.
            bounds: host bounds on the keys of each request, for prefills.
        """
        starts: list[int] = batch.query_start_loc_cpu[first : stop + 1].tolist()
        first_token = starts[0]
        # Padding tokens follow the last request's tokens.
        last_token = batch.num_actual_tokens if stop == batch.num_reqs else starts[-1]
        count = last_token - first_token
        lengths, indices, counts = self._views(plan, first_token, last_token)
        converted = row = None
        if plan.conversion is not None:
            row, room = self._row(plan), self._room(plan)
            flat = self.buffers["converted"][: room * row.nbytes].view(room, row.nbytes)
            is_bytes = plan.reads is not LatentFormat.BF16
            converted = flat if is_bytes else flat.view(row["nope"].dtype.torch)
        rows = SparseRows(
            plan=plan,
            first_req=first,
            first_token=first_token,
            num_rows=count,
            query_start_loc=_between(batch.query_start_loc, first, stop + 1),
            seq_lens=_between(batch.seq_lens, first, stop),
            block_table=_between(batch.block_table_tensor, first, stop),
            block_size=self.kv_cache_spec.block_size,
            lengths=lengths,
            indices=indices,
            counts=counts,
            offsets=None,
            chunks=(),
            converted=converted,
            converted_row=row,
            planned=self._calls.plan(plan, indices),
            launch=self._launch(plan, count),
            joint=self._joint_rows(plan, first_token, count, bounds),
            stripe=self.stripe,
        )
        self._fill(rows)
        if plan.index_kind is IndexKind.GATHERED:
            rows.chunks = self._gathered(rows)
        elif plan.index_kind is IndexKind.RAGGED:
            rows.chunks, rows.offsets = self._ragged(
                rows, [one - first_token for one in starts], bounds
            )
        return rows

    def _views(self, plan: PhasePlan, first: int, stop: int) -> _RowViews:
        """Lengths, lists and numbers of entries of rows ``first`` to ``stop``, in the buffers.

        A phase's latest views are kept, for decodes often have as many rows as a step before.
        """
        place = plan, first, stop
        kept = self._viewed.get(plan.phase)
        if kept is None or kept[0] != place:
            buffers, width = self.buffers, plan.index_width
            lengths = (buffers[name][first:stop] for name in ("reqs", "visible_lens", "topk_lens"))
            begin = first * self._width
            indices = buffers["indices"][begin : begin + (stop - first) * width]
            counts = None if plan.skips_minus_one else buffers["counts"][first:stop]
            views = RowLengths(*lengths), indices.view(stop - first, width), counts
            kept = self._viewed[plan.phase] = place, views
        return kept[1]

    def _launch(self, plan: PhasePlan, count: int) -> SparseLaunch | None:
        if plan.kernel not in OWN_LAUNCHES or self._launches is None:
            return None
        return self._launches.of(count, plan.phase)

    def _joint_rows(
        self, plan: PhasePlan, first: int, count: int, bounds: list[int]
    ) -> JointRows | None:
        """How the rows of prompts attend together; None where each attends alone."""
        if self._joint is None or plan.phase is not SparsePhase.PREFILL:
            return None
        if plan.kernel is not SparseKernel.TRITON_SPARSE or not self._joint.serves(count, bounds):
            return None
        return self._joint.rows(first, count)

    def _fill(self, rows: SparseRows) -> None:
        fill_rows(
            rows.query_start_loc,
            rows.seq_lens,
            rows.first_token,
            rows.plan.topk,
            rows.lengths,
            self.vllm_config.max_num_seqs,
        )

    def _gathered(self, rows: SparseRows) -> tuple[RowChunk, ...]:
        """Chunks of query rows, each with as many as the buffer has room for listed keys of."""
        width = rows.plan.index_width
        step = self._room(rows.plan) // width
        chunks = []
        for first in range(0, rows.num_rows, step):
            count = min(step, rows.num_rows - first)
            chunks.append(RowChunk(first, count, self.buffers.view("slots", count * width)))
        return tuple(chunks)

    def _ragged(
        self, rows: SparseRows, starts: list[int], bounds: list[int]
    ) -> tuple[tuple[RowChunk, ...], torch.Tensor]:
        """Chunks of requests, each with as many requests as the buffer has room for contexts of.

        Args:
            rows: rows of the phase.
            starts: first query row of each of R' requests, and the end of the last.
            bounds: host bounds on the keys of each of R' requests.

        Returns:
            The chunks; and ``[R']`` int32: first row of each request's context in its chunk.
        """
        room, groups, used = self._room(rows.plan), [0], 0
        for req, bound in enumerate(bounds):
            if used and used + bound > room:
                groups.append(req)
                used = 0
            used += bound
        chunks, offsets = [], []
        for first, stop in zip(groups, [*groups[1:], len(bounds)], strict=True):
            lens = rows.seq_lens[first:stop]
            ends = torch.cumsum(lens, 0, dtype=torch.int32)
            offsets.append(ends - lens)
            # Padding tokens follow the last request's tokens.
            last = rows.num_rows if stop == len(bounds) else starts[stop]
            slots = self._context(rows, first, ends, sum(bounds[first:stop]))
            chunks.append(RowChunk(starts[first], last - starts[first], slots, first, ends))
        return tuple(chunks), torch.cat(offsets)

    def _context(
        self, rows: SparseRows, first: int, ends: torch.Tensor, count: int
    ) -> torch.Tensor:
        table = rows.block_table[first : first + len(ends)]
        return context_slots(table, ends, count, rows.block_size, self.vllm_config.max_num_seqs)

    def _set_block_table(self, metadata: SparseMLAMetadata, block_table: torch.Tensor) -> None:
        for name in ("decode", "prefill_rows"):
            rows: SparseRows | None = getattr(metadata, name)
            if rows is None:
                continue
            stop = rows.first_req + len(rows.seq_lens)
            moved = replace(rows, block_table=block_table[rows.first_req : stop])
            if moved.plan.index_kind is IndexKind.RAGGED:
                moved.chunks = tuple(
                    replace(
                        chunk,
                        slots=self._context(moved, chunk.first_req, chunk.ends, len(chunk.slots)),
                    )
                    for chunk in rows.chunks
                    if chunk.ends is not None
                )
            setattr(metadata, name, moved)
        if metadata.prefill is not None:
            first = metadata.num_decodes
            table = block_table[first : first + metadata.num_prefills]
            short = with_block_table(metadata.prefill, table, metadata.slot_mapping)
            metadata.prefill = replace(short, context_slots=self._context_slots(short.context))


def forward_mode(batch: CommonAttentionMetadata, found: BatchSplit) -> ForwardMode:
    """The kind of step that a batch is.

    Args:
        batch: a decode-first batch.
        found: where its decodes end.
    """
    if found.num_prefill_tokens:
        has_decodes = found.num_decode_tokens > 0
        return ForwardMode.MIXED if has_decodes else ForwardMode.EXTEND
    if batch.num_actual_tokens == 0:
        return ForwardMode.IDLE
    return ForwardMode.TARGET_VERIFY if batch.max_query_len > 1 else ForwardMode.DECODE


def _between(rows: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Rows ``first`` to ``stop``; the tensor itself where these are all."""
    return rows[first:stop] if first else leading(rows, stop)


def _pages(rows: int) -> int:
    """A number of rows, rounded up to whole pages."""
    return cdiv(rows, INDEXER_PAGE) * INDEXER_PAGE
