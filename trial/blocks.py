import re,sys,collections
f,head=sys.argv[1],int(sys.argv[2],16)
ins=[]
for line in open(f):
    m=re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?);",line)
    if m: ins.append((int(m.group(1),16),m.group(2).strip()))
at={a:i for i,(a,_) in enumerate(ins)}
i=at[head]; end=None
for j in range(i,len(ins)):
    m=re.search(r"\bBRA(?:\.\w+)* .*?(0x[0-9a-f]+)",ins[j][1])
    if m and int(m.group(1),16)==head: end=j;break
targets={int(m.group(1),16) for _,s in ins[i:end+1] for m in [re.search(r"\b(?:BRA|BSSY|CALL)(?:\.\w+)* .*?(0x[0-9a-f]+)",s)] if m}
blocks=[];cur=[]
for a,s in ins[i:end+1]:
    if a in targets and cur: blocks.append(cur);cur=[]
    cur.append((a,s))
    if re.search(r"\bBRA\b|BSYNC",s): blocks.append(cur);cur=[]
if cur: blocks.append(cur)
for b in blocks:
    c=collections.Counter(re.sub(r"^@!?U?P\d+ ","",x).split()[0].split(".")[0] for _,x in b)
    print(hex(b[0][0]),len(b),b[-1][1][:50],dict(c.most_common(9)))
