"""Launches as data, and how little of a launch is prepared anew from call to call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attn.impls.base import LayerScales
from attn.impls.dense.triton_attn import TritonAttentionImpl
from attn.kernels.dense import launcher as dense
from attn.kernels.dense.launcher import DenseLauncher, prefill_call, split_call
from attn.kernels.dense.tensors import DenseLayer, DenseTensors
from builders.batch import CommonAttentionMetadata
from builders.dense.record import TritonAttentionMetadata
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.launch import call as kernel_calls
from builders.launch.call import (
    KernelCall,
    LaunchOptions,
    collected_calls,
    compile_calls,
    is_by_ptxas_13,
    triton_release,
)
from builders.launch.launcher import Launcher, launch
from specs.dtypes import CacheDType, DType
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 32, 16, 8


@dataclass(eq=False)
class Recorder:
    """A stand-in for a kernel, with the kernel's arguments; it notes its launches."""

    arg_names: Sequence[str]
    calls: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = field(
        default_factory=list
    )

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


@dataclass(frozen=True)
class Parameter:
    """A stand-in for a parameter of a kernel."""

    name: str
    is_constexpr: bool


class Compiled(Recorder):
    """A stand-in for a kernel that notes what it is compiled for, and in which thread."""

    @property
    def params(self) -> list[Parameter]:
        return [Parameter(name, name.isupper()) for name in self.arg_names]

    def warmup(self, grid: tuple[int, ...], **given: Any) -> None:
        self.calls.append((grid, (threading.get_ident(),), given))


# -- Records.


def test_launches_are_collected_where_that_is_asked_for() -> None:
    kernel = Recorder(["a"])
    call = KernelCall(kernel, (1,), {"a": 1})
    with collected_calls() as calls:
        launch(call)
        launch(KernelCall(kernel, (0,), {"a": 1}))
    assert calls == [call]
    assert kernel.calls == []
    launch(call)
    assert len(kernel.calls) == 1


def test_variants_compile_side_by_side_and_calls_of_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[int] = []

    @contextmanager
    def device(which: int) -> Iterator[None]:
        entered.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    one, other = Compiled(["a", "B"]), Compiled(["a", "B"])
    arguments = [(one, 1, 7), (one, 2, 7), (one, 1, 8), (other, 1, 7)]
    calls = [KernelCall(kernel, (1,), {"a": a, "B": b}, num_warps=8) for kernel, a, b in arguments]
    calls.append(KernelCall(one, (1,), {"a": 1, "B": 7}, num_warps=4))
    compile_calls(calls, torch.device("cuda", 3))
    assert len({call.variant for call in calls}) == 4
    assert entered == [3] * 4
    options = {"num_stages": 2, "enable_fp_fusion": True}
    same = [{**given} for _, _, given in one.calls if given["B"] == 7 and given["num_warps"] == 8]
    assert same == [{"a": a, "B": 7, "num_warps": 8, **options} for a in (1, 2)]
    assert [given for _, _, given in other.calls] == [{"a": 1, "B": 7, "num_warps": 8, **options}]
    assert len(one.calls) == 4


def test_kernels_are_loaded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 may give a kernel another kernel's C function where two threads load."""
    monkeypatch.setattr(torch.cuda, "device", lambda which: nullcontext())
    loading, most = [0], [0]

    class Loaded:
        @property
        def run(self) -> None:
            loading[0] += 1
            most[0] = max(most[0], loading[0])
            time.sleep(0.002)
            loading[0] -= 1

    class Slow(Compiled):
        def warmup(self, grid: tuple[int, ...], **given: Any) -> Loaded:
            return Loaded()

    calls = [KernelCall(Slow(["a"]), (1,), {"a": 1}) for _ in range(20)]
    compile_calls(calls, torch.device("cuda", 0))
    assert most == [1]


