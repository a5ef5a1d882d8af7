"""Our sparse latent triple as vLLM subclasses.

vLLM's layer of a sparse model is its ``MLAAttention``: what :mod:`attn.integrations.vllm.latent`
says of latent layers holds here too. This module holds the differences: where lists of tokens come
from, rows with block scales, and what vLLM asks a sparse impl for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none

from attn.integrations.vllm import compat, translate
from attn.integrations.vllm.latent import LatentBackend, LatentBuilder, LatentImpl
from builders.latent.prefill import check_head_pair
from builders.sparse.choice import width_reasons
from specs.attention import AttentionCGSupport, AttentionSelectorConfig
from specs.dtypes import CacheDType
from specs.rows import LatentFormat
from specs.sparse_mla import MOST_HEADS

SCALED_WIDTH = 576
"""Columns of the latent row for which vLLM's caches of ``fp8_ds_mla`` have room."""


class SparseBackend(LatentBackend):
    """Methods of a sparse backend that differ for vLLM."""

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The shape ``[N, P, L + r]`` in elements of the storage dtype.

        Rows of ``fp8_ds_mla`` have block scales: ``[N, P, 656]`` bytes.

        Raises:
            ValueError: no kernel takes this block size.
        """
        given = num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str
        shape = super().get_kv_cache_shape(*given)
        if cache_dtype_str != CacheDType.FP8_DS_MLA:
            return shape
        return *shape[:-1], LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE.row().nbytes

    @classmethod
    def validate(cls, config: AttentionSelectorConfig, device_capability: Any) -> list[str]:
        """Every reason why not, with those that only the model's configuration tells."""
        reasons = super().validate(config, device_capability)
        is_scaled = config.kv_cache_dtype == CacheDType.FP8_DS_MLA
        if is_scaled and config.head_size != SCALED_WIDTH:
            reasons.append(
                f"fp8_ds_mla of head_size {config.head_size} not supported (served: {SCALED_WIDTH})"
            )
        widths = compat.latent_widths()
        # A draft model's layers may have other widths than the model whose configuration this is.
        if widths is not None and sum(widths) == config.head_size:
            reasons += width_reasons(*widths)
        engine = get_current_vllm_config_or_none()
        if engine is not None:
            # The op's module is large, and only sparse layers need it.
            from attn.integrations.vllm.indexer import reasons as indexer_reasons

            reasons += indexer_reasons(engine)
        return reasons + compat.sparse_reasons(MOST_HEADS)


class _SharedLists:
    """Lists of a layer without an indexer: those that an earlier layer's indexer wrote."""

    def __init__(self, topk_indices_buffer: torch.Tensor | None) -> None:
        self.topk_indices_buffer = topk_indices_buffer


class SparseImpl(LatentImpl):
    """Methods of a sparse impl that differ for vLLM.

    vLLM's model runner gives an indexer another buffer after the impl was made, so the impl asks
    the indexer for its buffer at every step.
    """

    supports_dense_mha_prefill: ClassVar[bool] = False
    """vLLM 0.33 makes no prefill kernel of its own then."""
    masked_mha_available: ClassVar[bool] = False
    """vLLM 0.33 asks for this: whether ``forward_mha`` takes lists as masks."""

    def __init__(
        self,
        num_heads: int,
        *args: Any,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: Any = None,
        **extras: Any,
    ) -> None:
        """Take vLLM's arguments.

        Args:
            num_heads: query heads of this rank.
            *args: the other arguments that every impl takes.
            indexer: the layer's own indexer, which has ``topk_indices_buffer``; None for a layer
                that reads the lists of an earlier layer.
            topk_indices_buffer: ``[max_tokens, K]`` int32, lists of a layer without an indexer.
            index_group_builder: vLLM 0.33 converts the lists of several layers at a time with it;
                not used.
            **extras: the other arguments that MLA impls take.

        Raises:
            ValueError: more heads than a kernel takes; neither an indexer with a buffer nor a
                buffer; or an indexer that our kernels do not serve.
        """
        # Under DCP a rank attends with the heads of all ranks that share its keys.
        heads = num_heads * self.dcp_world_size
        if heads > MOST_HEADS:
            raise ValueError(f"num_heads must be 1 to {MOST_HEADS} per rank, got {heads}")
        lists = _SharedLists(topk_indices_buffer) if indexer is None else indexer
        if hasattr(indexer, "indexer_op"):
            # The op's module is large, and only layers with an indexer of vLLM's need it.
            from attn.integrations.vllm.indexer import adopt

            adopt(indexer)
        ours: Any = super()
        ours.__init__(num_heads, *args, indexer=lists, **extras)

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """``[max_tokens, K]`` int32: the lists that this layer reads now."""
        mine: Any = self
        buffer: torch.Tensor = mine.indexer.topk_indices_buffer
        return buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        """Read ``buffer`` from now on, whatever the indexer's own is.

        vLLM 0.33 gives the layers of HYV4's draft models the target's buffer in this way.
        """
        self.indexer = _SharedLists(buffer)

    def record_logical_topk_ready(self) -> None:
        """Do nothing: lists are read in the order of the stream. Only vLLM 0.33 calls this."""

    @property
    def expands(self) -> bool:
        """Whether ``forward_mha`` takes the layer's head sizes."""
        mine: Any = self
        try:
            check_head_pair(mine.qk_head_dim, mine.v_head_dim)
        except ValueError:
            return False
        return True


class SparseBuilder(LatentBuilder):
    """A builder made from vLLM's objects. It takes vLLM's batches, which have the same fields."""

    depends_on_chunks: ClassVar[bool] = False
    """With batch invariance every token attends its own list, however its prompt is cut."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        """Take the arguments of :class:`LatentBuilder`.

        Raises:
            ValueError: whatever that class refuses.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        for layer in translate.layers_of(vllm_config, layer_names):
            compat.merge_by_lse_alone(layer)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Most tokens of a request in a captured batch whose requests differ in tokens.

        Rows find their requests on the device, so requests of a captured batch may have any number
        of tokens up to that of a verify. Only vLLM 0.33 calls this.
        """
        level = cls.get_cudagraph_support(vllm_config, kv_cache_spec)
        if level.value < AttentionCGSupport.UNIFORM_BATCH.value:
            return None
        return compat.verified_tokens(vllm_config)
