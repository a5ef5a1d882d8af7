# f.sh COMMIT: the table of batch invariance beside its peers, twice as many rounds, since rounds of prompts differ by 10 %
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w
python3 - > /tmp/w/jobs <<'P'
from attn.bench.cases.dense import BenchTable
print(*(c.name for c in BenchTable("invariance").cases), sep="\n")
P
xargs -P 9 -L 1 bash -c 'timeout 150 python3 -m attn.bench.kernels --table invariance --case $0 --rounds 1 --reps 1 --json /tmp/w/$0.json --out /tmp/w/$0.md > /tmp/w/$0.log 2>&1' < /tmp/w/jobs; say warm $(ls /tmp/w/*.json | wc -l) of $(wc -l < /tmp/w/jobs)
timeout 300 python3 -m attn.bench.kernels --table invariance --rounds 12 --json $OUT/invariance.json --out $OUT/invariance.md > /tmp/w/inv.log 2>&1; say invariance $?
grep "^Targets" $OUT/invariance.md; grep "^| [dspcm].* | <= " $OUT/invariance.md | cut -c1-160
