"""Defaults of transformers' config classes, with transformers stood in for."""

import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from specs.base import SpecError
from specs.families.defaults import declared_defaults
from specs.hf_config import read_hf_config
from tests.specs.hf_samples import BASE, config, read


@dataclass
class Declared:
    """A config class as transformers 5 writes it."""

    hidden_size: int = 2048
    num_hidden_layers: int = 6
    num_attention_heads: int = 32
    max_position_embeddings: int = 4096
    num_key_value_heads: int = 4
    sliding_window: int | None = None
    rope_parameters: dict[str, object] = field(default_factory=dict)


class Constructed:
    """A config class as transformers 4 writes it."""

    def __init__(self, hidden_size=2048, num_hidden_layers=6, vocab_size=7, **kwargs):
        raise AssertionError("no config is made")


@pytest.fixture
def transformers(monkeypatch):
    """A transformers that knows ``llama``, ``gemma3_text``, ``new`` and ``older``."""
    auto = types.ModuleType("transformers.models.auto.configuration_auto")
    known = dict.fromkeys(("llama", "gemma3_text", "new"), Declared)
    auto.CONFIG_MAPPING = {**known, "older": Constructed}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for name in ("transformers", "transformers.models", "transformers.models.auto"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, auto.__name__, auto)


@pytest.mark.usefixtures("transformers")
def test_declared_defaults_are_read_and_nothing_is_made():
    assert declared_defaults("llama") == {
        **BASE,
        "num_key_value_heads": 4,
        "sliding_window": None,
    }
    assert declared_defaults("older") == {
        "hidden_size": 2048,
        "num_hidden_layers": 6,
        "vocab_size": 7,
    }
    assert declared_defaults("mamba") == {}


def test_without_transformers_there_are_none(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert declared_defaults("llama") == {}


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("missing", sorted(BASE))
def test_a_size_that_a_file_leaves_out_is_transformers_default_and_is_named(missing):
    data = config("llama")
    del data[missing]
    model = read_hf_config(data, "tiny", "x")
    assert model.notes == (f"not in the file, defaults of transformers: {missing} {BASE[missing]}",)
    assert model.replace(notes=()) == read("llama")


@pytest.mark.usefixtures("transformers")
def test_a_family_keeps_its_own_default():
    model = read("llama")
    assert (model.notes, model.layers[0].num_kv_heads) == ((), 32)


@pytest.mark.usefixtures("transformers")
def test_an_unknown_type_takes_every_default_that_attention_depends_on():
    model = read_hf_config({"model_type": "new"}, "tiny", "x")
    assert model.layers[0].num_kv_heads == 4
    assert model.notes[1] == (
        "not in the file, defaults of transformers: hidden_size 2048, num_hidden_layers 6, "
        "num_attention_heads 32, max_position_embeddings 4096, num_key_value_heads 4"
    )


@pytest.mark.usefixtures("transformers")
def test_a_whole_file_is_read_alike_with_transformers_and_without(monkeypatch):
    whole = {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": None}
    with_it = [read(model_type, **whole) for model_type in ("llama", "gemma3", "new")]
    monkeypatch.setattr("specs.hf_config.declared_defaults", lambda model_type: {})
    assert with_it == [read(model_type, **whole) for model_type in ("llama", "gemma3", "new")]


@pytest.mark.usefixtures("transformers")
def test_a_value_that_is_given_and_wrong_is_not_replaced():
    with pytest.raises(SpecError, match="field 'hidden_size': Input should be a valid integer"):
        read("llama", hidden_size=None)


def test_a_file_with_every_size_loads_no_transformers():
    code = (
        "import sys; from specs.hf_config import bundled_model_names, load_model_geometry; "
        "[load_model_geometry(name) for name in bundled_model_names()]; "
        "assert 'transformers' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
