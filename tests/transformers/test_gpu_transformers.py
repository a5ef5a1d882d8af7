"""On a GPU: the models' greedy tokens by TRITON_ATTN, with CUDA graphs where they are offered."""

import pytest

from attn.integrations.transformers import NAME
from tests.transformers.model_runs import continuously, in_one_batch, one_by_one, prompts
from tests.transformers.small_models import MODELS, make_model

pytestmark = pytest.mark.gpu
CONTINUOUS = [name for name in MODELS if name != "deepseek_v3"]


def pair(name):
    """The model in fp32, whose tokens do not depend on rounding, and eager's tokens."""
    model = make_model(name).cuda()
    model.set_attn_implementation("eager")
    wanted = [one_by_one(model, prompt) for prompt in prompts()]
    model.set_attn_implementation(NAME)
    return model, wanted


@pytest.mark.parametrize("name", MODELS)
def test_generate_gives_eagers_tokens(name):
    model, wanted = pair(name)
    assert [one_by_one(model, prompt) for prompt in prompts()] == wanted
    assert in_one_batch(model, prompts()) == wanted


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_generate_batch_gives_eagers_tokens(name, page, packed_steps):
    model, wanted = pair(name)
    # torch's product of fp32 experts copies from the host, which no graph may.
    options = {"use_cuda_graph": False} if name == "gpt_oss" else {}
    assert continuously(model, prompts(), page=page, **options) == wanted
    has_tables = any(step.block_table is not None for step in packed_steps)
    assert has_tables == (name in ("llama", "qwen3"))