def test_a_compile_that_fails_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda which: nullcontext())

    class Broken(Compiled):
        def warmup(self, grid: tuple[int, ...], **given: Any) -> None:
            raise ValueError("no registers")

    with pytest.raises(ValueError, match="no registers"):
        compile_calls([KernelCall(Broken(["a"]), (1,), {"a": 1})], torch.device("cuda"))


def test_a_record_launches_by_name() -> None:
    kernel = Recorder(["a", "b"])
    launch(
        KernelCall(kernel, (2, 3), {"b": 1, "a": 2}, num_warps=8, num_stages=4, max_registers=128)
    )
    options = {"num_warps": 8, "num_stages": 4, "maxnreg": 128, "enable_fp_fusion": True}
    assert kernel.calls == [((2, 3), (), {"a": 2, "b": 1, **options})]


def test_a_launcher_gives_every_argument_in_the_kernels_order() -> None:
    kernel = Recorder(["a", "b", "c", "d"])
    launcher = Launcher(
        kernel, {"d": 4, "b": 2}, ["c", "a"], options=LaunchOptions(num_warps=8, num_stages=4)
    )
    launch = launcher.bind((5,), {"c": 3, "a": 1, "of another": 5})
    assert [*launch.call.arguments.items()] == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    launch.launch()
    launcher.bind((6,), {"a": None, "c": 30}).launch()
    options = {"num_warps": 8, "num_stages": 4, "enable_fp_fusion": True}
    first, second = {"a": 1, "b": 2, "c": 3, "d": 4}, {"a": None, "b": 2, "c": 30, "d": 4}
    assert kernel.calls == [((5,), (), first | options), ((6,), (), second | options)]


@pytest.mark.parametrize("by_13", [False, True])
def test_instructions_are_ordered_for_few_registers_where_that_helps(
    by_13: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_calls, "is_by_ptxas_13", lambda: by_13)
    launcher = Launcher(Recorder(["a"]), {}, ["a"], options=LaunchOptions(few_registers=True))
    assert ("sched4reg" in launcher.call((1,), [1]).options) == by_13
    assert "sched4reg" not in KernelCall(Recorder(["a"]), (1,), {"a": 1}).options


