"""Latent decode on Hopper: whether the wide kernel prefetches, and whether it frees half of a block early.

    PYTHONPATH=<checkout of this branch> python trial/ring.py

Processes side by side compile; one process, watched for hangs, checks and then measures.
"""
import importlib.util, os, subprocess, sys, threading, time, traceback

T0 = float(os.environ.setdefault("EXCH_T0", str(time.time())))
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
MOST = float(os.environ.get("MOST_SECONDS", "110"))
SILENT = 25.0
V = {"base": {}, "c8x512": dict(fold="c8x512"), "nofold": dict(nofold=True), "late": dict(PREFETCH=True, EARLY=False), "narrow": dict(narrow=64)}
ROWS = [
    ("odd_h128", "base c8x512"),
    ("mla_h128_b32_4k", "base c8x512 nofold"),
    ("mla_h128_b1_8k", "base c8x512 nofold"),
    ("mla_h16_q4_b64_4k", "base late nofold"),
]
# The last field: compile only the plan.
WARM = [(name, which.replace(" ", "+"), 0) for name, which in ROWS]
ODD = (1, 63, 64, 65, 129, 500, 512, 513, 1025, 2048, 2049, 9000, 20000, 17, 8193, 300, 4100, 128, 77, 33000)


def prepare():
    import torch
    from attn.bench.cases.latent import MLA_CASES, _latent
    cases = {case.name: case for case in MLA_CASES}
    lens = [(1, n) for n in ODD]
    verify = [(1, n + 4) for n in ODD[:12]]
    from specs.dtypes import CacheDType
    fp8 = dict(kv_cache_dtype=CacheDType.FP8_E4M3)
    for case in (_latent("fp8_h16_q2_b64_4k", 16, (64, 4096), drafts=1, **fp8), _latent("fp8_h16_q3_b64_4k", 16, (64, 4096), drafts=2, **fp8),
                 _latent("fp8_h16_q4_b64_4k", 16, (64, 4096), drafts=3, **fp8), _latent("fp8_h24_b64_4k", 24, (64, 4096), **fp8),
                 _latent("fp8_h24_b32_8k", 24, (32, 8192), **fp8), _latent("h24_b64_4k_16", 24, (64, 4096)), _latent("h128_b4_32k", 128, (4, 32768)), _latent("h64_b1_8k", 64, (1, 8192)), _latent("odd_h16", 16, *lens),
                 _latent("odd_h128", 128, *lens), _latent("odd_h16q4", 16, *verify, drafts=3)):
        cases[case.name] = case
    return torch, cases


def once(text, old, new):
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def module(name, text):
    import importlib
    path = os.path.join(HERE, name + ".py")
    if not os.path.exists(path) or open(path).read() != text:
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(text)
        os.replace(file.name, path)
    return importlib.import_module(name)


def folds(name):
    import attn.kernels.latent.hopper_wide.fold as fold
    text = open(fold.__file__).read()
    if name is None:
        return fold
    if name == "rows8":
        text = once(text, "ROWS_OF_TWO = 4", "ROWS_OF_TWO = 8")
    if name == "some":
        text = once(text, "    if WAITS:\n        gdc_wait()", "    if WAITS:\n        if is_within | (place == 0):\n            gdc_wait()")
    n, cols = name[1:].split("x")
    text = once(text, "USED, 16, 1, _WIDTH,", f"USED, {n}, 1, {dict(a512='_WIDTH', a256='_WIDTH // 2')['a' + cols]},")
    return module("fold_" + name, text)


def choose(variant):
    import attn.kernels.latent.hopper_wide.launch as launch
    import builders.latent.choice as choice
    from builders.launch.call import LaunchOptions
    if not hasattr(choice, "plain_narrow"):
        choice.plain_narrow = choice._is_narrow
    choice._is_narrow = choice.plain_narrow if "narrow" not in variant else lambda shape, tokens: shape.num_heads * tokens <= variant["narrow"]
    changed = {key: value for key, value in variant.items() if key.isupper()}
    found = folds(variant.get("fold"))
    launch.fold_cuts_kernel, launch.ROWS_OF_TWO = found.fold_cuts_kernel, found.ROWS_OF_TWO
    if not hasattr(launch, "plain_launcher"):
        launch.plain_launcher = launch.Launcher
    launch.Launcher = lambda kernel, fixed, *more, **named: launch.plain_launcher(kernel, fixed | {key: value for key, value in changed.items() if key in fixed}, *more, **named)

    def options(**given):
        if given == dict(waits=True) and "regs" in variant:
            given["max_registers"] = variant["regs"]
        return LaunchOptions(**given)

    launch.LaunchOptions = options
    Launcher = launch.HopperLatentLauncher
    if not hasattr(Launcher, "plain"):
        # Without its fold a step's result is wrong; only its time is of interest.
        Launcher.plain = Launcher.launch
        Variants = launch.Variants

        def launch_some(self, *given):
            if getattr(self, "leaves_out", None) is None:
                self.leaves_out = Launcher.next_leaves_out
                if self.leaves_out:
                    kept = self._new_launchers
                    def without(*more):
                        attends, found, slices = kept(*more)
                        return attends, lambda *_: None, slices
                    self._new_launchers = without
            return Launcher.plain(self, *given)

        Launcher.launch = launch_some
    Launcher.next_leaves_out = bool(variant.get("nofold"))


