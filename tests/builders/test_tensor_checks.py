"""Every triple refuses tensors of another type, shape or block size than its layer, step or cache.

The error names the argument, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.backends.flashinfer import FlashInferBackend
from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.backends.mixed import mix
from attn.backends.sparse_mla import SparseMLABackend
from attn.backends.torch_ref import TorchRefBackend
from attn.backends.torch_ref_mla import TorchRefMLABackend, TorchRefSparseMLABackend
from attn.backends.triton_attn import TritonAttentionBackend
from attn.backends.triton_mla import TritonMLABackend
from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.backends.trtllm_mla import TrtllmMlaBackend
from attn.impls.sparse.indexer import IndexInputs, SparseIndexer
from attn.ops.mla import mla_attention
from attn.testing.batches import BATCHES, Heads
from attn.testing.cases import FEATURES, Case, LatentCase
from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import Trial
from builders.batch import CommonAttentionMetadata
from builders.device import interprets
from builders.sparse.indexer import IndexerMetadataBuilder
from specs.devices import KNOWN_DEVICES
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig
from specs.kv_cache import IndexerSpec
from tests.emulators import (
    flashinfer_emulator,
    flashinfer_mla_emulator,
    trtllm_emulator,
    trtllm_mla_emulator,
)

CPU = torch.device("cpu")
on_cpu_tensors = pytest.mark.skipif(
    not interprets(), reason="kernels take CPU tensors under Triton's interpreter alone"
)
HEADS = Heads(4, 2, 64)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OTHER = {
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float16,
}
"""The other 16-bit type."""


@dataclass
class Triple:
    """A backend, a case that it serves, and a context that emulates the packages it needs."""

    backend: type[AttentionBackend]
    case: Case | LatentCase
    packages: Callable[[], AbstractContextManager[Any]] = nullcontext
    other_size: int = 32

    def trial(self, **changes: Any) -> Trial:
        case = replace(self.case, **changes)
        if isinstance(case, Case):
            return DenseTrial(self.backend, case, CPU)
        return LatentTrial(self.backend, case, CPU)


def dense(dtype: DType = DType.FLOAT16) -> Case:
    return Case(batch=BATCHES["mixed"], heads=HEADS, dtype=dtype)


def latent(dtype: DType = DType.FLOAT16, **fields: Any) -> LatentCase:
    sizes = {"rank": 128, "rope_size": 32, **fields}
    return LatentCase(batch=BATCHES["mixed"], dtype=dtype, **sizes)


H200 = KNOWN_DEVICES["h200"]
DENSE = {
    "TORCH_REF": Triple(TorchRefBackend, dense()),
    "TRITON_ATTN": Triple(TritonAttentionBackend, dense()),
    "FLASHINFER": Triple(FlashInferBackend, dense(), flashinfer_emulator.emulated),
    "TRTLLM_MHA": Triple(
        TrtllmMhaBackend, dense(DType.BFLOAT16), lambda: trtllm_emulator.emulated(H200)
    ),
    "mixed": Triple(
        mix("REF_XQA", TorchRefBackend, TrtllmMhaBackend),
        dense(DType.BFLOAT16),
        lambda: trtllm_emulator.emulated(H200),
    ),
}
LATENT = {
    "TORCH_REF_MLA": Triple(TorchRefMLABackend, latent()),
    "TRITON_MLA": Triple(TritonMLABackend, latent()),
    "FLASHINFER_MLA": Triple(
        FlashInferMlaBackend,
        latent(rank=512, rope_size=64),
        flashinfer_mla_emulator.emulated,
    ),
    "TRTLLM_MLA": Triple(
        TrtllmMlaBackend,
        latent(DType.BFLOAT16, rank=512, rope_size=64, block_size=32),
        trtllm_mla_emulator.emulated,
        other_size=64,
    ),
    "TORCH_REF_SPARSE_MLA": Triple(
        TorchRefSparseMLABackend, latent(lists="padded", block_size=64), other_size=128
    ),
    "SPARSE_MLA": Triple(SparseMLABackend, latent(lists="padded", block_size=64), other_size=128),
}
EVERY = DENSE | LATENT
SAME_WORDS = ("TORCH_REF", "TRITON_ATTN")


@pytest.fixture(params=EVERY)
def triple(request: pytest.FixtureRequest) -> Iterator[Triple]:
    found = EVERY[request.param]
    with found.packages():
        yield found


# -- One call of a dense layer.


def forward_of(trial: Trial) -> dict[str, Any]:
    """Arguments of a forward that is not refused."""
    inputs, heads = trial.inputs, HEADS
    rows = len(inputs.query)
    return {
        "layer": trial.layer,
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        "kv_cache": trial.cache(),
        "attn_metadata": trial.build(trial.builder()),
        "output": torch.zeros(rows, heads.num_heads, heads.head_size, dtype=trial.dtype),
        "output_scale": None,
        "output_lse": None,
    }


def update_of(trial: Trial) -> dict[str, Any]:
    """Arguments of a cache write that is not refused."""
    inputs = trial.inputs
    return {
        "layer": trial.layer,
        "key": inputs.key,
        "value": inputs.value,
        "kv_cache": trial.cache(),
        "slot_mapping": inputs.batch.slot_mapping,
    }


@dataclass
class Wrong:
    """A call that must be refused."""

    message: str
    """Pattern of the error's message."""
    changes: Callable[[dict[str, Any], Trial], dict[str, Any]]
    case: dict[str, Any] = field(default_factory=dict)
    """Fields by which the case of the layer differs from the usual one."""


