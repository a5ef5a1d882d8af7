. .gpu/base/setup.sh
mkdir -p /tmp/k /tmp/o/w; cp .gpu/k3/* /tmp/k; mkdir -p /tmp/repo; tar c --exclude .gpu --exclude .git . | tar x -C /tmp/repo
export PYTHONPATH=/tmp/repo:/tmp/site ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
nvidia-smi -L; python3 /tmp/k/jobs.py invariance
export WARM_END=$((S + 105))
for i in $(seq 0 14); do timeout -s KILL 125 python3 /tmp/k/warm.py 0 >> /tmp/o/warm.txt 2>&1 & done
for l in "128 8192" "256" "128 window cap" "64" "192" "128 fp16 one head"; do (timeout 100 python3 /tmp/k/lazy.py bits "$l" 2>&1 | tail -1) & done
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(head -c 300 /tmp/o/queue.json)
export MEASURE_END=$(( $(date +%s) + 130 ))
python3 /tmp/k/measure.py 0 invariance > /tmp/o/lane0.txt 2>&1
say measured
tail -2 /tmp/o/lane0.txt; cp /tmp/o/invariance* $OUT/; sync
echo none > /tmp/done.txt
bash /tmp/k/tests.sh 28 14 0 tests/gpu/test_gpu_invariance.py
cp /tmp/done.txt.new $OUT/done.txt 2>/dev/null; wc -l $OUT/done.txt
grep -h -A25 "^FAILED" /tmp/o/t*.log | head -c 2000
