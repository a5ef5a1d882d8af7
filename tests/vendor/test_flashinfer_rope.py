"""FlashInfer's rotation and quantisation.

Its call binds to both versions, its bits are ours up to ties, and every argument matters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.ops.cache import write_stored_rows
from attn.ops.rope_quant import rope_quantize, rope_quantize_by_flashinfer
from attn.testing.latent_trial import LatentTrial
from builders.vendor.flashinfer_parts import rope as flashinfer_rope
from builders.vendor.flashinfer_parts.install import FlashInferUnavailableError
from tests.emulators import trtllm_mla_emulator
from tests.emulators.flashinfer_emulator import ContractError
from tests.emulators.flashinfer_rope_emulator import (
    OLD,
    SIGNATURES,
    VERSIONS,
    emulated,
    installed_signature,
)
from tests.emulators.flashinfer_signatures import known_version
from tests.latent.rope_ties import differences, grouped, real_rows
from tests.vendor.test_trtllm_mla import BACKEND, FP8

E4M3, CPU = torch.float8_e4m3fn, torch.device("cpu")
P, RANK, ROPE, T = 16, 128, 64, 7
SCALES = 0.037, 0.25


def inputs(heads: int, dtype: torch.dtype, rope: int = ROPE) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return 3 * torch.randn(*shape, generator=generator)

    fused = normal(T, RANK + rope).to(dtype)
    angles = 7 * torch.rand(40, rope // 2, generator=generator)
    return {
        "q_nope": normal(heads, T, RANK).to(dtype).transpose(0, 1),
        "q_pe": normal(T, heads, 2 * rope).to(dtype)[..., rope:],
        "kv_c": fused[:, :RANK],
        "k_pe": fused[:, RANK:],
        "positions": torch.tensor([0, 39, 7, 12, 3, 3, 21]),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1),
    }


def outputs(heads: int) -> dict[str, Tensor]:
    return {
        "q_out": torch.zeros(T, heads, RANK + ROPE).to(E4M3),
        "k_out": torch.zeros(T, RANK + ROPE).to(E4M3),
    }


def compared(given: dict[str, Any], is_neox: bool, one: Any, other: Any) -> list[str]:
    """Findings about queries and keys."""
    table, positions = given["cos_sin_cache"], given["positions"]
    found = []
    for side, rows, scale in (
        ("q_out", (given["q_nope"], given["q_pe"]), SCALES[0]),
        ("k_out", (given["kv_c"][:, None], given["k_pe"][:, None]), SCALES[1]),
    ):
        real, size = real_rows(*rows, table, positions, is_neox)
        shape = one[side].shape
        found += differences(one[side], other[side], real.view(shape), size.view(shape), scale)
    return found


def test_the_recorded_signature_is_the_installed_one() -> None:
    version = known_version(SIGNATURES)
    assert installed_signature() == SIGNATURES[version]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_both_give_the_same_bits_up_to_ties(
    heads: int, dtype: torch.dtype, is_neox: bool, version: str
) -> None:
    given, (q_scale, k_scale) = inputs(heads, dtype), SCALES
    given["q_nope"][1, 0, 5] = -30_000.0
    ours, theirs = outputs(heads), outputs(heads)
    in_groups = grouped(**given, is_neox=is_neox)
    rope_quantize(**in_groups, q_scale=torch.tensor(q_scale), k_scale=torch.tensor(k_scale), **ours)
    with emulated(version):
        rope_quantize_by_flashinfer(**in_groups, q_scale=q_scale, k_scale=k_scale, **theirs)
    assert theirs["q_out"][1, 0, 5].item() == -448
    assert compared(given, is_neox, ours, theirs) == []
    # It would show.
    codes = theirs["k_out"].view(torch.uint8)
    codes[3, 100] ^= 1
    assert compared(given, is_neox, ours, theirs) != []


def test_rows_go_to_their_slots_in_a_second_launch() -> None:
    given, out = inputs(3, torch.bfloat16), outputs(3)
    raw = torch.full((4, P, RANK + ROPE + 16), 0xFF, dtype=torch.uint8)
    before = raw.clone()
    cache = raw[..., :RANK].view(E4M3), raw[..., RANK : RANK + ROPE].view(E4M3)
    slots = torch.tensor([17, -1, 63, 32])
    with emulated():
        rope_quantize_by_flashinfer(
            **grouped(**given, is_neox=False), q_scale=1.0, k_scale=1.0, **out, cache=cache,
            slot_mapping=slots,
        )  # fmt: skip
    rows = out["k_out"].view(torch.uint8)
    for token, slot in ((0, 17), (2, 63), (3, 32)):
        before[slot // P, slot % P, : RANK + ROPE] = rows[token]
    assert torch.equal(raw, before)


def test_stored_rows_are_written_by_their_bits() -> None:
    codes = torch.arange(256, dtype=torch.int32).byte().view(1, 256).repeat(2, 1)
    codes[1] = codes[0].flip(0)
    raw = torch.zeros(2, P, 256, dtype=torch.uint8)
    cache = raw[..., :192].view(E4M3), raw[..., 192:].view(E4M3)
    write_stored_rows(codes.view(E4M3), cache, torch.tensor([31, 0]))
    assert torch.equal(raw[1, 15], codes[0])
    assert torch.equal(raw[0, 0], codes[1])
    assert int(raw.count_nonzero()) == 2 * 255


# -- Under TRTLLM_MLA.


class ByFlashInfer(LatentTrial):
    def _impl(self) -> Any:
        made = super()._impl()
        make = type(made)

        def remade(*args: Any, **kwargs: Any) -> Any:
            return make(*args, rope_kernel="flashinfer", **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.backend, "get_impl_cls", staticmethod(lambda: remade))
            return super()._impl()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_impl_rotates_by_it_where_that_is_asked(version: str) -> None:
    seen: list[dict[str, Any]] = []
    with trtllm_mla_emulator.emulated(version), emulated(version, seen.append):
        found = []
        for cls in (LatentTrial, ByFlashInfer):
            trial = cls(BACKEND, FP8, CPU)
            trial.write()
            query = trial._absorbed(trial.inputs.query)
            kv_c, k_pe = trial._parts(trial.inputs.key)
            table = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], -1)
            q_out = torch.zeros(query.shape).to(E4M3)
            trial.impl.do_rope_quantize_and_kv_cache_update(
                *(trial.layer, query[..., :512], query[..., 512:], kv_c, k_pe),
                *(torch.zeros(len(query), dtype=torch.int64), table, False, trial.cache()),
                *(trial.inputs.batch.slot_mapping, q_out),
            )
            stored = trial.buffer.view(E4M3).float().nan_to_num(0)
            found.append((q_out.float(), stored))
    assert len(seen) == 1
    assert seen[0]["quant_scale_q"] == pytest.approx(1 / 0.25)
    assert seen[0]["quant_scale_kv"] == pytest.approx(1 / 0.037)
    for one, other in zip(*found, strict=True):
        # Values differ by one step of e4m3 at most, where a reciprocal decides a tie; few differ.
        step = one.abs() / 8 + 2**-9
        assert bool(((one - other).abs() <= step).all())
        assert int((one != other).sum()) <= one.numel() // 100


def test_where_it_is_absent_the_impl_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*names: str) -> Any:
        raise FlashInferUnavailableError("flashinfer is not installed: pip install it")

    monkeypatch.setattr(flashinfer_rope, "checked_modules", absent)
    flashinfer_rope.load_rope.cache_clear()
    with trtllm_mla_emulator.emulated():
        with pytest.raises(FlashInferUnavailableError, match="is not installed"):
            ByFlashInfer(BACKEND, FP8, CPU)
        with pytest.raises(ValueError, match="'cuda' is not a valid RopeKernel"):
            LatentTrial(BACKEND, FP8, CPU).backend.get_impl_cls()(
                *(16, 576, 0.1, 1, None, None, "fp8"),
                rope_kernel="cuda",
                kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, qk_head_dim=192,
                v_head_dim=128, kv_b_proj=torch.nn.Identity(),
            )  # fmt: skip


def test_a_flashinfer_without_the_function_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("rope", (), {})
    monkeypatch.setattr(flashinfer_rope, "checked_modules", lambda *_: (OLD, [module]))
    flashinfer_rope.load_rope.cache_clear()
    with pytest.raises(FlashInferUnavailableError, match=r"0\.6\.14 is incomplete"):
        flashinfer_rope.load_rope()


# -- Mutations, and refusals.

Change = Callable[[Any], Any]
MUTATIONS: dict[str, Change] = {
    "q_rope": lambda rows: rows.roll(1, 0),
    "k_rope": lambda rows: rows.roll(1, 0),
    "q_nope": lambda rows: rows.roll(1, 0),
    "k_nope": lambda rows: rows.roll(1, 1),
    "cos_sin_cache": lambda table: table.roll(1, 1),
    "pos_ids": lambda positions: positions.flip(0),
    "is_neox": lambda is_neox: not is_neox,
    "quantize_dtype": lambda _: torch.float8_e5m2,
    "quant_scale_q": lambda scale: 1.1 * scale,
    "quant_scale_kv": lambda scale: 1 / scale,
    "q_rope_out": lambda out: out.clone(),
    "k_nope_out": lambda out: out.clone(),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_shows(name: str, version: str) -> None:
    given, theirs = inputs(3, torch.bfloat16), outputs(3)
    ours = outputs(3)
    scales = [torch.tensor(scale) for scale in SCALES]
    in_groups = grouped(**given, is_neox=True)
    rope_quantize(**in_groups, q_scale=scales[0], k_scale=scales[1], **ours)

    def mutate(call: dict[str, Any]) -> None:
        call[name] = MUTATIONS[name](call[name])

    def judge() -> None:
        q_scale, k_scale = SCALES
        rope_quantize_by_flashinfer(**in_groups, q_scale=q_scale, k_scale=k_scale, **theirs)
        assert compared(given, True, ours, theirs) == []

    with emulated(version, mutate), pytest.raises((AssertionError, ContractError)):
        judge()


def test_what_flashinfer_does_not_take_is_named() -> None:
    given, out = inputs(1, torch.bfloat16), outputs(1)
    known: dict[str, Any] = {"is_neox": True, "q_scale": 1.0, "k_scale": 1.0}
    for changes, message in (
        ({"k_pe": None}, "k_pe is needed"),
        ({"cos_sin_cache": None}, "cos_sin_cache is needed"),
        (
            {"cos_sin_cache": torch.zeros(ROPE, 40).T},
            "cos_sin_cache and positions must be contiguous",
        ),
        (
            {name: given[name].float() for name in ("q_nope", "q_pe", "kv_c", "k_pe")},
            "q_nope must be torch.float16 or torch.bfloat16 for FlashInfer, got torch.float32",
        ),
    ):
        with emulated(), pytest.raises(ValueError, match=message):
            rope_quantize_by_flashinfer(**grouped(**{**given, **known, **changes}), **out)
    narrow = inputs(1, torch.bfloat16, rope=48)
    out = {"q_out": torch.zeros(T, 1, RANK + 48).to(E4M3)}
    with emulated(), pytest.raises(ValueError, match=r"a multiple of 32 elements.*got 48"):
        rope_quantize_by_flashinfer(**grouped(**narrow, **known), **out)