def recast(name: str) -> Callable[[dict[str, Any], Trial], dict[str, Any]]:
    """A change that puts one tensor into the other 16-bit type."""
    return lambda given, _: {name: given[name].to(OTHER[given[name].dtype])}


def shaped(name: str, *shape: int) -> Callable[[dict[str, Any], Trial], dict[str, Any]]:
    """A change that gives one tensor rows of another shape."""
    return lambda given, _: {name: given[name].new_zeros(len(given[name]), *shape)}


def shorter(name: str) -> Callable[[dict[str, Any], Trial], dict[str, Any]]:
    """A change that takes rows away from one tensor."""
    return lambda given, _: {name: given[name][:3]}


def cache_of(**fields: Any) -> Callable[[dict[str, Any], Trial], dict[str, Any]]:
    """A change that gives the call a cache of another kind, with enough blocks."""

    def change(_: dict[str, Any], trial: Trial) -> dict[str, Any]:
        spec = trial.spec.replace(page_size_padded=None, **fields)
        return {"kv_cache": spec.layout().allocate(trial.paging.num_blocks)}

    return change


def without_scales(given: dict[str, Any], _: Trial) -> dict[str, Any]:
    return {"layer": SimpleNamespace()}


FP8 = {"cache_dtype": CacheDType.FP8}
FORWARDS = {
    "query of the other type": Wrong(
        r"kv_cache must hold torch.bfloat16 .*got torch.float16", recast("query")
    ),
    "cache of the other type": Wrong(
        r"kv_cache must hold torch.float16 .*got torch.bfloat16", recast("kv_cache")
    ),
    "cache of a named other type": Wrong(
        r"kv_cache must hold torch.bfloat16 .*got torch.float16",
        lambda given, _: {"kv_cache": given["kv_cache"].to(torch.float16)},
        {"cache_dtype": CacheDType.BFLOAT16},
    ),
    "cache of e5m2": Wrong(
        "kv_cache must hold torch.float8_e4m3fn .*got torch.float8_e5m2",
        lambda given, _: {"kv_cache": given["kv_cache"].view(E5M2)},
        FP8,
    ),
    "blocks of 32": Wrong(
        "kv_cache must have blocks of 16 .*got blocks of 32", cache_of(block_size=32)
    ),
    "cache of one KV head": Wrong(
        "kv_cache must have the layer's 2 KV heads, got 1", cache_of(num_kv_heads=1)
    ),
    "cache of wider heads": Wrong(
        "kv_cache rows must hold 128 bytes of v .*got 384", cache_of(head_size=128)
    ),
    "query of three heads": Wrong(r"query must have shape \[\*, 4, 64\]", shaped("query", 3, 64)),
    "query of narrower heads": Wrong(
        r"query must have shape \[\*, 4, 64\]", shaped("query", 4, 32)
    ),
    "query too short": Wrong(r"query.* must have at least num_actual_tokens", shorter("query")),
    "output of int8": Wrong(
        "output must be torch.float16 or torch.float32 without an output_scale, got torch.int8",
        lambda given, _: {"output": given["output"].to(torch.int8)},
    ),
    "output of the other type": Wrong(
        "output must be torch.float16 or torch.float32", recast("output")
    ),
    "scaled output of fp16": Wrong(
        "output must be torch.float8_e4m3fn with an output_scale, got torch.float16",
        lambda given, _: {"output_scale": torch.ones(())},
    ),
    "two output scales": Wrong(
        r"output_scale must be contiguous float32 of 1 elements, got shape \[2\]",
        lambda given, _: {"output_scale": torch.ones(2), "output": given["output"].to(E4M3)},
    ),
    "output of three heads": Wrong(
        r"output must have shape \[\*, 4, 64\]", shaped("output", 3, 64)
    ),
    "flat output too narrow": Wrong(r"output must have shape \[\*, 4, 64\]", shaped("output", 192)),
    "output too short": Wrong(r"output must have at least num_actual_tokens", shorter("output")),
    "lse of fp16": Wrong(
        "output_lse must be float32, got torch.float16",
        lambda given, _: {"output_lse": given["query"].new_zeros(len(given["query"]), 4)},
    ),
    "lse of three heads": Wrong(
        r"output_lse must have shape \[\*, 4\], got",
        lambda given, _: {"output_lse": torch.zeros(len(given["query"]), 3)},
    ),
    "lse too short": Wrong(
        "output_lse must have at least num_actual_tokens",
        lambda given, _: {"output_lse": torch.zeros(3, 4)},
    ),
    "no scales": Wrong("layer must have _k_scale and _v_scale", without_scales, FP8),
    "scales of fp16": Wrong(
        "k_scale must be contiguous float32",
        lambda given, trial: {"layer": replace(trial.layer, _k_scale=torch.ones(()).half())},
        FP8,
    ),
}
ENCODERS = {
    "no key": Wrong("key is needed for attn_type 'encoder_only'", lambda *_: {"key": None}),
    "no value": Wrong("value is needed for attn_type 'encoder_only'", lambda *_: {"value": None}),
    "key of the other type": Wrong("key and value must have query's dtype", recast("key")),
    "value of the other type": Wrong("key and value must have query's dtype", recast("value")),
    "value too short": Wrong("value and output must have at least", shorter("value")),
    "key of one head": Wrong(r"key must have shape \[\*, 2, 64\]", shaped("key", 1, 64)),
    "value of narrower heads": Wrong(
        r"value must have shape \[\*, 2, 64\]", shaped("value", 2, 32)
    ),
}
UPDATES = {
    "no key": Wrong("key is needed, got None", lambda *_: {"key": None}),
    "no value": Wrong("value is needed, got None", lambda *_: {"value": None}),
    "key of the other type": Wrong(
        "kv_cache must hold torch.bfloat16 .*got torch.float16", recast("key")
    ),
    "value of the other type": Wrong("value must have key's dtype", recast("value")),
    "key of one head": Wrong(
        r"value must be \[\d+, 1, Dv\] like key",
        lambda given, _: {"key": given["key"][:, :1].contiguous()},
    ),
    "both of one head": Wrong(
        r"views.key must have shape",
        lambda given, _: {name: given[name][:, :1].contiguous() for name in ("key", "value")},
    ),
    "value too short": Wrong(r"value must be \[\d+, 2, Dv\] like key", shorter("value")),
    "key of narrower heads": Wrong("views.key must have shape", shaped("key", 2, 32)),
    "slots of int32": Wrong(
        r"slot_mapping must be \[T\] int64",
        lambda given, _: {"slot_mapping": given["slot_mapping"].int()},
    ),
    "slots of two dimensions": Wrong(
        r"slot_mapping must be \[T\] int64",
        lambda given, _: {"slot_mapping": given["slot_mapping"][:, None]},
    ),
    "more slots than tokens": Wrong(
        "slot_mapping must have at most key's 3 rows",
        lambda given, _: {name: given[name][:3] for name in ("key", "value")},
    ),
    "cache of the other type": Wrong("kv_cache must hold torch.float16", recast("kv_cache")),
    "cache of one KV head": Wrong("kv_cache must have the layer's 2", cache_of(num_kv_heads=1)),
    "no scales": Wrong("layer must have _k_scale and _v_scale", without_scales),
    "scales of fp16": Wrong(
        "k_scale must be a float32 scalar",
        lambda given, trial: {"layer": replace(trial.layer, _k_scale=torch.ones(()).half())},
        FP8,
    ),
}


