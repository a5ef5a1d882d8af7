"""KV cache specs: bytes and blocks computed by hand, merging, cutting, JSON and error texts."""

import importlib
import inspect
import json
import math
import pkgutil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

import specs
from specs.base import Spec, SpecError, cdiv, parse_spec
from specs.dtypes import CacheDType, DType, KVQuantMode
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    IndexerSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    latent_spec,
)
from specs.layouts import DenseKVLayout, KVOrder, KVPacking, LatentKVLayout
from specs.rows import LatentFormat

ADAPTER: TypeAdapter[AnyKVCacheSpec] = TypeAdapter(KVCacheSpec)

DENSE = {"block_size": 16, "num_kv_heads": 3, "head_size": 64}
DENSE_SPECS: dict[str, AnyKVCacheSpec] = {
    "full_attention": FullAttentionSpec(**DENSE),
    "sliding_window": SlidingWindowSpec(**DENSE, sliding_window=32),
    "chunked_local_attention": ChunkedLocalAttentionSpec(**DENSE, attention_chunk_size=32),
    "sink_full_attention": SinkFullAttentionSpec(**DENSE, sink_len=32),
    "cross_attention": CrossAttentionSpec(**DENSE),
    "encoder_only_attention": EncoderOnlyAttentionSpec(**DENSE),
}
LATENT_SPECS: dict[str, AnyKVCacheSpec] = {
    "mla_attention": MLAAttentionSpec(block_size=64),
    "sliding_window_mla": SlidingWindowMLASpec(block_size=64, sliding_window=128),
}
SPECS: dict[str, AnyKVCacheSpec] = {**DENSE_SPECS, **LATENT_SPECS, "indexer": IndexerSpec()}
every_spec = pytest.mark.parametrize("kind", SPECS)

# Another valid value for every field of every spec.
CHANGES: dict[str, Any] = {
    "dtype": DType.FLOAT16,
    "cache_dtype": CacheDType.FP8,
    "page_size_padded": 1 << 20,
    "num_kv_heads": 6,
    "head_size": 128,
    "head_size_v": 128,
    "dcp_sharded": False,
    "sliding_window": 48,
    "attention_chunk_size": 64,
    "chunk_lookback": 1,
    "sink_len": 48,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "format": LatentFormat.BF16,
    "page_alignment": 512,
    "topk": 2048,
    "index_head_dim": 64,
    "block_size": 32,
}

# Bytes of a block: 16 tokens of 3 heads with K and V of 64 values, for a bf16 model.
DENSE_PAGE_BYTES = {
    "auto": 16 * 3 * (64 + 64) * 2,
    "float16": 16 * 3 * (64 + 64) * 2,
    "bfloat16": 16 * 3 * (64 + 64) * 2,
    "fp8": 16 * 3 * (64 + 64),
    "fp8_e4m3": 16 * 3 * (64 + 64),
    "fp8_e5m2": 16 * 3 * (64 + 64),
    "fp8_inc": 16 * 3 * (64 + 64),
    "int8_per_token_head": 16 * 3 * (64 + 4 + 64 + 4),
    "fp8_per_token_head": 16 * 3 * (64 + 4 + 64 + 4),
    "int4_per_token_head": 16 * 3 * (32 + 4 + 32 + 4),
}
# 64 tokens of a latent of 512 and a rope of 64.
LATENT_PAGE_BYTES = {
    "auto": 64 * 1152,
    "float16": 64 * 1152,
    "bfloat16": 64 * 1152,
    "fp8": 64 * 576,
    "fp8_e4m3": 64 * 576,
    "fp8_ds_mla": 64 * 656,
}


def spec_classes() -> list[type[Spec]]:
    """Every subclass of ``Spec`` that a module of the package defines."""
    found = []
    for info in pkgutil.walk_packages(specs.__path__, "specs."):
        module = importlib.import_module(info.name)
        found += [
            member
            for _, member in inspect.getmembers(module, inspect.isclass)
            if issubclass(member, Spec) and member.__module__ == info.name
        ]
    return found


