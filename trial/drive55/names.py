import torch, sys
from torch.profiler import profile, ProfilerActivity
from tests.tools import sanitize
jobs = [(n, j) for n, j in sanitize.JOBS["latent"]() if "short" in n and n.endswith(("h40-p16", "h24-p16"))]
for name, job in jobs:
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        job(); torch.cuda.synchronize()
    for e in p.key_averages():
        n = e.key
        if "::" not in n and "<" not in n and "Mem" not in n: print(name, n, e.count, round(e.device_time_total))
