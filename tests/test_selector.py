"""Selection: every reason, every limit, explicit and automatic choice, third-party backends."""

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn.backends.base import AttentionBackend
from attn.backends.torch_ref import TorchRefBackend
from attn.device import detect_device
from attn.errors import MissingDependencyError, UnsupportedError
from attn.registry import (
    ROWS,
    AttentionBackendEnum,
    BackendRegistry,
    BackendRow,
    RegisteredBackend,
    register_backend,
)
from attn.selector import (
    PRIORITIES,
    SelectionReport,
    Verdict,
    explain,
    get_attn_backend,
    refusals,
    select,
)
from specs.attention import (
    AttentionSelectorConfig,
    AttentionType,
    BackendCapabilities,
    ComputeCapabilityRange,
    HeadSizes,
    MultipleOf,
)
from specs.base import SpecError
from specs.devices import KNOWN_DEVICES, ComputeCapability, Device, DeviceKind, kind_of
from specs.dtypes import CacheDType, DType
from specs.engine import MlaKernel
from specs.kv_cache import FullAttentionSpec, MLAAttentionSpec
from specs.layouts import KVPacking

# -- vLLM's two versions, field by field: (name, default). The first four fields have no default.

REQUIRED = object()
VLLM_026_CONFIG = [
    ("head_size", REQUIRED),
    ("dtype", REQUIRED),
    ("kv_cache_dtype", REQUIRED),
    ("block_size", REQUIRED),
    ("use_mla", False),
    ("has_sink", False),
    ("use_sparse", False),
    ("use_mm_prefix", False),
    ("use_per_head_quant_scales", False),
    ("attn_type", "decoder"),
    ("has_sliding_window", False),
    ("use_non_causal", False),
    ("use_batch_invariant", False),
    ("use_kv_connector", False),
    ("use_pcp", False),
]
VLLM_033_CONFIG = [
    ("head_size", REQUIRED),
    ("dtype", REQUIRED),
    ("kv_cache_dtype", REQUIRED),
    ("block_size", REQUIRED),
    ("use_mla", False),
    ("has_sink", False),
    ("use_sparse", False),
    ("use_mm_prefix", False),
    ("use_per_head_quant_scales", False),
    ("attn_type", "decoder"),
    ("has_sliding_window", False),
    ("use_non_causal", False),
    ("use_batch_invariant", False),
    ("use_kv_connector", False),
    ("use_pcp", False),
    ("use_adaptive_verification", False),
    ("use_dcp", False),
    ("use_rswa", False),
]
# Fields that vLLM's selection does not see.
OUR_CONFIG = [
    ("use_logits_soft_cap", False),
    ("use_alibi", False),
    ("use_alibi_sqrt", False),
    ("use_alibi_symmetric", False),
    ("use_chunked_local", False),
    ("mla_kernel", MlaKernel.AUTO),
    ("head_size_v", None),
]
# Our function fills in fields that vLLM's callers must give.
OUR_DEFAULTS = {"kv_cache_dtype": "auto", "block_size": None}

VLLM_026_REASONS = [
    "head_size not supported",
    "dtype not supported",
    "kv_cache_dtype not supported",
    "block_size not supported",
    "partial multimodal token full attention not supported",
    "MLA not supported",
    "non-MLA not supported",
    "attention sinks not supported",
    "sparse not supported",
    "non-sparse not supported",
    "per-head quant scales not supported",
    "compute capability not supported",
    "attention type encoder_only not supported",
    "sliding window not supported",
    "non-causal attention not supported",
    "batch invariance not supported",
    "KV connector not supported",
    "PCP not supported",
    "a reason of supports_combination",
]
VLLM_033_REASONS = [
    "head_size not supported",
    "dtype not supported",
    "kv_cache_dtype not supported",
    "block_size not supported",
    "partial multimodal token full attention not supported",
    "MLA not supported",
    "non-MLA not supported",
    "attention sinks not supported",
    "sparse not supported",
    "non-sparse not supported",
    "per-head quant scales not supported",
    "compute capability not supported",
    "attention type encoder_only not supported",
    "sliding window not supported",
    "R-SWA not supported",
    "non-causal attention not supported",
    "non-causal MLA attention with DCP not supported",
    "batch invariance not supported",
    "KV connector not supported",
    "PCP not supported",
    "DCP not supported",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification",
    "a reason of supports_combination",
]
# A value outside a limit is named with what the backend serves, in place of vLLM's words.
LIMITS = {
    "head_size not supported": "head_size 65: 64, 128",
    "dtype not supported": "dtype float16: bfloat16",
    "kv_cache_dtype not supported": "kv_cache_dtype fp8: auto",
    "block_size not supported": "block_size 32: 64, any multiple of 48",
    "compute capability not supported": "compute capability 8.9: sm90",
    "attention type encoder_only not supported": "attention type encoder_only: decoder",
}
OUR_REASONS = [
    "logits soft cap not supported",
    "ALiBi not supported",
    "ALiBi-sqrt not supported",
    "symmetric ALiBi (of encoders) not supported",
    "chunked local attention not supported",
]


class VllmConfig026(NamedTuple):
    """Stands in for vLLM 0.26's selector config."""

    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None
    block_size: int | None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    attn_type: str = "decoder"
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False


class VllmAttentionType(str, Enum):  # noqa: UP042 (as vLLM declares it)
    """Stands in for vLLM's enum."""

    ENCODER_DECODER = "encoder_decoder"


# -- Backends that exist only here.


