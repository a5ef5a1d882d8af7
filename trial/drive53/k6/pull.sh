# pull.sh SECONDS PROCESSES GPU NAME FILES...
end=$(($(date +%s) + $1)); n=$2; gpu=$3; o=$4; shift 4
cd /tmp/repo
for i in $(seq 0 $((n - 1))); do
  CUDA_VISIBLE_DEVICES=$gpu END=$end OMP_NUM_THREADS=1 PYTHONPATH=/tmp/k:$PYTHONPATH nice -n 5 timeout -s INT -k 5 $((end - $(date +%s) + 40)) python3 -m pytest -q -p pull -p no:cacheprovider "$@" > /tmp/o/$o$i.log 2>&1 &
done
wait
