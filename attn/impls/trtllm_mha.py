"""TRTLLM_MHA: dense attention by FlashInfer's direct calls, as the metadata says."""

from __future__ import annotations

import math
from typing import Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense import DenseImpl
from attn.impls.host_scales import HostScales
from attn.ops.cache import rope_and_write_kv, write_kv
from attn.ops.quant import quantize_into
from builders.debug import debug_read
from builders.flashinfer_compat import LSE_UNIT, PagedCall, canonical_strides
from builders.trtllm_mha import CalledRows, DecodeRows, PrefillRows, TrtllmMhaMetadata
from builders.trtllm_mha_choice import (
    CACHE_DTYPES,
    HEAD_SIZES,
    MODEL_DTYPES,
    NAME,
    VendorKernel,
    mixed_dtypes_reason,
)
from specs.attention import AttentionType
from specs.dtypes import KVQuantMode
from specs.layouts import KVViews


class TrtllmMhaImpl(DenseImpl):
    """Causal decoders over 16-bit caches, or e4m3 ones with a scale per tensor."""

    can_return_lse_for_decode = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.DenseImpl`.

        Raises:
            ValueError: a head size or KV cache dtype that no kernel takes, besides what every dense
                impl refuses.
            NotImplementedError: a feature that they do not have; the message names it.
        """
        super().__init__(*args, **kwargs)
        if self.head_size not in HEAD_SIZES:
            raise ValueError(
                f"head_size must be one of {HEAD_SIZES} for {NAME}, got {self.head_size}"
            )
        if self.head_size_v != self.head_size:
            raise ValueError(
                f"head_size_v must be head_size ({self.head_size}) for {NAME}, got "
                f"{self.head_size_v}"
            )
        if self.cache_dtype not in CACHE_DTYPES:
            names = ", ".join(dtype.value for dtype in CACHE_DTYPES)
            raise ValueError(
                f"kv_cache_dtype must be one of {names} for {NAME}, got {self.cache_dtype.value!r}"
            )
        for name, value in (
            ("logits_soft_cap", self.logits_soft_cap),
            ("alibi_slopes", self.alibi_slopes),
            ("attention_chunk_size", self.rules.attention_chunk_size),
        ):
            if value is not None:
                raise NotImplementedError(f"{name} is not supported by {NAME}, got {value}")
        if self.attn_type is not AttentionType.DECODER:
            raise NotImplementedError(
                f"attn_type must be decoder for {NAME}, got {self.attn_type.value!r}"
            )
        self._is_fp8 = self.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        self._scales = HostScales(NAME)
        self._wide_sinks: torch.Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check the model dtype, and keep the sinks as the kernels read them, in fp32.

        Raises:
            ValueError: no kernel takes it, or not with this cache.
        """
        if act_dtype not in MODEL_DTYPES:
            names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
            raise ValueError(f"model dtype must be one of {names} for {NAME}, got {act_dtype}")
        reason = mixed_dtypes_reason(act_dtype, self.cache_dtype)
        if reason is not None:
            raise ValueError(reason)
        self._wide_sinks = None if self.sinks is None else self.sinks.float().contiguous()

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Never: outputs have the model's dtype here."""
        return False

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Cast and write this step's keys and values in one launch; see the base class."""
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
        attn_metadata: TrtllmMhaMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class.

        The scales of an fp8 cache, and of a query that goes with it in fp8, are read once a layer,
        at its first call, unless the layer has them on the host (``_k_scale_float`` and so on).

        Raises:
            NotImplementedError: with ``output_scale`` or ``output_block_scale``, or ``output_lse``
                where a kernel of the step has none.
            ValueError: tensors that do not fit the layer or the step; a cache whose layout a kernel
                of the step does not take.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"output_scale and output_block_scale: {NAME} has none")
        if attn_metadata is None:
            return output.zero_()
        step = attn_metadata
        if step.sliding_window not in (None, self.sliding_window):
            raise ValueError(
                f"sliding_window of the layer must be what the step's pages were cut to "
                f"({step.sliding_window}), got {self.sliding_window}"
            )
        rows = output.view(output.shape[0], self.num_heads, self.head_size)
        self._check_rows(step, query, rows, output_lse)
        views = self._views(kv_cache, query.dtype)
        debug_read(step.block_table, step.seq_lens, kv_cache.shape[0], views.key.shape[1])
        pages = KVViews(canonical_strides(views.key), canonical_strides(views.value))
        for part in (step.decode, step.prefill):
            if part is not None:
                self._attend(part, layer, query, pages, rows, output_lse)
        if step.keyless is not None:
            tokens = step.num_actual_tokens
            rows[:tokens].masked_fill_(step.keyless, 0)
            if output_lse is not None:
                output_lse[:tokens].masked_fill_(step.keyless[:, 0], -math.inf)
        return output

    def _attend(
        self,
        part: DecodeRows | PrefillRows,
        layer: AttentionLayer,
        query: torch.Tensor,
        pages: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """One call over its rows; the log-sum-exp becomes a natural one."""
        tokens = slice(part.first_token, part.first_token + part.num_tokens)
        own_lse = None if lse is None else lse[tokens]
        rows, qk_scale = self._query(part, layer, query[tokens])
        call = PagedCall(
            query=rows,
            key=pages.key,
            value=pages.value,
            output=output[tokens],
            pages=part.pages,
            kv_lens=part.kv_lens,
            max_kv_len=part.max_kv_len,
            workspace=part.workspace,
            counters=part.counters,
            qk_scale=qk_scale,
            v_scale=self._scales.of(layer, "_v_scale") if self._is_fp8 else 1.0,
            sliding_window=self.sliding_window,
            sinks=self._fp32_sinks(),
            lse=own_lse,
        )
        self._call(part, call)
        if own_lse is not None:
            own_lse.mul_(LSE_UNIT)

    def _call(self, part: DecodeRows | PrefillRows, call: PagedCall) -> None:
        calls, kernel = part.calls, part.rule.kernel
        if isinstance(part, PrefillRows):
            prefill = calls.fmha_v2 if kernel is VendorKernel.FMHA_V2 else calls.gen_prefill
            prefill(call, part.query_starts, part.kv_starts, part.max_query_len)
        elif kernel is VendorKernel.TRTLLM_GEN:
            calls.gen_decode(call, part.max_query_len, part.query_starts)
        elif (
            part.max_query_len > 1
            and self.sliding_window is not None
            and not calls.verifies_windows
        ):
            raise NotImplementedError(
                f"sliding_window {self.sliding_window} of rows of {part.max_query_len} tokens is "
                f"not placed row by row by xqa of flashinfer {calls.version}: give the layer a "
                "KV cache group with a window, or install flashinfer-python>=0.7"
            )
        else:
            calls.xqa(call, part.max_query_len, part.mask)

    def _query(
        self, part: CalledRows, layer: AttentionLayer, rows: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """The query as the kernel takes it, and the scale of its products with stored keys."""
        scale = self.scale
        if self._is_fp8:
            scale *= self._scales.of(layer, "_k_scale")
        if not (self._is_fp8 and part.rule.query_is_fp8):
            if part.query is not None and not rows.is_contiguous():
                return part.query.copy_(rows), scale
            return rows, scale
        assert part.query is not None
        q_scale = self._scales.of(layer, "_q_scale")
        quantize_into(rows, q_scale, part.query)
        return part.query, scale * q_scale

    def _fp32_sinks(self) -> torch.Tensor | None:
        if self.sinks is not None and self._wide_sinks is None:
            self._wide_sinks = self.sinks.float().contiguous()
        return self._wide_sinks

    def _check_rows(
        self,
        step: TrtllmMhaMetadata,
        query: torch.Tensor,
        rows: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Every tensor has a row for each token of the step, as the kernels address them."""
        tokens = step.num_actual_tokens
        if query.dtype not in MODEL_DTYPES or rows.dtype != query.dtype:
            names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
            raise ValueError(
                f"query and output must be of one type of {names}, got {query.dtype} and "
                f"{rows.dtype}"
            )
        for name, tensor in (("query", query), ("output", rows), ("output_lse", lse)):
            if tensor is not None and len(tensor) < tokens:
                raise ValueError(
                    f"{name} must have at least num_actual_tokens ({tokens}) rows, got "
                    f"{len(tensor)}"
                )
        for name, tensor in (("output", rows), ("output_lse", lse)):
            if tensor is not None and not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if query.stride(-1) != 1:
            raise ValueError(
                "query must be contiguous in its last dimension, got strides "
                f"{tuple(query.stride())}"
            )
        if lse is None:
            return
        for part in (step.decode, step.prefill):
            if part is not None and not part.rule.gives_lse:
                raise NotImplementedError(
                    f"output_lse: {part.rule.kernel.value} returns no log-sum-exp of paged keys, "
                    f"which takes the step's {part.rule.phase.value} rows"
                )
        if self.sinks is not None:
            raise NotImplementedError(
                "output_lse with sinks: trtllm-gen does not say whether its log-sum-exp has them"
            )
