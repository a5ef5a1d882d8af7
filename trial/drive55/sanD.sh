# sanD.sh COMMIT: racecheck of short latent cases, prompts with batch invariance, plans and index logits.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/l /tmp/st; w=
for i in $(seq 0 18); do timeout 100 python3 -m tests.tools.sanitize --share latent $i 19 --seconds 70 --case '*latent_short*' > /tmp/l/p$i.log 2>&1 & w="$w $!"; done
for i in 0 1 2; do timeout 100 python3 -m tests.tools.sanitize --share invariant $i 3 --seconds 70 > /tmp/l/pi$i.log 2>&1 & w="$w $!"; done; wait $w
say warm $(cat /tmp/l/p*.log | grep -c ^DONE) $(cat /tmp/l/p*.log | grep -c ^FAILED)
export TMPDIR=/tmp/st; (while sleep 5; do rm -rf /tmp/snap.new; cp -rp /tmp/st /tmp/snap.new 2>/dev/null; [ -n "$(ls /tmp/snap.new 2>/dev/null)" ] && rm -rf /tmp/snap && mv /tmp/snap.new /tmp/snap; free -g | sed -n 2p >> /tmp/l/free; done) & S=$!
timeout 320 python3 -m tests.tools.sanitize --commit $1 --tool racecheck --set latent --set invariant --set plan --set index --case '*latent_short*' --case '[!l]*' --seconds 150 --processes 28 --out $OUT/race.md > /tmp/l/race.log 2>&1; say race $?
cut -c1-260 $OUT/race.md; grep -h ^FAILED /tmp/l/race.log | cut -c1-300; sort -k3n /tmp/l/free | tail -n 1
for f in /tmp/snap/*/said; do echo $(grep -c ^DONE $f) $(tail -n 1 $f) $(stat -c %y $f | cut -c12-19); done
cp -r /tmp/snap /tmp/snap1; tar czf $OUT/d.tgz -C /tmp l snap1
left=$(( 570 - $(date +%s) + T0 )); say left $left
if false && [ $left -gt 200 ] && grep -q "| racecheck | latent | 19 of 19 | 0 | 0" $OUT/race.md; then
timeout $left python3 -m tests.tools.sanitize --commit $1 --tool racecheck --set latent --set index --case '*latent-latent-*' --case '*latent_[!s]*' --case 'latent-[!l]*' --case '[!l]*' --seconds $(( left - 160 )) --processes 20 --out $OUT/race2.md > /tmp/l/race2.log 2>&1; say race2 $?
cut -c1-260 $OUT/race2.md; grep -h ^FAILED /tmp/l/race2.log | cut -c1-300 | head; sort -k3n /tmp/l/free | tail -n 1
for f in /tmp/snap/*/said; do echo $(grep -c ^DONE $f) $(tail -n 1 $f) $(stat -c %y $f | cut -c12-19); done
fi
kill $S; tar czf $OUT/d.tgz -C /tmp l snap snap1
