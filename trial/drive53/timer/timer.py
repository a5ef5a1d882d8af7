"""Stamps of the narrow latent kernel over a million keys, eager behind a flush and in a graph."""
import torch, sys
from attn.bench.cases.dense import BenchTable
from attn.bench.cases.inputs import make_content
from attn.bench.measure.ours import make_layer, make_builder, our_run
from attn.bench.settings import KernelBench
import attn.kernels.latent.hopper_wide.launch as L
bench = KernelBench(backend="TRITON_MLA", table=BenchTable.MLA)
dev = torch.device("cuda")
case = next(c for c in BenchTable.MLA.cases if c.name == sys.argv[1])
g = torch.Generator().manual_seed(0)
content = make_content(case, dev, g)
layer = make_layer(bench.member, content, g)
builder = make_builder(bench.member, layer, kernels=bench.kernels)
run = our_run(layer, builder)
flush = torch.empty(256 << 20, dtype=torch.int8, device=dev)
for _ in range(3): run.call()
torch.cuda.synchronize()
s = torch.cuda.Stream()
with torch.cuda.stream(s):
    run.call()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(10): run.call()
def q(x): 
    x = sorted(x); return [round(x[int(p * (len(x) - 1))], 1) for p in (0, .1, .5, .9, 1)] + [len(x)]
def show(tag):
    d = L.DEBUG.view(132, 64)[1:].cpu().double()
    t0 = d[:, 0].min()
    rel = lambda k: [(float(v - t0)) / 1000 for v in d[:, k] if v > t0 - 1] if k != 12 else [float(v) for v in d[:, 12]]
    print("==", tag)
    names = {0: "start", 33: "queries", 1: "queries first", 2: "keys end first", 4: "arrived first", 34: "keys end", 35: "before store", 36: "arrived", 37: "pieces", 38: "waited", 39: "folded", 41: "looks", 12: "in pieces", 5: "pieces first", 7: "left first", 40: "end"}
    for k, n in names.items(): print(f"  {n:15}", q(rel(k)) if rel(k) else "-")
    tiles = d[:, 11] + d[:, 43]
    keys = [(float(tiles[i]), float((d[i, 34] - d[i, 0]) / 1000)) for i in range(131)]
    for n in sorted({t for t, _ in keys}): print("  tiles", n, q([b for a, b in keys if a == n]))
    late = sorted(((float(d[i, 34] - t0) / 1000, i + 1, int(tiles[i]), int(d[i, 10])) for i in range(131)))
    print("  last to end", late[-6:], "first", late[:3])
    e = [int(v) for v in (d[:, 40] - t0).argsort()[-3:]]
    for i in e: print("  program", i + 1, {n: round(float(d[i, k] - t0) / 1000, 1) for k, n in names.items() if d[i, k] > t0 - 1})

L.DEBUG.zero_(); flush.zero_(); run.call(); torch.cuda.synchronize(); show("flushed")
per = {}
ts = []
for turn in range(8):
    L.DEBUG.zero_(); a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2)); torch.cuda._sleep(2000000); a.record(); graph.replay(); b.record(); torch.cuda.synchronize(); ts.append(round(a.elapsed_time(b) * 100, 1))
    d = L.DEBUG.view(132, 64)[1:].cpu().double()
    t0 = d[:, 0].min(); last = (d[:, 34] - t0).max() / 1000; last = float(last)
    print("graph", ts[-1], "us a call; last keys", round(last, 1), {n: round(float((d[:, k] - t0).max() / 1000) - last, 1) for n, k in (("store", 35), ("arrived", 36), ("looks", 41), ("pieces", 37), ("waited", 38), ("folded", 39), ("end", 40))}, "median keys", round(float((d[:, 34] - t0).median()) / 1000, 1))
    for i in range(131):
        if d[i, 43] + d[i, 11] == 128: per.setdefault(int(d[i, 10]), []).append(round(float((d[i, 34] - d[i, 0]) / 1000), 1))
show("graph")
if len(sys.argv) > 2: print(sorted((round(sum(v) / len(v), 1), k, len(v)) for k, v in per.items()))
