end=$(($(date +%s) + $1))
while [ ! -e /tmp/o/ended ] && [ $(date +%s) -lt $end ]; do sleep 1; done
cd /tmp/o; tar czf $OUT/o.tgz --exclude w . ; tail -n 40 drive.log; tail -3 lane0.txt lane_mla.txt; tail -8 fa4.log; sort -u passed.txt | wc -l; head -c 3000 fails.txt; cat san_memcheck.md san_racecheck.md | cut -c1-300 | head -60; tail -3 san_*.log | cut -c1-600
