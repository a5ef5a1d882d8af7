"""The record of a benchmark case with its target, and functions that make cases."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum, unique
from itertools import groupby
from typing import Final, Self

import torch
from pydantic import Field, StrictBool, model_validator

from specs.base import NonNegativeInt, PositiveInt, Spec
from specs.dtypes import CacheDType, CacheDTypeField, DType
from specs.rows import LatentFormat, RowFormat, latent_format_of

PEERS: Final = ("fa3", "flashinfer", "xqa", "vllm_triton")
"""Kernels of other projects that the dense table compares with."""

NOPE_SIZE: Final = 128
"""``qk_nope_head_dim`` of a latent layer, as in DeepSeek's models."""
DENSE_LAYERS: Final = 32
LATENT_LAYERS: Final = 61
MODEL_DTYPE: Final = DType.BFLOAT16
"""Type of query, output and an ``auto`` cache in every case."""


@unique
class CaseKind(StrEnum):
    """Kind of a case's step, which decides the metric."""

    DECODE = "decode"
    VERIFY = "verify"
    """Several new tokens per request: the first is known, the others are drafts to verify."""
    PREFILL = "prefill"
    MIXED = "mixed"
    """Decodes first, then extends."""


class PeerBound(Spec):
    """A bound on our time as a multiple of one peer's time."""

    peer: str
    max_ratio: float = Field(gt=0)


class Target(Spec):
    """Bounds that a case has to meet, all of them; an empty target asks for nothing."""

    max_ratio_to_best: float | None = Field(default=None, gt=0)
    """Most of our time per layer over that of the fastest peer in ``against``."""
    max_graph_ratio_to_best: float | None = Field(default=None, gt=0)
    """Most of our time over that of the fastest peer in ``against``, both in captured graphs."""
    against: tuple[str, ...] = PEERS
    """Peers to compare with; all must be measured before a fastest one is known."""
    no_slower_than: str | None = None
    """Name of a case of the same run; our time per layer there, over ``min_speedup``, bounds our
    time here.
    """
    min_speedup: float = Field(default=1.0, gt=0)
    """Least of our time on the case ``no_slower_than`` over our time on this case."""
    max_graph_us: float | None = Field(default=None, gt=0)
    """Most microseconds of our ``forward`` in a captured graph."""
    max_invariant_ratio: float | None = Field(default=None, gt=0)
    """Most time per layer with ``EngineConfig.batch_invariant=True`` over that without."""
    max_host_us: float | None = Field(default=None, gt=0)
    """Most microseconds of one forward on the host."""
    host_at_most: str | None = None
    """Name of the peer whose host time bounds that of our forward."""
    faster_than: tuple[str, ...] = ()
    """Peers that our kernel must be faster than."""
    max_ratios: tuple[PeerBound, ...] = ()
    min_rate: float | None = Field(default=None, gt=0)
    """Least rate of our kernel, in the case's own unit, GB/s or TFLOP/s."""
    min_plain_rate: float | None = Field(default=None, gt=0)
    """Least rate of our portable kernel, in the case's own unit, GB/s or TFLOP/s."""


