"""The decode steps of a draft model: a backend for each, over the same requests."""

from __future__ import annotations

from typing import Any

from attn.integrations.sglang.dense import DenseBackend


class DraftBackends:
    """What SGLang calls before the steps of one draft; step i attends ``seq_lens + i + 1`` keys.

    Each step has lengths and a plan of its own, so that one graph holds all steps.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        """
        Args:
            runner: SGLang's ``ModelRunner`` of the draft model.
            topk: candidates that each step keeps.
            num_steps: steps of a draft; the first is the step that extends the draft model's cache,
                which has a backend of its own.

        Raises:
            ValueError: the engine or the model is not served.
        """
        del topk  # Trees are refused with the engine's other settings.
        made = DenseBackend
        if runner.use_mla_backend:
            from attn.integrations.sglang.latent import LatentBackend

            made = LatentBackend
        self.attn_backends = [made(runner, step) for step in range(num_steps - 1)]
        self._share_tables()

    def _share_tables(self) -> None:
        """Keep one set of block tables: the steps' lengths differ, their pages do not."""
        for backend in self.attn_backends[1:]:
            backend.share_tables(self.attn_backends[0])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for batches of up to ``max_bs`` requests."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)
        self._share_tables()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a padded request."""
        return self.attn_backends[0].get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan all steps of a draft that is run without a graph."""
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing: all of a plan is made inside of the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan all steps of a draft."""
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        """Nothing."""

    def glue_draft_metadata(self) -> str:
        """Empty: a draft's plan reads nothing of the host."""
        return ""
