"""Row formats: the documented bytes at the documented offsets, and nothing else."""

import pytest

from specs.base import SpecError
from specs.dtypes import CacheDType, DType
from specs.layouts import LatentKVLayout
from specs.rows import (
    LatentFormat,
    RowField,
    RowFormat,
    cache_dtype_of,
    dense_row_format,
    latent_format_of,
    row_format,
)

# Format -> row bytes and (field, dtype, offset, count), for a latent of 512 and a rope of 64
# (the indexer: keys of 128).
LATENT_ROWS = {
    LatentFormat.BF16: (1152, [("nope", "bfloat16", 0, 512), ("rope", "bfloat16", 1024, 64)]),
    LatentFormat.FP8_NOPE_FP8_ROPE: (
        576,
        [("nope", "float8_e4m3fn", 0, 512), ("rope", "float8_e4m3fn", 512, 64)],
    ),
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: (
        656,
        [
            ("nope", "float8_e4m3fn", 0, 512),
            ("scale", "float32", 512, 4),
            ("rope", "bfloat16", 528, 64),
        ],
    ),
    LatentFormat.INDEXER_FP8: (
        132,
        [("data", "float8_e4m3fn", 0, 128), ("scale", "float32", 128, 1)],
    ),
}

# Cache dtype -> row bytes and fields for K of 16 and V of 8 values.
DENSE_ROWS = {
    "auto": (48, [("k", "bfloat16", 0, 16), ("v", "bfloat16", 32, 8)]),
    "float16": (48, [("k", "float16", 0, 16), ("v", "float16", 32, 8)]),
    "bfloat16": (48, [("k", "bfloat16", 0, 16), ("v", "bfloat16", 32, 8)]),
    "fp8": (24, [("k", "float8_e4m3fn", 0, 16), ("v", "float8_e4m3fn", 16, 8)]),
    "fp8_e4m3": (24, [("k", "float8_e4m3fn", 0, 16), ("v", "float8_e4m3fn", 16, 8)]),
    "fp8_inc": (24, [("k", "float8_e4m3fn", 0, 16), ("v", "float8_e4m3fn", 16, 8)]),
    "fp8_e5m2": (24, [("k", "float8_e5m2", 0, 16), ("v", "float8_e5m2", 16, 8)]),
    "int8_per_token_head": (
        32,
        [
            ("k", "int8", 0, 16),
            ("k_scale", "float32", 16, 1),
            ("v", "int8", 20, 8),
            ("v_scale", "float32", 28, 1),
        ],
    ),
    "fp8_per_token_head": (
        32,
        [
            ("k", "float8_e4m3fn", 0, 16),
            ("k_scale", "float32", 16, 1),
            ("v", "float8_e4m3fn", 20, 8),
            ("v_scale", "float32", 28, 1),
        ],
    ),
    "int4_per_token_head": (
        20,
        [
            ("k", "uint8", 0, 8),
            ("k_scale", "float32", 8, 1),
            ("v", "uint8", 12, 4),
            ("v_scale", "float32", 16, 1),
        ],
    ),
}


def listed(row: RowFormat) -> list[tuple[str, str, int, int]]:
    """The fields of a row as plain tuples."""
    return [(field.name, field.dtype.value, field.offset, field.count) for field in row.fields]


def field(name: str, dtype: DType, offset: int, count: int) -> RowField:
    """A field, briefly."""
    return RowField(name=name, dtype=dtype, offset=offset, count=count)


@pytest.mark.parametrize("latent", LatentFormat)
def test_latent_rows_have_the_documented_bytes_and_offsets(latent: LatentFormat) -> None:
    nbytes, fields = LATENT_ROWS[latent]
    row = latent.row(128) if latent is LatentFormat.INDEXER_FP8 else latent.row()
    assert row.nbytes == nbytes
    assert listed(row) == fields
    assert row.name == latent.value
    assert row.planar == (latent is LatentFormat.INDEXER_FP8)


@pytest.mark.parametrize(
    ("latent", "nbytes", "fields"),
    [
        (LatentFormat.BF16, 1024, ["nope"]),
        (LatentFormat.FP8_NOPE_FP8_ROPE, 512, ["nope"]),
        (LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE, 528, ["nope", "scale"]),
    ],
)
def test_latent_rows_without_rope_have_no_such_field(
    latent: LatentFormat, nbytes: int, fields: list[str]
) -> None:
    row = latent.row(512, 0)
    assert (row.nbytes, [part.name for part in row.fields]) == (nbytes, fields)


def test_plain_latent_rows_follow_the_model_dtype() -> None:
    assert LatentFormat.BF16.row(512, 64, DType.FLOAT32).nbytes == 4 * 576


def test_block_scaled_latents_need_whole_blocks_of_128() -> None:
    with pytest.raises(ValueError, match=r"kv_lora_rank must be a multiple of 128.*got 500"):
        LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE.row(500)


@pytest.mark.parametrize(
    ("name", "latent"),
    [
        ("BF16", LatentFormat.BF16),
        ("bfloat16", LatentFormat.BF16),
        ("FP8_NOPE_FP8_ROPE", LatentFormat.FP8_NOPE_FP8_ROPE),
        (
            "FP8_NOPE_WITH_BLOCK_SCALE_BF16_ROPE",
            LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE,
        ),
        ("fp8_ds_mla", LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE),
    ],
)
def test_other_engines_names_are_known_in_any_case(name: str, latent: LatentFormat) -> None:
    assert LatentFormat(name) is latent
    assert LatentFormat(name.lower()) is latent


