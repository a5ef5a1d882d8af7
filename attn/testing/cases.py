"""Which cases the conformance runner puts a backend through.

A *feature* is what a dense layer asks beyond plain causal attention: a window, sinks, ALiBi. A
*case* is one layer with one batch and one cache: feature, batch, head counts and sizes, dtypes,
block size, cache layout. :func:`cases_for` chooses cases for a backend:

    for case in cases_for(MyBackend):
        check_case(MyBackend, case, device)  # of attn.testing.conformance

Every batch of every feature that the backend serves comes several times. The other axes are dealt
at random, from a seed that is the backend's name, so that each of their values meets many features;
further cases go through each axis on its own. A backend serves a case when its
``validate_configuration`` has no reason against the layer on this machine, so a backend that
refuses more is asked less.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.device import detect_device
from attn.registry import AttentionBackendEnum, RegisteredBackend
from attn.selector import import_problem
from attn.testing.batches import BATCHES, BatchSpec, Heads
from attn.testing.oracle import Rules
from specs.attention import AttentionSelectorConfig, AttentionType
from specs.dtypes import CacheDType, DType
from specs.layouts import KVOrder, KVPacking

# -- features


@dataclass(frozen=True)
class Feature:
    """What a dense layer and its batch ask beyond plain causal attention. None and False mean off.

    ``attn.testing.oracle.Rules`` defines what windows, chunks, ranges and R-SWA mean.
    """

    name: str
    batches: tuple[str, ...] = ("mixed",)
    """Names of the batches that the feature is asked with."""
    attn_type: AttentionType = AttentionType.DECODER
    causal: bool | None = True
    """None: every second request is causal, and the batch's ``causal`` is a tensor."""
    sliding_window: int | None = None
    """Keys that a query sees, its own included."""
    attention_chunk_size: int | None = None
    chunk_lookback: int | None = None
    """Chunks before its own that a query sees."""
    window_is_chunk: bool = False
    """vLLM's convention: with a lookback, ``sliding_window`` is the chunk size."""
    logits_soft_cap: float | None = None
    alibi: bool = False
    use_alibi_sqrt: bool = False
    sinks: bool = False
    mm_prefix: bool = False
    """Ranges of multimodal tokens see each other in both directions."""
    mm_clamp_window: bool = False
    """Even inside such a range, nothing further back than the sliding window is seen."""
    rswa_window: int | None = None
    """R-SWA: a query sees the request's prefix and its last keys, this many."""
    fp8_output: bool = False
    """The output is e4m3, with a scale."""
    num_shared_blocks: int = 0
    """Leading blocks that all requests have in common."""
    seq_lens_are_the_encoders: bool = True
    """Cross attention: ``seq_lens`` of the batch are the encoder's (True) or the decoder's."""

    def mm_ranges(self, kv_len: int) -> tuple[tuple[int, int], ...]:
        """Inclusive ranges of multimodal tokens in a request of ``kv_len`` tokens.

        There are several: separate ones, some longer than the window, one past the end and one that
        is empty. A request of fewer than 12 tokens has none.
        """
        if not self.mm_prefix or kv_len < 12:
            return ()
        third = kv_len // 3
        return ((1, third), (third + 2, third + 2), (2 * third - 1, kv_len - 3), (kv_len - 2, 999))

    def rswa_prefix_len(self, row: int) -> int:
        """Length of the R-SWA prefix of a request: one of several, 0 among them."""
        return (5, 0, 17, 2)[row % 4]

    def causal_of(self, row: int) -> bool:
        """True where the request in this row of the batch is causal."""
        if self.attn_type is not AttentionType.DECODER:
            return False
        return self.causal if self.causal is not None else row % 2 == 0

    def rules(self, row: int, kv_len: int, heads: Heads, slopes: Tensor | None) -> Rules:
        """What the oracle applies to one request, without sinks.

        Args:
            row: of the request.
            kv_len: its keys.
            heads: of the layer.
            slopes: fp32 ``[H]`` ALiBi slopes, if there are any.
        """
        chunk = self.sliding_window if self.window_is_chunk else self.attention_chunk_size
        rswa = self.rswa_window is not None
        return Rules(
            scale=heads.head_size**-0.5,
            causal=self.causal_of(row),
            sliding_window=None if self.window_is_chunk else self.sliding_window,
            attention_chunk_size=chunk,
            chunk_lookback=self.chunk_lookback or 0,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=slopes,
            use_alibi_sqrt=self.use_alibi_sqrt,
            mm_ranges=self.mm_ranges(kv_len),
            mm_clamp_window=self.mm_clamp_window,
            rswa_prefix_len=self.rswa_prefix_len(row) if rswa else None,
            rswa_window=self.rswa_window,
        )

    def impl_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the impl's constructor, only those that the feature needs."""
        given = {
            "attention_chunk_size": self.attention_chunk_size,
            "chunk_lookback": self.chunk_lookback,
            "use_alibi_sqrt": self.use_alibi_sqrt or None,
        }
        return {name: value for name, value in given.items() if value is not None}


