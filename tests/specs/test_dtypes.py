"""Dtypes: vLLM's strings are all known, and every name has one meaning."""

import importlib
import inspect
import pkgutil
from enum import Enum

import pytest
import torch

import specs
from specs.base import SpecError, parse_spec
from specs.dtypes import CacheDType, DType, KVQuantMode
from specs.layouts import DenseKVLayout

VLLM_026_CACHE_DTYPES = [
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
]

VLLM_033_CACHE_DTYPES = [
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "octave_k3v4",
    "octave_k3v3",
    "octave_k3v3_compact",
    "ultraquant_4bit",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
]

# vLLM 0.33's numbers; its CUSTOM shares OCTAVE_K3V4's and is no mode of ours.
VLLM_033_QUANT_MODES = {
    "NONE": 0,
    "FP8_PER_TENSOR": 1,
    "INT8_PER_TOKEN_HEAD": 2,
    "FP8_PER_TOKEN_HEAD": 3,
    "INT4_PER_TOKEN_HEAD": 4,
    "NVFP4": 5,
    "TURBOQUANT_K8V4": 6,
    "TURBOQUANT_4BIT_NC": 7,
    "TURBOQUANT_K3V4_NC": 8,
    "TURBOQUANT_3BIT_NC": 9,
    "NVFP4_DS_MLA": 10,
    "ULTRAQUANT_4BIT": 11,
    "OCTAVE_K3V4": 12,
    "OCTAVE_K3V3": 13,
    "OCTAVE_K3V3_COMPACT": 14,
}

MODE_OF = {
    "auto": "NONE",
    "float16": "NONE",
    "bfloat16": "NONE",
    "fp8": "FP8_PER_TENSOR",
    "fp8_e4m3": "FP8_PER_TENSOR",
    "fp8_e5m2": "FP8_PER_TENSOR",
    "fp8_inc": "FP8_PER_TENSOR",
    "fp8_ds_mla": "FP8_DS_MLA",
    "nvfp4_ds_mla": "NVFP4_DS_MLA",
    "turboquant_k8v4": "TURBOQUANT_K8V4",
    "turboquant_4bit_nc": "TURBOQUANT_4BIT_NC",
    "turboquant_k3v4_nc": "TURBOQUANT_K3V4_NC",
    "turboquant_3bit_nc": "TURBOQUANT_3BIT_NC",
    "octave_k3v4": "OCTAVE_K3V4",
    "octave_k3v3": "OCTAVE_K3V3",
    "octave_k3v3_compact": "OCTAVE_K3V3_COMPACT",
    "ultraquant_4bit": "ULTRAQUANT_4BIT",
    "int4_per_token_head": "INT4_PER_TOKEN_HEAD",
    "int8_per_token_head": "INT8_PER_TOKEN_HEAD",
    "fp8_per_token_head": "FP8_PER_TOKEN_HEAD",
    "nvfp4": "NVFP4",
    "nvfp4_4over6": "NVFP4",
}

# Cache dtype -> stored element and tensor storage, for a bf16 model.
ELEMENT_AND_STORAGE = {
    "auto": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "fp8": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_inc": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
    "fp8_ds_mla": (torch.uint8, torch.uint8),
    "int4_per_token_head": (torch.uint8, torch.uint8),
    "int8_per_token_head": (torch.int8, torch.int8),
    "fp8_per_token_head": (torch.float8_e4m3fn, torch.uint8),
}

DTYPE_ALIASES = {
    "double": torch.float64,
    "fp64": torch.float64,
    "float": torch.float32,
    "fp32": torch.float32,
    "half": torch.float16,
    "fp16": torch.float16,
    "torch.half": torch.float16,
    "bf16": torch.bfloat16,
    "BFloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def enums_of_specs() -> list[type[Enum]]:
    """Every enum that a module of the package defines."""
    found = []
    for info in pkgutil.walk_packages(specs.__path__, "specs."):
        module = importlib.import_module(info.name)
        found += [
            member
            for _, member in inspect.getmembers(module, inspect.isclass)
            if issubclass(member, Enum) and member.__module__ == info.name
        ]
    return found


def test_the_walk_over_specs_finds_its_enums() -> None:
    assert {DType, CacheDType, KVQuantMode} < set(enums_of_specs())


@pytest.mark.parametrize("enum", enums_of_specs(), ids=lambda enum: enum.__name__)
def test_every_enum_value_in_specs_has_one_name(enum: type[Enum]) -> None:
    values = [member.value for member in enum.__members__.values()]
    assert len(values) == len(set(values))
    assert list(enum.__members__) == [member.name for member in enum]


@pytest.mark.parametrize("text", VLLM_026_CACHE_DTYPES)
def test_every_cache_dtype_of_vllm_026_is_a_member(text: str) -> None:
    assert CacheDType.parse(text) is CacheDType(text)
    assert CacheDType(text).value == text


@pytest.mark.parametrize("text", VLLM_033_CACHE_DTYPES)
def test_every_cache_dtype_of_vllm_033_is_a_member(text: str) -> None:
    assert CacheDType.parse(text) is CacheDType(text)
    assert CacheDType(text).value == text


def test_cache_dtypes_are_those_of_vllm_and_no_others() -> None:
    assert {member.value for member in CacheDType} == {
        *VLLM_026_CACHE_DTYPES,
        *VLLM_033_CACHE_DTYPES,
    }


def test_none_means_auto_as_a_cache_dtype() -> None:
    assert CacheDType.parse(None) is CacheDType.AUTO


@pytest.mark.parametrize(
    ("alias", "text"),
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("FP8", "fp8")],
)
def test_cache_dtype_aliases_and_case(alias: str, text: str) -> None:
    assert CacheDType.parse(alias) is CacheDType(text)


