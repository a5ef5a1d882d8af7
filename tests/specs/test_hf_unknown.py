"""Model types that nobody knows, fields that nobody understands, models that nothing serves."""

import pytest

from specs.base import SpecError
from specs.families.fields import ATTENTION_FIELDS
from specs.hf_config import read_hf_config
from specs.hf_families import FAMILIES, MISSING, NESTED
from specs.model import LayerKind, OtherLayers
from tests.specs.hf_samples import BASE, INDEX, LATENT, attention_part, config, kinds, read, windows

F, W, C = LayerKind.FULL, LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_LOCAL
NOTE = (
    "model_type 'new' is not known: its attention is read by the names of its fields, and may do "
    "more than they say"
)


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    """Files are read as they are where transformers is installed too."""
    monkeypatch.setattr("specs.hf_config.declared_defaults", lambda model_type: {})


def refusal(data: dict[str, object]) -> str:
    """The message that a config is refused with."""
    with pytest.raises(SpecError) as caught:
        read_hf_config(data, "tiny", "config.json")
    return str(caught.value)


# -- Types that nobody knows.


def test_an_unknown_type_is_read_by_its_field_names_and_says_so():
    model = read("new", num_key_value_heads=4, head_dim=128, attn_logit_softcapping=30.0)
    assert model.notes == (NOTE,)
    (layer,) = model.kinds
    assert (layer.kind, layer.num_heads, layer.num_kv_heads, layer.head_size) == (F, 32, 4, 128)
    assert (layer.scale, layer.logits_soft_cap) == (128**-0.5, 30.0)


def test_an_unknown_type_may_use_older_names():
    data = {"model_type": "new", "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 512}
    model = read_hf_config({**data, "n_head_kv": 2, "kv_channels": 32}, "tiny", "x")
    (layer,) = model.kinds
    assert (model.hidden_size, model.num_layers, model.max_position_embeddings) == (256, 2, 512)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_size) == (4, 2, 32)


def test_layers_of_an_unknown_type_are_those_that_are_named():
    types = [
        "full_attention",
        "sliding_attention",
        "mamba",
        "chunked_attention",
        "moe",
        "attention",
    ]
    sizes = {"sliding_window": 32, "attention_chunk_size": 64, "sliding_window_pattern": 4}
    model = read("new", layer_types=types, **sizes)
    assert kinds(model) == [F, W, C, F]
    assert windows(model) == [None, 32, None, None]
    assert model.layers[2].attention_chunk_size == 64
    assert model.other_layers == (
        OtherLayers(name="mamba", indices=(2,)),
        OtherLayers(name="moe", indices=(4,)),
    )


@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_size_of_layers_that_are_not_named_is_refused(field):
    message = refusal(config("new", **{field: 32}))
    assert f"field '{field}': Value error, layer_types must name the layers that have it" in message
    assert message.endswith("; got 32")
    assert kinds(read("new", **{field: None})) == [F] * 6


def test_a_window_that_is_switched_off_is_none():
    off = read("new", sliding_window=32, use_sliding_window=False, max_window_layers=3)
    assert kinds(off) == [F] * 6


@pytest.mark.parametrize(
    ("fields", "scale"),
    [({"query_pre_attn_scalar": 144}, 1 / 12), ({"attention_multiplier": 0.5}, 0.5)],
)
def test_the_scale_of_an_unknown_type_may_be_given(fields, scale):
    assert read("new", **fields).layers[0].scale == scale


def test_latent_sizes_make_an_unknown_type_latent():
    latent = read("new", **LATENT)
    assert latent.notes == (NOTE,)
    assert kinds(latent) == [LayerKind.MLA] * 6
    sparse = read("new", **LATENT, **INDEX, index_topk_freq=2)
    shared = [layer.indexer is None for layer in sparse.layers]
    assert shared == [False, False, True, False, True, False]


@pytest.mark.parametrize("field", ["text_config", "llm_config", "language_config"])
def test_an_unknown_type_with_a_known_text_model_is_that_model(field):
    data = {"model_type": "new", "architectures": ["New"], field: config("qwen3_moe")}
    model = read_hf_config(data, "tiny", "x")
    assert model.notes == ("model_type 'new' is not known: its text model 'qwen3_moe' is",)
    assert (model.architecture, model.layers) == ("New", read("qwen3_moe").layers)
    data = {"model_type": "new", field: {**BASE, "model_type": "newer"}}
    assert read_hf_config(data, "tiny", "x").notes == (NOTE.replace("'new'", "'newer'"),)


