"""RoPE, e4m3 and the cache write in one launch, against the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn.ops import rope_quant
from attn.ops.rope_quant import rope_quantize
from builders.launch.call import collected_calls
from builders.launch.launcher import launch
from tests.latent.rope_ties import grouped

E4M3 = torch.float8_e4m3fn
T, H, RANK, ROPE, P = 5, 3, 96, 32, 16


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(rope_quant, "has_kernel", lambda rows: False)
    elif not rope_quant.has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    return str(request.param)


def inputs(dtype: torch.dtype = torch.float16, heads: int = H, rank: int = RANK) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(heads + rank)

    def normal(*shape: int) -> Tensor:
        return 3 * torch.randn(*shape, generator=generator)

    fused = normal(T, rank + ROPE).to(dtype)
    angles = 7 * torch.rand(40, ROPE // 2, generator=generator)
    return {
        "q_nope": normal(heads, T, rank).to(dtype).transpose(0, 1),
        "q_pe": normal(T, heads, 2 * ROPE).to(dtype)[..., ROPE:],
        "kv_c": fused[:, :rank],
        "k_pe": fused[:, rank:],
        "positions": torch.tensor([0, 39, 7, 12, 3]),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1),
    }


def turned(rows: Tensor, positions: Tensor, table: Tensor, is_neox: bool) -> Tensor:
    """Rows rotated as complex numbers in float64; rows outside the table stay as they are."""
    half, out = ROPE // 2, rows.double().clone()
    for token, position in enumerate(positions.tolist()):
        if not 0 <= position < len(table):
            continue
        turn = torch.complex(table[position, :half].double(), table[position, half:].double())
        x = out[token]
        pairs = (x[..., :half], x[..., half:]) if is_neox else (x[..., 0::2], x[..., 1::2])
        z = torch.complex(*(part.contiguous() for part in pairs)) * turn
        parts = [z.real, z.imag]
        out[token] = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
    return out


def near(stored: Tensor, real: Tensor, scale: float) -> bool:
    """e4m3 values may be half a step away, or saturated; an fp32 tie may fall either way."""
    wanted = (real / scale).clamp(-448, 448)
    step = torch.exp2(wanted.abs().clamp(min=2**-6).log2().floor() - 3)
    return bool(((stored.double() - wanted).abs() <= step / 2 * (1 + 1e-5)).all())


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "rank"), [(H, RANK), (1, 64), (16, 128)])
def test_all_parts_are_rotated_in_fp32_and_rounded_once(
    heads: int, rank: int, dtype: torch.dtype, is_neox: bool
) -> None:
    given = inputs(dtype, heads, rank)
    given["q_nope"][1, 0, 5] = -30_000.0
    given["positions"][3] = -1
    kept = {name: tensor.clone() for name, tensor in given.items()}
    q_out = torch.zeros(T, heads, rank + ROPE).to(E4M3)
    k_out = torch.zeros(T, rank + ROPE).to(E4M3)
    scales = torch.tensor(0.037), torch.tensor(0.25)
    rope_quantize(
        **grouped(**given, is_neox=is_neox, q_scale=scales[0], k_scale=scales[1]),
        q_out=q_out,
        k_out=k_out,
    )
    table, positions = given["cos_sin_cache"], given["positions"]
    q_real = torch.cat(
        [given["q_nope"].double(), turned(given["q_pe"], positions, table, is_neox)], -1
    )
    k_real = torch.cat(
        [given["kv_c"].double(), turned(given["k_pe"], positions, table, is_neox)], -1
    )
    assert near(q_out, q_real, 0.037)
    assert near(k_out, k_real, 0.25)
    assert q_out[1, 0, 5].item() == -448
    assert not q_out.float().isnan().any()
    assert all(torch.equal(given[name], kept[name]) for name in kept)


@pytest.mark.parametrize("is_neox", [False, True])
def test_kernel_and_twin_give_the_same_bits(is_neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not rope_quant.has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    given, found = inputs(), []
    scale = torch.tensor(0.05)
    for is_kernel in (True, False):
        monkeypatch.setattr(rope_quant, "has_kernel", lambda rows, is_kernel=is_kernel: is_kernel)
        out = torch.zeros(T, H, RANK + ROPE).to(E4M3)
        rope_quantize(**grouped(**given, is_neox=is_neox, q_scale=scale, k_scale=scale), q_out=out)
        found.append(out.view(torch.uint8))
    assert torch.equal(*found)


@pytest.mark.usefixtures("path")
def test_rows_go_straight_to_their_slots() -> None:
    given = inputs()
    raw = torch.full((4, P, RANK + ROPE + 16), 0xFF, dtype=torch.uint8)
    before = raw.clone()
    cache = raw[..., :RANK].view(E4M3), raw[..., RANK : RANK + ROPE].view(E4M3)
    slots = torch.tensor([17, -1, 63, 32])
    q_out, k_out = torch.zeros(T, H, RANK + ROPE).to(E4M3), torch.zeros(T, RANK + ROPE).to(E4M3)
    one = torch.ones(())
    with collected_calls() as calls:
        rope_quantize(
            **grouped(**given, is_neox=False, q_scale=one, k_scale=one), q_out=q_out, k_out=k_out,
            cache=cache, slot_mapping=slots,
        )  # fmt: skip
    assert len(calls) <= 1
    if calls:
        launch(calls[0])
    rows = k_out.view(torch.uint8)
    for token, slot in ((0, 17), (2, 63), (3, 32)):
        before[slot // P, slot % P, : RANK + ROPE] = rows[token]
    assert torch.equal(raw, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_pe": None}, "k_pe is needed.*got None"),
        ({"cos_sin_cache": None}, "cos_sin_cache is needed.*got None"),
        (
            {"cos_sin_cache": torch.zeros(4, ROPE).bfloat16()},
            r"cos_sin_cache must be \[max_position, 32\] float32, got .*bfloat16",
        ),
        ({"positions": torch.zeros(2).long()}, r"positions must be \[5\] integer"),
        ({"kv_c": torch.zeros(T, RANK)}, "kv_c must be .* like q_nope, got .*float32"),
        ({"q_scale": torch.ones(2)}, "q_scale must be a float32 scalar"),
        ({"q_out": torch.zeros(T, H, RANK + ROPE)}, "q_out must be contiguous float8_e4m3fn"),
        ({"slot_mapping": torch.zeros(1).long()}, "cache and slot_mapping must be given together"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    known = {
        "is_neox": True,
        "q_scale": torch.ones(()),
        "k_scale": torch.ones(()),
        "q_out": torch.zeros(T, H, RANK + ROPE).to(E4M3),
    }
    with pytest.raises(ValueError, match=message):
        rope_quantize(**grouped(**{**inputs(), **known, **changes}))
