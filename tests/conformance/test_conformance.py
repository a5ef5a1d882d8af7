"""Every registered backend keeps its promises, because it is registered."""

from __future__ import annotations

import pytest

from attn.backends.base import AttentionBackend
from attn.device import detect_device
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BATCHES
from attn.testing.cases import (
    BLOCK_SIZES,
    FEATURES,
    HEADS,
    LATENT_HEADS,
    Case,
    LatentCase,
    cases_for,
    device_for,
    refusals,
    runs_here,
    takes_blocks,
)
from attn.testing.plugin import BackendCase
from specs.dtypes import CacheDType, DType
from specs.layouts import KVOrder, KVPacking


def plain(batch: str) -> Case:
    return Case(batch=BATCHES[batch], dtype=DType.FLOAT16)


def stores(backend: type[AttentionBackend], cache: CacheDType) -> bool:
    """Whether this machine, whose FlashInfer may be an old one, serves layers with such a cache."""
    make = LatentCase if backend.is_mla() else Case
    dtypes = backend.capabilities.dtypes
    asked = (make(dtype=dtype, cache_dtype=cache).selector_config() for dtype in dtypes)
    reasons = (" ".join(refusals(backend, config)) for config in asked)
    return not all("kv_cache_dtype" in said for said in reasons)


def backends_here() -> list[str]:
    return [row.name for row in AttentionBackendEnum if device_for(row) is not None]


@pytest.mark.attn_backend(*(row.name for row in AttentionBackendEnum))
def test_backend_conforms(attn_case: BackendCase) -> None:
    attn_case.check()


@pytest.mark.parametrize("name", backends_here())
def test_cases_cover_what_the_backend_declares(name: str) -> None:
    backend = AttentionBackendEnum[name].get_class()
    cases, declared = cases_for(backend), backend.capabilities
    assert {case.dtype for case in cases} == set(declared.dtypes)
    stored = {cache for cache in declared.kv_cache_dtypes if stores(backend, cache)}
    assert {case.cache_dtype for case in cases} == stored
    block_sizes = {size for size in BLOCK_SIZES if takes_blocks(backend, size)}
    assert block_sizes <= {case.block_size for case in cases}
    dense = [case for case in cases if isinstance(case, Case)]
    if declared.is_mla:
        decoders = {
            name
            for name, spec in BATCHES.items()
            if spec.encoder_lens is None
            and runs_here(backend, LatentCase(batch=spec, dtype=DType.FLOAT16))
        }
        assert {case.batch.name for case in cases} == decoders - {"shared_prefix"}
        assert {case.num_heads for case in cases} == set(LATENT_HEADS)
        return
    assert {case.feature.attn_type for case in dense} == set(declared.attn_types)
    batches = {name for name in FEATURES["causal"].batches if runs_here(backend, plain(name))}
    assert batches <= {case.batch.name for case in dense}
    capability = detect_device().compute_capability
    assert {(case.packing, case.order, case.padded_pages) for case in dense} == {
        (packing, order, padded)
        for packing in KVPacking
        for order in KVOrder
        for padded in (False, True)
        if backend.layout_reason(packing, padded, capability) is None
    }
    dtype = declared.dtypes[0]
    heads = {one for one in HEADS if Case(heads=one, dtype=dtype).is_served_by(backend)}
    assert heads <= {case.heads for case in dense}
    asked = (Case(feature, dtype=dtype) for feature in FEATURES.values())
    wanted = {case.feature.name for case in asked if case.is_served_by(backend)}
    assert wanted <= {case.feature.name for case in dense}


def test_at_least_one_dense_one_latent_and_one_sparse_backend_run_here() -> None:
    kinds = set()
    for name in backends_here():
        backend = AttentionBackendEnum[name].get_class()
        kinds.add((backend.is_mla(), backend.is_sparse()))
    assert kinds == {(False, False), (True, False), (True, True)}
