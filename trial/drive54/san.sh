# san.sh COMMIT: both sanitizers over latent launches and prompts with batch invariance; one GPU of 16 cores, with base and this folder as .gpu/k8.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
w=; for i in $(seq 0 11); do timeout 90 python3 -m tests.tools.sanitize --share latent $i 12 --seconds 70 --case '*latent_short*' > /tmp/p$i.log 2>&1 & w="$w $!"; done
for i in 0 1 2 3; do timeout 90 python3 -m tests.tools.sanitize --share invariant $i 4 --seconds 70 > /tmp/p2$i.log 2>&1 & w="$w $!"; done; wait $w
say warm $(cat /tmp/p*.log | grep -c ^DONE) $(cat /tmp/p*.log | grep -c ^FAILED)
timeout 120 python3 -m tests.tools.sanitize --commit $1 --tool memcheck --set latent --set invariant --case '*latent_short*' --case '[!l]*' --seconds 50 --processes 16 --out $OUT/mem.md > /tmp/mem.log 2>&1; say mem $?
timeout 400 python3 -m tests.tools.sanitize --commit $1 --tool racecheck --set latent --set invariant --case '*latent_short*' --case '[!l]*' --seconds 230 --processes 16 --out $OUT/race.md > /tmp/race.log 2>&1; say race $?
cat $OUT/*.md | cut -c1-260; grep -h ^FAILED /tmp/mem.log /tmp/race.log /tmp/p*.log | cut -c1-300
