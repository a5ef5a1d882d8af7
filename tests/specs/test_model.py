"""Model geometry: the records, what they ask of a backend and what they store."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.attention import AttentionType
from specs.base import SpecError, parse_spec
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, ParallelConfig
from specs.kv_cache import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from specs.model import (
    IndexerGeometry,
    LayerGeometry,
    LayerKind,
    MLAGeometry,
    ModelGeometry,
    OtherLayers,
)

FULL = LayerGeometry(
    kind=LayerKind.FULL, num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5
)
SLIDING = FULL.replace(kind=LayerKind.SLIDING_WINDOW, sliding_window=1024)
CHUNKED = FULL.replace(kind=LayerKind.CHUNKED_LOCAL, attention_chunk_size=8192)
ENCODER = FULL.replace(kind=LayerKind.ENCODER_ONLY)
LATENT = MLAGeometry(
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
MLA = LayerGeometry(
    kind=LayerKind.MLA,
    num_heads=128,
    num_kv_heads=1,
    head_size=192,
    head_size_v=128,
    scale=192**-0.5,
    mla=LATENT,
)
INDEXER = IndexerGeometry(index_topk=2048, index_n_heads=64, index_head_dim=128)
SPARSE = MLA.replace(kind=LayerKind.SPARSE_MLA, indexer=INDEXER)
ALL = {layer.kind: layer for layer in (FULL, SLIDING, CHUNKED, ENCODER, MLA, SPARSE)}


def model(*layers: LayerGeometry, **fields: object) -> ModelGeometry:
    """A model of these layers."""
    common = {"name": "tiny", "architecture": "Tiny", "hidden_size": 4096}
    return ModelGeometry.model_validate(
        {**common, "max_position_embeddings": 4096, "layers": layers, **fields}
    )


def changed(layer: LayerGeometry, **changes: object) -> str:
    """The message of the error that these changes to ``layer`` make."""
    fields = {**layer.model_dump(), **changes}
    with pytest.raises(SpecError) as caught:
        parse_spec(LayerGeometry, fields, "layer")
    return str(caught.value)


def test_every_kind_has_an_example_here():
    assert set(ALL) == set(LayerKind)


def test_layer_kinds_have_the_values_of_the_json_format():
    assert [kind.value for kind in LayerKind] == [
        "full_attention",
        "sliding_window",
        "chunked_local_attention",
        "mla",
        "sparse_mla",
        "encoder_only",
    ]


def test_only_the_latent_kinds_are_mla():
    assert {kind for kind in LayerKind if kind.is_mla} == {LayerKind.MLA, LayerKind.SPARSE_MLA}


def test_latent_sizes_of_deepseek_v3_are_192_before_and_576_after_absorption():
    assert (LATENT.qk_head_dim, LATENT.latent_size) == (192, 576)


def test_value_head_size_falls_back_to_the_head_size():
    assert (FULL.v_size, MLA.v_size) == (128, 128)
    assert FULL.replace(head_size_v=64).v_size == 64


def test_group_size_is_query_heads_per_kv_head():
    assert (FULL.num_queries_per_kv, MLA.num_queries_per_kv) == (4, 128)


def test_kv_heads_must_divide_the_heads():
    message = changed(FULL, num_kv_heads=5)
    assert "field 'num_kv_heads'" in message
    assert "must divide num_heads (32); got 5" in message


@pytest.mark.parametrize("layer", [MLA, SPARSE], ids=lambda layer: layer.kind.value)
def test_latent_layers_have_one_kv_head(layer):
    message = changed(layer, num_kv_heads=128)
    assert f"must be 1 for kind '{layer.kind.value}'; got 128" in message


NEEDED = {
    "sliding_window": {LayerKind.SLIDING_WINDOW},
    "attention_chunk_size": {LayerKind.CHUNKED_LOCAL},
    "mla": {LayerKind.MLA, LayerKind.SPARSE_MLA},
}
VALUES = {"sliding_window": 64, "attention_chunk_size": 64, "mla": LATENT}


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize("field", NEEDED)
def test_a_field_of_one_kind_is_needed_there_and_refused_elsewhere(field, kind):
    layer = ALL[kind]
    if kind in NEEDED[field]:
        message = changed(layer, **{field: None})
        assert f"field '{field}'" in message
        assert f"a layer of kind '{kind.value}' needs it; got None" in message
    elif (field, kind) != ("sliding_window", LayerKind.ENCODER_ONLY):
        message = changed(layer, **{field: VALUES[field]})
        assert f"field '{field}'" in message
        assert f"this layer's is '{kind.value}'" in message
        for needed in NEEDED[field]:
            assert f"'{needed.value}'" in message


SHARED = SPARSE.replace(indexer=None, shared_index_topk=2048)


@pytest.mark.parametrize("kind", LayerKind)
@pytest.mark.parametrize("field", ["indexer", "shared_index_topk"])
def test_only_a_sparse_layer_has_an_indexer_or_takes_a_list(field, kind):
    if kind is LayerKind.SPARSE_MLA:
        return
    message = changed(
        ALL[kind], **{field: getattr(SPARSE if field == "indexer" else SHARED, field)}
    )
    assert f"field '{field}': Value error, only for kind 'sparse_mla'" in message
    assert f"this layer's is '{kind.value}'" in message


def test_a_sparse_layer_has_an_indexer_or_takes_a_list_and_not_both():
    message = changed(SPARSE, indexer=None)
    assert (
        "field 'shared_index_topk': Value error, a layer of kind 'sparse_mla' needs it" in message
    )
    message = changed(SPARSE, shared_index_topk=2048)
    assert "only for a layer without an indexer; got 2048" in message


def test_who_lists_the_tokens_changes_neither_what_a_layer_asks_nor_what_it_stores():
    assert (SPARSE.index_topk, SHARED.index_topk, MLA.index_topk) == (2048, 2048, None)
    assert SHARED.selector_config("bfloat16") == SPARSE.selector_config("bfloat16")
    assert SHARED.kv_cache_spec(64, "bfloat16") == SPARSE.kv_cache_spec(64, "bfloat16")


def test_a_layer_that_takes_a_list_takes_the_last_one_made():
    geometry = model(SPARSE, SHARED, SHARED, SPARSE, MLA, SHARED)
    assert [geometry.list_maker(index) for index in range(6)] == [None, 0, 0, None, None, 3]
    smaller = geometry.select_layers(3)
    assert smaller.layers == (SPARSE, SHARED, MLA)
    assert smaller.list_maker(1) == 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((SHARED, SPARSE), "layer 0 takes a list of 2048, and no layer before it makes one"),
        (
            (SPARSE, SHARED.replace(shared_index_topk=512)),
            "layer 1 takes a list of 512, and that list has 2048",
        ),
    ],
)
def test_a_list_that_nobody_makes_cannot_be_taken(layers, message):
    with pytest.raises(ValueError, match=message):
        model(*layers)


def test_a_shared_cache_needs_an_equal_layer_before_that_stores():
    reader = FULL.replace(shares_kv=True)
    assert model(FULL, reader).kinds == (FULL, reader)
    for layers in ((reader, FULL), (SLIDING, reader), (FULL.replace(head_size=64), reader)):
        with pytest.raises(ValueError, match="no equal layer before it stores one"):
            model(*layers)


def test_a_smaller_model_has_attention_layers_only():
    other = OtherLayers(name="mamba", indices=(1,))
    geometry = model(FULL, SLIDING, other_layers=(other,))
    assert geometry.select_layers(2).other_layers == ()
    assert geometry.local(2).other_layers == (other,)


def test_the_label_of_a_layer_says_what_it_takes_from_others():
    assert FULL.label == "full_attention"
    assert SLIDING.label == "sliding_window 1024"
    assert SHARED.label == "sparse_mla (shared list)"
    assert SLIDING.replace(shares_kv=True).label == "sliding_window 1024 (shared cache)"


def test_alibi_of_an_encoder_is_asked_for_as_symmetric():
    decoder = FULL.replace(use_alibi=True).selector_config("float32")
    encoder = ENCODER.replace(use_alibi=True).selector_config("float32")
    assert (decoder.use_alibi, decoder.use_alibi_symmetric) == (True, False)
    assert (encoder.use_alibi, encoder.use_alibi_symmetric) == (False, True)


def test_an_encoder_may_have_a_window():
    assert ENCODER.replace(sliding_window=65).sliding_window == 65


@pytest.mark.parametrize("sizes", [{"head_size": 128}, {"head_size_v": 64}, {"head_size_v": None}])
def test_head_sizes_of_a_latent_layer_are_those_of_its_latent_sizes(sizes):
    message = changed(MLA, **sizes)
    assert "field 'mla'" in message
    assert "means head_size 192 and head_size_v 128" in message


def test_a_layer_of_unknown_kind_and_size_reports_those_and_nothing_that_follows_from_them():
    message = changed(SPARSE, kind="linear", num_heads=0, head_size="wide")
    lines = message.splitlines()
    assert [line.split("'")[1] for line in lines] == ["kind", "num_heads", "head_size"]
    assert "'full_attention'" in lines[0]
    assert "'linear'" in lines[0]


@pytest.mark.parametrize("field", ["scale", "logits_soft_cap"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_scale_and_soft_cap_are_positive_and_finite(field, value):
    assert f"field '{field}'" in changed(FULL, **{field: value})


def test_a_rank_has_its_share_of_the_heads():
    local = FULL.local(4)
    assert (local.num_heads, local.num_kv_heads) == (8, 2)
    assert local.replace(num_heads=32, num_kv_heads=8) == FULL


def test_kv_heads_are_replicated_when_ranks_outnumber_them():
    local = FULL.local(16)
    assert (local.num_heads, local.num_kv_heads) == (2, 1)


def test_the_latent_row_is_on_every_rank():
    local = MLA.local(8)
    assert (local.num_heads, local.num_kv_heads, local.mla) == (16, 1, LATENT)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (0, "tensor_parallel_size must be at least 1, got 0"),
        (5, "tensor_parallel_size must divide num_heads (24), got 5"),
        (4, "tensor_parallel_size must divide num_kv_heads (6) or be a multiple of it, got 4"),
    ],
)
def test_heads_that_do_not_divide_over_the_ranks_are_refused(ranks, message):
    layer = FULL.replace(num_heads=24, num_kv_heads=6)
    with pytest.raises(SpecError) as caught:
        layer.local(ranks)
    assert str(caught.value) == message


exponents = st.integers(0, 5)


@given(kv=exponents, group=exponents, ranks=exponents)
def test_ranks_together_have_all_heads_and_none_is_without_a_kv_head(kv, group, ranks):
    layer = FULL.replace(num_heads=2 ** (kv + group), num_kv_heads=2**kv)
    size = 2 ** min(ranks, kv + group)
    local = layer.local(size)
    assert local.num_heads * size == layer.num_heads
    assert local.num_kv_heads == max(1, layer.num_kv_heads // size)
    assert local.num_queries_per_kv <= layer.num_queries_per_kv
    same = ("num_heads", "num_kv_heads")
    assert local.model_dump(exclude=set(same)) == layer.model_dump(exclude=set(same))


@given(kv=exponents, group=exponents, first=exponents, second=exponents)
def test_dividing_twice_is_dividing_by_the_product(kv, group, first, second):
    layer = FULL.replace(num_heads=2 ** (kv + group), num_kv_heads=2**kv)
    first = min(first, kv + group)
    second = min(second, kv + group - first)
    assert layer.local(2**first).local(2**second) == layer.local(2 ** (first + second))


def test_a_plain_layer_asks_for_its_head_size_and_dtype_and_nothing_else():
    config = FULL.selector_config("bf16")
    assert config.model_dump(exclude_defaults=True) == {"head_size": 128, "dtype": DType.BFLOAT16}


ASKED = {
    LayerKind.FULL: {},
    LayerKind.SLIDING_WINDOW: {"has_sliding_window": True},
    LayerKind.CHUNKED_LOCAL: {"use_chunked_local": True},
    LayerKind.MLA: {"head_size": 576, "use_mla": True},
    LayerKind.SPARSE_MLA: {"head_size": 576, "use_mla": True, "use_sparse": True},
    LayerKind.ENCODER_ONLY: {"attn_type": AttentionType.ENCODER_ONLY},
}


@pytest.mark.parametrize("kind", LayerKind)
def test_each_kind_asks_for_what_it_needs(kind):
    config = ALL[kind].selector_config(DType.FLOAT16)
    expected = {"head_size": 128, "dtype": DType.FLOAT16, **ASKED[kind]}
    assert config.model_dump(exclude_defaults=True) == expected


def test_extras_of_a_layer_are_asked_for():
    layer = SLIDING.replace(has_sinks=True, use_alibi=True, logits_soft_cap=50.0)
    config = layer.selector_config(DType.BFLOAT16, "fp8", block_size=16)
    assert (config.has_sink, config.use_alibi, config.use_logits_soft_cap) == (True, True, True)
    assert (config.kv_cache_dtype, config.block_size) == (CacheDType.FP8, 16)
    encoder = ENCODER.replace(sliding_window=65).selector_config(DType.FLOAT32)
    assert (encoder.has_sliding_window, encoder.use_non_causal) == (True, False)


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        (EngineConfig(max_model_len=8), set()),
        (EngineConfig(max_model_len=8, batch_invariant=True), {"use_batch_invariant"}),
        (
            EngineConfig(max_model_len=8, parallel=ParallelConfig(decode_context_parallel_size=2)),
            {"use_dcp"},
        ),
        (
            EngineConfig(max_model_len=8, parallel=ParallelConfig(prefill_context_parallel_size=2)),
            {"use_pcp"},
        ),
    ],
)
def test_the_engine_adds_invariance_and_context_parallelism(engine, asked):
    config = MLA.selector_config(DType.BFLOAT16, engine=engine)
    flags = {
        name for name in ("use_batch_invariant", "use_dcp", "use_pcp") if getattr(config, name)
    }
    assert flags == asked


def test_a_bad_selector_argument_is_named():
    with pytest.raises(ValueError, match="unknown kv_cache_dtype 'fp7'"):
        FULL.selector_config(DType.BFLOAT16, "fp7")
    with pytest.raises(SpecError, match=r"full_attention layer: field 'block_size': .*got 0"):
        FULL.selector_config(DType.BFLOAT16, block_size=0)


STORED = {
    LayerKind.FULL: (FullAttentionSpec, {}),
    LayerKind.SLIDING_WINDOW: (SlidingWindowSpec, {"sliding_window": 1024}),
    LayerKind.CHUNKED_LOCAL: (ChunkedLocalAttentionSpec, {"attention_chunk_size": 8192}),
    LayerKind.ENCODER_ONLY: (EncoderOnlyAttentionSpec, {"sliding_window": None}),
    LayerKind.MLA: (MLAAttentionSpec, {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "topk": None}),
    LayerKind.SPARSE_MLA: (MLAAttentionSpec, {"kv_lora_rank": 512, "topk": 2048}),
}


@pytest.mark.parametrize("kind", LayerKind)
def test_each_kind_stores_what_its_cache_spec_says(kind):
    spec = ALL[kind].kv_cache_spec(64, "bfloat16", "auto", tensor_parallel_size=2)
    cls, fields = STORED[kind]
    assert type(spec) is cls
    assert (spec.block_size, spec.dtype, spec.cache_dtype) == (64, DType.BFLOAT16, CacheDType.AUTO)
    for name, value in fields.items():
        assert getattr(spec, name) == value
    heads = (1, 576) if kind.is_mla else (4, 128)
    assert (spec.num_kv_heads, spec.head_size) == heads


def test_the_cache_of_a_rank_keeps_one_kv_head_when_ranks_outnumber_them():
    spec = FULL.kv_cache_spec(16, DType.BFLOAT16, tensor_parallel_size=32)
    assert spec.num_kv_heads == 1


def test_the_page_of_a_llama_layer_is_64_kib():
    assert FULL.kv_cache_spec(16, DType.BFLOAT16).page_size_bytes == 16 * 8 * 2 * 128 * 2


def test_a_latent_cache_dtype_chooses_the_row():
    plain = MLA.kv_cache_spec(64, DType.BFLOAT16)
    packed = SPARSE.kv_cache_spec(64, DType.BFLOAT16, "fp8_ds_mla")
    assert plain.page_size_bytes == 64 * 1152
    assert packed.page_size_bytes == 64 * 656


def test_unequal_value_heads_are_kept_in_the_cache_spec():
    spec = FULL.replace(head_size_v=64).kv_cache_spec(16, DType.BFLOAT16)
    assert (spec.head_size, spec.v_size) == (128, 64)


def test_a_block_size_below_one_is_refused_by_name():
    with pytest.raises(SpecError, match=r"KV cache of a mla layer: field 'block_size': .*got 0"):
        MLA.kv_cache_spec(0, DType.BFLOAT16)


def test_kinds_and_groups_are_in_order_of_first_appearance():
    hybrid = model(SLIDING, SLIDING, FULL, SLIDING, FULL)
    assert hybrid.num_layers == 5
    assert hybrid.kinds == (SLIDING, FULL)
    assert hybrid.groups() == ((SLIDING, (0, 1, 3)), (FULL, (2, 4)))


def test_only_a_model_of_encoder_layers_is_an_encoder():
    assert model(ENCODER, ENCODER.replace(sliding_window=65)).is_encoder
    assert not model(FULL).is_encoder
    assert not model(ENCODER, FULL).is_encoder


def test_a_selection_holds_every_kind_before_a_second_of_any():
    hybrid = model(SLIDING, SLIDING, SLIDING, FULL, SLIDING, CHUNKED)
    assert hybrid.select_layers(1).layers == (SLIDING,)
    assert hybrid.select_layers(2).layers == (SLIDING, FULL)
    assert hybrid.select_layers(3).layers == (SLIDING, FULL, CHUNKED)
    assert hybrid.select_layers(4).layers == (SLIDING, SLIDING, FULL, CHUNKED)
    assert hybrid.select_layers(6) == hybrid


@pytest.mark.parametrize("count", [-1, 0, 3])
def test_a_selection_outside_the_model_is_refused(count):
    with pytest.raises(SpecError) as caught:
        model(FULL, SLIDING).select_layers(count)
    assert str(caught.value) == f"count must be from 1 to 2 (layers of tiny), got {count}"


layer_lists = st.lists(st.sampled_from(list(ALL.values())), min_size=1, max_size=24)


@given(layers=layer_lists, data=st.data())
def test_a_selection_is_a_subsequence_that_covers_the_kinds_it_has_room_for(layers, data):
    whole = model(*layers)
    count = data.draw(st.integers(1, len(layers)))
    part = whole.select_layers(count)
    assert part.num_layers == count
    remaining = iter(layers)
    assert all(any(layer == other for other in remaining) for layer in part.layers)
    assert part.kinds == whole.kinds[:count]
    assert part.replace(layers=whole.layers) == whole


@given(layers=layer_lists)
def test_groups_cover_every_layer_once(layers):
    whole = model(*layers)
    placed = {index: layer for layer, indices in whole.groups() for index in indices}
    assert [placed[index] for index in range(len(layers))] == layers
    assert tuple(layer for layer, _ in whole.groups()) == whole.kinds


@given(layers=layer_lists)
def test_a_model_goes_to_json_and_back_unchanged(layers):
    whole = model(*layers, dtype="half")
    again = ModelGeometry.model_validate_json(whole.model_dump_json())
    assert again == whole
    assert hash(again) == hash(whole)


def test_the_json_schema_describes_every_field():
    schema = ModelGeometry.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {
        "name",
        "architecture",
        "hidden_size",
        "max_position_embeddings",
        "layers",
    }
    layer = schema["$defs"]["LayerGeometry"]
    assert set(layer["properties"]) == set(LayerGeometry.model_fields)
    assert set(layer["required"]) == {"kind", "num_heads", "num_kv_heads", "head_size", "scale"}
    assert "before the softmax" in layer["properties"]["scale"]["description"]
    assert schema["$defs"]["LayerKind"]["enum"] == [kind.value for kind in LayerKind]
    json.dumps(schema)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int64"])
def test_a_model_computes_in_floats_of_16_bits_or_more(dtype):
    with pytest.raises(ValueError, match="a model computes in float16, bfloat16, float32"):
        model(FULL, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bf16", "float32", "float64"])
def test_model_dtypes_are_taken(dtype):
    assert model(FULL, dtype=dtype).dtype is DType.parse(dtype)


def test_a_model_has_layers_and_a_name():
    with pytest.raises(ValueError, match="at least 1 item"):
        model()
    with pytest.raises(ValueError, match="at least 1 character"):
        model(FULL, name="")
