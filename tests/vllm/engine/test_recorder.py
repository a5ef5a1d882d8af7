"""The recorder of lists, and the scores of a run, without an engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Simple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

from tests.vllm.engine import latent
from tests.vllm.engine.latent import CONFIGS, Oracle
from tests.vllm.engine.models import make_model, prompts_of
from tests.vllm.engine.worker import Run, _scored

TOPK = 4


class Indexer(nn.Module):
    """Writes lists that tell layer and position: ``10000 * layer + 10 * position + column``."""

    def __init__(self, layer: int, buffer: Tensor) -> None:
        super().__init__()
        self.layer, self.topk_indices_buffer = layer, buffer

    def forward(self, hidden: Any, latent: Any, positions: Tensor, rope: Any) -> Tensor:
        lists = 10000 * self.layer + 10 * positions[:, None] + torch.arange(TOPK)
        self.topk_indices_buffer[: len(positions)] = lists.int()
        return self.topk_indices_buffer


class Runner:
    """The parts of a model runner that the recorder reads; two layers share one buffer."""

    def __init__(self, second: bool) -> None:
        buffer = torch.full((32, TOPK), -1, dtype=torch.int32)
        layers = [nn.Module() for _ in range(3)]
        for layer in (0, 2):
            layers[layer].indexer = Indexer(layer, buffer)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(layers)
        self.second = second
        if second:
            self.execute_model_state: Any = None
        else:
            self.input_batch = Simple(req_ids=[])

    def get_model(self) -> nn.Module:
        return self.model

    def execute_model(self, step: Any) -> str:
        rows = [
            step.begin[name] + torch.arange(step.num_scheduled_tokens[name]) for name in step.order
        ]
        # A graph's batch is padded.
        positions = torch.cat([*rows, torch.zeros(3, dtype=torch.int64)])
        batch = Simple(req_ids=step.order)
        if self.second:
            self.execute_model_state = Simple(input_batch=batch)
        else:
            self.input_batch = batch
        for layer in (0, 2):
            self.model.layers[layer].indexer(None, None, positions, None)
        return "done"


def step_of(new: dict[str, list[int]], counts: dict[str, int], begin: dict[str, int]) -> Any:
    """A scheduler's output; the runner's order is the reverse of the scheduler's."""
    requests = [Simple(req_id=name, prompt_token_ids=tokens) for name, tokens in new.items()]
    return Simple(
        scheduled_new_reqs=requests,
        num_scheduled_tokens=counts,
        begin=begin,
        order=list(counts)[::-1],
    )


@pytest.mark.parametrize("second", [True, False])
def test_lists_are_kept_by_prompt_layer_and_position(second: bool) -> None:
    from tests.vllm.engine.recorder import Recorder

    runner = Runner(second)
    recorder = Recorder(runner, max_len=16)
    long, short = [5, 6, 7, 8, 9], [1, 2]
    prompts = {"a": long, "b": short}
    steps = [
        step_of(prompts, {"a": 3, "b": 2}, {"a": 0, "b": 0}),
        step_of({}, {"a": 2, "b": 3}, {"a": 3, "b": 2}),
        # Two drafts were rejected: their positions are computed again.
        step_of({}, {"b": 1, "a": 1}, {"a": 5, "b": 3}),
        # Another engine's warm-up.
        step_of({}, {"_warmup_0_": 2}, {"_warmup_0_": 0}),
        # The same prompt once more.
        step_of({"c": short}, {"c": 2}, {"c": 0}),
    ]
    assert [runner.execute_model(step) for step in steps] == ["done"] * 5
    assert set(recorder.kept) == {tuple(long), tuple(short)}
    for prompt, length in ((long, 6), (short, 5)):
        for layer in (0, 2):
            lists = recorder.kept[tuple(prompt)][layer]
            expected = 10000 * layer + 10 * torch.arange(length)[:, None] + torch.arange(TOPK)
            assert torch.equal(lists[:length], expected.int())
            assert (lists[length:] == -2).all()


def test_a_model_without_indexers_is_left_alone() -> None:
    from tests.vllm.engine.recorder import Recorder

    runner = Runner(True)
    runner.model = nn.Linear(2, 2)
    execute = runner.execute_model
    assert Recorder(runner, 16).kept == {}
    assert runner.execute_model == execute


def outputs_of(folder: Path, prompts: list[list[int]], lists: dict[Any, Any], shift: float) -> Any:
    """What vLLM would answer, were it the oracle in float32 with ``shift`` added to one token."""
    outputs, oracle = [], Oracle(folder)
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(3):
            tokens.append(int(oracle.answer(tokens)[0][-1].argmax()))
        kept: dict[int, Tensor] = {}
        listed = oracle._listed

        def keep(*args: Any, kept: dict[int, Tensor] = kept, listed: Any = listed) -> Any:
            found = listed(*args)
            kept[args[3]] = found[0]
            return found

        oracle._listed = keep  # type: ignore[method-assign]
        logits = oracle.answer(tokens[:-1])[0]
        oracle._listed = listed  # type: ignore[method-assign]
        if kept:
            lists[tuple(prompt)] = {
                layer: torch.cat([rows, torch.full((4, rows.shape[1]), -2).int()])
                for layer, rows in kept.items()
            }
        table = logits.log_softmax(-1)
        table[:, 0] += shift
        rows = [
            {token: Simple(logprob=float(value)) for token, value in enumerate(row)}
            for row in table
        ]
        outputs.append(
            Simple(
                outputs=[Simple(token_ids=tokens[len(prompt) :], logprobs=rows[len(prompt) - 1 :])],
                prompt_logprobs=[None, *rows[: len(prompt) - 1]],
                num_cached_tokens=0,
            )
        )
    return outputs


@pytest.mark.parametrize("name", [latent.DENSE, latent.SPARSE])
def test_a_run_is_scored(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == latent.SPARSE:
        monkeypatch.setitem(CONFIGS, name, {**CONFIGS[name], "index_topk": 8})
    folder = tmp_path / "model"
    make_model(name, folder)
    prompts = prompts_of(lens=(1, 5, 20))
    run = Run(model=name, folder=str(folder), backend="CUSTOM")
    for shift in (0.0, 0.5):
        lists: dict[Any, Any] = {}
        outputs = outputs_of(folder, prompts, lists, shift)
        path = tmp_path / "lists.pt"
        torch.save(lists, path)
        found = _scored(run, prompts, outputs, path)
        assert found["prompt"].positions == 4 + 19
        assert found["generated"].positions == 3 * 3
        # One of 256 log-probabilities is off by the shift.
        assert found["generated"].mean == pytest.approx(shift / 16, abs=1e-3)
        assert found["prompt"].largest == pytest.approx(shift, abs=2e-3)
        assert 0 < found["plain_generated"].mean < 0.2
        if name == latent.SPARSE:
            assert (found["lists"].malformed, found["lists"].missed_max) == (0, 0.0)
            assert found["lists"].rows == 3 * (22 - 8)
        else:
            assert found["lists"] is None