class KernelCase(Spec):
    """One step of one layer with R requests; lengths are in tokens."""

    name: str
    kind: CaseKind
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_size: PositiveInt
    rope_size: NonNegativeInt = 0
    """Elements of the rotary part. In a latent case a row is the key of all heads, and the row
    without its rotary part is their value. Where rows are expanded, every head's key has a rotary
    part. 0 where keys and values have one size."""
    query_lens: tuple[PositiveInt, ...] = Field(min_length=1)
    """``[R]`` new tokens."""
    seq_lens: tuple[PositiveInt, ...] = Field(min_length=1)
    """``[R]`` KV lengths, the new tokens included."""
    block_size: PositiveInt = 16
    kv_cache_dtype: CacheDTypeField = CacheDType.AUTO
    fp8_queries: StrictBool = False
    """Our latent layer may round queries to e4m3 (``EngineConfig.fp8_mla_queries``)."""
    sliding_window: PositiveInt | None = None
    """Visible keys, the token itself included."""
    topk: NonNegativeInt = 0
    """Keys that each new token lists; 0 means that it attends all visible keys."""
    sinks: StrictBool = False
    """One sink logit per query head in the softmax denominator."""
    num_speculative_tokens: NonNegativeInt = 0
    """k drafts per request; a verify query has 1 + k tokens."""
    target: Target = Target()
    compare_free_partition: StrictBool = False
    """Also time the kernel with a partition of the keys that depends on the whole batch."""
    compare_batch_invariant: StrictBool = False
    """Also time the kernel with ``EngineConfig.batch_invariant=True``."""

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        """There is one query and one KV length per request, and the kind allows the lengths."""
        if len(self.query_lens) != len(self.seq_lens):
            raise ValueError(
                f"query_lens and seq_lens must have one entry per request, got "
                f"{len(self.query_lens)} and {len(self.seq_lens)}"
            )
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            if query_len > seq_len:
                raise ValueError(f"query_lens must be at most seq_lens, got {query_len}, {seq_len}")
        expected = {CaseKind.DECODE: 1, CaseKind.VERIFY: 1 + self.num_speculative_tokens}
        length = expected.get(self.kind)
        if length is not None and set(self.query_lens) != {length}:
            raise ValueError(
                f"query_lens of a {self.kind.value} must be {length}, got {set(self.query_lens)}"
            )
        return self

    @property
    def num_reqs(self) -> int:
        """R, requests of the step."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """T, new tokens of the step."""
        return sum(self.query_lens)

    @property
    def scale(self) -> float:
        """Factor that q.k is multiplied by."""
        return float(self.head_size**-0.5)

    @property
    def layers(self) -> int:
        """Layers that share a step's plan: 61 latent ones as in DeepSeek-V3, 32 dense ones as in
        Llama-3.1-8B.
        """
        return LATENT_LAYERS if self.rope_size else DENSE_LAYERS

    @property
    def kv_itemsize(self) -> int:
        """Bytes per cached element."""
        return self.kv_cache_dtype.storage(MODEL_DTYPE).itemsize

    @property
    def is_bandwidth_bound(self) -> bool:
        """True for a case that is rated in GB/s, False for one in TFLOP/s."""
        return self.kind in (CaseKind.DECODE, CaseKind.VERIFY)

    @property
    def is_latent(self) -> bool:
        """True for absorbed attention over a latent cache."""
        return self.rope_size > 0 and self.num_kv_heads == 1

    @property
    def is_expanded(self) -> bool:
        """True for latent attention over expanded keys and values, which lie as queries do."""
        return self.rope_size > 0 and self.num_kv_heads > 1

    @property
    def head_size_v(self) -> int:
        """Head size of values and output."""
        return self.head_size - self.rope_size

    @property
    def latent_format(self) -> LatentFormat:
        """Name of the row format of the latent cache."""
        return latent_format_of(self.kv_cache_dtype)

    @property
    def latent_row(self) -> RowFormat:
        """Row format of the latent cache."""
        return self.latent_format.row(self.head_size_v, self.rope_size, MODEL_DTYPE)

    @property
    def unit(self) -> str:
        """Unit of :meth:`rate`. 64 or more query rows over a latent row are bound by products and
        therefore rated in TFLOP/s.
        """
        is_computed = self.is_latent and self.num_heads * max(self.query_lens) >= 64
        return "GB/s" if self.is_bandwidth_bound and not is_computed else "TF"

    @property
    def nbytes(self) -> int:
        """Bytes that a step has to move.

        Each key and value that some new token sees counts once, and query and output are added. In
        a case with lists every listed row counts, as often as it is listed.
        """
        if self.topk:
            return self.num_tokens * self.topk * self.latent_row.nbytes
        live = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            seen = seq_len if self.sliding_window is None else self.sliding_window + query_len - 1
            live += min(seq_len, seen)
        # A latent row is read once, as key and as value.
        sides = self.head_size + (0 if self.is_latent else self.head_size_v)
        cached = live * self.num_kv_heads * sides * self.kv_itemsize
        rows = self.num_tokens * self.num_heads * (self.head_size + self.head_size_v)
        return cached + rows * MODEL_DTYPE.itemsize

    @property
    def flops(self) -> int:
        """2 * (head size + value head size) per query head and visible (query, key) pair."""
        pairs = 0
        for query_len, seq_len in zip(self.query_lens, self.seq_lens, strict=True):
            if self.topk:
                pairs += query_len * self.topk
            else:
                pairs += _visible_pairs(query_len, seq_len, self.sliding_window)
        return 2 * (self.head_size + self.head_size_v) * self.num_heads * pairs

    def rate(self, time_us: float) -> float:
        """Rate in the case's unit for a time of ``time_us`` microseconds."""
        if self.unit == "GB/s":
            return self.nbytes / time_us * 1e-3
        return self.flops / time_us * 1e-6

    @property
    def what(self) -> str:
        """Shape in a few words: kind, heads / KV heads / head size, requests."""
        parts = []
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        groups = [(lens, len(list(same))) for lens, same in groupby(pairs)]
        if len(groups) > 3:
            parts.append(f"{self.num_reqs} ragged of {min(self.seq_lens)}..{max(self.seq_lens)}")
            groups = []
        for (query_len, seq_len), count in groups:
            new = f"{query_len} of " if 1 < query_len < seq_len else ""
            parts.append(f"{count} x {new}{seq_len}")
        if len(set(self.query_lens)) > 3:
            parts.append(f"{min(self.query_lens)}..{max(self.query_lens)} new")
        if self.sliding_window is not None:
            parts.append(f"window {self.sliding_window}")
        if self.topk:
            parts.append(f"top-k {self.topk}")
        if self.sinks:
            parts.append("sinks")
        if self.kv_cache_dtype.is_quantized:
            parts.append(f"{self.kv_cache_dtype.value} KV")
        if self.fp8_queries:
            parts.append("queries rounded to e4m3")
        heads = f"{self.num_heads}/{self.num_kv_heads}/{self.head_size}"
        return f"{self.kind.value} {heads}, {', '.join(parts)}"


