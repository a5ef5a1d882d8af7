"""KV cache layouts: logical shape, stride order, strides and bytes, and views of K and V.

Logical shapes are fixed (``N`` blocks, ``P`` tokens per block, ``Hk`` KV heads):

- packed  ``[N, Hk, P, K width + V width]`` (vLLM 0.26 and later; a dense spec's default),
- split   ``[N, 2, P, Hk, width]`` (earlier vLLM; preferred by backends),
- latent  ``[N, P, row]``.

NHD and HND differ in strides alone. A width counts elements of the cache tensor and includes inline
scales.
"""

from __future__ import annotations

from enum import StrEnum, unique
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from pydantic import model_validator

from specs.base import NonNegativeInt, PositiveInt, Spec, cdiv
from specs.dtypes import CacheDType, CacheDTypeField, DType, DTypeField
from specs.rows import INDEXER_PAGE, LatentFormat, RowFormat, dense_row_format

if TYPE_CHECKING:
    import torch


@unique
class KVPacking(StrEnum):
    """Whether K and V of a token share a row (packed) or lie in two planes of a block (split)."""

    PACKED = "packed"
    SPLIT = "split"


@unique
class KVOrder(StrEnum):
    """Order inside a block: tokens (N), heads (H), elements (D)."""

    NHD = "NHD"
    HND = "HND"


class KVViews(NamedTuple):
    """K and V of a cache tensor, as strided views: nothing is copied."""

    key: torch.Tensor
    """``[N, P, Hk, head_size]`` in the stored type (int4: ``uint8``, half the width)."""
    value: torch.Tensor
    """``[N, P, Hk, head_size_v]`` in the stored type (int4: ``uint8``, half the width)."""
    key_scale: torch.Tensor | None = None
    """``[N, P, Hk]`` fp32, inline scale of each (token, head) key; None without inline scales."""
    value_scale: torch.Tensor | None = None
    """``[N, P, Hk]`` fp32, inline scale of each (token, head) value; None without inline scales."""


