"""An MLA layer on trial: its latent cache, its forward, and the check of its results.

``LatentTrial`` sets up a :class:`attn.testing.cases.LatentCase`. It calls ``do_kv_cache_update`` to
write latent rows, ``attn.ops.mla.mla_attention`` for the output of the layer, and ``forward_mqa``
with absorbed queries for the latent output and the lse of the decodes.

:func:`latent_output` and :func:`low_latent_output` compute what a layer should give, exactly and in
low precision; they serve tests without a trial too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.ops.mla import mla_attention
from attn.testing import batches, budget, oracle, stored_rows
from attn.testing.batches import Indexer, LatentWeights, Layer, Projection, Request
from attn.testing.cases import LatentCase
from attn.testing.oracle import Rules, State
from attn.testing.stored_rows import Stored
from attn.testing.trial import (
    PAGE_PADDING,
    CaseResult,
    Inputs,
    Results,
    Trial,
    check_poison,
    check_rows,
    judge_lse,
    judge_output,
)
from specs.attention import AttentionType
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel
from specs.kv_cache import MLAAttentionSpec, SlidingWindowMLASpec


def _rounds_queries(record: Any) -> bool:
    """Whether a kernel of this library rounds the queries of a record's decodes to e4m3."""
    tile = getattr(getattr(record.decode, "split", None), "hopper", None)
    return bool(getattr(tile, "rounds_queries", False))


def latent_output(weights: LatentWeights, request: Request) -> Tensor:
    """The output of a dense MLA layer for one request, by definition: float64 ``[Tq, H, V]``.

    Keys and values are expanded for every head, and the oracle attends.

    Args:
        weights: of the layer.
        request: queries ``[Tq, H, P + r]`` and latent rows ``[Tk, 1, L + r]``.
    """
    nope, rank, rows = weights.nope_size, weights.rank, request.key[:, 0]
    parts = (request.query[..., :nope], request.query[..., nope:], rows[:, :rank], rows[:, rank:])
    position, rules = request.first_position, request.rules
    return oracle.mla_expanded(*parts, weights.w_uk, weights.w_uv, position, rules)[0]


def low_latent_output(
    weights: LatentWeights,
    request: Request,
    stored: Tensor,
    attend: Callable[[Tensor, Tensor], Tensor] | None = None,
    fp8_scale: Tensor | None = None,
) -> Tensor:
    """The output of an MLA layer for one request as a careful kernel computes it in the model's
    dtype: ``[Tq, H, V]``. Its error sets the budget of an output.

    Args:
        weights: of the layer.
        request: queries, latent rows and rules; the dtype of its queries is the model's.
        stored: latent rows ``[Tk, L + r]`` as the cache has them.
        attend: for decodes; takes absorbed queries ``[Tq, H, L + r]`` and latent rows, gives the
            latent output ``[Tq, H, L]``. None: a prefill, which expands keys and values for every
            head and takes the new tokens as they came, not as they are stored.
        fp8_scale: scale with which a prefill rounds expanded keys and values to e4m3; it rounds
            queries too, with scale 1. None: nothing is rounded to e4m3.
    """
    dtype, rank, nope = request.query.dtype, weights.rank, weights.nope_size
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = stored.to(dtype).to(wide)
    w_uk, w_uv = weights.w_uk.to(wide), weights.w_uv.to(wide)
    if attend is not None:
        q_nope, q_pe = request.query[..., :nope], request.query[..., nope:]
        absorbed = torch.einsum("thp,lhp->thl", q_nope.to(wide), w_uk).to(dtype)
        latent = attend(torch.cat([absorbed, q_pe], -1), rows)
        return torch.einsum("thl,lhv->thv", latent.to(wide), w_uv).to(dtype)
    new = request.key[request.context_len :, 0].to(wide)
    rows = torch.cat([rows[: request.context_len], new])
    k_nope = torch.einsum("sl,lhp->shp", rows[:, :rank], w_uk)
    value = torch.einsum("sl,lhv->shv", rows[:, :rank], w_uv)
    key = torch.cat([k_nope, rows[:, None, rank:].expand(-1, weights.num_heads, -1)], -1)
    query = request.query
    if fp8_scale is not None:
        query = stored_rows.quantized(query, "fp8", torch.ones(()))
        key = stored_rows.quantized(key.to(dtype), "fp8", fp8_scale)
        value = stored_rows.quantized(value.to(dtype), "fp8", fp8_scale)
    position, rules = request.first_position, request.rules
    habits = budget.Habits(fp8_weights=fp8_scale is not None)
    return budget.low_precision(query, key, value, position, rules, dtype, habits)[0]