# Families read config.json files that others write: unknown fields are expected there.
OF_OTHERS = "specs.families."
every_spec_class = pytest.mark.parametrize(
    "cls",
    [cls for cls in spec_classes() if not cls.__module__.startswith(OF_OTHERS)],
    ids=lambda cls: cls.__name__,
)


def test_the_examples_are_every_kind_of_the_union() -> None:
    assert {spec.kind for spec in SPECS.values()} == set(SPECS)
    assert {type(spec) for spec in SPECS.values()} == set(AnyKVCacheSpec.__args__)


# -- Bytes.


@pytest.mark.parametrize("kind", DENSE_SPECS)
@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_dense_pages_have_the_bytes_computed_by_hand(kind: str, cache_dtype: CacheDType) -> None:
    spec = DENSE_SPECS[kind]
    if cache_dtype is CacheDType.FP8_DS_MLA:
        with pytest.raises(SpecError, match="'fp8_ds_mla' is for latent"):
            spec.replace(cache_dtype=cache_dtype)
        return
    spec = spec.replace(cache_dtype=cache_dtype)
    assert spec.kv_quant_mode is cache_dtype.quant_mode
    if cache_dtype.value in DENSE_PAGE_BYTES:
        assert spec.page_size_bytes == DENSE_PAGE_BYTES[cache_dtype.value]
        assert spec.storage_dtype is cache_dtype.storage(DType.BFLOAT16)
    else:
        with pytest.raises(NotImplementedError, match=repr(cache_dtype.value)):
            _ = spec.page_size_bytes


@pytest.mark.parametrize("kind", LATENT_SPECS)
@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_latent_pages_have_the_bytes_computed_by_hand(kind: str, cache_dtype: CacheDType) -> None:
    spec = LATENT_SPECS[kind].replace(cache_dtype=cache_dtype)
    assert spec.kv_quant_mode is cache_dtype.quant_mode
    if cache_dtype.value in LATENT_PAGE_BYTES:
        assert spec.page_size_bytes == LATENT_PAGE_BYTES[cache_dtype.value]
    else:
        with pytest.raises(NotImplementedError, match=repr(cache_dtype.value)):
            _ = spec.page_size_bytes


@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_indexer_pages_have_132_bytes_a_token_whatever_the_cache_dtype(
    cache_dtype: CacheDType,
) -> None:
    assert IndexerSpec(cache_dtype=cache_dtype).page_size_bytes == 64 * 132
    assert IndexerSpec(index_head_dim=64).page_size_bytes == 64 * 68


@pytest.mark.parametrize(
    ("fields", "nbytes"),
    [
        ({"dtype": "float32"}, 16 * 3 * 128 * 4),
        ({"head_size_v": 32}, 16 * 3 * (64 + 32) * 2),
        ({"head_size_v": 32, "cache_dtype": "int4_per_token_head"}, 16 * 3 * (36 + 20)),
        ({"page_size_padded": 20000}, 20000),
        ({"block_size": 528, "num_kv_heads": 1}, 528 * 128 * 2),
    ],
)
def test_full_attention_pages_by_hand(fields: dict[str, Any], nbytes: int) -> None:
    assert FullAttentionSpec.model_validate({**DENSE, **fields}).page_size_bytes == nbytes


@pytest.mark.parametrize(
    ("fields", "nbytes"),
    [
        ({"dtype": "float32"}, 64 * 576 * 4),
        ({"dtype": "float32", "cache_dtype": "bfloat16"}, 64 * 576 * 2),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32, "cache_dtype": "fp8"}, 64 * 288),
        ({"cache_dtype": "fp8_ds_mla", "page_alignment": 576}, 73 * 576),
        ({"page_size_padded": 80000}, 80000),
        ({"cache_dtype": "fp8_ds_mla", "format": "fp8_nope_block_scale_bf16_rope"}, 64 * 656),
    ],
)
def test_latent_pages_by_hand(fields: dict[str, Any], nbytes: int) -> None:
    assert MLAAttentionSpec.model_validate({"block_size": 64, **fields}).page_size_bytes == nbytes


