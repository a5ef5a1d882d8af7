"""Launches that the bundled models' layers make on the GPUs that ``attn explain`` knows.

    python -m tests.compile.model_calls --major 8 12

prints how much shared memory they take on GPUs of some major compute capabilities, as JSON.
Launches of one size are compiled once, and only until their shared memory is allocated. Sizes that
the tests of ``tests/compile`` and ``tests/dense/test_hopper.py`` compile to machine code, and
compare with the same limit, are not compiled here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Final
from unittest import mock

import builders.dense.triton_attn
from attn.registry import AttentionBackendEnum
from attn.selector import refusals
from builders.dense.choice import LayerRequirements
from builders.latent.choice import latent_kernel_of
from builders.launch.call import KernelCall
from builders.sparse.hopper_tiles import sparse_kernel_of
from builders.sparse.tiles import SparseShape
from builders.splitkv.tiles import DenseShape
from specs.attention import AttentionType
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, PrefillKernel
from specs.hf_config import bundled_model_names, load_model_geometry
from specs.model import LayerGeometry, LayerKind
from specs.rows import latent_format_of
from tests.compile import sparse_variants
from tests.compile.compile_matrix import SETS, _Device, limit_of
from tests.compile.record import Record, RecordedError
from tests.compile.variants import (
    DEVICES,
    TARGETS,
    Kernel,
    Layer,
    Variant,
    attention_calls,
    call_of,
    pretending,
)

CACHES: Final = (CacheDType.AUTO, CacheDType.FP8_E4M3, CacheDType.FP8_DS_MLA)
"""KV cache types; a layer is left out where no backend serves it with one."""
STEPS: Final = (1, 41)
"""New tokens of a request: a decode, and a prefill."""
SPARSE_ROWS: Final = (1, 4096)
"""Rows of a sparse launch: so few that they are cut into parts, and many."""
MAJORS: Final = tuple(sorted({number // 10 for number in DEVICES}))
"""Major compute capabilities; within one, Triton compiles a launch to the same code."""
_NO_SIZES: Final = frozenset(
    {
        # Heads, rows and keys past the end of a tile.
        *("HEADS", "NUM_HEADS", "HEAD_LOOPS", "HEAD_TILES", "GROUP", "GROUPS", "TILE_HEADS"),
        *("QUERY_TOKENS", "SLOTS", "SEGMENT_GROUPS", "AREA", "SEGMENT", "SEGMENT_UNIT", "SEGMENTS"),
        *("SPAN", "PARTS", "REQ_STEPS", "FINISH_ROWS", "FINISH_WIDTH"),
        # Widths that are padded to other widths, and strides.
        *("K_SIZE", "V_SIZE", "BLOCK_SIZE", "RUN", "PACKED", "BLOCK_UNITS", "ROW_UNITS"),
        *("QUERY_TOKEN", "QUERY_HEAD", "OUT_TOKEN", "OUT_HEAD", "LSE_TOKEN"),
        # Features.
        *("CAUSAL", "ALIBI"),
    }
)
"""Constants of kernels that are no part of a tile; flags are no part of it either."""


@dataclass(frozen=True)
class Size:
    """What a launch's shared memory depends on: kernel, tile and types."""

    kernel: str
    options: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, str], ...]
    dtype: str
    """Type of the elements that are attended."""


@dataclass(frozen=True)
class Compiled:
    """The outcome for the launches of one size."""

    kernel: str
    of: tuple[str, ...]
    """Models and devices that make the launches."""
    capabilities: tuple[int, ...]
    """Compute capabilities of these devices."""
    shared: int = 0
    """Bytes of shared memory; 0 if another test compiles the size."""
    elsewhere: str = ""
    """Name of a launch of this size that another test compiles; empty if there is none."""
    error: str = ""
    """Why the size did not compile; empty if it did."""


def size_of(call: KernelCall) -> Size:
    """The size of a launch."""
    constants = {
        parameter.name: call.arguments[parameter.name]
        for parameter in call.kernel.params
        if parameter.is_constexpr and parameter.name not in _NO_SIZES
    }
    names = ("latent_ptr", "k_desc", "key_ptr", "query_ptr", "out_ptr")
    attended = next(call.arguments[name] for name in names if call.arguments.get(name) is not None)
    dtype = getattr(attended, "dtype", None)
    # How a cache's bytes are converted matters, since not every GPU has instructions for it.
    converts = dtype is not None and not dtype.is_floating_point
    flags, ignored = ({"HARDWARE_E4M3"}, set()) if converts else (set(), {"DECODE"})
    return Size(
        call.kernel.__name__,
        # The assembler limits registers, after shared memory is allocated.
        tuple(sorted((name, x) for name, x in call.options.items() if name != "maxnreg")),
        tuple(
            sorted(
                (name, str(value))
                for name, value in constants.items()
                if name in flags or not (isinstance(value, bool) or name in ignored)
            )
        ),
        str(attended.layout if dtype is None else dtype),
    )


