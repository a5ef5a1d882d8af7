"""TRTLLM_MHA and a mixed backend with it on a real GPU, beyond the conformance suite.

No call waits for the GPU, and steps that a graph replays find what a build wrote.
"""

from __future__ import annotations

import pytest
import torch

from attn.backends.mixed import mix
from attn.backends.triton_attn import TritonAttentionBackend
from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.bench.measure.timing import count_waits, waits_are_errors
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BATCHES
from attn.testing.cases import FEATURES, HEADS, Case, device_for
from attn.testing.conformance import check_case
from attn.testing.dense_trial import DenseTrial
from attn.testing.trial import PAGE_PADDING
from specs.dtypes import CacheDType, DType
from specs.layouts import KVOrder, KVPacking

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NAMES = ("uniform_decode", "ragged_decode", "mixed", "speculative_verify", "chunked_prefill")
CASES = [
    Case(feature, BATCHES[name], dtype=DType.BFLOAT16, cache_dtype=cache)
    for feature in (FEATURES["causal"], FEATURES["window"], FEATURES["sinks"])
    for name in NAMES
    for cache in (CacheDType.AUTO, CacheDType.FP8)
]
MIXED = mix("TRITON_XQA", TritonAttentionBackend, TrtllmMhaBackend)


@pytest.fixture(autouse=True)
def needs_flashinfer() -> None:
    if device_for(AttentionBackendEnum["TRTLLM_MHA"]) is None:
        pytest.skip(TrtllmMhaBackend.unavailable_reason() or "no kernel for this GPU")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_build_and_forward_wait_for_nothing(case: Case) -> None:
    if not case.is_served_by(TrtllmMhaBackend):
        pytest.skip("not served on this GPU")
    trial = DenseTrial(TrtllmMhaBackend, case, CUDA)
    trial.write()
    builder, cache = trial.builder(), trial.cache()
    # The first call compiles kernels and reads scales, so it may wait for the GPU.
    trial.attend(trial.build(builder), trial.inputs, cache)
    torch.cuda.synchronize()
    with waits_are_errors():
        trial.attend(trial.build(builder), trial.inputs, cache)


@pytest.mark.parametrize("feature", ["causal", "window"])
@pytest.mark.parametrize("name", NAMES)
def test_a_profile_of_a_build_shows_no_wait(name: str, feature: str) -> None:
    case = Case(FEATURES[feature], BATCHES[name], dtype=DType.BFLOAT16)
    trial = DenseTrial(TrtllmMhaBackend, case, CUDA)
    builder = trial.builder()
    assert count_waits(lambda: trial.build(builder), CUDA) == 0


@pytest.mark.parametrize("packing", KVPacking)
@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_decodes_read_every_layout_beside_triton_s_prefills(
    packing: KVPacking, order: KVOrder, page: int, dtype: DType
) -> None:
    for heads in HEADS:
        for padded in (False, True):
            case = Case(
                batch=BATCHES["mixed"],
                heads=heads,
                dtype=dtype,
                block_size=page,
                packing=packing,
                order=order,
                padded_pages=padded,
            )
            if not case.is_served_by(MIXED):
                continue
            if padded and PAGE_PADDING % (heads.head_size * dtype.itemsize):
                with pytest.raises(ValueError, match="pages of whole rows for xqa"):
                    DenseTrial(MIXED, case, CUDA).builder()
                continue
            check_case(MIXED, case, CUDA)
