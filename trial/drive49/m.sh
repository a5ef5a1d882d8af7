# m.sh PATTERN.. : table mla rows with flashmla as peer
export TRITON_CACHE_DIR=/tmp/tc
a=; for c in "$@"; do a="$a --case $c"; done
timeout 200 python -m attn.bench.kernels --table mla --peer flashmla $a --rounds 4 --out /tmp/m.md --json $OUT/m.json --commit trial > /tmp/m.log 2>&1
grep "^| mla_" /tmp/m.md | cut -c1-230; tail -2 /tmp/m.log