@pytest.mark.parametrize(
    ("version", "release", "by_13"),
    [
        ("3.6.0", (3, 6), False),
        ("3.8.1", (3, 8), False),
        ("3.9.0+git1", (3, 9), True),
        ("4.0", (4, 0), True),
    ],
)
def test_tritons_version_says_which_ptxas_it_takes(
    version: str, release: tuple[int, int], by_13: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    assert triton_release.__wrapped__() == release
    monkeypatch.setattr(kernel_calls, "triton_release", lambda: release)
    assert is_by_ptxas_13() == by_13


def test_an_empty_grid_launches_nothing() -> None:
    kernel = Recorder(["a"])
    launch(KernelCall(kernel, (0,), {"a": 1}))
    Launcher(kernel, {}, ["a"]).bind((3, 0), {"a": 1}).launch()
    assert kernel.calls == []


@pytest.mark.parametrize(
    ("varying", "problem"),
    [({"a"}, r"missing \['b'\], unknown \[\]"), ({"a", "b", "x"}, r"unknown \['x'\]")],
)
def test_a_launcher_names_every_argument_of_its_kernel(varying: set[str], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        Launcher(Recorder(["a", "b", "c"]), {"c": 1}, sorted(varying))


# -- Launches of dense attention.


@dataclass
class Bench:
    """A layer with a cache, on the CPU."""

    cache_dtype: CacheDType = CacheDType.AUTO

    def __post_init__(self) -> None:
        self.spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=KV_HEADS,
            head_size=SIZE,
            dtype=DType.FLOAT16,
            cache_dtype=self.cache_dtype,
        )
        config = EngineConfig(
            max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128, num_heads=HEADS
        )
        self.builder = TritonAttentionMetadataBuilder(self.spec, ["layer.0"], config, "cpu")
        self.cache = self.spec.layout().allocate(BLOCKS)
        self.impl = TritonAttentionImpl(HEADS, SIZE, 0.2, KV_HEADS, None, None, self.cache_dtype)
        self.layer = LayerScales.of()

    def record(self, *lens: int) -> TritonAttentionMetadata:
        table = torch.arange(BLOCKS, dtype=torch.int32).expand(len(lens), BLOCKS)
        batch = CommonAttentionMetadata.from_lengths(lens, lens, table, BLOCK)
        return self.builder.build(0, batch)

    def tensors(self, tokens: int, **changes: Any) -> DenseTensors:
        rows = torch.zeros(tokens, HEADS, SIZE, dtype=torch.float16)
        given = {
            "query": rows,
            "keys": self.spec.layout().split(self.cache),
            "output": torch.zeros_like(rows),
            "k_scale": self.layer._k_scale,
            "v_scale": self.layer._v_scale,
        }
        return DenseTensors(**{**given, **changes})

    def forward(self, record: TritonAttentionMetadata, tokens: int, **options: Any) -> None:
        rows = torch.zeros(tokens, HEADS, SIZE, dtype=torch.float16)
        output = torch.zeros(tokens, HEADS * SIZE, dtype=torch.float16)
        self.impl.forward(self.layer, rows, None, None, self.cache, record, output, **options)

    @property
    def variants(self) -> int:
        """Number of compiled variants that are prepared so far."""
        return sum(
            len(launcher._splits) + len(launcher._tiled)
            for launcher in self.impl._launchers.values()
        )


LAYER = DenseLayer(HEADS, KV_HEADS, SIZE, SIZE, 0.2, CacheDType.AUTO, True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Replaces both kernels by stand-ins that note their launches."""
    recorders = [Recorder(dense.decode_kernel.arg_names), Recorder(dense.prefill_kernel.arg_names)]
    monkeypatch.setattr(dense, "decode_kernel", recorders[0])
    monkeypatch.setattr(dense, "prefill_kernel", recorders[1])
    return recorders


def test_records_hold_every_argument_by_name() -> None:
    bench = Bench()
    record = bench.record(1, 30)
    for call in (
        split_call(LAYER, record, bench.tensors(31)),
        prefill_call(LAYER, record, bench.tensors(31)),
    ):
        assert list(call.arguments) == list(call.kernel.arg_names)
        assert call.arguments["GROUP"] == HEADS // KV_HEADS
        assert call.arguments["query_ptr"].shape == (31, HEADS, SIZE)


def test_an_fp8_output_is_written_as_bytes() -> None:
    bench = Bench()
    record = bench.record(1, 30)
    output = torch.zeros(31, HEADS, SIZE).to(torch.float8_e4m3fn)
    tensors = bench.tensors(31, output=output, output_scale=torch.ones(1))
    for call in (split_call(LAYER, record, tensors), prefill_call(LAYER, record, tensors)):
        assert call.arguments["out_ptr"].dtype == torch.uint8
        assert call.arguments["out_ptr"].data_ptr() == output.data_ptr()


def test_lengths_prepare_nothing_anew(kernels: list[Recorder]) -> None:
    bench = Bench()
    bench.forward(bench.record(1, 30), 31)
    assert bench.variants == 2
    for lens in ((1,), (1, 2, 3), (50,), (20, 1, 40), (64, 64)):
        bench.forward(bench.record(*lens), sum(lens))
        bench.forward(bench.record(*lens), sum(lens) + 5)
    assert bench.variants == 2
    # A step with only long queries has no work items for the split-KV kernel.
    assert len(kernels[0].calls) == 7
    # Latent prefill has a cache of its own, of as many pages as a step needs.
    bench.cache = bench.spec.layout().allocate(2 * BLOCKS)
    bench.forward(bench.record(1, 30), 31)
    assert bench.variants == 2


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.FP8])
def test_what_a_variant_depends_on_prepares_another(
    kernels: list[Recorder], cache_dtype: CacheDType
) -> None:
    bench, layer = Bench(cache_dtype), Bench(cache_dtype).impl
    launcher = layer._new_launcher(False)
    record = bench.record(1, 2)
    lse = torch.zeros(3, HEADS)
    ranges = torch.zeros(2, 3, 2, dtype=torch.int32)
    wide = torch.zeros(3, 2 * HEADS, SIZE, dtype=torch.float16)[:, :HEADS]
    quantised = torch.zeros(3, HEADS, SIZE, dtype=torch.float16).to(torch.float8_e4m3fn)
    variants: list[dict[str, Any]] = [
        {},
        {"query": wide},
        {"output": wide},
        {"output": torch.zeros(3, HEADS, SIZE)},
        {"lse": lse},
        {"output": quantised, "output_scale": torch.ones(1)},
        {"sinks": torch.zeros(HEADS)},
        {"alibi_slopes": torch.zeros(HEADS)},
    ]
    for variant in variants * 2:
        launcher.split(record, bench.tensors(3, **variant))
    assert len(launcher._splits) == len(variants)
    steps: list[dict[str, Any]] = [
        {"causal": False},
        {"causal": torch.ones(2, dtype=torch.bool)},
        {"mm_ranges": ranges},
        {"rswa_prefix_lens": torch.ones(2, dtype=torch.int32), "rswa_window": 5},
    ]
    for step in steps * 2:
        changed = replace(record, **step)
        launcher.split(changed, bench.tensors(3))
    assert len(launcher._splits) == len(variants) + len(steps)


def test_a_variant_is_what_is_prepared_from_scratch(kernels: list[Recorder]) -> None:
    bench = Bench()
    launcher = DenseLauncher(LAYER)
    launcher.attend(bench.record(1, 30), bench.tensors(31))
    record, tensors = bench.record(2, 60), bench.tensors(62)
    for again, fresh in (
        (launcher.split(record, tensors), split_call(LAYER, record, tensors)),
        (launcher.prefill(record, tensors), prefill_call(LAYER, record, tensors)),
    ):
        assert again.arguments.keys() == fresh.arguments.keys()
        assert again.grid == fresh.grid
        for name, value in again.arguments.items():
            other = fresh.arguments[name]
            same = value is other if isinstance(value, torch.Tensor) else value == other
            assert same, name


class Operations(TorchDispatchMode):
    """A mode of torch that notes every tensor operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.INT8_PER_TOKEN_HEAD])
