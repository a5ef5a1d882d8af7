"""Latent decode over e4m3 on an H200: tiles of 16 rows (before), tiles of 64 rows (after), FlashMLA's fp8 decode.

    PYTHONPATH=<checkout of branch fp8wide> python trial/fp8wide.py

Processes side by side compile; one process, watched for hangs, checks against float64 and then measures. About 100 s.
ROWS="a b" chooses rows, MOST_SECONDS=118 is the limit.
"""
import os, subprocess, sys, threading, time, traceback
from unittest import mock

T0 = float(os.environ.setdefault("TRIAL_T0", str(time.time())))
MOST = float(os.environ.get("MOST_SECONDS", "108"))
SILENT = 25.0
# narrow: batch_invariant=True gives the kernel that every e4m3 cache had before. The others change constants of the wide one.
V = {"narrow": dict(invariant=True), "wide": {}} | {name: dict(layout="k_" + name) for name in ("hot", "nosts", "nofence", "prev", "quart")}
ROWS = [
    ("odd_h128", "wide quart"), ("odd_h64", "wide quart"), ("odd_p16_h20", "wide quart"), ("odd_h16q4", "wide quart"),
    ("h128_b32_4k", "wide prev hot nosts nofence quart flashmla"),
    ("h128_b128_4k", "wide prev hot nosts nofence quart flashmla"),
    ("h64_b64_8k", "wide prev quart flashmla"),
    ("h16q4_b64_4k", "wide prev quart flashmla"),
    ("h128_b1_8k", "wide prev quart flashmla"),
    ("h128_zipf", "wide prev quart flashmla"),
]
WARM = [(name, w) for name, which in ROWS for w in which.split() if w != "flashmla"]
ODD = (1, 63, 64, 65, 129, 500, 512, 513, 1025, 2048, 2049, 9000, 20000, 17, 8193, 300, 4100, 128, 77, 33000)


def cases():
    from attn.bench.cases.latent import _RAGGED, _latent
    lens, verify = [(1, n) for n in ODD], [(1, n + 4) for n in ODD[:14]]
    made = [
        _latent("odd_h128", 128, *lens), _latent("odd_h64", 64, *lens), _latent("odd_p16_h20", 20, *lens),
        _latent("odd_h16q4", 16, *verify, drafts=3), _latent("h128_b32_4k", 128, (32, 4096)), _latent("h128_b128_4k", 128, (128, 4096)),
        _latent("h128_b1_8k", 128, (1, 8192)), _latent("h128_zipf", 128, *_RAGGED), _latent("h64_b64_8k", 64, (64, 8192)),
        _latent("h16q4_b64_4k", 16, (64, 4096), drafts=3),
    ]
    from specs.dtypes import CacheDType
    found = {c.name: c.replace(kv_cache_dtype=CacheDType.FP8_E4M3) for c in made}
    found["odd_p16_h20"] = found["odd_p16_h20"].replace(block_size=16)
    found["bf16_h128_b32_4k"] = _latent("bf16_h128_b32_4k", 128, (32, 4096))
    return found


def kernel_of(layout):
    import importlib
    return importlib.import_module(layout or "attn.kernels.latent.hopper_wide.kernel").hopper_mla_kernel


def member():
    from attn.bench.settings import KernelBench
    return KernelBench(backend="TRITON_MLA").member


def ours(layer, case, name, k_scale=1.0):
    """A run with a variant: the launchers of its impl are made at the first call."""
    from dataclasses import replace
    import attn.kernels.latent.hopper_wide.launch as launch
    from attn.bench.measure.ours import latent_impl, make_builder, our_run
    from attn.impls.base import LayerScales
    from specs.engine import DecodeKernel, Kernels, PrefillKernel
    changed = {key: value for key, value in V[name].items() if key.isupper()}
    made = launch.Launcher

    def launcher(kernel, fixed, *more, **named):
        return made(kernel, fixed | {key: value for key, value in changed.items() if key in fixed}, *more, **named)

    own = replace(layer, impl=latent_impl(member(), case), scales=LayerScales.of(k=k_scale, device=layer.kv_cache.device))
    builder = make_builder(member(), own, V[name].get("invariant", False), kernels=Kernels.own(PrefillKernel.TRITON, DecodeKernel.HOPPER))
    with mock.patch.object(launch, "Launcher", launcher), mock.patch.object(launch, "hopper_mla_kernel", kernel_of(V[name].get("layout"))):
        run = our_run(own, builder)
        run.call()
    return run, own, builder


def layer_of(torch, case, device, seed):
    from attn.bench.cases.inputs import make_content
    from attn.bench.measure.ours import make_layer
    generator = torch.Generator().manual_seed(seed)
    content = make_content(case, device, generator)
    return content, make_layer(member(), content, generator)


def warm(name, which):
    import torch
    case = cases()[name]
    with torch.inference_mode():
        layer = layer_of(torch, case, torch.device("cuda"), 0)[1]
        for one in which.split("+"):
            ours(layer, case, one)
        torch.cuda.synchronize()


def exact(torch, content, k_scale):
    """Every row in float64."""
    case, out, start, token = content.case, [], 0, 0
    for count, length in zip(case.query_lens, case.seq_lens):
        keys = content.rows(content.key, content.slots[start : start + length])[:, 0].double() * k_scale
        query = content.query[token : token + count].double()
        scores = torch.einsum("thd,kd->thk", query, keys) * case.scale
        seen = torch.arange(length, device=keys.device)[None] <= (length - count + torch.arange(count, device=keys.device))[:, None]
        out.append(scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ keys[:, :512])
        start += length; token += count
    return torch.cat(out)


