# x.sh TREE VERSIONS -- names
t=$1; vs=$2; shift; shift
for v in $vs; do P=$WORK/tritons/triton-$v:$WORK/x/$t; [ $v = 3.7 ] && P=$WORK/x/$t; (cd $WORK/x/$t; rm -rf $WORK/x/c-$t-$v; TRITON_DUMP_PTXAS_LOG=1 TRITON_INTERPRET=0 TRITON_CACHE_DIR=$WORK/x/c-$t-$v PYTHONPATH=$P $ROOT/.venv/bin/python $WORK/pipe/w.py "$@" 2>&1 | grep "MISS\|Error" | sed "s/^/$t /; s/'wide_stores.*MISS//; s/'shared.*,//"); done
