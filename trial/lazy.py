"""Lazy references: bits, times of invariant and default kernels. One GPU, about 80 s."""
import os, subprocess, sys, threading, time, traceback, queue, contextlib
T0 = float(os.environ.setdefault("LZ_T0", str(time.time())))
HERE = os.path.abspath(__file__)
MOST = float(os.environ.get("MOST", "110"))
WARM_END = float(os.environ.get("WARM_END", "60"))
VARIANTS = {"default": (False, 0), "dlazy": (False, 2), "inv": (True, 0), "invheld": (True, 1), "portable": (False, -1), "dlheld": (False, 3)}
TIMES = {
    "pre_1x8k": "default dlazy dlheld inv invheld", "pre_d256_1x8k": "default dlazy dlheld inv invheld", "chunk_2k_of_16k": "default dlazy inv invheld", "pre_16x1k": "default dlazy inv invheld", "pre_sw1k_1x16k": "default inv", "pre_d64_1x8k": "default inv", "pre_fp8_1x8k": "default dlazy",
}
if os.environ.get("ONLY"): TIMES = {k: v for k, v in TIMES.items() if k in os.environ["ONLY"].split()}
LAYERS = {
    "128 8192": dict(heads=(32, 8, 128), keys=8192, queries=8192), "256": dict(heads=(16, 8, 256)), "128 window cap": dict(heads=(32, 8, 128), window=1000, soft_cap=30.0, sinks=True),
    "64": dict(heads=(64, 8, 64)), "192": dict(heads=(16, 8, 192)),
    "128 fp16 one head": dict(heads=(8, 1, 128), dtype="float16"), "96": dict(heads=(32, 32, 96)),
}

def say(*a):
    print(f"[{time.time()-T0:.0f}]", *a, flush=True)

def bits(name):
    import torch
    from specs.dtypes import CacheDType, DType
    from tests.dense.chunked import Prompt, Setup
    fields = dict(LAYERS[name])
    if "cache_dtype" in fields: fields["cache_dtype"] = CacheDType(fields["cache_dtype"])
    if "dtype" in fields: fields["dtype"] = DType(fields["dtype"])
    p = Prompt(Setup(**fields, beside=9000), torch.device("cuda"))
    last = p.setup.queries
    whole = p.rows(0, last)
    plan = [(1, last - 20, last), (4, last - 40, last), (7, last - 70, last), (64, last - 320, last), (300, 0, min(last, 900))]
    if last == 8192: plan += [(2048, 0, last), (1, 0, 3), (1, 511, 514), (4, 4000, 4012)]
    bad = []
    for size, start, stop in plan:
        start = max(start, 0)
        found = p.in_chunks(size, start, stop)
        a, b = (whole[0][start:start + len(found[0])], whole[1][start:start + len(found[0])])
        lse, out = int((found[1] != b).sum()), int((found[0] != a).any(-1).sum())
        nan = any(bool(x.isnan().any()) for x in (*found, a, b))
        if lse or out or nan: bad.append(f"{size}: lse {lse} out {out} nan {nan}")
    return f"{'BAD' if bad else 'ok'} {name} segmented={p.builder.planner.is_segmented} {bad}"

def cases():
    from attn.bench.cases.dense import INVARIANCE_CASES, HOPPER_CASES
    from attn.bench.cases.latent import MLA_CASES
    return {c.name: c for c in (*MLA_CASES, *HOPPER_CASES, *INVARIANCE_CASES)}

def made(case, content, generator, device):
    from attn.bench.measure.ours import make_layer
    from attn.bench.settings import KernelBench
    return make_layer(KernelBench(backend="TRITON_MLA" if case.is_expanded else "TRITON_ATTN").member, content, generator)