_ENCODER, _CROSS = AttentionType.ENCODER, AttentionType.ENCODER_DECODER
_DECODER_BATCHES = tuple(
    name for name, spec in BATCHES.items() if spec.encoder_lens is None and name != "shared_prefix"
)
_SOME = ("mixed", "ragged_decode", "chunked_prefill")

FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("causal", _DECODER_BATCHES),
        Feature("non_causal", ("mixed", "uniform_decode", "full_prefill"), causal=False),
        Feature("causal_per_request", ("mixed", "full_prefill", "speculative_verify"), causal=None),
        Feature(
            "window",
            (*_SOME, "speculative_verify", "block_boundary", "long_context", "padding_rows"),
            sliding_window=13,
        ),
        Feature("window_of_one", sliding_window=1),
        Feature("non_causal_window", ("mixed", "full_prefill"), causal=False, sliding_window=9),
        Feature("causal_per_request_window", causal=None, sliding_window=9),
        Feature("chunked", (*_SOME, "block_boundary"), attention_chunk_size=20),
        Feature(
            "chunked_lookback",
            ("mixed", "ragged_verify"),
            attention_chunk_size=12,
            chunk_lookback=1,
        ),
        Feature("window_as_chunk", sliding_window=16, chunk_lookback=2, window_is_chunk=True),
        Feature("soft_cap", _SOME, logits_soft_cap=8.0),
        Feature("alibi", _SOME, alibi=True),
        Feature("alibi_sqrt", ("mixed", "chunked_prefill"), alibi=True, use_alibi_sqrt=True),
        Feature("sinks", (*_SOME, "keyless_rows"), sinks=True),
        Feature("sinks_window", ("mixed", "ragged_verify"), sinks=True, sliding_window=11),
        Feature("soft_cap_window", sliding_window=15, logits_soft_cap=6.0),
        Feature("mm_prefix", ("mixed", "full_prefill", "chunked_prefill"), mm_prefix=True),
        Feature(
            "mm_prefix_window",
            ("mixed", "full_prefill", "chunked_prefill"),
            mm_prefix=True,
            sliding_window=6,
        ),
        Feature(
            "mm_prefix_clamped",
            ("mixed", "full_prefill"),
            mm_prefix=True,
            mm_clamp_window=True,
            sliding_window=6,
        ),
        Feature("rswa", (*_SOME, "ragged_verify"), rswa_window=7),
        Feature("encoder", ("full_prefill",), attn_type=_ENCODER),
        Feature(
            "encoder_only",
            ("full_prefill", "single_long_prefill"),
            attn_type=AttentionType.ENCODER_ONLY,
        ),
        Feature(
            "encoder_only_window",
            ("full_prefill", "single_long_prefill"),
            attn_type=AttentionType.ENCODER_ONLY,
            sliding_window=10,
        ),
        Feature("cross", ("cross_decode", "cross_prefill"), attn_type=_CROSS),
        Feature(
            "cross_decoder_lens",
            ("cross_decode", "cross_prefill"),
            attn_type=_CROSS,
            seq_lens_are_the_encoders=False,
        ),
        Feature("cascade", ("shared_prefix",), num_shared_blocks=2),
        Feature("cascade_sinks", ("shared_prefix",), num_shared_blocks=2, sinks=True),
        Feature("cascade_window", ("shared_prefix",), num_shared_blocks=2, sliding_window=60),
        Feature("fp8_output", ("mixed", "uniform_decode", "padding_rows"), fp8_output=True),
    )
}
"""Every feature of the conformance cases, by name."""


# -- cases

