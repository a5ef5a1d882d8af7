"""Start and end of every program of a prompt, and its multiprocessor."""
import torch, sys
from attn.bench.cases.dense import BenchTable
from attn.bench.cases.sparse import sparse_content
from attn.bench.measure.sparse import our_sparse_run
from attn.bench.settings import KernelBench
import attn.kernels.sparse.hopper_launch as H
bench=KernelBench(backend="SPARSE_MLA", table=BenchTable.SPARSE_MLA)
dev=torch.device("cuda")
flush=torch.empty(256<<20,dtype=torch.int8,device=dev)
for name in ("pre_bf16_h16_2k","pre_656_h16_2k"):
    case0=next(c for c in BenchTable("sparse_mla").cases if c.name==name)
    for T in (132,264,528,1056,1848,2048,4096):
        case=case0.model_copy(update=dict(query_lens=(T,)))
        run=our_sparse_run(bench.member, sparse_content(case, dev, 0), bench.kernels)
        for _ in range(5): run.call()
        for _ in range(2):
            flush.zero_(); run.call(); torch.cuda.synchronize()
        d=H.DEBUG.view(-1,4)[:T].cpu().double()
        b,e,sm=d[:,0],d[:,1],d[:,2]
        t0=b.min(); dur=(e-b)/1000
        per={}
        for i in range(T): per.setdefault(int(sm[i]),[]).append(float(dur[i]))
        n=[len(v) for v in per.values()]; ends=[max(float(e[i]-t0)/1000 for i in range(T) if int(sm[i])==s) for s in per]
        mean=[sum(v)/len(v) for v in per.values()]
        q=lambda x: [round(sorted(x)[int(p*(len(x)-1))],1) for p in (0,.1,.5,.9,1)]
        order=sorted(range(T),key=lambda i: float(b[i]))
        parts=[round(float(sum(dur[i] for i in order[k*T//4:(k+1)*T//4])/max(1,((k+1)*T//4-k*T//4))),1) for k in range(4)]
        print(name,T,"span",round(float(e.max()-t0)/1000,1),"dur",q(dur.tolist()),"per SM count",min(n),max(n),"sm mean",q(mean),"ends",q(ends),"quarters",parts, flush=True)
        if T==2048:
            print(" slow SMs", sorted(((round(sum(v)/len(v),1),s) for s,v in per.items()))[-12:], "fast", sorted(((round(sum(v)/len(v),1),s) for s,v in per.items()))[:6])