def refused(trial: Trial, method: str, given: dict[str, Any], wrong: Wrong) -> str:
    """The message of the error that refuses the call."""
    with pytest.raises(ValueError, match=wrong.message) as caught:
        getattr(trial.impl, method)(**{**given, **wrong.changes(given, trial)})
    return str(caught.value)


def told_alike(wrong: Wrong, method: str, given_of: Callable[[Trial], dict[str, Any]]) -> None:
    """Check that TORCH_REF and TRITON_ATTN refuse a call with the same message."""
    said = set()
    for name in SAME_WORDS:
        trial = DENSE[name].trial(**wrong.case)
        said.add(refused(trial, method, given_of(trial), wrong))
    assert len(said) == 1


@pytest.mark.parametrize("what", FORWARDS)
def test_a_forward_with_a_wrong_tensor_is_refused_alike(what: str) -> None:
    told_alike(FORWARDS[what], "forward", forward_of)


@pytest.mark.parametrize("what", ENCODERS)
def test_an_encoder_with_a_wrong_tensor_is_refused_alike(what: str) -> None:
    wrong = ENCODERS[what]
    case = {"feature": FEATURES["encoder_only"], "batch": BATCHES["full_prefill"]}
    told_alike(replace(wrong, case=case), "forward", forward_of)


