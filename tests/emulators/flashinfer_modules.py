"""FlashInfer's kernels that GPU tests and the benchmark of latent calls ask for, compiled ahead.

    python -m tests.emulators.flashinfer_modules --list
    python -m tests.emulators.flashinfer_modules 'conformance/FLASHINFER/*' 'gpu/TRTLLM_MHA/*-p16-*'

Without it every test waits for nvcc. What a test asks for is found by building its steps on the
CPU, over an emulated FlashInfer of the installed version. TRTLLM_MLA asks for none on Hopper: its
rows are Triton's there, and what rotates them is that of ``gpu/rope``.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from attn.backends.base import AttentionBackend
from attn.backends.flashinfer import FlashInferBackend
from attn.backends.flashinfer_mla import FlashInferMlaBackend
from attn.backends.trtllm_mha import TrtllmMhaBackend
from attn.bench.cases.latent import LATENT_VENDOR_CASES
from attn.bench.peers.flashinfer_jit import (
    ROPE_MODULE,
    Module,
    compile_modules,
    decode_module,
    fmha_v2_module,
    latent_module,
    prefill_module,
    xqa_module,
)
from attn.bench.peers.flashinfer_jit import modules_of as modules_of_bench
from attn.testing import cases
from attn.testing.batches import BATCHES
from attn.testing.cases import FEATURES, HEADS, Case, LatentCase, cases_for
from attn.testing.dense_trial import DenseTrial
from attn.testing.latent_trial import LatentTrial
from builders.vendor import flashinfer, flashinfer_mla
from builders.vendor.trtllm_parts.mha_choice import VendorKernel
from specs.devices import KNOWN_DEVICES
from specs.layouts import KVOrder
from tests.emulators import flashinfer_emulator, flashinfer_mla_emulator
from tests.emulators import trtllm_emulator as trtllm
from tests.emulators.flashinfer_signatures import installed_version
from tests.gpu.vendor import test_gpu_flashinfer, test_gpu_flashinfer_mla, test_gpu_trtllm_mha
from tests.tools.gpus import hopper

DEVICE = KNOWN_DEVICES["h200"]


@contextmanager
def emulated(version: str) -> Iterator[None]:
    """Let every backend build here as on a Hopper GPU."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(flashinfer_emulator.emulated(version))
        stack.enter_context(trtllm.emulated(DEVICE, version))
        stack.enter_context(flashinfer_mla_emulator.emulated(version))
        for module in (flashinfer, flashinfer_mla):
            patch.setattr(module, "device_facts", lambda _: hopper(3))
        patch.setattr(cases, "detect_device", lambda: DEVICE)
        yield


def modules_of(backend: type[AttentionBackend], case: Case) -> set[Module]:
    """The modules that a case's step compiles, and each of its requests alone."""
    try:
        trial = DenseTrial(backend, case, torch.device("cpu"))
        builder = trial.builder()
    except ValueError:
        # The version refuses the case: 0.6 prefills no fp8 on Hopper.
        return set()
    found = set(_of_record(case, trial.build(builder)))
    if not trial.common_prefix_len:
        for request in trial.requests:
            batch = trial.alone(request.row, request.tokens).batch
            found |= set(_of_record(case, trial.build(builder, batch)))
            trial.together()
    return found


def _of_record(case: Case, record: Any) -> Iterator[Module]:
    shared = getattr(record, "shared", None)
    parts = [shared.prefix, shared.own] if shared else [record.decode, record.prefill]
    for part in parts:
        if part is not None:
            yield _of_wrapper(case, part) if hasattr(part, "wrapper") else _of_call(case, part)


def _dtypes(case: Case) -> tuple[torch.dtype, torch.dtype]:
    return case.dtype.torch, case.cache_dtype.element(case.dtype).torch


def _of_wrapper(case: Case, part: Any) -> Module:
    size, choice = case.heads.head_size, part.choice
    variant = case.feature.sliding_window is not None, case.feature.logits_soft_cap is not None
    if isinstance(part, flashinfer.DecodeRows) and not choice.use_tensor_cores:
        return decode_module(*_dtypes(case), size, *variant)
    return prefill_module(choice.kernel.value, *_dtypes(case), size, *variant)


def _of_call(case: Case, part: Any) -> Module:
    heads, (query, cached) = case.heads, _dtypes(case)
    if part.rule.kernel is VendorKernel.XQA:
        group = heads.num_heads // heads.num_kv_heads
        has_window = case.feature.sliding_window is not None
        sizes = (case.block_size, heads.head_size, group, has_window, part.max_query_len)
        return xqa_module(query, cached, *sizes, is_ragged=part.query_starts is not None)
    is_nhd = case.order is KVOrder.NHD or heads.num_kv_heads == 1
    return fmha_v2_module("NHD" if is_nhd else "HND", cached, query)