class _Fake(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "FAKE"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> Any:
        raise NotImplementedError


class Stingy(_Fake):
    """A backend that serves one of each kind of thing, and no feature."""

    capabilities = BackendCapabilities(
        dtypes=(DType.BFLOAT16,),
        kv_cache_dtypes=(CacheDType.AUTO,),
        block_sizes=(64, MultipleOf(base=48)),
        head_sizes=HeadSizes(values=(64, 128)),
        device_kinds=(DeviceKind.SM90,),
        kv_connector=False,
    )

    @classmethod
    def combination_reason(
        cls, config: AttentionSelectorConfig, device_capability: Any
    ) -> str | None:
        return "a reason of supports_combination" if config.head_size == 128 else None


class StingyMLA(_Fake):
    """A latent backend that can do non-causal attention and DCP, each alone."""

    capabilities = Stingy.capabilities.replace(is_mla=True, non_causal=True, dcp=True)


class StingySparse(_Fake):
    """A sparse latent backend."""

    capabilities = Stingy.capabilities.replace(is_mla=True, is_sparse=True)


class Generous(_Fake):
    """A backend that serves every feature, on every device."""

    capabilities = BackendCapabilities.model_validate(
        {
            "dtypes": tuple(DType),
            "kv_cache_dtypes": tuple(CacheDType),
            "block_sizes": (MultipleOf(base=1),),
            "device_kinds": tuple(DeviceKind),
            "attn_types": tuple(AttentionType),
            **{
                name: True
                for name, field in BackendCapabilities.model_fields.items()
                if field.annotation is bool and name not in ("is_mla", "is_sparse")
            },
        }
    )


class Ranged(_Fake):
    """A backend for CUDA alone, in two ranges of capabilities; its head sizes are a range."""

    capabilities = Generous.capabilities.replace(
        device_kinds=(DeviceKind.SM80, DeviceKind.SM90, DeviceKind.SM100),
        head_sizes=HeadSizes(multiple_of=8, minimum=16, maximum=256),
        compute_capabilities=(
            ComputeCapabilityRange(
                minimum=ComputeCapability(major=8, minor=6),
                maximum=ComputeCapability(major=9, minor=0),
            ),
            ComputeCapabilityRange(minimum=ComputeCapability(major=10, minor=3)),
        ),
    )


class NoBackend:
    """A class that is no backend."""


@cache
def named(cls: type[_Fake], name: str) -> type[_Fake]:
    """The backend under a name of its own, found by that name in this module."""
    fields = {"get_name": staticmethod(lambda: name), "__module__": __name__}
    globals()[name] = made = type(name, (cls,), fields)
    return made


def path_of(cls: type) -> str:
    """Registry path of a class of this module."""
    return f"{__name__}:{cls.__name__}"


@contextmanager
def registry_restored() -> Iterator[None]:
    """Put every name, alias and override back."""
    registry = AttentionBackendEnum
    members, aliases = dict(registry._members), dict(registry._aliases)
    overrides = {member: member._override for member in registry}
    try:
        yield
    finally:
        for target, saved in ((registry._members, members), (registry._aliases, aliases)):
            target.clear()
            target.update(saved)
        for member, path in overrides.items():
            member._override = path


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    with registry_restored():
        yield


H100 = KNOWN_DEVICES["h100"]
CPU = KNOWN_DEVICES["cpu"]
SM90 = SimpleNamespace(major=9, minor=0)
DENSE = AttentionSelectorConfig(head_size=64, dtype=DType.BFLOAT16)
LATENT = AttentionSelectorConfig(head_size=576, dtype=DType.BFLOAT16, use_mla=True)
SPARSE = LATENT.replace(use_sparse=True)
IMPOSSIBLE = DENSE.replace(dtype=DType.INT8)
REQUESTS = {"dense": DENSE, "latent": LATENT, "sparse": SPARSE, "impossible": IMPOSSIBLE}


def reasons_of(backend: type[AttentionBackend], **changes: Any) -> list[str]:
    """Reasons of a backend that serves the request unless ``changes`` spoil it."""
    fields: dict[str, Any] = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": backend.is_mla(),
        "has_sink": False,
        "use_sparse": backend.is_sparse(),
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        "device_capability": SM90,
    }
    return backend.validate_configuration(**{**fields, **changes})


# -- The request.


@pytest.mark.parametrize(("name", "default"), VLLM_026_CONFIG)
def test_requests_have_every_field_of_vllm_026_with_its_default(name: str, default: object) -> None:
    field = AttentionSelectorConfig.model_fields[name]
    if default is not REQUIRED:
        assert field.default == default
    elif name in OUR_DEFAULTS:
        assert field.default == OUR_DEFAULTS[name]
    else:
        assert field.is_required()


@pytest.mark.parametrize(("name", "default"), VLLM_033_CONFIG)
def test_requests_have_every_field_of_vllm_033_with_its_default(name: str, default: object) -> None:
    test_requests_have_every_field_of_vllm_026_with_its_default(name, default)


def test_fields_of_requests_are_in_vllms_order_and_ours_come_after() -> None:
    names = list(AttentionSelectorConfig.model_fields)
    assert names == [name for name, _ in VLLM_033_CONFIG + OUR_CONFIG]
    assert VLLM_033_CONFIG[: len(VLLM_026_CONFIG)] == VLLM_026_CONFIG
    defaults = {name: AttentionSelectorConfig.model_fields[name].default for name, _ in OUR_CONFIG}
    assert defaults == dict(OUR_CONFIG)


def test_validate_configuration_takes_vllms_arguments_in_vllms_order() -> None:
    parameters = inspect.signature(AttentionBackend.validate_configuration).parameters
    # vLLM puts the capability before the layer's role.
    expected = [name for name, _ in VLLM_033_CONFIG + OUR_CONFIG]
    expected.insert(expected.index("attn_type"), "device_capability")
    assert list(parameters) == expected
    optional = [name for name in parameters if parameters[name].default is False]
    assert optional == expected[expected.index("has_sliding_window") : -2]
    assert [parameters[name].default for name in expected[-2:]] == [MlaKernel.AUTO, None]


# -- Reasons.

# Reason -> the backend that gives it and the request that draws it.
CASES: dict[str, tuple[type[AttentionBackend], dict[str, Any]]] = {
    "head_size not supported": (Stingy, {"head_size": 65}),
    "dtype not supported": (Stingy, {"dtype": torch.float16}),
    "kv_cache_dtype not supported": (Stingy, {"kv_cache_dtype": "fp8"}),
    "block_size not supported": (Stingy, {"block_size": 32}),
    "partial multimodal token full attention not supported": (Stingy, {"use_mm_prefix": True}),
    "MLA not supported": (Stingy, {"use_mla": True}),
    "non-MLA not supported": (StingyMLA, {"use_mla": False}),
    "attention sinks not supported": (Stingy, {"has_sink": True}),
    "sparse not supported": (StingyMLA, {"use_sparse": True}),
    "non-sparse not supported": (StingySparse, {"use_sparse": False}),
    "per-head quant scales not supported": (Stingy, {"use_per_head_quant_scales": True}),
    "compute capability not supported": (
        Stingy,
        {"device_capability": SimpleNamespace(major=8, minor=9)},
    ),
    "attention type encoder_only not supported": (Stingy, {"attn_type": "encoder_only"}),
    "sliding window not supported": (Stingy, {"has_sliding_window": True}),
    "R-SWA not supported": (Stingy, {"use_rswa": True}),
    "non-causal attention not supported": (Stingy, {"use_non_causal": True}),
    "non-causal MLA attention with DCP not supported": (
        StingyMLA,
        {"use_non_causal": True, "use_dcp": True},
    ),
    "batch invariance not supported": (Stingy, {"use_batch_invariant": True}),
    "KV connector not supported": (Stingy, {"use_kv_connector": True}),
    "PCP not supported": (Stingy, {"use_pcp": True}),
    "DCP not supported": (Stingy, {"use_dcp": True}),
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": (
        Stingy,
        {"use_adaptive_verification": True},
    ),
    "a reason of supports_combination": (Stingy, {"head_size": 128}),
    "logits soft cap not supported": (Stingy, {"use_logits_soft_cap": True}),
    "ALiBi not supported": (Stingy, {"use_alibi": True}),
    "ALiBi-sqrt not supported": (Stingy, {"use_alibi_sqrt": True}),
    "symmetric ALiBi (of encoders) not supported": (Stingy, {"use_alibi_symmetric": True}),
    "chunked local attention not supported": (Stingy, {"use_chunked_local": True}),
}


