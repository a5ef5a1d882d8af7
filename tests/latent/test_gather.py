"""Kernels that move rows between tokens and padded blocks, or clear them, against their torch
twins.
"""

from __future__ import annotations

import pytest
import torch

from attn.ops import clear, gather
from attn.ops.clear import clear_rows, clear_tails
from attn.ops.gather import pack_query, unpack_state

H, RANK, ROPE = 3, 96, 32


@pytest.fixture(params=["kernel", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(gather, "has_kernel", lambda rows: False)
        monkeypatch.setattr(clear, "has_kernel", lambda rows: False)
    elif not gather.has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    return str(request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_queries_are_packed(dtype: torch.dtype, quantised: bool, indexed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = 8 * torch.randn(5, H, 2 * RANK, generator=generator).to(dtype)
    nope = wide[..., :RANK]
    rope = torch.randn(H, 5, ROPE, generator=generator).to(dtype).transpose(0, 1)
    nope[1, 2, 3], scale = 30_000.0, 0.5
    index = torch.tensor([4, -1, 0, 1, -1, 2, 3], dtype=torch.int32) if indexed else None
    rows = 5 if index is None else len(index)
    out_dtype = torch.float8_e4m3fn if quantised else dtype
    out = torch.full((rows, H, RANK + ROPE), float("nan")).to(out_dtype)
    pack_query(nope, rope, index, scale, out)
    wanted = torch.cat([nope, rope], -1)
    if index is not None:
        wanted = wanted[index.clamp(min=0).long()].clone()
        wanted[index < 0] = 0
    if quantised:
        wanted = (wanted.float() / scale).clamp(-448, 448).to(out_dtype)
    assert torch.equal(out.view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("indexed", [False, True])
def test_quantised_queries_are_read_in_the_model_s_type(dtype: torch.dtype, indexed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(0, 256, (5, H, RANK + ROPE), generator=generator).byte()
    stored[(stored & 0x7F) == 0x7F] = 0
    query = stored.view(torch.float8_e4m3fn)
    index = torch.tensor([4, -1, 0, 1, -1, 2, 3], dtype=torch.int32) if indexed else None
    rows = 5 if index is None else len(index)
    out = torch.full((rows, H, RANK + ROPE), float("nan")).to(dtype)
    pack_query(query[..., :RANK], query[..., RANK:], index, 0.037, out)
    wanted = (query.float() * 0.037).to(dtype)
    if index is not None:
        wanted = wanted[index.clamp(min=0).long()]
        wanted[index < 0] = 0
    assert torch.equal(out, wanted)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("flagged", [False, True])
def test_states_are_unpacked_and_uncovered_rows_are_neutral(flagged: bool) -> None:
    padded, padded_lse = torch.randn(6, H, RANK).half(), torch.randn(6, H)
    padded[0], padded_lse[0] = float("nan"), float("nan")
    index = torch.tensor([3, 1, 5, -1, 2], dtype=torch.int32)
    flags = torch.tensor([False, True, False, False, False]) if flagged else None
    out = torch.full((7, H, RANK), 9.0).half()
    lse = torch.full((7, H), 9.0)
    unpack_state(padded, padded_lse, index, flags, 0.5, out, lse)
    gone = [False, flagged, False, True, False]
    for token, row in enumerate(index.tolist()):
        if gone[token]:
            assert not out[token].any()
            assert bool((lse[token] == float("-inf")).all())
        else:
            assert torch.equal(out[token], padded[row])
            assert torch.equal(lse[token], padded_lse[row] * 0.5)
    assert bool((out[5:] == 9).all())
    assert bool((lse[5:] == 9).all())


@pytest.mark.usefixtures("path")
def test_flagged_rows_are_cleared_and_others_left_alone() -> None:
    out, lse = torch.randn(4, H, 700).bfloat16(), torch.randn(4, H)
    before, before_lse = out.clone(), lse.clone()
    out[1], lse[1] = float("nan"), float("nan")
    clear_rows(out, lse, torch.tensor([False, True, False]))
    assert not out[1].any()
    assert bool((lse[1] == float("-inf")).all())
    kept = [0, 2, 3]
    assert torch.equal(out[kept], before[kept])
    assert torch.equal(lse[kept], before_lse[kept])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads_first", [False, True])
def test_slots_behind_the_last_key_are_cleared_and_others_left_alone(
    dtype: torch.dtype, heads_first: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    stacked = torch.randn(6, 2, 16, H, 80, generator=generator).to(dtype)
    if heads_first:
        stacked = torch.randn(6, 2, H, 16, 80, generator=generator).to(dtype).transpose(2, 3)
    bytes_ = stacked.view(torch.uint8)
    before = bytes_.clone()
    # Requests of no token, of a whole page, of three tokens, of all tokens but one. Unused entries
    # of the table lead nowhere. The last request stands for padding: block 0 belongs to nobody.
    pages = torch.tensor([[9999, 9999], [1, 9999], [2, 9999], [3, 5], [0, 0]], dtype=torch.int32)
    lens = torch.tensor([0, 16, 3, 31, 1], dtype=torch.int32)
    clear_tails(stacked[:, 0], stacked[:, 1], pages, lens)
    before[2, :, 3:], before[5, :, 15:] = 0, 0
    assert torch.equal(bytes_, before)


def test_rows_that_do_not_fit_are_refused() -> None:
    nope, rope = torch.zeros(5, H, RANK), torch.zeros(5, H, ROPE)
    with pytest.raises(ValueError, match=r"out must be contiguous of shape \[5, 3, 128\]"):
        pack_query(nope, rope, None, 1.0, torch.zeros(5, H, 64))
    index = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="a row for each of 3, got 5"):
        pack_query(nope, rope, index, 1.0, torch.zeros(5, H, RANK + ROPE))
    stored = (part.to(torch.float8_e4m3fn) for part in (nope, rope))
    with pytest.raises(ValueError, match="must be given as bytes"):
        pack_query(*stored, None, 1.0, torch.zeros(2, H, RANK + ROPE).to(torch.float8_e4m3fn))
