export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
GPUS=$(nvidia-smi -L | wc -l); export LAST=$((GPUS - 1))
python3 /tmp/k/jobs.py mla
export WARM_END=$((S + 110))
for i in $(seq 0 23); do
  timeout -s KILL 140 python3 /tmp/k/warm.py $((i % GPUS)) >> /tmp/o/warm.txt 2>&1 &
done
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(cat /tmp/o/queue.json | head -c 600)
export MEASURE_END=$(( $(date +%s) + 150 ))
python3 /tmp/k/measure.py 0 mla:mla_h128_b1_8k,mla_h128_b32_4k,mla_h128_b128_4k,mla_h64_b64_8k,mla_h16_q4_b64_4k,mla_h24_b64_4k,mla_h16_q8_b32_4k,mla_p32_h128_b32_4k,mla_p128_h128_b32_4k,mla_h128_b64_zipf,mla_h128_q2_b64_4k > /tmp/o/lane0.txt 2>&1 &
mkdir -p /tmp/o/b; sed 's#/tmp/o/{table}#/tmp/o/b/{table}#' /tmp/k/measure.py > /tmp/k/measure_b.py
python3 /tmp/k/measure_b.py $LAST mla:mla_h16_b32_8k,mla_h16_b128_4k,mla_h16_b64_zipf,mla_fp8_h16_b128_4k,mla_fp8_h128_b32_4k,mla_h12_b64_4k,mla_h96_b64_4k,mla_h128_q4_b32_4k,mla_p16_h16_b32_8k,mla_h16_b1_1m,mla_h128_b1_1m,ragged_mla_pre_1x8k > /tmp/o/lane1.txt 2>&1 &
wait
say measured
touch /tmp/o/measured
echo none > /tmp/done.txt
export PYTHONPATH=/tmp/repo:/tmp/site
(CUDA_VISIBLE_DEVICES=$LAST timeout -s INT -k 5 250 python3 -m tests.tools.sanitize --tool racecheck --set latent --seconds 80 --processes 8 --commit $1 --out /tmp/o/race.md > /tmp/o/race.log 2>&1; say race) &
(CUDA_VISIBLE_DEVICES=$LAST timeout -s INT -k 5 250 python3 -m tests.tools.sanitize --tool memcheck --set latent --seconds 60 --processes 4 --commit $1 --out /tmp/o/mem.md > /tmp/o/mem.log 2>&1; say mem) &
bash /tmp/k/tests.sh 150 16 0 tests/gpu/test_gpu_hopper_mla.py
say tests
wait
cp /tmp/done.txt.new /tmp/o/done.txt
grep -h -A25 "^FAILED" /tmp/o/t*.log > /tmp/o/fails.txt
say ended
touch /tmp/o/ended
