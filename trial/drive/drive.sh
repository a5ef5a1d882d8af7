export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
GPUS=$(nvidia-smi -L | wc -l); export LAST=$((GPUS - 1))
python3 /tmp/k/jobs.py mla sparse_mla hopper invariance ${DENSE-dense}
export WARM_END=$((S + ${WARM:-170}))
for i in $(seq 0 $(( ${WORKERS:-13} * GPUS - 1 ))); do
  timeout -s KILL $(( ${WARM:-170} + 40 )) python3 /tmp/k/warm.py $((i % GPUS)) >> /tmp/o/warm.txt 2>&1 &
done
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(cat /tmp/o/queue.json | head -c 600)
export MEASURE_END=$(( $(date +%s) + ${MEASURE:-560} ))
if [ $GPUS = 1 ]; then
  python3 /tmp/k/measure.py 0 mla sparse_mla hopper invariance > /tmp/o/lane0.txt 2>&1
else
  python3 /tmp/k/measure.py 0 hopper ${DENSE-dense} > /tmp/o/lane0.txt 2>&1 &
  python3 /tmp/k/measure.py $LAST mla sparse_mla invariance > /tmp/o/lane1.txt 2>&1 &
  wait
fi
say measured
touch /tmp/o/measured
bash /tmp/k/after.sh
say ended
touch /tmp/o/ended
