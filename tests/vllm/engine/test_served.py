"""The judgement of a server's answers, without a server: faults are found, and rounding is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.vllm.engine.latent import CONFIGS, SPARSE, Listed, Oracle
from tests.vllm.engine.models import make_model, prompts_of
from tests.vllm.engine.served import Served, faults_of, served_of

OUTPUT_LEN = 8


class Server(Oracle):
    """A plain run whose products are summed in another order than the judge's are."""

    def __init__(self, folder: Path, cache: str) -> None:
        super().__init__(folder, torch.bfloat16, cache, scores_in_fp8=True)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x.float(), self.weights[f"{name}.weight"].float()).to(x.dtype)

    def served(self, prompt: list[int]) -> Served:
        tokens = list(prompt)
        for _ in range(OUTPUT_LEN):
            tokens.append(int(self.answer(tokens).logits[-1].argmax()))
        logprobs = self.answer(tokens[:-1]).logits.double().log_softmax(-1)
        taken = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return Served(tokens, len(prompt), taken)


class WithWindow(Server):
    """One layer attends its last keys rather than its best ones."""

    def _listed(self, *arguments: Any) -> Listed:
        found, layer = super()._listed(*arguments), arguments[3]
        if layer != 1:
            return found
        rows = torch.arange(len(found.own))[:, None]
        last = rows - torch.arange(found.own.shape[1])
        return found._replace(attended=torch.where(last < 0, -1, last).int())


class WithStaleBlock(Server):
    """One layer reads rows of the cache that other tokens wrote, 16 of them at most."""

    def _attend(
        self, x: Tensor, query_latent: Tensor, positions: Tensor, layer: int, listed: Any
    ) -> Tensor:
        if layer == 1:
            x, count = x.clone(), min(len(x) // 2, 16)
            x[:count] = x[count : 2 * count].clone()
        return super()._attend(x, query_latent, positions, layer, listed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(CONFIGS, SPARSE, {**CONFIGS[SPARSE], "index_topk": 24})
    make_model(SPARSE, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_a_server_that_rounds_as_vllm_does_is_faultless(folder: Path, cache: str) -> None:
    server = Server(folder, cache)
    answers = [server.served(prompt) for prompt in prompts_of(lens=(1, 9, 100))]
    assert faults_of(answers, folder, cache) == []


@pytest.mark.parametrize(
    ("server", "lens"), [(WithWindow, (100,)), (WithStaleBlock, (9,)), (WithStaleBlock, (100,))]
)
def test_a_fault_is_found(folder: Path, server: Any, lens: tuple[int, ...]) -> None:
    answers = [server(folder, "auto").served(prompt) for prompt in prompts_of(lens=lens)]
    assert faults_of(answers, folder, "auto")


def test_tokens_that_were_not_the_best_are_found(folder: Path) -> None:
    """Their log-probabilities are right, but they should not have been taken."""
    server, prompt = Server(folder, "auto"), prompts_of(lens=(9,))[0]
    logprobs = server.answer(prompt).logits.double().log_softmax(-1)
    worst = int(logprobs[-1].argmin())
    taken = logprobs.gather(1, torch.tensor([*prompt[1:], worst])[:, None])[:, 0]
    answers = [Served([*prompt, worst], len(prompt), taken)]
    assert [text for text in faults_of(answers, folder, "auto") if "below the best" in text]


def test_an_answer_of_the_completions_api_is_read() -> None:
    choice = {
        "token_ids": [7, 8],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
        "prompt_logprobs": [None, {"4": {"logprob": -3.0}, "9": {"logprob": -1.0}}],
    }
    found = served_of([5, 4], choice)
    assert (found.tokens, found.prompt_len) == ([5, 4, 7, 8], 2)
    assert found.logprobs.tolist() == [-3.0, -0.5, -0.25]
