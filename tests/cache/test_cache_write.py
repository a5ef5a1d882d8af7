"""The cache-write kernel, byte by byte against the reference over a poisoned buffer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.kernels.cache import write as cache_write
from attn.kernels.cache import write_kernel as write_kv
from attn.ops import cache as operations
from attn.ops.dispatch import converts_float8
from attn.reference import cache as reference
from attn.reference.rope import apply_rope
from attn.testing.batches import POISON_BYTE, is_poison
from attn.testing.stored_rows import half_ulp
from builders.launch.launcher import launch
from specs.cache_write import CacheTarget, Rotation
from specs.dtypes import CacheDType, DType
from specs.layouts import DenseKVLayout, KVOrder, KVPacking, KVViews

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HARDWARE = converts_float8(DEVICE)
P, N = 4, 6
"""Tokens of a block, and blocks of the cache."""
SLOTS = (11, 12, -1, 0, 23, 8, 7)
"""Slots on both sides of a block's end, the first and the last slot, and a skipped token."""
MODEL = [torch.float16, torch.bfloat16, torch.float32]
CACHES = [
    CacheDType.AUTO,
    CacheDType.FLOAT16,
    CacheDType.BFLOAT16,
    CacheDType.FP8,
    CacheDType.FP8_E5M2,
    CacheDType.INT8_PER_TOKEN_HEAD,
    CacheDType.FP8_PER_TOKEN_HEAD,
    CacheDType.INT4_PER_TOKEN_HEAD,
]


@dataclass(frozen=True)
class Shape:
    """The shapes and types of what a step writes, and of the cache that it writes to."""

    cache_dtype: CacheDType = CacheDType.AUTO
    dtype: torch.dtype = torch.bfloat16
    heads: int = 3
    size: int = 32
    size_v: int | None = None
    packing: KVPacking = KVPacking.PACKED
    order: KVOrder = KVOrder.NHD
    padding: int = 0
    """Bytes behind each page."""
    tokens: int = len(SLOTS)

    @property
    def layout(self) -> DenseKVLayout:
        dense = DenseKVLayout(
            block_size=P,
            num_kv_heads=self.heads,
            head_size=self.size,
            head_size_v=self.size_v,
            model_dtype=DType.parse(self.dtype),
            cache_dtype=self.cache_dtype,
            packing=self.packing,
            order=self.order,
        )
        if not self.padding:
            return dense
        return dense.model_copy(update={"page_size_padded": dense.content_bytes + self.padding})

    def buffer(self) -> Tensor:
        """Poisoned bytes of a cache, on the CPU."""
        return torch.full((self.layout.nbytes(N),), POISON_BYTE, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> KVViews:
        return self.layout.split(self.layout.view(buffer, N))

    def rows(self, seed: int, size: int | None = None, heads: int | None = None) -> Tensor:
        """``[tokens, heads, size]`` on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.tokens, heads or self.heads, size or self.size)
        return (torch.randn(shape, generator=generator) * 3).to(self.dtype)

    def key_and_value(self) -> tuple[Tensor, Tensor]:
        return self.rows(1), self.rows(2, self.size_v or self.size)


def scales(heads: int) -> tuple[Tensor, Tensor]:
    """One scale of K for the whole tensor, and one scale of V per head."""
    return torch.tensor(0.03), torch.linspace(0.01, 0.05, heads)


def on_device(x: Any) -> Any:
    return x.to(DEVICE) if isinstance(x, Tensor) else x


def expected_bytes(
    shape: Shape, key: Tensor, value: Tensor, slots: Tensor, k_scale: Tensor, v_scale: Tensor
) -> Tensor:
    """The bytes that the reference leaves in a poisoned buffer."""
    buffer = shape.buffer()
    views = shape.views(buffer)
    target = CacheTarget(views, slots, k_scale, v_scale, shape.cache_dtype)
    reference.write_kv(key, value, target)
    return buffer


def check_write(
    shape: Shape,
    slots: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    layer_scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Check that kernel and reference leave the same bytes in the whole buffer, and return it."""
    made_key, made_value = shape.key_and_value()
    key, value = made_key if key is None else key, made_value if value is None else value
    slots = torch.tensor(SLOTS) if slots is None else slots
    k_scale, v_scale = layer_scales or scales(shape.heads)
    expected = expected_bytes(shape, key, value, slots.clamp(min=-1), k_scale, v_scale)
    buffer = shape.buffer().to(DEVICE)
    launch(
        cache_write.write_kv_call(
            on_device(key),
            on_device(value),
            CacheTarget(
                shape.views(buffer), *map(on_device, (slots, k_scale, v_scale)), shape.cache_dtype
            ),
            hardware_e4m3=HARDWARE,
        )
    )
    assert torch.equal(buffer.cpu(), expected)
    return buffer.cpu()


# -- Bytes.


@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("order", list(KVOrder))
@pytest.mark.parametrize("packing", list(KVPacking))
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_every_layout_gets_the_references_bytes(
    cache_dtype: CacheDType, packing: KVPacking, order: KVOrder, padding: int
) -> None:
    shape = Shape(cache_dtype, packing=packing, order=order, padding=padding)
    buffer = check_write(shape)
    written = shape.views(buffer).key.reshape(N * P, -1)
    assert [not is_poison(row) for row in written] == [slot in SLOTS for slot in range(N * P)]


@pytest.mark.parametrize("dtype", MODEL, ids=str)
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_every_model_type_is_stored(cache_dtype: CacheDType, dtype: torch.dtype) -> None:
    check_write(Shape(cache_dtype, dtype))


@pytest.mark.parametrize(
    ("size", "size_v"), [(40, None), (72, 128), (128, 64), (192, 128), (256, 40), (512, 512)]
)
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_any_head_size_is_stored(cache_dtype: CacheDType, size: int, size_v: int | None) -> None:
    check_write(Shape(cache_dtype, size=size, size_v=size_v, heads=2))


@pytest.mark.parametrize("heads", [1, 2, 5, 33])
@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.INT4_PER_TOKEN_HEAD])
def test_any_number_of_heads_is_stored(cache_dtype: CacheDType, heads: int) -> None:
    check_write(Shape(cache_dtype, heads=heads))


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.INT8_PER_TOKEN_HEAD])
def test_many_tokens_are_stored(cache_dtype: CacheDType) -> None:
    slots = torch.randperm(N * P, generator=torch.Generator().manual_seed(0))
    check_write(Shape(cache_dtype, tokens=N * P, heads=4, size=64), slots)


