"""Measure tables on one GPU, one after another: measure.py GPU TABLE[:CASE,CASE...]...; a case that says nothing for long is left out."""
import glob, json, os, queue, signal, subprocess, sys, threading, time
sys.path.insert(0, "/tmp/repo")
END = float(os.environ["MEASURE_END"])
SILENT = float(os.environ.get("SILENT", "60"))
env = os.environ | {"CUDA_VISIBLE_DEVICES": sys.argv[1], "PYTHONFAULTHANDLER": "1"}


def run(table, names, part, peers=()):
    out = f"/tmp/o/{table}.{part}"
    command = [sys.executable, "-m", "attn.bench.kernels", "--table", table, "--json", out + ".json", "--out", out + ".md"]
    for name in names:
        command += ["--case", name]
    for peer in peers:
        command += ["--peer", peer]
    child = subprocess.Popen(command, env=env, cwd="/tmp/repo", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = queue.Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in child.stdout] and None or lines.put(None), daemon=True).start()
    at, seen = None, []
    with open(out + ".log", "a") as log:
        while True:
            try:
                line = lines.get(timeout=SILENT)
            except queue.Empty:
                child.send_signal(signal.SIGABRT)
                time.sleep(2)
                while not lines.empty():
                    log.write(lines.get() or "")
                child.kill()
                print(f"SILENT {table} {at}", flush=True)
                if at and not peers and table == "hopper":
                    # cuDNN is what has not been seen to end in every case.
                    child.wait()
                    run(table, [at], f"{part}x", ("fa3", "flashinfer", "xqa"))
                break
            if line is None:
                break
            log.write(f"[{time.time() - START:.0f}] {line}")
            log.flush()
            name = line.split(":")[0]
            if name in names:
                at = name
                seen.append(name)
                print(f"{time.time() - START:.0f} {table} {name}", flush=True)
            if time.time() > END:
                child.send_signal(signal.SIGINT)
                time.sleep(1)
                child.kill()
                print(f"OUT OF TIME {table} {at}", flush=True)
                return []
    child.wait()
    return [name for name in names if name not in seen]


START = time.time()
for number, given in enumerate(sys.argv[2:]):
    from attn.bench.cases.dense import BenchTable
    table, _, some = given.partition(":")
    names = [case.name for case in BenchTable(table).cases]
    if some:
        names = [name for name in names if name in some.split(",")]
    part = number
    while names and time.time() < END:
        names = run(table, names, part)
        part += 10
print(f"lane ended at {time.time() - START:.0f} s", flush=True)
