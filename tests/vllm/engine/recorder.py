"""A worker of vLLM that keeps the lists of keys that its model's indexers write.

vLLM makes the worker of this class in each of its processes. The plugin is registered when this
module is imported, since a process finds no entry point where the project is not installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu_worker import Worker

from attn.integrations.vllm.plugin import register

register()


@dataclass
class Attempt:
    """A time that a request is computed from its beginning: the first, or after a preemption.

    Lists are chosen anew, and those of nearly tied scores differ. A token is judged with the lists
    of the attempt that took it.
    """

    begin: int
    """Position whose answer is the first that this attempt samples: all tokens up to it were known
    when the attempt began."""
    lists: dict[int, Tensor] = field(default_factory=dict)
    """By layer, ``[max_len, index_topk]`` int32; -2 marks a token that no step computed."""
    is_begun: bool = False


class Recorder:
    """Lists of keys by prompt, attempt and layer.

    A hook behind each indexer copies its lists and positions to buffers of fixed address, also
    inside a CUDA graph. After each step the rows of real tokens are sorted by prompt and position;
    a position that an attempt computes again, as after a rejected draft, replaces what was kept of
    it. A prompt that is asked for again replaces all attempts of the earlier request.

    Args:
        runner: vLLM's model runner, whose weights are loaded.
        max_len: most tokens of a request.
    """

    def __init__(self, runner: Any, max_len: int) -> None:
        self.runner, self.max_len = runner, max_len
        self.lists: dict[int, Tensor] = {}
        self.positions: Tensor | None = None
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.kept: dict[tuple[int, ...], list[Attempt]] = {}
        for name, module in runner.get_model().named_modules():
            if type(module).__name__ == "Indexer":
                layer = int(re.findall(r"layers\.(\d+)\.", name)[0])
                self._watch(module, layer)
        if self.lists:
            execute = runner.execute_model

            def execute_and_keep(scheduler_output: Any, *args: Any, **options: Any) -> Any:
                returned = execute(scheduler_output, *args, **options)
                self._keep(scheduler_output)
                return returned

            runner.execute_model = execute_and_keep

    def _watch(self, indexer: Any, layer: int) -> None:
        source = indexer.topk_indices_buffer
        lists = self.lists[layer] = torch.full_like(source, -1)
        if self.positions is None:
            self.positions = torch.zeros(len(source), dtype=torch.int64, device=source.device)
        positions_of_step = self.positions

        def copy(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
            positions = inputs[2]
            # vLLM reads the lists through the indexer, whose buffer may be replaced.
            lists[: len(positions)].copy_(module.topk_indices_buffer[: len(positions)])
            positions_of_step[: len(positions)].copy_(positions)

        indexer.register_forward_hook(copy)

    def _keep(self, scheduler_output: Any) -> None:
        for name, prompt, known in _begun(scheduler_output, self.prompts):
            self._begin(name, prompt, Attempt(known - 1))
        counts = scheduler_output.num_scheduled_tokens
        # Steps that only warm up have requests of which the runner was never told.
        if not counts or not self.prompts.keys() >= counts.keys():
            return
        state = getattr(self.runner, "execute_model_state", None)
        batch = getattr(state, "input_batch", None) or self.runner.input_batch
        begin = 0
        for name in batch.req_ids[: len(counts)]:
            rows = slice(begin, begin + counts[name])
            begin = rows.stop
            assert self.positions is not None
            at = self.positions[rows]
            attempt = self.kept[self.prompts[name]][-1]
            if not attempt.is_begun:
                # What is read from the prefix cache has the lists of the attempt that computed it.
                attempt.is_begun, first = True, int(at[0])
                for kept in attempt.lists.values():
                    kept[first:] = -2
            for layer, lists in self.lists.items():
                attempt.lists[layer][at] = lists[rows]

    def _begin(self, name: str, prompt: tuple[int, ...], attempt: Attempt) -> None:
        """Keep an attempt that begins."""
        attempts = self.kept.setdefault(prompt, [])
        for layer, lists in self.lists.items():
            if attempts:
                attempt.lists[layer] = attempts[-1].lists[layer].clone()
            else:
                # No indexer writes -2.
                shape = (self.max_len, lists.shape[1])
                attempt.lists[layer] = torch.full(shape, -2, dtype=torch.int32, device=lists.device)
        if name not in self.prompts:
            attempts.clear()
        elif attempts[-1].begin == attempt.begin:
            # It was preempted before it took a token.
            attempts.pop()
        attempts.append(attempt)
        self.prompts[name] = prompt


def _begun(
    scheduler_output: Any, prompts: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, prompt and number of known tokens of each request that begins, or begins again.

    vLLM's second model runner is told of a preempted request as of a new one; the first is told of
    it among those that go on.
    """
    for request in scheduler_output.scheduled_new_reqs:
        prompt = tuple(request.prompt_token_ids)
        yield request.req_id, prompt, len(request.prefill_token_ids or prompt)
    others = scheduler_output.scheduled_cached_reqs
    for name, generated in zip(others.req_ids, others.num_output_tokens, strict=True):
        if name in others.resumed_req_ids:
            yield name, prompts[name], len(prompts[name]) + generated


class RecordingWorker(Worker):
    """vLLM's worker, which keeps the lists of its model's indexers."""

    def load_model(self, *args: Any, **options: Any) -> None:
        super().load_model(*args, **options)
        self.recorder = Recorder(self.model_runner, self.model_config.max_model_len)

    def write_lists(self, path: str) -> None:
        """Write ``{prompt: [(begin, {layer: [max_len, index_topk] int32}), ...]}``, a pair for each
        attempt; only the first rank writes."""
        if self.rank == 0:
            on_host = {
                prompt: [
                    (attempt.begin, {layer: lists.cpu() for layer, lists in attempt.lists.items()})
                    for attempt in attempts
                ]
                for prompt, attempts in self.recorder.kept.items()
            }
            torch.save(on_host, path)

    def begin_kernels(self) -> None:
        """Begin to record the names of what runs on this rank's GPU."""
        activity = torch.profiler.ProfilerActivity.CUDA
        self.profile = torch.profiler.profile(activities=[activity])
        self.profile.__enter__()

    def end_kernels(self) -> list[str]:
        """The names of what ran on this rank's GPU since :meth:`begin_kernels`."""
        torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)
        cuda = torch.autograd.DeviceType.CUDA
        return sorted({e.name for e in self.profile.events() if e.device_type == cuda})
