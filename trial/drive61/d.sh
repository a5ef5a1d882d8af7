# d.sh COMMIT: what is left of the latent tests, then both sanitizers side by side over sparse lists and short latent cases
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 ATTN_COMMIT=$1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w; rm -f /tmp/passed.*
for i in $(seq 0 14); do timeout 90 python3 .gpu/k11/rest.py $i 15 > /tmp/w/t$i.log 2>&1 & done; wait
cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR" /tmp/w/t*.log | head; say tests
for tool in memcheck racecheck; do
  (timeout 125 python3 -m tests.tools.sanitize --commit $1 --tool $tool --set sparse --set latent --case '*heads, *' --case '*latent_short*' --seconds 80 --processes 12 --out $OUT/$tool.md > /tmp/w/$tool.log 2>&1; say $tool $?; grep -h "^FAILED" /tmp/w/$tool.log | cut -c1-300) &
done; wait; cut -c1-120 $OUT/memcheck.md; cut -c1-120 $OUT/racecheck.md