@pytest.mark.parametrize("cache_dtype", [CacheDType.FP8, CacheDType.FP8_E5M2])
def test_scales_may_be_scalars_or_per_head(cache_dtype: CacheDType) -> None:
    one, per_head = torch.tensor([0.07]), torch.tensor([0.01, 0.4, 0.09])
    for pair in itertools.product((one, one[0], per_head, one.expand(3)), repeat=2):
        check_write(Shape(cache_dtype), layer_scales=pair)


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_rows_may_lie_in_a_larger_tensor(cache_dtype: CacheDType) -> None:
    shape = Shape(cache_dtype)
    fused = torch.randn(shape.tokens, 8, 40).to(shape.dtype)
    check_write(shape, key=fused[:, 1:4, :32], value=fused[:, 2::2, 3:35])
    transposed = torch.randn(shape.heads, shape.tokens, shape.size).to(shape.dtype)
    check_write(shape, key=transposed.transpose(0, 1))


# -- Slots.


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.INT8_PER_TOKEN_HEAD])
@pytest.mark.parametrize(
    "slots", [(), (-1,) * 7, (5,), (-1, 6, 7, 8), (-9, 3, -(2**40), 4, 5, 6, -1)]
)
def test_skipped_and_padding_tokens_write_nothing(
    slots: tuple[int, ...], cache_dtype: CacheDType
) -> None:
    shape = Shape(cache_dtype)
    key, value = shape.key_and_value()
    key[len(slots) :], value[len(slots) :] = torch.nan, torch.nan
    check_write(shape, torch.tensor(slots, dtype=torch.int64), key, value)


