import os, sys, re, hashlib
sys.path.insert(0, os.getcwd())
import triton
from tests.compile.compile_matrix import _Device
from tests.compile.variants import HOPPER_VARIANTS, INVARIANT_VARIANTS, call_of
triton.runtime.driver.set_active(_Device(90))
for tag,table in (("inv",INVARIANT_VARIANTS),("hop",HOPPER_VARIANTS)):
    for v in table:
        if tag == "inv" and v.name in ("hopper_prefill 32/8/128","hopper_prefill window 1024"):
            call = call_of(v, 90)
            c = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
            p = c.asm["ptx"]
            p = re.sub(r"^\s*\.(loc|file).*$","",p,flags=re.M); p=re.sub(r"//.*$","",p,flags=re.M); p=p[:p.find(".section")] if ".section" in p else p
            p = re.sub(r"\$L__\w+|\$\w*tmp\d+:?","L",p)
            lines=[l.strip() for l in p.splitlines() if l.strip()]
            print(tag, v.name, hashlib.sha1("\n".join(lines).encode()).hexdigest()[:10], len(lines), flush=True)
            open(f"$TMP/{sys.argv[1]}_{tag}_{v.name.replace(' ','_').replace('/','_')}.ptx","w").write("\n".join(lines))
os._exit(0)
