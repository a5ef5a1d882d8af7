"""TORCH_REF: dense attention in plain torch, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense import DenseImpl
from attn.reference.cache import read_kv, write_kv
from attn.reference.dense import AttentionRules, ReadKV, Request, attend_batch
from attn.reference.quant import saturate
from attn.reference.rope import apply_rope
from builders.debug import debug_read
from builders.torch_ref import TorchRefMetadata
from specs.dtypes import CacheDType
from specs.layouts import KVViews


class TorchRefImpl(DenseImpl):
    """Every feature a dense backend of this library may offer, at reference speed."""

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values; see the base class."""
        if not self.attn_type.is_cached:
            return
        views = self._views(kv_cache, key.dtype)
        write_kv(key, value, views, slot_mapping, layer._k_scale, layer._v_scale, self.cache_dtype)

    def do_rope_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        layer_slot_mapping: torch.Tensor,
    ) -> None:
        """Rotate query and key in place, then write the cache; see the base class."""
        for rows in (query, key):
            rows.copy_(apply_rope(rows, positions[: len(rows)], cos_sin_cache, is_neox))
        self.do_kv_cache_update(layer, key, value, kv_cache, layer_slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TorchRefMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this step's tokens; see the base class."""
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale: no kernel writes block-scaled output")
        if attn_metadata is None:
            return output.zero_()
        rows = output.view(output.shape[0], self.num_heads, self.head_size_v)

        def write(tokens: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
            if output_scale is not None:
                out = saturate(out / output_scale.reshape(()).to(out.dtype), output.dtype)
            rows[tokens] = out.to(output.dtype)
            if output_lse is not None:
                output_lse[tokens] = lse.float()

        if self.attn_type.is_cached:
            debug_read(
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                kv_cache.shape[0],
                kv_cache.shape[2],
            )
            requests = self._cached_requests(layer, query.dtype, kv_cache, attn_metadata)
        else:
            if key is None or value is None:
                raise ValueError(f"key and value are needed for attn_type {self.attn_type.value!r}")
            requests = self._encoder_requests(key, value, query.dtype, attn_metadata)
        attend_batch(query, requests, write, attn_metadata.common_prefix_len)
        return output

    def _rules_of(
        self, layer: AttentionLayer, metadata: TorchRefMetadata, row: int
    ) -> AttentionRules:
        ranges = metadata.mm_ranges.get(row)
        prefixes = metadata.rswa_prefix_lens
        causal = metadata.causal[row] and self.rules.causal
        if ranges is None and prefixes is None and causal == self.rules.causal:
            return self.rules
        return replace(
            self.rules,
            causal=causal,
            mm_ranges=tuple(ranges or ()),
            mm_clamp_window=bool(getattr(layer, "mm_prefix_clamp_sliding_window", False)),
            rswa_prefix_len=None if prefixes is None else prefixes[row],
            rswa_window=metadata.rswa_window,
        )

    def _cached_requests(
        self,
        layer: AttentionLayer,
        query_dtype: torch.dtype,
        kv_cache: torch.Tensor,
        metadata: TorchRefMetadata,
    ) -> Iterator[Request]:
        views = self._views(kv_cache, query_dtype)
        compute = torch.float64 if query_dtype == torch.float64 else torch.float32
        scales = (layer._k_scale, layer._v_scale)
        for row, num_keys in enumerate(metadata.kv_lens):
            start, stop = metadata.query_starts[row], metadata.query_starts[row + 1]
            if stop > start:
                read: ReadKV = partial(
                    _read, views, metadata.block_table[row], scales, self.cache_dtype, compute
                )
                first = max(0, num_keys - (stop - start))
                rules = self._rules_of(layer, metadata, row)
                yield Request(start, stop, num_keys, first, rules, read)

    def _encoder_requests(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        query_dtype: torch.dtype,
        metadata: TorchRefMetadata,
    ) -> Iterator[Request]:
        compute = torch.float64 if query_dtype == torch.float64 else torch.float32
        for start, stop in pairwise(metadata.query_starts):
            if stop > start:
                own_key, own_value = key[start:stop].to(compute), value[start:stop].to(compute)
                read: ReadKV = partial(_slice, own_key, own_value)
                yield Request(start, stop, stop - start, 0, self.rules, read)


def _read(
    views: KVViews,
    table_row: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    cache_dtype: CacheDType,
    compute: torch.dtype,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return read_kv(views, table_row, start, stop, scales, cache_dtype, compute)


def _slice(
    key: torch.Tensor, value: torch.Tensor, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return key[start:stop], value[start:stop]
