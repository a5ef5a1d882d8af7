"""Registration, what is refused, and what importing loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attn.integrations.transformers import NAME, compat, register
from attn.integrations.transformers.masks import padding_mask
from tests.transformers.model_runs import config, prompts
from tests.transformers.small_models import make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    made = make_model("llama")
    made.set_attn_implementation(NAME)
    return made


def line_of(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_importing_the_integration_imports_neither_transformers_nor_torch():
    code = (
        "import json, sys, attn.integrations.transformers as found\n"
        "assert found.register\n"
        "print(json.dumps(sorted(name for name in ('torch', 'transformers', 'triton')"
        " if name in sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []


def test_a_model_can_be_loaded_with_the_name(saved_model):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(saved_model, attn_implementation=NAME)
    assert loaded.config._attn_implementation == NAME


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="unknown attention backend 'FAST'"):
        register("FAST")
    with pytest.raises(ValueError, match="latent layers only"):
        register("TRITON_MLA")


def test_a_version_that_is_not_served_is_refused(monkeypatch):
    monkeypatch.setattr(compat.transformers, "__version__", "5.9.0")
    with pytest.raises(ValueError, match=r"Transformers 5\.17 to 5\.24, this is 5\.9\.0"):
        register()


def test_registering_again_changes_nothing():
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn
    register()
    assert ContinuousBatchingManager.switch_to_cb_friendly_attn is switch


@pytest.mark.parametrize("kind", ["static"])
def test_a_static_cache_is_refused(model, kind):
    settings = config()
    settings.cache_implementation = kind
    with pytest.raises(NotImplementedError, match="static cache") as error:
        model.generate(torch.tensor([prompts()[0]]), generation_config=settings)
    line_of(error)


def test_packed_sequences_are_refused(model):
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad(), pytest.raises(NotImplementedError, match="packed sequences") as error:
        model(torch.tensor([prompts()[0]]), position_ids=positions, use_cache=False)
    line_of(error)


def test_a_mask_of_the_callers_is_refused(model):
    mask = torch.zeros(1, 1, 5, 5)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="mask of padding") as error:
        model(torch.tensor([prompts()[0]]), attention_mask=mask)
    line_of(error)


def test_training_is_refused(model):
    with pytest.raises(NotImplementedError, match="no backward pass") as error:
        model(torch.tensor([prompts()[0]]))
    line_of(error)


def test_a_call_that_is_not_packed_is_refused_while_a_batch_runs(model):
    for part in (model.config, model.model.config):
        part._attn_implementation_internal = compat.CONTINUOUS
    try:
        with torch.no_grad(), pytest.raises(NotImplementedError, match="continuous batch") as error:
            model(torch.tensor([prompts()[0]]))
        line_of(error)
    finally:
        model.set_attn_implementation(NAME)


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks"])
def test_arguments_that_no_kernel_reads_are_refused(name):
    from tests.transformers.attention_calls import Trial

    with pytest.raises(NotImplementedError, match=rf"\({name}\)") as error:
        Trial("refused", arguments={name: torch.zeros(1)}).run()
    line_of(error)


def test_chunked_attention_is_refused_beyond_the_first_chunk():
    class Config:
        attention_chunk_size = 16

    assert padding_mask(1, 16, 16, config=Config) is None
    with pytest.raises(NotImplementedError, match=r"attention_chunk_size \(16\)") as error:
        padding_mask(1, 1, 17, config=Config)
    line_of(error)
