"""The conformance runner finds every seeded fault; a runner that passes wrong results is broken."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from attn.backends.base import AttentionBackend
from attn.cli.corrupt import Fault, corrupt_backend
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BATCHES
from attn.testing.cases import (
    FEATURES,
    AnyCase,
    Case,
    LatentCase,
    device_for,
    is_interpreted,
    latent_shape,
    runs_here,
)
from attn.testing.conformance import run_case
from attn.testing.trial import CaseResult
from builders.base import AttentionMetadataBuilder
from specs.attention import AttentionCGSupport
from specs.dtypes import CacheDType, DType

Backend = type[AttentionBackend]

FEATURE_OF = {
    Fault.WINDOW_OFF_BY_ONE: "window",
    Fault.DROPPED_SINK: "sinks",
    Fault.WRONG_SOFT_CAP: "soft_cap",
    Fault.SHIFTED_ALIBI: "alibi",
    Fault.WRONG_CHUNK: "chunked",
}
"""What a dense layer must have for a fault to touch it; plain causal attention otherwise."""
NOT_LATENT = {*FEATURE_OF, Fault.SWAPPED_KV, Fault.WRONG_GROUP} - {Fault.WINDOW_OFF_BY_ONE}
NOT_SPARSE = {*NOT_LATENT, Fault.WINDOW_OFF_BY_ONE, Fault.UNMASKED_TAIL}
"""Lists, not lengths, decide what a sparse layer reads."""
IN_THE_PLAN = {Fault.WINDOW_OFF_BY_ONE, Fault.WRONG_SOFT_CAP}
"""Where the host plans for a layer, an impl that asks for another layer is refused."""
BATCH_NAMES = ("mixed", "ragged_decode", "ragged_verify", "chunked_prefill", "full_prefill")
LATENT_BATCH_NAMES = BATCH_NAMES[:-1]
"""A latent prefill without context reads nothing from the cache."""


def backends_here() -> dict[str, Backend]:
    rows = [row for row in AttentionBackendEnum if device_for(row) is not None]
    return {row.name: row.get_class() for row in rows}


def fitting_case(fault: Fault, backend: Backend, batch: str, dtype: DType) -> AnyCase | None:
    """A case that the backend serves and in which the fault matters."""
    if backend.capabilities.needs_host_lengths and fault in IN_THE_PLAN:
        return None
    cache_dtype = CacheDType.FP8 if fault is Fault.WRONG_KV_SCALE else CacheDType.AUTO
    axes: dict[str, Any] = {
        "batch": BATCHES[batch],
        "dtype": dtype,
        "cache_dtype": cache_dtype,
    }
    case: AnyCase
    if backend.is_mla():
        if fault in (NOT_SPARSE if backend.is_sparse() else NOT_LATENT):
            return None
        lists = "padded" if backend.is_sparse() else None
        window = 13 if fault is Fault.WINDOW_OFF_BY_ONE else None
        case = LatentCase(**axes, **latent_shape(backend), lists=lists, sliding_window=window)
    else:
        case = Case(**axes, feature=FEATURES[FEATURE_OF.get(fault, "causal")])
    return case if case.is_served_by(backend) else None


def seeded() -> list[tuple[Fault, str, str, DType]]:
    """Faults on every backend in every batch, each dtype in turn; under Triton's interpreter, which
    is slow, in one batch each.
    """
    found = []
    for (name, backend), fault in itertools.product(backends_here().items(), Fault):
        dtypes = itertools.cycle(backend.capabilities.dtypes)
        rows = [
            (fault, name, batch, dtype)
            for batch in (LATENT_BATCH_NAMES if backend.is_mla() else BATCH_NAMES)
            if (case := fitting_case(fault, backend, batch, dtype := next(dtypes))) is not None
            and runs_here(backend, case)
        ]
        found += rows[:1] if is_interpreted(backend) else rows
    return found


def conform(backend: Backend, case: AnyCase, name: str | None = None) -> CaseResult:
    device = device_for(AttentionBackendEnum[name or backend.get_name()])
    assert device is not None
    return run_case(backend, case, device)


@cache
def is_clean(name: str, case: AnyCase) -> bool:
    """Whether the unchanged backend has no findings; asked once for all faults of a case."""
    return not conform(AttentionBackendEnum[name].get_class(), case).findings


@pytest.mark.parametrize(("fault", "name", "batch", "dtype"), seeded())
def test_every_fault_shows_in_the_output(fault: Fault, name: str, batch: str, dtype: DType) -> None:
    backend = AttentionBackendEnum[name].get_class()
    case = fitting_case(fault, backend, batch, dtype)
    assert case is not None
    assert is_clean(name, case)
    assert "output" in conform(corrupt_backend(backend, fault), case).findings


@pytest.mark.parametrize("fault", list(Fault))
def test_every_fault_fits_a_case_of_some_backend(fault: Fault) -> None:
    assert fault in {one for one, *_ in seeded()}


# -- faults that no triple wrapper of the library makes


def wrapped(
    backend: Backend,
    impl: dict[str, Callable[..., Any]] | None = None,
    builder: dict[str, Callable[..., Any]] | None = None,
) -> Backend:
    """The backend with some methods of its impl or builder replaced."""
    base_impl, base_builder = backend.get_impl_cls(), backend.get_builder_cls()
    broken_impl = type("BrokenImpl", (base_impl,), impl or {})
    broken_builder = type("BrokenBuilder", (base_builder,), builder or {})
    names = {
        "get_impl_cls": staticmethod(lambda: broken_impl),
        "get_builder_cls": staticmethod(lambda: broken_builder),
    }
    return type("BrokenBackend", (backend,), names)


def inherited(self: Any, name: str) -> Any:
    """The method that a wrapper replaced."""
    return getattr(super(type(self), self), name)


def forward_then(spoil: Callable[[Any, Any, torch.Tensor, Any], None]) -> dict[str, Any]:
    """``forward`` followed by ``spoil(kv_cache, metadata, output, output_lse)``."""

    def forward(
        self: Any, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any, output: Any,
        **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        arguments = (layer, q, k, v, kv_cache, metadata, output)
        out: torch.Tensor = inherited(self, "forward")(*arguments, **options)
        spoil(kv_cache, metadata, out, options.get("output_lse"))
        return out

    return {"forward": forward}


def build_then(change: Callable[[Any, Any, Any], None]) -> dict[str, Any]:
    """``build`` followed by ``change(builder, batch, record)``."""

    def build(self: Any, prefix: int, batch: Any, fast_build: bool = False) -> Any:
        record = inherited(self, "build")(prefix, batch, fast_build)
        change(self, batch, record)
        return record

    return {"build": build}


def _log2_lse(kv_cache: Any, metadata: Any, out: torch.Tensor, lse: Any) -> None:
    if lse is not None and metadata is not None:
        lse.div_(math.log(2))


def _write_padding(kv_cache: Any, metadata: Any, out: torch.Tensor, lse: Any) -> None:
    out[-1] = 0


def _write_lse_padding(kv_cache: Any, metadata: Any, out: torch.Tensor, lse: Any) -> None:
    if lse is not None:
        lse[-1] = 0


def _scribble(kv_cache: torch.Tensor, metadata: Any, out: torch.Tensor, lse: Any) -> None:
    if metadata is not None:
        kv_cache[0].zero_()


def _leave_profile(kv_cache: Any, metadata: Any, out: torch.Tensor, lse: Any) -> None:
    if metadata is None:
        out[..., -1] = 1


def _depend_on_the_batch(kv_cache: Any, metadata: Any, out: torch.Tensor, lse: Any) -> None:
    if metadata is not None and len(out) > 1:
        out.mul_(1 + 2 * torch.finfo(out.dtype).eps)


def _write_the_batch(builder: Any, batch: Any, record: Any) -> None:
    batch.max_seq_len += 1


def _write_a_tensor_of_the_batch(builder: Any, batch: Any, record: Any) -> None:
    batch.positions.add_(1)


_SERIAL = itertools.count()


def _never_the_same(builder: Any, batch: Any, record: Any) -> None:
    record.serial = next(_SERIAL)


def _keep_the_table(self: Any, metadata: Any, block_table: Any, slot_mapping: Any) -> Any:
    return copy.copy(metadata)


def _forget_the_wrapper(self: Any, metadata: Any, block_table: Any, slot_mapping: Any) -> Any:
    updated = inherited(self, "update_block_table")(metadata, block_table, slot_mapping)
    del updated.added_by_a_wrapper
    return updated


PADDED = Case(batch=BATCHES["padding_rows"])
LOCAL = {
    "log2_lse": (forward_then(_log2_lse), {}, Case(), "lse"),
    "padding_row_written": (forward_then(_write_padding), {}, PADDED, "padding"),
    "padding_lse_written": (forward_then(_write_lse_padding), {}, PADDED, "padding"),
    "cache_written": (forward_then(_scribble), {}, Case(), "unchanged"),
    "unused_block_written": (forward_then(_scribble), {}, Case(), "cache"),
    "profile_not_zero": (forward_then(_leave_profile), {}, Case(), "profile"),
    "batch_dependent": (forward_then(_depend_on_the_batch), {}, Case(), "same_bits"),
    "batch_written": ({}, build_then(_write_the_batch), Case(), "unchanged"),
    "tensor_written": ({}, build_then(_write_a_tensor_of_the_batch), Case(), "unchanged"),
    "not_repeatable": ({}, build_then(_never_the_same), Case(), "rebuild"),
    "table_kept": ({}, {"update_block_table": _keep_the_table}, Case(), "block_table"),
    "wrapper_lost": ({}, {"update_block_table": _forget_the_wrapper}, Case(), "block_table"),
}


def dense_backends() -> list[str]:
    return [name for name, backend in backends_here().items() if not backend.is_mla()]


def latent_backends() -> list[str]:
    return [name for name, backend in backends_here().items() if backend.is_mla()]


@pytest.mark.parametrize("fault", LOCAL)
@pytest.mark.parametrize("name", dense_backends())
def test_broken_promises_of_a_dense_triple_are_seen(name: str, fault: str) -> None:
    impl, builder, case, check = LOCAL[fault]
    backend = AttentionBackendEnum[name].get_class()
    case = replace(case, dtype=backend.capabilities.dtypes[0])
    needed = {"lse"} if "lse" in fault else set()
    if needed and not backend.capabilities.lse:
        pytest.skip("returns no LSE")
    assert is_clean(name, case)
    assert check in conform(wrapped(backend, impl, builder), case).findings


@pytest.mark.parametrize("name", latent_backends())
def test_a_log2_lse_of_a_latent_triple_is_seen(name: str) -> None:
    def forward_mqa(self: Any, *args: Any) -> Any:
        out, lse = inherited(self, "forward_mqa")(*args)
        return out, lse / math.log(2)

    backend = AttentionBackendEnum[name].get_class()
    if not backend.capabilities.lse:
        pytest.skip("returns no LSE")
    lists = "padded" if backend.is_sparse() else None
    case = LatentCase(dtype=backend.capabilities.dtypes[0], lists=lists, **latent_shape(backend))
    broken = wrapped(backend, {"forward_mqa": forward_mqa})
    assert list(conform(broken, case).findings) == ["lse"]


# -- every feature matters: a triple that ignores it, or gets it wrong by one, is seen


def given(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A constructor whose keyword arguments are changed."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        change(options)
        inherited(self, "__init__")(*args, **options)

    return {"__init__": __init__}


def built_from(change: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """``build`` of a batch with some fields changed."""

    def build(self: Any, prefix: int, batch: Any, fast_build: bool = False) -> Any:
        return inherited(self, "build")(prefix, batch.replace(**change(batch)), fast_build)

    return {"build": build}


def seen_through(change: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """A ``forward`` that runs with another layer."""

    def forward(self: Any, layer: Any, *args: Any, **options: Any) -> Any:
        return inherited(self, "forward")(replace(layer, **change(layer)), *args, **options)

    return {"forward": forward}


def _wider_rswa_window(self: Any, spec: Any, names: Any, config: Any, device: Any) -> None:
    wider = config.replace(rswa_window=config.rswa_window + 1)
    inherited(self, "__init__")(spec, names, wider, device)


def _shorter_ranges(batch: Any) -> dict[str, Any]:
    ranges = batch.mm_req_doc_ranges
    return {
        "mm_req_doc_ranges": {
            row: [(start, end - 1) for start, end in pairs] for row, pairs in ranges.items()
        }
    }


def _inverse_output_scale(self: Any, *args: Any, **options: Any) -> Any:
    if options.get("output_scale") is not None:
        options["output_scale"] = 1 / options["output_scale"]
    return inherited(self, "forward")(*args, **options)


PER_HEAD = Case(cache_dtype=CacheDType.FP8, per_head_scales=True)
IGNORED = {
    "non_causal": (Case(FEATURES["non_causal"]), {}, built_from(lambda b: {"causal": True})),
    "causal_flags": (
        Case(FEATURES["causal_per_request"]),
        {},
        built_from(lambda b: {"causal": ~b.causal}),
    ),
    "two_sided_window": (
        Case(FEATURES["non_causal_window"]),
        {},
        built_from(lambda b: {"causal": True}),
    ),
    "ranges": (
        Case(FEATURES["mm_prefix"]),
        {},
        built_from(lambda b: {"mm_req_doc_ranges": None}),
    ),
    "end_of_ranges": (Case(FEATURES["mm_prefix_window"]), {}, built_from(_shorter_ranges)),
    "clamp_of_ranges": (
        Case(FEATURES["mm_prefix_clamped"]),
        seen_through(lambda layer: {"mm_prefix_clamp_sliding_window": False}),
        {},
    ),
    "no_clamp_of_ranges": (
        Case(FEATURES["mm_prefix_window"]),
        seen_through(lambda layer: {"mm_prefix_clamp_sliding_window": True}),
        {},
    ),
    "rswa_prefix": (
        Case(FEATURES["rswa"]),
        {},
        built_from(lambda b: {"rswa_prefix_lens": b.rswa_prefix_lens + 1}),
    ),
    "rswa_window": (
        Case(FEATURES["rswa"]),
        {},
        {"__init__": _wider_rswa_window},
    ),
    "lookback": (
        Case(FEATURES["chunked_lookback"]),
        given(lambda options: options.update(chunk_lookback=0)),
        {},
    ),
    "lookback_of_window_chunks": (
        Case(FEATURES["window_as_chunk"]),
        given(lambda options: options.update(chunk_lookback=1)),
        {},
    ),
    "alibi_sqrt": (
        Case(FEATURES["alibi_sqrt"]),
        given(lambda options: options.update(use_alibi_sqrt=False)),
        {},
    ),
    "output_scale": (Case(FEATURES["fp8_output"]), {"forward": _inverse_output_scale}, {}),
    "key_scale_per_head": (
        PER_HEAD,
        seen_through(lambda layer: {"_k_scale": layer._k_scale.flip(0)}),
        {},
    ),
    "value_scale_per_head": (
        PER_HEAD,
        seen_through(lambda layer: {"_v_scale": layer._v_scale.flip(0)}),
        {},
    ),
    "order_of_sinks": (
        Case(FEATURES["sinks"]),
        given(lambda options: options.update(sinks=options["sinks"].roll(1))),
        {},
    ),
}


@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("name", dense_backends())
def test_a_triple_that_gets_a_feature_wrong_is_seen(name: str, ignored: str) -> None:
    case, impl, builder = IGNORED[ignored]
    backend = AttentionBackendEnum[name].get_class()
    case = replace(case, dtype=backend.capabilities.dtypes[0])
    if not case.is_served_by(backend):
        pytest.skip("does not serve this feature")
    assert is_clean(name, case)
    assert "output" in conform(wrapped(backend, impl, builder), case).findings


@pytest.mark.parametrize("name", dense_backends())
@pytest.mark.parametrize("batch", ["cross_decode", "cross_prefill"])
def test_cross_attention_over_the_decoders_lengths_is_seen(name: str, batch: str) -> None:
    backend = AttentionBackendEnum[name].get_class()
    dtype = backend.capabilities.dtypes[0]
    case = Case(FEATURES["cross_decoder_lens"], BATCHES[batch], dtype=dtype)
    if not case.is_served_by(backend):
        pytest.skip("serves no cross attention")

    def shorter(b: Any) -> dict[str, Any]:
        return {"encoder_seq_lens": torch.minimum(b.encoder_seq_lens, b.seq_lens)}

    assert is_clean(name, case)
    broken = wrapped(backend, builder=built_from(shorter))
    assert "output" in conform(broken, case).findings


def _stop_at_the_first_hole(lists: torch.Tensor) -> torch.Tensor:
    return lists.masked_fill((lists < 0).cumsum(1) > 0, -1)


def _drop_repeats(lists: torch.Tensor) -> torch.Tensor:
    earlier = (lists[:, :, None] == lists[:, None, :]).tril(-1).any(-1)
    return lists.masked_fill(earlier, -1)


def _drop_the_last_column(lists: torch.Tensor) -> torch.Tensor:
    kept = (lists >= 0).cumsum(1) < (lists >= 0).sum(1, keepdim=True)
    return lists.masked_fill(~kept, -1)


def _next_position(lists: torch.Tensor) -> torch.Tensor:
    return torch.where(lists > 0, lists - 1, lists)


WRONG_LISTS = {
    "holes": _stop_at_the_first_hole,
    "repeats": _drop_repeats,
    "last": _drop_the_last_column,
    "shifted": _next_position,
}


@pytest.mark.parametrize("wrong", WRONG_LISTS)
@pytest.mark.parametrize("name", [name for name, one in backends_here().items() if one.is_sparse()])
def test_lists_read_wrongly_by_a_sparse_triple_are_seen(name: str, wrong: str) -> None:
    def forward_mqa(self: Any, *args: Any) -> Any:
        right = self.indexer.topk_indices_buffer
        self.indexer.topk_indices_buffer = WRONG_LISTS[wrong](right)
        try:
            return inherited(self, "forward_mqa")(*args)
        finally:
            self.indexer.topk_indices_buffer = right

    backend = AttentionBackendEnum[name].get_class()
    lists = wrong if wrong in ("holes", "repeats") else "padded"
    case = LatentCase(dtype=backend.capabilities.dtypes[0], lists=lists, **latent_shape(backend))
    assert is_clean(name, case)
    findings = conform(wrapped(backend, {"forward_mqa": forward_mqa}), case).findings
    assert {"output", "latent", "lse"} <= set(findings)


# -- CUDA graphs: doubles of a builder that claims them, one right and one wrong


def claims_graphs(backend: Backend, keeps_its_record: bool) -> Backend:
    """A backend whose builder claims graphs: it updates one record in place, or makes a new one."""

    def build(
        self: Any, prefix: int, batch: Any, fast_build: bool = False
    ) -> AttentionMetadataBuilder[Any]:
        fresh = inherited(self, "build")(prefix, batch, fast_build)
        if not keeps_its_record:
            return fresh
        if not hasattr(self, "record"):
            self.record = fresh
        vars(self.record).update(vars(fresh))
        return self.record

    support = classmethod(lambda cls, *args: AttentionCGSupport.ALWAYS)
    return wrapped(backend, builder={"build": build, "get_cudagraph_support": support})


def without_graphs(name: str) -> Backend:
    """A backend for the tests with graphs; on the CPU, where a replay is another forward."""
    backend = AttentionBackendEnum[name].get_class()
    if backend.cudagraph_support() is not AttentionCGSupport.NEVER:
        pytest.skip("has graphs of its own")
    return backend


@pytest.mark.parametrize("name", dense_backends())
@pytest.mark.parametrize("batch", ["mixed", "uniform_decode", "padding_rows", "full_prefill"])
def test_a_replay_of_a_record_updated_in_place_passes(name: str, batch: str) -> None:
    backend = without_graphs(name)
    case = Case(batch=BATCHES[batch], dtype=backend.capabilities.dtypes[0])
    result = run_case(claims_graphs(backend, keeps_its_record=True), case, "cpu")
    assert "capture" in result.checked
    assert not result.findings


@pytest.mark.parametrize("name", dense_backends())
@pytest.mark.parametrize("batch", ["mixed", "uniform_decode"])
def test_a_replay_that_reads_the_captured_step_is_seen(name: str, batch: str) -> None:
    backend = without_graphs(name)
    case = Case(batch=BATCHES[batch], dtype=backend.capabilities.dtypes[0])
    result = run_case(claims_graphs(backend, keeps_its_record=False), case, "cpu")
    assert list(result.findings) == ["capture"]


def test_backends_without_graphs_are_not_asked_for_them() -> None:
    for backend in backends_here().values():
        if backend.cudagraph_support() is AttentionCGSupport.NEVER:
            lists = "padded" if backend.is_sparse() else None
            case = LatentCase(lists=lists, **latent_shape(backend)) if backend.is_mla() else Case()
            assert "capture" not in conform(backend, case).checked


def test_one_step_runs_the_checks_of_its_forward() -> None:
    case = LatentCase(BATCHES["ragged_decode"], num_heads=2)
    backend = AttentionBackendEnum.TORCH_REF_MLA.get_class()
    whole, one = run_case(backend, case), run_case(backend, case, one_step=True)
    later = {"profile", "block_table", "same_bits", "capture"}
    assert one.checked == whole.checked - later
    assert whole.checked & later
    assert {"cache", "output", "padding"} <= one.checked
    wrong = corrupt_backend(backend, Fault.WRONG_KV_SCALE)
    case = replace(case, cache_dtype=CacheDType.FP8)
    assert run_case(wrong, case, one_step=True).findings
