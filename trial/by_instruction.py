import csv,sys,re
f=sys.argv[1]; top=int(sys.argv[2]) if len(sys.argv)>2 else 40
rows=list(csv.reader(open(f)))
h=rows[1]; rows=rows[2:]
ix={n:i for i,n in enumerate(h)}
st=[n for n in h if n.startswith("stall_") and "Not" not in n]
tot=sum(int(r[ix["# Samples"]]) for r in rows)
ex=[int(r[ix["Instructions Executed"]]) for r in rows]
print(f,"samples",tot, "instr",sum(ex))
# by exec count clusters => loops
import collections
c=collections.Counter()
n=collections.Counter()
for r,e in zip(rows,ex):
    c[e]+=int(r[ix["# Samples"]]); n[e]+=1
for e,s in c.most_common(12): print("  executed",e,"instrs",n[e],"samples",s,f"{100*s/tot:.1f}%")
def show(i):
    r=rows[i]; s=int(r[ix["# Samples"]])
    w=sorted(((int(r[ix[k]]),k[6:]) for k in st),reverse=True)[:2]
    print(f"   {i:5d} {ex[i]:9d} {100*s/tot:5.2f}%  {r[1].strip()[:70]:70s} {w}")
if len(sys.argv)>3:
    a,b=map(int,sys.argv[3].split('-'))
    for i in range(a,b):
        if 100*int(rows[i][ix["# Samples"]])/tot>=float(sys.argv[4] if len(sys.argv)>4 else 0.25) or re.search("HGMMA.*gsb0|DEPBAR|BAR|SYNCS|BRA|VOTE",rows[i][1]): show(i)
else:
    for i in sorted(range(len(rows)),key=lambda i:-int(rows[i][ix["# Samples"]]))[:top]: show(i)
