# waits for the build, then packs .gpu/fi
export FI=/tmp/h/fi ROOT=/work/main
until grep -q "ALL DONE" $FI/log.txt; do sleep 3; done
cd $FI; . ./env.sh; bash pack_aot.sh
mkdir -p $ROOT/.gpu/fi; mv $ROOT/.gpu/k2/aot.txz $ROOT/.gpu/fi/; rmdir $ROOT/.gpu/k2
cp -r whl extra setup_fi.sh $ROOT/.gpu/fi/
tar -C site -cf - --exclude=__pycache__ --exclude='flashinfer/data/csrc/*/*' --exclude=flashinfer/data/cutlass --exclude=flashinfer/data/cccl --exclude=flashinfer/moe_ep flashinfer flashinfer_python-0.7.2.post1.dist-info | xz -T2 -3 > $ROOT/.gpu/fi/flashinfer.tar.xz
du -sh $ROOT/.gpu/fi/*; date; echo PACKED
