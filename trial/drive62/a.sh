# a.sh COMMIT: tests of batch invariance, the same of Triton 3.9's form, both sanitizers, then the table beside its peers
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w /tmp/f13; rm -f /tmp/passed.*
cp -r attn builders specs tests pyproject.toml .gpu /tmp/f13/; (cd /tmp/f13
sed -i 's/^_BY_PTXAS_13 = .*/_BY_PTXAS_13 = gl.constexpr(True)/' attn/kernels/dense/hopper_prefill/segmented.py
sed -i 's/    return triton_release() >= (3, 9)/    return True/; s/if self.few_registers and is_by_ptxas_13():/if False:/' builders/launch/call.py; grep -c "return True\|if False:" builders/launch/call.py)
for i in $(seq 0 9); do timeout 240 python3 .gpu/k12/shard.py $i 10 tests/gpu/test_gpu_invariance.py > /tmp/w/t$i.log 2>&1 & done
for i in $(seq 10 13); do (cd /tmp/f13; PYTHONPATH=/tmp/f13:/tmp/site TRITON_CACHE_DIR=/tmp/tc13 timeout 240 python3 .gpu/k12/shard.py $((i-10)) 4 tests/gpu/test_gpu_invariance.py -k "256 or 192" > /tmp/w/f$i.log 2>&1) & done; wait
cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR\|^E  " /tmp/w/[tf]*.log | cut -c1-200 | head; tail -qn 1 /tmp/w/[tf]*.log; say tests
for tool in memcheck racecheck; do
  (timeout 120 python3 -m tests.tools.sanitize --commit $1 --tool $tool --set invariant --seconds 75 --processes 7 --out $OUT/$tool.md > /tmp/w/$tool.log 2>&1; say $tool $?; grep -h "^FAILED" /tmp/w/$tool.log | cut -c1-300) &
done; wait; cut -c1-160 $OUT/memcheck.md; cut -c1-200 $OUT/racecheck.md; cp /tmp/w/*check.log $OUT/
