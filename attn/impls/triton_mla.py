"""TRITON_MLA: latent attention in Triton; launches what the metadata says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attn.impls.base import AttentionLayer, MLAAttentionImpl, check_scale
from attn.ops.cache import rope_and_write_kv, write_kv
from attn.ops.dispatch import converts_float8
from attn.ops.merge import merge_states
from builders.debug import debug_enabled, debug_read
from builders.paging import check_slots
from builders.triton_mla import PAGE, check_head_pair, check_latent_dtypes, check_latent_widths
from specs.dtypes import CacheDType, DType
from specs.layouts import KVViews, latent_views
from specs.rows import latent_format_of

if TYPE_CHECKING:
    from attn.kernels.dense import DenseLauncher
    from attn.kernels.mla_launch import LatentLauncher
    from builders.triton_attn import TritonAttentionMetadata
    from builders.triton_mla import TritonMLAMetadata, TritonMLAMetadataBuilder


class TritonMLAImpl(MLAAttentionImpl):
    """Absorbed decode over the latent cache, expanded prefill over it in chunks."""

    can_return_lse_for_decode = True
    supports_sliding_window: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments of :class:`MLAAttentionImpl`.

        Raises:
            NotImplementedError: a KV cache dtype without latent rows.
            ValueError: a KV cache dtype, a width of rows or a pair of head sizes that no kernel
                takes.
        """
        super().__init__(*args, **kwargs)
        latent_format_of(self.cache_dtype)
        check_latent_dtypes(None, self.cache_dtype)
        check_latent_widths(self.kv_lora_rank, self.qk_rope_head_dim)
        check_head_pair(self.qk_head_dim, self.v_head_dim)
        self._latent: LatentLauncher | None = None
        self._expanded: DenseLauncher | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See the base class.

        Raises:
            ValueError: no kernel takes the model dtype.
        """
        check_latent_dtypes(act_dtype, self.cache_dtype)
        super().process_weights_after_loading(act_dtype)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write this step's latent rows in one launch; see the base class."""
        cache_dtype = CacheDType.parse(kv_cache_dtype)
        check_scale(k_scale, cache_dtype)
        views = self._written(kv_cache, cache_dtype, kv_c_normed.dtype, slot_mapping)
        scale = torch.ones_like(k_scale) if skip_scale else k_scale
        key, value = k_pe.reshape(len(k_pe), 1, self.qk_rope_head_dim), kv_c_normed[:, None]
        write_kv(key, value, views, slot_mapping, scale, scale, cache_dtype)

    def fused_rope_kvcache_supported(self) -> bool:
        """Layers that write a cache of their own."""
        return self.kv_sharing_target_layer_name is None

    def do_rope_and_kv_cache_update(
        self,
        q_pe: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        is_neox: bool,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Rotate both rotary parts and write latent rows, in one launch; see the base class."""
        cache_dtype = CacheDType.parse(kv_cache_dtype)
        check_scale(k_scale, cache_dtype)
        views = self._written(kv_cache, cache_dtype, kv_c_normed.dtype, slot_mapping)
        scale = torch.ones_like(k_scale) if skip_scale else k_scale
        rope_and_write_kv(
            q_pe,
            k_pe if k_pe.dim() == 3 else k_pe[:, None],
            kv_c_normed[:, None],
            positions,
            cos_sin_cache,
            is_neox,
            views,
            slot_mapping,
            scale,
            scale,
            cache_dtype,
        )

    def _written(
        self,
        kv_cache: torch.Tensor,
        cache_dtype: CacheDType,
        model_dtype: torch.dtype,
        slot_mapping: torch.Tensor,
    ) -> KVViews:
        """Rows of the cache as what is written: of the two, it is keys that RoPE rotates."""
        if debug_enabled():
            num_blocks, block_size = kv_cache.shape[:2]
            check_slots(slot_mapping, block_size, num_blocks)
        latent, rope = self._fields(kv_cache, cache_dtype, model_dtype)
        return KVViews(rope[:, :, None], latent[:, :, None])

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TritonMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed decode; see the base class."""
        if isinstance(q, tuple):
            query, rotary = q
        else:
            query, rotary = q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :]
        step = attn_metadata.decode
        out = query.new_empty((*query.shape[:2], self.kv_lora_rank))
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        if step is None or _has_padding(query, attn_metadata.num_covered_tokens):
            # Its rows go through the projection that follows.
            out.zero_()
            lse.fill_(float("-inf"))
        if step is None:
            return out, lse
        self._check_step(attn_metadata, kv_c_and_k_pe_cache)
        check_scale(layer._k_scale, self.cache_dtype)
        if debug_enabled():
            num_blocks, block_size = kv_c_and_k_pe_cache.shape[:2]
            debug_read(step.block_table, step.seq_lens.cpu(), num_blocks, block_size)
        from attn.kernels.mla_launch import LatentTensors

        fields = self._fields(kv_c_and_k_pe_cache, self.cache_dtype, query.dtype)
        tensors = LatentTensors(query, rotary, *fields, out, lse, layer._k_scale)
        self._decoder().attend(step, tensors)
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
        """Expanded prefill: context from the cache, new tokens as they came; see the base class."""
        prefill = attn_metadata.prefill
        if prefill is None:
            return
        self._check_step(attn_metadata, kv_c_and_k_pe_cache)
        check_scale(k_scale, self.cache_dtype)
        from attn.kernels.dense import DenseTensors

        rows = output.view(len(output), self.num_heads, self.v_head_dim)
        own = self._workspace(q, len(kv_c_normed))
        self._expand(kv_c_normed, k_pe.reshape(len(k_pe), -1), own)
        if prefill.context is None:
            self.attend_expanded(q, own, prefill.own, rows, k_scale, output_scale)
            return
        scale, launcher = k_scale, self._attender()
        states = q.new_empty((2, *rows.shape), dtype=torch.float32)
        lses = q.new_empty((2, *rows.shape[:2]), dtype=torch.float32)
        launcher.attend(prefill.own, DenseTensors(q, own, states[0], scale, scale, lse=lses[0]))
        context, count = prefill.context, prefill.num_tokens
        chunks = len(context.lens)
        keys = self._workspace(q, len(context.block_table) * context.span // PAGE, PAGE)
        fields = self._fields(kv_c_and_k_pe_cache, self.cache_dtype, q.dtype)
        factor = k_scale if self.cache_dtype.is_quantized else None
        for chunk in range(chunks):
            self._expand(*fields, keys, paged=context.rows(chunk), scale=factor)
            step = context.step_over(chunk)
            launcher.attend(step, DenseTensors(q, keys, states[1], scale, scale, lse=lses[1]))
            if chunk + 1 < chunks:
                merge_states(states, lses, states[0], output_lse=lses[0], num_tokens=count)
        merge_states(states, lses, rows, output_scale=output_scale, num_tokens=count)

    def attend_expanded(
        self,
        q: torch.Tensor,
        keys: KVViews,
        step: TritonAttentionMetadata,
        output: torch.Tensor,
        scale: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """New tokens among themselves, over keys and values that are expanded already.

        Args:
            q: ``[T_prefill, H, P + r]``.
            keys: ``[T_prefill, H, P + r]`` and ``[T_prefill, H, V]``.
            step: ``prefill.own`` of a record.
            output: ``[T_prefill, H, V]``, written in place.
            scale: fp32 scalar, not used.
            output_scale: fp32 scalar; ``output`` is then fp8.
        """
        from attn.kernels.dense import DenseTensors

        tensors = DenseTensors(q, keys, output, scale, scale, output_scale=output_scale)
        self._attender().attend(step, tensors)

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

        What makes a variant: the layer (heads, widths, KV cache dtype), the builder's configuration
        (tiles, limits, block size), strides and alignment of the cache, dtype of the query, and
        whether prefill is to write fp8 (call it once for each). Lengths and batch sizes make none.
        The cache is read (block 0) and not written; the builder's plan is overwritten.

        Args:
            layer: scales of the layer.
            kv_cache: its cache, in the layout to be served.
            builder: of this triple, for the layer's group.
            query_dtype: of queries, latents and plain output.
            output_scale: what :meth:`forward_mha` will be given; its output is then fp8.

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
                    # As an engine has it: absorbed head by head, the rotary part a slice.
                    absorbed = blank(self.num_heads, count, self.kv_lora_rank).transpose(0, 1)
                    rotary = query[..., self.qk_nope_head_dim :]
                    self.forward_mqa((absorbed, rotary), kv_cache, record, layer)
                    whole = torch.cat([absorbed, rotary], dim=-1)
                    self.forward_mqa(whole, kv_cache, record, layer)
                output = blank(count, self.num_heads * self.v_head_dim).to(output_dtype)
                self.forward_mha(
                    *(query, latent, rope, kv_cache, record),
                    *(layer._k_scale, output, output_scale),
                )

        if builder.device.type == "cuda":
            from attn.kernels.launch import collected_calls, compile_calls

            with collected_calls() as calls:
                run_steps()
            compile_calls(calls, builder.device)
        run_steps()

    def _check_step(self, metadata: TritonMLAMetadata, kv_cache: torch.Tensor) -> None:
        """A step that is planned for other rows, or leaves keys out that the layer sees."""
        group, window = metadata.group, self.sliding_window
        planned = group.rank, group.rope_size, group.block_size
        sizes = self.kv_lora_rank, self.qk_rope_head_dim, kv_cache.shape[1]
        if planned != sizes:
            raise ValueError(
                f"the step is planned for latent rows of {planned[0]} + {planned[1]} in blocks of "
                f"{planned[2]}, the layer has {sizes[0]} + {sizes[1]} in blocks of {sizes[2]}"
            )
        if group.window is not None and (window is None or window > group.window):
            raise ValueError(
                f"the step is planned for a window of {group.window}, the layer's is {window}"
            )

    def _expand(self, latent: torch.Tensor, rope: torch.Tensor, into: KVViews, **rows: Any) -> None:
        """Keys ``[S, H, P + r]`` and values ``[S, H, V]`` of latent rows."""
        from attn.kernels.expand import expand_call

        hardware = converts_float8(latent.device)
        keys, values = into.key.flatten(0, -3), into.value.flatten(0, -3)
        call = expand_call(
            latent, rope, self.W_UK, self.W_UV, keys, values, hardware_e4m3=hardware, **rows
        )
        call.launch()

    def _workspace(self, like: torch.Tensor, *rows: int) -> KVViews:
        """Room for expanded keys and values."""
        return KVViews(
            like.new_empty(*rows, self.num_heads, self.qk_head_dim),
            like.new_empty(*rows, self.num_heads, self.v_head_dim),
        )

    def _fields(
        self, kv_cache: torch.Tensor, cache_dtype: CacheDType, model_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[N, P, L]`` and ``[N, P, r]`` of the cache, in the stored type."""
        model = DType.parse(model_dtype)
        element = model if cache_dtype.is_quantized else cache_dtype.element(model)
        row = latent_format_of(cache_dtype).row(self.kv_lora_rank, self.qk_rope_head_dim, element)
        latent, rope = latent_views(kv_cache, row).values()
        return latent, rope

    def _decoder(self) -> LatentLauncher:
        if self._latent is None:
            from attn.kernels.mla_launch import LatentLauncher, LatentLayer

            self._latent = LatentLauncher(
                LatentLayer(
                    num_heads=self.num_heads,
                    rank=self.kv_lora_rank,
                    rope_size=self.qk_rope_head_dim,
                    scale=self.scale,
                    cache_dtype=self.cache_dtype,
                    sliding_window=self.sliding_window,
                )
            )
        return self._latent

    def _attender(self) -> DenseLauncher:
        if self._expanded is None:
            from attn.kernels.dense import DenseLauncher, DenseLayer

            self._expanded = DenseLauncher(
                DenseLayer(
                    num_heads=self.num_heads,
                    num_kv_heads=self.num_heads,
                    head_size=self.qk_head_dim,
                    head_size_v=self.v_head_dim,
                    scale=self.scale,
                    cache_dtype=CacheDType.AUTO,
                    causal=True,
                    sliding_window=self.sliding_window,
                )
            )
        return self._expanded


def _has_padding(query: torch.Tensor, covered: int) -> bool:
    """There may be rows that no request owns; in a graph they come with the steps it replays."""
    if query.shape[0] > covered:
        return True
    return query.is_cuda and torch.cuda.is_current_stream_capturing()