@every_spec
def test_bytes_for_a_request_are_its_blocks_times_the_page(kind: str) -> None:
    spec = SPECS[kind]
    for tokens, inflight in [(0, 0), (1, 0), (100, 1), (1000, 64)]:
        blocks = spec.num_blocks_for(tokens, inflight)
        assert spec.num_bytes_for(tokens, inflight) == blocks * spec.page_size_bytes


# -- Blocks: (tokens, in flight) -> blocks.

PLAIN = {(0, 0): 0, (1, 0): 1, (15, 0): 1, (16, 0): 1, (17, 0): 2, (32, 9): 2, (33, 0): 3}
# With a window of 32, 31 earlier tokens touch 3 blocks of 16 if they start inside one.
WINDOW = {
    (0, 0): 0,
    (1, 0): 1,
    (15, 0): 1,
    (16, 0): 1,
    (17, 0): 2,
    (32, 0): 2,
    (33, 0): 3,
    (48, 0): 3,
    (49, 0): 3,
    (5000, 0): 3,
    (5000, 1): 3,
    (5000, 2): 4,
    (5000, 17): 4,
    (5000, 18): 5,
    (40, 500): 3,
}
CHUNK = {
    (0, 0): 0,
    (15, 0): 1,
    (16, 0): 1,
    (17, 0): 2,
    (31, 0): 2,
    (32, 0): 2,
    (33, 0): 2,
    (5000, 0): 2,
    (5000, 1): 3,
    (5000, 16): 3,
    (5000, 17): 4,
    (33, 500): 3,
}
MLA = {(0, 0): 0, (63, 0): 1, (64, 0): 1, (65, 0): 2, (128, 0): 2, (129, 7): 3}
WINDOW_MLA = {
    (0, 0): 0,
    (64, 0): 1,
    (65, 0): 2,
    (128, 0): 2,
    (129, 0): 3,
    (9000, 1): 3,
    (9000, 2): 4,
}
BLOCKS: dict[str, dict[tuple[int, int], int]] = {
    "full_attention": PLAIN,
    "sliding_window": WINDOW,
    "chunked_local_attention": CHUNK,
    "sink_full_attention": PLAIN,
    "cross_attention": PLAIN,
    "encoder_only_attention": {(0, 0): 0, (1, 0): 0, (17, 0): 0, (5000, 100): 0},
    "mla_attention": MLA,
    "sliding_window_mla": WINDOW_MLA,
    "indexer": MLA,
}


@pytest.mark.parametrize(
    ("kind", "tokens", "inflight", "blocks"),
    [(kind, *key, blocks) for kind, table in BLOCKS.items() for key, blocks in table.items()],
)
def test_blocks_of_a_request_at_block_boundaries(
    kind: str, tokens: int, inflight: int, blocks: int
) -> None:
    assert SPECS[kind].num_blocks_for(tokens, inflight) == blocks


@pytest.mark.parametrize(
    "spec", [SPECS["full_attention"], MLAAttentionSpec(block_size=16)], ids=["full", "mla"]
)
@pytest.mark.parametrize(
    ("tokens", "ranks", "blocks"),
    [(0, 2, 0), (31, 2, 1), (32, 2, 1), (33, 2, 2), (64, 4, 1), (65, 4, 2), (1, 8, 1)],
)
def test_dcp_ranks_divide_the_tokens_unless_the_layer_is_not_sharded(
    spec: FullAttentionSpec | MLAAttentionSpec, tokens: int, ranks: int, blocks: int
) -> None:
    assert spec.num_blocks_for(tokens, dcp_size=ranks) == blocks
    whole = spec.replace(dcp_sharded=False)
    assert whole.num_blocks_for(tokens, dcp_size=ranks) == math.ceil(tokens / 16)


def test_a_chunk_with_lookback_keeps_the_chunks_before_it() -> None:
    spec = DENSE_SPECS["chunked_local_attention"].replace(chunk_lookback=2)
    assert [spec.num_blocks_for(tokens, 1) for tokens in (95, 96, 97, 5000)] == [6, 6, 7, 7]