def member():
    from attn.bench.settings import KernelBench
    return KernelBench(backend="TRITON_MLA").member


def ours(layer, case, variant, plan_only=False):
    """A run with a variant: the launchers of its impl are made at the first call."""
    from dataclasses import replace
    from attn.bench.measure.ours import latent_impl, make_builder, our_run
    from specs.engine import DecodeKernel, Kernels, PrefillKernel
    choose(variant)
    own = replace(layer, impl=latent_impl(member(), case))
    builder = make_builder(member(), own, kernels=Kernels.own(PrefillKernel.TRITON, DecodeKernel.HOPPER))
    if plan_only:
        return builder.build(0, own.batch)
    run = our_run(own, builder)
    run.call()
    return run, own, builder


def warm(name, which, plan_only):
    torch, cases = prepare()
    from attn.bench.cases.inputs import make_content
    from attn.bench.measure.ours import make_layer
    case, generator = cases[name], torch.Generator().manual_seed(0)
    layer = make_layer(member(), make_content(case, torch.device("cuda"), generator), generator)
    for one in which.split("+"):
        ours(layer, case, V[one], plan_only)
    torch.cuda.synchronize()


def plan_of(record):
    """The record's plan of the decode kernel, wherever it lies."""
    from builders.splitkv.record import SplitPlan
    seen, todo = set(), [record]
    while todo:
        x = todo.pop()
        if isinstance(x, SplitPlan):
            return x
        if id(x) not in seen and hasattr(x, "__dict__"):
            seen.add(id(x))
            todo += [y for y in vars(x).values() if hasattr(y, "__dict__")]
    raise LookupError("no plan")


def alone(torch, run, own, builder, case, request):
    """How far a request's output alone is from that among others; 0 is wanted."""
    from builders.batch import CommonAttentionMetadata
    run.call(); run.collect()
    first = sum(case.query_lens[:request]); count = case.query_lens[request]
    wanted = run.output[first : first + count].clone()
    batch = CommonAttentionMetadata.from_lengths([count], [case.seq_lens[request]],
        own.batch.block_table_tensor[request : request + 1].contiguous(), case.block_size)
    record = builder.build(0, batch)
    parts = tuple(part[first : first + count] for part in own.content.parts)
    found = own.impl.forward_mqa(parts, own.kv_cache, record, own.scales)[0]
    same = torch.equal(found, wanted)
    off = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    builder.build(0, own.batch)
    return 0.0 if same else max(off, 1e-30)


def exact(torch, content):
    """Every row in float64."""
    case, out, start, token = content.case, [], 0, 0
    for count, length in zip(case.query_lens, case.seq_lens):
        keys = content.rows(content.key, content.slots[start : start + length])[:, 0].double()
        query = content.query[token : token + count].double()
        scores = torch.einsum("thd,kd->thk", query, keys) * case.scale
        seen = torch.arange(length, device=keys.device)[None] <= (length - count + torch.arange(count, device=keys.device))[:, None]
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
        out.append(weights @ keys[:, :512])
        start += length; token += count
    return torch.cat(out)


