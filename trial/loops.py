import re,sys,collections
for f in sys.argv[1:]:
    ins=[]
    for line in open(f):
        m=re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?);",line)
        if m: ins.append((int(m.group(1),16),m.group(2).strip()))
    at={a:i for i,(a,_) in enumerate(ins)}
    print(f.split('_',1)[1],"instructions",len(ins))
    loops=[]
    for i,(a,s) in enumerate(ins):
        m=re.search(r"\bBRA(?:\.\w+)* .*?(0x[0-9a-f]+)",s)
        if m:
            t=int(m.group(1),16)
            if t<=a and t in at and i-at[t]>60: loops.append((at[t],i))
    inner=[l for l in loops if not any(o!=l and o[0]>=l[0] and o[1]<=l[1] for o in loops)]
    for lo,hi in inner:
        body=[x for _,x in ins[lo:hi+1]]
        c=collections.Counter(re.sub(r"^@!?U?P\d+ ","",x).split()[0].split(".")[0] for x in body)
        if c['HGMMA']: print("  ",hex(ins[lo][0]),len(body),dict(c.most_common(22)))
