"""The longest sequence that a config allows: scaled rotary positions, rows of padding."""

import pytest

from tests.specs.hf_samples import read

YARN = {"rope_type": "yarn", "factor": 4.0}
TRAINED = {"original_max_position_embeddings": 32768}


def longest(model_type: str, positions: int, **fields: object) -> int:
    """Tokens of the longest sequence of a model whose file says ``positions``."""
    return read(model_type, max_position_embeddings=positions, **fields).max_position_embeddings


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("positions", "rope", "expected"),
    [
        # Qwen advises to keep the trained length in the file.
        (32768, {**YARN, **TRAINED}, 131072),
        (40960, {**YARN, **TRAINED}, 131072),
        (32768, {"type": "yarn", "factor": 4.0}, 131072),
        # The files of DeepSeek and gpt-oss already hold the product.
        (131072, {**YARN, **TRAINED}, 131072),
        (262144, {**YARN, **TRAINED}, 262144),
        (4096, {"type": "linear", "factor": 2.0}, 8192),
        (4096, {"type": "dynamic", "factor": 2.5}, 10240),
        (4096, {"type": "dynamic", "alpha": 1000.0}, 4096),
        (131072, {"rope_type": "llama3", "factor": 8.0, **TRAINED}, 131072),
        (131072, {"type": "longrope", "factor": 32.0}, 131072),
        (131072, {"type": "su", "factor": 32.0}, 131072),
        (32768, {"type": "mrope", "mrope_section": [16, 24, 24]}, 32768),
        (32768, {"rope_type": "default", "factor": 4.0}, 32768),
        (32768, {"rope_type": "linear", "factor": None}, 32768),
        (32768, {"rope_theta": 10000.0}, 32768),
        (32768, None, 32768),
    ],
)
def test_scaled_positions_lengthen_sequences(field, positions, rope, expected):
    assert longest("qwen3", positions, **{field: rope}) == expected


def test_scaling_by_type_of_layer_is_that_of_full_layers():
    linear, default = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "default"}
    both = {"full_attention": linear, "sliding_attention": default}
    assert longest("gpt_oss", 4096, rope_parameters=both) == 32768
    assert longest("gpt_oss", 4096, rope_parameters={"sliding_attention": linear}) == 4096
    assert longest("gpt_oss", 4096, rope_parameters={**both, "full_attention": None}) == 4096


def test_files_of_gemma_3_and_phi_3_give_the_scaled_length():
    linear = {"rope_type": "linear", "factor": 8.0}
    assert longest("gemma3", 131072, rope_scaling=linear) == 131072
    # Phi-3's older files say "yarn" for the type that is now LongRoPE.
    assert longest("phi3", 131072, rope_scaling={"type": "yarn", "factor": 4.0}) == 131072


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta"])
def test_roberta_counts_the_rows_of_padding(model_type):
    assert longest(model_type, 514) == 512
    assert longest(model_type, 514, pad_token_id=None) == 512
    assert longest(model_type, 514, pad_token_id=0) == 513
    assert longest(model_type, 8194, position_embedding_type="rotary") == 8192
    assert longest("bert", 512) == 512
