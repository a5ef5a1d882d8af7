"""KV cache specs: what one layer stores, how many blocks a request needs, how many bytes.

Each layer kind has a spec of its own; JSON tells them apart by ``kind``. A spec with a meaning of
its own is never the base class of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from specs.base import NonNegativeInt, PositiveInt, Spec, SpecError, cdiv, spec_errors
from specs.dtypes import CacheDType, CacheDTypeField, DType, DTypeField, KVQuantMode
from specs.layouts import DenseKVLayout, KVOrder, KVPacking, LatentKVLayout
from specs.rows import (
    INDEXER_PAGE,
    LatentFormat,
    cache_dtype_of,
    dense_row_format,
    latent_format_of,
)


class _KVCacheSpec(Spec):
    """Fields and methods that the specs of all layer kinds have."""

    is_mla: ClassVar[bool] = False
    block_size: PositiveInt
    """Tokens per block."""
    dtype: DTypeField = DType.BFLOAT16
    """Model dtype: the type of K and V before the write, and what ``auto`` stores."""
    cache_dtype: CacheDTypeField = CacheDType.AUTO
    page_size_padded: PositiveInt | None = None
    """Bytes from one block to the next when larger than the content (hybrid models)."""

    @field_validator("dtype")
    @classmethod
    def _dtype_is_a_model_dtype(cls, dtype: DType) -> DType:
        """A model computes in floats of 16 bits or more."""
        if not dtype.is_floating or dtype.itemsize < 2:
            raise ValueError("a model computes in float16, bfloat16, float32 or float64")
        return dtype

    @model_validator(mode="after")
    def _layout_exists(self) -> Self:
        """Block size and padding suit the rows; unknown row formats are not checked."""
        with spec_errors("layout"), suppress(NotImplementedError):
            self.layout()
        return self

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of this layer, padding and inline scales included."""
        return self.layout().page_size_bytes

    @property
    def kv_quant_mode(self) -> KVQuantMode:
        """The quantisation of the cache."""
        return self.cache_dtype.quant_mode

    @property
    def storage_dtype(self) -> DType:
        """Element type of the cache tensor."""
        return self.layout().storage_dtype

    def layout(
        self, packing: KVPacking = KVPacking.SPLIT, order: KVOrder = KVOrder.NHD
    ) -> DenseKVLayout | LatentKVLayout:
        """The layout of this layer's cache; latent layers have one packing and order."""
        raise NotImplementedError

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Blocks that a request of ``num_tokens`` cached tokens holds at most at one time.

        Args:
            num_tokens: KV length of the request.
            num_inflight_tokens: tokens of one step, kept beyond a window until the step ends.
        """
        raise NotImplementedError

    def num_bytes_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Bytes of one layer's blocks that :meth:`num_blocks_for` counts."""
        return self.num_blocks_for(num_tokens, num_inflight_tokens) * self.page_size_bytes

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The spec with another block size.

        Raises:
            SpecError: a padded page cannot be cut into smaller blocks.
        """
        if self.page_size_padded is not None and block_size != self.block_size:
            raise SpecError(
                f"a page padded to {self.page_size_padded} bytes cannot be cut from block_size "
                f"{self.block_size} into blocks of {block_size}"
            )
        return self.replace(block_size=block_size)

    def _effective(self, name: str) -> object:
        """A field's value, with None replaced by the value that it stands for."""
        meant = {"head_size_v": "v_size", "format": "latent_format"}.get(name, name)
        return getattr(self, meant)

    @classmethod
    def merge(cls, specs: Sequence[Self]) -> Self:
        """One spec for a group of layers that share block tables: they must be equal.

        Raises:
            SpecError: an empty group, or specs that differ; the message names field and values.
        """
        if not specs:
            raise SpecError("cannot merge an empty group of KV cache specs")
        first = specs[0]
        for other in specs[1:]:
            if type(other) is not type(first):
                raise SpecError(
                    f"cannot merge KV cache specs of different kinds: {type(first).__name__} "
                    f"and {type(other).__name__}"
                )
            for name in type(first).model_fields:
                if first._effective(name) != other._effective(name):
                    ours, theirs = getattr(first, name), getattr(other, name)
                    raise SpecError(
                        f"cannot merge {type(first).__name__}: {name} differs ({ours} and {theirs})"
                    )
        return first


class _DenseSpec(_KVCacheSpec):
    """A layer with K and V per KV head."""

    num_kv_heads: PositiveInt
    head_size: PositiveInt
    head_size_v: PositiveInt | None = None
    """Value head size; None means ``head_size``."""

    @model_validator(mode="after")
    def _rows_exist(self) -> Self:
        """The row format allows these head sizes; unknown row formats are not checked."""
        if self.cache_dtype is CacheDType.FP8_DS_MLA:
            raise ValueError("cache_dtype 'fp8_ds_mla' is for latent (MLA) layers")
        if self.cache_dtype.has_row_format:
            dense_row_format(self.head_size, self.v_size, self.cache_dtype, self.dtype)
        return self

    @property
    def v_size(self) -> int:
        """Value head size."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    def layout(
        self, packing: KVPacking = KVPacking.PACKED, order: KVOrder = KVOrder.NHD
    ) -> DenseKVLayout:
        """The layout of this layer's cache."""
        return DenseKVLayout(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            model_dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            packing=packing,
            order=order,
            page_size_padded=self.page_size_padded,
        )


