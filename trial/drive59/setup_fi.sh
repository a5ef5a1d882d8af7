# Source from the project's root on the GPU machine, after .gpu/base/setup.sh:  . .gpu/fi/setup_fi.sh
# Installs FlashInfer 0.7.2.post1 to /tmp/site_fi (once), unpacks .gpu/fi/aot.txz into it (again when that file changed),
# and appends /tmp/site_fi to PYTHONPATH. Safe to source twice.
# With ahead-of-time modules in place nothing is compiled: a missing module is an error at once (FLASHINFER_DISABLE_JIT=1).
# To let FlashInfer compile what is missing:  export FLASHINFER_DISABLE_JIT=  (empty) before sourcing.
_fi=/tmp/site_fi
mkdir -p $_fi
if [ -d .gpu/fi ] && [ ! -e $_fi/.done ]; then
  # nvidia-cudnn-frontend and tvm-ffi, then FlashInfer's own tree; the light ones only where the image lacks them.
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target $_fi .gpu/fi/whl/*.whl 2>&1 | grep -i '^error'
  for _m in click:click einops:einops pynvml:nvidia_ml_py tabulate:tabulate; do
    python3 -c "import ${_m%%:*}" 2>/dev/null || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target $_fi .gpu/fi/extra/${_m##*:}-*.whl 2>&1 | grep -i '^error'
  done
  tar xJf .gpu/fi/flashinfer.tar.xz -C $_fi && touch $_fi/.done
fi
if [ -f .gpu/fi/aot.txz ] && [ -d $_fi/flashinfer ]; then
  _sum=$(cksum < .gpu/fi/aot.txz)
  if [ "$_sum" != "$(cat $_fi/.aot 2>/dev/null)" ]; then
    mkdir -p $_fi/flashinfer/data/aot && tar xJf .gpu/fi/aot.txz -C $_fi/flashinfer/data/aot && printf '%s' "$_sum" > $_fi/.aot
  fi
fi
case ":${PYTHONPATH:-}:" in *:$_fi:*) ;; *) export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$_fi ;; esac
if [ -e $_fi/.aot ]; then export FLASHINFER_DISABLE_JIT=${FLASHINFER_DISABLE_JIT-1}; fi
unset _fi _m _sum
