import sys, json
from dataclasses import asdict
from tests.compile.compile_matrix import Compiler, SETS, misses_of
names=sys.argv[1:]
vs=[v for n in SETS for v in SETS[n].variants if v.name in names]
vs=list({v.name:v for v in vs}.values())
c=Compiler(None)
import triton
for v in vs:
    f=c.compile(90,[v])[v.name]
    d={k:x for k,x in asdict(f).items()}
    print(triton.__version__, v.name, {k:x for k,x in d.items() if k in("registers","spill_bytes","spills","shared","error","serialised","wgmma") or x}, "MISS", misses_of(v,90,f), flush=True)
