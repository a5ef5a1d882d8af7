"""Time of a prompt by its number of tokens: is the last round half empty?"""
import torch
from dataclasses import replace
from attn.bench.cases.dense import BenchTable
from attn.bench.cases.sparse import sparse_content
from attn.bench.measure.sparse import our_sparse_run
from attn.bench.measure.timing import time_interleaved, make_clock
from attn.bench.settings import KernelBench
bench=KernelBench(backend="SPARSE_MLA", table=BenchTable.SPARSE_MLA)
dev=torch.device("cuda")
for name in ("pre_bf16_h16_2k","pre_656_h16_2k"):
    case0=next(c for c in BenchTable("sparse_mla").cases if c.name==name)
    for T in (1848,1914,1980,2046,2048,2112):
        case=case0.model_copy(update=dict(query_lens=(T,)))
        run=our_sparse_run(bench.member, sparse_content(case, dev, 0), bench.kernels)
        clock=make_clock(dev, 10); clock.warm_up(run.call)
        ts=sorted(t for _ in range(3) for t in clock.measure(run.call, 10))
        print(name, T, round(T/132,3), round(ts[len(ts)//2],1), flush=True)
