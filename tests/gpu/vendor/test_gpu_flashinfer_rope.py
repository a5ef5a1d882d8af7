"""FlashInfer's rotation and quantisation on a real GPU give the library's bits, except at ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn.ops.rope_quant import rope_quantize, rope_quantize_by_flashinfer
from builders.vendor.flashinfer_parts.install import unavailable_reason
from builders.vendor.flashinfer_parts.rope import load_rope
from tests.latent.rope_ties import differences, grouped, real_rows

pytestmark = pytest.mark.gpu
CUDA, E4M3 = torch.device("cuda"), torch.float8_e4m3fn
RANK, ROPE, P, LONGEST = 512, 64, 64, 4096
SCALES = 0.037, 0.25


@pytest.fixture(autouse=True)
def needs_flashinfer() -> None:
    reason = unavailable_reason(load_rope)
    if reason is not None:
        pytest.skip(reason)


def inputs(tokens: int, heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Random inputs in an engine's strides.

    Queries have heads first, as absorption leaves them; rows are parts of one projection.
    """
    generator = torch.Generator(CUDA).manual_seed(tokens * heads)

    def normal(*shape: int) -> Tensor:
        return 3 * torch.randn(*shape, device=CUDA, generator=generator)

    fused = normal(tokens, RANK + ROPE).to(dtype)
    frequencies = 10_000.0 ** (-torch.arange(0, ROPE, 2, device=CUDA).double() / ROPE)
    angles = torch.arange(LONGEST, device=CUDA).double()[:, None] * frequencies
    positions = torch.randint(0, LONGEST, (tokens,), device=CUDA, generator=generator)
    positions[0] = LONGEST - 1
    return {
        "q_nope": normal(heads, tokens, RANK).to(dtype).transpose(0, 1),
        "q_pe": normal(tokens, heads, 128 + ROPE).to(dtype)[..., 128:],
        "kv_c": fused[:, :RANK],
        "k_pe": fused[:, RANK:],
        "positions": positions,
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1).float(),
    }


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("tokens", [1, 7, 128])
def test_both_give_the_same_bits_up_to_ties(
    tokens: int, heads: int, dtype: torch.dtype, is_neox: bool
) -> None:
    given = inputs(tokens, heads, dtype)
    given["q_nope"][0, 0, 5] = 60_000.0
    slots = torch.randperm(4 * P, device=CUDA)[:tokens]
    slots[-1:] = -1 if tokens > 1 else slots[-1:]
    found = []
    for is_ours in (True, False):
        q_out = torch.zeros(tokens, heads, RANK + ROPE, device=CUDA).to(E4M3)
        k_out = torch.zeros(tokens, RANK + ROPE, device=CUDA).to(E4M3)
        raw = torch.full((4, P, RANK + ROPE), 0xFF, dtype=torch.uint8, device=CUDA).view(E4M3)
        cache = raw[..., :RANK], raw[..., RANK:]
        more: Any = {"cache": cache, "slot_mapping": slots, **grouped(**given, is_neox=is_neox)}
        if is_ours:
            q_scale, k_scale = (torch.tensor(scale, device=CUDA) for scale in SCALES)
            rope_quantize(q_scale=q_scale, k_scale=k_scale, q_out=q_out, k_out=k_out, **more)
        else:
            q_factor, k_factor = SCALES
            rope_quantize_by_flashinfer(
                q_scale=q_factor, k_scale=k_factor, q_out=q_out, k_out=k_out, **more
            )
        # The cache holds exactly the rows that have a slot.
        kept = slots >= 0
        rows = raw.view(torch.uint8).flatten(0, 1)
        assert torch.equal(rows[slots[kept]], k_out.view(torch.uint8)[kept])
        assert int((rows != 0xFF).any(-1).sum()) == int(kept.sum())
        found.append((q_out.cpu(), k_out[:, None].cpu()))
    parts = ((given["q_nope"], given["q_pe"]), (given["kv_c"][:, None], given["k_pe"][:, None]))
    table, positions = given["cos_sin_cache"].cpu(), given["positions"].cpu()
    for (ours, theirs), (nope, rope), scale in zip(
        zip(*found, strict=True), parts, SCALES, strict=True
    ):
        real, size = real_rows(nope.cpu(), rope.cpu(), table, positions, is_neox)
        assert differences(ours, theirs, real, size, scale) == []
    assert found[1][0][0, 0, 5].item() == 448
