# again.sh COMMIT: (1) one latent case under racecheck, 15 processes of several kinds; (2) GPU tests not yet run; (3) both sets, both tools.
. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1; T0=$(date +%s); say() { echo "[$(( $(date +%s) - T0 ))] $*"; }
mkdir -p /tmp/w /tmp/l /tmp/old; tar xJf .gpu/k10/old.txz -C /tmp/old
C='latent-latent_short-bfloat16-kv_fp8_e4m3-h96-p16'
one() { # NAME DIR OPTIONS...
  local name=$1 dir=$2; shift 2
  (cd $dir; export TRITON_CACHE_DIR=/tmp/tc; PYTHONPATH=$dir:/tmp/site timeout 120 compute-sanitizer --tool racecheck --report-api-errors no --print-limit 100000 --log-file /tmp/l/$name.log "$@" python3 -m tests.tools.sanitize --share latent 0 1 --seconds 60 "--case=$C" > /tmp/l/$name.said 2>&1)
}
A="--racecheck-report analysis --show-backtrace no"; X="--kernel-name-exclude regex=_Z|xmma_gemm"
for i in 1 2 3 4; do one now$i $PWD $A $X & done
for i in 1 2 3; do one old$i /tmp/old $A $X & done
one all $PWD --racecheck-report all --show-backtrace no $X &
one noex $PWD $A &
one back $PWD --racecheck-report analysis --show-backtrace yes $X &
for i in 1 2; do CUDA_MODULE_LOADING=EAGER one eager$i $PWD $A $X & done
one dem $PWD $A $X --demangle no &
wait; say variants
for f in /tmp/l/*.log; do echo "$(basename $f) nameless $(grep -cE 'access at +(\[|$)' $f) named $(grep -c 'Race reported between .* access at h' $f) $(tail -1 $f | cut -c1-80) $(grep -c DONE ${f%log}said)"; done
(cd /tmp/l; for f in *.log; do [ $(stat -c %s $f) -gt 3000000 ] && head -c 3000000 $f > $f.cut && mv $f.cut $f; done; tar czf $OUT/l.tgz *)
for i in $(seq 0 5); do timeout 60 python3 .gpu/k10/rest.py $i 6 > /tmp/w/t$i.log 2>&1 & done; wait; cat /tmp/passed.* | cut -d' ' -f1 | sort | uniq -c; cat /tmp/passed.* > $OUT/passed.txt; grep -h "^FAILED\|^ERROR" /tmp/w/t*.log | head; say tests
for tool in racecheck memcheck; do
  timeout 180 python3 -m tests.tools.sanitize --commit $1 --tool $tool --set sparse --set latent --case '*heads, *' --case '*latent_short*' --seconds 80 --processes 20 --out $OUT/$tool.md > /tmp/w/$tool.log 2>&1; say $tool $?; cut -c1-100 $OUT/$tool.md | head -20; grep -h "^FAILED" /tmp/w/$tool.log | cut -c1-300
done
