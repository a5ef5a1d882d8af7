"""Prompts of a batch-invariant engine on the Hopper kernel: bits, then times. See README.

PYTHONPATH=CHECKOUT_OF_BRANCH_seg python seg.py
Everything compiles side by side; times come last, in one process. Lines are printed as they come.
"""
import contextlib, os, queue, subprocess, sys, threading, time, traceback
from dataclasses import replace
from unittest import mock

START = time.time()
HERE = os.path.abspath(__file__)
CORES = int(os.environ.get("CORES", 0)) or max(12, (os.cpu_count() or 12) - 2)
# heads, KV heads, head size, query tokens, keys; ways beside the default
TIMES = {
    "1x4k 16/8/256": (16, 8, 256, 4096, 4096, ["single", "pairs", "single", "pairs"]),
    "1x4k 16/8/192": (16, 8, 192, 4096, 4096, ["single", "pairs", "single", "pairs"]),
}
BITS = {
    "16/8/192": ("pairs", [dict(heads=(16, 8, 192))]),
    "16/8/256": ("pairs", [dict(heads=(16, 8, 256), keys=30000)]),
}


def device():
    import torch
    return torch.device(os.environ.get("DEV", "cuda"))


@contextlib.contextmanager
def tiled(way):
    """The Hopper tile of a batch-invariant engine: "single" is the form of before this branch."""
    import attn.kernels.dense.hopper_prefill.launch as launch, builders.dense.choice as choice
    if way == "default":
        yield
        return
    own = choice._segmented_tile

    def made(packed, run, kv_tile, width, extra):
        tile, columns = own(packed, run, kv_tile, width, extra), width + extra
        stores, halves, q, kib = True, 2 if way == "pairs" else 1, 1, 216 * 1024
        keys = kv_tile * halves
        stages = min((kib - q * 256 * columns) // (4 * keys * columns), 6)
        return replace(tile, kv_tile=keys, run=min(run, keys), query_stages=q, num_stages=stages, registers=232 if stores else 240, stores_totals=stores, halves=halves)

    with mock.patch.object(choice, "_segmented_tile", made):
        yield


def parts(found, whole):
    lse = int((found[1] != whole[1]).sum())
    out = int((found[0] != whole[0]).any(-1).sum())
    nan = any(bool(x.isnan().any()) for x in (*found, *whole))
    return "same" if lse == out == 0 and not nan else f"LSE {lse}, outputs {out} of {found[1].numel()}{' NaN' if nan else ''}"


def bits(name):
    from specs.dtypes import DType
    from specs.engine import PrefillKernel
    from tests.dense.chunked import Prompt, Setup
    way, setups = BITS[name]
    said, bad = [], False
    with tiled(way):
        for kw in setups:
            kw = dict(kw)
            if "dtype" in kw:
                kw["dtype"] = DType(kw["dtype"])
            make = lambda kernel: Prompt(Setup(**kw, prefill=kernel, beside=9000), device())
            p = make(PrefillKernel.HOPPER)
            last = p.setup.queries
            whole = p.rows(0, last)
            t = p.builder.planner.hopper
            said.append(f"[{p.setup.keys} keys, tile {t.query_tile} tokens x {t.kv_tile} keys, {t.num_stages} stages, {t.halves} halves]")
            checks = [("again", p.rows(0, last), 0), ("portable", make(PrefillKernel.TRITON).rows(0, last), 0)]
            if last == 8192:
                checks += [("2048", p.in_chunks(2048), 0), ("decodes from 511", p.in_chunks(1, 511, 514), 511), ("4 from 8150", p.in_chunks(4, 8150, 8162), 8150), ("64 from 1000", p.in_chunks(64, 1000, 1640), 1000)]
            else:
                checks += [(f"chunks of {n}", p.in_chunks(n, start), start) for n, start in ((1, last - 4), (7, last - 21), (64, last - 256), (300, 0))]
                near = min(8000, p.setup.keys - 100)
                checks.append(("beside others", p.rows(0, last, ((1, near), (50, near // 2))), 0))
            for what, found, a in checks:
                text = parts(found, (whole[0][a : a + len(found[0])], whole[1][a : a + len(found[1])]))
                bad |= text != "same"
                said.append(f"{what}: {text}")
    return f"{'BAD' if bad else 'ok'} {name}, {way}: " + ", ".join(said)


def attends(name, ways):
    """Times of the ways to compute a prompt; only runs them if one is given."""
    import torch
    from attn.backends.triton_attn import TritonAttentionBackend
    from attn.testing.batches import Layer
    from builders.batch import CommonAttentionMetadata
    from specs.dtypes import DType
    from specs.engine import EngineConfig, Kernels, PrefillKernel
    from specs.kv_cache import FullAttentionSpec
    heads, kv_heads, size, q, k, _ = TIMES[name]
    d, g = device(), torch.Generator(device()).manual_seed(0)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_size=size, dtype=DType.BFLOAT16)
    blocks = k // 16 + 2
    cache = spec.layout().allocate(blocks, d, fill_byte=0)
    table = (torch.randperm(blocks - 1, device=d, generator=g)[: k // 16] + 1).int().view(1, -1)
    rows = lambda n, h: torch.randn(n, h, size, device=d, generator=g).bfloat16()
    query, one = rows(q, heads), torch.ones((), device=d)
    base = own = first = None
    for number, way in enumerate(ways):
        kernels = {} if way == "default" else {"kernels": Kernels.own(PrefillKernel.HOPPER)}
        config = EngineConfig(max_model_len=16384, max_num_seqs=8, max_num_batched_tokens=8192, num_heads=heads, batch_invariant=way != "default", **kernels)
        impl = TritonAttentionBackend.get_impl_cls()(heads, size, size**-0.5, kv_heads, None, None, "auto")
        layer = Layer(one, one, one)
        if not number:
            impl.do_kv_cache_update(layer, rows(blocks * 16, kv_heads), rows(blocks * 16, kv_heads), cache, torch.arange(blocks * 16, device=d))
        with tiled(way):
            builder = TritonAttentionBackend.get_builder_cls()(spec, ["l"], config, d)
            record = builder.build(0, CommonAttentionMetadata.from_lengths([q], [k], table, 16))
            o = torch.full_like(query, 7.0)
            run = lambda: impl.forward(layer, query, None, None, cache, record, o)
            run()
            if d.type == "cuda":
                torch.cuda.synchronize()
            if len(ways) == 1:
                return ""
            import triton
            t = triton.testing.do_bench(run, warmup=10, rep=50, return_mode="median") * 1000
            run()
        if way == "default":
            base, first, note = o, t, ""
        else:
            note = f", off {float((o.float() - base.float()).norm() / base.float().norm()):.1e}"
            if way == "single":
                own = o
            else:
                other = int((o != own).any(-1).sum())
                note += f", {'same bits' if not other else f'OTHER BITS in {other} rows'} as single"
        print(f"  {name}: {way} {t:.1f} us ({t / first:.3f}{note})", flush=True)
    return ""


def task(arguments, limit):
    """One case in a process of its own; its last words if it fails, or does not end in time."""
    begun = time.time()
    try:
        done = subprocess.run([sys.executable, HERE, "task", *map(str, arguments)], capture_output=True, text=True, timeout=limit)
        text = done.stdout.strip()
        if done.returncode:
            text += f"\nFAILED {arguments}: {done.stderr.strip().splitlines()[-1:]}"
    except subprocess.TimeoutExpired as late:
        text = f"{(late.stdout or b'').decode().strip()}\nLATE {arguments}: nothing after {limit:.0f} s"
    if text.strip() or os.environ.get("SAY"):
        print(f"[{time.time() - START:.0f} s, took {time.time() - begun:.0f}] {arguments if os.environ.get('SAY') else ''} {text.strip()}", flush=True)


def side_by_side(tasks, end):
    todo = queue.Queue()
    for one in tasks:
        todo.put(one)

    def work():
        with contextlib.suppress(queue.Empty):
            while True:
                one = todo.get_nowait()
                left = end - (time.time() - START)
                if left > 5:
                    task(one, left)
                else:
                    print(f"LATE {one}: not begun", flush=True)

    threads = [threading.Thread(target=work) for _ in range(CORES)]
    for t in threads: t.start()
    for t in threads: t.join()


if __name__ == "__main__":
    if sys.argv[1:2] == ["task"]:
        kind, name, *rest = sys.argv[2:]
        try:
            print(bits(name) if kind == "bits" else attends(name, rest or ["default", *TIMES[name][-1]]), flush=True)
        except Exception as e:
            print(f"FAILED {kind} {name} {rest}: {type(e).__name__} {str(e)[:400]!r} {' '.join(traceback.format_exc().splitlines()[-3:-1])[:300]}", flush=True)
        sys.exit()
    if sys.argv[1:2] == ["times"]:
        for name in TIMES:
            try:
                attends(name, ["default", *TIMES[name][-1]])
            except Exception as e:
                print(f"FAILED times {name}: {type(e).__name__} {str(e)[:300]!r}", flush=True)
        sys.exit()
    compiled = [("times", name, way) for name in TIMES for way in ("pairs", "single", "default")]
    side_by_side([*[("bits", name) for name in BITS], *compiled], 75)
    print(f"compiled: {time.time() - START:.0f} s", flush=True)
    for what, most in (("times", 20),):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([sys.executable, HERE, what], timeout=max(min(most, 95 - (time.time() - START)), 5))
    print(f"{time.time() - START:.0f} s")