@given(
    window=st.integers(1, 40),
    block_size=st.integers(1, 9),
    num_tokens=st.integers(0, 90),
    inflight=st.integers(1, 20),
    latent=st.booleans(),
)
def test_a_window_never_holds_more_blocks_than_counted_and_the_count_is_tight(
    window: int, block_size: int, num_tokens: int, inflight: int, latent: bool
) -> None:
    if latent:
        spec: AnyKVCacheSpec = SlidingWindowMLASpec(block_size=block_size, sliding_window=window)
    else:
        spec = SlidingWindowSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, sliding_window=window
        )
    held = [0]
    for start in range(num_tokens):
        stop = min(start + inflight, num_tokens)
        first = max(0, start - window + 1)
        held.append((stop - 1) // block_size - first // block_size + 1)
    counted = spec.num_blocks_for(num_tokens, inflight)
    assert max(held) <= counted <= max(held) + 1


@given(
    chunk=st.integers(1, 30),
    lookback=st.integers(0, 2),
    block_size=st.integers(1, 9),
    num_tokens=st.integers(0, 90),
    inflight=st.integers(1, 20),
)
def test_chunks_never_hold_more_blocks_than_counted_and_the_count_is_tight(
    chunk: int, lookback: int, block_size: int, num_tokens: int, inflight: int
) -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        attention_chunk_size=chunk,
        chunk_lookback=lookback,
    )
    held = [0]
    for start in range(num_tokens):
        stop = min(start + inflight, num_tokens)
        first = max(0, start // chunk - lookback) * chunk
        held.append((stop - 1) // block_size - first // block_size + 1)
    counted = spec.num_blocks_for(num_tokens, inflight)
    starts_inside_a_block = chunk % block_size != 0
    assert max(held) <= counted <= max(held) + 1 + starts_inside_a_block


def test_shared_sinks_are_reserved_once_and_not_counted_per_request() -> None:
    spec = DENSE_SPECS["sink_full_attention"]
    assert isinstance(spec, SinkFullAttentionSpec)
    assert spec.reserved_blocks == 2
    with pytest.raises(SpecError, match=r"sink_len must be a multiple of block_size \(16\)"):
        spec.replace(sink_len=33)


# -- Derived values.


@pytest.mark.parametrize("kind", LATENT_SPECS)
def test_latent_layers_have_one_kv_head_of_latent_plus_rope(kind: str) -> None:
    spec = LATENT_SPECS[kind].replace(kv_lora_rank=256, qk_rope_head_dim=32)
    assert (spec.num_kv_heads, spec.head_size, spec.is_mla) == (1, 288, True)
    assert isinstance(spec.layout(), LatentKVLayout)


@pytest.mark.parametrize("kind", DENSE_SPECS)
@pytest.mark.parametrize("packing", list(KVPacking))
@pytest.mark.parametrize("order", list(KVOrder))
def test_dense_layers_have_the_layout_that_is_asked_for(
    kind: str, packing: KVPacking, order: KVOrder
) -> None:
    spec = DENSE_SPECS[kind].replace(page_size_padded=12288 + 64)
    layout = spec.layout(packing, order)
    assert layout == DenseKVLayout(
        block_size=16,
        num_kv_heads=3,
        head_size=64,
        packing=packing,
        order=order,
        page_size_padded=12288 + 64,
    )
    assert not spec.is_mla


def test_the_value_head_size_is_the_keys_unless_given() -> None:
    spec = FullAttentionSpec(**DENSE)
    assert (spec.v_size, spec.replace(head_size_v=32).v_size) == (64, 32)


@pytest.mark.parametrize(
    ("cache_dtype", "latent"),
    [("auto", "bf16"), ("fp8", "fp8_nope_fp8_rope"), ("fp8_ds_mla", None)],
)
def test_the_cache_dtype_names_the_latent_format(cache_dtype: str, latent: str | None) -> None:
    spec = MLAAttentionSpec(block_size=64, cache_dtype=CacheDType(cache_dtype))
    expected = latent or "fp8_nope_block_scale_bf16_rope"
    assert spec.latent_format == LatentFormat(expected)
    assert spec.layout().format == LatentFormat(expected)


@pytest.mark.parametrize(
    ("cache_dtype", "latent"),
    [
        ("auto", "fp8_nope_fp8_rope"),
        ("fp8", "bf16"),
        ("fp8", "indexer_fp8"),
        ("fp8_ds_mla", "fp8_nope_fp8_rope"),
    ],
)
def test_an_explicit_format_must_store_the_cache_dtype(cache_dtype: str, latent: str) -> None:
    fields = {"block_size": 64, "cache_dtype": cache_dtype, "format": latent}
    with pytest.raises(
        SpecError, match=f"format must be .* for cache_dtype '{cache_dtype}', got '{latent}'"
    ):
        parse_spec(MLAAttentionSpec, fields, "layer")


# -- Merging and cutting.


@every_spec
def test_equal_specs_merge_to_themselves(kind: str) -> None:
    spec = SPECS[kind]
    assert type(spec).merge([spec, spec.replace(), spec.replace()]) == spec
    assert type(spec).merge([spec]) is spec


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, spec in SPECS.items()
        for name in type(spec).model_fields
        # The indexer's block size is fixed, the latent format follows from the cache dtype, and a
        # kind has only its own name.
        if name not in ("kind", "format") and (kind, name) != ("indexer", "block_size")
    ],
)
def test_specs_that_differ_in_one_field_do_not_merge_and_the_error_names_it(
    kind: str, name: str
) -> None:
    spec = SPECS[kind]
    other = spec.replace(**{name: CHANGES[name]})
    values = f"{getattr(spec, name)} and {getattr(other, name)}"
    expected = f"cannot merge {type(spec).__name__}: {name} differs ({values})"
    with pytest.raises(SpecError) as caught:
        type(spec).merge([spec, spec, other])
    assert str(caught.value) == expected


