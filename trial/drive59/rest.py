"""rest.py I N: every N-th of the GPU tests of latent and sparse layers that passed.txt does not name."""
import sys
import pytest
i, n = map(int, sys.argv[1:])
passed = set(open(".gpu/k10/passed.txt").read().split("\n"))
class Rest:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        rest = [item for item in items if item.nodeid not in passed]
        items[:] = rest[i::n]
    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            with open(f"/tmp/passed.{i}", "a") as file:
                print(report.outcome, report.nodeid, file=file)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu/test_gpu_hopper_mla.py", "tests/gpu/test_gpu_sparse_layer.py"], plugins=[Rest()]))
