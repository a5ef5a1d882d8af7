# w.sh VERSION REG NAME SEDS...: compile the working tree with edits
v=$1; reg=$2; name=$3; d=$(mktemp -d $TMP/t.XXXX); S=attn/kernels/dense/hopper_prefill
cd $d; cp -r $REPO/attn $REPO/builders $REPO/specs $REPO/tests $REPO/pyproject.toml .
sed -i "s/^    registers = 240$/    registers = $reg/" builders/dense/choice.py
[ -n "$4" ] && eval "$4"
sed "s#$TMP/inv#$d/inv#g" $TMP/compinv.py > $d/c.py
TRITON_CACHE_DIR=$TMP/tc PYTHONPATH=$TRITONS/triton-$v:$PWD $REPO/.venv/bin/python $d/c.py "${VARIANT:-hopper_prefill 16/8/256}" inv > $d/o 2>$d/err
echo "$v $reg $name :: $(sed -n 1p $d/o)"; [ -n "$SHOW" ] && sed -n '2,$p' $d/o
[ -z "$KEEP" ] && rm -rf $d || echo $d
