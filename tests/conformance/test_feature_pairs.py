"""Features of a layer, two and three at a time: what selection accepts is made, runs and is right.

An *atom* is one thing that a layer asks beyond the plainest layer. Every pair of a backend's atoms
that selection accepts is in some layer whose forward the oracle judges. Every accepted triple is in
some layer that is made for each kind of device. Refused pairs are listed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch

from attn.backends.base import AttentionBackend
from attn.backends.mixed import mix
from attn.backends.torch_ref import TorchRefBackend
from attn.backends.triton_attn import TritonAttentionBackend
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BatchSpec, Heads
from attn.testing.cases import Case, Feature, LatentCase, is_interpreted
from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from attn.testing.trial import CaseResult
from builders.splitkv.stripe import Stripe
from specs.attention import AttentionSelectorConfig, AttentionType
from specs.devices import KNOWN_DEVICES, Device, DeviceKind
from specs.dtypes import CacheDType, DType
from specs.engine import Kernels, ParallelConfig
from specs.layouts import KVPacking
from tests.conformance.ranks import Asks, check_ranks
from tests.emulators import (
    flashinfer_emulator,
    flashinfer_mla_emulator,
    trtllm_emulator,
    trtllm_mla_emulator,
)

CPU = torch.device("cpu")
MIXED = mix("REF_TRITON", TorchRefBackend, TritonAttentionBackend)
NAMES = [*(row.name for row in AttentionBackendEnum), "REF_TRITON"]
RUNS = [
    ("TORCH_REF", "cpu"),
    ("TORCH_REF_MLA", "cpu"),
    ("TORCH_REF_SPARSE_MLA", "cpu"),
    ("TRITON_ATTN", "h200"),
    ("TRITON_MLA", "h200"),
    ("SPARSE_MLA", "h200"),
    ("REF_TRITON", "h200"),
    ("FLASHINFER", "h200"),
    ("FLASHINFER_MLA", "h200"),
    ("TRTLLM_MHA", "h200"),
    ("TRTLLM_MHA", "b200"),
    ("TRTLLM_MLA", "b200"),
]
"""The backends that run here: over Triton's interpreter, or over emulated functions of
FlashInfer."""


# -- Atoms.


@dataclass(frozen=True, eq=False)
class Atom:
    """One thing that a layer asks; atoms of one ``factor`` exclude each other."""

    factor: str
    name: str
    request: dict[str, Any] = field(default_factory=dict)
    """Fields of the selector's request that the atom sets."""
    feature: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.name


Layer = frozenset[Atom]

MASKS = (
    Atom("sinks", "sinks", {"has_sink": True}, {"sinks": True}),
    Atom("window", "window", {"has_sliding_window": True}, {"sliding_window": 11}),
    Atom("chunks", "chunks", {"use_chunked_local": True}, {"attention_chunk_size": 20}),
    Atom("soft_cap", "soft_cap", {"use_logits_soft_cap": True}, {"logits_soft_cap": 8.0}),
    Atom("alibi", "alibi", {"use_alibi": True}, {"alibi": True}),
    Atom(
        "alibi",
        "alibi_sqrt",
        {"use_alibi": True, "use_alibi_sqrt": True},
        {"alibi": True, "use_alibi_sqrt": True},
    ),
    Atom("ranges", "ranges", {"use_mm_prefix": True}, {"mm_prefix": True}),
    Atom("rswa", "rswa", {"use_rswa": True}, {"rswa_window": 7}, {}, {"rswa_window": 7}),
    Atom("causal", "non_causal", {"use_non_causal": True}, {"causal": False}),
)
SETTINGS = (
    Atom("invariant", "invariant", {"use_batch_invariant": True}, config={"batch_invariant": True}),
    Atom(
        "trims",
        "trims",
        {"use_adaptive_verification": True},
        config={"exact_host_lengths": False},
    ),
    Atom(
        "dcp",
        "dcp",
        {"use_dcp": True},
        config={"parallel": ParallelConfig(decode_context_parallel_size=2)},
    ),
)
PER_HEAD = Atom(
    "per_head", "per_head", {"use_per_head_quant_scales": True}, case={"per_head_scales": True}
)
ROLES = tuple(
    Atom("role", kind.value, {"attn_type": kind}, {"attn_type": kind})
    for kind in AttentionType
    if kind is not AttentionType.DECODER
)


