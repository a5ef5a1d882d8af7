"""Names of backends, models and devices: case is ignored, and errors suggest a near name."""

from typing import Any

import pytest
import torch

from attn import UnknownBackendError, get_attn_backend
from attn.bench.settings import KernelBench
from attn.device import known_device
from attn.registry import ROWS, AttentionBackendEnum, BackendRow
from attn.selector import explain, select
from specs.attention import AttentionSelectorConfig
from specs.base import SpecError
from specs.devices import KNOWN_DEVICES
from specs.dtypes import DType
from specs.hf_config import bundled_model_names, load_model_geometry
from specs.names import find_name, near_miss

DENSE = AttentionSelectorConfig(head_size=64, dtype=DType.BFLOAT16)
CPU = KNOWN_DEVICES["cpu"]


@pytest.mark.parametrize("spell", [str.upper, str.lower, str.title])
def test_backends_are_found_in_any_case(spell: Any) -> None:
    for row in ROWS:
        for name in (row.name, *row.aliases):
            assert AttentionBackendEnum[spell(name)] is AttentionBackendEnum[row.name]
            assert getattr(AttentionBackendEnum, spell(name)).name == row.name
            assert spell(name) in AttentionBackendEnum
            assert explain(DENSE, CPU, spell(name)).asked_for == row.name
    assert select(DENSE, CPU, spell("TORCH_REF")).get_name() == "TORCH_REF"


@pytest.mark.parametrize("spell", [str.upper, str.lower, str.title])
def test_devices_are_found_in_any_case(spell: Any) -> None:
    for name, device in KNOWN_DEVICES.items():
        assert known_device(spell(name)) is device
        assert explain(DENSE, spell(name)).device is device
    found = get_attn_backend(64, torch.bfloat16, "auto", device=spell("h200"))
    assert found.get_name() == "TRITON_ATTN"


@pytest.mark.parametrize("spell", [str.upper, str.title])
def test_models_are_found_in_any_case(spell: Any) -> None:
    for name in bundled_model_names():
        assert load_model_geometry(spell(name)) == load_model_geometry(name)


def test_a_file_of_a_models_name_is_read_where_the_case_differs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "QWEN3-8B").write_text("{")
    (tmp_path / "qwen3-8b").write_text("{")
    with pytest.raises(SpecError, match="QWEN3-8B: not JSON"):
        load_model_geometry("QWEN3-8B")
    assert load_model_geometry("qwen3-8b").name == "qwen3-8b"


NEAR = {
    "TRITON_ATN": "TRITON_ATTN",
    "triton-attn": "TRITON_ATTN",
    "flash_infer": "FLASHINFER",
    "TORCHREF": "TORCH_REF",
    "trtllm_mha2": "TRTLLM_MHA",
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_of_a_backend_is_told(name: str) -> None:
    with pytest.raises(UnknownBackendError) as caught:
        explain(DENSE, CPU, name)
    names = ", ".join(row.name for row in ROWS)
    assert str(caught.value) == (
        f"unknown attention backend {name!r} (did you mean {NEAR[name]!r}?); registered: {names}"
    )
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownBackendError, match=f"did you mean {NEAR[name]!r}"):
        KernelBench(backend=name)


def test_near_misses_of_devices_and_models_are_told() -> None:
    with pytest.raises(ValueError, match=r"^unknown device 'B20' \(did you mean 'b200'\?\); exp"):
        known_device("B20")
    with pytest.raises(ValueError, match=r"unknown device 'tpu' .*; expected one of cpu, .*h200"):
        known_device("tpu")
    with pytest.raises(ValueError, match="unknown device 'rtx6000'"):
        explain(DENSE, "rtx6000")
    for name in ("lama-3.1-8b", "meta-llama/Llama-3.1-8B"):
        with pytest.raises(
            SpecError, match=r"bundled models \(did you mean 'llama-3\.1-8b'\?\) are "
        ):
            load_model_geometry(name)


def test_a_name_like_none_is_told_without_a_guess() -> None:
    assert near_miss("XYZ", ["TRITON_ATTN", "TORCH_REF"]) == ""
    assert near_miss("XYZ", []) == ""
    with pytest.raises(UnknownBackendError, match=r"unknown attention backend 'XYZ'; registered"):
        explain(DENSE, CPU, "XYZ")


def test_the_spelling_of_a_name_that_is_there_goes_before_another_case() -> None:
    assert find_name("a", ["A", "a"]) == "a"
    assert find_name("A", ["a", "b"]) == "a"
    assert find_name(7, ["a"]) is None


def test_a_name_that_is_taken_in_another_case_is_taken() -> None:
    for row in (BackendRow("torch_ref", "a.b:C"), BackendRow("NEW", "a.b:C", aliases=("new",))):
        with pytest.raises(ValueError, match="is registered already"):
            AttentionBackendEnum.add(row)
    assert "NEW" not in AttentionBackendEnum


def test_a_benchmark_knows_its_backend_by_its_own_name() -> None:
    assert KernelBench(backend="torch_ref").backend == "TORCH_REF"
    assert KernelBench(backend="nsa").backend == "SPARSE_MLA"