def features_of(call: KernelCall) -> int:
    """Number of features of a launch: the launch with the most stands for all of its size."""
    return sum(value is True for value in call.arguments.values())


def dense_calls(
    layer: LayerGeometry, dtype: DType, cache: CacheDType, target: int
) -> Iterator[KernelCall]:
    """Decodes and prefills of TRITON_ATTN; on Hopper by either kernel."""
    is_encoder = layer.kind is LayerKind.ENCODER_ONLY
    known = Layer(
        heads=(layer.num_heads, layer.num_kv_heads, layer.head_size),
        head_size_v=layer.head_size_v,
        dtype=dtype,
        cache=cache,
        attn_type=AttentionType.ENCODER_ONLY if is_encoder else AttentionType.DECODER,
        causal=not is_encoder,
        window=layer.sliding_window,
        chunk=layer.attention_chunk_size,
        sinks=layer.has_sinks,
        soft_cap=layer.logits_soft_cap,
        alibi=layer.use_alibi,
    )
    with pretending(target):
        for count in STEPS:
            yield from attention_calls(known, count, PrefillKernel.TRITON)
            if target // 10 == 9:
                with mock.patch.object(builders.dense.triton_attn, "runs_gluon", return_value=True):
                    yield from attention_calls(known, count, PrefillKernel.AUTO, DecodeKernel.AUTO)


def latent_calls(
    layer: LayerGeometry, dtype: DType, cache: CacheDType, target: int
) -> Iterator[KernelCall]:
    """Decodes and prefills of TRITON_MLA; decodes on Hopper by either kernel."""
    sizes = layer.mla
    assert sizes is not None
    known = Layer(
        heads=(layer.num_heads, 1, sizes.latent_size),
        head_size_v=sizes.kv_lora_rank,
        dtype=dtype,
        cache=cache,
        block_size=64,
        window=layer.sliding_window,
        nope=sizes.qk_nope_head_dim,
        expanded_v=sizes.v_head_dim,
    )
    context = replace(known, causal=False)
    given = [(Kernel.MLA_DECODE, known), (Kernel.MLA_PREFILL, known)]
    given += [(Kernel.MLA_PREFILL, context), (Kernel.MLA_EXPAND, context)]
    stored = 8 * cache.element(dtype).itemsize
    widths = sizes.latent_size, sizes.kv_lora_rank, dtype.itemsize, stored
    shape = DenseShape(layer.num_heads, 1, *widths)
    asks = LayerRequirements(is_local=known.window is not None, query=dtype, cache_dtype=cache)
    facts = shape, DEVICES[target].kind, known.block_size, 1, asks
    if latent_kernel_of(*facts, DecodeKernel.AUTO)[0] is not None:
        given.append((Kernel.HOPPER_MLA, known))
    for kernel, asked in given:
        yield call_of(Variant(kernel, "", asked), target)


def sparse_calls(
    layer: LayerGeometry, dtype: DType, cache: CacheDType, target: int
) -> Iterator[KernelCall]:
    """Rows of SPARSE_MLA; on Hopper by either kernel."""
    layout, heads, device = latent_format_of(cache), layer.num_heads, DEVICES[target]
    for rows in SPARSE_ROWS:
        yield from sparse_variants.calls_of(layout, heads, rows, device.name, dtype.torch)[1]
    given = SparseShape(heads, sparse_variants.TOPK, layout), device.kind, dtype
    if (
        sparse_kernel_of(*given, False, "kernels.sparse.own_decode", DecodeKernel.AUTO)[0]
        is not None
    ):
        known = Layer(
            heads=(heads, 1, 576), head_size_v=512, dtype=dtype, cache=cache, block_size=64
        )
        yield call_of(Variant(Kernel.HOPPER_SPARSE, "", known), target)


CALLS_OF: Final = {
    "TRITON_ATTN": dense_calls,
    "TRITON_MLA": latent_calls,
    "SPARSE_MLA": sparse_calls,
}


