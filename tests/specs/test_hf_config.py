"""Reading model geometries: bundled models, files, every refusal."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specs.base import SpecError
from specs.dtypes import DType
from specs.hf_config import bundled_model_names, load_model_geometry
from specs.hf_families import FAMILIES, NESTED
from specs.model import IndexerGeometry, LayerKind, MLAGeometry
from tests.specs.hf_samples import BASE, INDEX, LATENT, attention_part, config, read

F, W = LayerKind.FULL, LayerKind.SLIDING_WINDOW


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    """Files are read as they are where transformers is installed too."""
    monkeypatch.setattr("specs.hf_config.declared_defaults", lambda model_type: {})


def refusal(data: object, tmp_path: Path) -> str:
    """The message that a file with ``data`` is refused with, less the file's path."""
    path = tmp_path / "bad.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(SpecError) as caught:
        load_model_geometry(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def test_the_bundled_models_are_these():
    assert bundled_model_names() == (
        "deepseek-v3",
        "deepseek-v3.2",
        "gemma-3-4b",
        "gemma-4-31b",
        "glm-5.2",
        "gpt-oss-20b",
        "kimi-k2.5",
        "llama-3.1-8b",
        "llama-3.2-1b",
        "mimo-v2-flash",
        "qwen3-8b",
        "qwen3-next-80b",
    )


DENSE_FACTS = [
    # name, architecture, hidden, max positions, layers, heads, kv heads, head size
    ("llama-3.1-8b", "LlamaForCausalLM", 4096, 131072, 32, 32, 8, 128),
    ("llama-3.2-1b", "LlamaForCausalLM", 2048, 131072, 16, 32, 8, 64),
    ("qwen3-8b", "Qwen3ForCausalLM", 4096, 40960, 36, 32, 8, 128),
    ("gemma-3-4b", "Gemma3ForConditionalGeneration", 2560, 131072, 34, 8, 4, 256),
    ("gpt-oss-20b", "GptOssForCausalLM", 2880, 131072, 24, 64, 8, 64),
    ("deepseek-v3", "DeepseekV3ForCausalLM", 7168, 163840, 61, 128, 1, 192),
    ("deepseek-v3.2", "DeepseekV32ForCausalLM", 7168, 163840, 61, 128, 1, 192),
    ("glm-5.2", "GlmMoeDsaForCausalLM", 6144, 1048576, 78, 64, 1, 256),
    ("kimi-k2.5", "KimiK25ForConditionalGeneration", 7168, 262144, 61, 64, 1, 192),
    ("qwen3-next-80b", "Qwen3NextForCausalLM", 2048, 262144, 12, 16, 2, 256),
]
VARIED_FACTS = [
    # name, architecture, hidden, max positions, and per kind: layers, window, heads, kv heads,
    # key and value head size, sinks
    (
        *("gemma-4-31b", "Gemma4ForConditionalGeneration", 5376, 262144),
        (50, 1024, 32, 16, 256, 256, False),
        (10, None, 32, 4, 512, 512, False),
    ),
    (
        *("mimo-v2-flash", "MiMoV2FlashForCausalLM", 4096, 262144),
        (9, None, 64, 4, 192, 128, False),
        (39, 129, 64, 8, 192, 128, True),
    ),
]


@pytest.mark.parametrize("facts", DENSE_FACTS, ids=lambda facts: facts[0])
def test_a_bundled_model_has_its_published_sizes(facts):
    name, architecture, hidden_size, positions, layers, *heads = facts
    model = load_model_geometry(name)
    assert (model.name, model.architecture, model.dtype) == (name, architecture, DType.BFLOAT16)
    assert (model.hidden_size, model.max_position_embeddings) == (hidden_size, positions)
    assert model.num_layers == layers
    for layer in model.kinds:
        assert [layer.num_heads, layer.num_kv_heads, layer.head_size] == heads


@pytest.mark.parametrize("facts", VARIED_FACTS, ids=lambda facts: facts[0])
def test_a_bundled_model_with_heads_by_layer_has_its_published_sizes(facts):
    name, architecture, hidden_size, positions, *expected = facts
    model = load_model_geometry(name)
    assert (model.name, model.architecture, model.dtype) == (name, architecture, DType.BFLOAT16)
    assert (model.hidden_size, model.max_position_embeddings) == (hidden_size, positions)
    assert expected == [
        (
            *(len(indices), layer.sliding_window, layer.num_heads, layer.num_kv_heads),
            *(layer.head_size, layer.v_size, layer.has_sinks),
        )
        for layer, indices in model.groups()
    ]


def test_every_bundled_model_has_its_facts_tested():
    assert {facts[0] for facts in DENSE_FACTS + VARIED_FACTS} == set(bundled_model_names())


def test_glm_5_2_has_21_indexers_in_78_layers():
    model = load_model_geometry("glm-5.2")
    (own, at), (shared, _) = model.groups()
    assert at == (0, 1, *range(2, 75, 4))
    assert len(at) == 21
    assert own.indexer == IndexerGeometry(index_topk=2048, index_n_heads=32, index_head_dim=128)
    assert (shared.indexer, shared.index_topk) == (None, 2048)
    assert [model.list_maker(index) for index in (1, 3, 5, 6, 77)] == [None, 2, 2, None, 74]


def test_qwen3_next_80b_attends_in_every_fourth_layer():
    model = load_model_geometry("qwen3-next-80b")
    (other,) = model.other_layers
    assert other.name == "linear_attention"
    assert other.indices == tuple(index for index in range(48) if index % 4 != 3)


def test_kimi_k2_5_is_scaled_for_yarn():
    (layer,) = load_model_geometry("kimi-k2.5").kinds
    # 192^-0.5 * (0.1 ln 64 + 1)^2
    assert layer.scale == pytest.approx(0.14467962580268923, rel=1e-15)


def test_a_token_of_glm_5_2_takes_1152_bytes_in_every_layer_and_an_index_row_in_21():
    model = load_model_geometry("glm-5.2")
    for layer in model.kinds:
        assert layer.kv_cache_spec(64, DType.BFLOAT16).page_size_bytes == 64 * 1152


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b"])
def test_a_plain_bundled_model_is_full_attention_throughout(name):
    (layer,) = load_model_geometry(name).kinds
    assert layer.kind is F
    assert layer.scale == layer.head_size**-0.5


def test_gemma_3_4b_has_one_full_layer_in_six():
    model = load_model_geometry("gemma-3-4b")
    (sliding, at), (full, full_at) = model.groups()
    assert (sliding.kind, sliding.sliding_window, full.kind) == (W, 1024, F)
    assert full_at == (5, 11, 17, 23, 29)
    assert len(at) == 29
    assert sliding.scale == full.scale == 1 / 16
    assert sliding.logits_soft_cap is None


def test_gpt_oss_20b_alternates_from_sliding_and_has_sinks_everywhere():
    model = load_model_geometry("gpt-oss-20b")
    (sliding, at), (full, full_at) = model.groups()
    assert (sliding.kind, sliding.sliding_window, full.kind) == (W, 128, F)
    assert (at, full_at) == (tuple(range(0, 24, 2)), tuple(range(1, 24, 2)))
    assert sliding.has_sinks
    assert full.has_sinks
    assert sliding.scale == 1 / 8


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_a_deepseek_model_is_latent_and_scaled_for_yarn(name):
    (layer,) = load_model_geometry(name).kinds
    assert layer.mla == MLAGeometry(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    assert layer.v_size == 128
    # 192^-0.5 * (0.1 ln 40 + 1)^2
    assert layer.scale == pytest.approx(0.1352337788608801, rel=1e-15)


def test_only_deepseek_v3_2_is_sparse():
    (dense,) = load_model_geometry("deepseek-v3").kinds
    (sparse,) = load_model_geometry("deepseek-v3.2").kinds
    assert (dense.kind, dense.indexer) == (LayerKind.MLA, None)
    assert sparse.kind is LayerKind.SPARSE_MLA
    assert sparse.indexer == IndexerGeometry(index_topk=2048, index_n_heads=64, index_head_dim=128)
    assert sparse.replace(kind=LayerKind.MLA, indexer=None) == dense


def test_a_token_of_deepseek_v3_takes_1152_bytes_a_layer():
    (layer,) = load_model_geometry("deepseek-v3").kinds
    assert (
        layer.kv_cache_spec(64, DType.BFLOAT16, tensor_parallel_size=8).page_size_bytes == 64 * 1152
    )


@pytest.mark.parametrize("name", bundled_model_names())
def test_a_bundled_model_survives_a_round_trip_through_our_own_json(name, tmp_path):
    model = load_model_geometry(name)
    path = tmp_path / "own.json"
    path.write_text(model.model_dump_json(indent=2))
    assert load_model_geometry(str(path)) == model


def test_a_file_is_named_after_itself_and_a_config_after_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "my-model"
    folder.mkdir()
    text = json.dumps(config("llama"))
    for name in ("config.json", "other.json"):
        (folder / name).write_text(text)
    assert load_model_geometry(folder).name == "my-model"
    assert load_model_geometry(folder / "config.json").name == "my-model"
    assert load_model_geometry(str(folder / "other.json")).name == "other"
    monkeypatch.chdir(folder)
    assert load_model_geometry("config.json").name == "my-model"


def test_a_bundled_name_wins_over_a_file_and_a_path_does_not_name_a_bundled_model(
    tmp_path, monkeypatch
):
    (tmp_path / "qwen3-8b").write_text("not JSON")
    monkeypatch.chdir(tmp_path)
    assert load_model_geometry("qwen3-8b").num_layers == 36
    with pytest.raises(SpecError, match="qwen3-8b: not JSON"):
        load_model_geometry(Path("qwen3-8b"))


@pytest.mark.parametrize("source", ["llama-9", "meta-llama/Llama-9", Path("none/config.json")])
def test_an_unknown_name_or_missing_file_is_refused_with_the_bundled_names(source):
    with pytest.raises(SpecError) as caught:
        load_model_geometry(source)
    message = str(caught.value)
    assert message.startswith(f"{source}: neither an existing file nor a bundled model; ")
    assert message.endswith(", ".join(bundled_model_names()))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(SpecError, match="neither an existing file"):
        load_model_geometry(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "model.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError) as caught:
        load_model_geometry(path)
    assert str(caught.value).startswith(f"{path}: cannot be read as text: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            '{\n  "model_type": "llama",\n  oops\n}',
            ": not JSON: Expecting property name enclosed in double quotes at line 3, column 3",
        ),
        ("[1, 2]", ": expected a JSON object, got list"),
        ("3", ": expected a JSON object, got int"),
        (
            {"name": "x"},
            ": field 'model_type': missing; expected a Hugging Face config.json "
            "(with 'model_type') or a ModelGeometry (with 'layers')",
        ),
        (
            {"model_type": ["llama"], **BASE},
            f": field 'model_type': got ['llama']; known are {', '.join(sorted(FAMILIES))}",
        ),
        (
            {"architectures": ["X"], **BASE},
            f": field 'model_type': missing; known are {', '.join(sorted(FAMILIES))}",
        ),
        (
            config("llama", architectures="X"),
            ": field 'architectures': expected a list of names, got 'X'",
        ),
        (
            config("llama", architectures=[1]),
            ": field 'architectures': expected a list of names, got [1]",
        ),
        (
            {"model_type": "gemma3", **BASE},
            ": field 'text_config': expected an object, got None",
        ),
        (
            config("llama4", head_dim="x"),
            " (text_config): field 'head_dim': Input should be a valid integer; got 'x'",
        ),
        (
            config("llama", num_attention_heads="abc"),
            ": field 'num_attention_heads': Input should be a valid integer; got 'abc'",
        ),
        (
            config("llama", num_attention_heads="8"),
            ": field 'num_attention_heads': Input should be a valid integer; got '8'",
        ),
        (
            config("llama", num_hidden_layers=True),
            ": field 'num_hidden_layers': Input should be a valid integer; got True",
        ),
        (
            config("llama", hidden_size=None),
            ": field 'hidden_size': Input should be a valid integer; got None",
        ),
        (
            config("llama", hidden_size=0),
            ": field 'hidden_size': Input should be greater than 0; got 0",
        ),
        (
            config("llama", num_attention_heads=30, num_key_value_heads=8),
            ": field 'num_key_value_heads': Value error, must divide num_attention_heads (30); "
            "got 8",
        ),
        (
            config("gemma2", query_pre_attn_scalar="wide"),
            ": field 'query_pre_attn_scalar': Input should be a valid number; got 'wide'",
        ),
        (
            config("llama", num_hidden_layers=2, layer_types=["full_attention", "mamba"]),
            ": field 'layer_types': Value error, entry 1 is 'mamba', expected one of "
            "full_attention, sliding_attention; got ['full_attention', 'mamba']",
        ),
        (
            config("gpt_oss", layer_types=["full_attention"]),
            ": field 'layer_types': Value error, has 1 entries, expected num_hidden_layers (6); "
            "got ['full_attention']",
        ),
        (
            config("gpt_oss", layer_types="full_attention"),
            ": field 'layer_types': Input should be a valid list; got 'full_attention'",
        ),
        (
            config("llama", num_hidden_layers=1, layer_types=["sliding_attention"]),
            ": field 'sliding_window': Value error, a layer of kind 'sliding_window' needs it; "
            "got None",
        ),
        (
            config("llama4_text", no_rope_layers=[1, 0]),
            ": field 'no_rope_layers': Value error, has 2 entries, expected num_hidden_layers (6); "
            "got [1, 0]",
        ),
        (
            config("deepseek_v3", rope_scaling={"type": "yarn", "factor": "40"}),
            ": field 'rope_scaling.factor': Input should be a valid number; got '40'",
        ),
        (
            config("bert", is_decoder=True),
            ": field 'is_decoder': Input should be False; got True",
        ),
    ],
)
def test_a_bad_file_is_refused_with_file_field_value_and_what_is_allowed(data, message, tmp_path):
    assert refusal(data, tmp_path) == message


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_an_unknown_dtype_is_refused_with_the_dtypes(field, tmp_path):
    message = refusal(config("llama", **{field: "float7"}), tmp_path)
    assert message.startswith(
        f": field '{field}': unknown dtype 'float7'; expected one of float64,"
    )


def test_a_dtype_that_no_model_computes_in_is_refused(tmp_path):
    message = refusal(config("llama", torch_dtype="int8"), tmp_path)
    assert message.startswith(
        ": field 'dtype': Value error, a model computes in float16, bfloat16,"
    )


def needed_fields() -> list[tuple[str, str]]:
    """Each family with each of its fields that a file must give."""
    return [
        (model_type, name)
        for model_type, family in sorted(FAMILIES.items())
        for name, field in family.model_fields.items()
        if field.is_required() and family.names_of(name) == (name,)
        # A Nemotron-H without a number of layers has as many layers as its list.
        if (model_type, name) != ("nemotron_h", "num_hidden_layers")
    ]


@pytest.mark.parametrize(("model_type", "field"), needed_fields())
def test_a_missing_size_is_refused_by_name(model_type, field, tmp_path):
    data = config(model_type)
    del attention_part(data)[field]
    inside = " (text_config)" if model_type in NESTED else ""
    expected = f"{inside}: field '{field}': missing; this model_type needs it"
    assert refusal(data, tmp_path) == expected


def test_a_missing_size_with_two_names_is_refused_with_both(tmp_path):
    message = refusal({"model_type": "bloom", "n_layer": 2, "n_head": 4}, tmp_path)
    assert message == ": field 'n_embed' or 'hidden_size': missing; this model_type needs it"


def test_the_sizes_that_every_family_needs_are_tested_as_missing():
    tested = set(needed_fields())
    assert {("llama", name) for name in BASE} <= tested
    assert {("glm_moe_dsa", name) for name in (*BASE, *LATENT, *INDEX)} <= tested
    defaulted = ("gemma3", "gemma4", "llama4")
    assert not [name for model_type, name in tested if model_type.startswith(defaulted)]


def own(**changes: object) -> dict[str, object]:
    """A small model in the project's own format."""
    model = read("llama", num_hidden_layers=2, head_dim=64)
    return {**model.model_dump(mode="json"), **changes}


def test_an_unknown_field_of_our_own_format_is_refused(tmp_path):
    message = refusal(own(vocab_size=7), tmp_path)
    assert message == ": field 'vocab_size': Extra inputs are not permitted; got 7"


def test_a_bad_layer_of_our_own_format_is_refused_with_its_index(tmp_path):
    data = own()
    data["layers"][1]["num_kv_heads"] = 3
    message = refusal(data, tmp_path)
    assert message == (
        ": field 'layers.1.num_kv_heads': Value error, must divide num_heads (32); got 3"
    )
    data["layers"][1] = {**data["layers"][0], "window": 7}
    message = refusal(data, tmp_path)
    assert message == ": field 'layers.1.window': Extra inputs are not permitted; got 7"


def test_an_unknown_kind_of_our_own_format_is_refused_with_the_kinds(tmp_path):
    data = own()
    data["layers"][0]["kind"] = "linear"
    message = refusal(data, tmp_path)
    assert message.startswith(": field 'layers.0.kind': Input should be 'full_attention', ")
    assert message.endswith("; got 'linear'")


def test_reading_a_model_imports_no_torch():
    code = (
        "import sys; from specs.hf_config import load_model_geometry; "
        "load_model_geometry('gemma-3-4b'); assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