HEADS = (
    Heads(8, 2, 64),
    Heads(4, 4, 64),
    Heads(7, 1, 64),
    Heads(14, 2, 64),
    Heads(8, 1, 64),
    Heads(8, 2, 80),
    Heads(8, 2, 128),
)
"""Head counts and sizes of dense cases: groups of 1 to 8 query heads, some not powers of two."""


def _id(*parts: str) -> str:
    return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Case:
    """One dense layer with one batch and one cache. ``str(case)`` names it in test ids."""

    feature: Feature = FEATURES["causal"]
    batch: BatchSpec = BATCHES["mixed"]
    heads: Heads = HEADS[0]
    dtype: DType = DType.FLOAT32
    cache_dtype: CacheDType = CacheDType.AUTO
    block_size: int = 16
    packing: KVPacking = KVPacking.SPLIT
    order: KVOrder = KVOrder.NHD
    padded_pages: bool = False
    """True: bytes lie between the pages of the cache."""
    per_head_scales: bool = False
    """True: the layer has an fp8 scale for each KV head, not one for the tensor."""
    fused_projection: bool = False
    """True: q, k and v are strided slices of a wider tensor, and the output is ``[T, H * Dv]``.
    False: all are dense, ``[T, H, D]``."""

    def __str__(self) -> str:
        return _id(
            self.feature.name,
            self.batch.name,
            self.dtype.value,
            "" if self.cache_dtype is CacheDType.AUTO else f"kv_{self.cache_dtype.value}",
            "per_head" if self.per_head_scales else "",
            str(self.heads),
            f"p{self.block_size}",
            self.packing.value,
            self.order.value,
            "padded" if self.padded_pages else "",
            "fused" if self.fused_projection else "",
        )

    def selector_config(self) -> AttentionSelectorConfig:
        """The layer's needs as the selector and ``validate_configuration`` take them."""
        feature = self.feature
        return AttentionSelectorConfig(
            head_size=self.heads.head_size,
            dtype=self.dtype,
            kv_cache_dtype=self.cache_dtype,
            block_size=self.block_size,
            has_sink=feature.sinks,
            use_mm_prefix=feature.mm_prefix,
            use_per_head_quant_scales=self.per_head_scales,
            attn_type=feature.attn_type,
            has_sliding_window=feature.sliding_window is not None,
            use_non_causal=feature.causal is not True,
            use_rswa=feature.rswa_window is not None,
            use_logits_soft_cap=feature.logits_soft_cap is not None,
            use_alibi=feature.alibi,
            use_alibi_sqrt=feature.use_alibi_sqrt,
            use_chunked_local=feature.attention_chunk_size is not None or feature.window_is_chunk,
        )

    def is_served_by(self, backend: type[AttentionBackend]) -> bool:
        """True where the backend takes such a layer on this machine, with this cache layout, and
        offers what the case needs of the optional parts of its interface.
        """
        if self.feature.fp8_output and not backend.capabilities.output_quant:
            return False
        if not self.feature.attn_type.is_cached and self.cache_dtype.is_quantized:
            return False
        if self.heads.v_size != self.heads.head_size and not backend.capabilities.head_size_v:
            return False
        if not takes_blocks(backend, self.block_size):
            return False
        capability = detect_device().compute_capability
        if backend.layout_reason(self.packing, self.padded_pages, capability) is not None:
            return False
        return not refusals(backend, self.selector_config())


@dataclass(frozen=True)
class LatentCase:
    """One MLA layer with one batch and one latent cache. ``str(case)`` names it in test ids."""

    batch: BatchSpec = BATCHES["mixed"]
    num_heads: int = 3
    dtype: DType = DType.FLOAT32
    cache_dtype: CacheDType = CacheDType.AUTO
    block_size: int = 16
    padded_pages: bool = False
    """True: bytes lie between the pages of the cache."""
    lists: str | None = None
    """None: a dense layer. Else a sparse one whose lists are ``padded`` with -1 at the end, have
    ``holes`` of -1 in between, or have ``repeats``, a position twice."""
    fused_projection: bool = False
    """True: absorbed queries come as one tensor, latent and rotary rows as slices of a wider one.
    False: queries come in two parts, and rows are dense."""
    rank: int = 512
    """L, the width of the latent."""
    rope_size: int = 64
    """r, the width of the rotary part."""
    sliding_window: int | None = None
    """Keys that a query sees, its own included; None: all up to its own."""

    def __str__(self) -> str:
        return _id(
            "sparse_" + self.lists if self.lists else "latent",
            "" if self.sliding_window is None else f"window{self.sliding_window}",
            self.batch.name,
            self.dtype.value,
            "" if self.cache_dtype is CacheDType.AUTO else f"kv_{self.cache_dtype.value}",
            f"h{self.num_heads}",
            f"p{self.block_size}",
            "padded" if self.padded_pages else "",
            "fused" if self.fused_projection else "",
        )

    def selector_config(self) -> AttentionSelectorConfig:
        """The layer's needs as the selector and ``validate_configuration`` take them."""
        return AttentionSelectorConfig(
            head_size=self.rank + self.rope_size,
            dtype=self.dtype,
            kv_cache_dtype=self.cache_dtype,
            block_size=self.block_size,
            use_mla=True,
            use_sparse=self.lists is not None,
            has_sliding_window=self.sliding_window is not None,
        )

    def is_served_by(self, backend: type[AttentionBackend]) -> bool:
        """True where the backend takes such a layer on this machine."""
        return not refusals(backend, self.selector_config())


