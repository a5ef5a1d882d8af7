"""Multi-step drafting: metadata of consecutive draft steps over one set of buffers."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, replace_known
from builders.buffers import GraphBuffers
from builders.drafts.advance import advance
from specs.sentinels import PAD_SLOT_ID

M = TypeVar("M", bound=AttentionMetadata)


class MultiStepDraft(Generic[M]):
    """The draft steps after one verify, for the builder of any triple: EAGLE with top-k 1.

    Each step has one token per request, one further than the step before. Lengths, slots and
    positions lie in tensors of this object, which :meth:`next` rewrites in place, so that all steps
    with their forwards can be captured as one graph, behind :meth:`begin`:

        record = draft.begin(batch, num_rejected_tokens)
        for step in range(draft.num_steps):
            if step:
                record = draft.next()
            forward(record)

    A record is good until the next step. Of a builder that updates its records on the device
    (``supports_draft_decode_metadata_update``) all steps share one; others build each anew.

    A builder that plans on the host (``plans_on_host``) has to know lengths there: the batch's must
    be exact, and refused drafts be given on the host too. It plans between forwards, so that
    its steps cannot be one graph; each forward may be one of its own, captured by
    ``build_for_cudagraph_capture``.
    """

    def __init__(
        self,
        builder: AttentionMetadataBuilder[M],
        num_steps: int,
        *,
        topk: int = 1,
    ) -> None:
        """
        Args:
            builder: of the draft model's layers.
            num_steps: most steps of a draft.
            topk: candidates that each step keeps.

        Raises:
            ValueError: ``num_steps`` below 1, or ``topk`` other than 1.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        if topk != 1:
            raise ValueError(
                f"topk must be 1, got {topk}: candidates of a tree at one position see different "
                "tokens, which needs a tree mask that the kernels do not have"
            )
        config, spec = builder.vllm_config, builder.kv_cache_spec
        self.builder, self.num_steps = builder, num_steps
        self._block_size, self._max_model_len = spec.block_size, config.max_model_len
        reqs = config.max_num_seqs
        self._buffers = GraphBuffers(builder.device)
        self._buffers.declare("seq_lens", (reqs,), torch.int32)
        self._buffers.declare("slot_mapping", (reqs,), torch.int64, fill=PAD_SLOT_ID)
        self._buffers.declare("positions", (reqs,), torch.int64)
        self._buffers.declare("query_start_loc", (reqs + 1,), torch.int32)
        self._batch: CommonAttentionMetadata | None = None
        self._record: M | None = None
        self._step = 0
        self._is_exact = False

    @property
    def batch(self) -> CommonAttentionMetadata:
        """The current step's batch, over this object's tensors.

        Raises:
            ValueError: before :meth:`begin`.
        """
        if self._batch is None:
            raise ValueError("begin must be called before the first step")
        return self._batch

    def begin(
        self,
        batch: CommonAttentionMetadata,
        num_rejected_tokens: torch.Tensor | None = None,
        num_rejected_tokens_cpu: torch.Tensor | None = None,
    ) -> M:
        """The first step's record.

        Args:
            batch: of the verify, or prefill, whose keys are all written. Its block table must stay
                where it is while the steps are used.
            num_rejected_tokens: ``[R]`` int32, device: drafts refused in it; None for none.
            num_rejected_tokens_cpu: the same on the host, where it is known there: needed by a
                builder that plans on the host, with ``seq_lens_cpu_upper_bound`` exact.

        Raises:
            ValueError: more requests than the engine's limit, or counts of the host that are not
                of the batch's requests.
            NotImplementedError: the builder cannot make draft steps; with the reason.
        """
        is_exact = self.builder.plans_on_host
        if is_exact:
            self._check_host(batch, num_rejected_tokens, num_rejected_tokens_cpu)
        self._step, self._is_exact = 0, is_exact
        counts = num_rejected_tokens_cpu if self._is_exact else None
        self._batch = self._placed(self._advanced(batch, num_rejected_tokens, counts))
        self._record = self._built()
        return self._record

    def _check_host(
        self,
        batch: CommonAttentionMetadata,
        rejected: torch.Tensor | None,
        counts: torch.Tensor | None,
    ) -> None:
        """The host knows the lengths of every step."""
        name = type(self.builder).__name__
        if batch.seq_lens_cpu_upper_bound is None:
            raise ValueError(
                f"seq_lens_cpu_upper_bound is needed by {name}, which plans on the host, got None"
            )
        if rejected is not None and counts is None:
            raise NotImplementedError(
                f"{name} cannot plan draft step 0: its host lengths are not exact, since rejected "
                "drafts are known to the device alone; give num_rejected_tokens_cpu"
            )
        if counts is not None and (rejected is None or len(counts) != batch.num_reqs):
            raise ValueError(
                f"num_rejected_tokens_cpu must be num_rejected_tokens of {batch.num_reqs} requests "
                f"on the host, got {len(counts)} beside "
                f"{'none' if rejected is None else len(rejected)}"
            )
        self._refuse_capture()

    def _refuse_capture(self) -> None:
        if self.builder.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                f"{type(self.builder).__name__} plans on the host, which a graph does not repeat: "
                "capture each step's forward alone"
            )

    def _built(self) -> M:
        """A record of the current step, made anew."""
        if self._is_exact:
            # An engine's own draft steps are refused: there the host is not told of them.
            return self.builder.build(0, self.batch, fast_build=True)
        return self.builder.build_for_drafting(self.batch, self._step)

    def next(self) -> M:
        """The next step's record; only work that a graph may hold, where the builder updates its
        records on the device.

        Raises:
            ValueError: before :meth:`begin`, or after the last step that was declared.
            NotImplementedError: while capturing, of a builder that plans on the host.
        """
        batch, record = self.batch, self._record
        if self._step + 1 >= self.num_steps:
            raise ValueError(
                f"num_steps ({self.num_steps}) draft steps were declared, asked for step "
                f"{self._step + 1}"
            )
        if self._is_exact:
            self._refuse_capture()
        self._step += 1
        self._batch = self._placed(self._advanced(batch, None, None))
        if record is not None and self.builder.supports_draft_decode_metadata_update:
            self.builder.update_draft_decode_metadata(record)
            return record
        self._record = self._built()
        return self._record

    def _advanced(
        self,
        batch: CommonAttentionMetadata,
        rejected: torch.Tensor | None,
        counts: torch.Tensor | None,
    ) -> CommonAttentionMetadata:
        if self._is_exact and counts is None:
            counts = torch.zeros(batch.num_reqs, dtype=torch.int32)
        return advance(batch, self._block_size, self._max_model_len, rejected, counts)

    def _placed(self, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch with its tensors in this object's; bounds that no step changes."""
        names = ("query_start_loc", "seq_lens", "slot_mapping", "positions")
        placed = {
            name: self._buffers.write(name, tensor)
            for name in names
            if (tensor := getattr(batch, name)) is not None
        }
        return replace_known(batch, **placed, max_seq_len=self._max_model_len)