def test_a_forward_makes_views_and_fills_in_few_arguments(
    kernels: list[Recorder], cache_dtype: CacheDType
) -> None:
    bench = Bench(cache_dtype)
    record = bench.record(1, 30)
    rows = torch.zeros(31, HEADS, SIZE, dtype=torch.float16)
    output, lse = torch.zeros(31, HEADS * SIZE, dtype=torch.float16), torch.zeros(31, HEADS)
    arguments = (bench.layer, rows, None, None, bench.cache, record, output)
    bench.impl.forward(*arguments, output_lse=lse)
    with Operations() as seen:
        bench.impl.forward(*arguments, output_lse=lse)
    assert set(seen.names) <= {"view", "detach"}
    assert len(seen.names) <= 10
    (launcher,) = bench.impl._launchers[False]._splits._known.values()
    launched = kernels[0].calls[-1][2]
    filled = sum(launched[name] is not old for name, old in launcher.arguments.items())
    assert filled <= 25


@pytest.mark.parametrize("cache_dtype", [CacheDType.AUTO, CacheDType.INT8_PER_TOKEN_HEAD])
def test_views_of_a_cache_are_made_once_and_let_go_with_it(
    kernels: list[Recorder], cache_dtype: CacheDType
) -> None:
    bench = Bench(cache_dtype)
    record = bench.record(1)
    bench.forward(record, 1)
    bench.forward(record, 1)
    (_, _, first), (_, _, second) = kernels[0].calls
    assert first["key_ptr"] is second["key_ptr"]
    other = torch.empty_like(bench.cache)
    bench.cache = other
    bench.forward(record, 1)
    assert kernels[0].calls[-1][2]["key_ptr"].data_ptr() == other.data_ptr()
    kernels[0].calls.clear()
    viewed: Any = bench.impl._viewed
    del first, second, other
    bench.cache = torch.empty(0)
    assert viewed.views is None
    assert viewed.made is None


