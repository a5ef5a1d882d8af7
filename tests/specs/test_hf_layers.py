"""Families whose layers differ in heads, head sizes, windows, lists or caches."""

import pytest

from specs.base import SpecError
from specs.hf_config import read_hf_config
from specs.model import IndexerGeometry, LayerKind
from tests.specs.hf_samples import BASE, INDEX, config, kinds, read, windows

F, W = LayerKind.FULL, LayerKind.SLIDING_WINDOW


def refusal(model_type: str, **fields: object) -> str:
    """The message that a config with these fields is refused with."""
    with pytest.raises(SpecError) as caught:
        read(model_type, **fields)
    return str(caught.value)


# -- Lists of chosen tokens.


def indexers(**fields: object) -> str:
    """A letter for each of six layers: F for an indexer, S for another layer's list."""
    model = read("glm_moe_dsa", **fields)
    own = IndexerGeometry.model_validate(INDEX)
    for layer in model.layers:
        assert layer.kind is LayerKind.SPARSE_MLA
        assert layer.index_topk == 8
        assert layer.indexer in (own, None)
    return "".join("S" if layer.indexer is None else "F" for layer in model.layers)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "FFFFFF"),
        ({"index_topk_freq": 1}, "FFFFFF"),
        ({"index_topk_freq": 2}, "FFSFSF"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSS"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFSS"),
        ({"index_topk_freq": 0}, "FFFFFF"),
        ({"index_topk_pattern": "FSFSSF"}, "FSFSSF"),
        ({"index_topk_pattern": None, "index_topk_freq": 2}, "FFSFSF"),
        ({"indexer_types": ["full", "full", "shared", "full", "shared", "shared"]}, "FFSFSS"),
        ({"indexer_types": ["full"] * 6, "index_topk_pattern": "FSSSSS"}, "FFFFFF"),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_freq": 2}, "FSSSSS"),
    ],
)
def test_layers_without_an_indexer_take_the_last_list(fields, expected):
    assert indexers(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer_types": ["full"] * 5}, "field 'indexer_types': Value error, has 5 entries"),
        (
            {"indexer_types": ["shared"] + ["full"] * 5},
            "field 'indexer_types': Value error, the first layer must be 'full'",
        ),
        ({"indexer_types": ["own"] * 6}, "field 'indexer_types.0': Input should be 'full' or"),
        ({"index_topk_pattern": "FFFFFX"}, "field 'index_topk_pattern.5': Input should be 'full'"),
        ({"index_topk_pattern": "FS"}, "field 'index_topk_pattern': Value error, has 2 entries"),
        (
            {"index_topk_freq": 2, "index_skip_topk_offset": 0},
            "field 'layers': Value error, layer 0 takes a list of 8, and no layer before it",
        ),
    ],
)
def test_a_schedule_of_indexers_that_cannot_be_is_refused(fields, message):
    assert message in refusal("glm_moe_dsa", **fields)


# -- Windows.


@pytest.mark.parametrize("field", ["sliding_window", "interleaved_sliding_window"])
def test_mistral_may_list_its_windows_and_the_list_repeats(field):
    model = read("mistral", **{field: [None, 32, 64, 0]})
    assert windows(model) == [None, 32, 64, None, None, 32]
    assert kinds(model) == [F, W, W, F, F, W]


def test_one_interleaved_window_holds_for_all_layers_and_a_list_wins_over_one_window():
    assert windows(read("mistral", interleaved_sliding_window=48)) == [48] * 6
    both = {"sliding_window": 99, "interleaved_sliding_window": [None, 32]}
    assert windows(read("mistral", **both)) == [None, 32] * 3


@pytest.mark.parametrize(
    ("windows_of_layers", "message"),
    [
        ([], "has no entries, expected at least one window"),
        ([32, "wide"], "Input should be a valid integer; got 'wide'"),
        ([32, -1], "Input should be greater than or equal to 0; got -1"),
    ],
)
def test_a_list_of_windows_that_are_none_is_refused(windows_of_layers, message):
    assert message in refusal("mistral", sliding_window=windows_of_layers)


def test_gemma_1_has_no_layers_with_windows_whatever_is_listed():
    assert "expected one of full_attention" in refusal(
        "gemma", sliding_window=32, layer_types=["sliding_attention"] * 6
    )


