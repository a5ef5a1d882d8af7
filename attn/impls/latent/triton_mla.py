"""TRITON_MLA: latent attention in Triton; launches the kernels that the builder's record names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attn.impls.base import AttentionLayer, check_scale
from attn.impls.latent.base import LatentImpl
from attn.impls.warm import run_compiled
from builders.checks.debug import debug_read, debug_slots
from builders.checks.tensors import check_count, k_scale_of, latent_query
from builders.latent.triton_mla import check_latent_dtypes, check_latent_widths

if TYPE_CHECKING:
    from attn.kernels.latent.launcher import LatentLauncher
    from builders.latent.triton_mla import (
        LatentGroup,
        TritonMLAMetadata,
        TritonMLAMetadataBuilder,
    )


class TritonMLAImpl(LatentImpl):
    """Computes absorbed decode over the latent cache, and expanded prefill in chunks of context."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True
    supports_sliding_window: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of :class:`MLAAttentionImpl`.

        Raises:
            NotImplementedError: a KV cache dtype without latent rows.
            ValueError: a KV cache dtype, a width of rows or a pair of head sizes that no kernel
                takes.
        """
        super().__init__(*args, **kwargs)
        check_latent_dtypes(None, self.cache_dtype)
        check_latent_widths(self.kv_lora_rank, self.qk_rope_head_dim)
        self._latent: LatentLauncher | None = None
        self._checked: LatentGroup | None = None
        """The group that the latest step was planned for, which fits this layer."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See the base class.

        Raises:
            ValueError: no kernel takes the model dtype.
        """
        check_latent_dtypes(act_dtype, self.cache_dtype)
        super().process_weights_after_loading(act_dtype)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TritonMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute decode rows with absorbed queries; see the base class.

        Under DCP the queries have the heads of all ranks, and the result is attention over the keys
        of this rank: zero with an LSE of ``-inf`` for tokens of which the rank keeps no key.
        """
        group = attn_metadata.group
        heads = self.num_heads * group.ranks
        query, rotary = latent_query(self, q, heads)
        step, ranked = attn_metadata.decode, attn_metadata.ranked
        if ranked is not None:
            step = ranked.step
        tokens, dtype = query.shape[0], query.dtype
        out = query.new_empty((tokens, heads, self.kv_lora_rank))
        lse = query.new_empty((tokens, heads), dtype=torch.float32)
        if step is None:
            # Padding rows go through the projection that follows, so they must hold numbers. Where
            # there are decodes, launches of theirs clear these rows.
            out.zero_()
            lse.fill_(float("-inf"))
            return out, lse
        if group is not self._checked:
            self._check_step(attn_metadata)
            self._checked = group
        if tokens < attn_metadata.num_covered_tokens:
            check_count("q", query, attn_metadata.num_covered_tokens)
        k_scale = k_scale_of(layer)
        if self._is_scaled:
            check_scale(k_scale, self.cache_dtype)
        if self._debugs:
            debug_slots(attn_metadata.slot_mapping, attn_metadata.num_actual_tokens)
            num_blocks, block_size = kv_c_and_k_pe_cache.shape[:2]
            debug_read(step.block_table, step.seq_lens.cpu(), num_blocks, block_size)
        latent, rope = self._fields(kv_c_and_k_pe_cache, self.cache_dtype, dtype)
        viewed = self._viewed
        assert viewed is not None
        assert viewed.pages is not None
        attn_metadata.check_cache(*viewed.pages)
        launcher = self._decoder(heads)
        # Positional arguments cost less than keywords.
        rows = (query, rotary, latent, rope, out, lse, k_scale)
        tensors = launcher.tensors(*rows, attn_metadata.num_covered_tokens, viewed.made)
        launcher.attend(step, tensors)
        viewed.made = tensors.rows
        return out, lse

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TritonMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute prefill rows over expanded keys and values; see the base class."""
        prefill = attn_metadata.prefill
        if prefill is None:
            return
        self._check_step(attn_metadata)
        self._check_cache(attn_metadata, kv_c_and_k_pe_cache, q.dtype)
        if self._debugs:
            debug_slots(attn_metadata.slot_mapping, attn_metadata.num_actual_tokens)
        cache = kv_c_and_k_pe_cache
        self.attend_prefill(q, kv_c_normed, k_pe, cache, prefill, k_scale, output, output_scale)

    def warm_up(
        self,
        layer: AttentionLayer,
        kv_cache: torch.Tensor,
        builder: TritonMLAMetadataBuilder,
        query_dtype: torch.dtype,
        *,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compile every kernel variant that serving this layer will need, by running small steps.

        A variant depends on the layer (heads, widths, KV cache dtype), the builder's configuration
        (tiles, limits, block size), the strides and the alignment of the cache, the dtype of the
        query, and whether prefill writes fp8 (call this method once for each). It does not depend
        on lengths or batch sizes. The cache is read (block 0) and not written; the builder's plan
        is overwritten.

        Args:
            layer: scales of the layer.
            kv_cache: the layer's cache, in the layout to be served.
            builder: this triple's builder, for the layer's group.
            query_dtype: dtype of queries and latents, and of an output that is not fp8.
            output_scale: the scale that :meth:`forward_mha` will be given; its output is then fp8.

        Raises:
            ValueError: :meth:`process_weights_after_loading` was not called.
        """
        output_dtype = query_dtype if output_scale is None else torch.float8_e4m3fn

        def run_steps() -> None:
            for batch, record in builder.warm_up_steps():
                count = batch.num_actual_tokens
                blank = torch.zeros((), dtype=query_dtype, device=builder.device).new_zeros
                latent = blank(count, self.kv_lora_rank)
                rope = blank(count, 1, self.qk_rope_head_dim)
                self.do_kv_cache_update(
                    *(latent, rope, kv_cache, batch.slot_mapping),
                    *(self.kv_cache_dtype, layer._k_scale),
                )
                query = blank(count, self.num_heads, self.qk_head_dim)
                if record.decode is not None:
                    # An engine absorbs queries head by head, and slices the rotary part: these
                    # are its strides.
                    absorbed = blank(self.num_heads, count, self.kv_lora_rank).transpose(0, 1)
                    rotary = query[..., self.qk_nope_head_dim :]
                    if record.ranked is None:
                        self.forward_mqa((absorbed, rotary), kv_cache, record, layer)
                    whole = torch.cat([absorbed, rotary], dim=-1)
                    # Under DCP an engine gathers whole queries of all ranks.
                    whole = whole.repeat(1, record.group.ranks, 1)
                    self.forward_mqa(whole, kv_cache, record, layer)
                output = blank(count, self.num_heads * self.v_head_dim).to(output_dtype)
                self.forward_mha(
                    *(query, latent, rope, kv_cache, record),
                    *(layer._k_scale, output, output_scale),
                )

        run_compiled(run_steps, builder.device)

    def _check_step(self, metadata: TritonMLAMetadata) -> None:
        """Check that the step is planned for this layer's latent rows and window.

        Raises:
            ValueError: the plan is for rows of other sizes, or leaves out keys that the layer sees.
        """
        group, window = metadata.group, self.sliding_window
        planned = group.rank, group.rope_size
        sizes = self.kv_lora_rank, self.qk_rope_head_dim
        if planned != sizes:
            raise ValueError(
                f"the step is planned for latent rows of {planned[0]} + {planned[1]}, the layer "
                f"has {sizes[0]} + {sizes[1]}"
            )
        if group.window is not None and (window is None or window > group.window):
            raise ValueError(
                f"the step is planned for a window of {group.window}, the layer's is {window}"
            )

    def _decoder(self, heads: int) -> LatentLauncher:
        if self._latent is None or self._latent.layer.num_heads != heads:
            from attn.kernels.latent.launcher import LatentLauncher
            from attn.kernels.latent.tensors import LatentLayer

            self._latent = LatentLauncher(
                LatentLayer(
                    num_heads=heads,
                    rank=self.kv_lora_rank,
                    rope_size=self.qk_rope_head_dim,
                    scale=self.scale,
                    cache_dtype=self.cache_dtype,
                    sliding_window=self.sliding_window,
                )
            )
        return self._latent
