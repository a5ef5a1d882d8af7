"""Greedy tokens of small models are those of Transformers' own eager attention."""

import pytest
import torch

from attn.integrations.transformers import NAME, register
from tests.transformers.model_runs import (
    continuously,
    expected,
    in_one_batch,
    one_by_one,
    prompts,
)
from tests.transformers.small_models import MODELS, make_model

CONTINUOUS = [name for name in MODELS if name != "deepseek_v3"]


def ours(name):
    model = make_model(name)
    model.set_attn_implementation(NAME)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_eagers_tokens(name):
    model = ours(name)
    assert [one_by_one(model, prompt) for prompt in prompts()] == expected(name)


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_no_token(name):
    assert in_one_batch(ours(name), prompts()) == expected(name)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_generate_batch_gives_eagers_tokens(name, packed_steps):
    model = ours(name)
    assert continuously(model, prompts()) == expected(name)
    assert model.config._attn_implementation == NAME
    # The longest prompt comes in chunks, with decodes beside it.
    lens = [step.query_start_loc.diff().tolist() for step in packed_steps]
    assert any(min(step) == 1 and max(step) > 1 for step in lens)
    assert any(step.pages is None for step in packed_steps) == (name not in ("llama", "qwen3"))


@pytest.mark.parametrize("backend", [None, "TRITON_ATTN"])
def test_a_model_that_ran_in_inference_mode_runs_outside_of_it(backend):
    register(backend)
    model, (prompt, *_) = ours("llama"), prompts()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        first = model(ids).logits
    with torch.no_grad():
        second = model(ids).logits
    assert torch.equal(first, second)
    with torch.inference_mode():
        assert torch.equal(first, model(ids).logits)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_generate_batch_by_block_tables(name, packed_steps, block_tables):
    assert continuously(ours(name), prompts()) == expected(name)
    # Models with a window have none.
    assert any(step.block_table is not None for step in packed_steps) == (name == "llama")


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_padding_of_steps_for_graphs_changes_no_token(
    name, block_tables, padded_steps, packed_steps
):
    assert continuously(ours(name), prompts()) == expected(name)
    # Requests of no tokens pad a step.
    assert any((step.query_start_loc.diff() == 0).any() for step in packed_steps)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pages_that_no_kernel_reads_are_gathered(name, packed_steps):
    assert continuously(ours(name), prompts(), page=8) == expected(name)
    assert all(step.pages is None for step in packed_steps)


def test_requests_that_share_a_prefix_share_its_pages():
    first, *_ = prompts((48,))
    given = [[*first, 5], [*first, 9, 9]]
    model = ours("llama")
    wanted = [one_by_one(model, prompt) for prompt in given]
    assert continuously(model, given, step_tokens=64) == wanted


def test_continuous_batching_of_latent_attention_is_refused_in_one_line():
    model = ours("deepseek_v3")
    with pytest.raises(NotImplementedError, match=r"DeepseekV3ForCausalLM.*generate\(\)") as error:
        continuously(model, prompts())
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == NAME


def test_continuous_batching_of_several_head_sizes_is_refused_in_one_line():
    model = ours("llama")
    model.model.layers[1].self_attn = make_model("llama", head_dim=64).model.layers[1].self_attn
    with pytest.raises(NotImplementedError, match=r"this model has 32 and 64") as error:
        continuously(model, prompts())
    assert "\n" not in str(error.value)


def test_other_implementations_are_served_as_before():
    model = make_model("llama")
    model.set_attn_implementation("sdpa")
    assert continuously(model, prompts()) == expected("llama")


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_the_kernels_of_a_gpu_give_the_same_tokens(name, block_tables, padded_steps):
    """The kernels run in Triton's interpreter, which is slow: few prompts, few tokens."""
    register("TRITON_ATTN")
    model = ours(name)
    given = prompts()[:2]
    wanted = [tokens[:2] for tokens in expected(name)[:2]]
    assert [one_by_one(model, prompt, 2) for prompt in given] == wanted
    assert continuously(model, given, 2) == wanted


def test_layers_of_several_head_sizes():
    """Each layer has a builder for its own heads, as in models whose layers differ."""
    from transformers import DynamicCache

    model, wide = make_model("llama"), make_model("llama", head_dim=64)
    layers = [model.model.layers[0].self_attn, wide.model.layers[1].self_attn]
    angles = [part.model.rotary_emb for part in (model, wide)]
    hidden = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))
    results = {}
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        wide.set_attn_implementation(attention)
        cache, states = DynamicCache(), []
        for first, stop in ((0, 1), (1, 2), (2, 3)):
            # One token at a time, whose mask is empty for both.
            new, positions = hidden[:, first:stop], torch.arange(first, stop)[None]
            for layer, angle in zip(layers, angles, strict=True):
                with torch.no_grad():
                    new, _ = layer(new, angle(new, positions), None, cache)
            states.append(new)
        results[attention] = torch.cat(states, 1)
    assert (results[NAME] - results["eager"]).abs().max() < 1e-4 * results["eager"].abs().max()