@pytest.mark.parametrize("what", UPDATES)
def test_a_write_with_a_wrong_tensor_is_refused_alike(what: str) -> None:
    told_alike(UPDATES[what], "do_kv_cache_update", update_of)


ROTATIONS = {
    "positions too short": Wrong("positions must have a row for each", shorter("positions")),
    "positions of floats": Wrong(
        "positions must be", lambda given, _: {"positions": given["positions"].float()}
    ),
    "query of the other type": Wrong("query must be .* like key", recast("query")),
    "table too wide": Wrong(
        "cos_sin_cache must be", lambda *_: {"cos_sin_cache": torch.zeros(900, 128)}
    ),
    "no value": Wrong("value is needed, got None", lambda *_: {"value": None}),
}


def rotation_of(trial: Trial) -> dict[str, Any]:
    """Arguments of a rotation with cache write that is not refused."""
    given = update_of(trial)
    given["layer_slot_mapping"] = given.pop("slot_mapping")
    return given | {
        "query": trial.inputs.query,
        "positions": torch.arange(len(trial.inputs.query)),
        "cos_sin_cache": torch.zeros(900, 64),
        "is_neox": True,
    }


@on_cpu_tensors
@pytest.mark.parametrize("what", ROTATIONS)
def test_a_rotation_with_a_wrong_tensor_is_refused_alike(what: str) -> None:
    told_alike(ROTATIONS[what], "do_rope_and_kv_cache_update", rotation_of)


