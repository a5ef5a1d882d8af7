"""An impl made of two: one computes decodes, the other all other rows, over one KV cache."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from attn.impls.base import AttentionImpl, AttentionLayer
from attn.impls.dense.base import DenseImpl
from builders.mixed import MixedMetadata


class MixedImpl(DenseImpl):
    """Hands each of its two impls the rows of its phase; a subclass names both impls."""

    prefill_cls: ClassVar[type[AttentionImpl]]
    decode_cls: ClassVar[type[AttentionImpl]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.base.DenseImpl`; raises the errors of both impls."""
        super().__init__(*args, **kwargs)
        self.prefill = self.prefill_cls(*args, **kwargs)
        self.decode = self.decode_cls(*args, **kwargs)
        self.can_return_lse_for_decode = self.decode.can_return_lse_for_decode

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Prepare both impls."""
        self.prefill.process_weights_after_loading(act_dtype)
        self.decode.process_weights_after_loading(act_dtype)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether both impls support it."""
        return all(
            one.fused_output_quant_supported(quant_key) for one in (self.prefill, self.decode)
        )

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether the decode impl supports it, since that impl writes the cache."""
        return self.decode.fused_rope_kvcache_supported()

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Let the decode impl write the cache; both impls read the same bytes."""
        self.decode.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def do_rope_and_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Let the decode impl rotate and write the cache; both impls read the same bytes."""
        self.decode.do_rope_and_kv_cache_update(*args, **kwargs)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: MixedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class; raises the errors of both impls."""
        if attn_metadata is None:
            return output.zero_()
        cut = attn_metadata.num_decode_tokens
        parts: tuple[tuple[AttentionImpl, Any, slice], ...] = (
            (self.decode, attn_metadata.decode, slice(0, cut)),
            (self.prefill, attn_metadata.prefill, slice(cut, None)),
        )
        for impl, record, rows in parts:
            if record is None:
                continue
            own_key, own_value = (None if one is None else one[rows] for one in (key, value))
            impl.forward(
                layer,
                query[rows],
                own_key,
                own_value,
                kv_cache,
                record,
                output[rows],
                output_scale,
                output_block_scale,
                output_lse=None if output_lse is None else output_lse[rows],
            )
        return output
