"""A worker of vLLM that keeps the lists of keys that its model's indexers write.

vLLM makes the worker of this class in each of its processes. The plugin is registered when this
module is imported, since a process finds no entry point where the project is not installed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu_worker import Worker

from attn.integrations.vllm.plugin import register

register()


class Recorder:
    """Lists of keys by prompt and layer.

    A hook behind each indexer copies its lists and positions to buffers of fixed address, also
    inside a CUDA graph. After each step the rows of real tokens are sorted by prompt and position;
    a position that is computed again, as after a rejected draft, replaces what was kept of it.

    Args:
        runner: vLLM's model runner, whose weights are loaded.
        max_len: most tokens of a request.
    """

    def __init__(self, runner: Any, max_len: int) -> None:
        self.runner, self.max_len = runner, max_len
        self.lists: dict[int, Tensor] = {}
        self.positions: Tensor | None = None
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.kept: dict[tuple[int, ...], dict[int, Tensor]] = {}
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
        for request in scheduler_output.scheduled_new_reqs:
            self.prompts.setdefault(request.req_id, tuple(request.prompt_token_ids))
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
            kept = self.kept.setdefault(self.prompts[name], {})
            for layer, lists in self.lists.items():
                if layer not in kept:
                    shape = (self.max_len, lists.shape[1])
                    # No indexer writes -2: it marks a token that no step computed.
                    kept[layer] = torch.full(shape, -2, dtype=torch.int32, device=lists.device)
                kept[layer][at] = lists[rows]


class RecordingWorker(Worker):
    """vLLM's worker, which keeps the lists of its model's indexers."""

    def load_model(self, *args: Any, **options: Any) -> None:
        super().load_model(*args, **options)
        self.recorder = Recorder(self.model_runner, self.model_config.max_model_len)

    def write_lists(self, path: str) -> None:
        """Write ``{prompt: {layer: [max_len, index_topk] int32}}``; only the first rank writes."""
        if self.rank == 0:
            kept = self.recorder.kept
            on_host = {
                prompt: {layer: lists.cpu() for layer, lists in layers.items()}
                for prompt, layers in kept.items()
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
