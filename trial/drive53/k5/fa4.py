"""pre_1x8k beside all peers in one process: FlashInfer is imported before CuTe DSL 4.6.0, which it does not take, is on the path."""
import sys
sys.path[:0] = ["/tmp/repo"]
import flashinfer, flashinfer.decode, flashinfer.prefill, flashinfer.mla  # noqa
sys.path += ["/tmp/site_fa4", "/tmp/site_fa4/nvidia_cutlass_dsl/dsl_packages"]
from attn.bench.kernels import main
code = main(["--table", "hopper", "--case", "pre_1x8k", "--json", "/tmp/o/hopper.fa4.json", "--out", "/tmp/o/hopper.fa4.md"])
print("code", code)
