# c1.sh COMMIT: tests of sparse attention beside the warm-up, then the rows of the narrow sparse kernel with their peers
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w; rm -f /tmp/passed.*
python3 - > /tmp/w/jobs <<'P'
from attn.bench.cases.dense import BenchTable
names = [c.name for c in BenchTable("sparse_mla").cases if c.num_heads <= 24 and c.name != "convert_576_656"]
print(*(n for n in names if n.startswith("pre_")), *(n for n in names if not n.startswith("pre_")), sep="\n")
P
xargs -P 8 -L 1 bash -c 'timeout 120 python3 -m attn.bench.kernels --table sparse_mla --case $0 --rounds 1 --reps 1 --json /tmp/w/$0.json --out /tmp/w/$0.md > /tmp/w/$0.log 2>&1' < /tmp/w/jobs &
for i in $(seq 0 6); do timeout 170 python3 .gpu/k11/shard.py $i 7 tests/gpu/test_gpu_sparse_layer.py --durations 2 > /tmp/w/t$i.log 2>&1 & done
wait; say warm $(ls /tmp/w/*.json | wc -l) of $(wc -l < /tmp/w/jobs)
cp /tmp/passed.* /tmp/w/ 2>/dev/null; cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; grep -h "^FAILED\|^ERROR\|^E  " /tmp/w/t*.log | head; grep -h "s call" /tmp/w/t*.log | sort -rn | head -4; tail -qn 1 /tmp/w/t*.log
timeout 300 python3 -m attn.bench.kernels --table sparse_mla $(sed 's/^/--case /' /tmp/w/jobs) --json $OUT/sparse_mla.json --out $OUT/sparse_mla.md > /tmp/w/sparse.log 2>&1; say sparse $?; cp /tmp/w/sparse.log $OUT/
grep "^Targets" $OUT/sparse_mla.md; grep "NOT met" $OUT/sparse_mla.md | cut -c1-200
left=$(( ${2:-440} - $(date +%s) + T0 )); [ $left -gt 20 ] && for i in $(seq 10 23); do timeout $left python3 .gpu/k11/shard.py $((i-10)) 14 tests/gpu/test_gpu_hopper_sparse.py > /tmp/w/u$i.log 2>&1 & done; wait
cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR" /tmp/w/[tu]*.log | head; say tests