@pytest.mark.parametrize("backend", [Stingy, StingyMLA, StingySparse, Generous])
def test_the_request_that_the_cases_spoil_is_served(backend: type[AttentionBackend]) -> None:
    assert reasons_of(backend) == []


@pytest.mark.parametrize("reason", VLLM_026_REASONS)
def test_every_reason_of_vllm_026_is_given(reason: str) -> None:
    backend, changes = CASES[reason]
    assert reasons_of(backend, **changes) == [LIMITS.get(reason, reason)]


@pytest.mark.parametrize("reason", VLLM_033_REASONS)
def test_every_reason_of_vllm_033_is_given(reason: str) -> None:
    backend, changes = CASES[reason]
    assert reasons_of(backend, **changes) == [LIMITS.get(reason, reason)]


@pytest.mark.parametrize("reason", OUR_REASONS)
def test_every_reason_of_ours_is_given(reason: str) -> None:
    backend, changes = CASES[reason]
    assert reasons_of(backend, **changes) == [reason]


@pytest.mark.parametrize("reason", CASES)
def test_a_backend_with_every_feature_gives_no_reason(reason: str) -> None:
    _, changes = CASES[reason]
    structural = {"use_mla", "use_sparse"} & set(changes)
    assert reasons_of(Generous, **{k: v for k, v in changes.items() if k not in structural}) == []


@pytest.mark.parametrize("backend", [Stingy, Generous])
def test_a_kernel_by_name_is_refused_where_there_is_no_choice(
    backend: type[AttentionBackend],
) -> None:
    assert reasons_of(backend, mla_kernel=MlaKernel.TRITON) == ["kernel triton not supported"]
    assert reasons_of(backend, mla_kernel="auto") == []


def test_all_reasons_are_given_at_once_in_vllms_order() -> None:
    everything: dict[str, Any] = {}
    exclusive = ("non-MLA not supported", "non-sparse not supported", "head_size not supported")
    for reason, (_, changes) in CASES.items():
        if reason not in exclusive:
            everything |= changes
    given_reasons = reasons_of(Stingy, **{**everything, "use_mla": True, "use_sparse": True})
    ours = [reason for reason in given_reasons if reason in OUR_REASONS]
    vllms = [reason for reason in given_reasons if reason not in OUR_REASONS]
    expected = [reason for reason in VLLM_033_REASONS if reason not in exclusive]
    assert vllms == [LIMITS.get(reason, reason) for reason in expected]
    assert ours == OUR_REASONS


@pytest.mark.parametrize("capability", [SM90, ComputeCapability(major=9), "9.0", (9, 0), None])
def test_vllm_calls_with_the_fields_of_its_config_and_a_capability(capability: object) -> None:
    config = VllmConfig026(64, torch.bfloat16, None, None)
    assert [*config._asdict()] == [name for name, _ in VLLM_026_CONFIG]
    assert Stingy.validate_configuration(**config._asdict(), device_capability=capability) == []
    refused = config._replace(dtype=torch.float16, attn_type=VllmAttentionType.ENCODER_DECODER)
    reasons = Stingy.validate_configuration(**refused._asdict(), device_capability=capability)
    assert reasons == ["dtype float16: bfloat16", "attention type encoder_decoder: decoder"]
    newer = {**config._asdict(), "use_rswa": True, "use_dcp": True}
    assert Stingy.validate_configuration(**newer, device_capability=capability) == [
        "R-SWA not supported",
        "DCP not supported",
    ]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_door_and_the_record_give_the_same_reasons(data: st.DataObject) -> None:
    request, capability = data.draw(requests), data.draw(st.sampled_from([None, "9.0", "10.0"]))
    fields = {name: getattr(request, name) for name in type(request).model_fields}
    for member in AttentionBackendEnum:
        if member.missing():
            continue
        backend = member.get_class()
        found = backend.validate(request, capability)
        assert backend.validate_configuration(**fields, device_capability=capability) == found
        names = [*fields][: [*fields].index("use_mm_prefix") + 1]
        given_fields = {name: fields[name] for name in names}
        combination = backend.combination_reason(request, capability)
        told = backend.supports_combination(**given_fields, device_capability=capability)
        assert told == combination


# -- Every limit of every registered backend: one step outside, exactly that reason.

REGISTERED = [row.name for row in ROWS]
FAKES = {
    name: named(cls, name)
    for name, cls in (
        ("STINGY", Stingy),
        ("STINGY_MLA", StingyMLA),
        ("STINGY_SPARSE", StingySparse),
        ("RANGED", Ranged),
    )
}
every_backend = pytest.mark.parametrize("name", [*REGISTERED, *FAKES])

# Capability -> what a layer asks for, and the reason where it is not declared.
FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "sink": ({"has_sink": True}, "attention sinks not supported"),
    "sliding_window": ({"has_sliding_window": True}, "sliding window not supported"),
    "chunked_local": ({"use_chunked_local": True}, "chunked local attention not supported"),
    "logits_soft_cap": ({"use_logits_soft_cap": True}, "logits soft cap not supported"),
    "alibi": ({"use_alibi": True}, "ALiBi not supported"),
    "alibi_sqrt": ({"use_alibi_sqrt": True}, "ALiBi-sqrt not supported"),
    "alibi_symmetric": (
        {"use_alibi_symmetric": True},
        "symmetric ALiBi (of encoders) not supported",
    ),
    "mm_prefix": (
        {"use_mm_prefix": True},
        "partial multimodal token full attention not supported",
    ),
    "rswa": ({"use_rswa": True}, "R-SWA not supported"),
    "non_causal": ({"use_non_causal": True}, "non-causal attention not supported"),
    "per_head_quant_scales": (
        {"use_per_head_quant_scales": True},
        "per-head quant scales not supported",
    ),
    "batch_invariance": ({"use_batch_invariant": True}, "batch invariance not supported"),
    "kv_connector": ({"use_kv_connector": True}, "KV connector not supported"),
    "pcp": ({"use_pcp": True}, "PCP not supported"),
    "dcp": ({"use_dcp": True}, "DCP not supported"),
    "device_cpu_query_lens_mismatch": (
        {"use_adaptive_verification": True},
        "device-cpu query lens mismatch not supported, this is needed for adaptive verification",
    ),
}
# Structure, a pair of features, and what an impl offers without being asked at selection.
NO_FEATURES = {
    *("is_mla", "is_sparse", "non_causal_dcp", "lse", "output_quant"),
    *("head_size_v", "needs_host_lengths", "row_bits", "clears_tails"),
}


