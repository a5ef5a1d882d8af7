"""Latent rows written, gathered and converted: bytes, bounds, and kernels against torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn.ops import latent_convert as ops
from attn.ops.latent_convert import convert_blocks, convert_rows, write_latent_rows
from attn.testing import stored_rows
from attn.testing.batches import POISON_BYTE, is_poison
from specs.dtypes import DType
from specs.layouts import LatentKVLayout, latent_views
from specs.rows import LatentFormat
from specs.sparse_mla import CONVERSIONS, STORED_FORMATS, Exactness, find_conversion

BF16, RAW, SCALED = STORED_FORMATS
NAMES = {BF16: "auto", RAW: "fp8", SCALED: "fp8_ds_mla"}
RANK, ROPE, N, P = 256, 32, 5, 16
MODELS = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = [(one.source, one.target) for one in CONVERSIONS]


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(ops, "has_kernel", lambda rows: False)
        # The rows fill several chunks.
        monkeypatch.setattr(ops, "_CHUNK_ROWS", 7)
    elif not ops.has_kernel(torch.ones(1)):
        pytest.skip("needs Triton's interpreter")
    return str(request.param)


def layout_of(
    latent: LatentFormat,
    model: torch.dtype = torch.bfloat16,
    padding: int = 0,
    rank: int = RANK,
    rope: int = ROPE,
) -> LatentKVLayout:
    width = stored_rows.latent_row_bytes(rank, rope, NAMES[latent], model)
    return LatentKVLayout(
        block_size=P,
        format=latent,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        model_dtype=DType.parse(model),
        page_size_padded=P * width + padding if padding else None,
    )


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers in rows of very different sizes."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.logspace(-4, 4, len(x))[:, None]).to(dtype)


def tokens(model: torch.dtype, count: int = N * P) -> tuple[Tensor, Tensor]:
    return normal(count, RANK, dtype=model), normal(count, ROPE, seed=1, dtype=model)


def filled(
    latent: LatentFormat, k_scale: Tensor, model: torch.dtype = torch.bfloat16, padding: int = 0
) -> tuple[LatentKVLayout, Tensor, Tensor]:
    """A cache with data in every slot but those of the last block, and the bytes of its rows."""
    layout = layout_of(latent, model, padding)
    buffer = torch.full((layout.nbytes(N),), POISON_BYTE, dtype=torch.uint8)
    cache = layout.view(buffer, N)
    slots = torch.arange(N * P)
    slots[-P:] = -1
    write_latent_rows(*tokens(model), cache, slots, k_scale, layout.row)
    return layout, cache, bytes_of(cache, layout)


def bytes_of(cache: Tensor, layout: LatentKVLayout) -> Tensor:
    """The bytes ``[N * P, row bytes]`` of a cache's rows."""
    flat = cache.contiguous().view(torch.uint8)
    return flat.reshape(-1, layout.row.nbytes)


def real_of(rows: Tensor, latent: LatentFormat, model: torch.dtype, k_scale: Tensor) -> Tensor:
    """float64 values of rows of bytes, read by code of the tests."""
    parts = stored_rows.decode_latent(rows, RANK, NAMES[latent], model, k_scale)
    return torch.cat([part.real.double().expand_as(part.units) for part in parts], -1)


# -- Writers.


@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("latent", STORED_FORMATS)
def test_rows_are_written_as_the_format_says_and_nothing_else(
    latent: LatentFormat, model: torch.dtype, padding: int
) -> None:
    layout = layout_of(latent, model, padding)
    buffer = torch.full((layout.nbytes(N),), POISON_BYTE, dtype=torch.uint8)
    cache, k_scale = layout.view(buffer, N), torch.tensor(0.03)
    kv_c, k_pe = tokens(model, 7)
    # Rows are parts of a wider tensor, as projections leave them; the row past the slots is
    # padding.
    wide = torch.cat([kv_c, k_pe], -1)
    slots = torch.tensor([20, 21, -1, 79, 22, 8])
    write_latent_rows(wide[:, :RANK], wide[:, RANK:], cache, slots, k_scale, layout.row)
    rows, kept = bytes_of(cache, layout), slots >= 0
    parts = stored_rows.decode_latent(rows[slots[kept]], RANK, NAMES[latent], model, k_scale)
    for x, stored in zip((kv_c, k_pe), parts, strict=True):
        assert not bool(stored.misses(x[:6][kept]).any())
    if latent is SCALED:
        wanted = stored_rows.block_scale(kv_c[:6][kept].unflatten(-1, (-1, 128)))
        scales = latent_views(cache, layout.row)["scale"].reshape(N * P, -1)[slots[kept]]
        assert torch.equal(scales.double(), wanted[..., 0])
    untouched = torch.ones(N * P, dtype=torch.bool)
    untouched[slots[kept]] = False
    assert is_poison(rows[untouched])
    pages = buffer.view(N, -1)
    assert is_poison(pages[:, P * layout.row.nbytes :])