# -- Latent layers.


def mqa_of(trial: LatentTrial) -> dict[str, Any]:
    record = trial.build(trial.builder())
    absorbed = trial._absorbed(trial.inputs.query[: record.num_decode_tokens])
    return {
        "q": absorbed,
        "kv_c_and_k_pe_cache": trial.cache(),
        "attn_metadata": record,
        "layer": trial.layer,
    }


def mha_of(trial: LatentTrial) -> dict[str, Any]:
    record, inputs = trial.build(trial.builder()), trial.inputs
    assert inputs.key is not None
    rows = slice(record.num_decode_tokens, None)
    kv_c, k_pe = trial._parts(inputs.key[rows])
    width = trial.case.num_heads * trial.weights.v_size
    return {
        "q": inputs.query[rows],
        "kv_c_normed": kv_c,
        "k_pe": k_pe,
        "kv_c_and_k_pe_cache": trial.cache(),
        "attn_metadata": record,
        "k_scale": trial.layer._k_scale,
        "output": torch.zeros(len(kv_c), width, dtype=trial.dtype),
    }


def latent_update_of(trial: LatentTrial) -> dict[str, Any]:
    inputs = trial.inputs
    assert inputs.key is not None
    kv_c, k_pe = trial._parts(inputs.key)
    return {
        "kv_c_normed": kv_c,
        "k_pe": k_pe,
        "kv_cache": trial.cache(),
        "slot_mapping": inputs.batch.slot_mapping,
        "kv_cache_dtype": trial.case.cache_dtype.value,
        "k_scale": trial.layer._k_scale,
    }


def other_cache(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name].to(OTHER[given[name].dtype])}


LATENT_UPDATES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "no latent": ("kv_c_normed is needed, got None", lambda _: {"kv_c_normed": None}),
    "no rotary key": ("k_pe is needed, got None", lambda _: {"k_pe": None}),
    "no scale": ("k_scale is needed, got None", lambda _: {"k_scale": None}),
    "latent too narrow": (
        r"kv_c_normed must have shape \[\*, ",
        lambda given: {"kv_c_normed": given["kv_c_normed"][:, :64]},
    ),
    "rotary key too narrow": (
        r"k_pe must have shape \[\*, ",
        lambda given: {"k_pe": given["k_pe"][:, :16]},
    ),
    "rotary key of the other type": (
        "k_pe must have kv_c_normed's dtype",
        lambda given: other_cache("k_pe", given),
    ),
    "rotary key too short": (
        r"k_pe must have kv_c_normed's \d+ rows, got 3",
        lambda given: {"k_pe": given["k_pe"][:3]},
    ),
    "slots of int32": (
        r"slot_mapping must be \[T\] int64",
        lambda given: {"slot_mapping": given["slot_mapping"].int()},
    ),
    "more slots than tokens": (
        "slot_mapping must have at most kv_c_normed's 3 rows",
        lambda given: {name: given[name][:3] for name in ("kv_c_normed", "k_pe")},
    ),
    "cache of the other type": (
        "kv_cache must hold",
        lambda given: other_cache("kv_cache", given),
    ),
}
DECODES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "query too narrow": (
        r"q must have shape \[\*, 3, ",
        lambda given: {"q": given["q"][..., :-8]},
    ),
    "query of two heads": (r"q must have shape", lambda given: {"q": given["q"][:, :2]}),
    "pair of two types": (
        "q must be a pair",
        lambda given: {"q": (given["q"][..., :-32], given["q"][..., -32:].float())},
    ),
    "pair of two lengths": (
        "q must be a pair",
        lambda given: {"q": (given["q"][..., :-32], given["q"][:1, :, -32:])},
    ),
    "query too short": (
        r"q(uery)? must have a row for each of the step's \d+ tokens",
        lambda given: {"q": given["q"][:0]},
    ),
    "cache of the other type": (
        "kv_cache must hold",
        lambda given: other_cache("kv_c_and_k_pe_cache", given),
    ),
}
PREFILLS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "no latent": ("kv_c_normed is needed, got None", lambda _: {"kv_c_normed": None}),
    "no rotary key": ("k_pe is needed, got None", lambda _: {"k_pe": None}),
    "query of two heads": (
        r"q must have shape \[\*, 3, ",
        lambda given: {"q": given["q"][:, :2]},
    ),
    "query too short": (
        r"q must have a row for each of the step's \d+ tokens, got 3",
        lambda given: {"q": given["q"][:3]},
    ),
    "latent too short": (
        r"kv_c_normed must have a row for each of the step's \d+ tokens, got 3",
        lambda given: {"kv_c_normed": given["kv_c_normed"][:3]},
    ),
    "rotary key too short": (
        r"k_pe must have a row for each of the step's \d+ tokens, got 3",
        lambda given: {"k_pe": given["k_pe"][:3]},
    ),
    "new rows of the other type": (
        "kv_c_normed and k_pe must have q's dtype",
        lambda given: other_cache("k_pe", given) | other_cache("kv_c_normed", given),
    ),
    "output too narrow": (
        r"output must have shape \[\*, ",
        lambda given: {"output": given["output"][:, :-8]},
    ),
    "output too short": (
        r"output must have a row for each of the step's \d+ tokens, got 3",
        lambda given: {"output": given["output"][:3]},
    ),
    "output of int8": (
        "output must be .* without an output_scale, got torch.int8",
        lambda given: {"output": given["output"].to(torch.int8)},
    ),
}


