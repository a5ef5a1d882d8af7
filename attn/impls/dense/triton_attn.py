"""TRITON_ATTN: dense attention in Triton; launches the kernels that the builder's record names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense.base import given_rows
from attn.impls.dense.cached import CachedImpl
from attn.impls.warm import run_compiled
from attn.ops.merge import merge_states
from builders.checks.debug import debug_read, debug_slots
from builders.checks.kernel_limits import check_dtypes, check_head_sizes
from builders.checks.tensors import check_lengths, scales_of
from specs.attention import AttentionType
from specs.dtypes import KVQuantMode
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.dense.launcher import DenseLauncher
    from attn.kernels.dense.tensors import DenseTensors
    from builders.dense.record import SharedPrefix, TritonAttentionMetadata
    from builders.dense.triton_attn import TritonAttentionMetadataBuilder
    from builders.splitkv.stripe import Stripe


class TritonAttentionImpl(CachedImpl):
    """Runs the split-KV kernel for few query tokens and the prefill kernel for many.

    The portable kernels run on every GPU. On Hopper, the Hopper kernels run steps that are planned
    for them.
    """

    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.base.DenseImpl`.

        Raises:
            ValueError: a head size or KV cache dtype that no kernel takes, besides what every dense
                impl refuses.
        """
        super().__init__(*args, **kwargs)
        check_head_sizes(self.head_size, self.head_size_v)
        check_dtypes(None, self.cache_dtype)
        rules = self.rules
        self._is_plainly_causal = rules.causal and (
            rules.alibi_slopes is None
            and rules.sliding_window is None
            and rules.attention_chunk_size is None
        )
        """Whether the mask is causality alone: then every query sees a shared prefix whole, and
        positions may shift."""
        self._is_scaled = self.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        self._on_device: dict[torch.device, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._launchers: dict[bool, DenseLauncher] = {}

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Check the model dtype.

        Raises:
            ValueError: no kernel takes it.
        """
        check_dtypes(act_dtype, self.cache_dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class.

        A shared prefix in the metadata is used where the layer's mask is causality alone.

        Raises:
            NotImplementedError: with ``output_block_scale``; multimodal ranges that end with the
                layer's window, beside another window of R-SWA.
            ValueError: tensors that do not fit the layer or the step.
        """
        if output_block_scale is not None:
            raise NotImplementedError("output_block_scale is not supported")
        if attn_metadata is None:
            return output.zero_()
        viewed = None
        if self._is_cached:
            if self._debugs:
                _debug_read(attn_metadata, kv_cache, self.attn_type)
            keys = self._views(kv_cache, query.dtype)
            viewed = self._viewed
            assert viewed is not None
            assert viewed.pages is not None
            attn_metadata.check_cache(*viewed.pages)
        else:
            keys = _rows_of(key, value, attn_metadata.num_actual_tokens, self.attn_type)
        sinks, slopes = self.sinks, self.alibi_slopes
        if sinks is not None or slopes is not None:
            sinks, slopes = self._constants(query.device, attn_metadata.stripe)
        rows = self._by_head(output)
        clamps = attn_metadata.mm_ranges is not None and _clamps_ranges(layer)
        if clamps:
            self._check_clamp(attn_metadata)
        launcher = self._launchers.get(clamps)
        if launcher is None:
            launcher = self._launchers[clamps] = self._new_launcher(clamps)
        k_scale, v_scale = scales_of(layer) if self._is_scaled else (None, None)
        # Positional arguments cost less than keywords.
        tensors = launcher.tensors(
            query,
            keys,
            rows,
            k_scale,
            v_scale,
            output_lse,
            output_scale,
            sinks,
            slopes,
            None if viewed is None else viewed.made,
            attn_metadata.num_actual_tokens,
        )
        shared = attn_metadata.shared
        if shared is not None and self._is_plainly_causal:
            _attend_shared(launcher, shared, tensors)
        else:
            launcher.attend(attn_metadata, tensors)
        if viewed is not None:
            viewed.made = tensors.rows
        return output

    def _check_clamp(self, step: TritonAttentionMetadata) -> None:
        """Check that the layer's window, at which ranges end, is also the window of R-SWA.

        A kernel takes one window only.

        Raises:
            NotImplementedError: the two windows differ.
        """
        window, rswa_window = self.rules.sliding_window, step.rswa_window
        if window is not None and rswa_window is not None and window != rswa_window:
            raise NotImplementedError(
                f"mm_prefix_clamp_sliding_window with sliding_window ({window}) does not go "
                f"together with another rswa_window ({rswa_window})"
            )

    def warm_up(
        self,
        layer: AttentionLayer,
        kv_cache: torch.Tensor,
        builder: TritonAttentionMetadataBuilder,
        query_dtype: torch.dtype,
        *,
        with_lse: bool = False,
        output_scale: torch.Tensor | None = None,
        query_stride: int | None = None,
        **features: bool,
    ) -> None:
        """Compile every kernel variant that serving this layer will need, by running small steps.

        A variant depends on:

        - the layer: head counts and sizes, window, chunk, soft cap, ALiBi, sinks, KV cache dtype,
          per-head scales;
        - the builder's configuration: tiles, limits, block size, batch invariance, R-SWA;
        - the strides and the alignment of the cache, and the dtype and the stride of the query;
        - whether a log-sum-exp or fp8 output is asked for (call this method once for each);
        - whether a batch may be non-causal, be causal per request, hold multimodal ranges or have a
          shared prefix.

        It does not depend on lengths, batch sizes or the number of ranges.

        The cache is read (block 0) and not written. The builder's plan is overwritten. With
        ``shared_prefix`` the buffers of cascade attention are allocated.

        Args:
            layer: scales of the layer.
            kv_cache: the layer's cache, in the layout to be served; ignored by encoders.
            builder: this triple's builder, for the layer's group.
            query_dtype: dtype of query, key and value, and of an output that is not fp8.
            with_lse: whether ``forward`` will be given ``output_lse``.
            output_scale: the scale that ``forward`` will be given; the output is then fp8.
            query_stride: elements from a token to the next in ``query``; None where it is dense.
            **features: arguments of :meth:`TritonAttentionMetadataBuilder.warm_up_batches`.
        """
        device = builder.device
        heads, size, size_v = self.num_heads, self.head_size, self.head_size_v
        row = heads * size if query_stride is None else query_stride
        output_dtype = query_dtype if output_scale is None else torch.float8_e4m3fn

        def run_steps() -> None:
            for prefix, batch in builder.warm_up_batches(**features):
                tokens = batch.num_actual_tokens
                flat = torch.zeros(tokens * row, dtype=query_dtype, device=device)
                query = flat.as_strided((tokens, heads, size), (row, size, 1))
                key = query.new_zeros(tokens, self.num_kv_heads, size)
                value = query.new_zeros(tokens, self.num_kv_heads, size_v)
                output = query.new_zeros(tokens, heads, size_v, dtype=output_dtype)
                # Pass output_lse only if asked: an engine's wrapper of forward may not take it.
                lse = query.new_empty(tokens, heads, dtype=torch.float32)
                asked: dict[str, Any] = {"output_lse": lse} if with_lse else {}
                if self.kv_sharing_target_layer_name is None:
                    self.do_kv_cache_update(layer, key, value, kv_cache, batch.slot_mapping)
                record = builder.build(prefix, batch)
                self.forward(
                    *(layer, query, key, value, kv_cache, record, output, output_scale),
                    **asked,
                )

        run_compiled(run_steps, device)

    def _new_launcher(self, clamps_ranges: bool) -> DenseLauncher:
        from attn.kernels.dense.launcher import DenseLauncher
        from attn.kernels.dense.tensors import DenseLayer

        rules = self.rules
        layer = DenseLayer(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            scale=self.scale,
            cache_dtype=self.cache_dtype,
            causal=rules.causal,
            sliding_window=rules.sliding_window,
            attention_chunk_size=rules.attention_chunk_size,
            chunk_lookback=rules.chunk_lookback,
            logits_soft_cap=rules.logits_soft_cap,
            use_alibi_sqrt=rules.use_alibi_sqrt,
            clamps_ranges=clamps_ranges,
        )
        return DenseLauncher(layer)

    def _constants(
        self, device: torch.device, stripe: Stripe | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sinks and ALiBi slopes on ``device``; the first call copies them there if need be.

        Ranks that share a request's keys merge their states, so that only one rank may count the
        sinks. It is rank 0, which holds position 0: it has a key of every row that has any key.
        """
        constants = self.sinks, self.alibi_slopes
        if any(tensor is not None and tensor.device != device for tensor in constants):
            kept = self._on_device.get(device)
            if kept is None:
                sinks, slopes = (None if x is None else x.to(device) for x in constants)
                kept = self._on_device[device] = (sinks, slopes)
            constants = kept
        if stripe is not None and stripe.rank > 0:
            return None, constants[1]
        return constants


def _attend_shared(launcher: DenseLauncher, shared: SharedPrefix, tensors: DenseTensors) -> None:
    """Attend to the shared prefix and to each request's own keys, then merge both states.

    Sinks must join the softmax once. They join with the own keys, which every row has.
    """
    check_lengths(tensors.num_tokens, tensors.query, tensors.output, tensors.lse)
    outputs, lses = shared.outputs, shared.lses
    # The buffers have rows for the tokens of the batch without padding.
    own = replace(tensors, output=outputs[1], lse=lses[1], output_scale=None, num_tokens=0)
    launcher.attend(shared.prefix, replace(own, output=outputs[0], lse=lses[0], sinks=None))
    launcher.attend(shared.own, own)
    merge_states(
        outputs,
        lses,
        tensors.output,
        output_lse=tensors.lse,
        output_scale=tensors.output_scale,
    )


def _clamps_ranges(layer: AttentionLayer) -> bool:
    """Whether multimodal ranges end at the layer's window; they do only where the layer says so."""
    return bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))


def _debug_read(
    step: TritonAttentionMetadata, kv_cache: torch.Tensor, attn_type: AttentionType
) -> None:
    """Check that every block to be read lies in the cache, and that every token has its slot."""
    if attn_type is AttentionType.DECODER:
        debug_slots(step.slot_mapping, step.num_actual_tokens)
    # One rank of several has blocks for its own tokens of a request only.
    span = kv_cache.shape[2] * (1 if step.stripe is None else step.stripe.size)
    debug_read(step.block_table, step.seq_lens, kv_cache.shape[0], span)


def _rows_of(
    key: torch.Tensor | None, value: torch.Tensor | None, num_tokens: int, attn_type: AttentionType
) -> KVViews:
    """The keys and values that came with the query, at least ``num_tokens`` rows of each."""
    keys = given_rows(key, value, attn_type)
    check_lengths(num_tokens, keys.key, keys.value, None)
    return keys
