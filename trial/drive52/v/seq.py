import re,sys
f,lo,hi=sys.argv[1],int(sys.argv[2],16),int(sys.argv[3],16)
s=open(f).read(); out=[]
for m in re.finditer(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);",s):
    a=int(m.group(1),16)
    if lo<=a<=hi:
        t=m.group(2); mm=re.search(r'(HGMMA|BAR\.\w+|WARPGROUP\.\w+|SYNCS\.\w+|ARRIVES|MUFU|FMNMX|F2FP|FMUL|FADD|FFMA|BRA|SHFL|VOTE|LDL|STL|LDS|STS|LDG|STG)',t)
        k=mm.group(1) if mm else None
        if k=='WARPGROUP.DEPBAR': k+=t[-4:]
        if k:
            if out and out[-1][0]==k: out[-1][1]+=1
            else: out.append([k,1])
print(' '.join(f'{k}*{n}' if n>1 else k for k,n in out))