@pytest.mark.parametrize(("name", "number"), VLLM_033_QUANT_MODES.items())
def test_quant_modes_have_vllms_numbers(name: str, number: int) -> None:
    assert KVQuantMode[name] == number


@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_each_cache_dtype_has_its_quant_mode(cache_dtype: CacheDType) -> None:
    assert cache_dtype.quant_mode.name == MODE_OF[cache_dtype.value]
    assert cache_dtype.is_quantized == (MODE_OF[cache_dtype.value] != "NONE")


@pytest.mark.parametrize("mode", KVQuantMode)
def test_per_token_head_modes_are_those_named_so(mode: KVQuantMode) -> None:
    assert mode.is_per_token_head == mode.name.endswith("PER_TOKEN_HEAD")


@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_elements_and_storage_of_a_cache(cache_dtype: CacheDType) -> None:
    known = cache_dtype.value in ELEMENT_AND_STORAGE
    assert cache_dtype.has_row_format == known
    if known:
        element, storage = ELEMENT_AND_STORAGE[cache_dtype.value]
        assert cache_dtype.element(DType.BFLOAT16).torch == element
        assert cache_dtype.storage(DType.BFLOAT16).torch == storage
    else:
        assert cache_dtype.storage(DType.BFLOAT16) is DType.UINT8
        with pytest.raises(NotImplementedError, match=repr(cache_dtype.value)):
            cache_dtype.element(DType.BFLOAT16)


@pytest.mark.parametrize("model_dtype", [DType.FLOAT16, DType.FLOAT32, DType.FLOAT64])
def test_auto_stores_the_model_dtype(model_dtype: DType) -> None:
    assert CacheDType.AUTO.element(model_dtype) is model_dtype
    assert CacheDType.AUTO.storage(model_dtype) is model_dtype


@pytest.mark.parametrize("cache_dtype", CacheDType)
def test_only_int4_packs_two_values_into_an_element(cache_dtype: CacheDType) -> None:
    assert cache_dtype.packing == (2 if cache_dtype.value.startswith("int4") else 1)


@pytest.mark.parametrize("dtype", DType)
def test_dtypes_round_trip_through_strings_and_torch(dtype: DType) -> None:
    assert dtype.torch is getattr(torch, dtype.value)
    for spelling in (dtype, dtype.value, dtype.torch, str(dtype.torch), dtype.value.upper()):
        assert DType.parse(spelling) is dtype


@pytest.mark.parametrize("dtype", DType)
def test_sizes_and_kinds_of_dtypes_are_torchs(dtype: DType) -> None:
    assert dtype.itemsize == dtype.torch.itemsize
    assert dtype.is_floating == dtype.torch.is_floating_point


@pytest.mark.parametrize(("alias", "expected"), DTYPE_ALIASES.items())
def test_dtype_aliases(alias: str, expected: torch.dtype) -> None:
    assert DType.parse(alias).torch == expected


@pytest.mark.parametrize("bad", ["float7", torch.complex64, None, 16])
def test_an_unknown_dtype_is_named_with_the_allowed_ones(bad: object) -> None:
    with pytest.raises(ValueError, match="unknown dtype") as caught:
        DType.parse(bad)
    message = str(caught.value)
    assert repr(bad) in message
    assert all(dtype.value in message for dtype in DType)


@pytest.mark.parametrize("bad", ["fp9", "", 8, torch.float8_e4m3fn])
def test_an_unknown_cache_dtype_is_named_with_the_allowed_ones(bad: object) -> None:
    with pytest.raises(ValueError, match="unknown kv_cache_dtype") as caught:
        CacheDType.parse(bad)
    message = str(caught.value)
    assert repr(bad) in message
    assert all(dtype.value in message for dtype in CacheDType)


def test_fields_of_specs_take_torch_dtypes_and_none() -> None:
    layout = DenseKVLayout.model_validate(
        {
            "block_size": 16,
            "num_kv_heads": 1,
            "head_size": 8,
            "model_dtype": torch.half,
            "cache_dtype": None,
        }
    )
    assert (layout.model_dtype, layout.cache_dtype) == (DType.FLOAT16, CacheDType.AUTO)


def test_a_bad_dtype_in_a_spec_names_field_value_and_the_allowed_ones() -> None:
    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "model_dtype": "float7"}
    with pytest.raises(SpecError) as caught:
        parse_spec(DenseKVLayout, fields, "layout")
    message = str(caught.value)
    assert message.startswith("layout: field 'model_dtype'")
    assert "'float7'" in message
    assert all(dtype.value in message for dtype in DType)
