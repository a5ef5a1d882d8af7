"""Our model families against transformers' config classes, which vLLM brings along.

Both know the fields that a file leaves out, and both work out the type of each layer. They must
agree.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from specs.families.base import Family
from specs.families.defaults import declared_defaults
from specs.hf_config import read_hf_config
from specs.hf_families import FAMILIES, NESTED
from specs.model import LayerKind, ModelGeometry

TYPES = sorted({NESTED.get(model_type, model_type) for model_type in FAMILIES})
UNKNOWN_THERE = {"kimi_k2", "mimo", "mimo_v2", "nemotron-nas"}
"""Model types of checkpoints that bring their own code."""
SIZES = {
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}
OLDER = {"attention": "full_attention", "mamba": "linear_attention"}
"""Names of layer types that transformers renames."""
KINDS = {
    LayerKind.FULL: "full_attention",
    LayerKind.SLIDING_WINDOW: "sliding_attention",
    LayerKind.CHUNKED_LOCAL: "chunked_attention",
    LayerKind.MLA: "full_attention",
    LayerKind.SPARSE_MLA: "indexed_attention",
}


@pytest.fixture(autouse=True)
def without_vllm_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the classes that vLLM registers in transformers when it reads a model."""
    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})


known_there = pytest.mark.parametrize(
    "model_type", [name for name in TYPES if name not in UNKNOWN_THERE]
)


def test_transformers_knows_every_type_but_these() -> None:
    assert {name for name in TYPES if not declared_defaults(name)} == UNKNOWN_THERE


def own_defaults(family: type[Family]) -> dict[str, Any]:
    """The fields of a family that a file may leave out, by every name."""
    return {
        name: field.default
        for declared, field in family.model_fields.items()
        if not field.is_required()
        for name in family.names_of(declared)
    }


@known_there
def test_defaults_of_a_family_are_those_of_transformers(model_type: str) -> None:
    theirs, ours = declared_defaults(model_type), own_defaults(FAMILIES[model_type])
    both = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}


# The list of a Nemotron-H's attention layers is no size.
@pytest.mark.parametrize(
    "model_type", [name for name in TYPES if name not in {*UNKNOWN_THERE, "nemotron_h"}]
)
def test_every_size_that_a_file_must_give_has_a_default_there(model_type: str) -> None:
    model = read_hf_config({"model_type": model_type}, "tiny", "config.json")
    assert model.num_layers > 0


def config_of_theirs(model_type: str) -> Any:
    sizes = dict(SIZES)
    if model_type == "bloom":
        sizes = {"hidden_size": 2048, "n_layer": 12, "n_head": 32}
    if model_type == "nemotron_h":
        sizes["hybrid_override_pattern"] = "M-*EM*M-*EM*"  # type: ignore[assignment]
    return CONFIG_MAPPING[model_type](**sizes)


def types_of(data: dict[str, Any]) -> list[str]:
    """The type of each layer as we read it, in transformers' words."""
    model = read_hf_config(data, "tiny", "config.json")
    named, layers, found = others(model), iter(model.layers), []
    for index in range(model.num_layers + len(named)):
        if index in named:
            found.append(named[index])
            continue
        layer = next(layers)
        encoder = "full_attention" if layer.sliding_window is None else "sliding_attention"
        found.append(KINDS.get(layer.kind, encoder))
    return found


def others(model: ModelGeometry) -> dict[int, str]:
    """Layers that are not attention, by their number, in transformers' words."""
    return {
        index: OLDER.get(other.name, other.name)
        for other in model.other_layers
        for index in other.indices
    }


@known_there
def test_the_layers_of_a_config_are_of_the_types_that_transformers_says(model_type: str) -> None:
    theirs = config_of_theirs(model_type)
    types = getattr(theirs, "layer_types", None)
    if types is None:
        types = ["full_attention"] * 12
        if getattr(theirs, "sliding_window", None) and model_type in ("mistral", "mixtral", "phi3"):
            types = ["sliding_attention"] * 12
    data = {"model_type": model_type, **SIZES}
    if model_type == "nemotron_h":
        data["hybrid_override_pattern"] = "M-*EM*M-*EM*"
    assert types_of(data) == types


@known_there
def test_a_config_that_transformers_wrote_is_read_as_one_that_leaves_all_out(
    model_type: str,
) -> None:
    theirs = config_of_theirs(model_type)
    # vLLM gives a class that it registers for another type that type's name.
    full = {**theirs.to_dict(), "model_type": model_type}
    written = read_hf_config(full, "tiny", "config.json")
    given = {name: value for name, value in theirs.to_dict().items() if name in SIZES}
    short = {"model_type": model_type, **SIZES, **given}
    if model_type == "nemotron_h":
        short["hybrid_override_pattern"] = "M-*EM*M-*EM*"
    read = read_hf_config(short, "tiny", "config.json")
    assert written.layers == read.layers
    assert others(written) == others(read)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 3},
        {"index_topk_pattern": "FSSFSSFFSSSS"},
    ],
)
def test_the_indexers_of_a_schedule_are_where_transformers_has_them(fields: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING["glm_moe_dsa"](**SIZES, **fields)
    model = read_hf_config({"model_type": "glm_moe_dsa", **SIZES, **fields}, "tiny", "config.json")
    ours = ["full" if layer.indexer is not None else "shared" for layer in model.layers]
    assert ours == theirs.indexer_types
