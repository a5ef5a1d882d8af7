export OMP_NUM_THREADS=1
bash .gpu/v/v3.sh $1 2>&1 | grep -v "^end"
for f in $OUT/*.md; do echo "## $f"; grep -E "x default" $f | cut -c1-150; done
