"""Launches past Triton have the arguments that Triton would pass; doubtful ones go through Triton.

Triton's own code runs in these tests down to the C function, for which a stand-in takes notes. The
compiler and the driver have stand-ins too; compiled kernels are numbers.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from builders.buffers import GraphBuffers
from builders.launch import compiled as compiled_launch
from builders.launch import launcher as launch_module
from builders.launch.call import KernelCall, LaunchOptions, collected_calls
from builders.launch.compiled import is_known_triton
from builders.launch.launcher import MOST_SPECIALISED, Launcher, launch, launcher_of
from builders.launch.pointers import Pointers
from builders.launch.variants import Variants
from builders.splitkv import planner as split_kv
from builders.splitkv.device import plan as plan_kernels
from builders.splitkv.device.plan import plan_kernel
from builders.splitkv.planner import SplitPlanner
from builders.splitkv.record import PLAN_POINTERS, SplitLimits
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
    row: tl.int64,
    TILE: tl.constexpr,
):
    """A stand-in for a kernel; it is never compiled."""


VARYING = ("desc", "plan", "query_ptr", "table_ptr", "sinks_ptr", "count", "size", "row")


class Driver:
    """A stand-in for a GPU's driver: it encodes descriptors as tuples and notes launches."""

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
        """The last launch's arguments as the GPU sees them.

        Tensors are addresses, and arguments that only hooks would see are None.
        """
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
        """Whether the last launch went past Triton, which would pass tensors to its C function."""
        words = [word for given in self.launches[-1] for word in self._flat(given)]
        return not any(isinstance(word, torch.Tensor) for word in words)

    @staticmethod
    def _flat(word: Any) -> Any:
        return word if isinstance(word, tuple | list) else [word]


class CFunction:
    """A stand-in for the C function at the bottom of Triton's launcher; it notes launches."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __call__(self, *words: Any) -> None:
        self.driver.launches.append(words)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.delenv("ATTN_RELAUNCH", raising=False)
    driver = Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(launch_module, "_launchers", {})
    return driver


def compiled_for(
    driver: Driver, signature: dict[str, str], number: int, options: Any = None
) -> Any:
    """A compiled kernel as Triton would return it, with Triton's own launcher."""
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
    # The test must not load any code.
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
        "plan": Pointers(*(tensor(torch.int32) for _ in PLAN_POINTERS)),
        "query_ptr": tensor(),
        "table_ptr": tensor(torch.int32),
        "sinks_ptr": None,
        "count": 20,
        "size": 48,
        "row": 64,
    }
    return {**given, **changes}


def new_launcher(driver: Driver, is_typed: bool = False) -> Launcher:
    varying = VARYING[::-1] if is_typed else VARYING
    groups = {"plan": PLAN_POINTERS}
    return Launcher(kernel_of(driver), FIXED, varying, groups=groups, is_typed=is_typed)


# -- The same as Triton.


