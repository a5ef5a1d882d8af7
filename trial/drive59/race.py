"""race.py OUT SECONDS SET PATTERN: racecheck of one set as the tool does it, with every process's output and log kept in OUT."""
import shutil, sys
from pathlib import Path
import tests.tools.sanitize as s
out, seconds, which, pattern = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
out.mkdir(parents=True, exist_ok=True)
n = 0
wait = s.Running.wait
def kept(self, deadline):
    global n
    import time
    try:
        self._process.wait(max(deadline - time.monotonic(), 0))
    except Exception:
        pass
    for name in ("said", "log"):
        if self._path(name).exists():
            shutil.copy(self._path(name), out / f"{n}.{name}")
    n += 1
    return wait(self, deadline)
s.Running.wait = kept
outcomes = s.run(["racecheck"], seconds, 20, [which], [pattern])
print(s.render(outcomes, "race"))
for share in sorted(out.glob("*.log")):
    log = share.read_text(errors="replace")
    found = s.reports(log)
    if any(not r for r in found) or s.complaints(log) != len(found):
        print("ODD", share, s.complaints(log), len(found), [i for i, r in enumerate(found) if not r][:5])
        lines = log.splitlines()
        at = [i for i, line in enumerate(lines) if "Race reported between" in line]
        for k, r in enumerate(found):
            if not r:
                print("\n".join(lines[max(at[k] - 2, 0):at[k] + 8]))
