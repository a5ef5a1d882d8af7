"""SASS START END: branches within, and instructions if every forward branch over > 12 instructions is taken."""
import re,sys
sass=open(sys.argv[1]).read(); lo,hi=int(sys.argv[2],16),int(sys.argv[3],16)
ins=[(int(m.group(1),16),m.group(2)) for m in re.finditer(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);",sass)]
idx={a:i for i,(a,_) in enumerate(ins)}
i=idx[lo]; n=0; from collections import Counter; c=Counter()
while i<=idx[hi]:
    a,t=ins[i]; n+=1
    op=re.sub(r'^@!?U?P\w+ ','',t).split()[0].split('.')[0]; c[op]+=1
    m=re.search(r'\bBRA\b.*?(0x[0-9a-f]+)',t)
    if m:
        g=int(m.group(1),16); d=(idx.get(g,-1)-i)
        print('%05x %s  skips %d'%(a,t,d))
        if 4<d and g<=hi: i=idx[g]; continue
    i+=1
print(n,c.most_common(40))
