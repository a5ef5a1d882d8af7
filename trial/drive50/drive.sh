export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
GPUS=$(nvidia-smi -L | wc -l); export LAST=$((GPUS - 1))
python3 /tmp/k/jobs.py mla sparse_mla hopper invariance
export WARM_END=$((S + 150))
for i in $(seq 0 29); do
  timeout -s KILL 185 python3 /tmp/k/warm.py $((i % GPUS)) >> /tmp/o/warm.txt 2>&1 &
done
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(head -c 600 /tmp/o/queue.json)
export MEASURE_END=$(( $(date +%s) + 400 ))
python3 /tmp/k/measure.py 0 mla hopper > /tmp/o/lane0.txt 2>&1 &
python3 /tmp/k/measure.py $LAST invariance sparse_mla > /tmp/o/lane1.txt 2>&1 &
wait
say measured
touch /tmp/o/measured
: > /tmp/done.txt
END=$(( BEGUN + 785 )); LEFT=$(( END - $(date +%s) - 40 ))
(
 CUDA_VISIBLE_DEVICES=0 timeout -s INT -k 5 75 python3 /tmp/k/fa4.py > /tmp/o/fa4.log 2>&1; say fa4
) &
PYTHONPATH=/tmp/repo:/tmp/site bash /tmp/k/tests.sh $LEFT 14 $LAST tests/gpu/test_gpu_hopper_mla.py tests/gpu/test_gpu_hopper_decode.py &
PYTHONPATH=/tmp/repo:/tmp/site O=u bash /tmp/k/tests.sh $LEFT 14 0 tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_sparse_layer.py tests/gpu/test_gpu_hopper_sparse.py tests/gpu/test_gpu_triton_attn.py &
wait
cp /tmp/done.txt.new /tmp/o/done.txt
grep -h -A25 "^FAILED" /tmp/o/t*.log /tmp/o/u*.log > /tmp/o/fails.txt
say ended
touch /tmp/o/ended
