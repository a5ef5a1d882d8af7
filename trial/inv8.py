"""Batch invariance over 8-bit caches on one Hopper GPU: bits, then times. About 100 s.

    PYTHONPATH=<checkout of branch inv8> python trial/inv8.py

Processes side by side compile and compare bits; one process, alone on the GPU, checks results with
float64 and measures. Lines are printed as they come. ``ok`` and ``BAD`` begin the lines on bits.

Ways to serve a batch-invariant engine: ``before`` gives every row to the split-KV kernel in tiles
of 16 query tokens, as the parent of this branch; ``now`` is the branch; ``q64w4`` and ``q128w8``
are ``now`` with prompts in tiles of 64 rows by four warps and of 128 rows by eight, with outputs of
earlier segments in memory. ``default`` and ``portable`` are engines without batch invariance, with
the backend's choice of kernels and with portable kernels. ``fa3`` and ``fa3_one_split`` are
FlashAttention-3, the latter the one that is batch-invariant too; their query is fp8.

On a computer without a GPU: DEV=cpu TRITON_INTERPRET=1 SMALL=1 python trial/inv8.py
"""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from unittest import mock

START = float(os.environ.setdefault("INV8_START", str(time.time())))
HERE = os.path.abspath(__file__)
SMALL = bool(os.environ.get("SMALL"))
CORES = int(os.environ.get("CORES", 0)) or 12
BITS_END, END = (3600, 3600) if SMALL else (70, 112)
FP8, E5M2, INT8, FP8_TOKEN = "fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head"

# Fields of tests.dense.chunked.Setup.
LAYERS = {
    "e4m3 128": dict(heads=(32, 8, 128), cache_dtype=FP8),
    "e4m3 64": dict(heads=(32, 8, 64), cache_dtype=FP8),
    "int8 128": dict(heads=(32, 8, 128), cache_dtype=INT8),
    "int8 64": dict(heads=(32, 8, 64), cache_dtype=INT8),
    "e4m3 128, 8192 tokens": dict(heads=(32, 8, 128), cache_dtype=FP8, keys=8192, queries=8192),
    "int8 64, 8192 tokens": dict(heads=(32, 8, 64), cache_dtype=INT8, keys=8192, queries=8192),
    "e4m3 256": dict(heads=(16, 8, 256), cache_dtype=FP8),
    "e4m3 128 fp16, scales of heads": dict(
        heads=(8, 1, 128), cache_dtype=FP8, dtype="float16", head_scales=True
    ),
    "e4m3 128, 64 rows": dict(heads=(16, 1, 128), cache_dtype=FP8),
    "e4m3 128, 30000 keys": dict(heads=(32, 8, 128), cache_dtype=FP8, keys=30000),
    "e4m3 128, window, cap, sinks": dict(
        heads=(32, 8, 128), cache_dtype=FP8, window=1000, soft_cap=30.0, sinks=True
    ),
    "e5m2 128": dict(heads=(32, 8, 128), cache_dtype=E5M2),
    "fp8 per token 128, alibi": dict(heads=(32, 8, 128), cache_dtype=FP8_TOKEN, alibi=True),
}
# What is timed: query and KV lengths, cache, ways. Heads are 32/8/128 unless a fifth field says so.
DECODE = ["default", "portable", "before", "now", "fa3", "fa3_one_split"]
PROMPT = ["default", "portable", "before", "now", "q64w4", "q128w8", "fa3_one_split"]
TIMES = {
    "decode 128 x 8k e4m3": ([1] * 128, [8192] * 128, FP8, DECODE),
    "decode 32 x 4k e4m3": ([1] * 32, [4096] * 32, FP8, DECODE),
    "prompt 1 x 8k e4m3": ([8192], [8192], FP8, PROMPT),
    "decode 1 x 8k e4m3": ([1], [8192], FP8, DECODE),
    "decode 32 x 4k int8": ([1] * 32, [4096] * 32, INT8, DECODE[:4]),
    "prompt 1 x 8k int8": ([8192], [8192], INT8, PROMPT[1:6]),
    "prompt 1 x 8k e4m3 64/8/64": ([8192], [8192], FP8, PROMPT, (64, 8, 64)),
    "decode 32 x 8k e4m3 64/8/64": ([1] * 32, [8192] * 32, FP8, DECODE, (64, 8, 64)),
}
if SMALL:
    small = dict(heads=(2, 1, 128), keys=1100, queries=40, max_len=2048)
    LAYERS = {"e4m3 128": small | dict(cache_dtype=FP8), "int8 64": small | dict(cache_dtype=INT8)}
    TIMES = {
        "decode": ([1] * 2, [600] * 2, FP8, DECODE, (2, 1, 128)),
        "prompt int8": ([80], [600], INT8, PROMPT[1:6], (2, 1, 128)),
    }


