"""The metadata builder of the indexer of sparse attention, which scores rows against cached keys.

A row is one query token. Rows of decodes are scored over the pages of the indexer's cache. For
prompts, the keys of each request are gathered once to compact rows, and the prompt's rows are
scored over the gathered keys. Nothing is read back from the device.

Under decode context parallelism (DCP) a rank scores the keys that it keeps. Ranks exchange the best
of each row, chunk by chunk, and all of them write the same list, of positions in the request. How
many chunks there are follows from host bounds, so that it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from builders.base import AttentionMetadata, AttentionMetadataBuilder
from builders.batch import CommonAttentionMetadata, refuse_fields, split_decodes_and_prefills
from builders.buffers import GraphBuffers
from builders.checks.debug import debug_limits
from builders.sparse.rows import RowLengths, context_slots, fill_rows
from builders.sparse.tiles import IndexTile
from builders.splitkv.stripe import Stripe
from specs.attention import AttentionCGSupport
from specs.base import cdiv
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, IndexerSpec
from specs.rows import SCALE_BYTES

NAME: Final = "the indexer"
LOGIT_BYTES: Final = 256 << 20
"""Most bytes of logits that are held at a time; but all logits of a row are."""
KEY_BYTES: Final = 64 << 20
"""Most bytes of gathered keys that are held at a time; but all keys of a request are."""
CANDIDATE_BYTES: Final = 64 << 20
"""Most bytes of candidates that ranks exchange at a time; but all of a row are."""
_FLOAT: Final = 4
_FOUR: Final = 4
"""Logits of 16 bytes, at which every row of logits begins."""


def most_kept(config: EngineConfig, length: int) -> int:
    """Most keys that a rank keeps of a request of ``length`` keys: rank 0 keeps the most."""
    stripe = Stripe.of(config)
    return length if stripe is None else replace(stripe, rank=0).local_len(length)


def _width_of(keys: int) -> int:
    """Logits of a row that sees at most ``keys`` keys: a whole number of 16 bytes."""
    return cdiv(max(keys, 1), _FOUR) * _FOUR


def scratch_of(
    config: EngineConfig, head_dim: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each large buffer of a builder: room for logits and for gathered keys.

    Args:
        config: limits of the engine.
        head_dim: width of the indexer's keys.
    """
    whole, longest = config.max_model_len, most_kept(config, config.max_model_len)
    row, whole_row = _width_of(longest), _width_of(whole)
    verified = config.max_num_seqs * config.max_decode_query_len
    most_rows = max(config.max_num_batched_tokens, verified)
    floats = min(max(LOGIT_BYTES // _FLOAT, row), most_rows * row)
    scratch: dict[str, tuple[tuple[int, ...], torch.dtype]]
    scratch = {"logits": ((floats,), torch.float32)}
    if config.parallel.decode_context_parallel_size > 1:
        floats = min(max(LOGIT_BYTES // _FLOAT, whole_row), most_rows * whole_row)
        scratch["merged"] = ((floats,), torch.float32)
    if config.batch_invariant:
        return scratch
    fits = max(KEY_BYTES // (head_dim + SCALE_BYTES), longest)
    keys = min(fits, config.max_num_seqs * longest)
    return {
        **scratch,
        "data": ((keys, head_dim), torch.uint8),
        "scale": ((keys,), torch.float32),
    }


def selection_bytes(config: EngineConfig, topk: int) -> int:
    """Most memory that a selection of the longest logits allocates while it runs.

    Rows of more than a segment leave the best of each segment, a logit and a position each, and the
    number of these. With a given room for logits, shorter rows are more rows.

    Args:
        config: limits of the engine.
        topk: entries of a list.
    """
    segment = IndexTile().segment_of(topk)
    most_rows = max(
        config.max_num_batched_tokens, config.max_num_seqs * config.max_decode_query_len
    )
    longest = _width_of(config.max_model_len)
    most = 0
    for segments in range(2, cdiv(longest, segment) + 1):
        width = (segments - 1) * segment + 1
        rows = min(most_rows, max(LOGIT_BYTES // (_FLOAT * width), 1))
        held, left = 0, segments * segment
        while left > segment:
            left = cdiv(left, segment) * topk
            held += rows * (2 * _FLOAT * left + _FLOAT)
        most = max(most, held)
    return most


@dataclass
class IndexChunk:
    """Rows whose logits are held at the same time."""

    first_row: int
    """First row, counted from the phase's first."""
    logits: torch.Tensor
    """``[rows, M]`` fp32: room for the rows' logits; no row sees more than M keys of this rank."""
    merged: torch.Tensor | None = None
    """``[rows, M']`` fp32: room for the logits of all ranks' candidates; no row sees more than M'
    keys. None without DCP."""


@dataclass
class IndexKeys:
    """Keys of some requests, gathered one request behind another."""

    first_req: int
    """First request, counted from the phase's first."""
    slots: torch.Tensor
    """``[S]`` int32: cache slot of each key, -1 for none."""
    ends: torch.Tensor
    """``[R'']`` int32: end of each request's keys among the gathered ones."""
    data: torch.Tensor
    """``[S, Di]`` e4m3: room for the gathered keys."""
    scale: torch.Tensor
    """``[S]`` fp32: room for the scale of each gathered key."""
    starts: torch.Tensor
    """``[T'']`` int32: first key of each row's request among the gathered ones."""
    stops: torch.Tensor
    """``[T'']`` int32: end of the keys that each row sees among the gathered ones."""


@dataclass
class IndexGroup:
    """Rows that are scored over the same keys: gathered ones, or the pages of the cache."""

    first_row: int
    """First row, counted from the phase's first."""
    num_rows: int
    """Rows of the group."""
    keys: IndexKeys | None
    """The gathered keys; None where rows are scored over the pages of the cache."""
    chunks: tuple[IndexChunk, ...]
    """All rows of the group, in order."""


@dataclass
class IndexRows:
    """The rows of one phase, each of one query token, of R' requests."""

    first_req: int
    """First request of the phase, in the batch."""
    first_token: int
    """First token of the phase, in the batch."""
    num_rows: int
    """Rows, padding included where the batch counts it."""
    query_start_loc: torch.Tensor
    """``[R' + 1]`` int32, device: first token of each request, counted in the batch's tokens."""
    seq_lens: torch.Tensor
    """``[R']`` int32, device: KV lengths."""
    block_table: torch.Tensor
    """``[R', max_blocks]`` int32, device: blocks of the indexer's cache."""
    lengths: RowLengths
    """Request, visible keys and list length of each row, ``[num_rows]``. Of keys, those that this
    rank keeps are counted."""
    groups: tuple[IndexGroup, ...]
    """All rows in order, in groups."""
    every_len: torch.Tensor | None = None
    """``[num_rows]`` int32, device: keys that each row sees, those of all ranks counted. None
    without DCP."""


@dataclass
class IndexerMetadata(AttentionMetadata):
    """A step of the indexer: decodes come first, then prefills."""

    num_actual_tokens: int
    """Tokens to compute, padding included."""
    decode: IndexRows | None
    """Rows that are scored over pages; None without any."""
    prefill: IndexRows | None
    """Rows that are scored over gathered keys; None without any."""
    stripe: Stripe | None = None
    """The keys that this rank keeps under DCP; None where it has all keys."""


class IndexerMetadataBuilder(AttentionMetadataBuilder[IndexerMetadata]):
    """Builds records of the indexers, whose KV cache group has its own spec, pages and table."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AnyKVCacheSpec,
        layer_names: Sequence[str],
        vllm_config: EngineConfig,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            kv_cache_spec: the group's spec, :class:`specs.kv_cache.IndexerSpec`.
            layer_names: layers of the group.
            vllm_config: limits and settings of the engine; ``index_topk`` is needed.
            device: where the records' tensors live.

        Raises:
            ValueError: the spec is of another class, or ``index_topk`` is missing.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not isinstance(kv_cache_spec, IndexerSpec):
            raise ValueError(
                f"kv_cache_spec must be IndexerSpec for {NAME}, got {type(kv_cache_spec).__name__}"
            )
        config = vllm_config
        if config.index_topk is None:
            raise ValueError(f"vllm_config.index_topk is needed by {NAME}, got None")
        self.stripe = Stripe.of(config)
        self.topk = config.index_topk
        self.head_dim = kv_cache_spec.index_head_dim
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.threshold = self.reorder_batch_threshold or 1
        self.step_limits = self.step_limits.with_verifies(self.threshold)
        self._longest = config.max_model_len
        self.buffers, most_rows = GraphBuffers(self.device), self.step_limits.max_num_tokens
        for name in ("reqs", "visible_lens", "topk_lens"):
            self.buffers.declare(name, (most_rows,), torch.int32)
        if self.stripe is not None:
            self.buffers.declare("every_len", (most_rows,), torch.int32)
        for name, (shape, dtype) in scratch_of(config, self.head_dim).items():
            self.buffers.declare(name, shape, dtype)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> IndexerMetadata:
        """Build the step's record, see the base class.

        Args:
            common_prefix_len: is checked and makes no other difference.
            common_attn_metadata: the batch, with block table and slots of the indexer's cache.
            fast_build: makes no difference to the record.

        Raises:
            NotImplementedError: the batch is not plainly causal.
            ValueError: the batch exceeds the engine's limits.
        """
        batch = common_attn_metadata
        longest = min(batch.max_seq_len, self._longest)
        return self._build(batch, longest, common_prefix_len, fast_build)

    def warm_up_steps(self) -> Iterator[IndexerMetadata]:
        """One small step for each way to score: a decode, and a prompt if the limits allow it.

        Both read block 0 and write nothing to the cache.
        """
        config, block_size = self.vllm_config, self.kv_cache_spec.block_size
        width = cdiv(self._longest, block_size)
        table = torch.zeros((1, width), dtype=torch.int32, device=self.device)
        for count in (1, self.threshold + 1):
            if count > min(config.max_num_batched_tokens, self._longest):
                continue
            batch = CommonAttentionMetadata.from_lengths([count], [count], table, block_size)
            unwritten = torch.full_like(batch.slot_mapping, -1)
            yield IndexerMetadataBuilder.build(self, 0, batch.replace(slot_mapping=unwritten))

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> IndexerMetadata:
        """Build the record to capture a CUDA graph with; it has room for the longest sequences.

        Raises:
            ValueError: a request has more new tokens than a verify.
        """
        longest = common_attn_metadata.max_query_len
        if longest > self.threshold:
            raise ValueError(
                f"max_query_len of a captured batch must be at most {self.threshold} for {NAME}, "
                f"got {longest}"
            )
        return self._build(common_attn_metadata, self._longest)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> IndexerMetadata:
        """Build the record of a draft step, with room for lengths that later draft steps grow."""
        return self._build(common_attn_metadata, self._longest, fast_build=True)

    def update_draft_decode_metadata(self, metadata: IndexerMetadata) -> None:
        """Write anew how many keys rows see, from what the record's lengths are now.

        This can be captured.

        Args:
            metadata: a record of this builder whose rows are all decodes.
        """
        if metadata.decode is not None:
            debug_limits(metadata.decode.seq_lens, self.step_limits)
            self._fill(metadata.decode)

    def _build(
        self,
        batch: CommonAttentionMetadata,
        longest: int,
        common_prefix_len: int = 0,
        fast_build: bool = False,
    ) -> IndexerMetadata:
        """Build a record; no row that is scored over pages may see more than ``longest`` keys."""
        self.check_batch(common_prefix_len, batch, fast_build)
        refuse_fields(batch, NAME, "mm_req_doc_ranges", "rswa_prefix_lens")
        if self.stripe is None:
            refuse_fields(batch, NAME, "dcp_local_seq_lens")
        if batch.causal is not True:
            raise NotImplementedError(f"{NAME} takes causal batches, got causal={batch.causal!r}")
        found = split_decodes_and_prefills(batch, self.threshold)
        # Each kernel sums products in its own order. With batch invariance a row's bits must not
        # depend on the phase, so one kernel scores all rows, over pages.
        decodes = batch.num_reqs if self.vllm_config.batch_invariant else found.num_decodes
        decode = prefill = None
        if batch.num_actual_tokens and (decodes == batch.num_reqs or found.num_decode_tokens):
            decode = self._rows(batch, 0, decodes)
            decode.groups = (self._paged(decode.num_rows, max(longest, 1)),)
        if decodes < batch.num_reqs:
            prefill = self._rows(batch, decodes, batch.num_reqs)
            prefill.groups = tuple(self._gathered(prefill, batch, longest))
        return IndexerMetadata(
            slot_mapping=batch.slot_mapping,
            num_actual_tokens=batch.num_actual_tokens,
            decode=decode,
            prefill=prefill,
            stripe=self.stripe,
            **self.pages,
        )

    def _rows(self, batch: CommonAttentionMetadata, first: int, stop: int) -> IndexRows:
        """The rows of requests ``first`` to ``stop``, without groups."""
        first_token = int(batch.query_start_loc_cpu[first])
        # Padding tokens follow the last request's tokens.
        is_last = stop == batch.num_reqs
        last = batch.num_actual_tokens if is_last else int(batch.query_start_loc_cpu[stop])
        lengths = (
            self.buffers[name][first_token:last] for name in ("reqs", "visible_lens", "topk_lens")
        )
        rows = IndexRows(
            first_req=first,
            first_token=first_token,
            num_rows=last - first_token,
            query_start_loc=batch.query_start_loc[first : stop + 1],
            seq_lens=batch.seq_lens[first:stop],
            block_table=batch.block_table_tensor[first:stop],
            lengths=RowLengths(*lengths),
            groups=(),
        )
        if self.stripe is not None:
            rows.every_len = self.buffers["every_len"][first_token:last]
        self._fill(rows)
        return rows

    def _fill(self, rows: IndexRows) -> None:
        fill_rows(
            *(rows.query_start_loc, rows.seq_lens, rows.first_token, self.topk, rows.lengths),
            self.vllm_config.max_num_seqs,
        )
        if self.stripe is not None:
            assert rows.every_len is not None
            seen = rows.lengths.visible_lens
            rows.every_len.copy_(seen)
            seen.copy_(self.stripe.local_lens(rows.every_len))

    def _paged(self, num_rows: int, longest: int) -> IndexGroup:
        return IndexGroup(0, num_rows, None, tuple(self._chunks(0, num_rows, longest)))

    def _chunks(self, first: int, num_rows: int, longest: int) -> Iterator[IndexChunk]:
        """Chunks of rows, each with as many rows as the buffers have room for logits of.

        Args:
            first: first row, counted from the phase's first.
            num_rows: number of rows.
            longest: most keys of a row, those of all ranks counted.
        """
        room, width = self.buffers["logits"], _width_of(most_kept(self.vllm_config, longest))
        whole = _width_of(longest)
        step = len(room) // width
        if self.stripe is not None:
            candidates = CANDIDATE_BYTES // (2 * _FLOAT * self.topk * self.stripe.size)
            step = min(step, len(self.buffers["merged"]) // whole, candidates)
        step = max(step, 1)
        for begin in range(first, first + num_rows, step):
            count = min(step, first + num_rows - begin)
            chunk = IndexChunk(begin, room[: count * width].view(count, width))
            if self.stripe is not None:
                chunk.merged = self.buffers["merged"][: count * whole].view(count, whole)
            yield chunk

    def _gathered(
        self, rows: IndexRows, batch: CommonAttentionMetadata, longest: int
    ) -> Iterator[IndexGroup]:
        """Groups of requests, each with as many requests as the buffer has room for keys of.

        Args:
            rows: rows of the phase.
            batch: the step's batch.
            longest: most keys of a request.
        """
        count = len(rows.seq_lens)
        starts: list[int] = batch.query_start_loc_cpu[rows.first_req :].tolist()
        bounds = [longest] * count
        known = getattr(batch, "seq_lens_cpu_upper_bound", None)
        if known is not None:
            part = known[rows.first_req : rows.first_req + count].tolist()
            bounds = [min(int(bound), self._longest) for bound in part]
        kept = [most_kept(self.vllm_config, bound) for bound in bounds]
        groups, used = [0], 0
        for req, bound in enumerate(kept):
            if used and used + bound > len(self.buffers["data"]):
                groups.append(req)
                used = 0
            used += bound
        for first, stop in zip(groups, [*groups[1:], count], strict=True):
            begin = starts[first] - rows.first_token
            end = rows.num_rows if stop == count else starts[stop] - rows.first_token
            keys = self._keys(rows, first, stop, slice(begin, end), sum(kept[first:stop]))
            width = max(*bounds[first:stop], 1)
            chunks = tuple(self._chunks(begin, end - begin, width))
            yield IndexGroup(begin, end - begin, keys, chunks)

    def _keys(self, rows: IndexRows, first: int, stop: int, part: slice, count: int) -> IndexKeys:
        """The gathered keys of requests ``first`` to ``stop``.

        Args:
            rows: rows of the phase.
            first: first request, counted from the phase's first.
            stop: the request behind the last one.
            part: rows of these requests.
            count: host bound on their keys, of which those that a rank keeps are counted.
        """
        lens = rows.seq_lens[first:stop]
        if self.stripe is not None:
            lens = self.stripe.local_lens(lens)
        ends = torch.cumsum(lens, 0, dtype=torch.int32)
        # A padding row sees no key, and its request may be any of the phase.
        own = (rows.lengths.reqs[part] - first).clamp(0, stop - first - 1)
        starts = (ends - lens)[own]
        return IndexKeys(
            first_req=first,
            slots=self._slots(rows.block_table[first:stop], ends, count),
            ends=ends,
            data=self.buffers["data"][:count].view(torch.float8_e4m3fn),
            scale=self.buffers["scale"][:count],
            starts=starts,
            stops=starts + rows.lengths.visible_lens[part],
        )

    def _slots(self, table: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
        page, requests = self.kv_cache_spec.block_size, self.vllm_config.max_num_seqs
        return context_slots(table, ends, count, page, requests)

    def _set_block_table(self, metadata: IndexerMetadata, block_table: torch.Tensor) -> None:
        for name in ("decode", "prefill"):
            rows: IndexRows | None = getattr(metadata, name)
            if rows is None:
                continue
            stop = rows.first_req + len(rows.seq_lens)
            table = block_table[rows.first_req : stop]
            groups = tuple(self._moved(group, table) for group in rows.groups)
            setattr(metadata, name, replace(rows, block_table=table, groups=groups))

    def _moved(self, group: IndexGroup, table: torch.Tensor) -> IndexGroup:
        keys = group.keys
        if keys is None:
            return group
        table = table[keys.first_req : keys.first_req + len(keys.ends)]
        slots = self._slots(table, keys.ends, len(keys.slots))
        return replace(group, keys=replace(keys, slots=slots))
