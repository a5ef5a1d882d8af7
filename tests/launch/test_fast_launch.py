"""Launches past Triton: the same arguments for the same kernel, and Triton's wherever in doubt.

Triton's own route runs here down to the C function, which is replaced by one that takes notes; so
are the compiler, whose kernels are numbers, and the driver.
"""

from __future__ import annotations

import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import triton.language as tl
import triton.runtime
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel, LazyDict
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, compute_cache_key

from attn.kernels.dense.decode import decode_kernel
from attn.kernels.dense.hopper_decode.kernel import hopper_decode_kernel
from attn.kernels.dense.hopper_prefill.kernel import hopper_prefill_kernel
from attn.kernels.dense.prefill import prefill_kernel
from attn.kernels.latent.decode import mla_decode_kernel
from attn.kernels.latent.hopper_wide.kernel import hopper_mla_kernel
from attn.kernels.launch import KernelForm
from builders.buffers import GraphBuffers
from builders.launch import driver as driver_launch
from builders.launch import launcher as fast_launch
from builders.launch import prepared as prepared_launch
from builders.launch.call import collected_calls
from builders.launch.launcher import (
    MOST_PREPARED,
    Relauncher,
    Repeat,
    RepeatedLaunch,
    repeated_launch,
)
from builders.launch.prepared import GROUPS
from builders.splitkv import planner as split_kv
from builders.splitkv.device import plan as plan_kernels
from builders.splitkv.device.plan import plan_kernel
from builders.splitkv.planner import SplitPlanner
from builders.splitkv.record import Pointers, SplitLimits
from builders.splitkv.tiles import DenseShape
from tests.tools.gpus import hopper

STREAM = 7
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
FIXED = {"stride": 16, "scale": 0.5, "TILE": 32}


def source(
    desc,
    rows_ptr,
    total_ptr,
    starts_ptr,
    shares_ptr,
    counters_ptr,
    states_ptr,
    sums_ptr,
    query_ptr,
    table_ptr,
    sinks_ptr,
    stride,
    scale,
    count,
    size,
    TILE: tl.constexpr,
):
    """Stands for a kernel; it is never compiled."""


VARYING = ("desc", "plan", "query_ptr", "table_ptr", "sinks_ptr", "count", "size")


class Driver:
    """Of a GPU that is not here: it encodes descriptors as tuples and notes launches."""

    def __init__(self) -> None:
        self.device = 0
        self.encoded: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.utils = types.SimpleNamespace(
            fill_tma_descriptor=self.encode, fill_tma_descriptor_tiled=self.encode
        )

    def encode(self, address: int, *rest: Any) -> tuple[Any, ...]:
        self.encoded.append((address, *map(str, rest)))
        return self.encoded[-1]

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return STREAM + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launched(self) -> list[Any]:
        """The last launch as the GPU sees it: tensors are addresses, what hooks would see None."""
        words: list[Any] = []
        for word in self.launches[-1]:
            words += word if isinstance(word, tuple | list) else [word]
        return [
            word.data_ptr()
            if isinstance(word, torch.Tensor)
            else None
            if isinstance(word, knobs.HookChain | LazyDict)
            else word
            for word in words
        ]

    @property
    def was_past_triton(self) -> bool:
        """Of the last launch: Triton gives tensors to its C function."""
        words = [word for given in self.launches[-1] for word in self._flat(given)]
        return not any(isinstance(word, torch.Tensor) for word in words)

    @staticmethod
    def _flat(word: Any) -> Any:
        return word if isinstance(word, tuple | list) else [word]


