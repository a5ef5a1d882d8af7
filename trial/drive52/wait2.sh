end=$(($(date +%s) + $1))
pack() { (cd /tmp/o; tar czf /tmp/o.tgz mla.*.json invariance.*.json mla*.log inv*.log bits*.log lane?.txt drive.log 2>/dev/null; cp /tmp/o.tgz $OUT/); }
while [ ! -e /tmp/o/ended ] && [ $(date +%s) -lt $end ]; do sleep 3; pack; done
pack; cat /tmp/o/drive.log; tail -n 30 /tmp/o/lane0.txt; tail -n 30 /tmp/o/lane1.txt; for i in 0 1 2 3; do tail -n 1 /tmp/o/bits$i.log; done
