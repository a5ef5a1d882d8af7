# sanE.sh COMMIT: memcheck of short latent cases, prompts with batch invariance, plans and index logits; then tests for the time that is left.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/l; w=
timeout 200 python3 -m tests.tools.sanitize --commit $1 --tool memcheck --set latent --set invariant --set plan --set index --case '*latent_short*' --case '[!l]*' --seconds 110 --processes 21 --out $OUT/mem.md > /tmp/l/mem.log 2>&1; say mem $?
cat $OUT/mem.md; grep -h ^FAILED /tmp/l/mem.log | cut -c1-300
left=$(( 265 - $(date +%s) + T0 )); say left $left; [ $left -gt 60 ] || exit 0
t() { timeout $left python3 -m pytest -v -p no:cacheprovider tests/gpu/$2 -k "$3" > /tmp/l/t$1.log 2>&1 & w="$w $!"; }
t 1 test_gpu_invariance.py test_decodes_verifies
t 2 test_gpu_hopper_decode.py "test_every_case"
t 3 test_gpu_hopper_decode.py "test_120_launches_of"
t 4 test_gpu_hopper.py test_every_case_that
t 5 test_gpu_hopper.py "test_dequantised_keys or test_outputs_may or test_an_engine"
t 6 test_gpu_hopper_mla.py test_every_case
t 7 test_gpu_hopper_mla.py test_decodes_of_every_number
t 8 test_gpu_hopper_mla.py test_rows_of_many_segments
t 9 test_gpu_hopper_mla.py test_120_launches_of
t 10 test_gpu_hopper.py test_every_case_of_expanded
t 11 test_gpu_hopper_decode.py test_an_engine_left
t 12 test_gpu_hopper_mla.py test_queries_may
wait $w; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $i $(grep -c PASSED /tmp/l/t$i.log) $(grep -c FAILED /tmp/l/t$i.log) $(tail -n 1 /tmp/l/t$i.log | cut -c1-120); done; grep -h "^E  " /tmp/l/t*.log | head
tar czf $OUT/e.tgz -C /tmp l