def test_gemma_files_call_windows_and_patterns_by_two_names():
    assert read("gemma2", sliding_window_size=99) == read("gemma2")
    assert windows(read("gemma3", _sliding_window_pattern=2)) == [4096, None] * 3


# -- Heads.


def test_gemma_4_has_wide_heads_in_full_layers_and_no_scale():
    model = read("gemma4", num_hidden_layers=7, num_key_value_heads=8)
    assert windows(model) == [512] * 5 + [None] * 2
    window, full = model.kinds
    assert (window.num_kv_heads, window.head_size, window.v_size) == (8, 256, 256)
    assert (full.num_kv_heads, full.head_size, full.v_size) == (8, 512, 512)
    assert (window.scale, full.scale) == (1.0, 1.0)


def test_the_last_layer_of_gemma_4_sees_everything_whatever_is_listed():
    types = ["sliding_attention"] * 6
    assert kinds(read("gemma4_text", layer_types=types)) == [W] * 5 + [F]


def test_k_and_v_of_one_projection_are_two_cached_rows_of_fewer_heads():
    fields = {"num_key_value_heads": 8, "num_global_key_value_heads": 2}
    _, joined = read("gemma4", **fields, attention_k_eq_v=True).kinds
    assert (joined.num_kv_heads, joined.head_size, joined.v_size) == (2, 512, 512)
    spec = joined.kv_cache_spec(16, "bfloat16")
    assert spec.page_size_bytes == 16 * 2 * (512 + 512) * 2
    _, apart = read("gemma4", **fields).kinds
    assert apart.num_kv_heads == 8


def test_the_last_layers_of_gemma_4_may_share_the_caches_before_them():
    model = read("gemma4", num_hidden_layers=12, num_kv_shared_layers=6)
    assert [layer.shares_kv for layer in model.layers] == [False] * 6 + [True] * 6
    assert [layer.replace(shares_kv=False) for layer in model.layers[6:]] == list(model.layers[:6])
    assert "layer 0 shares a cache, and no equal layer before it stores one" in refusal(
        "gemma4", num_kv_shared_layers=6
    )


def test_images_of_gemma_4_are_told_and_an_encoder_is_refused():
    (note,) = read("gemma4", use_bidirectional_attention="vision").notes
    assert note.startswith("tokens of an image see each other both ways")
    assert "field 'use_bidirectional_attention': Input should be 'vision'; got 'all'" in refusal(
        "gemma4", use_bidirectional_attention="all"
    )


MIMO = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0, 1, 1],
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 96,
    "swa_v_head_dim": 64,
}


@pytest.mark.parametrize("model_type", ["mimo_v2", "mimo_v2_flash"])
def test_mimo_v2_has_heads_and_sinks_by_kind_of_layer(model_type):
    model = read(model_type, **MIMO)
    assert kinds(model) == [F, W, W, F, W, W]
    full, window = model.kinds
    assert (full.num_heads, full.num_kv_heads, full.head_size, full.v_size) == (32, 4, 192, 128)
    assert (window.num_heads, window.num_kv_heads) == (64, 16)
    assert (window.head_size, window.v_size, window.scale) == (96, 64, 96**-0.5)
    # A token sees 128 keys before its own.
    assert window.sliding_window == 129
    assert (full.has_sinks, window.has_sinks) == (False, True)


def test_mimo_v2_without_its_makers_fields_is_what_transformers_says():
    model = read("mimo_v2_flash", num_hidden_layers=7)
    assert windows(model) == [None, *[129] * 4, None, 129]
    full, window = model.kinds
    assert (full.num_kv_heads, window.num_kv_heads) == (4, 8)
    assert (window.head_size, window.v_size) == (192, 128)
    assert [layer.has_sinks for layer in model.kinds] == [False, True]
    sinks = {"add_swa_attention_sink_bias": False, "add_full_attention_sink_bias": True}
    assert [layer.has_sinks for layer in read("mimo_v2", **sinks).kinds] == [True, False]


def test_flags_of_mimo_v2_are_one_for_each_layer():
    message = refusal("mimo_v2", hybrid_layer_pattern=[0, 1])
    assert "field 'hybrid_layer_pattern': Value error, has 2 entries" in message
    message = refusal("mimo_v2", hybrid_layer_pattern=[0, 1, 2, 0, 1, 1])
    assert "field 'hybrid_layer_pattern.2': Input should be 0 or 1; got 2" in message


