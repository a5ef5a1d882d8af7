# rest.sh COMMIT: GPU tests that the session of 2026-11-30 did not reach (sparse layers, three latent tests), then one row of the latent table
# again, beside its peer. Carry .gpu/base, .gpu/peers (without the project's own wheel, 64 MiB) and this folder as .gpu/k11. About 200 s.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w; rm -f /tmp/passed.*
for i in $(seq 0 13); do timeout 300 python3 .gpu/k11/rest.py $i 14 > /tmp/w/t$i.log 2>&1 & done; wait
cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR" /tmp/w/t*.log | head; tail -qn 1 /tmp/w/t*.log; say tests
timeout 200 python3 -m attn.bench.kernels --table mla --case ragged_mla_pre_1x8k --json $OUT/ragged.json --out $OUT/ragged.md > $OUT/ragged.log 2>&1; say ragged $?
grep "ragged_mla_pre_1x8k" $OUT/ragged.md | cut -c1-250