@pytest.mark.parametrize("is_typed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_launches_have_tritons_kernel_and_arguments(
    gpu: Driver, seed: int, is_typed: bool
) -> None:
    dice = random.Random(seed)
    launcher, checked = new_launcher(gpu, is_typed), new_launcher(gpu)
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
        "row": lambda: [0, 1, 2, 16, 64, 2**31, 2**40],
    }
    if is_typed:
        pools["query_ptr"] = lambda: [tensor(offset=offset) for offset in (0, 8, 1, 3)]
        pools["table_ptr"] = lambda: [tensor(torch.int32, offset) for offset in (0, 1)]
        pools["sinks_ptr"] = lambda: [None]
    known: list[dict[str, Any]] = []
    past = 0
    for _ in range(400):
        # Most launches repeat an earlier one with one argument changed: a wrong reuse shows.
        given = arguments() if not known or dice.random() < 0.1 else {**dice.choice(known[:6])}
        name = dice.choice(VARYING)
        given[name] = dice.choice(pools[name]())
        known.append(given)
        launcher.bind((3, 2), given).launch()
        launched = gpu.launched()
        past += gpu.was_past_triton
        record = checked.bind((3, 2), given).call
        record.launch_through_triton()
        assert gpu.launched()[5:] == launched[5:]
        kernels, keys, _, _, binder = launcher.kernel.device_caches[0]
        extra = {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
        if hasattr(knobs.compilation, "fpsan_homomorphic_casts"):
            extra["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
        _, specialization, options = binder(*record.arguments.values(), **OPTIONS, **extra)
        wanted = kernels[compute_cache_key(keys, specialization, options)]
        assert launched[:5] == [3, 2, 1, STREAM, wanted.function]
    assert past > 100


def test_values_come_in_the_launchers_order(gpu: Driver) -> None:
    given, names = arguments(), VARYING[::-1]
    launcher = Launcher(kernel_of(gpu), FIXED, names, groups={"plan": PLAN_POINTERS})
    assert launcher.varying == names
    for _ in range(2):
        launcher((3,), *(given[name] for name in names))
        launched = gpu.launched()
        new_launcher(gpu).bind((3,), given).launch()
        assert gpu.launched() == launched


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
        {"size": 2**31},
        {"row": 1},
        {"row": 17},
        {"desc": descriptor(torch.zeros(32, 64, dtype=torch.float16), (8, 64))},
        {"plan": Pointers(*(tensor(torch.int32, 1) for _ in PLAN_POINTERS))},
    ],
    ids=lambda change: "".join(change),
)
def test_what_triton_specialises_on_is_compiled_anew_and_learnt(
    gpu: Driver, change: dict[str, Any]
) -> None:
    launcher = new_launcher(gpu)
    for given in (arguments(), arguments(**change)):
        launcher.bind((1,), given).launch()
        assert not gpu.was_past_triton
        launcher.bind((1,), given).launch()
        assert gpu.was_past_triton
    first, second, third, fourth = (words[4] for words in gpu.launches)
    assert first == second != third == fourth


def test_what_it_does_not_specialise_on_is_not_compiled_anew(gpu: Driver) -> None:
    launcher = new_launcher(gpu)
    launcher.bind((1,), arguments()).launch()
    for change in (
        {"table_ptr": tensor(torch.int32, 1)},
        {"count": 1},
        {"count": 16},
        {"size": 32},
        {"size": 0},
    ):
        launcher.bind((1,), arguments(**change)).launch()
        assert gpu.was_past_triton


def test_only_so_many_specialisations_are_kept(gpu: Driver) -> None:
    launcher = new_launcher(gpu)
    # Integers that Triton specialises on, and dtypes that it compiles for.
    sizes, dtypes = (1, 3, 16, 2**31), (torch.float16, torch.int32, torch.int64)
    for size, dtype in itertools.product(sizes, dtypes):
        launcher.bind((1,), arguments(size=size, query_ptr=tensor(dtype))).launch()
    assert len(launcher._compiled) == MOST_SPECIALISED
    launcher.bind((1,), arguments(size=1)).launch()
    assert gpu.was_past_triton
    launcher.bind((1,), arguments(size=2**31, query_ptr=tensor(torch.int64))).launch()
    assert not gpu.was_past_triton