def device():
    """The device of all tensors."""
    import torch

    return torch.device(os.environ.get("DEV", "cuda"))


@contextlib.contextmanager
def served(way):
    """Builders made inside serve a batch-invariant engine that way."""
    import builders.dense.choice as choice
    import builders.dense.triton_attn as builder
    from builders.splitkv.tiles import PrefillTile

    with contextlib.ExitStack() as stack:
        if way == "before":
            none = mock.patch.object(builder, "segmented_prefill_of", return_value="as before")
            stack.enter_context(none)
        sizes = {"q64w4": (64, 4), "q128w8": (128, 8)}.get(way)
        if sizes:
            rows, warps = sizes
            tile = lambda shape, gpu, split: PrefillTile(  # noqa: E731
                rows, split.kv_tile, warps, 2, stores_totals=True
            )
            stack.enter_context(mock.patch.object(choice, "segmented_tile", tile))
        yield


def parts(found, whole):
    """In words, how many rows of ``found`` have other bits than those of ``whole``."""
    lse = int((found[1] != whole[1]).sum())
    out = int((found[0] != whole[0]).any(-1).sum())
    nan = any(bool(x.isnan().any()) for x in (*found, *whole))
    if lse == out == 0 and not nan:
        return "same"
    return f"LSE {lse}, outputs {out} of {found[1].numel()}{' NaN' if nan else ''}"


