"""Dense attention at head sizes between powers of two: today's form beside variants, and FA3.

    PYTHONPATH=<checkout> python odd.py            # everything, about 80 s

Every variant first runs on a small batch, in forked processes, which compiles it into Triton's
cache and compares it with float64; what fails, hangs or is late there is not timed.
"""

import dataclasses
import os
import sys
import time

START = time.time()
os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/odd_triton")
# A check for a GPU must not start CUDA here: this process forks.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch

import builders.dense.choice as choice
from attn.bench.cases.case import CaseKind, make_case
from attn.bench.cases.inputs import expected_rows, make_content
from attn.bench.measure.judge import check_run
from attn.bench.measure.ours import make_builder, make_layer, our_run
from attn.bench.measure.timing import CudaClock, time_interleaved
from attn.registry import AttentionBackendEnum
from specs.engine import DecodeKernel, Kernels, PrefillKernel

PATCH = {}


def _patched(name):
    plain = getattr(choice, name)

    def found(*given, **named):
        tile = plain(*given, **named)
        if isinstance(tile, str):
            return tile
        return dataclasses.replace(tile, **{k: v for k, v in PATCH.items() if hasattr(tile, k)})

    setattr(choice, name, found)


_patched("hopper_tile")
_patched("hopper_decode_tile")

PLAIN = None  # the portable kernel
AS_IS = {}
D = CaseKind.DECODE
V = CaseKind.VERIFY
P = CaseKind.PREFILL
C2 = {"consumers": 2}


def dec(heads, requests, variants, **fields):
    return D, heads, requests, {"plain": PLAIN, "hopper": AS_IS, **variants}, fields


PADDED = {"width": 128, "extra": 0, "num_stages": 2, "query_stages": 2, "kv_tile": 128}
PADDED_WIDE = {
    "width": 256, "extra": 0, "num_stages": 2, "query_stages": 1, "kv_tile": 64, "registers": 224,
}
THREE = {
    "warp_groups": 3, "registers": 160, "query_stages": 1, "kv_tile": 64, "num_stages": 4, "run": 16,
}
S2, S3 = {"num_stages": 2}, {"num_stages": 3}
HELD = {"registers": 232}
OF_64 = {"padded": PADDED, "split": AS_IS, "s2": S2, "three": THREE, "held": HELD}
OF_160 = {
    "padded": PADDED_WIDE, "split": AS_IS, "k128": {"kv_tile": 128, "num_stages": 2, "run": 16},
}
OF_192 = {
    "padded": PADDED_WIDE, "split": AS_IS, "s2": S2, "s2q2": {"num_stages": 2, "query_stages": 2},
}
# The most important first: what is not reached in time is left out.
CASES = {
    "d192_1": dec((8, 1, 192), [(32, 1, 8192)], {"s3": S3}),
    "p80": (P, (32, 8, 80), [(1, 8192, 8192)], OF_64, {}),
    "d96_8": dec((32, 8, 96), [(32, 1, 8192)], {"s3": S3, "c2": C2}),
    "p192": (P, (16, 8, 192), [(1, 8192, 8192)], OF_192, {}),
    "d80_8": dec((32, 8, 80), [(32, 1, 8192)], {"s2": S2, "c2": C2}),
    "p96": (P, (32, 8, 96), [(1, 8192, 8192)], OF_64, {}),
    "d192_8": dec((32, 8, 192), [(32, 1, 4096)], {"s3": S3}),
    "p160": (P, (16, 8, 160), [(1, 8192, 8192)], OF_160, {}),
    "d160_8": dec((32, 8, 160), [(32, 1, 4096)], {"s2": S2}),
    "p112": (P, (32, 8, 112), [(1, 8192, 8192)], {"padded": AS_IS}, {}),
    "d112_8": dec((32, 8, 112), [(32, 1, 8192)], {"c2": C2}),
    "d96_1": dec((8, 1, 96), [(32, 1, 8192)], {"c2": C2}),
    "d80_b1": dec((32, 8, 80), [(1, 1, 8192)], {"c2": C2}),
    "d96_mha": dec((32, 32, 96), [(16, 1, 4096)], {"c2": C2}),
    "c192": (P, (16, 8, 192), [(1, 2048, 16384)], {"padded": PADDED_WIDE, "split": AS_IS}, {}),
    "p80_mha": (P, (32, 32, 80), [(4, 2048, 2048)], {"padded": PADDED, "split": AS_IS}, {}),
    "d96_win": dec((32, 8, 96), [(32, 1, 8192)], {}, sliding_window=1024),
    "v96_4": (
        V, (32, 8, 96), [(32, 4, 8192)], {"plain": PLAIN, "hopper": AS_IS},
        {"num_speculative_tokens": 3},
    ),
    "v96_8": (
        V, (32, 8, 96), [(32, 8, 4096)], {"plain": PLAIN, "hopper": AS_IS},
        {"num_speculative_tokens": 7},
    ),
    "d192_fp8": dec((32, 8, 192), [(32, 1, 8192)], {}, kv_cache_dtype="fp8_e4m3"),
    "d96_fp8": dec((32, 8, 96), [(32, 1, 8192)], {}, kv_cache_dtype="fp8_e4m3"),
    "p144": (P, (16, 8, 144), [(1, 8192, 8192)], OF_160, {}),
}
DEVICE = torch.device(os.environ.get("ODD_DEVICE", "cuda"))