def test_specs_that_say_the_same_in_other_words_merge() -> None:
    full, latent = SPECS["full_attention"], SPECS["mla_attention"]
    spelled = full.replace(head_size_v=full.v_size), latent.replace(format=latent.latent_format)
    for one, other in zip((full, latent), spelled, strict=True):
        assert type(one).merge([one, other]) == one


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float8_e4m3fn"])
def test_a_model_computes_in_floats(dtype: str) -> None:
    with pytest.raises(SpecError, match=r"field 'dtype'.*float16, bfloat16"):
        parse_spec(FullAttentionSpec, {**DENSE, "dtype": dtype}, "layer")


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention"])
def test_there_is_at_least_one_rank(kind: str) -> None:
    with pytest.raises(SpecError, match="dcp_size must be positive, got 0"):
        SPECS[kind].num_blocks_for(10, dcp_size=0)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [True, "16", 16.0])
def test_a_size_is_an_integer(value: object) -> None:
    with pytest.raises(SpecError, match="field 'block_size'"):
        parse_spec(FullAttentionSpec, {**DENSE, "block_size": value}, "layer")


def test_specs_of_different_kinds_do_not_merge() -> None:
    full, window = SPECS["full_attention"], SPECS["sliding_window"]
    with pytest.raises(SpecError, match="FullAttentionSpec and SlidingWindowSpec"):
        FullAttentionSpec.merge([full, window])  # type: ignore[list-item]


def test_an_empty_group_does_not_merge() -> None:
    with pytest.raises(SpecError, match="empty group"):
        FullAttentionSpec.merge([])


@pytest.mark.parametrize("kind", [kind for kind in SPECS if kind != "indexer"])
def test_a_copy_with_another_block_size_differs_in_nothing_else(kind: str) -> None:
    spec = SPECS[kind]
    copied = spec.copy_with_new_block_size(8)
    assert copied == spec.replace(block_size=8)
    assert copied.block_size == 8
    assert copied.page_size_bytes * spec.block_size == spec.page_size_bytes * 8
    assert spec.copy_with_new_block_size(spec.block_size) == spec


