import os, time, sys, threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from attn.bench.peers.flashinfer_jit import modules_of
from attn.bench.cases.dense import BenchTable
mods={}
for t in BenchTable:
    if t.value in ("mla",):
        for c in t.cases:
            for m in modules_of(c): mods.setdefault(m,c.name)
specs={}
for (name,make,*key) in mods:
    s=getattr(import_module(name),make)(*key); specs.setdefault(s.name,s)
def rank(n):
    if "_head_dim_qk_80_" in n: return 9
    if "mla" in n: return 0
    if n.startswith("xqa"): return 1
    if n.endswith("kv_stride_equal"): return 2
    return 3
order=sorted(specs,key=rank)
order=[n for n in order if rank(n)!=9]
lock=threading.Lock(); t00=time.time(); log=open(os.environ["FI"] + "/log.txt","a",buffering=1)
done=0
def go(n):
    global done
    t=time.time()
    try: specs[n].build(verbose=False); r="ok"
    except Exception as e:
        r="FAILED"; open(os.environ["FI"] + f"/fail_{n}.txt","w").write(str(e))
    with lock:
        done+=1
        log.write(f"{time.strftime('%H:%M:%S')} +{time.time()-t00:5.0f}s  {time.time()-t:5.0f} s  {r}  {n}\n")
        if done==3:
            log.write(f"RATE: 3 modules in {time.time()-t00:.0f} s, {len(order)} in all: about {(time.time()-t00)/3*len(order)/60:.0f} min at this rate\n")
log.write(f"start {time.strftime('%H:%M:%S')}: {len(order)} modules\n")
with ThreadPoolExecutor(2) as p: list(p.map(go,order))
log.write("ALL DONE\n")
