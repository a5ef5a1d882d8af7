"""The requests of layers and the declarations of backends, as data."""

import pytest

from specs.attention import (
    AttentionCGSupport,
    AttentionSelectorConfig,
    AttentionType,
    BackendCapabilities,
    ComputeCapabilityRange,
    HeadSizes,
    MultipleOf,
)
from specs.base import SpecError, parse_spec
from specs.devices import ComputeCapability, DeviceKind
from specs.dtypes import CacheDType, DType

LEAST = {
    "dtypes": ("bfloat16",),
    "kv_cache_dtypes": ("auto",),
    "block_sizes": (16,),
    "device_kinds": ("sm90",),
}


def test_attention_types_have_vllms_values_and_decoders_alone_use_the_cache() -> None:
    assert {kind.name: (kind.value, kind.is_cached) for kind in AttentionType} == {
        "DECODER": ("decoder", True),
        "ENCODER": ("encoder", False),
        "ENCODER_ONLY": ("encoder_only", False),
        "ENCODER_DECODER": ("encoder_decoder", True),
    }


def test_graph_support_has_vllms_numbers_so_that_levels_compare() -> None:
    assert {level.name: level.value for level in AttentionCGSupport} == {
        "NEVER": 0,
        "UNIFORM_SINGLE_TOKEN_DECODE": 1,
        "UNIFORM_BATCH": 2,
        "ALWAYS": 3,
    }
    assert min(AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH).name == "UNIFORM_BATCH"


def test_multiples_are_values_with_a_readable_name() -> None:
    assert MultipleOf(base=16) == MultipleOf(base=16)
    assert len({MultipleOf(base=16), MultipleOf(base=16), MultipleOf(base=8)}) == 2
    assert str(MultipleOf(base=16)) == "any multiple of 16"
    with pytest.raises(SpecError):
        MultipleOf(base=0)


@pytest.mark.parametrize(
    ("sizes", "inside", "outside", "text"),
    [
        (HeadSizes(), [1, 7, 4096], [0, -1], "multiples of 1 from 1"),
        (HeadSizes(values=(64, 128)), [64, 128], [63, 96, 256], "64, 128"),
        (
            HeadSizes(multiple_of=8, minimum=16, maximum=256),
            [16, 24, 256],
            [8, 15, 17, 257, 264],
            "multiples of 8 from 16 to 256",
        ),
        (HeadSizes(multiple_of=32, minimum=32), [32, 1 << 20], [31, 33], "multiples of 32 from 32"),
    ],
)
def test_head_sizes_are_a_list_or_a_range_with_a_step(
    sizes: HeadSizes, inside: list[int], outside: list[int], text: str
) -> None:
    assert [size for size in inside + outside if size in sizes] == inside
    assert str(sizes) == text


def test_an_empty_range_of_head_sizes_is_refused() -> None:
    with pytest.raises(SpecError, match=r"minimum \(64\) exceeds maximum \(32\)"):
        HeadSizes(minimum=64, maximum=32)
    assert 64 in HeadSizes(minimum=64, maximum=64)


@pytest.mark.parametrize(
    ("maximum", "inside", "outside"),
    [
        (None, ["9.0", "9.1", "12.0"], ["8.9", "8.0"]),
        ("9.0", ["9.0"], ["8.9", "9.1", "10.0"]),
        ("10.3", ["9.0", "10.0", "10.3"], ["8.9", "10.4", "11.0"]),
    ],
)
def test_capability_ranges_include_both_ends(
    maximum: str | None, inside: list[str], outside: list[str]
) -> None:
    allowed = ComputeCapabilityRange.model_validate({"minimum": "9.0", "maximum": maximum})
    numbers = [ComputeCapability.model_validate(text) for text in inside + outside]
    assert [str(number) for number in numbers if number in allowed] == inside


def test_a_backend_declares_little_by_default() -> None:
    declared = BackendCapabilities.model_validate(LEAST)
    assert declared.attn_types == (AttentionType.DECODER,)
    assert declared.cudagraph_support is AttentionCGSupport.NEVER
    assert declared.compute_capabilities == ()
    flags = {name for name in BackendCapabilities.model_fields if getattr(declared, name) is True}
    assert flags == {"kv_connector"}


@pytest.mark.parametrize(
    "name", ["dtypes", "kv_cache_dtypes", "block_sizes", "device_kinds", "attn_types"]
)
def test_a_backend_serves_at_least_one_of_each_kind_of_thing(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} must not be empty"):
        parse_spec(BackendCapabilities, {**LEAST, name: ()}, "capabilities")


@pytest.mark.parametrize("size", [0, -16])
def test_block_sizes_are_positive(size: int) -> None:
    with pytest.raises(SpecError, match=r"block_sizes.*greater than 0"):
        parse_spec(BackendCapabilities, {**LEAST, "block_sizes": (size,)}, "capabilities")


def test_sparse_backends_are_mla_backends() -> None:
    with pytest.raises(SpecError, match="is_sparse needs is_mla"):
        parse_spec(BackendCapabilities, {**LEAST, "is_sparse": True}, "capabilities")
    assert BackendCapabilities.model_validate({**LEAST, "is_sparse": True, "is_mla": True}).is_mla


def test_capabilities_round_trip_through_json() -> None:
    declared = BackendCapabilities(
        dtypes=(DType.BFLOAT16, DType.FLOAT16),
        kv_cache_dtypes=(CacheDType.AUTO, CacheDType.FP8),
        block_sizes=(64, MultipleOf(base=16)),
        head_sizes=HeadSizes(values=(128,)),
        device_kinds=(DeviceKind.SM90, DeviceKind.SM100),
        compute_capabilities=(
            ComputeCapabilityRange(minimum=ComputeCapability(major=9)),
            ComputeCapabilityRange(
                minimum=ComputeCapability(major=8, minor=6),
                maximum=ComputeCapability(major=8, minor=9),
            ),
        ),
        attn_types=tuple(AttentionType),
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
        sink=True,
    )
    assert BackendCapabilities.model_validate_json(declared.model_dump_json()) == declared


def test_requests_round_trip_through_json() -> None:
    request = AttentionSelectorConfig(
        head_size=128, dtype=DType.BFLOAT16, attn_type=AttentionType.ENCODER, has_sink=True
    )
    assert AttentionSelectorConfig.model_validate_json(request.model_dump_json()) == request


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"attn_type": "prefix"}, ["'attn_type'", "'encoder_only'", "got 'prefix'"]),
        ({"head_size": 0}, ["'head_size'", "greater than 0", "got 0"]),
        ({"use_mla": "perhaps"}, ["'use_mla'", "boolean", "got 'perhaps'"]),
        ({"use_mlaa": True}, ["'use_mlaa'", "not permitted", "got True"]),
    ],
)
def test_a_bad_request_names_field_value_and_what_is_allowed(
    fields: dict[str, object], parts: list[str]
) -> None:
    good = {"head_size": 128, "dtype": "bfloat16"}
    with pytest.raises(SpecError, match="request: field ") as caught:
        parse_spec(AttentionSelectorConfig, {**good, **fields}, "request")
    assert all(part in str(caught.value) for part in parts)
