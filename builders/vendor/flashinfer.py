"""Metadata of FLASHINFER: a step planned on the host, from host lengths, for FlashInfer's wrappers.

A plan depends on the layer's window, soft cap and dtypes. The record holds them too, so that an
impl can refuse a record that was planned for another kind of layer. A record is valid until its
builder builds again, because plans live in wrappers that the builder keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_enabled
from builders.device import device_facts
from builders.pages.lists import RequestPlaces, list_pages
from builders.splitkv.tiles import DenseShape
from builders.vendor.flashinfer_parts import install as compat
from builders.vendor.flashinfer_parts.choice import (
    NAME,
    KernelChoice,
    WrapperKernel,
    check_support,
    decode_kernel_of,
    prefill_kernel_of,
)
from builders.vendor.flashinfer_parts.csr import CsrOnDevice, CsrOnHost, LayerSizes
from builders.vendor.flashinfer_parts.lengths import (
    HostLengths,
    csr_on_host,
    debug_lengths,
    host_drafts_reason,
    host_lengths,
    keyless_tokens,
    num_pages,
    skipped_pages,
)
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, SlidingWindowSpec
from specs.positions import cut_window

if TYPE_CHECKING:
    import numpy as np

WORKSPACE_BYTES = 384 << 20
"""Bytes of a builder's scratch for partial states of split rows; FlashInfer bounds their number by
the size of the GPU."""


@dataclass
class PlannedRows:
    """Consecutive query rows, and the wrapper that was planned for them."""

    choice: KernelChoice
    first_token: int
    num_tokens: int
    indices: torch.Tensor
    """``[>= pages]`` int32, device: the pages that the plan reads."""
    wrapper: Any


@dataclass
class DecodeRows(PlannedRows):
    """Query rows of requests with one token each."""


@dataclass
class PrefillRows(PlannedRows):
    """Query rows of requests of any length: prefills, extends, verifies, padding."""


@dataclass
class SharedPrefix:
    """Cascade attention: all tokens over the shared prefix, and each request over its own keys."""

    prefix: PrefillRows
    own: PrefillRows
    outputs: torch.Tensor
    """``[2, T, H, D]`` scratch in the model's dtype: prefix part, own part."""
    lses: torch.Tensor
    """``[2, T, H]`` fp32 scratch: LSE of the prefix part, then of the own part."""


@dataclass
class FlashInferMetadata(AttentionMetadata):
    """A step of dense attention, planned for one kind of layer."""

    num_actual_tokens: int
    """Query rows of the step, without padding; in a CUDA graph of decodes padding counts too."""
    num_reqs: int
    query_start_loc: torch.Tensor
    """``[R + 1]`` int32, device: first query row of each request."""
    seq_lens: torch.Tensor
    """``[R]`` int32, device: KV lengths, this step's tokens included."""
    block_table: torch.Tensor
    """``[R, max_blocks]`` int32, device."""
    lengths: HostLengths
    sizes: LayerSizes
    """The layer that the plans are for."""
    decode: DecodeRows | None
    prefill: PrefillRows | None
    shared: SharedPrefix | None
    """Plans for all rows where the batch has a common prefix; ``decode`` and ``prefill`` are then
    None."""
    keyless: torch.Tensor | None
    """int64, device: indices of query rows without any key, whose output the kernels leave
    undefined; None without such rows."""


@dataclass(slots=True)
class _Listed:
    """The rows, keys and pages of every request that a step's plans list."""

    query_starts: np.ndarray
    """``[R + 1]`` int32, host: first query row of each request."""
    kv_lens: np.ndarray
    """``[R]`` int32, host: listed keys of each request."""
    indices: torch.Tensor
    """``[>= all pages]`` int32, device: pages of all requests, one request behind another."""
    places: RequestPlaces
    """Rows and pages of each request, on the device; decodes are the leading requests."""


@dataclass(frozen=True)
class _Graph:
    """The wrapper of one captured number of requests and query length."""

    choice: KernelChoice
    query_len: int
    wrapper: Any
    reserved: CsrOnDevice


