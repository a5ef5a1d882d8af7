export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw
cd /tmp/repo
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
GPUS=$(nvidia-smi -L | wc -l); export LAST=$((GPUS - 1))
INV=pre_1x8k,chunk_2k_of_16k,pre_16x1k,pre_d64_1x8k,pre_sw1k_1x16k,mix_64dec8k_2kpre,pre_d256_1x8k
A=mla_fp8q_h128_b1_8k,mla_fp8_h128_b32_4k,mla_fp8q_h128_b32_4k,mla_fp8q_h128_b128_4k,mla_fp8q_h64_b64_8k,ragged_mla_pre_1x8k,mla_h128_b1_8k,mla_h128_b32_4k,mla_h128_b128_4k,mla_h64_b64_8k,mla_h128_b64_zipf,mla_h16_b1_1m
B=mla_h128_q2_b64_4k,mla_h128_q4_b32_4k,mla_h96_b64_4k,mla_h24_b64_4k,mla_h128_b1_1m,mla_p32_h128_b32_4k,mla_p128_h128_b32_4k,mla_h16_q4_b64_4k,mla_h16_q8_b32_4k
python3 - $INV mla:$A,$B <<'P'
import json, sys
jobs = [["invariance", c, 0] for c in sys.argv[1].split(",")] + [["mla", c, 0] for c in sys.argv[2][4:].split(",")]
jobs.sort(key=lambda j: "1m" not in j[1])
json.dump(jobs, open("/tmp/o/queue.json", "w"))
P
export WARM_END=$((S + 40))
for i in $(seq 0 27); do timeout -s KILL 72 python3 /tmp/k/warm.py $((i % GPUS)) >> /tmp/o/warm.txt 2>&1 & done
n=0; for t in "test_a_prompt_of_8192_tokens_has_the_bits_of_its_decodes[128]" "test_both_kernels_of_prompts_have_the_same_bits[window]" "test_both_kernels_of_prompts_have_the_same_bits[96]" "test_both_kernels_of_prompts_have_the_same_bits[64]"; do
 PYTHONPATH=/tmp/repo:/tmp/site CUDA_VISIBLE_DEVICES=$LAST timeout -s INT -k 3 66 python3 -m pytest -q -p no:cacheprovider "tests/gpu/test_gpu_invariance.py::$t" > /tmp/o/bits$n.log 2>&1 & n=$((n+1)); done
wait
say warm ended, $(wc -l < /tmp/o/warm.txt) lines, left: $(head -c 300 /tmp/o/queue.json)
export LD_PRELOAD=libcuda.so.1
export MEASURE_END=$((BEGUN + $2)) SILENT=40
python3 /tmp/k/measure.py 0 mla:$A > /tmp/o/lane0.txt 2>&1 &
sleep 5
python3 /tmp/k/measure.py $LAST invariance:$INV mla:$B > /tmp/o/lane1.txt 2>&1 &
wait
say measured
touch /tmp/o/ended