def model_calls(major: int) -> Iterator[tuple[str, int, KernelCall]]:
    """Every launch of a bundled model's layer on a GPU: model and device, capability, and launch.

    Args:
        major: of the GPU's compute capability.
    """
    targets = sorted(number for number in DEVICES if number // 10 == major)
    # Several models have the same layers.
    layers: dict[tuple[LayerGeometry, DType], list[str]] = {}
    for name in bundled_model_names():
        model = load_model_geometry(name)
        for layer, _ in model.groups():
            layers.setdefault((layer, model.dtype), []).append(name)
    for ((layer, dtype), names), target, cache in product(layers.items(), targets, CACHES):
        request, device = layer.selector_config(dtype, cache), DEVICES[target]
        for backend, calls in CALLS_OF.items():
            if not refusals(AttentionBackendEnum[backend], request, device):
                for call in calls(layer, dtype, cache, target):
                    yield f"{', '.join(names)} on {device.name}, {cache.value}", target, call


class _AllocatedError(Exception):
    """Ends a compile after the allocation of shared memory; its argument is the result."""


def shared_memory(call: KernelCall, record: Record) -> int:
    """Bytes of shared memory of a launch on the active target.

    It is compiled until they are known, or not at all where the record has them.
    """
    from triton.backends.nvidia import compiler

    lowered = compiler.CUDABackend.make_llir
    found: list[int] = []
    hashes: list[str] = []

    def stop(passes: Any, *_: Any) -> None:
        raise _AllocatedError(passes)

    def allocate(self: Any, module: Any, metadata: Any, *given: Any) -> str:
        hashes.append(metadata["hash"])
        try:
            lowered(self, module, metadata, *given)
        except _AllocatedError as listed:
            listed.args[0].run(module, "allocate")
        found.append(module.get_int_attr("ttg.shared"))
        raise _AllocatedError

    with (
        mock.patch.object(compiler.CUDABackend, "make_llir", allocate),
        mock.patch.object(compiler.nvidia.passes.ttgpuir, "add_to_llvmir", stop),
        contextlib.suppress(_AllocatedError),
        record.watching("shared"),
    ):
        try:
            call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
        except RecordedError as recorded:
            return int(recorded.facts["shared"])
    (shared,), (key,) = found, hashes
    record.note("shared", key, {"shared": shared})
    return shared


def tested_calls(target: int) -> Iterator[tuple[str, KernelCall]]:
    """Launches that other tests compile for a target and hold to its limit of shared memory."""
    for one in SETS.values():
        for variant in one.variants:
            if target in variant.tested:
                yield variant.name, call_of(variant, target)
    yield from sparse_variants.tested(target).items()


def compiled(major: int) -> list[Compiled]:
    """Compile one launch for each size that no other test compiles."""
    import triton

    calls: dict[Size, KernelCall] = {}
    users: dict[Size, list[tuple[str, int]]] = {}
    for of, target, call in model_calls(major):
        size = size_of(call)
        users.setdefault(size, []).append((of, target))
        if size not in calls or features_of(call) > features_of(calls[size]):
            calls[size] = call
    kernels = {size.kernel for size in calls}
    tested: dict[Size, list[tuple[int, int, str]]] = {}
    for target in (target for target in TARGETS if target // 10 == major):
        for name, call in tested_calls(target):
            if call.kernel.__name__ in kernels:
                facts = limit_of(target), features_of(call), f"{name} sm_{target}"
                tested.setdefault(size_of(call), []).append(facts)
    found, record = [], Record()
    for size, call in calls.items():
        names, targets = (tuple(dict.fromkeys(part)) for part in zip(*users[size], strict=True))
        one, room = Compiled(size.kernel, names, targets), min(map(limit_of, targets))
        others = [
            name
            for limit, features, name in tested.get(size, [])
            if limit <= room and features >= features_of(call)
        ]
        if others:
            found.append(replace(one, elsewhere=others[0]))
            continue
        triton.runtime.driver.set_active(_Device(min(targets)))
        try:
            found.append(replace(one, shared=shared_memory(call, record)))
        except Exception as error:
            found.append(replace(one, error=f"{type(error).__name__}: {error}"))
    return found


def main() -> int:
    """The command line of this module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--major", type=int, nargs="+", required=True, choices=MAJORS)
    majors = parser.parse_args().major
    print(json.dumps({major: compiled(major) for major in majors}, default=asdict))
    return 0


if __name__ == "__main__":
    sys.exit(main())