def test_no_token_is_no_launch() -> None:
    shape = Shape(tokens=0)
    check_write(shape, torch.empty(0, dtype=torch.int64))


# -- Values at the edge.


@pytest.mark.parametrize("dtype", MODEL, ids=str)
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_large_values_saturate(cache_dtype: CacheDType, dtype: torch.dtype) -> None:
    shape = Shape(cache_dtype, dtype)
    key, value = shape.key_and_value()
    large = 1e30 if dtype != torch.float16 else 60000.0
    for rows, sign in ((key, 1), (value, -1)):
        rows[0, 0, :4] = sign * torch.tensor([torch.inf, -torch.inf, large, 1000.0])
        rows[1, 1, 5:7] = sign * torch.tensor([large, -1000.0])
        rows[4, 2, 31] = sign * 465.0
        rows[5] = 0.0
    buffer = check_write(shape, key=key, value=value)
    if key.dtype != shape.views(buffer).key.dtype:
        at = SLOTS[0]
        stored = shape.views(buffer).key[at // P, at % P].float()
        assert bool(stored.isfinite().all())


@pytest.mark.parametrize("cache_dtype", CACHES)
def test_a_nan_stays_one(cache_dtype: CacheDType) -> None:
    shape = Shape(cache_dtype)
    key, value = shape.key_and_value()
    key[1, 1, 20], value[1, 2, 7] = torch.nan, torch.nan
    buffer = shape.buffer().to(DEVICE)
    views = shape.views(buffer)
    target = CacheTarget(views, *map(on_device, (torch.tensor(SLOTS), *scales(3))), cache_dtype)
    rows = map(on_device, (key, value))
    launch(cache_write.write_kv_call(*rows, target, hardware_e4m3=HARDWARE))
    table = torch.arange(N, dtype=torch.int32)
    layer_scales = tuple(map(on_device, scales(3)))
    real = reference.read_kv(views, table, 0, N * P, layer_scales, cache_dtype, torch.float32)
    for got, head, element in zip(real, (1, 2), (20, 7), strict=True):
        row = got[SLOTS[1]].cpu()
        assert bool(row[head, element].isnan())
        others = [other for other in range(3) if other != head]
        assert bool(row[others].isfinite().all())


# -- RoPE.


def cos_sin(rotary_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[64, rotary_dim]``: cosines, then sines."""
    frequencies = 100.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(64).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


POSITIONS = (3, 0, 63, 17, 5, 40, 1)


def check_rope(
    shape: Shape,
    table: Tensor,
    is_neox: bool,
    positions: tuple[int, ...] = POSITIONS,
    slots: tuple[int, ...] = SLOTS,
    num_turned: int | None = None,
) -> None:
    """Check that one launch leaves the same bytes as the reference's RoPE and write.

    Args:
        num_turned: rows that are rotated; None is all of ``positions``.
    """
    num_turned = len(positions) if num_turned is None else num_turned
    # An engine's projection leaves query and key side by side in one tensor.
    fused = torch.cat([shape.rows(3, heads=4), shape.rows(1), shape.rows(4)], dim=1)
    fused[len(positions) :] = torch.nan
    before = fused.clone()
    fused = fused.to(DEVICE)
    query, key = fused[:, :4], fused[:, 4 : 4 + shape.heads]
    value = shape.rows(2, shape.size_v or shape.size)
    buffer = shape.buffer().to(DEVICE)
    launch(
        cache_write.rope_and_write_kv_call(
            query,
            key,
            on_device(value),
            Rotation(
                torch.tensor(positions, dtype=torch.int64, device=DEVICE), on_device(table), is_neox
            ),
            CacheTarget(
                shape.views(buffer),
                torch.tensor(slots, dtype=torch.int64, device=DEVICE),
                *map(on_device, scales(shape.heads)),
                shape.cache_dtype,
            ),
            hardware_e4m3=HARDWARE,
        )
    )
    turned = before.clone()
    where = torch.tensor(positions, dtype=torch.int64)[:num_turned]
    heads = 4 + shape.heads
    turned[:num_turned, :heads] = apply_rope(before[:num_turned, :heads], where, table, is_neox)
    check_turned(fused.cpu(), turned, before, table.shape[1], num_turned)
    k_scale, v_scale = scales(shape.heads)
    all_slots = torch.tensor(slots, dtype=torch.int64)
    written = expected_bytes(shape, key.cpu(), value, all_slots, k_scale, v_scale)
    assert torch.equal(buffer.cpu(), written)


def check_turned(
    got: Tensor, expected: Tensor, before: Tensor, rotary_dim: int, num_turned: int
) -> None:
    """Check rotated rows: elements that do not rotate are equal, the others nearly so.

    A fused multiply-add may change the last bits of elements that rotate.
    """
    bits = torch.int32 if got.dtype == torch.float32 else torch.int16
    for part in (got[num_turned:], expected[num_turned:]):
        assert torch.equal(part.view(bits), before[num_turned:].view(bits))
    kept = got[:num_turned, :, rotary_dim:]
    assert torch.equal(kept, before[:num_turned, :, rotary_dim:])
    error = (got - expected)[:num_turned].double().abs()
    limit = torch.zeros(())
    if DEVICE.type == "cuda":
        largest = before[:num_turned].double().abs().amax(-1, keepdim=True)
        limit = 2 * half_ulp(expected[:num_turned].double(), got.dtype)
        limit = limit + 3 * torch.finfo(torch.float32).eps * largest
    assert bool((error <= limit).all())


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("cache_dtype", CACHES)
@pytest.mark.parametrize("dtype", MODEL, ids=str)
def test_rope_rotates_in_place_and_writes_the_rotated_key(
    dtype: torch.dtype, cache_dtype: CacheDType, is_neox: bool
) -> None:
    check_rope(Shape(cache_dtype, dtype), cos_sin(32), is_neox)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    "cache_dtype", [CacheDType.AUTO, CacheDType.FP8, CacheDType.INT4_PER_TOKEN_HEAD]
)
@pytest.mark.parametrize(
    ("size", "size_v", "rotary_dim"),
    [(64, 64, 16), (72, 40, 48), (72, 72, 72), (128, 128, 2), (80, 80, 78), (256, 128, 128)],
)
def test_rope_may_cover_part_of_a_head(
    size: int, size_v: int, rotary_dim: int, cache_dtype: CacheDType, is_neox: bool
) -> None:
    check_rope(Shape(cache_dtype, size=size, size_v=size_v), cos_sin(rotary_dim), is_neox)


@pytest.mark.parametrize("dtype", MODEL, ids=str)
def test_the_table_may_have_the_models_type(dtype: torch.dtype) -> None:
    check_rope(Shape(dtype=dtype), cos_sin(32, dtype), True)
    check_rope(Shape(dtype=dtype, order=KVOrder.HND), cos_sin(32, dtype), False)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("packing", list(KVPacking))
def test_rope_with_any_number_of_heads_and_layout(packing: KVPacking, heads: int) -> None:
    check_rope(Shape(heads=heads, packing=packing, padding=32), cos_sin(32), True)


@pytest.mark.parametrize(
    ("positions", "slots"),
    [
        (POSITIONS[:5], SLOTS[:5]),
        (POSITIONS, SLOTS[:3]),
        (POSITIONS, (-1,) * 7),
        (POSITIONS[:4], ()),
        ((), ()),
    ],
)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
def test_rows_past_the_positions_stay_and_rows_without_a_slot_rotate(
    positions: tuple[int, ...], slots: tuple[int, ...], is_neox: bool
) -> None:
    for cache_dtype in (CacheDType.AUTO, CacheDType.INT4_PER_TOKEN_HEAD):
        shape = Shape(cache_dtype, size=64)
        check_rope(shape, cos_sin(32), is_neox, positions, slots)


def test_a_position_outside_the_table_is_a_padding_rows() -> None:
    positions = (*POSITIONS[:4], 64, -1, 2**40)
    check_rope(Shape(), cos_sin(32), True, positions, SLOTS[:4], num_turned=4)
    # A row that has a slot all the same is written to the cache without rotation.
    check_rope(Shape(), cos_sin(32), True, positions, num_turned=4)


def test_query_and_key_may_have_different_lengths() -> None:
    shape = Shape()
    key, value = shape.key_and_value()
    longer = shape.rows(3, heads=6)
    positions, slots = torch.tensor(POSITIONS), torch.tensor(SLOTS)
    turned = [apply_rope(x, positions[: len(x)], cos_sin(32), True) for x in (longer[:4], key)]
    around = longer.to(DEVICE, copy=True)
    got = [around[:4], key.to(DEVICE)]
    rotation = Rotation(*map(on_device, (positions, cos_sin(32))), True)
    written = map(on_device, (slots, *scales(3)))
    target = CacheTarget(shape.views(shape.buffer().to(DEVICE)), *written, CacheDType.AUTO)
    launch(
        cache_write.rope_and_write_kv_call(
            *got, on_device(value), rotation, target, hardware_e4m3=HARDWARE
        )
    )
    assert torch.equal(around[4:].cpu(), longer[4:])
    for x, expected in zip(got, turned, strict=True):
        error = (x.cpu() - expected).abs().double()
        assert bool((error <= 2 * half_ulp(expected.double(), x.dtype)).all())


# -- The launch.


def write_arguments(shape: Shape) -> dict[str, Any]:
    """The arguments of ``write_kv_call`` for a write without RoPE."""
    key, value = shape.key_and_value()
    k_scale, v_scale = scales(shape.heads)
    return {
        "key": key,
        "value": value,
        "views": shape.views(shape.buffer()),
        "slot_mapping": torch.arange(shape.tokens) % (N * P),
        "k_scale": k_scale,
        "v_scale": v_scale,
        "cache_dtype": shape.cache_dtype,
    }


def call_for(shape: Shape, **changes: Any) -> cache_write.KernelCall:
    """The launch of a write without RoPE, with some arguments replaced."""
    arguments = write_arguments(shape) | changes
    return cache_write.write_kv_call(**grouped(arguments), hardware_e4m3=False)


def grouped(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, those of a rotation and of a target in their records."""
    rest = dict(arguments)
    groups = {"target": CacheTarget, "rotation": Rotation}
    return {
        name: group(*(rest.pop(field) for field in group._fields))
        for name, group in groups.items()
        if rest.keys() >= {*group._fields}
    } | rest


def rope_call_for(shape: Shape, **changes: Any) -> cache_write.KernelCall:
    """The launch of a write with RoPE, with some arguments replaced."""
    plain = call_for(shape).arguments
    arguments = {
        "query": shape.rows(3, heads=4),
        "key": plain["key"],
        "value": plain["value"],
        "positions": torch.arange(shape.tokens) % 64,
        "cos_sin_cache": cos_sin(shape.size),
        "is_neox": True,
        "views": shape.views(shape.buffer()),
        "slot_mapping": plain["slot_mapping"],
        "k_scale": scales(shape.heads)[0],
        "v_scale": scales(shape.heads)[1],
        "cache_dtype": shape.cache_dtype,
    }
    return cache_write.rope_and_write_kv_call(**grouped(arguments | changes), hardware_e4m3=False)


@pytest.mark.parametrize("make", [call_for, rope_call_for])
@pytest.mark.parametrize("cache_dtype", CACHES)
def test_no_length_is_compiled_in(cache_dtype: CacheDType, make: Any) -> None:
    compiled = []
    for tokens in (1, 2, 16, 1000):
        call = make(Shape(cache_dtype, tokens=tokens))
        numbers = {
            name
            for name, value in call.arguments.items()
            if isinstance(value, int | str) and name not in write_kv.RUNTIME_INTEGERS
        }
        assert all(name.isupper() for name in numbers)
        compiled.append({name: call.arguments[name] for name in numbers})
    assert all(constants == compiled[0] for constants in compiled)


@pytest.mark.parametrize("size", [32, 72, 128, 512])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_tiles_hold_16_bytes_per_thread(size: int, itemsize: int) -> None:
    config = cache_write.write_config(size, 32, itemsize)
    tile = config.rows * 2 ** (size - 1).bit_length() * itemsize
    assert tile == 16 * 32 * config.num_warps or (config.rows == 1 and size == 512)


@pytest.mark.parametrize(
    ("shape", "key_align", "value_align"),
    [
        (Shape(size=64), 16, 16),
        (Shape(size=72, heads=1), 16, 16),
        (Shape(CacheDType.FP8, size=72), 16, 8),
        # A row is 2 * (64 + 4) bytes, and its second half starts at byte 68.
        (Shape(CacheDType.INT8_PER_TOKEN_HEAD, size=64), 8, 4),
        (Shape(CacheDType.INT4_PER_TOKEN_HEAD, size=40), 16, 8),
    ],
)
def test_the_promised_alignment_is_kept(shape: Shape, key_align: int, value_align: int) -> None:
    arguments = call_for(shape).arguments
    assert arguments["KEY_CACHE_ALIGN"] == key_align
    assert arguments["VALUE_CACHE_ALIGN"] == value_align
    for name in ("key_cache", "value_cache", "key", "value"):
        view = arguments[name]
        places = itertools.product(*(range(count) for count in view.shape[:-1]))
        addresses = [view[place].data_ptr() for place in places]
        assert all(address % arguments[f"{name.upper()}_ALIGN"] == 0 for address in addresses)


SHAPE = Shape()
WRONG = {
    "key": [torch.zeros(7, 96), torch.zeros(7, 3, 64).bfloat16()[..., ::2]],
    "value": [
        torch.zeros(7, 2, 32).bfloat16(),
        torch.zeros(6, 3, 32).bfloat16(),
        torch.zeros(7, 3, 40).bfloat16(),
        torch.zeros(7, 3, 32),
    ],
    "views": [
        replace(SHAPE, heads=2).views(replace(SHAPE, heads=2).buffer()),
        replace(SHAPE, size=40).views(replace(SHAPE, size=40).buffer()),
        Shape(CacheDType.FP8).views(Shape(CacheDType.FP8).buffer()),
        Shape(CacheDType.INT8_PER_TOKEN_HEAD).views(Shape(CacheDType.INT8_PER_TOKEN_HEAD).buffer()),
    ],
    "slot_mapping": [
        torch.arange(7).int(),
        torch.arange(8),
        torch.zeros(7, 1, dtype=torch.int64),
        torch.arange(14)[::2],
    ],
}
WRONG_ROPE = {
    "query": [torch.zeros(7, 4, 32), torch.zeros(7, 4, 40).bfloat16(), torch.zeros(7, 128)],
    "positions": [torch.zeros(7), torch.arange(6), torch.zeros(7, 3, dtype=torch.int64)],
    "cos_sin_cache": [cos_sin(34), cos_sin(32)[:, :31], cos_sin(32).double(), cos_sin(32)[0]],
}


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, many in WRONG.items() for wrong in many]
)
def test_what_does_not_fit_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name}.* got "):
        call_for(SHAPE, **{name: wrong})


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, wrong) for name, many in WRONG_ROPE.items() for wrong in many]
)
def test_rope_arguments_that_do_not_fit_are_refused_by_name(name: str, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"{name} .* got "):
        rope_call_for(SHAPE, **{name: wrong})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("wrong", [torch.ones(2), torch.ones((), dtype=torch.float64)])
