# drive.sh COMMIT SECONDS: rest of the portable table on the first GPU; tests that have not passed yet on both; then
# memcheck and racecheck of the latent kernels over e4m3 on the first.
export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
LAST=$(( $(nvidia-smi -L | wc -l) - 1 ))
CASES=pre_d256_1x8k,pre_sw1k_1x16k,mix_64dec8k_2kpre
FILES="tests/splitkv/test_split_kv.py tests/gpu/test_gpu_hopper_mla.py tests/gpu/test_gpu_invariance.py tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_sparse_layer.py"
LEFT=$(( BEGUN + $2 - $(date +%s) ))
(PYTHONPATH=/tmp/repo:/tmp/site bash /tmp/k/pull.sh $((LEFT - 45)) 14 $LAST u $FILES) &
for c in ${CASES//,/ }; do CUDA_VISIBLE_DEVICES=0 timeout 90 python3 -m attn.bench.kernels --table dense --case $c --rounds 1 --reps 3 --json /tmp/o/w/$c.json > /tmp/o/w/$c.log 2>&1 & w="$w $!"; done; wait $w; say warm
export LD_PRELOAD=libcuda.so.1 MEASURE_END=$(( $(date +%s) + 60 ))
python3 /tmp/k/measure.py 0 dense:$CASES > /tmp/o/lane0.txt 2>&1; say dense
unset LD_PRELOAD
for t in memcheck racecheck; do
 (export CUDA_VISIBLE_DEVICES=0 PYTHONPATH=/tmp/repo:/tmp/site; timeout 330 python3 -m tests.tools.sanitize --commit $1 --tool $t --set latent --case '*fp8_e4m3*' --seconds 120 --processes 8 --out /tmp/o/san_$t.md > /tmp/o/san_$t.log 2>&1; say $t $?) &
done
wait
grep -h -A25 "^FAILED" /tmp/o/u*.log > /tmp/o/fails.txt
say ended
touch /tmp/o/ended
