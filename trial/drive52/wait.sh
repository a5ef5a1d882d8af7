# wait.sh SECONDS: until the drive has ended, then all results
end=$(($(date +%s) + $1))
while [ ! -e /tmp/o/ended ] && [ $(date +%s) -lt $end ]; do sleep 1; done
cp /tmp/done.txt.new /tmp/o/done.txt 2>/dev/null
cd /tmp/o; tar czf $OUT/o.tgz --exclude w . ; tail -n 60 drive.log; tail -3 lane0.txt lane1.txt; tail -8 fa4.log; wc -l done.txt; head -c 3000 fails.txt