def cache_atoms(backend: type[AttentionBackend]) -> Iterator[Atom]:
    for one in backend.capabilities.kv_cache_dtypes:
        if one is not CacheDType.AUTO:
            yield Atom("cache", one.value, {"kv_cache_dtype": one}, case={"cache_dtype": one})


def dtype_atoms(backend: type[AttentionBackend]) -> Iterator[Atom]:
    for one in backend.capabilities.dtypes:
        if one is not plain_dtype(backend):
            yield Atom("dtype", one.value, {"dtype": one}, case={"dtype": one})


def head_atoms(backend: type[AttentionBackend]) -> Iterator[Atom]:
    """Atoms of head sizes: another size, an odd size if one exists, and values of another size."""
    size = plain_heads(backend).head_size
    sizes = (33, 40, 48, 128)
    for other in [one for one in sizes if one in backend.capabilities.head_sizes][:2]:
        heads = Heads(4, 2, other)
        yield Atom("heads", f"size{other}", {"head_size": other}, case={"heads": heads})
    wide = Heads(4, 2, size, size + 8)
    yield Atom("heads", "values", {"head_size_v": size + 8}, case={"heads": wide})


ROW_SIZES = ((64, 32), (128, 32), (33, 7), (40, 32), (256, 64), (512, 64))


def row_atoms(backend: type[AttentionBackend]) -> Iterator[Atom]:
    for rank, rope in ROW_SIZES:
        sizes = {"rank": rank, "rope_size": rope}
        if rank + rope in backend.capabilities.head_sizes and sizes != plain_row(backend):
            yield Atom("heads", f"row{rank}+{rope}", {"head_size": rank + rope}, case=sizes)


def plain_dtype(backend: type[AttentionBackend]) -> DType:
    dtypes = backend.capabilities.dtypes
    return DType.FLOAT32 if DType.FLOAT32 in dtypes else dtypes[-1]


def plain_heads(backend: type[AttentionBackend]) -> Heads:
    return Heads(4, 2, 64 if "flashinfer" in needed(backend) else 32)


def plain_row(backend: type[AttentionBackend]) -> dict[str, int]:
    """The sizes of the narrowest row that every cache can store; wide rows take the interpreter
    long.
    """
    caches = backend.capabilities.kv_cache_dtypes
    wanted = ROW_SIZES[1:] if CacheDType.FP8_DS_MLA in caches else ROW_SIZES
    rows = [row for row in wanted if sum(row) in backend.capabilities.head_sizes]
    # FlashInfer's kernels read e4m3 rows of one width only.
    rank, rope = rows[-1] if "flashinfer" in needed(backend) else rows[0]
    return {"rank": rank, "rope_size": rope}


def needed(backend: type[AttentionBackend]) -> tuple[str, ...]:
    name = backend.get_name()
    return AttentionBackendEnum[name].row.requires if name in AttentionBackendEnum else ()


@cache
def atoms_of(backend: type[AttentionBackend]) -> tuple[Atom, ...]:
    if backend is MIXED:
        # A MIXED backend's types and sizes are those of its members.
        return (*MASKS, *SETTINGS, *ROLES)
    own = [*MASKS, *SETTINGS, *ROLES, *cache_atoms(backend), *dtype_atoms(backend)]
    if not backend.is_mla():
        return (*own, PER_HEAD, *head_atoms(backend))
    return (*own, *row_atoms(backend))


def request_of(backend: type[AttentionBackend], layer: Iterable[Atom]) -> AttentionSelectorConfig:
    """The selector's request of a layer."""
    is_mla, row = backend.is_mla(), plain_row(backend) if backend.is_mla() else {}
    values: dict[str, Any] = {
        "head_size": sum(row.values()) if is_mla else plain_heads(backend).head_size,
        "dtype": plain_dtype(backend),
        "use_mla": is_mla,
        "use_sparse": backend.is_sparse(),
    }
    for atom in layer:
        values |= atom.request
    return AttentionSelectorConfig(**values)


def reasons(backend: type[AttentionBackend], device: Device, layer: Iterable[Atom]) -> list[str]:
    request = request_of(backend, layer)
    fields = {name: getattr(request, name) for name in type(request).model_fields}
    capability = device.compute_capability
    return backend.validate_configuration(**fields, device_capability=capability)


# -- Which layers.


