"""The judgement of a server's answers, whose lists of keys are not known.

An untouched server records no lists. Its indexers choose keys by scores of queries and keys in fp8,
so that some per cent of its keys are others than float32's, and some of these weigh much. A plain
run in bf16 that chooses keys in the same way differs from float32 as much: it sets the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.vllm.engine.latent import Oracle
from tests.vllm.engine.runs import beyond_budget
from tests.vllm.engine.worker import taken_error


@dataclass(frozen=True)
class Served:
    """What a server answered to a prompt."""

    tokens: list[int]
    """The prompt and what was generated."""
    prompt_len: int
    logprobs: Tensor
    """Log-probability of each token but the first, float64."""


def served_of(prompt: list[int], choice: Mapping[str, Any]) -> Served:
    """An answer of the completions API that was asked for log-probabilities and token ids."""
    known = [
        row[str(token)]["logprob"]
        for token, row in zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
    ]
    logprobs = [*known, *choice["logprobs"]["token_logprobs"]]
    tokens = [*prompt, *choice["token_ids"]]
    return Served(tokens, len(prompt), torch.tensor(logprobs, dtype=torch.float64))


def faults_of(answers: Sequence[Served], folder: Path, cache: str) -> list[str]:
    """Messages where answers differ more from float32's than the plain run's do.

    Sequences that are longer than a list, and the others, have a budget each.

    Args:
        answers: what was served.
        folder: the model's folder.
        cache: vLLM's ``kv_cache_dtype``.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The reference may not be shortened to TF32.
    torch.set_float32_matmul_precision("highest")
    exact = Oracle(folder, device=device)
    plain = Oracle(folder, torch.bfloat16, cache, device, scores_in_fp8=True)
    groups: dict[str, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
    faults = []
    for served in answers:
        found = [oracle.answer(served.tokens[:-1]) for oracle in (exact, plain)]
        mine, other = (answer.logits.double().cpu() for answer in found)
        is_cut = len(served.tokens) > exact.config["index_topk"]
        targets = torch.tensor(served.tokens[1:])
        known = other.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        name = "sequences longer than a list" if is_cut else "sequences shorter than a list"
        groups.setdefault(name, []).append((served.logprobs, known, mine, targets))
        # Sampling is greedy: a token may lie below the best one by both tokens' errors.
        generated = slice(served.prompt_len - 1, None)
        mine, other = mine[generated].log_softmax(-1), other[generated].log_softmax(-1)
        gap = (mine.amax(-1) - mine.gather(1, targets[generated][:, None])[:, 0]).max()
        if not gap <= 2 * (mine - other).abs().max() + 0.1:
            faults.append(f"a token of {name} is {gap:.2f} below the best one")
    for name, parts in groups.items():
        ours, theirs, logits, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        errors = [taken_error(logprobs, logits, targets) for logprobs in (ours, theirs)]
        faults += [f"{name}: {message}" for message in beyond_budget(*errors)]
    return faults
