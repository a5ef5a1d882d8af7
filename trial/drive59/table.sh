# table.sh COMMIT: the whole sparse table beside its peers (carry .gpu/base, .gpu/peers, this folder as .gpu/k10), then GPU tests until 560 s.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w
python3 - > /tmp/w/jobs <<'P'
from attn.bench.cases.dense import BenchTable
names = [case.name for case in BenchTable("sparse_mla").cases]
first = [name for name in names if name.startswith(("pre_", "ragged", "index", "convert"))]
print(*first, *(name for name in names if name not in first), sep="\n")
P
xargs -P 15 -L 1 bash -c 'timeout 120 python3 -m attn.bench.kernels --table sparse_mla --case $0 --rounds 1 --reps 1 --json /tmp/w/$0.json --out /tmp/w/$0.md > /tmp/w/$0.log 2>&1' < /tmp/w/jobs
say warm $(ls /tmp/w/*.json | wc -l) of $(wc -l < /tmp/w/jobs)
timeout 450 python3 -m attn.bench.kernels --table sparse_mla --json $OUT/sparse_mla.json --out $OUT/sparse_mla.md > /tmp/w/sparse.log 2>&1; say sparse $?; cp /tmp/w/sparse.log $OUT/
grep "^Targets" $OUT/sparse_mla.md; grep "NOT met" $OUT/sparse_mla.md | cut -c1-200
left=$(( 560 - $(date +%s) + T0 )); [ $left -gt 20 ] && for i in $(seq 0 11); do timeout $left python3 .gpu/k10/shard.py $i 12 tests/gpu/test_gpu_hopper_mla.py tests/gpu/test_gpu_sparse_layer.py > /tmp/w/t$i.log 2>&1 & done; wait
cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR" /tmp/w/t*.log | head; say tests
