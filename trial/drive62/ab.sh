# ab.sh: pre_d256_1x8k of the invariance table by forms of segmented.py in turn, ours alone
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w; FORMS="t0 t1 t2 t3 t4 t5"
for t in $FORMS; do mkdir -p /tmp/$t; cp -r attn builders specs pyproject.toml /tmp/$t/; cp .gpu/k12/$t.py /tmp/$t/attn/kernels/dense/hopper_prefill/segmented.py; done
bench() { (cd /tmp/$1; PYTHONPATH=/tmp/$1:/tmp/site timeout 120 python3 -m attn.bench.kernels --table invariance --no-peers --commit trial --case pre_d256_1x8k "${@:2}"); }
for t in $FORMS; do bench $t --rounds 1 --reps 1 --out /tmp/w/x$t.md --json /tmp/w/x$t.json > /tmp/w/x$t.log 2>&1 & done; wait; say warm
for turn in 1 2 3; do for t in $FORMS; do
  bench $t --rounds 3 --out $OUT/$t.$turn.md --json /tmp/w/$t.json > /tmp/w/$t.log 2>&1
  echo $t $turn $(grep -h "^| pre_d256_1x8k" $OUT/$t.$turn.md | tail -1 | cut -d'|' -f3-7)
done; say $turn; done
tail -3 /tmp/w/xt0.log