def engine(layer, case, way):
    import torch
    from attn.backends.triton_attn import TritonAttentionBackend
    import attn.kernels.dense.hopper_prefill.launch as L
    from attn.bench.measure.ours import PLAIN_KERNELS, engine_config, kv_cache_spec
    from specs.engine import Kernels
    inv, trial = VARIANTS[way]
    impl = layer.impl
    from dataclasses import replace
    L.TRIAL = max(trial, 0)
    kernels = PLAIN_KERNELS if trial < 0 else Kernels()
    if case.is_expanded:
        from attn.bench.measure.ours import make_builder, our_run
        from attn.bench.settings import KernelBench
        run = our_run(layer, make_builder(KernelBench(backend="TRITON_MLA").member, layer, kernels=kernels))
        def call():
            L.TRIAL = max(trial, 0)
            run.call()
        call()
        return call, run.output
    builder = TritonAttentionBackend.get_builder_cls()(kv_cache_spec(case), ["l"], engine_config(case, inv, kernels), layer.kv_cache.device)
    record = builder.build(0, layer.batch)
    query = layer.content.query
    output = torch.full_like(query, float("nan"))
    def call():
        L.TRIAL = max(trial, 0)
        layer.impl.forward(layer.scales, query, None, None, layer.kv_cache, record, output)
    call()
    return call, output

def times(name, warm=None):
    import torch
    from attn.bench.cases.inputs import expected_rows, make_content
    from attn.bench.measure.timing import graph_times_us, make_clock, time_interleaved
    device = torch.device("cuda")
    case, generator = cases()[name], torch.Generator().manual_seed(1)
    content = make_content(case, device, generator)
    calls, said = {}, []
    ways = warm.split("+") if warm else TIMES[name].split()
    expected = None if warm else expected_rows(content)
    for way in ways:
        layer = made(case, content, generator, device)
        call, output = engine(layer, case, way)
        if warm: continue
        calls[way] = call
        said.append(f"{way}: error {expected.error_of(output):.2e}")
    torch.cuda.synchronize()
    if warm: return
    found = time_interleaved(calls, make_clock(device, 10), 6, 10)
    graphs = graph_times_us(calls, device, 3, {}) or {} if name.startswith(("dec", "spec")) else {}
    base = found["default"].median_us
    say(f"{name}: " + "  ".join(f"{w} {t.median_us:.1f} ({t.median_us/base:.3f}, +-{t.spread*100:.1f}%" + (f", graph {graphs[w].median_us:.1f})" if w in graphs else ")") for w, t in found.items()))
    print("    " + "; ".join(said), flush=True)

def task(args, limit):
    t = time.time()
    try:
        d = subprocess.run([sys.executable, HERE, *args], capture_output=True, text=True, timeout=limit)
        text = d.stdout.strip()
        if d.returncode: text += f"\nFAILED {args}: {d.stderr.strip().splitlines()[-3:]}"
    except subprocess.TimeoutExpired:
        text = f"LATE {args}"
    if text.strip(): say(f"took {time.time()-t:.0f}", text.strip())

def main():
    todo = queue.Queue()
    jobs = [("warm", n, w) for n, ws in list(TIMES.items())[:2] for w in ws.split()] + [("bits", n) for n in list(LAYERS)[:5]] + [("warm", n, w) for n, ws in list(TIMES.items())[2:] for w in ws.split()] + [("bits", n) for n in list(LAYERS)[5:]]
    for one in [*jobs, ]: todo.put(one)
    def work():
        with contextlib.suppress(queue.Empty):
            while True:
                one = todo.get_nowait()
                left = WARM_END - (time.time() - T0)
                if left > 5: task(one, left)
                else: say("not begun", one)
    ts = [threading.Thread(target=work) for _ in range(int(os.environ.get("CORES", "15")))]
    [t.start() for t in ts]; [t.join() for t in ts]
    say("compiled")
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, HERE, "times"], timeout=max(5, MOST - (time.time() - T0)), check=False)
    say("done")

if __name__ == "__main__":
    a = sys.argv[1:]
    if not a: main(); sys.exit()
    import torch
    with torch.inference_mode():
        if a[0] == "bits": print(bits(a[1]))
        elif a[0] == "warm": times(a[1], a[2])
        else:
            for n in TIMES:
                try: times(n)
                except Exception: traceback.print_exc(limit=-4)
                torch.cuda.empty_cache()
