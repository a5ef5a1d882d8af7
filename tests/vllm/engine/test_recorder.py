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

    offset = 0
    """Added to all keys, so that lists of one time can be told from those of another."""

    def __init__(self, layer: int, buffer: Tensor) -> None:
        super().__init__()
        self.layer, self.topk_indices_buffer = layer, buffer

    def forward(self, hidden: Any, latent: Any, positions: Tensor, rope: Any) -> Tensor:
        lists = 10000 * self.layer + 10 * positions[:, None] + torch.arange(TOPK)
        self.topk_indices_buffer[: len(positions)] = lists.int() + self.offset
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


def step_of(
    new: dict[str, list[int]],
    counts: dict[str, int],
    begin: dict[str, int],
    resumed: dict[str, list[int]] | None = None,
    second: bool = True,
) -> Any:
    """A scheduler's output; the runner's order is the reverse of the scheduler's.

    Args:
        new: prompts of the requests that begin.
        counts: tokens of the step.
        begin: first position of the step.
        resumed: known tokens after the prompt of requests that begin again, whose prompts are in
            ``new`` where ``second`` is true.
        second: of vLLM's second model runner.
    """
    again = resumed or {}
    requests = [
        Simple(
            req_id=name,
            prompt_token_ids=tokens,
            prefill_token_ids=[*tokens, *again.get(name, [])] if second else None,
        )
        for name, tokens in new.items()
        if second or name not in again
    ]
    going_on = [name for name in counts if name not in new or (name in again and not second)]
    return Simple(
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=Simple(
            req_ids=going_on,
            resumed_req_ids=set() if second else set(again),
            num_output_tokens=[len(again.get(name, [0])) for name in going_on],
        ),
        num_scheduled_tokens=counts,
        begin=begin,
        order=list(counts)[::-1],
    )


def expected_lists(layer: int, length: int, offset: int = 0) -> Tensor:
    lists = 10000 * layer + 10 * torch.arange(length)[:, None] + torch.arange(TOPK)
    return lists.int() + offset


@pytest.mark.parametrize("second", [True, False])
def test_lists_are_kept_by_prompt_layer_and_position(second: bool) -> None:
    from tests.vllm.engine.recorder import Recorder

    runner = Runner(second)
    recorder = Recorder(runner, max_len=16)
    long, short = [5, 6, 7, 8, 9], [1, 2]
    prompts = {"a": long, "b": short}
    steps = [
        step_of(prompts, {"a": 3, "b": 2}, {"a": 0, "b": 0}, second=second),
        step_of({}, {"a": 2, "b": 3}, {"a": 3, "b": 2}, second=second),
        # Two drafts were rejected: their positions are computed again.
        step_of({}, {"b": 1, "a": 1}, {"a": 5, "b": 3}, second=second),
        # Another engine's warm-up.
        step_of({}, {"_warmup_0_": 2}, {"_warmup_0_": 0}, second=second),
    ]
    assert [runner.execute_model(step) for step in steps] == ["done"] * 4
    assert set(recorder.kept) == {tuple(long), tuple(short)}
    for prompt, length in ((long, 6), (short, 5)):
        (attempt,) = recorder.kept[tuple(prompt)]
        assert attempt.begin == len(prompt) - 1
        for layer in (0, 2):
            assert torch.equal(attempt.lists[layer][:length], expected_lists(layer, length))
            assert (attempt.lists[layer][length:] == -2).all()


