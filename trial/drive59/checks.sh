# checks.sh COMMIT: GPU tests of sparse and latent layers (150 s), then both sanitizers over sparse lists and short latent cases (100 s); carry .gpu/base and .gpu/k10.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w; rm -f /tmp/passed.*
for i in $(seq 0 13); do timeout 150 python3 .gpu/k10/shard.py $i 14 tests/gpu/test_gpu_hopper_sparse.py tests/gpu/test_gpu_sparse_layer.py tests/gpu/test_gpu_hopper_mla.py > /tmp/w/t$i.log 2>&1 & done; wait
cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR" /tmp/w/t*.log | head; say tests
for tool in memcheck racecheck; do
  timeout 120 python3 -m tests.tools.sanitize --commit $1 --tool $tool --set sparse --set latent --case '*heads, *' --case '*latent_short*' --seconds 80 --processes 20 --out $OUT/$tool.md > /tmp/w/$tool.log 2>&1; say $tool $?; cut -c1-160 $OUT/$tool.md; grep -h "^FAILED" /tmp/w/$tool.log | cut -c1-300
done