AnyCase = Case | LatentCase
"""What the conformance runner takes."""


def takes_blocks(backend: type[AttentionBackend], block_size: int) -> bool:
    """True where the backend's kernels take blocks of this size.

    An engine may cut larger blocks into pages that a kernel takes; the runner does not.
    """
    return any(
        block_size == size if isinstance(size, int) else block_size % size.base == 0
        for size in backend.get_supported_kernel_block_sizes()
    )


def refusals(backend: type[AttentionBackend], config: AttentionSelectorConfig) -> list[str]:
    """The backend's reasons against a layer on this machine."""
    return backend.validate(config, detect_device().compute_capability)


def device_for(row: RegisteredBackend) -> torch.device | None:
    """The device on which a registered backend can run here; None where it cannot run.

    A backend that needs no package but Triton runs on the CPU with ``TRITON_INTERPRET=1``.
    """
    if row.missing() or import_problem(row) is not None:
        return None
    here = detect_device()
    if row.get_class().supports_device(here):
        broken = row.get_class().unavailable_reason()
        return torch.device(here.torch_type) if broken is None else None
    return torch.device("cpu") if is_interpreted(row.get_class()) else None


def is_interpreted(backend: type[AttentionBackend]) -> bool:
    """True where the backend's Triton kernels run in Triton's interpreter on this machine.

    Raises:
        UnknownBackendError: they would have to, but the backend is not registered.
    """
    if os.environ.get("TRITON_INTERPRET", "0") != "1" or backend.supports_device(detect_device()):
        return False
    return set(AttentionBackendEnum[backend.get_name()].row.requires) <= {"triton"}


def latent_shape(backend: type[AttentionBackend]) -> dict[str, int]:
    """Smaller ``rank`` and ``rope_size`` of latent cases for a backend in Triton's interpreter,
    where wide rows take too long; else empty, which leaves the usual sizes.
    """
    if not is_interpreted(backend):
        return {}
    # A block of a block-scaled latent is 128 wide.
    is_scaled = CacheDType.FP8_DS_MLA in backend.capabilities.kv_cache_dtypes
    return {"rank": 128 if is_scaled else 64, "rope_size": 32}


# -- choosing cases


class _Deck:
    """Deals values in random order, each of them once before any comes again."""

    def __init__(self, values: Sequence[Any], seed: str) -> None:
        self._values = list(values)
        self._random = random.Random(seed)
        self._left: list[Any] = []

    def deal(self) -> Any:
        if not self._left:
            self._left = self._random.sample(self._values, len(self._values))
        return self._left.pop()


BLOCK_SIZES = (16, 48, 64)
"""Tokens of a block that cases ask for."""
LATENT_HEADS = (1, 3, 16)
"""Query heads of latent cases."""
LATENT_WINDOWS = {
    13: (
        *(*_SOME, "full_prefill", "speculative_verify", "ragged_verify", "block_boundary"),
        *("padding_rows", "keyless_rows", "long_context"),
    ),
    1: ("mixed", "ragged_verify"),
    40: ("chunked_prefill", "ragged_decode"),
}
"""Sliding windows of latent cases, and the names of the batches that each is asked with."""
COARSE = (CacheDType.INT4_PER_TOKEN_HEAD, CacheDType.FP8_E5M2)
"""Cache dtypes whose error is a large part of the output. Features are not asked over them, only
cases that go through the dtypes."""
ROUNDS = 3
"""How often each batch of each feature comes, each time with other values of the other axes."""
_TRIES = 50
"""How often other values are dealt until the backend serves the case."""


