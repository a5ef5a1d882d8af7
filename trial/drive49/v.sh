# v.sh "TRIALS": times of e4m3 latent cases for each trial
export TRITON_CACHE_DIR=/tmp/tc
python .gpu/t/cases.py
for t in $1; do [ $t = - ] && t=; for c in mla_fp8_h128_b32_4k mla_fp8_t_b1; do
 TRIAL=$t timeout 300 python -m attn.bench.kernels --table mla --no-peers --case $c --rounds 1 --reps 1 --out /tmp/w_$t.md --json /tmp/w_$t.json > /tmp/w_$t.log 2>&1 & done; done; wait
for t in $1; do [ $t = - ] && t=; p="--peer flashmla"; [ -n "$t" ] && p=--no-peers
 TRIAL=$t timeout 200 python -m attn.bench.kernels --table mla $p --case "mla_fp8_h128*" --case "mla_fp8_t_*" --rounds 4 --out /tmp/m_$t.md --json $OUT/m_$t.json > /tmp/m_$t.log 2>&1
 echo "== $t"; grep "| mla_fp8" /tmp/m_$t.md | cut -c1-170; tail -3 /tmp/m_$t.log; done
