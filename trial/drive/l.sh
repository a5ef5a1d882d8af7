# Last hold: cases that lacked a module of FlashInfer's on GPU 0; racecheck and the rest of the tests on GPU 1.
cd /tmp/repo
export ATTN_COMMIT=04054a3a471d TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw FLASHINFER_DISABLE_JIT=1
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
G=$(( $(nvidia-smi -L | wc -l) - 1 ))
cp /tmp/k/done.txt /tmp/done.txt
P=/tmp/repo:/tmp/site:/tmp/site_fi
(
 export PYTHONPATH=$P CUDA_VISIBLE_DEVICES=0
 for c in pre_d256_1x8k pre_sw1k_1x16k; do
   timeout -s INT -k 5 60 python3 -m attn.bench.kernels --table hopper --case $c --rounds 1 --reps 3 > /tmp/o/w_$c.log 2>&1 &
   timeout -s INT -k 5 60 python3 -m attn.bench.kernels --table dense --case $c --rounds 1 --reps 3 > /tmp/o/wd_$c.log 2>&1 &
 done
 wait; say warm
 timeout -s INT -k 5 60 python3 -m attn.bench.kernels --table hopper --case pre_d256_1x8k --case pre_sw1k_1x16k --json /tmp/o/hopper.1.json --out /tmp/o/hopper.1.md > /tmp/o/hopper.1.log 2>&1; say hopper
 timeout -s INT -k 5 60 python3 -m attn.bench.kernels --table dense --case pre_d256_1x8k --case pre_sw1k_1x16k --json /tmp/o/dense.1.json --out /tmp/o/dense.1.md > /tmp/o/dense.1.log 2>&1; say dense
) &
(PYTHONPATH=/tmp/repo:/tmp/site bash /tmp/k/tests.sh ${T:-110} 12 $G tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_hopper_mla.py tests/gpu/test_gpu_hopper.py tests/gpu/test_gpu_hopper_decode.py; say tests) &
for tool in racecheck memcheck; do
 (cd /tmp/repo; PYTHONPATH=/tmp/repo:/tmp/site CUDA_VISIBLE_DEVICES=$G PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -s INT -k 5 140 compute-sanitizer --tool $tool --log-file /tmp/o/logits_$tool.log python3 -m pytest -q -p no:cacheprovider tests/gpu/test_gpu_sparse_mla.py -k "test_a_row_s_logits_are_its_own or test_paged_logits_of_fp8 or test_logits_of_rows_that" > /tmp/o/logits_$tool.txt 2>&1; say $tool $(tail -n 1 /tmp/o/logits_$tool.txt) $(tail -n 1 /tmp/o/logits_$tool.log)) &
done
wait
cp /tmp/done.txt.new /tmp/o/done.txt; grep -h -A25 "^FAILED" /tmp/o/t*.log > /tmp/o/fails.txt
cd /tmp/o; tar czf $OUT/o.tgz --exclude w .; tail -n 4 hopper.1.log dense.1.log; wc -l done.txt fails.txt
