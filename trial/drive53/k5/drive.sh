# drive.sh COMMIT SECONDS
export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
GPUS=$(nvidia-smi -L | wc -l); export LAST=$((GPUS - 1))
python3 /tmp/k/jobs.py dense
python3 - <<'P'
import json
jobs = json.load(open("/tmp/o/queue.json"))
json.dump([["mla", "mla_h16_b1_1m", 0], ["hopper", "pre_1x8k", 0]] + jobs, open("/tmp/o/queue.json", "w"))
P
export WARM_END=$((S + 120))
for i in $(seq 0 27); do timeout -s KILL 150 python3 /tmp/k/warm.py $((i % GPUS)) >> /tmp/o/warm.txt 2>&1 & done
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(head -c 600 /tmp/o/queue.json)
# A quiet host: FlashAttention-4 beside the others, as soon as it is here.
w=$(( $(date +%s) + 60 )); while [ ! -e /tmp/fa4_here ] && [ $(date +%s) -lt $w ]; do sleep 1; done
CUDA_VISIBLE_DEVICES=0 timeout -s INT -k 5 70 python3 /tmp/k/fa4.py > /tmp/o/fa4.log 2>&1; say fa4
export LD_PRELOAD=libcuda.so.1
export MEASURE_END=$(( $(date +%s) + 60 ))
python3 /tmp/k/measure.py 0 mla:mla_h16_b1_1m > /tmp/o/lane_mla.txt 2>&1; say one million
export MEASURE_END=$(( $(date +%s) + 240 ))
python3 /tmp/k/measure.py 0 dense > /tmp/o/lane0.txt 2>&1 &
lane=$!
unset LD_PRELOAD
LEFT=$(( BEGUN + $2 - $(date +%s) ))
say left $LEFT
FILES="tests/splitkv/test_split_kv.py tests/gpu/test_gpu_hopper_mla.py tests/gpu/test_gpu_invariance.py tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_sparse_layer.py"
(PYTHONPATH=/tmp/repo:/tmp/site bash /tmp/k/pull.sh $((LEFT - 20)) 13 $LAST u $FILES) &
for t in memcheck racecheck; do
 (cd /tmp/repo; export CUDA_VISIBLE_DEVICES=$LAST PYTHONPATH=/tmp/repo:/tmp/site; timeout 300 python3 -m tests.tools.sanitize --commit $1 --tool $t --set latent --seconds 90 --processes 7 --out /tmp/o/san_$t.md > /tmp/o/san_$t.log 2>&1; say $t $?) &
done
wait $lane; say dense
LEFT=$(( BEGUN + $2 - $(date +%s) ))
(PYTHONPATH=/tmp/repo:/tmp/site bash /tmp/k/pull.sh $((LEFT - 20)) 12 0 w $FILES) &
wait
grep -h -A25 "^FAILED" /tmp/o/u*.log /tmp/o/w[0-9]*.log > /tmp/o/fails.txt
say ended
touch /tmp/o/ended
