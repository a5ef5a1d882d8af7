# sanB.sh COMMIT: racecheck of short latent cases.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1 T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/l; rm -rf /tmp/st /tmp/snap; mkdir /tmp/st
export TMPDIR=/tmp/st; (while sleep 10; do rm -rf /tmp/snap.new; cp -r /tmp/st /tmp/snap.new && rm -rf /tmp/snap && mv /tmp/snap.new /tmp/snap; date > /tmp/snap/at; done) & S=$!
timeout 560 python3 -m tests.tools.sanitize --commit $1 --tool racecheck --set latent --case '*latent_short*' --seconds 400 --processes 16 --out $OUT/race_latent.md > /tmp/l/race_latent.log 2>&1; say race_latent $?
kill $S; cut -c1-260 $OUT/race_latent.md; grep -h ^FAILED /tmp/l/race_latent.log | cut -c1-300
for f in /tmp/snap/*/said; do echo $(grep -c ^DONE $f) $(tail -n 1 $f); done
tar czf $OUT/b.tgz -C /tmp l snap
