import csv,sys,collections
f,e=sys.argv[1],int(sys.argv[2])
rows=list(csv.reader(open(f))); h=rows[1]; rows=rows[2:]; ix={n:i for i,n in enumerate(h)}
st=[n for n in h if n.startswith("stall_") and "Not" not in n]
g=[r for r in rows if int(r[ix["Instructions Executed"]])==e]
tot=sum(int(r[ix["# Samples"]]) for r in g)
c={k[6:]:sum(int(r[ix[k]]) for r in g) for k in st}
print(f,e,len(g),"samples",tot,{k:round(100*v/tot,1) for k,v in sorted(c.items(),key=lambda t:-t[1]) if v})
# regions for first half
import re
acc=0; lab=None; out=[]; cnt=0; cc=collections.Counter()
for r in g:
    s=int(r[ix["# Samples"]]); acc+=s; cnt+=1
    for k in st: cc[k[6:]]+=int(r[ix[k]])
    if re.search(r"DEPBAR|BAR\.SYNC|TRYWAIT|gsb0|SYNCS.ARRIVE|VOTE|SHFL",r[1]):
        out.append((r[1].strip()[:60],cnt,round(100*acc/tot,1),[(k,round(100*v/tot,1)) for k,v in cc.most_common(3)])); acc=0; cnt=0; cc=collections.Counter()
out.append(("end",cnt,round(100*acc/tot,1),cc.most_common(3)))
for o in out[:len(out)//2+1]: print("  ",*o)
