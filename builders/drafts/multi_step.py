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

    Each step has one token per request, at the position after the previous step's token. Lengths,
    slots and positions lie in tensors of this object, which :meth:`next` rewrites in place. All
    steps and their forwards after :meth:`begin` can therefore be captured as one graph:

        record = draft.begin(batch, num_rejected_tokens)
        for step in range(draft.num_steps):
            if step:
                record = draft.next()
            forward(record)

    A record is valid until the next step. With a builder that updates its records on the device
    (``supports_draft_decode_metadata_update``) all steps share one record; other builders build one
    for each step.

    A builder that plans on the host (``plans_on_host``) must know lengths on the host: the batch's
    host lengths must be exact, and the numbers of refused drafts be given on the host too. It plans
    between forwards, so that its steps cannot be one graph. Each forward may be a graph of its own,
    captured with a record of ``build_for_cudagraph_capture``.
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
            builder: builder of the draft model's layers.
            num_steps: most steps of a draft.
            topk: candidates that each step keeps; must be 1.

        Raises:
            ValueError: ``num_steps`` is below 1, or ``topk`` is not 1.
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
        """The current step's batch; its tensors belong to this object.

        Raises:
            ValueError: :meth:`begin` was not called.
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
        """Start a draft and return the first step's record.

        Args:
            batch: batch of the verify or prefill before the draft; all its keys are written. Its
                block table must keep its address while the steps are used.
            num_rejected_tokens: ``[R]`` int32, device: drafts refused in ``batch``; None for none.
            num_rejected_tokens_cpu: ``num_rejected_tokens`` on the host. A builder that plans on
                the host needs it, and needs an exact ``seq_lens_cpu_upper_bound``.

        Raises:
            ValueError: the batch has more requests than the engine's limit, or the host's counts
                are not those of the batch's requests.
            NotImplementedError: the builder cannot make draft steps; the message says why.
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
        """Refuse a draft of which the host does not know the lengths of every step."""
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
        """A new record of the current step."""
        if self._is_exact:
            # Such a builder refuses build_for_drafting, which an engine calls without telling the
            # host the lengths; here the host knows them.
            return self.builder.build(0, self.batch, fast_build=True)
        return self.builder.build_for_drafting(self.batch, self._step)

    def next(self) -> M:
        """Advance by one step and return its record.

        A graph may capture this call where the builder updates its records on the device.

        Raises:
            ValueError: :meth:`begin` was not called, or the last of ``num_steps`` is done.
            NotImplementedError: a graph is being captured and the builder plans on the host.
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
        """Copy the batch's tensors into this object's; bounds are those of every step."""
        names = ("query_start_loc", "seq_lens", "slot_mapping", "positions")
        placed = {
            name: self._buffers.write(name, tensor)
            for name in names
            if (tensor := getattr(batch, name)) is not None
        }
        return replace_known(batch, **placed, max_seq_len=self._max_model_len)
