# ab.sh: rows of the narrow sparse kernel by two trees in turn, ours alone: /tmp/old (.gpu/k10/old.txz) and this checkout.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/old /tmp/w; tar xJf .gpu/k10/old.txz -C /tmp/old
CASES="dec_656_h16_b128 dec_656_h8_b128 dec_656_h16_b32 dec_656_h16_b8 dec_576_h16_b128 dec_bf16_h16_b128 dec_bf16_h16_b64_8k dec_bf16_h16_b8 pre_576_h16_2k"
bench() { (cd $1; PYTHONPATH=$1:/tmp/site timeout 200 python3 -m attn.bench.kernels --table $2 --no-peers --commit trial "${@:3}"); }
for tree in /tmp/old $PWD; do for c in $CASES; do bench $tree sparse_mla --case $c --rounds 1 --reps 1 --out /tmp/w/x$c.md --json /tmp/w/x$c.json > /tmp/w/x$(basename $tree)$c.log 2>&1 & done; bench $tree mla --case mla_h12_b64_4k --rounds 1 --reps 1 --out /tmp/w/xh12.md --json /tmp/w/xh12.json > /tmp/w/xh12$(basename $tree).log 2>&1 & done; wait; say warm
for turn in 1 2 3; do for tree in /tmp/old $PWD; do
  bench $tree sparse_mla $(for c in $CASES; do echo --case $c; done) --rounds 3 --out $OUT/$(basename $tree).$turn.md --json /tmp/w/ab.json > /tmp/w/ab.log 2>&1
  bench $tree mla --case mla_h12_b64_4k --rounds 3 --out $OUT/$(basename $tree).h12.$turn.md --json /tmp/w/ab.json > /tmp/w/ab.log 2>&1
  say $(basename $tree) $turn; grep -h "^| [dpm][erl][cea]_[a-z0-9_]* | ours " $OUT/$(basename $tree).*$turn.md | cut -d'|' -f2,4,8
done; done
tar czf $OUT/ab.tgz -C $OUT . --exclude ab.tgz; rm -f $OUT/*.md
