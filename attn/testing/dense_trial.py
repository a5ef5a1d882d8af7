"""A dense attention layer on trial: its cache, its forward, and the check of its results.

``DenseTrial`` sets up a :class:`attn.testing.cases.Case`. It calls ``do_kv_cache_update`` to write
keys and values into the cache and ``forward`` to attend. Encoders have no cache: their trial calls
``forward`` alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.testing import batches, budget, oracle, stored_rows
from attn.testing.batches import Layer, Request
from attn.testing.cases import Case, is_inline
from attn.testing.habits import both, fp8_products, of_wrapper
from attn.testing.oracle import State
from attn.testing.stored_rows import Pages, Stored
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
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from specs.layouts import KVOrder, KVPacking

OUTPUT_SCALE = 1 / 32
"""Scale of fp8 outputs, real = stored * scale. It is far from 1, so that ignoring it shows, and
outputs of a few units still lie inside e4m3's range."""


class DenseTrial(Trial):
    """A dense attention layer on trial: decoder, encoder or cross attention.

    Args:
        backend: the backend on trial, a dense one.
        case: what the layer, its batch and its cache are like.
        device: where the backend's tensors lie.
    """

    case: Case

    def __init__(self, backend: type[AttentionBackend], case: Case, device: torch.device) -> None:
        super().__init__(backend, case, device)
        feature, heads, spec = case.feature, case.heads, case.batch
        self.common_prefix_len = feature.num_shared_blocks * case.block_size
        self.slopes = None
        if feature.alibi:
            self.slopes = 0.02 + 0.2 * torch.rand(heads.num_heads, generator=self.generator)
        rules = [
            feature.rules(row, kv_len, heads, self.slopes)
            for row, kv_len in enumerate(spec.kv_lens)
        ]
        self.requests = batches.dense_requests(
            self.generator,
            spec,
            heads,
            rules,
            self.dtype,
            case.block_size,
            self.common_prefix_len,
        )
        self.sinks = self._add_sinks() if feature.sinks else None
        kv_lens = spec.kv_lens if feature.attn_type.is_cached else [0] * len(spec.kv_lens)
        self.full_paging = batches.paginate(
            self.generator, kv_lens, case.block_size, feature.num_shared_blocks
        )
        self.paging = self.full_paging
        if feature.attn_type.is_cached and not self.common_prefix_len:
            self.paging = batches.forget_unseen_blocks(self.full_paging, self.requests)
        self.config = self.engine(
            heads.num_heads,
            rswa_window=feature.rswa_window,
            logits_soft_cap=feature.logits_soft_cap,
            has_sinks=feature.sinks,
        )
        self.spec = self._kv_cache_spec()
        self.buffer = self.allocate()
        self.output_scale = torch.tensor(OUTPUT_SCALE, device=device)
        self.layer = self._layer()
        self.impl = self._impl()
        self.inputs = self._inputs()

    def _add_sinks(self) -> Tensor:
        """fp32 ``[H]`` sinks at the height of the scores, put into the rules of every request."""
        lse = torch.cat([self._state(request)[1] for request in self.requests])
        sinks = budget.peaked_sinks(self.generator, lse)
        for request in self.requests:
            request.rules = replace(request.rules, sinks=sinks)
        return sinks

    @property
    def has_cache(self) -> bool:
        """True for decoders and cross attention, False for encoders."""
        return self.case.feature.attn_type.is_cached

    @staticmethod
    def _state(request: Request) -> State:
        """The oracle's state of a request, on its original keys and values."""
        return oracle.attention(
            request.query, request.key, request.value, request.first_position, request.rules
        )

    def _kv_cache_spec(self) -> AnyKVCacheSpec:
        feature, heads = self.case.feature, self.case.heads
        padded = self.page_bytes if self.case.padded_pages else None
        common = {
            "block_size": self.case.block_size,
            "dtype": self.case.dtype,
            "cache_dtype": self.case.cache_dtype,
            "page_size_padded": padded,
            "num_kv_heads": heads.num_kv_heads,
            "head_size": heads.head_size,
            "head_size_v": heads.head_size_v,
        }
        if feature.attn_type is AttentionType.ENCODER_DECODER:
            return CrossAttentionSpec(**common)
        if not feature.attn_type.is_cached:
            return EncoderOnlyAttentionSpec(**common, sliding_window=feature.sliding_window)
        if feature.attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(
                **common,
                attention_chunk_size=feature.attention_chunk_size,
                chunk_lookback=feature.chunk_lookback or 0,
            )
        if feature.sliding_window is not None:
            return SlidingWindowSpec(**common, sliding_window=feature.sliding_window)
        return FullAttentionSpec(**common)

    @property
    def side_bytes(self) -> tuple[int, int]:
        """Bytes that the cache holds for K and for V of one token and one KV head."""
        cache_dtype, heads = self.case.cache_dtype.value, self.case.heads
        return (
            stored_rows.side_bytes(heads.head_size, cache_dtype, self.dtype),
            stored_rows.side_bytes(heads.v_size, cache_dtype, self.dtype),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one block, and its padding where pages are padded."""
        content = self.case.block_size * self.case.heads.num_kv_heads * sum(self.side_bytes)
        return content + (PAGE_PADDING if self.case.padded_pages else 0)

    @property
    def layout(self) -> Any:
        """The spec's layout for the packing and the order of the case."""
        return self.spec.layout(self.case.packing, self.case.order)

    def _layer(self) -> Layer:
        """The layer's scales: 1 unless the cache is fp8 with scales that the layer holds."""
        one = torch.ones((), device=self.device)
        clamp = self.case.feature.mm_clamp_window
        if not self.case.cache_dtype.value.startswith("fp8") or is_inline(self.case.cache_dtype):
            return Layer(one, one, one, clamp)
        # Scales that keep normal values well inside the type's range, and that matter.
        k_scale, v_scale = torch.tensor(0.037), torch.tensor(0.029)
        if self.case.per_head_scales:
            heads = torch.arange(1, self.case.heads.num_kv_heads + 1)
            k_scale, v_scale = k_scale * heads, v_scale / heads
        q_scale = torch.tensor(0.4)  # kernels that round queries to fp8 divide by it
        return Layer(
            q_scale.to(self.device), k_scale.to(self.device), v_scale.to(self.device), clamp
        )

    def _impl(self) -> Any:
        feature, heads = self.case.feature, self.case.heads
        extras = feature.impl_arguments()
        if self.sinks is not None:
            extras["sinks"] = self.sinks.to(self.device)
        if heads.head_size_v is not None:
            extras["head_size_v"] = heads.head_size_v
        impl_cls: Any = self.backend.get_impl_cls()
        impl = impl_cls(
            heads.num_heads,
            heads.head_size,
            heads.head_size**-0.5,
            heads.num_kv_heads,
            None if self.slopes is None else self.slopes.tolist(),
            feature.sliding_window,
            self.case.cache_dtype.value,
            feature.logits_soft_cap,
            feature.attn_type.value,
            None,
            **extras,
        )
        impl.process_weights_after_loading(self.dtype)
        return impl

    def _num_cached(self, request: Request) -> int:
        """Number of keys of a request that earlier steps wrote; of cross attention all of them."""
        if self.case.feature.attn_type is AttentionType.ENCODER_DECODER:
            return len(request.key)
        return max(0, len(request.key) - len(request.query))

    def _new(self, request: Request, rows: Tensor) -> Tensor:
        """The rows of ``rows``, a request's keys or values, that come new with the step."""
        num_cached = self._num_cached(request) if self.has_cache else 0
        return batches.new_rows(rows, num_cached, len(request.query))

    def _inputs(self) -> Inputs:
        feature, spec = self.case.feature, self.batch_spec
        padding, fused = spec.num_padding_tokens, self.case.fused_projection
        rows, device = len(spec.query_lens), self.device

        def stack(parts: list[Tensor]) -> Tensor:
            return batches.stack_rows(parts, padding, device, fused)

        fields: dict[str, Any] = {"causal": feature.causal}
        if feature.causal is None:
            flags = [feature.causal_of(row) for row in range(rows)]
            fields["causal"] = torch.tensor(flags, device=device)
        if feature.mm_prefix:
            ranges = {row: list(feature.mm_ranges(spec.kv_lens[row])) for row in range(rows)}
            fields["mm_req_doc_ranges"] = {row: pairs for row, pairs in ranges.items() if pairs}
        if feature.rswa_window is not None:
            prefixes = [feature.rswa_prefix_len(row) for row in range(rows)]
            fields["rswa_prefix_lens"] = torch.tensor(prefixes, dtype=torch.int32, device=device)
        is_cross = feature.attn_type is AttentionType.ENCODER_DECODER
        batch = batches.make_batch(
            spec, self.paging, feature.attn_type is AttentionType.DECODER, device, **fields
        )
        if self.backend.capabilities.needs_host_lengths:
            batch = batch.replace(seq_lens_cpu_upper_bound=batch.seq_lens.cpu())
        if is_cross and feature.seq_lens_are_the_encoders:
            batch = batch.replace(seq_lens=batch.encoder_seq_lens)
        query = stack([request.query for request in self.requests])
        if is_cross:
            return Inputs(batch, query, None, None)
        key = stack([self._new(request, request.key) for request in self.requests])
        value = stack([self._new(request, request.value) for request in self.requests])
        return Inputs(batch, query, key, value)

    def write(self) -> None:
        """Write the context, then the new tokens, by the impl's ``do_kv_cache_update``.

        An encoder's impl gets an empty cache and must write nothing.
        """
        cache, inputs = self.cache(), self.inputs
        if self.has_cache:
            # A shared prefix is written once, by the first request.
            spans = [
                (request, self.common_prefix_len if request.row else 0, self._num_cached(request))
                for request in self.requests
            ]
            slots = [self.full_paging.slots(r.row, start, stop) for r, start, stop in spans]
            key = torch.cat([r.key[start:stop] for r, start, stop in spans]).to(self.device)
            value = torch.cat([r.value[start:stop] for r, start, stop in spans]).to(self.device)
            slot_mapping = torch.cat(slots).to(self.device)
            self.impl.do_kv_cache_update(self.layer, key, value, cache, slot_mapping)
        if inputs.key is not None and not self.backend.forward_includes_kv_cache_update:
            new = inputs.batch.slot_mapping
            self.impl.do_kv_cache_update(self.layer, inputs.key, inputs.value, cache, new)

    def written_slots(self) -> list[Tensor]:
        """int64 cache slots of the keys of each request; without a cache there are none."""
        return [
            self.full_paging.slots(request.row, 0, len(request.key) if self.has_cache else 0)
            for request in self.requests
        ]

    def _pages(self) -> Pages:
        """How the bytes of this cache are laid out."""
        return Pages(
            self.paging.num_blocks,
            self.case.block_size,
            self.case.heads.num_kv_heads,
            sum(self.side_bytes),
            self.page_bytes,
            self.case.packing is KVPacking.SPLIT,
            self.case.order is KVOrder.HND,
        )

    def _stored(self, slots: Tensor) -> tuple[Stored, Stored]:
        """Keys and values ``[slots, Hk, D]`` that the cache's bytes at ``slots`` mean."""
        rows = self._pages().rows(self.buffer.cpu()).flatten(0, 1)[slots]
        k_bytes = self.side_bytes[0]
        cache_dtype = self.case.cache_dtype.value
        key, value = rows[..., :k_bytes], rows[..., k_bytes:]
        return (
            stored_rows.decode_side(key, cache_dtype, self.dtype, self.layer._k_scale.cpu()),
            stored_rows.decode_side(value, cache_dtype, self.dtype, self.layer._v_scale.cpu()),
        )

    def restore_tails(self, kept: Tensor) -> None:
        """Put the bytes of ``kept`` back behind the last key of each request, to its page's end.

        Slots that hold anything but zeros and poison by now are left alone, all of them, so that
        the check of the cache finds what was written there.
        """
        if not self.has_cache:
            return
        size, tails = self.case.block_size, []
        for request in self.requests:
            keys = len(request.key)
            tails.append(self.full_paging.slots(request.row, keys, -(-keys // size) * size))
        places = self._pages().rows(torch.arange(self.buffer.numel())).flatten(0, 1)
        here = places[torch.cat(tails)].flatten().to(self.device)
        flat = self.buffer.view(-1)
        if bool(((flat[here] == 0) | (flat[here] == batches.POISON_BYTE)).all()):
            flat[here] = kept.view(-1)[here]

    def check_cache(self, result: CaseResult) -> None:
        """Check keys, values and inline scales of written slots, and poison everywhere else."""
        if not self.has_cache:
            result.note("cache", None if batches.is_poison(self.buffer) else "an encoder wrote")
            return
        slots = torch.cat(self.written_slots())
        pages, buffer = self._pages(), self.buffer.cpu()
        untouched = torch.ones(self.paging.num_blocks * self.case.block_size, dtype=torch.bool)
        untouched[slots] = False
        check_poison(pages.rows(buffer).flatten(0, 1), pages.margins(buffer), untouched, result)
        key = torch.cat([request.key for request in self.requests])
        value = torch.cat([request.value for request in self.requests])
        for name, x, stored in zip("kv", (key, value), self._stored(slots), strict=True):
            check_rows(name, x, stored, result)
            if is_inline(self.case.cache_dtype):
                wanted = stored_rows.expected_inline_scale(x, self.case.cache_dtype.value)
                _check_scale(name, stored.scale, wanted, result)

    def _output_dtype(self) -> torch.dtype:
        """The dtype that the layer writes: the model's, or e4m3 for fused fp8 output."""
        return torch.float8_e4m3fn if self.case.feature.fp8_output else self.dtype

    def attend(
        self, record: Any, inputs: Inputs, cache: Tensor, *, for_bits: bool = False
    ) -> Results:
        """One ``forward`` into a poisoned ``output`` ``[T, H, Dv]``, and a poisoned ``lse`` fp32
        ``[T, H]`` where the backend declares that it gives one.

        Raises:
            AssertionError: ``forward`` returned another tensor than the output it was given.
        """
        heads, tokens = self.case.heads, len(inputs.query)
        shape = (tokens, heads.num_heads, heads.v_size)
        output = batches.poisoned(*shape, dtype=self._output_dtype(), device=self.device)
        given = output.flatten(1) if self.case.fused_projection else output
        options: dict[str, Any] = {}
        if self.case.feature.fp8_output:
            options["output_scale"] = self.output_scale
        results = {"output": output}
        if self.backend.capabilities.lse:
            lse = batches.poisoned(*shape[:2], dtype=torch.float32, device=self.device)
            results["lse"] = options["output_lse"] = lse
        returned = self.impl.forward(
            self.layer, inputs.query, inputs.key, inputs.value, cache, record, given, **options
        )
        if returned is not given:
            raise AssertionError("forward must return the output that it was given")
        return results

    def cache(self, buffer: Tensor | None = None) -> Tensor:
        """The cache tensor over ``buffer``; an empty tensor where the layer has no cache."""
        if not self.has_cache:
            return torch.empty(0, device=self.device)
        return super().cache(buffer)

    def profile(self) -> Tensor:
        """The output ``[T, H, Dv]`` of a ``forward`` with an empty cache and no metadata."""
        heads = self.case.heads
        shape = (len(self.inputs.query), heads.num_heads, heads.v_size)
        output = batches.poisoned(*shape, dtype=self.dtype, device=self.device)
        empty, inputs = torch.empty(0, device=self.device), self.inputs
        self.impl.forward(self.layer, inputs.query, inputs.key, inputs.value, empty, None, output)
        return output

    def judge(self, results: Results, record: Any, result: CaseResult) -> None:
        """Check ``output`` and ``lse`` against the oracle on the original keys and values. Over a
        quantised cache that is right, check them under ``stored`` too, against the oracle on the
        numbers that the cache holds.
        """
        scales = (self.layer._k_scale.cpu(), self.layer._v_scale.cpu())
        cache_dtype = self.case.cache_dtype.value
        lossy = self.has_cache
        expected, low, exact, low_exact = [], [], [], []
        for request, slots in zip(self.requests, self.written_slots(), strict=True):
            position, rules = request.first_position, request.rules
            expected.append(self._state(request))
            query, rounding = self._read_query(request, record)
            key, value = request.key, request.value
            if lossy:
                key = stored_rows.quantized(key, cache_dtype, scales[0])
                value = stored_rows.quantized(value, cache_dtype, scales[1])
            low.append(
                budget.low_precision(query, key, value, position, rules, self.dtype, rounding)
            )
            if lossy and self.case.cache_dtype is not CacheDType.AUTO and result.cache_is_right:
                key, value = (stored.real for stored in self._stored(slots))
                held = (query, key, value, position, rules)
                exact.append(oracle.attention(*held))
                low_exact.append(budget.low_precision(*held, self.dtype, rounding))
        self._judge_states("output", "lse", results, expected, low, result)
        if exact:
            self._judge_states("stored", "stored", results, exact, low_exact, result)

    def _read_query(self, request: Request, record: Any) -> tuple[Tensor, budget.Habits]:
        """A request's query as its kernel reads it, and what that kernel is known to round.

        Beside an fp8 cache, some kernels round queries and weights to fp8. The record says which
        kernel computes the request; what a kernel rounds is in ``attn.testing.habits``.
        """
        parts: list[Any] = [getattr(record, name, None) for name in ("decode", "prefill")]
        for part in parts:
            rule = getattr(part, "rule", None)
            if rule is None or not _holds(part, request):
                continue
            products = fp8_products(rule, self.case.cache_dtype.value)
            if products is not None:
                scale = self.layer._q_scale.cpu() if products.scaled_query else torch.ones(())
                query = stored_rows.quantized(request.query, "fp8", scale)
                return query, budget.Habits(fp8_weights=True)
        shared = getattr(record, "shared", None)
        parts += [getattr(shared, name, None) for name in ("prefix", "own")]
        planned = [part for part in parts if hasattr(part, "choice") and _holds(part, request)]
        return request.query, both([of_wrapper(part.choice) for part in planned])

    def _judge_states(
        self,
        check: str,
        lse_check: str,
        results: Results,
        expected: list[State],
        low: list[State],
        result: CaseResult,
    ) -> None:
        """Check results under two names against the states of all requests."""
        tokens = self.batch_spec.num_tokens
        out, low_out = (torch.cat([one for one, _ in states]) for states in (expected, low))
        actual, dtype = results["output"][:tokens].cpu(), self._output_dtype()
        if self.case.feature.fp8_output:
            limit = torch.finfo(dtype).max
            narrow = (low_out.float() / OUTPUT_SCALE).clamp(-limit, limit).to(dtype)
            low_out = narrow.double() * OUTPUT_SCALE
            actual = actual.double() * OUTPUT_SCALE
        judge_output(check, actual, out, low_out, dtype, result)
        if "lse" in results:
            lse, low_lse = (torch.cat([one for _, one in states]) for states in (expected, low))
            cap = self.case.feature.logits_soft_cap
            judge_lse(lse_check, results["lse"][:tokens].cpu(), lse, low_lse, result, cap)


def _holds(part: Any, request: Request) -> bool:
    """True where a part of a record, its decodes or its prefills, has the request's rows."""
    return bool(0 <= request.tokens.start - part.first_token < part.num_tokens)


def _check_scale(name: str, actual: Tensor, wanted: Tensor, result: CaseResult) -> None:
    """Check the inline scales of rows against ``wanted``, under the name ``cache``."""
    # An fp32 maximum over an fp32 constant: two roundings.
    off = ~((actual - wanted).abs() <= 2 * torch.finfo(torch.float32).eps * wanted)
    result.note("cache", f"{int(off.sum())} scales of {name} are off" if bool(off.any()) else None)
