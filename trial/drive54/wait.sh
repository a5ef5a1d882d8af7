end=$(($(date +%s) + $1))
while [ ! -e /tmp/o/ended2 ] && [ $(date +%s) -lt $end ]; do sleep 1; done
cd /tmp/o; tar czf $OUT/o.tgz --exclude w . ; tail -n 40 drive.log; tail -n 5 lane0.txt; tail -n 4 w/*.log | cut -c1-200; for n in race mem inv; do cat $n.md 2>/dev/null | cut -c1-260 | head -30; tail -n 3 $n.log | cut -c1-400; done; grep -h ^FAILED plain*.log | cut -c1-300 | head