Accepts = Callable[[Iterable[Atom]], bool]


def excludes(layer: Iterable[Atom]) -> bool:
    factors = [atom.factor for atom in layer]
    return len(set(factors)) < len(factors)


def combined(atoms: Iterable[Atom], count: int) -> Iterator[Layer]:
    """Combinations of so many atoms that do not exclude each other."""
    return (frozenset(some) for some in combinations(atoms, count) if not excludes(some))


def covering(atoms: Iterable[Atom], accepts: Accepts, strength: int) -> list[Layer]:
    """Accepted layers that together have every accepted combination of up to ``strength`` atoms."""
    dice, found = random.Random(strength), []
    served = [atom for atom in atoms if accepts([atom])]
    wanted = {
        some: None
        for count in range(strength, 0, -1)
        for some in combined(served, count)
        if accepts(some)
    }
    while wanted:
        layer = next(iter(wanted))
        for atom in dice.sample(served, len(served)):
            more = layer | {atom}
            if not excludes(more) and accepts(more):
                layer = more
        parts = (some for count in range(1, strength + 1) for some in combined(layer, count))
        for some in parts:
            wanted.pop(some, None)
        found.append(layer)
    return found


# -- Devices.

DEVICES = [
    KNOWN_DEVICES[name]
    for name in ("cpu", "a100", "l40s", "h200", "b200", "rtx-pro-6000", "mi300x")
]
"""One device of each kind."""


@contextmanager
def pretended(device: Device, *, gluon: bool) -> Iterator[None]:
    """Builders take the CPU for ``device``, and FlashInfer's functions are emulated."""
    known = {
        "device_facts": lambda _: device.facts,
        "runs_gluon": lambda _: gluon,
        "capability_of": lambda _: device.compute_capability,
    }
    with ExitStack() as stack:
        stack.enter_context(flashinfer_emulator.emulated())
        stack.enter_context(flashinfer_mla_emulator.emulated())
        stack.enter_context(trtllm_emulator.emulated(device, trtllm_emulator.NEW))
        stack.enter_context(trtllm_mla_emulator.emulated(device=device))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module in [one for name, one in sys.modules.items() if name.startswith("builders.")]:
            for name, stands_in in known.items():
                if device.kind is not DeviceKind.CPU and hasattr(module, name):
                    patch.setattr(module, name, stands_in)
        yield


def backend_of(name: str) -> type[AttentionBackend]:
    if name == MIXED.get_name():
        return MIXED
    member = AttentionBackendEnum[name]
    if member.missing():
        pytest.skip(f"{name} needs {', '.join(member.missing())}")
    return member.get_class()


def serves(backend: type[AttentionBackend], device: Device) -> bool:
    """Whether the device serves the backend's plainest layer."""
    return backend.supports_device(device) and not reasons(backend, device, ())


def runs_here(backend: type[AttentionBackend], atom: Atom) -> bool:
    """Whether the layer runs here: the interpreter multiplies no bf16, and takes long for wide
    rows.
    """
    if backend is MIXED or not is_interpreted(backend):
        return True
    return atom.request.get("dtype") is not DType.BFLOAT16 and atom.case.get("rank", 0) <= 128


# -- Layers at work.

ONE = BatchSpec("one", (1,), (1,))
STEPS = {
    # Host and device may disagree about which of the first two requests has which tokens.
    AttentionType.DECODER: BatchSpec(
        "pairs", (1, 3, 1, 20), (47, 36, 5, 29), num_speculative_tokens=3
    ),
    AttentionType.ENCODER: BatchSpec("pairs_encoder", (25, 1), (25, 1)),
    AttentionType.ENCODER_ONLY: BatchSpec("pairs_encoder", (25, 1), (25, 1)),
    AttentionType.ENCODER_DECODER: BatchSpec("pairs_cross", (1, 3, 20), (12, 5, 20), (33, 0, 36)),
}
DECODES = BatchSpec("pairs_decode", (1, 3, 1), (47, 36, 5), num_speculative_tokens=3)
LATENT = BatchSpec("pairs_latent", (1, 3, 9), (47, 36, 20), num_speculative_tokens=3)


