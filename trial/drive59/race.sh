. .gpu/base/setup.sh
export TRITON_CACHE_DIR=/tmp/tc OMP_NUM_THREADS=1
timeout 260 python3 .gpu/k10/race.py $OUT/logs ${1:-60} latent '*latent_short*' 2>&1 | cut -c1-300 | tail -60
tar czf $OUT/logs.tgz -C $OUT logs; rm -rf $OUT/logs
