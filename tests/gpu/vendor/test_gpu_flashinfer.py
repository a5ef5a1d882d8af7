"""FLASHINFER with the real package, beyond the conformance suite: nothing waits for the GPU."""

from __future__ import annotations

import pytest
import torch

from attn.backends.flashinfer import FlashInferBackend
from attn.bench.measure.timing import count_waits, waits_are_errors
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BATCHES
from attn.testing.cases import FEATURES, Case, device_for
from attn.testing.conformance import check_case
from attn.testing.dense_trial import DenseTrial
from builders.vendor import flashinfer
from builders.vendor.flashinfer_parts.choice import KernelChoice, WrapperKernel
from specs.dtypes import CacheDType, DType
from specs.layouts import KVOrder

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NAMES = ("uniform_decode", "ragged_decode", "mixed", "speculative_verify", "chunked_prefill")
CASES = [
    Case(feature, BATCHES[name], dtype=DType.BFLOAT16, cache_dtype=cache)
    for feature in (FEATURES["causal"], FEATURES["window"], FEATURES["soft_cap"])
    for name in NAMES
    for cache in (CacheDType.AUTO, CacheDType.FP8)
]


@pytest.fixture(autouse=True)
def needs_flashinfer() -> None:
    if device_for(AttentionBackendEnum["FLASHINFER"]) is None:
        pytest.skip(FlashInferBackend.unavailable_reason() or "flashinfer is not installed")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_build_and_forward_wait_for_nothing(case: Case) -> None:
    trial = DenseTrial(FlashInferBackend, case, CUDA)
    trial.write()
    builder, cache = trial.builder(), trial.cache()
    # The first call compiles kernels and reads scales, so it may wait for the GPU.
    trial.attend(trial.build(builder), trial.inputs, cache)
    torch.cuda.synchronize()
    with waits_are_errors():
        trial.attend(trial.build(builder), trial.inputs, cache)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_of_a_build_shows_no_wait(name: str) -> None:
    case = Case(FEATURES["causal"], BATCHES[name], dtype=DType.BFLOAT16)
    trial = DenseTrial(FlashInferBackend, case, CUDA)
    builder = trial.builder()
    assert count_waits(lambda: trial.build(builder), CUDA) == 0


@pytest.mark.parametrize("kernel", WrapperKernel)
@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("name", ["full_prefill", "chunked_prefill", "single_long_prefill"])
def test_both_kernels_take_both_orders(
    kernel: WrapperKernel, order: KVOrder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel is WrapperKernel.FA3 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fa3 is of sm90")
    choice = KernelChoice(kernel, True, "the test's")
    monkeypatch.setattr(flashinfer, "prefill_kernel_of", lambda *_: choice)
    for feature in ("causal", "window", "soft_cap"):
        case = Case(FEATURES[feature], BATCHES[name], dtype=DType.BFLOAT16, order=order)
        check_case(FlashInferBackend, case, CUDA)
