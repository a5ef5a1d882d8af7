"""Compile FlashInfer's kernels ahead, many modules at a time.

FlashInfer's calls compile at first use, one module after another, while the GPU is idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

import torch

from attn.bench.cases.case import MODEL_DTYPE, KernelCase
from attn.bench.cases.latent import ROPE_CASE
from attn.bench.results.reasons import describe

FILES_AT_ONCE: Final = 4
"""Files of a module that are compiled at once, unless ``MAX_JOBS`` is set; a module has 5 to 10."""
FILE_BYTES: Final = 7 << 29
"""Most bytes of memory that compiling one file takes (3.5 GiB)."""
MEMORY_SHARE: Final = 0.8
"""Share of the machine's free memory that all compilers together may take."""

Module = tuple[Any, ...]
"""Python module and name of the function that makes a kernel module, then its arguments."""

PREFILL_MAKER: Final = ("flashinfer.jit", "gen_batch_prefill_module")
FA2_MAKER: Final = ("flashinfer.jit.attention.modules", "_gen_batch_prefill_primary_module")
"""Maker of fa2's module in FlashInfer 0.7.2; earlier versions make it like fa3's module."""
FA2_FILE: Final = ("jit", "attention", "modules.py")


def free_memory() -> int:
    """Free bytes of this machine's memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def modules_at_once(files: int, memory: int, cores: int) -> int:
    """Number of modules to compile side by side, so that compilers fit into memory and cores.

    Args:
        files: files of a module that are compiled at once.
        memory: free bytes.
        cores: cores of the machine.
    """
    compilers = min(int(memory * MEMORY_SHARE) // FILE_BYTES, cores)
    return max(compilers // files, 1)


def compile_modules(modules: Iterable[Module], log: Callable[[str], None] = print) -> bool:
    """Compile each module once, the slowest ones first.

    Args:
        modules: modules to compile; a repeated module is compiled once.
        log: receives a line per module.

    Returns:
        False when a module does not compile; the remaining modules are compiled even then.
    """
    started = time.perf_counter()

    def build(spec: Any) -> bool:
        try:
            spec.build(verbose=False)
            outcome = "compiled"
        except Exception as error:
            outcome = describe(error)
        log(f"  {time.perf_counter() - started:4.0f} s  {spec.name}: {outcome}")
        return outcome == "compiled"

    longest_first = sorted(dict.fromkeys(modules), key=lambda module: "fa3" not in module)
    made = [getattr(import_module(name), make)(*key) for name, make, *key in longest_first]
    # Keyed by name, because different arguments can mean the same kernel module.
    specs = {spec.name: spec for spec in made if not spec.is_aot}
    files = int(os.environ.setdefault("MAX_JOBS", str(FILES_AT_ONCE)))
    at_once = modules_at_once(files, free_memory(), os.cpu_count() or 1)
    with ThreadPoolExecutor(at_once) as pool:
        return all(list(pool.map(build, specs.values())))


def prefill_module(
    kernel: str,
    query: torch.dtype,
    cached: torch.dtype,
    head_size: int,
    has_window: bool,
    has_soft_cap: bool = False,
) -> Module:
    """The module of the paged prefill wrapper, and of the decode wrapper with tensor cores.

    In 0.7.2 fa2's module serves keys and values of equal strides; unequal strides would load a
    second module at the first call. That module is not compiled, since every layout of this library
    has K and V of equal widths and strides.
    """
    # 0: no position encoding. The last False: no fp16 scores.
    sizes = (head_size, head_size, 0, has_window, has_soft_cap, False)
    dtypes = (query, cached, query, torch.int32)
    maker = fa2_maker() if kernel == "fa2" else PREFILL_MAKER
    return (*maker, kernel, *dtypes, *sizes)


@cache
def fa2_maker() -> tuple[str, str]:
    """Python module and function that make fa2's module in the installed version of FlashInfer.

    The function looks into the text of FlashInfer's file, because importing it needs a GPU in some
    versions.
    """
    package = PathFinder.find_spec("flashinfer")
    for folder in (package and package.submodule_search_locations) or ():
        source = Path(folder, *FA2_FILE)
        if source.exists() and f"def {FA2_MAKER[1]}(" in source.read_text(encoding="utf-8"):
            return FA2_MAKER
    return PREFILL_MAKER


def decode_module(
    query: torch.dtype,
    cached: torch.dtype,
    head_size: int,
    has_window: bool,
    has_soft_cap: bool = False,
) -> Module:
    """The module of the decode wrapper without tensor cores."""
    sizes = (head_size, head_size, 0, has_window, has_soft_cap)
    dtypes = (query, cached, query, torch.int32)
    return ("flashinfer.jit", "gen_batch_decode_module", *dtypes, *sizes)


def xqa_module(
    query: torch.dtype,
    cached: torch.dtype,
    page_size: int,
    head_size: int,
    group: int,
    has_window: bool,
    query_len: int = 1,
    is_ragged: bool = False,
) -> Module:
    """The module of XQA's decode, or of its verify of ``query_len`` tokens.

    Ragged verifies need FlashInfer 0.7.2 or later.
    """
    sizes = (page_size, head_size, group, has_window)
    ragged = (True,) if is_ragged else ()
    make = ("flashinfer.jit.xqa", "gen_xqa_module")
    return (*make, query, cached, *sizes, query, query_len, *ragged)


def fmha_v2_module(layout: str, query: torch.dtype, output: torch.dtype) -> Module:
    """The module of fmha_v2's prefill over paged keys.

    Args:
        layout: ``NHD`` or ``HND``.
        query: the model's type, or e4m3.
        output: the model's type.
    """
    named = output if query == torch.float8_e4m3fn else None
    return ("flashinfer.jit", "gen_fmha_v2_module", f"Q_PAGED_KV_{layout}", query, named)


def latent_module(
    kernel: str, query: torch.dtype, cached: torch.dtype, rank: int, rope_size: int
) -> Module:
    """The module of the wrapper of absorbed latent attention."""
    # The last False: no profiler.
    sizes = (query, torch.int32, rank, rope_size, False)
    return ("flashinfer.jit", "gen_batch_mla_module", kernel, query, cached, *sizes)


ROPE_MODULE: Final[Module] = ("flashinfer.jit.rope", "gen_rope_module")
"""The module of ``mla_rope_quantize_fp8``, which serves every shape."""


def modules_of(case: KernelCase) -> Iterator[Module]:
    """The modules that FlashInfer compiles for a case of the benchmark: its wrappers and XQA."""
    if case.topk:
        # Sparse cases are compared with FlashMLA alone.
        return
    query, cached = MODEL_DTYPE.torch, case.kv_cache_dtype.element(MODEL_DTYPE).torch
    size, has_window = case.head_size, case.sliding_window is not None
    if case.is_expanded:
        return
    if case.name == ROPE_CASE:
        yield ROPE_MODULE
        return
    if case.is_latent:
        yield latent_module("fa3", query, cached, case.head_size_v, case.rope_size)
        return
    if not case.sinks:
        yield prefill_module(wrapper_backend(case), query, cached, size, has_window)
    if case.is_bandwidth_bound:
        group = case.num_heads // case.num_kv_heads
        sizes = (case.block_size, size, group, has_window)
        yield xqa_module(query, cached, *sizes, query_len=case.query_lens[0])


def wrapper_backend(case: KernelCase) -> str:
    """The backend argument for FlashInfer's wrappers: fa2 or fa3.

    fa2 packs the query heads of a KV head into one tile, which short queries need. It also takes a
    cache of another type than the query's, which fa3 does not.
    """
    mixes = case.kv_cache_dtype.is_quantized
    return "fa2" if case.is_bandwidth_bound or mixes else "fa3"


def compile_flashinfer(cases: Sequence[KernelCase], log: Callable[[str], None] = print) -> bool:
    """Compile the modules that FlashInfer needs for the cases: see :func:`compile_modules`."""
    return compile_modules((module for case in cases for module in modules_of(case)), log)