def _visible_pairs(query_len: int, seq_len: int, window: int | None) -> int:
    """Pairs (new token, key it sees) of one request under a causal mask."""
    context = seq_len - query_len
    full = query_len * context + query_len * (query_len + 1) // 2
    if window is None:
        return full
    hidden = range(max(context, window), seq_len)
    return full - sum(position + 1 - window for position in hidden)


def zipf_lens(count: int, shortest: int, longest: int) -> tuple[int, ...]:
    """``count`` lengths, log-uniform from ``shortest`` to ``longest``, equal in every call."""
    draws = torch.rand(count, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(int(shortest * (longest / shortest) ** draw) for draw in draws)


def mixed_lens(count: int, most_new: int) -> list[tuple[int, int, int]]:
    """``count`` requests, as (1, new tokens, KV length), of which half have a context.

    New tokens are log-uniform from 1 to ``most_new``: one request is drawn from each of ``count``
    equal parts of the range, so that few requests span it too. Contexts are log-uniform from 64 to
    8191 tokens. Every call gives the same requests.
    """
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)
    has_context = torch.randperm(count, generator=generator) < count // 2
    contexts = torch.rand(count, generator=generator)
    requests = []
    for place, is_extend, context in zip(
        (places / count).tolist(), has_context.tolist(), contexts.tolist(), strict=True
    ):
        query_len = int((most_new + 1) ** place)
        requests.append((1, query_len, query_len + is_extend * int(64 * 128**context)))
    return requests


def make_case(
    name: str,
    kind: CaseKind,
    heads: tuple[int, int, int],
    requests: Sequence[tuple[int, int, int]],
    **fields: object,
) -> KernelCase:
    """A case of any kind.

    ``heads`` is (query heads, KV heads, head size); each of ``requests`` is (count, new tokens, KV
    length).
    """
    query_lens = [new for count, new, _ in requests for _ in range(count)]
    seq_lens = [length for count, _, length in requests for _ in range(count)]
    values = {
        "name": name,
        "kind": kind,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_size": heads[2],
        "query_lens": tuple(query_lens),
        "seq_lens": tuple(seq_lens),
        **fields,
    }
    return KernelCase.model_validate(values)


def make_decode(
    name: str,
    heads: tuple[int, int, int],
    requests: Sequence[tuple[int, int]],
    min_rate: float | None = None,
    drafts: int = 0,
    **fields: object,
) -> KernelCase:
    """A decode, or a verify of ``drafts`` drafts; each of ``requests`` is (count, KV length)."""
    return make_case(
        name,
        CaseKind.VERIFY if drafts else CaseKind.DECODE,
        heads,
        [(count, 1 + drafts, length) for count, length in requests],
        num_speculative_tokens=drafts,
        target=Target(max_ratio_to_best=1.10, faster_than=("vllm_triton",), min_rate=min_rate),
        **fields,
    )


def make_prefill(
    name: str,
    heads: tuple[int, int, int],
    requests: tuple[int, int, int],
    min_rate: float | None = None,
    **fields: object,
) -> KernelCase:
    """A prefill; ``requests`` is (count, new tokens, KV length)."""
    target = Target(min_rate=min_rate)
    return make_case(name, CaseKind.PREFILL, heads, [requests], target=target, **fields)