def latent_trial(name: str) -> LatentTrial:
    trial = LATENT[name].trial()
    assert isinstance(trial, LatentTrial)
    return trial


@pytest.mark.parametrize("what", LATENT_UPDATES)
@pytest.mark.parametrize("name", LATENT)
def test_a_write_of_wrong_latent_rows_is_refused(name: str, what: str) -> None:
    message, change = LATENT_UPDATES[what]
    with LATENT[name].packages():
        trial = latent_trial(name)
        given = latent_update_of(trial)
        with pytest.raises(ValueError, match=message):
            trial.impl.do_kv_cache_update(**{**given, **change(given)})


@pytest.mark.parametrize("what", DECODES)
@pytest.mark.parametrize("name", LATENT)
def test_a_latent_decode_with_a_wrong_tensor_is_refused(name: str, what: str) -> None:
    message, change = DECODES[what]
    with LATENT[name].packages():
        trial = latent_trial(name)
        given = mqa_of(trial)
        with pytest.raises(ValueError, match=message):
            trial.impl.forward_mqa(**{**given, **change(given)})


@pytest.mark.parametrize("what", PREFILLS)
@pytest.mark.parametrize("name", [name for name in LATENT if "SPARSE" not in name])
def test_a_latent_prefill_with_a_wrong_tensor_is_refused(name: str, what: str) -> None:
    message, change = PREFILLS[what]
    with LATENT[name].packages():
        trial = latent_trial(name)
        given = mha_of(trial)
        with pytest.raises(ValueError, match=message):
            trial.impl.forward_mha(**{**given, **change(given)})


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda good: good.to(torch.int8), "output must be .* got torch.int8"),
        (lambda good: good[:, :-8], r"output must have shape \[\*, "),
    ],
)
def test_a_latent_layer_refuses_an_output_that_does_not_fit(
    output: Callable[[Tensor], Tensor], message: str
) -> None:
    trial = latent_trial("TORCH_REF_MLA")
    given = mha_of(trial)
    inputs, record = trial.inputs, given["attn_metadata"]
    assert inputs.key is not None
    rows = torch.zeros(len(inputs.query), given["output"].shape[1], dtype=trial.dtype)
    tensors = inputs.query, *trial._parts(inputs.key), trial.cache(), record, output(rows)
    with pytest.raises(ValueError, match=message):
        mla_attention(trial.impl, trial.layer, *tensors)