def test_every_launch_is_tritons_if_that_is_asked_for(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert new_launcher(gpu)._learns
    monkeypatch.setenv("ATTN_RELAUNCH", "0")
    assert not new_launcher(gpu)._learns


def test_descriptors_are_encoded_once(gpu: Driver) -> None:
    launcher, rows = new_launcher(gpu), torch.zeros(32, 64, dtype=torch.float16)
    desc = descriptor(rows)
    launcher.bind((1,), arguments(desc=desc)).launch()
    gpu.encoded.clear()
    for _ in range(3):
        launcher.bind((1,), arguments(desc=desc)).launch()
    assert gpu.encoded == []
    other = descriptor(rows[8:])
    for _ in range(3):
        launcher.bind((1,), arguments(desc=other)).launch()
    assert [address for address, *_ in gpu.encoded] == [rows[8:].data_ptr()]
    assert gpu.was_past_triton


def test_no_tensor_is_kept_alive(gpu: Driver) -> None:
    launcher, given = new_launcher(gpu), arguments()
    launcher.bind((1,), given).launch()
    launcher.bind((1,), given).launch()
    kept = weakref.ref(given["query_ptr"]), weakref.ref(given["table_ptr"])
    gpu.launches.clear()
    del given
    assert [one() for one in kept] == [None, None]


# -- Launches that go through Triton.


@contextmanager
def hook_in_chain(launcher: Launcher, gpu: Driver) -> Iterator[None]:
    chain, hook = knobs.runtime.launch_enter_hook, lambda *_: None
    chain.add(hook)
    yield
    chain.remove(hook)


@contextmanager
def hook_after(launcher: Launcher, gpu: Driver) -> Iterator[None]:
    chain, hook = knobs.runtime.launch_exit_hook, lambda *_: None
    chain.add(hook)
    yield
    chain.remove(hook)


@contextmanager
def single_hook(launcher: Launcher, gpu: Driver) -> Iterator[None]:
    with knobs.runtime.scope():
        cast(Any, knobs.runtime).launch_enter_hook = lambda *_: None
        yield


@contextmanager
def debugging(launcher: Launcher, gpu: Driver) -> Iterator[None]:
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        yield


@contextmanager
def hook_of_kernel(launcher: Launcher, gpu: Driver) -> Iterator[None]:
    launcher.kernel.add_pre_run_hook(lambda *_, **__: None)
    yield
    launcher.kernel.pre_run_hooks.clear()


@contextmanager
def other_device(launcher: Launcher, gpu: Driver) -> Iterator[None]:
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
    launcher, given = new_launcher(gpu), arguments()
    launcher.bind((1,), given).launch()
    with disturbed(launcher, gpu):
        launcher.bind((1,), given).launch()
        assert not gpu.was_past_triton
    launcher.bind((1,), given).launch()
    assert gpu.was_past_triton
    assert gpu.launches[-1][3:5] == gpu.launches[0][3:5]


def test_torch_is_asked_for_the_device_without_what_it_does_besides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    usual = types.SimpleNamespace(get_current_device=torch.cuda.current_device)
    assert compiled_launch._device_getter(usual)() == 3
    assert (
        compiled_launch._device_getter(types.SimpleNamespace(get_current_device=lambda: 5))() == 5
    )


def test_a_device_is_learnt_on_its_own(gpu: Driver) -> None:
    launcher, given = new_launcher(gpu), arguments()
    for device in (0, 1, 0, 1):
        gpu.device = device
        launcher.bind((1,), given).launch()
        assert gpu.launches[-1][3] == STREAM + device
    assert gpu.was_past_triton


def test_another_driver_is_tritons(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, given = new_launcher(gpu), arguments()
    launcher.bind((1,), given).launch()
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    launcher.bind((1,), given).launch()
    assert not gpu.was_past_triton


@pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_with_scratch_memory_is_tritons(gpu: Driver, size: str) -> None:
    launcher, given = new_launcher(gpu), arguments()
    record = launcher.bind((1,), given).call
    compiled = record.launch_through_triton()
    setattr(compiled.run, size, 8)
    launcher._learn(compiled, launcher._pick(given), record.arguments)
    assert launcher._compiled == []


def test_a_launcher_that_does_something_else_is_tritons(gpu: Driver) -> None:
    launcher, given = new_launcher(gpu), arguments()
    record = launcher.bind((1,), given).call
    values = launcher._pick(given)

    def learns(change: Callable[[Any], None]) -> bool:
        compiled = record.launch_through_triton()
        compiled = compiled_for(gpu, compiled.src.signature, 5)
        change(compiled)
        fresh = Launcher(launcher.kernel, FIXED, VARYING, groups={"plan": PLAN_POINTERS})
        fresh._learn(compiled, values, record.arguments)
        return bool(fresh._compiled)

    class OtherLauncher(nvidia.CudaLauncher):
        """A launcher of another class than the known one."""

    class CudaLauncher(nvidia.CudaLauncher):
        """The launcher of a version of Triton that passes more to the C function."""

        def __call__(self, *given: Any) -> None:
            super().__call__(*given, "more")

    more = CudaLauncher

    class CudaLauncher(nvidia.CudaLauncher):  # type: ignore[no-redef]
        """The launcher of a version of Triton that passes less to the C function."""

        def __call__(self, *given: Any) -> None:
            self.launch(*given[:5])

    assert learns(lambda compiled: None)
    assert not learns(lambda compiled: setattr(compiled.run, "__class__", OtherLauncher))
    assert not learns(lambda compiled: setattr(compiled.run, "__class__", more))
    assert not learns(lambda compiled: setattr(compiled.run, "__class__", CudaLauncher))
    assert not learns(lambda compiled: setattr(compiled.run, "launch", lambda *_: None))
    assert not learns(lambda compiled: delattr(compiled.metadata, "tensordesc_meta"))
    assert not learns(lambda compiled: vars(compiled.src).clear())
    launcher._learn(None, values, record.arguments)
    launcher._learn(object(), values, record.arguments)
    assert launcher._compiled == []


def test_arguments_of_other_types_are_tritons(gpu: Driver) -> None:
    launcher = new_launcher(gpu)
    for size in (True, 0.5):
        for _ in range(2):
            launcher.bind((1,), arguments(size=size)).launch()
            assert not gpu.was_past_triton


def test_collected_and_empty_launches_are_not_made(gpu: Driver) -> None:
    launcher, given = new_launcher(gpu), arguments()
    launcher.bind((1,), given).launch()
    with collected_calls() as calls:
        launcher.bind((2,), given).launch()
    launcher.bind((2, 0), given).launch()
    assert [call.grid for call in calls] == [(2,)]
    assert len(gpu.launches) == 1


def test_a_group_stands_for_its_members(gpu: Driver) -> None:
    given = arguments()
    record = new_launcher(gpu).bind((1,), given).call
    assert list(record.arguments) == list(record.kernel.arg_names)
    members = [record.arguments[name] for name in PLAN_POINTERS]
    assert all(one is other for one, other in zip(members, given["plan"].tensors, strict=True))


def test_what_is_not_learnt_once_is_not_tried_again(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, given = new_launcher(gpu), arguments()
    tried: list[Any] = []

    def bottom(*what: Any) -> Any:
        tried.append(what)
        raise AttributeError

    monkeypatch.setattr(compiled_launch, "_bottom_of", bottom)
    for _ in range(3):
        launcher.bind((1,), given).launch()
        assert not gpu.was_past_triton
    assert len(tried) == 1


def test_a_triton_without_its_knobs_is_not_learnt_from(
    gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "_KNOBS", ("launch_enter_hook", "unheard_of"))
    launcher, given = new_launcher(gpu), arguments()
    for _ in range(2):
        launcher.bind((1,), given).launch()
        assert not gpu.was_past_triton


def test_nothing_is_watched_as_a_rule() -> None:
    assert not launch_module.is_watched()


# -- Launches of builders.


def test_a_launcher_called_by_position_goes_past_triton(
    gpu: Driver,
) -> None:
    launch = Launcher(kernel_of(gpu), FIXED)
    given = arguments(table_ptr=tensor(torch.int32, 1))
    del given["plan"]
    given = (
        {"desc": given.pop("desc")} | {name: tensor(torch.int32) for name in PLAN_POINTERS} | given
    )
    sinks = {"sinks_ptr": tensor()}
    for change, is_known in (({}, False), ({"count": 21}, True), (sinks, False), (sinks, True)):
        given |= change
        launch((3, 2), *given.values())
        assert gpu.was_past_triton == is_known
    past = gpu.launched()
    Launcher(kernel_of(gpu), FIXED)((3, 2), *given.values())
    assert gpu.launched()[5:] == past[5:]


def test_a_launcher_shares_no_tensors(gpu: Driver) -> None:
    with pytest.raises(TypeError, match="table_ptr must vary"):
        Launcher(kernel_of(gpu), FIXED | {"table_ptr": tensor(torch.int32)})


def test_launches_with_the_same_fixed_arguments_are_the_same(gpu: Driver) -> None:
    kernel = kernel_of(gpu)
    launch = launcher_of(kernel, **FIXED)
    assert launcher_of(kernel, **FIXED) is launch
    name, value = next((name, value) for name, value in FIXED.items() if type(value) is int)
    assert launcher_of(kernel, **(FIXED | {name: value + 1})) is not launch
    assert launcher_of(kernel_of(gpu), **FIXED) is not launch


def test_a_launch_that_is_collected_is_not_made(gpu: Driver) -> None:
    given = arguments(count=20)
    del given["plan"]
    given = (
        {"desc": given.pop("desc")} | {name: tensor(torch.int32) for name in PLAN_POINTERS} | given
    )
    launch = Launcher(kernel_of(gpu), FIXED, options=LaunchOptions(num_warps=2, waits=True))
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


# -- Launches that bring no launcher.


def call_with(kernel: Any, **changes: Any) -> KernelCall:
    given = {**arguments(), **changes}
    plan = given.pop("plan")
    given |= dict(zip(PLAN_POINTERS, plan.tensors, strict=True))
    return KernelCall(kernel, (2,), {**FIXED, **given})


def test_a_call_is_launched_by_what_is_kept_for_calls_like_it(gpu: Driver) -> None:
    kernel = kernel_of(gpu)
    for change, is_known in (
        ({}, False),
        ({}, True),
        ({"count": 3, "query_ptr": tensor(offset=8)}, True),
        ({"size": 17}, False),
        ({"size": 19}, True),
        ({"sinks_ptr": tensor()}, False),
        ({"TILE": 64}, False),
        ({"TILE": 64}, True),
        ({"scale": 0.25}, False),
        ({}, True),
    ):
        call = call_with(kernel, **change)
        launch(call)
        assert gpu.was_past_triton == is_known, change
        launched = gpu.launched()
        call.launch_through_triton()
        assert gpu.launched() == launched
    assert len(launch_module._launchers) == 4


def test_options_and_equal_numbers_of_other_types_are_compiled_apart(gpu: Driver) -> None:
    kernel = kernel_of(gpu)
    launch(call_with(kernel, TILE=1))
    for other in (
        call_with(kernel, TILE=True),
        replace(call_with(kernel, TILE=1), num_warps=8),
        replace(call_with(kernel, TILE=1), waits=True),
    ):
        launch(other)
        assert not gpu.was_past_triton
    assert len(launch_module._launchers) == 4


def test_only_so_many_launchers_are_kept(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "MOST_LAUNCHERS", 3)
    kernel = kernel_of(gpu)
    for tile in range(2, 12):
        launch(call_with(kernel, TILE=tile))
        assert len(launch_module._launchers) <= 3


def test_what_is_no_kernel_of_triton_launches_itself() -> None:
    calls: list[Any] = []

    class Interpreted:
        arg_names = ("a",)

        def __getitem__(self, grid: Any) -> Any:
            return lambda **given: calls.append((grid, given["a"]))

    launch(KernelCall(Interpreted(), (3,), {"a": 1}))
    assert calls == [((3,), 1)]


# -- Versions of Triton, and copies.


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("3.5.1", False), ("3.6.0", True), ("3.9.0+git1", True), ("3.10.0", False), ("4.0.0", False)],
)
def test_kernels_are_launched_past_known_versions_of_triton_only(
    version: str,
    is_known: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    is_known_triton.cache_clear()
    try:
        assert [is_known_triton() for _ in range(3)] == [is_known] * 3
    finally:
        is_known_triton.cache_clear()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (0 if is_known else 1)
    assert is_known or f"Triton {version} launches every kernel itself" in said[0]


def test_a_copy_of_pointers_reads_its_own_tensors() -> None:
    pointers = Pointers(tensor(), tensor(torch.int32, 1))
    for made in (copy.deepcopy(pointers), pickle.loads(pickle.dumps(pointers))):
        assert made.addresses == [one.data_ptr() for one in made.tensors] != pointers.addresses
    assert copy.copy(pointers).addresses == pointers.addresses


def test_variants_are_made_once_each() -> None:
    made: list[int] = []
    variants: Variants[int] = Variants()

    def make(number: int) -> int:
        made.append(number)
        return number

    for key in (1, 1, 2, 1, 3, 2):
        assert variants.of((key,), make, key) == key
    assert made == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        variants.of((4,), lambda: 1 // 0)
    assert len(variants) == 3


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
    # The prefill kernel takes the scratch alone, which is the end of the group.
    if PLAN_POINTERS[0] in params:
        start = [*params].index(PLAN_POINTERS[0])
        assert (*params,)[start : start + len(PLAN_POINTERS)] == PLAN_POINTERS


def waived(kernel: Any) -> dict[str, Any]:
    """The options with which a kernel was declared.

    Under the interpreter the kernel is of another class, which keeps them elsewhere.
    """
    kept = getattr(kernel, "kwargs", None) or vars(kernel)
    names = ("do_not_specialize", "do_not_specialize_on_alignment")
    return {name: kept.get(name) for name in names}