def backend_of(name: str) -> type[AttentionBackend]:
    """A registered or fake backend; skips where packages are missing."""
    if name in FAKES:
        return FAKES[name]
    member = AttentionBackendEnum[name]
    if member.missing():
        pytest.skip(f"{name} needs {', '.join(member.missing())}")
    return member.get_class()


def devices_of(backend: type[AttentionBackend]) -> list[Device]:
    """Known devices that the backend declares."""
    return [
        device
        for device in KNOWN_DEVICES.values()
        if backend.supports_device(device)
        and backend.supports_compute_capability(device.compute_capability)
    ]


def served(backend: type[AttentionBackend]) -> dict[str, Any]:
    """Arguments of a layer well inside a backend's limits, without any feature."""
    declared = backend.capabilities
    return {
        "head_size": next(size for size in (64, 128, 256, 576) if size in declared.head_sizes),
        "dtype": declared.dtypes[0],
        "kv_cache_dtype": declared.kv_cache_dtypes[0],
        "block_size": None,
        "use_mla": declared.is_mla,
        "has_sink": False,
        "use_sparse": declared.is_sparse,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": devices_of(backend)[0].compute_capability,
        "attn_type": declared.attn_types[0],
    }


def check(backend: type[AttentionBackend], **changes: Any) -> list[str]:
    """Reasons against a served layer with some arguments changed."""
    return backend.validate_configuration(**{**served(backend), **changes})


def listed(values: Any) -> str:
    """Served values as a reason lists them."""
    return ", ".join(str(value) for value in values)


def outside(backend: type[AttentionBackend], capability: object) -> str:
    """The reason against a compute capability."""
    declared = backend.capabilities
    ranges = declared.compute_capabilities or declared.device_kinds
    return f"compute capability {capability}: {listed(ranges)}"


@every_backend
def test_a_layer_inside_all_limits_is_served_on_every_declared_device(name: str) -> None:
    backend = backend_of(name)
    for device in devices_of(backend):
        assert check(backend, device_capability=device.compute_capability) == []


@every_backend
@pytest.mark.parametrize("dtype", DType)
def test_one_step_outside_the_dtypes(name: str, dtype: DType) -> None:
    backend = backend_of(name)
    if dtype not in backend.capabilities.dtypes:
        expected = [f"dtype {dtype.value}: {listed(backend.capabilities.dtypes)}"]
        assert check(backend, dtype=dtype) == expected
        assert check(backend, dtype=dtype.torch) == expected
    else:
        assert check(backend, dtype=dtype.torch) == []
        assert dtype.torch in backend.supported_dtypes


@every_backend
@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_one_step_outside_the_cache_dtypes(name: str, cache_dtype: CacheDType) -> None:
    backend = backend_of(name)
    if cache_dtype not in backend.capabilities.kv_cache_dtypes:
        served_here = listed(backend.capabilities.kv_cache_dtypes)
        expected = [f"kv_cache_dtype {cache_dtype.value}: {served_here}"]
        assert check(backend, kv_cache_dtype=cache_dtype.value) == expected
        assert cache_dtype.value not in backend.supported_kv_cache_dtypes
    else:
        found = check(backend, kv_cache_dtype=cache_dtype)
        assert not any(reason.startswith(f"kv_cache_dtype {cache_dtype}: ") for reason in found)
        assert cache_dtype.value in backend.supported_kv_cache_dtypes


@every_backend
def test_one_step_outside_the_block_sizes(name: str) -> None:
    backend = backend_of(name)
    bases = [
        size if isinstance(size, int) else size.base for size in backend.capabilities.block_sizes
    ]
    # 0 is outside even where every positive size is inside.
    outside = [0] + [
        size
        for base in bases
        for size in (base - 1, base + 1, 2 * base - 1)
        if size and all(size % other for other in bases)
    ]
    for size in outside:
        expected = f"block_size {size}: {listed(backend.capabilities.block_sizes)}"
        assert check(backend, block_size=size) == [expected]
    for base in bases:
        assert check(backend, block_size=base) == []
        assert check(backend, block_size=6 * base) == []
    assert backend.get_preferred_block_size(bases[0]) == bases[0]
    assert backend.get_preferred_block_size(0) == min(bases)


