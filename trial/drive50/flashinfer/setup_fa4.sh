# Source from the project's root on the GPU machine, last:  . .gpu/fa4/setup_fa4.sh
# Installs NVIDIA's CuTe DSL 4.6.0 (vLLM 0.26.0's pin) and quack-kernels 0.6.1 (which pins the same) to /tmp/site_fa4, for the peer `fa4`.
# The pieces .gpu/fa4/p0/* and .gpu/fa4/p1/* may arrive in different calls; each call that sources this keeps what it has.
# DO NOT have this on the path of a process that imports FlashInfer 0.7.2.post1: FlashInfer needs CuTe DSL >= 4.6.2 once it
# sees any (AttributeError: cutlass.cute has no FastDivmodDivisorV2). Run the fa4 peer in a process of its own.
_fa4=/tmp/site_fa4
_parts=/tmp/fa4_parts
if [ ! -e $_fa4/.done ]; then
  mkdir -p $_parts
  cp -n .gpu/fa4/p?/fa4.tar.xz.* $_parts/ 2>/dev/null
  if [ -f .gpu/fa4/SHA256 ] && [ "$(cat $_parts/fa4.tar.xz.* 2>/dev/null | sha256sum | cut -d' ' -f1)" = "$(cat .gpu/fa4/SHA256)" ]; then
    mkdir -p $_fa4 && cat $_parts/fa4.tar.xz.* | tar xJf - -C $_fa4 && touch $_fa4/.done && rm -rf $_parts
  else
    echo "setup_fa4: pieces so far: $(ls $_parts 2>/dev/null | tr '\n' ' ')- not complete"
  fi
fi
if [ -e $_fa4/.done ]; then
  case ":${PYTHONPATH:-}:" in
    *:$_fa4:*) ;;
    *) export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$_fa4:$_fa4/nvidia_cutlass_dsl/dsl_packages ;;
  esac
fi
unset _fa4 _parts
