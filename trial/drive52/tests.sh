# tests.sh SECONDS PROCESSES GPU FILES...: tests side by side; what passed goes to /tmp/done.txt.new
end=$(($(date +%s) + $1)); n=$2; gpu=$3; shift 3
cd /tmp/repo
for i in $(seq 0 $((n - 1))); do
  CUDA_VISIBLE_DEVICES=$gpu END=$end SHARD=$i/$n OMP_NUM_THREADS=1 PYTHONPATH=/tmp/k:$PYTHONPATH nice -n 5 timeout -s INT -k 5 $((end - $(date +%s) + 45)) python3 -m pytest -q -p shard -p no:cacheprovider "$@" > /tmp/o/${O:-t}$i.log 2>&1 &
done
wait