# -- What does not fit.


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"query": torch.zeros(3, HEADS, SIZE, dtype=torch.float64)}, r"query .*float64"),
        ({"query": torch.zeros(3, HEADS + 1, SIZE).half()}, r"query .*\[\*, 4, 32\].*\[3, 5, 32\]"),
        ({"query": torch.zeros(3, SIZE, HEADS).half().mT}, r"query .*contiguous"),
        ({"output": torch.zeros(3, HEADS * SIZE + 8).half()}, r"output .*\[\*, 4, 32\]"),
        ({"output": torch.zeros(3, HEADS, SIZE, 2).half()[..., 0]}, r"output .*contiguous"),
        ({"output": torch.zeros(3, HEADS, SIZE).bfloat16()}, r"output .*float16.*got .*bfloat16"),
        ({"output_scale": torch.ones(1)}, r"output .*float8_e4m3fn with an output_scale"),
        ({"lse": torch.zeros(3, HEADS).half()}, r"output_lse .*float32.*float16"),
        ({"lse": torch.zeros(3, HEADS + 1)}, r"output_lse .*\[\*, 4\].*\[3, 5\]"),
        ({"lse": torch.zeros(HEADS, 3).T}, r"output_lse .*contiguous"),
        ({"k_scale": torch.ones(3)}, r"k_scale .*1 or 2 elements.*\[3\]"),
        ({"v_scale": torch.ones((), dtype=torch.float64)}, r"v_scale .*float64"),
        ({"k_scale": torch.ones(KV_HEADS)}, r"k_scale and v_scale .*got 2 and 1"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], problem: str) -> None:
    bench = Bench(CacheDType.FP8)
    launcher = bench.impl._new_launcher(False)
    with pytest.raises(ValueError, match=problem):
        launcher.attend(bench.record(1, 2), bench.tensors(3, **changes))


def test_an_output_scale_is_one_number() -> None:
    bench = Bench()
    quantised = torch.zeros(3, HEADS, SIZE).to(torch.float8_e4m3fn)
    for scale in (torch.ones(2), torch.ones((), dtype=torch.float64)):
        tensors = bench.tensors(3, output=quantised, output_scale=scale)
        with pytest.raises(ValueError, match="output_scale must be contiguous float32 of 1 "):
            split_call(LAYER, bench.record(1, 2), tensors)


def test_a_cache_of_other_heads_or_blocks_is_refused() -> None:
    bench, record = Bench(), Bench().record(1, 2)
    wrong = (
        ((BLOCK, KV_HEADS + 1), record, "kv_cache must have the layer's 2 KV heads, got 3"),
        ((24, KV_HEADS), record, "kv_cache must have blocks of 16 tokens, .* got blocks of 24"),
        ((24, KV_HEADS), replace(record, block_size=24), "block size of kv_cache .* of 16, got 24"),
    )
    for shape, step, problem in wrong:
        bench.cache = torch.zeros(BLOCKS, 2, *shape, SIZE, dtype=torch.float16)
        with pytest.raises(ValueError, match=problem):
            bench.forward(step, 3)


def test_fewer_rows_than_tokens_are_refused() -> None:
    bench = Bench()
    record = bench.record(1, 2)
    with pytest.raises(ValueError, match=r"at least num_actual_tokens \(3\) rows, got 2 and 2"):
        bench.forward(record, 2)
    with pytest.raises(ValueError, match=r"output_lse .*num_actual_tokens \(3\) rows, got 2"):
        bench.forward(record, 3, output_lse=torch.zeros(2, HEADS))
