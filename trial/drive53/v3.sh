# v3.sh PLAN: trial of trees /tmp/v/NAME: the repository (base) with the files of .gpu/v/NAME.tgz; PLAN lines: NAME TRIAL TABLE ROUNDS PEER CASE,CASE
export TRITON_CACHE_DIR=/tmp/tc PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1; t0=$(date +%s); say(){ echo "[$(( $(date +%s) - t0 ))] $*"; }
root=$PWD; mkdir -p /tmp/v /tmp/o/w
tree(){ rm -rf /tmp/v/$1; mkdir -p /tmp/v/$1; cp -r attn builders specs /tmp/v/$1; }
tree base; for t in .gpu/v/*.tgz; do n=$(basename $t .tgz); tree $n; tar xzf $t -C /tmp/v/$n; done
go(){ # NAME TRIAL ARGS
 n=$1; tr=$2; shift; shift; (cd /tmp/v/$n; TRIAL=$tr PYTHONPATH=/tmp/v/$n:/tmp/site:/tmp/site_fi timeout 250 python -m attn.bench.kernels --commit trial "$@"); }
: > /tmp/o/jobs
while read n tr table rounds peer cases; do for c in ${cases//,/ }; do echo "$n $tr $table $c"; done; done < $1 >> /tmp/o/jobs
export -f go
xargs -P 22 -L 1 bash -c 'go $0 $1 --table $2 --case $3 --no-peers --rounds 1 --reps 1 --json /tmp/o/w/$0_$1_$3.json --out /tmp/o/w/$0_$1_$3.md > /tmp/o/w/$0_$1_$3.log 2>&1' < /tmp/o/jobs
say warm $(ls /tmp/o/w/*.json | wc -l) of $(wc -l < /tmp/o/jobs)
for turn in 1; do
while read n tr table rounds peer cases; do
 a=; for c in ${cases//,/ }; do a="$a --case $c"; done
 p=--no-peers; [ $peer != - ] && p=; for q in ${peer//,/ }; do [ $q != - ] && p="$p --peer $q"; done
 [ $turn = 2 ] && p=--no-peers
 go $n $tr --table $table $a $p --rounds $rounds --json $OUT/${n}_${tr}_$table.$turn.json --out /tmp/o/${n}_${tr}_$table.$turn.md > /tmp/o/${n}_${tr}_$table.$turn.log 2>&1 || tail -3 /tmp/o/${n}_${tr}_$table.$turn.log
 cp /tmp/o/${n}_${tr}_$table.$turn.md $OUT/
 say "== $turn $n $tr $table"; { grep -E "^\| (dec|mla|pre)[a-z0-9_]* \| (ours|fa3|flashmla|flashinfer_mla|\\*\\*)|^\| mla_[a-z0-9_]* \| decode|index_b64|^\| [0-9]+ \| [0-9.]+ \| [0-9.]+ \|" /tmp/o/${n}_${tr}_$table.$turn.md | cut -c1-170; }
done < $1; done
[ -n "$2" ] && (cd /tmp/v/base; PYTHONPATH=/tmp/v/base:/tmp/site timeout 60 ncu --metrics gpu__time_duration.sum -k regex:"topk_transform|sparse_mla|fold_states" --launch-skip 30 -c 9 python -m attn.bench.kernels --table sparse_mla --no-peers --case dec_656_h16_b1 --rounds 1 --reps 20 --out /tmp/x.md 2>&1 | grep -E "^ +[a-z_]+kernel|duration" | cut -c1-120)
say end
