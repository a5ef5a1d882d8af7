# latent.sh COMMIT: the latent table beside its peers. First a call with .gpu/base and .gpu/peers (". .gpu/base/setup.sh"), then this one
# with .gpu/base, .gpu/fi and this folder as .gpu/k10, while the machine is warm. About 100 s of compiles and 170 s of measurements.
. .gpu/base/setup.sh; . .gpu/fi/setup_fi.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w
python3 -c 'from attn.bench.cases.dense import BenchTable; print(*(case.name for case in BenchTable("mla").cases), sep="\n")' > /tmp/w/jobs
xargs -P 15 -L 1 bash -c 'timeout 120 python3 -m attn.bench.kernels --table mla --case $0 --rounds 1 --reps 1 --json /tmp/w/$0.json --out /tmp/w/$0.md > /tmp/w/$0.log 2>&1' < /tmp/w/jobs
say warm $(ls /tmp/w/mla*.json | wc -l) of $(wc -l < /tmp/w/jobs)
timeout 330 python3 -m attn.bench.kernels --table mla --json $OUT/mla.json --out $OUT/mla.md > $OUT/mla.log 2>&1; say mla $?
grep "^Targets" $OUT/mla.md; grep "NOT met" $OUT/mla.md | cut -c1-250; grep "h12" $OUT/mla.md | cut -c1-200