@pytest.mark.parametrize("kind", [kind for kind in SPECS if kind != "indexer"])
def test_a_padded_page_is_not_cut(kind: str) -> None:
    spec = SPECS[kind].replace(page_size_padded=1 << 20)
    assert spec.copy_with_new_block_size(spec.block_size) == spec
    expected = f"padded to 1048576 bytes cannot be cut from block_size {spec.block_size} into blo"
    with pytest.raises(SpecError, match=expected):
        spec.copy_with_new_block_size(8)


def test_an_indexer_page_is_not_cut_because_it_is_planar() -> None:
    with pytest.raises(SpecError, match="block_size must be 64 for indexer_fp8, got 32"):
        IndexerSpec().copy_with_new_block_size(32)


def test_a_sink_that_no_longer_fills_its_blocks_is_not_cut() -> None:
    with pytest.raises(SpecError, match=r"sink_len must be a multiple of block_size \(24\)"):
        DENSE_SPECS["sink_full_attention"].copy_with_new_block_size(24)


def test_an_aligned_page_is_cut_only_where_its_parts_are_aligned_too() -> None:
    # 64 rows of 656 bytes are 72.9 times 576; sixteen are 18.2 times, so the parts do not fit.
    spec = MLAAttentionSpec(block_size=64, cache_dtype=CacheDType.FP8_DS_MLA, page_alignment=576)
    assert spec.page_size_bytes == 73 * 576
    assert spec.copy_with_new_block_size(64) == spec
    with pytest.raises(SpecError, match=r"aligned to 576 bytes.*64 \(42048 bytes\).*16 \(10944"):
        spec.copy_with_new_block_size(16)
    plain = MLAAttentionSpec(block_size=64, page_alignment=1152)
    assert plain.copy_with_new_block_size(16).page_size_bytes == 16 * 1152


# -- JSON, schemas and error texts.


@every_spec
def test_specs_round_trip_through_json_as_a_member_of_the_union(kind: str) -> None:
    spec = SPECS[kind].replace(cache_dtype=CacheDType.FP8, dtype=DType.FLOAT16)
    text = ADAPTER.dump_json(spec)
    assert json.loads(text)["kind"] == kind
    back = ADAPTER.validate_json(text)
    assert back == spec
    assert type(back) is type(spec)
    assert hash(back) == hash(spec)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python({"kind": "mamba", "block_size": 16})
    message = str(caught.value)
    assert "'mamba'" in message
    assert all(repr(kind) in message for kind in SPECS)


def test_the_schema_of_the_union_lists_every_kind() -> None:
    schema = ADAPTER.json_schema()
    assert set(schema["discriminator"]["mapping"]) == set(SPECS)


@every_spec
def test_unknown_fields_are_refused_and_named(kind: str) -> None:
    fields = {**SPECS[kind].model_dump(mode="json"), "page_sise": 1}
    with pytest.raises(SpecError, match=r"cache: field 'page_sise': Extra inputs.*got 1"):
        parse_spec(type(SPECS[kind]), fields, "cache")


@every_spec
def test_specs_are_frozen(kind: str) -> None:
    with pytest.raises(SpecError, match="frozen"):
        SPECS[kind].block_size = 32


@every_spec_class
def test_every_spec_class_refuses_unknown_fields(cls: type[Spec]) -> None:
    with pytest.raises(SpecError) as caught:
        cls.model_validate({"no_such_field": 1})
    assert "field 'no_such_field': Extra inputs are not permitted; got 1" in str(caught.value)
    assert cls.model_config["frozen"]


@every_spec_class
def test_every_spec_class_has_a_json_schema_that_names_its_fields(cls: type[Spec]) -> None:
    schema = cls.model_json_schema()
    assert schema["title"] == cls.__name__
    assert set(schema["properties"]) == set(cls.model_fields)
    assert schema["additionalProperties"] is False
    if not cls.__name__.startswith("_"):
        assert schema["description"] == inspect.getdoc(cls)
    json.dumps(schema)


