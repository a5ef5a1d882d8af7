"""TORCH_REF: dense attention in plain torch, request by request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense.base import DenseImpl, given_rows
from attn.reference.cache import read_kv, write_kv
from attn.reference.dense import AttentionRules, ReadKV, Request, attend_batch
from attn.reference.quant import saturate
from attn.reference.rope import rotate_in_place
from builders.checks.debug import debug_read, debug_slots
from builders.checks.tensors import (
    REFERENCE_DTYPES,
    check_dense,
    check_given,
    check_lengths,
    check_rotated,
    scales_of,
)
from builders.dense.torch_ref import TorchRefMetadata
from specs.attention import AttentionType
from specs.cache_write import CacheTarget, Rotation
from specs.dtypes import CacheDType, KVQuantMode
from specs.layouts import KVViews


class TorchRefImpl(DenseImpl):
    """Computes every feature that a dense backend may offer, at reference speed."""

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
        check_given(key=key, value=value)
        views = self._views(kv_cache, key.dtype)
        write_kv(key, value, CacheTarget(views, slot_mapping, *scales_of(layer), self.cache_dtype))

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
        check_given(query=query, key=key, value=value)
        rotation = Rotation(positions, cos_sin_cache, is_neox)
        check_rotated(query, key, rotation, len(layer_slot_mapping), REFERENCE_DTYPES)
        for rows in (query, key):
            rotate_in_place(rows, rotation)
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
        """Compute attention of this step's tokens; see the base class.

        Raises:
            NotImplementedError: with ``output_block_scale``.
            ValueError: tensors that do not fit the layer or the step.
        """
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale: no kernel writes block-scaled output")
        if attn_metadata is None:
            return output.zero_()
        rows = self._by_head(output)
        keys = self._keys(query.dtype, key, value, kv_cache, attn_metadata)
        is_scaled = self.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        check_dense(
            *(self, query, keys, rows),
            dtypes=REFERENCE_DTYPES,
            output_scale=output_scale,
            lse=output_lse,
            scales=scales_of(layer) if is_scaled else (None, None),
        )
        check_lengths(attn_metadata.num_actual_tokens, query, rows, output_lse)

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
            if self.attn_type is AttentionType.DECODER:
                debug_slots(attn_metadata.slot_mapping, attn_metadata.num_actual_tokens)
            requests = self._cached_requests(layer, query.dtype, keys, attn_metadata)
        else:
            requests = self._encoder_requests(keys, query.dtype, attn_metadata)
        attend_batch(query, requests, write, attn_metadata.common_prefix_len)
        return output

    def _keys(
        self,
        model_dtype: torch.dtype,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: TorchRefMetadata,
    ) -> KVViews:
        """The keys and values to attend: those of the cache, or those of an encoder's call.

        Raises:
            ValueError: the cache, or the encoder's keys and values, do not fit the step.
        """
        if self.attn_type.is_cached:
            keys = self._views(kv_cache, model_dtype)
            metadata.check_cache(keys.key.shape[1], keys.key.dtype)
            return keys
        keys = given_rows(key, value, self.attn_type)
        check_lengths(metadata.num_actual_tokens, keys.key, keys.value, None)
        return keys

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
        views: KVViews,
        metadata: TorchRefMetadata,
    ) -> Iterator[Request]:
        compute = torch.float64 if query_dtype == torch.float64 else torch.float32
        scales = scales_of(layer)
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
        keys: KVViews,
        query_dtype: torch.dtype,
        metadata: TorchRefMetadata,
    ) -> Iterator[Request]:
        compute = torch.float64 if query_dtype == torch.float64 else torch.float32
        key, value = keys.key, keys.value
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