def merged(layer: Layer, what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for atom in layer:
        found |= getattr(atom, what)
    return found


def dense_case(backend: type[AttentionBackend], layer: Layer, batch: BatchSpec | None) -> Case:
    asked, axes = merged(layer, "feature"), merged(layer, "case")
    if {"sliding_window", "attention_chunk_size"} <= set(asked):
        # A layer has both a window and a chunk where one is a spelling of the other.
        chunk = asked.pop("attention_chunk_size")
        asked |= {"sliding_window": chunk, "chunk_lookback": 0, "window_is_chunk": True}
    feature = Feature("+".join(sorted(atom.name for atom in layer)), **asked)
    axes = {"dtype": plain_dtype(backend), "heads": plain_heads(backend), **axes}
    if axes["heads"].head_size_v is not None:
        axes["packing"] = KVPacking.PACKED
    block = backend.get_preferred_block_size(16)
    return Case(feature, batch or STEPS[feature.attn_type], block_size=block, **axes)


def latent_case(backend: type[AttentionBackend], layer: Layer, batch: BatchSpec) -> LatentCase:
    asked = {"num_heads": 2, "dtype": plain_dtype(backend), **plain_row(backend)}
    return LatentCase(
        batch,
        block_size=backend.get_preferred_block_size(16),
        lists="holes" if backend.is_sparse() else None,
        **{**asked, **merged(layer, "feature"), **merged(layer, "case")},
    )


def trial_of(
    backend: type[AttentionBackend], layer: Layer, batch: BatchSpec | None
) -> DenseTrial | LatentTrial:
    trial: DenseTrial | LatentTrial
    if backend.is_mla():
        # FlashInfer's latent backends prefill with TRITON_MLA, which the interpreter runs slowly at
        # their widths.
        step = DECODES if "flashinfer" in needed(backend) else LATENT
        trial = LatentTrial(backend, latent_case(backend, layer, batch or step), CPU)
    else:
        trial = DenseTrial(backend, dense_case(backend, layer, batch), CPU)
    kernels = Kernels.own(rows=trial.mla_kernel)
    trial.config = trial.config.replace(kernels=kernels, **merged(layer, "config"))
    return trial


def step_of(trial: DenseTrial | LatentTrial) -> Any:
    """The record of the trial's step; its lengths on the host are wrong where they may be."""
    batch, config = trial.inputs.batch, trial.config
    if not config.exact_host_lengths and trial.has_cache:
        starts = batch.query_start_loc_cpu.clone()
        starts[1] += 1
        batch = batch.replace(query_start_loc_cpu=starts)
    return trial.build(trial.builder(config), batch)


def findings(backend: type[AttentionBackend], layer: Layer) -> dict[str, list[str]]:
    """The errors of one forward."""
    trial = trial_of(backend, layer, None)
    trial.write()
    record, kept = step_of(trial), trial.buffer.clone()
    results = trial.attend(record, trial.inputs, trial.cache())
    if backend.capabilities.clears_tails:
        trial.restore_tails(kept)
    result = CaseResult()
    trial.check_cache(result)
    trial.judge(results, record, result)
    return result.findings


def check_shared(layer: Layer) -> None:
    """Check a decoder whose keys are on two ranks."""
    feature, axes = merged(layer, "feature"), merged(layer, "case")
    heads = axes.get("heads", Heads(4, 2, 32))
    asks = Asks(
        causal=feature.get("causal", True),
        sinks=(0.5, -2.0, 3.0, 1.0) if feature.get("sinks") else None,
        logits_soft_cap=feature.get("logits_soft_cap"),
        head_size=heads.head_size,
        head_size_v=heads.head_size_v,
        k_scale=(0.037,),
    )
    config = {name: value for name, value in merged(layer, "config").items() if name != "parallel"}
    check_ranks(
        [Stripe(2, rank, 4) for rank in range(2)],
        ((1, 20), (36, 25)),
        axes.get("dtype", DType.FLOAT32),
        axes.get("cache_dtype", CacheDType.AUTO),
        asks,
        **config,
    )


# -- The tests.


@pytest.mark.parametrize(("name", "device"), RUNS)
def test_accepted_pairs_run_and_are_right(name: str, device: str) -> None:
    backend, on = backend_of(name), KNOWN_DEVICES[device]
    atoms = [atom for atom in atoms_of(backend) if runs_here(backend, atom)]
    with pretended(on, gluon=False):
        layers = covering(atoms, lambda layer: not reasons(backend, on, layer), 2)
        assert layers
        for layer in layers:
            asked = {atom.factor for atom in layer}
            if "dcp" in asked and "role" not in asked:
                if not backend.is_mla():
                    check_shared(layer)
                    continue
                # Several ranks of latent layers have tests of their own, test_latent_ranks and
                # test_sparse_ranks; here the other features of the layer run on one rank.
                layer = type(layer)(atom for atom in layer if atom.factor != "dcp")
            assert findings(backend, layer) == {}, layer


@pytest.mark.parametrize("name", NAMES)
def test_accepted_triples_are_made_for_every_kind_of_device(name: str) -> None:
    """The impl is made, and the builder of its group; on Hopper the Gluon kernels are planned too.

    What needs no package is made for one device: it is the same for all.
    """
    backend = backend_of(name)
    made = 0
    for device in DEVICES:
        with pretended(device, gluon=device.kind is DeviceKind.SM90):
            if not serves(backend, device) or (made and not needed(backend)):
                continue
            for layer in covering(
                atoms_of(backend), lambda some, on=device: not reasons(backend, on, some), 3
            ):
                trial = trial_of(backend, layer, ONE)
                assert trial.builder(trial.config).kv_cache_spec == trial.spec
                made += 1
    assert made


def pairs_of(first: str, *seconds: str) -> set[frozenset[str]]:
    return {frozenset((first, second)) for second in seconds}


ENCODERS = ("encoder", "encoder_only")
QUANTIZED = [one.value for one in CacheDType if one.is_quantized]
REFUSED = {
    *pairs_of("dcp", "window", "chunks", "alibi", "alibi_sqrt", "ranges", "rswa"),
    *pairs_of("dcp", "encoder_decoder"),
    *(pair for kind in ENCODERS for pair in pairs_of(kind, *QUANTIZED)),
    *pairs_of("chunks", "non_causal", *ENCODERS, "rswa"),
    *pairs_of("rswa", "non_causal", *ENCODERS),
    *pairs_of("encoder_decoder", "window", "chunks", "alibi", "alibi_sqrt", "ranges", "rswa"),
}
"""Refused pairs by name, for backends that have both features alone."""
OF_TYPES = ("cache", "dtype", "heads")
"""Factors whose pairs depend on the backend's own types."""


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_refused_for_reasons_that_hold_everywhere_or_are_of_types(name: str) -> None:
    backend = backend_of(name)
    for device in DEVICES:
        with pretended(device, gluon=False):
            if not serves(backend, device):
                continue
            atoms = [atom for atom in atoms_of(backend) if not reasons(backend, device, [atom])]
            for one, other in map(tuple, combined(atoms, 2)):
                found = reasons(backend, device, (one, other))
                names = frozenset((one.name, other.name))
                if one.factor not in OF_TYPES or other.factor not in OF_TYPES:
                    assert bool(found) == (names in REFUSED), (device.name, names, found)


def said(**asked: Any) -> list[str]:
    """Reasons that TRITON_ATTN gives on an H200."""
    request = AttentionSelectorConfig(**{"head_size": 64, "dtype": DType.BFLOAT16, **asked})
    fields = {name: getattr(request, name) for name in type(request).model_fields}
    return TritonAttentionBackend.validate_configuration(**fields, device_capability="9.0")


def test_a_refused_pair_is_named_with_the_reason() -> None:
    whole = "a rank keeps a part of the keys, and knows no other's positions"
    assert said(use_dcp=True, has_sink=True) == []
    assert said(use_dcp=True, has_sliding_window=True, use_alibi=True) == [
        f"DCP with sliding window not supported: {whole}",
        f"DCP with ALiBi not supported: {whole}",
    ]
    assert said(attn_type="encoder", kv_cache_dtype="fp8_e5m2") == [
        "a quantised KV cache with attention type encoder not supported: encoders cache nothing"
    ]
    assert said(use_rswa=True, use_non_causal=True) == [
        "R-SWA with non-causal attention not supported: it is defined for causal attention"
    ]
    assert said(head_size_v=64) == said(head_size_v=96) == []
    assert said(head_size_v=20) == ["head_size_v not supported"]


def test_what_a_backend_lacks_is_not_refused_once_more_beside_another_feature() -> None:
    fields = {"dtype": DType.BFLOAT16, "kv_cache_dtype": "fp8", "block_size": None}
    flags = ("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales")
    found = AttentionBackendEnum.TORCH_REF.get_class().validate_configuration(
        *(64, *fields.values(), *(False for _ in flags), None, "decoder"),
        use_dcp=True,
        has_sliding_window=True,
    )
    assert found == ["DCP not supported"]


@pytest.mark.parametrize("name", ["FLASHINFER", "TRTLLM_MHA"])
def test_values_of_another_size_are_refused_where_kernels_have_none(name: str) -> None:
    backend, h200 = backend_of(name), KNOWN_DEVICES["h200"]
    values = next(atom for atom in atoms_of(backend) if atom.name == "values")
    with pretended(h200, gluon=False):
        found = reasons(backend, h200, [values])
    assert found == ["head_size_v other than head_size not supported"]


# -- What depends on a layer's own arguments, or on a batch.

BOTH = pytest.mark.parametrize("backend", [TorchRefBackend, TritonAttentionBackend])


@BOTH
def test_a_window_beside_chunks_of_another_size_is_refused(backend: Any) -> None:
    make = backend.get_impl_cls()
    with pytest.raises(ValueError, match=r"attention_chunk_size \(20\) .* sliding_window.* got 11"):
        make(4, 32, 1.0, sliding_window=11, attention_chunk_size=20)
    for spelled in ({"attention_chunk_size": 20}, {"chunk_lookback": 0}):
        assert make(4, 32, 1.0, sliding_window=20, **spelled).rules.attention_chunk_size == 20


@BOTH
@pytest.mark.parametrize("kind", [one for one in AttentionType if one != "decoder"])
def test_chunks_are_of_decoders(backend: Any, kind: AttentionType) -> None:
    with pytest.raises(ValueError, match=r"attention_chunk_size \(20\) is defined for causal"):
        backend.get_impl_cls()(4, 32, 1.0, attn_type=kind, attention_chunk_size=20)


def step_with(backend: type[AttentionBackend], *names: str, **fields: Any) -> None:
    """Build and run a step of a layer with the named atoms."""
    layer = frozenset(atom for atom in atoms_of(backend) if atom.name in names)
    trial = trial_of(backend, layer, BatchSpec("two", (1, 1), (30, 47)))
    batch = trial.inputs.batch.replace(**fields)
    trial.attend(trial.build(trial.builder(trial.config), batch), trial.inputs, trial.cache())


@BOTH
def test_chunks_of_a_batch_that_is_not_causal_are_refused(backend: Any) -> None:
    wanted = r"attention_chunk_size \(20\) is defined for causal"
    for causal in (False, torch.tensor([True, False])):
        with pytest.raises(ValueError, match=wanted):
            step_with(backend, "chunks", causal=causal)


@BOTH
def test_prefixes_of_a_batch_that_is_not_causal_are_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match=r"rswa_window \(7\) is defined for causal"):
        step_with(backend, "rswa", causal=False)


