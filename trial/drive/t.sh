. .gpu/base/setup.sh
mkdir -p /tmp/k /tmp/o /tmp/repo; cp .gpu/k3/* /tmp/k; tar c --exclude .gpu --exclude .git . | tar x -C /tmp/repo
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 PYTHONPATH=/tmp/repo:/tmp/site
cp /tmp/k/done.txt /tmp/done.txt; cd /tmp/repo
(O=u bash /tmp/k/tests.sh 50 13 1 tests/gpu/test_gpu_sparse_mla.py 2>/dev/null) &
bash /tmp/k/tests.sh 60 18 0 tests/gpu/test_gpu_hopper_mla.py 2>/dev/null
wait
wc -l /tmp/done.txt.new; grep -h "shard" /tmp/o/t*.log | tail -2;  grep -h -A25 "^FAILED" /tmp/o/t*.log /tmp/o/u*.log | head -60
cp /tmp/done.txt.new $OUT/done.txt