@every_backend
def test_one_step_outside_the_head_sizes(name: str) -> None:
    backend = backend_of(name)
    sizes = backend.capabilities.head_sizes
    if sizes.values:
        inside = list(sizes.values)
        outside = [size + step for size in inside for step in (-1, 1) if size + step not in inside]
        assert backend.get_supported_head_sizes() == inside
    else:
        first = -(-sizes.minimum // sizes.multiple_of) * sizes.multiple_of
        inside = [first]
        outside = [sizes.minimum - 1] + [first + 1] * (sizes.multiple_of > 1)
        if sizes.maximum is not None:
            inside.append(sizes.maximum // sizes.multiple_of * sizes.multiple_of)
            outside += [sizes.maximum + 1, sizes.maximum + sizes.multiple_of]
        assert backend.get_supported_head_sizes() == []
    for size in outside:
        assert check(backend, head_size=size) == [f"head_size {size}: {sizes}"]
    for size in inside:
        found = check(backend, head_size=size)
        assert not any(reason.startswith(f"head_size {size}: ") for reason in found)


@every_backend
@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=list(KNOWN_DEVICES))
def test_one_step_outside_the_devices(name: str, device: Device) -> None:
    backend = backend_of(name)
    if name in FAKES:
        register_backend(name, path_of(backend))
    fields = {k: v for k, v in served(backend).items() if k != "device_capability"}
    found = refusals(AttentionBackendEnum[name], AttentionSelectorConfig(**fields), device)
    if device.kind not in backend.capabilities.device_kinds:
        kinds = listed(backend.capabilities.device_kinds)
        is_cuda = device.compute_capability is not None
        of_kind = f"device {device.kind.value}: {kinds}"
        assert found == [outside(backend, device.compute_capability) if is_cuda else of_kind]
    elif device.compute_capability is None:
        assert found == []
    else:
        ranges = backend.capabilities.compute_capabilities
        inside = not ranges or any(device.compute_capability in allowed for allowed in ranges)
        assert found == ([] if inside else [outside(backend, device.compute_capability)])


@every_backend
def test_one_step_outside_the_compute_capabilities(name: str) -> None:
    backend = backend_of(name)
    assert check(backend, device_capability="7.5") == [outside(backend, "7.5")]
    ranges = backend.capabilities.compute_capabilities

    def step(capability: ComputeCapability, minor: int) -> ComputeCapability | None:
        number = capability.to_int() + minor
        moved = ComputeCapability(major=number // 10, minor=number % 10)
        return None if any(moved in allowed for allowed in ranges) else moved

    for allowed in ranges:
        edges = [(allowed.minimum, -1)]
        if allowed.maximum is not None:
            edges.append((allowed.maximum, 1))
        for edge, minor in edges:
            if kind_of(edge) in backend.capabilities.device_kinds:
                assert check(backend, device_capability=edge) == []
            moved = step(edge, minor)
            if moved is not None:
                assert check(backend, device_capability=moved) == [outside(backend, moved)]


@every_backend
@pytest.mark.parametrize("attn_type", AttentionType)
def test_one_step_outside_the_attention_types(name: str, attn_type: AttentionType) -> None:
    backend = backend_of(name)
    declared = attn_type in backend.capabilities.attn_types
    served_here = listed(backend.capabilities.attn_types)
    expected = [] if declared else [f"attention type {attn_type.value}: {served_here}"]
    assert check(backend, attn_type=attn_type.value) == expected


@every_backend
@pytest.mark.parametrize("feature", FEATURES)
def test_one_step_outside_every_feature(name: str, feature: str) -> None:
    backend = backend_of(name)
    changes, reason = FEATURES[feature]
    if getattr(backend.capabilities, feature):
        assert reason not in check(backend, **changes)
    else:
        assert check(backend, **changes) == [reason]


@every_backend
def test_one_step_outside_latent_or_dense_and_sparse_or_not(name: str) -> None:
    backend = backend_of(name)
    is_mla, is_sparse = backend.is_mla(), backend.is_sparse()
    assert check(backend, use_mla=not is_mla) == [
        "non-MLA not supported" if is_mla else "MLA not supported"
    ]
    assert check(backend, use_sparse=not is_sparse) == [
        "non-sparse not supported" if is_sparse else "sparse not supported"
    ]
    assert not backend.is_ssm()


@every_backend
def test_one_step_outside_non_causal_under_dcp(name: str) -> None:
    backend = backend_of(name)
    reason = "non-causal MLA attention with DCP not supported"
    found = check(backend, use_non_causal=True, use_dcp=True)
    refused = backend.is_mla() and not backend.supports_non_causal_dcp()
    assert (reason in found) == refused


def test_every_boolean_of_the_capabilities_is_stepped_over() -> None:
    fields = BackendCapabilities.model_fields.items()
    booleans = {name for name, field in fields if field.annotation is bool}
    assert booleans == set(FEATURES) | NO_FEATURES


def test_every_boolean_of_a_request_can_be_refused() -> None:
    fields = AttentionSelectorConfig.model_fields.items()
    booleans = {name for name, field in fields if field.annotation is bool}
    asked = {name for changes, _ in FEATURES.values() for name in changes}
    assert booleans == asked | {"use_mla", "use_sparse"}


@pytest.mark.parametrize(
    ("cache_dtype", "step"), [("int8_per_token_head", 4), ("int4_per_token_head", 8)]
)
def test_the_reference_refuses_head_sizes_that_inline_scales_cannot_follow(
    cache_dtype: str, step: int
) -> None:
    size = 64 + step // 2
    reason = f"{cache_dtype} needs a head_size that is a multiple of {step}, got {size}"
    assert check(TorchRefBackend, kv_cache_dtype=cache_dtype, head_size=size) == [reason]
    assert check(TorchRefBackend, kv_cache_dtype=cache_dtype, head_size=64 + step) == []


# -- Shapes that a backend declares.


@pytest.mark.parametrize("name", REGISTERED)
def test_the_declared_cache_shape_is_the_layouts(name: str) -> None:
    backend = backend_of(name)
    for cache_dtype in backend.capabilities.kv_cache_dtypes:
        if backend.is_mla():
            spec: Any = MLAAttentionSpec(block_size=64, cache_dtype=cache_dtype)
            heads, head_size = 1, 576
        else:
            heads, head_size = 2, 128
            spec = FullAttentionSpec(
                block_size=64, num_kv_heads=heads, head_size=head_size, cache_dtype=cache_dtype
            )
        layout = backend.kv_cache_layout(spec)
        shape = backend.get_kv_cache_shape(5, 64, heads, head_size, cache_dtype.value)
        assert shape == layout.logical_shape(5)
        assert backend.get_kv_cache_stride_order() == layout.stride_order()
        layered = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        assert layered == layout.stride_order(include_num_layers_dimension=True)


def test_a_layer_whose_values_are_narrower_gets_the_packed_layout() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=128, head_size_v=64)
    layout = TorchRefBackend.kv_cache_layout(spec)
    assert layout == spec.layout(KVPacking.PACKED)


@every_backend
def test_backends_name_themselves_and_where_they_are(name: str) -> None:
    backend = backend_of(name)
    assert backend.full_cls_name() == (backend.__module__, backend.__qualname__)
    assert backend.get_name() == name
    assert backend.get_supported_kernel_block_sizes() == [*backend.capabilities.block_sizes]
    assert backend.cudagraph_support() is backend.capabilities.cudagraph_support
    assert backend.supports_block_size(None)
    assert backend.forward_includes_kv_cache_update is False


# -- The choice.

requests = st.builds(
    lambda fields, flags: AttentionSelectorConfig(**fields, **dict.fromkeys(flags, True)),
    st.fixed_dictionaries(
        {
            "head_size": st.sampled_from([1, 64, 66, 128, 256, 576]),
            "dtype": st.sampled_from(DType),
            "kv_cache_dtype": st.sampled_from(CacheDType),
            "block_size": st.sampled_from([None, 1, 16, 48, 64]),
            "attn_type": st.sampled_from(AttentionType),
        }
    ),
    st.sets(
        st.sampled_from(
            [name for name, default in VLLM_033_CONFIG + OUR_CONFIG if default is False]
        ),
        max_size=3,
    ),
)
# Requests that something serves come up often only when little is asked.
likely = st.builds(
    lambda base, dtype, flags: base.replace(dtype=dtype, **dict.fromkeys(flags, True)),
    st.sampled_from([DENSE, LATENT, SPARSE]),
    st.sampled_from([DType.BFLOAT16, DType.FLOAT32]),
    st.sets(st.sampled_from(["has_sink", "use_dcp", "use_rswa", "use_kv_connector"]), max_size=2),
)
devices = st.sampled_from(list(KNOWN_DEVICES.values()))


@settings(deadline=None, max_examples=80)
@given(request=st.one_of(requests, likely), device=devices)
def test_an_explicit_choice_is_used_iff_it_has_no_reason_and_never_falls_back(
    request: AttentionSelectorConfig, device: Device
) -> None:
    with registry_restored():
        for name, backend in FAKES.items():
            register_backend(name, path_of(backend))
        for member in AttentionBackendEnum:
            reasons = refusals(member, request, device)
            if not reasons:
                assert select(request, device, member.name) is member.get_class()
            elif not member.missing():
                with pytest.raises(UnsupportedError) as caught:
                    select(request, device, member.name)
                assert caught.value.reasons == reasons
                report = explain(request, device, member.name)
                assert report.chosen is None


@settings(deadline=None, max_examples=80)
@given(request=st.one_of(requests, likely), device=devices, allowed=st.booleans())
def test_the_automatic_choice_is_the_first_in_rank_without_a_reason(
    request: AttentionSelectorConfig, device: Device, allowed: bool
) -> None:
    report = explain(request, device, allow_reference=allowed)
    ranked = [
        AttentionBackendEnum[name]
        for name in PRIORITIES[device.kind]
        if allowed or device.kind is DeviceKind.CPU or not name.startswith("TORCH_REF")
    ]
    able = [member for member in ranked if not refusals(member, request, device)]
    if able:
        assert report.chosen == able[0].name
        chosen = select(request, device, allow_reference=allowed)
        assert chosen is able[0].get_class()
    else:
        assert report.chosen is None
        with pytest.raises(UnsupportedError, match=f"serves this layer on {device.name}") as caught:
            select(request, device, allow_reference=allowed)
        assert caught.value.reasons == report.reasons
        assert len(report.reasons) == len(AttentionBackendEnum)


@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=list(KNOWN_DEVICES))
@pytest.mark.parametrize("asked", [None, *REGISTERED])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_a_report_has_one_verdict_with_a_reason_for_every_registered_backend(
    device: Device, asked: str | None, request_name: str
) -> None:
    register_backend("STINGY", path_of(FAKES["STINGY"]))
    request = REQUESTS[request_name]
    report = explain(request, device, asked)
    names = [candidate.name for candidate in report.candidates]
    ranked = list(PRIORITIES[device.kind])
    assert names[: len(ranked)] == ranked
    assert sorted(names) == sorted(member.name for member in AttentionBackendEnum)
    assert all(candidate.reasons and all(candidate.reasons) for candidate in report.candidates)
    chosen = [item.name for item in report.candidates if item.verdict is Verdict.CHOSEN]
    assert chosen == ([] if report.chosen is None else [report.chosen])
    assert report.chosen in (None, asked) or asked is None
    assert len(report.reasons) == len(names) - len(chosen)
    refused = {item.name for item in report.candidates if item.verdict is Verdict.REFUSED}
    assert refused == {
        member.name for member in AttentionBackendEnum if refusals(member, request, device)
    }
    assert (report.request, report.device, report.asked_for) == (request, device, asked)
    assert SelectionReport.model_validate_json(report.model_dump_json()) == report


