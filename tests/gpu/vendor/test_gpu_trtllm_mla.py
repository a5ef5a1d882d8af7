"""TRTLLM_MLA on a real GPU: by TRITON_MLA's kernel on every GPU, by trtllm-gen where it runs."""

from __future__ import annotations

import pytest
import torch

from attn.backends.trtllm_mla import TrtllmMlaBackend
from attn.bench.measure.timing import waits_are_errors
from attn.ops.rope_quant import rope_quantize
from attn.registry import AttentionBackendEnum
from attn.testing.batches import BATCHES
from attn.testing.cases import LatentCase, device_for
from attn.testing.conformance import check_case
from attn.testing.latent_trial import LatentTrial
from builders.vendor.flashinfer_parts.install import unavailable_reason
from builders.vendor.flashinfer_parts.rope import load_rope
from specs.attention import MlaKernel, RopeKernel
from specs.cache_write import Rotation, UnrotatedLatents
from specs.dtypes import CacheDType, DType

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
    monkeypatch.setattr("attn.testing.conformance.LatentTrial", ByTriton)
    check_case(BACKEND, case, CUDA)


@pytest.mark.parametrize("case", [one for one in CASES if one.num_heads == 16], ids=str)
def test_build_and_forward_wait_for_nothing(case: LatentCase) -> None:
    trial = ByTriton(BACKEND, case, CUDA)
    trial.write()
    builder, cache = trial.builder(), trial.cache()
    # The first call compiles kernels, so it may wait for the GPU.
    trial.attend(trial.build(builder), trial.inputs, cache)
    torch.cuda.synchronize()
    with waits_are_errors():
        trial.attend(trial.build(builder), trial.inputs, cache)


@pytest.mark.parametrize("kernel", RopeKernel)
@pytest.mark.parametrize("name", ["ragged_decode", "ragged_verify", "padding_tokens_counted"])
def test_queries_that_came_quantised_are_attended(name: str, kernel: RopeKernel) -> None:
    """The whole fp8 path of a step runs on TRITON_MLA's kernel, without trtllm-gen."""
    reason = unavailable_reason(load_rope)
    if kernel is RopeKernel.FLASHINFER and reason is not None:
        pytest.skip(reason)
    (case,) = (
        one
        for one in CASES
        if (one.batch.name, one.cache_dtype, one.num_heads) == (name, CacheDType.FP8, 16)
    )
    trial = ByTriton(BACKEND, case, CUDA)
    trial.impl._rotates_by = kernel
    trial.write()
    record, before = trial.build(trial.builder()), trial.buffer.clone()
    query = trial._absorbed(trial.inputs.query)
    parts = trial._parts(trial.inputs.key)
    # With cosines of 1 and sines of 0, position 0 rotates nothing.
    table = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], -1).to(CUDA)
    positions = torch.zeros(len(query), dtype=torch.int64, device=CUDA)
    q_out = torch.zeros(query.shape, device=CUDA).to(torch.float8_e4m3fn)
    trial.impl.do_rope_quantize_and_kv_cache_update(
        *(trial.layer, query[..., :512], query[..., 512:], *parts, positions, table, False),
        *(trial.cache(), trial.inputs.batch.slot_mapping, q_out),
    )
    if kernel is RopeKernel.TRITON:
        assert torch.equal(trial.buffer.view(torch.uint8), before.view(torch.uint8))
    found = trial.impl.forward_mqa(q_out, trial.cache(), record, trial.layer)
    read = (q_out.float() * trial.layer._q_scale).to(trial.dtype)
    wanted = trial.impl.forward_mqa(read, trial.cache(), record, trial.layer)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("scale", [1.0, 0.037, 0.3, 7.7e-4, 123.4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quotients_have_the_bits_of_divisions(dtype: torch.dtype, scale: float) -> None:
    """The kernel multiplies by a reciprocal and corrects the result, for every 16-bit number."""
    every = torch.arange(-(2**15), 2**15, device=CUDA).to(torch.int16).view(dtype)
    rows = every.where(every.isfinite(), 0).view(128, 512)
    given = rows[:, None], torch.zeros(128, 1, 64, device=CUDA, dtype=dtype)
    # Rotary parts of zeros stay zeros.
    table, positions = torch.ones(1, 64, device=CUDA), torch.zeros(128, device=CUDA).long()
    q_out = torch.zeros(128, 1, 576, device=CUDA).to(torch.float8_e4m3fn)
    k_out, factor = q_out[:, 0].clone(), torch.tensor(scale, device=CUDA)
    latents = UnrotatedLatents(*given, rows, given[1][:, 0])
    rope_quantize(latents, Rotation(positions, table, False), factor, factor, q_out, k_out)
    wanted = (rows.float() / factor).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    for found in (q_out[:, 0, :512], k_out[:, :512]):
        assert torch.equal(found.contiguous().view(torch.uint8), wanted)


class InFp8(LatentTrial):
    fp8_mla_prefill = True


@pytest.mark.parametrize("scale", [0.037, 2.5])
@pytest.mark.parametrize("name", ["full_prefill", "chunked_prefill", "mixed", "empty_request"])
def test_the_vendor_s_prefills_in_e4m3_conform(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_for(AttentionBackendEnum["TRTLLM_MLA"]) is None:
        pytest.skip("trtllm-gen does not run on this GPU")
    monkeypatch.setattr(InFp8, "fp8_k_scale", scale)
    monkeypatch.setattr("attn.testing.conformance.LatentTrial", InFp8)
    for case in CASES:
        if (case.batch.name, case.cache_dtype) == (name, CacheDType.FP8):
            check_case(BACKEND, case, CUDA)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_vendor_s_kernels_conform(case: LatentCase) -> None:
    if device_for(AttentionBackendEnum["TRTLLM_MLA"]) is None:
        pytest.skip("trtllm-gen does not run on this GPU")
    check_case(BACKEND, case, CUDA)
