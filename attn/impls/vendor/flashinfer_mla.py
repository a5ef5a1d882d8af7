"""FLASHINFER_MLA: absorbed decodes by FlashInfer's wrapper, as the builder planned it."""

from __future__ import annotations

import math
from typing import Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.latent.base import LatentImpl
from attn.impls.vendor.host_scales import HostScales
from attn.ops.clear import clear_rows
from builders.checks.debug import debug_enabled, debug_read, debug_slots
from builders.checks.tensors import latent_query
from builders.vendor.flashinfer_mla import FlashInferMlaMetadata, PlannedLatentRows
from builders.vendor.flashinfer_parts.mla_calls import LatentCall, LatentSizes
from builders.vendor.flashinfer_parts.mla_choice import (
    NAME,
    check_model_dtype,
    check_rows,
    padded_heads,
)


class FlashInferMlaImpl(LatentImpl):
    """Runs over caches of the model's 16-bit type; on Hopper also over e4m3, one scale a tensor."""

    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of :class:`attn.impls.base.MLAAttentionImpl`.

        Raises:
            NotImplementedError: a KV cache dtype without latent rows.
            ValueError: a KV cache dtype, a width of rows or a pair of head sizes that no kernel
                takes.
        """
        super().__init__(*args, **kwargs)
        check_rows(self.kv_lora_rank, self.qk_rope_head_dim, self.cache_dtype)
        self._planned: LatentSizes | None = None
        self._scales = HostScales(NAME)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See the base class.

        Raises:
            ValueError: the wrapper does not take the model dtype with this cache.
        """
        check_model_dtype(act_dtype, self.cache_dtype)
        super().process_weights_after_loading(act_dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: FlashInferMlaMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute decode rows with absorbed queries; see the base class.

        The scale of an fp8 cache is read from the device once, at the layer's first call, unless
        the layer has it on the host (``_k_scale_float``).

        Raises:
            ValueError: a query that does not fit the step, or a step planned for another layer.
        """
        query, rotary = latent_query(self, q)
        step, rows = attn_metadata.decode, len(query)
        if attn_metadata.sizes is not self._planned:
            self._check_planned(attn_metadata.sizes)
        heads = attn_metadata.sizes.num_heads
        out = query.new_empty((rows, heads, self.kv_lora_rank))
        lse = query.new_empty((rows, heads), dtype=torch.float32)
        covered = 0
        if step is not None:
            cache = kv_c_and_k_pe_cache
            self._attend(attn_metadata, step, (query, rotary), cache, layer, (out, lse))
            covered = step.num_tokens
        flags = attn_metadata.keyless
        if flags is not None:
            clear_rows(out, lse, flags[:rows])
            covered = max(covered, len(flags))
        if covered < rows:
            # Padding rows go through the projection that follows, so they must hold numbers.
            out[covered:].zero_()
            lse[covered:].fill_(float("-inf"))
        return out[:, : self.num_heads], lse[:, : self.num_heads]

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: FlashInferMlaMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute prefill rows by the library's own kernels; see the base class."""
        prefill = attn_metadata.prefill
        if prefill is None:
            return
        self._check_cache(attn_metadata, kv_c_and_k_pe_cache, q.dtype)
        debug_slots(attn_metadata.slot_mapping, attn_metadata.lengths.num_tokens)
        cache = kv_c_and_k_pe_cache
        self.attend_prefill(q, kv_c_normed, k_pe, cache, prefill, k_scale, output, output_scale)

    def _attend(
        self,
        metadata: FlashInferMlaMetadata,
        step: PlannedLatentRows,
        query: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        state: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Run the wrapper over the rows that it is planned for."""
        count = step.num_tokens
        self._check_rows(metadata.sizes, query[0], count)
        self._check_cache(metadata, kv_cache, query[0].dtype)
        if debug_enabled():
            debug_slots(metadata.slot_mapping, metadata.lengths.num_tokens)
            num_blocks, block_size = kv_cache.shape[:2]
            decodes = slice(0, metadata.num_decodes)
            lens = metadata.seq_lens[decodes].cpu()
            debug_read(metadata.block_table[decodes], lens, num_blocks, block_size)
        q_nope, q_pe = (part[:count] for part in query)
        scale, rest = None, 1.0
        if metadata.sizes.is_fp8:
            scale, rest = _exact_part(self._scales.of(layer, "_k_scale"))
        if step.query is not None:
            for wide, part in zip(step.query, (q_nope, q_pe), strict=True):
                torch.mul(part, rest, out=wide[:, : self.num_heads])
            q_nope, q_pe = step.query
        elif rest != 1.0:
            q_nope, q_pe = q_nope * rest, q_pe * rest
        latent, rope = self._fields(kv_cache, self.cache_dtype, query[0].dtype)
        call = LatentCall(
            q_nope=q_nope,
            q_pe=q_pe,
            latent=latent,
            rope=rope,
            output=state[0][:count],
            lse=state[1][:count],
            scale=scale,
        )
        step.flashinfer.run(step.wrapper, call)
        if rest != 1.0:
            call.output.mul_(rest)

    def _check_rows(self, sizes: LatentSizes, query: torch.Tensor, count: int) -> None:
        if query.dtype != sizes.query_dtype:
            raise ValueError(
                f"query must be {sizes.query_dtype}, as was planned, got {query.dtype}"
            )
        if len(query) < count:
            raise ValueError(
                f"query must have a row for each of the step's {count} tokens, padding of a "
                f"captured batch included, got {len(query)}"
            )

    def _check_planned(self, sizes: LatentSizes) -> None:
        """Check that the step was planned for layers like this one.

        Raises:
            ValueError: a size of the layer differs from the plan's; the message names both.
        """
        for name, own, planned in (
            ("num_heads", padded_heads(self.num_heads), sizes.num_heads),
            ("kv_lora_rank", self.kv_lora_rank, sizes.rank),
            ("qk_rope_head_dim", self.qk_rope_head_dim, sizes.rope_size),
            ("scale", self.scale, sizes.scale),
            ("quantised kv_cache_dtype", self.cache_dtype.is_quantized, sizes.is_fp8),
        ):
            if own != planned:
                raise ValueError(
                    f"{name} of the layer must be what the step was planned with ({planned}), "
                    f"got {own}"
                )
        self._planned = sizes


def _exact_part(scale: float) -> tuple[float, float]:
    """Split a scale into a power of two and a rest from 1 to 2.

    The kernel rounds the scale to the model's type, and then every product of the scale and a
    stored number. A power of two makes both exact. The rest multiplies queries and outputs instead,
    which costs them one more rounding.
    """
    fraction, exponent = math.frexp(scale)
    return math.ldexp(1.0, exponent - 1), 2 * fraction
