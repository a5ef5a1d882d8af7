"""TORCH_REF_MLA and TORCH_REF_SPARSE_MLA: latent attention in torch, request by request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from attn.impls.base import AttentionLayer, MLAAttentionImpl, check_scale
from attn.reference.cache import gather_positions, latent_values, read_latent, write_latent
from attn.reference.dense import AttentionRules, attend_request
from attn.reference.mla import attend_topk, expand_latent, read_as_mqa
from attn.reference.quant import saturate
from attn.reference.rope import rotate_in_place
from builders.checks.debug import debug_enabled, debug_read, debug_slots
from builders.checks.tensors import (
    REFERENCE_DTYPES,
    check_count,
    check_expanded,
    check_latent_rows,
    check_rotated,
    k_scale_of,
    latent_query,
)
from builders.latent.torch_ref_mla import LatentRows, TorchRefMLAMetadata
from specs.cache_write import Rotation
from specs.dtypes import CacheDType, DType
from specs.layouts import latent_views
from specs.rows import RowFormat, latent_element, latent_format_of


@dataclass(frozen=True)
class _LatentCache:
    """A cache tensor, with the scale, row format and type that reading it needs."""

    tensor: torch.Tensor
    k_scale: torch.Tensor
    row: RowFormat
    compute: torch.dtype

    def read(self, table_row: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Read positions ``start`` to ``stop`` of one request: rows ``[stop - start, L + r]``."""
        return read_latent(
            self.tensor, table_row, start, stop, self.k_scale, self.row, self.compute
        )

    def read_positions(self, table_row: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Read the rows at ``[S]`` positions of one request, as real rows ``[S, L + r]``."""
        fields = {
            name: gather_positions(view, table_row, positions)
            for name, view in latent_views(self.tensor, self.row).items()
        }
        return latent_values(fields, self.k_scale, self.row, self.compute)


class TorchRefMLAImpl(MLAAttentionImpl):
    """Computes absorbed decode and expanded prefill at reference speed."""

    can_return_lse_for_decode = True
    supports_sliding_window: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of :class:`MLAAttentionImpl`."""
        super().__init__(*args, **kwargs)
        self.latent_format = latent_format_of(self.cache_dtype)
        self.rules = AttentionRules(scale=self.scale, sliding_window=self.sliding_window)

    def _row(self, model_dtype: torch.dtype, cache_dtype: CacheDType) -> RowFormat:
        model = DType.parse(model_dtype)
        element = model if cache_dtype.is_quantized else cache_dtype.element(model)
        return latent_format_of(cache_dtype).row(self.kv_lora_rank, self.qk_rope_head_dim, element)

    def _cache(
        self,
        metadata: TorchRefMLAMetadata,
        kv_cache: torch.Tensor,
        k_scale: torch.Tensor,
        query_dtype: torch.dtype,
    ) -> _LatentCache:
        """The cache, after a check that it is of the kind that the step was built for."""
        check_scale(k_scale, self.cache_dtype)
        stored = latent_element(self.cache_dtype, DType.parse(query_dtype))
        metadata.check_cache(kv_cache.shape[1], stored.torch)
        debug_slots(metadata.slot_mapping, metadata.num_actual_tokens)
        compute = torch.float64 if query_dtype == torch.float64 else torch.float32
        row = self._row(query_dtype, self.cache_dtype)
        return _LatentCache(kv_cache, k_scale, row, compute)

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
        """Write this step's latent rows; see the base class."""
        cache_dtype = CacheDType.parse(kv_cache_dtype)
        check_scale(k_scale, cache_dtype)
        check_latent_rows(self, kv_c_normed, k_pe, slot_mapping, k_scale)
        row = self._row(kv_c_normed.dtype, cache_dtype)
        scale = torch.ones_like(k_scale) if skip_scale else k_scale
        k_pe = k_pe.reshape(len(k_pe), self.qk_rope_head_dim)
        write_latent(kv_c_normed, k_pe, kv_cache, slot_mapping, scale, row)

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether the layer writes a cache of its own."""
        return self.kv_sharing_target_layer_name is None

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
        """Rotate both rotary parts in place, then write latent rows; see the base class."""
        check_latent_rows(self, kv_c_normed, k_pe, slot_mapping, k_scale)
        rotary = k_pe if k_pe.dim() == 3 else k_pe[:, None]
        count = len(slot_mapping)
        rotation = Rotation(positions, cos_sin_cache, is_neox)
        check_rotated(q_pe, rotary, rotation, count, REFERENCE_DTYPES)
        for rows in (q_pe, rotary):
            rotate_in_place(rows, rotation)
        self.do_kv_cache_update(
            *(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale)
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TorchRefMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute decode rows with absorbed queries; see the base class."""
        query = torch.cat(latent_query(self, q), dim=-1)
        cache = self._cache(attn_metadata, kv_c_and_k_pe_cache, k_scale_of(layer), query.dtype)
        out = query.new_zeros((*query.shape[:2], self.kv_lora_rank))
        lse = torch.full(query.shape[:2], float("-inf"), dtype=torch.float32, device=query.device)
        if attn_metadata.decode is not None:
            check_count("q", query, attn_metadata.decode.query_starts[-1])
            _debug_read(attn_metadata.decode, kv_c_and_k_pe_cache)
            for tokens, num_keys, table_row in _rows(attn_metadata.decode):
                part = query[tokens].to(cache.compute)
                latent, row_lse = self._attend_mqa(part, cache, table_row, num_keys, tokens.start)
                out[tokens], lse[tokens] = latent.to(out.dtype), row_lse.float()
        return out, lse

    def _attend_mqa(
        self,
        query: torch.Tensor,
        cache: _LatentCache,
        table_row: torch.Tensor,
        num_keys: int,
        first_token: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def read(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            return read_as_mqa(cache.read(table_row, start, stop), self.kv_lora_rank)

        return attend_request(query, read, max(0, num_keys - len(query)), num_keys, self.rules)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TorchRefMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute prefill rows over expanded keys and values; see the base class."""
        if attn_metadata.prefill is None:
            return
        count = attn_metadata.prefill.query_starts[-1]
        check_expanded(self, q, kv_c_normed, k_pe, output, count, output_scale)
        _debug_read(attn_metadata.prefill, kv_c_and_k_pe_cache)
        cache = self._cache(attn_metadata, kv_c_and_k_pe_cache, k_scale, q.dtype)
        k_pe = k_pe.reshape(len(k_pe), self.qk_rope_head_dim)
        new = torch.cat([kv_c_normed, k_pe], dim=-1).to(cache.compute)
        rows = output.view(len(output), self.num_heads, self.v_head_dim)
        for tokens, num_keys, table_row in _rows(attn_metadata.prefill):
            context = max(0, num_keys - (tokens.stop - tokens.start))
            # Keys before the first token's window are not seen, and their blocks may be freed.
            first = 0 if self.sliding_window is None else max(0, context - self.sliding_window + 1)
            latents = torch.cat([cache.read(table_row, first, context), new[tokens]])
            read = self._expanded_reader(latents, first)
            part = q[tokens].to(cache.compute)
            out, _ = attend_request(part, read, context, num_keys, self.rules)
            if output_scale is not None:
                out = saturate(out / output_scale.reshape(()).to(out.dtype), output.dtype)
            rows[tokens] = out.to(output.dtype)

    def _expanded_reader(
        self, latents: torch.Tensor, first: int
    ) -> Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]:
        """A function that gives expanded keys and values by position.

        ``latents [S, L + r]`` are the latent rows from position ``first`` on.
        """
        return partial(_slice_expanded, *expand_latent(latents, self.W_UK, self.W_UV), first)


class TorchRefSparseMLAImpl(TorchRefMLAImpl):
    """Computes top-k sparse latent attention: a token attends the positions its indexer lists."""

    is_sparse: ClassVar[bool] = True
    supports_sliding_window: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of :class:`MLAAttentionImpl`; ``indexer`` is needed.

        Raises:
            ValueError: no indexer, or one without ``topk_indices_buffer [max_tokens, K]``.
        """
        super().__init__(*args, **kwargs)
        if getattr(self.indexer, "topk_indices_buffer", None) is None:
            raise ValueError("indexer must have a topk_indices_buffer [max_tokens, K], got none")

    def _attend_mqa(
        self,
        query: torch.Tensor,
        cache: _LatentCache,
        table_row: torch.Tensor,
        num_keys: int,
        first_token: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        listed = self.indexer.topk_indices_buffer[first_token : first_token + len(query)]
        # The lists of padding rows are stale, and nothing past the sequence may be read.
        listed = listed.where(listed < num_keys, -1)
        read = partial(cache.read_positions, table_row)
        return attend_topk(query, listed, read, self.kv_lora_rank, self.scale)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TorchRefMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Raise: this triple's builder sends every row to :meth:`forward_mqa`."""
        raise NotImplementedError("sparse rows, prefill included, run in forward_mqa")


def _rows(phase: LatentRows) -> list[tuple[slice, int, torch.Tensor]]:
    """The tokens, the KV length and the table row of each request that has tokens."""
    starts = phase.query_starts
    return [
        (slice(starts[row], starts[row + 1]), num_keys, phase.block_table[row])
        for row, num_keys in enumerate(phase.kv_lens)
        if starts[row + 1] > starts[row]
    ]


def _debug_read(phase: LatentRows, kv_cache: torch.Tensor) -> None:
    """When debugging, check that every block a phase reads lies in the cache."""
    if not debug_enabled():
        return
    num_blocks, block_size = kv_cache.shape[:2]
    debug_read(phase.block_table, torch.tensor(phase.kv_lens), num_blocks, block_size)


def _slice_expanded(
    key: torch.Tensor, value: torch.Tensor, first: int, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = slice(start - first, stop - first)
    return key[rows], value[rows]