def cases_for(backend: type[AttentionBackend]) -> list[AnyCase]:
    """The conformance cases of a backend: see the text of this module.

    In Triton's interpreter each batch of each feature comes once, and long batches are left out.
    """
    is_slow = is_interpreted(backend)
    rounds = 1 if is_slow else ROUNDS
    made: Iterator[AnyCase] = (
        _latent_cases(backend, rounds) if backend.is_mla() else _dense_cases(backend, rounds)
    )
    unique = dict.fromkeys(made)
    return [case for case in unique if runs_here(backend, case)]


def runs_here(backend: type[AttentionBackend], case: AnyCase) -> bool:
    """False for batches of more than 1,000 keys in Triton's interpreter, which takes too long."""
    return not is_interpreted(backend) or max(case.batch.kv_lens, default=0) <= 1000


def _dense_cases(backend: type[AttentionBackend], rounds: int) -> Iterator[Case]:
    """Cases of a dense backend, some of them twice."""
    yield from _feature_cases(backend, rounds)
    yield from _swept(backend, _dtype_cases(backend))
    yield from _swept(backend, _layout_cases(backend))
    yield from _swept(backend, _geometry_cases(backend))


def _served(backend: type[AttentionBackend], axis: str, values: Sequence[Any]) -> list[Any]:
    """Values of one axis with which the backend serves an otherwise plain layer."""
    plain = Case(dtype=backend.capabilities.dtypes[0])
    kept = [value for value in values if replace(plain, **{axis: value}).is_served_by(backend)]
    return kept or [getattr(plain, axis)]


def _feature_cases(backend: type[AttentionBackend], rounds: int) -> Iterator[Case]:
    """Every batch of every feature, ``rounds`` times, with dealt values of the other axes."""
    name = backend.get_name()
    caches = [dtype for dtype in backend.capabilities.kv_cache_dtypes if dtype not in COARSE]
    served = _served(backend, "cache_dtype", caches)
    decks = {
        "dtype": _Deck(backend.capabilities.dtypes, f"{name} dtype"),
        "cache_dtype": _Deck([CacheDType.AUTO] * len(served) + served, f"{name} cache"),
        "block_size": _Deck(_served(backend, "block_size", BLOCK_SIZES), f"{name} block"),
        "heads": _Deck(_served(backend, "heads", HEADS), f"{name} heads"),
        "packing": _Deck(list(KVPacking), f"{name} packing"),
        "order": _Deck(list(KVOrder), f"{name} order"),
        "padded_pages": _Deck([False, False, True], f"{name} padded"),
        "fused_projection": _Deck([False, True], f"{name} fused"),
    }
    wanted = [(feature, name) for feature in FEATURES.values() for name in feature.batches]
    for feature, batch in wanted * rounds:
        for _ in range(_TRIES):
            axes = {axis: deck.deal() for axis, deck in decks.items()}
            case = Case(feature=feature, batch=BATCHES[batch], **axes)
            if case.is_served_by(backend) and runs_here(backend, case):
                yield case
                break


def _swept(backend: type[AttentionBackend], cases: Iterator[Case]) -> Iterator[Case]:
    """Those of ``cases`` that the backend serves."""
    return (case for case in cases if case.is_served_by(backend))


def _dtype_cases(backend: type[AttentionBackend]) -> Iterator[Case]:
    """Every model dtype with every cache dtype; fp8 with scales per head too."""
    orders = _Deck(list(KVOrder), "dtype order")
    packings = _Deck(list(KVPacking), "dtype packing")
    for dtype in backend.capabilities.dtypes:
        for cache_dtype in backend.capabilities.kv_cache_dtypes:
            case = Case(dtype=dtype, cache_dtype=cache_dtype, heads=Heads(8, 2, 128))
            case = replace(case, order=orders.deal(), packing=packings.deal())
            yield case
            if cache_dtype.value.startswith("fp8") and not is_inline(cache_dtype):
                yield replace(case, per_head_scales=True, heads=Heads(6, 3, 128))


