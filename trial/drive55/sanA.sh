# sanA.sh COMMIT: a sanity run of tests, memcheck of both sets, racecheck of prompts with batch invariance.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/l /tmp/st; w=
t() { timeout 130 python3 -m pytest -v -p no:cacheprovider tests/gpu/$2 -k "$3" > /tmp/l/t$1.log 2>&1 & w="$w $!"; }
for i in $(seq 0 7); do timeout 130 python3 -m tests.tools.sanitize --share latent $i 8 --seconds 110 --case '*latent_short*' > /tmp/l/p$i.log 2>&1 & w="$w $!"; done
for i in 0 1 2 3; do timeout 130 python3 -m tests.tools.sanitize --share invariant $i 4 --seconds 110 > /tmp/l/p2$i.log 2>&1 & w="$w $!"; done
t 1 test_gpu_hopper_decode.py "test_a_graph_of_decodes or test_draft_steps"
t 2 test_gpu_hopper_decode.py test_a_row_has_one_result
t 3 test_gpu_hopper_decode.py "test_every_case"
t 4 test_gpu_hopper.py test_every_case_that
t 5 test_gpu_hopper.py "test_a_request_has_the_same or test_a_graph_replays"
t 6 test_gpu_hopper_mla.py test_every_case
t 7 test_gpu_hopper_mla.py "test_a_row_has_one or test_a_graph_of"
t 8 test_gpu_hopper_mla.py "test_queries_may_be_rounded"
wait $w
say warm $(cat /tmp/l/p*.log | grep -c ^DONE) $(cat /tmp/l/p*.log | grep -c ^FAILED) tests $(cat /tmp/l/t*.log | grep -c PASSED) $(cat /tmp/l/t*.log | grep -c FAILED)
grep -h "^FAILED\|^E  " /tmp/l/*.log | cut -c1-300 | head -20; for i in 1 2 3 4 5 6 7 8; do echo $i $(grep -c PASSED /tmp/l/t$i.log) $(tail -n 1 /tmp/l/t$i.log | cut -c1-120); done
timeout 150 python3 -m tests.tools.sanitize --commit $1 --tool memcheck --set latent --set invariant --case '*latent_short*' --case '[!l]*' --seconds 100 --processes 16 --out $OUT/mem.md > /tmp/l/mem.log 2>&1; say mem $?
cat $OUT/mem.md; grep -h ^FAILED /tmp/l/mem.log | cut -c1-300
export TMPDIR=/tmp/st; (while sleep 10; do rm -rf /tmp/snap.new; cp -r /tmp/st /tmp/snap.new && rm -rf /tmp/snap && mv /tmp/snap.new /tmp/snap; date > /tmp/snap/at; done) & S=$!
timeout 290 python3 -m tests.tools.sanitize --commit $1 --tool racecheck --set invariant --seconds 130 --processes 15 --out $OUT/race_inv.md > /tmp/l/race_inv.log 2>&1; say race_inv $?
kill $S; cut -c1-260 $OUT/race_inv.md; grep -h ^FAILED /tmp/l/race_inv.log | cut -c1-300
for f in /tmp/snap/*/said; do echo $(grep -c ^DONE $f) $(tail -n 1 $f); done
tar czf $OUT/a.tgz -C /tmp l snap
