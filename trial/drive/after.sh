cd /tmp/repo
S=$(date +%s); say() { echo "[after $(( $(date +%s) - S ))] $*"; }
cp /tmp/k/done.txt /tmp/done.txt
LIMIT=${AFTER:-240}
(PYTHONPATH=/tmp/repo:/tmp/site bash /tmp/k/tests.sh $((LIMIT - 45)) 15 $LAST tests/gpu/test_gpu_sparse_mla.py tests/gpu/test_gpu_hopper_mla.py tests/gpu/test_gpu_hopper.py tests/gpu/test_gpu_hopper_decode.py; say tests ended) &
(cd /tmp/k/logits; WARM_GPU=$LAST CUDA_VISIBLE_DEVICES=0 PYTHONPATH=/tmp/k/logits:/tmp/site timeout -s INT -k 5 100 python3 trial/logits.py > /tmp/o/logits.log 2>&1; say logits ended
 for tool in racecheck memcheck; do
   (cd /tmp/repo; PYTHONPATH=/tmp/repo:/tmp/site CUDA_VISIBLE_DEVICES=0 timeout -s INT -k 5 $((LIMIT - $(date +%s) + S)) python3 -m tests.tools.sanitize --tool $tool --set invariant --set latent --set decode --set prefill --seconds ${SAN:-60} --processes 8 --commit $ATTN_COMMIT --out /tmp/o/$tool.md > /tmp/o/$tool.log 2>&1; say $tool ended) &
 done
 if [ -e /tmp/site_fa4/.done ]; then
   PYTHONPATH=/tmp/repo:/tmp/site:/tmp/site_fa4:/tmp/site_fa4/nvidia_cutlass_dsl/dsl_packages CUDA_VISIBLE_DEVICES=0 timeout -s INT -k 5 100 python3 -m attn.bench.kernels --table hopper --case pre_1x8k --peer fa3 --peer fa4 --json /tmp/o/fa4.json --out /tmp/o/fa4.md > /tmp/o/fa4.log 2>&1; say fa4 ended
 fi
 wait) &
wait
cp /tmp/done.txt.new /tmp/o/done.txt
grep -h -A25 "^FAILED" /tmp/o/t*.log > /tmp/o/fails.txt
