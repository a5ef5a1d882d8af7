"""all.py FIRST STEP: every hopper_prefill variant of the invariant and Hopper sets by the Triton on the path: stack bytes"""
import os, sys, json
sys.path.insert(0, os.getcwd())
from tests.compile.compile_matrix import Compiler
from tests.compile.variants import HOPPER_VARIANTS, INVARIANT_VARIANTS
import triton
which=sys.argv[1]
table=INVARIANT_VARIANTS if which=="inv" else HOPPER_VARIANTS
vs=[v for v in table if v.name.startswith("hopper_prefill")][int(sys.argv[2])::int(sys.argv[3])]
for v in vs:
    found = Compiler(None).compile(90, [v])
    for n, f in found.items(): print(triton.__version__, which, n, "speed" if v.speed else "", f.registers, f.spills, f.error, flush=True)
os._exit(0)
