"""TRTLLM_MHA: dense attention by FlashInfer's direct calls, which the builder's record names."""

from __future__ import annotations

import math
from typing import Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.vendor.base import VendorImpl, rows_of
from attn.ops.clear import clear_tails
from attn.ops.quant import quantize_into
from builders.vendor.flashinfer_parts.install import LSE_UNIT, LayerCall, canonical_strides
from builders.vendor.trtllm_parts.mha_choice import (
    CACHE_DTYPES,
    HEAD_SIZES,
    MODEL_DTYPES,
    NAME,
    VendorKernel,
    mixed_dtypes_reason,
    most_tokens_with_sinks,
)
from builders.vendor.trtllm_parts.mha_record import CalledRows, TrtllmMhaMetadata
from specs.layouts import KVViews


class TrtllmMhaImpl(VendorImpl):
    """Runs causal decoders over 16-bit caches, and over e4m3 caches with a scale per tensor."""

    backend_name = NAME
    unsupported = ("logits_soft_cap", "alibi_slopes")

    can_return_lse_for_decode = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.base.DenseImpl`.

        Raises:
            ValueError: a head size or KV cache dtype that no kernel takes, besides what every dense
                impl refuses.
            NotImplementedError: a feature that the kernels do not have; the message names it.
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
        self._wide_sinks: torch.Tensor | None = None
        self._window_left = -1 if self.sliding_window is None else self.sliding_window - 1

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check the model dtype, and convert the sinks to fp32, which the kernels read.

        Raises:
            ValueError: no kernel takes the model dtype, or none takes it with this cache.
        """
        if act_dtype not in MODEL_DTYPES:
            names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
            raise ValueError(f"model dtype must be one of {names} for {NAME}, got {act_dtype}")
        reason = mixed_dtypes_reason(act_dtype, self.cache_dtype)
        if reason is not None:
            raise ValueError(reason)
        self._wide_sinks = None if self.sinks is None else self.sinks.float().contiguous()

    def _split(self, kv_cache: torch.Tensor, model_dtype: torch.dtype) -> KVViews:
        """Make views of K and V in a new cache, with strides that hardware descriptors take."""
        views = super()._split(kv_cache, model_dtype)
        return KVViews(canonical_strides(views.key), canonical_strides(views.value))

    def _attend_step(
        self,
        step: TrtllmMhaMetadata,
        layer: AttentionLayer,
        query: torch.Tensor,
        views: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if step.decode is not None:
            self._attend(step.decode, layer, query, views, output, lse)
        if step.prefill is not None:
            self._attend(step.prefill, layer, query, views, output, lse)
        if step.keyless is not None:
            tokens = step.num_actual_tokens
            output[:tokens].masked_fill_(step.keyless, 0)
            if lse is not None:
                lse[:tokens].masked_fill_(step.keyless[:, 0], -math.inf)

    def _attend(
        self,
        part: CalledRows,
        layer: AttentionLayer,
        query: torch.Tensor,
        pages: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Make one call over its rows, and make its log-sum-exp natural.

        Each feature that the common step lacks costs one comparison here. At batch 1 a layer waits
        for nothing but the host.
        """
        rows, own_output, own_lse = rows_of(part, query, output, lse)
        qk_scale, v_scale = self.scale, 1.0
        if self._is_fp8:
            rows, qk_scale = self._scaled_query(part, layer, rows)
            v_scale = self._scales.of(layer, "_v_scale")
        if part.query is not None and not rows.is_contiguous():
            rows = part.query.copy_(rows)
        if self.sliding_window is not None:
            self._check_windows(part)
        if self._is_fp8 or part.rule.kernel is VendorKernel.FMHA_V2:
            # FMHA_V2, and XQA over e4m3, multiply the values of unseen slots by zero. A slot that
            # holds NaN would then spoil the output.
            clear_tails(pages.key, pages.value, part.pages, part.kv_lens)
        sinks = None
        if self.sinks is not None:
            self._check_sinks(part)
            sinks = self._fp32_sinks()
        call = LayerCall(
            rows,
            pages.key,
            pages.value,
            own_output,
            qk_scale,
            v_scale,
            self._window_left,
            sinks,
            own_lse,
        )
        part.attend(part.calls, part, call)
        if own_lse is not None:
            own_lse.mul_(LSE_UNIT)

    def _check_windows(self, part: CalledRows) -> None:
        """Check that the kernel places the layer's window for each row.

        Raises:
            NotImplementedError: it does not.
        """
        is_verify = part.rule.kernel is VendorKernel.XQA and part.max_query_len > 1
        if is_verify and not part.calls.verifies_windows:
            raise NotImplementedError(
                f"sliding_window {self.sliding_window} of rows of {part.max_query_len} tokens is "
                f"not placed row by row by xqa of flashinfer {part.calls.version}: give the layer "
                "a KV cache group with a window, or install flashinfer-python>=0.7"
            )

    def _check_sinks(self, part: CalledRows) -> None:
        """Check that the kernel finds the sink of each row.

        Raises:
            NotImplementedError: it does not.
        """
        if part.rule.kernel is not VendorKernel.XQA:
            return
        tokens, group = part.max_query_len, self.num_heads // self.num_kv_heads
        if tokens > most_tokens_with_sinks(group, tokens):
            raise NotImplementedError(
                f"sinks of rows of {tokens} tokens are not found by xqa with {group} query heads "
                "per KV head: give EngineConfig has_sinks=True, so that such rows are prefills"
            )

    def _scaled_query(
        self, part: CalledRows, layer: AttentionLayer, rows: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """The query in the type that the kernel takes over an fp8 cache.

        The second result is the scale of its products with stored keys.
        """
        scale = self.scale * self._scales.of(layer, "_k_scale")
        if not part.rule.query_is_fp8:
            return rows, scale
        assert part.query is not None
        q_scale = self._scales.of(layer, "_q_scale")
        quantize_into(rows, q_scale, part.query)
        return part.query, scale * q_scale

    def _fp32_sinks(self) -> torch.Tensor | None:
        if self.sinks is not None and self._wide_sinks is None:
            self._wide_sinks = self.sinks.float().contiguous()
        return self._wide_sinks

    def _check_step(
        self,
        step: TrtllmMhaMetadata,
        query: torch.Tensor,
        rows: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if step.sliding_window not in (None, self.sliding_window):
            raise ValueError(
                f"sliding_window of the layer must be what the step's pages were cut to "
                f"({step.sliding_window}), got {self.sliding_window}"
            )
        if query.dtype not in MODEL_DTYPES or rows.dtype != query.dtype:
            names = ", ".join(str(dtype) for dtype in MODEL_DTYPES)
            raise ValueError(
                f"query and output must be of one type of {names}, got {query.dtype} and "
                f"{rows.dtype}"
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
