"""plr.py FILE [low]: live GPR count per instruction; prints peaks by block."""
import sys,re
f=sys.argv[1]; low=int(sys.argv[2]) if len(sys.argv)>2 else 225
label="";best={}
n=0
for l in open(f):
    m=re.match(r"\s*(\.L_x_\d+):",l)
    if m: label=m[1]
    if "// |" not in l: continue
    code,_,plr=l.partition("// |")
    m=re.match(r"\s*(\d+)",plr)
    if not m: continue
    c=int(m[1]); n+=1
    a=re.search(r"/\*([0-9a-f]+)\*/",code)
    at=a[1] if a else ""
    text=re.sub(r"/\*[0-9a-f]+\*/","",code).strip()[:80]
    b=best.setdefault(label,[0,None,0,0])
    b[2]+=1; 
    if c>=low: b[3]+=1
    if c>b[0]: b[0]=c;b[1]=(at,text)
for k,v in best.items():
    if v[0]>=low-20: print(k,v)
