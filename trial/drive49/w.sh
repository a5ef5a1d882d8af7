# w.sh VERSION names...
v=$1; shift
cd $ROOT; P=$PWD; [ $v != 3.7 ] && P=$WORK/tritons/triton-$v:$PWD
rm -rf $WORK/pipe/cc-$v-$TRIAL-$$; TRITON_DUMP_PTXAS_LOG=1 TRITON_INTERPRET=0 TRITON_CACHE_DIR=$WORK/pipe/cc-$v-$TRIAL-$$ PYTHONPATH=$P .venv/bin/python $WORK/pipe/w.py "$@" 2>&1 | grep "MISS\|Error" | tail -15
