"""Every prefill kernel x decode kernel x stored rows of SPARSE_MLA: right numbers, or the reason.

Nothing stands in for a kernel here. Expectations are written down anew from what FlashMLA,
FlashInfer and FlashAttention read, and not taken from the rules under test.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from builders.sparse.choice import CALLED, unavailable_kernels
from specs.rows import LatentFormat
from specs.sparse_mla import STORED_FORMATS, SparseKernel, SparsePhase
from tests.sparse.sparse_layers import Part, SparseLayer

K = SparseKernel
BF16, RAW, SCALED = STORED_FORMATS
PREFILL, DECODE = SparsePhase.PREFILL, SparsePhase.DECODE
STEPS: tuple[list[Part], ...] = (
    [(0, 0, 70), (1, 0, 9)],
    [(0, 70, 1), (1, 9, 4), (2, 0, 30)],
    [(0, 71, 1), (1, 13, 1), (2, 30, 1)],
    [(0, 72, 25), (2, 31, 10)],
)

# For a kernel and a phase: rows that it computes from, stored as they are or converted.
SERVED: dict[SparseKernel, dict[SparsePhase, tuple[LatentFormat, ...]]] = {
    K.TRITON_SPARSE: {PREFILL: (BF16, RAW, SCALED), DECODE: (BF16, RAW, SCALED)},
    K.FLASHMLA_SPARSE: {PREFILL: (BF16, RAW, SCALED), DECODE: (BF16,)},
    K.FLASHMLA_KV: {PREFILL: (BF16, RAW, SCALED), DECODE: (BF16, RAW, SCALED)},
    K.FLASHMLA_AUTO: {PREFILL: (BF16, RAW, SCALED), DECODE: (BF16, RAW, SCALED)},
    K.TRTLLM: {PREFILL: (BF16, RAW), DECODE: (BF16, RAW)},
    K.FLASHINFER_MLA: {PREFILL: (RAW,), DECODE: (RAW,)},
    K.FA3: {PREFILL: (BF16,), DECODE: (BF16,)},
}
# What a refusal says about rows that a kernel does not take.
ROW_REASONS = {
    (K.FLASHMLA_SPARSE, DECODE, RAW): "are converted to bf16 for prefill, not for decode",
    (K.FLASHMLA_SPARSE, DECODE, SCALED): "are converted to bf16 for prefill, not for decode",
    (K.TRTLLM, PREFILL, SCALED): "one scale per tensor cannot stand for a scale per 128 elements",
    (K.TRTLLM, DECODE, SCALED): "one scale per tensor cannot stand for a scale per 128 elements",
    (K.FLASHINFER_MLA, PREFILL, BF16): "one scale per tensor is chosen when rows are written",
    (K.FLASHINFER_MLA, DECODE, BF16): "one scale per tensor is chosen when rows are written",
    (K.FLASHINFER_MLA, PREFILL, SCALED): "one scale per tensor cannot stand for a scale per 128",
    (K.FLASHINFER_MLA, DECODE, SCALED): "one scale per tensor cannot stand for a scale per 128",
    (K.FA3, PREFILL, RAW): "none are converted for it in prefill",
    (K.FA3, DECODE, RAW): "none are converted for it in decode",
    (K.FA3, PREFILL, SCALED): "none are converted for it in prefill",
    (K.FA3, DECODE, SCALED): "none are converted for it in decode",
}
CAPABILITIES: dict[SparseKernel, tuple[str, tuple[tuple[int, int], ...]]] = {
    K.FLASHMLA_SPARSE: ("9.0 or 10.0 to 10.3", ((9, 0), (10, 0), (10, 3))),
    K.FLASHMLA_KV: ("9.0 or 10.0 to 10.3", ((9, 0), (10, 0), (10, 3))),
    K.TRTLLM: ("10.0 to 10.3", ((10, 0), (10, 3))),
    K.FLASHINFER_MLA: ("9.0", ((9, 0),)),
    K.FA3: ("9.0", ((9, 0),)),
}


def reasons(
    kernel: SparseKernel, phase: SparsePhase, layout: LatentFormat, device: str
) -> list[str]:
    """What a refusal must say; [] where there is no refusal."""
    found = []
    if layout not in SERVED[kernel][phase]:
        found.append(ROW_REASONS[kernel, phase, layout])
    # The choice between FlashMLA's two kernels: over bf16 rows it takes the kernel that reads them.
    concrete = kernel
    if kernel is K.FLASHMLA_AUTO:
        concrete = K.FLASHMLA_SPARSE if layout is BF16 else K.FLASHMLA_KV
    if concrete in CAPABILITIES:
        said, served = CAPABILITIES[concrete]
        has = torch.cuda.get_device_capability() if device == "cuda" else None
        if has not in served:
            found.append(f"{concrete.value} needs compute capability {said}")
        missing = unavailable_kernels().get(concrete)
        if missing is not None:
            found.append(missing)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", STORED_FORMATS)
@pytest.mark.parametrize("decode", K)
@pytest.mark.parametrize("prefill", K)
def test_a_pair_is_right_or_refused(
    prefill: SparseKernel, decode: SparseKernel, layout: LatentFormat, device: str
) -> None:
    expected = reasons(prefill, PREFILL, layout, device) + reasons(decode, DECODE, layout, device)
    if expected:
        with pytest.raises(ValueError, match="SPARSE_MLA cannot be set up so:") as caught:
            SparseLayer(layout, device, prefill, decode)
        for said in expected:
            assert said in str(caught.value)
        assert "use triton_sparse" in str(caught.value) or "use flash" in str(caught.value)
        return
    layer = SparseLayer(layout, device, prefill, decode)
    for parts in STEPS:
        step = layer.step(parts)
        layer.check(step, layer.run(step))


def test_the_walk_knows_every_kernel_and_row() -> None:
    assert set(SERVED) == set(K)
    assert set(CALLED) <= set(K)
    refused = {
        (kernel, phase, layout)
        for kernel, phase, layout in product(K, SparsePhase, STORED_FORMATS)
        if layout not in SERVED[kernel][phase]
    }
    assert set(ROW_REASONS) == refused


ALTERNATING: tuple[list[Part], ...] = (
    [(0, 0, 70)],
    [(0, 70, 1)],
    [(1, 0, 90)],
    [(0, 71, 1), (1, 90, 1)],
    [(0, 72, 60)],
    [(0, 132, 1), (1, 91, 1), (2, 0, 30)],
)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [RAW, SCALED])
@pytest.mark.parametrize("decode", [K.FLASHMLA_KV, K.TRITON_SPARSE])
def test_prefill_over_fp8_after_a_decode(layout: LatentFormat, decode: SparseKernel) -> None:
    """A decode must not change the plan of the prefill after it.

    In SGLang's attempt the second prefill by ``flashmla_sparse`` over an fp8 cache crashed.
    """
    for kernel in (K.FLASHMLA_SPARSE, decode):
        missing = unavailable_kernels().get(kernel)
        if missing is not None:
            pytest.skip(missing)
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("FlashMLA runs on compute capability 9.0 and 10.0 to 10.3")
    layer = SparseLayer(layout, "cuda", K.FLASHMLA_SPARSE, decode)
    for parts in ALTERNATING:
        step = layer.step(parts)
        layer.check(step, layer.run(step))
