import re,sys
for f in sys.argv[1:]:
    txt=[m.groups() for m in (re.match(r"\s+/\*([0-9a-f]+)\*/\s+(.*?);",l) for l in open(f)) if m]
    at={int(a,16):i for i,(a,_) in enumerate(txt)}
    loops=[]
    for i,(a,s) in enumerate(txt):
        m=re.search(r"\bBRA(?:\.\w+)* .*?(0x[0-9a-f]+)",s)
        if m and int(m.group(1),16)<=int(a,16) and int(m.group(1),16) in at and i-at[int(m.group(1),16)]>60: loops.append((at[int(m.group(1),16)],i))
    inner=[l for l in loops if not any(o!=l and o[0]>=l[0] and o[1]<=l[1] for o in loops)]
    main=[(a,b) for a,b in inner if sum('HGMMA' in s for _,s in txt[a:b+1])]
    sp=[(i,s) for i,(a,s) in enumerate(txt) if re.search(r"\b(LDL|STL)",s)]
    for a,b in main[:8]:
        print(f[-40:],hex(int(txt[a][0],16)),b-a+1,"local:",[ (i-a,s[:28]) for i,s in sp if a<=i<=b][:30])
    print("outside", len([1 for i,s in sp if not any(a<=i<=b for a,b in main)]))
