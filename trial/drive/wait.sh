end=$(($(date +%s) + $1))
while [ ! -e /tmp/o/ended ] && [ $(date +%s) -lt $end ]; do sleep 1; done
cp /tmp/done.txt.new /tmp/o/done.txt 2>/dev/null
cd /tmp/o; tar czf $OUT/o.tgz --exclude w . ; tail -n 30 drive.log; tail -3 lane0.txt lane1.txt; wc -l done.txt; head -c 3000 fails.txt; tail -25 race.log; tail -12 mem.log
