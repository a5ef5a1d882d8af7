"""Launches by the driver: the bytes that the C function would give it, and that one's in doubt."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import types
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import triton.runtime

from attn.kernels.launch import KernelForm
from builders.launch import driver as driver_launch
from builders.launch.driver import (
    DriverFunctions,
    DriverKernel,
    driver_functions,
    driver_kernel,
    driver_launches,
)
from builders.launch.launcher import Repeat
from builders.launch.prepared import GROUPS
from builders.splitkv.record import (
    Pointers,
)
from tests.launch.test_fast_launch import (
    FIXED,
    GIVEN,
    STREAM,
    VARYING,
    Driver,
    arguments,
    descriptor,
    given_of,
    kernel_of,
    tensor,
)

WARPS, SHARED = 12, 213252
SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4}
SIGNS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f"}
HEAD = 128
"""Bytes of a map's object before the map."""


class PyCUtensorMap:
    """As large as Triton's: 16 bytes of Python's, and 30 words; the last 16 of them are the map."""

    __slots__ = tuple(f"word_{index}" for index in range(30))


def new_map(spoilt: list[Any]) -> PyCUtensorMap:
    """One where the real ones are: at a multiple of 128 bytes."""
    while True:
        made = PyCUtensorMap()
        if id(made) % 128 == 0:
            break
        spoilt.append(made)
    for index in range((HEAD - 16) // 8, 30):
        setattr(made, f"word_{index}", object())
    return made


def bytes_of(kind: str, word: Any) -> bytes:
    """A parameter as the C function would give it."""
    if kind == "map":
        return ctypes.string_at(id(word) + HEAD, 128)
    if kind.startswith("*"):
        return struct.pack("Q", word or 0)
    return struct.pack(SIGNS[kind], word)


def kinds_of(signature: dict[str, str]) -> list[str]:
    """A kernel's words, those that are no parameters among them."""
    kinds: list[str] = []
    for kind in signature.values():
        # Descriptors of two dimensions here.
        is_map = kind.startswith("tensordesc")
        kinds += ["map", "i32", "i32", "i64", "i64"] if is_map else [kind]
    return kinds


def sizes_of(signature: dict[str, str]) -> list[int]:
    """Bytes of a kernel's parameters, Triton's own among them."""
    kinds = [kind for kind in kinds_of(signature) if kind != "constexpr"]
    return [{"map": 128, **SIZES}.get(kind, 8) for kind in kinds] + [8, 8]


class DirectDriver(Driver):
    """Notes launches by the driver too; its maps are where Triton's are."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: list[dict[str, Any]] = []
        self.sizes: dict[int, list[int]] = {}
        self.code = 0
        self.spoilt: list[Any] = []
        pointer = ctypes.c_void_p
        called = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self.called)
        self.functions: DriverFunctions | None = DriverFunctions(
            cast(Any, called), lambda function: self.sizes.get(function), lambda code: f"no {code}"
        )

    def encode(self, address: int, *rest: Any) -> Any:
        self.encoded.append((address, *map(str, rest)))
        return new_map(self.spoilt)

    def called(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        if not self.code:
            *block, stream, attributes, count = struct.unpack(
                "7I4xQQI4x", ctypes.string_at(config, 56)
            )
            sizes = self.sizes[function]
            addresses = struct.unpack(
                f"{len(sizes)}Q", ctypes.string_at(parameters, 8 * len(sizes))
            )
            pairs = zip(addresses, sizes, strict=True)
            assert all(
                address % min(size, 64) == 0 for address, size in zip(addresses, sizes, strict=True)
            )
            self.direct.append(
                {
                    "grid": block[:3],
                    "block": block[3:6],
                    "shared": block[6],
                    "stream": stream,
                    "attributes": ctypes.string_at(attributes, 72 * count),
                    "parameters": [ctypes.string_at(*pair) for pair in pairs],
                    "rest": (function, extra),
                }
            )
        return self.code

    def wanted(self, kinds: list[str]) -> list[bytes]:
        """Parameters of the last launch by the C function."""
        words = self.launched()[-len(kinds) :]
        given = [bytes_of(*one) for one in zip(kinds, words, strict=True) if one[0] != "constexpr"]
        return [*given, bytes(8), bytes(8)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DirectDriver:
    monkeypatch.delenv("ATTN_RELAUNCH", raising=False)
    driver = DirectDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(driver_launch, "driver_functions", lambda: driver.functions)
    return driver


def form_of(
    gpu: DirectDriver, change: Callable[[Any], None] = lambda compiled: None, **options: Any
) -> KernelForm:
    """Its kernels have what the driver is told; a change is made before they are learnt from."""
    kernel = kernel_of(gpu)
    compile_ = kernel._do_compile

    def compiled_with(*given: Any) -> Any:
        compiled = compile_(*given)
        packed = (WARPS, 1, SHARED)
        vars(compiled)["packed_metadata"] = packed
        vars(compiled.metadata).update(
            zip(("num_warps", "num_ctas", "shared"), packed, strict=True)
        )
        gpu.sizes[compiled.function] = sizes_of(compiled.src.signature)
        change(compiled)
        return compiled

    kernel._do_compile = compiled_with
    return KernelForm(kernel, FIXED, VARYING, **options)


def repeat_of(form: KernelForm, **changes: Any) -> tuple[Repeat, list[str]]:
    """A repeat of a launch, and the types of its words."""
    call = form.call((3,), arguments(**changes))
    call.launch()
    repeat = call.repeat(GIVEN)
    assert repeat is not None
    (prepared,) = form.relauncher._prepared
    return repeat, kinds_of(prepared._compiled.src.signature)


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"query_ptr": tensor(offset=8)},
    {"table_ptr": tensor(torch.int32, 1)},
    {"count": 1},
    {"count": 2**31 - 1},
    {"desc": descriptor(torch.zeros(32, 64, dtype=torch.float16)[8:])},
    {"plan": Pointers(*(tensor(torch.int32) for _ in GROUPS["plan"]))},
)


@pytest.mark.parametrize("waits", [False, True])
def test_a_repeat_gives_the_driver_what_the_c_function_would(
    gpu: DirectDriver, waits: bool
) -> None:
    form = form_of(gpu, waits=waits)
    repeat, kinds = repeat_of(form)
    assert {"constexpr", "map", "fp32", "i32", "i64"} <= {*kinds}
    launches = len(gpu.launches)
    for programs, change in itertools.chain(enumerate(CHANGES, 4), enumerate(CHANGES, 4)):
        values = arguments(**change)
        for _ in range(2):
            assert repeat.launch(programs, given_of(repeat, values))
            assert len(gpu.launches) == launches
        first, second = gpu.direct[-2:]
        assert first == second
        # Its words, for the same descriptor, encoded once.
        (prepared,) = form.relauncher._prepared
        prepared.call(programs, 1, 1, cast(Any, prepared.words_of(form._values(values))))
        gpu.launches[launches:], (last,) = [], gpu.launches[launches:]
        gpu.launches.append(last)
        wanted = gpu.wanted(kinds)
        gpu.launches.pop()
        assert second["parameters"] == wanted
        assert second["grid"] == [programs, 1, 1]
        assert second["block"] == [32 * WARPS, 1, 1]
        assert (second["shared"], second["stream"]) == (SHARED, STREAM)
        assert second["rest"] == (prepared._compiled.function, None)
        assert second["attributes"] == (struct.pack("i4xi60x", 6, 1) if waits else b"")


def test_a_launch_gives_the_driver_what_triton_gives_the_c_function(gpu: DirectDriver) -> None:
    form = form_of(gpu)
    _, kinds = repeat_of(form)
    for change in (*CHANGES, *CHANGES):
        values = arguments(**change)
        launches = len(gpu.launches)
        form.call((4, 3, 2), values).launch()
        form.call((4, 3), values).launch()
        assert len(gpu.launches) == launches
        assert [one["grid"] for one in gpu.direct[-2:]] == [[4, 3, 2], [4, 3, 1]]
        form.call((4,), values).record.launch()
        # Triton encodes descriptors anew: their maps are compared above.
        scalars = [index for index, size in enumerate(map(len, gpu.wanted(kinds))) if size != 128]
        for one in gpu.direct[-2:]:
            wanted = gpu.wanted(kinds)
            assert [one["parameters"][index] for index in scalars] == [wanted[i] for i in scalars]


def test_an_absent_pointer_is_null(gpu: DirectDriver) -> None:
    places: list[int] = []

    def keep(compiled: Any) -> None:
        signature = compiled.src.signature
        signature["sinks_ptr"] = "*fp32"
        gpu.sizes[compiled.function] = sizes_of(signature)
        names = [*signature]
        ahead = {name: signature[name] for name in names[: names.index("sinks_ptr")]}
        places.append(len(sizes_of(ahead)) - 2)

    repeat, _ = repeat_of(form_of(gpu, keep))
    assert repeat.launch(1, given_of(repeat, arguments()))
    assert gpu.direct[-1]["parameters"][places[0]] == bytes(8)
    assert gpu.direct[-1]["parameters"][places[0] - 1] != bytes(8)


def test_the_current_stream_is_asked_for_at_every_launch(gpu: DirectDriver) -> None:
    repeat, _ = repeat_of(form_of(gpu))
    values = given_of(repeat, arguments())
    for stream in (0, 2**63 + 5, 7):
        gpu.get_current_stream = lambda device, now=stream: now  # type: ignore[assignment,misc]
        assert repeat.launch(1, values)
        assert gpu.direct[-1]["stream"] == stream


def test_what_triton_would_specialise_otherwise_is_not_launched(gpu: DirectDriver) -> None:
    repeat, _ = repeat_of(form_of(gpu))
    good = given_of(repeat, arguments())
    assert repeat.launch(1, good)
    for change in ({"query_ptr": tensor(offset=1)}, {"count": 2**31}, {"count": -1}):
        launches = len(gpu.direct), len(gpu.launches)
        bad = given_of(repeat, arguments(**change))
        assert not repeat.launch(1, bad)
        assert not repeat.launch(1, bad)
        assert (len(gpu.direct), len(gpu.launches)) == launches
    assert repeat.launch(1, good)
    assert gpu.direct[-1]["parameters"] == gpu.direct[0]["parameters"]


# -- The C function's.


def drop(compiled: Any, sizes: dict[int, list[int]]) -> None:
    sizes[compiled.function].pop()


def add(compiled: Any, sizes: dict[int, list[int]]) -> None:
    sizes[compiled.function].append(8)


def widen(compiled: Any, sizes: dict[int, list[int]]) -> None:
    given = sizes[compiled.function]
    given[given.index(4)] = 8


def is_silent(compiled: Any, sizes: dict[int, list[int]]) -> None:
    del sizes[compiled.function]


def set_packed(compiled: Any, **changes: int) -> None:
    meta = compiled.metadata
    vars(meta).update(changes)
    vars(compiled)["packed_metadata"] = (meta.num_warps, meta.num_ctas, meta.shared)


def two_programs(compiled: Any, sizes: Any) -> None:
    set_packed(compiled, num_ctas=2)
    compiled.run.num_ctas = 2


def other_programs(compiled: Any, sizes: Any) -> None:
    compiled.run.num_ctas = 2


def other_metadata(compiled: Any, sizes: Any) -> None:
    vars(compiled)["packed_metadata"] = (WARPS, 1, SHARED, 1)


def no_numbers(compiled: Any, sizes: Any) -> None:
    set_packed(compiled, shared=cast(Any, 1.5))


def much_memory(compiled: Any, sizes: Any) -> None:
    set_packed(compiled, shared=229 << 10)


def together(compiled: Any, sizes: Any) -> None:
    compiled.run.launch_cooperative_grid = True


def unknown_type(compiled: Any, sizes: Any) -> None:
    signature = compiled.src.signature
    (name,) = [name for name in signature if name == "scale"]
    signature[name] = "fp64"


def no_number(compiled: Any, sizes: Any) -> None:
    vars(compiled)["function"] = None


@pytest.mark.parametrize(
    "change",
    [
        drop,
        add,
        widen,
        is_silent,
        two_programs,
        other_programs,
        other_metadata,
        no_numbers,
        much_memory,
        together,
        unknown_type,
        no_number,
    ],
)
def test_what_is_not_confirmed_is_the_c_functions(gpu: DirectDriver, change: Any) -> None:
    form = form_of(gpu, lambda compiled: change(compiled, gpu.sizes))
    repeat, _ = repeat_of(form)
    launches = len(gpu.launches)
    assert repeat.launch(4, given_of(repeat, arguments()))
    form.call((4,), arguments()).launch()
    assert gpu.direct == []
    assert len(gpu.launches) == launches + 2
    assert gpu.was_past_triton


def test_a_launcher_that_gives_more_or_other_things_is_not_passed_by(gpu: DirectDriver) -> None:
    form = form_of(gpu)
    repeat_of(form)
    (prepared,) = form.relauncher._prepared
    compiled, base, words = prepared._compiled, prepared._base, prepared._words
    signature = compiled.src.signature
    kinds = [(kind, len(kinds_of({"": kind}))) for kind in signature.values()]
    assert driver_kernel(compiled, base, kinds, words) == prepared.direct is not None
    others = (
        (*base, "more"),
        (*base, compiled.packed_metadata),
        tuple(None if one is compiled.packed_metadata else one for one in base),
        (base[0] + 1, *base[1:]),
        (base[0], True, *base[2:]),
        (*base[:2], not base[2], *base[3:]),
        base[:3],
        (),
    )
    for other in others:
        assert driver_kernel(compiled, other, kinds, words) is None
    counts = [(kind, count + 1) for kind, count in kinds]
    assert driver_kernel(compiled, base, counts, words) is None
    assert driver_kernel(compiled, base, kinds, words[1:]) is None
    compiled.run.gsan_enabled = True
    assert driver_kernel(compiled, base, kinds, words) is None


def test_without_the_drivers_functions_launches_are_the_c_functions(gpu: DirectDriver) -> None:
    gpu.functions = None
    repeat, _ = repeat_of(form_of(gpu))
    launches = len(gpu.launches)
    assert repeat.launch(4, given_of(repeat, arguments()))
    assert len(gpu.launches) == launches + 1


@pytest.mark.parametrize("lacking", ["", "cuLaunchKernelEx", "cuFuncGetParamInfo"])
def test_a_driver_without_a_symbol_is_not_called(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def load(name: str) -> Any:
        if not lacking:
            raise OSError(name)
        names = {"cuLaunchKernelEx", "cuFuncGetParamInfo", "cuGetErrorString"} - {lacking}
        return types.SimpleNamespace(**dict.fromkeys(names))

    monkeypatch.setattr(ctypes, "CDLL", load)
    driver_functions.cache_clear()
    assert driver_functions() is None
    driver_functions.cache_clear()


def test_the_driver_is_asked_for_parameters_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[int, tuple[int, int]] = {0: (0, 8), 1: (0, 4), 2: (1, 0)}

    def ask(function: Any, index: Any, offset: Any, size: Any) -> int:
        assert function.value == 2**40
        code, size._obj.value = answers[index.value]
        return code

    def describe(code: int, text: Any) -> int:
        text._obj.value = b"because" if code == 700 else None
        return 0

    library = types.SimpleNamespace(
        cuLaunchKernelEx=None, cuFuncGetParamInfo=ask, cuGetErrorString=describe
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    driver_functions.cache_clear()
    functions = driver_functions()
    driver_functions.cache_clear()
    assert functions is not None
    assert functions.param_sizes(2**40) == [8, 4]
    answers[2] = 201, 0
    assert functions.param_sizes(2**40) is None
    monkeypatch.setattr(driver_launch, "_MOST_PARAMETERS", 2)
    assert functions.param_sizes(2**40) is None
    assert functions.error_text(700) == "because"
    assert functions.error_text(1) == "unknown error"


@pytest.mark.parametrize(
    "encode", [lambda *_: ("a", "tuple"), lambda *_: PyCUtensorMap], ids=["a tuple", "a class"]
)
def test_a_map_that_is_another_object_is_the_c_functions(gpu: DirectDriver, encode: Any) -> None:
    gpu.utils.fill_tma_descriptor = gpu.utils.fill_tma_descriptor_tiled = encode
    repeat, _ = repeat_of(form_of(gpu))
    assert repeat.launch(4, given_of(repeat, arguments()))
    assert gpu.direct == []


def test_a_value_that_does_not_fit_is_the_c_functions_to_judge(gpu: DirectDriver) -> None:
    repeat, _ = repeat_of(form_of(gpu))
    values = arguments()
    words = repeat.encoded("desc", values["desc"])
    assert words is not None
    for place, unfit in ((1, 2**31), (0, object())):
        changed = [*words]
        changed[place] = unfit
        launches = len(gpu.launches)
        assert repeat.launch(4, (*given_of(repeat, values)[:-1], (changed,)))
        assert len(gpu.launches) == launches + 1
        assert unfit in gpu.launched()
    assert gpu.direct == []
    assert repeat.launch(4, given_of(repeat, values))
    assert len(gpu.direct) == 1


# -- Errors and threads.


def test_an_error_of_the_driver_is_raised(gpu: DirectDriver) -> None:
    form = form_of(gpu)
    repeat, _ = repeat_of(form)
    gpu.code = 700
    launches = len(gpu.launches)
    with pytest.raises(RuntimeError, match="CUDA error 700, no 700"):
        repeat.launch(4, given_of(repeat, arguments()))
    with pytest.raises(RuntimeError, match="CUDA error 700, no 700"):
        form.call((4,), arguments()).launch()
    assert len(gpu.launches) == launches


def test_a_thread_without_a_context_gets_one_of_the_c_function(gpu: DirectDriver) -> None:
    form = form_of(gpu)
    repeat, _ = repeat_of(form)
    gpu.code = 201
    launches = len(gpu.launches)
    assert repeat.launch(4, given_of(repeat, arguments()))
    form.call((4,), arguments()).launch()
    assert len(gpu.launches) == launches + 2
    gpu.code = 0
    assert repeat.launch(4, given_of(repeat, arguments()))
    assert len(gpu.direct) == 1


def test_threads_do_not_write_over_each_others_parameters(gpu: DirectDriver) -> None:
    repeat, _ = repeat_of(form_of(gpu))
    inner = given_of(repeat, arguments(count=5))
    outer = given_of(repeat, arguments(count=6))
    assert repeat.launch(1, outer)
    assert repeat._direct is not None
    mine, theirs = repeat._direct.own, []

    def launch() -> None:
        assert repeat.launch(2, inner)
        assert repeat._direct is not None
        theirs.append(repeat._direct.own)

    stream = gpu.get_current_stream

    def stream_after_another_thread(device: int) -> int:
        # Between the writing and the call.
        gpu.get_current_stream = stream  # type: ignore[method-assign]
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
        return stream(device)

    gpu.get_current_stream = stream_after_another_thread  # type: ignore[method-assign]
    assert repeat.launch(1, outer)
    first, between, last = gpu.direct
    assert first == last != between
    assert theirs[0] is not mine


def test_a_number_beyond_fp32_is_the_c_functions_to_round(gpu: DirectDriver) -> None:
    assert gpu.functions is not None
    kernel = DriverKernel(gpu.functions, 1, 32, 0, False, ("fp32",))
    assert driver_launches(kernel, [1e39], []) is None
    assert driver_launches(kernel, [1e38], []) is not None


def test_a_number_that_is_compiled_in_keeps_no_launch_from_the_driver(gpu: DirectDriver) -> None:
    form = form_of(gpu)
    for _ in range(2):
        form.call((3,), arguments(size=1)).launch()
    assert len(gpu.direct) == 1
