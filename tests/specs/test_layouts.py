"""KV cache layouts: shape, strides and bytes against formulas written here a second time."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specs.base import SpecError
from specs.dtypes import CacheDType, DType
from specs.layouts import (
    DenseKVLayout,
    KVOrder,
    KVPacking,
    LatentKVLayout,
    latent_views,
    split_kv_cache,
)
from specs.rows import LatentFormat

NUM_BLOCKS = 3
NUM_HEADS = 3
HEAD_SIZE = 8
# Sizes that hybrid models make (48, 528, 1072) beside the usual ones.
BLOCK_SIZES = [1, 16, 48, 528, 1072]


@dataclass(frozen=True)
class Kind:
    """What a cache dtype means, in bytes: written by hand, not read from the specs."""

    cache_dtype: str
    model_dtype: str
    element: torch.dtype
    storage: torch.dtype
    packing: int = 1
    scale_bytes: int = 0

    def side_bytes(self, head_size: int) -> int:
        """Bytes of K (or V) of one token of one head, with its scale."""
        return head_size // self.packing * self.element.itemsize + self.scale_bytes


KINDS = [
    Kind("auto", "bfloat16", torch.bfloat16, torch.bfloat16),
    Kind("auto", "float32", torch.float32, torch.float32),
    Kind("float16", "bfloat16", torch.float16, torch.float16),
    Kind("fp8", "bfloat16", torch.float8_e4m3fn, torch.uint8),
    Kind("fp8_e5m2", "bfloat16", torch.float8_e5m2, torch.uint8),
    Kind("int8_per_token_head", "bfloat16", torch.int8, torch.int8, scale_bytes=4),
    Kind("fp8_per_token_head", "float16", torch.float8_e4m3fn, torch.uint8, scale_bytes=4),
    Kind("int4_per_token_head", "bfloat16", torch.uint8, torch.uint8, 2, 4),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{k.cache_dtype}-{k.model_dtype}")
packings = pytest.mark.parametrize("packing", list(KVPacking))
orders = pytest.mark.parametrize("order", list(KVOrder))
block_sizes = pytest.mark.parametrize("block_size", BLOCK_SIZES)
paddings = pytest.mark.parametrize("padding", [0, 64], ids=["dense", "padded"])


def dense_layout(
    kind: Kind,
    packing: KVPacking,
    order: KVOrder,
    block_size: int,
    padding: int = 0,
    head_size_v: int | None = None,
) -> DenseKVLayout:
    """A layout of the tests' sizes."""
    row = kind.side_bytes(HEAD_SIZE) + kind.side_bytes(head_size_v or HEAD_SIZE)
    return DenseKVLayout(
        block_size=block_size,
        num_kv_heads=NUM_HEADS,
        head_size=HEAD_SIZE,
        head_size_v=head_size_v,
        model_dtype=DType(kind.model_dtype),
        cache_dtype=CacheDType(kind.cache_dtype),
        packing=packing,
        order=order,
        page_size_padded=block_size * NUM_HEADS * row + padding if padding else None,
    )


