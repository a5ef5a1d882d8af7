"""Forwards of one layer, one after the other, launch with the right arguments and past Triton.

A launch has the same arguments as that of a layer that never ran before. The first launch of each
compiled variant goes through Triton, and the others go past it.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton.runtime.jit import JITFunction

from attn.impls.base import LayerScales
from attn.impls.dense.triton_attn import TritonAttentionImpl
from attn.kernels.dense import launcher as dense
from attn.kernels.dense.decode import decode_kernel
from attn.kernels.dense.hopper_decode import launch as decode_launch
from attn.kernels.dense.hopper_decode.kernel import hopper_decode_kernel
from attn.kernels.dense.hopper_prefill import launch
from attn.kernels.dense.hopper_prefill.kernel import hopper_prefill_kernel
from attn.kernels.dense.prefill import prefill_kernel
from builders.batch import CommonAttentionMetadata
from builders.dense.record import TritonAttentionMetadata
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.launch.call import collected_calls
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig, Kernels
from specs.kv_cache import FullAttentionSpec
from tests.launch.test_launcher import Driver, compiled_for, gpu, hook_in_chain, waived

__all__ = ["gpu"]
HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 128, 16, 16
WITHOUT_HOPPER = 1
"""Number of the variants below that the Hopper kernels refuse: a query with rows not aligned."""
PLAIN = ("plain", "fp8", "per head")
STARTS_AHEAD = 6
"""Place of the C function's argument that lets a kernel start ahead: it is behind the grid, the
stream, the kernel, and whether programs run together."""
KINDS = {
    "hopper": ("hopper", "hopper", CacheDType.AUTO),
    "plain": ("triton", "triton", CacheDType.AUTO),
    "fp8": ("triton", "triton", CacheDType.FP8),
    "per head": ("triton", "triton", CacheDType.INT8_PER_TOKEN_HEAD),
}


class Bench:
    """A layer and its steps, over kernels whose launches a stand-in driver notes."""

    def __init__(
        self, driver: Driver, kind: str, monkeypatch: pytest.MonkeyPatch, **options: Any
    ) -> None:
        self.driver, self.options = driver, options
        self.past = 0
        """Number of launches that went past Triton."""
        prefill, decode, self.cache_dtype = KINDS[kind]
        places = [
            (dense, decode_kernel),
            (dense, prefill_kernel),
            (launch, hopper_prefill_kernel),
            (decode_launch, hopper_decode_kernel),
        ]
        numbers = itertools.count(100)
        for module, kernel in places:
            fresh = JITFunction(cast(Any, kernel).fn, **waived(kernel))
            name = fresh.fn.__name__
            monkeypatch.setattr(cast(Any, fresh), "_do_compile", self._compiler(fresh, numbers))
            monkeypatch.setattr(module, name, fresh)
        self.spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
            dtype=DType.FLOAT16,
            cache_dtype=self.cache_dtype,
        )
        config = EngineConfig(
            max_model_len=BLOCK * BLOCKS,
            max_num_seqs=4,
            max_num_batched_tokens=256,
            num_heads=HEADS,
            kernels=Kernels.own(cast(Any, prefill), cast(Any, decode)),
        )
        self.builder = TritonAttentionMetadataBuilder(self.spec, ["layer.0"], config, "cpu")
        self.cache = self.spec.layout().allocate(BLOCKS)
        self.layer = LayerScales.of()
        self.impl = self.new_impl()

    def _compiler(self, kernel: Any, numbers: Any) -> Callable[..., Any]:
        def compile_(
            key: Any, signature: Any, device: int, constants: Any, options: Any, *rest: Any
        ) -> Any:
            compiled = compiled_for(self.driver, signature, next(numbers), options)
            kernel.device_caches[device][0][key] = compiled
            return compiled

        return compile_

    def new_impl(self) -> TritonAttentionImpl:
        slopes = self.options.get("alibi_slopes")
        given = {name: x for name, x in self.options.items() if name != "alibi_slopes"}
        sizes = (HEADS, SIZE, 0.2, KV_HEADS, slopes, None, self.cache_dtype)
        return TritonAttentionImpl(*sizes, **given)

    def step(self, *lens: int, **changes: Any) -> TritonAttentionMetadata:
        table = torch.arange(BLOCKS, dtype=torch.int32).repeat(len(lens), 1)
        batch = CommonAttentionMetadata.from_lengths(lens, lens, table, BLOCK)
        return replace(self.builder.build(0, batch), **changes)

    def step_ahead(self, *lens: int, ahead: bool = True) -> TritonAttentionMetadata:
        """A step whose portable split-KV kernel may start while the kernel before it still runs.

        With ``ahead=False`` it may not, whatever GPU the builder has found.
        """
        step = self.step(*lens)
        assert step.split is not None
        return replace(step, split=replace(step.split, waits=ahead))

    def forward(self, impl: TritonAttentionImpl, given: dict[str, Any]) -> list[list[Any]]:
        """The launches of a forward as the GPU sees them."""
        before = len(self.driver.launches)
        rows, cache = (given["query"], None, None), given.get("cache", self.cache)
        arguments = (self.layer, *rows, cache, given["step"], given["output"])
        impl.forward(*arguments, given.get("output_scale"), output_lse=given.get("lse"))
        every, noted = self.driver.launches, []
        for end in range(before + 1, len(every) + 1):
            self.driver.launches = every[:end]
            noted.append(self.driver.launched())
            self.past += self.driver.was_past_triton
        self.driver.launches = every
        return noted


def rows_of(tokens: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(tokens, HEADS, SIZE, dtype=dtype)


def variants(bench: Bench) -> list[dict[str, Any]]:
    """Forwards that differ in everything that launches depend on."""
    base, long = bench.step(40), rows_of(48)
    count = 40 * HEADS * SIZE
    wide = torch.zeros(64, 3 * HEADS, SIZE, dtype=torch.float16)
    odd = [wide.flatten()[start : start + count].view(40, HEADS, SIZE) for start in (1, 3)]
    table = torch.zeros(1, 2 * BLOCKS, dtype=torch.int32)[:, :BLOCKS]
    quantised, few = (
        rows_of(40).to(torch.float8_e4m3fn),
        {"query": rows_of(4), "output": rows_of(4)},
    )
    changes: list[dict[str, Any]] = [
        {},
        {"query": rows_of(40)},
        {"query": long},
        {"query": long[:44]},
        {"query": wide[:40, :HEADS]},
        {"query": wide[:40, HEADS : 2 * HEADS]},
        {"query": odd[0]},
        {"output": rows_of(40)},
        {"output": wide[:40, :HEADS]},
        {"output": rows_of(40).flatten(1)},
        {"output": rows_of(40, torch.float32)},
        {"output": odd[1]},
        {"output": quantised, "output_scale": torch.ones(1)},
        {"lse": torch.zeros(40, HEADS)},
        {"lse": torch.zeros(40, 2 * HEADS)[:, :HEADS]},
        {"cache": bench.spec.layout().allocate(BLOCKS)},
        {"cache": bench.spec.layout().allocate(2 * BLOCKS)},
        {"step": bench.step(20, 20)},
        {"step": bench.step(40, block_table=table)},
        {"step": bench.step(40, block_table=base.block_table.long())},
        {"step": bench.step(40, seq_lens=base.seq_lens.long())},
        {"step": bench.step(40, query_start_loc=base.query_start_loc.long())},
        {"step": bench.step(40, causal=False)},
        {"step": bench.step(40, causal=torch.ones(1, dtype=torch.bool))},
        {"step": bench.step(40, mm_ranges=torch.zeros(1, 2, 2, dtype=torch.int32))},
        {"step": bench.step(40, mm_ranges=torch.zeros(1, 3, 2, dtype=torch.int32))},
        {"step": bench.step(40, mm_ranges=torch.zeros(1, 3, 2, dtype=torch.int64))},
        {"step": bench.step(40, causal=torch.ones(1, dtype=torch.int32))},
        {"step": bench.step(40, causal=False, first_positions=torch.zeros(1, dtype=torch.int32))},
        {"step": bench.step(40, causal=False, first_positions=torch.zeros(1, dtype=torch.int64))},
        {"step": bench.step(1, 39)},
        {"step": bench.step(1, 2), **few},
        {"step": bench.step(1, 1, 1, 1), **few},
        {"step": bench.step(1, 2, causal=False), **few},
        {"step": bench.step_ahead(1, 2), **few},
        {"step": bench.step_ahead(1, 1, 1, 1), **few},
    ]
    common = {"step": base, "query": rows_of(40), "output": rows_of(40)}
    return [{**common, **change} for change in changes]


@pytest.mark.parametrize(
    ("kind", "features"),
    [*itertools.product(KINDS, ("", "sinks")), *((kind, "alibi_slopes") for kind in PLAIN)],
)
def test_launches_are_those_of_a_layer_that_never_ran(
    gpu: Driver, kind: str, features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {features: torch.ones(HEADS)} if features else {}
    bench, dice = Bench(gpu, kind, monkeypatch, **options), random.Random(kind)
    expected: list[tuple[dict[str, Any], list[list[Any]]]] = []
    refused = 0
    for given in variants(bench):
        try:
            expected.append((given, bench.forward(bench.new_impl(), given)))
        except ValueError:
            refused += 1
    # A Hopper kernel that is wanted by name raises for launches that it does not serve.
    assert refused == (WITHOUT_HOPPER if kind == "hopper" else 0)
    bench.past, made = 0, 0
    for _ in range(300):
        given, launches = dice.choice(expected)
        for _ in range(dice.randrange(1, 4)):
            assert bench.forward(bench.impl, given) == launches
            made += len(launches)
    # The first launch of each variant goes through Triton, and so do launches of variants that a
    # launcher has no room to keep.
    assert bench.past > 0.8 * made


def common(bench: Bench) -> dict[str, Any]:
    return {"step": bench.step(1, 39), "query": rows_of(40), "output": rows_of(40)}


@pytest.mark.parametrize("kind", ["hopper", "plain"])
def test_the_second_forward_goes_past_triton(
    gpu: Driver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, kind, monkeypatch)
    for number in range(4):
        # Each forward has other tensors and another record.
        bench.forward(bench.impl, common(bench))
        assert bench.past == 2 * number


@pytest.mark.parametrize(("kind", "ahead"), [("hopper", True), ("plain", True), ("plain", False)])
def test_what_starts_ahead_does_so_past_triton_too(
    gpu: Driver, kind: str, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, kind, monkeypatch)
    for number in range(4):
        step = bench.step_ahead(1, 2, ahead=ahead)
        given = {"step": step, "query": rows_of(4), "output": rows_of(4)}
        (words,) = bench.forward(bench.impl, given)
        assert words[STARTS_AHEAD] is ahead
        assert gpu.was_past_triton == (number > 0)


ALONE = {"prefill": ((40,), 40), "decodes": ((1, 2), 4)}
"""Lengths of steps with requests of one kind only, and rows of their query and output."""


def alone(bench: Bench, kind: str) -> dict[str, Any]:
    lens, rows = ALONE[kind]
    return {"step": bench.step(*lens), "query": rows_of(rows), "output": rows_of(rows)}


@pytest.mark.parametrize("rows", ALONE)
def test_known_forwards_are_watched_checked_and_collected(
    gpu: Driver, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, "hopper", monkeypatch)
    given = alone(bench, rows)
    for _ in range(5):
        bench.forward(bench.impl, given)
    with hook_in_chain(cast(Any, None), gpu):
        bench.forward(bench.impl, given)
        assert not gpu.was_past_triton
    with collected_calls() as calls:
        assert bench.forward(bench.impl, given) == []
    assert len(calls) == 1
    fewer = {**given, "query": given["query"][:1]}
    with pytest.raises(ValueError, match="query"):
        bench.forward(bench.impl, fewer)
    bench.forward(bench.impl, given)
    assert gpu.was_past_triton


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("before", [0, 2, 5])
def test_what_a_layer_is_given_later_is_seen(
    gpu: Driver, name: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, "plain", monkeypatch)
    given = alone(bench, "decodes")
    for value in (None, torch.ones(HEADS), torch.ones(HEADS), None):
        setattr(bench.impl, name, value)
        fresh = bench.new_impl()
        setattr(fresh, name, value)
        launches = bench.forward(fresh, given)
        for _ in range(before or 5):
            assert bench.forward(bench.impl, given) == launches


def test_scales_are_compared_one_by_one(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(gpu, "fp8", monkeypatch)
    given = alone(bench, "prefill")
    scale = torch.ones(1)
    both = LayerScales(scale, scale, scale)
    for layer in (bench.layer, both, bench.layer):
        bench.layer = layer
        launches = bench.forward(bench.new_impl(), given)
        for _ in range(5):
            assert bench.forward(bench.impl, given) == launches
    bench.layer = cast(Any, SimpleNamespace(_k_scale=None, _v_scale=scale))
    with pytest.raises(ValueError, match="k_scale"):
        bench.forward(bench.impl, given)


@pytest.mark.parametrize("rows", ALONE)
def test_a_block_table_with_gaps_is_refused_at_every_step(
    gpu: Driver, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gpu, "plain", monkeypatch)
    given = alone(bench, rows)
    table = given["step"].block_table
    gaps = table.repeat_interleave(2, dim=1)[:, ::2]
    odd = {**given, "step": replace(given["step"], block_table=gaps)}
    with pytest.raises(ValueError, match="block_table") as fresh:
        bench.forward(bench.new_impl(), odd)
    for _ in range(5):
        bench.forward(bench.impl, given)
    with pytest.raises(ValueError, match="block_table") as later:
        bench.forward(bench.impl, odd)
    assert str(later.value) == str(fresh.value)


def test_what_watches_launches_sees_them(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(gpu, "hopper", monkeypatch)
    given = common(bench)
    for _ in range(3):
        bench.forward(bench.impl, given)
    with hook_in_chain(cast(Any, None), gpu):
        bench.forward(bench.impl, given)
        assert not gpu.was_past_triton
    with collected_calls() as calls:
        assert bench.forward(bench.impl, given) == []
    assert len(calls) == 2
    bench.forward(bench.impl, given)
    assert gpu.was_past_triton


def test_every_launch_is_tritons_if_that_is_asked_for(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_RELAUNCH", "0")
    bench = Bench(gpu, "hopper", monkeypatch)
    given = common(bench)
    for _ in range(4):
        bench.forward(bench.impl, given)
        assert not gpu.was_past_triton
    assert bench.past == 0


def test_no_tensor_is_kept_alive(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(gpu, "hopper", monkeypatch)
    given = common(bench)
    for _ in range(4):
        bench.forward(bench.impl, given)
    step = given["step"]
    kept = [weakref.ref(x) for x in (given["query"], given["output"], step.block_table, step)]
    gpu.launches.clear()
    del given, step, bench.cache
    assert [one() for one in kept] == [None] * 4
    assert bench.impl._viewed is not None
    assert bench.impl._viewed.made is None
