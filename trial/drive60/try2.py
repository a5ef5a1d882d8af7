import sys
p="builders/dense/choice.py"; s=open("/work/main/"+p).read()
a=s.index("    registers = 240"); b=s.index("    return HopperTile", a) if "    return HopperTile" in s[a:] else None
r=sys.argv[1]
lines=s.split("\n")
for i,l in enumerate(lines):
    if l.strip()=="registers = 240": lines[i]=f"    registers = {r}"
    if "registers = 224 if extra else 232" in l: lines[i]=l.split("registers")[0]+f"registers = {r}"
open(p,"w").write("\n".join(lines))
