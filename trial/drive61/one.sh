# one.sh VERSION VARIANT [inv]
cd ${TREE:-/tmp/h/sp/t}; out=/tmp/h/sp/o.$$; sed "s#/tmp/h/sp/out#$out#g" /tmp/h/sp/comp.py > $out.py
TRITON_CACHE_DIR=/tmp/h/sp/tc PYTHONPATH=/tmp/h/tritons/triton-$1:$PWD /work/main/.venv/bin/python $out.py "$2" $3 2>/dev/null | sed -n '1p'; rm -f $out*