@pytest.mark.parametrize("model", MODELS)
def test_zeros_and_values_out_of_range_leave_a_finite_row(model: torch.dtype) -> None:
    layout = layout_of(SCALED, model)
    cache = layout.allocate(N, fill_byte=POISON_BYTE)
    kv_c, k_pe = torch.zeros(4, RANK, dtype=model), torch.zeros(4, ROPE, dtype=model)
    largest = torch.finfo(model).max
    kv_c[1, 3], kv_c[1, 4], k_pe[1, 0] = largest, -largest, largest
    kv_c[2, 200], kv_c[2, 201] = torch.inf, 3.0
    kv_c[3] = torch.finfo(model).smallest_normal
    write_latent_rows(kv_c, k_pe, cache, torch.arange(4), torch.ones(()), layout.row)
    fields = {name: part[0, :4] for name, part in latent_views(cache, layout.row).items()}
    assert not fields["nope"][0].view(torch.uint8).any()
    assert fields["scale"][0].tolist() == [1.0, 1.0]
    units = fields["nope"].float()
    assert bool(units.isfinite().all())
    assert bool(fields["rope"].isfinite().all())
    # A block with an infinite element keeps only elements in e4m3's own range.
    assert fields["scale"][2].tolist() == [1.0, 1.0]
    assert units[2, [200, 201]].tolist() == [448.0, 3.0]
    scales = fields["scale"].double()
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    real = units.double() * scales.repeat_interleave(128, -1)
    assert bool((real[1, 3] - largest).abs() <= largest / 16)
    assert bool((real[3] > 0).all()) or model is not torch.float16


def test_a_nan_stays_in_its_block() -> None:
    layout = layout_of(SCALED, torch.float32)
    cache = layout.allocate(1)
    kv_c, k_pe = torch.ones(1, RANK), torch.ones(1, ROPE)
    kv_c[0, 5] = torch.nan
    write_latent_rows(
        kv_c, k_pe, cache, torch.zeros(1, dtype=torch.int64), torch.ones(()), layout.row
    )
    units = latent_views(cache, layout.row)["nope"][0, 0].float()
    assert units.isnan().nonzero().flatten().tolist() == [5]


def test_rows_that_cannot_be_written_are_refused() -> None:
    layout = layout_of(SCALED)
    cache, one = layout.allocate(N), torch.ones(())
    kv_c, k_pe = tokens(torch.bfloat16, 3)
    slots = torch.arange(3)
    indexer = LatentFormat.INDEXER_FP8.row(128)
    with pytest.raises(ValueError, match="format of attended rows, got 'indexer_fp8'"):
        write_latent_rows(kv_c, k_pe, cache, slots, one, indexer)
    with pytest.raises(ValueError, match="kv_cache must be"):
        write_latent_rows(kv_c, k_pe, cache[..., :-1], slots, one, layout.row)


def test_the_kernel_says_which_rows_do_not_fit(path: str) -> None:
    if path != "kernel":
        pytest.skip("the kernel's own checks")
    layout = layout_of(SCALED)
    cache, one = layout.allocate(N), torch.ones(())
    kv_c, k_pe = tokens(torch.bfloat16, 3)
    slots = torch.arange(3)
    with pytest.raises(ValueError, match=r"must be 256 and 32 wide.*got 128 and 32"):
        write_latent_rows(kv_c[:, :128], k_pe, cache, slots, one, layout.row)
    with pytest.raises(ValueError, match="one for each of 3 slots, got 2 and 3"):
        write_latent_rows(kv_c[:2], k_pe, cache, slots, one, layout.row)


# -- Conversions.

SLOTS = torch.tensor([20, 3, 3, -1, 47, 0, -1, 20, 63, 1, 2])
"""Slots in any order, some twice, some empty."""