def row_starts(
    packing: KVPacking, order: KVOrder, block_size: int, k_bytes: int, v_bytes: int, page_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """First byte of K and of V of every (block, token, head): ``[N, P, Hk]`` each."""
    block = torch.arange(NUM_BLOCKS).view(-1, 1, 1)
    token = torch.arange(block_size).view(1, -1, 1)
    head = torch.arange(NUM_HEADS).view(1, 1, -1)
    row = token * NUM_HEADS + head if order is KVOrder.NHD else head * block_size + token
    page = block * page_bytes
    if packing is KVPacking.PACKED:
        start = page + row * (k_bytes + v_bytes)
        return start, start + k_bytes
    plane = block_size * NUM_HEADS * k_bytes
    return page + row * k_bytes, page + plane + row * v_bytes


def random_bytes(*shape: int) -> torch.Tensor:
    """Any bytes; every format can hold any bits."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def as_bytes(view: torch.Tensor) -> torch.Tensor:
    """The bytes of a view, elementwise, with a trailing axis of bytes."""
    flat = view.contiguous()
    return flat.view(torch.uint8).reshape(*view.shape, view.element_size())


def places(starts: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Byte offsets of every byte of ``view``, whose rows start at ``starts``."""
    size = view.element_size()
    row = torch.arange(math.prod(view.shape[starts.dim() :]) * size)
    return (starts[..., None] + row).reshape(*view.shape, size)


def storage_bytes(cache: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The raw bytes under a cache tensor."""
    raw = torch.empty(0, dtype=torch.uint8)
    return raw.set_(cache.untyped_storage(), 0, (nbytes,), (1,))


def logical_and_order(
    packing: KVPacking, order: KVOrder, block_size: int, width: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Logical shape and stride order, as the design documents them; ``width`` is K's and V's."""
    if packing is KVPacking.PACKED:
        shape: tuple[int, ...] = (NUM_BLOCKS, NUM_HEADS, block_size, 2 * width)
        return shape, ((0, 2, 1, 3) if order is KVOrder.NHD else (0, 1, 2, 3))
    shape = (NUM_BLOCKS, 2, block_size, NUM_HEADS, width)
    return shape, ((0, 1, 2, 3, 4) if order is KVOrder.NHD else (0, 1, 3, 2, 4))


def strides_by_permute(
    shape: tuple[int, ...], order: tuple[int, ...], page_elements: int
) -> tuple[int, ...]:
    """Strides of a contiguous tensor, cut from padded pages and permuted to ``shape`` by torch."""
    physical = [shape[axis] for axis in order]
    pages = torch.empty(shape[0], page_elements)[:, : math.prod(physical[1:])]
    inverse = [order.index(axis) for axis in range(len(order))]
    return pages.unflatten(1, physical[1:]).permute(inverse).stride()


@kinds
@packings
@orders
@block_sizes
@paddings
def test_dense_shape_strides_and_bytes(
    kind: Kind, packing: KVPacking, order: KVOrder, block_size: int, padding: int
) -> None:
    layout = dense_layout(kind, packing, order, block_size, padding)
    content = 2 * block_size * NUM_HEADS * kind.side_bytes(HEAD_SIZE)
    page = content + padding
    size = kind.storage.itemsize
    shape, stride_order = logical_and_order(
        packing, order, block_size, kind.side_bytes(HEAD_SIZE) // size
    )
    assert layout.logical_shape(NUM_BLOCKS) == shape
    assert layout.stride_order() == stride_order
    assert layout.strides(NUM_BLOCKS) == strides_by_permute(shape, stride_order, page // size)
    assert (layout.content_bytes, layout.page_size_bytes) == (content, page)
    assert layout.nbytes(NUM_BLOCKS) == NUM_BLOCKS * page
    assert layout.storage_dtype.torch == kind.storage
    cache = layout.allocate(NUM_BLOCKS)
    assert (tuple(cache.shape), cache.stride(), cache.dtype) == (
        shape,
        layout.strides(NUM_BLOCKS),
        kind.storage,
    )
    assert cache.untyped_storage().nbytes() == NUM_BLOCKS * page
    assert not storage_bytes(cache, NUM_BLOCKS * page).any()


@kinds
@packings
@orders
@block_sizes
@paddings
def test_dense_views_write_and_read_the_bytes_of_their_own_rows(
    kind: Kind, packing: KVPacking, order: KVOrder, block_size: int, padding: int
) -> None:
    layout = dense_layout(kind, packing, order, block_size, padding)
    cache = layout.allocate(NUM_BLOCKS)
    raw = storage_bytes(cache, layout.nbytes(NUM_BLOCKS))
    side = kind.side_bytes(HEAD_SIZE)
    data_bytes = side - kind.scale_bytes
    starts = row_starts(packing, order, block_size, side, side, layout.page_size_bytes)
    views = layout.split(cache)
    expected = torch.zeros_like(raw)
    shape = (NUM_BLOCKS, block_size, NUM_HEADS, HEAD_SIZE // kind.packing)
    for start, data, scale in zip(starts, views[:2], views[2:], strict=True):
        assert data is not None
        assert (tuple(data.shape), data.dtype) == (shape, kind.element)
        written = random_bytes(*shape, data.element_size())
        data.copy_(written.view(kind.element)[..., 0])
        expected[places(start, data)] = written
        assert (scale is not None) == bool(kind.scale_bytes)
        if scale is not None:
            assert (tuple(scale.shape), scale.dtype) == (shape[:3], torch.float32)
            values = torch.rand(shape[:3])
            scale.copy_(values)
            expected[places(start + data_bytes, scale)] = as_bytes(values)
    # Every other byte, page padding included, is still zero.
    assert torch.equal(raw, expected)

    raw.copy_(random_bytes(len(raw)))
    for start, data, scale in zip(starts, views[:2], views[2:], strict=True):
        assert data is not None
        assert torch.equal(as_bytes(data), raw[places(start, data)])
        if scale is not None:
            assert torch.equal(as_bytes(scale), raw[places(start + data_bytes, scale)])


@kinds
@orders
def test_packed_rows_may_hold_values_narrower_than_keys(kind: Kind, order: KVOrder) -> None:
    layout = dense_layout(kind, KVPacking.PACKED, order, 16, head_size_v=16)
    cache = layout.allocate(NUM_BLOCKS)
    raw = storage_bytes(cache, layout.nbytes(NUM_BLOCKS))
    raw.copy_(random_bytes(len(raw)))
    k_bytes, v_bytes = kind.side_bytes(HEAD_SIZE), kind.side_bytes(16)
    assert layout.content_bytes == 16 * NUM_HEADS * (k_bytes + v_bytes)
    k_start, v_start = row_starts(
        KVPacking.PACKED, order, 16, k_bytes, v_bytes, layout.page_size_bytes
    )
    views = layout.split(cache)
    assert views.value.shape[-1] == 16 // kind.packing
    assert torch.equal(as_bytes(views.key), raw[places(k_start, views.key)])
    assert torch.equal(as_bytes(views.value), raw[places(v_start, views.value)])


@kinds
@packings
def test_views_of_a_cache_that_is_already_in_the_element_type(
    kind: Kind, packing: KVPacking
) -> None:
    layout = dense_layout(kind, packing, KVOrder.NHD, 16)
    cache = layout.allocate(NUM_BLOCKS)
    raw = storage_bytes(cache, layout.nbytes(NUM_BLOCKS))
    raw.copy_(random_bytes(len(raw)))
    typed = split_kv_cache(cache.view(kind.element), layout.row)
    untyped = layout.split(cache)
    assert typed.key.dtype == untyped.key.dtype == kind.element
    for ours, theirs in zip(typed, untyped, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.data_ptr() == theirs.data_ptr()
            assert torch.equal(as_bytes(ours), as_bytes(theirs))


@pytest.mark.parametrize(
    ("order", "stride_order", "layered"),
    [("NHD", (0, 2, 1, 3), (1, 0, 3, 2, 4)), ("HND", (0, 1, 2, 3), (1, 0, 2, 3, 4))],
)
@kinds
@block_sizes
def test_packed_is_the_shape_of_vllm_026(
    kind: Kind,
    block_size: int,
    order: str,
    stride_order: tuple[int, ...],
    layered: tuple[int, ...],
) -> None:
    # vLLM: (B, H, N, 2 * hs), hs in elements of the cache tensor; per-token-head rows count four
    # more bytes for the scale, int4 half the values.
    layout = dense_layout(kind, KVPacking.PACKED, KVOrder(order), block_size)
    hs = HEAD_SIZE // kind.packing + kind.scale_bytes
    assert layout.logical_shape(NUM_BLOCKS) == (NUM_BLOCKS, NUM_HEADS, block_size, 2 * hs)
    assert layout.stride_order() == stride_order
    assert layout.stride_order(include_num_layers_dimension=True) == layered


def test_split_with_layers_keeps_the_layers_of_a_block_side_by_side() -> None:
    layout = dense_layout(KINDS[0], KVPacking.SPLIT, KVOrder.NHD, 16)
    assert layout.stride_order(include_num_layers_dimension=True) == (1, 0, 2, 3, 4, 5)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    packing=st.sampled_from(KVPacking),
    order=st.sampled_from(KVOrder),
    block_size=st.integers(1, 24),
    num_kv_heads=st.integers(1, 5),
    head_size=st.integers(1, 4).map(lambda n: 8 * n),
    padding=st.sampled_from([None, 0, 4, 100]),
)
def test_every_element_of_a_dense_cache_has_bytes_of_its_own_in_its_page(
    kind: Kind,
    packing: KVPacking,
    order: KVOrder,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    padding: int | None,
) -> None:
    content = 2 * block_size * num_kv_heads * kind.side_bytes(head_size)
    layout = DenseKVLayout(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        model_dtype=DType(kind.model_dtype),
        cache_dtype=CacheDType(kind.cache_dtype),
        packing=packing,
        order=order,
        page_size_padded=None if padding is None else content + padding,
    )
    cache = layout.allocate(2)
    taken: list[torch.Tensor] = []
    for view in layout.split(cache):
        if view is not None:
            first = view.data_ptr() - cache.data_ptr()
            start = torch.full(view.shape, first)
            for axis, (extent, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
                steps = torch.arange(extent) * stride * view.element_size()
                start += steps.view([-1 if axis == i else 1 for i in range(view.dim())])
            taken.append((start[..., None] + torch.arange(view.element_size())).reshape(2, -1))
    for block, offsets in enumerate(torch.cat(taken, dim=1)):
        inside = offsets - block * layout.page_size_bytes
        assert torch.equal(inside.sort().values, torch.arange(content))


# -- Latent caches.

# Format -> (field, element, bytes from the row's start, count), for a latent of 256, rope of 32.
LATENT_FIELDS = {
    LatentFormat.BF16: [("nope", torch.bfloat16, 0, 256), ("rope", torch.bfloat16, 512, 32)],
    LatentFormat.FP8_NOPE_FP8_ROPE: [
        ("nope", torch.float8_e4m3fn, 0, 256),
        ("rope", torch.float8_e4m3fn, 256, 32),
    ],
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: [
        ("nope", torch.float8_e4m3fn, 0, 256),
        ("scale", torch.float32, 256, 2),
        ("rope", torch.bfloat16, 264, 32),
    ],
}
ROW_BYTES = {
    LatentFormat.BF16: 576,
    LatentFormat.FP8_NOPE_FP8_ROPE: 288,
    LatentFormat.FP8_NOPE_BLOCK_SCALE_BF16_ROPE: 328,
}
latent_formats = pytest.mark.parametrize("latent", list(ROW_BYTES))


def latent_layout(latent: LatentFormat, block_size: int, **fields: int) -> LatentKVLayout:
    """A latent layout of the tests' sizes."""
    return LatentKVLayout.model_validate(
        {
            "block_size": block_size,
            "format": latent,
            "kv_lora_rank": 256,
            "qk_rope_head_dim": 32,
            **fields,
        }
    )


@latent_formats
@block_sizes
@pytest.mark.parametrize("padding", ["dense", "padded", "aligned"])
def test_latent_shape_strides_and_bytes(
    latent: LatentFormat, block_size: int, padding: str
) -> None:
    content = block_size * ROW_BYTES[latent]
    fields, page = {
        "dense": ({}, content),
        "padded": ({"page_size_padded": content + 64}, content + 64),
        "aligned": ({"page_alignment": 1000}, math.ceil(content / 1000) * 1000),
    }[padding]
    layout = latent_layout(latent, block_size, **fields)
    dtype = torch.bfloat16 if latent is LatentFormat.BF16 else torch.uint8
    width = ROW_BYTES[latent] // dtype.itemsize
    assert layout.logical_shape(NUM_BLOCKS) == (NUM_BLOCKS, block_size, width)
    assert layout.stride_order() == (0, 1, 2)
    assert layout.stride_order(include_num_layers_dimension=True) == (1, 0, 2, 3)
    assert layout.strides(NUM_BLOCKS) == (page // dtype.itemsize, width, 1)
    assert (layout.content_bytes, layout.page_size_bytes) == (content, page)
    assert layout.nbytes(NUM_BLOCKS) == NUM_BLOCKS * page
    assert layout.allocate(NUM_BLOCKS).dtype == dtype


@latent_formats
@block_sizes
@paddings
def test_latent_fields_write_and_read_the_bytes_of_their_own_rows(
    latent: LatentFormat, block_size: int, padding: int
) -> None:
    content = block_size * ROW_BYTES[latent]
    fields = {"page_size_padded": content + padding} if padding else {}
    layout = latent_layout(latent, block_size, **fields)
    cache = layout.allocate(NUM_BLOCKS)
    raw = storage_bytes(cache, layout.nbytes(NUM_BLOCKS))
    page = torch.arange(NUM_BLOCKS)[:, None] * (content + padding)
    rows = page + torch.arange(block_size) * ROW_BYTES[latent]
    expected = torch.zeros_like(raw)
    views = layout.fields(cache)
    assert list(views) == [name for name, *_ in LATENT_FIELDS[latent]]
    for name, dtype, offset, count in LATENT_FIELDS[latent]:
        view = views[name]
        assert (tuple(view.shape), view.dtype) == ((NUM_BLOCKS, block_size, count), dtype)
        written = random_bytes(*view.shape, dtype.itemsize)
        view.copy_(written.view(dtype)[..., 0])
        expected[places(rows + offset, view)] = written
    assert torch.equal(raw, expected)


@paddings
def test_planar_indexer_pages_hold_all_data_and_then_all_scales(padding: int) -> None:
    page_bytes = 64 * 132 + padding
    layout = LatentKVLayout(
        block_size=64,
        format=LatentFormat.INDEXER_FP8,
        kv_lora_rank=128,
        page_size_padded=page_bytes if padding else None,
    )
    assert layout.logical_shape(NUM_BLOCKS) == (NUM_BLOCKS, 64, 132)
    assert layout.page_size_bytes == page_bytes
    cache = layout.allocate(NUM_BLOCKS)
    raw = storage_bytes(cache, layout.nbytes(NUM_BLOCKS))
    page = torch.arange(NUM_BLOCKS)[:, None] * page_bytes
    token = torch.arange(64)
    starts = {"data": page + token * 128, "scale": page + 64 * 128 + token * 4}
    views = layout.fields(cache)
    assert views["data"].dtype == torch.float8_e4m3fn
    assert views["scale"].dtype == torch.float32
    assert tuple(views["data"].shape) == (NUM_BLOCKS, 64, 128)
    assert tuple(views["scale"].shape) == (NUM_BLOCKS, 64, 1)
    expected = torch.zeros_like(raw)
    for name, start in starts.items():
        written = random_bytes(*views[name].shape, views[name].element_size())
        views[name].copy_(written.view(views[name].dtype)[..., 0])
        expected[places(start, views[name])] = written
    assert torch.equal(raw, expected)


def test_the_bf16_format_stores_the_model_dtype() -> None:
    layout = LatentKVLayout(
        block_size=4, format=LatentFormat.BF16, model_dtype=DType.FLOAT32, kv_lora_rank=8
    )
    assert layout.storage_dtype is DType.FLOAT32
    assert layout.content_bytes == 4 * (8 + 64) * 4


# -- Buffers and refusals.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bfloat16])
def test_a_view_covers_the_leading_bytes_of_a_larger_buffer(dtype: torch.dtype) -> None:
    layout = dense_layout(KINDS[0], KVPacking.PACKED, KVOrder.NHD, 16)
    buffer = torch.zeros(layout.nbytes(4), dtype=dtype)
    cache = layout.view(buffer, NUM_BLOCKS)
    cache.fill_(1)
    used = layout.nbytes(NUM_BLOCKS)
    assert cache.data_ptr() == buffer.data_ptr()
    assert buffer.view(torch.uint8)[:used].view(torch.bfloat16).eq(1).all()
    assert not buffer.view(torch.uint8)[used:].any()


def test_a_buffer_that_is_too_small_is_refused() -> None:
    layout = dense_layout(KINDS[0], KVPacking.PACKED, KVOrder.NHD, 16)
    buffer = torch.zeros(layout.nbytes(NUM_BLOCKS) - 1, dtype=torch.uint8)
    expected = f"buffer has {buffer.numel()} bytes; 3 blocks of 1536 need 4608"
    with pytest.raises(ValueError, match=expected):
        layout.view(buffer, NUM_BLOCKS)


def test_a_buffer_with_gaps_is_refused_and_not_copied() -> None:
    layout = dense_layout(KINDS[0], KVPacking.PACKED, KVOrder.NHD, 16)
    buffer = torch.zeros(layout.nbytes(NUM_BLOCKS), 2, dtype=torch.uint8)[:, 0]
    with pytest.raises(ValueError, match=r"buffer must be contiguous, got strides \(2,\)"):
        layout.view(buffer, NUM_BLOCKS)


def test_every_byte_of_a_new_cache_can_be_set() -> None:
    cache = dense_layout(KINDS[0], KVPacking.SPLIT, KVOrder.HND, 16, padding=64).allocate(
        NUM_BLOCKS, fill_byte=0xFF
    )
    assert cache.isnan().all()
    assert storage_bytes(cache, NUM_BLOCKS * (1536 + 64)).eq(0xFF).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size_padded": 1535}, "at least the content's 1536 bytes, got 1535"),
        ({"page_size_padded": 1537}, r"multiple of 2 bytes.*\(auto\), got 1537"),
        (
            {"cache_dtype": "int8_per_token_head", "page_size_padded": 1153},
            r"multiple of 4 bytes.*\(int8_per_token_head\), got 1153",
        ),
        (
            {"packing": "split", "head_size_v": 4},
            r"split layout needs head_size_v equal to head_size \(8\), got 4; use the packed",
        ),
        ({"block_size": 0}, "block_size"),
        ({"order": "DHN"}, "'NHD' or 'HND'"),
    ],
)
def test_impossible_dense_layouts_are_refused(fields: dict[str, object], message: str) -> None:
    good = {"block_size": 16, "num_kv_heads": 3, "head_size": 8, "packing": "packed"}
    with pytest.raises(SpecError, match=message):
        DenseKVLayout.model_validate({**good, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "indexer_fp8"}, "block_size must be 64 for indexer_fp8, got 16"),
        ({"page_alignment": 512, "page_size_padded": 36864}, "page_alignment or page_size_padded"),
        ({"page_size_padded": 100}, "at least the content's 18432 bytes, got 100"),
        ({"page_alignment": 5}, r"page_alignment must be a multiple of 2 bytes.*\(bf16\), got 5"),
        (
            {"format": "fp8_nope_block_scale_bf16_rope", "page_size_padded": 10498},
            "page_size_padded must be a multiple of 4 bytes.*got 10498",
        ),
    ],
)
def test_impossible_latent_layouts_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        LatentKVLayout.model_validate({"block_size": 16, "format": "bf16", **fields})


@pytest.mark.parametrize("shape", [(3, 16, 8), (3, 3, 16, 8, 8), (1, 2, 3, 4, 5, 6)])
def test_a_dense_cache_of_another_rank_is_refused(shape: tuple[int, ...]) -> None:
    row = dense_layout(KINDS[0], KVPacking.PACKED, KVOrder.NHD, 16).row
    with pytest.raises(ValueError, match=r"kv_cache must be .*got \(" + str(shape[0])):
        split_kv_cache(torch.empty(shape, dtype=torch.bfloat16), row)


@pytest.mark.parametrize("shape", [(3, 3, 16, 15), (3, 3, 16, 17), (3, 2, 16, 3, 9)])
def test_a_dense_cache_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    row = dense_layout(KINDS[0], KVPacking.PACKED, KVOrder.NHD, 16).row
    with pytest.raises(ValueError, match=r"rows must hold 16 bytes of [kv] \(auto\), got"):
        split_kv_cache(torch.empty(shape, dtype=torch.bfloat16), row)


@pytest.mark.parametrize("shape", [(3, 16, 287), (3, 16, 1, 288), (48, 288)])
def test_a_latent_cache_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    row = latent_layout(LatentFormat.BF16, 16).row
    with pytest.raises(ValueError, match=r"\[num_blocks, block_size, 288\] for rows of 576 bytes"):
        latent_views(torch.empty(shape, dtype=torch.bfloat16), row)


def test_planar_pages_with_gaps_inside_are_refused() -> None:
    row = LatentFormat.INDEXER_FP8.row(128)
    cache = torch.zeros(2, 64, 136, dtype=torch.uint8)[..., :132]
    with pytest.raises(ValueError, match=r"planar rows \(indexer_fp8\) need blocks dense inside"):
        latent_views(cache, row)


def test_the_layout_base_leaves_everything_to_its_leaves() -> None:
    base = DenseKVLayout.__mro__[1](block_size=16)
    for name in ("row", "storage_dtype", "content_bytes"):
        with pytest.raises(NotImplementedError):
            getattr(base, name)
    for call in (lambda: base.logical_shape(1), base.stride_order):
        with pytest.raises(NotImplementedError):
            call()
