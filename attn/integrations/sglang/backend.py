"""SGLang's interface of a backend: when steps are planned, and when graphs are captured.

Tables, lengths and plans are made by kernels inside of the graph, so that a replay plans itself.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention

from attn.impls.warm import run_compiled
from attn.integrations.sglang import checks, compat
from attn.integrations.sglang.steps import Step, make_step
from builders.pages.slot_tables import SlotTables, StepSlots

logger = logging.getLogger("sglang.srt.attn_backends")


class SlotBackend(AttentionBackend):  # type: ignore[misc]
    """What dense and latent backends share; a subclass adds :meth:`record` and the forwards."""

    needs_cpu_seq_lens = False
    extend_dummy_seqs_capped_by_req_pool = True
    pools: tuple[str, ...] = ()
    """Names of the classes of caches that are served."""

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        """
        Args:
            runner: SGLang's ``ModelRunner``.
            draft_step: number of the draft model's decode step that the backend is for.

        Raises:
            ValueError: the engine or the model is not served; the message has every reason.
        """
        super().__init__()
        self.facts = compat.facts_of(runner)
        self.draft_step = draft_step
        self.model = runner.model
        self.layers = [one for one in runner.model.modules() if isinstance(one, RadixAttention)]
        checks.check(self.facts, self.layers, self.pools)
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_reqs = self.facts.max_reqs
        self.tables = self._new_tables()
        self.forward_metadata: Step | None = None
        self._replaced: list[object] = []
        """What was replaced; graphs may hold its addresses."""

    def _new_tables(self) -> SlotTables:
        return SlotTables(
            self.req_to_token_pool.req_to_token,
            self.facts.page_size,
            self.max_reqs,
            compat.window_slots(self.token_to_kv_pool),
        )

    def share_tables(self, other: SlotBackend) -> None:
        """Use another backend's block tables: both write the same pages of the same requests."""
        self.tables.table = other.tables.table
        self.tables.window_table = other.tables.window_table

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for batches of up to ``max_bs`` requests; SGLang calls it before captures."""
        if max_bs > self.max_reqs:
            self._replaced.append(self.tables)
            self.max_reqs = max_bs
            self.tables = self._new_tables()
        self.tables.reserve(max(max_num_tokens, max_bs))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padded request: it reads slot 0, which is nobody's."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing: all of a plan is made inside of the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan a step: launches without a wait, which a graph repeats."""
        self.forward_metadata = None
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            return
        if forward_batch.batch_size > self.max_reqs:
            self.init_cuda_graph_state(forward_batch.batch_size, 0)
        step = make_step(forward_batch, self.tables, self.draft_step)
        self.forward_metadata = step
        self.plan(step)

    def plan(self, step: Step) -> None:
        """Build the records of all groups of layers that are known."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Compile the kernels that serving will launch, by running small steps.

        SGLang calls no forward of a prompt before the first request where it captures no graphs of
        prompts. The cache is not written, and of it page 0 is read, which is nobody's.
        """
        device = self.facts.device
        one = torch.ones(1, dtype=torch.int64, device=device)
        slots = StepSlots(rows=one - 1, seq_lens=one, new_slots=one - 1, query_len=1)

        def run_steps() -> None:
            for counts in (None, one.int()):
                self.tables.fill(dataclasses.replace(slots, query_lens=counts))

        run_compiled(run_steps, device)
        self.warm_up_layers()

    def warm_up_layers(self) -> None:
        """Compile the kernels of every kind of layer."""
        raise NotImplementedError

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Nothing: the drafts of a chain need no mask."""

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        """True: nothing is left to do before a replay."""
        return True

    def glue_target_verify_metadata(self) -> str:
        """Empty: a verify's plan reads nothing of the host."""
        return ""

    def glue_draft_metadata(self) -> str:
        """Empty: a draft's plan reads nothing of the host."""
        return ""

    def forward_decode(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of a step with one token a request; see :meth:`forward_extend`."""
        return self.forward_extend(*args, **kwargs)


def started(backend: Any) -> Any:
    """A new backend whose kernels are compiled, if it is on a GPU; elsewhere none are.

    Args:
        backend: one with ``facts`` and ``warm_up``.
    """
    if backend.facts.device.type == "cuda":
        begun = time.perf_counter()
        backend.warm_up()
        logger.info("attn-backends: kernels were compiled in %.1f s", time.perf_counter() - begun)
    return backend


def log_served(name: str, words: str, builder: Any) -> None:
    """Say in the log which layers a backend of ours serves, and by which kernels."""
    kernels = ", ".join(f"{phase}: {kernel}" for phase, kernel in builder.phase_kernels.items())
    logger.info("attn-backends: %s serves %s; %s", name, words, kernels)


def rows_of(tensor: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """``[T, heads, size]`` of a tensor that may have flat rows."""
    return tensor if tensor.dim() == 3 else tensor.reshape(-1, heads, size)
