import sys
import pytest
i, n = map(int, sys.argv[1:3])
class Shard:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        items[:] = items[i::n]
    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            with open(f"/tmp/passed.{i}.{sys.argv[3].rpartition(chr(47))[2]}", "a") as file:
                print(report.outcome, report.nodeid, file=file)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "gpu", *sys.argv[3:]], plugins=[Shard()]))
