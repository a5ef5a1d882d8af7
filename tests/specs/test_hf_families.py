"""Every Hugging Face family: what its config fields mean for attention."""

import math

import pytest

from specs.dtypes import DType
from specs.hf_config import read_hf_config
from specs.hf_families import FAMILIES
from specs.model import IndexerGeometry, LayerKind, MLAGeometry
from tests.specs.hf_samples import (
    INDEX,
    LATENT,
    LATENT_TYPES,
    SPARSE_TYPES,
    config,
    kinds,
    read,
    windows,
)

YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
MSCALE = 0.1 * math.log(40) + 1.0
F, W, C = LayerKind.FULL, LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_LOCAL


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_family_reads_and_names_itself(model_type):
    model = read(model_type)
    assert (model.name, model.architecture) == ("tiny", model_type)
    others = sum(len(other.indices) for other in model.other_layers)
    assert (model.hidden_size, model.num_layers + others) == (2048, 6)
    images = model_type.startswith("gemma4_unified")
    assert len(model.notes) == images
    assert all(layer.num_heads == 32 for layer in model.layers)


ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_the_dtype_of_a_file_that_gives_none_is_bfloat16_but_float32_for_encoders(model_type):
    expected = DType.FLOAT32 if model_type in ENCODERS else DType.BFLOAT16
    assert read(model_type).dtype is expected
    assert read(model_type).is_encoder is (model_type in ENCODERS)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_has_two_names(field):
    assert read("llama", **{field: "float16"}).dtype is DType.FLOAT16


def test_the_newer_name_of_the_dtype_wins_and_null_means_nothing():
    assert read("llama", dtype="float32", torch_dtype="float16").dtype is DType.FLOAT32
    assert read("llama", dtype=None, torch_dtype="float16").dtype is DType.FLOAT16


def test_a_nested_config_takes_the_dtype_of_the_outer_one_unless_it_gives_its_own():
    outer = {**config("gemma3"), "torch_dtype": "float16"}
    assert read_hf_config(outer, "tiny", "x").dtype is DType.FLOAT16
    inner = {**config("gemma3", dtype="float32"), "torch_dtype": "float16"}
    assert read_hf_config(inner, "tiny", "x").dtype is DType.FLOAT32


def test_the_architecture_is_the_first_one_listed():
    assert read("llama", architectures=["A", "B"]).architecture == "A"
    assert read("llama", architectures=[]).architecture == "llama"


def test_head_size_falls_back_to_hidden_size_over_heads():
    assert read("llama").layers[0].head_size == 64
    assert read("llama", head_dim=None).layers[0].head_size == 64
    assert read("llama", head_dim=128).layers[0].head_size == 128
    assert read("qwen3").layers[0].head_size == 128
    assert read("gpt_oss", head_dim=None).layers[0].head_size == 64


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", 32),
        ("phi3", 32),
        ("mistral", 8),
        ("qwen2", 32),
        ("qwen3", 32),
        ("qwen2_moe", 16),
        ("mixtral", 8),
        ("qwen3_moe", 4),
        ("gemma2", 4),
        ("gemma3_text", 4),
        ("gpt_oss", 8),
        ("llama4_text", 8),
        ("gemma", 16),
        ("gemma4_text", 4),
        ("glm4_moe", 8),
        ("minimax_m2", 8),
        ("mimo", 32),
        ("step3p5", 8),
        ("qwen3_vl_text", 32),
        ("qwen3_vl_moe", 16),
        ("qwen3_next", 2),
        ("qwen3_5_text", 4),
        ("qwen3_5_moe", 2),
        ("nemotron_h", 8),
    ],
)
def test_kv_heads_that_are_not_given_are_the_family_default_and_null_means_all_heads(
    model_type, expected
):
    assert read(model_type).layers[0].num_kv_heads == expected
    assert read(model_type, num_key_value_heads=None).layers[0].num_kv_heads == 32
    assert read(model_type, num_key_value_heads=2).layers[0].num_kv_heads == 2