def case_of(name, small):
    kind, heads, requests, variants, fields = CASES[name]
    if small:
        requests = [
            (min(n, 2), new, length)
            for n, new, length in ([(2, 777, 1301)] if kind is P else [(2, requests[0][1], 3001)])
        ]
    return make_case(name, kind, heads, requests, **fields), variants


def runs_of(name, small, wanted=None):
    """Content, and runs of ours by variant; each is launched once with its patch in place."""
    case, variants = case_of(name, small)
    member = AttentionBackendEnum["TRITON_ATTN"]
    generator = torch.Generator().manual_seed(7)
    content = make_content(case, DEVICE, generator)
    layer = make_layer(member, content, generator)
    runs = {}
    for variant, patch in variants.items():
        if wanted is not None and variant not in wanted:
            continue
        PATCH.clear()
        kernels = Kernels.own(PrefillKernel.TRITON, DecodeKernel.TRITON)
        if patch is not None:
            PATCH.update(patch)
            kernels = Kernels.own(PrefillKernel.HOPPER, DecodeKernel.TRITON)
            if case.kind is not P:
                kernels = Kernels.own(PrefillKernel.TRITON, DecodeKernel.HOPPER)
        try:
            impl = member.get_class().get_impl_cls()(
                case.num_heads, case.head_size, case.scale, case.num_kv_heads, None,
                case.sliding_window, case.kv_cache_dtype.value, None, "decoder", None,
            )
            own = dataclasses.replace(layer, impl=impl)
            run = our_run(own, make_builder(member, own, kernels=kernels))
            run.call()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            runs[variant] = run
            yield content, variant, run
        except Exception as error:  # noqa: BLE001
            yield content, variant, f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            PATCH.clear()


def warm(task):
    """Compile a variant and compare it with float64; returns its error, or why there is none."""
    name, variant = task
    for content, _, run in runs_of(name, True, (variant,)):
        if isinstance(run, str):
            return run
        found = check_run(variant, run, expected_rows(content))
        return found if isinstance(found, float) else found.reason


def main(names, compiling_s):
    from concurrent.futures import ProcessPoolExecutor, wait
    from multiprocessing import get_context

    print(f"imported after {time.time() - START:.0f} s", flush=True)
    # Forked before this process uses the GPU: nothing is imported again.
    pool = ProcessPoolExecutor(min(16, os.cpu_count() or 1), get_context("fork"))
    tasks = [(name, variant) for name in names for variant in CASES[name][3]]
    futures = {task: pool.submit(warm, task) for task in tasks}
    done, late = wait(futures.values(), timeout=compiling_s - (time.time() - START))
    workers = [*pool._processes.values()]
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.kill()
    good = {}
    for (name, variant), future in futures.items():
        if future in late:
            print("LATE", name, variant)
            continue
        found = future.result() if future.exception() is None else repr(future.exception())[:300]
        if isinstance(found, float):
            good.setdefault(name, set()).add(variant)
        else:
            print("BAD", name, variant, found)
    print(f"compiled and checked after {time.time() - START:.0f} s", flush=True)
    torch.cuda.init()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    from attn.bench.peers.dense import KernelRun, prepare_peer

    clock = CudaClock(DEVICE, 10)
    for name in names:
        if name not in good:
            continue
        try:
            row(name, good[name], clock, KernelRun, prepare_peer)
        except Exception as error:  # noqa: BLE001
            print("FAILED", name, f"{type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"done after {time.time() - START:.0f} s")


def row(name, variants, clock, peer_type, prepare_peer):
    runs, expected, content = {}, None, None
    for content, variant, run in runs_of(name, False, variants):
        if isinstance(run, str):
            print("BAD", name, variant, run)
            continue
        expected = expected or expected_rows(content)
        found = check_run(variant, run, expected)
        if isinstance(found, float):
            runs[variant] = run
        else:
            print("WRONG", name, variant, found.reason)
    peer = prepare_peer("fa3", content)
    if isinstance(peer, peer_type):
        found = check_run("fa3", peer, expected)
        if isinstance(found, float):
            runs["fa3"] = peer
        else:
            print("fa3 WRONG", name, found.reason)
    else:
        print("fa3", name, peer.reason)
    times = time_interleaved({n: r.call for n, r in runs.items()}, clock, 3, 10)
    fa3 = times["fa3"].median_us if "fa3" in times else float("nan")
    cells = [
        f"{n} {t.median_us:.1f} ({t.median_us / fa3:.3f}; {100 * t.spread:.1f} %)"
        for n, t in times.items()
    ]
    case = content.case
    rate = case.rate(min(t.median_us for t in times.values()))
    print(f"{name} | {case.what} | {rate:.0f} {case.unit} | " + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES), float(os.environ.get("ODD_COMPILING", "75")))
