"""pytest plugin: workers claim tests one by one; keeps who passed. Tests that passed at c3d0386d come last."""
import hashlib, os, random, time
from pathlib import Path
END = float(os.environ.get("END", "0"))
CLAIMS = Path("/tmp/claims"); CLAIMS.mkdir(exist_ok=True)
PASSED = "/tmp/o/passed.txt"


def pytest_collection_modifyitems(config, items):
    before = set(Path("/tmp/k/done_sparse.txt").read_text().split("\n"))
    four = ("test_gpu_hopper_mla", "test_gpu_invariance", "test_gpu_sparse_mla", "test_gpu_sparse_layer")
    # As they were drawn then: the project's conftest has sorted files by weight.
    old = [i for i in items if any(name + ".py" in i.nodeid for name in four) and i.nodeid not in before]
    random.Random(5).shuffle(old)
    is_same = 328 <= len(old) <= 332
    done = set()
    if is_same:
        for s in (0, 1, 5, 10, 12, 13):
            done |= {i.nodeid for i in old[s::14]}
        for s, n in ((4, 10), (6, 7), (8, 12)):
            done |= {i.nodeid for i in old[s::14][:n]}
    now = set(Path("/tmp/k/ok.txt").read_text().split("\n"))
    items[:] = [i for i in items if i.nodeid not in now]
    first = [i for i in items if i.nodeid not in done and i.nodeid not in before]
    last = [i for i in items if i.nodeid in done or i.nodeid in before]
    random.Random(7).shuffle(first)
    random.Random(7).shuffle(last)
    items[:] = first + last
    print(f"{len(items)} tests, {len(old)} drawn before, {len(done)} done, {len(first)} first", flush=True)


def pytest_runtest_protocol(item, nextitem):
    if END and time.time() > END:
        return True
    name = CLAIMS / hashlib.md5(item.nodeid.encode()).hexdigest()
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    # The next item of this process is not known yet, so everything is torn down.
    from _pytest.runner import runtestprotocol
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed or report.when == "setup" and report.skipped:
        with open(PASSED, "a") as file:
            file.write(("skipped " if report.skipped else "") + report.nodeid + "\n")
    if report.failed:
        print(f"\nFAILED {report.nodeid} {report.when}\n{str(report.longrepr)[-1500:]}", flush=True)
