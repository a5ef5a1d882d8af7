export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
GPUS=$(nvidia-smi -L | wc -l); export LAST=$((GPUS - 1))
python3 /tmp/k/jobs.py mla sparse_mla hopper invariance
export WARM_END=$((S + 150))
: > /tmp/done.txt
for i in $(seq 0 29); do
  timeout -s KILL 185 python3 /tmp/k/warm.py $((i % GPUS)) >> /tmp/o/warm.txt 2>&1 &
done
(export PYTHONPATH=/tmp/repo:/tmp/site; CUDA_VISIBLE_DEVICES=$LAST nice -n 5 timeout -s KILL 130 compute-sanitizer --tool memcheck --error-exitcode 9 python3 /tmp/k/jcheck.py > /tmp/o/memcheck_join.log 2>&1; say memcheck $?) &
(PYTHONPATH=/tmp/repo:/tmp/site O=w bash /tmp/k/tests.sh 125 4 $LAST tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_sparse_layer.py tests/gpu/test_gpu_sparse_parts.py; say early tests) &
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(head -c 600 /tmp/o/queue.json)
cp /tmp/done.txt.new /tmp/done.txt
export LD_PRELOAD=libcuda.so.1  # modules of FlashInfer are linked to it, but the linker dropped an empty stand-in
export MEASURE_END=$(( $(date +%s) + 355 ))
python3 /tmp/k/measure.py 0 hopper mla > /tmp/o/lane0.txt 2>&1 &
sleep 7
python3 /tmp/k/measure.py $LAST sparse_mla invariance > /tmp/o/lane1.txt 2>&1 &
wait
say measured
touch /tmp/o/measured
LEFT=$(( BEGUN + $2 - $(date +%s) ))
say left $LEFT
(
 [ $LEFT -gt 32 ] && CUDA_VISIBLE_DEVICES=0 timeout -s INT -k 5 $((LEFT - 4)) python3 /tmp/k/fa4.py > /tmp/o/fa4.log 2>&1; say fa4
) &
[ $LEFT -gt 20 ] && PYTHONPATH=/tmp/repo:/tmp/site O=u bash /tmp/k/tests.sh $((LEFT - 12)) 12 $LAST tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_sparse_layer.py tests/gpu/test_gpu_sparse_parts.py tests/gpu/test_gpu_hopper_sparse.py &
wait
grep -h -A25 "^FAILED" /tmp/o/t*.log /tmp/o/u*.log /tmp/o/w[0-9]*.log > /tmp/o/fails.txt
say ended
touch /tmp/o/ended
