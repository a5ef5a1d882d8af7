# inv.sh PLAN TESTTREE KEY: trial of trees, then bits of TESTTREE
sed -i 's/cp -r attn builders specs/cp -r attn builders specs tests/' .gpu/v/v3.sh
export OMP_NUM_THREADS=1
bash .gpu/v/v3.sh $1 2>&1 | grep -v "^end"
for f in $OUT/*.md; do echo "## $f"; grep -E "x default" $f | cut -c1-150; done
cd /tmp/v/$2 && (for i in 0 1 2 3 4 5 6 7; do SHARD=$i/8 PYTHONPATH=/tmp/k:/tmp/v/$2:/tmp/site timeout 110 python3 -m pytest -q -p shard -p no:cacheprovider tests/gpu/test_gpu_invariance.py -k "$3" > /tmp/o/it$i.log 2>&1 & done; wait; tail -qn1 /tmp/o/it?.log; grep -h -A12 "^FAILED" /tmp/o/it?.log | head -60)