@pytest.mark.parametrize(
    ("model_type", "default"),
    [("mistral", 4096), ("mixtral", None), ("phi3", None)],
)
def test_one_window_holds_for_all_layers(model_type, default):
    assert windows(read(model_type)) == [default] * 6
    assert windows(read(model_type, sliding_window=77)) == [77] * 6
    for off in (None, 0):
        assert kinds(read(model_type, sliding_window=off)) == [F] * 6


@pytest.mark.parametrize("model_type", ["llama", "gemma", "glm4_moe", "minimax_m2", "qwen3_vl"])
def test_a_left_over_window_means_nothing_where_models_have_none(model_type):
    plain = read(model_type)
    left_over = {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}
    assert read(model_type, **left_over) == plain
    assert windows(plain) == [None] * 6


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("mimo", [F, F, F, F, W, W]),
        ("qwen2", [F, F, F, F, W, W]),
        ("qwen3", [F, F, F, F, W, W]),
        ("qwen2_moe", [W, F, W, F, F, F]),
        ("qwen3_moe", [W] * 6),
    ],
)
def test_qwen_has_a_window_only_when_asked_for(model_type, expected):
    heads = {"num_key_value_heads": 2, "max_window_layers": 4, "sliding_window": 32}
    assert kinds(read(model_type, **heads)) == [F] * 6
    assert kinds(read(model_type, **heads, use_sliding_window=True)) == expected
    off = {**heads, "sliding_window": None}
    assert kinds(read(model_type, **off, use_sliding_window=True)) == [F] * 6


def test_gemma_2_alternates_and_caps_its_logits():
    model = read("gemma2", query_pre_attn_scalar=144)
    assert windows(model) == [4096, None] * 3
    for layer in model.kinds:
        assert (layer.scale, layer.logits_soft_cap, layer.head_size) == (1 / 12, 50.0, 256)
    assert read("gemma2", attn_logit_softcapping=None).layers[0].logits_soft_cap is None


@pytest.mark.parametrize("model_type", ["gemma3", "gemma3_text"])
def test_gemma_3_has_a_full_layer_at_the_end_of_each_period(model_type):
    assert kinds(read(model_type)) == [W] * 5 + [F]
    assert kinds(read(model_type, sliding_window_pattern=2)) == [W, F] * 3
    layer = read(model_type).layers[0]
    assert (layer.sliding_window, layer.scale, layer.logits_soft_cap) == (4096, 1 / 16, None)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("gemma3", (2304, 26, 8, 4, 256, 131072)),
        ("gemma4", (2304, 30, 8, 4, 256, 131072)),
        ("llama4", (5120, 48, 40, 8, 128, 131072)),
    ],
)
def test_an_empty_text_config_means_the_defaults_of_transformers(model_type, sizes):
    model = read_hf_config({"model_type": model_type, "text_config": {}}, "tiny", "x")
    layer = model.layers[0]
    assert sizes == (
        model.hidden_size,
        model.num_layers,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_size,
        model.max_position_embeddings,
    )


def test_a_bidirectional_gemma_3_is_an_encoder_with_half_the_window_to_each_side():
    model = read("gemma3_text", use_bidirectional_attention=True, sliding_window=512)
    assert model.is_encoder
    assert windows(model) == [257] * 5 + [None]


def test_gpt_oss_alternates_and_has_sinks():
    model = read("gpt_oss")
    assert windows(model) == [128, None] * 3
    assert all(layer.has_sinks for layer in model.layers)


@pytest.mark.parametrize("model_type", ["llama4", "llama4_text"])
def test_llama_4_attends_its_chunk_where_positions_are_rotary(model_type):
    assert kinds(read(model_type)) == [C, C, C, F, C, C]
    assert kinds(read(model_type, no_rope_layer_interval=2)) == [C, F] * 3
    assert kinds(read(model_type, no_rope_layers=[])) == [C, C, C, F, C, C]
    assert kinds(read(model_type, no_rope_layers=[0, 1, 1, 0, 1, 1, 0])) == [F, C, C, F, C, C]
    assert kinds(read(model_type, attention_chunk_size=None)) == [F] * 6
    assert read(model_type).layers[0].attention_chunk_size == 8192


