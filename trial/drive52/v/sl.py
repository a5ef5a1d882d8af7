"""CLONE names...: for each variant compiled on 3.6: spills, loops with counts, groups."""
import sys,re
from tests.compile.compile_matrix import Compiler, SETS, misses_of, _disassembled, _Device, read_log
from tests.compile.variants import call_of
import triton, io, contextlib
triton.runtime.driver.set_active(_Device(90))
names=sys.argv[1:]
vs={v.name:v for n in ['invariant'] for v in SETS[n].variants if v.name in names}
for name in names:
    v=vs[name]; call=call_of(v,90); log=io.StringIO()
    with contextlib.redirect_stdout(log):
        c=call.kernel.warmup(grid=call.grid, **call.arguments, **call.options)
    print(triton.__version__, name, read_log(log.getvalue()), 'shared', c.metadata.shared, 'n_spills', getattr(c.metadata,'num_stages',None))
    sass=_disassembled(c.asm['cubin'])
    open('%s.%s.sass'%(re.sub(r'\W+','_',name), sys.argv[0] and __import__('os').environ.get('TAG','x')),'w').write(sass)
    ins=[(int(m.group(1),16),m.group(2)) for m in re.finditer(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);",sass)]
    idx={a:i for i,(a,_) in enumerate(ins)}
    print('  total', len(ins))
    for i,(a,t) in enumerate(ins):
        m=re.search(r'\bBRA\b.*?(0x[0-9a-f]+)',t)
        if m:
            tgt=int(m.group(1),16)
            if tgt in idx and tgt<a and i-idx[tgt]>60:
                body=[x for _,x in ins[idx[tgt]:i+1]]
                cnt=lambda p: sum(bool(re.search(p,x)) for x in body)
                print('  loop %05x-%05x n=%d HMMA=%d HGMMA=%d LDGSTS=%d LDS=%d STL=%d LDL=%d MOV=%d ISETP=%d'%(tgt,a,len(body),cnt('HMMA'),cnt('HGMMA'),cnt('LDGSTS'),cnt(r'\bLDS'),cnt(r'\bSTL'),cnt(r'\bLDL'),cnt(r'\b(MOV|IMAD\.MOV)'),cnt('ISETP')))
    print('  STL', sum('STL' in x for _,x in ins), 'LDL', sum('LDL' in x for _,x in ins))