class FullAttentionSpec(_DenseSpec):
    """Every token attends itself and all tokens before it; every token is kept."""

    kind: Literal["full_attention"] = "full_attention"
    dcp_sharded: bool = True
    """Tokens are striped over decode-context-parallel ranks."""

    def num_blocks_for(
        self, num_tokens: int, num_inflight_tokens: int = 0, dcp_size: int = 1
    ) -> int:
        """Blocks for ``num_tokens``, divided over ``dcp_size`` ranks."""
        return _striped_blocks(num_tokens, self.block_size, dcp_size if self.dcp_sharded else 1)


class SlidingWindowSpec(_DenseSpec):
    """Each token sees the last ``sliding_window`` tokens, itself included."""

    kind: Literal["sliding_window"] = "sliding_window"
    sliding_window: PositiveInt

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Blocks of the window plus the step's tokens; one more as the window starts mid-block."""
        return _window_blocks(self.sliding_window, self.block_size, num_tokens, num_inflight_tokens)


class ChunkedLocalAttentionSpec(_DenseSpec):
    """Each token sees its own aligned chunk, and ``chunk_lookback`` chunks before it."""

    kind: Literal["chunked_local_attention"] = "chunked_local_attention"
    attention_chunk_size: PositiveInt
    chunk_lookback: NonNegativeInt = 0

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Blocks of the visible chunks and the step; one more if chunks start mid-block."""
        visible = self.attention_chunk_size * (1 + self.chunk_lookback)
        blocks = _span_blocks(visible, self.block_size, num_tokens, num_inflight_tokens)
        if self.attention_chunk_size % self.block_size:
            blocks = min(blocks + 1, cdiv(num_tokens, self.block_size))
        return blocks


class SinkFullAttentionSpec(_DenseSpec):
    """Full attention over ``sink_len`` static tokens shared by all requests, then the request's."""

    kind: Literal["sink_full_attention"] = "sink_full_attention"
    sink_len: PositiveInt

    @model_validator(mode="after")
    def _sinks_fill_blocks(self) -> Self:
        """Sink tokens occupy whole blocks."""
        if self.sink_len % self.block_size:
            raise ValueError(
                f"sink_len must be a multiple of block_size ({self.block_size}), "
                f"got {self.sink_len}"
            )
        return self

    @property
    def reserved_blocks(self) -> int:
        """Blocks of the shared sinks, held once for all requests."""
        return self.sink_len // self.block_size

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Blocks for ``num_tokens``, the shared sinks not counted."""
        return cdiv(num_tokens, self.block_size)


class CrossAttentionSpec(_DenseSpec):
    """Decoder tokens attend the encoder's states: ``num_tokens`` is the encoder's length."""

    kind: Literal["cross_attention"] = "cross_attention"

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Blocks for an encoder input of ``num_tokens``."""
        return cdiv(num_tokens, self.block_size)


class EncoderOnlyAttentionSpec(_DenseSpec):
    """Bidirectional attention within a request: nothing is cached."""

    kind: Literal["encoder_only_attention"] = "encoder_only_attention"
    sliding_window: PositiveInt | None = None
    """Keys visible to each side, the token's own included; None means all."""

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Always 0, since nothing is cached."""
        return 0


class _LatentSpec(_KVCacheSpec):
    """A layer with one latent row per token."""

    is_mla: ClassVar[bool] = True
    kv_lora_rank: PositiveInt = 512
    qk_rope_head_dim: NonNegativeInt = 64
    format: LatentFormat | None = None
    """Row format; None means the one that ``cache_dtype`` names."""
    page_alignment: PositiveInt | None = None
    """Pages are padded to a multiple of this many bytes."""

    @model_validator(mode="after")
    def _format_fits_the_cache_dtype(self) -> Self:
        """An explicit format stores what ``cache_dtype`` says."""
        if self.format is None:
            return self
        if not self.cache_dtype.has_row_format:
            return self
        expected = latent_format_of(self.cache_dtype)
        if self.format is not expected:
            raise ValueError(
                f"format must be {expected.value!r} for cache_dtype {self.cache_dtype.value!r}, "
                f"got {self.format.value!r}"
            )
        return self

    @property
    def num_kv_heads(self) -> int:
        """Always 1: all heads share the latent row."""
        return 1

    @property
    def head_size(self) -> int:
        """Width of an absorbed query and of the latent key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def copy_with_new_block_size(self, block_size: int) -> Self:
        """The spec with another block size.

        Raises:
            SpecError: padding of the page, or of its parts, would end up between the blocks.
        """
        copied = super().copy_with_new_block_size(block_size)
        if self.page_alignment is not None and (
            copied.page_size_bytes * self.block_size != self.page_size_bytes * block_size
        ):
            raise SpecError(
                f"pages aligned to {self.page_alignment} bytes cannot be cut from block_size "
                f"{self.block_size} ({self.page_size_bytes} bytes) into blocks of {block_size} "
                f"({copied.page_size_bytes} bytes)"
            )
        return copied

    @property
    def latent_format(self) -> LatentFormat:
        """The row format in force."""
        return self.format or latent_format_of(self.cache_dtype)

    def layout(
        self, packing: KVPacking = KVPacking.SPLIT, order: KVOrder = KVOrder.NHD
    ) -> LatentKVLayout:
        """The layout of this layer's cache."""
        return LatentKVLayout(
            block_size=self.block_size,
            format=self.latent_format,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            model_dtype=self.cache_dtype.element(self.dtype)
            if not self.cache_dtype.is_quantized
            else self.dtype,
            page_size_padded=self.page_size_padded,
            page_alignment=self.page_alignment,
        )