def test_a_size_that_an_unknown_type_does_not_give_is_named():
    message = refusal({"model_type": "new", "n_layer": 2})
    expected = "config.json: field 'hidden_size' or 'n_embd' or 'n_embed' or 'd_model' or 'dim': "
    assert message.startswith(f"{expected}missing")


# -- Fields that nobody understands.

FOREIGN = {
    "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
    "compress_ratios": [0, 4, 128],
    "sparse_attention_config": {"use_sparse_attention": True},
    "attn_window_size": 128,
    "index_kpool": 4,
    "add_cross_attention": True,
    "num_kv_shared_layers": 2,
    "attention_sinks": True,
}


@pytest.mark.parametrize("field", FOREIGN)
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen2_moe", "gemma3", "deepseek_v3", "new"]
)
def test_a_field_that_changes_attention_and_is_not_understood_is_an_error(model_type, field):
    value = FOREIGN[field]
    inner = NESTED.get(model_type, model_type)
    inside = " (text_config)" if model_type in NESTED else ""
    assert refusal(config(model_type, **{field: value})) == (
        f"config.json{inside}: field '{field}': got {value!r}; it changes attention, and what it "
        f"means for model_type '{inner}' is not known"
    )


def test_qwen_2_5_1m_is_refused_for_its_dual_chunks():
    published = {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    }
    message = refusal(config("qwen2", dual_chunk_attention_config=published))
    assert "field 'dual_chunk_attention_config': got {'chunk_size': 262144," in message


@pytest.mark.parametrize("off", [None, False, 0, "", [], {}])
def test_a_field_that_is_off_changes_nothing(off):
    fields = dict.fromkeys(("compress_ratios", "attention_sinks", "num_kv_shared_layers"), off)
    assert read("llama", **fields) == read("llama")


@pytest.mark.parametrize(
    ("field", "harmless", "harmful"),
    [
        ("is_causal", True, False),
        ("scale_attn_weights", True, False),
        ("position_embedding_type", "rope", "alibi"),
        ("position_embedding_type", "absolute", "relative_key"),
    ],
)
def test_some_fields_ask_for_nothing_special(field, harmless, harmful):
    assert read("llama", **{field: harmless}) == read("llama")
    assert f"field '{field}': got {harmful!r}" in refusal(config("llama", **{field: harmful}))


def test_fields_outside_attention_are_ignored():
    outside = {"attention_bias": True, "final_logit_softcapping": 30.0, "attn_output_gate": True}
    for model_type in ("llama", "new"):
        assert read(model_type, **outside) == read(model_type)


def test_no_attention_field_is_listed_twice():
    assert len(set(ATTENTION_FIELDS)) == len(ATTENTION_FIELDS)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize("field", ["dual_chunk_attention_config", "moba_config", "alibi"])
def test_no_family_overlooks_a_field_that_is_not_its_own(model_type, field):
    data = config(model_type)
    attention_part(data)[field] = {"on": True}
    assert f"field '{field}': got {{'on': True}}; it changes attention" in refusal(data)


# -- Models that nothing serves.


@pytest.mark.parametrize("model_type", sorted(MISSING))
def test_a_model_that_nothing_serves_is_refused_with_what_is_missing(model_type):
    expected = (
        f"field 'model_type': got '{model_type}', whose attention nothing here serves: it "
        f"{MISSING[model_type]}"
    )
    assert refusal({"model_type": model_type, **BASE}) == f"config.json: {expected}"
    nested = {"model_type": "new", "text_config": {"model_type": model_type, **BASE}}
    assert refusal(nested) == f"config.json (text_config): {expected}"


def test_deepseek_v4_and_minimax_m3_are_among_them():
    assert "compressed keys of a second cache" in MISSING["deepseek_v4"]
    assert "blocks of keys that a block indexer picks" in MISSING["minimax_m3"]
    assert not MISSING.keys() & FAMILIES.keys()
