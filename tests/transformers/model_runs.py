"""Greedy generation of the test models, by ``generate`` and by ``generate_batch``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tests.transformers.small_models import VOCABULARY, make_model

PROMPT_LENS = (5, 23, 40)
NEW_TOKENS = 8


def prompts(lens: Sequence[int] = PROMPT_LENS) -> list[list[int]]:
    """Random prompts, without padding's token."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lens]


def config(new_tokens: int = NEW_TOKENS) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)


@functools.cache
def expected(name: str, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """New tokens of every prompt by eager attention, one prompt at a time."""
    model = make_model(name)
    model.set_attn_implementation("eager")
    return [one_by_one(model, prompt, new_tokens) for prompt in prompts()]


def one_by_one(model: Any, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """New tokens of one prompt."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(ids, generation_config=config(new_tokens))
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def padded(given: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts in one batch, padded on the left, and their mask."""
    width = max(map(len, given))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in given])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in given])
    return ids, mask


def in_one_batch(model: Any, given: Sequence[list[int]]) -> list[list[int]]:
    """New tokens of prompts in one padded batch."""
    ids, mask = (tensor.to(model.device) for tensor in padded(given))
    output = model.generate(ids, attention_mask=mask, generation_config=config())
    return output[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def continuously(
    model: Any,
    given: Sequence[list[int]],
    new_tokens: int = NEW_TOKENS,
    *,
    page: int = 16,
    step_tokens: int = 32,
    **options: Any,
) -> list[list[int]]:
    """New tokens by continuous batching; small steps cut long prompts into chunks.

    Args:
        options: further settings of continuous batching.
    """
    from transformers import ContinuousBatchingConfig

    is_page = "page_size" in ContinuousBatchingConfig.__dataclass_fields__
    settings = ContinuousBatchingConfig(
        **{"page_size" if is_page else "block_size": page},
        num_blocks=1024 // page,
        max_batch_tokens=step_tokens,
        **options,
    )
    done = model.generate_batch(
        list(given),
        generation_config=config(new_tokens),
        continuous_batching_config=settings,
        progress_bar=False,
    )
    errors = [done[key].error for key in sorted(done) if done[key].error]
    if errors:
        raise RuntimeError(str(errors[0]))
    return [done[key].generated_tokens for key in sorted(done)]
