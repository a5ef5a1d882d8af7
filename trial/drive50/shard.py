import sys, pytest
i, n, k = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
class P:
    def pytest_collection_modifyitems(self, config, items):
        items[:] = [x for j, x in enumerate(items) if j % n == i]
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", "-k", k, "tests/gpu/test_gpu_hopper_mla.py"], plugins=[P()]))
