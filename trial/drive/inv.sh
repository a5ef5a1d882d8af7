. .gpu/base/setup.sh
mkdir -p /tmp/k /tmp/o/w; cp .gpu/k3/* /tmp/k; mkdir -p /tmp/repo; tar c --exclude .gpu --exclude .git . | tar x -C /tmp/repo
export PYTHONPATH=/tmp/repo:/tmp/site ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
nvidia-smi -L; python3 /tmp/k/jobs.py invariance
export WARM_END=$((S + 110))
for i in $(seq 0 15); do timeout -s KILL 140 python3 /tmp/k/warm.py 0 >> /tmp/o/warm.txt 2>&1 & done
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(head -c 300 /tmp/o/queue.json)
export MEASURE_END=$(( $(date +%s) + 190 ))
python3 /tmp/k/measure.py 0 invariance > /tmp/o/lane0.txt 2>&1
say measured
tail -2 /tmp/o/lane0.txt; cp /tmp/o/invariance* $OUT/
echo none > /tmp/done.txt
(timeout -s INT -k 5 110 python3 -m tests.tools.sanitize --tool racecheck --set invariant --seconds 60 --processes 4 --commit $1 --out $OUT/race.md > /tmp/o/race.log 2>&1; say race) &
(timeout -s INT -k 5 110 python3 -m tests.tools.sanitize --tool memcheck --set invariant --seconds 50 --processes 3 --commit $1 --out $OUT/mem.md > /tmp/o/mem.log 2>&1; say mem) &
bash /tmp/k/tests.sh 95 10 0 tests/gpu/test_gpu_invariance.py tests/gpu/test_gpu_hopper.py -k "invariance or 256 or 192 or 160"
say tests
wait
cp /tmp/done.txt.new $OUT/done.txt 2>/dev/null; wc -l $OUT/done.txt
grep -h -A25 "^FAILED" /tmp/o/t*.log | head -c 3000; grep -h "shard " /tmp/o/t*.log | head -3
tail -12 /tmp/o/race.log; tail -8 /tmp/o/mem.log
