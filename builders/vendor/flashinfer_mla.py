"""Metadata of FLASHINFER_MLA: absorbed decodes planned on the host for FlashInfer's wrapper.

Prefill is expanded in chunks, planned as in every latent backend. A record is valid until its
builder builds again, because plans live in wrappers that the builder keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from builders.base import AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_enabled
from builders.device import device_facts
from builders.latent.prefill import ExpandedPrefill, with_block_table
from builders.latent.record import LatentStep, captured_query_len, split_step
from builders.latent.rows import flag_keyless
from builders.pages.lists import list_pages
from builders.vendor.flashinfer_parts import mla_calls as compat
from builders.vendor.flashinfer_parts.lengths import (
    HostLengths,
    csr_on_host,
    debug_lengths,
    host_drafts_reason,
    host_lengths,
)
from builders.vendor.flashinfer_parts.mla_calls import (
    FlashInferLatent,
    LatentCsrBuffers,
    LatentSizes,
)
from builders.vendor.flashinfer_parts.mla_choice import (
    NAME,
    LatentKernelChoice,
    check_support,
    latent_wrapper_kernel,
    padded_heads,
)
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec

WORKSPACE_BYTES = 128 << 20
"""Bytes of a builder's scratch for partial states of split rows; the plan bounds their number by
the size of the GPU."""


@dataclass
class PlannedLatentRows:
    """The decode rows of a step, and the wrapper that was planned for them."""

    choice: LatentKernelChoice
    flashinfer: FlashInferLatent
    wrapper: Any
    num_tokens: int
    """Query rows of the plan, from the step's first row on; in a graph padding counts too."""
    indices: torch.Tensor
    """``[pages]`` int32, device: the pages that the plan reads."""
    query: tuple[torch.Tensor, torch.Tensor] | None
    """``[T, H', L]`` and ``[T, H', r]`` scratch for a query that is padded to H' heads with zeros;
    None where the kernel takes the layer's heads."""


@dataclass
class FlashInferMlaMetadata(LatentStep):
    """A step of latent attention, planned for one kind of layer."""

    lengths: HostLengths
    sizes: LatentSizes
    """The layer that the plans are for."""
    decode: PlannedLatentRows | None


@dataclass(frozen=True)
class _Listed:
    """Decodes as a plan lists them: each has tokens, and a key for each of its tokens."""

    query_starts: torch.Tensor
    """``[R + 1]`` int32, host: first query row of each request."""
    kv_lens: torch.Tensor
    """``[R]`` int32, host: keys of each request."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: keys of each request, equal to ``kv_lens``."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device; a request without keys is listed with keys of page 0."""