def named(module: Module) -> str:
    """A module's function and arguments in one word, for example
    ``xqa-bfloat16-bfloat16-p16-d64-g4``.

    The word is the same for every version, whatever the version calls its functions.
    """
    make, *key = module[1:]
    words = [str(item).removeprefix("torch.") for item in key]
    if make == "gen_xqa_module":
        query, cached, page, size, group, window, _, length, *ragged = words
        sizes = [f"p{page}", f"d{size}", f"g{group}", f"q{length}"]
        flags = ["window"] * (window == "True") + ["ragged"] * bool(ragged)
        return "-".join(["xqa", query, cached, *sizes, *flags])
    kind = make.removeprefix("_").removeprefix("gen_").removesuffix("_module")
    kind = kind.removesuffix("_primary")
    return "-".join([kind, *words])


def groups() -> Iterator[tuple[str, type[AttentionBackend], list[Case]]]:
    """Tests by name, with their cases."""
    for backend in (FlashInferBackend, TrtllmMhaBackend):
        own = [case for case in cases_for(backend) if isinstance(case, Case)]
        yield f"conformance/{backend.get_name()}", backend, own
    yield "gpu/FLASHINFER", FlashInferBackend, test_gpu_flashinfer.CASES
    served = [case for case in test_gpu_trtllm_mha.CASES if case.is_served_by(TrtllmMhaBackend)]
    yield "gpu/TRTLLM_MHA", TrtllmMhaBackend, served


def beside_other_prefills() -> Iterator[Module]:
    """Modules that ``test_decodes_read_every_layout_beside_triton_s_prefills`` loads."""
    for dtype in (torch.float16, torch.bfloat16):
        for page in (16, 32, 64, 128):
            for heads in HEADS:
                group = heads.num_heads // heads.num_kv_heads
                if heads.v_size == heads.head_size:
                    yield xqa_module(dtype, dtype, page, heads.head_size, group, False)


def of_both_kernels() -> Iterator[Module]:
    """Modules that ``test_both_kernels_take_both_orders`` loads."""
    for name in ("causal", "window", "soft_cap"):
        feature = FEATURES[name]
        case = Case(feature, BATCHES["full_prefill"])
        variant = feature.sliding_window is not None, feature.logits_soft_cap is not None
        for kernel in ("fa2", "fa3"):
            size, dtype = case.heads.head_size, torch.bfloat16
            yield prefill_module(kernel, dtype, dtype, size, *variant)


def of_latent(case: LatentCase) -> Module:
    """The modules that FLASHINFER_MLA's wrapper compiles for a case; types and widths decide."""
    builder = LatentTrial(FlashInferMlaBackend, case, torch.device("cpu")).builder()
    sizes, kernel = builder.sizes, builder._choice.kernel.value
    given = sizes.query_dtype, sizes.kv_dtype, sizes.rank, sizes.rope_size
    return latent_module(kernel, *given)


def latent_groups() -> Iterator[tuple[str, list[LatentCase]]]:
    """Tests of FLASHINFER_MLA by name, with one case for each combination of types and widths."""
    own = [case for case in cases_for(FlashInferMlaBackend) if isinstance(case, LatentCase)]
    gpu = test_gpu_flashinfer_mla
    others = [gpu.case_of(BATCHES[name], cache) for name in gpu.NAMES for cache in gpu.CACHES]
    for name, listed in (("conformance", own), ("gpu", others)):
        kept = {(case.dtype, case.cache_dtype, case.rank, case.rope_size): case for case in listed}
        yield f"{name}/FLASHINFER_MLA", list(kept.values())


def all_modules(version: str) -> dict[str, Module]:
    """Every module, by group and name."""
    found: dict[str, Module] = {}
    with emulated(version):
        for group, backend, own in groups():
            for case in own:
                for module in modules_of(backend, case):
                    found[f"{group}/{named(module)}"] = module
        for group, latents in latent_groups():
            for one in latents:
                module = of_latent(one)
                found[f"{group}/{named(module)}"] = module
    found[f"gpu/rope/{named(ROPE_MODULE)}"] = ROPE_MODULE
    for bench_case in LATENT_VENDOR_CASES:
        for module in modules_of_bench(bench_case):
            found[f"bench/trtllm_mla/{named(module)}"] = module
    for module in beside_other_prefills():
        found[f"gpu/TRTLLM_MHA/mixed/{named(module)}"] = module
    for module in of_both_kernels():
        found[f"gpu/FLASHINFER/{named(module)}"] = module
    return dict(sorted(found.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """List or compile the modules that match a pattern; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m tests.emulators.flashinfer_modules", description=__doc__
    )
    parser.add_argument("pattern", nargs="*", default=["*"])
    parser.add_argument("--list", action="store_true", help="Compile nothing.")
    parser.add_argument("--version", default=installed_version(), help="Of FlashInfer.")
    options = parser.parse_args(arguments)
    known = all_modules(options.version)
    chosen = {
        name: module
        for name, module in known.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.pattern)
    }
    if not chosen:
        print(f"error: no module matches {options.pattern}", file=sys.stderr)
        return 2
    for name in chosen:
        print(name)
    print(f"{len(set(chosen.values()))} modules")
    return 0 if options.list or compile_modules(chosen.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
