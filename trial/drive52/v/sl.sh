# sl.sh TREE VERSION "names..." 
t=$1; v=$2; shift 2; P=TRITONS/triton-$v:$t; [ $v = 3.7 ] && P=$t
cd $t; rm -rf c-$t-sl; TAG=$t TRITON_DUMP_PTXAS_LOG=1 TRITON_INTERPRET=0 TRITON_CACHE_DIR=c-$t-sl PYTHONPATH=$P .venv/bin/python sl.py "$@" 2>&1 | cut -c1-200 | awk '/serialized|Error/{print} /loop/ && /HGMMA=/{split($0,a,"HGMMA="); n=a[2]+0; split($0,b,"n="); c=b[2]+0; if (c<1500) print}'