class FlashInferMlaMetadataBuilder(AttentionMetadataBuilder[FlashInferMlaMetadata]):
    """Builder that gives decodes and verifies to the wrapper, and expands prefills."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    plans_on_host = True

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            kv_cache_spec: the group's spec, :class:`specs.kv_cache.MLAAttentionSpec`.
            layer_names: layers of the group.
            vllm_config: engine limits; ``num_heads`` and ``softmax_scale`` are needed.
            device: where the records' tensors live.

        Raises:
            ValueError: the wrapper does not serve the spec or a setting, such as host lengths that
                are not exact; or the bound of the workspace is smaller than one chunk.
            FlashInferUnavailableError: FlashInfer cannot be used here.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        gpu = device_facts(self.device)
        self.num_heads = check_support(spec, vllm_config, gpu.kind)
        assert vllm_config.softmax_scale is not None
        self.sizes = LatentSizes(
            num_heads=padded_heads(self.num_heads),
            rank=spec.kv_lora_rank,
            rope_size=spec.qk_rope_head_dim,
            page_size=spec.block_size,
            scale=vllm_config.softmax_scale,
            query_dtype=spec.dtype.torch,
            kv_dtype=spec.cache_dtype.element(spec.dtype).torch,
        )
        self._choice = latent_wrapper_kernel(gpu.kind)
        self._is_pinned = self.device.type == "cuda"
        self.flashinfer = compat.load_latent()
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.step_limits = self.step_limits.with_verifies(vllm_config.max_decode_query_len)
        self.buffers = GraphBuffers(self.device)
        self.expanded = ExpandedPrefill(spec, vllm_config, gpu, self.buffers)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._wrapper: Any = None
        self._graphs: dict[tuple[int, int], Any] = {}
        self._declare()

    def _declare(self) -> None:
        config, sizes, buffers = self.vllm_config, self.sizes, self.buffers
        most = config.max_num_seqs
        tokens = max(most * config.max_decode_query_len, config.max_num_batched_tokens)
        buffers.declare("keyless", (tokens,), torch.bool)
        width = cdiv(config.max_model_len, sizes.page_size)
        for name, extent in (
            ("qo_indptr", most + 1),
            ("kv_indptr", most + 1),
            ("kv_lens", most),
            ("kv_indices", most * width),
        ):
            buffers.declare(name, (extent,), torch.int32)
        if sizes.num_heads > self.num_heads:
            rows = most * config.max_decode_query_len, sizes.num_heads
            buffers.declare("q_nope", (*rows, sizes.rank), sizes.query_dtype)
            buffers.declare("q_pe", (*rows, sizes.rope_size), sizes.query_dtype)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMlaMetadata:
        """The step's record; nothing is copied back to the host.

        Args:
            common_prefix_len: ignored, since every request reads its own pages.
            common_attn_metadata: the batch; its host lengths must equal the device's.
            fast_build: ignored.

        Raises:
            ValueError: the batch has no host lengths, or lengths exceed the table or a limit.
            NotImplementedError: the batch's mask is not plainly causal.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        fields = split_step(batch, self.reorder_batch_threshold or 1, NAME)
        lengths = host_lengths(batch, 0, self.sizes.page_size, NAME)
        if debug_enabled():
            debug_lengths(batch, lengths, NAME)
        own: Any = {"lengths": lengths, "sizes": self.sizes, "decode": None}
        record = FlashInferMlaMetadata(**fields, **own, **self.pages)
        if record.num_prefills:
            record.prefill = self.expanded.plan(batch, record.num_decodes)
        self._plan_decodes(record)
        return record

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashInferMlaMetadata:
        """The record to capture a graph with.

        After a build, the graph can be replayed for any batch of the same number of requests, each
        with the captured number of tokens or with none.

        Args:
            common_attn_metadata: a batch of requests of one query length; padding may follow.

        Raises:
            ValueError: the requests have several query lengths.
        """
        batch = common_attn_metadata
        length = captured_query_len(batch)
        key = batch.num_reqs, length
        if length <= (self.reorder_batch_threshold or 1) and key not in self._graphs:
            self._graphs[key] = self._graph_wrapper(batch.num_reqs)
        # Calls self.build, since a wrapper around this builder may have replaced it.
        return self.build(0, batch)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> FlashInferMlaMetadata:
        """Refuse draft steps of an engine.

        Raises:
            NotImplementedError: always, as an engine's host does not know the lengths of draft
                steps. Where the host knows them, ``MultiStepDraft`` plans them by :meth:`build`.
        """
        raise NotImplementedError(host_drafts_reason(NAME, draft_index))

    def _set_block_table(self, metadata: FlashInferMlaMetadata, block_table: torch.Tensor) -> None:
        reqs, first = len(metadata.seq_lens), metadata.num_decodes
        metadata.block_table = block_table[:reqs]
        if metadata.prefill is not None:
            table, slots = block_table[first:reqs], metadata.slot_mapping
            metadata.prefill = with_block_table(metadata.prefill, table, slots)
        self._plan_decodes(metadata)

    # -- plans

    def _plan_decodes(self, record: FlashInferMlaMetadata) -> None:
        """Make the plan of the decodes and store it in a record that no caller has yet."""
        record.decode = record.keyless = None
        reqs = record.num_decodes
        lengths = record.lengths
        query_lens = torch.from_numpy(lengths.query_lens[:reqs])
        kv_lens = torch.from_numpy(lengths.kv_lens[:reqs])
        has_keys = (query_lens > 0) & (kv_lens > 0)
        graph = self._graph_of(query_lens) if record.num_prefills == 0 else None
        listed: _Listed | None
        if graph is not None:
            wrapper, length = graph
            record.num_decode_tokens = reqs * length
            listed = self._padded(record, has_keys, length)
        else:
            listed, wrapper = self._live(record, query_lens, has_keys), None
        owned = int(query_lens[has_keys].sum())
        if graph is not None or owned < record.num_decode_tokens:
            record.keyless = flag_keyless(
                record.query_start_loc[: reqs + 1],
                record.seq_lens[:reqs],
                self.buffers.view("keyless", record.num_decode_tokens),
            )
        if listed is not None:
            record.decode = self._planned(listed, wrapper)

    def _planned(self, listed: _Listed, wrapper: Any) -> PlannedLatentRows:
        sizes, page = self.sizes, self.sizes.page_size
        starts, lens = listed.query_starts.numpy(), listed.kv_lens.numpy()
        csr = csr_on_host(starts, lens, page, self._is_pinned)
        most = self.vllm_config.max_num_seqs
        indices = list_pages(listed.block_table, listed.seq_lens, page, None, most)
        indices = indices[: csr.num_pages]
        if wrapper is not None:
            indices = self.buffers.write("kv_indices", indices)
        else:
            wrapper = self._wrapper = self._wrapper or self.flashinfer.wrapper(
                self._workspace, self._choice.kernel.value
            )
        # With one token per request the causal mask hides nothing.
        causal = csr.max_query_len > 1
        self.flashinfer.plan(wrapper, csr, indices, sizes, causal=causal)
        query = None
        if "q_nope" in self.buffers:
            rows = csr.num_tokens, sizes.num_heads
            query = (
                self.buffers.view("q_nope", *rows, sizes.rank),
                self.buffers.view("q_pe", *rows, sizes.rope_size),
            )
        return PlannedLatentRows(
            self._choice, self.flashinfer, wrapper, csr.num_tokens, indices, query
        )

    def _live(
        self, record: FlashInferMlaMetadata, query_lens: torch.Tensor, has_keys: torch.Tensor
    ) -> _Listed | None:
        """List the requests that have tokens; None where there are none.

        The kernel's tile follows the average number of tokens, which padding would bring below one
        token.
        """
        rows: list[int] = torch.nonzero(query_lens).flatten().tolist()
        if not rows:
            return None
        lens, live = torch.from_numpy(record.lengths.kv_lens), len(rows)
        seq_lens, table = record.seq_lens, record.block_table
        if rows[-1] + 1 == live:
            seq_lens, table = seq_lens[:live], table[:live]
        else:
            chosen = torch.tensor(rows, pin_memory=self._is_pinned)
            chosen = chosen.to(self.device, non_blocking=True)
            seq_lens, table = seq_lens[chosen], table[chosen]
        tokens, kept = query_lens[rows], has_keys[rows]
        starts = torch.zeros(live + 1, dtype=torch.int32)
        torch.cumsum(tokens, 0, out=starts[1:])
        kv_lens = torch.where(kept, lens[rows], tokens)
        if not bool(kept.all()):
            stand_ins = tokens.pin_memory() if self._is_pinned else tokens
            stand_ins = stand_ins.to(self.device, non_blocking=True)
            table = torch.where(seq_lens[:, None] > 0, table, 0)
            seq_lens = torch.where(seq_lens > 0, seq_lens, stand_ins)
        return _Listed(starts, kv_lens, seq_lens, table)

    def _padded(
        self, record: FlashInferMlaMetadata, has_keys: torch.Tensor, length: int
    ) -> _Listed:
        """List every request, padding included, with ``length`` tokens.

        The grid in a graph follows the average number of tokens, which must stay the same. Rows of
        padding read page 0, and their output is cleared.
        """
        reqs = record.num_decodes
        starts = torch.arange(reqs + 1, dtype=torch.int32) * length
        kv_lens = torch.where(has_keys, torch.from_numpy(record.lengths.kv_lens[:reqs]), length)
        own = record.query_start_loc[: reqs + 1].diff() > 0
        own &= record.seq_lens[:reqs] > 0
        seq_lens = torch.where(own, record.seq_lens[:reqs], length)
        table = torch.where(own[:, None], record.block_table[:reqs], 0)
        return _Listed(starts, kv_lens, seq_lens, table)

    # -- CUDA graphs

    def _graph_wrapper(self, num_reqs: int) -> Any:
        """Make a graph's wrapper over the builder's buffers.

        Graphs of all sizes share these buffers, since a graph is planned again before each replay.
        """
        view = self.buffers.view
        width = cdiv(self.vllm_config.max_model_len, self.sizes.page_size)
        reserved = LatentCsrBuffers(
            view("qo_indptr", num_reqs + 1),
            view("kv_indptr", num_reqs + 1),
            view("kv_indices", num_reqs * width),
            view("kv_lens", num_reqs),
        )
        return self.flashinfer.wrapper(self._workspace, self._choice.kernel.value, reserved)

    def _graph_of(self, query_lens: torch.Tensor) -> tuple[Any, int] | None:
        """Wrapper and query length of the graph that an engine may replay for a batch, or None.

        Such a batch has requests of one length, then padding.
        """
        if not self._graphs or len(query_lens) == 0:
            return None
        first = int(query_lens[0])
        found: list[tuple[Any, int]] = [
            (wrapper, length)
            for (reqs, length), wrapper in self._graphs.items()
            if reqs == len(query_lens) and first in (0, length)
        ]
        live = int((query_lens == first).sum()) if first else 0
        # Requests of another length must be padding: last in the batch, without tokens.
        return None if query_lens[live:].any() or not found else found[0]