@pytest.mark.parametrize("name", LATENT)
def test_a_latent_layer_without_its_scale_is_refused(name: str) -> None:
    with LATENT[name].packages():
        trial = latent_trial(name)
        given = mqa_of(trial) | {"layer": SimpleNamespace()}
        if name in ("FLASHINFER_MLA", "TRTLLM_MLA"):
            # These backends read the layer's scales only with an fp8 cache.
            trial.impl.forward_mqa(**given)
            return
        with pytest.raises(ValueError, match="layer must have _k_scale, a float32 tensor"):
            trial.impl.forward_mqa(**given)


# -- Every triple: the step knows its cache.


def attend(trial: Trial, cache: Tensor, record: Any) -> None:
    trial.attend(record, trial.inputs, cache)


@on_cpu_tensors
def test_a_right_step_is_attended(triple: Triple) -> None:
    trial = triple.trial()
    trial.write()
    attend(trial, trial.cache(), trial.build(trial.builder()))


def test_blocks_of_another_size_are_refused(triple: Triple) -> None:
    trial = triple.trial()
    spec = trial.spec.replace(block_size=triple.other_size)
    cache = spec.layout().allocate(trial.paging.num_blocks)
    wanted = rf"kv_cache must have blocks of {trial.spec.block_size} .*of {triple.other_size}"
    with pytest.raises(ValueError, match=wanted):
        attend(trial, cache, trial.build(trial.builder()))


@on_cpu_tensors
def test_a_cache_of_the_other_type_is_refused(triple: Triple) -> None:
    trial = triple.trial()
    cache = trial.cache()
    with pytest.raises(ValueError, match=f"kv_cache must hold .*got {OTHER[cache.dtype]}"):
        attend(trial, cache.to(OTHER[cache.dtype]), trial.build(trial.builder()))


def test_a_step_that_was_built_for_another_type_is_refused(triple: Triple) -> None:
    trial = triple.trial()
    record = trial.build(trial.builder())
    parts = [record, getattr(record, "decode", None), getattr(record, "prefill", None)]
    for part in parts:
        if hasattr(part, "cache_dtype"):
            part.cache_dtype = E4M3
    with pytest.raises(ValueError, match=r"kv_cache must hold torch.float8_e4m3fn, for which"):
        attend(trial, trial.cache(), record)


def test_a_batch_of_another_block_size_is_refused(triple: Triple) -> None:
    trial = triple.trial()
    own = trial.spec.block_size
    batch = trial.inputs.batch.replace(block_size=triple.other_size)
    message = f"block_size of the batch must be .* {own}, got {triple.other_size}"
    with pytest.raises(ValueError, match=message):
        trial.build(trial.builder(), batch)
    trial.build(trial.builder(), trial.inputs.batch.replace(block_size=own))


def test_a_negative_prefix_is_refused(triple: Triple) -> None:
    trial = triple.trial()
    with pytest.raises(ValueError, match="common_prefix_len must not be negative, got -16"):
        trial.builder().build(-16, trial.inputs.batch)


@pytest.mark.skipif(torch.cuda.device_count() > 9, reason="has such a device")
def test_a_device_that_is_not_there_is_refused(triple: Triple) -> None:
    trial = triple.trial()
    trial.device = torch.device("cuda", 9)
    with pytest.raises(ValueError, match=r"device must be there, got 'cuda:9' on a machine of"):
        trial.builder()


def test_another_group_s_record_gets_that_group_s_blocks(triple: Triple) -> None:
    trial = triple.trial()
    builder = trial.builder()
    if not builder.supports_update_block_table:
        pytest.skip("builds every group's record anew")
    record = trial.build(builder)
    batch = trial.inputs.batch
    record.block_size, record.cache_dtype = 8, E4M3
    updated = builder.update_block_table(record, batch.block_table_tensor, batch.slot_mapping)
    assert (updated.block_size, updated.cache_dtype) == (
        trial.spec.block_size,
        trial.cache().dtype,
    )


