"""FLASHINFER: dense attention by FlashInfer's wrappers; runs what the metadata planned."""

from __future__ import annotations

from typing import Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense import DenseImpl
from attn.impls.host_scales import HostScales
from attn.ops.cache import rope_and_write_kv, write_kv
from attn.ops.merge import merge_states
from builders.debug import debug_read
from builders.flashinfer import FlashInferMetadata, PlannedRows, SharedPrefix
from builders.flashinfer_choice import NAME, check_dtypes, check_head_sizes
from builders.flashinfer_compat import LSE_UNIT, LayerSizes
from specs.attention import AttentionType
from specs.dtypes import KVQuantMode
from specs.layouts import KVViews


class FlashInferImpl(DenseImpl):
    """Causal decoders over 16-bit caches, or fp8 ones with a scale per tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.DenseImpl`.

        Raises:
            ValueError: a head size or KV cache dtype that the wrappers do not take, besides what
                every dense impl refuses.
            NotImplementedError: a feature that they do not have; the message names it.
        """
        super().__init__(*args, **kwargs)
        check_head_sizes(self.head_size, self.head_size_v)
        check_dtypes(None, self.cache_dtype)
        rules = self.rules
        for name, value in (
            ("sinks", self.sinks),
            ("alibi_slopes", self.alibi_slopes),
            ("attention_chunk_size", rules.attention_chunk_size),
        ):
            if value is not None:
                raise NotImplementedError(f"{name} is not supported by {NAME}, got {value}")
        if self.attn_type is not AttentionType.DECODER:
            raise NotImplementedError(
                f"attn_type must be decoder for {NAME}, got {self.attn_type.value!r}"
            )
        self._is_fp8 = self.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        self._planned: LayerSizes | None = None
        self._scales = HostScales(NAME)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check the model dtype.

        Raises:
            ValueError: the wrappers do not take it with this cache.
        """
        check_dtypes(act_dtype, self.cache_dtype)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Never: the wrappers write the model's dtype."""
        return False

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write this step's keys and values in one launch; see the base class."""
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
        scales = layer._k_scale, layer._v_scale
        rotated = query, key, value, positions, cos_sin_cache, is_neox
        views = self._views(kv_cache, key.dtype)
        rope_and_write_kv(*rotated, views, layer_slot_mapping, *scales, self.cache_dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: FlashInferMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class.

        The scales of an fp8 cache are read once a layer, at its first call, unless the layer has
        them on the host (``_k_scale_float``, ``_v_scale_float``, as vLLM's layers do).

        Raises:
            NotImplementedError: with ``output_scale`` or ``output_block_scale``.
            ValueError: tensors that do not fit the layer or the step, or a step planned for
                another layer.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"output_scale and output_block_scale: {NAME} has none")
        if attn_metadata is None:
            return output.zero_()
        step = attn_metadata
        if step.sizes is not self._planned:
            self._check_planned(step.sizes)
        debug_read(step.block_table, step.seq_lens, kv_cache.shape[0], step.sizes.page_size)
        rows = output.view(output.shape[0], self.num_heads, self.head_size)
        _check_rows(step, query, rows, output_lse)
        views = self._views(kv_cache, query.dtype)
        if views.key.shape[1] != step.sizes.page_size:
            raise ValueError(
                f"kv_cache must have blocks of {step.sizes.page_size} tokens, as was planned, got "
                f"{views.key.shape[1]}"
            )
        scales = self._run_scales(layer)
        if step.shared is not None:
            self._attend_shared(step.shared, query, views, rows, output_lse, scales)
        for part in (step.decode, step.prefill):
            if part is not None:
                self._attend(part, query, views, rows, output_lse, scales)
        if step.keyless is not None:
            rows.index_fill_(0, step.keyless, 0)
            if output_lse is not None:
                output_lse.index_fill_(0, step.keyless, float("-inf"))
        return output

    def _attend(
        self,
        part: PlannedRows,
        query: torch.Tensor,
        views: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        scales: dict[str, float],
    ) -> None:
        """One wrapper over its rows; the log-sum-exp becomes a natural one."""
        tokens = slice(part.first_token, part.first_token + part.num_tokens)
        given = dict(scales)
        if lse is None:
            part.wrapper.run(query[tokens], views[:2], out=output[tokens], **given)
            return
        own = lse[tokens]
        part.wrapper.run(
            query[tokens], views[:2], out=output[tokens], lse=own, return_lse=True, **given
        )
        own.mul_(LSE_UNIT)

    def _attend_shared(
        self,
        shared: SharedPrefix,
        query: torch.Tensor,
        views: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        scales: dict[str, float],
    ) -> None:
        """Attention over the prefix and over the rest, then both merged."""
        outputs, lses = shared.outputs, shared.lses
        for part, own, own_lse in zip((shared.prefix, shared.own), outputs, lses, strict=True):
            self._attend(part, query, views, own, own_lse, scales)
        merge_states(outputs, lses, output, output_lse=lse, num_tokens=outputs.shape[1])

    def _run_scales(self, layer: AttentionLayer) -> dict[str, float]:
        """Scales as ``run`` takes them: plans leave the softmax's at 1."""
        scales = {"q_scale": self.scale}
        if not self._is_fp8:
            return scales
        scales["k_scale"] = self._scales.of(layer, "_k_scale")
        v_scale = self._scales.of(layer, "_v_scale")
        # It costs a launch over the output.
        if v_scale != 1.0:
            scales["v_scale"] = v_scale
        return scales

    def _check_planned(self, sizes: LayerSizes) -> None:
        """The step was planned for layers like this one."""
        for name, own, planned in (
            ("num_heads", self.num_heads, sizes.num_heads),
            ("num_kv_heads", self.num_kv_heads, sizes.num_kv_heads),
            ("head_size", self.head_size, sizes.head_size),
            ("sliding_window", self.sliding_window, sizes.sliding_window),
            ("logits_soft_cap", self.logits_soft_cap, sizes.logits_soft_cap),
        ):
            if own != planned:
                raise ValueError(
                    f"{name} of the layer must be what the step was planned with ({planned}), "
                    f"got {own}"
                )
        self._planned = sizes


def _check_rows(
    step: FlashInferMetadata, query: torch.Tensor, rows: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Every tensor has a row for each token of the step, as the kernels address them."""
    tokens, dtype = step.num_actual_tokens, step.sizes.query_dtype
    if query.dtype != dtype or rows.dtype != dtype:
        raise ValueError(
            f"query and output must be {dtype}, as was planned, got {query.dtype} and {rows.dtype}"
        )
    for name, tensor in (("query", query), ("output", rows), ("output_lse", lse)):
        if tensor is not None and len(tensor) < tokens:
            raise ValueError(
                f"{name} must have at least num_actual_tokens ({tokens}) rows, got {len(tensor)}"
            )
    for name, tensor in (("output", rows), ("output_lse", lse)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if query.stride(-1) != 1:
        raise ValueError(
            f"query must be contiguous in its last dimension, got strides {query.stride()}"
        )