@pytest.mark.parametrize("name", ["fp8", "656", 656, None])
def test_a_width_is_no_name_of_a_format(name: object) -> None:
    with pytest.raises(ValueError, match="is not a valid LatentFormat"):
        LatentFormat(name)


def test_every_attended_format_has_a_cache_dtype() -> None:
    for latent in LatentFormat:
        if latent is LatentFormat.INDEXER_FP8:
            with pytest.raises(ValueError, match="got 'indexer_fp8': the indexer's have a spec"):
                cache_dtype_of(latent)
        else:
            assert latent_format_of(cache_dtype_of(latent)) is latent


def test_sglangs_name_of_the_block_scaled_format_is_an_alias() -> None:
    alias = "fp8_nope_with_block_scale_bf16_rope"
    assert LatentFormat(alias) is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    layout = LatentKVLayout.model_validate({"block_size": 64, "format": alias})
    assert layout.format is LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE
    assert alias not in {member.value for member in LatentFormat}


def test_an_unknown_latent_format_is_refused() -> None:
    with pytest.raises(ValueError, match="fp4_nope"):
        LatentFormat("fp4_nope")


@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_each_cache_dtype_means_one_latent_format_or_none(cache_dtype: CacheDType) -> None:
    expected = {
        "auto": LatentFormat.BF16,
        "float16": LatentFormat.BF16,
        "bfloat16": LatentFormat.BF16,
        "fp8": LatentFormat.FP8_NOPE_FP8_ROPE,
        "fp8_e4m3": LatentFormat.FP8_NOPE_FP8_ROPE,
        "fp8_ds_mla": LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE,
    }
    if cache_dtype.value in expected:
        assert latent_format_of(cache_dtype) is expected[cache_dtype.value]
    else:
        with pytest.raises(NotImplementedError, match=repr(cache_dtype.value)):
            latent_format_of(cache_dtype)


@pytest.mark.parametrize("cache_dtype", DENSE_ROWS)
def test_dense_rows_have_k_then_v_each_with_its_inline_scale(cache_dtype: str) -> None:
    nbytes, fields = DENSE_ROWS[cache_dtype]
    row = dense_row_format(16, 8, CacheDType(cache_dtype), DType.BFLOAT16)
    assert row.nbytes == nbytes
    assert listed(row) == fields
    assert not row.planar


@pytest.mark.parametrize("cache_dtype", [c for c in CacheDType if c.value not in DENSE_ROWS])
def test_cache_dtypes_without_dense_rows_say_so(cache_dtype: CacheDType) -> None:
    with pytest.raises(NotImplementedError, match=repr(cache_dtype.value)):
        dense_row_format(128, 128, cache_dtype, DType.BFLOAT16)


@pytest.mark.parametrize(
    ("cache_dtype", "step"),
    [("int8_per_token_head", 4), ("fp8_per_token_head", 4), ("int4_per_token_head", 8)],
)
@pytest.mark.parametrize("side", ["head_size", "head_size_v"])
def test_inline_scales_need_aligned_head_sizes(cache_dtype: str, step: int, side: str) -> None:
    sizes = {"head_size": 16, "head_size_v": 16, side: 16 + step // 2}
    expected = f"{side} must be a multiple of {step} for {cache_dtype} rows, got {16 + step // 2}"
    with pytest.raises(ValueError, match=expected):
        dense_row_format(**sizes, cache_dtype=CacheDType(cache_dtype), model_dtype=DType.BFLOAT16)


def test_fields_are_found_by_name() -> None:
    row = row_format("pair", ("k", DType.FLOAT16, 3), ("v", DType.FLOAT16, 5))
    assert (row["v"].offset, row["v"].nbytes, row["v"].end) == (6, 10, 16)
    assert row.get("k") == row.fields[0]
    assert row.get("scale") is None
    assert "k" in row
    assert "scale" not in row
    with pytest.raises(KeyError, match="row format 'pair' has no field 'scale'"):
        row["scale"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((), "row format 'bad' has no fields"),
        (
            (field("k", DType.INT8, 0, 4), field("k", DType.INT8, 4, 4)),
            r"row format 'bad' repeats a field name: \['k', 'k'\]",
        ),
        (
            (field("k", DType.INT8, 0, 4), field("v", DType.INT8, 8, 4)),
            "field 'v' starts at byte 8, expected 4",
        ),
        (
            (field("k", DType.INT8, 0, 4), field("v", DType.INT8, 2, 4)),
            "field 'v' starts at byte 2, expected 4",
        ),
        ((field("k", DType.INT8, 4, 4),), "field 'k' starts at byte 4, expected 0"),
        (
            (field("k", DType.INT8, 0, 3), field("s", DType.FLOAT32, 3, 1)),
            "field 's' of float32 at byte 3 is not aligned to 4 bytes",
        ),
        (
            (field("s", DType.FLOAT32, 0, 1), field("k", DType.INT8, 4, 3)),
            "7 bytes of a row are no multiple of 4",
        ),
    ],
    ids=["empty", "duplicate", "gap", "overlap", "late start", "misaligned", "ragged end"],
)
def test_a_row_whose_fields_do_not_tile_it_is_refused(
    fields: tuple[RowField, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        RowFormat(name="bad", fields=fields)


def test_planar_rows_may_end_anywhere_because_pages_align_their_planes() -> None:
    fields = (field("s", DType.FLOAT32, 0, 1), field("k", DType.INT8, 4, 3))
    assert RowFormat(name="planar", fields=fields, planar=True).nbytes == 7


@pytest.mark.parametrize(("offset", "count"), [(-1, 1), (0, 0)])
def test_a_field_has_a_place_and_at_least_one_element(offset: int, count: int) -> None:
    with pytest.raises(SpecError):
        field("k", DType.INT8, offset, count)