STEP = {
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "sliding_window": 512,
}


@pytest.mark.parametrize("model_type", ["step3p5", "step3p7"])
@pytest.mark.parametrize(
    "heads",
    [
        {"num_sliding_attention_heads": 96},
        {
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 96,
                "num_attention_groups": 8,
                "head_dim": 128,
            }
        },
    ],
)
def test_step_3_5_has_more_heads_in_window_layers(model_type, heads):
    types = ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"]
    for drafts in (0, 2):
        listed = types + ["full_attention"] * drafts
        fields = {**STEP, **heads, "layer_types": listed, "num_nextn_predict_layers": drafts}
        model = read(model_type, **fields)
        assert windows(model) == [None, 512, 512, 512, None, 512]
        full, window = model.kinds
        assert (full.num_heads, full.num_kv_heads, full.head_size) == (64, 8, 128)
        assert (window.num_heads, window.num_kv_heads, window.head_size) == (96, 8, 128)


def test_step_3_5_serves_one_kind_of_attention():
    assert "field 'att_impl_type': Input should be 'GQA'; got 'MFA'" in refusal(
        "step3p5", att_impl_type="MFA"
    )


def test_a_searched_llama_has_kv_heads_by_block_and_blocks_without_attention():
    blocks = [
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"n_heads_in_group": None, "no_op": True}},
        {"attention": {"n_heads_in_group": None, "replace_with_linear": True}},
        {"attention": {"n_heads_in_group": 16, "window_length": None, "sparsify": None}},
        {"attention": {"n_heads_in_group": 8}},
        {"attention": {"no_op": True}},
    ]
    model = read("nemotron-nas", block_configs=blocks, num_key_value_heads=None)
    assert [layer.num_kv_heads for layer in model.layers] == [4, 2, 4]
    assert [layer.num_heads for layer in model.layers] == [32] * 3
    assert [(o.name, o.indices) for o in model.other_layers] == [
        ("no_op", (1, 5)),
        ("linear", (2,)),
    ]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({}, "block 0 has attention and no n_heads_in_group"),
        (
            {"n_heads_in_group": 5},
            "n_heads_in_group (5) of block 0 must divide num_attention_heads",
        ),
        (
            {"n_heads_in_group": 8, "window_length": 4096},
            "field 'block_configs.0.attention.window_length': Input should be None; got 4096",
        ),
        (
            {"n_heads_in_group": 8, "unshifted_sink": True},
            "field 'block_configs.0.attention.unshifted_sink': Input should be False; got True",
        ),
    ],
)
def test_a_block_that_cannot_be_read_is_refused(attention, message):
    assert message in refusal("nemotron-nas", block_configs=[{"attention": attention}] * 6)


def test_minimax_m2_lists_softmax_layers_only():
    assert read("minimax_m2", attn_type_list=[1] * 6) == read("minimax_m2")
    assert "field 'attn_type_list.1': Input should be 1; got 0" in refusal(
        "minimax_m2", attn_type_list=[1, 0, 1, 1, 1, 1]
    )


def test_single_layers_may_have_sizes_of_their_own():
    sizes = {"1": {"head_dim": 128, "num_key_value_heads": 4}, "5": {"num_attention_heads": 64}}
    model = read("llama", num_key_value_heads=8, per_layer_config=sizes)
    assert [layer.head_size for layer in model.layers] == [64, 128, 64, 64, 64, 64]
    assert [layer.num_kv_heads for layer in model.layers] == [8, 4, 8, 8, 8, 8]
    assert [layer.num_heads for layer in model.layers] == [32, 32, 32, 32, 32, 64]
    assert [layer.scale for layer in model.layers[:2]] == [64**-0.5, 128**-0.5]
    message = refusal("llama", per_layer_config={"1": {"sinks": True}})
    assert "field 'per_layer_config.1.sinks': Extra inputs are not permitted; got True" in message


# -- Layers that are not attention.