@pytest.mark.parametrize("model_type", LATENT_TYPES)
def test_a_latent_family_has_one_kv_head_and_its_latent_sizes(model_type):
    (layer,) = read(model_type, num_key_value_heads=3).kinds
    assert (layer.num_heads, layer.num_kv_heads) == (32, 1)
    assert (layer.head_size, layer.v_size, layer.scale) == (48, 48, 48**-0.5)
    assert layer.mla == MLAGeometry.model_validate(LATENT)
    sparse = model_type in SPARSE_TYPES
    assert layer.kind is (LayerKind.SPARSE_MLA if sparse else LayerKind.MLA)
    assert layer.indexer == (IndexerGeometry.model_validate(INDEX) if sparse else None)


def test_a_latent_query_may_be_uncompressed():
    (layer,) = read("deepseek_v2", q_lora_rank=None).kinds
    assert layer.mla is not None
    assert layer.mla.q_lora_rank is None


@pytest.mark.parametrize(
    ("rope", "mscale"),
    [
        ({"rope_scaling": YARN}, MSCALE),
        ({"rope_scaling": {**YARN, "mscale_all_dim": 0.707}}, 0.0707 * math.log(40) + 1.0),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}}, MSCALE),
        ({"rope_scaling": None, "rope_parameters": YARN}, MSCALE),
        ({"rope_scaling": None}, 1.0),
        ({"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}}, 1.0),
        ({"rope_scaling": {**YARN, "mscale_all_dim": 0}}, 1.0),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, 1.0),
        ({"rope_parameters": {"factor": 40, "mscale_all_dim": 1.0}}, 1.0),
        ({"rope_parameters": {**YARN, "type": "default"}}, 1.0),
    ],
)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm_moe_dsa"])
def test_yarn_scales_attention_where_it_covers_all_elements(model_type, rope, mscale):
    (layer,) = read(model_type, **rope).kinds
    assert layer.scale == pytest.approx(48**-0.5 * mscale**2, rel=1e-15)


def test_modernbert_has_a_global_layer_in_three_and_half_its_window_to_each_side():
    assert windows(read("modernbert")) == [None, 65, 65] * 2
    local = read("modernbert", local_attention=100, global_attn_every_n_layers=2)
    assert windows(local) == [None, 51] * 3


def test_bloom_has_alibi_and_its_own_names():
    published = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16}
    model = read_hf_config(published, "bloom-560m", "x")
    (layer,) = model.kinds
    assert (model.hidden_size, model.num_layers, model.max_position_embeddings) == (1024, 24, 2048)
    assert (layer.num_heads, layer.head_size, layer.use_alibi) == (16, 64, True)
    assert (
        read_hf_config({**published, "seq_length": 4096}, "b", "x").max_position_embeddings == 4096
    )


@pytest.mark.parametrize(
    ("model_type", "local", "expected"),
    [
        ("llama", "sliding_attention", W),
        ("mistral", "sliding_attention", W),
        ("qwen2", "sliding_attention", W),
        ("gemma2", "sliding_attention", W),
        ("gemma3", "sliding_attention", W),
        ("gpt_oss", "sliding_attention", W),
        ("llama4", "chunked_attention", C),
        ("modernbert", "sliding_attention", LayerKind.ENCODER_ONLY),
    ],
)
def test_layer_types_override_the_pattern(model_type, local, expected):
    full = LayerKind.ENCODER_ONLY if model_type == "modernbert" else F
    types = ["full_attention", local, local, "full_attention", local, "full_attention"]
    fields = {"sliding_window": 99, "use_sliding_window": True}
    model = read(model_type, layer_types=types, **fields)
    assert kinds(model) == [full if name == "full_attention" else expected for name in types]
    local_layer = model.layers[1]
    assert (local_layer.sliding_window or local_layer.attention_chunk_size) in (99, 65, 8192)


@pytest.mark.parametrize("name", ["indexed_attention", "deepseek_sparse_attention"])
def test_the_layer_type_of_sparse_layers_has_two_names(name):
    assert read("glm_moe_dsa", layer_types=[name] * 6) == read("glm_moe_dsa")