def test_verdicts_say_what_became_of_each_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend("GENEROUS", path_of(named(Generous, "GENEROUS")))
    register_backend("UNRANKED", path_of(named(Generous, "UNRANKED")))
    monkeypatch.setitem(PRIORITIES, DeviceKind.CPU, ("TORCH_REF_MLA", "TORCH_REF", "GENEROUS"))
    report = explain(DENSE, CPU)
    assert [(item.name, item.verdict.value, item.reasons) for item in report.candidates] == [
        ("TORCH_REF_MLA", "refused", ("non-MLA not supported",)),
        ("TORCH_REF", "chosen", ("best-ranked on cpu that serves it (rank 2)",)),
        ("GENEROUS", "ranked lower", ("TORCH_REF ranks higher",)),
        *(
            (item.name, item.verdict.value, item.reasons)
            for item in report.candidates
            if item.name not in ("TORCH_REF_MLA", "TORCH_REF", "GENEROUS", "UNRANKED")
        ),
        ("UNRANKED", "not asked for", ("chosen only by name",)),
    ]
    assert report.reasons[0] == "TORCH_REF_MLA: non-MLA not supported"
    asked = {item.name: item for item in explain(DENSE, CPU, "GENEROUS").candidates}
    assert asked["GENEROUS"].reasons == ("asked for by name",)
    assert asked["TORCH_REF"].verdict is Verdict.NOT_ASKED
    assert asked["TORCH_REF"].reasons == ("GENEROUS was asked for",)
    assert asked["UNRANKED"].reasons == ("GENEROUS was asked for",)
    assert asked["TORCH_REF_MLA"].verdict is Verdict.REFUSED


@pytest.mark.parametrize("kind", DeviceKind)
def test_every_kind_of_device_has_a_ranking_of_registered_names(kind: DeviceKind) -> None:
    ranked = PRIORITIES[kind]
    assert len(set(ranked)) == len(ranked)
    assert set(ranked) <= {member.name for member in AttentionBackendEnum}
    reference = ("TORCH_REF", "TORCH_REF_MLA", "TORCH_REF_SPARSE_MLA")
    assert ranked[-len(reference) :] == reference


def test_a_ranked_name_that_is_gone_is_passed_over() -> None:
    AttentionBackendEnum.remove("TORCH_REF")
    assert explain(DENSE, CPU).chosen is None
    assert explain(LATENT, CPU).chosen == "TORCH_REF_MLA"


def test_an_alias_asks_for_the_backend_behind_it() -> None:
    report = explain(SPARSE, CPU, "TORCH_REF_NSA")
    assert (report.asked_for, report.chosen) == ("TORCH_REF_SPARSE_MLA", "TORCH_REF_SPARSE_MLA")


@pytest.mark.parametrize("call", [explain, select])
def test_an_unknown_backend_is_refused_with_the_known_names(call: Any) -> None:
    with pytest.raises(ValueError, match="unknown attention backend") as caught:
        call(DENSE, CPU, "FLASH_ATTN_9")
    message = str(caught.value)
    assert "'FLASH_ATTN_9'" in message
    assert all(member.name in message for member in AttentionBackendEnum)


# -- vLLM's function.


def test_get_attn_backend_takes_vllms_arguments() -> None:
    found = get_attn_backend(128, torch.bfloat16, None, False, True, num_heads=32, device=CPU)
    assert found is TorchRefBackend
    assert get_attn_backend(576, "bf16", "fp8", use_mla=True, device=H100).get_name() in [
        member.name for member in AttentionBackendEnum
    ]
    expected = [
        "head_size",
        "dtype",
        "kv_cache_dtype",
        "use_mla",
        "has_sink",
        "use_sparse",
        "use_mm_prefix",
        "use_per_head_quant_scales",
        "attn_type",
        "num_heads",
        "has_sliding_window",
    ]
    assert list(inspect.signature(get_attn_backend).parameters)[: len(expected)] == expected


def test_get_attn_backend_passes_every_feature_on() -> None:
    register_backend("STINGY", path_of(FAKES["STINGY"]))
    features = [name for name, _ in VLLM_033_CONFIG + OUR_CONFIG if name.startswith(("use", "has"))]
    for name in features:
        with pytest.raises(UnsupportedError) as caught:
            get_attn_backend(
                64, torch.bfloat16, "auto", backend="STINGY", device=H100, **{name: True}
            )
        assert len(caught.value.reasons) == 1
    with pytest.raises(UnsupportedError) as caught:
        get_attn_backend(
            64, torch.bfloat16, "fp8", attn_type="encoder_only", backend="STINGY", device=H100
        )
    assert caught.value.reasons == [
        "kv_cache_dtype fp8: auto",
        "attention type encoder_only: decoder",
    ]