@pytest.mark.parametrize(
    "model_type", ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]
)
def test_qwen_attends_in_every_fourth_layer(model_type):
    model = read(model_type, num_hidden_layers=8)
    (layer,) = model.kinds
    assert (model.num_layers, layer.kind, layer.num_heads, layer.head_size) == (2, F, 32, 256)
    assert [(o.name, o.indices) for o in model.other_layers] == [
        ("linear_attention", (0, 1, 2, 4, 5, 6))
    ]
    every_second = read(model_type, num_hidden_layers=8, full_attention_interval=2)
    assert every_second.num_layers == 4
    types = ["full_attention"] + ["linear_attention"] * 5
    assert read(model_type, layer_types=types).other_layers[0].indices == (1, 2, 3, 4, 5)


def test_nemotron_h_says_what_each_layer_is_with_a_letter_or_a_word():
    model = read("nemotron_h", hybrid_override_pattern="M-*EM*")
    (layer,) = model.kinds
    assert (model.num_layers, layer.num_kv_heads, layer.head_size) == (2, 8, 128)
    expected = [("mamba", (0, 4)), ("mlp", (1,)), ("moe", (3,))]
    assert [(other.name, other.indices) for other in model.other_layers] == expected
    words = ["mamba", "mlp", "attention", "moe", "mamba", "attention"]
    listed = read("nemotron_h", hybrid_override_pattern=None, layers_block_type=words)
    assert listed == model
    unnumbered = config("nemotron_h")
    del unnumbered["num_hidden_layers"]
    assert read_hf_config(unnumbered, "tiny", "config.json") == model


@pytest.mark.parametrize(
    ("letters", "message"),
    [
        (None, "a file without layers_block_type needs it; got None"),
        ("M-*", "has 3 entries, expected num_hidden_layers (6); got 'M-*'"),
        ("M-*EMX", "letter 5 is 'X', expected one of M, E, -, *; got 'M-*EMX'"),
    ],
)
def test_a_pattern_of_nemotron_h_that_is_none_is_refused(letters, message):
    refused = refusal("nemotron_h", hybrid_override_pattern=letters)
    assert f"field 'hybrid_override_pattern': Value error, {message}" in refused


@pytest.mark.parametrize("model_type", ["kimi_linear", "kimi_k3"])
def test_kimi_linear_counts_its_layers_from_one(model_type):
    lists = {"full_attn_layers": [4, 6], "kda_layers": [1, 2, 3, 5], "num_heads": 32}
    model = read(model_type, linear_attn_config=lists, mla_use_nope=True)
    (layer,) = model.kinds
    assert (model.num_layers, layer.kind, layer.head_size) == (2, LayerKind.MLA, 48)
    assert [(o.name, o.indices) for o in model.other_layers] == [("linear_attention", (0, 1, 2, 4))]
    for wrong in ([4], [4, 5, 6], [4, 7]):
        message = refusal(model_type, linear_attn_config={**lists, "full_attn_layers": wrong})
        assert "full_attn_layers and kda_layers must name layers 1 to 6, each once" in message


def test_kimi_linear_may_call_its_longest_sequence_otherwise():
    data = config("kimi_linear", model_max_length=77)
    del data["max_position_embeddings"]
    assert read_hf_config(data, "tiny", "config.json").max_position_embeddings == 77


def test_a_text_model_is_read_by_its_own_type():
    inner = config("kimi_linear", num_hidden_layers=5)
    assert (
        read_hf_config({"model_type": "kimi_k3", "text_config": inner}, "tiny", "x").num_layers == 1
    )
    llama = {"model_type": "gemma3", "text_config": {"model_type": "llama", **BASE}}
    assert kinds(read_hf_config(llama, "tiny", "x")) == [F] * 6


# -- Encoders.


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta"])
def test_positions_of_an_encoder_may_be_symmetric_alibi(model_type):
    (layer,) = read(model_type, position_embedding_type="alibi").kinds
    assert layer.kind is LayerKind.ENCODER_ONLY
    assert layer.use_alibi
    assert layer.selector_config("float32").use_alibi_symmetric
    for outside in ("absolute", "rope", "rotary", None):
        assert read(model_type, position_embedding_type=outside) == read(model_type)
    assert "Input should be 'absolute', 'rope', 'rotary' or 'alibi'; got 'relative_key'" in refusal(
        model_type, position_embedding_type="relative_key"
    )
