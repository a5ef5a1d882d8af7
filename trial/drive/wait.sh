# wait.sh SECONDS: until the drive has ended, then all results
end=$(($(date +%s) + $1))
while [ ! -e /tmp/o/ended ] && [ $(date +%s) -lt $end ]; do sleep 1; done
cd /tmp/o; tar czf $OUT/o.tgz --exclude w . ; tail -n ${3:-60} drive.log
