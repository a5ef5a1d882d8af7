"""Devices as data: capabilities compare as vLLM's, and each kind is one row of the table."""

from itertools import pairwise
from types import SimpleNamespace

import pytest

from specs.base import SpecError, parse_spec
from specs.devices import (
    KNOWN_DEVICES,
    ComputeCapability,
    Device,
    DeviceKind,
    GpuFacts,
    kind_of,
    shared_memory_of,
)


def cc(text: str) -> ComputeCapability:
    """A compute capability from its text."""
    return ComputeCapability.model_validate(text)


@pytest.mark.parametrize(
    "value",
    [
        "9.0",
        "9",
        (9, 0),
        {"major": 9},
        {"major": 9, "minor": 0},
        SimpleNamespace(major=9, minor=0),
        ComputeCapability(major=9),
    ],
    ids=str,
)
def test_capabilities_are_read_from_text_pairs_and_objects(value: object) -> None:
    assert ComputeCapability.model_validate(value) == ComputeCapability(major=9, minor=0)


@pytest.mark.parametrize("value", ["nine", "9.x", (9,), (9, 0, 0), 90, None])
def test_other_values_are_no_capability(value: object) -> None:
    with pytest.raises(SpecError):
        ComputeCapability.model_validate(value)


def test_capabilities_have_text_and_number() -> None:
    assert str(cc("12.1")) == "12.1"
    assert [cc(text).to_int() for text in ("8.0", "9.0", "10.3", "12.1")] == [80, 90, 103, 121]
    assert cc("10.3").model_dump() == "10.3"
    assert ComputeCapability.model_validate_json(cc("10.3").model_dump_json()) == cc("10.3")


def test_capabilities_are_ordered_by_major_then_minor() -> None:
    ordered = [cc(text) for text in ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0")]
    assert sorted(reversed(ordered), key=ComputeCapability.to_int) == ordered
    for low, high in pairwise(ordered):
        assert low < high
        assert low <= high
        assert high > low
        assert high >= low
        assert not high < low
        assert not high <= low
    assert ordered[0] <= cc("8.0")
    assert not ordered[0] < cc("8.0")


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        ("7.5", None),
        ("8.0", "sm80"),
        ("8.6", "sm80"),
        ("8.7", "sm80"),
        ("8.9", "sm89"),
        ("9.0", "sm90"),
        ("10.0", "sm100"),
        ("10.3", "sm100"),
        ("11.0", "sm100"),
        ("12.0", "sm120"),
        ("12.1", "sm120"),
    ],
)
def test_each_capability_has_a_row_of_the_priority_table(capability: str, kind: str | None) -> None:
    assert kind_of(cc(capability)) == kind


@pytest.mark.parametrize(
    ("name", "kind", "capability", "processors", "gib"),
    [
        ("cpu", "cpu", None, None, None),
        ("a100", "sm80", "8.0", 108, 80),
        ("a10", "sm80", "8.6", 72, 24),
        ("a40", "sm80", "8.6", 84, 48),
        ("rtx-3090", "sm80", "8.6", 82, 24),
        ("orin", "sm80", "8.7", 16, 64),
        ("l4", "sm89", "8.9", 58, 24),
        ("l40", "sm89", "8.9", 142, 48),
        ("l40s", "sm89", "8.9", 142, 48),
        ("h100", "sm90", "9.0", 132, 80),
        ("h200", "sm90", "9.0", 132, 141),
        ("h20", "sm90", "9.0", 78, 96),
        ("b200", "sm100", "10.0", 148, 180),
        ("b300", "sm100", "10.3", 148, 288),
        ("rtx-5090", "sm120", "12.0", 170, 32),
        ("rtx-pro-6000", "sm120", "12.0", 188, 96),
        ("mi300x", "rocm", None, 304, 192),
    ],
)
def test_known_devices(
    name: str, kind: str, capability: str | None, processors: int | None, gib: int | None
) -> None:
    device = KNOWN_DEVICES[name]
    assert device.name == name
    assert device.kind == kind
    assert device.compute_capability == (None if capability is None else cc(capability))
    assert device.num_multiprocessors == processors
    assert device.memory_bytes == (None if gib is None else gib << 30)
    assert device.torch_type == ("cpu" if kind == "cpu" else "cuda")
    assert Device.model_validate_json(device.model_dump_json()) == device


@pytest.mark.parametrize(
    ("capability", "kibibytes"),
    [
        ("8.0", 163),
        ("8.6", 99),
        ("8.7", 163),
        ("8.9", 99),
        ("9.0", 227),
        ("10.0", 227),
        ("10.3", 227),
        ("11.0", 227),
        ("12.0", 99),
        ("12.1", 99),
        # A capability outside the table gets the least of its major version, or of all.
        ("8.8", 99),
        ("10.9", 227),
        ("13.0", 99),
    ],
)
def test_each_capability_has_its_shared_memory(capability: str, kibibytes: int) -> None:
    assert shared_memory_of(cc(capability)) == kibibytes * 1024
    facts = GpuFacts.of(cc(capability), 7)
    assert (facts.kind, facts.num_multiprocessors) == (kind_of(cc(capability)), 7)
    assert facts.shared_memory == kibibytes * 1024
    assert facts.is_nvidia


def test_programs_of_a_multiprocessor_share_a_kibibyte_more_than_one_has() -> None:
    # 8.6 has 100 KiB, of which each program takes one KiB for itself.
    facts = KNOWN_DEVICES["a10"].facts
    assert facts == GpuFacts(DeviceKind.SM80, 72, 99 << 10)
    assert [facts.programs(kib << 10) for kib in (100, 99, 50, 49, 24, 0)] == [0, 1, 1, 2, 4, 100]
    amd = KNOWN_DEVICES["mi300x"].facts
    assert (amd.kind, amd.shared_memory, amd.is_nvidia) == (DeviceKind.ROCM, 64 << 10, False)
    assert [amd.programs(kib << 10) for kib in (65, 64, 32)] == [0, 1, 2]


def test_a_cpu_has_no_tiles() -> None:
    with pytest.raises(ValueError, match="device 'cpu' must be a GPU, got kind cpu"):
        _ = KNOWN_DEVICES["cpu"].facts


def test_every_kind_of_device_is_known_by_an_example() -> None:
    assert {device.kind for device in KNOWN_DEVICES.values()} == set(DeviceKind)


@pytest.mark.parametrize(
    ("kind", "capability", "message"),
    [
        ("cpu", "9.0", "a cpu device has no compute capability"),
        ("rocm", "9.0", "a rocm device has no compute capability"),
        ("sm90", None, "'x' of kind sm90 cannot have compute capability None"),
        ("sm90", "10.0", "'x' of kind sm90 cannot have compute capability 10.0"),
        ("sm80", "7.5", "'x' of kind sm80 cannot have compute capability 7.5"),
    ],
)
def test_a_capability_of_another_kind_is_refused(
    kind: str, capability: str | None, message: str
) -> None:
    fields = {"name": "x", "kind": kind, "compute_capability": capability}
    with pytest.raises(SpecError, match=message):
        parse_spec(Device, fields, "device")
