"""RoPE fused with the latent cache write: rotation in place, rows written, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attn.backends.base import AttentionBackend
from attn.registry import AttentionBackendEnum
from attn.testing.batches import POISON_BYTE, Indexer, Projection, is_poison
from attn.testing.cases import device_for
from attn.testing.stored_rows import decode_latent, half_ulp
from builders.launch.call import KernelCall
from specs.dtypes import CacheDType, DType
from specs.kv_cache import MLAAttentionSpec

HEADS, RANK, NOPE, ROPE = 3, 64, 32, 32
BLOCKS, BLOCK_SIZE = 3, 16
SLOTS = (17, 16, -1, 47, 31, 18, -1)
POSITIONS = (3, 0, 63, 17, 5, 40, 64)
"""Positions of tokens; the last is outside the table and belongs to a padding row."""
TURNED = 6
SCALE = 0.037

BACKENDS = [
    row.get_class()
    for row in AttentionBackendEnum
    if device_for(row) is not None and row.get_class().is_mla()
]
IS_NEOX = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
ON = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.get_name())


@dataclass
class Step:
    """What a step rotates and writes: parts of wider rows, as projections leave them."""

    query: Tensor
    """Queries ``[T, H, P + r]``."""
    rows: Tensor
    """Latent rows ``[T, L + r]``."""
    cache: Tensor
    """The cache ``[N, P, row]``."""

    @property
    def q_pe(self) -> Tensor:
        return self.query[..., NOPE:]

    @property
    def k_pe(self) -> Tensor:
        return self.rows[:, RANK:]


def device_of(backend: type[AttentionBackend]) -> torch.device:
    device = device_for(AttentionBackendEnum[backend.get_name()])
    assert device is not None
    return device


def step_of(dtype: torch.dtype, cache_dtype: CacheDType, device: torch.device) -> Step:
    generator = torch.Generator().manual_seed(5)

    def rows(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 3).to(dtype)

    spec = MLAAttentionSpec(
        block_size=BLOCK_SIZE,
        dtype=DType.parse(dtype),
        cache_dtype=cache_dtype,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
    )
    cache = spec.layout().allocate(BLOCKS)
    cache.view(torch.uint8).fill_(POISON_BYTE)
    count = len(SLOTS)
    parts = rows(count, HEADS, NOPE + ROPE), rows(count, RANK + ROPE), cache
    return Step(*(part.to(device) for part in parts))


def impl_of(backend: type[AttentionBackend], cache_dtype: CacheDType, **given: Any) -> Any:
    impl_cls: Any = backend.get_impl_cls()
    sizes = {"kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
    return impl_cls(
        *(HEADS, RANK + ROPE, 0.1, 1, None, None, cache_dtype.value),
        qk_head_dim=NOPE + ROPE,
        v_head_dim=NOPE,
        kv_b_proj=Projection(torch.zeros(HEADS * 2 * NOPE, RANK)),
        indexer=Indexer(torch.zeros(8, 4, dtype=torch.int32)),
        **sizes,
        **given,
    )


def table_of(dtype: torch.dtype) -> Tensor:
    """The table ``[64, r]``: cosines, then sines."""
    frequencies = 100.0 ** (-torch.arange(0, ROPE, 2).double() / ROPE)
    angles = torch.arange(64).double()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def rotated(x: Tensor, table: Tensor, is_neox: bool) -> Tensor:
    """Rotated rows by definition, float64 ``[T, heads, r]``: pairs are complex numbers, turned by
    an angle.
    """
    x = x.double().cpu()
    first, second = x.chunk(2, -1) if is_neox else (x[..., 0::2], x[..., 1::2])
    cos, sin = table.double().cpu()[list(POSITIONS[:TURNED])].chunk(2, -1)
    turned = torch.complex(first, second)
    turned[:TURNED] *= torch.complex(cos, sin)[:, None]
    parts = (turned.real, turned.imag)
    return torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)


def update(
    backend: type[AttentionBackend],
    step: Step,
    table: Tensor,
    is_neox: bool,
    cache_dtype: CacheDType,
    keys: Callable[[Tensor], Tensor] = lambda k_pe: k_pe,
    **given: Any,
) -> Any:
    """Make one call, and return the impl that made it."""
    device, impl = step.rows.device, impl_of(backend, cache_dtype)
    assert impl.fused_rope_kvcache_supported()
    impl.do_rope_and_kv_cache_update(
        step.q_pe,
        step.rows[:, :RANK],
        keys(step.k_pe),
        torch.tensor(POSITIONS, device=device),
        table.to(device),
        is_neox,
        step.cache,
        torch.tensor(SLOTS, device=device),
        cache_dtype.value,
        torch.tensor(SCALE, device=device),
        **given,
    )
    return impl


def check_turned(actual: Tensor, before: Tensor, table: Tensor, is_neox: bool) -> None:
    """Check values that are rounded once from fp32, where a rotation is two products and a sum."""
    expected = rotated(before, table, is_neox)
    error = (actual.double().cpu() - expected).abs()
    largest = before.double().cpu().abs().amax(-1, keepdim=True)
    band = 3 * torch.finfo(torch.float32).eps * largest
    assert bool((error <= half_ulp(expected, actual.dtype) + band).all())
    # A padding row keeps its bits.
    assert torch.equal(actual[TURNED:].cpu(), before[TURNED:].cpu())


def written(step: Step) -> Tensor:
    """The written cache as uint8 ``[N * P, bytes of a row]``."""
    return step.cache.view(torch.uint8).cpu().reshape(BLOCKS * BLOCK_SIZE, -1)


@ON
@IS_NEOX
@pytest.mark.parametrize(
    "cache_dtype", [CacheDType.AUTO, CacheDType.FLOAT16, CacheDType.FP8], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_both_rotary_parts_turn_in_place_and_rows_are_written(
    backend: type[AttentionBackend],
    dtype: torch.dtype,
    table_dtype: torch.dtype,
    cache_dtype: CacheDType,
    is_neox: bool,
) -> None:
    table, device = table_of(table_dtype), device_of(backend)
    step, before = (step_of(dtype, cache_dtype, device) for _ in range(2))
    impl = update(backend, step, table, is_neox, cache_dtype)
    check_turned(step.q_pe, before.q_pe, table, is_neox)
    check_turned(step.k_pe[:, None], before.k_pe[:, None], table, is_neox)
    assert torch.equal(step.query[..., :NOPE], before.query[..., :NOPE])
    assert torch.equal(step.rows[:, :RANK], before.rows[:, :RANK])
    # The call writes what the plain cache write makes of the rotated rows.
    slots, scale = torch.tensor(SLOTS, device=device), torch.tensor(SCALE, device=device)
    parts = step.rows[:, :RANK], step.k_pe
    impl.do_kv_cache_update(*parts, before.cache, slots, cache_dtype.value, scale)
    assert torch.equal(written(step), written(before))
    rows = written(step)
    assert [not is_poison(row) for row in rows] == [slot in SLOTS for slot in range(len(rows))]
    # The rotated rows themselves are right.
    live = [slot for slot in SLOTS if slot >= 0]
    kept = torch.tensor([slot >= 0 for slot in SLOTS])
    stored = decode_latent(rows[live], RANK, cache_dtype.value, dtype, torch.tensor(SCALE))
    for x, found in zip(parts, stored, strict=True):
        assert not bool(found.misses(x.cpu()[kept]).any())


@IS_NEOX
@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_has_the_bits_of_its_twin(
    dtype: torch.dtype, cache_dtype: CacheDType, is_neox: bool
) -> None:
    found = {}
    for backend in BACKENDS:
        device = device_of(backend)
        if device.type == "cuda":
            pytest.skip("compiled kernels may fuse a product and a sum")
        step = step_of(dtype, cache_dtype, device)
        update(backend, step, table_of(torch.float32), is_neox, cache_dtype)
        found[backend.get_name()] = (step.query, step.rows, written(step))
    first = found["TORCH_REF_MLA"]
    for parts in found.values():
        assert all(map(torch.equal, parts, first))


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8], ids=str)
def test_it_is_one_launch(cache_dtype: CacheDType, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = AttentionBackendEnum["TRITON_MLA"].get_class()
    if backend not in BACKENDS:
        pytest.skip("its kernels do not run here")
    launches: list[KernelCall] = []
    launch = KernelCall.launch_through_triton

    def noted(call: KernelCall) -> None:
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    step = step_of(torch.float16, cache_dtype, device_of(backend))
    update(backend, step, table_of(torch.float32), True, cache_dtype)
    assert len(launches) == 1


@ON
def test_rotary_keys_may_have_an_axis_of_heads(backend: type[AttentionBackend]) -> None:
    device, table = device_of(backend), table_of(torch.float32)
    steps = [step_of(torch.float16, CacheDType.AUTO, device) for _ in range(2)]
    update(backend, steps[0], table, True, CacheDType.AUTO)
    update(backend, steps[1], table, True, CacheDType.AUTO, keys=lambda k_pe: k_pe[:, None])
    assert torch.equal(steps[0].rows, steps[1].rows)
    assert torch.equal(written(steps[0]), written(steps[1]))


@ON
def test_fp8_rows_saturate_and_may_be_scaled_already(backend: type[AttentionBackend]) -> None:
    step = step_of(torch.float16, CacheDType.FP8, device_of(backend))
    step.rows[0] = 1000.0
    step.rows[1] = -1000.0
    step.rows[3] = 2.0
    update(backend, step, table_of(torch.float32), True, CacheDType.FP8, skip_scale=True)
    rows = written(step).view(torch.float8_e4m3fn).float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    assert bool((rows[SLOTS[0], :RANK] == largest).all())
    assert bool((rows[SLOTS[1], :RANK] == -largest).all())
    assert bool((rows[SLOTS[3], :RANK] == 2.0).all())


@ON
def test_a_layer_that_shares_anothers_cache_writes_none(backend: type[AttentionBackend]) -> None:
    impl = impl_of(backend, CacheDType.AUTO, kv_sharing_target_layer_name="layer.0")
    assert not impl.fused_rope_kvcache_supported()