class FlashInferMetadataBuilder(AttentionMetadataBuilder[FlashInferMetadata]):
    """Builder that gives leading requests of one token to the decode wrapper, others to prefill."""

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
            kv_cache_spec: the group's spec.
            layer_names: layers of the group.
            vllm_config: engine limits; ``num_heads`` is needed, and ``logits_soft_cap`` where the
                layers have one.
            device: where the records' tensors live.

        Raises:
            ValueError: the wrappers do not serve the spec or a setting, such as host lengths that
                are not exact.
            FlashInferUnavailableError: FlashInfer cannot be used here.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec: Any = kv_cache_spec
        heads = check_support(spec, vllm_config)
        element = spec.cache_dtype.element(spec.dtype)
        self.shape = DenseShape(
            num_heads=heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size,
            itemsize=spec.dtype.itemsize,
            stored_bits=element.itemsize * 8,
        )
        self.sizes = LayerSizes(
            num_heads=heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            page_size=spec.block_size,
            query_dtype=spec.dtype.torch,
            kv_dtype=element.torch,
            sliding_window=cut_window(
                spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
            ),
            logits_soft_cap=vllm_config.logits_soft_cap,
        )
        self.kind = device_facts(self.device).kind
        self._is_pinned = self.device.type == "cuda"
        self.flashinfer = compat.load()
        self.shares_prefix = self.sizes.sliding_window is None
        # The wrappers need zeros at first use; later plans reuse the memory without clearing it.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._buffers = GraphBuffers(self.device)
        most = vllm_config.max_num_seqs
        self._buffers.declare("places", (3 * most + 4,), torch.int32)
        self._places_key = (0, 0)
        self._places_of = RequestPlaces(self._buffers.view("places", 4), 0)
        """Places for the last step's numbers of requests and decodes, which most steps repeat."""
        self._one_each = torch.arange(most + 1, dtype=torch.int32, device=self.device)
        self._decode_choice = decode_kernel_of(self.shape)
        self._wrappers: dict[tuple[str, WrapperKernel, bool], Any] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._init_reorder_batch_threshold(1)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashInferMetadata:
        """The step's record; nothing is copied back to the host.

        Args:
            common_prefix_len: leading tokens that all requests share, in the same blocks. Every
                request has at least this many tokens before its queries.
            common_attn_metadata: the batch; its host lengths must equal the device's.
            fast_build: ignored.

        Raises:
            ValueError: the batch has no host lengths, lengths exceed the table or a limit, or
                ``common_prefix_len`` is not a whole number of blocks.
            NotImplementedError: the batch's mask is not plainly causal.
        """
        batch = common_attn_metadata
        self.check_batch(common_prefix_len, batch, fast_build)
        refuse_fields(batch, NAME, "dcp_local_seq_lens", "rswa_prefix_lens")
        if batch.causal is not True:
            raise NotImplementedError(f"{NAME} plans causal batches, got causal={batch.causal!r}")
        if any((getattr(batch, "mm_req_doc_ranges", None) or {}).values()):
            raise NotImplementedError(f"{NAME} does not support mm_req_doc_ranges")
        reqs, table = batch.num_reqs, batch.block_table_tensor
        lengths = host_lengths(batch, common_prefix_len, self.sizes.page_size)
        if debug_enabled():
            debug_lengths(batch, lengths)
        # Sliced only where needed, since even a slice of the whole tensor costs host time.
        starts, lens = batch.query_start_loc, batch.seq_lens
        record = FlashInferMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=lengths.num_tokens,
            num_reqs=reqs,
            query_start_loc=starts if starts.shape[0] == reqs + 1 else starts[: reqs + 1],
            seq_lens=lens if lens.shape[0] == reqs else lens[:reqs],
            block_table=table,
            lengths=lengths,
            sizes=self.sizes,
            decode=None,
            prefill=None,
            shared=None,
            keyless=None,
            **self.pages,
        )
        self._plan(record)
        return record

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashInferMetadata:
        """The record to capture a graph with.

        After a build, the graph can be replayed for any batch of the same number of requests, each
        with the captured number of tokens or with none.

        Args:
            common_attn_metadata: a batch of requests of one query length, without padding.

        Raises:
            ValueError: the requests have several query lengths.
        """
        batch = common_attn_metadata
        lens = batch.query_start_loc_cpu[: batch.num_reqs + 1].diff().tolist()
        if len(set(lens)) != 1 or lens[0] == 0 or batch.num_actual_tokens != sum(lens):
            raise ValueError(
                "query_start_loc_cpu must give every request of a captured batch the same number "
                f"of tokens, got {lens} of {batch.num_actual_tokens}"
            )
        key = len(lens), lens[0]
        if key not in self._graphs:
            self._graphs[key] = self._new_graph(*key)
        # Calls self.build, since a wrapper around this builder may have replaced it.
        return self.build(0, batch)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> FlashInferMetadata:
        """Refuse draft steps of an engine.

        Raises:
            NotImplementedError: always, as an engine's host does not know the lengths of draft
                steps. Where the host knows them, ``MultiStepDraft`` plans them by :meth:`build`.
        """
        raise NotImplementedError(host_drafts_reason(NAME, draft_index))

    def _set_block_table(self, metadata: FlashInferMetadata, block_table: torch.Tensor) -> None:
        metadata.block_table = block_table
        metadata.sizes = self.sizes
        self._plan(metadata)

    # -- plans

    def _plan(self, record: FlashInferMetadata) -> None:
        """Make the step's plans and store them in a record that no caller has yet."""
        lengths = record.lengths
        num_tokens = lengths.num_tokens
        record.decode = record.prefill = record.shared = None
        record.keyless = keyless_tokens(lengths, self.device)
        graph = self._graph_of(lengths)
        if graph is not None:
            self._plan_graph(record, graph)
            return
        if num_tokens == 0:
            return
        if lengths.common_prefix_len and self.shares_prefix:
            record.shared = self._shared_prefix(record)
            return
        decodes, choice = lengths.num_decodes, self._decode_choice
        listed = self._listed(record, decodes, record.query_start_loc)
        if decodes:
            wrapper = self._wrapper("decode", choice)
            csr, on_device = self._csr(listed, 0, decodes, wrapper)
            indices = on_device.kv_indices
            self.flashinfer.plan_decode(wrapper, csr, indices, self.sizes, on_device=on_device)
            record.decode = DecodeRows(choice, 0, decodes, indices, wrapper)
        if decodes < num_tokens:
            record.prefill = self._prefill_rows(listed, decodes, "prefill")

    def _prefill_rows(self, listed: _Listed, first_req: int, role: str) -> PrefillRows:
        """Plan the requests from ``first_req`` on, of any length, over their listed keys."""
        starts = listed.query_starts
        first, query_lens = int(starts[first_req]), starts[first_req + 1 :] - starts[first_req:-1]
        tokens, live = int(starts[-1]) - first, int((query_lens > 0).sum())
        choice = prefill_kernel_of(self.shape, self.kind, tokens, live)
        wrapper = self._wrapper(role, choice)
        csr, on_device = self._csr(listed, first_req, listed.kv_lens.size, wrapper)
        indices = on_device.kv_indices
        self.flashinfer.plan_prefill(wrapper, csr, indices, self.sizes, on_device=on_device)
        return PrefillRows(choice, first, tokens, indices, wrapper)

    def _shared_prefix(self, record: FlashInferMetadata) -> SharedPrefix:
        """Plan all tokens over the prefix, then over each request's own keys; adds scratch."""
        lengths, sizes = record.lengths, self.sizes
        tokens, pages = record.num_actual_tokens, lengths.common_prefix_len // sizes.page_size
        ends = torch.tensor([0, tokens, lengths.common_prefix_len], dtype=torch.int32).numpy()
        csr = csr_on_host(ends[:2], ends[2:], sizes.page_size, self._is_pinned)
        choice = prefill_kernel_of(self.shape, self.kind, tokens, 1)
        wrapper = self._wrapper("prefix", choice)
        row = int(lengths.query_lens.nonzero()[0][0])
        indices = record.block_table[row, :pages].contiguous()
        self.flashinfer.plan_prefill(wrapper, csr, indices, sizes, causal=False)
        if "outputs" not in self._buffers:
            state = 2, self.vllm_config.max_num_batched_tokens, sizes.num_heads
            self._buffers.declare("outputs", (*state, sizes.head_size), sizes.query_dtype)
            self._buffers.declare("lses", state, torch.float32)
        state = 2, tokens, sizes.num_heads
        return SharedPrefix(
            prefix=PrefillRows(choice, 0, tokens, indices, wrapper),
            own=self._prefill_rows(self._listed(record, 0, record.query_start_loc), 0, "own"),
            outputs=self._buffers.view("outputs", *state, sizes.head_size),
            lses=self._buffers.view("lses", *state),
        )

    def _wrapper(self, role: str, choice: KernelChoice) -> Any:
        """The wrapper of a role outside graphs; each kernel's wrapper is made once."""
        key = role, choice.kernel, choice.use_tensor_cores
        if key not in self._wrappers:
            self._wrappers[key] = self._new_wrapper(role == "decode", choice, None)
        return self._wrappers[key]

    def _new_wrapper(
        self, is_decode: bool, choice: KernelChoice, buffers: CsrOnDevice | None
    ) -> Any:
        kernel = choice.kernel.value
        if not is_decode:
            return self.flashinfer.prefill(self._workspace, kernel, buffers)
        return self.flashinfer.decode(self._workspace, kernel, choice.use_tensor_cores, buffers)

    # -- CUDA graphs

    def _new_graph(self, num_reqs: int, query_len: int) -> _Graph:
        """Make a graph's wrapper over the builder's buffers.

        Graphs of all sizes share these buffers, since a graph is planned again before each replay.
        """
        config, buffers = self.vllm_config, self._buffers
        most = config.max_num_seqs
        width = cdiv(config.max_model_len, self.sizes.page_size)
        if "kv_indices" not in buffers:
            buffers.declare("kv_indices", (most * width,), torch.int32)
        places = self._places(num_reqs, num_reqs if query_len == 1 else 0)
        parts = places.leading if query_len == 1 else places.behind
        reserved = CsrOnDevice(*parts, buffers.view("kv_indices", num_reqs * width))
        choice = self._decode_choice
        if query_len > 1:
            choice = prefill_kernel_of(self.shape, self.kind, num_reqs * query_len, num_reqs)
        wrapper = self._new_wrapper(query_len == 1, choice, reserved)
        return _Graph(choice, query_len, wrapper, reserved)

    def _graph_of(self, lengths: HostLengths) -> _Graph | None:
        """The graph that an engine may replay for a batch, or None where none was captured.

        Such a batch has requests of one length, then padding. The builder does not know whether the
        step will run in the graph, and plans the graph's wrapper in either case: the wrapper also
        serves outside the graph, but a graph without a new plan would replay the previous step.
        """
        if not self._graphs or lengths.common_prefix_len:
            return None
        query_lens = lengths.query_lens
        first = int(query_lens[0]) if query_lens.size else 0
        graph = self._graphs.get((query_lens.size, first))
        if graph is None:
            return None
        live = int((query_lens == first).sum())
        # Requests of another length must be padding: last in the batch, without tokens.
        is_padded = not query_lens[live:].any()
        return graph if is_padded else None

    def _plan_graph(self, record: FlashInferMetadata, graph: _Graph) -> None:
        reqs, wrapper = record.num_reqs, graph.wrapper
        is_decode = graph.query_len == 1
        # In a graph the decode wrapper has a row for every request, padding included.
        starts = self._one_each[: reqs + 1] if is_decode else record.query_start_loc
        listed = self._listed(record, reqs if is_decode else 0, starts)
        if is_decode:
            listed.query_starts = torch.arange(reqs + 1, dtype=torch.int32).numpy()
        csr, on_device = self._csr(listed, 0, reqs, wrapper)
        indices = self._buffers.write("kv_indices", on_device.kv_indices[: csr.num_pages])
        plan = self.flashinfer.plan_decode if is_decode else self.flashinfer.plan_prefill
        plan(wrapper, csr, indices, self.sizes, on_device=graph.reserved)
        if is_decode:
            record.num_actual_tokens = reqs
            record.decode = DecodeRows(graph.choice, 0, reqs, indices, wrapper)
        else:
            record.prefill = PrefillRows(graph.choice, 0, csr.num_tokens, indices, wrapper)

    # -- page lists

    def _places(self, num_reqs: int, num_leading: int) -> RequestPlaces:
        """Views for one step's places; steps of all sizes share a buffer, written in every step."""
        key = num_reqs, num_leading
        if self._places_key != key:
            out = self._buffers.view("places", 3 * num_reqs + 4)
            self._places_key, self._places_of = key, RequestPlaces(out, num_leading)
        return self._places_of

    def _listed(
        self, record: FlashInferMetadata, num_leading: int, query_start_loc: torch.Tensor
    ) -> _Listed:
        """List keys and pages of every request.

        A shared prefix is left out, and so are blocks before a window, which an engine may have
        given to other requests. Masks stay right, because they count from the end of a request.
        """
        lengths, size, window = record.lengths, self.sizes.page_size, self.sizes.sliding_window
        kv_lens, device_lens, table = lengths.kv_lens, record.seq_lens, record.block_table
        if lengths.common_prefix_len and self.shares_prefix:
            hidden = lengths.common_prefix_len
            kv_lens, device_lens = (kv_lens - hidden).clip(0), (device_lens - hidden).clip(0)
            table = table[:, hidden // size :]
        if table.shape[0] != record.num_reqs:
            table = table[: record.num_reqs]
        skipped = None
        if window is not None:
            skipped = skipped_pages(device_lens, record.query_start_loc, window, size)
            kv_lens = kv_lens - size * skipped_pages(kv_lens, lengths.query_start_loc, window, size)
        places, most = self._places(record.num_reqs, num_leading), self.vllm_config.max_num_seqs
        given = table, device_lens, size, skipped, most
        indices = list_pages(*given, places, query_start_loc)
        return _Listed(lengths.query_start_loc, kv_lens, indices, places)

    def _csr(
        self, listed: _Listed, start: int, stop: int, wrapper: Any
    ) -> tuple[CsrOnHost, CsrOnDevice]:
        """Lengths and pages of requests ``start`` to ``stop``: the leading ones, or the rest."""
        size, kv_lens, indices = self.sizes.page_size, listed.kv_lens, listed.indices
        starts = listed.query_starts[start : stop + 1]
        # Only FlashInfer's own plan copies from this memory to the GPU; a replan copies nothing.
        is_pinned = self._is_pinned and not self.flashinfer.replans(wrapper)
        csr = csr_on_host(starts, kv_lens[start:stop], size, is_pinned)
        is_leading = stop == listed.places.num_leading
        parts = listed.places.leading if is_leading else listed.places.behind
        if start:
            indices = indices[num_pages(kv_lens[:start], size) :]
        return csr, CsrOnDevice(*parts, indices)
