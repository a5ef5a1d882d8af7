. .gpu/base/setup.sh
for n in dbg dbg1 dbg2 dbg3; do mkdir -p /tmp/v/$n; cp -r attn builders specs /tmp/v/$n; tar xzf .gpu/w/$n.tgz -C /tmp/v/$n; done
export OMP_NUM_THREADS=1 TRITON_CACHE_DIR=/tmp/tc; R=$PWD
go(){ cd /tmp/v/$1; PYTHONPATH=/tmp/v/$1:/tmp/site timeout 100 python3 $R/.gpu/w/timer.py mla_h16_b1_1m $2; }
for c in dbg dbg1 dbg2 dbg3; do go $c > /tmp/$c.txt 2>&1 & done; wait
for c in dbg dbg1 dbg2 dbg3; do echo "##### $c"; go $c $([ $c = dbg ] && echo all) 2>&1 | tail -50 | cut -c1-2600; done