def test_the_error_of_an_explicit_choice_carries_its_reasons_and_no_fallback() -> None:
    with pytest.raises(UnsupportedError) as caught:
        get_attn_backend(
            128, torch.bfloat16, "auto", has_sink=True, backend="TORCH_REF_MLA", device=CPU
        )
    assert caught.value.reasons == ["non-MLA not supported", "attention sinks not supported"]
    lines = str(caught.value).splitlines()
    assert lines[0] == "attention backend TORCH_REF_MLA cannot serve this layer on cpu:"
    assert lines[1:] == ["  - non-MLA not supported", "  - attention sinks not supported"]
    assert isinstance(caught.value, ValueError)


def test_the_error_of_the_automatic_choice_carries_a_reason_per_candidate() -> None:
    with pytest.raises(UnsupportedError, match="no attention backend serves this layer") as caught:
        get_attn_backend(128, torch.int8, "auto", device=CPU)
    assert len(caught.value.reasons) == len(AttentionBackendEnum)
    assert all("dtype int8: " in reason for reason in caught.value.reasons)
    dtypes = "float16, bfloat16, float32, float64"
    assert f"TORCH_REF: dtype int8: {dtypes}" in caught.value.reasons


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"head_size": 0}, ["'head_size'", "greater than 0", "got 0"]),
        ({"kv_cache_dtype": "fp9"}, ["'kv_cache_dtype'", "fp8_e5m2", "'fp9'"]),
        ({"dtype": torch.complex64}, ["'dtype'", "bfloat16", "complex64"]),
        ({"attn_type": "other"}, ["'attn_type'", "'encoder'", "'other'"]),
        ({"use_magic": True}, ["'use_magic'", "not permitted"]),
    ],
)
def test_a_bad_argument_is_named_with_what_is_allowed(
    arguments: dict[str, Any], parts: list[str]
) -> None:
    good = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "device": CPU}
    with pytest.raises(SpecError, match="attention request: field ") as caught:
        get_attn_backend(**{**good, **arguments})
    assert all(part in str(caught.value) for part in parts)


# -- Third parties.


def test_a_new_name_is_used_when_asked_for_and_never_chosen_automatically() -> None:
    mine = named(Generous, "MINE")
    decorate = register_backend("MINE", path_of(mine))
    assert decorate(mine) is mine
    member = AttentionBackendEnum["MINE"]
    assert member is AttentionBackendEnum.MINE
    assert member.get_class() is mine
    assert not member.is_overridden()
    assert select(DENSE, CPU, "MINE") is mine
    assert select(DENSE, CPU) is not mine
    assert explain(IMPOSSIBLE, CPU).chosen is None


def test_the_decorator_registers_the_class_that_it_returns() -> None:
    cls = named(Generous, "DECORATED")
    decorated = register_backend("DECORATED")(cls)
    assert decorated is cls
    assert AttentionBackendEnum["DECORATED"].get_path() == path_of(cls)
    assert select(DENSE, CPU, "DECORATED") is cls


def test_nothing_is_registered_before_the_decorator_is_applied() -> None:
    register_backend("LATER")
    assert "LATER" not in AttentionBackendEnum


def test_a_decorated_class_of_a_new_name_that_calls_itself_otherwise_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r":Generous must be 'MINE', .* got 'FAKE'"):
        register_backend("MINE")(Generous)
    assert "MINE" not in AttentionBackendEnum
    with pytest.raises(TypeError, match="is no AttentionBackend"):
        register_backend("MINE")(NoBackend)  # type: ignore[type-var]
    assert "MINE" not in AttentionBackendEnum


def test_a_class_behind_a_path_of_a_new_name_that_calls_itself_otherwise_is_refused() -> None:
    register_backend("MINE", path_of(Generous))
    message = f"get_name() of {path_of(Generous)} must be 'MINE', the name it is registered under"
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionBackendEnum["MINE"].get_class()
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        select(DENSE, CPU, "MINE")
    # A class that replaces an existing backend may have any name.
    register_backend("MINE", path_of(Stingy))
    assert AttentionBackendEnum["MINE"].get_class() is Stingy


@pytest.mark.parametrize("decorator", [False, True])
def test_an_override_keeps_the_rank_and_can_be_cleared(decorator: bool) -> None:
    before = [item.name for item in explain(DENSE, CPU).candidates]
    shipped = AttentionBackendEnum["TORCH_REF"].get_path()
    if decorator:
        register_backend("TORCH_REF")(Generous)
    else:
        register_backend("TORCH_REF", path_of(Generous))
    member = AttentionBackendEnum["TORCH_REF"]
    assert member.is_overridden()
    assert member.get_path() == path_of(Generous)
    report = explain(DENSE, CPU)
    assert [item.name for item in report.candidates] == before
    assert report.chosen == "TORCH_REF"
    assert select(DENSE, CPU) is Generous
    member.clear_override()
    assert not member.is_overridden()
    assert member.get_path() == shipped
    assert select(DENSE, CPU) is TorchRefBackend


def test_an_alias_overrides_the_backend_behind_it() -> None:
    register_backend("TORCH_REF_DSA", path_of(Generous))
    assert AttentionBackendEnum["TORCH_REF_SPARSE_MLA"].get_class() is Generous
    assert len(AttentionBackendEnum) == len(ROWS)


@pytest.mark.parametrize(
    "row",
    [
        BackendRow("TORCH_REF", "a.b:C"),
        BackendRow("TORCH_REF_NSA", "a.b:C"),
        BackendRow("NEW", "a.b:C", aliases=("TORCH_REF",)),
        BackendRow("NEW", "a.b:C", aliases=("TORCH_REF_NSA",)),
        BackendRow("NEW", "a.b:C", aliases=("NEW",)),
        BackendRow("NEW", "a.b:C", aliases=("OTHER", "OTHER")),
    ],
)
def test_a_name_or_alias_that_is_taken_is_refused(row: BackendRow) -> None:
    names = list(AttentionBackendEnum._members)
    with pytest.raises(ValueError, match=r"backend name '\w+' is registered already"):
        AttentionBackendEnum.add(row)
    assert list(AttentionBackendEnum._members) == names
    assert "OTHER" not in AttentionBackendEnum


@pytest.mark.parametrize("name", ["", "my backend", "9LIVES", "_hidden", "A-B"])
def test_a_name_that_is_no_identifier_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"must be an identifier, got {name!r}"):
        register_backend(name, path_of(Generous))


@pytest.mark.parametrize("path", ["", "Backend", "package.module:", ":Backend", "package."])
@pytest.mark.parametrize("name", ["NEW", "TORCH_REF"])
def test_a_path_without_module_or_class_is_refused(name: str, path: str) -> None:
    if not path:
        with pytest.raises(ValueError, match=r"'package\.module:Class', got ''"):
            AttentionBackendEnum.add(BackendRow("NEW", path))
        return
    with pytest.raises(ValueError, match=f"must be 'package.module:Class', got {path!r}"):
        register_backend(name, path)
    assert "NEW" not in AttentionBackendEnum
    assert not AttentionBackendEnum["TORCH_REF"].is_overridden()