def bits(name):
    """Compare the rows of a prompt with those of its decodes, verifies and chunks."""
    from specs.dtypes import CacheDType, DType
    from tests.dense.chunked import Prompt, Setup

    fields = dict(LAYERS[name])
    fields["cache_dtype"] = CacheDType(fields["cache_dtype"])
    if "dtype" in fields:
        fields["dtype"] = DType(fields["dtype"])
    prompt = Prompt(Setup(**fields, beside=9000), device())
    last, keys, planner = prompt.setup.queries, prompt.setup.keys, prompt.builder.planner
    tile, prefill = planner.tile, planner.prefill
    if not planner.is_segmented:
        return f"BAD {name}: every row goes to the split-KV kernel"
    whole = prompt.rows(0, last)
    plan = [
        *((1, last - 20, last), (4, last - 40, last), (7, last - 70, last), (64, last - 320, last)),
        (300, 0, min(last, 900)),
    ]
    if last == 8192:
        plan += [(2048, 0, last), (1, 0, 3), (1, 511, 514), (4, 4000, 4012), (64, 1000, 1640)]
    checks = [("again", prompt.rows(0, last), 0)]
    for size, start, stop in plan:
        start = max(start, 0)
        checks.append((f"{size} from {start}", prompt.in_chunks(size, start, stop), start))
    near = max(min(8000, keys - 100), 1)
    others = ((1, near), (min(50, near // 2), near // 2))
    checks.append(("prompt beside others", prompt.rows(0, last, others), 0))
    checks.append(("decode beside others", prompt.rows(last - 1, last, others * 3), last - 1))
    said, bad = [], False
    for what, found, at in checks:
        stop = at + len(found[0])
        text = parts(found, (whole[0][at:stop], whole[1][at:stop]))
        bad |= text != "same"
        said.append(f"{what}: {text}")
    return (
        f"{'BAD' if bad else 'ok'} {name} [decode {tile.rows} x {tile.kv_tile} by {tile.num_warps} "
        f"warps, prompt {prefill.query_tile} x {prefill.kv_tile} by {prefill.num_warps}] "
        + ", ".join(said)
    )


def case_of(name, warm):
    """The timed case of a name; one with few keys if its kernels are only compiled."""
    from attn.bench.cases.case import CaseKind, KernelCase
    from specs.dtypes import CacheDType

    queries, keys, cache, _, *heads = TIMES[name]
    h, k, d = heads[0] if heads else (32, 8, 128)
    if warm and queries[0] == 1:
        # The compiled variant depends on the number of requests, and on no length.
        keys = [min(length, 64) for length in keys]
    return KernelCase(
        name="case", kind=CaseKind.DECODE if queries[0] == 1 else CaseKind.PREFILL, num_heads=h,
        num_kv_heads=k, head_size=d, query_lens=tuple(queries), seq_lens=tuple(keys),
        kv_cache_dtype=CacheDType(cache),
    )  # fmt: skip


def engine(layer, case, way):
    """The call of one forward, its output, and the kernel's tile in words."""
    import torch

    from attn.backends.triton_attn import TritonAttentionBackend
    from attn.bench.measure.ours import PLAIN_KERNELS, engine_config, kv_cache_spec
    from specs.engine import Kernels

    is_ours = way not in ("default", "portable")
    kernels = PLAIN_KERNELS if way == "portable" else Kernels()
    with served(way):
        builder = TritonAttentionBackend.get_builder_cls()(
            kv_cache_spec(case), ["l"], engine_config(case, is_ours, kernels), layer.kv_cache.device
        )
    record = builder.build(0, layer.batch)
    query = layer.content.query
    output = torch.full_like(query, float("nan"))

    def call():
        layer.impl.forward(layer.scales, query, None, None, layer.kv_cache, record, output)

    return call, output


def layer_of(name, warm):
    """The layer of a timed case; int8 is made of the rows of a 16-bit case."""
    import torch

    from attn.bench.cases.inputs import make_content
    from attn.bench.measure.ours import make_layer
    from attn.bench.settings import KernelBench
    from specs.dtypes import CacheDType

    case, generator = case_of(name, warm), torch.Generator().manual_seed(1)
    is_int8 = case.kv_cache_dtype is CacheDType.INT8_PER_TOKEN_HEAD
    drawn = case.model_copy(update={"kv_cache_dtype": CacheDType.AUTO}) if is_int8 else case
    content = make_content(drawn, device(), generator)
    member = KernelBench(backend="TRITON_ATTN").member
    return case, make_layer(member, replace(content, case=case), generator), content


def times(name, ways, warm=False):
    """Compute a case in all ways, compare results, and measure; only run them if ``warm``."""
    import torch

    from attn.bench.cases.inputs import expected_rows
    from attn.bench.measure.judge import output_of
    from attn.bench.measure.timing import graph_times_us, make_clock, time_interleaved
    from attn.bench.peers.dense import KernelRun, prepare_peer

    case, layer, content = layer_of(name, warm)
    calls, said = {}, []
    expected = None if warm else expected_rows(content)
    # Rows of int8 differ from those that float64 reads by their rounding.
    most = 4e-2 if case.kv_cache_dtype.value == INT8 else 1e-2
    for way in ways:
        try:
            if way.startswith("fa3"):
                run = prepare_peer(way, content)
                if not isinstance(run, KernelRun):
                    said.append(f"{way}: {run.reason[:90]}")
                    continue
                run.call()
                error, limit = expected.error_of(output_of(run)), run.tolerance
                calls[way] = run.call
            else:
                call, output = engine(layer, case, way)
                call()
                if warm:
                    continue
                error, limit = expected.error_of(output), most
                calls[way] = call
            said.append(f"{way}: error {error:.1e}{'' if error < limit else ' WRONG'}")
        except Exception as problem:
            said.append(f"{way}: {type(problem).__name__} {str(problem)[:160]}")
    if device().type == "cuda":
        torch.cuda.synchronize()
    if warm:
        return "; ".join(said)
    found = time_interleaved(calls, make_clock(device(), 10), 2 if SMALL else 5, 10)
    graphs = graph_times_us(calls, device(), 3, {}) or {}
    base = found["default" if "default" in found else next(iter(found))].median_us
    print(f"{name}: " + "  ".join(
        f"{way} {t.median_us:.1f} ({t.median_us / base:.3f}, +-{t.spread * 100:.1f}%"
        + (f", graph {graphs[way].median_us:.1f})" if way in graphs else ")")
        for way, t in found.items()
    ) + f"  [{time.time() - START:.0f} s]", flush=True)  # fmt: skip
    print("    " + "; ".join(said), flush=True)
    return ""


def task(arguments, limit):
    """One case in a process of its own; its last words if it fails, or does not end in time."""
    begun = time.time()
    command = [sys.executable, HERE, "task", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        text = done.stdout.strip()
        if done.returncode:
            text += f"\nFAILED {arguments}: {done.stderr.strip().splitlines()[-1:]}"
    except subprocess.TimeoutExpired as late:
        heard = late.stdout or b""
        text = heard if isinstance(heard, str) else heard.decode()
        text = f"{text.strip()}\nLATE {arguments}: nothing after {limit:.0f} s"
    if text.strip():
        print(
            f"[{time.time() - START:.0f} s, took {time.time() - begun:.0f}] {text.strip()}",
            flush=True,
        )


def side_by_side(tasks):
    """Run tasks in :data:`CORES` processes at a time."""
    todo = queue.Queue()
    for one in tasks:
        todo.put(one)

    def work():
        with contextlib.suppress(queue.Empty):
            while True:
                one = todo.get_nowait()
                left = BITS_END - (time.time() - START)
                if left > 5:
                    task(one, left)
                else:
                    print(f"LATE {one}: not begun", flush=True)

    threads = [threading.Thread(target=work) for _ in range(CORES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    """The command, and the processes that it starts."""
    if sys.argv[1:2] == ["task"]:
        kind, name, *ways = sys.argv[2:]
        try:
            import torch

            with torch.inference_mode():
                print(bits(name) if kind == "bits" else times(name, ways, warm=True), flush=True)
        except Exception as e:
            where = " ".join(traceback.format_exc().splitlines()[-3:-1])[:300]
            print(f"FAILED {kind} {name} {ways}: {type(e).__name__} {str(e)[:300]!r} {where}")
        return
    if sys.argv[1:2] == ["times"]:
        import torch

        for name, (*_, ways) in {n: t[:4] for n, t in TIMES.items()}.items():
            if time.time() - START > END - 4:
                print("out of time before", name, flush=True)
                break
            try:
                with torch.inference_mode():
                    times(name, ways)
            except Exception as e:
                print(f"FAILED times {name}: {type(e).__name__} {str(e)[:300]!r}", flush=True)
                traceback.print_exc(limit=-4)
            if device().type == "cuda":
                torch.cuda.empty_cache()
        return
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["nvidia-smi", "-L"], check=False)
    # The variants that are timed are compiled here: of each case all ways of ours, in two tasks.
    warm = []
    for name, (*_, ways) in {n: t[:4] for n, t in TIMES.items()}.items():
        own = [way for way in ways if not way.startswith("fa3")]
        warm += [("warm", name, *own[::2]), ("warm", name, *own[1::2])]
    # The first three cases matter most.
    checks = [("bits", name) for name in LAYERS]
    side_by_side([*warm[:6], *checks, *warm[6:]])
    print(f"compiled: {time.time() - START:.0f} s", flush=True)
    print("us, median of 50 calls, L2 flushed (/ default, spread, in a graph: warm L2)", flush=True)
    left = max(END + 4 - (time.time() - START), 5)
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, HERE, "times"], timeout=left, check=False)
    print(f"{time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
