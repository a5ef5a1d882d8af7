"""Packed row formats as data: which bytes of a KV cache row hold which field."""

from __future__ import annotations

from enum import StrEnum, unique
from typing import Final, Self

from pydantic import model_validator

from specs.base import NonNegativeInt, PositiveInt, Spec
from specs.dtypes import CacheDType, DType

SCALE_BYTES: Final = DType.FLOAT32.itemsize
LATENT_BLOCK: Final = 128
"""Latent elements that share one scale in block-scaled rows."""
INDEXER_PAGE: Final = 64
"""Tokens in a page of the planar indexer cache."""
INDEXER_LEAST: Final = 1e-4
"""The scale of an indexer key whose elements are all smaller is that of a key whose largest element
is this, as in vLLM, so that a page has the same bytes in either."""


class RowField(Spec):
    """A run of equal elements inside a row."""

    name: str
    dtype: DType
    offset: NonNegativeInt
    """Bytes from the start of the row."""
    count: PositiveInt
    """Number of elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of the field."""
        return self.count * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte after the field."""
        return self.offset + self.nbytes


class RowFormat(Spec):
    """The bytes of one cache row (one token, or one token of one KV head).

    With ``planar`` a page holds the first field of every token, then the second field of every
    token, and so on; offsets are then those of a page with one token.
    """

    name: str
    fields: tuple[RowField, ...]
    planar: bool = False

    @model_validator(mode="after")
    def _fields_tile_the_row(self) -> Self:
        """Fields follow one another without gap or overlap, each aligned to its element."""
        if not self.fields:
            raise ValueError(f"row format {self.name!r} has no fields")
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"row format {self.name!r} repeats a field name: {names}")
        end = 0
        for field in self.fields:
            if field.offset != end:
                raise ValueError(
                    f"row format {self.name!r}: field {field.name!r} starts at byte "
                    f"{field.offset}, expected {end} (no gap, no overlap)"
                )
            if field.offset % field.dtype.itemsize:
                raise ValueError(
                    f"row format {self.name!r}: field {field.name!r} of {field.dtype.value} "
                    f"at byte {field.offset} is not aligned to {field.dtype.itemsize} bytes"
                )
            end = field.end
        step = max(field.dtype.itemsize for field in self.fields)
        if not self.planar and end % step:
            raise ValueError(
                f"row format {self.name!r}: the {end} bytes of a row are no multiple of {step}, "
                f"so the next row is not aligned"
            )
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.fields[-1].end

    def __getitem__(self, name: str) -> RowField:
        """The field of that name.

        Raises:
            KeyError: no such field.
        """
        field = self.get(name)
        if field is None:
            raise KeyError(f"row format {self.name!r} has no field {name!r}")
        return field

    def get(self, name: str) -> RowField | None:
        """The field of that name, or None."""
        return next((field for field in self.fields if field.name == name), None)

    def __contains__(self, name: str) -> bool:
        """True when a field of that name exists."""
        return self.get(name) is not None


def row_format(name: str, *fields: tuple[str, DType, int], planar: bool = False) -> RowFormat:
    """A row format from ``(field name, dtype, count)`` in order; offsets follow from the counts."""
    placed: list[RowField] = []
    for field_name, dtype, count in fields:
        offset = placed[-1].end if placed else 0
        placed.append(RowField(name=field_name, dtype=dtype, offset=offset, count=count))
    return RowFormat(name=name, fields=tuple(placed), planar=planar)


@unique
class LatentFormat(StrEnum):
    """Row formats of a latent (MLA) cache and of its indexer; never inferred from a width."""

    BF16 = "bf16"
    """Latent and rope unquantised in the model dtype (bf16 in the usual case: 1152 bytes)."""
    FP8_NOPE_FP8_ROPE = "fp8_nope_fp8_rope"
    """All e4m3 with one scale per tensor (TRT-LLM): 576 bytes."""
    FP8_NOPE_BLOCK_SCALE_BF16_ROPE = "fp8_nope_block_scale_bf16_rope"
    """e4m3 latent, an fp32 scale per 128 of it, bf16 rope (FlashMLA): 656 bytes."""
    INDEXER_FP8 = "indexer_fp8"
    """Indexer keys: e4m3 with one fp32 scale, planar inside a 64-token page: 132 bytes."""

    @classmethod
    def _missing_(cls, value: object) -> LatentFormat | None:
        """Accept the names that other engines use, in upper or lower case."""
        if not isinstance(value, str):
            return None
        name = value.lower()
        name = _LATENT_ALIASES.get(name, name)
        return next((member for member in cls if member.value == name), None)

    def row(
        self,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        model_dtype: DType = DType.BFLOAT16,
    ) -> RowFormat:
        """The row's fields, for a latent of ``kv_lora_rank`` and ``qk_rope_head_dim`` elements.

        For ``INDEXER_FP8``, ``kv_lora_rank`` is the index head size (usually 128) and
        ``qk_rope_head_dim`` is ignored.

        Raises:
            ValueError: a block-scaled latent that is no multiple of 128.
        """
        e4m3, fp32 = DType.FLOAT8_E4M3FN, DType.FLOAT32
        if self is LatentFormat.BF16:
            plain = [("nope", model_dtype, kv_lora_rank)]
            if qk_rope_head_dim:
                plain.append(("rope", model_dtype, qk_rope_head_dim))
            return row_format(self.value, *plain)
        if self is LatentFormat.FP8_NOPE_FP8_ROPE:
            raw = [("nope", e4m3, kv_lora_rank)]
            if qk_rope_head_dim:
                raw.append(("rope", e4m3, qk_rope_head_dim))
            return row_format(self.value, *raw)
        if self is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE:
            if kv_lora_rank % LATENT_BLOCK:
                raise ValueError(
                    f"kv_lora_rank must be a multiple of {LATENT_BLOCK} for {self.value}, "
                    f"got {kv_lora_rank}"
                )
            scaled = [
                ("nope", e4m3, kv_lora_rank),
                ("scale", fp32, kv_lora_rank // LATENT_BLOCK),
            ]
            if qk_rope_head_dim:
                scaled.append(("rope", DType.BFLOAT16, qk_rope_head_dim))
            return row_format(self.value, *scaled)
        return row_format(self.value, ("data", e4m3, kv_lora_rank), ("scale", fp32, 1), planar=True)


_LATENT_ALIASES: Final = {
    "bfloat16": LatentFormat.BF16.value,
    # FlashMLA's rows have one name in SGLang and another in vLLM.
    "fp8_nope_with_block_scale_bf16_rope": LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE.value,
    "fp8_ds_mla": LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE.value,
}

_CACHE_DTYPES: Final = {
    LatentFormat.BF16: CacheDType.AUTO,
    LatentFormat.FP8_NOPE_FP8_ROPE: CacheDType.FP8_E4M3,
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: CacheDType.FP8_DS_MLA,
}


def cache_dtype_of(latent: LatentFormat) -> CacheDType:
    """The ``kv_cache_dtype`` for a row format: the inverse of :func:`latent_format_of`.

    Raises:
        ValueError: the indexer's rows, which attention does not read.
    """
    if latent not in _CACHE_DTYPES:
        raise ValueError(
            f"format must be one of attended rows ({', '.join(_CACHE_DTYPES)}), "
            f"got {latent.value!r}: the indexer's have a spec of their own"
        )
    return _CACHE_DTYPES[latent]


def latent_format_of(cache_dtype: CacheDType) -> LatentFormat:
    """The latent row format that a ``kv_cache_dtype`` string means for an MLA layer.

    Raises:
        NotImplementedError: a string that means no latent format of this library.
    """
    if not cache_dtype.is_quantized:
        return LatentFormat.BF16
    if cache_dtype in (CacheDType.FP8, CacheDType.FP8_E4M3):
        return LatentFormat.FP8_NOPE_FP8_ROPE
    if cache_dtype is CacheDType.FP8_DS_MLA:
        return LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    raise NotImplementedError(f"kv_cache_dtype {cache_dtype.value!r} has no latent row format")


def latent_element(cache_dtype: CacheDType, model_dtype: DType) -> DType:
    """Type that the latent of a row, its first field, is stored in.

    Raises:
        NotImplementedError: a string that means no latent format of this library.
    """
    if latent_format_of(cache_dtype) is LatentFormat.BF16:
        return cache_dtype.element(model_dtype)
    return DType.FLOAT8_E4M3FN


def dense_row_format(
    head_size: int, head_size_v: int, cache_dtype: CacheDType, model_dtype: DType
) -> RowFormat:
    """Row of one token and KV head: K, then V, each followed by its fp32 scale if stored inline.

    Raises:
        ValueError: a head size that the packing or the scale's alignment does not allow.
        NotImplementedError: a ``kv_cache_dtype`` whose rows this library does not know.
    """
    element, packing = cache_dtype.element(model_dtype), cache_dtype.packing
    if cache_dtype is CacheDType.FP8_DS_MLA:
        raise NotImplementedError("kv_cache_dtype 'fp8_ds_mla' is a latent (MLA) row format")
    if not cache_dtype.quant_mode.is_per_token_head:
        return row_format(cache_dtype.value, ("k", element, head_size), ("v", element, head_size_v))
    alignment = SCALE_BYTES * packing
    for name, size in (("head_size", head_size), ("head_size_v", head_size_v)):
        if size % alignment:
            raise ValueError(
                f"{name} must be a multiple of {alignment} for {cache_dtype.value} rows, got {size}"
            )
    return row_format(
        cache_dtype.value,
        ("k", element, head_size // packing),
        # int4 pairs are symmetric with offset 8. vLLM's int4 rows have as many bytes, but are
        # rotated and keep a zero point in the scale, so that no cache can be shared with vLLM.
        ("k_scale", DType.FLOAT32, 1),
        ("v", element, head_size_v // packing),
        ("v_scale", DType.FLOAT32, 1),
    )
