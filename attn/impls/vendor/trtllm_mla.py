"""TRTLLM_MLA: latent attention by FlashInfer's direct calls, or by TRITON_MLA's decode kernel."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.latent.base import LatentImpl
from attn.impls.vendor.host_scales import HostScales
from attn.ops.clear import clear_rows
from attn.ops.gather import pack_query, unpack_state
from attn.ops.merge import merge_states
from attn.ops.quant import quantize_into
from attn.ops.rope_quant import rope_quantize, rope_quantize_by_flashinfer
from builders.checks.debug import debug_enabled, debug_read, debug_slots
from builders.checks.tensors import check_expanded, latent_query, needed
from builders.latent.prefill import LatentPrefill
from builders.vendor.flashinfer_parts import rope as flashinfer_rope
from builders.vendor.flashinfer_parts.install import LSE_UNIT
from builders.vendor.trtllm_mla import LatentRows, RaggedChunks, TrtllmMlaMetadata
from builders.vendor.trtllm_parts.mla_calls import LatentDecodeCall, RaggedCall
from builders.vendor.trtllm_parts.mla_choice import EXPANDED_SIZES, NAME, dtypes_reason
from specs.attention import MlaKernel, RopeKernel
from specs.cache_write import Rotation, UnrotatedLatents
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.latent.launcher import LatentLauncher


class TrtllmMlaImpl(LatentImpl):
    """Runs over caches of bf16, and of e4m3 with a scale per tensor."""

    can_return_lse_for_decode = True
    supports_quant_query_input = True
    """Whether the query may arrive in fp8 over an fp8 cache.

    :meth:`do_rope_quantize_and_kv_cache_update` writes such a query."""

    def __init__(self, *args: Any, rope_kernel: str = RopeKernel.TRITON, **kwargs: Any) -> None:
        """
        Args:
            args: positional arguments of :class:`attn.impls.base.MLAAttentionImpl`.
            rope_kernel: the kernel of :meth:`do_rope_quantize_and_kv_cache_update`, a
                ``RopeKernel`` string.
            kwargs: keyword arguments of :class:`attn.impls.base.MLAAttentionImpl`.

        Raises:
            NotImplementedError: a KV cache dtype without latent rows.
            ValueError: a pair of head sizes that no kernel takes.
            FlashInferUnavailableError: ``rope_kernel`` is FlashInfer's, but cannot be used here.
        """
        super().__init__(*args, **kwargs)
        self._rotates_by = RopeKernel(rope_kernel)
        if self._rotates_by is RopeKernel.FLASHINFER:
            # A missing FlashInfer must raise here, not at the first step.
            flashinfer_rope.load_rope()
        self._scales = HostScales(NAME)
        self._latent: LatentLauncher | None = None
        self._model_dtype = torch.bfloat16

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See the base class.

        Raises:
            ValueError: no kernel takes the model dtype with this cache.
        """
        reason = dtypes_reason(MlaKernel.TRITON, act_dtype, self.cache_dtype)
        if reason is not None:
            raise ValueError(f"{NAME}: {reason}")
        self._model_dtype = act_dtype
        super().process_weights_after_loading(act_dtype)

    def do_rope_quantize_and_kv_cache_update(
        self,
        layer: AttentionLayer,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        is_neox: bool,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        q_out: torch.Tensor,
    ) -> None:
        """Rotate and quantise absorbed queries and latent rows, and write the rows to the cache.

        The library's own kernel does it in one launch, FlashInfer in two.

        Args:
            layer: scales of the layer.
            q_nope: ``[T, H, L]``, absorbed.
            q_pe: ``[T, H, r]``, not rotated.
            kv_c_normed: ``[T, L]``.
            k_pe: ``[T, 1, r]`` or ``[T, r]``, not rotated.
            positions: ``[T]`` integer; with FlashInfer, each must be inside the table.
            cos_sin_cache: ``[max_position, r]`` fp32: cosines, then sines.
            is_neox: rotate halves (True) or interleaved pairs (False).
            kv_cache: ``[N, block_size, row]`` e4m3.
            slot_mapping: ``[T]`` int64; -1 skips.
            q_out: ``[T, H, L + r]`` e4m3, written: the query of :meth:`forward_mqa`.

        Raises:
            ValueError: a cache that is not e4m3, a tensor that is None, or tensors that do not fit
                together.
        """
        if not self.cache_dtype.is_quantized:
            raise ValueError(
                f"kv_cache_dtype must be fp8 to quantise queries for {NAME}, got "
                f"{self.cache_dtype.value!r}"
            )
        k_pe, cos_sin_cache = needed("k_pe", k_pe), needed("cos_sin_cache", cos_sin_cache)
        latents = UnrotatedLatents(q_nope, q_pe, kv_c_normed, k_pe.reshape(len(k_pe), -1))
        rotation = Rotation(positions, cos_sin_cache, is_neox)
        cache = self._fields(kv_cache, self.cache_dtype, q_nope.dtype)
        written: Any = {"cache": cache, "slot_mapping": slot_mapping}
        names = "_q_scale", "_k_scale"
        if self._rotates_by is RopeKernel.FLASHINFER:
            q_factor, k_factor = (self._scale_of(layer, name) for name in names)
            rope_quantize_by_flashinfer(latents, rotation, q_factor, k_factor, q_out, **written)
            return
        one = torch.ones((), device=q_nope.device)
        found = (getattr(layer, name, None) for name in names)
        q_scale, k_scale = (one if scale is None else scale for scale in found)
        rope_quantize(latents, rotation, q_scale, k_scale, q_out, **written)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TrtllmMlaMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute decode rows with absorbed queries; see the base class.

        A query may have more rows than the step was built for, if padding was added later. The
        results of padding rows are neutral: output 0, LSE -inf.

        The scales of an fp8 cache and of its queries are read from the device once, at the layer's
        first call, unless the layer has them on the host (``_k_scale_float`` and so on).

        Raises:
            ValueError: a query or a cache that does not fit the step.
        """
        query = latent_query(self, q)
        step, rows = attn_metadata.decode, len(query[0])
        size = rows, self.num_heads, self.kv_lora_rank
        out = query[0].new_empty(size, dtype=self._model_dtype)
        lse = query[0].new_empty((rows, self.num_heads), dtype=torch.float32)
        flags = attn_metadata.keyless
        covered = 0
        if step is not None:
            covered = step.num_tokens
            self._check_rows(step, rows)
            self._check_cache(attn_metadata, kv_c_and_k_pe_cache, self._model_dtype)
            if debug_enabled():
                debug_slots(attn_metadata.slot_mapping, int(attn_metadata.query_start_loc[-1]))
                self._debug_read(attn_metadata, kv_c_and_k_pe_cache)
            self._attend(step, query, kv_c_and_k_pe_cache, layer, flags, (out, lse))
        if flags is not None and (step is None or step.unpadded is None or covered < len(flags)):
            clear_rows(out, lse, flags[:rows])
        covered = max(covered, 0 if flags is None else len(flags))
        if covered < rows:
            # Padding rows go through the projection that follows, so they must hold numbers.
            out[covered:].zero_()
            lse[covered:].fill_(-math.inf)
        return out, lse

    def _attend(
        self,
        step: LatentRows,
        query: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        flags: torch.Tensor | None,
        state: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Compute the decode rows; requests of different lengths are padded to one length."""
        own = state
        if step.padded is not None:
            rows = step.num_reqs * step.query_len
            own = (
                state[0].new_empty((rows, *state[0].shape[1:])),
                state[1].new_empty((rows, self.num_heads)),
            )
        if step.calls is None:
            self._attend_triton(step, query, kv_cache, layer, own)
            unit = 1.0
        else:
            self._attend_gen(step, query, kv_cache, layer, own)
            unit = LSE_UNIT
        if step.unpadded is not None:
            of_rows = None if flags is None else flags[: step.num_tokens]
            unpack_state(*own, step.unpadded, of_rows, unit, *state)
        elif step.calls is not None:
            state[1][: step.num_tokens].mul_(unit)

    def _attend_gen(
        self,
        step: LatentRows,
        query: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        state: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        is_fp8 = self.cache_dtype.is_quantized
        q_scale = self._scale_of(layer, "_q_scale") if is_fp8 else 1.0
        k_scale = self._scale_of(layer, "_k_scale") if is_fp8 else 1.0
        assert step.calls is not None
        assert step.workspace is not None
        assert step.counters is not None
        self._pack(step, query, q_scale)
        rows = step.num_reqs, step.query_len, self.num_heads
        latent, _ = self._fields(kv_cache, self.cache_dtype, self._model_dtype)
        width = self.kv_lora_rank + self.qk_rope_head_dim
        step.calls.decode(
            LatentDecodeCall(
                query=step.query.view(*rows, width),
                cache=latent.as_strided((*latent.shape[:2], width), latent.stride()),
                output=state[0][: len(step.query)].view(*rows, self.kv_lora_rank),
                lse=state[1][: len(step.query)],
                pages=step.pages,
                kv_lens=step.kv_lens,
                max_kv_len=step.max_kv_len,
                workspace=step.workspace,
                counters=step.counters,
                nope_size=self.qk_nope_head_dim,
                rank=self.kv_lora_rank,
                qk_scale=q_scale * k_scale * self.scale,
                # Values are the latents themselves, stored with the scale of keys.
                v_scale=k_scale,
            )
        )

    def _pack(
        self, step: LatentRows, query: tuple[torch.Tensor, torch.Tensor], scale: float
    ) -> None:
        """Write the query in the kernel's rows and type; a query in e4m3 is only moved."""
        if query[0].dtype != step.query.dtype or query[0].dtype != torch.float8_e4m3fn:
            pack_query(*query, step.padded, scale, step.query)
            return
        nope, rope = (part.view(torch.uint8) for part in query)
        pack_query(nope, rope, step.padded, 1.0, step.query.view(torch.uint8))

    def _attend_triton(
        self,
        step: LatentRows,
        query: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        state: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        from attn.kernels.latent.tensors import LatentTensors

        is_fp8 = query[0].dtype == torch.float8_e4m3fn
        if step.padded is not None or is_fp8:
            # The kernel reads no e4m3 queries: they are dequantised first.
            q_scale = self._scale_of(layer, "_q_scale") if is_fp8 else 1.0
            pack_query(*query, step.padded, q_scale, step.query)
            query = step.query[..., : self.kv_lora_rank], step.query[..., self.kv_lora_rank :]
        fields = self._fields(kv_cache, self.cache_dtype, query[0].dtype)
        scale = getattr(layer, "_k_scale", None)
        if scale is None:
            scale = torch.ones((), device=query[0].device)
        assert step.planned is not None
        self._decoder().attend(step.planned, LatentTensors(*query, *fields, *state, scale))

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TrtllmMlaMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute prefill rows over expanded keys and values; see the base class.

        trtllm-gen's ragged kernel runs steps that the builder planned for it; the library's own
        kernels run the others.

        Raises:
            NotImplementedError: ``output_scale`` with the ragged kernel.
            ValueError: expanded head sizes that the ragged kernel does not take.
        """
        prefill, ragged = attn_metadata.prefill, attn_metadata.ragged
        if prefill is None:
            return
        self._check_cache(attn_metadata, kv_c_and_k_pe_cache, q.dtype)
        if debug_enabled():
            debug_slots(attn_metadata.slot_mapping, int(attn_metadata.query_start_loc[-1]))
        given = q, kv_c_normed, k_pe, kv_c_and_k_pe_cache
        if ragged is None:
            self.attend_prefill(*given, prefill, k_scale, output, output_scale)
            return
        if output_scale is not None:
            raise NotImplementedError(f"output_scale: trtllm-gen of {NAME} has none")
        sizes = self.qk_head_dim, self.v_head_dim
        if sizes not in EXPANDED_SIZES:
            known = ", ".join(f"{size} and {size_v}" for size, size_v in EXPANDED_SIZES)
            raise ValueError(
                f"qk_head_dim and v_head_dim must be one of {known} for trtllm-gen, got "
                f"{sizes[0]} and {sizes[1]}"
            )
        check_expanded(self, q, kv_c_normed, k_pe, output, prefill.num_tokens)
        rows = output.view(len(output), self.num_heads, self.v_head_dim)
        self._attend_ragged(*given, prefill, ragged, k_scale, rows)

    def _attend_ragged(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        prefill: LatentPrefill,
        ragged: RaggedChunks,
        k_scale: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend new tokens to each other, then to each chunk of context, and merge the states.

        In e4m3, queries are stored with scale 1. Keys and values are stored with the scale of the
        cache's rows, but at least with 1: that scale fits latents, and the keys and values that are
        expanded from them may be larger.
        """
        count, scale = prefill.num_tokens, 1.0
        q, new, k_pe = q[:count], kv_c_normed[:count], k_pe[:count].reshape(count, -1)
        own = self._workspace(q, count)
        self._expand(new, k_pe, own)
        if ragged.dtype != q.dtype:
            scale = max(self._scales.value_of("_k_scale", k_scale), 1.0)
        query = _stored(q, 1.0, ragged.dtype)
        attend = partial(self._ragged, ragged, prefill, query, scale)
        context, first = prefill.context, prefill.own
        starts, most = first.query_start_loc, prefill.max_query_len
        lengths = starts, first.seq_lens, most
        if context is None:
            attend(own, lengths, True, (output[:count], None))
            return
        states = q.new_empty((2, count, *output.shape[1:]))
        lses = q.new_empty((2, count, self.num_heads), dtype=torch.float32)
        attend(own, lengths, True, (states[0], lses[0]))
        assert ragged.starts is not None
        assert ragged.keyless is not None
        keys = self._workspace(q, context.lens.shape[1] * context.span)
        fields = self._fields(kv_cache, self.cache_dtype, q.dtype)
        factor = k_scale if self.cache_dtype.is_quantized else None
        chunks = len(context.lens)
        # The kernel may load values behind the last key and multiply them by zero: no NaN may be
        # there.
        keys.value.zero_()
        for chunk in range(chunks):
            packed = ragged.starts[chunk]
            paged = replace(context.rows(chunk), packed=packed)
            self._expand(*fields, keys, paged=paged, scale=factor)
            state = states[1], lses[1]
            attend(keys, (packed, context.lens[chunk], context.span), False, state)
            clear_rows(*state, ragged.keyless[chunk])
            into = output[:count] if chunk + 1 == chunks else states[0]
            merge_states(states, lses, into, output_lse=lses[0], num_tokens=count)

    def _ragged(
        self,
        ragged: RaggedChunks,
        prefill: LatentPrefill,
        query: torch.Tensor,
        scale: float,
        keys: KVViews,
        lengths: tuple[torch.Tensor, torch.Tensor, int],
        causal: bool,
        state: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Make one call of the ragged kernel, and make its log-sum-exp natural."""
        kv_starts, kv_lens, max_kv_len = lengths
        ragged.calls.ragged(
            RaggedCall(
                query=query,
                key=_stored(keys.key, scale, ragged.dtype),
                value=_stored(keys.value, scale, ragged.dtype),
                output=state[0],
                lse=state[1],
                query_starts=prefill.own.query_start_loc,
                kv_starts=kv_starts,
                kv_lens=kv_lens,
                max_query_len=prefill.max_query_len,
                max_kv_len=max_kv_len,
                workspace=ragged.workspace,
                qk_scale=scale * self.scale,
                v_scale=scale,
                causal=causal,
            )
        )
        if state[1] is not None:
            state[1].mul_(LSE_UNIT)

    def _scale_of(self, layer: AttentionLayer, name: str) -> float:
        """A scale of the layer, on the host; 1 where the layer has no such scale."""
        if getattr(layer, name, None) is None and getattr(layer, f"{name}_float", None) is None:
            return 1.0
        return self._scales.of(layer, name)

    def _check_rows(self, step: LatentRows, rows: int) -> None:
        if rows < step.num_tokens:
            raise ValueError(
                f"query must have a row for each of the step's {step.num_tokens} tokens, got {rows}"
            )
        heads, width = step.query.shape[1:]
        own = self.num_heads, self.kv_lora_rank + self.qk_rope_head_dim
        if own != (heads, width):
            raise ValueError(
                f"the step is built for {heads} heads of {width}, the layer has {own[0]} of "
                f"{own[1]}"
            )

    def _debug_read(self, metadata: TrtllmMlaMetadata, kv_cache: torch.Tensor) -> None:
        decodes = slice(0, metadata.num_decodes)
        lens, (num_blocks, block_size) = metadata.seq_lens[decodes].cpu(), kv_cache.shape[:2]
        debug_read(metadata.block_table[decodes], lens, num_blocks, block_size)

    def _decoder(self) -> LatentLauncher:
        if self._latent is None:
            from attn.kernels.latent.launcher import LatentLauncher
            from attn.kernels.latent.tensors import LatentLayer

            self._latent = LatentLauncher(
                LatentLayer(
                    num_heads=self.num_heads,
                    rank=self.kv_lora_rank,
                    rope_size=self.qk_rope_head_dim,
                    scale=self.scale,
                    cache_dtype=self.cache_dtype,
                    sliding_window=None,
                )
            )
        return self._latent


def _stored(rows: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Convert rows ``[T, H, D]`` to ``dtype``, e4m3 with real = stored * scale.

    Rows that have the type already are returned as they are.
    """
    if rows.dtype == dtype:
        return rows
    stored = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    quantize_into(rows, scale, stored)
    return stored