@pytest.mark.parametrize(
    "cls",
    [cls for cls in spec_classes() if cls.__module__.startswith(OF_OTHERS)],
    ids=lambda cls: cls.__name__,
)
def test_readers_of_foreign_files_have_a_json_schema_too(cls: type[Spec]) -> None:
    schema = cls.model_json_schema()
    assert schema["title"] == cls.__name__
    assert len(schema["properties"]) == len(cls.model_fields)


def test_attribute_docstrings_reach_the_schema() -> None:
    properties = SlidingWindowSpec.model_json_schema()["properties"]
    assert properties["block_size"]["description"] == "Tokens per block."


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"block_size": 0}, ["'block_size'", "greater than 0", "got 0"]),
        ({"block_size": "many"}, ["'block_size'", "integer", "got 'many'"]),
        ({"dtype": "float7"}, ["'dtype'", "bfloat16", "got 'float7'"]),
        ({"cache_dtype": "fp9"}, ["'cache_dtype'", "fp8_e5m2", "got 'fp9'"]),
        ({"kind": "mla_attention"}, ["'kind'", "'full_attention'", "got 'mla_attention'"]),
        ({"head_size": None}, ["'head_size'", "integer", "got None"]),
        ({"page_size_padded": 5}, ["page_size_padded", "at least", "12288 bytes", "got 5"]),
        (
            {"head_size": 6, "cache_dtype": "int4_per_token_head"},
            ["head_size", "multiple of 8", "got 6"],
        ),
    ],
)
def test_a_bad_value_is_reported_with_field_value_and_what_is_allowed(
    fields: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(FullAttentionSpec, {**DENSE, **fields}, "layer 3")
    message = str(caught.value)
    assert message.startswith("layer 3: field ")
    assert all(part in message for part in parts), message


def test_every_problem_has_a_line_of_its_own_with_the_path() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(FullAttentionSpec, {"block_size": -1, "head_size": 64}, "layer")
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("layer: field 'block_size'")
    assert lines[1].startswith("layer: field 'num_kv_heads': Field required")


def test_a_long_value_is_shortened_in_the_report() -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(FullAttentionSpec, {**DENSE, "dtype": "x" * 500}, "layer")
    came = str(caught.value).rsplit("got ", 1)[1]
    assert came.endswith("xxx...")
    assert len(came) == 80


@pytest.mark.parametrize("encode", [str, str.encode], ids=["text", "bytes"])
def test_json_text_is_parsed_like_a_mapping(encode: Any) -> None:
    spec = SPECS["sliding_window"]
    assert parse_spec(SlidingWindowSpec, encode(spec.model_dump_json()), "file") == spec
    with pytest.raises(SpecError, match=r"file: field '\(whole\)': Invalid JSON"):
        parse_spec(SlidingWindowSpec, encode("{"), "file")


def test_replace_validates_again() -> None:
    with pytest.raises(SpecError):
        SPECS["full_attention"].replace(block_size=0)


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2)])
def test_cdiv_rounds_up(a: int, b: int, expected: int) -> None:
    assert cdiv(a, b) == expected


def test_the_spec_base_leaves_layout_and_blocks_to_its_leaves() -> None:
    base = FullAttentionSpec.__mro__[2](block_size=16)
    assert base.kv_quant_mode is KVQuantMode.NONE
    with pytest.raises(NotImplementedError):
        base.layout()
    with pytest.raises(NotImplementedError):
        base.num_blocks_for(1)


@pytest.mark.parametrize(
    ("latent", "row_bytes"),
    [
        (LatentFormat.BF16, 1152),
        (LatentFormat.FP8_NOPE_FP8_ROPE, 576),
        (LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE, 656),
        (LatentFormat.INDEXER_FP8, 132),
    ],
)
def test_every_latent_format_has_a_spec(latent: LatentFormat, row_bytes: int) -> None:
    spec = latent_spec(latent, topk=2048)
    layout = spec.layout()
    assert isinstance(layout, LatentKVLayout)
    assert (layout.format, layout.row.nbytes) == (latent, row_bytes)
    assert spec.page_size_bytes == 64 * row_bytes
    assert isinstance(spec, IndexerSpec) == (latent is LatentFormat.INDEXER_FP8)
    assert getattr(spec, "topk", 2048) == 2048
