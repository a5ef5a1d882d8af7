"""TRTLLM_MLA on a real GPU: by TRITON_MLA's kernel anywhere, by the vendor's where it runs."""

from __future__ import annotations

import pytest
import torch

from attn.backends.trtllm_mla import TrtllmMlaBackend
from attn.bench.timing import waits_are_errors
from attn.registry import AttentionBackendEnum
from specs.attention import MlaKernel
from specs.dtypes import CacheDType, DType
from tests.batches import BATCHES
from tests.cases import LatentCase, device_for
from tests.conformance import check_case
from tests.trials import LatentTrial

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BACKEND = TrtllmMlaBackend
NAMES = (
    *("single_token", "uniform_decode", "ragged_decode", "mixed", "empty_request"),
    *("keyless_rows", "padding_rows", "padding_tokens_counted", "fewer_slots_than_keys"),
    *("all_padding", "all_padding_counted", "block_boundary", "full_prefill", "chunked_prefill"),
    *("single_long_prefill", "speculative_verify", "ragged_verify", "long_context"),
)
CASES = [
    LatentCase(
        BATCHES[name],
        num_heads=heads,
        dtype=DType.BFLOAT16,
        cache_dtype=cache,
        block_size=page,
        padded_pages=padded,
        fused_projection=padded,
    )
    for name in NAMES
    for cache in (CacheDType.AUTO, CacheDType.FP8)
    for heads, page, padded in ((16, 64, False), (128, 32, True))
]


class ByTriton(LatentTrial):
    mla_kernel = MlaKernel.TRITON


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_s_kernel_conforms(case: LatentCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.conformance.LatentTrial", ByTriton)
    check_case(BACKEND, case, CUDA)


@pytest.mark.parametrize("case", [one for one in CASES if one.num_heads == 16], ids=str)
def test_build_and_forward_wait_for_nothing(case: LatentCase) -> None:
    trial = ByTriton(BACKEND, case, CUDA)
    trial.write()
    builder, cache = trial.builder(), trial.cache()
    # Kernels are compiled by the first call.
    trial.attend(trial.build(builder), trial.inputs, cache)
    torch.cuda.synchronize()
    with waits_are_errors():
        trial.attend(trial.build(builder), trial.inputs, cache)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_vendor_s_kernels_conform(case: LatentCase) -> None:
    if device_for(AttentionBackendEnum["TRTLLM_MLA"]) is None:
        pytest.skip("trtllm-gen does not run on this GPU")
    check_case(BACKEND, case, CUDA)
