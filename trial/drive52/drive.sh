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
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(head -c 600 /tmp/o/queue.json)
cp /tmp/done.txt.new /tmp/done.txt 2>/dev/null
export LD_PRELOAD=libcuda.so.1  # modules of FlashInfer are linked to it, but the linker dropped an empty stand-in
export MEASURE_END=$(( $(date +%s) + 400 ))
python3 /tmp/k/measure.py 0 hopper mla > /tmp/o/lane0.txt 2>&1 &
sleep 7
python3 /tmp/k/measure.py $LAST sparse_mla invariance > /tmp/o/lane1.txt 2>&1 &
wait
say measured
touch /tmp/o/measured
LEFT=$(( BEGUN + $2 - $(date +%s) ))
say left $LEFT
# One lane, a quiet host: rows whose host time is judged.
CUDA_VISIBLE_DEVICES=0 timeout -s INT -k 5 60 python3 /tmp/k/fa4.py > /tmp/o/fa4.log 2>&1; say fa4
export MEASURE_END=$(( $(date +%s) + 40 ))
mkdir -p /tmp/o/quiet
python3 /tmp/k/quiet.py mla:mla_h128_b1_8k,mla_fp8q_h128_b1_8k > /tmp/o/quiet.txt 2>&1; say quiet
LEFT=$(( BEGUN + $2 - $(date +%s) ))
say left $LEFT
if [ $LEFT -gt 25 ]; then
  PYTHONPATH=/tmp/repo:/tmp/site O=u bash /tmp/k/tests.sh $((LEFT - 14)) 14 0 tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_sparse_layer.py &
  PYTHONPATH=/tmp/repo:/tmp/site O=w bash /tmp/k/tests.sh $((LEFT - 14)) 14 $LAST tests/gpu/test_gpu_sparse_parts.py tests/gpu/test_gpu_hopper_sparse.py &
fi
wait
grep -h -A25 "^FAILED" /tmp/o/u*.log /tmp/o/w[0-9]*.log > /tmp/o/fails.txt
say ended
touch /tmp/o/ended