def test_a_scale_that_does_not_fit_is_refused(name: str, wrong: Tensor) -> None:
    with pytest.raises(ValueError, match=rf"{name} .* got "):
        call_for(Shape(CacheDType.FP8), **{name: wrong})
    call_for(SHAPE, **{name: wrong})


@pytest.mark.parametrize("size", [24, 36, 520])
def test_a_head_size_outside_the_range_is_refused(size: int) -> None:
    with pytest.raises(NotImplementedError, match=f"head size .* got {size}"):
        call_for(Shape(size=size))


def test_other_types_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="float64"):
        call_for(Shape(dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="nvfp4"):
        call_for(SHAPE, cache_dtype=CacheDType.NVFP4)


# -- The operations.


def operate(shape: Shape, monkeypatch: pytest.MonkeyPatch, has_kernel: bool | None) -> list[Tensor]:
    """Query, key and buffers after the fused operation, and after the operations one by one."""
    if has_kernel is not None:
        monkeypatch.setattr(operations, "has_kernel", lambda rows: has_kernel)
    key, value = (x.to(DEVICE) for x in shape.key_and_value())
    query = shape.rows(3, heads=4).to(DEVICE)[:5]
    key[6:] = torch.nan
    buffers = [shape.buffer().to(DEVICE) for _ in range(2)]
    first, second = (shape.views(buffer) for buffer in buffers)
    slots = torch.tensor(SLOTS[:5], device=DEVICE)
    positions, table = torch.tensor(POSITIONS[:6], device=DEVICE), cos_sin(32).to(DEVICE)
    rest = (slots, *map(on_device, scales(3)), shape.cache_dtype)
    operations.write_kv(key, value, CacheTarget(first, *rest))
    rotation = Rotation(positions, table, True)
    operations.rope_and_write_kv(query, key, value, rotation, CacheTarget(second, *rest))
    return [x.cpu() for x in (query.float(), key.float(), *buffers)]


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_operations_mean_the_same_with_kernels_and_without(
    cache_dtype: CacheDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(cache_dtype)
    by_reference = operate(shape, monkeypatch, has_kernel=False)
    by_kernel = operate(shape, monkeypatch, has_kernel=True)
    assert torch.equal(by_kernel[2], by_reference[2])
    assert not is_poison(by_kernel[3])
    if DEVICE.type == "cpu":
        for got, expected in zip(by_kernel, by_reference, strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_kernels_serve_every_type_but_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    made = cache_write.write_kv_launch

    def noted(*args: Any, **kwargs: Any) -> Any:
        launched.append(made(*args, **kwargs))
        return launched[-1]

    monkeypatch.setattr(cache_write, "write_kv_launch", noted)
    for dtype in (torch.bfloat16, torch.float64):
        operate(Shape(dtype=dtype), monkeypatch, has_kernel=None)
    assert len(launched) == 1


def test_writes_alike_share_a_launcher_and_all_others_are_checked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_write, "_launchers", {})
    arguments = write_arguments(Shape(tokens=5))
    made = cache_write.write_kv_launch(**grouped(arguments), hardware_e4m3=False).call
    wanted = cache_write.write_kv_call(**grouped(arguments), hardware_e4m3=False)
    assert made.grid == wanted.grid
    for name, value in wanted.arguments.items():
        given = made.arguments[name]
        same = given is value or (isinstance(value, torch.Tensor) and torch.equal(given, value))
        assert same or given == value, name
    (launcher,) = cache_write._launchers.values()
    fewer = arguments | {name: arguments[name][:-1] for name in ("key", "value", "slot_mapping")}
    again = cache_write.write_kv_launch(**grouped(fewer), hardware_e4m3=False)
    assert again.launcher is launcher
    assert again.call.arguments["num_slots"] == len(fewer["slot_mapping"])
    key, slots = arguments["key"], arguments["slot_mapping"]
    for changes, said in (
        ({"key": key[:-1], "value": arguments["value"][:-1]}, "at most key's"),
        ({"value": arguments["value"][:-1]}, "like key"),
        ({"slot_mapping": slots.int()}, "slot_mapping must be"),
        ({"key": key.double(), "value": arguments["value"].double()}, "key must be float16"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=said):
            cache_write.write_kv_launch(**grouped(arguments | changes), hardware_e4m3=False)
    # A single row has no next row, so the stride to it cannot misalign anything.
    one = {name: arguments[name][:1] for name in ("key", "value", "slot_mapping")}
    assert (
        cache_write.write_kv_launch(**grouped(arguments | one), hardware_e4m3=False).launcher
        is not launcher
    )
