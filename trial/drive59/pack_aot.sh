set -u; cd ${FI}; . ./env.sh; S=$(find ws -name cached_ops | head -1); D=${FI}/aot; rm -rf $D.new; mkdir -p $D.new; n=0
for d in $S/*/; do m=$(basename $d); grep -q " ok  $m\$" log.txt || continue
  f=$d$m.so
  if nm -D --undefined-only $f | grep -qE " cu[A-Z]" && ! readelf -d $f | grep -q 'libcuda.so.1'; then rm $f; (cd $d && nice -n 19 ninja -f build.ninja > relink.log 2>&1) || echo relink failed $m; grep -c "" $d/relink.log >/dev/null; fi
  mkdir -p $D.new/$m; strip --strip-unneeded -o $D.new/$m/$m.so $f; n=$((n+1))
done
mkdir -p ${ROOT}/.gpu/k2; nice -n 19 tar -C $D.new -cJf ${ROOT}/.gpu/k2/aot.txz.tmp . && mv ${ROOT}/.gpu/k2/aot.txz.tmp ${ROOT}/.gpu/k2/aot.txz; rm -rf $D; mv $D.new $D; echo $(date +%T) packed $n modules $(du -h ${ROOT}/.gpu/k2/aot.txz | cut -f1) | tee -a pack.log
