import sys
from attn.bench.peers.flashinfer_jit import *
from attn.bench.peers import flashinfer_jit as fj
from attn.bench.cases.dense import BenchTable
from importlib import import_module
which = sys.argv[1:] or ["hopper","mla","invariance"]
out={}
for t in BenchTable:
    if t.value not in which: continue
    for c in t.cases:
        for m in modules_of(c):
            out.setdefault(m,[]).append(c.name)
print("fa2 maker",fj.fa2_maker())
names={}
for m,cs in out.items():
    name, make, *key = m
    try:
        spec=getattr(import_module(name),make)(*key)
        names.setdefault(spec.name,(spec,[]))[1].extend(cs)
    except Exception as e:
        print("FAIL",m,cs,repr(e)[:300])
for n,(s,cs) in names.items(): print(n,len(s.sources),s.is_aot,cs)
print(len(names))