def converted(
    source: LatentFormat,
    target: LatentFormat,
    k_scale: Tensor,
    model: torch.dtype = torch.bfloat16,
    snap_scales: bool = False,
    slots: Tensor = SLOTS,
    padding: int = 0,
) -> tuple[Tensor, Tensor, LatentKVLayout]:
    """Bytes of the listed rows before and after conversion."""
    layout, cache, rows = filled(source, k_scale, model, padding)
    to = layout_of(target, model)
    out = to.allocate(1, fill_byte=POISON_BYTE)[0]
    convert_rows(cache, layout.row, slots, out, to.row, k_scale, snap_scales)
    made = bytes_of(out[None], to)
    assert is_poison(made[len(slots) :])
    return rows[slots.clamp(min=0)], made[: len(slots)], to


@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("latent", STORED_FORMATS)
def test_gathered_rows_are_the_same_bytes(
    latent: LatentFormat, index: torch.dtype, padding: int
) -> None:
    slots = SLOTS.to(index)
    given, made, to = converted(latent, latent, torch.tensor(0.03), slots=slots, padding=padding)
    there = SLOTS >= 0
    assert torch.equal(made[there], given[there])
    nothing = {name: part[0] for name, part in latent_views(made[~there][None], to.row).items()}
    assert not nothing["nope"].view(torch.uint8).any()
    assert not nothing["rope"].view(torch.uint8).any()
    assert latent is not SCALED or bool((nothing["scale"] == 1).all())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("k_scale", [1.0, 0.25, 2.0**-20, 2.0**9])
@pytest.mark.parametrize(("source", "target"), [(RAW, BF16), (RAW, SCALED), (SCALED, BF16)])
def test_conversions_are_exact_for_powers_of_two(
    source: LatentFormat, target: LatentFormat, k_scale: float, model: torch.dtype
) -> None:
    if target is BF16 and model is torch.float16:
        pytest.skip("fp16 has not the range")
    scale = torch.tensor(k_scale)
    for snap_scales in (False, True):
        given, made, _ = converted(source, target, scale, model, snap_scales)
        there = SLOTS >= 0
        before = real_of(given, source, model, scale)[there]
        assert torch.equal(real_of(made, target, model, scale)[there], before)
        assert bool(before.isfinite().all())
        assert bool((before != 0).any())
        if target is SCALED:
            assert torch.equal(made[there][:, :RANK], given[there][:, :RANK])


@pytest.mark.parametrize("target", [BF16, SCALED])
@pytest.mark.parametrize("source", [RAW, SCALED])
def test_every_code_of_e4m3_is_converted(source: LatentFormat, target: LatentFormat) -> None:
    layout, to = layout_of(source), layout_of(target)
    cache, out = layout.allocate(1), to.allocate(1)[0]
    views = latent_views(cache, layout.row)
    codes = torch.arange(256, dtype=torch.uint8)
    views["nope"][0, 0].view(torch.uint8).copy_(codes)
    scale = torch.tensor(0.5)
    if "scale" in views:
        views["scale"].fill_(0.5)
    convert_rows(cache, layout.row, torch.zeros(1, dtype=torch.int32), out, to.row, scale)
    made = bytes_of(out[None], to)[:1]
    nope = real_of(made, target, torch.bfloat16, torch.ones(()))[0, :RANK]
    wanted = codes.view(torch.float8_e4m3fn).double() / 2
    assert wanted.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(nope.nan_to_num(7e9), wanted.nan_to_num(7e9))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("k_scale", [0.03, 0.7, 1.0000001, 3.0])
def test_other_scales_round_once(k_scale: float, model: torch.dtype) -> None:
    scale, there = torch.tensor(k_scale), SLOTS >= 0
    given, made, _ = converted(RAW, BF16, scale, model)
    before = real_of(given, RAW, model, scale)[there]
    largest = torch.finfo(model).max
    # The product is rounded to fp32 and then to the model's type: like one rounding, but for ties.
    slack = torch.finfo(torch.float32).eps * before.abs()
    limit = stored_rows.half_ulp(before.clamp(-largest, largest), model) + slack
    assert bool(((real_of(made, BF16, model, scale)[there] - before).abs() <= limit).all())

    given, made, _ = converted(RAW, SCALED, scale, model)
    after = real_of(made, SCALED, model, scale)[there]
    assert torch.equal(after[:, :RANK], before[:, :RANK])
    rope, wanted = after[:, RANK:], before[:, RANK:]
    limit = stored_rows.half_ulp(wanted, torch.bfloat16) + slack[:, RANK:]
    assert bool(((rope - wanted).abs() <= limit).all())


