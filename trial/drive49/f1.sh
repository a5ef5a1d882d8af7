# f1.sh COMMIT: warm, sparse table, GPU tests
export TRITON_CACHE_DIR=/tmp/tc ATTN_COMMIT=$1; mkdir -p /tmp/o/w; t0=$(date +%s); say(){ echo "[$(( $(date +%s) - t0 ))] $*"; }
python - <<'P' > /tmp/o/jobs
from attn.bench.cases.dense import BenchTable
names=[(t, c.name) for t in ("sparse_mla","mla") for c in BenchTable(t).cases]
first=[n for n in names if n[1].startswith(("pre_","ragged","index","convert"))]
for t,c in first+[n for n in names if n not in first]: print(t,c)
P
xargs -P 15 -L 1 bash -c 'timeout 120 python -m attn.bench.kernels --table $0 --case $1 --rounds 1 --reps 1 --json /tmp/o/w/$0_$1.json --out /tmp/o/w/$0_$1.md > /tmp/o/w/$0_$1.log 2>&1' < /tmp/o/jobs
say warm $(ls /tmp/o/w/*.json | wc -l) of $(wc -l < /tmp/o/jobs)
timeout 230 python -m attn.bench.kernels --table sparse_mla --json $OUT/sparse_mla.json --out $OUT/sparse_mla.md > $OUT/sparse.log 2>&1; say sparse $?; grep "^Targets" $OUT/sparse_mla.md; grep "NOT met" $OUT/sparse_mla.md | cut -c1-330
for i in 0 1 2 3 4 5 6 7 8 9 10 11; do OMP_NUM_THREADS=1 timeout ${2:-100} python .gpu/t/shard2.py $i 12 > /tmp/sh$i.log 2>&1 & done; wait
for i in 0 1 2 3 4 5 6 7 8 9 10 11; do tail -1 /tmp/sh$i.log | cut -c1-200; grep -h "^FAILED\|^ERROR" /tmp/sh$i.log; done; say tests
