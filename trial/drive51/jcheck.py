import torch
from attn.ops.joint_lists import join_lists
from builders.sparse.arguments import JointLists, TopkLists
import builders.sparse.joint as J
dev="cuda"; g=torch.Generator().manual_seed(1)
for tokens in (2,4,8):
  for keys,rows,P in ((32768,37,64),(40000,64,16),(5000,33,64),(700,19,3)):
    topk=2048
    ids=torch.randint(-1,keys,(rows,topk),generator=g,dtype=torch.int32)
    reqs=torch.randint(0,3,(rows,),generator=g,dtype=torch.int32).sort().values.int()
    vis=torch.randint(keys//2,keys+1,(rows,),generator=g,dtype=torch.int32)
    table=torch.randperm(3*(keys//P+1),generator=g).int().view(3,-1).contiguous()
    W=32768; groups=-(-rows//tokens)
    def make(d):
        return JointLists(tokens,torch.full((groups,tokens*topk),7,dtype=torch.int32,device=d),torch.full((groups,),7,dtype=torch.int32,device=d),torch.zeros(5,W//4,dtype=torch.int32,device=d))
    a,b=make("cpu"),make(dev)
    join_lists(TopkLists(ids,vis,reqs),table,P,a)
    for _ in range(3): join_lists(TopkLists(ids.to(dev),vis.to(dev),reqs.to(dev)),table.to(dev),P,b)
    ok=torch.equal(a.counts,b.counts.cpu()) and all(torch.equal(a.entries[i,:n],b.entries[i,:n].cpu()) for i,n in enumerate(a.counts.tolist())) and not b.marks.any()
    print("join", tokens, keys, ok, flush=True)