def _layout_cases(backend: type[AttentionBackend]) -> Iterator[Case]:
    """Every cache layout: plain, with inline scales, and with values of another size than keys."""
    inline = [dtype for dtype in backend.capabilities.kv_cache_dtypes if is_inline(dtype)]
    dtypes = _Deck(backend.capabilities.dtypes, "layout dtype")
    for packing in KVPacking:
        for order in KVOrder:
            for padded in (False, True):
                case = Case(packing=packing, order=order, padded_pages=padded, dtype=dtypes.deal())
                yield case
                for cache_dtype in inline[:1]:
                    yield replace(case, cache_dtype=cache_dtype)
                if packing is KVPacking.PACKED:
                    smaller, larger = Heads(8, 2, 96, 64), Heads(8, 2, 64, 96)
                    yield replace(case, heads=larger if padded else smaller)


def _geometry_cases(backend: type[AttentionBackend]) -> Iterator[Case]:
    """All of ``HEADS`` and ``BLOCK_SIZES``, the smallest and the largest declared head size, and
    the smallest block size and four times that.
    """
    sizes = backend.capabilities.head_sizes
    declared = sizes.values or (max(sizes.minimum, sizes.multiple_of), sizes.maximum or 256)
    dtypes = _Deck(backend.capabilities.dtypes, "geometry dtype")
    decode = BATCHES["ragged_verify"]
    for heads in (*HEADS, *(Heads(4, 2, size) for size in (min(declared), max(declared)))):
        yield Case(heads=heads, batch=decode, dtype=dtypes.deal())
    smallest = backend.get_preferred_block_size(1)
    for block_size in (*BLOCK_SIZES, smallest, 4 * smallest):
        yield Case(block_size=block_size, batch=BATCHES["block_boundary"], dtype=dtypes.deal())


def is_inline(cache_dtype: CacheDType) -> bool:
    """True where the row of a token and a head ends in its own scale."""
    return cache_dtype.value.endswith("per_token_head")


def _latent_cases(backend: type[AttentionBackend], rounds: int) -> Iterator[LatentCase]:
    """Cases of a latent backend, some of them twice."""
    name, capabilities = backend.get_name(), backend.capabilities
    dtypes = _Deck(capabilities.dtypes, f"{name} dtype")
    caches = _Deck(capabilities.kv_cache_dtypes, f"{name} cache")
    blocks = _Deck(BLOCK_SIZES, f"{name} block")
    heads = _Deck(LATENT_HEADS, f"{name} heads")
    flags = _Deck([False, True], f"{name} flags")
    lists = _Deck(["padded", "holes", "repeats"] if capabilities.is_sparse else [None], name)
    shape = latent_shape(backend)
    if shape:
        heads = _Deck(LATENT_HEADS[:-1], f"{name} heads")

    def dealt(**given: Any) -> LatentCase:
        axes = {
            "dtype": dtypes.deal(),
            "cache_dtype": caches.deal(),
            "block_size": blocks.deal(),
            "num_heads": heads.deal(),
            "padded_pages": flags.deal(),
            "fused_projection": flags.deal(),
            "lists": lists.deal(),
        }
        return LatentCase(**{**axes, **shape, **given})

    def served(**given: Any) -> Iterator[LatentCase]:
        tries = (dealt(**given) for _ in range(_TRIES))
        yield from [
            case for case in tries if case.is_served_by(backend) and runs_here(backend, case)
        ][:1]

    for batch_name in _DECODER_BATCHES * rounds:
        longest = {"num_heads": 1} if batch_name == "long_context" else {}
        yield from served(batch=BATCHES[batch_name], **longest)
    for dtype in capabilities.dtypes:
        for cache_dtype in capabilities.kv_cache_dtypes:
            decodes = dtype is DType.FLOAT16 or is_interpreted(backend)
            batch = BATCHES["ragged_decode" if decodes else "mixed"]
            yield from served(batch=batch, dtype=dtype, cache_dtype=cache_dtype)
    for num_heads in LATENT_HEADS:
        yield from served(batch=BATCHES["ragged_verify"], num_heads=num_heads)
    for block_size in BLOCK_SIZES:
        yield from served(batch=BATCHES["block_boundary"], block_size=block_size)
    for window, names in LATENT_WINDOWS.items():
        for batch_name in names:
            yield from served(batch=BATCHES[batch_name], sliding_window=window)
    if shape:
        yield from served(batch=BATCHES["mixed"], rank=512, rope_size=64)