def row(torch, case, names, device):
    from attn.bench.cases.inputs import expected_rows, make_content
    from attn.bench.measure.judge import output_of
    from attn.bench.measure.ours import make_layer
    from attn.bench.measure.timing import graph_times_us, make_clock, time_interleaved
    from attn.bench.peers.dense import KernelRun, prepare_peer
    from attn.bench.peers.latent import LATENT_ADAPTERS
    generator = torch.Generator().manual_seed(1)
    content = make_content(case, device, generator)
    expected, layer = expected_rows(content), make_layer(member(), content, generator)
    is_odd = case.name.startswith("odd")
    full = exact(torch, content) if is_odd else None
    runs, said, first = {}, [], None
    for name in names:
        try:
            variant = V[name]
            run, own, builder = ours(layer, case, variant)
            if variant.get("nofold"):
                runs[name] = run
                continue
            plan = plan_of(builder.build(0, own.batch))
            run.output.fill_(float("nan"))
            run.call()
            error = expected.error_of(output_of(run))
            if full is not None:
                found = output_of(run).double()
                error = float(((found - full).norm(dim=-1) / full.norm(dim=-1)).max())
            bits = output_of(run).clone()
            found = []
            for _ in range(20):
                # Nothing waits between these: a state that is read too early is NaN.
                plan.states.fill_(float("nan")); plan.sums.fill_(float("nan"))
                run.call(); run.collect(); found.append(run.output.clone())
            text = f"{name}: error {error:.1e}"
            if not all(torch.equal(bits, other) for other in found):
                text += " CALLS DIFFER"
            found = []
            for _ in range(20):
                run.call(); run.collect(); found.append(run.output.clone())
            if not all(torch.equal(bits, other) for other in found):
                text += " CALLS DIFFER behind one another"
            if first is None:
                first = bits
            else:
                text += " bits of before" if torch.equal(first, bits) else f" OTHER BITS than before, by {float((first.float() - bits.float()).norm() / bits.float().norm()):.1e}"
            # The plan of one request is compiled for these costs alone.
            if False:
                step = max(1, case.num_reqs // 5)
                off = max(alone(torch, run, own, builder, case, at) for at in range(0, case.num_reqs, step))
                text += f" ALONE DIFFERS by {off:.1e}" if off else " as alone"
            said.append(text)
            if error < run.tolerance:
                runs[name] = run
            else:
                said[-1] += " WRONG"
        except Exception as problem:
            traceback.print_exc(limit=-3)
            said.append(f"{name}: {type(problem).__name__} {str(problem)[:200]}")
    torch.cuda.synchronize()
    if is_odd:
        print(f"{case.name}: " + "; ".join(said), flush=True)
        return
    for name in ("fa3",):
        run = prepare_peer(name, content, LATENT_ADAPTERS)
        if isinstance(run, KernelRun):
            run.call()
            said.append(f"{name}: error {expected.error_of(output_of(run)):.1e}")
            runs[name] = run
        else:
            said.append(f"{name}: {run.reason[:100]}")
    calls = {name: run.call for name, run in runs.items()}
    times = time_interleaved(calls, make_clock(device, 10), 6, 10)
    graphs = graph_times_us(calls, device, 3, {}) or {}
    print(f"{case.name}: " + "  ".join(
        f"{name} {time.median_us:.1f} (+-{time.spread * 100:.1f}%" + (f", graph {graphs[name].median_us:.1f})" if name in graphs else ")")
        for name, time in times.items()) + f"  [{time.time() - T0:.0f} s]", flush=True)
    print("    " + "; ".join(said), flush=True)


def measure(rows):
    torch, cases = prepare()
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    print("READY", flush=True)
    sys.stdin.readline()
    for name in rows:
        if time.time() - T0 > MOST:
            print("out of time before", name, flush=True); break
        print("ROW", name, flush=True)
        try:
            with torch.inference_mode():
                row(torch, cases[name], dict(ROWS)[name].split(), device)
        except Exception:
            traceback.print_exc(limit=-4)
        torch.cuda.empty_cache()
    print("END", flush=True)


def watch(rows, jobs):
    """Run a measuring process; returns the rows behind the one that hung, if one did."""
    child = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--measure", *rows], stdin=subprocess.PIPE,
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
        left = max(1.0, 70 - (time.time() - T0))
        try:
            text = job.communicate(timeout=left)[0]
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
    if ended[0] or at[0] is None:
        return []
    return rows[rows.index(at[0]) + 1 :]


def main():
    jobs = [(subprocess.Popen([sys.executable, os.path.abspath(__file__), "--warm", name, which, str(plan)],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), (name, which)) for name, which, plan in WARM]
    rows = [name for name, _ in ROWS]
    chosen = os.environ.get("ROWS")
    if chosen:
        rows = chosen.split()
    if os.path.exists("/usr/bin/nvidia-smi"):
        subprocess.run(["nvidia-smi", "-L"])
    while rows and time.time() - T0 < MOST:
        rows = watch(rows, jobs)
        jobs = []
    print(f"done at {time.time() - T0:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--warm"]:
        warm(sys.argv[2], sys.argv[3], sys.argv[4] == "1")
    elif sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    else:
        main()
