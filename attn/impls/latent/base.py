"""The base of latent impls: cache writes, and prefill over keys expanded for every head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attn.impls.base import MLAAttentionImpl, check_scale
from attn.impls.viewed import ViewedCache
from attn.ops.cache import rope_and_write_kv, write_kv
from attn.ops.gather import gather_paged
from attn.ops.merge import merge_states
from builders.checks.debug import debug_enabled
from builders.checks.tensors import check_expanded, check_latent_rows
from builders.device import device_facts
from builders.latent.prefill import PAGE, LatentContext, LatentPrefill, check_head_pair
from builders.pages.paging import check_slots
from specs.cache_write import CacheTarget, Rotation
from specs.dtypes import CacheDType, DType, KVQuantMode
from specs.layouts import KVViews, latent_views
from specs.rows import RowFormat, latent_format_of

if TYPE_CHECKING:
    from attn.kernels.dense.launcher import DenseLauncher
    from attn.kernels.latent.expand import ExpandLauncher
    from builders.base import AttentionMetadata
    from builders.dense.record import TritonAttentionMetadata
    from builders.latent.prefill import PagedRows


class LatentImpl(MLAAttentionImpl):
    """Writes the cache, and runs expanded prefill by the library's own kernels.

    A subclass adds ``forward_mqa``.
    """

    always_expands: ClassVar[bool] = True
    """Whether every prefill is expanded, so that head sizes must be those that its kernels take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """The arguments of :class:`MLAAttentionImpl`.

        Raises:
            NotImplementedError: a KV cache dtype without latent rows.
            ValueError: a pair of head sizes that no kernel takes.
        """
        super().__init__(*args, **kwargs)
        latent_format_of(self.cache_dtype)
        if self.always_expands:
            check_head_pair(self.qk_head_dim, self.v_head_dim)
        # Reading the environment takes as long as handling a call's tensors, so it is read once.
        self._debugs = debug_enabled()
        self._is_scaled = self.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        """Whether the layer has a scale for its cache, which each call checks."""
        self._rows: dict[tuple[CacheDType, torch.dtype], RowFormat] = {}
        self._viewed: ViewedCache[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._expander: ExpandLauncher | None = None
        self._expanded: DenseLauncher | None = None
        self.all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Under DCP, puts the tensors of all ranks one behind another in their first dimension, in
        the order of ranks. The engine sets it, since only the engine knows how ranks communicate.
        """

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
        check_latent_rows(self, kv_c_normed, k_pe, slot_mapping, k_scale)
        views = self._written(kv_cache, cache_dtype, kv_c_normed.dtype, slot_mapping)
        scale = torch.ones_like(k_scale) if skip_scale else k_scale
        key, value = k_pe.reshape(len(k_pe), 1, self.qk_rope_head_dim), kv_c_normed[:, None]
        write_kv(key, value, CacheTarget(views, slot_mapping, scale, scale, cache_dtype))

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether the layer writes a cache of its own."""
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
        check_latent_rows(self, kv_c_normed, k_pe, slot_mapping, k_scale)
        views = self._written(kv_cache, cache_dtype, kv_c_normed.dtype, slot_mapping)
        scale = torch.ones_like(k_scale) if skip_scale else k_scale
        rope_and_write_kv(
            q_pe,
            k_pe if k_pe.dim() == 3 else k_pe[:, None],
            kv_c_normed[:, None],
            Rotation(positions, cos_sin_cache, is_neox),
            CacheTarget(views, slot_mapping, scale, scale, cache_dtype),
        )

    def _written(
        self,
        kv_cache: torch.Tensor,
        cache_dtype: CacheDType,
        model_dtype: torch.dtype,
        slot_mapping: torch.Tensor,
    ) -> KVViews:
        """The cache's rows as the K and V of a dense cache write.

        The rotary part takes the place of K, which that write rotates under RoPE. The latent part
        takes the place of V.
        """
        if self._debugs:
            num_blocks, block_size = kv_cache.shape[:2]
            check_slots(slot_mapping, block_size, num_blocks)
        latent, rope = self._fields(kv_cache, cache_dtype, model_dtype)
        return KVViews(rope[:, :, None], latent[:, :, None])

    def attend_prefill(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        prefill: LatentPrefill,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute prefill rows over keys and values that are expanded for every head.

        New tokens are expanded from ``kv_c_normed`` and ``k_pe``, the context from the cache, one
        chunk at a time. The states of new tokens and of all chunks are merged. Under DCP ranks
        exchange the cached rows of every chunk by :attr:`all_gather`, so that all ranks must make
        this call for the same step.

        Args:
            q: ``[T_prefill, H, P + r]``, nope then rope.
            kv_c_normed: ``[T_prefill, L]`` new latents.
            k_pe: ``[T_prefill, 1, r]`` or ``[T_prefill, r]`` new rotary keys.
            kv_c_and_k_pe_cache: ``[N, block_size, row]``.
            prefill: the part of a record that is for these rows.
            k_scale: fp32 scalar of a per-tensor fp8 cache.
            output: ``[T_prefill, H * V]``, written in place.
            output_scale: fp32 scalar; ``output`` is then fp8.

        Raises:
            ValueError: a tensor does not fit; or ranks share the context, and :attr:`all_gather` is
                not set.
        """
        check_scale(k_scale, self.cache_dtype)
        check_expanded(self, q, kv_c_normed, k_pe, output, prefill.num_tokens, output_scale)
        rows = output.view(len(output), self.num_heads, self.v_head_dim)
        own = self._workspace(q, len(kv_c_normed))
        self._expand(kv_c_normed, k_pe.reshape(len(k_pe), -1), own)
        cache = kv_c_and_k_pe_cache
        self.attend_with_context(q, own, cache, prefill, k_scale, rows, output_scale)

    def attend_with_context(
        self,
        q: torch.Tensor,
        own: KVViews,
        kv_c_and_k_pe_cache: torch.Tensor,
        prefill: LatentPrefill,
        k_scale: torch.Tensor,
        rows: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute prefill rows whose own keys and values are expanded already.

        Args:
            q: ``[T_prefill, H, P + r]``, nope then rope.
            own: ``[T_prefill, H, P + r]`` and ``[T_prefill, H, V]`` of the new tokens.
            kv_c_and_k_pe_cache: see :meth:`attend_prefill`, as for ``prefill`` and ``k_scale``.
            prefill: the part of a record that is for these rows.
            k_scale: fp32 scalar of a per-tensor fp8 cache.
            rows: ``[T_prefill, H, V]``, written in place.
            output_scale: fp32 scalar; ``rows`` are then fp8.
        """
        from attn.kernels.dense.tensors import DenseTensors

        if prefill.context is None:
            self.attend_expanded(q, own, prefill.own, rows, k_scale, output_scale)
            return
        scale, launcher = k_scale, self._attender()
        states = q.new_empty((2, *rows.shape), dtype=torch.float32)
        lses = q.new_empty((2, *rows.shape[:2]), dtype=torch.float32)
        launcher.attend(prefill.own, DenseTensors(q, own, states[0], scale, scale, lse=lses[0]))
        context, count = prefill.context, prefill.num_tokens
        pieces = len(context.lens)
        keys = self._workspace(q, len(context.block_table) * context.span // PAGE, PAGE)
        cache = kv_c_and_k_pe_cache
        for piece in range(pieces):
            if context.stripe is None:
                paged = context.rows(piece)
            else:
                if piece % context.ranks == 0:
                    cache = self._exchange(kv_c_and_k_pe_cache, context, piece)
                paged = context.exchanged(piece)
            self._expand_cached(cache, prefill, piece, paged, keys, k_scale)
            step = context.step_over(piece)
            launcher.attend(step, DenseTensors(q, keys, states[1], scale, scale, lse=lses[1]))
            if piece + 1 < pieces:
                merge_states(states, lses, states[0], output_lse=lses[0], num_tokens=count)
        merge_states(states, lses, rows, output_scale=output_scale, num_tokens=count)

    def _exchange(self, kv_cache: torch.Tensor, context: LatentContext, first: int) -> torch.Tensor:
        """The cached rows of the chunk whose first piece is ``first``, of all ranks.

        Returns:
            ``[ranks * R' * C / PAGE, PAGE, row]``, see
            :meth:`builders.latent.prefill.LatentContext.exchanged`.
        """
        if self.all_gather is None:
            raise ValueError("all_gather must be set where ranks share the context of a prefill")
        assert context.stripe is not None
        own = context.rows(first + context.stripe.rank)
        # Rows travel as bytes: not every way to communicate knows e4m3.
        rows = gather_paged(kv_cache, own).view(torch.uint8)
        return self.all_gather(rows.view(-1, PAGE, rows.shape[-1])).view(kv_cache.dtype)

    def attend_expanded(
        self,
        q: torch.Tensor,
        keys: KVViews,
        step: TritonAttentionMetadata,
        output: torch.Tensor,
        scale: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Attend the new tokens to each other, over keys and values that are expanded already.

        Args:
            q: ``[T_prefill, H, P + r]``.
            keys: ``[T_prefill, H, P + r]`` and ``[T_prefill, H, V]``.
            step: ``prefill.own`` of a record.
            output: ``[T_prefill, H, V]``, written in place.
            scale: fp32 scalar, not used.
            output_scale: fp32 scalar; ``output`` is then fp8.
        """
        from attn.kernels.dense.tensors import DenseTensors

        tensors = DenseTensors(q, keys, output, scale, scale, output_scale=output_scale)
        self._attender().attend(step, tensors)

    def _expand_cached(
        self,
        kv_cache: torch.Tensor,
        prefill: LatentPrefill,
        piece: int,
        paged: PagedRows,
        into: KVViews,
        k_scale: torch.Tensor,
    ) -> None:
        """Expand the rows of a piece of context, which ``paged`` finds in ``kv_cache``."""
        fields = self._fields(kv_cache, self.cache_dtype, into.key.dtype)
        scale = k_scale if self.cache_dtype.is_quantized else None
        self._expand(*fields, into, paged, scale)

    def _expand(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor,
        into: KVViews,
        paged: PagedRows | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Expand latent rows into keys ``[S, H, P + r]`` and values ``[S, H, V]``."""
        if self._expander is None:
            from attn.kernels.latent.expand import ExpandLauncher

            self._expander = ExpandLauncher(device_facts(latent.device))
        if into.key.dim() > 3:
            into = KVViews(into.key.flatten(0, -3), into.value.flatten(0, -3))
        weights = self.W_UK, self.W_UV
        self._expander.launch((latent, rope), weights, into, paged, scale)

    def _workspace(self, like: torch.Tensor, *rows: int) -> KVViews:
        """Allocate room for expanded keys ``[*rows, H, P + r]`` and values ``[*rows, H, V]``."""
        return KVViews(
            like.new_empty(*rows, self.num_heads, self.qk_head_dim),
            like.new_empty(*rows, self.num_heads, self.v_head_dim),
        )

    def _fields(
        self, kv_cache: torch.Tensor, cache_dtype: CacheDType, model_dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the cache's latent ``[N, P, L]`` and rotary ``[N, P, r]`` parts, as stored.

        The views of the latest cache are kept while it lives, since a layer has only one cache.
        """
        if self._viewed is not None and cache_dtype is self.cache_dtype:
            known = self._viewed.of(kv_cache, model_dtype)
            if known is not None:
                return known
        latent, rope = latent_views(kv_cache, self._row(cache_dtype, model_dtype)).values()
        if cache_dtype is self.cache_dtype:
            latent, rope = latent.detach(), rope.detach()
            self._viewed = ViewedCache(kv_cache, model_dtype, (latent, rope))
            self._viewed.pages = latent.shape[1], latent.dtype
        return latent, rope

    def _row(self, cache_dtype: CacheDType, model_dtype: torch.dtype) -> RowFormat:
        """The format of the cache's rows, made once for each pair of types."""
        found = self._rows.get((cache_dtype, model_dtype))
        if found is None:
            model = DType.parse(model_dtype)
            element = model if cache_dtype.is_quantized else cache_dtype.element(model)
            sizes = self.kv_lora_rank, self.qk_rope_head_dim
            found = latent_format_of(cache_dtype).row(*sizes, element)
            self._rows[cache_dtype, model_dtype] = found
        return found

    def _check_cache(
        self, step: AttentionMetadata, kv_cache: torch.Tensor, model_dtype: torch.dtype
    ) -> None:
        """Check that the cache is of the kind that the step was built for."""
        # The first field of a row, the latent, has the type of the row's stored elements.
        stored = self._row(self.cache_dtype, model_dtype).fields[0].dtype
        step.check_cache(kv_cache.shape[1], stored.torch)

    def _attender(self) -> DenseLauncher:
        if self._expanded is None:
            from attn.kernels.dense.launcher import DenseLauncher
            from attn.kernels.dense.tensors import DenseLayer

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