def checked(torch, name, run, builder, own, error_of):
    from attn.bench.measure.judge import output_of
    run.output.fill_(float("nan")); run.call()
    error, bits = error_of(output_of(run)), output_of(run).clone()
    text = f"{name}: error {error:.1e}"
    for _ in range(10):
        run.call(); run.collect()
        if not torch.equal(bits, run.output):
            return text + " CALLS DIFFER", error
    return text, error


def row(torch, case, names, device):
    from attn.bench.cases.inputs import expected_rows
    from attn.bench.measure.judge import output_of
    from attn.bench.measure.timing import graph_times_us, make_clock, time_interleaved
    from attn.bench.peers.dense import KernelRun, prepare_peer
    from attn.bench.peers.latent import LATENT_ADAPTERS
    content, layer = layer_of(torch, case, device, 1)
    is_odd, runs, said = case.name.startswith("odd"), {}, []
    k_scale = 0.75 if is_odd else 1.0
    if is_odd:
        full = exact(torch, content, k_scale)
        error_of = lambda found: float(((found.double() - full).norm(dim=-1) / full.norm(dim=-1)).nan_to_num(9e9).max())
    else:
        error_of = expected_rows(content).error_of
    for name in names:
        try:
            if name in V:
                run, own, builder = ours(layer, case, name, k_scale)
                text, error = checked(torch, name, run, builder, own, error_of)
                limit = run.tolerance
            else:
                run = prepare_peer(name, content, LATENT_ADAPTERS)
                if not isinstance(run, KernelRun):
                    said.append(f"{name}: {run.reason[:160]}"); continue
                run.output.fill_(float("nan")); run.call()
                error, limit = error_of(output_of(run)), run.tolerance
                text = f"{name}: error {error:.1e}"
            said.append(text + ("" if error < limit else " WRONG"))
            runs[name] = run
        except Exception as problem:
            traceback.print_exc(limit=-3)
            said.append(f"{name}: {type(problem).__name__} {str(problem)[:200]}")
    torch.cuda.synchronize()
    print(f"{case.name}: " + "; ".join(said), flush=True)
    if is_odd:
        return
    calls = {name: run.call for name, run in runs.items()}
    times = time_interleaved(calls, make_clock(device, 10), 6, 10)
    graphs = graph_times_us(calls, device, 3, {}) or {}
    print("    us: " + "  ".join(
        f"{name} {time.median_us:.1f} (+-{time.spread * 100:.1f}%" + (f", graph {graphs[name].median_us:.1f})" if name in graphs else ")")
        for name, time in times.items()) + f"  [{time.time() - T0:.0f} s]", flush=True)


def measure(rows):
    import torch
    device, known = torch.device("cuda", 0), cases()
    torch.zeros(1, device=device)
    print("READY", flush=True)
    sys.stdin.readline()
    for name in rows:
        if time.time() - T0 > MOST:
            print("out of time before", name, flush=True); break
        print("ROW", name, flush=True)
        try:
            with torch.inference_mode():
                row(torch, known[name], dict(ROWS)[name].split(), device)
        except Exception:
            traceback.print_exc(limit=-4)
        torch.cuda.empty_cache()
    print("END", flush=True)


def watch(rows, jobs):
    """Run a measuring process; returns the rows behind the one that hung, if one did."""
    here = os.path.abspath(__file__)
    child = subprocess.Popen([sys.executable, here, "--measure", *rows], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last, at, ended = [time.time()], [None], [False]

    def read():
        for line in child.stdout:
            last[0] = time.time()
            if line.startswith("ROW "):
                at[0] = line.split()[1]
            elif line.startswith("END"):
                ended[0] = True
            elif not line.startswith("READY"):
                print(line, end="", flush=True)

    reader = threading.Thread(target=read, daemon=True); reader.start()
    for job, what in jobs:
        try:
            text = job.communicate(timeout=max(1.0, 55 - (time.time() - T0)))[0]
            if job.returncode:
                print("warm", what, "failed:", text[-700:], flush=True)
        except subprocess.TimeoutExpired:
            job.kill(); print("warm", what, "took too long", flush=True)
    if jobs:
        print(f"compiled at {time.time() - T0:.0f} s; us, median of 60 calls, L2 flushed; graph: warm L2", flush=True)
    last[0] = time.time()
    child.stdin.write("go\n"); child.stdin.flush()
    while child.poll() is None:
        if time.time() - last[0] > SILENT or time.time() - T0 > MOST + 8:
            print("HANG or out of time in", at[0], flush=True)
            child.kill(); child.wait(); break
        time.sleep(0.2)
    reader.join(2)
    return [] if ended[0] or at[0] is None else rows[rows.index(at[0]) + 1 :]


def main():
    if os.path.exists("/usr/bin/nvidia-smi"):
        subprocess.run(["nvidia-smi", "-L"])
    jobs = [(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--warm", *what],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), what) for what in WARM]
    rows = os.environ.get("ROWS", " ".join(name for name, _ in ROWS)).split()
    while rows and time.time() - T0 < MOST:
        rows, jobs = watch(rows, jobs), []
    print(f"done at {time.time() - T0:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--warm"]:
        warm(sys.argv[2], sys.argv[3])
    elif sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    else:
        main()
