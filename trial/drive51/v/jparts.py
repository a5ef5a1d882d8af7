import os, sys, torch
from attn.bench.cases.dense import BenchTable
from attn.bench.cases.sparse import sparse_content
from attn.bench.measure.sparse import our_sparse_run
from attn.bench.measure.timing import graph_times_us, make_clock
from attn.bench.settings import KernelBench
from builders.launch.launcher import Launcher
import builders.sparse.joint as J, attn.kernels.sparse.joint_lists as K
from specs.rows import LatentFormat
SKIP=set()
old=Launcher.__call__
def call(self, grid, *values):
    if self.kernel.fn.__name__ in SKIP: return
    old(self, grid, *values)
Launcher.__call__=call
bench=KernelBench(backend="SPARSE_MLA", table=BenchTable.SPARSE_MLA)
dev=torch.device("cuda")
ATT={"hopper_narrow_sparse_kernel","hopper_sparse_kernel"}; L={"join_lists_kernel","topk_transform_kernel"}
cfgs=[("none",{},4096,16)]
if len(sys.argv)>1:
    cfgs=[("joint",{},32768,16),("narrow",{},32768,1)]
for name in ("pre_bf16_h16_2k","pre_bf16_h16_4k")[:1]:
    case=next(c for c in BenchTable("sparse_mla").cases if c.name==name)
    content=sparse_content(case, dev, 0)
    for label,env,window,reach in cfgs:
        for k in ("JSTEP","JWARPS"): os.environ.pop(k,None)
        os.environ.update(env); J._WINDOW=window; J.REACH[LatentFormat.BF16]=reach; K._launcher.cache_clear()
        try:
            SKIP.clear(); run=our_sparse_run(bench.member, content, bench.kernels); run.call(); torch.cuda.synchronize()
            out={}
            for k,s in {"all":set(),"lists":ATT,"attend":L}.items():
                SKIP.clear(); SKIP.update(s)
                out[k]=round(graph_times_us({"c":run.call}, dev, 3)["c"].median_us,1)
            print(name, label, out, flush=True)
        except Exception as e: print(name,label,repr(e)[:200],flush=True)
        SKIP.clear()
