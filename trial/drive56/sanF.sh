# sanF.sh COMMIT: both sanitizers over sparse lists, the indexer's logits and dense heads between powers of two; one H200, carry .gpu/base and this folder as .gpu/k9.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
C="--set sparse --set index --set kinds --set decode --set prefill"
set -- "$1" --case '*heads, *' --case '*-d80-*' --case 'd80' --case 'd192' --case '*_d96' --case '*_d160'; commit=$1; shift
timeout 245 python3 -m tests.tools.sanitize --commit $commit --tool memcheck $C "$@" --seconds 90 --processes 24 --out $OUT/mem.md > /tmp/mem.log 2>&1; say mem $?
cat $OUT/mem.md; grep -h ^FAILED /tmp/mem.log | cut -c1-300
timeout 345 python3 -m tests.tools.sanitize --commit $commit --tool racecheck $C "$@" --seconds 190 --processes 24 --out $OUT/race.md > /tmp/race.log 2>&1; say race $?
cut -c1-260 $OUT/race.md; grep -h ^FAILED /tmp/race.log | cut -c1-300; free -g | sed -n 2p
