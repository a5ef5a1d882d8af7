"""parts.py CASE...: time in a graph of subsets of a sparse decode's launches."""
import sys, torch
from attn.bench.cases.dense import BenchTable
from attn.bench.cases.sparse import sparse_content
from attn.bench.measure.sparse import our_sparse_run
from attn.bench.measure.timing import graph_times_us
from attn.bench.settings import KernelBench
from builders.launch.launcher import Launcher
SKIP=set()
old=Launcher.__call__
def call(self, grid, *values):
    if getattr(self.kernel,'__name__','') in SKIP or self.kernel.fn.__name__ in SKIP: return
    old(self, grid, *values)
Launcher.__call__=call
seen=[]
dev=torch.device("cuda")
bench=KernelBench(backend="SPARSE_MLA", table=BenchTable.SPARSE_MLA)
for name in sys.argv[1:]:
    case=next(c for c in BenchTable("sparse_mla").cases if c.name==name)
    content=sparse_content(case, dev, 0)
    run=our_sparse_run(bench.member, content, bench.kernels)
    run_call = run.call
    run_call(); torch.cuda.synchronize()
    lists={"topk_transform_kernel"}; fold={"fold_states_kernel"}; att={"sparse_mla_kernel","hopper_narrow_sparse_kernel","hopper_sparse_kernel","sparse_mla_many_kernel"}
    subsets={"all":set(),"lists":fold|att,"attend":lists|fold,"fold":lists|att,"lists+attend":fold,"attend+fold":lists}
    out={}
    for k,s in subsets.items():
        SKIP.clear(); SKIP.update(s)
        out[k]=round(graph_times_us({"c":run_call}, dev, 15)["c"].median_us,2)
    SKIP.clear()
    print(name, out, flush=True)