class LatentTrial(Trial):
    """An MLA layer on trial, dense, behind a sliding window or sparse.

    Args:
        backend: the backend on trial, a latent one.
        case: what the layer, its batch and its cache are like.
        device: where the backend's tensors lie.
    """

    case: LatentCase
    TOPK = 32
    """Entries of a list of a sparse layer."""
    fp8_k_scale = 0.037
    """The layer's ``_k_scale`` over an fp8 cache with one scale per tensor; else that is 1."""

    def __init__(
        self, backend: type[AttentionBackend], case: LatentCase, device: torch.device
    ) -> None:
        super().__init__(backend, case, device)
        self.weights = batches.latent_weights(
            self.generator, case.num_heads, self.dtype, case.rank, rope_size=case.rope_size
        )
        # On both sides beforehand: a graph's capture may copy nothing from the host.
        w_uk = self.weights.w_uk.double()
        self.w_uk = {"cpu": w_uk, device.type: w_uk.to(device)}
        w_uv = self.weights.w_uv.double().to(device)
        self.placed_weights = replace(self.weights, w_uk=self.w_uk[device.type], w_uv=w_uv)
        self.lists: dict[int, Tensor] = {}
        self.requests = batches.latent_requests(
            self.generator,
            case.batch,
            self.weights,
            self.dtype,
            case.block_size,
            None if case.lists is None else self._list_positions,
            case.sliding_window,
        )
        self.full_paging = batches.paginate(self.generator, case.batch.kv_lens, case.block_size)
        self.paging = self.full_paging
        if case.sliding_window is not None:
            self.paging = batches.forget_unseen_blocks(self.full_paging, self.requests)
        topk = None if case.lists is None else self.TOPK
        self.config = self.engine(case.num_heads, index_topk=topk, softmax_scale=self.weights.scale)
        self.spec = self._kv_cache_spec(topk)
        self.buffer = self.allocate()
        is_scaled = case.cache_dtype in (CacheDType.FP8, CacheDType.FP8_E4M3)
        one = torch.ones((), device=device)
        k_scale = torch.tensor(self.fp8_k_scale, device=device) if is_scaled else one
        # Read where queries are quantised beside such a cache.
        q_scale = torch.tensor(0.25, device=device) if is_scaled else one
        self.layer = Layer(q_scale, k_scale, k_scale)
        self.impl = self._impl()
        self.inputs = self._inputs()

    def _kv_cache_spec(self, topk: int | None) -> MLAAttentionSpec | SlidingWindowMLASpec:
        case = self.case
        common = {
            "block_size": case.block_size,
            "dtype": case.dtype,
            "cache_dtype": case.cache_dtype,
            "kv_lora_rank": case.rank,
            "qk_rope_head_dim": case.rope_size,
            "page_size_padded": self.page_bytes if case.padded_pages else None,
        }
        if case.sliding_window is not None:
            return SlidingWindowMLASpec(**common, sliding_window=case.sliding_window)
        return MLAAttentionSpec(**common, topk=topk)

    @property
    def layout(self) -> Any:
        """The spec's layout of latent rows."""
        return self.spec.layout()

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's latent row, block scales included."""
        case = self.case
        return stored_rows.latent_row_bytes(
            case.rank, case.rope_size, case.cache_dtype.value, self.dtype
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of the latent rows of one block, and its padding where pages are padded."""
        padding = PAGE_PADDING if self.case.padded_pages else 0
        return self.case.block_size * self.row_bytes + padding

    def _list_positions(self, row: int, num_queries: int, num_keys: int, first: int) -> Tensor:
        """Make a request's lists of visible positions, and give the mask that they mean.

        The lists, int32 ``[num_queries, TOPK]``, go into ``self.lists``. Every fourth is empty.

        Args:
            row: of the request.
            num_queries: Tq.
            num_keys: Tk.
            first: position of the first query.

        Returns:
            bool ``[Tq, Tk]``.
        """
        visible = torch.zeros(num_queries, num_keys, dtype=torch.bool)
        lists = torch.full((num_queries, self.TOPK), oracle.NO_TOKEN, dtype=torch.int32)
        for t in range(num_queries):
            seen = min(first + t + 1, num_keys)
            is_empty = (row + t) % 4 == 3
            count = 0 if is_empty else min(seen, self.TOPK - 4 * (t % 3) - 4)
            listed = torch.randperm(seen, generator=self.generator)[:count]
            visible[t, listed] = True
            places = torch.arange(count)
            if self.case.lists == "holes":
                places = torch.randperm(self.TOPK, generator=self.generator)[:count].sort().values
            lists[t, places] = listed.int()
            if self.case.lists == "repeats" and count:
                lists[t, count] = listed[0]
        self.lists[row] = lists
        return visible

    def _indexer(self) -> Indexer | None:
        """The lists of all requests as a sparse layer's indexer holds them; else None."""
        if self.case.lists is None:
            return None
        # Lists of padding tokens are what an earlier, longer step left behind.
        parts = [self.lists[request.row] for request in self.requests]
        padding = torch.full((self.batch_spec.num_padding_tokens, self.TOPK), batches.WILD_BLOCK)
        return Indexer(torch.cat([*parts, padding.int()]).to(self.device))

    def _impl(self) -> Any:
        case, weights = self.case, self.weights
        impl_cls: Any = self.backend.get_impl_cls()
        impl = impl_cls(
            case.num_heads,
            case.rank + case.rope_size,
            weights.scale,
            1,
            None,
            case.sliding_window,
            case.cache_dtype.value,
            None,
            AttentionType.DECODER.value,
            None,
            q_lora_rank=None,
            kv_lora_rank=case.rank,
            qk_nope_head_dim=weights.nope_size,
            qk_rope_head_dim=case.rope_size,
            qk_head_dim=weights.nope_size + case.rope_size,
            v_head_dim=weights.v_size,
            kv_b_proj=Projection(weights.kv_b_proj().to(self.device)),
            indexer=self._indexer(),
        )
        impl.process_weights_after_loading(self.dtype)
        return impl

    def _inputs(self) -> Inputs:
        padding, fused = self.batch_spec.num_padding_tokens, self.case.fused_projection
        batch = batches.make_batch(self.batch_spec, self.paging, True, self.device)
        if self.backend.capabilities.needs_host_lengths:
            batch = batch.replace(seq_lens_cpu_upper_bound=batch.seq_lens.cpu())
        query = batches.stack_rows([r.query for r in self.requests], padding, self.device)
        rows = [
            batches.new_rows(request.key, request.context_len, len(request.query))
            for request in self.requests
        ]
        new = batches.stack_rows(rows, padding, self.device, fused)
        return Inputs(batch, query, new, None)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Latent ``[T, L]`` and rotary part ``[T, r]`` of rows ``[T, 1, L + r]``: strided views."""
        return rows[:, 0, : self.case.rank], rows[:, 0, self.case.rank :]

    def _update(self, rows: Tensor, slots: Tensor) -> None:
        """Write latent rows ``[T, 1, L + r]`` into slots ``[T]`` of the cache."""
        kv_c, k_pe = self._parts(rows)
        if self.case.fused_projection:
            k_pe = k_pe[:, None]
        dtype = self.case.cache_dtype.value
        cache, scale = self.cache(), self.layer._k_scale
        self.impl.do_kv_cache_update(kv_c, k_pe, cache, slots, dtype, scale)

    def write(self) -> None:
        """Write the context's latent rows, then the new tokens', by ``do_kv_cache_update``."""
        context = torch.cat([r.key[: r.context_len] for r in self.requests])
        slots = [self.full_paging.slots(r.row, 0, r.context_len) for r in self.requests]
        self._update(context.to(self.device), torch.cat(slots).to(self.device))
        assert self.inputs.key is not None
        if not self.backend.forward_includes_kv_cache_update:
            self._update(self.inputs.key, self.inputs.batch.slot_mapping)

    def written_slots(self) -> list[Tensor]:
        """int64 cache slots of each request's rows, those of blocks that a window forgot too."""
        lens = ((request.row, len(request.key)) for request in self.requests)
        return [self.full_paging.slots(row, 0, count) for row, count in lens]

    def _rows(self) -> Tensor:
        """The cache's bytes by slot: uint8 ``[N * P, row_bytes]``."""
        pages = self.buffer.cpu().view(self.paging.num_blocks, -1)
        content = pages[:, : self.case.block_size * self.row_bytes]
        return content.reshape(-1, self.row_bytes)

    def _stored(self, slots: Tensor) -> tuple[Stored, Stored]:
        """Latent ``[slots, L]`` and rotary part ``[slots, r]`` that the cache's bytes mean."""
        scale, case = self.layer._k_scale.cpu(), self.case
        rows = self._rows()[slots]
        return stored_rows.decode_latent(rows, case.rank, case.cache_dtype.value, self.dtype, scale)

    def check_cache(self, result: CaseResult) -> None:
        """Check the rows and the block scales of written slots, and poison everywhere else."""
        slots = torch.cat(self.written_slots())
        rows = self._rows()
        margins = self.buffer.cpu().view(self.paging.num_blocks, -1)
        margins = margins[:, self.case.block_size * self.row_bytes :]
        untouched = torch.ones(len(rows), dtype=torch.bool)
        untouched[slots] = False
        check_poison(rows, margins, untouched, result)
        x = torch.cat([request.key for request in self.requests])
        parts = self._parts(x)
        latent, rope = self._stored(slots)
        check_rows("the latent", parts[0], latent, result)
        check_rows("the rotary key", parts[1], rope, result)
        if self.case.cache_dtype is CacheDType.FP8_DS_MLA:
            wanted = stored_rows.block_scale(stored_rows.latent_blocks(parts[0]))[..., 0]
            actual = latent.scale[:, :: stored_rows.LATENT_BLOCK]
            off = actual != wanted
            count = int(off.sum())
            result.note("cache", f"{count} block scales are off" if count else None)

    def attend(
        self, record: Any, inputs: Inputs, cache: Tensor, *, for_bits: bool = False
    ) -> Results:
        """One forward of the layer, and one ``forward_mqa`` over the batch's decodes.

        Results are ``output`` ``[T, H, V]``, ``latent`` ``[decode tokens, H, L]`` where there are
        decodes, and ``lse`` fp32 ``[decode tokens, H]`` where the backend declares that it gives
        one. With ``for_bits``, a batch without prefills has no ``output``.
        """
        tokens, width = len(inputs.query), self.case.num_heads * self.weights.v_size
        results: Results = {}
        if record.num_prefill_tokens or not for_bits:
            output = batches.poisoned(tokens, width, dtype=self.dtype, device=self.device)
            assert inputs.key is not None
            kv_c, k_pe = self._parts(inputs.key)
            mla_attention(self.impl, self.layer, inputs.query, kv_c, k_pe, cache, record, output)
            results["output"] = output.view(tokens, self.case.num_heads, self.weights.v_size)
        decodes = record.num_decode_tokens
        if decodes:
            absorbed = self._absorbed(inputs.query[:decodes])
            nope, rope = absorbed[..., : self.case.rank], absorbed[..., self.case.rank :]
            # An engine's absorbed part is a product for each head, seen token by token.
            by_head = nope.transpose(0, 1).contiguous().transpose(0, 1)
            query = absorbed if self.case.fused_projection else (by_head, rope)
            latent, lse = self.impl.forward_mqa(query, cache, record, self.layer)
            results["latent"] = latent
            if self.backend.capabilities.lse:
                results["lse"] = lse
        return results

    def _absorbed(self, query: Tensor) -> Tensor:
        """Absorbed queries ``[T, H, L + r]`` of queries ``[T, H, P + r]``, rounded once.

        Each token is computed by itself, so that its bits do not depend on the other tokens.
        """
        nope, rope = query[..., : self.weights.nope_size], query[..., self.weights.nope_size :]
        w_uk = self.w_uk[query.device.type]
        rows = [torch.einsum("hp,lhp->hl", token, w_uk) for token in nope.double()]
        latent = torch.stack(rows) if rows else query.new_zeros(0, *w_uk.shape[:2][::-1])
        return torch.cat([latent.to(query.dtype), rope], -1)

    def profile(self) -> Tensor:
        """The layer's output ``[T, H * V]`` with an empty cache and no metadata."""
        inputs, width = self.inputs, self.case.num_heads * self.weights.v_size
        output = batches.poisoned(len(inputs.query), width, dtype=self.dtype, device=self.device)
        empty = torch.empty(0, device=self.device)
        assert inputs.key is not None
        parts = self._parts(inputs.key)
        return mla_attention(self.impl, self.layer, inputs.query, *parts, empty, None, output)

    def check_padding(self, results: Results, result: CaseResult) -> None:
        """Check the rows of ``output`` past the last request's.

        Padding tokens that the batch counts go through the up-projection with the others: their
        rows must be zeros, or still poison. Rows past the batch must still be poison. ``latent``
        and ``lse`` are tensors of the impl's own, which promise nothing past the batch's tokens.
        """
        output = results["output"]
        counted = output[self.batch_spec.num_tokens : self.inputs.batch.num_actual_tokens]
        past = output[self.inputs.batch.num_actual_tokens :]
        written = not batches.is_poison(past) or not (
            batches.is_poison(counted) or bool((counted == 0).all())
        )
        result.note("padding", "output rows past the batch were written" if written else None)

    def own_bits(self, results: Results, record: Any) -> Results:
        """The results whose bits must be the same in every batch.

        Decodes count by ``latent`` and ``lse`` alone, since ``output`` has gone through the
        layer's projections, which are not the impl's. Where the plan of the Hopper kernel cuts
        requests by what the batch has, their bits depend on it, and only ``output`` of a batch
        with prefills remains.

        Raises:
            AssertionError: the plan depends on the batch, and the Hopper kernel was not asked for.
        """
        split = getattr(record.decode, "split", None)
        if split is not None and split.depends_on_batch:
            if self.decode_kernel is DecodeKernel.TRITON:
                raise AssertionError("only the Hopper kernel's rows are cut where the batch says")
            results = {name: rows for name, rows in results.items() if name == "output"}
        kept = {name: rows for name, rows in results.items() if name != "output"}
        if record.num_prefill_tokens:
            kept["output"] = results["output"]
        return kept

    def _low_rows(self, request: Request) -> Tensor:
        """float64 latent rows ``[Tk, L + r]`` of a request after a round trip through the cache."""
        rows, scale = request.key[:, 0], self.layer._k_scale.cpu()
        return stored_rows.quantized_latent(
            rows, self.case.cache_dtype.value, scale, self.case.rank
        )

    def _latent_state(self, request: Request, absorbed: Tensor, rows: Tensor) -> State:
        """The oracle's latent state of absorbed queries ``[Tq, H, L + r]`` over latent rows
        ``[Tk, L + r]``: all visible rows, or those that a sparse layer's lists name.
        """
        rank, scale = self.case.rank, self.weights.scale
        q, rows = (absorbed[..., :rank], absorbed[..., rank:]), rows.double()
        keys = (rows[:, :rank], rows[:, rank:])
        if request.row in self.lists:
            return oracle.sparse_mla(*q, *keys, self.lists[request.row], scale)
        return oracle.mla_absorbed(*q, *keys, request.first_position, request.rules)

    def _low_latent_state(
        self, request: Request, absorbed: Tensor, rows: Tensor, record: Any
    ) -> State:
        """The latent state of absorbed queries over latent rows, in the model's precision.

        Queries that the kernel of the record rounds to e4m3 are multiplied as such.
        """
        scale = float(self.layer._k_scale) if _rounds_queries(record) else 0.0
        habits = budget.Habits(key_scale=scale)

        def low(query: Tensor, keys: Tensor, first: int, rules: Rules) -> State:
            key = keys[:, None]
            value = key[..., : self.case.rank]
            return budget.low_precision(query, key, value, first, rules, self.dtype, habits)

        if request.row not in self.lists:
            return low(absorbed, rows, request.first_position, request.rules)
        rules = Rules(scale=self.weights.scale, causal=False)
        states = [
            low(absorbed[t : t + 1], rows[listed[listed >= 0].long()], 0, rules)
            for t, listed in enumerate(self.lists[request.row])
        ]
        return torch.cat([out for out, _ in states]), torch.cat([lse for _, lse in states])

    def judge(self, results: Results, record: Any, result: CaseResult) -> None:
        """Check ``output`` of the layer, and ``latent`` and ``lse`` of the decodes, against the
        oracle on the original rows. Over a quantised cache that is right, check the decodes under
        ``stored`` too, against the oracle on the rows that the cache holds.
        """
        decodes, outs, latents, stored = record.num_decode_tokens, [], [], []
        for request, slots in zip(self.requests, self.written_slots(), strict=True):
            if not len(request.query):
                continue
            is_decode = request.tokens.stop <= decodes
            outs.append((self._output(request), self._low_output(request, is_decode, record)))
            if not is_decode:
                continue
            absorbed, rows = self._absorbed(request.query), request.key[:, 0]
            expected = self._latent_state(request, absorbed, rows)
            low_rows, read = self._low_rows(request), self._read_query(absorbed, record)
            latents.append((expected, self._low_latent_state(request, read, low_rows, record)))
            if self.case.cache_dtype.is_quantized and result.cache_is_right:
                held = torch.cat([part.real for part in self._stored(slots)], -1)
                exact = self._latent_state(request, read, held)
                stored.append((exact, self._low_latent_state(request, read, held, record)))
        self._judge_outputs(results, outs, result)
        self._judge_latents("latent", "lse", results, latents, result)
        self._judge_latents("stored", "stored", results, stored, result)

    def _read_query(self, absorbed: Tensor, record: Any) -> Tensor:
        """Absorbed queries as the kernel reads them: rounded to e4m3 where its scratch is e4m3, or
        where the plan says so.

        Raises:
            AssertionError: no kernel of this backend is known to round queries over this cache, or
                nobody asked for that.
        """
        if _rounds_queries(record):
            if not self.fp8_mla_queries or self.case.cache_dtype is not CacheDType.FP8_E4M3:
                raise AssertionError("decode rounds queries to e4m3, which nobody asked for")
            return stored_rows.rounded_queries(absorbed)
        scratch = getattr(record.decode, "query", None)
        if not isinstance(scratch, Tensor) or scratch.dtype is not torch.float8_e4m3fn:
            return absorbed
        if self.backend.get_name() != "TRTLLM_MLA" or not self.case.cache_dtype.is_quantized:
            raise AssertionError(f"{self.backend.get_name()} is not known to round queries to e4m3")
        return stored_rows.quantized(absorbed, "fp8", self.layer._q_scale.cpu())

    def _judge_outputs(
        self, results: Results, pairs: list[tuple[Tensor, Tensor]], result: CaseResult
    ) -> None:
        """Check ``output`` against pairs of the exact and the low-precision output."""
        if pairs:
            expected, low = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            actual = results["output"][: len(expected)].cpu()
            judge_output("output", actual, expected, low, self.dtype, result)

    def _judge_latents(
        self,
        check: str,
        lse_check: str,
        results: Results,
        pairs: list[tuple[State, State]],
        result: CaseResult,
    ) -> None:
        """Check ``latent`` and ``lse`` against pairs of the exact and the low-precision state."""
        if not pairs:
            return
        out, low_out = (torch.cat([pair[i][0] for pair in pairs]) for i in (0, 1))
        lse, low_lse = (torch.cat([pair[i][1] for pair in pairs]) for i in (0, 1))
        actual = results["latent"][: len(out)].cpu()
        judge_output(check, actual, out, low_out, self.dtype, result)
        if "lse" in results:
            judge_lse(lse_check, results["lse"][: len(out)].cpu(), lse, low_lse, result)

    def _split_query(self, request: Request) -> tuple[Tensor, Tensor]:
        """The parts ``[Tq, H, P]`` and ``[Tq, H, r]`` of a request's queries."""
        nope = self.weights.nope_size
        return request.query[..., :nope], request.query[..., nope:]

    def _output(self, request: Request) -> Tensor:
        """The exact output of the layer for one request: float64 ``[Tq, H, V]``."""
        weights, rows = self.weights, request.key[:, 0]
        q_nope, q_pe = self._split_query(request)
        if request.row in self.lists:
            absorbed = torch.einsum("thp,lhp->thl", q_nope.double(), weights.w_uk.double())
            query = torch.cat([absorbed, q_pe.double()], -1)
            latent, _ = self._latent_state(request, query, rows)
            return torch.einsum("thl,lhv->thv", latent, weights.w_uv.double())
        # On the device: expanding keys and values is most of the arithmetic of a long test.
        query, key = request.query.to(self.device), request.key.to(self.device)
        return latent_output(self.placed_weights, replace(request, query=query, key=key)).cpu()

    def _low_output(self, request: Request, is_decode: bool, record: Any) -> Tensor:
        """The output of the layer for one request in the model's precision: ``[Tq, H, V]``.

        A decode is absorbed, a prefill expanded.

        Raises:
            AssertionError: the record says that prefills round to e4m3, which the engine's settings
                did not ask for.
        """

        def attend(query: Tensor, rows: Tensor) -> Tensor:
            read = self._read_query(query, record)
            return self._low_latent_state(request, read, rows, record)[0]

        stored, scale = self._low_rows(request), None
        if getattr(getattr(record, "ragged", None), "dtype", None) is torch.float8_e4m3fn:
            if not self.fp8_mla_prefill:
                raise AssertionError("prefill rounds to e4m3, which nobody asked for")
            scale = self.layer._k_scale.cpu().clamp(min=1)
        given = self.weights, request, stored, attend if is_decode else None
        return low_latent_output(*given, scale)

    def alone(self, row: int, tokens: slice) -> Inputs:
        """Inputs of a step with one request only; a sparse layer's indexer gets that one's lists,
        until :meth:`together`.
        """
        if self.impl.indexer is not None:
            count = tokens.stop - tokens.start
            self.impl.indexer.topk_indices_buffer = self.lists[row][-count:].to(self.device)
        return super().alone(row, tokens)

    def together(self) -> None:
        """Give a sparse layer's indexer the lists of all requests back."""
        indexer = self._indexer()
        if indexer is not None and self.impl.indexer is not None:
            self.impl.indexer.topk_indices_buffer = indexer.topk_indices_buffer