def test_a_path_may_have_a_dot_before_the_class_as_vllm_writes_it() -> None:
    cls = named(Generous, "DOTTED")
    register_backend("DOTTED", f"{__name__}.DOTTED")
    assert AttentionBackendEnum["DOTTED"].get_class() is cls
    assert AttentionBackendEnum["DOTTED"].get_path(include_classname=False) == __name__


def test_a_missing_package_is_a_reason_and_an_error_when_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, needed = path_of(named(Generous, "NEEDY")), ("no_such_package_1", "torch")
    register_backend("NEEDY", path, requires=needed)
    member = AttentionBackendEnum["NEEDY"]
    assert member.missing() == ["no_such_package_1"]
    reason = "no_such_package_1 is not installed: pip install no_such_package_1"
    assert refusals(member, DENSE, CPU) == [reason]
    with pytest.raises(MissingDependencyError, match="backend NEEDY needs no_such_package_1") as e:
        select(DENSE, CPU, "NEEDY")
    assert e.value.package == "no_such_package_1"
    with pytest.raises(MissingDependencyError):
        member.get_class()
    monkeypatch.setitem(PRIORITIES, DeviceKind.CPU, ("NEEDY", *PRIORITIES[DeviceKind.CPU]))
    assert select(DENSE, CPU) is TorchRefBackend
    assert f"NEEDY: {reason}" in explain(DENSE, CPU).reasons
    # An override brings what it needs itself.
    register_backend("NEEDY", path_of(Generous))
    assert member.missing() == []
    assert select(DENSE, CPU) is Generous


def test_a_missing_dependency_names_the_extra_that_installs_it() -> None:
    plain = MissingDependencyError("triton", "backend X")
    assert str(plain) == "backend X needs triton, which is not installed: pip install triton"
    vendor = MissingDependencyError("flashinfer", "backend X")
    assert str(vendor) == (
        "backend X needs flashinfer, which is not installed: pip install flashinfer-python"
    )
    assert (vendor.module, vendor.package) == ("flashinfer", "flashinfer-python")
    extra = MissingDependencyError("rich", "the report", extra="cli")
    assert str(extra).endswith("pip install 'attn-backends[cli]'")
    assert (extra.package, extra.extra, plain.extra) == ("rich", "cli", None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('libfoo.so.1 is too old')", "libfoo.so.1 is too old"),
        ("raise OSError('cannot open libfoo.so')", "cannot open libfoo.so"),
        ("import no_such_module_2", "No module named 'no_such_module_2'"),
        ("Other = 1", "cannot import name 'Backend' from 'broken_plugin'"),
        (None, "No module named 'broken_plugin'"),
    ],
)
def test_a_broken_import_is_a_reason_and_does_not_stop_the_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str | None, message: str
) -> None:
    if source is not None:
        (tmp_path / "broken_plugin.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    # Modules that the import leaves behind are removed again.
    monkeypatch.setitem(sys.modules, "broken_plugin", None)
    del sys.modules["broken_plugin"]
    register_backend("BROKEN", "broken_plugin:Backend")
    found = refusals(AttentionBackendEnum["BROKEN"], DENSE, CPU)
    assert found == [f"cannot be imported: {message}"]
    with pytest.raises(UnsupportedError, match=message):
        select(DENSE, CPU, "BROKEN")
    assert select(DENSE, CPU) is TorchRefBackend


def test_a_path_to_something_else_is_an_error() -> None:
    register_backend("ODD", path_of(NoBackend))
    with pytest.raises(TypeError, match="is no AttentionBackend"):
        AttentionBackendEnum["ODD"].get_class()


# -- The registry.


def test_the_registry_is_read_like_vllms_enum() -> None:
    registry = AttentionBackendEnum
    assert [member.name for member in registry][: len(ROWS)] == [row.name for row in ROWS]
    assert len(registry) == len(list(registry)) == len(ROWS)
    assert registry.TORCH_REF is registry["TORCH_REF"]
    assert registry.TORCH_REF_NSA is registry["TORCH_REF_SPARSE_MLA"]
    assert "TORCH_REF" in registry
    assert "TORCH_REF_NSA" in registry
    assert "NOTHING" not in registry
    assert repr(registry.TORCH_REF) == (
        "<AttentionBackendEnum.TORCH_REF: 'attn.backends.torch_ref:TorchRefBackend'>"
    )
    assert registry.TORCH_REF.get_path(include_classname=False) == "attn.backends.torch_ref"


def test_an_unknown_attribute_of_the_registry_lists_the_names() -> None:
    with pytest.raises(AttributeError, match="unknown attention backend 'NOTHING'; registered: "):
        _ = AttentionBackendEnum.NOTHING
    with pytest.raises(AttributeError, match="_private"):
        _ = AttentionBackendEnum._private


def test_a_removed_name_takes_its_aliases_along_and_can_be_added_again() -> None:
    registry = BackendRegistry()
    row = BackendRow("ONE", "a.b:C", aliases=("UNO", "EINS"))
    member = registry.add(row)
    assert isinstance(member, RegisteredBackend)
    registry.remove("UNO")
    assert len(registry) == 0
    assert "EINS" not in registry
    assert registry.add(row).name == "ONE"


def test_a_registry_can_be_copied() -> None:
    copied = copy.copy(AttentionBackendEnum)
    assert copied["TORCH_REF"] is AttentionBackendEnum["TORCH_REF"]


# -- This machine.


def pretend_gpu(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, hip: str | None = None
) -> None:
    """Make torch report one GPU."""
    properties = SimpleNamespace(
        name="A GPU", major=major, minor=minor, multi_processor_count=132, total_memory=80 << 30
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)


def test_without_a_gpu_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_device() == CPU
    assert explain(DENSE).device == CPU


@pytest.mark.parametrize(
    ("major", "minor", "kind"), [(8, 0, "sm80"), (9, 0, "sm90"), (10, 3, "sm100"), (12, 1, "sm120")]
)
def test_a_cuda_gpu_is_known_by_its_capability(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, kind: str
) -> None:
    pretend_gpu(monkeypatch, major, minor)
    for device in (detect_device(), detect_device(0)):
        assert device.kind == kind
        assert device.compute_capability == ComputeCapability(major=major, minor=minor)
        assert (device.name, device.num_multiprocessors, device.memory_bytes) == (
            "A GPU",
            132,
            80 << 30,
        )


def test_a_rocm_gpu_has_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 9, 4, hip="6.4")
    device = detect_device()
    assert (device.kind, device.compute_capability) == (DeviceKind.ROCM, None)


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 7, 5)
    with pytest.raises(UnsupportedError, match="A GPU cannot be used") as caught:
        detect_device()
    assert caught.value.reasons == ["compute capability 7.5 is below 8.0"]