class CFunction:
    """At the bottom of a launcher."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __call__(self, *words: Any) -> None:
        self.driver.launches.append(words)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.delenv("ATTN_RELAUNCH", raising=False)
    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    # The kernels here are none of a real driver's.
    monkeypatch.setattr(driver_launch, "driver_functions", lambda: None)
    return driver


def compiled_for(
    driver: Driver, signature: dict[str, str], number: int, options: Any = None
) -> Any:
    """What Triton would have compiled, with the launcher that it would have made."""
    meta = [
        {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [1], "fp4_padded": False}
        for kind in signature.values()
        if kind.startswith("tensordesc")
    ]
    metadata = types.SimpleNamespace(tensordesc_meta=meta)
    run: Any = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
    numbered = dict(enumerate(signature.values()))
    run.launch = nvidia.wrap_handle_tensordesc(CFunction(driver), numbered, meta)
    vars(run).update(
        num_ctas=1,
        global_scratch_size=0,
        global_scratch_align=1,
        profile_scratch_size=0,
        profile_scratch_align=1,
        launch_cooperative_grid=False,
        launch_pdl=getattr(options, "launch_pdl", False),
        gsan_enabled=False,
        arg_annotations="annotations",
        kernel_signature="signature",
    )
    kernel: Any = CompiledKernel.__new__(CompiledKernel)
    vars(kernel).update(
        src=types.SimpleNamespace(signature=signature),
        metadata=metadata,
        packed_metadata="packed",
        function=number,
        module=None,
        name="kernel",
        _run=run,
    )
    # Nothing is to be loaded.
    kernel._init_handles = lambda: None
    return kernel


def kernel_of(driver: Driver) -> Any:
    """A kernel whose compiler is :func:`compiled_for`, numbered from 100."""
    kernel = JITFunction(
        source,
        do_not_specialize=["count"],
        do_not_specialize_on_alignment=["table_ptr"],
    )
    numbers = itertools.count(100)

    def compile_(
        key: Any, signature: Any, device: int, constants: Any, options: Any, *rest: Any
    ) -> Any:
        compiled = compiled_for(driver, signature, next(numbers), options)
        kernel.device_caches[device][0][key] = compiled
        return compiled

    cast(Any, kernel)._do_compile = compile_
    return kernel


LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


def descriptor(rows: torch.Tensor, box: tuple[int, int] = (16, 64)) -> TensorDescriptor:
    return TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [*box], LAYOUT)


def tensor(dtype: torch.dtype = torch.float16, offset: int = 0) -> torch.Tensor:
    rows = torch.zeros(64, dtype=dtype)
    assert rows.data_ptr() % 16 == 0
    return rows[offset:]


def arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "desc": descriptor(torch.zeros(32, 64, dtype=torch.float16)),
        "plan": Pointers(*(tensor(torch.int32) for _ in GROUPS["plan"])),
        "query_ptr": tensor(),
        "table_ptr": tensor(torch.int32),
        "sinks_ptr": None,
        "count": 20,
        "size": 48,
    }
    return {**given, **changes}


def new_form(driver: Driver) -> KernelForm:
    return KernelForm(kernel_of(driver), FIXED, VARYING)


# -- The same as Triton.


@pytest.mark.parametrize("seed", range(4))
def test_random_launches_have_tritons_kernel_and_arguments(gpu: Driver, seed: int) -> None:
    dice = random.Random(seed)
    form, checked = new_form(gpu), new_form(gpu)
    rows = torch.zeros(32, 64, dtype=torch.float16)
    pools: dict[str, Callable[[], list[Any]]] = {
        "desc": lambda: [
            descriptor(rows),
            descriptor(rows[8:]),
            descriptor(torch.zeros(16, 64, dtype=torch.float16)),
            *dice.choice([[], [descriptor(rows, (8, 64)), descriptor(rows.bfloat16())]]),
        ],
        "plan": lambda: [
            Pointers(*(tensor(torch.int32) for _ in range(6)), tensor(torch.int32, offset))
            for offset in (0, 0, 4, 1)
        ],
        "query_ptr": lambda: [tensor(), tensor(offset=8), tensor(offset=1), None, tensor(offset=3)],
        "table_ptr": lambda: [tensor(torch.int32), tensor(torch.int32, 1), tensor(torch.int64)],
        "sinks_ptr": lambda: [None, None, tensor(torch.float32)],
        "count": lambda: [0, 1, 2, 16, 17, -5, 2**31 - 1, 2**31, 2**40, 2**63],
        "size": lambda: [1, 16, 48, 3, 2**31],
    }
    known: list[dict[str, Any]] = []
    past = 0
    for _ in range(400):
        # Mostly a launch seen before with one argument changed: what is reused wrongly shows.
        given = arguments() if not known or dice.random() < 0.1 else {**dice.choice(known[:6])}
        name = dice.choice(VARYING)
        given[name] = dice.choice(pools[name]())
        known.append(given)
        form.call((3, 2), given).launch()
        launched = gpu.launched()
        past += gpu.was_past_triton
        record = checked.call((3, 2), given).record
        record.launch()
        assert gpu.launched()[5:] == launched[5:]
        kernels, keys, _, _, binder = form.kernel.device_caches[0]
        extra = {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
        if hasattr(knobs.compilation, "fpsan_homomorphic_casts"):
            extra["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
        _, specialization, options = binder(*record.arguments.values(), **OPTIONS, **extra)
        wanted = kernels[compute_cache_key(keys, specialization, options)]
        assert launched[:5] == [3, 2, 1, STREAM, wanted.function]
    assert past > 100


@pytest.mark.parametrize(
    "change",
    [
        {"query_ptr": tensor(offset=1)},
        {"query_ptr": tensor(torch.bfloat16)},
        {"query_ptr": None},
        {"sinks_ptr": tensor(torch.float32)},
        {"table_ptr": tensor(torch.int64)},
        {"count": 2**31},
        {"size": 1},
        {"size": 17},
        {"desc": descriptor(torch.zeros(32, 64, dtype=torch.float16), (8, 64))},
        {"plan": Pointers(*(tensor(torch.int32, 1) for _ in GROUPS["plan"]))},
    ],
    ids=lambda change: "".join(change),
)
def test_what_triton_specialises_on_is_compiled_anew_and_learnt(
    gpu: Driver, change: dict[str, Any]
) -> None:
    form = new_form(gpu)
    for given in (arguments(), arguments(**change)):
        form.call((1,), given).launch()
        assert not gpu.was_past_triton
        form.call((1,), given).launch()
        assert gpu.was_past_triton
    first, second, third, fourth = (words[4] for words in gpu.launches)
    assert first == second != third == fourth


def test_what_it_does_not_specialise_on_is_not_compiled_anew(gpu: Driver) -> None:
    form = new_form(gpu)
    form.call((1,), arguments()).launch()
    for change in ({"table_ptr": tensor(torch.int32, 1)}, {"count": 1}, {"count": 16}):
        form.call((1,), arguments(**change)).launch()
        assert gpu.was_past_triton


def test_only_so_many_specialisations_are_kept(gpu: Driver) -> None:
    form = new_form(gpu)
    for size in range(3, 3 + 2 * MOST_PREPARED):
        form.call((1,), arguments(size=size)).launch()
    assert len(form.relauncher._prepared) == MOST_PREPARED
    form.call((1,), arguments(size=3)).launch()
    assert gpu.was_past_triton


def test_every_launch_is_tritons_if_that_is_asked_for(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new_form(gpu).relauncher._learns
    monkeypatch.setenv("ATTN_RELAUNCH", "0")
    assert not new_form(gpu).relauncher._learns


def test_descriptors_are_encoded_once(gpu: Driver) -> None:
    form, rows = new_form(gpu), torch.zeros(32, 64, dtype=torch.float16)
    desc = descriptor(rows)
    form.call((1,), arguments(desc=desc)).launch()
    gpu.encoded.clear()
    for _ in range(3):
        form.call((1,), arguments(desc=desc)).launch()
    assert gpu.encoded == []
    other = descriptor(rows[8:])
    for _ in range(3):
        form.call((1,), arguments(desc=other)).launch()
    assert [address for address, *_ in gpu.encoded] == [rows[8:].data_ptr()]
    assert gpu.was_past_triton


def test_no_tensor_is_kept_alive(gpu: Driver) -> None:
    form, given = new_form(gpu), arguments()
    form.call((1,), given).launch()
    form.call((1,), given).launch()
    kept = weakref.ref(given["query_ptr"]), weakref.ref(given["table_ptr"])
    gpu.launches.clear()
    del given
    assert [one() for one in kept] == [None, None]


# -- Repeats.

GIVEN = ("of another kernel", "query_ptr", "count", "sinks_ptr", "plan", "table_ptr", "desc")


def repeated(gpu: Driver, **changes: Any) -> tuple[KernelForm, Repeat | None]:
    form, given = new_form(gpu), arguments(**changes)
    call = form.call((3,), given)
    call.launch()
    return form, call.repeat(GIVEN)


def given_of(repeat: Repeat, values: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    plan, query, table = values["plan"], values["query_ptr"], values["table_ptr"]
    described = repeat.encoded("desc", values["desc"])
    addresses = query.data_ptr(), table.data_ptr()
    rest = None, plan.addresses, addresses[1]
    return (5, addresses[0], values["count"]), rest, (described,)


def test_a_repeat_has_tritons_arguments(gpu: Driver) -> None:
    form, repeat = repeated(gpu)
    assert repeat is not None
    rows = torch.zeros(32, 64, dtype=torch.float16)
    for change in (
        {},
        {"query_ptr": tensor(offset=8)},
        {"table_ptr": tensor(torch.int32, 1)},
        {"count": 1},
        {"count": 2**31 - 1},
        {"desc": descriptor(rows[8:])},
        {"plan": Pointers(*(tensor(torch.int32) for _ in GROUPS["plan"]))},
    ):
        values = arguments(**change)
        assert repeat.launch(4, given_of(repeat, values))
        assert gpu.was_past_triton
        launched = gpu.launched()
        form.call((4,), values).record.launch()
        assert gpu.launched() == launched


@pytest.mark.parametrize(
    "change", [{"query_ptr": tensor(offset=1)}, {"count": 2**31}, {"count": -1}]
)
def test_a_repeat_leaves_what_is_specialised_otherwise(gpu: Driver, change: dict[str, Any]) -> None:
    _, repeat = repeated(gpu)
    assert repeat is not None
    launches = len(gpu.launches)
    assert not repeat.launch(4, given_of(repeat, arguments(**change)))
    assert len(gpu.launches) == launches


def test_what_a_repeat_does_not_compare_is_not_repeated(gpu: Driver) -> None:
    form, given = new_form(gpu), arguments()
    call = form.call((1,), given)
    assert call.repeat(GIVEN) is None
    call.launch()
    assert call.repeat(("size",)) is None
    for change in ({"query_ptr": tensor(offset=1)}, {"count": 2**31}):
        assert repeated(gpu, **change)[1] is None


def test_a_repeat_encodes_descriptors_of_its_kind(gpu: Driver) -> None:
    _, repeat = repeated(gpu)
    assert repeat is not None
    rows = torch.zeros(32, 64, dtype=torch.float16)
    assert repeat.encoded("desc", descriptor(rows)) is not None
    assert repeat.encoded("desc", descriptor(rows, (8, 64))) is None


# -- Triton's.


@contextmanager
def hook_in_chain(form: KernelForm, gpu: Driver) -> Iterator[None]:
    chain, hook = knobs.runtime.launch_enter_hook, lambda *_: None
    chain.add(hook)
    yield
    chain.remove(hook)


@contextmanager
def hook_after(form: KernelForm, gpu: Driver) -> Iterator[None]:
    chain, hook = knobs.runtime.launch_exit_hook, lambda *_: None
    chain.add(hook)
    yield
    chain.remove(hook)


@contextmanager
def single_hook(form: KernelForm, gpu: Driver) -> Iterator[None]:
    with knobs.runtime.scope():
        cast(Any, knobs.runtime).launch_enter_hook = lambda *_: None
        yield


@contextmanager
def debugging(form: KernelForm, gpu: Driver) -> Iterator[None]:
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        yield


@contextmanager
def hook_of_kernel(form: KernelForm, gpu: Driver) -> Iterator[None]:
    form.kernel.add_pre_run_hook(lambda *_, **__: None)
    yield
    form.kernel.pre_run_hooks.clear()


@contextmanager
def other_device(form: KernelForm, gpu: Driver) -> Iterator[None]:
    gpu.device = 1
    yield
    gpu.device = 0


@pytest.mark.parametrize(
    "disturbed",
    [hook_in_chain, hook_after, single_hook, debugging, hook_of_kernel, other_device],
)
def test_launches_that_someone_watches_or_of_another_device_are_tritons(
    gpu: Driver, disturbed: Any
) -> None:
    form, given = new_form(gpu), arguments()
    call = form.call((1,), given)
    call.launch()
    repeat = call.repeat(GIVEN)
    assert repeat is not None
    with disturbed(form, gpu):
        form.call((1,), given).launch()
        assert not gpu.was_past_triton
        assert not repeat.launch(1, given_of(repeat, given))
    form.call((1,), given).launch()
    assert gpu.was_past_triton
    assert gpu.launches[-1][3:5] == gpu.launches[0][3:5]


def test_torch_is_asked_for_the_device_without_what_it_does_besides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    usual = types.SimpleNamespace(get_current_device=torch.cuda.current_device)
    assert prepared_launch._device_getter(usual)() == 3
    assert (
        prepared_launch._device_getter(types.SimpleNamespace(get_current_device=lambda: 5))() == 5
    )


def test_a_device_is_learnt_on_its_own(gpu: Driver) -> None:
    form, given = new_form(gpu), arguments()
    for device in (0, 1, 0, 1):
        gpu.device = device
        form.call((1,), given).launch()
        assert gpu.launches[-1][3] == STREAM + device
    assert gpu.was_past_triton


def test_another_driver_is_tritons(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    form, given = new_form(gpu), arguments()
    form.call((1,), given).launch()
    repeat = form.call((1,), given).repeat(GIVEN)
    assert repeat is not None
    words = given_of(repeat, given)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    assert not repeat.launch(1, words)
    form.call((1,), given).launch()
    assert not gpu.was_past_triton


@pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_with_scratch_memory_is_tritons(gpu: Driver, size: str) -> None:
    form, given = new_form(gpu), arguments()
    record = form.call((1,), given).record
    compiled = record.launch()
    setattr(compiled.run, size, 8)
    form.relauncher.learn(compiled, form._values(given), record.arguments)
    assert form.relauncher._prepared == []


def test_a_launcher_that_does_something_else_is_tritons(gpu: Driver) -> None:
    form, given = new_form(gpu), arguments()
    record = form.call((1,), given).record
    values = form._values(given)

    def learns(change: Callable[[Any], None]) -> bool:
        compiled = record.launch()
        compiled = compiled_for(gpu, compiled.src.signature, 5)
        change(compiled)
        relauncher = Relauncher(form.kernel, form.varying)
        relauncher.learn(compiled, values, record.arguments)
        return bool(relauncher._prepared)

    class Launcher(nvidia.CudaLauncher):
        """Of another backend."""

    class CudaLauncher(nvidia.CudaLauncher):
        """Of a version that gives the C function more."""

        def __call__(self, *given: Any) -> None:
            super().__call__(*given, "more")

    more = CudaLauncher

    class CudaLauncher(nvidia.CudaLauncher):  # type: ignore[no-redef]
        """Of a version that gives it less."""

        def __call__(self, *given: Any) -> None:
            self.launch(*given[:5])

    assert learns(lambda compiled: None)
    assert not learns(lambda compiled: setattr(compiled.run, "__class__", Launcher))
    assert not learns(lambda compiled: setattr(compiled.run, "__class__", more))
    assert not learns(lambda compiled: setattr(compiled.run, "__class__", CudaLauncher))
    assert not learns(lambda compiled: setattr(compiled.run, "launch", lambda *_: None))
    assert not learns(lambda compiled: delattr(compiled.metadata, "tensordesc_meta"))
    assert not learns(lambda compiled: vars(compiled.src).clear())
    relauncher = Relauncher(form.kernel, form.varying)
    relauncher.learn(None, values, record.arguments)
    relauncher.learn(object(), values, record.arguments)
    assert relauncher._prepared == []


def test_arguments_of_other_types_are_tritons(gpu: Driver) -> None:
    form = new_form(gpu)
    for size in (True, 0.5):
        for _ in range(2):
            form.call((1,), arguments(size=size)).launch()
            assert not gpu.was_past_triton


def test_collected_and_empty_launches_are_not_made(gpu: Driver) -> None:
    form, given = new_form(gpu), arguments()
    form.call((1,), given).launch()
    with collected_calls() as calls:
        form.call((2,), given).launch()
    form.call((2, 0), given).launch()
    assert [call.grid for call in calls] == [(2,)]
    assert len(gpu.launches) == 1


def test_a_group_stands_for_its_members(gpu: Driver) -> None:
    given = arguments()
    record = new_form(gpu).call((1,), given).record
    assert list(record.arguments) == list(record.kernel.arg_names)
    members = [record.arguments[name] for name in GROUPS["plan"]]
    assert all(one is other for one, other in zip(members, given["plan"].tensors, strict=True))


def test_what_is_not_learnt_once_is_not_tried_again(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, given = new_form(gpu), arguments()
    tried: list[Any] = []

    def bottom(*what: Any) -> Any:
        tried.append(what)
        raise AttributeError

    monkeypatch.setattr(prepared_launch, "_bottom_of", bottom)
    for _ in range(3):
        form.call((1,), given).launch()
        assert not gpu.was_past_triton
    assert len(tried) == 1


def test_a_triton_without_its_knobs_is_not_learnt_from(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_launch, "_KNOBS", ("launch_enter_hook", "unheard_of"))
    form, given = new_form(gpu), arguments()
    for _ in range(2):
        form.call((1,), given).launch()
        assert not gpu.was_past_triton


def test_nothing_is_watched_as_a_rule() -> None:
    assert not fast_launch._is_watched()


# -- Launches of builders.


def test_a_repeated_launch_goes_past_triton_with_the_same_arguments(gpu: Driver) -> None:
    launch = RepeatedLaunch(kernel_of(gpu), FIXED)
    given = arguments(table_ptr=tensor(torch.int32, 1))
    del given["plan"]
    given = (
        {"desc": given.pop("desc")} | {name: tensor(torch.int32) for name in GROUPS["plan"]} | given
    )
    sinks = {"sinks_ptr": tensor()}
    for change, is_known in (({}, False), ({"count": 21}, True), (sinks, False), (sinks, True)):
        given |= change
        launch((3, 2), *given.values())
        assert gpu.was_past_triton == is_known
    past = gpu.launched()
    RepeatedLaunch(kernel_of(gpu), FIXED)((3, 2), *given.values())
    assert gpu.launched()[5:] == past[5:]


def test_a_repeated_launch_shares_no_tensors(gpu: Driver) -> None:
    with pytest.raises(TypeError, match="table_ptr must vary"):
        RepeatedLaunch(kernel_of(gpu), FIXED | {"table_ptr": tensor(torch.int32)})


def test_launches_with_the_same_fixed_arguments_are_the_same(gpu: Driver) -> None:
    kernel = kernel_of(gpu)
    launch = repeated_launch(kernel, **FIXED)
    assert repeated_launch(kernel, **FIXED) is launch
    name, value = next((name, value) for name, value in FIXED.items() if type(value) is int)
    assert repeated_launch(kernel, **(FIXED | {name: value + 1})) is not launch
    assert repeated_launch(kernel_of(gpu), **FIXED) is not launch


def test_a_repeated_launch_that_is_collected_is_not_made(gpu: Driver) -> None:
    given = arguments(count=20)
    del given["plan"]
    given = (
        {"desc": given.pop("desc")} | {name: tensor(torch.int32) for name in GROUPS["plan"]} | given
    )
    launch = RepeatedLaunch(kernel_of(gpu), FIXED, num_warps=2, waits=True)
    for _ in range(2):
        with collected_calls() as calls:
            launch((3,), *given.values())
        (call,) = calls
        assert (call.grid, call.options["num_warps"], call.waits) == ((3,), 2, True)
        assert [*call.arguments] == [*call.kernel.arg_names]
        assert not gpu.launches
    launch((3,), *given.values())
    with collected_calls() as calls:
        launch((3,), *given.values())
    assert (len(calls), len(gpu.launches)) == (1, 1)


# -- The kernels of this library.


def test_a_plan_goes_past_triton_with_the_same_arguments(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_kv, "interprets", lambda: True)
    kernel = JITFunction(cast("Any", plan_kernel).fn, **waived(plan_kernel))

    def compile_(
        key: Any, signature: Any, device: int, constants: Any, options: Any, *rest: Any
    ) -> Any:
        compiled = compiled_for(gpu, signature, 100, options)
        kernel.device_caches[device][0][key] = compiled
        return compiled

    monkeypatch.setattr(cast("Any", kernel), "_do_compile", compile_)
    monkeypatch.setattr(plan_kernels, "plan_kernel", kernel)
    shape, limits = DenseShape(4, 1, 64, 64, 2, 16), SplitLimits(64, 64, 512, None)
    first, second = (
        SplitPlanner(shape, hopper(132), limits, 1, GraphBuffers("cpu")) for _ in range(2)
    )
    second.buffers = first.buffers
    starts, lens = torch.arange(65, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    for count, is_known in ((2, False), (3, True), (40, False), (2, True), (64, True)):
        first.fill(starts[: count + 1], lens[:count])
        assert gpu.was_past_triton == is_known
    past = gpu.launched()
    second.fill(starts, lens)
    assert not gpu.was_past_triton
    assert gpu.launched()[5:] == past[5:]


@pytest.mark.parametrize(
    "kernel",
    [
        decode_kernel,
        prefill_kernel,
        mla_decode_kernel,
        hopper_decode_kernel,
        hopper_prefill_kernel,
        hopper_mla_kernel,
    ],
    ids=lambda kernel: kernel.__name__,
)
def test_lengths_specialise_no_kernel_and_groups_stand_together(kernel: Any) -> None:
    params = {param.name: param for param in JITFunction(kernel.fn, **waived(kernel)).params}
    for name in {"table_row", "num_ranges", "num_reqs", "programs"} & params.keys():
        assert params[name].do_not_specialize, name
    members = [name for name in params if name in GROUPS["plan"]]
    if members:
        start = [*params].index(members[0])
        assert (*params,)[start : start + len(members)] == GROUPS["plan"]


def waived(kernel: Any) -> dict[str, Any]:
    """What the kernel was declared with; under the interpreter it is another class's."""
    kept = getattr(kernel, "kwargs", None) or vars(kernel)
    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    return {name: kept.get(name) for name in names}