def _strides(shape: tuple[int, ...], stride_order: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides, in logical order, of a tensor dense in ``stride_order``."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(stride_order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


class _Layout(Spec):
    """Base of the layouts: shape, order, strides and bytes for a number of blocks."""

    block_size: PositiveInt
    page_size_padded: PositiveInt | None = None
    """Bytes from one block to the next when larger than the content; None when dense."""

    @property
    def row(self) -> RowFormat:
        """Bytes of one row."""
        raise NotImplementedError

    @property
    def storage_dtype(self) -> DType:
        """Element type of the cache tensor."""
        raise NotImplementedError

    @property
    def content_bytes(self) -> int:
        """Bytes of one block of one layer without padding."""
        raise NotImplementedError

    def logical_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the cache tensor."""
        raise NotImplementedError

    def stride_order(self, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Logical axes, outermost in memory first.

        With ``include_num_layers_dimension`` the layers are logical axis 0, and every block holds
        all layers side by side.
        """
        order = self._stride_order()
        if not include_num_layers_dimension:
            return order
        return (order[0] + 1, 0, *(axis + 1 for axis in order[1:]))

    def _stride_order(self) -> tuple[int, ...]:
        raise NotImplementedError

    @model_validator(mode="after")
    def _padding_holds_the_content(self) -> Self:
        """``page_size_padded`` is at least the content, and keeps every field aligned."""
        padded = self.page_size_padded
        if padded is not None:
            if padded < self.content_bytes:
                raise ValueError(
                    f"page_size_padded must be at least the content's {self.content_bytes} bytes, "
                    f"got {padded}"
                )
            self._check_alignment("page_size_padded", padded)
        return self

    def _check_alignment(self, name: str, nbytes: int) -> None:
        step = max(field.dtype.itemsize for field in self.row.fields)
        if nbytes % step:
            raise ValueError(
                f"{name} must be a multiple of {step} bytes, the largest element of a row "
                f"({self.row.name}), got {nbytes}"
            )

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding and inline scales included."""
        return self.page_size_padded or self.content_bytes

    def strides(self, num_blocks: int) -> tuple[int, ...]:
        """Element strides in logical order."""
        shape = self.logical_shape(num_blocks)
        strides = _strides(shape, self.stride_order())
        return (self.page_size_bytes // self.storage_dtype.itemsize, *strides[1:])

    def nbytes(self, num_blocks: int) -> int:
        """Bytes of the cache of one layer."""
        return num_blocks * self.page_size_bytes

    def view(self, buffer: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """The cache tensor (logical shape) over a flat byte buffer.

        Args:
            buffer: at least ``nbytes(num_blocks)`` bytes, contiguous, one byte per element.
            num_blocks: blocks to expose.

        Raises:
            ValueError: the buffer is too small or not contiguous.
        """
        import torch

        if not buffer.is_contiguous():
            raise ValueError(f"buffer must be contiguous, got strides {buffer.stride()}")
        nbytes = self.nbytes(num_blocks)
        if buffer.numel() * buffer.element_size() < nbytes:
            raise ValueError(
                f"buffer has {buffer.numel() * buffer.element_size()} bytes; "
                f"{num_blocks} blocks of {self.page_size_bytes} need {nbytes}"
            )
        flat = buffer.view(torch.uint8).flatten()[:nbytes].view(self.storage_dtype.torch)
        return flat.as_strided(self.logical_shape(num_blocks), self.strides(num_blocks))

    def allocate(
        self, num_blocks: int, device: torch.device | str = "cpu", fill_byte: int = 0
    ) -> torch.Tensor:
        """A cache tensor for ``num_blocks`` blocks.

        Args:
            num_blocks: blocks of the cache.
            device: device of the tensor.
            fill_byte: value of every byte; 0xFF makes every float format NaN, for tests.
        """
        import torch

        nbytes = self.nbytes(num_blocks)
        return self.view(
            torch.full((nbytes,), fill_byte, dtype=torch.uint8, device=device), num_blocks
        )


class DenseKVLayout(_Layout):
    """Layout of a multi-head (MHA, GQA, MQA) KV cache."""

    kind: Literal["dense"] = "dense"
    num_kv_heads: PositiveInt
    head_size: PositiveInt
    head_size_v: PositiveInt | None = None
    """Value head size; None means ``head_size``."""
    model_dtype: DTypeField = DType.BFLOAT16
    cache_dtype: CacheDTypeField = CacheDType.AUTO
    packing: KVPacking = KVPacking.SPLIT
    order: KVOrder = KVOrder.NHD

    @model_validator(mode="after")
    def _split_planes_are_equal(self) -> Self:
        """K and V of the split packing have equal sizes, as they are planes of one tensor."""
        if self.packing is KVPacking.SPLIT and self.v_size != self.head_size:
            raise ValueError(
                f"a split layout needs head_size_v equal to head_size ({self.head_size}), "
                f"got {self.v_size}; use the packed layout"
            )
        return self

    @property
    def v_size(self) -> int:
        """Value head size."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def row(self) -> RowFormat:
        """Bytes of one token of one KV head."""
        return dense_row_format(self.head_size, self.v_size, self.cache_dtype, self.model_dtype)

    @property
    def storage_dtype(self) -> DType:
        """Element type of the cache tensor."""
        return self.cache_dtype.storage(self.model_dtype)

    @property
    def content_bytes(self) -> int:
        """Bytes of one block of one layer without padding."""
        return self.block_size * self.num_kv_heads * self.row.nbytes

    def logical_shape(self, num_blocks: int) -> tuple[int, ...]:
        """``[N, Hk, P, width]`` packed, ``[N, 2, P, Hk, width]`` split."""
        width = self.row.nbytes // self.storage_dtype.itemsize
        if self.packing is KVPacking.PACKED:
            return (num_blocks, self.num_kv_heads, self.block_size, width)
        return (num_blocks, 2, self.block_size, self.num_kv_heads, width // 2)

    def _stride_order(self) -> tuple[int, ...]:
        if self.packing is KVPacking.PACKED:
            return (0, 2, 1, 3) if self.order is KVOrder.NHD else (0, 1, 2, 3)
        return (0, 1, 2, 3, 4) if self.order is KVOrder.NHD else (0, 1, 3, 2, 4)

    def split(self, kv_cache: torch.Tensor) -> KVViews:
        """Views of K and V in a cache tensor of this layout's logical shape (any strides)."""
        return split_kv_cache(kv_cache, self.row)


def split_kv_cache(kv_cache: torch.Tensor, row: RowFormat) -> KVViews:
    """Views of K and V in a packed or split cache tensor, told apart by their logical shapes.

    Args:
        kv_cache: ``[N, Hk, P, width]`` (packed) or ``[N, 2, P, Hk, width]`` (split), any strides
            with contiguous rows, in the storage type or already in the stored element's type.
        row: format of the rows, from :func:`specs.rows.dense_row_format`.

    Raises:
        ValueError: another element type, with bits that would mean other numbers; a shape that is
            neither packed nor split; a width that does not fit the row.
    """
    _check_stored(kv_cache, row["k"].dtype, row.name)
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2:
        planes = [kv_cache[:, 0], kv_cache[:, 1]]
    elif kv_cache.dim() == 4:
        # [N, Hk, P, width] -> [N, P, Hk, width]
        rows = kv_cache.transpose(1, 2)
        v_start = row["v"].offset // kv_cache.element_size()
        planes = [rows[..., :v_start], rows[..., v_start:]]
    else:
        raise ValueError(
            "kv_cache must be [num_blocks, num_kv_heads, block_size, width] or "
            f"[num_blocks, 2, block_size, num_kv_heads, width], got {tuple(kv_cache.shape)}"
        )
    views: dict[str, torch.Tensor] = {}
    for side, plane in zip(("k", "v"), planes, strict=True):
        data, size = row[side], kv_cache.element_size()
        scale = row.get(f"{side}_scale")
        nbytes = data.nbytes + (scale.nbytes if scale else 0)
        if plane.shape[-1] * size != nbytes:
            raise ValueError(
                f"kv_cache rows must hold {nbytes} bytes of {side} ({row.name}), "
                f"got {plane.shape[-1] * size} in shape {tuple(kv_cache.shape)}"
            )
        stored = plane[..., : data.nbytes // size]
        views[side] = stored if stored.dtype == data.dtype.torch else stored.view(data.dtype.torch)
        if scale:
            views[f"{side}_scale"] = plane[..., data.nbytes // size :].view(DType.FLOAT32.torch)[
                ..., 0
            ]
    return KVViews(views["k"], views["v"], views.get("k_scale"), views.get("v_scale"))


def _check_stored(kv_cache: torch.Tensor, element: DType, name: str) -> None:
    """Refuse elements that are neither of the stored type nor bytes to be viewed as that type."""
    dtype = kv_cache.dtype
    is_bytes = dtype.itemsize == 1 and not dtype.is_floating_point
    if dtype != element.torch and not is_bytes:
        raise ValueError(
            f"kv_cache must hold {element.torch} or bytes for {name} rows, got {dtype}"
        )


class LatentKVLayout(_Layout):
    """Layout of a latent (MLA) cache or of its indexer: one row per token, shared by all heads."""

    kind: Literal["latent"] = "latent"
    format: LatentFormat
    kv_lora_rank: PositiveInt = 512
    """Latent width; the index head size for ``INDEXER_FP8``."""
    qk_rope_head_dim: NonNegativeInt = 64
    model_dtype: DTypeField = DType.BFLOAT16
    page_alignment: PositiveInt | None = None
    """Pages are padded to a multiple of this many bytes; None when dense."""

    @model_validator(mode="after")
    def _indexer_pages_are_planar(self) -> Self:
        """Planar indexer pages hold 64 tokens: readers address data and scales by that number."""
        if self.format is LatentFormat.INDEXER_FP8 and self.block_size != INDEXER_PAGE:
            raise ValueError(
                f"block_size must be {INDEXER_PAGE} for {self.format.value}, got {self.block_size}"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_pad(self) -> Self:
        """Padding is given by one field at most, and keeps every field of the rows aligned."""
        if self.page_alignment is not None and self.page_size_padded is not None:
            raise ValueError("give page_alignment or page_size_padded, not both")
        if self.page_alignment is not None:
            self._check_alignment("page_alignment", self.page_alignment)
        return self

    @property
    def row(self) -> RowFormat:
        """Bytes of one token."""
        return self.format.row(self.kv_lora_rank, self.qk_rope_head_dim, self.model_dtype)

    @property
    def storage_dtype(self) -> DType:
        """Element type of the cache tensor: the model's, or bytes."""
        return self.model_dtype if self.format is LatentFormat.BF16 else DType.UINT8

    @property
    def content_bytes(self) -> int:
        """Bytes of one block of one layer without padding."""
        return self.block_size * self.row.nbytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding included."""
        if self.page_alignment is not None:
            return cdiv(self.content_bytes, self.page_alignment) * self.page_alignment
        return super().page_size_bytes

    def logical_shape(self, num_blocks: int) -> tuple[int, ...]:
        """``[N, P, row]`` in elements of the storage type."""
        return (num_blocks, self.block_size, self.row.nbytes // self.storage_dtype.itemsize)

    def _stride_order(self) -> tuple[int, ...]:
        return (0, 1, 2)

    def fields(self, kv_cache: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of every field of the rows; nothing is copied."""
        return latent_views(kv_cache, self.row)


def latent_views(kv_cache: torch.Tensor, row: RowFormat) -> dict[str, torch.Tensor]:
    """Views of a latent cache's fields, by name: ``[N, P, count]`` each, in the field's type.

    Args:
        kv_cache: ``[N, P, row width]``, in bytes or in the type of the row's first field; planar
            formats need blocks that are dense inside.
        row: format of the rows, from :meth:`specs.rows.LatentFormat.row`.

    Raises:
        ValueError: a tensor of neither bytes nor the first field's type, with bits that would mean
            other numbers; a shape whose rows do not have ``row.nbytes`` bytes.
    """
    _check_stored(kv_cache, row.fields[0].dtype, row.name)
    size = kv_cache.element_size()
    if kv_cache.dim() != 3 or kv_cache.shape[-1] * size != row.nbytes:
        raise ValueError(
            f"kv_cache must be [num_blocks, block_size, {row.nbytes // size}] for rows of "
            f"{row.nbytes} bytes ({row.name}), got {tuple(kv_cache.shape)} of {kv_cache.dtype}"
        )
    views: dict[str, torch.Tensor] = {}
    if not row.planar:
        for field in row.fields:
            part = kv_cache[..., field.offset // size : field.end // size]
            dtype = field.dtype.torch
            views[field.name] = part if part.dtype == dtype else part.view(dtype)
        return views
    num_blocks, block_size, width = kv_cache.shape
    if kv_cache.stride(1) != width or kv_cache.stride(2) != 1:
        raise ValueError(
            f"planar rows ({row.name}) need blocks dense inside, got strides {kv_cache.stride()}"
        )
    pages = kv_cache.as_strided(
        (num_blocks, block_size * width), (kv_cache.stride(0), 1), kv_cache.storage_offset()
    )
    for field in row.fields:
        start, stop = (edge * block_size // size for edge in (field.offset, field.end))
        part = pages[:, start:stop].view(field.dtype.torch)
        views[field.name] = part.view(num_blocks, block_size, field.count)
    return views


KVLayout = DenseKVLayout | LatentKVLayout