@pytest.mark.parametrize("k_scale", [0.03, 0.7, 1.0000001, 3.0])
def test_snapped_scales_are_powers_of_two_and_round_once(k_scale: float) -> None:
    scale, there = torch.tensor(k_scale), SLOTS >= 0
    given, made, to = converted(RAW, SCALED, scale, snap_scales=True)
    scales = latent_views(made[None], to.row)["scale"][0].double()
    mantissa, _ = torch.frexp(scales)
    assert bool((mantissa == 0.5).all())
    assert bool((scales[there] >= k_scale).all())
    assert bool((scales[there] < 2 * scale.double()).all())
    before = real_of(given, RAW, torch.bfloat16, scale)[there][:, :RANK]
    after = real_of(made, SCALED, torch.bfloat16, scale)[there][:, :RANK]
    step = scales[there][:, :1]
    slack = 2 * torch.finfo(torch.float32).eps * (before / step).abs()
    limit = stored_rows.half_ulp(before / step, torch.float8_e4m3fn) + slack
    assert bool((((after - before) / step).abs() <= limit).all())


@pytest.mark.parametrize("model", MODELS)
def test_quantised_rows_are_those_that_the_writer_writes(model: torch.dtype) -> None:
    _, made, to = converted(BF16, SCALED, torch.ones(()), model)
    written = to.allocate(N, fill_byte=POISON_BYTE)
    write_latent_rows(*tokens(model), written, torch.arange(N * P), torch.ones(()), to.row)
    there = SLOTS >= 0
    assert torch.equal(made[there], bytes_of(written, to)[SLOTS[there]])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_whole_cache_is_converted_as_its_rows_are(
    source: LatentFormat, target: LatentFormat
) -> None:
    k_scale = torch.tensor(0.5)
    layout, cache, _ = filled(source, k_scale, padding=64)
    to = layout_of(target, padding=128)
    out = to.allocate(N, fill_byte=POISON_BYTE)
    convert_blocks(cache, layout.row, out, to.row, k_scale)
    listed = to.allocate(N, fill_byte=POISON_BYTE)
    flat = torch.empty(N * P, listed.shape[-1], dtype=listed.dtype)
    convert_rows(cache, layout.row, torch.arange(N * P), flat, to.row, k_scale)
    assert torch.equal(bytes_of(out, to)[:-P], bytes_of(flat[None], to)[:-P])
    # Memory is bounded: two blocks at a time.
    room = layout_of(target).allocate(2)
    for first in (0, 2):
        convert_blocks(cache, layout.row, room, to.row, k_scale, first_block=first)
        wanted = bytes_of(out[first : first + 2], to)
        assert torch.equal(bytes_of(room, to), wanted)


@pytest.mark.parametrize("slots", [torch.empty(0, dtype=torch.int64), torch.full((3,), -1)])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_no_rows_and_rows_of_nothing(
    source: LatentFormat, target: LatentFormat, slots: Tensor
) -> None:
    # The cache is poison: nothing of it may be read.
    layout, to = layout_of(source), layout_of(target)
    cache = layout.allocate(N, fill_byte=POISON_BYTE)
    out = to.allocate(1, fill_byte=POISON_BYTE)[0]
    convert_rows(cache, layout.row, slots, out, to.row, torch.ones(()))
    assert is_poison(out[len(slots) :])
    real = real_of(bytes_of(out[None, : len(slots)], to), target, torch.bfloat16, torch.ones(()))
    assert bool((real == 0).all())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("pair", [(RAW, BF16), (RAW, SCALED), (SCALED, BF16), (SCALED, SCALED)])
