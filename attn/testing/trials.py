"""A case at work: a triple set up for it, its cache, its forward, and its judgement."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.ops.mla import mla_attention
from attn.testing import batches, budget, oracle, stored_rows
from attn.testing.batches import Indexer, LatentWeights, Layer, Paging, Projection, Request
from attn.testing.cases import AnyCase, Case, LatentCase, is_inline
from attn.testing.habits import both, fp8_products, of_wrapper
from attn.testing.oracle import Rules, State
from attn.testing.stored_rows import Pages, Stored
from builders.batch import CommonAttentionMetadata
from specs.attention import AttentionType, MlaKernel
from specs.dtypes import CacheDType
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel, SpeculativeConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from specs.layouts import KVOrder, KVPacking

PAGE_PADDING = 256
"""Bytes behind the content of a padded page."""
OUTPUT_SCALE = 1 / 32
"""Of fused fp8 output: far from 1, and outputs of a few units stay inside e4m3's range."""

SUMMATION_ORDERS = 16
"""Orders in which a product is summed to see what the order alone does to a result."""


@dataclass
class CaseResult:
    """What went wrong, by check; and how close each budgeted check came."""

    findings: dict[str, list[str]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    """Error over budget."""
    checked: set[str] = field(default_factory=set)

    @property
    def cache_is_right(self) -> bool:
        """What the cache holds can be reasoned about."""
        return "cache" not in self.findings

    def note(self, check: str, problem: str | None) -> None:
        """Record that ``check`` ran, and its problem if it has one."""
        self.checked.add(check)
        if problem:
            self.findings.setdefault(check, []).append(problem)

    def judge(self, check: str, error: float, limit: float) -> None:
        """Record a budgeted check."""
        self.ratios[check] = max(self.ratios.get(check, 0.0), error / limit)
        self.note(check, None if error <= limit else f"error {error:.3g}, budget {limit:.3g}")


# -- one case at work


@dataclass(eq=False)
class Inputs:
    """What a step gives to ``build`` and ``forward``."""

    batch: CommonAttentionMetadata
    query: Tensor
    key: Tensor | None
    value: Tensor | None


Results = dict[str, Tensor]
"""Tensors by name, first axis the tokens of the batch; rows past the real ones included."""


class Trial(ABC):
    """A backend's triple set up for a case, its cache written as an engine writes it."""

    requests: list[Request]
    paging: Paging
    buffer: Tensor
    inputs: Inputs
    impl: Any
    spec: AnyKVCacheSpec
    layer: Layer
    config: EngineConfig
    common_prefix_len = 0
    prefill_kernel = PrefillKernel.TRITON
    decode_kernel = DecodeKernel.TRITON
    mla_kernel = MlaKernel.AUTO
    fp8_mla_prefill = False

    def __init__(
        self, backend: type[AttentionBackend], case: AnyCase, device: torch.device
    ) -> None:
        self.backend = backend
        self.case = case
        self.device = device
        self.batch_spec = case.batch
        self.generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    @property
    def dtype(self) -> torch.dtype:
        return self.case.dtype.torch

    def engine(self, num_heads: int, **settings: Any) -> EngineConfig:
        """Limits that the batch just meets."""
        spec = self.batch_spec
        speculative = None
        if spec.num_speculative_tokens is not None:
            speculative = SpeculativeConfig(num_speculative_tokens=spec.num_speculative_tokens)
        tokens = spec.num_tokens + spec.num_padding_tokens
        return EngineConfig(
            max_model_len=max(*spec.kv_lens, *spec.seq_lens, 1) + self.case.block_size,
            max_num_seqs=len(spec.query_lens),
            max_num_batched_tokens=max(tokens, 1),
            num_heads=num_heads,
            speculative=speculative,
            kernels=Kernels.own(self.prefill_kernel, self.decode_kernel, self.mla_kernel),
            fp8_mla_prefill=self.fp8_mla_prefill,
            **settings,
        )

    def builder(self, config: EngineConfig | None = None) -> Any:
        """A fresh metadata builder."""
        return self.backend.get_builder_cls()(
            self.spec, ["layer.0"], config or self.config, self.device
        )

    def build(self, builder: Any, batch: CommonAttentionMetadata | None = None) -> Any:
        """The step's record."""
        return builder.build(self.common_prefix_len, batch or self.inputs.batch)

    def cache(self, buffer: Tensor | None = None) -> Tensor:
        """The cache tensor over its bytes."""
        layout: Any = self.layout
        return layout.view(self.buffer if buffer is None else buffer, self.paging.num_blocks)

    @property
    @abstractmethod
    def layout(self) -> Any:
        """Shape, strides and bytes of the cache."""

    def allocate(self) -> Tensor:
        """Poisoned bytes of the whole cache."""
        nbytes = self.paging.num_blocks * self.page_bytes
        return batches.poisoned(nbytes, dtype=torch.uint8, device=self.device)

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """From one block to the next."""

    @abstractmethod
    def write(self) -> None:
        """Context first, as earlier steps did, then this step's tokens."""

    def restore_tails(self, kept: Tensor) -> None:
        """Slots behind the last key of each request, in its page, as they were in ``kept``, where
        zeros are all that came there.
        """
        raise NotImplementedError

    @abstractmethod
    def check_cache(self, result: CaseResult) -> None:
        """Every byte of the cache."""

    @abstractmethod
    def attend(
        self, record: Any, inputs: Inputs, cache: Tensor, *, for_bits: bool = False
    ) -> Results:
        """One forward into poisoned outputs; ``for_bits``: nothing is asked for that
        :meth:`own_bits` leaves out.
        """

    @abstractmethod
    def profile(self) -> Tensor:
        """The output of a call without metadata."""

    @abstractmethod
    def judge(self, results: Results, record: Any, result: CaseResult) -> None:
        """Results against the oracle."""

    def check_padding(self, results: Results, result: CaseResult) -> None:
        """Rows past the last request keep their bytes."""
        for name, rows in results.items():
            touched = not batches.is_poison(rows[self.batch_spec.num_tokens :])
            result.note("padding", f"{name} rows past the batch were written" if touched else None)

    def own_bits(self, results: Results, record: Any) -> Results:
        """The results that depend on the impl alone."""
        return results

    # -- a request alone

    def alone(self, row: int, tokens: slice) -> Inputs:
        """A batch of one request, over the same cache: all of its tokens or the last ones."""
        inputs = self.inputs

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[tokens].clone()

        batch = _single_request(inputs.batch, row, tokens)
        return Inputs(batch, inputs.query[tokens].clone(), part(inputs.key), part(inputs.value))

    def together(self) -> None:  # noqa: B027 (most trials have nothing to undo)
        """Undo what ``alone`` did."""

    @property
    def has_cache(self) -> bool:
        """Keys are read from the cache, so that a part of the queries can be asked alone."""
        return True

    def written_slots(self) -> list[Tensor]:
        """Slots of every request's keys, in order of position."""
        return [self.paging.slots(request.row, 0, len(request.key)) for request in self.requests]


def _single_request(
    batch: CommonAttentionMetadata, row: int, tokens: slice
) -> CommonAttentionMetadata:
    one, count = slice(row, row + 1), tokens.stop - tokens.start
    starts = torch.tensor([0, count], dtype=torch.int32)

    def request(value: Any) -> Any:
        return value[one].clone() if isinstance(value, Tensor) else value

    ranges = batch.mm_req_doc_ranges
    return batch.replace(
        query_start_loc=starts.to(batch.query_start_loc.device),
        query_start_loc_cpu=starts,
        seq_lens=request(batch.seq_lens),
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        block_table_tensor=request(batch.block_table_tensor),
        slot_mapping=batch.slot_mapping[tokens].clone(),
        causal=request(batch.causal),
        encoder_seq_lens=request(batch.encoder_seq_lens),
        encoder_seq_lens_cpu=None
        if batch.encoder_seq_lens_cpu is None
        else batch.encoder_seq_lens_cpu[one],
        positions=None if batch.positions is None else batch.positions[tokens].clone(),
        seq_lens_cpu_upper_bound=request(batch.seq_lens_cpu_upper_bound),
        rswa_prefix_lens=request(batch.rswa_prefix_lens),
        mm_req_doc_ranges=None if ranges is None else {0: ranges[row]} if row in ranges else {},
    )


class DenseTrial(Trial):
    """A dense layer."""

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
        lse = torch.cat([self._state(request)[1] for request in self.requests])
        sinks = budget.peaked_sinks(self.generator, lse)
        for request in self.requests:
            request.rules = replace(request.rules, sinks=sinks)
        return sinks

    @property
    def has_cache(self) -> bool:
        return self.case.feature.attn_type.is_cached

    @staticmethod
    def _state(request: Request) -> State:
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
        """Bytes of K and of V of one token of one head."""
        cache_dtype, heads = self.case.cache_dtype.value, self.case.heads
        return (
            stored_rows.side_bytes(heads.head_size, cache_dtype, self.dtype),
            stored_rows.side_bytes(heads.v_size, cache_dtype, self.dtype),
        )

    @property
    def page_bytes(self) -> int:
        content = self.case.block_size * self.case.heads.num_kv_heads * sum(self.side_bytes)
        return content + (PAGE_PADDING if self.case.padded_pages else 0)

    @property
    def layout(self) -> Any:
        return self.spec.layout(self.case.packing, self.case.order)

    def _layer(self) -> Layer:
        one = torch.ones((), device=self.device)
        clamp = self.case.feature.mm_clamp_window
        if not self.case.cache_dtype.value.startswith("fp8") or is_inline(self.case.cache_dtype):
            return Layer(one, one, one, clamp)
        # Scales that keep normal values well inside the type's range, and that matter.
        k_scale, v_scale = torch.tensor(0.037), torch.tensor(0.029)
        if self.case.per_head_scales:
            heads = torch.arange(1, self.case.heads.num_kv_heads + 1)
            k_scale, v_scale = k_scale * heads, v_scale / heads
        q_scale = torch.tensor(0.4)  # of a quantised query, which none is here
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
        """Keys of a request that earlier steps wrote."""
        if self.case.feature.attn_type is AttentionType.ENCODER_DECODER:
            return len(request.key)
        return max(0, len(request.key) - len(request.query))

    def _new(self, request: Request, rows: Tensor) -> Tensor:
        """This step's keys or values of a request."""
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
            slots = inputs.batch.slot_mapping
            self.impl.do_kv_cache_update(self.layer, inputs.key, inputs.value, cache, slots)

    def written_slots(self) -> list[Tensor]:
        return [
            self.full_paging.slots(request.row, 0, len(request.key) if self.has_cache else 0)
            for request in self.requests
        ]

    def _pages(self) -> Pages:
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
        """Keys and values that the cache's bytes at ``slots`` mean."""
        rows = self._pages().rows(self.buffer.cpu()).flatten(0, 1)[slots]
        k_bytes = self.side_bytes[0]
        cache_dtype = self.case.cache_dtype.value
        key, value = rows[..., :k_bytes], rows[..., k_bytes:]
        return (
            stored_rows.decode_side(key, cache_dtype, self.dtype, self.layer._k_scale.cpu()),
            stored_rows.decode_side(value, cache_dtype, self.dtype, self.layer._v_scale.cpu()),
        )

    def restore_tails(self, kept: Tensor) -> None:
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
        if not self.has_cache:
            result.note("cache", None if batches.is_poison(self.buffer) else "an encoder wrote")
            return
        slots = torch.cat(self.written_slots())
        pages, buffer = self._pages(), self.buffer.cpu()
        untouched = torch.ones(self.paging.num_blocks * self.case.block_size, dtype=torch.bool)
        untouched[slots] = False
        _check_poison(pages.rows(buffer).flatten(0, 1), pages.margins(buffer), untouched, result)
        key = torch.cat([request.key for request in self.requests])
        value = torch.cat([request.value for request in self.requests])
        for name, x, stored in zip("kv", (key, value), self._stored(slots), strict=True):
            _check_rows(name, x, stored, result)
            if is_inline(self.case.cache_dtype):
                wanted = stored_rows.expected_inline_scale(x, self.case.cache_dtype.value)
                _check_scale(name, stored.scale, wanted, result)

    def _output_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.case.feature.fp8_output else self.dtype

    def attend(
        self, record: Any, inputs: Inputs, cache: Tensor, *, for_bits: bool = False
    ) -> Results:
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
        if not self.has_cache:
            return torch.empty(0, device=self.device)
        return super().cache(buffer)

    def profile(self) -> Tensor:
        heads = self.case.heads
        shape = (len(self.inputs.query), heads.num_heads, heads.v_size)
        output = batches.poisoned(*shape, dtype=self.dtype, device=self.device)
        empty, inputs = torch.empty(0, device=self.device), self.inputs
        self.impl.forward(self.layer, inputs.query, inputs.key, inputs.value, empty, None, output)
        return output

    def judge(self, results: Results, record: Any, result: CaseResult) -> None:
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
            low.append(low_precision(query, key, value, position, rules, self.dtype, rounding))
            if lossy and self.case.cache_dtype is not CacheDType.AUTO and result.cache_is_right:
                key, value = (stored.real for stored in self._stored(slots))
                held = (query, key, value, position, rules)
                exact.append(oracle.attention(*held))
                low_exact.append(low_precision(*held, self.dtype, rounding))
        self._judge_states("output", "lse", results, expected, low, result)
        if exact:
            self._judge_states("stored", "stored", results, exact, low_exact, result)

    def _read_query(self, request: Request, record: Any) -> tuple[Tensor, budget.Habits]:
        """A request's query as its kernel reads it, and what the kernel is known to round: some
        round queries and weights to fp8 beside an fp8 cache. The record says which kernel.
        """
        parts = [getattr(record, name, None) for name in ("decode", "prefill")]
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
        tokens = self.batch_spec.num_tokens
        out, low_out = (torch.cat([one for one, _ in states]) for states in (expected, low))
        actual, dtype = results["output"][:tokens].cpu(), self._output_dtype()
        if self.case.feature.fp8_output:
            limit = torch.finfo(dtype).max
            narrow = (low_out.float() / OUTPUT_SCALE).clamp(-limit, limit).to(dtype)
            low_out = narrow.double() * OUTPUT_SCALE
            actual = actual.double() * OUTPUT_SCALE
        _judge_output(check, actual, out, low_out, dtype, result)
        if "lse" in results:
            lse, low_lse = (torch.cat([one for _, one in states]) for states in (expected, low))
            cap = self.case.feature.logits_soft_cap
            _judge_lse(lse_check, results["lse"][:tokens].cpu(), lse, low_lse, result, cap)


def _holds(part: Any, request: Request) -> bool:
    """A part of a record has the request's rows."""
    return bool(0 <= request.tokens.start - part.first_token < part.num_tokens)


def low_precision(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    rules: Rules,
    dtype: torch.dtype,
    habits: budget.Habits = budget.CAREFUL,
) -> State:
    """The same maths in ``dtype``, products summed in other orders than the oracle's.

    In float64, equal orders would share their rounding, and the budget would miss it. In 32 and 64
    bits the order of summation and the unit of exponents are all there is to the error, and they
    are the kernel's own choice: so the worst of several counts, for each token and head. The lse
    is fp32 whatever ``dtype`` is, but matrix units do not round what they add 16 products of 16-bit
    numbers to: they cut it off, always towards zero, by half a unit on average, and the sum is half
    its size on average.
    """
    generator = torch.Generator().manual_seed(0)
    states = []
    units = (1.0,) if dtype.itemsize < 4 else (1.0, math.log(2)) * (SUMMATION_ORDERS // 2)
    for unit in units:
        order = torch.randperm(query.shape[-1], generator=generator)
        turned = (query[..., order], key[..., order], value)
        states.append(budget.low_precision_attention(*turned, first, rules, dtype, unit, habits))
    if len(states) == 1:
        out, lse = states[0]
        return out, lse - lse.abs() * (query.shape[-1] / 16 * 2**-24 / 2)
    if len(query) == 0:
        return states[0]
    exact = oracle.attention(query, key, value, first, rules)
    outs, lses = (torch.stack([state[side] for state in states]) for side in (0, 1))
    off = (outs.double() - exact[0]).norm(dim=-1).argmax(0)[None]
    lse_off = (lses.double() - exact[1]).abs().nan_to_num(0).argmax(0)[None]
    worst = outs.gather(0, off[..., None].expand(-1, -1, -1, outs.shape[-1]))[0]
    return worst, lses.gather(0, lse_off)[0]


def _judge_output(
    check: str,
    actual: Tensor,
    expected: Tensor,
    low: Tensor,
    dtype: torch.dtype,
    result: CaseResult,
) -> None:
    if len(expected):
        error = float(budget.row_errors(actual, expected).max())
        result.judge(check, error, budget.budget(expected, low, dtype))


def _judge_lse(
    check: str,
    actual: Tensor,
    expected: Tensor,
    low: Tensor,
    result: CaseResult,
    soft_cap: float | None = None,
) -> None:
    if len(expected):
        error = float(budget.lse_errors(actual, expected).max())
        result.judge(check, error, budget.lse_budget(expected, low, soft_cap))


def _check_poison(rows: Tensor, margins: Tensor, untouched: Tensor, result: CaseResult) -> None:
    for slot in (untouched.nonzero().flatten()).tolist():
        if not batches.is_poison(rows[slot]):
            result.note("cache", f"slot {slot}, which no token has, was written")
    result.note("cache", None if batches.is_poison(margins) else "page padding was written")


def _check_rows(name: str, x: Tensor, stored: Stored, result: CaseResult) -> None:
    misses = stored.misses(x)
    problem = None
    if bool(misses.any()):
        token = int(misses.flatten(1).any(1).nonzero()[0])
        problem = f"{int(misses.sum())} numbers of {name} are off, the first in token {token}"
    result.note("cache", problem)


def _check_scale(name: str, actual: Tensor, wanted: Tensor, result: CaseResult) -> None:
    # An fp32 maximum over an fp32 constant: two roundings.
    off = ~((actual - wanted).abs() <= 2 * torch.finfo(torch.float32).eps * wanted)
    result.note("cache", f"{int(off.sum())} scales of {name} are off" if bool(off.any()) else None)


def latent_output(weights: LatentWeights, request: Request) -> Tensor:
    """float64 ``[Tq, H, V]`` of a layer, by definition: keys and values of every head expanded."""
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
    """The same in the model's precision.

    Args:
        weights: of the layer.
        request: what is asked; its query's type is the model's.
        stored: latent rows ``[Tk, L + r]`` as the cache has them.
        attend: latent output of absorbed queries over rows, as decodes are computed; None computes
            it expanded, as prefills are: those take the new tokens as they came.
        fp8_scale: of expanded keys and values where the kernel reads e4m3, and queries with 1; None
            where it reads the model's type.
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
    given = request.query, key, value
    if fp8_scale is not None:
        scales = torch.ones(()), fp8_scale, fp8_scale
        given = tuple(
            stored_rows.quantized(rows.to(dtype), "fp8", scale)
            for rows, scale in zip(given, scales, strict=True)
        )
    position, rules = request.first_position, request.rules
    habits = budget.Habits(fp8_weights=fp8_scale is not None)
    return low_precision(*given, position, rules, dtype, habits)[0]


class LatentTrial(Trial):
    """An MLA layer: absorbed decode by ``forward_mqa``, all of it by ``mla_attention``."""

    case: LatentCase
    TOPK = 32
    fp8_k_scale = 0.037

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
        return self.spec.layout()

    @property
    def row_bytes(self) -> int:
        case = self.case
        return stored_rows.latent_row_bytes(
            case.rank, case.rope_size, case.cache_dtype.value, self.dtype
        )

    @property
    def page_bytes(self) -> int:
        padding = PAGE_PADDING if self.case.padded_pages else 0
        return self.case.block_size * self.row_bytes + padding

    def _list_positions(self, row: int, num_queries: int, num_keys: int, first: int) -> Tensor:
        """Random lists of visible positions, some of them empty; the mask that they mean."""
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
        """Latent ``[T, L]`` and rotary ``[T, r]`` of rows ``[T, 1, L + r]``: strided views."""
        return rows[:, 0, : self.case.rank], rows[:, 0, self.case.rank :]

    def _update(self, rows: Tensor, slots: Tensor) -> None:
        kv_c, k_pe = self._parts(rows)
        if self.case.fused_projection:
            k_pe = k_pe[:, None]
        dtype = self.case.cache_dtype.value
        cache, scale = self.cache(), self.layer._k_scale
        self.impl.do_kv_cache_update(kv_c, k_pe, cache, slots, dtype, scale)

    def write(self) -> None:
        context = torch.cat([r.key[: r.context_len] for r in self.requests])
        slots = [self.full_paging.slots(r.row, 0, r.context_len) for r in self.requests]
        self._update(context.to(self.device), torch.cat(slots).to(self.device))
        assert self.inputs.key is not None
        if not self.backend.forward_includes_kv_cache_update:
            self._update(self.inputs.key, self.inputs.batch.slot_mapping)

    def written_slots(self) -> list[Tensor]:
        lens = ((request.row, len(request.key)) for request in self.requests)
        return [self.full_paging.slots(row, 0, count) for row, count in lens]

    def _rows(self) -> Tensor:
        """uint8 ``[N * P, row_bytes]``."""
        pages = self.buffer.cpu().view(self.paging.num_blocks, -1)
        content = pages[:, : self.case.block_size * self.row_bytes]
        return content.reshape(-1, self.row_bytes)

    def _stored(self, slots: Tensor) -> tuple[Stored, Stored]:
        scale, case = self.layer._k_scale.cpu(), self.case
        rows = self._rows()[slots]
        return stored_rows.decode_latent(rows, case.rank, case.cache_dtype.value, self.dtype, scale)

    def check_cache(self, result: CaseResult) -> None:
        slots = torch.cat(self.written_slots())
        rows = self._rows()
        margins = self.buffer.cpu().view(self.paging.num_blocks, -1)
        margins = margins[:, self.case.block_size * self.row_bytes :]
        untouched = torch.ones(len(rows), dtype=torch.bool)
        untouched[slots] = False
        _check_poison(rows, margins, untouched, result)
        x = torch.cat([request.key for request in self.requests])
        parts = self._parts(x)
        latent, rope = self._stored(slots)
        _check_rows("the latent", parts[0], latent, result)
        _check_rows("the rotary key", parts[1], rope, result)
        if self.case.cache_dtype is CacheDType.FP8_DS_MLA:
            blocks = parts[0].unflatten(-1, (-1, stored_rows.LATENT_BLOCK))
            wanted = stored_rows.block_scale(blocks)[..., 0]
            actual = latent.scale[:, :: stored_rows.LATENT_BLOCK]
            off = actual != wanted
            count = int(off.sum())
            result.note("cache", f"{count} block scales are off" if count else None)

    def attend(
        self, record: Any, inputs: Inputs, cache: Tensor, *, for_bits: bool = False
    ) -> Results:
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
            query = absorbed if self.case.fused_projection else (nope.contiguous(), rope)
            latent, lse = self.impl.forward_mqa(query, cache, record, self.layer)
            results["latent"] = latent
            if self.backend.capabilities.lse:
                results["lse"] = lse
        return results

    def _absorbed(self, query: Tensor) -> Tensor:
        """``[T, H, L + r]``, rounded once; per token, so that its bits are the token's own."""
        nope, rope = query[..., : self.weights.nope_size], query[..., self.weights.nope_size :]
        w_uk = self.w_uk[query.device.type]
        rows = [torch.einsum("hp,lhp->hl", token, w_uk) for token in nope.double()]
        latent = torch.stack(rows) if rows else query.new_zeros(0, *w_uk.shape[:2][::-1])
        return torch.cat([latent.to(query.dtype), rope], -1)

    def profile(self) -> Tensor:
        inputs, width = self.inputs, self.case.num_heads * self.weights.v_size
        output = batches.poisoned(len(inputs.query), width, dtype=self.dtype, device=self.device)
        empty = torch.empty(0, device=self.device)
        assert inputs.key is not None
        parts = self._parts(inputs.key)
        return mla_attention(self.impl, self.layer, inputs.query, *parts, empty, None, output)

    def check_padding(self, results: Results, result: CaseResult) -> None:
        """Latent results are the impl's own tensors: nothing past the batch's tokens is promised.

        Counted padding tokens go through the projection with the others: zeros, if not untouched.
        """
        output = results["output"]
        counted = output[self.batch_spec.num_tokens : self.inputs.batch.num_actual_tokens]
        past = output[self.inputs.batch.num_actual_tokens :]
        written = not batches.is_poison(past) or not (
            batches.is_poison(counted) or bool((counted == 0).all())
        )
        result.note("padding", "output rows past the batch were written" if written else None)

    def own_bits(self, results: Results, record: Any) -> Results:
        """The projections before and after ``forward_mqa`` are the layer's, not the impl's; and
        where states are too large to be kept apart, a row's cuts are the batch's.
        """
        split = getattr(record.decode, "split", None)
        if split is not None and split.is_free:
            if self.decode_kernel is DecodeKernel.TRITON:
                raise AssertionError("only the Hopper kernel's rows are cut where the batch says")
            results = {name: rows for name, rows in results.items() if name == "output"}
        kept = {name: rows for name, rows in results.items() if name != "output"}
        if record.num_prefill_tokens:
            kept["output"] = results["output"]
        return kept

    def _low_rows(self, request: Request) -> Tensor:
        rows, scale = request.key[:, 0], self.layer._k_scale.cpu()
        return stored_rows.quantized_latent(
            rows, self.case.cache_dtype.value, scale, self.case.rank
        )

    def _latent_state(self, request: Request, absorbed: Tensor, rows: Tensor) -> State:
        """float64 latent state of absorbed queries over latent rows."""
        rank, scale = self.case.rank, self.weights.scale
        q, rows = (absorbed[..., :rank], absorbed[..., rank:]), rows.double()
        keys = (rows[:, :rank], rows[:, rank:])
        if request.row in self.lists:
            return oracle.sparse_mla(*q, *keys, self.lists[request.row], scale)
        return oracle.mla_absorbed(*q, *keys, request.first_position, request.rules)

    def _low_latent_state(self, request: Request, absorbed: Tensor, rows: Tensor) -> State:
        """The same in the model's precision."""

        def low(query: Tensor, keys: Tensor, first: int, rules: Rules) -> State:
            key = keys[:, None]
            value = key[..., : self.case.rank]
            return low_precision(query, key, value, first, rules, self.dtype)

        if request.row not in self.lists:
            return low(absorbed, rows, request.first_position, request.rules)
        rules = Rules(scale=self.weights.scale, causal=False)
        states = [
            low(absorbed[t : t + 1], rows[listed[listed >= 0].long()], 0, rules)
            for t, listed in enumerate(self.lists[request.row])
        ]
        return torch.cat([out for out, _ in states]), torch.cat([lse for _, lse in states])

    def judge(self, results: Results, record: Any, result: CaseResult) -> None:
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
            latents.append((expected, self._low_latent_state(request, read, low_rows)))
            if self.case.cache_dtype.is_quantized and result.cache_is_right:
                held = torch.cat([part.real for part in self._stored(slots)], -1)
                exact = self._latent_state(request, read, held)
                stored.append((exact, self._low_latent_state(request, read, held)))
        self._judge_outputs(results, outs, result)
        self._judge_latents("latent", "lse", results, latents, result)
        self._judge_latents("stored", "stored", results, stored, result)

    def _read_query(self, absorbed: Tensor, record: Any) -> Tensor:
        """An absorbed query as its kernel reads it: some take fp8 beside an fp8 cache."""
        scratch = getattr(record.decode, "query", None)
        if not isinstance(scratch, Tensor) or scratch.dtype is not torch.float8_e4m3fn:
            return absorbed
        if self.backend.get_name() != "TRTLLM_MLA" or not self.case.cache_dtype.is_quantized:
            raise AssertionError(f"{self.backend.get_name()} is not known to round queries to e4m3")
        return stored_rows.quantized(absorbed, "fp8", self.layer._q_scale.cpu())

    def _judge_outputs(
        self, results: Results, pairs: list[tuple[Tensor, Tensor]], result: CaseResult
    ) -> None:
        if pairs:
            expected, low = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            actual = results["output"][: len(expected)].cpu()
            _judge_output("output", actual, expected, low, self.dtype, result)

    def _judge_latents(
        self,
        check: str,
        lse_check: str,
        results: Results,
        pairs: list[tuple[State, State]],
        result: CaseResult,
    ) -> None:
        if not pairs:
            return
        out, low_out = (torch.cat([pair[i][0] for pair in pairs]) for i in (0, 1))
        lse, low_lse = (torch.cat([pair[i][1] for pair in pairs]) for i in (0, 1))
        actual = results["latent"][: len(out)].cpu()
        _judge_output(check, actual, out, low_out, self.dtype, result)
        if "lse" in results:
            _judge_lse(lse_check, results["lse"][: len(out)].cpu(), lse, low_lse, result)

    def _split_query(self, request: Request) -> tuple[Tensor, Tensor]:
        nope = self.weights.nope_size
        return request.query[..., :nope], request.query[..., nope:]

    def _output(self, request: Request) -> Tensor:
        """float64 ``[Tq, H, V]`` of the layer."""
        weights, rows = self.weights, request.key[:, 0]
        q_nope, q_pe = self._split_query(request)
        if request.row in self.lists:
            absorbed = torch.einsum("thp,lhp->thl", q_nope.double(), weights.w_uk.double())
            query = torch.cat([absorbed, q_pe.double()], -1)
            latent, _ = self._latent_state(request, query, rows)
            return torch.einsum("thl,lhv->thv", latent, weights.w_uv.double())
        # Keys and values of every head are most of a long test's arithmetic: the device's.
        placed = {"query": request.query.to(self.device), "key": request.key.to(self.device)}
        return latent_output(self.placed_weights, replace(request, **placed)).cpu()

    def _low_output(self, request: Request, is_decode: bool, record: Any) -> Tensor:
        """The same in the model's precision: absorbed for decode, expanded for prefill."""

        def attend(query: Tensor, rows: Tensor) -> Tensor:
            return self._low_latent_state(request, self._read_query(query, record), rows)[0]

        stored, scale = self._low_rows(request), None
        if getattr(getattr(record, "ragged", None), "dtype", None) is torch.float8_e4m3fn:
            if not self.fp8_mla_prefill:
                raise AssertionError("prefill rounds to e4m3, which nobody asked for")
            scale = self.layer._k_scale.cpu().clamp(min=1)
        given = self.weights, request, stored, attend if is_decode else None
        return low_latent_output(*given, scale)

    def alone(self, row: int, tokens: slice) -> Inputs:
        if self.impl.indexer is not None:
            count = tokens.stop - tokens.start
            self.impl.indexer.topk_indices_buffer = self.lists[row][-count:].to(self.device)
        return super().alone(row, tokens)

    def together(self) -> None:
        if self.impl.indexer is not None:
            self.impl.indexer.topk_indices_buffer = self._indexer().topk_indices_buffer
