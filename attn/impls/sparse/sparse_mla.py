"""SPARSE_MLA: top-k sparse latent attention; calls the kernels that the builder's record names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from attn.impls.base import AttentionLayer, check_scale
from attn.impls.latent.base import LatentImpl
from attn.impls.sparse.call import SparseCall
from attn.impls.sparse.vendor_calls import (
    attend_by_fa3,
    attend_by_flashinfer_mla,
    attend_by_flashmla_kv,
    attend_by_flashmla_sparse,
    attend_by_triton,
    attend_by_trtllm,
)
from attn.impls.viewed import ViewedCache
from attn.impls.warm import run_compiled
from attn.ops.joint_lists import can_join, join_launch
from attn.ops.latent_convert import convert_rows, rope_and_write_latent_rows, write_latent_rows
from attn.ops.sparse_mla import attend_listed, sparse_launcher
from attn.ops.topk_transform import topk_launch, transform_topk
from builders.checks.debug import debug_read, debug_slots
from builders.checks.tensors import check_count, check_latent_rows, k_scale_of, latent_query
from builders.latent.prefill import LatentPrefill, PagedRows, check_head_pair
from builders.sparse.arguments import TopkLists
from builders.sparse.joint import JointRows
from builders.sparse.launches import SparseLaunch
from builders.sparse.record import RowChunk, ShortPrefill, SparseMLAMetadata, SparseRows
from specs.cache_write import Rotation
from specs.dtypes import CacheDType
from specs.layouts import KVViews
from specs.rows import LatentFormat, RowFormat
from specs.sparse_mla import IndexKind, SparseKernel

if TYPE_CHECKING:
    from attn.kernels.sparse.launcher import SparseLauncher
    from builders.sparse.sparse_mla import SparseMLAMetadataBuilder


ATTENDERS: Final[dict[SparseKernel, Callable[[SparseCall], None]]] = {
    SparseKernel.TRITON_SPARSE: attend_by_triton,
    SparseKernel.FLASHMLA_SPARSE: attend_by_flashmla_sparse,
    SparseKernel.FLASHMLA_KV: attend_by_flashmla_kv,
    SparseKernel.FA3: attend_by_fa3,
    SparseKernel.FLASHINFER_MLA: attend_by_flashinfer_mla,
    SparseKernel.TRTLLM: attend_by_trtllm,
}
"""The function that calls each kernel; ``builders.sparse.choice.CALLED`` has the same kernels."""


class SparseMLAImpl(LatentImpl):
    """Computes each row of prefill and decode over the positions that the indexer listed for it.

    Where the builder plans short prompts densely, the base class computes them.
    """

    is_sparse: ClassVar[bool] = True
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
    always_expands: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of ``MLAAttentionImpl``; ``indexer`` is needed.

        Raises:
            ValueError: no indexer, or one without ``topk_indices_buffer [max_tokens, K]``.
            NotImplementedError: a KV cache dtype without latent rows.
        """
        super().__init__(*args, **kwargs)
        if getattr(self.indexer, "topk_indices_buffer", None) is None:
            raise ValueError("indexer must have a topk_indices_buffer [max_tokens, K], got none")
        self._own: SparseLauncher | None = None
        self._cache_kept: ViewedCache[torch.Tensor] | None = None
        """The latest cache, and what launches made of it; a layer has only one."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write this step's latent rows in one launch; see the base class."""
        cache_dtype = CacheDType.parse(kv_cache_dtype)
        check_scale(k_scale, cache_dtype)
        check_latent_rows(self, kv_c_normed, k_pe, slot_mapping, k_scale)
        scale = torch.ones_like(k_scale) if skip_scale else k_scale
        row = self._row(cache_dtype, kv_c_normed.dtype)
        rope = k_pe.reshape(len(k_pe), self.qk_rope_head_dim)
        write_latent_rows(kv_c_normed, rope, kv_cache, slot_mapping, scale, row)

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether the layer writes a cache of its own, of rows without block scales."""
        is_scaled = self.cache_dtype is CacheDType.FP8_DS_MLA
        return self.kv_sharing_target_layer_name is None and not is_scaled

    def do_rope_and_kv_cache_update(
        self,
        q_pe: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Rotate both rotary parts and write latent rows, in one launch; see the base class."""
        cache_dtype = CacheDType.parse(kv_cache_dtype)
        check_scale(k_scale, cache_dtype)
        check_latent_rows(self, kv_c_normed, k_pe, slot_mapping, k_scale)
        rope_and_write_latent_rows(
            q_pe,
            kv_c_normed,
            k_pe.reshape(len(k_pe), self.qk_rope_head_dim),
            Rotation(positions, cos_sin_cache, is_neox),
            kv_cache,
            slot_mapping,
            torch.ones_like(k_scale) if skip_scale else k_scale,
            self._row(cache_dtype, kv_c_normed.dtype),
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute all rows of the step that attend lists, decodes first; see the base class.

        Under DCP the queries have the heads of all ranks, and the result is attention over the
        listed keys that this rank keeps: zero with an LSE of ``-inf`` where it keeps none.
        """
        heads = self.num_heads * attn_metadata.ranks
        query, rotary = latent_query(self, q, heads)
        tokens, dtype, k_scale = query.shape[0], query.dtype, k_scale_of(layer)
        if self._is_scaled:
            check_scale(k_scale, self.cache_dtype)
        if tokens < attn_metadata.num_decode_tokens:
            check_count("q", query, attn_metadata.num_decode_tokens)
        kept = self._cache_kept
        if kept is None or kept.of(kv_c_and_k_pe_cache, dtype) is None:
            kept = self._keep(kv_c_and_k_pe_cache, dtype)
        assert kept.pages is not None
        attn_metadata.check_cache(*kept.pages)
        if self._debugs:
            debug_slots(attn_metadata.slot_mapping, attn_metadata.num_actual_tokens)
        out = query.new_empty((tokens, heads, self.kv_lora_rank))
        lse = query.new_empty((tokens, heads), dtype=torch.float32)
        covered = 0
        for rows in (attn_metadata.decode, attn_metadata.prefill_rows):
            if rows is not None:
                if self._debugs:
                    num_blocks, block_size = kv_c_and_k_pe_cache.shape[:2]
                    debug_read(rows.block_table, rows.cached_lens.cpu(), num_blocks, block_size)
                tensors = (query, rotary, out, lse)
                self._attend(rows, kv_c_and_k_pe_cache, tensors, layer)
                covered = rows.first_token + rows.num_rows
        if covered < tokens:
            # Rows past the step's go through the projection that follows, so they must hold
            # numbers. Kernels clear the padding that the step counts: its lists are empty.
            out[covered:] = 0
            lse[covered:] = float("-inf")
        return out, lse

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute the rows of short prompts over expanded keys and values; see the base class.

        Raises:
            ValueError: the step has no short prompts, or no kernel takes the layer's head sizes.
        """
        prefill = attn_metadata.prefill
        if prefill is None:
            raise ValueError("all rows of this step attend lists, in forward_mqa")
        check_head_pair(self.qk_head_dim, self.v_head_dim)
        self._check_cache(attn_metadata, kv_c_and_k_pe_cache, q.dtype)
        if self._debugs:
            debug_slots(attn_metadata.slot_mapping, attn_metadata.num_actual_tokens)
        cache = kv_c_and_k_pe_cache
        self.attend_prefill(q, kv_c_normed, k_pe, cache, prefill, k_scale, output, output_scale)

    def warm_up(
        self,
        layer: AttentionLayer,
        kv_cache: torch.Tensor,
        builder: SparseMLAMetadataBuilder,
        query_dtype: torch.dtype,
        *,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compile every kernel variant that serving this layer will need, by running small steps.

        A variant depends on the layer (heads, widths, KV cache dtype), the builder's configuration
        (kernels, limits, block size), the strides and the alignment of the cache, the dtype of the
        query, and how rows are cut for the device. The small steps cover every way of cutting.
        Apart from that, a variant does not depend on lengths or batch sizes.

        The cache is not written, and read by short prompts alone (block 0). The builder's buffers
        and the front of the indexer's lists are overwritten. The indexer's own kernels are not run.

        Args:
            layer: scales of the layer.
            kv_cache: the layer's cache, in the layout to be served.
            builder: this triple's builder, for the layer's group.
            query_dtype: dtype of queries and latents, and of an output that is not fp8.
            output_scale: the scale that :meth:`forward_mha` will be given; its output is then fp8.
        """
        output_dtype = query_dtype if output_scale is None else torch.float8_e4m3fn

        def run_steps() -> None:
            for batch, record in builder.warm_up_steps():
                count = batch.num_actual_tokens
                blank = torch.zeros((), dtype=query_dtype, device=builder.device).new_zeros
                latent = blank(count, self.kv_lora_rank)
                rope = blank(count, 1, self.qk_rope_head_dim)
                self.do_kv_cache_update(
                    *(latent, rope, kv_cache, batch.slot_mapping),
                    *(self.kv_cache_dtype, layer._k_scale),
                )
                query = blank(count, self.num_heads, self.qk_head_dim)
                if record.prefill is not None:
                    output = blank(count, self.num_heads * self.v_head_dim).to(output_dtype)
                    self.forward_mha(
                        *(query, latent, rope, kv_cache, record),
                        *(layer._k_scale, output, output_scale),
                    )
                    continue
                self.indexer.topk_indices_buffer[:count] = -1
                # An engine absorbs queries head by head, and slices the rotary part: these are its
                # strides.
                absorbed = blank(self.num_heads, count, self.kv_lora_rank).transpose(0, 1)
                rotary = query[..., self.qk_nope_head_dim :]
                if record.ranks == 1:
                    self.forward_mqa((absorbed, rotary), kv_cache, record, layer)
                # Under DCP an engine gathers whole queries of all ranks.
                whole = torch.cat([absorbed, rotary], -1).repeat(1, record.ranks, 1)
                self.forward_mqa(whole, kv_cache, record, layer)

        run_compiled(run_steps, builder.device)

    def _expand_cached(
        self,
        kv_cache: torch.Tensor,
        prefill: LatentPrefill,
        piece: int,
        paged: PagedRows,
        into: KVViews,
        k_scale: torch.Tensor,
    ) -> None:
        """Expand the rows of a piece of context; rows with block scales are converted first."""
        if self.cache_dtype is not CacheDType.FP8_DS_MLA:
            super()._expand_cached(kv_cache, prefill, piece, paged, into, k_scale)
            return
        assert isinstance(prefill, ShortPrefill)
        slots, dtype = prefill.context_slots[piece], into.key.dtype
        plain = self._row(CacheDType.AUTO, dtype)
        rows = into.key.new_empty(len(slots), self.kv_lora_rank + self.qk_rope_head_dim)
        convert_rows(kv_cache, self._row(self.cache_dtype, dtype), slots, rows, plain, k_scale)
        self._expand(rows[:, : self.kv_lora_rank], rows[:, self.kv_lora_rank :], into)

    def _attend(
        self,
        rows: SparseRows,
        kv_cache: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        layer: AttentionLayer,
    ) -> None:
        """Compute the rows of one phase.

        ``tensors`` are query, rotary part, output and LSE of all rows of the step.
        """
        kernel = rows.plan.kernel
        if self.indexer.topk_indices_buffer.shape[1] != rows.plan.topk:
            raise ValueError(
                f"topk_indices_buffer must have index_topk ({rows.plan.topk}) columns, got "
                f"{self.indexer.topk_indices_buffer.shape[1]}"
            )
        if kernel is SparseKernel.TRITON_SPARSE and rows.converted is None:
            if rows.joint is not None and self._attend_jointly(
                rows, rows.joint, kv_cache, tensors, layer._k_scale
            ):
                return
            transform = self._transform(rows)
            if transform is not None:
                transform()
                self._attend_own(rows, kv_cache, tensors, layer._k_scale)
                return
        attend = ATTENDERS.get(kernel)
        if attend is None:
            raise NotImplementedError(f"{kernel.value} is not called by SPARSE_MLA yet")
        k_scale, stored = layer._k_scale, self._row(self.cache_dtype, tensors[0].dtype)
        run = partial(self._call, rows, tensors, layer, attend)
        if rows.converted is None or rows.converted_row is None:
            run(slice(0, rows.num_rows), kv_cache, stored, None)
            return
        for chunk in rows.chunks:
            part = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            convert = partial(self._convert, rows, chunk, kv_cache, stored, k_scale)
            run(part, rows.converted[None], rows.converted_row, (chunk, convert))

    def _attend_own(
        self,
        rows: SparseRows,
        kv_cache: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        k_scale: torch.Tensor,
    ) -> None:
        """Compute rows with ready lists by the library's own kernel, over the cache as it is."""
        launch = rows.launch
        assert launch is not None
        query, rotary, out, lse = _of_phase(rows, tensors)
        given = query, rotary, kv_cache, rows.indices, rows.counts, out, lse, k_scale
        self._attend_listed(launch, given)

    def _attend_jointly(
        self,
        rows: SparseRows,
        joint: JointRows,
        kv_cache: torch.Tensor,
        tensors: tuple[torch.Tensor, ...],
        k_scale: torch.Tensor,
    ) -> bool:
        """Compute the rows of prompts in groups of neighbouring tokens, over joint lists.

        Returns:
            False where the tensors do not allow it; nothing is computed then.
        """
        query, rotary, out, lse = _of_phase(rows, tensors)
        if not can_join(joint.lists, query, rotary, kv_cache):
            return False
        join = self._join(rows, joint)
        if join is None:
            return False
        join()
        entries, counts = joint.lists.entries, joint.lists.counts
        given = query, rotary, kv_cache, entries, counts, out, lse, k_scale
        self._attend_listed(joint.launch, given)
        return True

    def _attend_listed(self, launch: SparseLaunch, given: tuple[Any, ...]) -> None:
        """Launch the library's own kernel, given the first fields of ``SparseTensors``."""
        launcher, kept = self._launcher(*given[:2]), self._cache_kept
        assert kept is not None
        listed = launcher.tensors(*given)
        listed.rows = kept.made
        attend_listed(launcher, launch, listed)
        kept.made = listed.rows

    def _launcher(self, query: torch.Tensor, rotary: torch.Tensor) -> SparseLauncher:
        """The launcher of the library's own kernel, which the layer keeps."""
        if self._own is None:
            layout = LatentFormat(self._row(self.cache_dtype, query.dtype).name)
            sizes = query.shape[1], self.scale, layout, *query.shape[2:], *rotary.shape[2:]
            self._own = sparse_launcher(*sizes, query.device)
        return self._own

    def _keep(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> ViewedCache[torch.Tensor]:
        """Keep a cache, with its block size and the type of its elements."""
        kept = ViewedCache(kv_cache, model_dtype, kv_cache.detach())
        # The first field of a row, the latent, has the type of the row's stored elements.
        stored = self._row(self.cache_dtype, model_dtype).fields[0].dtype
        kept.pages = kv_cache.shape[1], stored.torch
        self._cache_kept = kept
        return kept

    def _join(self, rows: SparseRows, joint: JointRows) -> Callable[[], None] | None:
        """Launches the kernel that joins lists; None without a kernel.

        All layers of a step have the same launch, unless their lists are in different buffers.
        """
        buffer, lengths = self.indexer.topk_indices_buffer, rows.lengths
        place = buffer.data_ptr(), rows.block_table.data_ptr()
        found = joint.joins.get(place)
        if found is not None and not self._debugs:
            return found
        ids = buffer[rows.first_token : rows.first_token + rows.num_rows]
        lists = TopkLists(ids, lengths.visible_lens, lengths.reqs)
        made = join_launch(lists, rows.block_table, rows.block_size, joint.lists)
        if made is None:
            return None
        joint.joins[place] = made.launch
        return made.launch

    def _transform(self, rows: SparseRows) -> Callable[[], None] | None:
        """Launches the kernel that turns the indexer's lists into entries; None without a kernel.

        All layers of a step have the same launch, unless their lists are in different buffers.
        """
        buffer, launch = self.indexer.topk_indices_buffer, rows.launch
        assert launch is not None
        place = buffer.data_ptr(), rows.block_table.data_ptr()
        found = launch.transforms.get(place)
        if found is not None and not self._debugs:
            return found
        lengths = rows.lengths
        ids = buffer[rows.first_token : rows.first_token + rows.num_rows]
        made = topk_launch(
            TopkLists(ids, lengths.visible_lens, lengths.reqs, rows.stripe, hastens=True),
            rows.plan.index_kind,
            rows.indices,
            block_table=rows.block_table,
            block_size=rows.block_size,
            offsets=rows.offsets,
            counts=rows.counts,
        )
        if made is None:
            return None
        launch.transforms[place] = made.launch
        return made.launch

    def _convert(
        self,
        rows: SparseRows,
        chunk: RowChunk,
        kv_cache: torch.Tensor,
        stored: RowFormat,
        k_scale: torch.Tensor,
    ) -> None:
        assert rows.converted is not None
        assert rows.converted_row is not None
        snap = rows.plan.snaps_scales
        convert_rows(
            kv_cache, stored, chunk.slots, rows.converted, rows.converted_row, k_scale, snap
        )

    def _call(
        self,
        rows: SparseRows,
        tensors: tuple[torch.Tensor, ...],
        layer: AttentionLayer,
        attend: Callable[[SparseCall], None],
        part: slice,
        source: torch.Tensor,
        row: RowFormat,
        conversion: tuple[RowChunk, Callable[[], None]] | None,
    ) -> None:
        """Compute some rows of a phase, over the cache or over rows that are converted first."""
        first = rows.first_token
        tokens = slice(first + part.start, first + part.stop)
        indices = rows.indices[part]
        lens = None if rows.counts is None else rows.counts[part]
        visible_lens, reqs = rows.lengths.visible_lens[part], rows.lengths.reqs[part]
        ids, slots = self.indexer.topk_indices_buffer[tokens], None
        if conversion is not None and rows.plan.index_kind is IndexKind.GATHERED:
            slots = conversion[0].slots.view_as(indices)
        transform_topk(
            TopkLists(ids, visible_lens, reqs, rows.stripe),
            rows.plan.index_kind,
            indices,
            block_table=rows.block_table,
            block_size=rows.block_size,
            offsets=rows.offsets,
            slots=slots,
            counts=lens,
        )
        if conversion is not None:
            conversion[1]()
        query, rotary, out, lse = (tensor[tokens] for tensor in tensors)
        given = (query, rotary, source, row, indices, lens, self.scale, layer._k_scale, out, lse)
        q_scale = getattr(layer, "_q_scale", None)
        attend(SparseCall(*given, planned=rows.planned, q_scale=q_scale, launch=rows.launch))


def _of_phase(rows: SparseRows, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The rows of one phase in tensors of all rows of the step.

    Nothing is sliced that has the right size, since this runs in every layer of every step.
    """
    if tensors[0].shape[0] == rows.num_rows:
        return tensors
    tokens = slice(rows.first_token, rows.first_token + rows.num_rows)
    return tuple(tensor[tokens] for tensor in tensors)
