# sp.sh "TRIALS": sparse rows for each trial
export TRITON_CACHE_DIR=/tmp/tc
C="--case dec_656_h16_b128 --case dec_656_h16_b1 --case dec_656_h16_b4 --case dec_656_h128_b128 --case dec_656_h128_b1 --case dec_bf16_h16_b8 --case dec_656_h16_b8"
for t in $1; do for c in dec_656_h16_b128 dec_656_h16_b1 dec_656_h16_b4 dec_656_h128_b128 dec_656_h128_b1 dec_bf16_h16_b8; do
 TRIAL=$t timeout 200 python -m attn.bench.kernels --table sparse_mla --no-peers --case $c --rounds 1 --reps 1 --out /tmp/w.md --json /tmp/w.json > /tmp/w_$t$c.log 2>&1 & done; done; wait
for t in $1; do
 TRIAL=$t timeout 200 python -m attn.bench.kernels --table sparse_mla --no-peers $C --rounds 4 --out /tmp/s_$t.md --json $OUT/s_$t.json --commit trial > /tmp/s_$t.log 2>&1
 echo "== $t"; grep "^| dec.* ours " /tmp/s_$t.md; tail -2 /tmp/s_$t.log; done