@pytest.mark.parametrize("second", [True, False])
def test_attempts_of_a_preempted_request_are_kept_apart(
    second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.vllm.engine.recorder import Recorder

    runner = Runner(second)
    recorder = Recorder(runner, max_len=16)
    prompt = {"a": [5, 6, 7]}

    def run(offset: int, *arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(Indexer, "offset", offset)
        runner.execute_model(step_of(*arguments, **options, second=second))

    # Preempted at once, before it took a token; then after the second token.
    run(100, prompt, {"a": 2}, {"a": 0})
    run(200, prompt, {"a": 3}, {"a": 0}, resumed={"a": []})
    run(200, {}, {"a": 1}, {"a": 3})
    run(300, prompt, {"a": 4}, {"a": 0}, resumed={"a": [8, 9]})
    run(300, {}, {"a": 2}, {"a": 4})
    first, then = recorder.kept[5, 6, 7]
    assert (first.begin, then.begin) == (2, 4)
    for attempt, length, offset in ((first, 4, 200), (then, 6, 300)):
        for layer in (0, 2):
            found = attempt.lists[layer]
            assert torch.equal(found[:length], expected_lists(layer, length, offset))
            assert (found[length:] == -2).all()


def test_a_prompt_asked_for_again_replaces_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cached prefix keeps the lists that it was computed with."""
    from tests.vllm.engine.recorder import Recorder

    runner = Runner(True)
    recorder = Recorder(runner, max_len=16)
    prompt = [1, 2, 3, 4]
    runner.execute_model(step_of({"a": prompt}, {"a": 4}, {"a": 0}))
    runner.execute_model(step_of({}, {"a": 2}, {"a": 4}))
    monkeypatch.setattr(Indexer, "offset", 100)
    runner.execute_model(step_of({"b": prompt}, {"b": 2}, {"b": 2}))
    (attempt,) = recorder.kept[tuple(prompt)]
    assert torch.equal(attempt.lists[0][:2], expected_lists(0, 2))
    assert torch.equal(attempt.lists[0][2:4], expected_lists(0, 4, 100)[2:])
    assert (attempt.lists[0][4:] == -2).all()


def test_a_model_without_indexers_is_left_alone() -> None:
    from tests.vllm.engine.recorder import Recorder

    runner = Runner(True)
    runner.model = nn.Linear(2, 2)
    execute = runner.execute_model
    assert Recorder(runner, 16).kept == {}
    assert runner.execute_model == execute


def padded(lists: dict[int, Tensor]) -> dict[int, Tensor]:
    """Lists as they are kept: there is room for more tokens."""
    return {
        layer: torch.cat([rows, torch.full((4, rows.shape[1]), -2).int()])
        for layer, rows in lists.items()
    }


def outputs_of(folder: Path, prompts: list[list[int]], lists: dict[Any, Any], shift: float) -> Any:
    """What vLLM would answer, were it the oracle in float32 with ``shift`` added to one token."""
    outputs, oracle = [], Oracle(folder)
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(3):
            tokens.append(int(oracle.answer(tokens)[0][-1].argmax()))
        logits, _, found = oracle.answer(tokens[:-1])
        kept = {layer: part.own for layer, part in found.items()}
        if kept:
            lists[tuple(prompt)] = [(len(prompt) - 1, padded(kept))]
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
            plain = found["plain_lists"]
            assert (plain.rows, plain.malformed) == (3 * (22 - 8), 0)
            assert 0 < plain.missed_mean < 0.3
        else:
            assert found["lists"] is None
            assert found["plain_lists"] is None


def test_a_preempted_request_is_judged_by_the_lists_of_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists before and after differ; a token answered with other lists, or wrongly, is found."""
    name = latent.SPARSE
    monkeypatch.setitem(CONFIGS, name, {**CONFIGS[name], "index_topk": 8})
    folder, path = tmp_path / "model", tmp_path / "lists.pt"
    make_model(name, folder)
    prompts = prompts_of(lens=(20,))
    run = Run(model=name, folder=str(folder), backend="CUSTOM")
    outputs = outputs_of(folder, prompts, {}, 0.0)
    sequence = prompts[0] + outputs[0].outputs[0].token_ids
    oracle, total = Oracle(folder), len(sequence) - 1
    best = {layer: part.own for layer, part in oracle.answer(sequence[:-1]).lists.items()}
    # Lists that differ in one key, as after a tie that fell the other way.
    worst = {layer: rows.clone() for layer, rows in best.items()}
    for rows in worst.values():
        for position in range(8, total):
            absent = set(range(position + 1)) - set(rows[position].tolist())
            rows[position, 0] = min(absent)
    # Positions to 19 were answered by the first attempt, and the others by the second.
    logits = torch.cat(
        [
            oracle.answer(sequence[:20], best).logits,
            oracle.answer(sequence[:total], worst).logits[20:],
        ]
    )

    def error_with(first: Any, then: Any, taken: Tensor = logits) -> Any:
        known = [
            (19, padded({layer: rows[:20] for layer, rows in first.items()})),
            (20, padded(then)),
        ]
        torch.save({tuple(prompts[0]): known}, path)
        rows = [
            {token: Simple(logprob=float(value)) for token, value in enumerate(row)}
            for row in taken.log_softmax(-1)
        ]
        outputs[0].outputs[0].logprobs = rows[19:]
        outputs[0].prompt_logprobs = [None, *rows[:19]]
        return _scored(run, prompts, outputs, path)["generated"]

    assert error_with(best, worst).max < 1e-3
    assert error_with(worst, worst).max > 0.05
    assert error_with(best, best).max > 0.05
    # What an engine would answer that read another request's keys before the preemption.
    wrong = logits.clone()
    wrong[19] = oracle.answer([*reversed(sequence[:19]), sequence[19]]).logits[19]
    assert error_with(best, worst, wrong).max > 0.2
