. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w /tmp/t0 /tmp/u; for t in t0 u; do cp -r attn builders specs pyproject.toml .gpu /tmp/$t/; done; tar xJf .gpu/k12/u.txz -C /tmp/u
bench() { (cd /tmp/$1; PYTHONPATH=/tmp/$1:/tmp/site timeout 120 python3 .gpu/k12/turns.py --table invariance --no-peers --commit trial "${@:2}"); }
for t in t0 u; do for c in pre_1x8k chunk_2k_of_16k pre_16x1k pre_d256_1x8k; do bench $t --case $c --rounds 1 --reps 1 --out /tmp/w/x$t$c.md --json /tmp/w/x$t$c.json > /tmp/w/x$t$c.log 2>&1 & done; done; wait; say warm
for turn in 1 2 3; do for t in t0 u; do
  nvidia-smi --query-gpu=clocks.sm,power.draw,clocks_event_reasons.active --format=csv,noheader -lms 100 > /tmp/w/smi.txt & S=$!
  bench $t --case chunk_2k_of_16k --case pre_1x8k --case pre_16x1k --case pre_d256_1x8k --rounds 8 --out /tmp/w/$t.md --json /tmp/w/$t.json > /tmp/w/$t.log 2>&1; kill $S
  echo "== $t $turn"; grep "^| [pcm].* | <= " /tmp/w/$t.md | cut -d'|' -f2,3,5,7; [ $turn = 1 ] && { grep "^T" /tmp/w/$t.log | cut -c1-260; awk '{print $1,int($3/50)*50,$5}' /tmp/w/smi.txt | sort | uniq -c | sort -rn | head -12; }
done; say $turn; done
