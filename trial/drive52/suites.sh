# suites.sh SECONDS: GPU suites of what changed, on both GPUs of nvidia-h200-x2 (or one); run behind a.sh's files, in the background
# of a call as b.sh does with drive.sh; wait.sh fetches the logs.
cd /tmp/repo; export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
LAST=$(( $(nvidia-smi -L | wc -l) - 1 ))
cp /tmp/k/done_sparse.txt /tmp/done.txt; : > /tmp/done.txt.new
PYTHONPATH=/tmp/repo:/tmp/site O=u bash /tmp/k/tests.sh $1 14 0 tests/gpu/test_gpu_hopper_mla.py tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_sparse_layer.py &
PYTHONPATH=/tmp/repo:/tmp/site O=w bash /tmp/k/tests.sh $1 14 $LAST tests/gpu/test_gpu_invariance.py tests/gpu/test_gpu_hopper_mla.py &
wait
grep -h -A25 "^FAILED" /tmp/o/u*.log /tmp/o/w[0-9]*.log > /tmp/o/fails.txt
touch /tmp/o/ended