@BOTH
def test_prefixes_without_a_window_are_refused(backend: Any) -> None:
    prefixes = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rswa_prefix_lens needs .*rswa_window, got None"):
        step_with(backend, rswa_prefix_lens=prefixes)


@BOTH
def test_a_group_of_chunks_has_no_prefixes(backend: Any) -> None:
    trial = trial_of(backend, frozenset(a for a in MASKS if a.name == "chunks"), ONE)
    wanted = r"rswa_window \(7\) does not go together with attention_chunk_size \(20\)"
    with pytest.raises(ValueError, match=wanted):
        trial.builder(trial.config.replace(rswa_window=7))


def test_ranges_stay_with_their_requests_in_a_mix() -> None:
    """Requests after the decodes are counted from 0 in their part of the batch."""
    ranges = next(atom for atom in MASKS if atom.name == "ranges")
    assert findings(MIXED, frozenset([ranges])) == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_refused_only_for_what_two_of_its_features_are(name: str) -> None:
    backend = backend_of(name)
    for device in DEVICES:
        with pretended(device, gluon=False):
            if not serves(backend, device):
                continue
            atoms = [atom for atom in atoms_of(backend) if not reasons(backend, device, [atom])]
            pairs = {some: reasons(backend, device, some) for some in combined(atoms, 2)}
            for some in combined(atoms, 3):
                parts = [pairs[frozenset(pair)] for pair in combinations(some, 2)]
                assert bool(reasons(backend, device, some)) == any(parts), (device.name, some)