class MLAAttentionSpec(_LatentSpec):
    """Multi-head latent attention over all cached tokens."""

    kind: Literal["mla_attention"] = "mla_attention"
    topk: PositiveInt | None = None
    """Tokens that a sparse layer attends; None means all."""
    dcp_sharded: bool = True

    def num_blocks_for(
        self, num_tokens: int, num_inflight_tokens: int = 0, dcp_size: int = 1
    ) -> int:
        """Blocks for ``num_tokens``, divided over ``dcp_size`` ranks."""
        return _striped_blocks(num_tokens, self.block_size, dcp_size if self.dcp_sharded else 1)


class SlidingWindowMLASpec(_LatentSpec):
    """Multi-head latent attention over the last ``sliding_window`` tokens."""

    kind: Literal["sliding_window_mla"] = "sliding_window_mla"
    sliding_window: PositiveInt

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Blocks of the window plus the step's tokens; one more as the window starts mid-block."""
        return _window_blocks(self.sliding_window, self.block_size, num_tokens, num_inflight_tokens)


class IndexerSpec(_KVCacheSpec):
    """Small keys of a sparse layer's indexer: read to score tokens, never attended."""

    kind: Literal["indexer"] = "indexer"
    is_mla: ClassVar[bool] = True
    block_size: PositiveInt = INDEXER_PAGE
    index_head_dim: PositiveInt = 128

    def layout(
        self, packing: KVPacking = KVPacking.SPLIT, order: KVOrder = KVOrder.NHD
    ) -> LatentKVLayout:
        """The planar layout of the indexer's cache."""
        return LatentKVLayout(
            block_size=self.block_size,
            format=LatentFormat.INDEXER_FP8,
            kv_lora_rank=self.index_head_dim,
            qk_rope_head_dim=0,
            model_dtype=self.dtype,
            page_size_padded=self.page_size_padded,
        )

    def num_blocks_for(self, num_tokens: int, num_inflight_tokens: int = 0) -> int:
        """Blocks for ``num_tokens`` indexer keys."""
        return cdiv(num_tokens, self.block_size)


def latent_spec(
    latent: LatentFormat,
    block_size: int = INDEXER_PAGE,
    dtype: DType = DType.BFLOAT16,
    topk: int | None = None,
) -> MLAAttentionSpec | IndexerSpec:
    """The spec of a layer, or of an indexer, with rows of one format in DeepSeek's widths.

    Args:
        latent: format of the rows.
        block_size: tokens per block; must be 64 for ``INDEXER_FP8``.
        dtype: model dtype.
        topk: tokens that a sparse layer attends; ignored for an indexer's rows.
    """
    if latent is LatentFormat.INDEXER_FP8:
        return IndexerSpec(block_size=block_size, dtype=dtype)
    return MLAAttentionSpec(
        block_size=block_size,
        dtype=dtype,
        cache_dtype=cache_dtype_of(latent),
        format=latent,
        topk=topk,
    )


def _span_blocks(span: int, block_size: int, num_tokens: int, num_inflight_tokens: int) -> int:
    return cdiv(min(span + num_inflight_tokens, num_tokens), block_size)


def _striped_blocks(num_tokens: int, block_size: int, num_ranks: int) -> int:
    if num_ranks < 1:
        raise SpecError(f"dcp_size must be positive, got {num_ranks}")
    return cdiv(cdiv(num_tokens, num_ranks), block_size)


def _window_blocks(window: int, block_size: int, num_tokens: int, num_inflight_tokens: int) -> int:
    if num_tokens == 0:
        return 0
    span = _span_blocks(window - 1, block_size, num_tokens, num_inflight_tokens)
    return min(span + 1, cdiv(num_tokens, block_size))


AnyKVCacheSpec = (
    FullAttentionSpec
    | SlidingWindowSpec
    | ChunkedLocalAttentionSpec
    | SinkFullAttentionSpec
    | CrossAttentionSpec
    | EncoderOnlyAttentionSpec
    | MLAAttentionSpec
    | SlidingWindowMLASpec
    | IndexerSpec
)
"""Any layer's KV cache spec, for annotations and ``isinstance``."""

KVCacheSpec = Annotated[AnyKVCacheSpec, Field(discriminator="kind")]
""":data:`AnyKVCacheSpec` as a pydantic field: in JSON ``kind`` names the class."""
