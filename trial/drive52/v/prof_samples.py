import csv,gzip,sys,re
t=sys.argv[1]
rows=list(csv.reader(gzip.open(f'{t}.src.csv.gz','rt')))
h=rows[1]; rows=rows[2:]
I=h.index('Source'); S=h.index('# Samples'); X=h.index('Instructions Executed')
st=[i for i,n in enumerate(h) if n.startswith('stall_') and 'Not Issued' not in n]
def num(x):
    try: return float(x)
    except: return 0.
mx=max(num(r[X]) for r in rows)
tot=sum(num(r[S]) for r in rows)
print('total samples',tot,'max exec',mx)
# contiguous hot loop: instructions with exec > 0.6 max
hot=[i for i,r in enumerate(rows) if num(r[X])>0.35*mx]
a=hot[0]; segs=[]; 
cur=[hot[0]]
for i in hot[1:]:
    if i-cur[-1]<400: cur.append(i)
    else: segs.append(cur); cur=[i]
segs.append(cur)
for s in segs:
    print('segment',s[0],s[-1],len(s),sum(num(rows[i][S]) for i in range(s[0],s[-1]+1)))
s=segs[0]
# group by markers
names=[]
acc=None; n=0; ins=0
def flush(label):
    global acc
    if acc: print('%-46s %6d samples %5.1f%%  ins %4d  %s'%(label,acc[0],100*acc[0]/segtot,acc[1],' '.join('%s:%d'%(h[k].replace('stall_',''),v) for k,v in sorted(acc[2].items(),key=lambda z:-z[1])[:6])))
    acc=[0,0,{}]
segtot=sum(num(rows[i][S]) for i in range(s[0],s[-1]+1))
acc=[0,0,{}]
last='begin'
for i in range(s[0],s[-1]+1):
    r=rows[i]; src=r[I]
    if num(r[X])>0.35*mx: acc[1]+=1
    acc[0]+=num(r[S])
    for k in st:
        v=num(r[k])
        if v: acc[2][k]=acc[2].get(k,0)+v
    m=re.search(r'(BAR\.\w+|SYNCS\.\w+|WARPGROUP\.\w+|ARRIVES|VOTE|HGMMA.*gsb0|BRA|F2FP)',src)
    if m and not(m.group(1)=='F2FP'):
        flush(f'{last} -> {src.strip()[:40]}'); last=src.strip()[:14]
flush('end')
