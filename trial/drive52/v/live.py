import re,sys
sass=open(sys.argv[1]).read(); lo,hi=int(sys.argv[2],16),int(sys.argv[3],16)
ins=[(int(m.group(1),16),m.group(2)) for m in re.finditer(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);",sass)]
ins=[(a,t) for a,t in ins if lo<=a<=hi]
def regs(op,w):
    m=re.match(r'[-|~!]*R(\d+)',op)
    return set(range(int(m.group(1)),int(m.group(1))+w)) if m else set()
def du(t):
    t0=re.sub(r'^@!?U?P\w+ ','',t); pred=t0!=t
    op=t0.split()[0]; rest=t0[len(op):]
    ops=[x.strip() for x in rest.split(',')]
    d=set();u=set()
    if op.startswith('HGMMA'):
        n=int(re.search(r'64x(\d+)x',op).group(1)); w=n//2
        d=regs(ops[0],w)
        for x in ops[1:]:
            if x.startswith('gdesc'): continue
            if x.startswith('R') and not x.startswith('RZ'):
                u|=regs(x, w if x==ops[0] or x==ops[-1] or x==ops[-2] and regs(x,1)==regs(ops[0],1) else 4)
        return d-u if False else d,u
    nodst=op.split('.')[0] in('ST','STG','STS','STL','BRA','BAR','SYNCS','WARPGROUP','R2UR','LDGSTS','ISETP','FSETP','PLOP3','VOTE','NOP','UISETP','WARPSYNC','ARRIVES','EXIT','LDGDEPBAR','DEPBAR')
    w=1
    if '.128' in op: w=4
    elif '.64' in op: w=2
    if op.startswith('CS2R') : w=2 if '.32' not in op else 1
    if op.startswith('IMAD.WIDE'): w=2
    start=0
    if not nodst:
        if ops and ops[0].startswith('R') and not ops[0].startswith('RZ'):
            d=regs(ops[0],w); start=1
    for x in ops[start:]:
        for m in re.finditer(r'(?<![UA-Z])R(\d+)((?:\.64)?)',x):
            r=int(m.group(1)); ww=1
            if '[' in x: ww=2 if ('.64' in x or op.startswith(('LDG','STG'))) else 1
            elif nodst and w>1: ww=w
            u|=set(range(r,r+ww))
        if op.startswith('IMAD.WIDE') and x is ops[-1]:
            m=re.match(r'R(\d+)',x)
            if m: u|={int(m.group(1)),int(m.group(1))+1}
    if pred: u|=d  # partial
    return d,u
DU=[du(t) for _,t in ins]
live=set(); out=None
for it in range(3):
    L=[None]*len(ins)
    for i in range(len(ins)-1,-1,-1):
        d,u=DU[i]; L[i]=set(live); live=(live-d)|u
mx=[(len(x),i) for i,x in enumerate(L)]
step=int(sys.argv[4]) if len(sys.argv)>4 else 30
for i in range(0,len(ins),step): print('%05x %3d %s'%(ins[i][0],len(L[i]),ins[i][1][:90]))
m=max(mx); print('max',m[0],'%05x'%ins[m[1]][0],ins[m[1]][1])
