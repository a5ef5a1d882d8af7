# drive.sh COMMIT: the rest of the portable table, then both sanitizers over short launches of new kernels; one GPU.
export ATTN_COMMIT=$1 TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 FLASHINFER_WORKSPACE_BASE=/tmp/fiw CUDA_VISIBLE_DEVICES=0
cd /tmp/repo; T=/tmp/repo:/tmp/site
S=$(date +%s); say() { echo "[$(( $(date +%s) - S ))] $*"; }
CASES=pre_d256_1x8k,pre_sw1k_1x16k,mix_64dec8k_2kpre
export PYTHONPATH=$T:/tmp/site_fi FLASHINFER_DISABLE_JIT=1
for c in ${CASES//,/ }; do timeout 120 python3 -m attn.bench.kernels --table dense --case $c --rounds 1 --reps 3 --json /tmp/o/w/$c.json > /tmp/o/w/$c.log 2>&1 & w="$w $!"; done
for i in $(seq 0 10); do PYTHONPATH=$T timeout 75 python3 -m tests.tools.sanitize --share latent $i 11 --seconds 60 --case '*latent_short*' > /tmp/o/plain$i.log 2>&1 & w="$w $!"; done
for i in 0 1; do PYTHONPATH=$T timeout 75 python3 -m tests.tools.sanitize --share index $i 2 --seconds 60 > /tmp/o/plain2$i.log 2>&1 & w="$w $!"; done
for i in 0; do PYTHONPATH=$T timeout 75 python3 -m tests.tools.sanitize --share invariant $i 1 --seconds 60 > /tmp/o/plain3$i.log 2>&1 & w="$w $!"; done
wait $w; say warm $(cat /tmp/o/plain*.log | grep -c ^DONE) $(cat /tmp/o/plain*.log | grep -c ^FAILED)
LD_PRELOAD=libcuda.so.1 MEASURE_END=$(( $(date +%s) + 90 )) python3 /tmp/k/measure.py 0 dense:$CASES > /tmp/o/lane0.txt 2>&1; say dense
export PYTHONPATH=$T
san() { # TOOL NAME SECONDS SETS
 t=$1; n=$2; s=$3; shift 3; timeout $((s + 160)) python3 -m tests.tools.sanitize --commit $C --tool $t --seconds $s --processes 16 --out /tmp/o/$n.md "$@" > /tmp/o/$n.log 2>&1; say $n $?; }
C=$1
san racecheck race 90 --set latent --set index --set plan --case '*latent_short*' --case '* heads, *' --case 'plan *'
san memcheck mem 50 --set latent --set index --set plan --case '*latent_short*' --case '* heads, *' --case 'plan *'
touch /tmp/o/ended
[ $(( $(date +%s) - S )) -lt 470 ] && san racecheck inv 40 --set invariant
touch /tmp/o/ended2
