"""pytest plugin: a share of the tests, without those that have passed; keeps who passed."""
import os, random, time
SHARD, OF = map(int, os.environ.get("SHARD", "0/1").split("/"))
DONE = os.environ.get("DONE", "/tmp/done.txt")
END = float(os.environ.get("END", "0"))

def pytest_collection_modifyitems(config, items):
    done = set(__import__("pathlib").Path(DONE).read_text().split("\n")) if os.path.exists(DONE) else set()
    todo = [i for i in items if i.nodeid not in done]
    random.Random(5).shuffle(todo)
    items[:] = todo[SHARD::OF]
    print(f"shard {SHARD}/{OF}: {len(items)} of {len(todo)}", flush=True)

def pytest_runtest_setup(item):
    if END and time.time() > END:
        import pytest
        pytest.exit("out of time", 0)

def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed or report.when == "setup" and report.skipped:
        with open(f"{DONE}.new", "a") as file:
            file.write(report.nodeid + "\n")
    if report.failed:
        print(f"\nFAILED {report.nodeid} {report.when}\n{str(report.longrepr)[-1500:]}", flush=True)
