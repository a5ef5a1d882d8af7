"""The base of all dense impls: constructor and checks, a layer's rules, views of its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn.impls.base import AttentionImpl, is_integer, per_head
from attn.reference.dense import AttentionRules
from specs.attention import AttentionType
from specs.dtypes import CacheDType, DType
from specs.layouts import KVViews, split_kv_cache
from specs.positions import cut_chunks
from specs.rows import dense_row_format


class DenseImpl(AttentionImpl):
    """The base of dense impls; it takes every feature that a dense backend may offer."""

    can_return_lse_for_decode = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | torch.Tensor | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        attention_chunk_size: int | None = None,
        chunk_lookback: int = -1,
        head_size_v: int | None = None,
    ) -> None:
        """Take the ten arguments of every impl, then features by keyword.

        Args:
            num_heads: query heads H of this rank.
            head_size: query and key head size D.
            scale: multiplies q.k before the softmax.
            num_kv_heads: KV heads Hk; None means ``num_heads``.
            alibi_slopes: ``[H]`` position bias per head, or None.
            sliding_window: visible keys including the token itself, or None for all.
            kv_cache_dtype: a ``CacheDType`` string.
            logits_soft_cap: c of ``c * tanh(score / c)``; None or 0 is off.
            attn_type: an ``AttentionType`` string.
            kv_sharing_target_layer_name: layer whose cache this one reads, or None.
            sinks: ``[H]`` logits that join the softmax denominator.
            use_alibi_sqrt: square-root position bias in place of the linear one.
            attention_chunk_size: tokens per chunk of chunked local attention.
            chunk_lookback: chunks visible before the query's own chunk; negative is off. With
                ``sliding_window`` and no ``attention_chunk_size``, the window is the chunk size
                (vLLM's convention).
            head_size_v: value head size; None means ``head_size``.

        Raises:
            TypeError: a size that is no integer.
            ValueError: a value out of range; the message names argument and value.
            NotImplementedError: a KV cache dtype without dense rows, or a quantised one for an
                encoder.
        """
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
        )
        for name, number in (
            ("attention_chunk_size", attention_chunk_size),
            ("head_size_v", head_size_v),
        ):
            if not (number is None or is_integer(number)):
                raise TypeError(f"{name} must be an integer or None, got {number!r}")
            if number is not None and number < 1:
                raise ValueError(f"{name} must be positive or None, got {number}")
        if not is_integer(chunk_lookback):
            raise TypeError(f"chunk_lookback must be an integer, got {chunk_lookback!r}")
        if attention_chunk_size is None and chunk_lookback >= 0 and sliding_window is not None:
            attention_chunk_size = sliding_window
        chunk, lookback = cut_chunks(attention_chunk_size, max(0, chunk_lookback))
        if not self.attn_type.is_cached and self.cache_dtype.is_quantized:
            raise NotImplementedError(
                f"kv_cache_dtype {kv_cache_dtype!r} for attn_type {self.attn_type.value!r}: "
                "encoders cache nothing"
            )
        if not self.cache_dtype.has_row_format or self.cache_dtype is CacheDType.FP8_DS_MLA:
            raise NotImplementedError(f"kv_cache_dtype {kv_cache_dtype!r}: no dense rows here")
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.sinks = per_head("sinks", sinks, num_heads)
        self.rules = AttentionRules(
            scale=self.scale,
            causal=self.attn_type is AttentionType.DECODER,
            sliding_window=self.sliding_window,
            attention_chunk_size=chunk,
            chunk_lookback=lookback,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            use_alibi_sqrt=use_alibi_sqrt,
            sinks=self.sinks,
        )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether ``quant_key`` (vLLM's) means static per-tensor fp8, which is supported."""
        scale = getattr(quant_key, "scale", None)
        return (
            getattr(quant_key, "dtype", None) == torch.float8_e4m3fn
            and bool(getattr(scale, "static", False))
            and bool(getattr(getattr(scale, "group_shape", None), "is_per_tensor", lambda: False)())
        )

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether the layer is a decoder that writes a cache of its own."""
        shared = self.kv_sharing_target_layer_name is not None
        return self.attn_type is AttentionType.DECODER and not shared

    def _by_head(self, output: torch.Tensor) -> torch.Tensor:
        """View an output with flat rows as ``[T, H, Dv]``; an output of another shape is kept."""
        if output.dim() == 2 and output.shape[1] == self.num_heads * self.head_size_v:
            return output.view(output.shape[0], self.num_heads, self.head_size_v)
        return output

    def _views(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> KVViews:
        """Views of K and V in the cache.

        Raises:
            ValueError: the cache is not of this layer's kind.
        """
        model = DType.parse(model_dtype)
        row = dense_row_format(self.head_size, self.head_size_v, self.cache_dtype, model)
        views = split_kv_cache(kv_cache, row)
        if views.key.shape[2] != self.num_kv_heads:
            raise ValueError(
                f"kv_cache must have the layer's {self.num_kv_heads} KV heads, got "
                f"{views.key.shape[2]} in shape {tuple(kv_cache.shape)}"
            )
        return views


def given_rows(
    key: torch.Tensor | None, value: torch.Tensor | None, attn_type: AttentionType
) -> KVViews:
    """The keys and values that came with the query, for a layer without a cache.

    Raises:
        ValueError: key or value is None.
    """
    if key is None or value is None:
        name = "key" if key is None else "value"
        raise ValueError(f"{name} is needed for attn_type {attn_type.value!r}, got None")
    return KVViews(key, value)
