"""comp.py VARIANT-NAME [table]: compile by the Triton on the path; spill stats and local-memory instructions with source lines."""
import sys, os, re, subprocess, tempfile, contextlib, io
sys.path.insert(0, os.getcwd())
import triton
from tests.compile.compile_matrix import _Device, read_log
from tests.compile.variants import HOPPER_VARIANTS, INVARIANT_VARIANTS, call_of
triton.runtime.driver.set_active(_Device(90))
name = sys.argv[1]; table = INVARIANT_VARIANTS if len(sys.argv) > 2 and sys.argv[2] == "inv" else HOPPER_VARIANTS
(v,) = [v for v in table if v.name == name]
call = call_of(v, 90)
import triton.knobs
c = call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
bin_ = triton.__path__[0] + "/backends/nvidia/bin/"
import shutil
tool = lambda t: bin_ + t if os.path.exists(bin_ + t) else "/usr/local/cuda/bin/" + t
open("$TMP/inv.cubin", "wb").write(c.asm["cubin"])
r = subprocess.run([tool("cuobjdump"), "-res-usage", "$TMP/inv.cubin"], capture_output=True, text=True).stdout
print(triton.__version__, re.findall(r"REG:\d+ STACK:\d+ .*?LOCAL:\d+", r))
d = subprocess.run([tool("nvdisasm"), "-g", "-c", "$TMP/inv.cubin"], capture_output=True, text=True).stdout
open("$TMP/inv.sass", "w").write(d)
lines = d.splitlines(); where = ""; n = 0
labels = ""
seen_code = False
for l in lines:
    m = re.search(r'//## File "([^"]*)", line (\d+)(.*)', l)
    if m:
        if 'inlined' in m[3] or True:
            where = os.path.basename(m[1]) + ":" + m[2]
    if re.match(r"\.L_x_\d+:", l): labels = l
    if re.search(r"\b(STL|LDL)", l): print(labels, where, re.sub(r"\s+", " ", l.strip())[:110])
