"""TRITON_ATTN: dense attention in Triton; launches what the metadata says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense import DenseImpl
from attn.ops.cache import rope_and_write_kv, write_kv
from builders.debug import debug_read
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.dense import DenseLayer
    from builders.triton_attn import TritonAttentionMetadata

HEAD_SIZES = range(32, 513, 8)


class TritonAttentionImpl(DenseImpl):
    """Split-KV kernel for few query tokens, tiled kernel for many, on every GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.DenseImpl`.

        Raises:
            ValueError: a head size that no kernel takes, besides what every dense impl refuses.
        """
        super().__init__(*args, **kwargs)
        for name, size in (("head_size", self.head_size), ("head_size_v", self.head_size_v)):
            if size not in HEAD_SIZES:
                raise ValueError(f"{name} must be a multiple of 8 from 32 to 512, got {size}")
        self._on_device: dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values in one launch; see the base class."""
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
        """Rotate query and key in place and write the cache, in one launch; see the base class."""
        rope_and_write_kv(
            query,
            key,
            value,
            positions,
            cos_sin_cache,
            is_neox,
            self._views(kv_cache, key.dtype),
            layer_slot_mapping,
            layer._k_scale,
            layer._v_scale,
            self.cache_dtype,
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class."""
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale is not supported")
        if attn_metadata is None:
            return output.zero_()
        from attn.kernels.dense import DenseTensors, prefill_call, split_call

        if output.stride(-1) != 1:
            raise ValueError(
                f"output must be contiguous in its last dimension, got strides {output.stride()}"
            )
        if self.attn_type.is_cached:
            debug_read(
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                kv_cache.shape[0],
                kv_cache.shape[2],
            )
            keys = self._views(kv_cache, query.dtype)
        else:
            if key is None or value is None:
                raise ValueError(f"key and value are needed for attn_type {self.attn_type.value!r}")
            keys = KVViews(key, value)
        sinks, slopes = self._constants(query.device)
        tensors = DenseTensors(
            query=query,
            keys=keys,
            output=output.view(output.shape[0], self.num_heads, self.head_size_v),
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
            lse=output_lse,
            output_scale=output_scale,
            sinks=sinks,
            alibi_slopes=slopes,
        )
        shape = self._layer(layer)
        if attn_metadata.split is not None:
            split_call(shape, attn_metadata, tensors).launch()
        if attn_metadata.prefill is not None:
            prefill_call(shape, attn_metadata, tensors).launch()
        return output

    def _layer(self, layer: AttentionLayer) -> DenseLayer:
        from attn.kernels.dense import DenseLayer

        rules = self.rules
        return DenseLayer(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            scale=self.scale,
            cache_dtype=self.cache_dtype,
            causal=rules.causal,
            sliding_window=rules.sliding_window,
            attention_chunk_size=rules.attention_chunk_size,
            chunk_lookback=rules.chunk_lookback,
            logits_soft_cap=rules.logits_soft_cap,
            use_alibi_sqrt=rules.use_alibi_sqrt,
            clamps_ranges=bool(getattr(layer, "mm_prefix_clamp_sliding_window", False)),
        )

    def _constants(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sinks and ALiBi slopes on the device; copied once, by the first call (a warm-up)."""
        if device not in self._on_device:
            self._on_device[device] = (
                None if self.sinks is None else self.sinks.to(device),
                None if self.alibi_slopes is None else self.alibi_slopes.to(device),
            )
        return self._on_device[device]
