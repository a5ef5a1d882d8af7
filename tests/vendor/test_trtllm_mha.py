"""TRTLLM_MHA on a machine without a GPU: the conformance suite over emulated direct calls."""

from __future__ import annotations

from typing import ClassVar

import pytest

from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.testing import cases
from attn.testing.cases import Case, cases_for
from attn.testing.conformance import check_case
from specs.attention import BackendCapabilities
from specs.devices import KNOWN_DEVICES, Device
from specs.dtypes import CacheDType
from tests.emulators.flashinfer_signatures import FUNCTIONS, installed_functions, known_version
from tests.emulators.trtllm_emulator import NEW, OLD, emulated


class OnBlackwell(TrtllmMhaBackend):
    """The backend on Blackwell, where every kernel returns the LSE."""

    capabilities: ClassVar[BackendCapabilities] = TrtllmMhaBackend.capabilities.replace(lse=True)


BACKENDS = {"h200": TrtllmMhaBackend, "b200": OnBlackwell, "rtx-pro-6000": TrtllmMhaBackend}


def served_on(name: str) -> list[tuple[Device, Case, str]]:
    """Cases that the backend serves on a GPU, each with a version that serves it there."""
    device = KNOWN_DEVICES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "detect_device", lambda: device)
        found = [case for case in cases_for(TrtllmMhaBackend) if isinstance(case, Case)]
    versions = (OLD, NEW)
    served = []
    for place, case in enumerate(found):
        is_fp8 = case.cache_dtype.value.startswith("fp8")
        version = NEW if is_fp8 and name == "h200" else versions[place % 2]
        served.append((device, case, version))
    return served


CASES = [one for name in BACKENDS for one in served_on(name)]


@pytest.mark.parametrize(
    ("device", "case", "version"), CASES, ids=[f"{d.name}-{c}-{v}" for d, c, v in CASES]
)
def test_the_triple_conforms_over_emulated_calls(device: Device, case: Case, version: str) -> None:
    backend = BACKENDS[device.name]
    if case.feature.sinks:
        backend = TrtllmMhaBackend
    with emulated(device, version):
        check_case(backend, case)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_cases_ask_for_all_that_the_gpu_serves(name: str) -> None:
    own = [case for device, case, _ in CASES if device.name == name]
    features = {case.feature.name for case in own}
    assert {"causal", "window", "window_of_one", "sinks", "sinks_window"} <= features
    caches = {case.cache_dtype for case in own}
    assert {CacheDType.AUTO, CacheDType.BFLOAT16} <= caches
    assert {case.heads.num_heads for case in own} >= {7, 8, 14}
    assert (CacheDType.FP8 in caches) == (name != "rtx-pro-6000")
    assert {case.block_size for case in own} >= {16, 64}


def test_the_recorded_signatures_are_the_installed_ones() -> None:
    version = known_version(FUNCTIONS)
    assert installed_functions() == FUNCTIONS[version]
