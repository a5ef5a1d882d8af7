import sys,re
cur=None;n=0;out=[]
for l in open(sys.argv[1]):
    m=re.match(r"(\.L_x_\d+):",l)
    if m: out.append((m[1],0)); cur=None; continue
    m=re.search(r"/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\d+ )?([A-Z0-9_.]+)(.*)",l)
    if not m: continue
    op=m[2]
    k=None
    if op.startswith("HGMMA"): k="HGMMA"
    elif op.startswith("WARPGROUP.DEPBAR"): k="DEPBAR"+re.sub(r"\s","",m[3].split("/*")[0])
    elif op.startswith("WARPGROUP"): k=op
    elif op.startswith("MUFU.EX2"): k="EX2"
    elif op.startswith("F2FP"): k="F2FP"
    elif op.startswith("LDG"): k="LDG"
    elif op.startswith("STG"): k="STG"
    elif op.startswith(("LDL","STL")): k=op[:3]
    elif op.startswith("SYNCS"): k="SYNCS"
    elif op.startswith("BRA"): k="BRA"+m[3].split("/*")[0].strip()+(m[1] or "")
    elif op.startswith("BAR"): k="BAR"
    else: k="."
    if out and out[-1][0]==k: out[-1]=(k,out[-1][1]+1)
    else: out.append((k,1))
res=[]
for k,n in out:
    res.append(f"{k}" if n<=1 else (f"{k}{n}" if k!="." else f"_{n}"))
txt=" ".join(res)
txt=re.sub(r" (\.L_x_\d+)",r"\n\1",txt)
print(txt)