def test_rows_of_other_widths(
    pair: tuple[LatentFormat, LatentFormat], rope: int, model: torch.dtype
) -> None:
    rank, k_scale = 384, torch.tensor(0.25)
    layout, to = (layout_of(latent, model, rank=rank, rope=rope) for latent in pair)
    cache = layout.allocate(N)
    codes = torch.randint(0, 0x70, cache.shape, dtype=torch.uint8)
    views = latent_views(cache, layout.row)
    views["nope"].view(torch.uint8).copy_(codes[..., :rank])
    if "scale" in views:
        views["scale"].copy_(torch.exp2(torch.randint(-3, 4, views["scale"].shape).float()))
    if rope:
        views["rope"].copy_(torch.randint(-8, 9, views["rope"].shape).to(views["rope"].dtype))
    out = to.allocate(1)[0]
    convert_rows(cache, layout.row, SLOTS, out, to.row, k_scale)
    there = SLOTS >= 0
    names = [NAMES[latent] for latent in pair]
    before = stored_rows.decode_latent(
        bytes_of(cache, layout)[SLOTS[there]], rank, names[0], model, k_scale
    )
    after = stored_rows.decode_latent(
        bytes_of(out[None], to)[: len(SLOTS)][there], rank, names[1], model, k_scale
    )
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.real, other.real)


def test_conversions_that_lose_are_refused_with_the_reason() -> None:
    cache, one = layout_of(SCALED).allocate(N), torch.ones(())
    out = layout_of(RAW).allocate(1)[0]
    rows = {latent: layout_of(latent).row for latent in STORED_FORMATS}
    with pytest.raises(ValueError, match="bf16 rope would be rounded to e4m3"):
        convert_rows(cache, rows[SCALED], SLOTS, out, rows[RAW], one)
    with pytest.raises(ValueError, match="chosen when rows are written"):
        convert_blocks(layout_of(BF16).allocate(N), rows[BF16], out[None], rows[RAW], one)
    indexer = LatentFormat.INDEXER_FP8.row(128)
    with pytest.raises(ValueError, match="scored, not attended"):
        convert_rows(cache, indexer, SLOTS, out, rows[BF16], one)


def test_every_pair_of_formats_is_converted_or_refused() -> None:
    found = {(one.source, one.target): one.exactness for one in CONVERSIONS}
    assert len(found) == len(CONVERSIONS)
    assert {pair for pair in found if found[pair] is Exactness.SCALED} == {
        (RAW, BF16),
        (RAW, SCALED),
        (SCALED, BF16),
    }
    refused = {(SCALED, RAW), (BF16, RAW)}
    for source in STORED_FORMATS:
        for target in STORED_FORMATS:
            assert (find_conversion(source, target) is None) == ((source, target) in refused)


def test_arguments_that_do_not_fit_are_refused() -> None:
    layout, to = layout_of(RAW), layout_of(SCALED)
    cache, out, one = layout.allocate(N), to.allocate(1)[0], torch.ones(())
    with pytest.raises(ValueError, match=r"slots must be \[S\] int32 or int64"):
        convert_rows(cache, layout.row, SLOTS.float(), out, to.row, one)
    with pytest.raises(ValueError, match="slots must be contiguous"):
        convert_rows(cache, layout.row, SLOTS[::2], out, to.row, one)
    with pytest.raises(ValueError, match="a row for each of 11 slots"):
        convert_rows(cache, layout.row, SLOTS, out[:10], to.row, one)
    with pytest.raises(ValueError, match="nope must be like source's, got 128 of"):
        convert_rows(cache, layout.row, SLOTS, out, layout_of(SCALED, rank=128).row, one)
    with pytest.raises(ValueError, match="rope must be like source's, got none and 32 of"):
        convert_rows(cache, layout.row, SLOTS, out, layout_of(SCALED, rope=0).row, one)
    with pytest.raises(ValueError, match="blocks of 16 tokens as kv_cache, got 8"):
        convert_blocks(cache, layout.row, to.allocate(N)[:, :8], to.row, one)
    for first in (-1, 1):
        with pytest.raises(ValueError, match=f"first_block must leave 5 of 5 blocks, got {first}"):
            convert_blocks(cache, layout.row, to.allocate(N), to.row, one, first_block=first)


@pytest.mark.parametrize("bad", [-2, N * P])
def test_slots_outside_the_cache_are_found_when_debugging(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_DEBUG", "1")
    layout = layout_of(BF16)
    cache, out = layout.allocate(N), layout.allocate(1)[0]
    slots = torch.tensor([0, bad])
    with pytest.raises(ValueError, match=f"got {bad}"):
        convert_rows(cache, layout.row, slots, out, layout.row, torch.ones(()))
    with pytest.raises(ValueError, match=f"got {bad}"):
        write_latent_rows(*tokens(torch.bfloat16, 2), cache, slots, torch.ones(()), layout.row)
