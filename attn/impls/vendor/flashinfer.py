"""FLASHINFER: dense attention by FlashInfer's wrappers, as the builder planned them."""

from __future__ import annotations

from typing import Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.vendor.base import VendorImpl, rows_of
from attn.ops.merge import merge_states
from builders.vendor.flashinfer import FlashInferMetadata, PlannedRows, SharedPrefix
from builders.vendor.flashinfer_parts.choice import NAME, check_dtypes, check_head_sizes
from builders.vendor.flashinfer_parts.csr import LayerSizes
from builders.vendor.flashinfer_parts.install import LSE_UNIT
from specs.layouts import KVViews


class FlashInferImpl(VendorImpl):
    """Runs causal decoders over 16-bit caches, and over fp8 caches with a scale per tensor."""

    backend_name = NAME
    unsupported = ("sinks", "alibi_slopes")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.base.DenseImpl`.

        Raises:
            ValueError: a head size or KV cache dtype that the wrappers do not take, besides what
                every dense impl refuses.
            NotImplementedError: a feature that the wrappers do not have; the message names it.
        """
        super().__init__(*args, **kwargs)
        check_head_sizes(self.head_size, self.head_size_v)
        check_dtypes(None, self.cache_dtype)
        self._planned: LayerSizes | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check the model dtype.

        Raises:
            ValueError: the wrappers do not take the model dtype with this cache.
        """
        check_dtypes(act_dtype, self.cache_dtype)

    def _check_step(
        self,
        step: FlashInferMetadata,
        query: torch.Tensor,
        rows: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if step.sizes is not self._planned:
            self._check_planned(step.sizes)
        dtype = step.sizes.query_dtype
        if query.dtype != dtype or rows.dtype != dtype:
            raise ValueError(
                f"query and output must be {dtype}, as was planned, got {query.dtype} and "
                f"{rows.dtype}"
            )

    def _attend_step(
        self,
        step: FlashInferMetadata,
        layer: AttentionLayer,
        query: torch.Tensor,
        views: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        scales = self._run_scales(layer)
        if step.shared is not None:
            self._attend_shared(step.shared, query, views, output, lse, scales)
        for part in (step.decode, step.prefill):
            if part is not None:
                self._attend(part, query, views, output, lse, scales)
        if step.keyless is not None:
            output.index_fill_(0, step.keyless, 0)
            if lse is not None:
                lse.index_fill_(0, step.keyless, float("-inf"))

    def _attend(
        self,
        part: PlannedRows,
        query: torch.Tensor,
        views: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        scales: dict[str, float],
    ) -> None:
        """Run one wrapper over its rows, and make its log-sum-exp natural."""
        rows, out, own = rows_of(part, query, output, lse)
        cache = views.key, views.value
        if own is None:
            part.wrapper.run(rows, cache, out=out, **scales)
            return
        part.wrapper.run(rows, cache, out=out, lse=own, return_lse=True, **scales)
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
        """Attend to the shared prefix and to each request's own keys, then merge both states."""
        outputs, lses = shared.outputs, shared.lses
        for part, own, own_lse in zip((shared.prefix, shared.own), outputs, lses, strict=True):
            self._attend(part, query, views, own, own_lse, scales)
        merge_states(outputs, lses, output, output_lse=lse, num_tokens=outputs.shape[1])

    def _run_scales(self, layer: AttentionLayer) -> dict[str, float]:
        """The scales that ``run`` takes. Plans leave the softmax's scale at 1, so it is added."""
        scales = {"q_scale": self.scale}
        if not self._is_fp8:
            return scales
        scales["k_scale"] = self._scales.of(layer, "_k_scale")
        v_scale = self._scales.of(layer, "_v_scale")
        # FlashInfer applies v_scale in a launch of its own over the output, so 1 is left out.
        if v_scale != 1.0:
            scales["v_scale"] = v_scale
        return scales

    def _check_planned(self, sizes: LayerSizes) -> None:
        """Check that the step was planned for layers like this one.

        Raises:
            ValueError: a size of the layer differs from the plan's; the message names both.
        """
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