@pytest.mark.parametrize("phase", ["forward", "build"])
def test_debugging_finds_a_slot_mapping_that_is_too_short(
    triple: Triple, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    trial = triple.trial()
    batch = trial.inputs.batch
    if phase == "build":
        with pytest.raises(ValueError, match="slot_mapping must have length"):
            trial.build(trial.builder(), batch.replace(slot_mapping=batch.slot_mapping[:2]))
        return
    trial.write()
    record = trial.build(trial.builder())
    parts = [record, getattr(record, "decode", None), getattr(record, "prefill", None)]
    for part in parts:
        if hasattr(part, "slot_mapping"):
            part.slot_mapping = batch.slot_mapping[:0]
    with pytest.raises(ValueError, match=r"slot_mapping must have a slot for each .*got 0"):
        attend(trial, trial.cache(), record)


# -- A launch that is made again.


@on_cpu_tensors
def test_a_step_of_another_block_size_does_not_slip_through_a_repeated_forward() -> None:
    triple = DENSE["TRITON_ATTN"]
    trial = triple.trial()
    trial.write()
    given = forward_of(trial)
    for _ in range(3):
        trial.impl.forward(**given)
    again = trial.build(trial.builder())
    trial.impl.forward(**given | {"attn_metadata": again})
    again.block_size = 32
    with pytest.raises(ValueError, match="kv_cache must have blocks of 32"):
        trial.impl.forward(**given | {"attn_metadata": again})


# -- The indexer.


def indexer_step() -> tuple[SparseIndexer, IndexInputs]:
    config = EngineConfig(
        max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64, index_topk=8
    )
    spec = IndexerSpec(index_head_dim=32)
    builder = IndexerMetadataBuilder(spec, ["layer.0"], config, CPU)
    table = torch.arange(4, dtype=torch.int32)[None]
    batch = CommonAttentionMetadata.from_lengths([2], [70], table, 64)
    given = IndexInputs(
        query=torch.zeros(2, 4, 32, dtype=torch.float16),
        key=torch.zeros(2, 32, dtype=torch.float16),
        weights=torch.zeros(2, 4),
        kv_cache=spec.layout().allocate(4),
        metadata=builder.build(0, batch),
    )
    return SparseIndexer(torch.zeros(64, 8, dtype=torch.int32)), given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache": torch.zeros(4, 32, 36, dtype=torch.uint8)},
            "kv_cache must have blocks of 64",
        ),
        ({"kv_cache": torch.zeros(4, 64, 36, dtype=torch.int8)}, "kv_cache must hold torch.uint8"),
        ({"query": torch.zeros(1, 4, 32).half()}, "query must have a row for each of the step's 2"),
        ({"key": torch.zeros(1, 32).half()}, "key must have a row for each of the step's 2"),
        ({"weights": torch.zeros(1, 4)}, "weights must have a row for each of the step's 2"),
    ],
)
def test_an_indexer_refuses_what_does_not_fit_its_step(
    changes: dict[str, Any], message: str
) -> None:
    indexer, given = indexer_step()
    indexer.forward(given)
    with pytest.raises(ValueError, match=message):
        indexer.forward(replace(given, **changes))


def test_an_indexer_refuses_a_batch_of_another_block_size_and_a_negative_prefix() -> None:
    config = EngineConfig(
        max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64, index_topk=8
    )
    builder = IndexerMetadataBuilder(IndexerSpec(), ["layer.0"], config, CPU)
    table = torch.arange(8, dtype=torch.int32)[None]
    batch = CommonAttentionMetadata.from_lengths([2], [70], table, 32)
    with pytest.raises(ValueError, match=r"block_size of the batch must be .* 64, got 32"):
        builder.build(0, batch)
    with pytest.raises(ValueError, match="common_prefix_len must not be negative, got -64"):
        builder.build(-64, batch.replace(block_size=None))
