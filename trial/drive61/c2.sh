# c2.sh COMMIT SECONDS: two rows of the latent table with FlashInfer 0.7.2, then tests of the latent kernels until SECONDS
. .gpu/base/setup.sh; . .gpu/fi/setup_fi.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w; rm -f /tmp/passed.*
timeout 110 python3 -m attn.bench.kernels --table mla --case mla_p16_h16_b32_8k --case ragged_mla_pre_1x8k --json $OUT/mla.json --out $OUT/mla.md > $OUT/mla.log 2>&1; say mla $?
grep "^Targets" $OUT/mla.md; grep "^| [mr][a-z0-9_]*8k |" $OUT/mla.md | cut -c1-300
left=$(( $2 - $(date +%s) + T0 )); [ $left -gt 20 ] && for i in $(seq 0 13); do timeout $left python3 .gpu/k11/shard.py $i 14 tests/gpu/test_gpu_hopper_mla.py > /tmp/w/v$i.log 2>&1 & done; wait
cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR" /tmp/w/v*.log | head; say tests
